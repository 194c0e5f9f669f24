"""Speculation by a draft model: the same tokens and log-probabilities to the bit, in fewer steps.

A model that drafts for itself is right about every greedy token, as long as its own cache holds what the other's does: so what
prefix caching, preemption, chunks and forks do to blocks is seen in how many of its guesses hold.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

import forked
from engines import greedy, random_model, run, save
from nanovllm_cli.config import DRAFTED_TOKENS, EngineConfig
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.engine.draft import Draft
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.plan import Plan
from nanovllm_cli.errors import CheckpointError, DoesNotFitError, UsageError
from nanovllm_cli.llm import LLM
from nanovllm_cli.sampling_params import SamplingParams
from test_cli_driver import CACHE, SOURCE, environment
from test_lookup import ASKED, PROMPT, SHAPE, answers, engine_with

LONG = [(7 * i * i + i) % 250 for i in range(90)]
"""Of which nothing comes again."""


pytestmark = pytest.mark.usefixtures("eight_rows_may_have_guesses")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(Qwen3Config(**SHAPE)), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller one, of other heads, which is right now and then."""
    smaller = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 1, "head_dim": 32, "max_position_embeddings": 70}
    return save(random_model(Qwen3Config(**SHAPE | smaller)), tmp_path_factory.mktemp("draft"))


def drafting(folder: Path, draft: Path, **more: Any) -> Engine:
    return engine_with(folder, more.pop("num_guesses", 0), **{"draft_model": str(draft), "draft_min_p": 0.0} | more)


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_the_same_to_the_bit(name: str, folder: Path, other: Path) -> None:
    asked = [(PROMPT, ASKED[name]), (PROMPT[:9], ASKED[name])]
    expected = answers(engine_with(folder, 0), asked)
    assert answers(drafting(folder, other), asked) == expected
    assert answers(drafting(folder, folder), asked) == expected


@pytest.mark.parametrize(
    "more",
    [{"quant": "fp8", "draft_quant": "int8"}, {"draft_quant": "fp8"}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}],
    ids=str,
)
def test_rounded_weights_and_caches_too(more: dict[str, Any], folder: Path, other: Path) -> None:
    asked = [(PROMPT, ASKED["logprobs"]), (PROMPT[:9], ASKED["greedy"])]
    plain = {name: value for name, value in more.items() if name != "draft_quant"}
    assert answers(drafting(folder, other, **more), asked) == answers(engine_with(folder, 0, **plain), asked)


def test_all_kinds_together_under_pressure(folder: Path, other: Path) -> None:
    """Where blocks are so few that sequences lose theirs, and steps so small that guesses find no room."""
    r = random.Random(4)
    asked = [(PROMPT[: r.randint(4, len(PROMPT))], params) for params in ASKED.values() for _ in range(2)]
    r.shuffle(asked)
    plain = answers(engine_with(folder, 0, max_num_seqs=64), asked)
    for num_blocks, batched in ((40, 512), (24, 7), (256, 5)):
        pressed = drafting(folder, other, num_blocks=num_blocks, max_num_seqs=9, max_num_batched_tokens=batched)
        assert answers(pressed, asked) == plain
        assert pressed.stats().used_blocks == 0


def test_who_drafts_for_itself_is_always_right(folder: Path) -> None:
    engine = drafting(folder, folder)
    (output,) = run(engine, [(LONG, greedy(91))])
    assert output.metrics.num_guessed_tokens == output.metrics.num_held_tokens == 2 + 4 + 10 * 7 + 1
    assert engine.stats().steps == 14  # the prompt's, then three tokens, five, ten times eight, and two


PRESSED: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 11}, {"num_blocks": 9, "max_num_seqs": 4}, {"num_blocks": 15, "max_num_batched_tokens": 33},
    {"num_guesses": 5}, {"num_guesses": 1},
]  # fmt: skip


def check_that_all_hold(engine: Engine, *, loses: bool) -> None:
    """Several at once, some with a beginning that is known, one forked. loses: whether blocks are so few that sequences lose
    theirs."""
    asked = [(LONG[:n], greedy(40)) for n in (33, 50, 50, 17)]
    for _ in range(2):  # the second time prompts and answers are found
        outputs = run(engine, [*asked, (LONG[:20], greedy(30, n=3))])
        guessed = sum(output.metrics.num_guessed_tokens for output in outputs)
        assert guessed == sum(output.metrics.num_held_tokens for output in outputs) > 20
    assert engine.stats().prefix_hit_tokens > 100
    assert (engine.stats().preemptions > 0) == loses


@pytest.mark.parametrize("more", PRESSED, ids=str)
def test_its_cache_follows_the_other_ones(more: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "most_drafted", 64)
    check_that_all_hold(drafting(folder, folder, **more), loses="num_blocks" in more)


