"""From floats to GGUF's block types: the K-quants by a search of our own, Q1_0 and Q2_0 by their rules, the types that `gguf`
writes through `gguf`.

Legend: n rows, K columns, G groups along a row, S blocks along a row, b blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.kernels.cpu import launch
from nanovllm_cli.quant import gguf_encode_search as search
from nanovllm_cli.quant.gguf_blocks import BlockType, Decomposed, block_type, decompose

Floats = npt.NDArray[np.float32]
# Numbers below are 0 in all types but MXFP4. `gguf` would divide by what has no float32 inverse, or turn an exponent round.
SMALLEST = 2.0**-100


def encode(type_name: str, rows: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
    """Float rows [n, K], finite, to blocks uint8 [n, bytes a row]. importance [K]: how much a column's squared error counts; None
    counts all alike. A row's bytes depend on that row and on `importance` alone.

    UnsupportedError for a type that can't be written, a width that isn't whole blocks, numbers beyond what the type's scales can
    carry, and an importance that the type has no use for. UsageError for an importance that is negative or not finite."""
    kind = block_type(type_name)
    if kind.name not in ENCODED:
        raise UnsupportedError(f"{kind.name} can be read, not written", f"these can be written: {', '.join(ENCODED)}")
    n, width = rows.shape
    if width == 0 or width % kind.block_len:
        raise UnsupportedError(
            f"{kind.name}: rows of {width} don't divide into blocks of {kind.block_len}",
            "q8_0 has blocks of 32; f16 and bf16 have none",
        )
    if n == 0:
        return torch.empty(0, width // kind.block_len * kind.block_bytes, dtype=torch.uint8)
    x = rows.detach().float().contiguous().numpy()
    if kind.name in _SEARCHES:
        parts = _searched(kind, x, _weights(importance, width))
        data = pack(parts)
    elif importance is None:
        data = pack(_ROUNDED[kind.name](kind, x)) if kind.name in _ROUNDED else _by_gguf(kind, x)
        parts = decompose(kind.name, data)
    else:
        raise UnsupportedError(f"{kind.name} is rounded to nearest and can't weigh columns", "leave the importance out")
    if any(part is not None and not part.isfinite().all() for part in (parts.d, parts.dmin)):
        raise UnsupportedError(
            f"{kind.name}: numbers up to {np.abs(x).max():.3g} are more than its scales can carry",
            "write this tensor as bf16 or f32",
        )
    return data


def weighs_columns(type_name: str) -> bool:
    """Whether `encode` has a use for an importance."""
    return block_type(type_name).name in _SEARCHES


def _by_gguf(kind: BlockType, x: Floats) -> torch.Tensor:
    x = np.where(np.abs(x) < SMALLEST, np.float32(0), x)
    with np.errstate(all="ignore"):  # what overflows is found in the scales
        return torch.from_numpy(quants.quantize(x, GGMLQuantizationType[kind.name]))


def _signs(kind: BlockType, x: Floats) -> Decomposed:
    """Signs, -0 a positive one, and as scale the mean magnitude, summed from the first on as llama.cpp does."""
    blocks = np.abs(x).reshape(len(x), -1, kind.group)
    with np.errstate(over="ignore"):
        mean = np.add.accumulate(blocks, -1, dtype=np.float32)[..., -1] / np.float32(kind.group)
    return Decomposed(kind, torch.from_numpy((x >= 0).astype(np.uint8)), torch.from_numpy(mean).half())


def _ternary(kind: BlockType, x: Floats) -> Decomposed:
    """-1, 0 or 1 times the largest magnitude, of which a half goes outwards. Nothing gets the fourth code, which stands for 2."""
    x = np.where(np.abs(x) < SMALLEST, np.float32(0), x)
    blocks = x.reshape(len(x), -1, kind.group)
    largest = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(1) / largest, np.float32(0))
    share = blocks * inverse[..., None]
    values = np.sign(share) * (np.abs(share) >= 0.5)
    codes = torch.from_numpy((values + kind.offset).astype(np.uint8)).view(x.shape)
    return Decomposed(kind, codes, torch.from_numpy(largest).half())


_ROUNDED = {"Q1_0": _signs, "Q2_0": _ternary}


def _weights(importance: torch.Tensor | None, width: int) -> Floats:
    if importance is None:
        return np.ones(width, np.float32)
    weights: Floats = importance.detach().float().contiguous().numpy()
    if weights.shape != (width,):
        raise UsageError(
            f"an importance of shape {list(weights.shape)} for {width} columns", "it takes one number a column"
        )
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise UsageError(
            "an importance has numbers that are negative or not finite", "it is a mean of squares: count again"
        )
    return weights


# ---- the search ----


class _Search(NamedTuple):
    """most_code, most_sub: the largest; of symmetric types, half of how many there are. cuts: the candidates of step 1."""

    most_code: int
    most_sub: int
    cuts: Floats


def _affine(most_code: int, most_sub: int, steps: tuple[float, float, float, float]) -> _Search:
    """Both ends of a group's range are moved inwards by so many steps of the codes, each with each."""
    moved = np.array(steps) / most_code
    low, high = np.meshgrid(moved, 1 - moved)
    return _Search(most_code, most_sub, np.stack([low.ravel(), high.ravel()]).astype(np.float32))


