"""Kernels that start before the one ahead of them has ended: what that one may still write is neither read nor written until they
have waited for it. Emulated with everything but weights, lengths and block tables poisoned until then."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import convolutions
import scans
import test_kernel_expert_products as expert_tests
import test_kernel_scaled as scaled_tests
import wkvs
from convolutions import Paged
from deltas import Case, Kept
from emulation.compare import random
from emulation.emulator import ORDERS, PTX, SANITIZE, Emulator, emulation_alone, load
from emulation.quantized import quantized
from nanovllm_cli.kernels.block_gemv import block_gemv
from nanovllm_cli.kernels.causal_conv import causal_conv
from nanovllm_cli.kernels.decode_attention import DecodeScratch, decode_attention
from nanovllm_cli.kernels.expert_sum import expert_sum
from nanovllm_cli.kernels.experts import MANY_ROWS
from nanovllm_cli.kernels.gated_conv import gated_conv
from nanovllm_cli.kernels.gated_delta import gated_delta
from nanovllm_cli.kernels.gemm import expert_gemm
from nanovllm_cli.kernels.gemv import gemv
from nanovllm_cli.kernels.head_matmul import MOST_FEW, CudaHeadMatrices, head_matmul
from nanovllm_cli.kernels.kernel import Arg, Kernel, Launcher
from nanovllm_cli.kernels.latent_attention import LatentScratch, LatentShape, groups_of, latent_attention
from nanovllm_cli.kernels.latent_rows import latent_rows
from nanovllm_cli.kernels.ops import Normed
from nanovllm_cli.kernels.packed_gemm import Shape, new_counters, packed_gemm
from nanovllm_cli.kernels.packed_gemv import packed_gemv
from nanovllm_cli.kernels.packed_wgmma import Plan, packed_wgmma
from nanovllm_cli.kernels.ranks import scale_ranks
from nanovllm_cli.kernels.rope_cache import Projected, rope_and_cache
from nanovllm_cli.kernels.route import route
from nanovllm_cli.kernels.scale_sums import scale_sums
from nanovllm_cli.kernels.scaled_gemv import scaled_gemv
from nanovllm_cli.kernels.selective_scan import selective_scan
from nanovllm_cli.kernels.token_shift import token_shift
from nanovllm_cli.kernels.unpack import unpack
from nanovllm_cli.kernels.wkv7 import wkv7
from nanovllm_cli.quant.format import Integer
from nanovllm_cli.state_spec import ScanSpec
from test_kernel_block_gemv import weights

pytestmark = [*emulation_alone, pytest.mark.skipif(bool(PTX or SANITIZE), reason="dependent launch is for the plain emulation")]
BF16 = torch.bfloat16
Call = Callable[[Launcher], torch.Tensor]


class Overlapping(Emulator):
    """known: what a kernel may read at once, but for the parts of it that are `fresh`."""

    def __init__(self, order: int, known: tuple[torch.Tensor, ...], fresh: tuple[torch.Tensor, ...] = ()) -> None:
        super().__init__(order, bugs=("OVERLAP",), num_multiprocessors=132)
        self.known = {tensor.data_ptr() for tensor in known}
        self.fresh = fresh

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: tuple[Arg, ...],
        shared_bytes: int = 0,
    ) -> None:
        library = load(kernel, self.bugs)
        tensors = {arg.data_ptr(): arg for arg in args if isinstance(arg, torch.Tensor) and arg.numel()}
        for tensor in (*(tensor for address, tensor in tensors.items() if address not in self.known), *self.fresh):
            assert tensor.is_contiguous()
            library.emulation_hide(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes))
        super().launch(kernel, grid, block, args, shared_bytes)
        assert not library.emulation_is_hidden(), f"{kernel} never waits"


def normed_product() -> tuple[Call, tuple[torch.Tensor, ...]]:
    x, gain, weight = random(2, 256, dtype=BF16), random(256, dtype=BF16), random(48, 256, dtype=BF16)
    return lambda launcher: gemv(launcher, Normed(x, gain, 1e-6, 0.0), weight, None), (gain, weight)


def product_and_residual() -> tuple[Call, tuple[torch.Tensor, ...]]:
    x, weight, residual = random(2, 256, dtype=BF16), random(48, 256, dtype=BF16), random(2, 48, dtype=BF16)
    return lambda launcher: gemv(launcher, x, weight, None, residual=residual.clone()), (weight,)


def rotation() -> tuple[Call, tuple[torch.Tensor, ...]]:
    qkv, gain = random(3, 4 * 64, dtype=BF16), random(64, dtype=BF16)
    cos, sin, slots = random(3, 32), random(3, 32), torch.tensor([5, -1, 17])

    def call(launcher: Launcher) -> torch.Tensor:
        caches = torch.zeros(2, 2, 1, 16, 64, dtype=BF16)
        projected = Projected(qkv, 2, 1, 64, gain, gain, gain, 1e-6, 0.0, cos, sin, False)
        q = rope_and_cache(launcher, projected, slots, caches[0], caches[1])
        return torch.cat((q.flatten(), caches.flatten()))

    return call, (gain,)


def packed_product() -> tuple[Call, tuple[torch.Tensor, ...]]:
    weight, _ = quantized(Integer(4, 128), 40, 256)
    x, gain = random(2, 256, dtype=BF16), random(256, dtype=BF16)
    return lambda launcher: packed_gemv(launcher, Normed(x, gain, 1e-6, 0.0), weight, None), (gain, weight.codes, weight.scales)


def packed_product_of_many() -> tuple[Call, tuple[torch.Tensor, ...]]:
    """Sums of several blocks meet."""
    weight, _ = quantized(Integer(4, 128), 40, 2048)
    x = random(9, 2048, dtype=BF16)

    def call(launcher: Launcher) -> torch.Tensor:
        return packed_gemm(launcher, x, weight, None, new_counters(launcher))

    return call, (weight.codes, weight.scales)


def packed_product_of_warpgroups() -> tuple[Call, tuple[torch.Tensor, ...]]:
    weight, _ = quantized(Integer(4, 128), 70, 512)
    x, residual, two_blocks = random(65, 512, dtype=BF16), random(65, 70, dtype=BF16), Plan(Shape(4, 1, 64), 2)

    def call(launcher: Launcher) -> torch.Tensor:
        return packed_wgmma(launcher, x, weight, None, new_counters(launcher), residual=residual.clone(), plan=two_blocks)

    return call, (weight.codes, weight.scales)


def product_of_blocks() -> tuple[Call, tuple[torch.Tensor, ...]]:
    weight, _ = weights("Q4_K", 40, 512)
    x, gain, residual = random(2, 512, dtype=BF16), random(512, dtype=BF16), random(2, 40, dtype=BF16)

    def call(launcher: Launcher) -> torch.Tensor:
        return block_gemv(launcher, Normed(x, gain, 1e-6, 0.0), weight, None, residual=residual.clone())

    return call, (weight.data,)


def delta(mamba: bool = False, by_channel: bool = False) -> tuple[Call, tuple[torch.Tensor, ...]]:
    """The second step of two sequences: of their cache it reads nothing at once, either."""
    kept = Kept(Case((2, 32), (4, 32), 4, [[30, 8], [5, 1]], mamba=mamba, bias=mamba, by_channel=by_channel), BF16)
    gated_delta(Emulator(), **kept.step([30, 8])[0])
    args, _ = kept.step([5, 1])
    norm = ("skip", "taps_bias") if mamba else ("norm",)
    known = ("taps", "decay", "decay_bias", *norm, "query_starts", "kv_lens", "known_lens", "state_of")

    def call(launcher: Launcher) -> torch.Tensor:
        out = gated_delta(launcher, **args)  # written elsewhere than it reads: once more is no other step
        return torch.cat([out.flatten(), kept.states.matrices.nan_to_num(7.0).flatten(), kept.states.stamps.flatten()])

    return call, tuple(args[name] for name in known)


def delta_by_channel() -> tuple[Call, tuple[torch.Tensor, ...]]:
    return delta(by_channel=True)


def state_space() -> tuple[Call, tuple[torch.Tensor, ...]]:
    return delta(mamba=True)


def selective(kernel: int) -> Callable[[], tuple[Call, tuple[torch.Tensor, ...]]]:
    """The same of a selective scan's convolution, and of the scan itself."""

    def case() -> tuple[Call, tuple[torch.Tensor, ...]]:
        plain = causal_conv, selective_scan
        kept = scans.Kept(scans.Case(ScanSpec(40, 6, 5, 4), [[30, 8], [5, 1]]), BF16)
        kept.run(**kept.step([30, 8])[0])
        kept.lens = [30, 8]
        args, _ = kept.step([5, 1])

        def call(launcher: Launcher) -> torch.Tensor:
            chosen = [launcher if i == kernel else Emulator() for i in range(2)]
            kept.kernels = tuple(partial(each, own) for each, own in zip(plain, chosen, strict=True))
            out = kept.run(**args)
            return torch.cat([out.flatten(), kept.mixed.flatten(), kept.states.matrices.nan_to_num(7.0).flatten()])

        step = tuple(args[name] for name in ("query_starts", "kv_lens", "known_lens", "state_of"))
        return call, (kept.taps, kept.taps_bias, kept.by_head, kept.rate_bias, kept.skip, *step)

    case.__name__ = ("convolution before a scan", "selective scan")[kernel]
    return case


