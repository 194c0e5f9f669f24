"""A conversation's KV on disk: another process goes on with the same bits, and what is not surely ours is not used."""

from __future__ import annotations

import json
import os
import resource
import shutil
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

import forked
from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import SMALL, greedy, random_model, run, save
from nanovllm_cli import LLM, EngineConfig
from nanovllm_cli.engine import kv_file
from nanovllm_cli.errors import DoesNotFitError, OutputError
from test_cuda_engine import SHAPE, engine_on
from test_llm import VOCAB, write_byte_tokenizer

TURN = [(7 * i) % 251 for i in range(100)]  # six full blocks and four tokens
PARAMS = greedy(5, logprobs=2)


def model_folder(folder: Path, **changes: Any) -> Path:
    config = LlamaConfig(**SMALL | {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 4608} | changes)
    save(random_model(config), folder)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "nanovllm"


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, config=EngineConfig(**{"threads": 2, "num_blocks": 300, "device": "cpu"} | settings))


def answer(llm: LLM, ids: list[int]) -> tuple[Any, int]:
    """What it says and with which log-probabilities, to the bit; and how many tokens of the prompt it found."""
    (output,) = llm.generate(ids, PARAMS)
    first = output.outputs[0]
    return (first.token_ids, first.logprobs), output.metrics.num_cached_tokens


def conversation(llm: LLM, turn: list[int] = TURN) -> list[int]:
    (token_ids, _), _ = answer(llm, turn)
    return [*turn, *token_ids]


@pytest.fixture(scope="module")
def shared(folder: Path) -> LLM:
    return load(folder)


@pytest.fixture
def saved(shared: LLM, tmp_path: Path) -> Path:
    """Six blocks."""
    path = tmp_path / "turn.kv"
    assert shared.save_kv(conversation(shared), path) == 96
    return path


@pytest.fixture
def fresh(folder: Path) -> Iterator[LLM]:
    """Whatever is asked of it, no block is lost."""
    llm = load(folder)
    yield llm
    stats = llm.stats()
    assert (stats.used_blocks, stats.free_blocks + stats.cached_blocks) == (0, 300)


CHILD = """
import json, sys
from pathlib import Path
from nanovllm_cli import LLM, EngineConfig, SamplingParams
llm = LLM(sys.argv[1], config=EngineConfig(threads=2, num_blocks=300, device="cpu"))
path, ids = Path(sys.argv[2]), json.loads(sys.argv[3])
params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2)
"""
SAVES = CHILD + """
(first,) = llm.generate(ids, params)
said = [*ids, *first.outputs[0].token_ids]
kept = llm.save_kv(said, path)
second = [*said, *range(40, 50)]
(output,) = llm.generate(second, params)
print(json.dumps([kept, second, repr(output.outputs[0])]))
"""
LOADS = CHILD + """
found = llm.load_kv(path)
(output,) = llm.generate(ids, params)
print(json.dumps([found, output.metrics.num_cached_tokens, llm.stats().scheduled_tokens, repr(output.outputs[0])]))
"""


def child(program: str, folder: Path, path: Path, ids: list[int]) -> Any:
    command = [sys.executable, "-c", program, str(folder), str(path), json.dumps(ids)]
    return json.loads(forked.run(command, capture_output=True, text=True, check=True).stdout)


