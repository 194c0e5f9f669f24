"""LoRA adapters as their files have them (Hu et al. 2021): beside a weight W [N, K] two narrow ones, and W + scale * up @ down
is what is meant.

    PEFT    a folder with adapter_config.json and adapter_model.safetensors: base_model.model.<weight>.lora_A and .lora_B
    GGUF    a file whose general.type is adapter, as llama.cpp has them: <weight>.lora_a and .lora_b

What such a file may hold beside that (whole weights, biases, magnitudes, embeddings) would be left out in silence by whoever
reads the two alone, so it is refused by name. Which weight of which model is meant, `adapted.py` finds out.

Legend: N rows and K columns of a weight, r the rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from nanovllm_cli.errors import AccessRefusedError, CheckpointError, ModelNotFoundError, UnsupportedError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.weights.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PICKLES,
    choose_adapter,
    folder_of,
    pickle_error,
    some,
)
from nanovllm_cli.weights.fingerprint import Stamps, stamps_of
from nanovllm_cli.weights.gguf import GGUFFile
from nanovllm_cli.weights.json_file import MAX_CONFIG_BYTES, read_json_file
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN
from nanovllm_cli.weights.safetensors import SafetensorsFile

MAX_RANK = 1 << 13  # far more than anybody trains; what is believed of a file
MERGE_FIRST = "merge it into its base model by the program that trained it"
_PEFT = re.compile(r"(?:base_model\.model\.)?(?P<weight>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_WHOLE = re.compile(r"(?:base_model\.model\.)?(?P<weight>(?:(?!\.lora_).)+?)(?:\.base_layer)?\.weight")
_GGUF = re.compile(r"(?P<weight>.+\.weight)\.lora_(?P<side>[ab])")
_OF_TRAINING = ("eva_config", "loftq_config", "runtime_config", "megatron_config", "velora_config")
"""Settings of PEFT's that say how an adapter was begun or trained, and nothing of what it is."""
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin that change the base model, which the adapter is then not for."""


class LowRank(NamedTuple):
    """What is added to a weight: scale * up [N, r] @ down [r, K]; of any float type, and finite. module: the adapter's number, of
    one that requests choose."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    module: int | None = None

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Of the sum's rows, those from the first to before the second, in fp32."""
        return (self.up[first:end].float() * self.scale) @ self.down.float()


@dataclass(frozen=True, slots=True)
class Adapter:
    """weights: by what a checkpoint in its format calls them. base: what it was trained on, if it says so. copies: whole
    weights that come along, as PEFT has them where a head or an embedding is adapted. architecture: of a GGUF file's model.
    turned_over: the model's matrices are, and the sides are as of any other (PEFT's fan_in_fan_out)."""

    path: Path
    format: Literal["hf", "gguf"]
    weights: Mapping[str, LowRank]
    base: str | None
    copies: Mapping[str, torch.Tensor] = field(default_factory=dict)
    architecture: str | None = None
    turned_over: bool = False


def open_adapter(path: Path, scale: float) -> Adapter:
    """The adapter at `path`, a folder or a file, its products times `scale`.

    Raises ModelNotFoundError, AccessRefusedError, CheckpointError (broken), UnsupportedError (other kinds), UsageError (a folder
    with several).
    """
    try:
        return _open(path, scale)
    except PermissionError as error:
        raise AccessRefusedError(f"{path}: permission denied", "check its permissions") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _open(path: Path, scale: float) -> Adapter:
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such file or folder")
    if path.is_dir():
        path = _file_of(path)
    if path.suffix == ".gguf":
        return _open_gguf(path, scale)
    if path.suffix == ".safetensors":
        return _open_peft(path, scale)
    if path.suffix in PICKLES:
        raise pickle_error(str(path))
    raise UnsupportedError(f"{path}: not an adapter's file", f"it is a folder with {ADAPTER_WEIGHTS}, or a .gguf file")


def _file_of(folder: Path) -> Path:
    names = [file.name for file in folder.iterdir() if file.is_file()]
    return folder / choose_adapter(names, str(folder)).files[-1]


# ---- PEFT ----