def rwkv(kernel: int) -> Callable[[], tuple[Call, tuple[torch.Tensor, ...]]]:
    """Of a layer with RWKV-7's rule: the rows in front of it, the rule, and the rows in front of the MLP."""

    def case() -> tuple[Call, tuple[torch.Tensor, ...]]:
        kept = wkvs.Kept(wkvs.Case(2, 24, [[30, 8], [5, 1]]), BF16, Emulator())
        kept.run(**kept.step([30, 8])[0])
        kept.lens = [30, 8]
        args, _ = kept.step([5, 1])
        begun = [each.clone() for each in kept.states]

        def call(launcher: Launcher) -> torch.Tensor:
            for mine, before in zip(kept.states, begun, strict=True):
                mine.copy_(before)
            first, rule, last = (launcher if i == kernel else Emulator() for i in range(3))
            step = {name: args[name] for name in ("query_starts", "kv_lens", "known_lens", "state_of")}
            found = [
                token_shift(first, args["x"], kept.shares, wkvs.TIME, kept.states, **step),
                wkv7(rule, args["inputs"], kept.tables, wkvs.EPS, kept.states, **step),
                token_shift(last, args["y"], kept.shares[:1].contiguous(), wkvs.CHANNEL, kept.states, **step),
            ]
            return torch.cat([each.float().nan_to_num(7.0).flatten() for each in (*found, *kept.states)])

        known = tuple(args[name] for name in ("query_starts", "kv_lens", "known_lens", "state_of"))
        return call, known

    case.__name__ = ("rows before RWKV's rule", "RWKV's rule", "rows before RWKV's MLP")[kernel]
    return case


