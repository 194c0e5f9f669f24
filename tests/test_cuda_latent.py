"""Latent attention in the GPU's engine on emulated kernels: DeepSeek's models, GLM's and Youtu, on tensor cores and off them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AXK1Config,
    AXK2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    HYV4Config,
    Mistral4Config,
    YoutuConfig,
)

from emulation.device import EmulatedDevice
from emulation.emulator import Emulator, needs_emulation
from emulation.late import LateDevice
from engines import greedy, random_model, run, save
from nanovllm_cli.attention.backend import LatentWeights
from nanovllm_cli.attention.cuda import CudaAttention
from nanovllm_cli.batch import Batch
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.cuda_ops import CudaOps
from nanovllm_cli.layers.indexer import Indexer
from nanovllm_cli.mixer_spec import LatentSpec
from test_cuda_engine import (
    PROMPTS,
    SHAPE,
    engine_on,
    forks_and_found_prefixes,
    kernels_not_rehearsed,
    launches_of_a_decode_step,
    tokens,
)
from test_latent import SHAPES, Paged
from test_models import LATENT_EXPERTS, rope

pytestmark = needs_emulation
COMMON = {name: value for name, value in SHAPE.items() if name != "head_dim"} | {"num_key_value_heads": 4, "q_lora_rank": 28}
ROUND = COMMON | {"kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
ODD = COMMON | {"kv_lora_rank": 42, "qk_nope_head_dim": 18, "qk_rope_head_dim": 6, "v_head_dim": 22}
MODELS: dict[str, Any] = {
    "youtu": YoutuConfig(**ROUND),
    "youtu, odd": YoutuConfig(**ODD | {"q_lora_rank": None}),
    "deepseek v2": DeepseekV2Config(**ROUND | {"q_lora_rank": None}, **LATENT_EXPERTS),
    "deepseek v3": DeepseekV3Config(**ROUND, **LATENT_EXPERTS | {"n_routed_experts": 8}, n_group=4, topk_group=2),
    "deepseek v3, halves, odd": DeepseekV3Config(
        **ODD, **LATENT_EXPERTS, n_group=1, topk_group=1, rope_interleave=False, norm_topk_prob=False
    ),
    "mistral 4": Mistral4Config(
        **ROUND | {"pad_token_id": 0}, **LATENT_EXPERTS | {"first_k_dense_replace": 0},
        **rope("yarn", factor=4.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5),
    ),
    "deepseek v3.2, all are seen": DeepseekV32Config(
        **ROUND, **LATENT_EXPERTS, n_group=1, topk_group=1, index_n_heads=4, index_head_dim=16,
        index_topk=SHAPE["max_position_embeddings"],
    ),
    **{name: HYV4Config(
        **shape, **{name: value for name, value in LATENT_EXPERTS.items() if name != "first_k_dense_replace"}, index_n_heads=4,
        index_head_dim=16, index_topk=SHAPE["max_position_embeddings"], swiglu_limit=0.0,
    ) for name, shape in (("hy 4, all are seen", ROUND), ("hy 4, all are seen, odd", ODD))},
    "a.x k1": AXK1Config(**ROUND, **LATENT_EXPERTS, n_group=1, topk_group=1),
    "a.x k2, all are seen": AXK2Config(
        **ROUND, **LATENT_EXPERTS, index_n_heads=4, index_head_dim=16, index_topk=SHAPE["max_position_embeddings"],
        gated_norm_rank=6,
    ),
    "glm": Glm4MoeLiteConfig(
        **ROUND, **{name: value for name, value in LATENT_EXPERTS.items() if name != "first_k_dense_replace"}
    ),
}
LONG = [*PROMPTS, list(range(60, 110)), [9, 8, 7] * 12]


def saved(name: str, folder: Path) -> Path:
    return save(random_model(MODELS[name], seed=1, dtype=torch.bfloat16), folder)


@pytest.fixture(scope="module", params=["youtu", "youtu, odd"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def youtu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("youtu", tmp_path_factory.mktemp("youtu"))


# ---- the backend ----


class OnGpu(Paged):
    """The sequences of a Paged, over a GPU's cache."""

    def __init__(self, heads: int, latent: LatentSpec, lens: list[int], emulator: Emulator, deterministic: bool) -> None:
        super().__init__(heads, latent, lens, torch.bfloat16)
        ops = CudaOps(emulator, deterministic)
        matrices = [ops.head_matrices(heads, *each.shape[1:], self.dtype) for each in (self.keys, self.values)]
        for made, rows in zip(matrices, (self.keys, self.values), strict=True):
            for head in range(heads):
                made.load(head, rows[head])
        self.weights = LatentWeights(*self.weights[:3], *matrices)
        num_tokens = 16 * self.tables.shape[1]
        backend = CudaAttention(emulator, [self.spec], self.dtype, self.dtype, 16, len(lens), num_tokens, deterministic)
        ((shape, dtype),) = backend.block_parts(self.spec)
        self.cache = (torch.full((self.tables.numel() + 3, *shape), torch.nan, dtype=dtype),)
        self.backend = backend  # type: ignore[assignment]

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = super().angles(positions)
        return cos.float().contiguous(), sin.float().contiguous()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "latent", "lens"), SHAPES)
