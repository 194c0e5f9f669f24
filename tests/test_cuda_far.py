"""Weights that a GPU reads from the machine's memory, emulated: products and tokens to the bit those of weights on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from emulation.late import LateDevice
from engines import SMALL, greedy, random_model, save, worker_for
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine import cuda_platform
from nanovllm_cli.engine.cuda_platform import STEP_BYTES, CudaPlatform
from nanovllm_cli.engine.placement import Part, asked_for, fitted, group_of, in_words
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import DoesNotFitError, UsageError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.quant.cuda_far import SLAB_BYTES, CudaFar, FarMemory
from nanovllm_cli.quant.cuda_formats import CudaFormats
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_cuda_engine import PROMPTS, Notes, engine_on, tokens
from test_quant_engine import difference, logits_of

BF16 = torch.bfloat16
SHAPE = SMALL | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "head_dim": 64,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
NORMS = (5 * 64 + 4 * 64) * BF16.itemsize
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Three layers of which the middle one has experts, in bytes.
SIZES = Counter({
    Part("embedding"): 10, Part("layer", 0): 3, Part("layer", 1): 4, Part("experts", 1): 50, Part("layer", 2): 5,
    Part("head"): 10,
})  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(Qwen3Config(**SHAPE), dtype=BF16), tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(Qwen3MoeConfig(**SHAPE, **EXPERTS), dtype=BF16), tmp_path_factory.mktemp("mixture"))


@needs_emulation
def test_a_copy_is_there_before_the_kernel_behind_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may read a weight before it waits for what is ahead."""
    device, barriers = EmulatedDevice(), []
    formats, plain = CudaFormats(device.launcher, rounds=True, deterministic=False), device.launcher.torch_op
    far = formats.make(parse_format("int8"), 160, 256, BF16, FarMemory(device))
    monkeypatch.setattr(device.launcher, "torch_op", lambda op, barrier=False: (barriers.append(barrier), plain(op)))
    far.matmul(torch.zeros(9, 256, dtype=BF16), None, BF16)
    assert barriers[:2] == [True, True]


@needs_emulation
@pytest.mark.parametrize("quant", [None, "int8", "int4:group=32", "q4_k"])
def test_products_have_the_bits_of_a_weight_on_the_gpu(quant: str | None) -> None:
    """One row or eight where the weight is, nine of a copy; of rows that were loaded in two pieces, of a second slab too."""
    device = EmulatedDevice()
    formats, memory = CudaFormats(device.launcher, rounds=True, deterministic=False), FarMemory(device)
    memory.take(torch.empty(SLAB_BYTES - 4096, dtype=torch.uint8, device="meta"))
    sizes = (None if quant is None else parse_format(quant), 160, 256, BF16)
    near, far = formats.make(*sizes), formats.make(*sizes, memory)
    assert isinstance(far, CudaFar)
    rows = torch.randn(160, 256)
    for first in (0, 128):
        near.load_rows(first, rows[first : first + 128].to(BF16))
        far.load_rows(first, rows[first : first + 128].to(BF16))
    assert far.num_bytes == near.num_bytes
    assert device.num_pages == 2 * SLAB_BYTES
    for count in (1, 8, 9):
        x, residual = torch.randn(count, 256).to(BF16), torch.randn(count, 160).to(BF16)
        assert torch.equal(far.matmul(x, None, torch.float32), near.matmul(x, None, torch.float32))
        assert torch.equal(far.gated_matmul(x, None, "silu"), near.gated_matmul(x, None, "silu"))
        sums = [residual.clone(), residual.clone()]
        far.add_matmul(x, None, sums[0])
        near.add_matmul(x, None, sums[1])
        assert torch.equal(*sums)
    ids = torch.tensor([3, 159])
    assert torch.equal(far.rows(ids, None), near.rows(ids, None))