LARGE_TASKS = expert_tests.KINDS["bf16"]._replace(
    rows=MANY_ROWS, product=lambda launcher, x, weight, tasks, matrix: expert_gemm(launcher, x, weight, tasks, matrix)
)


def experts(name: str, matrix: int) -> Callable[[], tuple[Call, tuple[torch.Tensor, ...]]]:
    """The first matrix of a token's experts follows the router, which makes the tasks; at the second they are there."""

    def case() -> tuple[Call, tuple[torch.Tensor, ...]]:
        kind = expert_tests.KINDS.get(name, LARGE_TASKS)
        made = [kind.expert(32, 256) for _ in range(3)]
        own = [expert for _, expert in made]
        tasks = expert_tests.tasks_of(expert_tests.choose(9, 3, 2), own, own, kind.rows)
        x = random(18 if matrix else 9, 256, dtype=BF16)

        def call(launcher: Launcher) -> torch.Tensor:
            return kind.product(launcher, x, made[0][0], tasks, matrix)

        return call, (tasks.words,) if matrix else ()

    case.__name__ = f"matrix {matrix} of experts in {name}"
    return case


def routing() -> tuple[Call, tuple[torch.Tensor, ...]]:
    logits, matrices = random(40, 33), torch.arange(33 * 8).view(33, 8)

    def call(launcher: Launcher) -> torch.Tensor:
        tasks, weights = route(launcher, logits, matrices, 3, True)
        return torch.cat((tasks.words.flatten(), weights.view(torch.int32).flatten()))

    return call, (matrices,)


