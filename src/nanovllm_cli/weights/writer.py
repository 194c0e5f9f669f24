"""Models on the disk, whole or not at all: a file or a folder beside its target, flushed, renamed; and safetensors in pieces.

    with OutputFile(path) as output:             output.file is written; commit() gives it its name
    with OutputFolder(path) as output:           output.path is filled; commit() gives it its name

Without `commit` nothing stays. What a killed process left behind is found by its name and taken over by the next run to
the same target; a run that is still alive holds a lock on it, and a second one is refused. `gguf_writer.py` has the other
format.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Generic, NamedTuple, Protocol, Self, TypeVar

import torch

from nanovllm_cli import system
from nanovllm_cli.errors import CheckpointError, DoesNotFitError, OutputError, UsageError
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.weights.files import PICKLES, is_setting, some, told_bytes
from nanovllm_cli.weights.json_file import reading
from nanovllm_cli.weights.safetensors import DTYPES

SHARD_BYTES = 5_000_000_000  # of a folder's files, where nobody says another limit
SAFETENSORS_DTYPES = {dtype: name for name, (_, dtype) in DTYPES.items() if dtype is not None}
"""torch's dtypes under the names of a safetensors header."""

_MODEL_SUFFIXES = (".safetensors", ".json", ".gguf", ".jinja", ".model", ".md", ".txt", *PICKLES)
_MODEL_FILES = {"LICENSE", "NOTICE", ".gitattributes"}
_TEMPLATES = "additional_chat_templates"


class _Output:
    """What files and folders share: a hidden neighbour of the target, a lock on it, and the ways out."""

    def __init__(self, target: Path, *, replace: bool) -> None:
        self.target = Path(os.path.realpath(target))
        self.replace = replace
        self.temporary = self._neighbour("partial")
        self._shown = target
        self._handles: list[int] = []
        self._begun = False

    def _neighbour(self, kind: str) -> Path:
        """Of "/" as well, which has no name."""
        return self.target.parent / f".{self.target.name}.{kind}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if isinstance(error, OSError):
            raise self._failed(error) from error

    def __del__(self) -> None:
        """For an interrupt that comes before `with` has taken the object over."""
        self.close()

    def close(self) -> None:
        """Takes away what has not been committed, and lets the lock go."""
        if not getattr(self, "_begun", False):
            return
        with contextlib.suppress(OSError):
            if not self._handles:  # an interrupt came between the neighbour's creation and its opening
                self._open(os.O_RDONLY)
            if system.lock(self._lock) and self._holds(self.temporary):  # no other process has it
                self._remove()
        self._begun = False
        self._let_go()

    def _remove(self) -> None:
        shutil.rmtree(self.temporary) if self.temporary.is_dir() else self.temporary.unlink()

    def _remove_other_kind(self) -> None:
        """What a killed run left that made a folder where this one makes a file, or a file for a folder."""
        self._take(os.O_RDONLY)
        self._remove()
        self._let_go()

    @property
    def _lock(self) -> int:
        """The neighbour's handle."""
        return self._handles[-1]

    def _open(self, flags: int) -> None:
        """In one call, in which an interrupt cannot lose the handle."""
        paths, kinds, modes = (self.temporary,), (flags | os.O_CLOEXEC | os.O_NOFOLLOW,), (0o666,)
        self._handles.extend(map(os.open, paths, kinds, modes))

    def _let_go(self) -> None:
        while self._handles:
            os.close(self._handles.pop())

    def _take(self, flags: int) -> None:
        """Opens the neighbour and locks it. It may be gone, or be another one, by the time that the lock is here."""
        while True:
            self._open(flags)
            if not system.lock(self._lock):
                raise OutputError(f"{self._shown}: another process is writing it", "wait for it, or choose another output")
            if self._holds(self.temporary):
                return
            self._let_go()

    def _holds(self, path: Path) -> bool:
        try:
            there = path.lstat()
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._lock), there)

    def _check_target(self) -> None:
        if not self.replace and os.path.lexists(self.target):
            raise exists_already(self._shown)

    def _failed(self, failure: OSError) -> OutputError:
        hint = {
            errno.ENOSPC: "free some space, or write to another disk",
            errno.EDQUOT: "your quota is used up: free some space, or write to another disk",
            errno.EFBIG: "the disk, or ulimit -f, allows no file of that size; convert --split-max-size writes smaller ones",
            errno.ENOENT: "create its folder first",
            errno.EACCES: "choose a place that you may write to",
            errno.EROFS: "choose a place that you may write to",
        }.get(failure.errno or 0)
        return OutputError(f"cannot write {self._shown}: {failure.strerror or failure}", hint)


