"""Not tests: processes such as `python -m nanovllm_cli` starts, forked from one that has the imports behind it.

    Forked([sys.executable, "-m", "nanovllm_cli", …], stdout=PIPE, …)    what subprocess.Popen would make of it
    run([sys.executable, "-c", code, …], …)                              likewise subprocess.run
    Terminal(sys.executable, ["-m", "nanovllm_cli", …], …)               likewise pexpect.spawn

It is the test's own child, with an id, streams, folder, environment and terminal of its own, and dies of signals. Two things are
otherwise: what modules read from the environment when they are imported is the test's (so all share its cache of compiled
kernels), and modules are there that a command may not need. Tests of these start a Python.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib
import json
import os
import pty
import random
import runpy
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pexpect
import ptyprocess

SOURCE = Path(__file__).resolve().parents[1] / "src"
LIGHT = (
    "filelock", "httpcore", "httpx", "pydantic.fields", "pydantic.main", "pydantic.type_adapter", "pydantic.types",
    "rich.console", "tqdm.auto", "yaml", "nanovllm_cli.chat.commands", "nanovllm_cli.chat.plain",
    "nanovllm_cli.chat.remote_model", "nanovllm_cli.cli.app", "nanovllm_cli.cli.failures", "nanovllm_cli.cli.program",
    "nanovllm_cli.cli.run", "nanovllm_cli.engine.outputs", "nanovllm_cli.text.builtin_templates", "nanovllm_cli.weights.source",
)  # fmt: skip
"""Neither torch nor `huggingface_hub`, which asks the environment where the hub is."""
HEAVY = (
    *LIGHT, "nanovllm_cli.llm", "nanovllm_cli.planning.check", "nanovllm_cli.quantization.pipeline",
    "nanovllm_cli.quantization.verify", "nanovllm_cli.weights.convert", "nanovllm_cli.weights.gguf_writer",
    "nanovllm_cli.weights.hub_cache", "nanovllm_cli.weights.hub_headers",
)  # fmt: skip
_SET_CHILD_SUBREAPER = 36


class Forked(subprocess.Popen[Any]):
    """command: [sys.executable, then -m and a module, -c and code, or a script, arguments]. light: without torch. Of Popen's
    other options: cwd, env, streams, text and its like."""

    def __init__(self, command: Sequence[str], *, light: bool = False, **options: Any) -> None:
        self._light = light
        super().__init__(command, **options)

    def _execute_child(self, *args: Any) -> None:
        command, cwd, env = args[0], args[5], args[6]
        stdin, _, _, stdout, _, stderr = streams = args[10:16]
        try:
            fds = [own if given == -1 else given for own, given in enumerate((stdin, stdout, stderr))]
            self.pid = _fork(self._light, command[1:], cwd, env, fds)
            self._child_created = True
        finally:
            self._close_pipe_fds(*streams)


def run(
    command: Sequence[str], *, input: Any = None, timeout: float | None = 240, check: bool = False,
    capture_output: bool = False, **options: Any,
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """As subprocess.run does."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Forked(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class Terminal(pexpect.spawn):
    """On a terminal of its own, which controls it."""

    def __init__(self, command: str, args: list[str], *, light: bool = False, **options: Any) -> None:
        self._light = light
        super().__init__(command, args, **options)

    def _spawnpty(self, args: list[str], **options: Any) -> Any:
        ours, theirs = pty.openpty()
        rows, columns = options.get("dimensions") or (24, 80)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        try:
            pid = _fork(self._light, args[1:], options["cwd"], options["env"], [theirs] * 3, terminal=True)
        finally:
            os.close(theirs)
        return ptyprocess.PtyProcess(pid, ours)


def _fork(light: bool, words: Sequence[str], cwd: Any, env: Any, fds: list[int], *, terminal: bool = False) -> int:
    """The id of a child of this process."""
    environment = dict(os.environ if env is None else env)
    data = json.dumps([[os.fsdecode(word) for word in words], os.fspath(cwd or os.getcwd()), environment, terminal]).encode()
    server = _server(light)
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whose parent ends becomes ours, as long as this lasts
    try:
        socket.send_fds(server, [len(data).to_bytes(8, "big")], fds)
        server.sendall(data)
        pid = int.from_bytes(server.recv(8), "big")
    finally:
        libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert pid > 0, "the process that is forked has ended"
    return pid


@functools.cache
def _server(light: bool) -> socket.socket:
    """It ends with this process, or when the socket is closed."""
    ours, theirs = socket.socketpair()
    modules = LIGHT if light else HEAVY
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(SOURCE), str(Path(__file__).parent)))}
    command = [sys.executable, __file__, str(theirs.fileno()), *modules]
    subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    return ours


# ---- the process that is forked ----


def serve(fd: int, modules: Sequence[str]) -> Callable[[], object]:
    """What to run, in each child. In the process itself it does not return."""
    prepare(modules)
    client = socket.socket(fileno=fd)
    while True:
        head, fds, _, _ = socket.recv_fds(client, 8, 3)
        if not head:
            os._exit(0)
        data = b""
        while len(data) < int.from_bytes(head, "big"):
            data += client.recv(1 << 16)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            child = os.fork()
            if child:  # and ends, so that the child is the client's
                os.write(writing, child.to_bytes(8, "big"))
                os._exit(0)
            for each in (reading, writing):
                os.close(each)
            client.close()
            while os.getppid() == parent:
                time.sleep(0.0002)
            words, folder, environment, terminal = json.loads(data)
            _become(fds, folder, environment, terminal)
            return _program(words)
        os.waitpid(between, 0)
        client.sendall(os.read(reading, 8))
        for each in (reading, writing, *fds):
            os.close(each)


def prepare(modules: Sequence[str]) -> None:
    """Import them, and what numba imports with a process's first kernel."""
    for module in modules:
        importlib.import_module(module)
    if "numba" in sys.modules:
        from numba.core.registry import cpu_target

        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()


def unfork() -> None:
    """Behind a fork and its environment: threads are what they would be in a process of its own. Nothing has started any here."""
    if "numba" in sys.modules:
        import numba

        numba.config.THREADING_LAYER = os.environ.get("NUMBA_THREADING_LAYER", "default")


def _become(fds: list[int], folder: str, environment: dict[str, str], terminal: bool) -> None:
    if terminal:
        os.setsid()
        fcntl.ioctl(fds[0], termios.TIOCSCTTY, 0)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    unfork()
    random.seed()
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115


def _program(words: Sequence[str]) -> Callable[[], object]:
    """What Python does with these words."""
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        return lambda: exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        return lambda: runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    sys.argv = list(words)
    return lambda: runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    program = serve(int(sys.argv[1]), sys.argv[2:])
    program()
