"""latent_attention.cu and latent_combine.cu, emulated, against the formula in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from emulation.compare import random
from emulation.emulator import ORDERS, Emulator, KernelFailed, missing_ptx, needs_emulation
from nanovllm_cli.kernels import cpu, reference
from nanovllm_cli.kernels import latent_attention as kernels
from nanovllm_cli.kernels.latent_attention import LatentScratch, LatentShape, groups_of, latent_attention, tiling
from ptx.device import PtxMachine

pytestmark = needs_emulation
BF16, HALF, FP8, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
TYPES = [(BF16, BF16), (HALF, FP8)]
LENS = [1, 15, 0, 16, 33, 130, 321]


@dataclass
class Step:
    """Tokens over a cache of which all that none of them sees is NaN, or has a scale of NaN. lens: of each token. sequences: its
    table, or None."""

    shape: LatentShape
    rows: torch.Tensor
    cache: torch.Tensor
    tables: torch.Tensor
    lens: torch.Tensor
    kv_scale: torch.Tensor | None = None
    sequences: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    scale: float = 0.1
    sinks: torch.Tensor | None = None

    def scratch(self, emulator: Emulator, most: int | None = None, fixed: bool = False) -> LatentScratch:
        keys = self.tables.shape[1] * self.cache.shape[2]
        made = LatentScratch(emulator, self.shape, self.cache.dtype, most or len(self.lens), keys, fixed)
        made.partials.fill_(torch.nan)
        made.sums.fill_(torch.nan)
        return made

    def run(self, emulator: Emulator, scratch: LatentScratch | None = None) -> torch.Tensor:
        return latent_attention(
            emulator, self.rows, self.shape, self.cache, self.tables, self.lens, scratch or self.scratch(emulator), self.scale,
            kv_scale=self.kv_scale, sequences=self.sequences, groups=self.groups, sinks=self.sinks,
        )  # fmt: skip

    def as_tokens(self, counts: list[int], padding: int = 0) -> Step:
        """The last tokens of each sequence, so many, as rows of their own; behind them rows of padding."""
        lens = [n - count + 1 + i for n, count in zip(self.lens.tolist(), counts, strict=True) for i in range(count)]
        numbers = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return replace(
            self,
            rows=random(len(lens) + padding, self.rows.shape[1], dtype=self.rows.dtype),
            lens=torch.tensor(lens + [0] * padding, dtype=torch.int32),
            sequences=torch.cat([numbers, torch.zeros(padding)]).int(),
        )

    def in_groups(self, counts: list[int], emulator: Emulator) -> Step:
        """The same tokens in groups, as the host divides them."""
        starts = torch.tensor([0, *counts]).cumsum(0).numpy()
        together = kernels.tokens_of_group(emulator.capability, self.shape, self.cache.dtype)
        last = self.lens[torch.tensor(counts).cumsum(0) - 1].numpy()
        return replace(self, groups=groups_of(starts, last, together))

    def alone(self, row: int, width: int) -> Step:
        """One token, with a table of another width."""
        table = self.tables[int(self.sequences[row]) if self.sequences is not None else row]
        tables = torch.zeros(1, width, dtype=torch.int32)
        columns = min(width, len(table))
        tables[0, :columns] = table[:columns]
        return replace(self, rows=self.rows[row : row + 1], lens=self.lens[row : row + 1], tables=tables, sequences=None)

    def keys(self, row: int) -> torch.Tensor:
        """Float64 [keys that the token sees, rotary + rank], one by one."""
        size = self.cache.shape[2]
        table = self.tables[row if self.sequences is None else int(self.sequences[row])].tolist()
        found = [self.cache[table[i // size], 0, i % size] for i in range(int(self.lens[row]))]
        if self.cache.dtype == INT8:
            assert self.kv_scale is not None
            scales = [self.kv_scale[table[i // size], 0, i % size] for i in range(len(found))]
            return torch.stack(found).double() * torch.stack(scales).double()[:, None]
        return torch.stack(found).double() * (1.0 if self.kv_scale is None else self.kv_scale.double())

    def check(self, got: torch.Tensor) -> None:
        """One rounding of the output; before it each weight is rounded to the same type, as what they sum is, and what int8
        becomes, which moves scores."""
        heads, rotary, rank = self.shape
        step = 2.0**-8 if got.dtype == BF16 else 2.0**-11
        assert got.shape == (len(self.rows), heads * rank)
        for row, found in enumerate(got.double().view(-1, heads, rank)):
            if self.lens[row] == 0:
                assert not found.any()
                continue
            keys = self.keys(row)
            scores = self.rows[row].double().view(heads, -1) @ keys.T * self.scale
            sinks = torch.empty(heads, 0) if self.sinks is None else self.sinks[:, None]
            weights = torch.softmax(torch.cat([scores, sinks.double()], 1), 1)[:, : len(keys)]
            wanted, size = weights @ keys[:, rotary:], weights @ keys[:, rotary:].abs() * (3 if self.cache.dtype == INT8 else 1)
            wrong = ~((found - wanted).abs() <= step * (wanted.abs() + size) + 2e-5 * size)
            assert not wrong.any(), f"token {row}: {int(wrong.sum())} differ, first at {wrong.nonzero()[0].tolist()}"


def step(
    shape: tuple[int, int, int],
    types: tuple[torch.dtype, torch.dtype] = (BF16, BF16),
    lens: list[int] = LENS,
    block_size: int = 16,
    width: int | None = None,
) -> Step:
    """A step of decodes. Tables are shuffled; width is that of the longest sequence and one more."""
    heads, rotary, rank = shape
    needed = [-(-length // block_size) for length in lens]
    order = (torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(5)) + 1).tolist()
    tables = torch.zeros(len(lens), width or max(needed) + 1, dtype=torch.int32)
    filled = 99 if types[1] == INT8 else torch.nan
    cache = torch.full((len(order) + 1, 1, block_size, rotary + rank), filled).to(types[1])
    kv_scale = torch.tensor([0.7]) if types[1] == FP8 else None
    of_rows = torch.full(cache.shape[:3], torch.nan)
    for row, length in enumerate(lens):
        for i in range(needed[row]):
            tables[row, i] = order.pop()
        for token in range(length):
            kept, place = random(rotary + rank), (tables[row, token // block_size], 0, token % block_size)
            if types[1] == INT8:
                kept, of_rows[place] = reference.int8_rows(kept * 10 ** (0.2 * random(1)))
            cache[place] = kept.to(types[1])
    kv_scale = of_rows if types[1] == INT8 else kv_scale
    rows = random(len(lens), heads * (rotary + rank), dtype=types[0])
    return Step(LatentShape(*shape), rows, cache, tables, torch.tensor(lens, dtype=torch.int32), kv_scale)


STEPS = {
    "16 heads": lambda: step((16, 64, 512), lens=[1, 0, 70, 33]),
    "20 heads": lambda: step((20, 64, 512), lens=[40, 3]),
    "128 heads": lambda: step((128, 64, 512), lens=[67]),
    "3 heads, half": lambda: step((3, 16, 48), (HALF, HALF)),
    "17 heads of 8 and 16": lambda: step((17, 8, 16)),
    "70 heads, blocks of 64": lambda: step((70, 24, 80), block_size=64),
    "33 heads, rank of 272": lambda: step((33, 64, 272), (HALF, HALF), [130, 64, 0, 65]),
    "rank of 256, fp8": lambda: step((16, 64, 256), (BF16, FP8), [130, 64, 0, 65]),
    "5 heads, half, fp8, blocks of 32": lambda: step((5, 16, 48), (HALF, FP8), block_size=32),
    "40 heads, int8": lambda: step((40, 32, 96), (BF16, INT8)),
    "40 heads, fp8": lambda: step((40, 32, 96), (BF16, FP8)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", STEPS)
def test_each_row_is_a_rounding_from_float64(name: str, order: int) -> None:
    inputs, emulator = STEPS[name](), Emulator(order)
    inputs.check(inputs.run(emulator))
    assert emulator.launches["latent_attention"] == 1


@pytest.mark.parametrize("capability", [80, 86, 120])
def test_gpus_with_less_shared_memory_take_fewer_rows(capability: int) -> None:
    for name in ("128 heads", "40 heads, fp8", "20 heads"):
        inputs = STEPS[name]()
        inputs.check(inputs.run(Emulator(capability=capability)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("types", [*TYPES, (HALF, INT8)], ids=["bf16", "fp8", "int8"])
def test_many_splits_are_added_up_and_scratch_may_be_used_again(
    types: tuple[torch.dtype, torch.dtype], order: int
) -> None:
    inputs, emulator = step((18, 16, 48), types), Emulator(order, num_multiprocessors=132)
    scratch = inputs.scratch(emulator)
    for _ in range(2):
        inputs.check(inputs.run(emulator, scratch))
        inputs.rows.neg_()
    assert emulator.launches["latent_combine"] == 2


COUNTS = [3, 1, 34, 2]


def tokens(shape: tuple[int, int, int], types: tuple[torch.dtype, torch.dtype] = (BF16, BF16), padding: int = 0) -> Step:
    """All of a prompt's, a decode, the end of a chunk, and two of a long sequence."""
    return step(shape, types, [3, 65, 129, 321]).as_tokens(COUNTS, padding)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("types", TYPES, ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [3, 16, 40])
