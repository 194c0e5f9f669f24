"""When words are said: the heads of a Whisper's attention against transformers', the path through them in plain float64, and that
neither steps nor neighbours change it; then words, and what becomes of their times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from engines import engine_for, worker_for
from listening import EN, END, ROWS, START, TRANSCRIBE, UNTIMED, a_window, features, prompt_of, whisper, whisper_folder
from nanovllm_cli.attention.warping import first_rows, weights_of
from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.wishes import Wishes
from nanovllm_cli.transcribing import wishes_of_a_model
from nanovllm_cli.vision_spec import TokenIds

pytest.importorskip("transformers")
BEGINS = [START, EN, TRANSCRIBE, UNTIMED]
HEADS = ((0, 1), (1, 2), (2, 0), (2, 2))
TEXT = [*range(65, 85), 32, 200, 201]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_folder(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:
    return worker_for(folder, dtype="float32", num_blocks=64)


@pytest.fixture(scope="module")
def spec(worker: Worker) -> HearingSpec:
    assert worker.sight is not None
    assert worker.sight.senses.hearing is not None
    return worker.sight.senses.hearing


def attentions(seed: int, text: list[int]) -> list[np.ndarray]:
    """Of each layer [heads, T, R], by transformers, in float64."""
    with torch.inference_mode():
        ids = torch.tensor([[*BEGINS, *text, END]])
        found = whisper()(input_features=features(a_window(seed)), decoder_input_ids=ids, output_attentions=True)
    return [each[0].double().numpy() for each in found.cross_attentions]


def slowly(weights: list[np.ndarray], rows: int, before: int) -> list[int]:
    """OpenAI's way, number by number: of heads [T, R] -> where each token begins."""
    total = np.zeros((len(weights[0]), rows))
    for head in weights:
        cut = head[:, :rows] / head[:, :rows].sum(1, keepdims=True)
        cut = (cut - cut.mean(0)) / cut.std(0)
        if rows > 3:
            around = np.pad(cut, ((0, 0), (3, 3)), mode="reflect")
            cut = np.array([[sorted(line[i : i + 7])[3] for i in range(rows)] for line in around])
        total += cut / len(weights)
    best = {(-1, -1): (0.0, (-1, -1))}
    matrix = total[before:-1]
    for i in range(len(matrix)):
        for j in range(rows):
            ways = [(best[at][0], at) for at in ((i, j - 1), (i - 1, j - 1), (i - 1, j)) if at in best]
            value, at = max(ways, key=lambda way: way[0])
            best[i, j] = value + matrix[i, j], at
    at, first = (len(matrix) - 1, rows - 1), {}
    while at != (-1, -1):
        first[at[0]] = at[1]
        at = best[at][1]
    return [first[i] for i in range(len(matrix))]


def aligned(engine: Engine, requests: list[tuple[TokenIds, Alignment]]) -> list[list[int]]:
    for i, (prompt, wanted) in enumerate(requests):
        engine.embed(str(i), prompt, wanted)
    done: dict[str, Any] = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert all(done[str(i)].outputs[0].error is None for i in range(len(requests)))
    return [list(map(int, done[str(i)].pooled)) for i in range(len(requests))]


def asked(spec: HearingSpec, seed: int, text: list[int], heads: Any = HEADS, rows: int = ROWS) -> tuple[TokenIds, Alignment]:
    return prompt_of(spec, a_window(seed), [*BEGINS, *text, END]), Alignment(heads, len(BEGINS) - 1, rows)


# ---- the path ----


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (2, 3), (17, 31), (31, 17), (40, 90)])
def test_a_path_is_that_of_transformers(shape: tuple[int, int]) -> None:
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    for seed in range(8):
        weights = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        weights = np.round(weights) if seed % 2 else weights  # with ways that are equal
        tokens, rows = _dynamic_time_warping(-weights.astype(np.float64))
        begins = np.pad(np.diff(tokens), (1, 0), constant_values=1).astype(bool)
        assert first_rows(weights).tolist() == rows[begins].tolist()


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 33])
def test_weights_stand_out_as_openai_measures_them(rows: int) -> None:
    """Against softmax, deviation and median in torch, and transformers' filter."""
    from transformers.models.whisper.generation_whisper import _median_filter

    generator = torch.Generator().manual_seed(rows)
    q, k = torch.randn(3, 11, 8, generator=generator), torch.randn(3, 40, 8, generator=generator)
    weights = ((q @ k.mT)[:, :, :rows] * 0.3).double().softmax(-1)
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    expected = _median_filter(((weights - mean) / deviation.clamp_min(1e-30))[None], 7)[0].mean(0)
    found = weights_of(zip(q.numpy(), k.numpy(), strict=True), 0.3, rows)
    assert found.shape == (11, rows)
    if rows > 1:
        np.testing.assert_allclose(found, expected.numpy(), atol=2e-4)
    else:
        assert not found.any(), "where all tokens are alike, none stands out"


# ---- the model ----