def test_equal_to_the_formula(heads: int, latent: LatentSpec, lens: list[int], deterministic: bool) -> None:
    """Which makes keys and values of what is kept, as none of the kernels does."""
    emulator = Emulator()
    paged = OnGpu(heads, latent, lens, emulator, deterministic)
    for found, expected in zip(paged.step([0] * len(lens), lens), paged.expected(), strict=True):
        assert (found.double() - expected).norm() / expected.norm() < 1e-2
    is_round = latent.rank % 16 == 0 and latent.rotary_dim % 8 == 0
    assert ("latent_attention" in emulator.launches) == is_round


@pytest.mark.parametrize("index", [1, 3, 6])
def test_the_same_bits_in_any_chunks(index: int) -> None:
    heads, latent, lens = SHAPES[index]
    whole = OnGpu(heads, latent, lens, Emulator(), True)
    at_once = torch.cat(whole.step([0] * len(lens), lens))
    whole.cache = tuple(torch.full_like(side, torch.nan) for side in whole.cache)
    parts: list[list[torch.Tensor]] = [[] for _ in lens]
    done = [0] * len(lens)
    for most in (3, 1, 40, 1, 150):
        counts = [min(most, n - d) for n, d in zip(lens, done, strict=True)]
        for own, found in zip(parts, whole.step(done, counts), strict=True):
            own.append(found)
        done = [d + c for d, c in zip(done, counts, strict=True)]
    assert torch.equal(torch.cat([torch.cat(own) for own in parts]), at_once)


# ---- the engine ----


def agree(found: list[Any], expected: list[Any]) -> None:
    """The same tokens up to where the second best is as good but for roundings, which is seldom."""
    same = 0
    for one, other in zip(found, expected, strict=True):
        mine, theirs = one.outputs[0], other.outputs[0]
        pairs = enumerate(zip(mine.token_ids, theirs.token_ids, strict=True))
        first = next((at for at, (a, b) in pairs if a != b), None)
        same += len(theirs.token_ids) if first is None else first
        if first is not None:
            best = dict(theirs.logprobs[first].top)
            assert mine.token_ids[first] in best, f"token {first}: {mine.token_ids[first]}, of {best}"
            assert max(best.values()) - best[mine.token_ids[first]] < 0.06, f"token {first}: {mine.token_ids[first]}, of {best}"
    assert same > 0.7 * sum(len(each.outputs[0].token_ids) for each in expected), same