def test_a_step_has_guesses_for_as_many_as_pay(folder: Path) -> None:
    """Where many decode, a step is computing anyway."""
    engine = drafting(folder, folder, num_guesses=4)
    outputs = run(engine, [(LONG[i : i + 9], greedy(20)) for i in range(25)])
    assert all(output.metrics.num_guessed_tokens <= 8 for output in outputs), "the last ones, when others had ended"
    alone = run(engine, [(LONG[:9], greedy(21))])
    assert alone[0].metrics.num_guessed_tokens == 2 + 4 + 4 + 4 + 1


def test_it_guesses_up_to_what_it_is_not_sure_of(folder: Path) -> None:
    def guessed(least: float) -> int:
        (output,) = run(drafting(folder, folder, draft_min_p=least), [(LONG[:20], greedy(60))])
        assert output.metrics.num_held_tokens == output.metrics.num_guessed_tokens
        return output.metrics.num_guessed_tokens

    counts = [guessed(least) for least in (0.0, 0.05, 0.1, 0.999)]
    assert counts[0] > counts[1] > counts[2] > counts[3] == 0


def test_guesses_that_it_leaves_out_are_not_counted_as_computed(folder: Path, other: Path) -> None:
    """Each token is fed once, but the last, and beside them what was guessed in vain."""
    for least in (0.0, 0.3, 0.6):
        engine = drafting(folder, other, draft_min_p=least)
        (output,) = run(engine, [(PROMPT, ASKED["greedy"])])
        metrics, num_drawn = output.metrics, output.outputs[0].num_tokens
        in_vain = metrics.num_guessed_tokens - metrics.num_held_tokens
        assert engine.stats().scheduled_tokens == len(PROMPT) + num_drawn - 1 + in_vain


def test_who_is_never_right_is_asked_less_and_less(folder: Path, other: Path) -> None:
    engine = drafting(folder, other)
    (output,) = run(engine, [(LONG[:9], greedy(50, logit_bias=dict.fromkeys(range(250), -100.0)))])
    assert 2 <= output.metrics.num_guessed_tokens <= 8
    assert output.metrics.num_held_tokens == 0


def test_behind_its_own_context_it_guesses_no_more(folder: Path, other: Path) -> None:
    engine = drafting(folder, other)
    (short, long) = run(engine, [(LONG[:10], greedy(20)), (LONG[:80], greedy(20))])
    assert short.metrics.num_guessed_tokens > 0 == long.metrics.num_guessed_tokens
    plain = run(engine_with(folder, 0), [(LONG[:10], greedy(150))])
    assert run(engine, [(LONG[:10], greedy(150))])[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_tokens_that_the_large_model_lacks_are_no_guesses(folder: Path, tmp_path: Path) -> None:
    wide = save(random_model(Qwen3Config(**SHAPE | {"vocab_size": 4000})), tmp_path)
    asked = [(PROMPT, greedy(30))]
    assert answers(drafting(folder, wide), asked) == answers(engine_with(folder, 0), asked)


def test_what_it_takes_counts(folder: Path, other: Path) -> None:
    """A block of the cache is both models'; memory that was given has fewer of them."""
    alone, beside = engine_with(folder, 0)._executor, drafting(folder, other)._executor
    assert beside.block_bytes == alone.block_bytes + 16 * 2 * 32 * 4
    assert beside.draft_bytes > alone.draft_bytes == 0  # type: ignore[attr-defined]
    given = {"num_blocks": None, "kv_cache_bytes": 40 * alone.block_bytes, "max_model_len": 64}
    assert drafting(folder, other, **given)._executor.num_blocks < 40  # type: ignore[attr-defined]
    with pytest.raises(DoesNotFitError, match="a context of 512 tokens needs"):
        drafting(folder, folder, **given | {"max_model_len": 512})


def test_a_step_that_fails_is_tried_in_halves_with_its_guesses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = drafting(folder, folder)
    asked = [(LONG[:9], greedy(30)), (LONG[3:20], greedy(30))]
    plain = answers(engine_with(folder, 0), asked)
    fill, failures = Draft.fill, []

    def failing(self: Draft, plan: Plan) -> Any:
        if len(plan.scheduled) > 1 and len(failures) < 3 and any(share.num_guesses for share in plan.scheduled):
            failures.append(plan)
            raise RuntimeError("not together")
        return fill(self, plan)

    monkeypatch.setattr(Draft, "fill", failing)
    outputs = run(engine, asked)
    assert [(each.token_ids, each.error) for output in outputs for each in output.outputs] == [(ids, None) for ids, *_ in plain]
    assert len(failures) == 3
    assert all(output.metrics.num_guessed_tokens == output.metrics.num_held_tokens > 16 for output in outputs)


def test_what_makes_no_sense_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="draft_min_p must be at least 0 and below 1"):
        EngineConfig(draft_model="x", draft_min_p=1.0)
    with pytest.raises(UsageError, match="draft_quant has no meaning without draft_model"):
        EngineConfig(draft_quant="int8")
    with pytest.raises(UsageError, match="draft_model must be a name"):
        EngineConfig(draft_model=3)  # type: ignore[arg-type]
    assert EngineConfig(draft_model="x").max_guesses == DRAFTED_TOKENS
    assert EngineConfig(draft_model="x", num_speculative_tokens=3).max_guesses == 3
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError):
        drafting(folder, tmp_path)


