"""rope_cache.cu and rope_tables.cu, emulated: q and the cache against the formula in float64, every other slot untouched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from emulation import on_gpu
from emulation.compare import behind_nan, close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import cpu, reference, rope_cache, rope_tables
from nanovllm_cli.kernels.kernel import widest

pytestmark = needs_emulation
BF16, HALF, FP8, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
EPS = 1e-6


class Shape(NamedTuple):
    """num_blocks and block_size of the cache."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    rotary: int
    interleaved: bool = False
    num_blocks: int = 3
    block_size: int = 16

    @property
    def vector(self) -> int:
        return min(widest(self.dim, BF16), widest(self.rotary // 2, BF16))


SHAPES = [
    Shape(5, 4, 2, 64, 64),
    Shape(3, 3, 1, 128, 128, True),
    Shape(2, 16, 8, 128, 128),
    Shape(2, 2, 2, 80, 80),
    Shape(3, 2, 1, 96, 32, True),
    Shape(2, 3, 3, 256, 64),
    Shape(1, 1, 1, 512, 512),
    Shape(4, 2, 1, 64, 0),
    Shape(7, 7, 1, 24, 24),
    Shape(2, 5, 5, 40, 40, True),
    Shape(3, 6, 2, 100, 100, False, 2, 64),
    Shape(3, 2, 1, 100, 60, True, 2, 64),
    Shape(4, 3, 1, 17, 16),
    Shape(4, 3, 1, 17, 16, True),
    Shape(20, 1, 1, 1, 0),
    Shape(2, 2, 1, 50, 50),
    Shape(2, 2, 2, 511, 510),
]
KINDS = {
    8: [(BF16, BF16), (HALF, FP8), (BF16, INT8)], 4: [(BF16, FP8)], 2: [(HALF, HALF), (HALF, INT8)],
    1: [(BF16, BF16), (HALF, FP8)],
}  # fmt: skip
"""Types of activations and cache that are tested with a vector; together they are all combinations."""
UNTOUCHED = 99
"""Codes of int8 where nothing was written, whose scales are NaN."""
CASES = [(shape, *kind) for shape in SHAPES for kind in KINDS[shape.vector]]


def make(shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype, norm: bool = True) -> dict[str, Any]:
    """Arguments of `run`. Every third token is padding; the caches are full of NaN. Of an odd number of tokens q, k and v lie
    behind NaN, as behind gates."""
    tokens, heads, kv_heads, dim = shape[:4]
    angles, gates = random(tokens, shape.rotary // 2, scale=100), tokens % 2 * heads * dim
    gains = {f"{name}_norm": random(dim, dtype=dtype) if norm else None for name in "qkv"}
    slots = torch.randperm(shape.num_blocks * shape.block_size)[:tokens]
    slots[2::3] = -1
    filled = UNTOUCHED if kv_dtype == INT8 else torch.nan
    caches = [torch.full((shape.num_blocks, kv_heads, shape.block_size, dim), filled).to(kv_dtype) for _ in "kv"]
    scales: list[torch.Tensor | None] = [None, None]
    if kv_dtype == FP8:
        scales = [random(kv_heads).abs() + 0.01 for _ in "kv"]
    elif kv_dtype == INT8:
        scales = [torch.full(caches[0].shape[:3], torch.nan) for _ in "kv"]
    return {
        "qkv": behind_nan(random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype), gates), "heads": heads,
        "kv_heads": kv_heads, "dim": dim, **gains,
        "eps": EPS, "norm_offset": 0.5, "cos": angles.cos(), "sin": angles.sin(), "interleaved": shape.interleaved,
        "shared": False, "turned": False, "slots": slots,
        "k_cache": caches[0], "v_cache": caches[1],
        "k_scale": scales[0], "v_scale": scales[1],
    }  # fmt: skip


def run(launcher: Emulator, **args: Any) -> torch.Tensor:
    projected = rope_cache.Projected(**{name: args.pop(name) for name in rope_cache.Projected._fields})
    return rope_cache.rope_and_cache(launcher, projected, **args)


def expected_of(args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, and both caches, in float64."""
    names = ("heads", "kv_heads", "q_norm", "k_norm", "v_norm", "eps", "norm_offset", "cos", "sin", "interleaved", "turned")
    q, k, v = reference.qk_norm_rope(args["qkv"].double(), **{name: args[name] for name in names})
    caches = []
    for rows, name in ((k, "k"), (v, "v")):
        cache, scale = args[f"{name}_cache"].double(), args[f"{name}_scale"]
        if args["k_cache"].dtype == INT8:
            cache = torch.full_like(cache, torch.nan)
        elif scale is not None:
            rows = (rows / scale.double()[:, None]).clamp(-448, 448)
        reference.write_cache(cache, rows, args["slots"], None)
        caches.append(cache)
    return q, caches[0], caches[1]


def check(args: dict[str, Any], emulator: Emulator) -> None:
    expected = expected_of(args)
    q = run(emulator, **args)
    close_to_rounding(q, expected[0])
    for name, wanted in zip("kv", expected[1:], strict=True):
        cache, untouched = args[f"{name}_cache"], wanted.isnan()
        if cache.dtype == INT8:
            check_int8(cache, args[f"{name}_scale"], wanted)
            continue
        assert torch.equal(cache.double().isnan(), untouched)
        close_to_rounding(cache.double().nan_to_num().to(cache.dtype), wanted.nan_to_num())


def check_int8(codes: torch.Tensor, scales: torch.Tensor, wanted: torch.Tensor) -> None:
    """Half a step from float64, where a step is a 127th of the row's largest number."""
    untouched = wanted.isnan().all(dim=-1)
    assert torch.equal(scales.isnan(), untouched)
    assert (codes[untouched] == UNTOUCHED).all()
    rows, steps = wanted[~untouched], scales[~untouched].double()
    assert torch.allclose(steps * 127, rows.abs().amax(dim=-1), rtol=1e-5, atol=0.0)
    assert ((codes[~untouched] * steps[:, None] - rows).abs() <= 0.5001 * steps[:, None]).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("shape", "dtype", "kv_dtype"), CASES)
def test_one_rounding_from_float64(shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype, order: int) -> None:
    check(make(shape, dtype, kv_dtype), Emulator(order))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("norms", ["qk", "qkv"])
@pytest.mark.parametrize("shape", [SHAPES[index] for index in (0, 1, 2, 4, 9, 10, 13, 16)])
def test_norms_may_come_behind_the_rotation(shape: Shape, norms: str, order: int) -> None:
    """The length of a head is another then, where angles come with a factor."""
    args = make(shape, *KINDS[shape.vector][0])
    args |= {"turned": True, "cos": 2 * args["cos"]} | {f"{name}_norm": None for name in "qkv" if name not in norms}
    args["q_norm"] = random(shape.heads, shape.dim, dtype=args["qkv"].dtype)  # each head's own
    check(args, Emulator(order))


@pytest.mark.parametrize("norms", ["", "q", "k", "v", "qk", "kv"])
def test_norms_are_optional(norms: str) -> None:
    args = make(SHAPES[0], BF16, BF16)
    args |= {f"{name}_norm": None for name in "qkv" if name not in norms}
    check(args, Emulator())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_of_layers_that_read_anothers_cache_there_is_q_alone(shape: Shape, order: int) -> None:
    """The same bits, and nothing is written."""
    args = make(shape, BF16, BF16)
    expected = run(Emulator(order), **args)
    for name in ("k_cache", "v_cache"):
        args[name].fill_(torch.nan)
    qkv = args["qkv"][:, : shape.heads * shape.dim]
    args |= {"shared": True, "qkv": behind_nan(qkv, shape.tokens % 2 * shape.heads * shape.dim)}
    assert torch.equal(run(Emulator(order), **args), expected)
    assert all(args[name].isnan().all() for name in ("k_cache", "v_cache"))


@pytest.mark.parametrize("kv_dtype", [BF16, FP8, INT8])
@pytest.mark.parametrize("shape", [SHAPES[index] for index in (0, 4, 9)])
def test_of_rows_that_ask_nothing_there_are_k_and_v_alone(shape: Shape, kv_dtype: torch.dtype) -> None:
    """The same bits: what an encoder has made is kept so."""
    args = make(shape, BF16, kv_dtype)
    sides = [name for name in args if name[1:] in ("_cache", "_scale") and args[name] is not None]
    alone = {**args, **{name: args[name].clone() for name in sides}}
    run(Emulator(), **args)
    alone |= {"heads": 0, "qkv": args["qkv"][:, shape.heads * shape.dim :].contiguous()}
    assert run(Emulator(), **alone).shape == (shape.tokens, 0, shape.dim)
    for name in sides:
        assert torch.equal(alone[name].view(torch.uint8), args[name].view(torch.uint8)), name


def test_without_norm_and_rope_everything_is_copied() -> None:
    args = make(SHAPES[7], BF16, BF16, norm=False)
    q = run(Emulator(), **args)
    qkv = args["qkv"].view(4, 4, 64)
    assert torch.equal(q, qkv[:, :2])
    assert torch.equal(args["k_cache"].flatten(0, 2)[args["slots"][0]], qkv[0, 2])
    assert torch.equal(args["v_cache"].flatten(0, 2)[args["slots"][0]], qkv[0, 3])


def test_fp8_saturates_and_divides_by_its_heads_scale() -> None:
    args = make(SHAPES[0], HALF, FP8, norm=False)
    args["qkv"] = torch.full_like(args["qkv"], 300.0)
    args["k_scale"], args["v_scale"] = torch.tensor([0.5, 2.0]), torch.tensor([1.0, 300.0])
    run(Emulator(), **args)
    block, offset = divmod(int(args["slots"][0]), 16)
    assert args["v_cache"][block, :, offset].float().unique(dim=-1).flatten().tolist() == [288.0, 1.0]
    assert args["k_cache"][block, 0, offset].float().abs().max() == 448.0


def test_int8_is_what_the_cpu_keeps() -> None:
    """Ties to even, zeros, what is nearly nothing, and a NaN and an infinity, which leave no codes and a scale of NaN; on a CPU
    that is the key's, and the value's 0."""
    args = make(SHAPES[7]._replace(tokens=8), BF16, INT8, norm=False)
    rows = args["qkv"] = random(8, 4 * 64, dtype=BF16)
    rows[0] = torch.arange(256) % 128 - 64.0
    rows[1], rows[3], rows[4, 200], rows[6, 200] = 0.0, 1e-38, torch.nan, -torch.inf
    args |= {"slots": torch.arange(8) + 11, "cos": torch.empty(8, 0), "sin": torch.empty(8, 0)}
    on_cpu = [torch.zeros(shape, dtype=INT8) for shape in cpu.cache_shapes(3, 1, 64, BF16, (INT8, INT8))]
    cpu.rope_and_cache(
        rows, 2, 1, 64, None, None, None, EPS, 0.0, args["cos"], args["sin"], False, args["slots"],
        torch.arange(8, 0, -1).int(), *on_cpu,
    )  # fmt: skip
    run(Emulator(), **args)
    codes = on_cpu[1][:, 0, :-64].view(3, 8, 64, 2)
    of_keys, scales = (kept[:, 0, -64:].contiguous().view(torch.float32).flatten()[11:19] for kept in on_cpu)
    bad = torch.tensor([False] * 4 + [True, False, True, False])
    found = args["v_scale"].flatten()[11:19]
    assert torch.equal(found[~bad], scales[~bad])
    assert torch.equal(args["v_cache"].flatten(0, 2)[11:19], codes.transpose(2, 3).flatten(0, 2)[11:19])
    assert torch.equal(found.isnan(), bad)
    assert torch.equal(of_keys.isnan(), bad)
    assert not scales[bad].any()


def test_a_token_has_the_same_bits_alone() -> None:
    args = make(SHAPES[1], BF16, BF16)
    together = run(Emulator(), **args)
    alone = {name: args[name][1:2].clone() for name in ("qkv", "cos", "sin", "slots")}
    assert torch.equal(run(Emulator(), **(args | alone)), together[1:2])


def test_no_tokens_is_no_launch() -> None:
    emulator = Emulator()
    args = make(SHAPES[0]._replace(tokens=0), BF16, BF16)
    assert run(emulator, **args).shape == (0, 4, 64)
    assert not emulator.launches


def far_away() -> dict[str, Any]:
    """A cache of 4 GiB, of which only what is written takes memory; K is at the even blocks, V at the odd ones."""
    args = make(Shape(1, 2, 1, 128, 128), HALF, FP8)
    num_blocks = 2**32 // (16 * 128) + 4
    try:
        memory = cpu.zeros((num_blocks + 1) * 16 * 128, torch.uint8).view(FP8).view(num_blocks + 1, 1, 16, 128)
    except OSError:
        pytest.skip("no address space of 4 GiB")
    args |= {"k_cache": memory[:-1], "v_cache": memory[1:], "slots": torch.tensor([16 * (num_blocks - 2) + 5])}
    return args


def check_far_away(emulator: Emulator) -> None:
    args = far_away()
    small = make(Shape(1, 2, 1, 128, 128), HALF, FP8)
    small |= {name: value for name, value in args.items() if name not in ("k_cache", "v_cache", "slots")}
    small["slots"] = torch.tensor([5])
    run(Emulator(), **small)
    run(emulator, **args)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(args[name][-2, :, 5].view(torch.uint8), small[name][0, :, 5].view(torch.uint8))


def test_a_slot_past_four_billion_elements() -> None:
    check_far_away(Emulator())


def fails(run: Callable[[], None]) -> bool:
    try:
        run()
    except (AssertionError, KernelFailed):
        return True
    return False


@pytest.mark.parametrize("bug", ["UNMASKED_TAIL", "PAGE"])
def test_planted_bugs_are_found(bug: str) -> None:
    shape = {"UNMASKED_TAIL": Shape(4, 3, 1, 17, 16), "PAGE": Shape(24, 2, 1, 64, 64, num_blocks=4)}[bug]

    def check_with(order: int, bugs: tuple[str, ...]) -> None:
        check(make(shape, BF16, BF16) | {"slots": torch.arange(shape.tokens) + 7}, Emulator(order, bugs=bugs))

    assert any(fails(lambda order=order: check_with(order, (bug,))) for order in ORDERS)
    assert not fails(lambda: check_with(0, ()))


def test_an_overflow_of_32_bits_is_found() -> None:
    assert fails(lambda: check_far_away(Emulator(bugs=("INT32",))))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qkv", lambda t: t.float()),
        ("qkv", lambda t: t.T.contiguous().T),
        ("qkv", lambda t: t[:, 1:].contiguous()),
        ("q_norm", lambda t: t[1:].clone()),
        ("k_norm", lambda t: t.half()),
        ("v_norm", lambda t: t[::2]),
        ("shared", lambda _: True),
        ("cos", lambda t: t.double()),
        ("sin", lambda t: t[:, 1:].contiguous()),
        ("slots", lambda t: t.int()),
        ("k_cache", lambda t: t.transpose(1, 2)),
        ("k_cache", lambda t: t[:, :, :12].contiguous()),
        ("v_cache", lambda t: t.half()),
        ("v_cache", lambda t: t[1:].clone()),
        ("k_scale", lambda _: torch.ones(2)),
    ],
)
def test_what_the_kernel_would_misread_is_refused(name: str, change: Any) -> None:
    args = make(SHAPES[0], BF16, BF16)
    args[name] = change(args[name])
    with pytest.raises((AssertionError, KeyError)):
        run(Emulator(), **args)


