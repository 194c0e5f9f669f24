"""What structured output costs and holds: schemas of jsonschemabench, and decoding with masks against decoding without.

    python benchmarks/constraints.py --tokenizer FOLDER --schemas maskbench_sample.jsonl --masks
    python benchmarks/constraints.py --tokenizer FOLDER --model q4_0.gguf --output benchmarks/results/constraint_overhead.json

Schemas: how long compiling takes and the first mask; how many instances are accepted or refused as they should be, beside
llguidance's matcher by itself; what random logits say under the mask, checked by jsonschema.
Overhead: 16 sequences decode with the whole engine in this process; rounds with a schema, a regular expression and GBNF take
turns with rounds without. The weights may be random: no answer ends. "random": such a model knows nothing of its constraint, so
that most draws need their mask, which is the worst case. "followed": after each forward one logit is raised, that of the next
token of a text which fits the constraint (without one, of any text), as if a model had learned to write it. "filtered": the same
with Qwen3's own settings, top_k and top_p. "undecided": with these settings, and a second token half as likely at every place, so
that every draw needs its mask; what a model writes is somewhere between the two. Processor time is told, too, for a machine that
is not quiet.
Masks: processor time of the draws of a step by themselves, for such logits and for those of a model that follows its constraint.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from common import made_up, save
from nanovllm_cli.constrain.grammar import compiled
from nanovllm_cli.constrain.guide import Guide
from nanovllm_cli.constrain.matcher import Matcher
from nanovllm_cli.constrain.vocabulary import Vocabulary
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import UsageError
from nanovllm_cli.kernels.cpu_sampling import as_rows
from nanovllm_cli.text.tokenizer import Tokenizer

BATCH, STEPS, PROMPT = 16, 12, 8
KINDS = ("random", "followed", "filtered", "undecided")
SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
            "mail": {"type": "string", "pattern": "^[a-z]{1,20}@[a-z]{1,20}\\.com$"},
        },
        "required": ["name", "age", "tags", "mail"],
        "additionalProperties": False,
    },
}
GBNF = r"""
root   ::= "[" item{500,} "]"
item   ::= "{" [a-z]+ ":" ws (string | [0-9]+) "}" ws
string ::= "\"" [^"\\\n]* "\""
ws     ::= [ \n]?
"""
RECURSIVE = r"""
root   ::= "[" ws value ("," ws value){500,} "]"
value  ::= ("{" ws (pair ("," ws pair)*)? "}" | "[" ws (value ("," ws value)*)? "]" | string | number | "true" | "null") ws
pair   ::= string ws ":" ws value
string ::= "\"" ([^"\\\x00-\x1F] | "\\" ["\\/bfnrt])* "\""
number ::= "-"? [0-9]{1,9} ("." [0-9]{1,9})?
ws     ::= " "?
"""
FORMS = {
    "json_schema": Constraint("json_schema", json.dumps(SCHEMA)),
    "regex": Constraint("regex", r"([A-Z][a-z]{2,9} \d{1,3}; ){500}"),
    "gbnf": Constraint("gbnf", GBNF),
    "recursive_gbnf": Constraint("gbnf", RECURSIVE),
}


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    tokens = [tokenizer.id_to_bytes(i) for i in range(tokenizer.vocab_size)]
    return Vocabulary(tokens, tokenizer.control_ids, lambda text: plain(tokenizer, text))


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=False)


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)) * 1e3, 3) for p in (50, 95, 99, 100)}


# ---- schemas ----


def allows(words: Any, token_id: int) -> bool:
    return bool(words[token_id >> 5] >> np.uint32(token_id & 31) & 1)


def accepts(guide: Guide, ids: list[int], stop_id: int) -> bool:
    for token_id in ids:
        words = None if guide.is_complete else guide.allowed_mask()
        if words is None or not allows(words, token_id):
            return False
        guide.accept(token_id)
    if guide.is_complete:
        return True
    words = guide.allowed_mask()
    return guide.is_complete or allows(words, stop_id)


def sampled(guide: Guide, rng: random.Random, vocabulary: Vocabulary, stop_id: int, closing: Any) -> bytes | None:
    """Random logits, but that tokens which close something come oftener: more answers end."""
    text = b""
    for _ in range(200):
        words = None if guide.is_complete else guide.allowed_mask()
        if words is None or guide.is_complete or allows(words, stop_id):
            return text
        if rng.random() < 0.5 and (words & closing).any():
            words = words & closing
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        token_id = int(allowed[rng.randrange(len(allowed))])
        guide.accept(token_id)
        text += vocabulary.tokens[token_id]
    return None


def measure_schemas(path: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    import jsonschema
    import llguidance

    vocabulary = vocabulary_of(tokenizer)
    began = time.perf_counter()
    _ = vocabulary.tokenizer
    building = time.perf_counter() - began
    stop_id = tokenizer.eos_ids[0]
    rows = [json.loads(line) for line in path.open()]
    closing = vocabulary.mask([i for i, token in enumerate(vocabulary.tokens) if token[:1] in (b'"', b"}", b"]", b",", b":")])
    compiling: list[float] = []
    masks: list[float] = []
    refused: Counter[str] = Counter()
    right: Counter[str] = Counter()
    llguidance_alone: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    for number, row in enumerate(rows):
        text = json.dumps(row["schema"])
        began = time.perf_counter()
        try:
            base = compiled(Constraint("json_schema", text), vocabulary)
        except UsageError as error:
            refused[error.message.partition(": ")[2][:50]] += 1
            continue

        def fresh(base: Any = base) -> Guide:
            return Guide(vocabulary, Matcher(base.deep_copy(), vocabulary), None, (stop_id,))

        compiling.append(time.perf_counter() - began)
        guide = fresh()
        guide.allowed_mask()
        masks.append(time.perf_counter() - began)
        alone = llguidance.LLMatcher(vocabulary.tokenizer, llguidance.LLMatcher.grammar_from_json_schema(text), log_level=0)
        for test in row["tests"]:
            kind = "valid" if test["valid"] else "invalid"
            ids = tokenizer.encode(json.dumps(test["data"], ensure_ascii=False), add_special_tokens=False)
            right[kind] += accepts(fresh(), ids, stop_id) == test["valid"]
            right[f"{kind} of"] += 1
            own = alone.deep_copy()
            llguidance_alone[kind] += (own.try_consume_tokens(ids) == len(ids) and own.is_accepting()) == test["valid"]
        said = sampled(fresh(), random.Random(number), vocabulary, stop_id, closing)
        if said is None:
            drawn["unfinished"] += 1
            continue
        try:
            jsonschema.validators.validator_for(row["schema"])(row["schema"]).validate(json.loads(said))
            drawn["valid"] += 1
        except (ValueError, jsonschema.ValidationError):
            drawn[f"invalid: {row['name']}"] += 1
    return {
        "tokens": tokenizer.vocab_size,
        "vocabulary_seconds": round(building, 3),
        "schemas": len(rows),
        "compiled": len(compiling),
        "refused": dict(refused.most_common()),
        "compile_ms": percentiles(compiling),
        "compile_and_first_mask_ms": percentiles(masks),
        "instances_right": dict(right),
        "llguidance_alone": dict(llguidance_alone),
        "sampled": dict(drawn),
    }


# ---- overhead ----


def measure_overhead(path: Path, tokenizer: Tokenizer, rounds: int, threads: int) -> dict[str, Any]:
    from nanovllm_cli.config import EngineConfig
    from nanovllm_cli.engine.engine import Engine
    from nanovllm_cli.engine.worker import Worker
    from nanovllm_cli.sampling_params import SamplingParams
    from nanovllm_cli.weights.checkpoint import open_checkpoint

    config = EngineConfig(
        threads=threads, max_model_len=1024, num_blocks=512, max_num_seqs=BATCH, enable_prefix_caching=False
    )
    with open_checkpoint(path) as checkpoint:
        worker = Worker(
            checkpoint,
            config,
            lambda text: plain(tokenizer, text),
            lambda: [tokenizer.id_to_bytes(i) for i in range(tokenizer.vocab_size)],
            tokenizer.control_ids,
        )
    engine = Engine(
        worker, config, vocab_size=worker.spec.vocab_size, max_model_len=worker.max_model_len,
        num_blocks=worker.num_blocks, prepare=worker.prepare,
    )  # fmt: skip
    ids = range(tokenizer.vocab_size)
    vocabulary, sample = vocabulary_of(tokenizer), worker.runner.sampler.sample
    texts, of_sequence, second_logit = list[Iterator[int]](), dict[int, Iterator[int]](), [0.0]

    def sample_next(seq_ids: Sequence[int], logits: torch.Tensor, rows: Sequence[int] | None = None) -> Any:
        for seq_id, row in zip(seq_ids, range(len(seq_ids)) if rows is None else rows, strict=True):
            if seq_id not in of_sequence and texts:
                of_sequence[seq_id] = texts.pop()
            if seq_id in of_sequence:
                as_rows(logits)[row, (seq_id * 31 + row) % logits.shape[1]] = second_logit[0]
                as_rows(logits)[row, next(of_sequence[seq_id])] = 1e4
        return sample(seq_ids, logits, rows)

    worker.runner.sampler.sample = sample_next

    def decode(form: Constraint | None, steps: int, kind: str) -> tuple[list[float], list[float]]:
        """Seconds of each step after the one that ended the prompts, and seconds of processor time."""
        texts[:] = [iter(fitting(form, vocabulary, steps + 2, seed)) for seed in range(BATCH)] if kind != "random" else []
        second_logit[0] = 1e4 - 0.4 if kind == "undecided" else 0.0
        filters = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
        settings = filters if kind in ("filtered", "undecided") else {"temperature": 1.0}
        for i in range(BATCH):
            params = SamplingParams(seed=i, max_tokens=steps + 1, ignore_eos=True, constraint=form, **settings)
            engine.add(f"r{i}", [ids[place] for place in made_up(PROMPT, i, len(ids))], params)
        begun: set[str] = set()
        while len(begun) < BATCH:
            begun |= {each.request_id for each in engine.step() if each.outputs[0].token_ids}
        seconds, used = [], []
        while engine.has_unfinished():
            began, used_before = time.perf_counter(), time.process_time()
            outputs = engine.step()
            seconds.append(time.perf_counter() - began)
            used.append(time.process_time() - used_before)
            assert all(each.outputs[0].finish_reason in (None, "length") for each in outputs), outputs
        return seconds, used

    for form in (None, *FORMS.values()):
        decode(form, 2, "random")  # compiles kernels and constraints
    turns = [(kind, name) for kind in KINDS for name in ("free", *FORMS)]
    steps: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
    cpu: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
    for _ in range(rounds):
        for kind, name in turns:
            seconds, used = decode(FORMS.get(name), STEPS, kind)
            steps[kind, name] += seconds
            cpu[kind, name] += used
    medians = {turn: statistics.median(seconds) for turn, seconds in steps.items()}

    def told(of: Callable[[str], float]) -> dict[str, float]:
        return {name: of(name) for name in ("free", *FORMS)}

    return {"batch": BATCH, "steps": STEPS * rounds} | {
        kind: {
            "median_step_ms": told(lambda name, kind=kind: round(medians[kind, name] * 1e3, 2)),
            "median_step_cpu_ms": told(lambda name, kind=kind: round(statistics.median(cpu[kind, name]) * 1e3, 2)),
            "tokens_per_second": told(lambda name, kind=kind: round(BATCH / medians[kind, name], 2)),
            "slower_than_free": told(lambda name, kind=kind: round(medians[kind, name] / medians[kind, "free"] - 1, 4)),
        }
        for kind in KINDS
    }


def fitting(form: Constraint | None, vocabulary: Vocabulary, length: int, seed: int) -> list[int]:
    """Tokens that a constraint allows one after another, any of them at each place."""
    rng = random.Random(seed)
    if form is None:
        return [rng.randrange(len(vocabulary.tokens)) for _ in range(length)]
    guide, text = Guide(vocabulary, Matcher(compiled(form, vocabulary), vocabulary), None, ()), []
    for _ in range(length):
        words = guide.allowed_mask()
        assert words is not None
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        text.append(int(allowed[rng.randrange(len(allowed))]))
        guide.accept(text[-1])
    return text


def measure_draws(tokenizer: Tokenizer, steps: int = 40) -> dict[str, Any]:
    """Processor time of the draws of a step of 16 sequences, masks and all, on one thread and without a model. "random": logits
    that know nothing of the constraint, so that most draws need their mask. "followed": one likely token, which is allowed, as a
    model has it that was trained to write such answers, or was asked to."""
    from nanovllm_cli.constrain.compiler import Compiler
    from nanovllm_cli.engine.plan import NewSequence
    from nanovllm_cli.engine.sampler import Sampler
    from nanovllm_cli.kernels import cpu
    from nanovllm_cli.sampling_params import SamplingParams

    cpu.set_num_threads(1)
    vocabulary = vocabulary_of(tokenizer)
    sampler = Sampler(tokenizer.vocab_size, compiler=Compiler(lambda: vocabulary))
    logits = torch.randn(BATCH, tokenizer.vocab_size, generator=torch.Generator().manual_seed(0))
    rng, result = random.Random(0), dict[str, Any]()
    for name, form in {"free": None, **FORMS}.items():
        for kind in ("random", "followed"):
            params = SamplingParams(constraint=form)
            for i in range(BATCH):
                sampler.add(NewSequence(i, [0], params, seed=i, stop_ids=()))
            seconds = []
            for _ in range(steps):
                likely = [rng.randrange(tokenizer.vocab_size) for _ in range(BATCH)]
                guides = [sampler._states[i].guide for i in range(BATCH)]
                for i, guide in enumerate(guides):
                    if guide is not None and (words := guide.copy().allowed_mask()) is not None:
                        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
                        likely[i] = int(allowed[rng.randrange(len(allowed))])
                before = logits[range(BATCH), likely]
                logits[range(BATCH), likely] = 40.0 if kind == "followed" else before
                began = time.process_time()
                sampler.start_masks(range(BATCH))
                drawn = sampler.sample(range(BATCH), logits)
                seconds.append(time.process_time() - began)
                assert all(each.error is None and each.token_ids for each in drawn), drawn
                logits[range(BATCH), likely] = before
            result[f"{name}, {kind}"] = percentiles(seconds)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with tokenizer.json")
    parser.add_argument("--schemas", type=Path, help="lines of {schema, tests}")
    parser.add_argument("--model", type=Path, help="a checkpoint with at least as many tokens")
    parser.add_argument("--masks", action="store_true", help="processor time of masks and draws, without a model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_folder(options.tokenizer)
    result: dict[str, Any] = {}
    if options.schemas:
        result["schemas"] = measure_schemas(options.schemas, tokenizer)
    if options.masks:
        result["cpu_ms_of_a_steps_draws"] = measure_draws(tokenizer)
    if options.model:
        result["overhead"] = measure_overhead(options.model, tokenizer, options.rounds, options.threads)
    print(json.dumps(result, indent=1))
    save(options.output, result)


if __name__ == "__main__":
    main()