def sum_of_experts() -> tuple[Call, tuple[torch.Tensor, ...]]:
    y, weights, residual = random(6, 40, dtype=BF16), random(3, 2), random(3, 40, dtype=BF16)
    return lambda launcher: expert_sum(launcher, y, weights, residual.clone()), ()


def product_of_heads() -> tuple[Call, tuple[torch.Tensor, ...]]:
    x, weight = random(3, 2 * 160, dtype=BF16), random(2, 40, 130, dtype=BF16)

    def call(launcher: Launcher) -> torch.Tensor:
        out = torch.zeros(3, 2 * 48, dtype=BF16)
        head_matmul(launcher, x, 30, 160, weight, out, 8, 48)
        return out

    return call, (weight,)


def rows_of_latent_attention() -> tuple[Call, tuple[torch.Tensor, ...]]:
    q, kept, norm = random(3, 2 * 40, dtype=BF16), random(3, 64, dtype=BF16), random(48, dtype=BF16)
    cos, sin, slots = random(3, 8), random(3, 8), torch.tensor([5, -1, 17])

    def call(launcher: Launcher) -> torch.Tensor:
        cache = torch.zeros(2, 1, 16, 64, dtype=BF16)
        rows = latent_rows(launcher, q, kept, 2, norm, 1e-6, 0.0, cos, sin, True, slots, cache)
        return torch.cat((rows.view(3, 2, 64)[..., :16].flatten(), cache.flatten()))

    return call, ()


def attention_of_latents(kind: str) -> Callable[[], tuple[Call, tuple[torch.Tensor, ...]]]:
    """The cache was written two kernels ahead. Of the splits' sums nothing is read at once."""

    def case() -> tuple[Call, tuple[torch.Tensor, ...]]:
        shape, lens = LatentShape(3, 16, 48), torch.tensor([200, 201, 0, 300, 33], dtype=torch.int32)
        tables, numbers = torch.randperm(5 * 32).int().view(5, 32), torch.tensor([1, 1, 0, 2, 4], dtype=torch.int32)
        stored = torch.float8_e4m3fn if kind == "fp8" else BF16
        rows, cache = random(5, 3 * 64, dtype=BF16), random(5 * 32, 1, 16, 64, dtype=stored)
        groups = groups_of(torch.tensor([0, 2, 5]).numpy(), torch.tensor([201, 35]).numpy(), 2)
        options = {"sequences": numbers} if kind == "tokens" else {"groups": groups} if kind == "groups" else {}
        if kind == "fp8":
            options = {"kv_scale": torch.tensor([0.5])}

        def call(launcher: Launcher) -> torch.Tensor:
            scratch = LatentScratch(launcher, shape, stored, 5, 512)
            return latent_attention(launcher, rows, shape, cache, tables, lens, scratch, 0.125, **options)

        return call, (cache, tables, lens, *options.values())

    case.__name__ = f"latent attention, {kind}"
    return case


def codes(kind: torch.dtype) -> Callable[[], tuple[Call, tuple[torch.Tensor, ...]]]:
    """A product of codes, and what their sums are made of."""

    def case() -> tuple[Call, tuple[torch.Tensor, ...]]:
        x, weight = (scaled_tests.scaled(rows, 528, kind) for rows in (3, 48))
        sums, bias = random(3, 48), random(48, dtype=BF16)

        def call(launcher: Launcher) -> torch.Tensor:
            product = scaled_gemv(launcher, x, weight, bias, dtype=BF16)
            return torch.cat((product, scale_sums(launcher, sums, x.scales, weight.scales, bias, None, BF16, BF16)))

        return call, (*weight, bias)

    case.__name__ = f"codes of {kind}"
    return case


