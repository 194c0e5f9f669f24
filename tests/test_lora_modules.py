"""Adapters that requests choose from: each row of a batch with its own, against PEFT in fp32 and engines that have one alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from emulation.compare import close_to_rounding, random
from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from emulation.late import LateDevice
from engines import engine_for, greedy, random_model, run, save, worker_for
from live_server import live_server
from nanovllm_cli import LLM, SamplingParams
from nanovllm_cli.config import EngineConfig, LoraModule
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.kernels.adapters import Side, Sides
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_adapters import CASES, EVEN, adapted_by_hand, blocks, rounded, trained  # noqa: F401
from test_cli_driver import nanovllm as driven
from test_cli_real import nanovllm as real
from test_cuda_engine import engine_on, kernels_not_rehearsed
from test_cuda_quantized import SHAPE, worker_on
from test_models import prompts, whole_batch
from test_quant_engine import difference, expected_logits, write_gguf
from tiny_adapter import write_adapter

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # what PEFT asks transformers
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]
Chosen = list[dict[str, float]]


def modules(folder: Path, *names: str) -> dict[str, str]:
    return {name: str(folder / name) for name in names}


def logits_choosing(worker: Worker, names: list[str], tokens: list[list[int]], chosen: Chosen) -> list[torch.Tensor]:
    """Of each prompt's rows, all prompts in one batch, each with what it chooses."""
    lens = torch.tensor([len(ids) for ids in tokens])
    scales = torch.tensor([[each.get(name, 0.0) for name in names] for each in chosen])
    batch = replace(whole_batch(tokens), lora=scales.repeat_interleave(lens, 0) if scales.any() else None)
    with torch.inference_mode():
        worker.platform.enter()
        logits = worker.model.logits(worker.model.run(worker.model.prepare(batch), worker.runner.cache))
    return list(logits.split(lens.tolist()))


