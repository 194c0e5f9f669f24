"""Requests of all kinds at once, in too few blocks, some of them aborted: each gets what it gets alone in its own engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent import futures
from typing import Any, NamedTuple

import pytest
from transformers import Qwen3_5TextConfig, Qwen3Config

from engines import SMALL, poison_what_is_out_of_reach, random_model, save
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.constraint import Constraint, ReasoningPhase
from nanovllm_cli.engine import near, states
from nanovllm_cli.engine import worker as worker_module
from nanovllm_cli.engine.answer import detokenizers_of
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.memory import CacheSize, Near
from nanovllm_cli.engine.near import NearRoom
from nanovllm_cli.engine.outputs import CompletionOutput, RequestOutput
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.model_spec import Pooling
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.byte_tokenizer import byte_tokenizer
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_models import DELTA

SHAPE = SMALL | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256}
CONTEXT = 120
NUM_BLOCKS = NUM_PARTS = 64
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
TOKENIZER = byte_tokenizer()
BYTES = [TOKENIZER.id_to_bytes(i) for i in range(256)]
TEXT = TOKENIZER.encode("12 and 12 and 12 and a dog that ran and ran, and 12 and 12 of them, and so on and on. " * 3)
FORMS = [
    Constraint("regex", "(12 and ){2,9}"), Constraint("regex", "[a-d ]{5,30}x"), Constraint("choice", '["red", "green"]'),
    Constraint("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
    Constraint("gbnf", 'root ::= ("a" | "bc" root | "d"){2,5}'),
]  # fmt: skip
CHOICES: dict[str, tuple[float, list[Any]]] = {
    "top_k": (0.2, [1, 2, 20]), "top_p": (0.2, [0.0, 0.5, 0.9]), "min_p": (0.1, [0.1]), "repetition_penalty": (0.1, [0.8, 1.3]),
    "n": (0.4, [2, 3]), "min_tokens": (0.2, [1, 5]), "stop": (0.3, [("a",), ("an", "d 1"), ("e", "\x00")]),
    "include_stop_str_in_output": (0.5, [True]), "stop_token_ids": (0.2, [tuple(range(20))]), "ignore_eos": (0.3, [True]),
    "logprobs": (0.7, [0, 2]), "prompt_logprobs": (0.15, [0, 1]), "logit_bias": (0.1, [{40: 9.0, 41: -100.0}]),
    "allowed_token_ids": (0.2, [tuple(TOKENIZER.encode("12 and."))]), "bad_words": (0.1, [("12",)]),
    "dry_multiplier": (0.1, [0.6]), "constraint": (0.3, FORMS),
    "reasoning": (0.1, [ReasoningPhase("<t>", "</t>", True, 4), ReasoningPhase("<t>", "</t>")]),
}  # fmt: skip


class Asked(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    pooling: Pooling | None
    salt: str | None


KINDS = ["float32 auto", "bfloat16 int8", "bfloat16 auto with states", "bfloat16 auto with windows"]


@pytest.fixture(scope="module", params=KINDS)
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    dtype, cache, *others = request.param.split()
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    delta = Qwen3_5TextConfig(**SHAPE | {"num_hidden_layers": 3}, **DELTA, layer_types=kinds)
    windows = Qwen3Config(**SHAPE | {"num_hidden_layers": 3}, layer_types=WINDOWS, use_sliding_window=True, sliding_window=24)
    of_kind = {"states": delta, "windows": windows, "": Qwen3Config(**SHAPE)}[others[-1] if others else ""]
    folder = save(random_model(of_kind), tmp_path_factory.mktemp("model"))
    config = EngineConfig(threads=1, num_blocks=NUM_BLOCKS, max_model_len=CONTEXT, dtype=dtype, kv_cache_dtype=cache)
    with open_checkpoint(folder) as checkpoint, pytest.MonkeyPatch.context() as patch:
        poison_what_is_out_of_reach(patch)
        if "windows" in others:
            patch.setattr(worker_module, "size_cache", lambda *of: CacheSize(NUM_BLOCKS, CONTEXT, 0, NUM_PARTS))
        yield Worker(checkpoint, config, TOKENIZER.encode, lambda: BYTES)


def engine_of(worker: Worker, **settings: Any) -> Engine:
    config = EngineConfig(**{"num_blocks": NUM_BLOCKS} | settings)
    return Engine(
        worker, config, detokenizer_factory=detokenizers_of(TOKENIZER), vocab_size=256, max_model_len=CONTEXT,
        num_blocks=config.num_blocks or NUM_BLOCKS, eos_ids=(1,), prepare=worker.prepare,
    )  # fmt: skip


def ask(r: random.Random, before: list[RequestOutput]) -> Asked:
    """Beginnings that others have, and conversations that go on; lengths around the ends of blocks and of the context."""
    prompt = TEXT[r.choice((0, 0, 7)) :][: r.choice((1, 15, 16, 17, 33, 48, 80, CONTEXT - 1))]
    if before and r.random() < 0.3:
        told = r.choice(before)
        prompt = [*told.prompt_token_ids, *told.outputs[0].token_ids, *prompt[:5]][: CONTEXT - 1]
    room = CONTEXT - len(prompt)
    given = {name: r.choice(values) for name, (chance, values) in CHOICES.items() if r.random() < chance}
    given |= {"temperature": r.choice((0.0, 1.0, 1.5)), "seed": r.randrange(99)}
    given["max_tokens"] = r.choice((5, 20, 60, room, room + 1))
    given["min_tokens"] = min(given.get("min_tokens", 0), given["max_tokens"])
    pooling: Pooling | None = r.choice(("mean", "last")) if r.random() < 0.1 else None
    return Asked(prompt, SamplingParams(**given), pooling, r.choice((None, None, "its own")))


def add(engine: Engine, worker: Worker, name: str, asked: Asked) -> None:
    """A constraint is compiled first: when that is done in its thread, and so how many steps there are, no seed decides."""
    if asked.pooling is not None:
        engine.embed(name, asked.prompt, asked.pooling)
    else:
        if (prepared := worker.prepare(asked.params)) is not None:
            futures.wait([prepared])
        engine.add(name, asked.prompt, asked.params, cache_salt=asked.salt)


def alone(worker: Worker, asked: Asked) -> RequestOutput:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "near", worker.near._replace(num_parts=NUM_PARTS * bool(worker.near_bytes)))
        engine = engine_of(worker, enable_prefix_caching=False)
    add(engine, worker, "alone", asked)
    while engine.has_unfinished():
        outputs = engine.step()
    return outputs[0]


def told(answer: CompletionOutput) -> tuple[Any, ...]:
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, answer.error, answer.logprobs


@pytest.mark.parametrize("seed", range(6))
def test_whatever_runs_beside_it_a_request_gets_what_it_gets_alone(
    worker: Worker, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = random.Random(seed)
    settings = {
        "num_blocks": r.choice((8, 11)), "max_num_batched_tokens": r.choice((3, 17, 512)), "max_num_seqs": r.choice((3, 9)),
        "num_speculative_tokens": r.choice((0, 8)),
    }  # fmt: skip
    if worker.spec.has_states:
        settings["num_speculative_tokens"] = 0
        monkeypatch.setattr(worker, "num_states", r.choice((1, 2, 5, 20)))
        monkeypatch.setattr(states, "FIRST_KEPT", 16)  # texts are short here
        monkeypatch.setattr(states, "KEPT_EVERY", 64)
        monkeypatch.setattr(states, "LATEST_EVERY", 16)
    if worker.near_bytes:
        monkeypatch.setattr(near, "SLACK", 0)
        least = Near(worker.near_bytes, 24, settings["max_num_batched_tokens"]).least(16)
        monkeypatch.setattr(worker, "near", NearRoom(least + r.choice((0, 2, 9)), 24))
        settings["num_blocks"] = r.choice((11, 30))
    engine = engine_of(worker, **settings)
    asked: dict[str, Asked] = {}
    done: dict[str, RequestOutput] = {}
    aborted: set[str] = set()
    pieces: dict[tuple[str, int], str] = {}

    def look(output: RequestOutput) -> None:
        for answer in output.outputs:
            key = output.request_id, answer.index
            pieces[key] = pieces.get(key, "") + answer.delta_text
            assert pieces[key] == answer.text
        if output.finished:
            done[output.request_id] = output

    while len(asked) < 12 or engine.has_unfinished():
        if len(asked) < 12 and (len(asked) - len(done) < 2 or r.random() < 0.3):
            name = str(len(asked))
            asked[name] = ask(r, list(done.values()))
            add(engine, worker, name, asked[name])
        if r.random() < 0.01:
            aborted.add(name := r.choice(list(asked)))
            if (output := engine.abort(name)) is not None:
                look(output)
        engine.advance()
        for name, is_last in list(engine.moved.items()):
            if is_last or r.random() < 0.3:
                look(engine.take(name))
    stats = engine.stats()
    assert (stats.used_blocks, stats.free_blocks + stats.cached_blocks) == (0, settings["num_blocks"])
    kept = engine._blocks.states.pool
    assert kept.num_free + kept.num_kept == worker.num_states
    for name, output in done.items():
        expected = alone(worker, asked[name])
        if name in aborted:
            for one, other in zip(output.outputs, expected.outputs, strict=True):
                assert other.token_ids[: one.num_tokens] == one.token_ids
        elif asked[name].pooling is not None:
            assert output.pooled == pytest.approx(expected.pooled, abs=1e-9)
        else:
            assert [told(answer) for answer in output.outputs] == [told(answer) for answer in expected.outputs], asked[name]
            assert output.prompt_logprobs == expected.prompt_logprobs
            assert output.metrics.num_computed_prompt_tokens == len(asked[name].prompt)