def gated_convolution() -> tuple[Call, tuple[torch.Tensor, ...]]:
    """Of the cache, which the last step's kernel wrote, it reads nothing at once."""
    paged = Paged(convolutions.CASES[0], BF16)
    for counts in paged.case.steps:
        args, _ = paged.step(counts)
        before = paged.cache.clone()
        gated_conv(Emulator(), **args)

    def call(launcher: Launcher) -> torch.Tensor:
        cache = before.clone()
        return torch.cat((gated_conv(launcher, **args | {"cache": cache}).flatten(), cache.nan_to_num(7.0).flatten()))

    return call, tuple(each for each in (paged.weight, paged.bias) if each is not None)


def ranks() -> tuple[Call, tuple[torch.Tensor, ...]]:
    x, scales, modules = random(3, 40), random(3, 2), torch.arange(40).int() // 20
    return lambda launcher: scale_ranks(launcher, x, scales, modules, BF16), (modules,)


def unpacked() -> tuple[Call, tuple[torch.Tensor, ...]]:
    weight, _ = quantized(Integer(4, 128), 40, 256)
    return lambda launcher: unpack(launcher, weight, 3, 30, BF16), (weight.codes, weight.scales)


CASES = (
    codes(torch.int8), codes(torch.float8_e4m3fn), gated_convolution, ranks, unpacked,
    normed_product, product_and_residual, rotation, packed_product, packed_product_of_many, packed_product_of_warpgroups,
    product_of_blocks, delta, delta_by_channel, state_space, selective(0), selective(1), rwkv(0), rwkv(1), rwkv(2),
    routing, sum_of_experts,
    product_of_heads, rows_of_latent_attention,
    *map(attention_of_latents, ("decodes", "tokens", "groups", "fp8")),
    *(experts(kind, matrix) for kind in ("bf16", "int4 zeros", "Q4_K", "large tasks") for matrix in (0, 1)),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_results_do_not_depend_on_when_the_kernel_ahead_ends(case: Callable[[], tuple[Call, tuple[torch.Tensor, ...]]]) -> None:
    call, known = case()
    expected = call(Emulator(num_multiprocessors=132))
    for order in ORDERS:
        assert torch.equal(call(Overlapping(order, known)), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lengths", [(200, 1, 300, 33, 0, 260), (0, 40, 0)])
@pytest.mark.parametrize("kind", [BF16, torch.float8_e4m3fn])
def test_attention_reads_the_cache_at_once_but_for_the_newest(kind: torch.dtype, lengths: tuple[int, ...], order: int) -> None:
    """Tokens. What lies where those will be is not used. The first block to run has old tokens alone in one order, the newest one
    in another; or none, and writes zeros."""
    count, lens = len(lengths), torch.tensor(lengths, dtype=torch.int32)
    blocks = torch.randperm(count * 32).int().view(count, 32)
    qkv, gain, k, v = random(count, 8 * 64, dtype=BF16), random(64, dtype=BF16), *random(2, count * 32, 2, 16, 64, dtype=kind)
    scales = {} if kind == BF16 else {"k_scale": torch.tensor([0.5, 0.25]), "v_scale": torch.tensor([2.0, 1.0])}
    projected = Projected(qkv, 4, 2, 64, gain, gain, gain, 1e-6, 0.0, random(count, 32), random(count, 32), False)
    newest = [(int(blocks[row, (n - 1) // 16]), (n - 1) % 16) for row, n in enumerate(lengths) if n]

    def attend(make: Callable[[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], Launcher]) -> tuple[torch.Tensor, ...]:
        caches = k.clone(), v.clone()
        fresh = tuple(cache[block, head, at] for cache in caches for block, at in newest for head in range(2))
        launcher = make((blocks, lens, gain, *scales.values(), *caches), fresh)
        scratch = DecodeScratch(launcher, count, 4, 2, 64, 512)
        found = decode_attention(launcher, projected, *caches, blocks, lens, scratch, 0.125, **scales)
        return found, *(cache.float() for cache in caches)

    expected = attend(lambda *_: Emulator(num_multiprocessors=132))
    for got, wanted in zip(attend(lambda known, fresh: Overlapping(order, known, fresh)), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dim", [64, 512])
def test_attention_over_anothers_cache(dim: int, order: int) -> None:
    """On tensor cores it reads the cache at once, which the kernel ahead has not written; else only then, and the tokens of a
    prompt are right behind their own kernel."""
    tokens, lens = dim == 512, torch.tensor([200, 201, 202, 0, 33], dtype=torch.int32)
    blocks, numbers = torch.randperm(5 * 32).int().view(5, 32), torch.tensor([2, 2, 2, 0, 4], dtype=torch.int32)
    q, gain, k, v = random(5, 4 * dim, dtype=BF16), random(dim, dtype=BF16), *random(2, 5 * 32, 2, 16, dim, dtype=BF16)
    angles = random(5, dim // 2)
    projected = Projected(q, 4, 2, dim, gain, None, None, 1e-6, 0.0, angles, angles, False, shared=True)

    def attend(launcher: Launcher) -> torch.Tensor:
        scratch, options = DecodeScratch(launcher, 5, 4, 2, dim, 512), {"sequences": numbers} if tokens else {}
        return decode_attention(launcher, projected, k, v, blocks, lens, scratch, 0.125, **options)

    known = (blocks, lens, gain, numbers) if tokens else (blocks, lens, gain, k, v)
    assert torch.equal(attend(Overlapping(order, known)), attend(Emulator(num_multiprocessors=132)))


@pytest.mark.parametrize("order", ORDERS)
def test_attention_of_latents_behind_torchs_product_reads_a_cache_that_is_there(order: int) -> None:
    """A vendor's product may let it start before what wrote the cache has ended."""

    class Behind(Overlapping):
        at_barrier = False

        def torch_op(self, function: Callable[[], object], barrier: bool = False) -> None:
            function()
            self.at_barrier |= barrier

        def launch(self, *args: Any) -> None:  # type: ignore[override]
            at_barrier, self.at_barrier = self.at_barrier, False
            Emulator.launch(self, *args) if at_barrier else super().launch(*args)

    count, shape = MOST_FEW + 1, LatentShape(3, 16, 48)
    q, weight, cache = random(count, 3 * 40, dtype=BF16), random(3, 48, 40, dtype=BF16), random(2 * 8, 1, 16, 64, dtype=BF16)
    turned, tables = random(count, 3 * 64, dtype=BF16), torch.randperm(2 * 8).int().view(2, 8)
    lens, numbers = torch.arange(1, count + 1, dtype=torch.int32), torch.arange(count, dtype=torch.int32) % 2

    def attend(launcher: Launcher) -> torch.Tensor:
        rows, matrices = turned.clone(), CudaHeadMatrices(launcher, False, 3, 48, 40, BF16)
        for head in range(3):
            matrices.load(head, weight[head])
        matrices.products_into(q, 0, 40, rows, 16, 64)
        scratch = LatentScratch(launcher, shape, BF16, count, 128)
        return latent_attention(launcher, rows, shape, cache, tables, lens, scratch, 0.125, sequences=numbers)

    expected = attend(Emulator(num_multiprocessors=132))
    assert torch.equal(attend(Behind(order, (tables, lens, numbers))), expected)


@pytest.mark.parametrize("order", ORDERS)
def test_what_touches_too_much_too_early_is_found(order: int) -> None:
    """With gains hidden, which the norm in front of a product reads at once; or a cache, some of which cp.async copies."""
    call, (_, weight) = normed_product()
    assert not torch.equal(call(Overlapping(order, (weight,))), call(Emulator(num_multiprocessors=132)))
    call, (_, tables, lens) = attention_of_latents("decodes")()
    assert not torch.equal(call(Overlapping(order, (tables, lens))), call(Emulator(num_multiprocessors=132)))