class OutputFile(_Output):
    """A binary file. `file` is unbuffered enough for large slices. Raises OutputError at once where nothing could be written."""

    def __init__(self, target: Path, *, replace: bool = False) -> None:
        super().__init__(target, replace=replace)
        self._check_target()
        if replace and self.target.exists() and not self.target.is_file():
            raise UsageError(f"{target}: not a file, and so not replaced", "choose another output")
        self._begun = True
        try:
            if self.temporary.is_dir():
                self._remove_other_kind()
            self._take(os.O_RDWR | os.O_CREAT)
            if os.fstat(self._lock).st_nlink > 1:  # another name of somebody's file, which must not be emptied
                self._remove()
                self._let_go()
                self._take(os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.ftruncate(self._lock, 0)
            self.file: BinaryIO = os.fdopen(os.dup(self._lock), "wb")
        except OSError as failure:
            self.close()
            raise self._failed(failure) from failure

    def commit(self) -> None:
        """Everything written so far is the file, on the disk, under its name."""
        try:
            self.file.flush()
            os.fsync(self._lock)
            self.file.close()
            self._check_target()
            self.temporary.rename(self.target)
            sync_folder(self.target.parent)
        except OSError as failure:
            raise self._failed(failure) from failure

    def close(self) -> None:
        if hasattr(self, "file"):
            with contextlib.suppress(OSError, ValueError):
                self.file.close()
        super().close()


class OutputFolder(_Output):
    """A folder. `path` is where its files go meanwhile. One that exists is replaced only if it holds nothing but a model."""

    def __init__(self, target: Path, *, replace: bool = False) -> None:
        super().__init__(target, replace=replace)
        self._old = self._neighbour("replaced")
        self._discarded = self._neighbour("discarded")
        try:
            self._recover()
            self._check_target()
            if os.path.lexists(self.target):
                check_replaceable(self.target)
            self._begun = True
            if self.temporary.is_file():
                self._remove_other_kind()
            with contextlib.suppress(FileExistsError):
                self.temporary.mkdir()
            self._take(os.O_RDONLY | os.O_DIRECTORY)
            _empty(self.temporary)
        except OSError as failure:
            self.close()
            raise self._failed(failure) from failure

    @property
    def path(self) -> Path:
        return self.temporary

    def write(self, name: str, data: bytes) -> None:
        """A small file, whole."""
        place = self.path / name
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(data)

    def copy(self, source: Path, name: str) -> None:
        """Of a small file. Raises CheckpointError or AccessRefusedError where it cannot be read."""
        with reading(source):
            data = source.read_bytes()
        self.write(name, data)

    def commit(self) -> None:
        """Everything in `path` is the folder, on the disk, under its name."""
        try:
            for file in sorted(self.path.rglob("*")):
                _sync(file)
            sync_folder(self.path)
            self._check_target()
            if self.target.exists():
                self.target.rename(self._old)
            try:
                self.temporary.rename(self.target)
            except BaseException:
                self._recover()
                raise
            sync_folder(self.target.parent)
            self._discard()
        except OSError as failure:
            raise self._failed(failure) from failure

    def _recover(self) -> None:
        """Finishes what a run that was killed between the two renames left: the old folder is back, or is not needed."""
        if self._old.is_dir() and not self.target.exists():
            self._old.rename(self.target)
        self._discard()

    def _discard(self) -> None:
        """Deletes the old folder, under another name: what is left of one that was deleted halfway must never come back."""
        shutil.rmtree(self._discarded, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self._old.rename(self._discarded)
        shutil.rmtree(self._discarded, ignore_errors=True)


def exists_already(path: Path) -> UsageError:
    return UsageError(f"{path} exists already", "--force replaces it; -o names another output")


def check_replaceable(folder: Path) -> None:
    """Raises UsageError where `folder` is no model, or holds anything else: replacing it would delete that."""
    if not folder.is_dir() or folder.is_symlink():
        raise UsageError(f"{folder}: not a folder, and so not replaced by one", "choose another output")
    entries = sorted(folder.iterdir())
    names = [entry.name for entry in entries]
    others = [entry.name for entry in entries if not _is_of_a_model(entry)]
    is_model = "config.json" in names or any(name.endswith(".gguf") for name in names)
    if names and (others or not is_model):
        more = f"{folder}: not replaced, because there is more in it than a model: {some(others or names)}"
        raise UsageError(more, "choose another output")


def _is_of_a_model(entry: Path) -> bool:
    if entry.is_dir():
        inner = [f"{entry.name}/{file.name}" for file in entry.iterdir()]
        if entry.name == _TEMPLATES:
            return all(name.endswith(".jinja") for name in inner)
        return inner != [] and all(map(is_setting, inner))
    return is_setting(entry.name) or entry.name in _MODEL_FILES or entry.name.endswith(_MODEL_SUFFIXES)


def check_room(target: Path, num_bytes: int) -> None:
    """Raises DoesNotFitError where the disk of `target` has less than `num_bytes` left."""
    folder = Path(os.path.realpath(target)).parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return  # no such folder: the output says so
    if num_bytes > free:
        raise DoesNotFitError(
            f"{target} will have {told_bytes(num_bytes)}, and {folder} has {told_bytes(free)} left",
            "free some space, or write to another disk",
        )


class _Sized(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


SizedT = TypeVar("SizedT", bound=_Sized)


class TensorWriter(Generic[SizedT]):
    """A file whose tensors arrive in the order of its header, in slices; each begins at a multiple of `alignment`."""

    def __init__(self, file: BinaryIO, tensors: Iterable[SizedT], alignment: int = 1) -> None:
        self._file = file
        self._left = list(tensors)
        self._alignment = alignment

    def write_all(self, slices: Callable[[SizedT], Iterable[torch.Tensor]], progress: LoadProgress) -> None:
        """`slices`: of the tensor that is next."""
        for tensor in list(self._left):
            self.write(tensor.name, slices(tensor))
            progress.advance(tensor.num_bytes)
        self.finish()

    def write(self, name: str, slices: Iterable[torch.Tensor]) -> None:
        """The next tensor, which must be `name`: numbers of its type, or its bytes as uint8."""
        tensor = self._left.pop(0)
        assert name == tensor.name, f"{name} out of turn: {tensor.name} is next"
        written = sum(write_tensor(self._file, piece) for piece in slices)
        assert written == tensor.num_bytes, f"{name}: {written} bytes of {tensor.num_bytes}"
        self._file.write(b"\0" * (-written % self._alignment))

    def finish(self) -> None:
        assert not self._left, f"not written: {self._left}"


class TensorOut(NamedTuple):
    """A tensor that will be written. `shape` in torch order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter(TensorWriter[TensorOut]):
    """One `.safetensors` file. The header is written at once.

    Format: https://github.com/huggingface/safetensors#format; the header is padded with spaces to a multiple of 8 bytes.
    """

    def __init__(self, file: BinaryIO, tensors: Iterable[TensorOut]) -> None:
        super().__init__(file, tensors)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in self._left:
            header[tensor.name] = {
                "dtype": SAFETENSORS_DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.num_bytes],
            }
            end += tensor.num_bytes
        text = _encoded(json.dumps(header, separators=(",", ":"), ensure_ascii=False))
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)


def write_shards(
    folder: OutputFolder,
    tensors: Iterable[TensorOut],
    slices: Callable[[TensorOut], Iterable[torch.Tensor]],
    progress: LoadProgress,
    max_bytes: int = SHARD_BYTES,
) -> None:
    """The weights of a Hugging Face folder: one file, or shards of at most `max_bytes` and their index."""
    groups = shards(tensors, max_bytes)
    for name, group in zip(shard_names(len(groups)), groups, strict=True):
        with (folder.path / name).open("wb") as file:
            SafetensorsWriter(file, group).write_all(slices, progress)
    if len(groups) > 1:
        folder.write("model.safetensors.index.json", index_file(groups))


def shards(tensors: Iterable[SizedT], max_bytes: int) -> list[list[SizedT]]:
    """Tensors in order, in groups of at most `max_bytes`; a larger one is alone."""
    groups: list[list[SizedT]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    return groups


def shard_names(count: int) -> list[str]:
    """What the files of a model in `count` shards are called in a Hugging Face folder."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def index_file(groups: list[list[TensorOut]]) -> bytes:
    """model.safetensors.index.json of these shards."""
    named = zip(shard_names(len(groups)), groups, strict=True)
    weight_map = {tensor.name: name for name, group in named for tensor in group}
    total = sum(tensor.num_bytes for group in groups for tensor in group)
    return as_json({"metadata": {"total_size": total}, "weight_map": weight_map})


def as_json(value: Mapping[str, object]) -> bytes:
    """CheckpointError for numbers that JSON has no word for."""
    try:
        return _encoded(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    except ValueError as error:
        raise CheckpointError(
            "the model's settings hold a number that is infinite or NaN", "the file is damaged: download it again"
        ) from error


def _encoded(json_text: str) -> bytes:
    """Halves of surrogate pairs, which strings of JSON may hold and UTF-8 may not, as the escapes that JSON has for them."""
    return json_text.encode("utf-8", "backslashreplace")


def write_tensor(file: BinaryIO, tensor: torch.Tensor) -> int:
    """The tensor's bytes in row order; how many there were."""
    data = tensor.contiguous().reshape(-1)
    if data.numel():
        file.write(data.view(torch.uint8).numpy().data)
    return data.numel() * data.dtype.itemsize


def sync_folder(folder: Path) -> None:
    """A rename in `folder` is on the disk. Some file systems cannot say so of a folder."""
    with contextlib.suppress(OSError):
        _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _empty(folder: Path) -> None:
    for entry in list(folder.iterdir()):
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
