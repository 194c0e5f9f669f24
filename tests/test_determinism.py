"""A request's tokens and logprobs do not depend on what else runs, how it is cut up, or what happened to it: to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, Glm4MoeConfig, GraniteConfig, Qwen3Config, Qwen3MoeConfig, YoutuConfig

from engines import SMALL, engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli.engine.outputs import RequestOutput
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.models import block
from nanovllm_cli.sampling_params import SamplingParams

GENERATOR = torch.Generator().manual_seed(11)
TARGET_LEN = 61
Answer = tuple[tuple[int, ...], Any]


LATENT = {name: value for name, value in SMALL.items() if name != "head_dim"} | {
    "num_key_value_heads": 6, "q_lora_rank": 28, "kv_lora_rank": 40, "qk_nope_head_dim": 18, "qk_rope_head_dim": 12,
    "v_head_dim": 22,
}  # fmt: skip
SHAPE = SMALL | {"hidden_size": 96, "head_dim": 32, "tie_word_embeddings": True}
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, sliding_window=20, query_pre_attn_scalar=32, final_logit_softcapping=9.0),
    "experts": lambda: Qwen3MoeConfig(**SHAPE, num_experts=9, num_experts_per_tok=2, moe_intermediate_size=40),
    "shared": lambda: Glm4MoeConfig(**SHAPE, n_routed_experts=9, num_experts_per_tok=2, moe_intermediate_size=40),
    "latent": lambda: YoutuConfig(**LATENT),
    "granite": lambda: GraniteConfig(**SHAPE, embedding_multiplier=3.0, residual_multiplier=0.22, attention_multiplier=0.2),
}
"""Those whose layers have kernels of their own."""


@pytest.fixture(
    scope="module",
    params=[
        "qwen3 float32", "qwen3 bfloat16", "qwen3 bfloat16 int8", "gemma3 bfloat16", "granite bfloat16", "experts bfloat16",
        "shared bfloat16", "latent bfloat16", "latent bfloat16 fp8",
    ],
)  # fmt: skip
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    family, dtype, *cache = request.param.split()
    folder = save(random_model(FAMILIES[family]()), tmp_path_factory.mktemp("model"))
    return worker_for(folder, dtype=dtype, kv_cache_dtype=cache[0] if cache else "auto")


def prompt(length: int) -> list[int]:
    return torch.randint(2, 513, (length,), generator=GENERATOR).tolist()


TARGET = prompt(TARGET_LEN)
OTHERS = [(prompt(5 + 7 * (i % 9)), SamplingParams(temperature=0.8, seed=i, max_tokens=10 + i % 23)) for i in range(31)]


@pytest.fixture(params=["greedy", "seeded"])
def params(request: pytest.FixtureRequest) -> SamplingParams:
    common: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "logprobs": 3}
    if request.param == "greedy":
        return SamplingParams(temperature=0.0, **common)
    return SamplingParams(temperature=1.0, top_p=0.9, seed=5, **common)


def answer(output: RequestOutput) -> Answer:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def alone(worker: Worker, params: SamplingParams, **settings: Any) -> Answer:
    return answer(run(engine_for(worker, **settings), [(TARGET, params)])[0])


def test_in_a_batch_of_32(worker: Worker, params: SamplingParams) -> None:
    outputs = run(engine_for(worker), [*OTHERS[:15], (TARGET, params), *OTHERS[15:]])
    assert answer(outputs[15]) == alone(worker, params)


@pytest.mark.parametrize("budget", [7, 33, 512])
def test_in_chunks(worker: Worker, params: SamplingParams, budget: int) -> None:
    assert alone(worker, params, max_num_batched_tokens=budget) == alone(worker, params, max_num_batched_tokens=100)


def test_in_another_order_of_arrival(worker: Worker, params: SamplingParams) -> None:
    first = run(engine_for(worker, max_num_batched_tokens=64), [(TARGET, params), *OTHERS])
    last = run(engine_for(worker, max_num_batched_tokens=64), [*reversed(OTHERS), (TARGET, params)])
    assert answer(first[0]) == answer(last[-1])


def test_on_a_prefix_hit(worker: Worker, params: SamplingParams) -> None:
    engine = engine_for(worker)
    first = run(engine, [(TARGET, params)])[0]
    second = run(engine, [(TARGET, params)])[0]
    assert first.metrics.num_cached_tokens == 0
    assert second.metrics.num_cached_tokens == TARGET_LEN // 16 * 16
    assert answer(first) == answer(second)


def test_when_preempted_three_times(worker: Worker, params: SamplingParams) -> None:
    """Each time, more urgent requests grow until they need every block."""
    engine = engine_for(worker, num_blocks=12, policy="priority", aging_seconds=1e6, enable_prefix_caching=False)
    engine.add("target", TARGET, params, priority=9)
    done: dict[str, RequestOutput] = {}
    bursts = drawn = 0
    while engine.has_unfinished():
        if bursts < 3 and drawn >= 8 * (bursts + 1):
            bursts += 1
            for i in range(4):
                engine.add(f"burst {bursts} {i}", prompt(40), SamplingParams(temperature=0.0, max_tokens=4), priority=0)
        for output in engine.step():
            if output.request_id == "target":
                drawn = len(output.outputs[0].token_ids)
            if output.finished:
                done[output.request_id] = output
    assert done["target"].metrics.num_preemptions >= 3
    assert answer(done["target"]) == alone(worker, params)


def test_with_dynamic_rope_scaling(tmp_path: Path) -> None:
    """Angles depend on a sequence's length past the original 32 tokens: in any chunks, and on a prefix hit, the same."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
    config = Qwen3Config(**SMALL | {"max_position_embeddings": 32}, rope_parameters=rope)
    worker = worker_for(save(random_model(config), tmp_path))
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=2)
    whole = alone(worker, params)
    assert alone(worker, params, max_num_batched_tokens=7) == whole
    assert answer(run(engine_for(worker), [*OTHERS[:20], (TARGET, params)])[20]) == whole


