"""Sockets to listen on, opened before anything is loaded: an address that is taken is said at once.

A unix socket is its owner's alone (0600). A file that a dead server left in its place is removed; a living one's is not.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm_cli.errors import AccessRefusedError, NanovllmError, UsageError
from nanovllm_cli.server.reread import Reread
from nanovllm_cli.server.settings import ServeSettings

BACKLOG = 2048
_LONGEST_UNIX_PATH = 100
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""One of a name's addresses that the system has none of: in most containers localhost is ::1, too, without IPv6."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Open sockets. url: where the server is found, for a person. unix_path: the file to remove at the end."""

    sockets: list[socket.socket]
    url: str
    unix_path: Path | None = None

    def close(self) -> None:
        for each in self.sockets:
            each.close()
        if self.unix_path is not None:
            with suppress(OSError):
                self.unix_path.unlink()


def listen(settings: ServeSettings) -> Listener:
    """Raises NanovllmError where the address is taken, UsageError where it is none, AccessRefusedError without permission."""
    if settings.unix_socket is not None:
        return _unix(Path(settings.unix_socket))
    scheme = "https" if settings.tls_certificate is not None else "http"
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UsageError(f"--host {settings.host} is no address of this machine", "127.0.0.1 is this machine alone") from None
    sockets: list[socket.socket] = []
    port = settings.port
    addresses = list(dict.fromkeys(found))
    for place, (family, _, _, _, address) in enumerate(addresses):
        try:
            sockets.append(_tcp(family, (address[0], port, *address[2:])))  # with the zone of a link-local one
        except OSError as failure:
            if failure.errno in _NOT_HERE and (sockets or place + 1 < len(addresses)):
                continue
            for each in sockets:
                each.close()
            raise _unavailable(failure, f"{settings.host}:{port}", "--port 0 takes any that is free") from None
        port = sockets[0].getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return Listener(sockets, f"{scheme}://{host}:{port}")


def tls_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """None without TLS. A certificate that is renewed counts with the next connection. Raises UsageError for files that are no
    certificate and its key."""
    if settings.tls_certificate is None:
        return None
    files = (settings.tls_certificate, settings.tls_key, settings.tls_password_file)
    renewed = Reread([path for path in files if path is not None], lambda: _tls_context(settings))

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = renewed.now()

    first = renewed.now()
    first.sni_callback = choose
    return first


def _tls_context(settings: ServeSettings) -> ssl.SSLContext:
    assert settings.tls_certificate is not None
    password = None
    if settings.tls_password_file is not None:
        try:
            password = Path(settings.tls_password_file).read_text().rstrip("\n")
        except (OSError, ValueError):
            raise UsageError(f"cannot read {settings.tls_password_file}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password OpenSSL would ask the terminal for one.
        context.load_cert_chain(settings.tls_certificate, settings.tls_key, password if password is not None else str)
    except (OSError, ValueError):
        raise UsageError(
            f"{settings.tls_certificate} and {settings.tls_key} are no certificate with its key",
            "both in PEM form; an encrypted key needs --ssl-key-password-file",
        ) from None
    return context


def _tcp(family: int, address: tuple[Any, ...]) -> socket.socket:
    # asyncio turns Nagle's algorithm off, which costs 40 ms an answer, for sockets that say they are TCP.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _unix(path: Path) -> Listener:
    if len(os.fsencode(path)) > _LONGEST_UNIX_PATH:
        raise UsageError(f"--unix-socket has more than {_LONGEST_UNIX_PATH} bytes", "choose a shorter path")
    _remove_dead(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as failure:
        sock.close()
        raise _unavailable(failure, str(path), "choose another path") from None
    finally:
        os.umask(mask)
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return Listener([sock], f"unix://{path.absolute()}", path)


def _remove_dead(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UsageError(f"{path} exists and is no socket", "choose another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
        return
    except OSError as failure:
        raise _unavailable(failure, str(path), "choose another path") from None
    raise NanovllmError(f"{path} is in use: another server listens there", "choose another path")


def _unavailable(failure: OSError, where: str, hint: str) -> NanovllmError:
    if failure.errno == errno.EADDRINUSE:
        return NanovllmError(f"{where} is in use: another program listens there", hint)
    if failure.errno in (errno.EACCES, errno.EPERM):
        return AccessRefusedError(f"no permission to listen at {where}", "ports below 1024 are the system's")
    return NanovllmError(f"cannot listen at {where}: {os.strerror(failure.errno or 0)}", hint)
