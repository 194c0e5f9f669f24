"""A model on this machine, whatever its format: settings, and tensors by name, lazily.

    open_checkpoint(path)    a folder (safetensors or GGUF), a .safetensors file, a .gguf file, a part of a split GGUF;
                             random:SHAPE for weights that are made up (random_weights.py)

Nothing is copied when a checkpoint is opened: headers are read and checked, tensors are views of mapped files until
somebody asks for another dtype. Pickled weights (.bin, .pt, .pth) are never opened. Names stay as the files have them;
renaming, comparing with what a model needs and looking for NaN is the loader's work. A name from the hub becomes a path
in `source.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import torch

from nanovllm_cli.errors import (
    AccessRefusedError,
    CheckpointError,
    ModelNotFoundError,
    NanovllmError,
    UnsupportedError,
    UsageError,
)
from nanovllm_cli.overrides import Override, blamed, replaced
from nanovllm_cli.sampling_params import ONLY_GGUF
from nanovllm_cli.weights.files import (
    ADAPTER_CONFIG,
    PICKLES,
    adapter_error,
    folder_of,
    gguf_models,
    mmproj_error,
    pickle_error,
    read_index,
    some,
    split_parts,
)
from nanovllm_cli.weights.folder_config import read_config, read_generation_config
from nanovllm_cli.weights.gguf import GGUFFile
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN
from nanovllm_cli.weights.safetensors import SafetensorsFile, open_sharded
from nanovllm_cli.weights.shapes import RANDOM, shape_config

TensorFile = SafetensorsFile | GGUFFile

# GGUF's general.sampling.* under the names of generation_config.json
SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
SUPPRESSED_KEY = "tokenizer.ggml.suppress_tokens"
TOWER = "clip"
"""The architecture of GGUF files of what a model sees by (`mmproj.py`)."""


class TensorInfo(NamedTuple):
    """`shape` in torch order, rows first; `dtype_name` as the format spells it: "BF16", "F32", "Q4_K"."""

    name: str
    shape: tuple[int, ...]
    dtype_name: str
    num_bytes: int


class Checkpoint(ABC):
    """What every format offers. `path` is what was opened.

    `config` is config.json, or a GGUF's metadata as it is, of which `metadata_types` has the types; safetensors' `file_metadata`.
    `generation_config` is generation_config.json, else the ends in config.json, or what a GGUF says of it under the same names.
    `apart`: no tensor holds several matrices, or one in another way than models have it (`stacked.py`), whatever it is called.
    A tensor that was handed out stays valid after `close()`. `has_numbers`: tensors are those of a training, and are there.
    """

    format: Literal["hf", "gguf"]
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    metadata_types: Mapping[str, tuple[int, int | None]] = {}
    file_metadata: Mapping[str, str] = {}
    has_numbers: bool = True
    apart: bool = False

    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def info(self, name: str) -> TensorInfo: ...

    @abstractmethod
    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor, or its rows from the first to before the second.

        A read-only view of the mapped file, or float32 where the stored type is one of GGUF's block types. Raises
        UnsupportedError where the stored type cannot be read.
        """

    @abstractmethod
    def raw(self, name: str) -> torch.Tensor:
        """The stored bytes as a read-only view: uint8, of shape (rows, bytes of a row); a vector is one row."""

    @property
    def total_bytes(self) -> int:
        """What all tensors take as they are stored."""
        return sum(self.info(name).num_bytes for name in self.names())

    def release(self, name: str) -> None:  # noqa: B027
        """Says that the tensor's file pages are not needed in memory now. Views stay valid, and read them again."""

    def close(self) -> None:  # noqa: B027
        """Files are open no more; nothing else may be asked for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, CheckpointError):
            error.hint = blamed(self.config) or error.hint
        self.close()


class CheckpointView(Checkpoint):
    """`inner` as it is, for others to say what differs; `inner` stays the one to close."""

    def __init__(self, inner: Checkpoint) -> None:
        self.format = inner.format
        self.path = inner.path
        self.config = inner.config
        self.generation_config = inner.generation_config
        self.metadata_types, self.file_metadata = inner.metadata_types, inner.file_metadata
        self.has_numbers = inner.has_numbers
        self.apart = inner.apart
        self._inner = inner

    def names(self) -> list[str]:
        return self._inner.names()

    def info(self, name: str) -> TensorInfo:
        return self._inner.info(name)

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        return self._inner.tensor(name, rows)

    def raw(self, name: str) -> torch.Tensor:
        return self._inner.raw(name)

    def release(self, name: str) -> None:
        self._inner.release(name)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """As `Checkpoint.raw` has them, of numbers that were computed."""
    return tensor.flatten().view(torch.uint8).reshape(max(1, len(tensor)) if tensor.dim() > 1 else 1, -1)


def open_checkpoint(path: str | Path, *, of_tower: bool = False, overrides: Sequence[Override] = ()) -> Checkpoint:
    """The checkpoint at `path`, with its headers checked. of_tower: it may be what a model sees by (`mmproj.py`), too.
    overrides: other settings than its files have; `overrides.check_asked` finds those that nothing has asked for.

    Raises ModelNotFoundError (nothing there), UnsupportedError (pickles, other formats, what is no model), CheckpointError
    (broken, incomplete), AccessRefusedError (permissions), UsageError (a folder with several GGUF models).
    """
    from nanovllm_cli.weights.mlx_names import as_transformers_has_it
    from nanovllm_cli.weights.saved_names import by_published_names

    path = Path(path)
    if str(path).startswith(RANDOM):
        from nanovllm_cli.weights.random_weights import RandomCheckpoint

        return _with(overrides, RandomCheckpoint(shape_config(str(path).removeprefix(RANDOM)), path=path))
    try:
        checkpoint = as_transformers_has_it(by_published_names(_with(overrides, _open_path(path))))
    except PermissionError as error:
        raise AccessRefusedError(f"{path}: permission denied", "check the permissions of the folder") from error
    except OSError as error:  # a name too long, a loop of links, a disk that fails
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not of_tower and checkpoint.format == "gguf" and checkpoint.config.get("general.architecture") == TOWER:
        checkpoint.close()
        raise mmproj_error(str(path))
    return checkpoint


def _with(overrides: Sequence[Override], checkpoint: Checkpoint) -> Checkpoint:
    if overrides:
        try:
            checkpoint.config = replaced(checkpoint.config, overrides)
        except UsageError:
            checkpoint.close()
            raise
        if checkpoint.format == "gguf":
            checkpoint.generation_config = _sampling_of(checkpoint.config)
    return checkpoint


def _open_path(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such file or folder")
    if not path.is_file():
        raise CheckpointError(f"{path}: neither a file nor a folder")
    if path.suffix == ".gguf" or _starts_with(path, b"GGUF"):
        return GGUFCheckpoint(path)
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    if path.suffix in PICKLES:
        raise pickle_error(str(path))
    raise UnsupportedError(
        f"{path}: neither a .safetensors nor a .gguf file", "name such a file, or the folder that it is in"
    )


class _FilesCheckpoint(Checkpoint):
    """Tensors of open files, which are closed with it. `by_name`: the file that each is in."""

    def __init__(self, path: Path, files: Iterable[TensorFile], by_name: Mapping[str, TensorFile]) -> None:
        self.path = path
        self._files = files
        self._by_name = by_name

    def names(self) -> list[str]:
        return list(self._by_name)

    def info(self, name: str) -> TensorInfo:
        entry = self._file(name).entries[name]
        return TensorInfo(name, entry.shape, entry.dtype_name, entry.num_bytes)

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        return self._file(name).tensor(name, rows)

    def raw(self, name: str) -> torch.Tensor:
        return self._file(name).raw(name)

    def release(self, name: str) -> None:
        self._file(name).release(name)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _file(self, name: str) -> TensorFile:
        if name not in self._by_name:
            raise CheckpointError(f"{self.path}: no tensor {name!r} in it")
        return self._by_name[name]


class SafetensorsCheckpoint(_FilesCheckpoint):
    """A Hugging Face folder, or a file in it."""

    format = "hf"

    def __init__(self, path: Path, by_name: Mapping[str, SafetensorsFile]) -> None:
        super().__init__(path, dict.fromkeys(by_name.values()), by_name)
        self.file_metadata = {key: value for file in self._files for key, value in file.metadata.items()}
        folder = folder_of(path)
        try:
            self.config = read_config(folder)
            self.generation_config = read_generation_config(folder, self.config)
        except NanovllmError:
            self.close()
            raise


class GGUFCheckpoint(_FilesCheckpoint):
    """A GGUF file, or all parts of a split one, of which any may be named. The first part's metadata count."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        parts = _open_parts(path)
        by_name: dict[str, GGUFFile] = {}
        super().__init__(path, parts, by_name)
        try:
            if parts[0].metadata.get("general.type") == "adapter":
                raise adapter_error(str(path))
            for part in parts:
                for name in part.entries:
                    if name in by_name:
                        raise CheckpointError(f"{part.path}: tensor {name!r} is also in {by_name[name].path.name}")
                    by_name[name] = part
            expected = parts[0].metadata.get("split.tensors.count", len(by_name))
            if len(parts) > 1 and expected != len(by_name):
                raise CheckpointError(
                    f"{path}: the parts should hold {expected} tensors, they hold {len(by_name)}", DOWNLOAD_AGAIN
                )
        except NanovllmError:
            self.close()
            raise
        self.config = parts[0].metadata
        self.metadata_types = parts[0].metadata_types
        self.generation_config = _sampling_of(self.config)