@needs_emulation
@pytest.mark.parametrize(
    "settings", [{"n_gpu_layers": 0}, {"n_gpu_layers": 1, "eager": True}, {"n_gpu_layers": 2, "quant": "int8"}]
)
def test_tokens_are_the_same(settings: dict[str, Any], dense: Path) -> None:
    device, usual = EmulatedDevice(), {name: value for name, value in settings.items() if name != "n_gpu_layers"}
    expected = tokens(engine_on(dense, EmulatedDevice(), **usual), greedy(6))
    assert tokens(engine_on(dense, device, **settings), greedy(6)) == expected
    assert device.num_pages == SLAB_BYTES
    assert bool(device.graphs) != settings.get("eager", False)


@needs_emulation
@pytest.mark.parametrize("settings", [{"n_cpu_moe": 1}, {"n_gpu_layers": 0, "deterministic": True}])
def test_tokens_of_experts_are_the_same(settings: dict[str, Any], mixture: Path) -> None:
    device, usual = EmulatedDevice(), {"deterministic": settings.get("deterministic", False)}
    expected = tokens(engine_on(mixture, EmulatedDevice(), **usual), greedy(6))
    assert tokens(engine_on(mixture, device, **settings), greedy(6)) == expected
    assert device.graphs


@needs_emulation
def test_experts_of_many_tokens_have_matmuls_of_their_own(mixture: Path) -> None:
    """Eight pairs an expert are sixteen tokens here. What comes out is as near to float32 on a CPU as of experts on the GPU."""
    sizes = {"max_num_batched_tokens": 32, "num_blocks": 64}
    near, far = (worker_on(mixture, EmulatedDevice(), **sizes, n_cpu_moe=count) for count in (0, 2))
    assert (near.model.most_unread, far.model.most_unread) == (float("inf"), 16)
    expected = logits_of(worker_for(mixture, dtype="float32"), PROMPTS)
    assert difference(logits_of(far, PROMPTS), expected) < 1.2 * difference(logits_of(near, PROMPTS), expected)


@needs_emulation
def test_a_late_device_gives_the_same(dense: Path) -> None:
    """Which copies weights when it comes to them, and tells its memory from the host's."""
    settings = {"n_gpu_layers": 1, "quant": "int4:group=32"}
    expected = tokens(engine_on(dense, EmulatedDevice(), **settings), greedy(6))
    with LateDevice() as device:
        assert tokens(engine_on(dense, device, **settings), greedy(6)) == expected
    assert device.races == []


def worker_on(path: Path, device: EmulatedDevice, notes: Notes | None = None, **settings: Any) -> Worker:
    usual = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "dtype": "bfloat16", "max_model_len": 64}
    config = EngineConfig(**usual | settings)
    with open_checkpoint(path) as checkpoint:
        return Worker(checkpoint, config, platform=CudaPlatform(config, device, notes))


