"""Requests made up from the server's own OpenAPI description, hundreds for each operation, against a real server.

    python benchmarks/fuzz_server.py --examples 500 --output benchmarks/results/fuzz_server.json

Those that fit the description and those that don't. Held: no 5xx, no answer that takes longer than a minute, statuses, types and
bodies as described, what does not fit refused; and the server answers as before when it is over. The context is short, so that
requests for endless answers end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.extend([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])

CONTEXT = 64
SECONDS = 60
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
HOOKS = """
import schemathesis

@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict) and isinstance(body.get("model"), str) and 0 < len(body["model"]) < 100:
        body["model"] = "tiny"  # most would end as 404 otherwise; a name that breaks its bounds is left to be refused
    return body
"""
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}


def fuzz(url: str, examples: int, seed: int) -> dict[str, Any]:
    """schemathesis' own report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        (Path(folder) / "hooks.py").write_text(HOOKS)
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
        command += ["--phases", "coverage,fuzzing", "--mode", "all", "--max-examples", str(examples), "--seed", str(seed)]
        command += ["--checks", ",".join(CHECKS), "--request-timeout", str(SECONDS), "--warnings", "off", "--no-color"]
        command += ["--report", "json", "--report-json-path", str(report), "--generation-database", "none"]
        subprocess.run(
            command, cwd=folder, check=False, env=os.environ | {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": folder}
        )
        told: dict[str, Any] = json.loads(report.read_text())
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=500, help="requests for each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    from common import save
    from live_server import live_server

    with live_server("tiny", "-c", str(CONTEXT)) as server:
        before = server.post("/v1/chat/completions", CHAT)[1]["choices"]
        start = time.monotonic()
        report = fuzz(server.url, options.examples, options.seed)
        seconds = time.monotonic() - start
        status, answer = server.post("/v1/chat/completions", CHAT)
        lives = status == 200 and answer["choices"] == before and server.process.poll() is None
    result = {
        "examples": options.examples,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "answers_as_before": lives,
        "operations": report["operations"],
        "test_cases": report["test_cases"],
        "failures": report["failures"],
        "errors": report["errors"],
    }
    print(json.dumps(result, indent=1))
    save(options.output, result)
    sys.exit(0 if lives and not report["failures"] and not report["errors"] else 1)


if __name__ == "__main__":
    main()
