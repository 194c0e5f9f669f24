"""Mixtures of experts: router and sum against float64, a token's bits in any batch, experts in every format and in GGUF."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numba
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import (
    Dots1Config,
    Ernie4_5_MoeConfig,
    ExaoneMoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeSWAConfig,
    HYV3Config,
    Lfm2MoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SolarOpenConfig,
)

from engines import SMALL, add_shape, engine_for, random_model, run, save, worker_for
from nanovllm_cli.bench.work import ModelWork
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import CheckpointError, UnsupportedError, UsageError
from nanovllm_cli.kernels import cpu, cpu_experts, cpu_mixture, reference, warm
from nanovllm_cli.kernels.cpu_ops import CpuOps
from nanovllm_cli.kernels.entry import Kernel
from nanovllm_cli.kernels.mixture import Groups, Mixture, Scoring
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.moe import MoE
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.planning.estimate import Speed
from nanovllm_cli.planning.plan import make_plan
from nanovllm_cli.quant.cpu_formats import make_storage
from nanovllm_cli.quant.dense import DenseStorage
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.stacked import unstacked
from quantizing import plan_of
from quantizing import quantize as quantize_model
from test_models import GRANITE, prompts
from test_models_gguf import granite as granite_keys
from test_quant_engine import difference, expected_logits, logits_of
from test_quantized_models import CASES, PROMPTS, build

EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True}
SHAPE = SMALL | {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2}
GENERATOR = torch.Generator().manual_seed(17)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def qwen(**changes: Any) -> Any:
    return random_model(Qwen3MoeConfig(**SHAPE | EXPERTS | changes))


# ---- the router and the sum ----


def routed(logits: torch.Tensor, num_chosen: int, norm_topk: bool) -> list[dict[int, float]]:
    """Expert -> weight of each row, in float64, by a sort on (-logit, number)."""
    found = []
    for row in logits.double().tolist():
        order = sorted(range(len(row)), key=lambda e: (-row[e], e))[:num_chosen]
        exps = np.exp(np.array(row) - max(row))
        found.append({e: exps[e] / (exps[order].sum() if norm_topk else exps.sum()) for e in sorted(order)})
    return found


@pytest.mark.parametrize("route", [cpu_mixture.route, reference.route])
@pytest.mark.parametrize("norm_topk", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 1, 1), (3, 5, 1), (17, 7, 7), (31, 128, 8), (200, 60, 4)])
def test_a_token_takes_the_experts_with_the_largest_logits(
    tokens: int, experts: int, chosen: int, norm_topk: bool, route: Any
) -> None:
    logits = 3 * randn(tokens, experts)
    logits[::3] = logits[::3].round()  # many equals
    places, weights = route(logits, chosen, norm_topk)
    assert (places.dtype, weights.dtype) == (torch.int64, torch.float32)
    for row, (own, shares) in enumerate(zip(places.tolist(), weights.tolist(), strict=True)):
        expected = routed(logits[row : row + 1], chosen, norm_topk)[0]
        assert own == list(expected)
        assert shares == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.parametrize("route", [cpu_mixture.route, reference.route])
@pytest.mark.parametrize("by_sigmoid", [True, False])
@pytest.mark.parametrize("norm_topk", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 1, 1), (3, 5, 1), (17, 7, 7), (31, 128, 8)])
def test_scores_are_weights_and_with_a_bias_they_choose(
    tokens: int, experts: int, chosen: int, norm_topk: bool, by_sigmoid: bool, route: Any
) -> None:
    logits, bias = 5 * randn(tokens, experts), 0.3 * randn(experts)
    places, weights = route(logits, chosen, norm_topk, Scoring(by_sigmoid, bias, 1.5))
    exps = np.exp(logits.double().numpy())
    scores = exps / (1 + exps) if by_sigmoid else exps / exps.sum(1, keepdims=True)
    order = np.sort(np.argsort(-(scores + bias.double().numpy()), axis=1)[:, :chosen], axis=1)
    assert places.tolist() == order.tolist()
    taken = np.take_along_axis(scores, order, 1)
    expected = 1.5 * (taken / taken.sum(1, keepdims=True) if norm_topk else taken)
    assert np.allclose(weights.numpy(), expected, rtol=1e-5)
    if by_sigmoid:
        others, _ = route(logits, chosen, norm_topk, Scoring(True, 9 * bias, by_logit=True))
        wanted = np.argsort(-(logits + 9 * bias).numpy(), axis=1)[:, :chosen]
        assert others.tolist() == np.sort(wanted, axis=1).tolist()
    own = 0.5 + torch.rand(experts)
    again, scaled = route(logits, chosen, norm_topk, Scoring(by_sigmoid, bias, 1.5, own))
    assert torch.equal(again, places)
    assert np.allclose(scaled.numpy(), expected * own.numpy()[order], rtol=1e-5)


@pytest.mark.parametrize("route", [cpu_mixture.route, reference.route])
@pytest.mark.parametrize("by_sigmoid", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "groups", "looked_at"),
    [(1, 4, 1, 2, 1), (5, 12, 3, 3, 2), (17, 12, 4, 6, 2), (9, 256, 8, 8, 4), (3, 10, 10, 5, 5)],
)
def test_experts_of_groups_that_are_not_looked_at_are_not_taken(
    tokens: int, experts: int, chosen: int, groups: int, looked_at: int, by_sigmoid: bool, route: Any
) -> None:
    logits, bias = 5 * randn(tokens, experts), 0.3 * randn(experts)
    best = 2 if by_sigmoid else 1
    places, weights = route(logits, chosen, False, Scoring(by_sigmoid, bias, 1.5, None, Groups(groups, looked_at, best)))
    scores = (logits.sigmoid() if by_sigmoid else logits.softmax(1)).double()
    for row, own, weight in zip(scores.tolist(), places.tolist(), weights.tolist(), strict=True):
        ranks = [score + more for score, more in zip(row, bias.tolist(), strict=True)]
        size = experts // groups
        of_groups = [sum(sorted(ranks[g * size : (g + 1) * size])[-best:]) for g in range(groups)]
        seen = sorted(range(groups), key=lambda g: -of_groups[g])[:looked_at]
        allowed = sorted((e for e in range(experts) if e // size in seen), key=lambda e: -ranks[e])
        assert own == sorted(allowed[:chosen])
        assert weight == pytest.approx([1.5 * row[e] for e in own], rel=1e-5)


def near_shares(logits: list[float], count: int, nearness: float) -> dict[int, float]:
    """One after another, as the paper's own code has it of two."""
    left, found = dict(enumerate(logits)), {}
    for _ in range(count):
        best = max(left, key=lambda e: left[e])
        most = left[best]
        near = [x for x in left.values() if not (most - x) / max(abs(x), most) > nearness]
        found[best] = 1 / sum(math.exp(x - most) for x in near)
        del left[best]
    return found