def test_fp8_needs_scales_of_its_heads() -> None:
    for wrong in (None, torch.ones(3), torch.ones(2, dtype=HALF)):
        with pytest.raises(AssertionError):
            run(Emulator(), **(make(SHAPES[0], HALF, FP8) | {"k_scale": wrong}))


def test_heads_past_the_limit_are_an_error_that_says_so() -> None:
    with pytest.raises(UnsupportedError, match="513 dims"):
        run(Emulator(), **make(Shape(1, 1, 1, 513, 0), BF16, BF16))


# ---- tables ----

POSITIONS = torch.tensor([0, 1, 2, 31, 4095, 131071, 999_983, 1_000_000, 2**24 + 1])
# CUDA's sincosf may be two places away from the right rounding (its programming guide, mathematical functions).
FURTHER = 3 if on_gpu.ENABLED else 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("half", [1, 8, 25, 64, 255])
def test_tables_are_a_last_place_from_float64(half: int, order: int) -> None:
    frequencies = 1.0 / 500_000.0 ** (torch.arange(half).float() / half)
    cos, sin = rope_tables.rope_tables(Emulator(order), POSITIONS, frequencies, 1.25)
    angles = (POSITIONS.float()[:, None] * frequencies).double()
    for got, expected in ((cos, angles.cos() * 1.25), (sin, angles.sin() * 1.25)):
        assert (got.double() - expected).abs().max() <= FURTHER * 2.0**-23
    for got, expected in zip((cos, sin), reference.rope_tables(POSITIONS, frequencies, 1.25), strict=True):
        assert (got - expected).abs().max() <= FURTHER * 2.0**-23


