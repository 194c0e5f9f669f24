"""Weights as MLX quantizes them: codes in uint32 words [N, K * bits / 32], along a row, the first in the lowest bits, and across
words.

    affine     weight, scales and biases [N, K / group] in a float type: number = scale * code + bias; 1 to 6 or 8 bits, groups of
               32, 64 or 128. One bit is kept in two
    mxfp4      weight, scales [N, K / 32] uint8: OCP's e2m1 numbers, and powers of two (e8m0)
    nvfp4      weight, scales [N, K / 16] uint8: e2m1 numbers, and e4m3 scales; with global_scale a float32 for all of a weight
    mxfp8      weight, scales [N, K / 32] uint8: e4m3 numbers, and powers of two; see quantized_microscaled.py

Scales of affine weights have either sign: MLX begins a group at the end that is farther from 0. Embeddings and heads are
quantized like any other matrix. Which bits, groups and mode a module has its own settings say, else those of all; the tensors'
shapes must agree. Words are little-endian, so that a row's bytes are its codes' bits in order. Source: mlx.core.quantize, and
what mlx_lm.utils.load_model makes of a folder.

Legend: N rows, K columns (inputs), E experts; H heads of D numbers, V of a value, R of what is kept for all heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.quant.format import Affine, Blocks
from nanovllm_cli.quant.rows import AffineRows
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.mlx_names import of_heads
from nanovllm_cli.weights.quantized_microscaled import MicroscaledWeight, check_blocks
from nanovllm_cli.weights.quantized_mxfp4 import BLOCK, MXFP4Weight
from nanovllm_cli.weights.quantized_nvfp4 import GROUP, NVFP4Weight
from nanovllm_cli.weights.quantized_weight import BYTES, FLOATS, Module, Part, QuantizedWeight, modules, those, unpack

WORDS = ("U32",)
BITS, GROUPS = (1, 2, 3, 4, 5, 6, 8), (16, 32, 64, 128)
_SUFFIXES = ("weight", "scales", "biases", "global_scale")
_LATENT = ("embed_q", "unembed_out")
_FP = {"mxfp4": BLOCK, "nvfp4": GROUP}
"""Modes of four bits, and their groups."""
NVFP4_WHOLE = 448.0 * 6
"""What a global_scale is the largest number of."""
_ANOTHER = "known: affine, mxfp4, mxfp8, nvfp4; take the model in another one (mlx_lm.convert --q-mode affine), or a GGUF file"


@dataclass(frozen=True)
class Heads:
    """A matrix a head [H, N, K]: codes uint32 [H, N, K * bits / 32], scales and biases [H, N, K / group]; or numbers alone."""

    shape: tuple[int, ...]
    codes: Part
    scales: Part | None = None
    biases: Part | None = None
    bits: int = 0
    group: int = 0

    @property
    def parts(self) -> tuple[Part, ...]:
        return those(self.codes, self.scales, self.biases)

    def numbers(self) -> torch.Tensor:
        """float32 [H, N, K]."""
        if self.scales is None or self.biases is None:
            return self.codes.checked_numbers(self.codes.read()).float()
        codes = unpack(self.codes.read().contiguous().view(torch.uint8), self.bits, self.shape[2])
        scales, biases = (
            part.checked_numbers(part.read()).float().repeat_interleave(self.group, -1) for part in (self.scales, self.biases)
        )
        return codes * scales + biases


@dataclass(frozen=True)
class LatentWeight:
    """kv_b_proj [H (D + V), R] of the two matrices that mlx-lm makes of it, as numbers: embed_q [H, R, D] is the first turned
    over, with groups of its own; unembed_out [H, V, R]."""

    shape: tuple[int, int]
    embed: Heads
    unembed: Heads

    @property
    def format(self) -> None:
        return None

    @property
    def stored_as(self) -> str:
        one = self.embed if self.embed.bits else self.unembed
        return f"affine{one.bits}:group={one.group}"

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*self.embed.parts, *self.unembed.parts)

    def rows(self, first: int, end: int) -> torch.Tensor:
        return of_heads(self.embed.numbers(), self.unembed.numbers())[first:end].contiguous()


@dataclass(frozen=True)
class AffineWeight:
    """bits: of the file's codes."""

    format: Affine
    bits: int
    shape: tuple[int, int]
    codes: Part
    scales: Part
    biases: Part

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.codes, self.scales, self.biases

    def rows(self, first: int, end: int) -> AffineRows:
        words = self.codes.checkpoint.tensor(self.codes.name, (first, end)).contiguous()
        codes = unpack(words.view(torch.uint8), self.bits, self.shape[1])
        scales, biases = (part.checkpoint.tensor(part.name, (first, end)).contiguous() for part in (self.scales, self.biases))
        for part, values in ((self.scales, scales), (self.biases, biases)):
            part.checked_numbers(values)
        return AffineRows(codes, scales, biases)


def read_mlx(checkpoint: Checkpoint, config: ConfigReader) -> dict[str, QuantizedWeight]:
    """By the names of the weights. config: what `mlx_names` has made of a folder's settings."""
    layers = config.values.get("layers")
    layers = layers if isinstance(layers, Mapping) else {}
    found: dict[str, QuantizedWeight] = {}
    heads: dict[str, dict[str, Heads]] = {}
    names = set(checkpoint.names())
    for module in modules(checkpoint, _SUFFIXES):
        bare = module.name in names  # gpt-oss' experts, which have no ".weight"
        if not module.has("scales"):
            if module.has("weight") and module.any("weight").dtype_name in WORDS:
                module.part("scales", FLOATS)
            continue
        own = Module(checkpoint, module.name, {**module.suffixes, "weight": module.name}) if bare else module
        settings = layers.get(module.name)
        read = ConfigReader(settings, f"{config.where}: {module.name}") if isinstance(settings, Mapping) else config
        base, _, last = module.name.rpartition(".")
        if last in _LATENT:
            heads.setdefault(base, {})[last] = _heads(own, read)
            continue
        found[module.name if bare else module.weight_name] = _weight(own, read, said=isinstance(settings, Mapping))
    return found | {f"{base}.kv_b_proj.weight": _latent(checkpoint, base, own) for base, own in heads.items()}


