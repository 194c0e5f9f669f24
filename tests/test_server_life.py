"""From the first connection to the last: loading, draining, signals, sockets and TLS, as a process of its own."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

import scripted_server
from http_server import running
from nanovllm_cli.errors import NanovllmError, UsageError
from nanovllm_cli.server.listen import listen, tls_context
from nanovllm_cli.server.settings import ServeSettings

CHAT = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True})
JSON = {"content-type": "application/json"}


class Server:
    """A scripted server, its address said."""

    def __init__(self, pid: int, stdin: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self._stdin, self._stdout, self.stderr = os.fdopen(stdin, "w"), os.fdopen(stdout), os.fdopen(stderr)
        self.url = self.line()

    def line(self) -> str:
        return self._stdout.readline().strip()

    def go(self) -> None:
        print("go", file=self._stdin, flush=True)

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def ask(self, method: str, path: str, body: str | None = None) -> http.client.HTTPResponse:
        """The head of the answer; the rest can be read."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=20)
        connection.request(method, path, body, JSON if body is not None else {})
        return connection.getresponse()

    def begin_stream(self) -> http.client.HTTPResponse:
        answer = self.ask("POST", "/v1/chat/completions", CHAT)
        assert answer.status == 200
        while b"Hello" not in answer.readline():
            pass
        return answer

    def end(self) -> int:
        """Waits until it has closed its streams, then for its exit code."""
        self._stdout.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        for file in (self._stdin, self._stdout, self.stderr):
            file.close()


@contextlib.contextmanager
def scripted(**options: Any) -> Iterator[Server]:
    """Forked from this process: everything is imported."""
    (their_in, ours_in), (ours_out, their_out), (ours_err, their_err) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            for number, end in enumerate((their_in, their_out, their_err)):
                os.dup2(end, number)
            os.closerange(3, 1024)
            gc.freeze()  # of what was garbage here, sockets would close numbers that are the server's by then
            sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
            code = scripted_server.main(options)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    for end in (their_in, their_out, their_err):
        os.close(end)
    server = Server(pid, ours_in, ours_out, ours_err)
    try:
        yield server
    finally:
        server.close()


# ---- the end ----


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_running_streams_finish_and_new_requests_are_refused(signum: int) -> None:
    with scripted() as server:
        assert server.line() == "ready"
        stream = server.begin_stream()
        server.signal(signum)
        assert server.line() == "draining 1"
        refused = server.ask("POST", "/v1/chat/completions", CHAT)
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) > 0
        assert json.loads(refused.read())["error"]["code"] == "draining"
        health = server.ask("GET", "/health")
        assert (health.status, json.loads(health.read())["status"]) == (503, "draining")
        server.go()
        rest = stream.read()
        assert b"there" in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert server.line() == "closed"
        assert server.end() == 0
        with pytest.raises(ConnectionRefusedError):
            server.ask("GET", "/health")


def test_under_nohup_a_closed_terminal_is_no_matter() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with scripted() as server:
            assert server.line() == "ready"
            server.signal(signal.SIGHUP)
            assert server.ask("GET", "/health").status == 200
            server.signal(signal.SIGTERM)
            assert server.end() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stream_that_does_not_end_is_broken_off() -> None:
    with scripted(drain_seconds=0.2) as server:
        assert server.line() == "ready"
        stream = server.begin_stream()
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        with pytest.raises(http.client.IncompleteRead):  # cut off, and seen to be: no end of the chunks
            stream.read()


def test_a_second_signal_does_not_wait() -> None:
    with scripted(drain_seconds=60.0) as server:
        assert server.line() == "ready"
        stream = server.begin_stream()
        server.signal(signal.SIGINT)
        assert server.line() == "draining 1"
        server.signal(signal.SIGINT)
        assert server.end() == 130
        stream.close()


def test_a_second_signal_does_not_wait_until_what_was_read_is_kept() -> None:
    with scripted(keeps=True) as server:
        assert server.line() == "ready"
        server.signal(signal.SIGTERM)
        assert server.line() == "draining 0"
        assert server.line() == "keeping"
        server.signal(signal.SIGTERM)
        assert server.line() == "closed"
        assert server.end() == 143


