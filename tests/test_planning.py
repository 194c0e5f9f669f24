"""What changes a plan: all that changes what an engine takes. Numbers are worked out by hand from the bundled model's shape."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emulation.device import EmulatedDevice
from engines import random_model, save, worker_for
from forked_commands import Commands
from nanovllm_cli.bench.roofline import Roofline
from nanovllm_cli.cli import plan as plan_command
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine import cuda_platform
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.memory import OVERHEAD_BYTES, size_cache
from nanovllm_cli.errors import DoesNotFitError
from nanovllm_cli.planning import estimate, facts, plan
from nanovllm_cli.planning.estimate import Speed, WeightPlan
from nanovllm_cli.planning.plan import Plan, make_plan
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.shapes import RANDOM
from quantizing import TINY
from test_models import CASES

LAYERS, KV_HEADS, DIM, MOST = 4, 2, 64, 2048
SPEED = Speed(20.0, {"fp32": 100.0, "bf16": 200.0, "int8": 400.0})
GIB = 1 << 30


def planned(formats: list[str] | None = None, answers: int = 1, **settings: Any) -> Plan:
    with open_checkpoint(TINY) as checkpoint:
        return make_plan(checkpoint, EngineConfig(**{"device": "cpu", **settings}), formats, SPEED, answers=answers)


@pytest.mark.parametrize(
    ("inner", "names", "reason"),
    [
        (192, [None, "int8", "fp8", "int4:group=64", "nf4"], None),
        (160, [None, "int8", "fp8", "int4:group=32", "nf4:group=32"], None),
        (168, [None, "int8", "fp8"], "rows of 168 don't divide into groups of 32"),
    ],
)
def test_formats_have_the_largest_groups_that_rows_divide_into(
    inner: int, names: list[str | None], reason: str | None, tmp_path: Path
) -> None:
    """And where none divides them, it is said."""
    config = json.loads((TINY / "config.json").read_text()) | {"intermediate_size": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_checkpoint(f"{RANDOM}{tmp_path / 'config.json'}") as checkpoint:
        made = make_plan(checkpoint, EngineConfig(device="cpu"), None, SPEED)
    assert [row.quant for row in made.formats] == names
    assert len(made.left_out) == len(made.as_json()["left_out"]) == (2 if reason else 0)
    assert all(reason in line for line in made.left_out if reason)


@pytest.mark.parametrize("case", ["qwen3.5", "lfm2", "jamba"])
def test_taps_need_not_divide_into_groups(case: str, tmp_path: Path) -> None:
    """They stay numbers: a model whose matrices can be had in a format can be had in it, as its loading shows."""
    sizes = {
        "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "block_auto_adjust_ff_dim": False,
    }  # fmt: skip
    values = CASES[case].to_dict()
    config = type(CASES[case])(**values | {name: size for name, size in sizes.items() if name in values})
    save(random_model(config), tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        made = make_plan(checkpoint, EngineConfig(device="cpu"), None, SPEED)
    assert [row.quant for row in made.formats] == [None, "int8", "fp8", "int4", "nf4"]
    assert not made.left_out
    assert made.formats[3].format in {str(form and form.name) for form in worker_for(tmp_path, quant="int4").formats}


def test_keys_and_values_are_counted_in_the_types_that_were_asked_for() -> None:
    made = planned(answers=3, max_model_len=1000, cache_type_k="int8")
    tokens = 1008  # 63 whole blocks of 16
    assert made.cache_bytes == 3 * tokens * LAYERS * KV_HEADS * ((DIM + 4) + 2 * DIM)
    assert {(row.cache_type, row.context) for row in made.cache} == {("int8, bfloat16", 1000), ("int8, bfloat16", MOST)}
    assert made.batches == (1, 3, 8, 32)
    assert made.cache[0].num_bytes[1] == made.cache_bytes
    both = planned(kv_cache_dtype="fp8")
    assert {row.cache_type for row in both.cache} == {"fp8"}
    assert {row.cache_type for row in planned().cache} == {"bfloat16", "int8", "fp8"}


@pytest.mark.parametrize(
    ("free", "weights", "config", "room"),
    [
        (20 * GIB, 4 * GIB, {}, 8 * GIB),  # the engine leaves half of what is free to others
        (20 * GIB, 4 * GIB, {"kv_cache_bytes": 12 * GIB}, 12 * GIB),
        (20 * GIB, 4 * GIB, {"kv_cache_bytes": 18 * GIB}, 16 * GIB - OVERHEAD_BYTES),
        (4 * GIB, 4 * GIB, {}, 0),
        (4 * GIB, 5 * GIB, {"kv_cache_bytes": GIB}, 0),
    ],
)
def test_the_cache_gets_what_the_engine_would_give_it(free: int, weights: int, config: dict[str, Any], room: int) -> None:
    assert estimate.cache_room(EngineConfig(**config), free, weights, is_cpu=True) == room


def test_the_longest_context_is_the_longest_that_an_engine_takes() -> None:
    """A room of 40 blocks and a bit: what the plan says is taken, one token more is not."""
    block = 16 * LAYERS * KV_HEADS * DIM * 4
    room = 40 * block + 100
    made = planned(kv_cache_bytes=room)
    longest = made.formats[0].longest_context
    assert longest == 640
    assert size_cache(EngineConfig(max_model_len=longest, kv_cache_bytes=room), MOST, block, 0).max_model_len == longest
    with pytest.raises(DoesNotFitError):
        size_cache(EngineConfig(max_model_len=longest + 1, kv_cache_bytes=room), MOST, block, 0)
    assert [planned(kv_cache_bytes=room, max_model_len=length).fits for length in (640, 641)] == [True, False]
    assert planned(kv_cache_bytes=room, answers=3).formats[0].longest_context == 13 * 16


@pytest.mark.parametrize(
    ("settings", "budget", "blocks", "states"),
    [
        ({}, 10**9, 4 * 64, 4 + 4 + 8),  # room for everything: four contexts of 1,024 tokens
        ({"enable_prefix_caching": False}, 10**9, 4 * 64, 4),
        ({}, 64 * 1000 + 2 * 50_000, 64, 2),  # a context, and what it leaves
        ({}, 60_000, 10, 1),  # less than a context: a half for states, which is one of them
        ({"max_model_len": 512}, 32 * 1000 + 50_000, 32, 1),  # what was asked for comes first
        ({"num_blocks": 7}, 0, 7, 4 + 4 + 8),
        ({"kv_cache_bytes": 64 * 1000 + 3 * 50_000}, 0, 64, 3),
    ],
    ids=str,
)
def test_states_get_what_a_context_leaves(settings: dict[str, Any], budget: int, blocks: int, states: int) -> None:
    config = EngineConfig(max_num_seqs=4, **settings)
    found = size_cache(config, 1024, 1000, budget, 50_000)
    assert (found.num_blocks, found.num_states) == (blocks, states)


def test_room_for_no_state_is_said() -> None:
    with pytest.raises(DoesNotFitError, match=r"one block of 16 tokens takes 1 KiB, the state of a sequence 49 KiB"):
        size_cache(EngineConfig(), 1024, 1000, 50_500, 50_000)


def test_a_context_that_the_model_does_not_have_is_refused_as_by_run() -> None:
    with pytest.raises(DoesNotFitError, match="the model holds 2048"):
        planned(max_model_len=MOST + 1)
    assert planned(max_model_len=MOST).context == MOST


def test_defaults_of_a_gguf_file_are_told_as_they_were_meant() -> None:
    # the float32 nearest to 0.95 and to 0.6, as doubles
    told = facts.generation_defaults({"top_p": 0.949999988079071044921875, "temperature": 0.60000002384185791015625, "top_k": 20})
    assert told == {"top_p": 0.95, "temperature": 0.6, "top_k": 20}


def test_exact_activations_and_small_steps_cost_speed() -> None:
    def prefill(**settings: Any) -> float:
        rate = planned(["int8"], **settings).formats[0].prefill
        assert rate is not None
        return rate

    assert prefill() == pytest.approx(2 * prefill(activations="exact")), "whole numbers are multiplied twice as fast here"
    assert prefill(activations="rounded", dtype="float32") == pytest.approx(prefill())
    reads = planned(["int8"]).formats[0].weight_bytes / 20e9
    assert prefill(max_num_batched_tokens=1) == pytest.approx(1 / reads, rel=0.01), "every token reads the weights again"


def test_a_token_takes_as_long_as_reading_or_computing_whichever_is_longer() -> None:
    facts, weights = planned().facts, WeightPlan("any", 5000, 3000, "int8")
    slow_memory, slow_sums = Speed(1e-6, {"int8": 1e9}), Speed(1e9, {"int8": 1.0})  # 1000 bytes, 1e9 operations a second
    assert estimate.decode_rate(facts, weights, 2.0 * 500, slow_memory, depth=500) == pytest.approx(1000 / (3000 + 2 * 500))
    multiplied = 4 * (3 * 256 * 256 + 3 * 256 * 640) + 4096 * 256  # q with k and v, o, the MLP; the head
    for window, seen in ((None, 500), (100, 100), (900, 500)):
        blocks = [replace(block, mixer=replace(block.mixer, window=window)) for block in facts.spec.blocks]
        windowed = replace(facts, spec=replace(facts.spec, blocks=tuple(blocks)))
        operations = 2 * multiplied + 4 * 4 * 4 * 64 * seen  # scores and values; layers, heads, dims
        rate = estimate.decode_rate(windowed, weights, 2.0 * 500, slow_sums, depth=500)
        assert rate == pytest.approx(1e9 / operations, rel=1e-3)


def test_a_gpus_share_bounds_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice(free=3 * GIB)
    monkeypatch.setattr(plan, "select_platform", lambda config, progress: CudaPlatform(config, device, progress))
    total = device.memory().total
    most, less = (planned(["int8"], device="cuda", gpu_memory_utilization=share) for share in (1.0, 0.75))
    assert most.cache_room == 3 * GIB - OVERHEAD_BYTES - most.formats[0].weight_bytes
    assert most.cache_room - less.cache_room == total - int(0.75 * total)
    together = planned(["int8"], device="cuda", gpu_memory_utilization=1.0, tensor_parallel_size=2)
    assert together.cache_room == 2 * (3 * GIB - OVERHEAD_BYTES) - most.formats[0].weight_bytes


def test_what_a_gpu_has_no_room_for_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice(free=3 * GIB)
    monkeypatch.setattr(plan, "select_platform", lambda config, progress: CudaPlatform(config, device, progress))
    whole = planned(["int8"], device="cuda", gpu_memory_utilization=1.0)
    assert whole.formats[0].far_bytes == 0
    monkeypatch.setattr(CudaPlatform, "_beside_weights", lambda *_: 3 * GIB - whole.formats[0].weight_bytes + 1000)
    part = planned(["int8"], device="cuda", gpu_memory_utilization=1.0)
    row = part.formats[0]
    assert 1000 <= row.far_bytes < row.weight_bytes / 2, "a layer, as the head is the embedding"
    assert (row.fits, row.decode, row.prefill) == (True, None, None)
    assert part.cache_room == whole.cache_room + row.far_bytes
    monkeypatch.setattr(cuda_platform, "available_bytes", lambda: 0)
    assert not planned(["int8"], device="cuda", gpu_memory_utilization=1.0).fits


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-np", "3", "-c", "1000", "-ctk", "int8"], "with 3 x 1,000 tokens"),
        (["--kv-cache", "1M", "--quant", "int8"], "where it gets 1.0 MiB"),
        (["--kv-cache-dtype", "fp8"], "fp8"),
    ],
)
def test_the_command_takes_what_serve_takes(words: list[str], says: str) -> None:
    told = Commands(dict(os.environ)).run("plan", "tiny", "--roofline", "off", "--device", "cpu", *words)
    assert told.code == 0, told.err
    assert says in told.out


@pytest.mark.parametrize(("device", "times"), [("cpu", 1), ("cuda", 2)])
def test_gpus_that_compute_together_are_as_fast_as_all_of_them(
    device: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a CPU all is one machine's, however many processes there are."""
    limits = Roofline(10.0, {"bf16": 4.0})
    monkeypatch.setattr("nanovllm_cli.planning.plan.device_of", lambda config: device)
    monkeypatch.setattr("nanovllm_cli.bench.roofline.roofline", lambda *given, **more: limits)
    screen: Any = SimpleNamespace(err=SimpleNamespace(can_show=lambda text: True))
    found = plan_command._speed(EngineConfig(tensor_parallel_size=2), plan_command.PlanOptions(), screen)
    assert found == tuple(limits.times(times))


def test_texts_that_are_read_whole_need_blocks_for_two_steps() -> None:
    """By hand: of 16 tokens, 512 for the longest text and one more for each of nine; never more than nine texts take."""
    config = EngineConfig(max_num_seqs=9, max_num_batched_tokens=2048, block_size=16)
    assert size_cache(config, 8192, 10, 1 << 40, whole=True)[:2] == (2 * (512 + 9), 8192)
    assert size_cache(config, 8192, 10, 1 << 40)[0] == 512 * 9
    assert size_cache(config, 64, 10, 1 << 40, whole=True)[0] == 4 * 9
    assert size_cache(replace(config, max_num_batched_tokens=16384), 8192, 10, 1 << 40, whole=True)[0] == 2 * (1024 + 9)