@pytest.mark.parametrize("route", [cpu_mixture.route, reference.route])
@pytest.mark.parametrize("nearness", [0.0, 0.3, 5.0])
def test_an_expert_weighs_its_share_among_those_near_behind_it(nearness: float, route: Any) -> None:
    """Logits of either sign, equal ones, and 0, among them."""
    logits = 2 * randn(40, 7)
    logits[3, 2], logits[4] = logits[3].max(), -logits[4].abs()
    logits[5, :2] = torch.tensor([-0.0, 0.0])
    for count in (1, 2, 3):
        places, weights = route(logits, count, False, Scoring(nearness=nearness))
        assert (places.diff() > 0).all()
        for row, place, own in zip(logits.tolist(), places.tolist(), weights.tolist(), strict=True):
            expected = near_shares(row, count, nearness)
            assert place == sorted(expected)
            assert own == pytest.approx([expected[e] for e in place], rel=1e-5)
    shares = weights if nearness else weights[[0, 1]]
    assert ((shares < 0.99).any() if nearness else (shares == 1).all())
    logits[1, 4] = float("nan")
    _, weights = route(logits, 2, False, Scoring(nearness=nearness))
    assert weights.isnan().any(dim=1).nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("route", [cpu_mixture.route, reference.route])
def test_of_equal_groups_the_lower_ones_are_looked_at(route: Any) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 0.0, 1.0, 2.0], [0.0] * 6])
    for best in (1, 2):
        places, _ = route(logits, 2, True, Scoring(True, torch.zeros(6), groups=Groups(3, 1, best)))
        assert places.tolist() == [[4, 5] if best == 2 else [0, 1], [0, 1]]


@pytest.mark.parametrize("route", [cpu_mixture.route, reference.route])
def test_of_equal_logits_the_lower_experts_are_taken(route: Any) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0] * 5, [-torch.inf, 3.0, 3.0, -torch.inf, 3.0]])
    places, weights = route(logits, 2, True)
    assert places.tolist() == [[1, 2], [0, 1], [1, 2]]
    assert weights.tolist() == [[0.5, 0.5]] * 3


@pytest.mark.parametrize("route", [cpu_mixture.route, reference.route])
@pytest.mark.parametrize("norm_topk", [True, False])
def test_a_nan_comes_out_of_the_router_in_its_row_alone(norm_topk: bool, route: Any) -> None:
    logits = randn(3, 6)
    logits[1, 4] = torch.nan
    places, weights = route(logits, 2, norm_topk)
    assert 4 in places[1].tolist()
    assert weights[1].isnan().all()
    assert weights[[0, 2]].isfinite().all()
    for by_sigmoid in (False, True):
        places, weights = route(logits, 2, norm_topk, Scoring(by_sigmoid, torch.zeros(6)))
        assert weights[1].isnan().any()
        assert not by_sigmoid or 4 in places[1].tolist()
        assert weights[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 33), (17, 256)])
