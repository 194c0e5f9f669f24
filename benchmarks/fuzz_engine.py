"""Made-up models, settings and requests: whatever runs beside a request, it gets what it gets alone.

    python benchmarks/fuzz_engine.py --seconds 600 --seed 1000 --only mamba --output fuzz.json
    python benchmarks/fuzz_engine.py --seconds 0 --seed 1017                    # one seed, as a failure names it

A seed stands for a tiny model of random weights, of one of the families that the tests have, an engine's settings, and a dozen
requests that come at random moments, some of which are aborted. Blocks, states and steps are so few and small that sequences lose
their blocks, prompts are read in chunks, and prefixes are found; most engines guess ahead, and in a few of them steps fail. Held:
tokens, texts, reasons and every bit of log-probabilities are those of the same request alone, in an engine that has room, another
number of threads, and neither recorded steps nor cached prefixes nor guesses; in the end all blocks and states are free. What
fails is printed with its seed, and the exit status is 1.

Not covered: numbers that are not finite, adapters, images, vectors, what others quantized, several processes, GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

# Most of these models are odd, and all small. Who imports this has settings of its own.
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"} if __name__ == "__main__" else {}
sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in ("src", "tests"))

import common
from engines import failing_once, random_model, save
from nanovllm_cli.config import BLOCK_SIZE, EngineConfig
from nanovllm_cli.constraint import Constraint, ReasoningPhase
from nanovllm_cli.engine import states
from nanovllm_cli.engine.answer import detokenizers_of
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.outputs import RequestOutput
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import NanovllmError, UnsupportedError
from nanovllm_cli.kernels import cpu
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.byte_tokenizer import byte_tokenizer
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_models import CASES
from test_mtp import KINDS, with_layer

REQUESTS, MOST_STEPS = 12, 20_000
FEW, ALL = 6, 256
"""Tokens of a model. Among few, guesses of random weights hold; what is written below is in their letters, !"#$%&."""
TEXT = [2, 3, 5, 2, 3, 5, 2, 3, 5, 4, 0, 2, 5, 3, 4, 4, 3, 5, 4, 1, 2, 3, 5, 2, 3, 5, 0, 4, 2] * 12
"""What prompts begin with, in which the same words come again."""
TOKENIZER = byte_tokenizer()
WITH_MTP = ", with MTP"
NAMES = [*CASES, *(kind + WITH_MTP for kind in 3 * KINDS)]
WIDE = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "q_lora_rank": 256, "kv_lora_rank": 256, "v_head_dim": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
"""Of a model whose rows divide into groups of any size."""
ANY_WIDTH = ["int8", "int8:zeros", "int8-weight-only", "fp8", "fp8-weight-only", "fp8:block=128", "int4:group=0", "int2:group=0"]
IN_GROUPS = ["int4", "int4:group=32:zeros", "int4-weight-only:group=64", "int3:group=32", "nf4", "q8_0", "q4_0", "q5_1", "q2_k",
             "q3_k", "q4_k", "q5_k", "q6_k"]  # fmt: skip