def test_tokens_of_prompts_may_be_rows_of_their_own(
    heads: int, types: tuple[torch.dtype, torch.dtype], order: int
) -> None:
    inputs = tokens((heads, 16, 48), types, padding=2)
    inputs.check(inputs.run(Emulator(order, num_multiprocessors=64)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("types", TYPES, ids=["bf16", "fp8"])
@pytest.mark.parametrize(("heads", "together", "splits"), [(3, 21, 4), (16, 4, 4), (20, 3, 1), (40, 1, 4)])
def test_tokens_of_a_sequence_may_share_what_is_read(
    heads: int, together: int, splits: int, types: tuple[torch.dtype, torch.dtype], order: int
) -> None:
    emulator = Emulator(order, num_multiprocessors=64 if splits > 1 else 1)
    inputs = tokens((heads, 16, 48), types).in_groups(COUNTS, emulator)
    assert kernels.tokens_of_group(90, inputs.shape, types[1]) == together
    inputs.check(inputs.run(emulator, inputs.scratch(emulator, 40)))
    assert ("latent_combine" in emulator.launches) == (splits > 1)


def with_sinks(inputs: Step) -> Step:
    return replace(inputs, sinks=random(inputs.shape.heads, scale=3.0))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("types", TYPES, ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [3, 20, 40])
def test_sinks_take_part_in_the_sums(heads: int, types: tuple[torch.dtype, torch.dtype], order: int) -> None:
    """Once, of any number of splits, and of tokens that share what they read."""
    emulator = Emulator(order)
    decodes = with_sinks(step((heads, 16, 48), types))
    decodes.check(decodes.run(emulator))
    counts = [5, 1, 2]
    inputs = with_sinks(step((heads, 16, 48), types, [130, 37, 90])).as_tokens(counts)
    inputs.check(inputs.run(emulator))
    inputs = inputs.in_groups(counts, emulator)
    inputs.check(inputs.run(emulator))


def test_a_sink_of_each_lane_is_found() -> None:
    inputs = with_sinks(step((3, 16, 48)))
    with pytest.raises(AssertionError):
        inputs.check(inputs.run(Emulator(bugs=("SINKS",))))


def test_groups_have_every_token_once_the_longest_first() -> None:
    groups = groups_of(torch.tensor([0, 3, 4, 11]).numpy(), torch.tensor([3, 65, 129]).numpy(), 3)
    assert groups.tolist() == [[10, 1, 129, 2], [7, 3, 126, 2], [4, 3, 123, 2], [3, 1, 65, 1], [0, 3, 1, 0]]


@pytest.mark.parametrize("most", [4, 128], ids=["longer splits", "splits"])
@pytest.mark.parametrize("types", TYPES, ids=["bf16", "fp8"])
def test_with_fixed_splits_a_tokens_bits_are_its_own(
    types: tuple[torch.dtype, torch.dtype], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any batch, with any table, on any GPU, decoded or in a prompt; also where the scratch takes several launches."""
    monkeypatch.setattr(kernels, "FIXED_SPLIT", 64)
    monkeypatch.setattr(kernels, "MAX_SPLITS", most)
    inputs = tokens((18, 16, 48), types, padding=2)
    emulator = Emulator(num_multiprocessors=132)
    expected = inputs.run(emulator, inputs.scratch(emulator, fixed=True))
    inputs.check(expected)
    for row in (0, 3, 5, 37, 38):
        width = -(-int(inputs.lens[row]) // 16)
        for more, multiprocessors in ((0, 4), (3, 300)):
            alone, emulator = inputs.alone(row, width + more), Emulator(7, 90, multiprocessors)
            got = alone.run(emulator, alone.scratch(emulator, fixed=True))
            assert torch.equal(got, expected[row : row + 1])
    emulator = Emulator()
    assert torch.equal(inputs.run(emulator, inputs.scratch(emulator, 1, fixed=True)), expected)
    assert emulator.launches["latent_attention"] > 2


def test_every_number_of_splits_covers_every_key_once() -> None:
    inputs = step((2, 16, 48), lens=[1, 63, 64, 65, 300, 517])
    for multiprocessors in (1, 5, 7, 10, 13, 24, 40):
        inputs.check(inputs.run(Emulator(num_multiprocessors=multiprocessors)))


def far_step() -> Step:
    """Two sequences, one of which has its rows beyond 2^31 elements into the cache."""
    inputs = step((3, 16, 48), (BF16, FP8), [20, 20])
    num_blocks = 2**31 // (16 * 64) + 4
    cache = cpu.zeros(num_blocks * 16 * 64, torch.uint8).view(FP8).view(num_blocks, 1, 16, 64)
    cache[: len(inputs.cache)] = inputs.cache.view(torch.uint8).view(FP8)
    for i in range(2):
        cache[num_blocks - 2 + i] = inputs.cache[inputs.tables[1, i]]
    inputs.tables[1, :2] = torch.tensor([num_blocks - 2, num_blocks - 1])
    return replace(inputs, cache=cache)


def test_caches_beyond_two_to_the_31_elements() -> None:
    inputs = far_step()
    inputs.check(inputs.run(Emulator()))


BUGS = ["NO_WAIT", "NO_BARRIER", "SCORES", "PAGE", "MASK", "BARRIER", "WARPS", "INT32"]
BUGS_AND_TYPES = [(bug, types) for bug in BUGS for types in TYPES]


@pytest.mark.parametrize(("bug", "types"), [*BUGS_AND_TYPES, ("TAIL", TYPES[0])])  # what e4m3's NaN becomes is finite
def test_planted_bugs_are_found(bug: str, types: tuple[torch.dtype, torch.dtype]) -> None:
    inputs = far_step() if bug == "INT32" else step((16, 16, 48), types, [130, 37]).as_tokens([5, 2])
    found = 0
    for order in ORDERS:
        emulator = Emulator(order, num_multiprocessors=32, bugs=(bug,))
        if bug == "MASK":
            inputs = inputs.in_groups([5, 2], emulator)
        try:
            inputs.check(inputs.run(emulator))
        except (AssertionError, KernelFailed):
            found += 1
    assert found


@pytest.mark.skipif(missing_ptx() is not None, reason=str(missing_ptx()))
@pytest.mark.parametrize("types", TYPES, ids=["bf16", "fp8"])
@pytest.mark.parametrize("bug", ["", "NO_BARRIER", "SCORES", "WEIGHTS"])
def test_missing_barriers_are_races(bug: str, types: tuple[torch.dtype, torch.dtype]) -> None:
    """On the machine that runs PTX, which knows who touched what of shared memory since the last barrier."""
    inputs, machine = step((3, 16, 48), types, [70]), PtxMachine(bugs=(bug,) if bug else ())
    if bug:
        with pytest.raises(KernelFailed):
            inputs.run(machine)
    else:
        inputs.check(inputs.run(machine))


def test_what_is_not_for_tensor_cores_has_no_tiling() -> None:
    for capability, shape, dtype in ((75, (16, 64, 512), HALF), (90, (16, 12, 512), BF16), (90, (16, 64, 40), BF16),
                                     (90, (16, 24, 512), FP8), (86, (16, 64, 1024), BF16)):  # fmt: skip
        assert tiling(capability, 16, LatentShape(*shape), dtype) is None
    hopper = [tiling(90, heads, LatentShape(heads, 64, 512), BF16) for heads in (1, 16, 20, 40, 128)]
    assert [tile and tile.rows for tile in hopper] == [16, 16, 32, 64, 64]
    ada = [tiling(89, heads, LatentShape(heads, 64, 512), BF16) for heads in (16, 128)]
    assert [tile and tile.rows for tile in ada] == [16, 16]


def test_splits_fill_the_gpu_and_no_more() -> None:
    h200, shape = Emulator(num_multiprocessors=132), LatentShape(16, 64, 512)
    scratch = LatentScratch(h200, shape, BF16, 264, 40960, False)
    wanted = {(1, 40960): 128, (1, 8192): 128, (1, 2048): 32, (32, 2048): 9, (200, 2048): 2, (264, 2048): 1, (1, 64): 1}
    for (tokens, keys), splits in wanted.items():
        assert scratch.division(h200, tokens, tokens, 16, keys)[0] == splits


def test_no_tokens_is_no_launch() -> None:
    emulator, inputs = Emulator(), step((3, 16, 48), lens=[5])
    scratch = inputs.scratch(emulator)
    none = replace(inputs, rows=inputs.rows[:0], lens=inputs.lens[:0], tables=inputs.tables[:0])
    assert none.run(emulator, scratch).shape == (0, 144)
    assert not emulator.launches
