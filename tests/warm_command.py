"""Not tests: a `nanovllm` that starts in a moment, for tests that run whole command lines in a shell with the bundled model.

A server has imported what all commands need and forks for each call; the program on PATH hands it its arguments, environment,
folder and the three standard streams, and ends with its exit code. What runs is the product's own `main`.

    python warm_command.py SOCKET                     the server; prints a line when it is ready
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from forked import HEAVY, prepare, unfork

CLIENT = """#!{python} -SE
import json, os, socket, sys
for number in (0, 1, 2):
    try:
        os.fstat(number)
    except OSError:
        os.open(os.devnull, os.O_RDWR)
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
call = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(call).to_bytes(4, "big")], [0, 1, 2])
server.sendall(call)
os._exit(int(server.recv(8)))
"""


@contextlib.contextmanager
def warm_command(folder: Path) -> Iterator[Path]:
    """A folder for PATH with such a `nanovllm` in it."""
    path, programs = folder / "socket", folder / "bin"
    programs.mkdir()
    program = programs / "nanovllm"
    program.write_text(CLIENT.format(python=sys.executable, path=str(path)))
    program.chmod(0o755)
    server = subprocess.Popen([sys.executable, __file__, str(path)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield programs
    finally:
        server.kill()
        server.wait()


def serve(path: str) -> None:
    prepare(HEAVY)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            answer(connection)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def answer(connection: socket.socket) -> None:
    """Runs one call in a child, tells the client how it ended, and ends."""
    length, fds, _, _ = socket.recv_fds(connection, 4, 3)
    call = b""
    while len(call) < int.from_bytes(length, "big"):
        call += connection.recv(1 << 16)
    child = os.fork()
    if child == 0:
        connection.close()
        run(*json.loads(call), fds)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def run(arguments: list[str], folder: str, environment: dict[str, str], fds: list[int]) -> None:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    unfork()
    sys.stdin, sys.stdout, sys.stderr = (open(i, "r" if i == 0 else "w", closefd=False) for i in (0, 1, 2))  # noqa: SIM115
    sys.argv = ["nanovllm", *arguments]
    from nanovllm_cli.cli.app import main

    main()


if __name__ == "__main__":
    serve(sys.argv[1])
