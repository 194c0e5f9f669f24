"""Not a test: a server of tools, as the Model Context Protocol's revision of 2025-06-18 has it, and no more than a test needs.

Written from the protocol, so that the client is held against something else than its own package. `python mcp_server.py NAME…`
offers these tools; a tool's arguments are told back, but for some that do as they are called.
"""

import json
import sys
import time
from typing import Any

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
PAGE = 2


def result_of(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name == "add":
        return {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}
    if name == "fail":
        return {"content": [{"type": "text", "text": "out of\nluck \x1b[31m"}], "isError": True}
    if name == "show":
        link = {"type": "resource", "resource": {"uri": "file:///a", "text": "inside", "mimeType": "text/plain"}}
        far = {"type": "resource_link", "uri": "file:///b", "name": "b"}
        seen = {"type": "image", "data": "AAAA", "mimeType": "image/PNG"}
        heard = {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}
        kept = {"type": "resource", "resource": {"uri": "file:///c", "blob": "BBBB", "mimeType": "image/png"}}
        other = {"type": "resource", "resource": {"uri": "file:///d", "blob": "CCCC", "mimeType": "application/zip"}}
        return {"content": [{"type": "text", "text": "see"}, seen, far, heard, link, kept, other]}
    if name == "long":
        return {"content": [{"type": "text", "text": "x" * 300_000}]}
    if name == "sleep":
        time.sleep(30)
    if name == "die":
        sys.exit("I am dead")
    return {"content": [{"type": "text", "text": json.dumps(arguments)}]}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    method, params = message["method"], message.get("params") or {}
    if method == "initialize":
        info = {"name": "test", "version": "1"}
        return {"result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}}
    if method == "tools/list":
        start = int(params.get("cursor") or 0)
        tools = [{"name": name, "description": f"Does {name}.", "inputSchema": SCHEMA} for name in sys.argv[1:]]
        more = {"nextCursor": str(start + PAGE)} if len(tools) > start + PAGE else {}
        return {"result": {"tools": tools[start : start + PAGE], **more}}
    if method == "tools/call":
        return {"result": result_of(params["name"], params.get("arguments") or {})}
    return {"error": {"code": -32601, "message": "there is no such method"}}


def main() -> None:
    print("this is not for the client", file=sys.stderr)
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer(message)}), flush=True)


if __name__ == "__main__":
    main()