def answers(engine: Any, count: int, prompts: list[list[int]] = LONG) -> list[Any]:
    return run(engine, [(prompt, greedy(count, logprobs=3)) for prompt in prompts])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_the_cpu(name: str, deterministic: bool, tmp_path: Path) -> None:
    """Prompts are longer than a step, and wait for each other's chunks."""
    model, device = saved(name, tmp_path), EmulatedDevice()
    found = answers(engine_on(model, device, deterministic=deterministic), 12)
    agree(found, answers(engine_on(model, None), 12))
    assert device.graphs
    other = "decode_attention" if "odd" in name else "latent_attention"
    assert any(entry.startswith(other) for entry in device.launcher.launches)


def test_a_context_of_which_tokens_see_a_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where all is seen nobody computes what would choose."""
    config = MODELS["deepseek v3.2, all are seen"]
    folder = save(random_model(type(config)(**config.to_dict() | {"index_topk": 40}), dtype=torch.bfloat16), tmp_path)
    with pytest.raises(UnsupportedError, match="sparse attention, whose tokens see 40 of up to") as refused:
        engine_on(folder, EmulatedDevice())
    assert "--ctx-size 40" in str(refused.value.hint)
    monkeypatch.setattr(Indexer, "__call__", lambda *_: pytest.fail("what would choose"))
    answers(engine_on(folder, EmulatedDevice(), max_model_len=40), 2, [[5, 6, 7]])


@pytest.mark.parametrize(
    ("capability", "settings"),
    [(90, {"kv_cache_dtype": "int8"}), *itertools.product([75, 90], [{"kv_cache_dtype": "fp8"}, {"dtype": "float16"}])],
    ids=str,
)
def test_other_types_are_as_on_the_cpu(capability: int, settings: dict[str, Any], folder: Path) -> None:
    """A CPU has scales of its own in a cache of fp8, and computes no float16: tokens need not be the same for long."""
    if capability == 75:
        settings = settings | {"dtype": "float16"}
    device = EmulatedDevice(capability=capability)
    found = answers(engine_on(folder, device, **settings), 3)
    expected = answers(engine_on(folder, None), 3)
    same = sum(one.outputs[0].token_ids[0] == other.outputs[0].token_ids[0] for one, other in zip(found, expected, strict=True))
    assert same >= len(LONG) - 1
    assert all(len(each.outputs[0].token_ids) == 3 for each in found)


FEW = {"num_blocks": 7, "max_num_batched_tokens": 13}
OTHERS = [{}, {"eager": True}, FEW, {"max_num_batched_tokens": 5}, {"num_speculative_tokens": 4}]
BEHIND = greedy(20, logprobs=2)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    """What a deterministic GPU answers to each by itself."""
    engine = engine_on(folder, EmulatedDevice(), deterministic=True)
    return [run(engine, [(prompt, BEHIND)], salt=str(i))[0].outputs[0] for i, prompt in enumerate(LONG)]


@pytest.mark.parametrize("more", OTHERS, ids=str)
def test_a_deterministic_gpu_gives_the_same_to_the_bit(more: dict[str, Any], folder: Path, alone: list[Any]) -> None:
    """In any batch and any chunks, behind a preemption, and with guesses."""
    engine = engine_on(folder, EmulatedDevice(), deterministic=True, **more)
    for one, expected in zip(run(engine, [(prompt, BEHIND) for prompt in LONG]), alone, strict=True):
        assert one.outputs[0].token_ids == expected.token_ids
        assert one.outputs[0].logprobs == expected.logprobs
    assert engine.stats().used_blocks == 0
    assert (engine.stats().preemptions > 0) == (more is FEW)


def test_forks_and_found_prefixes_give_what_each_gives_alone(folder: Path) -> None:
    forks_and_found_prefixes(folder, max_tokens=12)


def test_steps_with_guesses_and_found_prefixes_agree_with_the_cpu(folder: Path) -> None:
    device = EmulatedDevice()
    engine = engine_on(folder, device, num_speculative_tokens=4)
    expected = answers(engine_on(folder, None), 12)
    for _ in range(2):
        agree(answers(engine, 12), expected)
    assert device.graphs


def test_a_late_device_gives_the_same(youtu: Path) -> None:
    """Whose groups and rows are brought to it, and found there, when it comes to them."""
    for settings in ({}, {"deterministic": True, "num_speculative_tokens": 4}):
        expected = tokens(engine_on(youtu, EmulatedDevice(), **settings), greedy(8), LONG)
        with LateDevice() as device:
            assert tokens(engine_on(youtu, device, **settings), greedy(8), LONG) == expected
        assert device.races == []


def test_launches_of_a_decode_step(folder: Path) -> None:
    """Projections of what is kept, and of queries in one step or two; rows, products with keys, attention, products with values;
    output, and the MLP's two."""
    assert launches_of_a_decode_step(folder) <= 10 * SHAPE["num_hidden_layers"] + 6