def _open_peft(path: Path, scale: float) -> Adapter:
    settings = folder_of(path) / ADAPTER_CONFIG
    if not settings.is_file():
        raise CheckpointError(f"{path}: no {ADAPTER_CONFIG} beside it", "download the whole adapter")
    config = ConfigReader(read_json_file(settings, MAX_CONFIG_BYTES), str(settings))
    _check_settings(config)
    file = SafetensorsFile(path)
    try:
        alphas = _Alphas(config)
        whole = {name: found for name in file.entries if (found := _WHOLE.fullmatch(name))}
        weights = {
            f"{weight}.weight": LowRank(down, up, scale * alphas.scale(weight, down.shape[0]))
            for weight, down, up in _pairs(file, _PEFT, file.entries.keys() - whole)
        }
        copies = {f"{found['weight']}.weight": file.tensor(name) for name, found in whole.items()}
        if len(copies) < len(whole):
            raise CheckpointError(f"{path}: a whole weight is there twice", DOWNLOAD_AGAIN)
    finally:
        file.close()
    base = config.values.get("base_model_name_or_path")
    return Adapter(path, "hf", weights, base if isinstance(base, str) else None, copies,
                   turned_over=config.flag("fan_in_fan_out", False))  # fmt: skip


def _check_settings(config: ConfigReader) -> None:
    """Refuses what changes the meaning of the two matrices, or adds to them, in words of their own."""

    def refuse(what: str) -> UnsupportedError:
        return UnsupportedError(f"{config.where}: {what}", MERGE_FIRST)

    if (kind := config.text("peft_type")) != "LORA":
        raise refuse(f"an adapter of the kind {kind[:40]!r}, not LoRA")
    switches = [key for key, value in config.values.items() if key.startswith("use_") and value and key != "use_rslora"]
    switches += [key for key in ("lora_bias",) if config.flag(key, False)]
    lists = ("alora_invocation_tokens", "layer_replication", "modules_to_save", "target_parameters", "trainable_token_indices")
    switches += [key for key in lists if config.values.get(key)]
    switches += [key for key, value in config.values.items() if key.endswith("_config") and value and key not in _OF_TRAINING]
    if switches:
        raise refuse(f"{some(switches)} is set")
    if (bias := config.text("bias", "none")) != "none":
        raise refuse(f"biases of the base model are changed too ({bias[:40]!r})")
    begun = config.values.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_OTHER_BASE):
        raise refuse(f"it began as {begun[:40]!r}, which changes the base model")


class _Alphas:
    """What the products of each weight are multiplied by: alpha / r, or with rank-stabilized scaling alpha / sqrt(r)
    (Kalajdzievski 2023)."""

    def __init__(self, config: ConfigReader) -> None:
        self._usual = config.number("lora_alpha", 8, positive=False)
        self._by_root = config.flag("use_rslora", False)
        patterns = config.section("alpha_pattern")
        self._own: dict[str, tuple[int, float]] = {}
        for place, name in enumerate(patterns.values):
            if re.search(r"[^\w.^-]", name):  # PEFT takes any regular expression, and so would somebody else's file
                raise UnsupportedError(f"{config.where}: the pattern {name[:60]!r} of alpha_pattern", MERGE_FIRST)
            self._own[name] = place, patterns.number(name, positive=False)
        self._own.pop("", None)  # which means no weight
        self._shapes = {re.sub(r"[^.^]", "x", name) for name in self._own}

    def scale(self, weight: str, rank: int) -> float:
        """The first pattern counts that is the weight's whole name behind a ^, or the end of its name from a dot on. Its own dots
        are any character, as in PEFT's."""
        found = (self._own.get(_as_pattern(weight, shape)) for shape in self._shapes)
        alpha = min((own for own in found if own is not None), default=(0, self._usual))[1]
        return alpha / (math.sqrt(rank) if self._by_root else rank)


def _as_pattern(weight: str, shape: str) -> str:
    """The one pattern of that shape (x a character, . any) that means the weight, or "". An adapter may have a pattern for each
    of thousands of weights, so that they are looked up, and not tried."""
    anchor = shape[:1] if shape.startswith("^") else ""
    start = len(weight) - len(shape) + len(anchor)
    if start < 0 or (start > 0 and (anchor or weight[start - 1] != ".")):
        return ""
    return anchor + "".join("." if kind == "." else c for kind, c in zip(shape[len(anchor) :], weight[start:], strict=True))