def test_two_signals_while_answers_run_wait_for_nothing_to_be_kept() -> None:
    with scripted(keeps=True, drain_seconds=60.0) as server:
        assert server.line() == "ready"
        stream = server.begin_stream()
        server.signal(signal.SIGTERM)
        assert server.line() == "draining 1"
        server.signal(signal.SIGTERM)
        assert server.line() in ("keeping", "closed")
        assert server.end() == 143
        stream.close()


def test_with_nothing_under_way_the_end_comes_at_once() -> None:
    with scripted(drain_seconds=60.0) as server:
        assert server.line() == "ready"
        idle = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        idle.close()


# ---- the beginning ----


def test_while_a_model_loads_health_says_so_and_ctrl_c_ends_it() -> None:
    with scripted(slow=True) as server:
        assert server.ask("GET", "/version").status == 200  # HTTP is there before the model
        server.signal(signal.SIGINT)
        assert server.line() == "closed"
        assert server.end() == 130


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    with scripted(fails=True) as server:
        assert server.end() == 1
        assert server.stderr.read() == "the weights are broken\n"


def test_an_address_of_one_link_is_listened_at_with_its_zone() -> None:
    known = Path("/proc/net/if_inet6")
    links = [line.split() for line in known.read_text().splitlines()] if known.exists() else []
    found = [(bytes.fromhex(link[0]), link[5]) for link in links if link[0].startswith("fe80")]
    if not found:
        pytest.skip("this machine has no link-local address")
    address, zone = socket.inet_ntop(socket.AF_INET6, found[0][0]), found[0][1]
    listener = listen(ServeSettings(host=f"{address}%{zone}", port=0, api_keys=("long-enough-key",)))
    (sock,) = listener.sockets
    assert sock.getsockname()[::3] == (address, socket.if_nametoindex(zone))
    listener.close()


def test_an_address_that_is_taken_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(NanovllmError, match=f"127.0.0.1:{port} is in use") as failure:
            listen(ServeSettings(port=port))
    assert "--port" in str(failure.value.hint)
    assert failure.value.exit_code == 1


@pytest.mark.parametrize("absent_first", [False, True])
def test_of_a_name_s_addresses_those_that_are_there_are_listened_at(absent_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of localhost in a container without IPv6, whose ::1 cannot be had: 2001:db8::/32 (RFC 3849) is nobody's."""
    here = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 0))
    absent = (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("2001:db8::1", 0, 0, 0))
    found = [absent, here] if absent_first else [here, absent]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    listener = listen(ServeSettings(host="localhost", port=0))
    assert [sock.getsockname()[0] for sock in listener.sockets] == ["127.0.0.1"]
    listener.close()
    found.remove(here)
    with pytest.raises(NanovllmError, match="cannot listen at localhost:0"):
        listen(ServeSettings(host="localhost", port=0))


def test_connections_send_small_pieces_at_once() -> None:
    listener = listen(ServeSettings(port=0))
    assert [sock.proto for sock in listener.sockets] == [socket.IPPROTO_TCP]  # asyncio's condition for TCP_NODELAY
    listener.close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.1.1.1"])
def test_a_host_that_is_no_address_of_ours_is_refused(host: str) -> None:
    with pytest.raises(UsageError):
        listen(ServeSettings(host=host, api_keys=("long-enough-key",)))


# ---- unix sockets ----


def test_a_unix_socket_is_its_owner_s_alone_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "here.sock"
    with running(ServeSettings(unix_socket=str(path))) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert server.ask("GET", "/version", host="anything").status == 200
    assert not path.exists()


def test_a_dead_server_s_socket_is_replaced_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    path = tmp_path / "here.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    settings = ServeSettings(unix_socket=str(path))
    with running(settings) as server:
        with pytest.raises(NanovllmError, match="in use"):
            listen(settings)
        assert server.ask("GET", "/version").status == 200
    path.write_text("precious")
    with pytest.raises(UsageError, match="no socket"):
        listen(settings)
    assert path.read_text() == "precious"
    with pytest.raises(UsageError):
        listen(ServeSettings(unix_socket=str(tmp_path / ("x" * 120))))
    with pytest.raises(NanovllmError):
        listen(ServeSettings(unix_socket=str(tmp_path / "no/folder/x")))