@pytest.mark.parametrize("rows", [ROWS, 31, 3])
@pytest.mark.parametrize("heads", [HEADS, ((1, 0), (2, 1))])
def test_rows_are_where_attention_of_transformers_leads(rows: int, heads: Any, worker: Worker, spec: HearingSpec) -> None:
    for seed, text in ((0, TEXT), (5, TEXT[:1]), (6, [*TEXT, *TEXT])):
        weights = attentions(seed, text)
        expected = slowly([weights[layer][head] for layer, head in heads], rows, len(BEGINS) - 1)
        assert aligned(engine_for(worker), [asked(spec, seed, text, heads, rows)]) == [expected]
        assert len(expected) == len(text) + 1


def test_neither_steps_nor_neighbours_change_a_time(worker: Worker, spec: HearingSpec) -> None:
    """Cut anywhere, beside texts that are drawn, behind what was found of the same text, and after a preemption."""
    requests = [asked(spec, seed, text) for seed, text in ((0, TEXT), (3, [*TEXT, *TEXT]), (0, TEXT[:5]))]
    alone = [aligned(engine_for(worker), [each])[0] for each in requests]
    assert alone[0] != alone[2][: len(alone[0])]
    for settings in ({"max_num_batched_tokens": 7}, {"max_num_batched_tokens": 70}, {"enable_prefix_caching": False}):
        assert aligned(engine_for(worker, **settings), requests) == alone
    engine = engine_for(worker)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.add("drawn", requests[1][0], params)  # whose blocks hold the same text
    assert aligned(engine, requests) == alone
    before = engine.stats().prefix_hit_tokens
    assert aligned(engine, requests) == alone
    lead = spec.placed(a_window(), 0).num_tokens
    assert engine.stats().prefix_hit_tokens - before == lead, "a sound is not encoded again, and of a text nothing is found"
    small = engine_for(worker, num_blocks=14, max_num_batched_tokens=4)
    small.add("long", prompt_of(spec, a_window(9), BEGINS), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    small.step()
    assert aligned(small, requests[1:2]) == alone[1:2]
    assert small.stats().preemptions > 0


@pytest.mark.parametrize(("dtype", "cache"), [("bfloat16", "auto"), ("float32", "int8"), ("bfloat16", "fp8")])
def test_keys_of_other_types_are_read(dtype: str, cache: str, folder: Path, spec: HearingSpec) -> None:
    """What a cache keeps of them, against transformers' projection of its own encoder's rows."""
    worker = worker_for(folder, dtype=dtype, num_blocks=16, kv_cache_dtype=cache)
    engine = engine_for(worker)
    prompt, wanted = asked(spec, 0, TEXT)
    (found,) = aligned(engine, [(prompt, wanted)])
    assert found == sorted(found)
    blocks = _blocks_of(worker, prompt)
    with torch.inference_mode():
        rows = whisper().model.encoder(features(a_window(0))).last_hidden_state[0]
        for layer in range(3):
            keys = whisper().model.decoder.layers[layer].encoder_attn.k_proj(rows).view(ROWS, 3, 16)
            for head in range(3):
                kept = worker.model.backend.encoded_keys(  # type: ignore[attr-defined]
                    worker.spec.cross.attention, worker._caches[0].layers[layer], blocks, head  # type: ignore[union-attr]
                )
                error = (kept[:ROWS] - keys[:, head]).abs().max() / keys.abs().max()
                assert error < (0.05 if cache != "int8" else 0.01), (layer, head)


def _blocks_of(worker: Worker, prompt: TokenIds) -> list[int]:
    """Those that a fresh engine gives a sound, as each does."""
    engine = engine_for(worker)
    engine.add("1", prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    engine._scheduler.plan()
    (sequence,) = engine._scheduler.running
    return sequence.block_table[: -(-ROWS // 16)]


def test_what_has_no_times_is_refused(worker: Worker, spec: HearingSpec, folder: Path) -> None:
    engine = engine_for(worker)
    prompt, good = asked(spec, 0, TEXT)
    for wrong in (
        good._replace(heads=()), good._replace(heads=((3, 0),)), good._replace(heads=((0, 3),)), good._replace(heads=((-1, 0),)),
        good._replace(before=len(TEXT) + 4), good._replace(before=-1), good._replace(rows=0), good._replace(rows=ROWS + 1),
        good._replace(heads=((0, 0),) * 5000),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="an alignment is"):
            engine.embed("1", prompt, wrong)
    with pytest.raises(UsageError, match="begins with half a minute of sound"):
        engine.embed("1", [*BEGINS, *TEXT, END], good)
    with pytest.raises(UnsupportedError):
        engine.embed("1", prompt, "mean")
    spec_ = SimpleNamespace(vocab_size=9)
    divided = cast(Any, SimpleNamespace(tensor_parallel_size=2, default_params=SamplingParams(), spec=spec_))
    with pytest.raises(UnsupportedError, match="several processes"):  # before half a minute is written down
        wishes_of_a_model(divided, Wishes(words=True))
    wishes_of_a_model(divided, Wishes())
    assert not engine.has_unfinished()
