"""gemv.cu, packed_gemv.cu, scaled_gemv.cu and block_gemv.cu with the tasks of a mixture of experts, emulated: a row of a task is
what the same kernel makes of it alone, and what float64 says."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from emulation.compare import GENERATOR, close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from emulation.quantized import quantized
from nanovllm_cli.kernels import block_gemv, gemm, gemv, packed_gemv, reference, scaled_gemv
from nanovllm_cli.kernels.experts import FEW_ROWS, MANY_ROWS, Tasks
from nanovllm_cli.quant.format import Format, Fp8, Integer, Nf4
from test_kernel_block_gemv import product as rounded_product
from test_kernel_block_gemv import weights as block_weights
from test_kernel_experts import task_words
from test_kernel_scaled import scaled, values

pytestmark = needs_emulation
BF16, FP16 = torch.bfloat16, torch.float16
Product = Callable[..., torch.Tensor]


class Expert(NamedTuple):
    """tensors: as kernels take their addresses. alone(x, bias, activation): the kernel without tasks. exact(x): float64."""

    tensors: list[torch.Tensor | None]
    bias: torch.Tensor | None
    alone: Product
    exact: Callable[[torch.Tensor], torch.Tensor]


class Kind(NamedTuple):
    """expert(N, K) makes one; product(launcher, x, first expert's weight, tasks, matrix, activation) takes tasks of `rows`."""

    expert: Callable[[int, int], tuple[object, Expert]]
    product: Product
    dtype: torch.dtype = BF16
    rows: int = FEW_ROWS


def dense(dtype: torch.dtype) -> Kind:
    def expert(outputs: int, width: int) -> tuple[object, Expert]:
        weight, bias = random(outputs, width, dtype=dtype, scale=width**-0.5), random(outputs, dtype=dtype)

        def alone(x: torch.Tensor, activation: str | None) -> torch.Tensor:
            return gemv.gemv(Emulator(), x, weight, bias, activation=activation)

        return weight, Expert([weight, None, None], bias, alone, lambda x: x.double() @ weight.double().T + bias.double())

    return Kind(expert, gemv.expert_gemv, dtype)


def packed(form: Format) -> Kind:
    def expert(outputs: int, width: int) -> tuple[object, Expert]:
        weight, meant = quantized(form, outputs, width)
        bias = random(outputs, dtype=BF16)

        def alone(x: torch.Tensor, activation: str | None) -> torch.Tensor:
            return packed_gemv.packed_gemv(Emulator(), x, weight, bias, activation=activation)

        tensors = [weight.codes, weight.scales, weight.zeros]
        return weight, Expert(tensors, bias, alone, lambda x: x.double() @ meant.T + bias.double())

    return Kind(expert, packed_gemv.expert_gemv)


def blocks(name: str) -> Kind:
    def expert(outputs: int, width: int) -> tuple[object, Expert]:
        weight, meant = block_weights(name, outputs, width, int(torch.randint(99, (), generator=GENERATOR)))
        group, bias = weight.layout.group, random(outputs, dtype=BF16)

        def alone(x: torch.Tensor, activation: str | None) -> torch.Tensor:
            return block_gemv.block_gemv(Emulator(), x, weight, bias, activation=activation)

        exact = lambda x: rounded_product(x, meant, group) + bias.double()
        return weight, Expert([weight.data, None, None], bias, alone, exact)

    return Kind(expert, block_gemv.expert_gemv)


KINDS = {
    "bf16": dense(BF16), "fp16": dense(FP16), "int8": packed(Integer(8)), "int4 zeros": packed(Integer(4, 32, zeros=True)),
    "nf4": packed(Nf4()), "fp8 blocks": packed(Fp8(128)),
    "Q4_K": blocks("Q4_K"), "Q6_K": blocks("Q6_K"), "MXFP4": blocks("MXFP4"),
}  # fmt: skip
# tokens, experts, taken, outputs, width: one token, tasks of one row and full ones, several of an expert, experts without any
SHAPES = [(1, 5, 2, 32, 256), (3, 4, 3, 33, 256), (9, 2, 1, 48, 512), (21, 3, 2, 32, 256)]


def choose(tokens: int, experts: int, taken: int) -> torch.Tensor:
    """[T, taken], ascending; nobody takes expert 1, where there are others enough."""
    able = [e for e in range(experts) if e != 1 or experts == taken]
    orders = [torch.randperm(len(able), generator=GENERATOR)[:taken] for _ in range(tokens)]
    return torch.tensor(able)[torch.stack(orders)].sort(-1).values


def tasks_of(chosen: torch.Tensor, first: list[Expert], second: list[Expert], rows: int = FEW_ROWS) -> Tasks:
    """As route.cu makes them."""
    matrices = [
        [0 if t is None else t.data_ptr() for side in both for t in (*side.tensors, side.bias)]
        for both in zip(first, second, strict=True)
    ]
    return Tasks(task_words(chosen, torch.tensor(matrices), rows), *chosen.shape, len(first), rows)


def reachable(experts: list[Expert]) -> list[torch.Tensor]:
    return [tensor for expert in experts for tensor in (*expert.tensors, expert.bias) if tensor is not None]


def run(
    kind: Kind, shape: tuple[int, int, int, int, int], matrix: int, activation: str | None, emulator: Emulator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What tasks give, what each pair's row gives alone, and that in float64."""
    tokens, experts, taken, outputs, width = shape
    made = [kind.expert(outputs, width) for _ in range(experts)]
    own, others = [expert for _, expert in made], [expert for _, expert in reversed(made)]
    chosen = choose(tokens, experts, taken)
    tasks = tasks_of(chosen, own, others, kind.rows) if matrix == 0 else tasks_of(chosen, others, own, kind.rows)
    emulator.by_address = reachable(own)
    x = random(tasks.num_pairs, width, dtype=kind.dtype)[: tasks.num_pairs if matrix else tokens]
    got = kind.product(emulator, x, made[0][0], tasks, matrix, activation=activation)
    rows = x if matrix else x.repeat_interleave(taken, 0)
    takers = [(row[None], own[e]) for row, e in zip(rows, chosen.flatten().tolist(), strict=True)]
    alone = torch.cat([expert.alone(row, activation) for row, expert in takers])
    return got, alone, torch.cat([expert.exact(row) for row, expert in takers])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_multiplied_by_its_experts_matrix(kind: str, shape: tuple[int, int, int, int, int], order: int) -> None:
    """The second one, whose rows are pairs."""
    got, alone, exact = run(KINDS[kind], shape, 1, None, Emulator(order))
    assert torch.equal(got, alone)
    close_to_rounding(got, exact)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bf16", "int8", "int4 zeros", "fp8 blocks", "Q4_K", "MXFP4"])
def test_a_token_meets_the_gates_and_ups_of_its_experts(kind: str, shape: tuple[int, int, int, int, int]) -> None:
    """The first one, whose rows are tokens. Where a gate ends within a tile, the activation is a kernel of its own."""
    tokens, experts, taken, outputs, width = shape
    got, alone, exact = run(KINDS[kind], (tokens, experts, taken, 2 * outputs, width), 0, "silu", Emulator())
    assert got.shape == (tokens * taken, outputs)
    assert torch.equal(got, alone)
    expected = reference.gated_activation(exact.to(KINDS[kind].dtype), "silu").double()
    assert (got.double() - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.parametrize("matrix", [0, 1])
@pytest.mark.parametrize(("kind", "width"), [("bf16", 40), ("fp16", 65), ("bf16", 2056), ("int8", 65), ("int8", 200)])
def test_rows_of_any_width(kind: str, width: int, matrix: int) -> None:
    got, alone, exact = run(KINDS[kind], (11, 3, 2, 50, width), matrix, None, Emulator())
    assert torch.equal(got, alone)
    close_to_rounding(got, exact)


@pytest.mark.parametrize("kind", ["bf16", "MXFP4"])
def test_the_activation_of_gpt_oss(kind: str) -> None:
    got, alone, _ = run(KINDS[kind], (5, 3, 2, 64, 256), 0, "swiglu_oai", Emulator())
    assert torch.equal(got, alone)


@pytest.mark.parametrize("kind", ["bf16", "int4 zeros", "Q4_K"])
def test_experts_without_a_gate(kind: str) -> None:
    """Whatever the rows of their first matrices are a multiple of."""
    shape = (11, 3, 2, 49, 256)
    got, alone, exact = run(KINDS[kind], shape, 0, "relu2", Emulator())
    assert got.shape == (22, 49)
    assert torch.equal(got, alone)
    expected = reference.gated_activation(exact.to(KINDS[kind].dtype), "relu2").double()
    assert (got.double() - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("matrix", [0, 1])
@pytest.mark.parametrize(("code", "groups"), [(torch.int8, 1), (torch.float8_e4m3fn, 1), (torch.float8_e4m3fn, 2)])
def test_rows_of_eight_bits(code: torch.dtype, groups: int, matrix: int, order: int) -> None:
    outputs, width = 48, 256
    for tokens, count, taken in [(1, 5, 2), (3, 4, 3), (21, 3, 2)]:
        weights = [scaled(outputs, width, code, groups) for _ in range(count)]
        biases = [random(outputs, dtype=BF16) for _ in range(count)]
        nothing = Expert([None] * 3, None, lambda x, _: x, lambda x: x)
        own = [nothing._replace(tensors=[*w, None], bias=b) for w, b in zip(weights, biases, strict=True)]
        chosen = choose(tokens, count, taken)
        tasks = tasks_of(chosen, *((own, [nothing] * count) if matrix == 0 else ([nothing] * count, own)))
        x = scaled(tasks.num_pairs if matrix else tokens, width, code, groups)
        emulator = Emulator(order)
        emulator.by_address = reachable(own)
        got = scaled_gemv.expert_gemv(emulator, x, weights[0], tasks, matrix, dtype=BF16)
        for pair, e in enumerate(chosen.flatten().tolist()):
            row = pair if matrix else pair // taken
            alone = type(x)(x.codes[row : row + 1], x.scales[:, row : row + 1].contiguous())
            plain = scaled_gemv.scaled_gemv(Emulator(), alone, weights[e], biases[e], dtype=BF16)
            assert torch.equal(got[pair : pair + 1], plain)
            close_to_rounding(got[pair], values(alone)[0] @ values(weights[e]).T + biases[e].double())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("matrix", [0, 1])
@pytest.mark.parametrize(
    ("shape", "dtype", "capability"),
    [
        ((1, 5, 2, 32, 256), BF16, 90), ((3, 4, 3, 33, 72), BF16, 90), ((70, 3, 1, 70, 64), FP16, 75),
        ((131, 2, 2, 17, 96), BF16, 80), ((67, 3, 2, 150, 136), FP16, 90), ((21, 3, 2, 128, 1), BF16, 90),
        ((64, 1, 1, 8, 65), FP16, 90), ((5, 2, 1, 260, 520), BF16, 90),
    ],
)  # fmt: skip
def test_many_rows_of_a_task(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, capability: int, matrix: int, order: int
) -> None:
    def expert(outputs: int, width: int) -> tuple[object, Expert]:
        weight, plain = dense(dtype).expert(outputs, width)
        return weight, plain._replace(alone=lambda x, _: gemm.gemm(Emulator(), x, weight, plain.bias))

    def product(emulator: Emulator, x: torch.Tensor, weight: torch.Tensor, tasks: Tasks, matrix: int, **_: None) -> torch.Tensor:
        return gemm.expert_gemm(emulator, x, weight, tasks, matrix)

    kind = Kind(expert, product, dtype, MANY_ROWS)
    got, alone, exact = run(kind, shape, matrix, None, Emulator(order, capability))
    assert torch.equal(got, alone)
    close_to_rounding(got, exact)


def test_blocks_of_a_task_divide_its_tiles() -> None:
    """On a GPU with room for all of them, and on one where a block has many."""
    for num_multiprocessors in (1, 5, 132):
        got, alone, _ = run(KINDS["bf16"], (3, 4, 3, 700, 40), 1, None, Emulator(num_multiprocessors=num_multiprocessors))
        close_to_rounding(got, alone.double())


@pytest.mark.parametrize("bug", ["ROW_OF_PAIR", "FIRST_MATRIX"])
def test_planted_bugs_are_seen(bug: str) -> None:
    for order in ORDERS:
        try:
            for matrix in (0, 1):
                got, alone, _ = run(KINDS["bf16"], (9, 3, 2, 32, 64), matrix, None, Emulator(order, bugs=(bug,)))
                assert torch.equal(got, alone)
        except (AssertionError, KernelFailed) as failure:
            if "does not compile" in str(failure):
                raise
            return
    pytest.fail("not seen")