CHOSEN: Chosen = [{}, {"one": 1.0}, {"two": -0.5}, {"one": 0.5, "two": 2.0}]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, `base`, and two adapters of it, `one` and `two`, the second of queries and values alone."""
    folder = tmp_path_factory.mktemp("qwen")
    save(random_model(Qwen3Config(**EVEN)), folder / "base")
    trained(Qwen3Config(**EVEN), folder / "one", 1)
    trained(Qwen3Config(**EVEN), folder / "two", 2, target_modules=["q_proj", "v_proj"])
    return folder


def test_each_row_has_what_its_request_chooses(qwen: Path) -> None:
    worker = worker_for(qwen / "base", lora_modules=modules(qwen, "one", "two"))
    tokens = prompts(EVEN["vocab_size"])[: len(CHOSEN)]
    found = logits_choosing(worker, ["one", "two"], tokens, CHOSEN)
    plain = logits_choosing(worker_for(qwen / "base"), [], tokens, [{}] * 4)
    for ids, chosen, actual, base in zip(tokens, CHOSEN, found, plain, strict=True):
        expected = expected_logits(adapted_by_hand(qwen, *chosen.items()), [ids])
        assert difference(actual, expected) < 1e-4
        assert torch.equal(actual, base) if not chosen else difference(actual, base) > 0.01


@pytest.mark.parametrize("case", [name for name in CASES if name not in ("qwen3, the head", "falcon h1")])
def test_equal_to_peft(case: str, tmp_path: Path) -> None:
    config, settings = CASES[case]
    if case in ("kimi linear", "ling 3"):  # alike
        settings = settings | {"target_modules": [name for name in settings["target_modules"] if name != "kv_b_proj"]}
    if case == "youtu":  # of whose matrices one is taken apart by head
        settings = settings | {"target_modules": ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj"]}
    save(random_model(config), tmp_path / "base")
    model = trained(config, tmp_path / "adapter", **settings)
    worker = worker_for(tmp_path / "base", lora_modules=modules(tmp_path, "adapter"))
    tokens = prompts(config.vocab_size)[:2]
    with_it, without = logits_choosing(worker, ["adapter"], tokens, [{"adapter": 1.0}, {}])
    assert difference(with_it, expected_logits(model, tokens[:1])) < 1e-4
    assert difference(without, expected_logits(random_model(config), tokens[1:])) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
def test_beside_weights_of_any_format(kind: str, dtype: str, blocks: Callable[[str], Path], tmp_path: Path) -> None:  # noqa: F811
    """Beside one that all requests have, too; and those that choose none get the very bits that they get where there is none."""
    for seed, name in enumerate(("all", "one", "two"), 1):
        trained(LlamaConfig(**EVEN), tmp_path / name, seed)
    lora = (str(tmp_path / "all"),)
    worker = worker_for(blocks(kind), lora=lora, lora_modules=modules(tmp_path, "one", "two"), dtype=dtype)
    tokens = prompts(EVEN["vocab_size"])[: len(CHOSEN)]
    together = logits_choosing(worker, ["one", "two"], tokens, CHOSEN)
    (without,) = logits_choosing(worker_for(blocks(kind), lora=lora, dtype=dtype), [], tokens[:1], [{}])
    assert torch.equal(together[0], without)
    for ids, chosen, actual in zip(tokens, CHOSEN, together, strict=True):
        assert torch.equal(logits_choosing(worker, ["one", "two"], [ids], [chosen])[0], actual)
        base = random_model(LlamaConfig(**EVEN)) if kind == "f32" else rounded(kind.upper())
        expected = adapted_by_hand(tmp_path, ("all", 1.0), *chosen.items(), base=base)
        assert difference(actual, expected_logits(expected, [ids])) < (1e-4 if dtype == "float32" else 0.15)


# ---- through the engine ----


def answers(worker: Worker, requests: list[tuple[list[int], SamplingParams]], **settings: Any) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in run(engine_for(worker, **settings), requests)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_do_not_depend_on_who_else_chooses_what(dtype: str, qwen: Path) -> None:
    """Steps are recorded all the same; and an adapter that is chosen answers as one that is part of the model."""
    named = modules(qwen, "one", "two")
    worker = worker_for(qwen / "base", lora_modules=named, dtype=dtype)
    tokens = prompts(EVEN["vocab_size"])[:4] * 2
    requests = [(ids, greedy(20, lora=chosen)) for ids, chosen in zip(tokens, [*CHOSEN, *reversed(CHOSEN)], strict=True)]
    together = answers(worker, requests, lora_modules=named)
    assert worker.runner.graphs._graphs
    assert together == [answers(worker, [request], lora_modules=named)[0] for request in requests]
    assert together == answers(worker, requests, lora_modules=named, num_blocks=12, max_num_batched_tokens=7)
    plain = worker_for(qwen / "base", dtype=dtype)
    assert answers(plain, [requests[0]]) == together[:1]
    if dtype == "float32":
        merged = worker_for(qwen / "base", lora=[named["one"]])
        assert answers(merged, [(tokens[1], greedy(20))]) == together[1:2]


def test_a_prompt_is_read_again_for_another_adapter(qwen: Path) -> None:
    """What is in the cache of one is found by requests that choose the same, and by no others."""
    named = modules(qwen, "one", "two")
    engine = engine_for(worker_for(qwen / "base", lora_modules=named), lora_modules=named)
    ids = list(range(2, 52))
    kinds: list[Any] = [(), "one", {"one": 0.5}, "two", {"one": 1.0, "two": 1.0}]
    found = [run(engine, [(ids, greedy(8, lora=kind))])[0] for kind in kinds]
    assert [output.metrics.num_cached_tokens for output in found] == [0] * 5
    assert len({tuple(output.outputs[0].token_ids) for output in found}) == 5
    again = [run(engine, [(ids, greedy(8, lora=kind))])[0] for kind in [*kinds, {"one": 0.0}, {"one": 1}, {"two": 1, "one": 1}]]
    assert [output.metrics.num_cached_tokens for output in again] == [48] * 8
    assert [output.outputs[0].token_ids for output in again] == [found[i].outputs[0].token_ids for i in [0, 1, 2, 3, 4, 0, 1, 4]]


def test_several_answers_guesses_and_log_probabilities(qwen: Path) -> None:
    """Whatever a request may ask for beside."""
    named = modules(qwen, "one", "two")
    ids = [5, 6, 7] * 8
    plain = worker_for(qwen / "base", lora=[named["one"]])
    worker = worker_for(qwen / "base", lora_modules=named, num_speculative_tokens=4)
    (alone,) = run(engine_for(plain), [(ids, greedy(24))])
    guessing = engine_for(worker, lora_modules=named, num_speculative_tokens=4)
    both = run(guessing, [(ids, greedy(24, lora="one")), (ids, greedy(24))])
    assert both[0].outputs[0].token_ids == alone.outputs[0].token_ids != both[1].outputs[0].token_ids
    params = SamplingParams(seed=3, n=3, max_tokens=6, prompt_logprobs=0, ignore_eos=True)
    (expected,) = run(engine_for(plain), [(ids, params)])
    actual, _ = run(engine_for(worker, lora_modules=named), [(ids, replace(params, lora="one")), (ids, params)])
    assert [each.token_ids for each in actual.outputs] == [each.token_ids for each in expected.outputs]
    there, here = ([entry.logprob for entry in output.prompt_logprobs[1:]] for output in (expected, actual))
    assert here == pytest.approx(there, abs=1e-3)


# ---- kernels ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("takes", [True, False])
def test_what_a_cpu_adds(takes: bool, dtype: torch.dtype) -> None:
    """Against float64: any number of rows, ranks of any kind, of which parts of a weight have their own."""
    for tokens, width, n, sides_of in ((1, 64, 96, (16,)), (5, 32, 64, (16, 144)), (200, 617, 1070, (16, 32, 80))):
        x, y = random(tokens, width, dtype=dtype), random(tokens, n, dtype=dtype)
        downs = [random(rank, width, dtype=dtype, scale=width**-0.5) for rank in sides_of]
        ups = [random(n, rank, dtype=dtype) for rank in sides_of]
        for up in ups:
            up[: n // 2, up.shape[1] // 2 :] = up[n // 2 :, : up.shape[1] // 2] = 0
        scales = random(tokens, len(sides_of) + 1) * (random(tokens, len(sides_of) + 1) > 0) if takes else None
        sides = Sides([Side(*pair, module) for module, pair in enumerate(zip(downs, ups, strict=True), 1)], width, dtype)
        ranks = sides.ranks(x, scales)
        expected, start = y.double(), 0
        for module, (down, up) in enumerate(zip(downs, ups, strict=True), 1):
            taken = torch.ones(tokens) if scales is None else scales[:, module]
            between = x.double() @ down.double().T * taken[:, None]
            there = ranks[:, start : start + len(down)][taken != 0]
            if there.numel():
                close_to_rounding(there, between[taken != 0], sums=1e-5)
            own_ranks = torch.where(taken[:, None] == 0, 0.0, ranks[:, start : start + len(down)].double())
            expected, start = expected + own_ranks @ up.double().T, start + len(down)
        if scales is not None:  # nobody reads what nobody takes
            ranks[scales[:, 1:].repeat_interleave(torch.tensor(sides_of), 1) == 0] = torch.nan
        before = y.clone()
        sides.onto(y, ranks, scales)
        close_to_rounding(y, expected, sums=1e-5)
        if scales is not None:
            idle = (scales[:, 1:] == 0).all(1)
            assert torch.equal(y[idle], before[idle])


FEW = [[3, 4, 5], [7], list(range(20, 41)), [9, 8]]


@pytest.fixture(scope="module")
def for_gpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A file of quantized weights and plain ones, and two adapters of it."""
    folder = tmp_path_factory.mktemp("gpu")
    write_gguf(folder / "model.gguf", random_model(Qwen3Config(**SHAPE)), ["Q4_0", "Q8_0", "F16"])
    for seed, name in enumerate(("one", "two"), 1):
        trained(Qwen3Config(**SHAPE), folder / name, seed)
    return folder / "model.gguf", modules(folder, "one", "two")