def test_weighted_rows_are_added_in_fp32(rows: int, width: int, dtype: torch.dtype) -> None:
    out, y, weights = randn(rows + 3, width), randn(rows, width).to(dtype), randn(rows)
    places = torch.randperm(rows + 3, generator=GENERATOR)[:rows]
    expected = out.double()
    expected[places] += weights.double()[:, None] * y.double()
    for add in (cpu_mixture.add_weighted_rows, reference.add_weighted_rows):
        actual = out.clone()
        add(actual, y, places, weights)
        assert torch.allclose(actual.double(), expected, rtol=1e-5, atol=1e-6)


# ---- the layer ----


def layer(spec: MoESpec, hidden: int, dtype: torch.dtype, quant: str | None) -> MoE:
    def make(parts: dict[str, int], width: int, share: object) -> Any:
        if quant is None or "router.weight" in parts:
            return DenseStorage(sum(parts.values()), width, dtype)
        return make_storage(parse_format(quant), sum(parts.values()), width, dtype, rounds=True)

    made = MoE(spec, NormSpec(1e-6), hidden, Kit(dtype, make, CpuOps(), None))  # type: ignore[arg-type]
    for slot in made.slots().values():
        slot.load(randn(*slot.shape) * slot.shape[-1] ** -0.5, 0)
    return made


def one_by_one(mixture: MoE, x: torch.Tensor) -> torch.Tensor:
    """By each expert in its turn, as where they are not alike."""
    return Mixture.__call__(mixture.mixture, x, mixture.router.matmul(x, None, torch.float32))