@needs_emulation
def test_what_does_not_fit_goes_by_itself(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding and the experts of the first layer where a byte more than the embedding is missing; and this is told."""
    notes, share = Notes(), int(0.9 * EmulatedDevice().free)
    on_the_gpu = worker_on(mixture, EmulatedDevice(), notes)
    assert (on_the_gpu.placement.far, notes.notes) == (frozenset(), [])
    needed, embedding = on_the_gpu.weight_bytes + NORMS, SHAPE["vocab_size"] * SHAPE["hidden_size"] * BF16.itemsize
    monkeypatch.setattr(CudaPlatform, "_beside_weights", lambda *_: share - needed + embedding + 1)
    worker = worker_on(mixture, EmulatedDevice(), notes)
    assert worker.placement.far == {Part("embedding"), Part("experts", 0)}
    assert worker.weight_bytes == on_the_gpu.weight_bytes
    where = (worker.spec, worker.model.backend, needed, lambda: {Part("embedding"): embedding, Part("experts", 0): 1000})
    monkeypatch.setattr(CudaPlatform, "_beside_weights", lambda *_: share - needed)
    places = [worker.platform.place(*where, organs=num_bytes).far for num_bytes in (0, 1)]
    assert places == [frozenset(), {Part("embedding")}], "what sees has its room, too"
    (note, _) = notes.notes
    assert note == "0.0 of 0.0 GiB of weights stay in the machine's memory, as the GPU has room for 0.0 (--n-cpu-moe 1)"


@needs_emulation
def test_what_was_asked_for_is_kept_or_refused(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice(free=STEP_BYTES + 1000)
    with pytest.raises(DoesNotFitError, match=r"of the GPU's memory, and 0\.4 GiB are free") as refused:
        worker_on(dense, device, n_gpu_layers=3)
    assert "leave --n-gpu-layers out" in str(refused.value.hint)
    monkeypatch.setattr(cuda_platform, "available_bytes", lambda: 1 << 20)
    with pytest.raises(DoesNotFitError, match="that the GPU has no room for need the machine's memory"):
        worker_on(dense, EmulatedDevice(), n_gpu_layers=0)
    with pytest.raises(UsageError, match="n_gpu_layers must be at least 0"):
        EngineConfig(n_gpu_layers=-1)


@pytest.mark.parametrize(
    ("layers", "experts", "expected"),
    [
        (None, 0, set()),
        (4, 0, set()),
        (99, 0, set()),
        (3, 0, {"embedding", "layer 0", "experts 0"}),
        (1, 0, {"embedding", "layer 0", "experts 0", "layer 1", "experts 1", "layer 2", "experts 2"}),
        (0, 0, {"embedding", "layer 0", "experts 0", "layer 1", "experts 1", "layer 2", "experts 2", "head 0"}),
        (None, 2, {"experts 0", "experts 1"}),
        (3, 2, {"embedding", "layer 0", "experts 0", "experts 1"}),
        (4, 9, {"experts 0", "experts 1", "experts 2"}),
    ],
)
def test_layers_are_counted_as_llama_cpp_counts_them(layers: int | None, experts: int, expected: set[str]) -> None:
    """The last ones, the head being one."""
    config = replace(EngineConfig(), n_gpu_layers=layers, n_cpu_moe=experts)
    assert {f"{each.kind} {each.layer}".replace("embedding 0", "embedding") for each in asked_for(config, 3)} == expected


def test_what_costs_least_goes_first() -> None:
    needed = sum(SIZES.values()) + 7  # norms
    shape = SHAPE | {"num_hidden_layers": 3, "mlp_only_layers": [0, 2], "architectures": ["Qwen3MoeForCausalLM"]}
    config = Qwen3MoeConfig(**shape, **EXPERTS).to_dict()
    spec = spec_from_hf(config, hf_family(config))
    by_room = {}
    for room in range(-1, needed + 1):
        far = fitted(SIZES, frozenset(), 3, needed, room)
        assert needed - sum(SIZES[each] for each in far) <= max(room, 7)
        by_room[room] = in_words(far, spec) if far else ""
    assert [room for room in range(needed) if by_room[room] != by_room[room + 1]] == [16, 21, 25, 28, 78, 88]
    assert list(dict.fromkeys(by_room.values())) == [
        "--n-gpu-layers 0", "--n-gpu-layers 1", "--n-gpu-layers 2", "--n-gpu-layers 3", "--n-cpu-moe 1", "the embedding", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tied", "group"),
    [
        ("embedding.weight", False, Part("embedding")),
        ("embedding.weight", True, Part("head")),
        ("per_layer_embedding.weight", True, Part("embedding")),
        ("head.weight", False, Part("head")),
        ("blocks.3.q.weight", False, Part("layer", 3)),
        ("blocks.12.experts.5.gate.weight", False, Part("experts", 12)),
        ("blocks.3.shared.gate.weight", False, Part("layer", 3)),
        ("blocks.3.router.weight", False, None),
        ("norm.weight", False, None),
    ],
)
def test_weights_belong_to_groups(name: str, tied: bool, group: Part | None) -> None:
    assert group_of(name, tied=tied) == group