def test_prompts_of_an_embedding_are_nothing_to_guess_about(folder: Path, other: Path) -> None:
    def pooled(engine: Engine) -> Any:
        engine.embed("x", LONG[:40], "mean")
        engine.add("y", LONG[:20], SamplingParams(temperature=0.0, max_tokens=30))
        found = {}
        while engine.has_unfinished():
            found |= {output.request_id: output for output in engine.step() if output.finished}
        return found["x"].pooled, found["y"].outputs[0].token_ids

    assert pooled(drafting(folder, other)) == pooled(engine_with(folder, 0))


# ---- the library and the commands, on the bundled model ----


@pytest.fixture(scope="module")
def others_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, whose tokens have one another's ids."""
    folder = tmp_path_factory.mktemp("vocabulary") / "model"
    shutil.copytree(Path(SOURCE) / "nanovllm_cli/assets/tiny", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    names = [name for name in tokenizer["model"]["vocab"] if name not in special]
    ids = [tokenizer["model"]["vocab"][name] for name in names]
    tokenizer["model"]["vocab"] |= dict(zip(names, reversed(ids), strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_what_was_saved_of_a_conversation_has_the_draft_models_part(tmp_path: Path) -> None:
    config = EngineConfig(draft_model="tiny", draft_min_p=0.0, num_blocks=64, threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    with LLM("tiny", config=config) as llm:
        (output,) = llm.generate("Once upon a time there was", params)
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        assert llm.save_kv(ids, tmp_path / "kv") >= 64
        assert llm.draft_model is not None
        assert llm.weight_bytes == 2 * llm.read_bytes
    with LLM("tiny", config=config) as llm:
        assert llm.load_kv(tmp_path / "kv") >= 64
        (output,) = llm.generate([ids], replace(params, max_tokens=20))
        assert output.metrics.num_cached_tokens >= 64
        assert output.metrics.num_guessed_tokens == output.metrics.num_held_tokens > 10
    for other in (replace(config, draft_model=None), replace(config, draft_quant="int8")):
        with LLM("tiny", config=other) as llm:
            assert llm.load_kv(tmp_path / "kv") == 0


def test_a_draft_model_of_another_vocabulary_is_refused(others_vocabulary: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot draft for this model: of \d+ tokens compared, \d+ are others there"):
        LLM("tiny", config=EngineConfig(draft_model=str(others_vocabulary), num_blocks=8))


def nanovllm(*words: str, home: Path) -> tuple[int, str, str]:
    there = environment(home) | {"XDG_CACHE_HOME": CACHE}
    command = [sys.executable, "-m", "nanovllm_cli", *words]
    done = forked.run(command, env=there, capture_output=True, text=True, cwd=home, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


def test_run_says_the_same_and_how_many_guesses_held(tmp_path: Path) -> None:
    words = ("run", "tiny", "--temp", "0", "-n", "60", "Once upon a time")
    code, said, told = nanovllm(*words, "--draft-model", "tiny", "--draft-quant", "int8", home=tmp_path)
    assert (code, said) == nanovllm(*words, home=tmp_path)[:2]
    assert "with guesses by " in told
    held, guessed = re.search(r"\((\d+) of (\d+) guesses held\)", told).groups()  # type: ignore[union-attr]
    assert int(guessed) >= int(held) > 0


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["run", "tiny", "--draft-model", "./none", "x"], 3, "error: no draft model ./none: "),
        (["run", "tiny", "--draft-quant", "int8", "x"], 2, "error: --draft-quant has no meaning without --draft-model"),
        (["run", "tiny", "--draft-model", "tiny", "--draft-min-p", "1", "x"], 2, "error: --draft-min-p must be at least 0"),
        (["run", "tiny", "--draft-model", "tiny", "--draft-quant", "int9", "x"], 2, "error: unknown format 'int9'"),
        (["serve", "tiny", "tiny", "-a", "a", "-a", "b", "--draft-model", "tiny"], 2, "error: --draft-model has no meaning with"),
        (["run", "tiny", "-md", "tiny", "x"], 2, "hint: here it is --draft-model"),
        (["chat", "tiny", "--draft-max", "16"], 2, "hint: here it is --speculate"),
        (["serve", "tiny", "--draft-p-min", "0.5"], 2, "hint: here it is --draft-min-p"),
        (["serve", "tiny", "--speculative-config", "{}"], 2, "hint: here it is --draft-model NAME or --mtp, and --speculate N"),
        (["run", "tiny", "-ngld", "99", "x"], 2, "hint: the draft model runs where the other one does"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_mistyped_is_told(words: list[str], code: int, told: str, tmp_path: Path) -> None:
    found = nanovllm(*words, home=tmp_path)
    assert (found[0], found[1]) == (code, "")
    assert told in found[2]
