"""A model that several processes compute gives what one process gives, to the bit, whatever it is made of."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    Mamba2Config,
    Phi3Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Zamba2Config,
)

from engines import SMALL, engine_for, random_model, run, save, worker_for
from live_server import live_server
from nanovllm_cli import LLM, EngineConfig, SamplingParams, processors, system
from nanovllm_cli.bench.sweep import Sweep
from nanovllm_cli.distributed.division import LEAST_ROWS, STEP, Division, bounds, own_parts
from nanovllm_cli.engine import ranks
from nanovllm_cli.engine.plan import Copy, NewSequence, Plan, Scheduled
from nanovllm_cli.engine.rank_messages import Begin, Line, Run, ToRank
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import CheckpointError, LostProcessError, ModelNotFoundError, UnsupportedError, UsageError
from nanovllm_cli.planning import estimate
from nanovllm_cli.weights.source import resolve
from rank_server import RankServer
from test_llamas import CASES as WITHOUT_TRANSFORMERS
from test_llamas import folder_of, random_tensors
from test_llm import VOCAB, write_byte_tokenizer
from test_models import CASES, DELTA, DELTA_LAYERS, MAMBA2, ZAMBA2
from test_plamo import CASES as PLAMO2
from test_plamo import random_tensors as tensors_of_plamo2
from test_plamo import write as write_plamo2
from tiny_adapter import write_adapter

SHAPE = SMALL | {"hidden_size": 96, "head_dim": 32, "intermediate_size": 320, "num_hidden_layers": 2}
FAMILIES = [
    "llama, bias, tied, group 1", "llama, head dim 80, group 8", "command r",
    "granite 4 h, 2 of 5 and shared", "lfm2, four taps, biases, tied", "lfm3", "olmo2, group 1",
    "olmo, clipped",
    "hy v3, 3 of 5 and shared", "phi3, longrope of a part",
    "mamba2", "nemotron h, 3 of 5 in fewer numbers", "falcon h1", "bitnet", "jamba, 2 of 5, three taps, tied",
    "qwen3 moe, 3 of 5, a dense layer between", "gpt-oss, 2 of 5", "qwen3.5 moe, 2 of 5 and shared",
    "olmo hybrid", "kimi linear, 3 of 5 and shared", "gemma4, numbers a layer", "gemma3n",
    "gemma4, keys are values", "gemma4, 2 of 5 beside", "deepseek v3, 3 of 5 and shared", "youtu",
    "hy 4, a layer goes by another",
    "glm 5, a layer goes by another", "a.x k2, 9 of what is before",
    "hrm, twice three and one", "dory, two layers thrice", "ling 3, 3 of 8 in two of four groups",
    "command a+, 2 of 5 and shared",
    "afmoe, 2 of 5 and shared", "laguna, 2 of 5 and shared", "mimo v2, 2 of 5", "zaya, 1 of 5 or none",
    "mistral4, 3 of 5 and shared",
    "ministral3, queries that grow",
]  # fmt: skip
"""Of those of test_models.py what has parts of its own."""


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()


@pytest.fixture
def quick(server: RankServer, monkeypatch: pytest.MonkeyPatch) -> RankServer:
    """The other process is one that is there already."""
    monkeypatch.setattr(ranks, "start_process", server.start)
    return server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(random_model(Qwen3Config(**SHAPE | {"vocab_size": VOCAB})), tmp_path_factory.mktemp("model"))
    write_byte_tokenizer(folder)
    return folder


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PLAIN = {"ignore_eos": True, "temperature": 0.0}
REQUESTS = [
    (prompt(61), SamplingParams(max_tokens=12, logprobs=3, **PLAIN)),
    (prompt(7, 1), SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True, logprobs=1, n=2)),
    (prompt(33, 2), SamplingParams(max_tokens=2, prompt_logprobs=2, **PLAIN)),
]


def answers(worker: Worker, **settings: Any) -> list[Any]:
    """To the last bit; read in pieces, and drawn together and alone."""
    outputs = run(engine_for(worker, max_num_batched_tokens=48, **settings), REQUESTS)
    return [([(each.token_ids, each.logprobs) for each in output.outputs], output.prompt_logprobs) for output in outputs]


def gives_the_same(folder: Path, size: int = 2, least_saved: float = 1.3, **settings: Any) -> None:
    speculation = {name: settings[name] for name in ("draft_model", "num_speculative_tokens") if name in settings}
    alone, together = worker_for(folder, **settings), worker_for(folder, tensor_parallel_size=size, **settings)
    try:
        assert answers(together, **speculation) == answers(alone, **speculation)
        if "draft_model" not in settings:
            planned = estimate.unit_bytes(together.spec, together.model.backend, size)
            assert planned[:2] == (together.block_bytes, together.state_bytes)
        assert together.weight_bytes >= alone.weight_bytes > least_saved * (together.weight_bytes - together._others.weight_bytes)
    finally:
        together.close()


def test_a_norm_of_groups_in_front_of_a_divided_product(tmp_path: Path, quick: RankServer) -> None:
    wide = {"hidden_size": 128, "num_heads": 8, "head_dim": 32, "n_groups": 2, "num_hidden_layers": 2}
    gives_the_same(save(random_model(Mamba2Config(**MAMBA2 | wide), dtype=torch.bfloat16), tmp_path))


def test_attention_that_layers_share_ahead_of_their_states(tmp_path: Path, quick: RankServer) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "adapter_rank": 16, "n_mamba_heads": 8}
    kinds = {"num_hidden_layers": 2, "num_mem_blocks": 1, "layers_block_type": ["hybrid", "hybrid"],
             "use_shared_attention_adapter": True}
    gives_the_same(save(random_model(Zamba2Config(**ZAMBA2 | wide | kinds)), tmp_path))


def test_experts_that_are_chosen_before_attention(tmp_path: Path, quick: RankServer) -> None:
    found = random_tensors(WITHOUT_TRANSFORMERS["smallthinker"])
    gives_the_same(folder_of(tmp_path / "model", "smallthinker", found), dtype="float32")


def test_scans_whose_heads_share(tmp_path: Path, quick: RankServer) -> None:
    case = PLAMO2["plamo2"]
    gives_the_same(write_plamo2(tmp_path / "model.gguf", case, tensors_of_plamo2(case)), dtype="float32")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str, tmp_path: Path, quick: RankServer) -> None:
    before = quick.num_started
    whole = name.startswith("zaya")  # its convolutions of heads are all processes'
    gives_the_same(save(random_model(CASES[name]), tmp_path), least_saved=1.2 if whole else 1.3)
    assert quick.num_started == before + 1


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"}, {"quant": "int8"}, {"quant": "int4:group=32", "dtype": "bfloat16"}, {"quant": "fp8"},
        {"quant": "nf4:group=32", "dtype": "bfloat16", "kv_cache_dtype": "int8"}, {"quant": "q8_0", "dtype": "bfloat16"},
        {"num_speculative_tokens": 3},
    ],
    ids=str,
)  # fmt: skip
def test_a_setting(settings: dict[str, Any], folder: Path, quick: RankServer) -> None:
    gives_the_same(folder, **settings)


def test_a_draft_model_is_the_first_process_alone(folder: Path, quick: RankServer) -> None:
    gives_the_same(folder, draft_model=str(folder))


def test_blocks_of_fp8_where_shares_begin_with_one(folder: Path, tmp_path: Path, quick: RankServer) -> None:
    wide = SHAPE | {"hidden_size": 128, "head_dim": 128, "num_attention_heads": 2, "intermediate_size": 512}
    gives_the_same(save(random_model(Qwen3Config(**wide)), tmp_path), quant="fp8:block=128")
    with pytest.raises(UnsupportedError, match="shares of the heads don't begin at multiples of 128 rows"):
        worker_for(folder, quant="fp8:block=128", tensor_parallel_size=2)


def test_fused_parts_whose_second_half_begins_within_a_block(tmp_path: Path, quick: RankServer) -> None:
    config = Phi3Config(**SHAPE | {"head_dim": 16, "intermediate_size": 576, "num_key_value_heads": 1, "pad_token_id": 0})
    gives_the_same(save(random_model(config), tmp_path), quant="fp8:block=128", least_saved=1.1)


def test_guesses_of_a_model_with_states(tmp_path: Path, quick: RankServer) -> None:
    config = Qwen3_5TextConfig(**SHAPE | {"num_hidden_layers": 4}, **DELTA, layer_types=DELTA_LAYERS)
    gives_the_same(save(random_model(config), tmp_path), num_speculative_tokens=3)


def test_three_processes_and_experts_whose_places_are_many(tmp_path: Path, server: RankServer) -> None:
    """Steps of a few tokens are recorded, the others not."""
    experts = {"num_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 144, "num_key_value_heads": 3}
    folder = save(random_model(Qwen3MoeConfig(**SHAPE | experts)), tmp_path)
    gives_the_same(folder, size=3, dtype="bfloat16", quant="int8")


def test_prompts_too_long_for_the_memory_that_is_shared(tmp_path: Path, quick: RankServer) -> None:
    """What a product gives is gathered in pieces, by all threads."""
    wide = SHAPE | {"intermediate_size": 24000, "num_hidden_layers": 1, "max_position_embeddings": 700}
    folder = save(random_model(LlamaConfig(**wide)), tmp_path)
    found = []
    for size in (1, 2):
        one = worker_for(folder, tensor_parallel_size=size, quant="int8")
        asked = (prompt(600), SamplingParams(max_tokens=2, logprobs=1, **PLAIN))
        found.append(run(engine_for(one, max_num_batched_tokens=600), [asked])[0].outputs[0].logprobs)
        one.close()
    assert found[0] == found[1]


# ---- what is kept ----


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, config=EngineConfig(**{"threads": 2, "num_blocks": 300, "device": "cpu"} | settings))


@pytest.mark.parametrize("has_states", [False, True])
def test_a_cache_that_was_saved(
    has_states: bool, folder: Path, tmp_path: Path, quick: RankServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if has_states:
        changes = {"num_hidden_layers": 4, "vocab_size": VOCAB, "max_position_embeddings": 600}
        config = Qwen3_5TextConfig(**SHAPE | changes, **DELTA, layer_types=DELTA_LAYERS)
        folder = save(random_model(config), tmp_path / "model")
        write_byte_tokenizer(folder)
    ids, params = prompt(520 if has_states else 80), SamplingParams(max_tokens=6, logprobs=2, **PLAIN)
    answered = []
    for size in (2, 2, 1):
        with load(folder, tensor_parallel_size=size) as llm:
            path = tmp_path / "saved.kv"
            found = llm.load_kv(path) if path.exists() else 0
            (output,) = llm.generate(ids, params)
            answered.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
            assert (found > 0) == (len(answered) == 2) == (output.metrics.num_cached_tokens > 0)
            llm.save_kv(ids, path)
    assert answered[0] == answered[1] == answered[2]


@pytest.mark.parametrize("quant", [None, "int8"])
def test_adapters_added_to_weights_and_beside_them(quant: str | None, tmp_path: Path, quick: RankServer) -> None:
    settings = {"lora": (str(write_adapter(tmp_path / "adapter")),), "quant": quant}
    params = SamplingParams(max_tokens=8, logprobs=2, **PLAIN)
    found = []
    for size in (1, 2):
        with load(resolve("tiny").path, tensor_parallel_size=size, **settings) as llm:
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate([prompt(20), prompt(3)], params)])
    assert found[0] == found[1]


@pytest.mark.parametrize("quant", [None, "int8"])
def test_adapters_that_requests_choose(quant: str | None, tmp_path: Path, quick: RankServer) -> None:
    """Those of the other process, too."""
    settings = {"lora_modules": {"sql": str(write_adapter(tmp_path / "adapter"))}, "quant": quant}
    each = [SamplingParams(max_tokens=8, logprobs=2, lora=lora, **PLAIN) for lora in ((), "sql", {"sql": 0.5})]
    found = []
    for size in (1, 2):
        with load(resolve("tiny").path, tensor_parallel_size=size, **settings) as llm:
            outputs = [output.outputs[0] for output in llm.generate([prompt(20)] * 3, each)]
            found.append([(output.token_ids, output.logprobs) for output in outputs])
    assert found[0] == found[1]
    assert len({tuple(ids) for ids, _ in found[0]}) == 3


def test_facts_are_those_of_the_whole(folder: Path, quick: RankServer) -> None:
    with load(folder) as alone, load(folder, tensor_parallel_size=2) as together:
        for name in ("kv_bytes", "num_parameters", "formats", "threads", "context_len"):
            assert getattr(together, name) == getattr(alone, name), name
        for llm in (alone, together):
            assert not llm.multiplies_whole
        for name in ("weight_bytes", "read_bytes"):  # shares are packed in tiles of their own
            assert getattr(alone, name) <= getattr(together, name) <= 1.1 * getattr(alone, name), name
        assert together.embed("some words") == alone.embed("some words")


# ---- how it ends ----


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for task in tasks for word in task.read_text().split()]


def rank_processes(pids: list[int]) -> list[int]:
    return [pid for pid in pids if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_processes_end_with_the_model_and_when_it_is_forgotten(folder: Path) -> None:
    for forget in (LLM.close, lambda llm: None):
        llm = load(folder, tensor_parallel_size=2)
        (pid,) = rank_processes(children_of(os.getpid()))
        llm.generate(prompt(5), SamplingParams(max_tokens=2))
        forget(llm)  # type: ignore[operator]
        del llm
        gc.collect()
        assert pid not in rank_processes(children_of(os.getpid()))


def test_a_fork_that_ends_leaves_them_alone(folder: Path, quick: RankServer) -> None:
    with load(folder, tensor_parallel_size=2) as llm:
        pid = os.fork()
        if pid == 0:
            llm._worker._ranks._end()  # as an interpreter that ends does
            os._exit(0)
        os.waitpid(pid, 0)
        assert llm.generate(prompt(5), SamplingParams(max_tokens=2))


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_that_fails_says_why(count: int, folder: Path, quick: RankServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(folder, tensor_parallel_size=2, quant="int8", dtype="bfloat16") as llm:
        assert llm.multiplies_whole

        def fail(*_: object) -> None:
            raise MemoryError("there is none")

        monkeypatch.setattr(llm._worker.runner.model, "prepare", fail)
        with pytest.raises(LostProcessError, match=r"a step failed \(MemoryError\('there is none'\)\)") as raised:
            llm.generate([prompt(5)] * count, SamplingParams(max_tokens=4))
        assert isinstance(raised.value.__cause__, MemoryError)


def test_modules_of_the_current_folder_are_not_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    load(folder, tensor_parallel_size=2).close()


def test_a_process_that_is_killed_ends_a_step_that_waits_for_it(folder: Path) -> None:
    with load(folder, tensor_parallel_size=2) as llm:
        (pid,) = rank_processes(children_of(os.getpid()))
        os.kill(pid, signal.SIGSTOP)
        stream = llm.stream(prompt(5), SamplingParams(max_tokens=40, **PLAIN))
        killer = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({pid}, 9)"])
        begin = time.monotonic()
        with pytest.raises(LostProcessError, match="one of the processes that compute the model has ended"):
            list(stream)
        assert time.monotonic() - begin > 0.3, "the step waited"
        with pytest.raises(LostProcessError):
            llm.generate(prompt(5), SamplingParams(max_tokens=2))
        killer.wait()


def test_a_process_that_cannot_load_says_why(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "Begin", lambda path, config, rank: Begin(str(tmp_path / "gone"), config, rank))
    with pytest.raises(ModelNotFoundError, match="gone"):
        load(folder, tensor_parallel_size=2)
    assert not rank_processes(children_of(os.getpid()))


def test_a_checkpoint_that_is_broken_is_refused_as_ever(tmp_path: Path, quick: RankServer) -> None:
    save(random_model(LlamaConfig(**SHAPE)), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(CheckpointError):
        worker_for(tmp_path, tensor_parallel_size=2)


def test_ctrl_c_waits_for_the_step_and_the_next_answer_is_right(folder: Path, quick: RankServer) -> None:
    with load(folder, tensor_parallel_size=2) as llm:
        params = SamplingParams(max_tokens=400, **PLAIN)
        expected = llm.generate(prompt(20), params)[0].outputs[0].token_ids
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        killer = subprocess.Popen(
            [sys.executable, "-c", f"import os, signal, time; time.sleep(0.2); os.kill({os.getpid()}, signal.SIGINT)"]
        )

        def generate_on_and_on() -> None:
            while True:
                llm.generate(prompt(20), params)

        try:
            with pytest.raises(KeyboardInterrupt):
                generate_on_and_on()
        finally:
            killer.wait()
            signal.signal(signal.SIGINT, before)
        assert llm.generate(prompt(20), params)[0].outputs[0].token_ids == expected


# ---- who may ----


@pytest.mark.parametrize("size", [0, -1, 65])
def test_a_number_that_is_none(size: int) -> None:
    with pytest.raises(UsageError, match=r"tensor_parallel_size must be at (least 1|most 64)"):
        EngineConfig(tensor_parallel_size=size)


def test_a_system_without_such_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UnsupportedError, match="need Linux"):
        worker_for(folder, tensor_parallel_size=2)


def test_a_server_whose_process_is_killed_comes_back() -> None:
    asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    with LLM("tiny") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=20)
        expected = llm.generate("Once upon a time", params)[0].outputs[0].text

    with live_server("tiny", "-tp", "2", "-t", "2") as server:
        for round_number in range(2):
            status, answer = server.post("/v1/completions", asked)
            while status == 503:  # it is loaded again
                time.sleep(0.1)
                status, answer = server.post("/v1/completions", asked)
            assert answer["choices"][0]["text"] == expected
            if round_number:
                break
            (pid,) = rank_processes(children_of(children_of(server.process.pid)[0]))
            server.log.clear()
            os.kill(pid, signal.SIGKILL)
            server.line("error: the engine of tiny ended")
            assert not any("Traceback" in line for line in server.log), server.log


def test_bench_sweeps_numbers_of_processes() -> None:
    sizes = [setup.tensor_parallel_size for setup in Sweep(("tiny",), tensor_parallel_sizes=(1, 2)).setups()]
    assert sizes == [1, 2]
    with pytest.raises(UsageError, match="-tp takes numbers from 1 on"):
        Sweep(("tiny",), tensor_parallel_sizes=(0,))


# ---- the parts ----


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [16, 100, 1000, 4099, 151936])
def test_shares_are_even_and_leave_nothing_out(count: int, size: int) -> None:
    cuts = bounds(count, size)
    shares = [end - first for first, end in itertools.pairwise(cuts)]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1
    division = Division((count, 3 * count), size)
    ranges = [division.ranges(rank) for rank in range(size)]
    for section, (first, rows) in enumerate(((0, count), (count, 3 * count))):
        joined = [row for own in ranges for row in own[section]]
        assert joined == list(range(first, first + rows))
        inner = [own[section].start - first for own in ranges[1:]]
        assert all(cut % STEP == 0 for cut in inner) or rows < 2 * STEP * size
        assert max(len(own[section]) for own in ranges) <= rows / size + STEP
    assert division.is_worth_it() == (count // size >= LEAST_ROWS)


def test_a_whole_is_put_together_of_pieces() -> None:
    division = Division((300, 20, 20), 2, units=5)
    whole = torch.arange(340)
    found = torch.zeros(340, dtype=torch.long)
    for rank in range(2):
        own = torch.cat([whole[rows.start : rows.stop] for rows in division.ranges(rank)])
        assert len(own) == division.own_rows(rank) <= division.most_rows
        for piece in division.pieces:
            if piece.rank == rank:
                found[piece.whole : piece.whole + piece.num] = own[piece.own : piece.own + piece.num]
    assert torch.equal(found, whole)
    assert own_parts({"q": 300, "kv": 40}, division.sections, [180, 12, 12]) == {"q": 180, "kv": 24}


def test_processors_beside_each_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)) - {5})
    monkeypatch.setattr(system, "memory_nodes", lambda: [{0, 1, 2, 3, 8, 9}, {4, 5, 6, 7}, set(range(100, 104))])
    assert processors.shares_of_processors(3) == [{0, 1, 2}, {3, 8, 9}, {4, 6, 7}]
    assert processors.shares_of_processors(10) is None
    monkeypatch.setattr(system, "memory_nodes", lambda: [set(range(16))])
    assert processors.shares_of_processors(2) is None


def test_memories_as_linux_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, text in ((0, "0-3,8-9\n"), (1, "4-7\n"), (2, "\n"), (10, "10\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text)
    monkeypatch.setattr(system, "NODES", tmp_path)
    assert system.memory_nodes() == [{0, 1, 2, 3, 8, 9}, {4, 5, 6, 7}, {10}]


def test_a_plan_crosses_as_it_is() -> None:
    ends: list[None] = []
    ours, theirs = socket.socketpair()
    one: Line[ToRank] = Line(ours.detach(), ToRank, lambda: ends.append(None))
    other: Line[ToRank] = Line(theirs.detach(), ToRank, lambda: ends.append(None))
    share = Scheduled(7, [1, 2, -2], 4, [3, 9], (7, 8), 2, (5, 6), 4, "mean", 1, True, True, 2, near_table=[0, 5])
    new = NewSequence(7, [1, 2], SamplingParams(temperature=0.5, stop=("a",)), 11, (1,), [4, 5])
    plan = Plan([share], [new], [3], [Copy(1, 2, 0, 5)], [(0, 1)])
    one.send(Run(plan))
    found = other.receive()
    assert isinstance(found, Run)
    assert found.plan == plan
    one.close()
    for _ in range(2):
        with pytest.raises(EOFError):
            other.receive()
    with pytest.raises(OSError, match="closed"):
        one.receive()
    while len(ends) < 2:
        time.sleep(0.01)


def test_processes_that_compute_together_have_parts_alike(tmp_path: Path, quick: RankServer) -> None:
    """What layers with a window keep (see `near.py`)."""
    heads = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape = {"hidden_size": 64, "max_position_embeddings": 4096} | heads
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    windows = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 40, "num_hidden_layers": 3}
    folder = save(random_model(Qwen3Config(**SHAPE | shape | windows)), tmp_path)
    config = {"num_blocks": None, "max_model_len": 4000, "max_num_batched_tokens": 64, "kv_cache_bytes": 8 << 20, "threads": 1}
    alone, together = worker_for(folder, **config), worker_for(folder, **config, tensor_parallel_size=2)
    try:
        assert together.near.num_parts == alone.near.num_parts > 0
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        asked = [([(i * i + n) % VOCAB for i in range(700)], params) for n in range(3)]
        found, expected = [run(engine_for(each, max_num_batched_tokens=64), asked) for each in (together, alone)]
        assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    finally:
        together.close()