@pytest.mark.parametrize("quant", [None, "int8", "int4:group=32", "fp8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype, quant: str | None) -> None:
    mixture = layer(MoESpec(7, 3, MLPSpec(128), norm_topk=True), 64, dtype, quant)
    x = randn(67, 64).to(dtype)
    whole = mixture(x)
    assert whole.dtype == dtype
    assert torch.equal(whole, one_by_one(mixture, x))
    for rows in ([], [0], [66], [5, 9], list(range(31)), list(reversed(range(67)))):
        assert torch.equal(mixture(x[rows].contiguous()), whole[rows])


@pytest.mark.parametrize("quant", [None, "int8", "int4:group=32", "fp8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "threads"), [(1, 1), (1, 2), (3, 2), (23, 1), (23, 2)])
def test_a_recorded_step_takes_the_experts_of_its_own_tokens(
    tokens: int, threads: int, dtype: torch.dtype, quant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit what the layer gives them otherwise, whatever was recorded first; two recordings share the experts' steps."""
    monkeypatch.setattr(cpu, "SERIAL_WORK", 1 << 60 if threads == 1 else 0)
    cpu.set_num_threads(2)
    mixture = layer(MoESpec(7, 3, MLPSpec(128), norm_topk=True), 64, dtype, quant)
    inputs = torch.zeros(tokens, 64, dtype=dtype)
    outs: list[torch.Tensor] = []
    programs: list[cpu.Program] = []
    taken: set[int] = set()
    for _ in range(2):
        with cpu.Program(cpu.MemoryPool()) as program:
            outs.append(mixture(inputs))
        programs.append(program)
    for i in range(6):
        x = randn(tokens, 64).to(dtype)
        inputs.copy_(x)
        programs[i % 2].replay()
        assert torch.equal(outs[i % 2], one_by_one(mixture, x))
        taken |= set(cpu_mixture.route(mixture.router.matmul(x, None, torch.float32), 3, True)[0].flatten().tolist())
    assert len(taken) >= 6, "nearly all of them are tried"


@pytest.mark.parametrize(("tokens", "num_chosen", "num_experts"), [(1, 1, 2), (1, 8, 128), (16, 8, 128), (33, 2, 2), (512, 1, 4)])
def test_pairs_are_sorted_by_experts_and_those_with_many_come_last(tokens: int, num_chosen: int, num_experts: int) -> None:
    generator = np.random.default_rng(tokens)
    weights = generator.random(num_experts) ** 3
    rows = [generator.choice(num_experts, num_chosen, replace=False, p=weights / weights.sum()) for _ in range(tokens)]
    taken = np.concatenate([np.sort(row) for row in rows]).astype(np.int64)
    begins, order, used, ends = (np.full(n, 9) for n in (num_experts + 1, len(taken), num_experts, tokens + 1))
    sort = numba.njit(lambda *arrays: cpu_experts._sort_pairs(*arrays))
    num_parts = sort(taken, begins, order, used, ends)
    counts = np.bincount(taken, minlength=num_experts)
    assert np.diff(begins).tolist() == counts.tolist()
    assert order.tolist() == np.argsort(taken, kind="stable").tolist()
    assert used[:num_parts].tolist() == [e for e in np.argsort(counts, kind="stable") if counts[e]]


def test_all_kernels_beside_matmuls_are_compiled_before_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [kernel for kernel in vars(cpu_experts).values() if isinstance(kernel, Kernel)]
    assert len(kernels) >= 5
    for kernel in kernels:
        monkeypatch.setattr(kernel, "_compiled", {})
    warm.warm_up([warm.Kind("experts", (torch.bfloat16,))])
    known = [set(kernel._compiled) for kernel in kernels]
    mixture = layer(MoESpec(5, 2, MLPSpec(64), norm_topk=True), 32, torch.bfloat16, None)
    x = randn(3, 32).bfloat16()
    expected = mixture(x)
    with cpu.Program(cpu.MemoryPool()) as program:
        recorded = mixture(x)
    program.replay()
    assert torch.equal(recorded, expected)
    assert [set(kernel._compiled) for kernel in kernels] == known


def test_experts_that_nobody_takes_are_not_computed() -> None:
    mixture = layer(MoESpec(9, 2, MLPSpec(33), norm_topk=False), 17, torch.float32, None)
    x = randn(1, 17)
    expected = mixture(x)
    chosen, _ = cpu_mixture.route(mixture.router.matmul(x, None, torch.float32), 2, False)
    for e in set(range(9)) - set(chosen[0].tolist()):
        mixture.experts[e] = None  # type: ignore[call-overload]
    assert torch.equal(mixture(x), expected)


# ---- models ----


@pytest.mark.parametrize(
    ("family", "dtype", "quant"),
    [("qwen", "float32", None), ("qwen", "bfloat16", None), ("qwen", "bfloat16", "int8"), ("gpt_oss", "bfloat16", "q4_0")],
)
def test_answers_do_not_depend_on_the_batch(family: str, dtype: str, quant: str | None, tmp_path: Path) -> None:
    model = {"qwen": qwen, "gpt_oss": gpt_oss}[family]()
    worker = worker_for(save(model, tmp_path), dtype=dtype, quant=quant)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    tokens = prompts(SHAPE["vocab_size"])[:6]
    together = run(engine_for(worker, max_num_batched_tokens=40), [(ids, params) for ids in tokens])
    for ids, output in zip(tokens, together, strict=True):
        alone = run(engine_for(worker), [(ids, params)])[0].outputs[0]
        assert (alone.token_ids, alone.logprobs) == (output.outputs[0].token_ids, output.outputs[0].logprobs)
    assert {shapes[0] for shapes in worker.runner.graphs._graphs} >= {torch.Size([n]) for n in (1, 6)}


def test_experts_whose_columns_have_an_order_are_recorded_too(tmp_path: Path) -> None:
    """GPTQ's: gate and up of an expert are two weights then, each with an order of its own."""
    config, maker, quantization = CASES["gptq 4, in an order, experts"]
    build(tmp_path, config, maker, quantization)
    worker = worker_for(tmp_path, dtype="bfloat16")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
    together = run(engine_for(worker), [(ids, params) for ids in PROMPTS])
    for ids, output in zip(PROMPTS, together, strict=True):
        alone = run(engine_for(worker), [(ids, params)])[0].outputs[0]
        assert (alone.token_ids, alone.logprobs) == (output.outputs[0].token_ids, output.outputs[0].logprobs)
    assert worker.runner.graphs._graphs


def test_experts_in_several_formats_are_not_recorded_and_answer_alike(tmp_path: Path) -> None:
    """Their kernels differ, so that which ones run can't be a matter of arguments."""
    source = save(qwen(), tmp_path / "source")
    types = ((r"experts\.1\.", "keep"), (r"experts\.[23]\.down", "int8"))
    quantize_model("int4:group=32", tmp_path / "out", source, tensor_types=types)
    worker = worker_for(tmp_path / "out", dtype="bfloat16")
    assert len(worker.formats) == 3
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    tokens = prompts(SHAPE["vocab_size"])[:3]
    together = run(engine_for(worker), [(ids, params) for ids in tokens])
    for ids, output in zip(tokens, together, strict=True):
        alone = run(engine_for(worker), [(ids, params)])[0].outputs[0]
        assert (alone.token_ids, alone.logprobs) == (output.outputs[0].token_ids, output.outputs[0].logprobs)
    assert not worker.runner.graphs._graphs


def rounded(model: Any, name: str, *, outer: bool = True) -> Any:
    """The model with the matrices of attention, MLPs and experts rounded by a format, one expert after the other; with `outer`
    embedding and head too, by int8 where the format has fewer bits. Its routers stay."""
    form = parse_format(name)
    of_outer = parse_format("int8") if form.row_bytes(1024) < 1024 else form
    for key, parameter in model.named_parameters():
        is_outer = "embed" in key or "lm_head" in key
        if parameter.dim() == 2 and not key.endswith("mlp.gate.weight") and (outer or not is_outer):
            own = of_outer if is_outer else form
            parameter.data = own.dequantize(own.quantize(parameter.data))
        elif parameter.dim() == 3:
            parts = [form.dequantize(form.quantize(half)) for expert in parameter.data for half in _matrices(key, expert)]
            parameter.data = torch.cat(parts).view(parameter.shape)
    return model


def _matrices(key: str, expert: torch.Tensor) -> list[torch.Tensor]:
    return list(expert.chunk(2)) if "gate_up" in key else [expert]


@pytest.mark.parametrize("name", ["int8", "int4:group=32", "fp8", "nf4", "q8_0", "q4_0"])
def test_experts_in_every_format(name: str, tmp_path: Path) -> None:
    """In fp32 nothing else is rounded: what is left is the arithmetic."""
    model = qwen(mlp_only_layers=[1])
    worker = worker_for(save(model, tmp_path), quant=name, dtype="float32")
    tokens = prompts(SHAPE["vocab_size"])[:5]
    assert difference(logits_of(worker, tokens), expected_logits(rounded(model, name), tokens)) < 1e-4


# ---- GGUF, with llama.cpp's names ----


def write_gguf(path: Path, model: Any, types: list[str], arch: str = "") -> Path:
    """A file with the types by turns, experts stacked; the model's own weights become what the file says."""
    config = model.config
    own = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "granitemoe": "granitemoe",
           "qwen2_moe": "qwen2moe", "glm4_moe": "glm4moe", "ernie4_5_moe": "ernie4_5-moe", "lfm2_moe": "lfm2moe",
           "olmoe": "olmoe", "minimax_m2": "minimax-m2", "dots1": "dots1", "solar_open": "glm4moe",
           "exaone_moe": "exaone-moe", "granitemoe_swa": "granite_swa", "phimoe": "phimoe",
           "hy_v3": "hy_v3"}  # fmt: skip
    arch = arch or own[config.model_type]
    mixtral, gpt_oss = arch in ("llama", "granitemoe", "granite_swa"), arch == "gpt-oss"
    writer = gguf.GGUFWriter(path, arch)
    add_shape(writer, config)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    writer.add_expert_count(next(getattr(config, name) for name in counts if hasattr(config, name)))
    writer.add_expert_used_count(config.moe_k if arch == "ernie4_5-moe" else config.num_experts_per_tok)
    if not mixtral and arch not in ("olmoe", "phimoe"):
        own_size = getattr(config, "moe_intermediate_size", config.intermediate_size)
        writer.add_expert_feed_forward_length(own_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if gpt_oss:
        writer.add_sliding_window(config.sliding_window)
    if arch in ("granitemoe", "granite_swa"):
        granite_keys(writer, config)
    if arch == "granite_swa":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_array("granite_swa.attention.rope_pattern", [theta > 0 for theta in config.layer_rope_theta])
    if arch == "glm4moe":
        if config.model_type == "glm4_moe":
            writer.add_rope_dimension_count(config.head_dim // 2)
        writer.add_nextn_predict_layers(1)
        writer.add_block_count(config.num_hidden_layers + 1)
    if arch in ("glm4moe", "dots1", "exaone-moe"):
        writer.add_expert_shared_count(config.num_shared_experts if arch == "exaone-moe" else config.n_shared_experts)
        if hasattr(config, "first_k_dense_replace"):
            writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if arch == "exaone-moe":
        writer.add_expert_shared_feed_forward_length(config.num_shared_experts * config.moe_intermediate_size)
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if arch == "hy_v3":
        writer.add_expert_shared_feed_forward_length(config.num_shared_experts * config.moe_intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(config.router_scaling_factor)
    if arch == "phimoe":
        rope = config.rope_parameters
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(rope["long_mscale"])
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
    if arch == "minimax-m2":
        writer.add_rope_dimension_count(config.head_dim // 2)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "ernie4_5-moe":
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.moe_num_shared_experts * config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    if arch == "lfm2moe":
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_tokenizer_model("no_vocab")
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
             "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
             "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
             "mlp.router": "ffn_gate_inp"}  # fmt: skip
    names |= {f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
    names |= {"mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
    names |= {f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
    names |= {"shared_mlp.input_linear": "ffn_up_shexp", "shared_mlp.output_linear": "ffn_down_shexp"}  # gate and up as one
    if gpt_oss or arch == "glm4moe":
        names |= {"post_attention_layernorm": "post_attention_norm"}
    names |= {f"conv.{part}": f"shortconv.{part}" for part in ("in_proj", "out_proj", "conv")}
    names |= {"operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.out_proj": "attn_output",
              "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm"}  # fmt: skip
    names |= {f"mlp.{theirs}": f"ffn_{part}" for part, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight", "lm_head.bias": "output.bias",
             "model.norm.bias": "output_norm.bias", "model.embedding_norm.weight": "token_embd_norm.weight"}  # fmt: skip
    turn = 0

    def add(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What a reader will take it for."""
        nonlocal turn
        if "gate_inp_shexp" in name:
            writer.add_tensor(name, tensor[0].numpy())
            return tensor
        if tensor.dim() == 1 or "gate_inp" in name or "shortconv.conv" in name:
            writer.add_tensor(name, tensor.numpy())
            return tensor
        kind = gguf.GGMLQuantizationType[types[turn % len(types)]]
        turn += 1
        data = quantize(tensor.numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        return torch.from_numpy(np.ascontiguousarray(dequantize(data, kind))).view(tensor.shape)

    others = {key: buffer for key, buffer in model.named_buffers() if key.endswith(("correction_bias", "expert_bias"))}
    if arch == "glm4moe":
        writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.enorm.weight", np.ones(config.hidden_size, np.float32))
    for key, parameter in {**dict(model.named_parameters()), **others}.items():
        tensor = parameter.detach()
        if key in outer:
            parameter.data = add(outer[key], tensor)
            continue
        _, _, layer_id, *rest = key.split(".")
        place, own = f"blk.{layer_id}.", ".".join(rest).removesuffix(".weight")
        own = own.replace("block_sparse_moe", "mlp").replace("feed_forward", "mlp")
        if "correction_bias" in own and arch == "ernie4_5-moe" and "MXFP4" in types:
            parameter.data.zero_()  # a file may leave it out
        elif "correction_bias" in own or "expert_bias" in own:
            writer.add_tensor(f"{place}exp_probs_b{'' if arch == 'hy_v3' else '.bias'}", tensor.flatten().numpy())
        elif own.endswith(("gate_up_proj_bias", "down_proj_bias")):
            parts = {"gate": tensor[:, ::2], "up": tensor[:, 1::2]} if "gate" in own else {"down": tensor}
            for part, bias in parts.items():
                writer.add_tensor(f"{place}ffn_{part}_exps.bias", bias.contiguous().numpy())
        elif own.endswith((".bias", "sinks")):
            theirs = "attn_sinks.weight" if "sinks" in own else f"{names[own.removesuffix('.bias')]}.bias"
            writer.add_tensor(f"{place}{theirs}", tensor.numpy())
        elif gpt_oss and own == "mlp.experts.gate_up_proj":
            halves = [add(f"{place}ffn_{part}_exps.weight", tensor[..., first::2].transpose(1, 2).contiguous()).transpose(1, 2)
                      for part, first in (("gate", 0), ("up", 1))]  # fmt: skip
            parameter.data = torch.stack(halves, -1).flatten(-2)
        elif gpt_oss and own == "mlp.experts.down_proj":
            parameter.data = add(f"{place}ffn_down_exps.weight", tensor.transpose(1, 2).contiguous()).transpose(1, 2)
        elif own == "mlp.experts.gate_up_proj":
            halves = [add(f"{place}ffn_{part}_exps.weight", half.contiguous())
                      for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True)]  # fmt: skip
            parameter.data = torch.cat(halves, 1)
        elif own == "mlp.experts.down_proj":
            parameter.data = add(f"{place}ffn_down_exps.weight", tensor)
        elif own == "conv.conv":
            add(f"{place}shortconv.conv.weight", tensor[:, 0].contiguous())
        elif mixtral and own in ("self_attn.q_proj", "self_attn.k_proj"):  # pairs (i, d / 2 + i) become (2 i, 2 i + 1)
            heads = tensor.view(-1, 2, config.head_dim // 2, tensor.shape[1])
            stored = add(f"{place}{names[own]}.weight", heads.transpose(1, 2).reshape(tensor.shape).contiguous())
            turned = stored.view(-1, config.head_dim // 2, 2, tensor.shape[1]).transpose(1, 2)
            parameter.data = turned.reshape(tensor.shape).contiguous()
        else:
            parameter.data = add(f"{place}{names[own]}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def mixtral() -> Any:
    return random_model(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2))


def granite() -> Any:
    return random_model(GraniteMoeConfig(**SHAPE, **GRANITE, num_local_experts=5, num_experts_per_tok=2))


def glm() -> Any:
    config = Glm4MoeConfig(**SHAPE, n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=64, attention_bias=True,
                           routed_scaling_factor=1.5)  # fmt: skip
    return random_model(config)


def ernie() -> Any:
    return random_model(Ernie4_5_MoeConfig(**SHAPE, moe_num_experts=5, moe_k=2, moe_intermediate_size=64))


def lfm2() -> Any:
    shape = SHAPE | {"num_attention_heads": 4, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
    return random_model(
        Lfm2MoeConfig(**shape, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=64, num_dense_layers=1)
    )


def qwen2() -> Any:
    """With a shared expert that each token weighs, and weights that are not made 1 together."""
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"} | {"num_attention_heads": 4}
    config = Qwen2MoeConfig(**shape, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=64,
                            shared_expert_intermediate_size=96)  # fmt: skip
    config.head_dim = 32
    return random_model(config)


def olmoe() -> Any:
    """With weights that are not made 1 together."""
    shape = SHAPE | {"num_attention_heads": 4, "intermediate_size": 64}
    return random_model(OlmoeConfig(**shape, num_experts=5, num_experts_per_tok=2))


def minimax() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    shape = SHAPE | {"intermediate_size": 64, "rope_parameters": rope}
    return random_model(MiniMaxM2Config(**shape, num_local_experts=5, num_experts_per_tok=2))


SIGMOIDS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "routed_scaling_factor": 1.5}


def dots() -> Any:
    experts = {"n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1}
    return random_model(Dots1Config(**SHAPE, **SIGMOIDS, **experts, sliding_window=None))


def solar() -> Any:
    """To llama.cpp a GLM-4.5."""
    return random_model(SolarOpenConfig(**SHAPE, **SIGMOIDS, n_routed_experts=5))


def exaone() -> Any:
    shape = SHAPE | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    return random_model(ExaoneMoeConfig(**shape, **SIGMOIDS, num_experts=5, sliding_window=20))


def granite_swa() -> Any:
    config = GraniteMoeSWAConfig(
        **SHAPE | {"intermediate_size": 64, "sliding_window": 20}, **GRANITE, num_local_experts=5, num_experts_per_tok=2,
        shared_intermediate_size=96, layer_rope_theta=[1e4, 0],
    )
    config.head_dim = SHAPE["head_dim"]
    return random_model(config)


def hy_v3() -> Any:
    return random_model(HYV3Config(**SHAPE, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=64, num_shared_experts=2))


def phimoe() -> Any:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + 0.1 * i for i in range(16)],
        "long_factor": [1.0 + 0.1 * i for i in range(16)], "short_mscale": 1.24, "long_mscale": 1.24,
        "original_max_position_embeddings": 32,
    }
    shape = SHAPE | {"num_attention_heads": 4, "intermediate_size": 64, "pad_token_id": 0, "rope_parameters": rope}
    config = PhimoeConfig(**shape, num_local_experts=5, attention_bias=True, lm_head_bias=True)
    return random_model(config)


def gpt_oss() -> Any:
    config = GptOssConfig(
        **SHAPE | {"intermediate_size": 64}, num_local_experts=5, num_experts_per_tok=2, sliding_window=20,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    return random_model(config)


@pytest.mark.parametrize("types", [["F32"], ["Q8_0", "MXFP4", "F16", "Q5_1"]], ids=["plain", "mixed"])
@pytest.mark.parametrize(
    "family", [qwen, qwen2, mixtral, granite, gpt_oss, glm, ernie, lfm2, olmoe, minimax, dots, solar, exaone, granite_swa,
               phimoe, hy_v3],
)
def test_a_gguf_file_has_its_experts_stacked(family: Any, types: list[str], tmp_path: Path) -> None:
    model = qwen(mlp_only_layers=[1]) if family is qwen else family()
    sees = "qwen3vlmoe" if family is qwen and "MXFP4" in types else ""  # whose part that writes is as Qwen3's
    path = write_gguf(tmp_path / "m.gguf", model, types, sees)
    tokens = prompts(SHAPE["vocab_size"])[:5]
    assert difference(logits_of(worker_for(path, dtype="float32"), tokens), expected_logits(model, tokens)) < 1e-4


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """Experts in MXFP4, [E, 2 N, K / 32, 16] with the rows of gate and up by turns; numbers by the table of OCP's MX 1.0."""
    model = gpt_oss()
    folder = save(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3:
            experts, columns, rows = parameter.shape
            del tensors[name]
            codes = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=GENERATOR, dtype=torch.uint8)
            scales = torch.randint(120, 125, codes.shape[:-1], generator=GENERATOR, dtype=torch.uint8)
            numbers = values[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(-2)
            numbers = numbers * 2.0 ** (scales.float() - 127)[..., None]
            parameter.data = numbers.flatten(-2).transpose(1, 2).contiguous()
            tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = prompts(SHAPE["vocab_size"])[:5]
    worker = worker_for(folder, dtype="float32")
    assert {form.name for form in worker.formats if form is not None} == {"mxfp4"}
    assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < 1e-4
    with pytest.raises(UsageError, match="its weights are mxfp4 already"):
        worker_for(folder, quant="int8")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"swiglu_limit": 8.0}, "'swiglu_limit' of 8"), ({"swiglu_alpha": 1.0}, "'swiglu_alpha' of 1 ")],
)
def test_another_clamped_activation_is_refused(changes: dict[str, float], words: str) -> None:
    config = gpt_oss().config.to_dict() | {"architectures": ["GptOssForCausalLM"]}
    assert spec_from_hf(config, hf_family(config)).blocks[0].mixer.sinks
    with pytest.raises(UnsupportedError, match=words):
        spec_from_hf(config | changes, hf_family(config))


def test_windows_of_gpt_oss_are_in_every_second_layer_where_the_config_does_not_say() -> None:
    config = gpt_oss().config.to_dict() | {"architectures": ["GptOssForCausalLM"], "layer_types": None}
    assert [block.mixer.window for block in spec_from_hf(config, hf_family(config)).blocks] == [20, None]


def test_llama_cpp_gives_the_logits_that_we_give(tmp_path: Path) -> None:
    """Its own matmuls round activations of Q8_0 to 8 bits too, by blocks of 32."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    tokens = prompts(SHAPE["vocab_size"])[3]
    for model in (qwen(), mixtral(), gpt_oss(), lfm2()):
        path = write_gguf(tmp_path / f"{model.config.model_type}.gguf", model, ["F32"])
        theirs = llama_cpp.Llama(str(path), n_ctx=128, n_threads=2, logits_all=True, verbose=False, type_k=0, type_v=0)
        theirs.eval(tokens)
        expected = torch.from_numpy(np.array(theirs.scores[: len(tokens)]))
        assert difference(logits_of(worker_for(path, dtype="float32"), [tokens]), expected) < 1e-3


# ---- what is written, planned and refused ----


def test_a_quantized_folder_keeps_its_routers(tmp_path: Path) -> None:
    """It says so, for loaders that would take every linear layer for quantized."""
    model = qwen(mlp_only_layers=[1])
    quantize_model("int4-weight-only:group=32", tmp_path / "out", save(model, tmp_path / "source"))
    with open_checkpoint(tmp_path / "out") as written:
        assert "model.layers.0.mlp.gate" in written.config["quantization_config"]["ignore"]
        assert written.info("model.layers.0.mlp.gate.weight").dtype_name == "F32"
        assert "model.layers.0.mlp.experts.4.down_proj.weight_packed" in written.names()
    tokens = prompts(SHAPE["vocab_size"])[:3]
    expected = expected_logits(rounded(model, "int4-weight-only:group=32", outer=False), tokens)
    assert difference(logits_of(worker_for(tmp_path / "out", dtype="float32"), tokens), expected) < 1e-4


def test_what_experts_can_not_be_made_into_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="several matrices in one tensor"):
        plan_of("int8", save(gpt_oss(), tmp_path / "stacked"))


def test_a_plan_and_a_roofline_count_the_experts_that_a_token_takes(tmp_path: Path) -> None:
    """3 of 5, in one of two layers; in fp32, so that a number has four bytes on every processor."""
    folder = save(qwen(mlp_only_layers=[1]), tmp_path)
    expert, router, hidden = 3 * 128 * 64, 5 * 128, 128
    attention, mlp, outer = 2 * (2 * (6 + 2) * 32 * hidden), 3 * 128 * 192, 513 * hidden
    norms = hidden + 2 * (2 * hidden + 2 * 32)
    every = attention + mlp + router + 2 * outer + norms
    speed = Speed(1e-6, {"fp32": 1e9})  # 1000 bytes a second
    with open_checkpoint(folder) as checkpoint:
        made = make_plan(checkpoint, EngineConfig(device="cpu", dtype="float32"), None, speed)
    assert (made.facts.num_parameters, made.facts.num_active) == (every + 5 * expert, every + 3 * expert)
    worker = worker_for(folder, dtype="float32")
    padded = 4 * 64 * (-(-513 // 64) - 513 / 64) * hidden  # a matrix is kept in blocks of 64 rows, a router of 5 too
    matrices = 4 * (attention + mlp + outer + 64 * hidden) + padded
    assert worker.expert_bytes == 4 * 5 * expert
    assert worker.read_bytes == matrices + worker.expert_bytes
    token_bytes = made.units.block / 16
    read = made.formats[0].weight_bytes - 4 * 2 * expert - 4 * outer - padded + 512 * token_bytes
    assert made.formats[0].decode == pytest.approx(1000 / read, rel=1e-3)
    work = ModelWork.of(worker.spec, worker.read_bytes, (torch.float32,) * 2, worker.expert_bytes)
    assert work.step_bytes(1) == pytest.approx(matrices + 4 * 3 * expert)
    assert work.step_bytes(2) == pytest.approx(matrices + 4 * 5 * expert * (1 - 0.4**2))
    assert work.linear_flops == 2 * (attention + mlp + router + 3 * expert)


def test_tensors_of_experts_without_end_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a name of its own: a small file could ask for gigabytes of them."""
    path = write_gguf(tmp_path / "m.gguf", qwen(), ["F32"])
    monkeypatch.setattr("nanovllm_cli.weights.stacked.MAX_PARTS", 12)
    with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match="more than 12 tensors of experts"):
        unstacked(checkpoint)