@needs_emulation
def test_requests_choose_on_a_gpu(for_gpus: tuple[Path, dict[str, str]]) -> None:
    """Recorded and not, guessed or one by one, with every kernel compiled beforehand."""
    path, named = for_gpus
    on_gpu = logits_choosing(worker_on(path, EmulatedDevice(), lora_modules=named), ["one", "two"], FEW, CHOSEN)
    on_cpu = logits_choosing(
        worker_for(path, lora_modules=named, dtype="float32", num_blocks=16), ["one", "two"], FEW, CHOSEN
    )
    for there, here in zip(on_gpu, on_cpu, strict=True):
        assert difference(there, here) < 0.07
    requests = [(ids, greedy(5, lora=chosen)) for ids, chosen in zip(FEW, CHOSEN, strict=True)]

    def answered(**settings: Any) -> list[Any]:
        device = EmulatedDevice()
        engine = engine_on(path, device, lora_modules=named, **settings)
        found = [output.outputs[0].token_ids for output in run(engine, requests)]
        assert bool(device.graphs) == (not settings.get("eager"))
        return found

    expected = answered(eager=True)
    assert answered() == expected
    assert answered(num_speculative_tokens=3) == expected
    lone = [(ids, params) for ids, params in requests if not params.lora]
    assert [output.outputs[0].token_ids for output in run(engine_on(path, EmulatedDevice()), lone)] == expected[:1]
    assert kernels_not_rehearsed(path, lora_modules=named) == set()