def test_another_process_answers_a_conversation_of_4000_tokens_at_once(shared: LLM, folder: Path, tmp_path: Path) -> None:
    answer(shared, TURN)  # compiles the kernels: code that comes from the cache has bits of its own
    path = tmp_path / "turn.kv"
    kept, second, uninterrupted = child(SAVES, folder, path, [(11 * i + i // 251) % 251 for i in range(4000)])
    assert kept == 4000
    found, cached, computed, output = child(LOADS, folder, path, second)
    assert (found, cached) == (4000, 4000)
    assert computed == len(second) - 4000 + 4, "the new tokens, and each drawn one that is fed"
    assert output == uninterrupted


@pytest.mark.parametrize("settings", [
    {"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    {"cache_type_k": "int8", "cache_type_v": "fp8"}, {"dtype": "bfloat16", "cache_type_v": "fp8"}, {"quant": "int8"},
])  # fmt: skip
def test_what_follows_has_the_same_bits(folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    first = load(folder, **settings)
    second_turn = [*conversation(first), 9, 8, 7]
    assert first.save_kv(second_turn, tmp_path / "kv") == 96
    expected = load(folder, **settings, enable_prefix_caching=False)
    other = load(folder, **settings)
    assert other.load_kv(tmp_path / "kv") == 96
    assert answer(other, second_turn) == (answer(expected, second_turn)[0], 96)


@needs_emulation
@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "fp8"}])
def test_a_gpu_goes_on_with_the_same_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = save(random_model(LlamaConfig(**SHAPE), dtype=torch.bfloat16), tmp_path / "model")
    prompt, params = list(range(20, 57)), greedy(4, logprobs=1)
    first, second = (engine_on(folder, EmulatedDevice(), **settings) for _ in range(2))
    (whole,) = run(first, [(prompt, params)])
    said = [*prompt, *whole.outputs[0].token_ids, 5]
    assert first.kv_files.save(tmp_path / "kv", "me", said) == 32
    assert second.kv_files.load(tmp_path / "kv", "me") == 32
    (expected,), (found,) = (run(engine, [(said, params)]) for engine in (first, second))
    assert found.metrics.num_cached_tokens == 32
    assert found.outputs == expected.outputs


def test_only_full_blocks_that_are_cached_are_saved(shared: LLM, tmp_path: Path) -> None:
    said = conversation(shared)
    path = tmp_path / "kv"
    assert shared.save_kv([250, *said], path) == 0
    assert shared.save_kv(said[:15], path) == 0
    assert not path.exists()
    assert shared.save_kv([*said[:40], *[3] * 60], path) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_loaded_blocks_are_cached_ones_like_others(saved: Path, folder: Path) -> None:
    llm = load(folder, num_blocks=8)
    assert llm.load_kv(saved) == llm.load_kv(saved) == 96
    assert llm.stats()[2:5] == (2, 0, 6)
    assert answer(llm, [251 - i % 9 for i in range(100)])[1] == 0  # seven blocks, of which five were ours
    assert answer(llm, TURN)[1] == 16


def test_a_cache_that_is_too_small_keeps_the_beginning(saved: Path, folder: Path, shared: LLM) -> None:
    llm = load(folder, num_blocks=4)
    assert llm.load_kv(saved) == 64
    assert llm.stats().cached_blocks == 4
    assert answer(llm, TURN[:50]) == (answer(shared, TURN[:50])[0], 48)


def test_blocks_that_are_known_are_shared(saved: Path, fresh: LLM, shared: LLM) -> None:
    answer(fresh, [*TURN[:40], 1, 2])
    assert fresh.stats().cached_blocks == 2
    assert fresh.load_kv(saved) == 96
    assert fresh.stats().cached_blocks == 6
    assert answer(fresh, TURN) == (answer(shared, TURN)[0], 96)


def refused(llm: LLM, path: Path, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    assert llm.load_kv(path) == 0
    assert llm.stats().cached_blocks == 0
    (record,) = caplog.records
    return str(record.message)


@pytest.mark.parametrize("settings", [
    {"dtype": "bfloat16"}, {"quant": "int8"}, {"cache_type_k": "int8", "cache_type_v": "fp8"}, {"deterministic": True},
])  # fmt: skip
def test_other_settings_are_refused(
    saved: Path, folder: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert "another model, other settings" in refused(load(folder, **settings), saved, caplog)


def test_other_weights_are_refused(saved: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    weights = other / "model.safetensors"
    stamp = os.stat(folder / "model.safetensors").st_mtime_ns
    os.utime(weights, ns=(stamp, stamp))
    assert load(other).load_kv(saved) == 96, "the same model at another place"
    os.utime(weights, ns=(stamp, stamp + 1))
    assert "another model" in refused(load(other), saved, caplog)
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1  # of 13 KB; what lies between samples shows by its time
    save_file(tensors, weights, {"format": "pt"})
    os.utime(weights, ns=(stamp, stamp))
    assert "another model" in refused(load(other), saved, caplog)


def test_another_program_is_refused(
    saved: Path, fresh: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm_cli.llm.program_digest", lambda: "newer")
    assert "another version" in refused(fresh, saved, caplog)


def test_somebody_elses_file_is_refused(saved: Path, fresh: LLM, state: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = state / "kv.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.unlink()
    assert "not saved by this user" in refused(fresh, saved, caplog)
    key.write_bytes(b"short")
    assert "damaged" in refused(fresh, saved, caplog)


def test_one_wrong_byte_anywhere_is_noticed(saved: Path, fresh: LLM, caplog: pytest.LogCaptureFixture) -> None:
    good = saved.read_bytes()
    step = len(good) // 97
    for at in [0, 7, 8, 11, 12, *range(13, len(good), step), len(good) - 1]:
        saved.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        assert refused(fresh, saved, caplog)
    saved.write_bytes(good)
    assert fresh.load_kv(saved) == 96


def _lengthened(data: bytes, length: int) -> bytes:
    return data[:8] + struct.pack("<I", length) + data[12:]


def _swapped(data: bytes) -> bytes:
    """The last two blocks with their tags in the other order."""
    size = (len(data) - 12 - struct.unpack("<I", data[8:12])[0] - 32) // 6
    return data[: -2 * size] + data[-size:] + data[-2 * size : -size]


@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: data[:11], lambda data: data[:50], lambda data: data[:-1], lambda data: data[:-5000],
    lambda data: data + b"\0", lambda data: b"x" * 1000, lambda data: _lengthened(data, 2**32 - 1),
    lambda data: _lengthened(data, len(data)), lambda data: _lengthened(data, 0), _swapped,
])  # fmt: skip
def test_a_file_that_was_cut_or_put_together_is_refused(
    saved: Path, fresh: LLM, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    saved.write_bytes(damage(saved.read_bytes()))
    assert refused(fresh, saved, caplog)


def test_paths_that_are_no_files_are_refused(fresh: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in refused(fresh, tmp_path / "pipe", caplog)
    assert "not a file" in refused(fresh, tmp_path, caplog)
    caplog.set_level("INFO", "nanovllm_cli")
    assert "no such file" in refused(fresh, tmp_path / "nothing", caplog)


def test_without_a_prefix_cache_there_is_nothing_to_save_or_find(
    saved: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = load(folder, enable_prefix_caching=False)
    assert llm.save_kv(conversation(llm), tmp_path / "none") == 0
    assert "switched off" in refused(llm, saved, caplog)


def test_angles_of_another_length_are_not_used(tmp_path: Path) -> None:
    """Dynamic NTK: past the original length every length has its own angles, so a longer prompt can use nothing."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = model_folder(tmp_path / "model", rope_parameters=scaling, max_position_embeddings=64)
    llm, other = load(model), load(model)
    for ids, kept in ((TURN[:40], 32), (TURN[:70], 64)):
        answer(llm, ids)
        assert llm.save_kv(ids, tmp_path / f"{kept}") == kept
    assert other.load_kv(tmp_path / "32") == 32
    assert answer(other, TURN[:50]) == (answer(load(model), TURN[:50])[0], 32)
    assert other.load_kv(tmp_path / "64") == 64
    assert answer(other, TURN[:80]) == (answer(load(model), TURN[:80])[0], 0)
    assert answer(other, TURN[:70])[1] == 64


def test_a_prompt_that_is_text_is_as_long_as_its_tokens(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = model_folder(tmp_path / "model", rope_parameters=scaling, max_position_embeddings=64)
    text, llm = "é" * 40, load(model)
    llm.generate(text, PARAMS)
    assert llm.save_kv(text, tmp_path / "kv") == 80
    assert load(model).load_kv(tmp_path / "kv", text) == 80


KILLED = CHILD + """
import os, signal
from nanovllm_cli.engine import kv_file
llm.generate(ids, params)
tag, tags = kv_file._tag, []
def dying(*args):
    tags.append(0)
    if len(tags) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return tag(*args)
kv_file._tag = dying
llm.save_kv(ids, path)
"""


def test_a_save_that_is_killed_leaves_what_was_there(saved: Path, folder: Path, shared: LLM, fresh: LLM) -> None:
    before = saved.read_bytes()
    command = [sys.executable, "-c", KILLED, str(folder), str(saved), json.dumps(list(range(1, 200)))]
    assert forked.run(command, capture_output=True).returncode == -9
    assert len(list(saved.parent.glob(".*.partial"))) == 1
    assert saved.read_bytes() == before
    assert fresh.load_kv(saved) == 96
    assert shared.save_kv(conversation(shared), saved) == 96
    assert not list(saved.parent.glob(".*.partial"))


def test_two_processes_that_want_their_first_key_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytes] = []
    other = threading.Thread(target=lambda: keys.append(kv_file._own_key()))

    def meanwhile(count: int) -> bytes:
        monkeypatch.setattr(os, "urandom", urandom)
        other.start()
        other.join(0.1)
        return urandom(count)

    urandom = os.urandom
    monkeypatch.setattr(os, "urandom", meanwhile)
    keys.append(kv_file._own_key())
    other.join()
    assert len(keys) == 2
    assert keys[0] == keys[1] == kv_file._own_key()


def test_a_full_disk_leaves_what_was_there(shared: LLM, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    said = conversation(shared, list(range(1, 200)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OutputError, match="cannot write"):
            shared.save_kv(said, saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 1000, 0))
    with pytest.raises(DoesNotFitError):
        shared.save_kv(said, saved)
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir() if file.name.endswith(".partial")] == []


def test_more_than_a_slice_comes_back_whole(
    shared: LLM, fresh: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_file, "SLICE_BYTES", 4 * shared._worker.block_bytes + 1)
    said = conversation(shared, [(5 * i) % 241 for i in range(150)])  # nine blocks: two slices, and one of one
    assert shared.save_kv(said, tmp_path / "kv") == 144
    answer(fresh, said[:110])  # six blocks are known: one slice, and half of the next
    assert fresh.load_kv(tmp_path / "kv") == 144
    assert answer(fresh, said) == (answer(shared, said)[0], 144)