def _heads(module: Module, read: ConfigReader) -> Heads:
    mode, bits, group = read.text("mode", "affine").lower(), read.integer("bits"), read.integer("group_size")
    if mode != "affine" or bits not in BITS or group not in GROUPS:
        told = f"{read.where}: {module.name!r} in MLX's mode {mode[:40]!r}, {bits} bits in groups of {group}"
        raise UnsupportedError(told, "known of latent attention: affine; or take a GGUF file")
    scales = module.part("scales", FLOATS, (None, None, None))
    heads, num_rows, groups = scales.shape
    width = groups * group
    if not heads * num_rows * groups or width * bits % 32:
        raise scales.misfit(f"has the shape {list(scales.shape)}, which no words have {bits} bits for")
    codes = module.part("weight", WORDS, (heads, num_rows, width * bits // 32))
    biases = module.part("biases", (scales.dtype_name,), scales.shape)
    return Heads((heads, num_rows, width), codes, scales, biases, bits, group)


def _latent(checkpoint: Checkpoint, base: str, own: Mapping[str, Heads]) -> LatentWeight:
    """One of the two may be plain, whose rows don't divide into groups."""
    both = dict(own)
    for name in _LATENT:
        if name not in own:
            module = Module(checkpoint, f"{base}.{name}", {"weight": f"{base}.{name}.weight"})
            if f"{base}.{name}.weight" not in checkpoint.names():
                raise next(iter(own.values())).codes.misfit(f"has no {f'{base}.{name}.weight'!r} beside it")
            part = module.part("weight", FLOATS, (None, None, None))
            both[name] = Heads(part.shape, part)
    embed, unembed = both["embed_q"], both["unembed_out"]
    if embed.shape[:2] != (unembed.shape[0], unembed.shape[2]):
        raise embed.codes.misfit(f"is {list(embed.shape)} to {list(unembed.shape)} of {unembed.codes.name!r}")
    heads, rank, size = embed.shape
    return LatentWeight((heads * (size + unembed.shape[1]), rank), embed, unembed)


def _weight(module: Module, read: ConfigReader, *, said: bool) -> QuantizedWeight:
    """said: whether `read` is of this module alone; else its tensors may tell another size of groups, or mode."""
    mode = read.text("mode", "affine").lower()
    codes = module.matrix("weight", WORDS)
    scales = module.matrix("scales", (*FLOATS, *BYTES))
    if scales.dtype_name in BYTES and mode == "affine" and not said:
        mode = {4 * BLOCK: "mxfp4", 4 * GROUP: "nvfp4"}.get(32 * codes.shape[1] // scales.shape[1], "mxfp8")
    if mode in _FP:
        return _of_four_bits(module, codes, mode)
    if mode == "mxfp8":
        return _of_eight_bits(module, codes)
    if mode != "affine":
        raise UnsupportedError(f"{read.where}: {module.name!r} in MLX's mode {mode[:40]!r}", _ANOTHER)
    return _affine(module, codes, read.integer("bits"), read.integer("group_size"), read.where)


def _affine(module: Module, codes: Part, bits: int, group: int, where: str) -> AffineWeight:
    if bits not in BITS or group not in GROUPS:
        known = f"known: {', '.join(map(str, BITS))} bits, groups of {', '.join(map(str, GROUPS))}"
        raise UnsupportedError(f"{where}: MLX weights of {bits} bits in groups of {group}", known)
    num_rows, words = codes.shape
    scales = module.part("scales", FLOATS, (num_rows, None))
    biases = module.part("biases", (scales.dtype_name,), scales.shape)
    width = scales.shape[1] * group
    if width * bits != 32 * words:
        what = f"{scales.shape[1]} groups of {group} columns of {bits} bits"
        raise codes.misfit(f"has {words} words in a row, expected {width * bits / 32:g} for {what}")
    form = Affine(max(bits, 2), group, scales.scale_type)  # type: ignore[arg-type]
    return AffineWeight(form, bits, (num_rows, width), codes, scales, biases)


def _of_eight_bits(module: Module, codes: Part) -> MicroscaledWeight:
    num_rows, width = codes.shape[0], codes.shape[1] * 4
    check_blocks(codes, width)
    scales = module.part("scales", BYTES, (num_rows, width // BLOCK))
    if module.has("biases"):
        raise module.any("biases").misfit("belongs to no weight in mxfp8")
    return MicroscaledWeight((num_rows, width), "fp8_e4m3", codes, scales)


def _of_four_bits(module: Module, codes: Part, mode: str) -> QuantizedWeight:
    num_rows, width = codes.shape[0], codes.shape[1] * 8
    group = _FP[mode]
    if width % group:
        raise codes.misfit(f"has rows of {width} columns, which don't divide into groups of {group}")
    scales = module.part("scales", BYTES, (num_rows, width // group))
    if module.has("biases"):
        raise module.any("biases").misfit(f"belongs to no weight in {mode}")
    if mode == "mxfp4":
        codes.check_width(Blocks("MXFP4"), width)
        return MXFP4Weight((num_rows, width), codes, scales)
    codes.check_width(Blocks("NVFP4"), width)
    factor = module.part("global_scale", ("F32",), (), (1,)) if module.has("global_scale") else None
    return NVFP4Weight((num_rows, width), codes, scales, factor, False, None, NVFP4_WHOLE)