@needs_emulation
def test_a_deterministic_gpu_gives_rows_what_they_have_alone(for_gpus: tuple[Path, dict[str, str]]) -> None:
    """To the bit, those that choose none as where there is none."""
    path, named = for_gpus
    requests = [(ids, greedy(4, lora=chosen, logprobs=2)) for ids, chosen in zip(FEW, CHOSEN, strict=True)]

    def answered(*each: Any, **settings: Any) -> list[Any]:
        engine = engine_on(path, EmulatedDevice(), deterministic=True, **settings)
        return [output.outputs[0].logprobs for output in run(engine, list(each))]

    together = answered(*requests, lora_modules=named)
    assert together == [answered(request, lora_modules=named)[0] for request in requests]
    assert together[:1] == answered(requests[0])


@needs_emulation
def test_on_a_late_device_each_step_has_its_own_choice(for_gpus: tuple[Path, dict[str, str]]) -> None:
    """While requests that choose come and go, and the host is a step ahead."""
    path, named = for_gpus
    asked = [(ids, greedy(3 + 4 * i, lora=chosen)) for i, (ids, chosen) in enumerate(zip(FEW, reversed(CHOSEN), strict=True))]
    settings: dict[str, Any] = {"lora_modules": named, "max_num_seqs": 2}
    expected = [output.outputs[0].token_ids for output in run(engine_on(path, EmulatedDevice(), eager=True, **settings), asked)]
    with LateDevice() as device:
        engine = engine_on(path, device, **settings)
        assert [output.outputs[0].token_ids for output in run(engine, asked)] == expected
    assert device.races == []


def test_their_memory_is_counted(qwen: Path, tmp_path: Path) -> None:
    """Before they are loaded, and no less than they take, however narrow each is."""
    trained(Qwen3Config(**EVEN), tmp_path / "narrow", r=1)
    named = {str(i): str(tmp_path / "narrow") for i in range(20)}
    counted: list[int] = []

    class Counted(Worker):
        def _beside_bytes(self) -> int:
            counted.append(super()._beside_bytes())
            return counted[-1]

    with open_checkpoint(qwen / "base") as checkpoint:
        worker = Counted(checkpoint, EngineConfig(threads=2, num_blocks=16, lora_modules=named, dtype="float32"))  # type: ignore[arg-type]
    taken = worker.weight_bytes - worker_for(qwen / "base", dtype="float32").weight_bytes
    assert 0 < taken <= counted[0]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        ("three", "no adapter is called 'three'"), ({"one": 1.0, "three": 0}, "no adapter is called 'three'"),
        (["one", "one"], "twice"), ({"one": float("nan")}, "the scale of 'one'"), ({"one": "1"}, "the scale of 'one'"),
        ({"one": 1e7}, "the scale of 'one'"), ({"one": True}, "the scale of 'one'"), ([3], "lora"),
        (3, "lora must be an adapter's name, a list of names"),
        ("", "lora must be strings"), ("x" * 201, "lora must be strings"), ([["one", 1, 2]], "lora"), (None, "lora"),
    ],
)  # fmt: skip
def test_requests_that_choose_what_is_not_there(lora: Any, told: str, qwen: Path) -> None:
    named = modules(qwen, "one", "two")
    with pytest.raises(UsageError, match=told):
        engine_for(worker_for(qwen / "base", lora_modules=named), lora_modules=named).add("x", [3], greedy(1, lora=lora))