def test_attention_of_a_decode_step(youtu: Path) -> None:
    device = EmulatedDevice()
    engine = engine_on(youtu, device, eager=True)
    engine.add("a", [3, 4, 5], greedy(20))
    for _ in range(4):
        engine.step()
    before = dict(device.launcher.launches)
    engine.step()
    layers = SHAPE["num_hidden_layers"]
    more = {entry: count - before.get(entry, 0) for entry, count in device.launcher.launches.items()}
    assert (more["latent_rows"], more["head_matmul"], more["latent_attention"]) == (layers, 2 * layers, layers)
    assert not more.get("decode_attention")


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"num_speculative_tokens": 16}], ids=str)
def test_no_answer_waits_for_the_compiler(settings: dict[str, Any], folder: Path) -> None:
    assert kernels_not_rehearsed(folder, **settings) == set()


def test_a_cache_has_one_row_a_token(youtu: Path) -> None:
    worker = engine_on(youtu, EmulatedDevice())._executor
    assert [[part.shape[1:] for part in layer] for layer in worker._caches[0].layers] == [[(1, 16, 80)]] * 2
    assert worker.block_bytes == 2 * 16 * 80 * 2


def test_blocks_are_taken_out_and_put_elsewhere(youtu: Path) -> None:
    """As by a KV file, and by who writes where others read."""
    engine = engine_on(youtu, EmulatedDevice(), num_blocks=12)
    tokens(engine, greedy(4), [list(range(60, 110))])
    worker = engine._executor
    (layers,) = (cache.layers for cache in worker._caches)
    used = [block for block in range(12) if layers[0][0][block].any()]
    free = [block for block in range(12) if block not in used][: len(used)]
    assert len(used) >= 3
    worker.write_blocks(free, free, worker.read_blocks(used, used))
    for (layer,) in layers:
        assert torch.equal(layer[free], layer[used])
    worker._caches[0].copy_blocks([(used[0], used[1]) * 2])
    for (layer,) in layers:
        assert torch.equal(layer[used[1]], layer[free[0]])


@pytest.mark.parametrize(
    ("starts", "kv_lens", "lens", "sequences"),
    [
        ([0, 3, 4, 6], [10, 1, 2], [8, 9, 10, 1, 1, 2], [0, 0, 0, 1, 2, 2]),
        ([0, 1, 2, 3], [7, 0, 0], [7, 0, 0], [0, 1, 2]),  # a bucket with padding
        ([0, 2, 3, 3], [5, 4, 0], [4, 5, 4], [0, 0, 1]),  # guesses: places of sequences that there aren't
    ],
)
def test_tokens_know_their_sequence(
    starts: list[int], kv_lens: list[int], lens: list[int], sequences: list[int], youtu: Path
) -> None:
    backend = engine_on(youtu, EmulatedDevice())._executor.model.backend
    assert isinstance(backend, CudaAttention)
    none, count = torch.empty(0, dtype=torch.int64), torch.zeros(starts[-1], dtype=torch.int64)
    numbers = (torch.tensor(starts, dtype=torch.int32), torch.tensor(kv_lens, dtype=torch.int32))
    rows = backend.decode_step(Batch(count, count, count, *numbers, numbers[-1], none, none, none, none), {}).rows
    assert rows is not None
    assert (rows.lens.tolist(), rows.sequences.tolist()) == (lens, sequences)