def _sampling_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a GGUF says about sampling, as generation_config.json has it."""
    named = SAMPLING_KEYS | {"sequence" if name == "samplers" else name: name for name in ONLY_GGUF}
    keys = {f"general.sampling.{key}": name for key, name in named.items()} | {SUPPRESSED_KEY: "suppress_tokens"}
    found = {name: metadata[key] for key, name in keys.items() if key in metadata}
    if isinstance(found.get("samplers"), str):
        found["samplers"] = [name for name in found["samplers"].split(";") if name]
    return found


def _open_parts(path: Path) -> list[GGUFFile]:
    paths = [path.with_name(part) for part in split_parts(path.name)]
    if path not in paths:
        raise CheckpointError(f"{path}: the number in its name is not one of 1 to {len(paths)}")
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of {len(paths)} parts are missing: {some(missing)}",
            "put all parts of the split model into one folder, or download it again",
        )
    parts: list[GGUFFile] = []
    try:
        for index, part_path in enumerate(paths):
            part = GGUFFile(part_path)
            parts.append(part)
            count, number = part.metadata.get("split.count", 1), part.metadata.get("split.no", 0)
            if count not in (len(paths), 0) and len(paths) == 1:
                raise CheckpointError(
                    f"{part_path}: it is part {_plus_one(number)} of {str(count)[:20]}, but its name does not say so",
                    f"name the parts NAME-00001-of-{count:05d}.gguf and so on" if isinstance(count, int) else None,
                )
            if len(paths) > 1 and (count, number) != (len(paths), index):
                raise CheckpointError(
                    f"{part_path}: expected part {index + 1} of {len(paths)} by its name, found part "
                    f"{_plus_one(number)} of {count} in it",
                    "the files are of different models, or were renamed: download it again",
                )
    except NanovllmError:
        for part in parts:
            part.close()
        raise
    return parts


def _plus_one(number: Any) -> Any:
    return number + 1 if isinstance(number, int) else repr(number)


def _open_folder(folder: Path) -> Checkpoint:
    """The first of: model.safetensors, its index, the only other index or file, consolidated.safetensors, GGUF."""
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        raise adapter_error(str(folder))
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return _single_file(folder, single)
    if index.is_file():
        return SafetensorsCheckpoint(folder, open_sharded(index))
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) == 1:
        return SafetensorsCheckpoint(folder, open_sharded(indexes[0]))
    files = sorted(folder.glob("*.safetensors"))
    models = gguf_models(folder)
    if models and not (files and (folder / "config.json").is_file()):
        if len(models) > 1:
            raise UsageError(
                f"{folder}: {len(models)} GGUF models in it: {some([model.name for model in models], 20)}",
                "name one of the files",
            )
        return GGUFCheckpoint(models[0])
    others = [file for file in files if file.name != "consolidated.safetensors"]
    if len(others) == 1 or (files and not others):
        return _single_file(folder, (others or files)[0])
    if others:
        raise CheckpointError(
            f"{folder}: several .safetensors files and no index: {some([file.name for file in others])}",
            "download model.safetensors.index.json too, or name one of the files",
        )
    if pickles := sorted(file for file in folder.iterdir() if file.suffix in PICKLES):
        raise pickle_error(str(pickles[0]))
    raise CheckpointError(
        f"{folder}: no .safetensors or .gguf file in it", "download the model again, or check the path"
    )


def _open_safetensors(path: Path) -> SafetensorsCheckpoint:
    """A single file, or the whole of a model of which this file is a shard."""
    for index in sorted(path.parent.glob("*.safetensors.index.json")):
        if path.name in read_index(index).values():
            return SafetensorsCheckpoint(path, open_sharded(index))
    return _single_file(path, path)


def _single_file(path: Path, weights: Path) -> SafetensorsCheckpoint:
    file = SafetensorsFile(weights)
    return SafetensorsCheckpoint(path, dict.fromkeys(file.entries, file))


def _starts_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic
