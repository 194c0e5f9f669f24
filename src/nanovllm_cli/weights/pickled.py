"""PyTorch's pickled weights (.bin, .pt, .pth) as a checkpoint, opened in a child process that can do no harm.

Reading a pickle is running a program. The child (`pickled_child.py`) lets `torch.load(weights_only=True)` do it, which knows
only what tensors are made of, and beforehand gives up what it does not need: writing files, more memory than the
model takes. Here nothing is believed but names, shapes and bytes, all of them bounded.

The child answers requests, a JSON line each, with a JSON line, and for rows of a tensor with their bytes behind it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from nanovllm_cli.errors import CheckpointError, NanovllmError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.weights.checkpoint import Checkpoint, TensorInfo, as_bytes
from nanovllm_cli.weights.files import PICKLES, folder_of, is_setting, read_index, some
from nanovllm_cli.weights.folder_config import read_generation_config
from nanovllm_cli.weights.json_file import MAX_CONFIG_BYTES, read_json_file
from nanovllm_cli.weights.writer import SAFETENSORS_DTYPES, SafetensorsWriter, TensorOut

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_MAX_ANSWER_BYTES = 64 << 20
_MAX_DIMS = 16
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")
_ANSWER_SECONDS = 300.0  # a file of the old format is read whole before the first answer
_GET_ANOTHER = "the file is damaged, or is no checkpoint: take the model in safetensors"


class _Listed(msgspec.Struct):
    """A tensor, as the child names it."""

    name: str
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


class _Answer(msgspec.Struct):
    error: str | None = None
    tensors: tuple[_Listed, ...] = ()


class PickledCheckpoint(Checkpoint):
    """A Checkpoint over one or several pickled files. Every tensor that is asked for comes through the child, as a copy."""

    format = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
        files = _files(path)
        self.config = read_json_file(folder_of(path) / "config.json", MAX_CONFIG_BYTES, infinity=True)
        self.generation_config = read_generation_config(folder_of(path), self.config)
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "nanovllm_cli.weights.pickled_child", *map(str, files)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env=_environment(),
        )  # fmt: skip
        try:
            self._infos = _infos(path, self._ask({"list": True}).tensors)
        except BaseException:
            self.close()
            raise

    def names(self) -> list[str]:
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise CheckpointError(f"{self.path}: no tensor {name!r} in it")
        return self._infos[name]

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        info = self.info(name)
        stored = _DTYPES[info.dtype_name]
        shape = info.shape if rows is None else (rows[1] - rows[0], *info.shape[1:])
        num_bytes = math.prod(shape) * stored.itemsize
        self._ask({"name": name, "rows": rows, "num_bytes": num_bytes})
        if num_bytes == 0:
            return torch.empty(shape, dtype=stored)
        return torch.frombuffer(self._read(num_bytes), dtype=torch.uint8).view(stored).reshape(shape)

    def raw(self, name: str) -> torch.Tensor:
        return as_bytes(self.tensor(name))

    def close(self) -> None:
        self._child.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        self._child.wait()

    def _ask(self, request: dict[str, Any]) -> _Answer:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        except OSError as error:
            raise self._died() from error
        try:
            answer = msgspec.json.decode(self._read_line(), type=_Answer)
        except msgspec.DecodeError as failure:
            raise CheckpointError(f"{self.path}: the process that reads it answers what it must not", _GET_ANOTHER) from failure
        if answer.error is not None:
            raise CheckpointError(f"{self.path}: {answer.error[:300]}", _GET_ANOTHER)
        return answer

    def _read_line(self) -> bytes:
        size = int.from_bytes(self._read(8), "little")
        if size > _MAX_ANSWER_BYTES:
            raise CheckpointError(
                f"{self.path}: its list of tensors has {size} bytes, at most {_MAX_ANSWER_BYTES} are read"
            )
        return bytes(self._read(size))

    def _read(self, num_bytes: int) -> bytearray:
        assert self._child.stdout is not None
        data = bytearray()
        while len(data) < num_bytes:
            ready, _, _ = select.select([self._child.stdout], [], [], _ANSWER_SECONDS)
            piece = self._child.stdout.read(num_bytes - len(data)) if ready else b""
            if not piece:
                raise self._died()
            data += piece
        return data

    def _died(self) -> NanovllmError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._child.wait(1.0)
            return CheckpointError(f"{self.path}: the process that reads it ended ({_cause(code)})", _GET_ANOTHER)
        return CheckpointError(f"{self.path}: reading it takes too long", _GET_ANOTHER)


def is_pickled(path: Path) -> bool:
    """Whether `path` is pickled weights, or a folder that has no others."""
    if path.is_dir():
        suffixes = {entry.suffix for entry in path.iterdir()}
        return bool(suffixes & set(PICKLES)) and not suffixes & {".safetensors", ".gguf"}
    return path.suffix in PICKLES


def pickled_modules(folder: Path) -> dict[str, bytes]:
    """Of modules in folders of their own, behind a model that embeds: their weights as .safetensors files, by their names in
    `folder`. Raises as opening and reading does."""
    found = {}
    for inner in sorted(folder.glob("[1-9]*_*")):
        name = f"{inner.name}/model.safetensors"
        if is_setting(name) and inner.is_dir() and is_pickled(inner) and (inner / "config.json").is_file():
            with PickledCheckpoint(inner) as source:
                found[name] = _as_safetensors(source)
    return found


def _as_safetensors(source: Checkpoint) -> bytes:
    infos = map(source.info, source.names())
    file = io.BytesIO()
    writer = SafetensorsWriter(file, [TensorOut(info.name, info.shape, _DTYPES[info.dtype_name]) for info in infos])
    writer.write_all(lambda out: [source.tensor(out.name)], NullProgress())
    return file.getvalue()


def _files(path: Path) -> list[Path]:
    """The one file, or all that the folder's index names. Of several without an index nobody knows which belong together."""
    if not path.is_dir():
        shards = map(_shards, sorted(path.parent.glob("*.bin.index.json")))
        return next(([path.parent / name for name in names] for names in shards if path.name in names), [path])
    indexes = sorted(path.glob("*.bin.index.json"))
    if indexes:
        names = _shards(indexes[0])
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{indexes[0]}: {len(missing)} of {len(names)} files are missing: {some(missing)}", "download them too"
            )
        return [path / name for name in names]
    files = sorted(entry for entry in path.iterdir() if entry.suffix in PICKLES and entry.name != "training_args.bin")
    single = [file for file in files if file.name == "pytorch_model.bin"] or files
    if len(single) != 1:
        raise CheckpointError(
            f"{path}: {len(files)} pickled files and no index: {some([file.name for file in files])}",
            "name one of them",
        )
    return single


def _shards(index: Path) -> list[str]:
    return list(dict.fromkeys(read_index(index, PICKLES).values()))


def _infos(path: Path, tensors: Sequence[_Listed]) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for name, dtype_name, shape in map(msgspec.structs.astuple, tensors):
        if name in infos:
            raise CheckpointError(f"{path}: the tensor {name!r} is in two of the files", _GET_ANOTHER)
        if len(shape) > _MAX_DIMS or dtype_name not in _DTYPES:
            raise CheckpointError(f"{path}: the tensor {name!r} has a shape or type that is not read", _GET_ANOTHER)
        infos[name] = TensorInfo(name, shape, dtype_name, math.prod(shape) * _DTYPES[dtype_name].itemsize)
    if not infos:
        raise CheckpointError(f"{path}: no tensors in it", _GET_ANOTHER)
    return infos


def _environment() -> dict[str, str]:
    """What a child needs to find this package, and nothing of the user's secrets."""
    kept = {key: os.environ[key] for key in _KEPT if key in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "OMP_NUM_THREADS": "1"}


def _cause(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