def test_an_engine_without_any(qwen: Path) -> None:
    with pytest.raises(UsageError, match="no adapter is called 'one'"):
        engine_for(worker_for(qwen / "base")).add("x", [3], greedy(1, lora="one"))


@pytest.mark.parametrize(
    ("case", "told"), [("qwen3, the head", r"the head \(lm_head.weight\)"), ("youtu", r"weights that are taken apart by head \(")]
)
def test_what_requests_can_not_choose(case: str, told: str, tmp_path: Path) -> None:
    config, settings = CASES[case]
    save(random_model(config), tmp_path / "base")
    trained(config, tmp_path / "adapter", **settings)
    with pytest.raises(UnsupportedError, match=f"can't choose an adapter of {told}"):
        worker_for(tmp_path / "base", lora_modules=modules(tmp_path, "adapter"))


@pytest.mark.parametrize(
    "given",
    [3, "a", ["a"], [("a",)], {"": "x"}, {"a": ""}, {"a": 1}, [("a", "x"), ("a", "y")], {"a\n": "x"}, {"x" * 201: "x"},
     {str(i): "x" for i in range(65)}],
)  # fmt: skip
def test_configs_that_name_none(given: Any) -> None:
    with pytest.raises(UsageError, match="adapter"):
        EngineConfig(lora_modules=given)


def test_configs_that_do() -> None:
    assert EngineConfig(lora_modules={"a": "x", "b": "x"}).lora_modules == (LoraModule("a", "x"), LoraModule("b", "x"))  # type: ignore[arg-type]