def _symmetric(half_code: int, half_sub: int, outwards: float, inwards: float) -> _Search:
    """The largest magnitude goes to the lowest value or to the highest, or up to so many steps beyond or before them."""
    steps = np.linspace(-outwards, inwards, search.LANES // 2)
    cuts = np.concatenate([-half_code + steps, half_code - 1 - steps])
    return _Search(half_code, half_sub, cuts.astype(np.float32))


def _with_three_values(found: _Search) -> _Search:
    """The last candidate gives way to one in which the ends of a range and its middle have codes of their own: of weights with
    three values, which have no code for the middle where both ends have the outermost, nothing is lost."""
    cuts = found.cuts.copy()
    cuts[:, -1] = 0, found.most_code / 2
    return found._replace(cuts=cuts)


# Steps and spreads were chosen by the error on normal and Student-t weights.
_SEARCHES = {
    "Q2_K": _with_three_values(_affine(3, 15, (-0.3, 0.0, 0.3, 0.6))),
    "Q3_K": _symmetric(4, 32, 0.6, 0.9),
    "Q4_K": _affine(15, 63, (-0.6, -0.2, 0.2, 0.6)),
    "Q5_K": _affine(31, 63, (-0.6, -0.2, 0.2, 0.6)),
    "Q6_K": _symmetric(32, 128, 0.6, 6.0),
}
ENCODED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *_SEARCHES, "Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "MXFP4")


def _searched(kind: BlockType, x: Floats, weights: Floats) -> Decomposed:
    n, width = x.shape
    most_code, most_sub, cuts = _SEARCHES[kind.name]
    codes = np.empty((n, width), np.uint8)
    d = np.empty((n, width // kind.block_len))
    sub = np.empty((n, width // kind.group), np.int8 if kind.sub == torch.int8 else np.uint8)
    dmin, sub_min = np.empty_like(d), np.empty_like(sub)
    sides = [codes, d, sub, *([dmin, sub_min] if kind.has_minimum else [])]
    addresses = [side.ctypes.data for side in (x, weights, cuts, *sides)]
    ints = (*addresses[:2], n, width, kind.group, most_code, most_sub, *addresses[2:])
    launch(search.affine if kind.has_minimum else search.symmetric, 64 * n * width, "", ints)
    parts = [torch.from_numpy(codes), _halves(d), torch.from_numpy(sub)]
    if kind.has_minimum:
        parts += [_halves(dmin), torch.from_numpy(sub_min)]
    return Decomposed(kind, *parts)


def _halves(values: npt.NDArray[np.float64]) -> torch.Tensor:
    """The search has rounded them to float16's numbers; those above are infinite here."""
    return torch.from_numpy(values).half()


# ---- to bytes ----


def pack(parts: Decomposed) -> torch.Tensor:
    """The inverse of `gguf_blocks.decompose` for the K-quants, Q1_0 and Q2_0: uint8 [n, bytes a row]."""
    n, width = parts.codes.shape
    across = width // parts.kind.block_len
    blocks = [None if part is None else part.view(n * across, part.shape[1] // across) for part in parts[1:]]
    return torch.cat(_PACK[parts.kind.name](*blocks), 1).view(n, across * parts.kind.block_bytes)


def _join(codes: torch.Tensor, bits: int, stride: int) -> torch.Tensor:
    """The lowest bits of [b, m] codes in bytes: the inverse of `gguf_fields.fields`."""
    b, m = codes.shape
    count = 8 // bits
    runs = codes.view(b, m // (count * stride), count, stride) & (1 << bits) - 1
    out = runs[:, :, 0].clone()
    for i in range(1, count):
        out |= runs[:, :, i] << (bits * i)
    return out.flatten(1)


def _bytes(part: torch.Tensor) -> torch.Tensor:
    return part.view(torch.uint8)


Fields = list[torch.Tensor]


def _q2_k(codes: torch.Tensor, d: torch.Tensor, sub: torch.Tensor, dmin: torch.Tensor, sub_min: torch.Tensor) -> Fields:
    return [sub | sub_min << 4, _join(codes, 2, 32), _bytes(d), _bytes(dmin)]


def _q3_k(codes: torch.Tensor, d: torch.Tensor, sub: torch.Tensor, *_: None) -> Fields:
    sub = _bytes(sub + 32)
    return [_join(codes >> 2, 1, 32), _join(codes, 2, 32), _join(sub, 4, 8), _join(sub >> 4, 2, 4), _bytes(d)]


def _six_bit_scales(sub: torch.Tensor, sub_min: torch.Tensor) -> torch.Tensor:
    first = sub[:, :4] | sub[:, 4:] >> 4 << 6
    second = sub_min[:, :4] | sub_min[:, 4:] >> 4 << 6
    return torch.cat([first, second, sub[:, 4:] & 15 | sub_min[:, 4:] << 4], 1)


def _q4_k(codes: torch.Tensor, d: torch.Tensor, sub: torch.Tensor, dmin: torch.Tensor, sub_min: torch.Tensor) -> Fields:
    return [_bytes(d), _bytes(dmin), _six_bit_scales(sub, sub_min), _join(codes, 4, 32)]


def _q5_k(codes: torch.Tensor, d: torch.Tensor, sub: torch.Tensor, dmin: torch.Tensor, sub_min: torch.Tensor) -> Fields:
    high, low = _join(codes >> 4, 1, 32), _join(codes, 4, 32)
    return [_bytes(d), _bytes(dmin), _six_bit_scales(sub, sub_min), high, low]


def _q6_k(codes: torch.Tensor, d: torch.Tensor, sub: torch.Tensor, *_: None) -> Fields:
    return [_join(codes, 4, 64), _join(codes >> 4, 2, 32), _bytes(sub), _bytes(d)]


def _q1_0(codes: torch.Tensor, d: torch.Tensor, *_: None) -> Fields:
    return [_bytes(d), _join(codes, 1, 1)]


def _q2_0(codes: torch.Tensor, d: torch.Tensor, *_: None) -> Fields:
    return [_bytes(d), _join(codes, 2, 1)]


_PACK: dict[str, Callable[..., Fields]] = {
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "Q1_0": _q1_0, "Q2_0": _q2_0,
}  # fmt: skip