@pytest.mark.parametrize("inner", [70, 71])
def test_recorded_steps_equal_steps_that_are_not(inner: int, tmp_path: Path) -> None:
    """An odd width can't be recorded in bf16; it must work all the same."""
    folder = save(random_model(Qwen3Config(**SMALL | {"intermediate_size": inner})), tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
    worker = worker_for(folder, dtype="bfloat16")
    recorded = alone(worker, params)
    worker.runner.graphs.fits = lambda batch: False  # type: ignore[method-assign]
    assert alone(worker, params) == recorded
    assert len(set(recorded[0])) > 3


def test_recorded_steps_of_all_sizes_share_their_memory(tmp_path: Path) -> None:
    """A batch that drains has a step of each size: of none do logits, or rows that are kept, stay taken."""
    worker = worker_for(save(random_model(Qwen3Config(**SMALL)), tmp_path), dtype="bfloat16")
    run(engine_for(worker), [(TARGET, greedy(4 + 3 * i)) for i in range(9)])
    graphs = worker.runner.graphs  # type: ignore[attr-defined]
    assert len(graphs._graphs) == 9
    assert sum(piece.nbytes for piece in graphs._pool._free) == graphs._pool.num_bytes


def test_seeded_requests_differ_by_seed_and_greedy_ones_do_not(worker: Worker) -> None:
    seeded = [(TARGET, SamplingParams(temperature=1.5, seed=s, max_tokens=20, ignore_eos=True)) for s in (1, 1, 2)]
    a, b, c = (answer(o)[0] for o in run(engine_for(worker), seeded))
    assert a == b != c


@pytest.mark.parametrize("size", [16, 64])
def test_of_a_prompt_only_the_last_token_goes_through_the_last_mlp(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chunk that is not the last, none does; of what is embedded by the mean, all do."""
    rows: list[int] = []
    through = block._onto

    def counted(mlp: Any, residual: torch.Tensor, h: Any, slots: torch.Tensor) -> torch.Tensor | None:
        assert len(slots) == len(residual)
        rows.append(len(residual))
        return through(mlp, residual, h, slots)

    monkeypatch.setattr(block, "_onto", counted)
    worker = worker_for(save(random_model(Qwen3Config(**SMALL | {"num_hidden_layers": 2})), tmp_path))
    engine = engine_for(worker, max_num_batched_tokens=size)
    run(engine, [(list(range(3, 43)), greedy(1))])
    assert rows == ([16, 16, 8, 1] if size == 16 else [40, 1])
    rows.clear()
    engine.embed("a", list(range(3, 43)), "mean")
    while engine.has_unfinished():
        engine.step()
    assert rows == ([16] * 4 + [8] * 2 if size == 16 else [40, 40])
