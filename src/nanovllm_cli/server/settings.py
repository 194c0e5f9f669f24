"""ServeSettings: how `nanovllm serve` listens, whom it lets in, and how much it takes on. What a model is loaded with is
`config.EngineConfig`; what it generates with is `sampling_params.SamplingParams`."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass

from nanovllm_cli.errors import UsageError
from nanovllm_cli.server.keys import KeyFile, check_keys

TEXTS_BODY, IMAGES_BODY = 16 << 20, 64 << 20
"""The longest context has a few megabytes of text. OpenAI takes 50 megabytes with images."""
_ORIGIN = r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+"
"""What browsers write of a page's place: its scheme and host, with the port that is not the usual one. Files have `null`."""
_HOST = r"\*|[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"
"""What `Host` can call a machine, without its port: a pattern, or a name with its scheme, would let nobody in."""
_OPTIONS = {
    "max_body_bytes": "--max-body",
    "max_requests": "--max-requests",
    "idle_seconds": "--idle-timeout",
    "request_seconds": "--timeout",
    "drain_seconds": "--drain-timeout",
    "ping_seconds": "--ping-interval",
}
"""What a person writes for a field."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """host, port: where to listen; port 0 is any that is free. unix_socket: a path, instead of both.

    api_keys, key_file: who may ask; without both everybody, which is refused beyond this machine. allowed_hosts: names in `Host`
    besides this machine's own and `host` (`*` is any). cors_origins: whose pages may read answers; none by default.

    max_*: what one request may cost, and how many are under way at once (more are answered 429); max_body_bytes: None is
    TEXTS_BODY, or IMAGES_BODY where a model reads images or hears. *_seconds: how long a request may take to arrive, a connection
    to lie idle, a client not to read, an answer to take in all (None sets no limit), running answers to finish after SIGTERM;
    ping_seconds: between comments on a silent stream.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    unix_socket: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_password_file: str | None = None
    api_keys: tuple[str, ...] = ()
    key_file: KeyFile | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int | None = None
    max_header_bytes: int = 32 << 10
    max_json_depth: int = 64
    max_requests: int = 512
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 30.0
    write_seconds: float = 30.0
    request_seconds: float | None = None
    drain_seconds: float = 30.0
    ping_seconds: float = 15.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port {self.port} is not a port", "0 to 65535; 0 takes any that is free")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise UsageError("--ssl-cert-file and --ssl-key-file belong together")
        if self.unix_socket is not None and self.tls_certificate is not None:
            raise UsageError("--unix-socket and --ssl-cert-file exclude each other", "leave one out")
        check_keys(self.api_keys)
        for origin in self.cors_origins:
            if not re.fullmatch(_ORIGIN, origin):
                written = "as browsers send it: https://example.org or http://localhost:3000, without a path; * is any"
                raise UsageError(f"--cors-origin {origin!r} is where no page can be from", written)
        for name in self.allowed_hosts:
            if not re.fullmatch(_HOST, name):
                written = "a name alone, such as gpu.lan, without scheme and port; addresses need none; * is any"
                raise UsageError(f"--allowed-host {name!r} is no name of a machine", written)
        if not self.host:
            raise UsageError("--host is empty", "127.0.0.1 is this machine alone, 0.0.0.0 all addresses")
        if not self.is_private and not self.needs_key:
            raise UsageError(
                f"at {self.host} everybody on the network could use this server",
                "say who may by --api-key or --api-key-file, or leave --host out",
            )
        for name in ("max_body_bytes", "max_header_bytes", "max_json_depth", "max_requests"):
            bound = getattr(self, name)
            if bound is not None and bound < 1:
                raise UsageError(f"{_OPTIONS.get(name, name)} must be at least 1")
        times = ("header_seconds", "body_seconds", "idle_seconds", "write_seconds", "drain_seconds", "ping_seconds")
        for name in times if self.request_seconds is None else (*times, "request_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{_OPTIONS.get(name, name)} must be a number of seconds, more than 0")

    def body_bytes(self, *, reads_more: bool) -> int:
        """Most of a request's body."""
        return self.max_body_bytes or (IMAGES_BODY if reads_more else TEXTS_BODY)

    @property
    def needs_key(self) -> bool:
        return bool(self.api_keys) or self.key_file is not None

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach it."""
        if self.unix_socket is not None or self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def max_connections(self) -> int:
        """More are closed at once: many times what can be under way, since clients keep connections for later."""
        return max(1024, 4 * self.max_requests)
