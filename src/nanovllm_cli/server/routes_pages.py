"""The pages at `/` (chat) and `/status`: each one document with its style and script inside, which loads nothing else.

They hold no secret and are shown without a key; what they ask the server for needs it, and they ask the person for it. A
Content-Security-Policy allows their own style and script by hash and requests to this server, and nothing else: no inline
handlers, no frames, no forms, no images but those whose bytes the page holds itself, and no text that is parsed as HTML (Trusted
Types).
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.routing import api_router

_PARTS = re.compile(r'<(style|script) data-from="([^"]*)"></\1>')


def router(context: ServerContext) -> APIRouter:
    routes = api_router()
    chat, status = Page("chat.html"), Page("status.html")

    @routes.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        return chat.response()

    @routes.get("/status", include_in_schema=False)
    async def status_page() -> Response:
        return status.response()

    return routes


class Page:
    """A document of assets/pages. `<style data-from="a.css b.css"></style>` stands for those files, and scripts likewise."""

    def __init__(self, name: str) -> None:
        self._hashes: dict[str, list[str]] = {"style": [], "script": []}
        self.html = _PARTS.sub(self._part, _read(name))
        self.policy = "; ".join([
            "default-src 'none'",
            *(f"{kind}-src {' '.join(hashes)}" for kind, hashes in self._hashes.items()),
            "connect-src 'self'",
            "img-src data:",  # the icon, and what a person attaches
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ])  # fmt: skip

    def response(self) -> Response:
        headers = {
            "content-security-policy": self.policy,
            "cross-origin-opener-policy": "same-origin",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
            "cache-control": "no-cache",
        }
        return HTMLResponse(self.html, headers=headers)

    def _part(self, found: re.Match[str]) -> str:
        kind, names = found.groups()
        content = "\n".join(_read(name) for name in names.split())
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        self._hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{content}</{kind}>"


def _read(name: str) -> str:
    return (files("nanovllm_cli") / "assets" / "pages" / name).read_text("utf-8")