CHOICES: dict[str, tuple[float, list[Any]]] = {
    "top_k": (0.2, [1, 2, 20]), "top_p": (0.2, [0.0, 0.5, 0.9]), "min_p": (0.1, [0.1, 0.5]), "typical_p": (0.06, [0.7]),
    "top_n_sigma": (0.06, [1.0]), "xtc_probability": (0.06, [0.5]), "repetition_penalty": (0.1, [0.8, 1.3]),
    "frequency_penalty": (0.1, [0.4, -0.3]), "penalty_last_n": (0.2, [0, 5, 64]), "dry_multiplier": (0.1, [0.6]),
    "mirostat": (0.06, [1, 2]), "dynatemp_range": (0.06, [0.5]), "adaptive_target": (0.06, [0.2]),
    "samplers": (0.12, [("top_k", "top_p", "temperature"), ("xtc", "penalties", "temperature", "dry", "adaptive_p"), ()]),
    "n": (0.25, [2, 3, 5]), "min_tokens": (0.2, [1, 5, 17]), "stop": (0.2, [("#",), ("$#", "&%!"), ("%", "\x00")]),
    "include_stop_str_in_output": (0.5, [True]), "stop_token_ids": (0.1, [(4,)]), "ignore_eos": (0.6, [True]),
    "logprobs": (0.7, [0, 2, 5]), "prompt_logprobs": (0.12, [0, 1, 3]), "logit_bias": (0.1, [{3: 1.0, 4: -100.0}]),
    "allowed_token_ids": (0.35, [(0, 2, 3), (2, 3, 4, 5), (2, 3)]), "bad_words": (0.1, [("$%",), ("#", "%&")]),
    "reasoning": (0.08, [ReasoningPhase("$", "&", True, 3), ReasoningPhase("$", "&")]),
    "constraint": (0.2, [
        Constraint("regex", '(!"# ?){2,9}'), Constraint("regex", '[!"#]{4,40}%'), Constraint("choice", '["!!#", "%%"]'),
        Constraint("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
    ]),
}  # fmt: skip
"""Of a request: how often each is set, and to what."""
TOLD = ["token_ids", "logprobs", "text", "finish_reason", "stop_reason", "error"]


class Asked(NamedTuple):
    prompt: list[int]
    given: dict[str, Any]  # what SamplingParams is made of
    salt: str


class Session:
    """What a seed decides, and what came of it. refused: why there is no such model or engine. counts: of what happened. found:
    what should not have happened."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.settings: dict[str, Any] = {"seed": seed}
        self.refused: str | None = None
        self.counts: Counter[str] = Counter()
        self.found: list[dict[str, str]] = []

    def report(self, what: str, asked: Asked | None = None) -> None:
        self.found.append({"what": what, "request": str(asked)})


def fuzz(seed: int, only: str = "") -> Session:
    """only: a part of the names of the families that the model may be of."""
    session = Session(seed)
    least_work, most_drafted = session.r.choice((1, 1 << 16, cpu.SERIAL_WORK)), session.r.choice((4, 8, 64))
    session.settings |= {"least_work": least_work, "most_drafted": most_drafted}
    with (  # bounds that models and texts of this size would never meet: of work for threads, guesses, and tokens between states
        mock.patch.object(cpu, "SERIAL_WORK", least_work),
        mock.patch.object(CpuPlatform, "most_drafted", most_drafted),
        mock.patch.multiple(states, FIRST_KEPT=16, KEPT_EVERY=64, LATEST_EVERY=16),
        tempfile.TemporaryDirectory() as folder,
    ):
        try:
            config, tried, plain = workers(session, only, Path(folder))
        except NanovllmError as refusal:
            session.refused = refusal.message
            return session
        try:
            hold(session, config, tried, plain)
        except Exception:
            session.report(traceback.format_exc())
    return session


def workers(session: Session, only: str, top: Path) -> tuple[EngineConfig, Worker, Worker]:
    """A model twice: with settings that make it hard, which come first, and with room."""
    r = session.r
    name = r.choice([name for name in NAMES if only in name])
    vocab = FEW if name.endswith(WITH_MTP) else r.choice((FEW, ALL))
    wide = r.random() < 0.5 and not name.endswith(WITH_MTP)
    session.settings |= {"model": name, "vocab": vocab, "wide": wide}
    make(name, vocab, wide, top / "model")
    numbers = {
        "dtype": r.choice(("float32", "bfloat16")), "activations": r.choice(("auto", "rounded", "exact")),
        "quant": r.choice((None, r.choice(ANY_WIDTH), r.choice(IN_GROUPS if wide else ANY_WIDTH))),
        "kv_cache_dtype": r.choice(("auto", "auto", "int8", "fp8")), "cache_type_v": r.choice((*6 * [None], "int8", "fp8")),
    }  # fmt: skip
    num_blocks, threads = r.choice((8, 11, 16, 30, 64)), r.choice((1, 2))
    context = min(r.choice((100, 160, 250)), num_blocks * BLOCK_SIZE)
    hard: dict[str, Any] = {
        "num_blocks": num_blocks, "max_num_seqs": r.choice((2, 4, 9, 24)), "threads": threads,
        "max_num_batched_tokens": r.choice((2, 7, 17, 64, 512)), "policy": r.choice(("fcfs", "fcfs", "priority")),
        "enable_prefix_caching": r.random() < 0.8, "num_speculative_tokens": r.choice((0, 1, 3, 8, 23)),
        "draft_min_p": r.choice((0.0, 0.2, 0.75)),
    }  # fmt: skip
    drafter = r.choice((None, None, name, r.choice(list(CASES))))
    if name.endswith(WITH_MTP):
        hard["mtp"] = True
    elif drafter is not None:
        draft = make(drafter, vocab, wide and drafter == name, top / drafter)
        hard |= {"draft_model": str(draft), "draft_quant": r.choice((None, "int8", "fp8"))}
    session.settings |= numbers | hard | {"context": context}
    config = EngineConfig(**numbers, **hard, max_model_len=context, aging_seconds=1e6)  # so that no seed depends on time
    tried = worker_of(top / "model", config, vocab)
    plain = worker_of(top / "model", EngineConfig(**numbers, threads=3 - threads, max_model_len=context, num_blocks=110), vocab)
    plain.runner.graphs._recordable = False  # type: ignore[attr-defined]
    if tried.spec.has_states:
        session.settings["num_states"] = tried.num_states = min(tried.num_states, r.choice((1, 2, 3, 5, 20)))
    if r.random() < 0.1:
        session.settings["fails"] = failing_once(tried) is not None
    return config, tried, plain


def make(name: str, vocab: int, wide: bool, to: Path) -> Path:
    if name.endswith(WITH_MTP):
        return with_layer(name.removesuffix(WITH_MTP), to, vocab_size=vocab).folder
    values = CASES[name].to_dict()
    values |= {key: vocab for key in ("vocab_size", "vocab_size_per_layer_input") if values.get(key)}
    values |= {key: 0 for key in ("bos_token_id", "eos_token_id", "pad_token_id") if (values.get(key) or 0) >= vocab}
    try:
        values |= {key: size for key, size in WIDE.items() if wide and isinstance(values.get(key), int)}
        return save(random_model(type(CASES[name])(**values)), to)
    except Exception as error:
        if not wide:
            raise
        raise UnsupportedError(f"sizes of {name} depend on each other") from error


def worker_of(folder: Path, config: EngineConfig, vocab: int) -> Worker:
    known = [TOKENIZER.id_to_bytes(token) for token in range(vocab)]
    with open_checkpoint(folder) as checkpoint:
        return Worker(checkpoint, config, lambda text: [i for i in TOKENIZER.encode(text) if i < vocab], lambda: known)


def engine_of(worker: Worker, config: EngineConfig, context: int) -> Engine:
    return Engine(
        worker, config, detokenizer_factory=detokenizers_of(TOKENIZER), vocab_size=worker.spec.vocab_size, eos_ids=(1,),
        max_model_len=context, num_blocks=worker.num_blocks, prepare=worker.prepare,
    )  # fmt: skip


def ask(r: random.Random, before: list[RequestOutput], spec: ModelSpec, context: int) -> Asked:
    """Beginnings that others have, and conversations that go on; lengths around the ends of blocks and of the context."""
    prompt = TEXT[r.choice((0, 0, 7)) :][: r.choice((1, 2, 15, 16, 17, 31, 33, 48, 63, 65, 80, 130, context - 1))]
    if r.random() < 0.15:
        prompt = [r.randrange(spec.vocab_size) for _ in prompt]
    if before and r.random() < 0.35:
        told = r.choice(before)
        prompt = [*told.prompt_token_ids, *told.outputs[-1].token_ids, *prompt[: r.choice((0, 1, 5))]]
    prompt = prompt[: context - 1]
    salt = f"{spec.rope_regime(len(prompt))} {r.choice(('', '', '', 'its own'))}"
    if r.random() < 0.1:
        most = min(r.choice((2, 3, 6)), spec.vocab_size - 1)  # beside the token that ends an answer
        beams = {"num_beams": most, "n": r.choice((1, 2)), "max_tokens": r.choice((1, 4, 20)), "logprobs": 0}
        return Asked(prompt, beams, salt)
    given = {name: r.choice(values) for name, (chance, values) in CHOICES.items() if r.random() < chance}
    given |= {"temperature": r.choice((0.0, 0.0, 0.7, 1.5, 3.0)), "seed": r.randrange(99)}
    given["max_tokens"] = r.choice((1, 5, 20, 60, context - len(prompt), context))
    given["min_tokens"] = min(given.get("min_tokens", 0), given["max_tokens"])
    return Asked(prompt, given, salt)


def add(engine: Engine, worker: Worker, name: str, asked: Asked, priority: int = 0) -> None:
    """A constraint is compiled first: when that is done in its thread, and so how many steps there are, no seed decides."""
    params = SamplingParams(**asked.given)
    if (prepared := worker.prepare(params)) is not None:
        futures.wait([prepared])
    engine.add(name, asked.prompt, params, cache_salt=asked.salt, priority=priority)


def together(session: Session, config: EngineConfig, engine: Engine, worker: Worker) -> list[tuple[Asked, RequestOutput]]:
    """All requests, and the last output of each."""
    r = session.r
    asked: dict[str, Asked] = {}
    done: dict[str, RequestOutput] = {}
    texts: defaultdict[tuple[str, int], str] = defaultdict(str)
    for _ in range(MOST_STEPS):
        if len(asked) == REQUESTS and not engine.has_unfinished():
            return [(asked[name], output) for name, output in done.items()]
        if len(asked) < REQUESTS and (len(asked) - len(done) < 2 or r.random() < 0.3):
            asked[name := str(len(asked))] = ask(r, list(done.values()), worker.spec, engine.context_len)
            add(engine, worker, name, asked[name], r.randrange(3) if config.policy == "priority" else 0)
        aborted = engine.abort(r.choice(list(asked)), r.choice((None, 0))) if r.random() < 0.01 else None
        engine.advance()
        moved = (engine.take(name) for name, is_last in list(engine.moved.items()) if is_last or r.random() < 0.3)
        for output in (*filter(None, [aborted]), *moved):
            for answer in output.outputs:
                texts[output.request_id, answer.index] += answer.delta_text
                if texts[output.request_id, answer.index] != answer.text:
                    session.report("the pieces of a text are another text", asked[output.request_id])
            if output.finished:
                done[output.request_id] = output
    raise RuntimeError(f"{len(asked) - len(done)} requests do not end")


def alone(worker: Worker, asked: Asked, context: int) -> RequestOutput:
    engine = engine_of(worker, EngineConfig(enable_prefix_caching=False), context)
    add(engine, worker, "alone", asked)
    while engine.has_unfinished():
        engine.advance()
    return engine.take("alone")


def hold(session: Session, config: EngineConfig, tried: Worker, plain: Worker) -> None:
    engine = engine_of(tried, config, tried.max_model_len)
    done = together(session, config, engine, tried)
    stats, pool = engine.stats(), engine._blocks.states.pool
    if (stats.used_blocks, stats.free_blocks + stats.cached_blocks) != (0, tried.num_blocks):
        session.report(f"blocks are not free: {stats}")
    if pool.num_free + pool.num_kept != tried.num_states:
        session.report(f"states are not free: {pool.num_free}, and {pool.num_kept} kept, of {tried.num_states}")
    session.counts.update(dict(list(stats._asdict().items())[-5:]), requests=len(done))  # those that count since the start
    for asked, output in done:
        session.counts.update(guessed_tokens=output.metrics.num_guessed_tokens, held_tokens=output.metrics.num_held_tokens)
        for what in differences(output, alone(plain, asked, engine.context_len)):
            session.report(what, asked)


def differences(output: RequestOutput, expected: RequestOutput) -> list[str]:
    """Of each answer the first; of one that was aborted, as far as it got. Floats are written alike if all of their bits are."""
    found = []
    for one, other in zip(output.outputs, expected.outputs, strict=True):
        if "not finite" in str(other.error):
            return []
        if "internal error" in str(other.error):
            found.append(f"answer {one.index} alone: {other.error}")
        pairs = [(name, getattr(one, name), getattr(other, name)) for name in TOLD]
        if one.finish_reason == "abort":
            pairs = [(name, mine, its and its[: one.num_tokens]) for name, mine, its in pairs[:2]]
        found += [f"answer {one.index}: {difference(*pair)}" for pair in pairs if repr(pair[1]) != repr(pair[2])][:1]
    pair = output.prompt_logprobs, expected.prompt_logprobs
    if repr(pair[0]) != repr(pair[1]) and (pair[0] is not None or output.outputs[0].finish_reason != "abort"):
        found.append(difference("prompt_logprobs", *pair))
    return found


def difference(name: str, *pair: Any) -> str:
    """Where two sequences part."""
    one, other = (each if isinstance(each, tuple) else (each,) for each in pair)
    place = len(list(itertools.takewhile(lambda both: repr(both[0]) == repr(both[1]), zip(one, other, strict=False))))
    return f"{name}[{place}]: {one[place : place + 1]} instead of {other[place : place + 1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="after which no seed begins any more")
    parser.add_argument("--seed", type=int, default=1, help="the first")
    parser.add_argument("--only", default="", help="families whose names in tests/test_models.py have this part")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not any(options.only in name for name in NAMES):
        parser.error(f"no family is called like {options.only!r}")
    sessions: list[Session] = []
    end = time.monotonic() + options.seconds
    while not sessions or time.monotonic() < end:
        print(options.seed + len(sessions), end=" ", file=sys.stderr, flush=True)  # the one that hangs, if one does
        sessions.append(session := fuzz(options.seed + len(sessions), options.only))
        for found in session.found:
            print(f"{found['what']}\n  settings: {session.settings}\n  request: {found['request']}", flush=True)
    result = {
        "seeds": [options.seed, options.seed + len(sessions) - 1],
        "families": len({session.settings["model"] for session in sessions}),
        "refused": [session.refused for session in sessions if session.refused is not None],
        "counts": dict(sum((session.counts for session in sessions), Counter())),
        "found": [found | {"settings": session.settings} for session in sessions for found in session.found],
    }
    print(json.dumps(result, indent=1))
    common.save(options.output, result)
    sys.exit(1 if result["found"] else 0)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # of steps that fail as they should
    main()