def test_a_socket_file_goes_with_its_server(tmp_path: Path) -> None:
    path = tmp_path / "here.sock"
    with scripted(unix_socket=str(path)) as server:
        assert server.url == f"unix://{path}"
        assert server.line() == "ready"
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    assert os.listdir(tmp_path) == []


# ---- TLS ----


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cert.pem, key.pem and the same key behind the password in password.txt."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    (folder / "password.txt").write_text("sesame\n")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -keyout key.pem -out cert.pem"
    subject = "-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    lock = "openssl ec -in key.pem -aes256 -passout file:password.txt -out locked.pem"
    for command in (f"{make} {subject}", lock):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("key", ["key.pem", "locked.pem"])
def test_https_with_its_certificate(certificate: Path, key: str) -> None:
    password = str(certificate / "password.txt") if key == "locked.pem" else None
    settings = ServeSettings(
        port=0, tls_certificate=str(certificate / "cert.pem"), tls_key=str(certificate / key), tls_password_file=password
    )
    client = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    with running(settings) as server:
        assert server.listener.url.startswith("https://")
        answer = server.say(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n", client)
        assert answer.status == 200
        with pytest.raises(ssl.SSLError):
            server.connect(ssl.create_default_context())  # nobody else's
        assert server.say(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n").status == 0  # plain HTTP
        assert server.say(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n", client).status == 200


def test_who_begins_no_handshake_is_not_waited_for_longer_than_for_a_head(certificate: Path) -> None:
    cert, key = str(certificate / "cert.pem"), str(certificate / "key.pem")
    with running(ServeSettings(port=0, tls_certificate=cert, tls_key=key, header_seconds=0.3)) as server:
        silent = [server.connect() for _ in range(3)]
        silent[1].sendall(b"\x16\x03\x01")  # the beginning of one
        for sock in silent:
            sock.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
            sock.close()


def test_a_certificate_that_is_renewed_counts_with_the_next_connection(certificate: Path, tmp_path: Path) -> None:
    """Renewed file by file, so that for a moment certificate and key do not fit: the old ones count until they do."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for path in (cert, key):
        shutil.copy(certificate / path.name, path)
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=renewed"
    subprocess.run(f"{make} -keyout new-key.pem -out new-cert.pem".split(), cwd=tmp_path, check=True, capture_output=True)
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    with running(ServeSettings(port=0, tls_certificate=str(cert), tls_key=str(key))) as server:

        def shown() -> str:
            with server.connect(anybody) as sock:
                assert isinstance(sock, ssl.SSLSocket)
                return ssl.DER_cert_to_PEM_cert(sock.getpeercert(binary_form=True) or b"").strip()

        old, new = (path.read_text().strip() for path in (cert, tmp_path / "new-cert.pem"))
        assert shown() == old
        (tmp_path / "new-cert.pem").rename(cert)
        assert shown() == old
        (tmp_path / "new-key.pem").rename(key)
        assert shown() == new
        key.unlink()
        assert shown() == new


def test_a_socket_file_has_no_tls(certificate: Path, tmp_path: Path) -> None:
    cert, key = str(certificate / "cert.pem"), str(certificate / "key.pem")
    with pytest.raises(UsageError, match="--unix-socket"):
        ServeSettings(unix_socket=str(tmp_path / "s"), tls_certificate=cert, tls_key=key)


def test_files_that_are_no_certificate_are_refused(certificate: Path, tmp_path: Path) -> None:
    (tmp_path / "junk.pem").write_text("junk")
    good, junk = str(certificate / "cert.pem"), str(tmp_path / "junk.pem")
    for cert, key, password in [
        (good, junk, None), (junk, str(certificate / "key.pem"), None), (good, str(tmp_path / "absent"), None),
        (good, str(certificate / "locked.pem"), None), (good, str(certificate / "locked.pem"), junk),
        (good, str(certificate / "key.pem"), str(tmp_path / "absent")),
    ]:  # fmt: skip
        with pytest.raises(UsageError):
            tls_context(ServeSettings(tls_certificate=cert, tls_key=key, tls_password_file=password))