# ---- by name, and over HTTP ----


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an adapter of the bundled model, `adapter`."""
    folder = tmp_path_factory.mktemp("tiny")
    write_adapter(folder / "adapter")
    return folder


PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def said(tiny: Path) -> dict[float, str]:
    """What the bundled model goes on with, by how much of the adapter it takes."""
    params = [SamplingParams(temperature=0, max_tokens=16, lora={"sql": scale}) for scale in (0.0, 0.5, 1.0)]
    config = EngineConfig(lora_modules={"sql": str(tiny / "adapter")}, max_model_len=256)  # type: ignore[arg-type]
    with LLM("tiny", config=config) as llm:
        texts = [output.outputs[0].text for output in llm.generate([PROMPT] * 3, params)]
        plain, chosen = (llm.embed("a cat", lora=lora) for lora in ((), "sql"))  # type: ignore[arg-type]
    assert len(set(texts)) == 3
    assert plain != chosen
    return dict(zip((0.0, 0.5, 1.0), texts, strict=True))


def test_lines_of_a_batch_choose(tiny: Path, said: dict[float, str]) -> None:
    lines = [{"prompt": PROMPT} | more for more in ({}, {"lora": "sql"}, {"lora": {"sql": 0.5}}, {"lora": "none"}, {"lora": 3})]
    (tiny / "in.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    common = ("run", "tiny", "--raw", "--temp", "0", "-n", "16", "--batch", "in.jsonl")
    done = real(tiny, *common, "--lora-modules", "sql=adapter")
    assert done.returncode == 1, done.stderr
    assert "with the adapter adapter for requests that choose sql" in done.stderr
    *answered, stranger, wrong = map(json.loads, done.stdout.splitlines())
    assert [line["answers"][0]["text"] for line in answered] == [said[0.0], said[1.0], said[0.5]]
    assert "no adapter is called 'none'" in stranger["error"]["message"]
    assert "lora must be an adapter's name" in wrong["error"]["message"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["run", "tiny", "--lora-modules", "sql=adapter", "x"], "--lora-modules has no meaning without --batch"),
        (["run", "tiny", "--lora-modules", "sql", "--batch", "b"], "'sql' is not an adapter with its name"),
        (["run", "--url", "http://127.0.0.1:1", "--batch", "b", "--lora-modules", "a=b"], "has no meaning with --url"),
        (["serve", "tiny", "tiny", "--alias", "a,b", "--lora-modules", "a=adapter"], "has no meaning with several models"),
        (["serve", "tiny", "--lora-modules", "tiny=adapter"], "two models would be called 'tiny'"),
        (["serve", "tiny", "--lora-modules", "a=adapter", "--lora-modules", "a=b"], "two adapters are called 'a'"),
        (["serve", "tiny", "tiny", "--alias", "a,a"], "two models would be called 'a'"),
        (["serve", "tiny", "--lora-modules", "a=adapter", "b=adapter"], "say --lora-modules b=adapter"),
        (["serve", "tiny", "--lora-init-without-apply"], "here it is --lora-modules NAME=PATH"),
    ],
)
def test_what_a_command_refuses(args: list[str], told: str, tiny: Path) -> None:
    done = driven(tiny, *args)
    assert (done.code, done.out) == (2, ""), done.err
    assert told in done.err


def test_a_server_has_them_as_models(tiny: Path, said: dict[float, str]) -> None:
    """By their names, as vLLM; by their numbers, as llama.cpp; and the model beside them as it is."""
    with live_server("tiny", "--lora-modules", f"sql={tiny / 'adapter'}", "-c", "256") as server:
        assert [(card["id"], card["parent"]) for card in server.get("/v1/models")[1]["data"]] == [("tiny", None), ("sql", "tiny")]
        assert server.get("/lora-adapters")[1] == [{"id": 0, "name": "sql", "scale": 0.0}]
        body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0}
        for more, scale in (
            ({}, 0.0), ({"model": "sql"}, 1.0), ({"lora": "sql"}, 1.0), ({"lora": {"sql": 0.5}}, 0.5),
            ({"lora": [{"id": 0, "scale": 0.5}]}, 0.5), ({"model": "sql", "lora": []}, 0.0),
        ):  # fmt: skip
            status, answer = server.post("/v1/completions", body | more)
            assert (status, answer["choices"][0]["text"]) == (200, said[scale]), more
            assert answer["model"] == more.get("model", "tiny")
        for more in (
            {"lora": "none"}, {"lora": [{"id": 1, "scale": 1.0}]}, {"lora": [{"id": 0}]}, {"lora": 3}, {"lora": {"sql": 1e9}},
            {"lora": [{"id": 0, "scale": 1.0}] * 2}, {"lora": {"sql": "1"}}, {"lora": [{"id": -1, "scale": 1.0}]},
        ):  # fmt: skip
            status, answer = server.post("/v1/completions", body | more)
            assert (status, answer["error"]["param"]) == (400, "lora"), more
        for path, body in (
            ("/v1/embeddings", {"input": "x"}), ("/embeddings", {"content": "x"}), ("/v1/score", {"text_1": "x", "text_2": "y"}),
            ("/v1/rerank", {"query": "x", "documents": ["y"]}),
            ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}),
        ):  # fmt: skip
            status, answer = server.post(path, body | {"lora": "sql"})
            assert (status, "lora: here an adapter is chosen by its name" in str(answer)) == (400, True), path
            assert server.post(path, body | {"model": "sql"})[0] == 200, path
        vectors = [server.post("/v1/embeddings", {"input": "a cat", "model": name})[1]["data"][0] for name in ("tiny", "sql")]
        assert vectors[0] != vectors[1]
        for more, text in (([], said[0.0]), (["-m", "sql"], said[1.0])):
            done = driven(tiny, "run", "--url", server.url, "--raw", "--temp", "0", "-n", "16", "-q", *more, "-p", PROMPT)
            assert (done.code, done.out.rstrip("\n")) == (0, text.rstrip("\n")), done.err