def test_tokens_of_long_sequences_take_the_long_frequencies() -> None:
    short, long = 1.0 / torch.arange(1, 17), 1.0 / torch.arange(17, 33)
    lengths = torch.tensor([4096, 4097, 1, 5000, 4096, 200_000, 10, 2**40, 4096])
    cos, sin = rope_tables.rope_tables(Emulator(), POSITIONS, short, 1.0, lengths, long, 4096)
    for i, (position, length) in enumerate(zip(POSITIONS, lengths, strict=True)):
        angles = (position.float() * (long if length > 4096 else short)).double()
        assert (cos[i] - angles.cos()).abs().max() <= FURTHER * 2.0**-24
        assert (sin[i] - angles.sin()).abs().max() <= FURTHER * 2.0**-24
    expected = reference.rope_tables(POSITIONS, short, 1.0, lengths, long, 4096)
    assert all((got - wanted).abs().max() <= FURTHER * 2.0**-23 for got, wanted in zip((cos, sin), expected, strict=True))


def test_tables_of_nothing() -> None:
    emulator = Emulator()
    cos, sin = rope_tables.rope_tables(emulator, POSITIONS, torch.empty(0), 1.0)
    assert cos.shape == sin.shape == (9, 0)
    assert not emulator.launches


@pytest.mark.parametrize(
    "bad",
    [
        (POSITIONS.int(), torch.ones(4), 1.0),
        (POSITIONS, torch.ones(4).double(), 1.0),
        (POSITIONS, torch.ones(8)[::2], 1.0),
        (POSITIONS, torch.ones(4), 1.0, POSITIONS[:2], torch.ones(4)),
        (POSITIONS, torch.ones(4), 1.0, POSITIONS, torch.ones(3)),
        (POSITIONS, torch.ones(4), 1.0, POSITIONS),
    ],
    ids=["type of positions", "type", "strides", "lengths", "long", "one of two"],
)
def test_tables_refuse_what_they_would_misread(bad: Any) -> None:
    with pytest.raises(AssertionError):
        rope_tables.rope_tables(Emulator(), *bad)