def stamps(path: Path) -> Stamps:
    """Of an adapter's files, as `file_stamps` has them of a model's."""
    weights = _file_of(path) if path.is_dir() else path
    return stamps_of([weights, *([weights.with_name(ADAPTER_CONFIG)] if weights.suffix == ".safetensors" else [])])


# ---- GGUF ----


def _open_gguf(path: Path, scale: float) -> Adapter:
    file = GGUFFile(path)
    try:
        config = ConfigReader(file.metadata, str(path))
        if (kind := config.text("general.type", "model")) != "adapter":
            raise UnsupportedError(f"{path}: a {kind[:40]}, not an adapter", "convert_lora_to_gguf.py makes these files")
        if (kind := config.text("adapter.type", "lora")) != "lora":
            raise UnsupportedError(f"{path}: an adapter of the kind {kind[:40]!r}, not LoRA", MERGE_FIRST)
        if "adapter.alora.invocation_tokens" in file.metadata:
            raise UnsupportedError(f"{path}: an adapter that begins at certain tokens (aLoRA)", MERGE_FIRST)
        alpha = config.number("adapter.lora.alpha", 0, positive=False)
        weights = {
            weight: LowRank(down, up, scale * alpha / down.shape[0] if alpha else scale)
            for weight, down, up in _pairs(file, _GGUF, file.entries.keys())
        }
        return Adapter(path, "gguf", weights, None, architecture=config.text("general.architecture", "") or None)
    finally:
        file.close()


# ---- both ----


def _pairs(
    file: SafetensorsFile | GGUFFile, pattern: re.Pattern[str], names: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(weight, down, up). UnsupportedError for other names than the pattern's, CheckpointError for sides that don't fit."""
    sides: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        found = pattern.fullmatch(name)
        if found is None:
            raise UnsupportedError(f"{file.path}: tensor {name!r} is no side of a LoRA", MERGE_FIRST)
        if found["weight"] == "token_embd.weight":
            raise UnsupportedError(f"{file.path}: an adapter of the embedding ({name})", MERGE_FIRST)
        both = sides.setdefault(found["weight"], {})
        if both.setdefault(found["side"].lower(), name) != name:
            raise CheckpointError(f"{file.path}: a side of {found['weight']!r} is there twice", DOWNLOAD_AGAIN)
    if not sides:
        raise CheckpointError(f"{file.path}: no side of a LoRA in it", DOWNLOAD_AGAIN)
    for weight, both in sides.items():
        if len(both) < 2:
            raise CheckpointError(f"{file.path}: of {weight!r} there is one side only", DOWNLOAD_AGAIN)
        down, up = _side(file, both["a"]), _side(file, both["b"])
        if down.shape[0] != up.shape[1]:
            told = f"{list(down.shape)} and {list(up.shape)}"
            raise CheckpointError(f"{file.path}: the two sides of {weight!r} don't fit: {told}", DOWNLOAD_AGAIN)
        if not 1 <= down.shape[0] <= MAX_RANK:
            raise CheckpointError(f"{file.path}: {weight!r} has the rank {down.shape[0]}; 1 to {MAX_RANK} are believed")
        yield weight, down, up


def _side(file: SafetensorsFile | GGUFFile, name: str) -> torch.Tensor:
    if len(file.entries[name].shape) != 2:
        dims = list(file.entries[name].shape)
        raise UnsupportedError(f"{file.path}: tensor {name!r} is {dims}, not a matrix", MERGE_FIRST)
    values = file.tensor(name)
    if not values.is_floating_point() or values.dtype.itemsize < 2:
        raise UnsupportedError(f"{file.path}: tensor {name!r} holds {values.dtype}", "an adapter in 16 or 32 bits is needed")
    if not values.isfinite().all():
        raise CheckpointError(f"{file.path}: tensor {name!r} has values that are NaN or infinite", DOWNLOAD_AGAIN)
    return values
