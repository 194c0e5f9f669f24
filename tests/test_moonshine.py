"""Moonshine against transformers, by tiny random models: what its decoder makes of an encoder's rows, of which each sound has
others; and that no bit of it depends on steps, neighbours, or what was found again."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from engines import check_that_no_bit_changes, engine_for, logprobs_of, run, worker_for
from moonshines import END, START, TEXT_LEN, a_wave, config_of, heard, moonshine, moonshine_folder, prompt_of
from nanovllm_cli import LLM, Wishes, transcribe
from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import RATE, HearingSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.ears import EARS
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.moonshine import LONGEST, MOONSHINE
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server import dictations
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.dictations import Turns
from nanovllm_cli.server.schemas_audio import SAMPLING
from nanovllm_cli.sounds.reading import read_sound
from nanovllm_cli.text.dictation import Answered, Ask, Heard, Passage
from nanovllm_cli.text.plain_dictation import PlainScribe, any_scribe_of, cut, dictate_by, quietest
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.transcribing import driven
from nanovllm_cli.vision_spec import Clip, Sound, TokenIds
from sounding import noise
from sounding import wav as saved
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors

pytest.importorskip("transformers")


def greedily(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moonshine_folder(tmp_path_factory.mktemp("moonshine"))


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:
    return worker_for(folder, dtype="float32", num_blocks=64)


@pytest.fixture(scope="module")
def spec(worker: Worker) -> HearingSpec:
    assert worker.sight is not None
    assert worker.sight.senses.hearing is not None
    return worker.sight.senses.hearing


@functools.cache
def expected(samples: int, seed: int, text: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities behind each token of a text."""
    with torch.inference_mode():
        found = moonshine()(input_values=heard(a_wave(samples, seed)), decoder_input_ids=torch.tensor([text]))
    logprobs: torch.Tensor = found.logits[0].log_softmax(-1)
    return logprobs


@pytest.mark.parametrize("samples", [895, 7000, 16_001])
def test_texts_are_what_transformers_writes(samples: int, worker: Worker, spec: HearingSpec) -> None:
    """Of one row, and of such as fill no block."""
    (output,) = run(engine_for(worker), [(prompt_of(spec, a_wave(samples), [START]), greedily(20, logprobs=0))])
    ids = list(output.outputs[0].token_ids)
    logprobs = expected(samples, 0, (START, *ids))[:-1]
    assert ids == logprobs.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(logprobs_of(output)), logprobs.max(-1).values, rtol=1e-4, atol=1e-4)
    (other,) = run(engine_for(worker), [(prompt_of(spec, a_wave(samples, 9), [START]), greedily(20, logprobs=0))])
    assert logprobs_of(other) != logprobs_of(output), "it matters what is heard"


def test_neither_steps_nor_neighbours_change_a_bit(worker: Worker, spec: HearingSpec) -> None:
    """Alone, cut anywhere, beside sounds of other lengths, recorded or not, behind a found prefix, and after a preemption."""
    asked = [(7000, 0, [START]), (7000, 0, [START, 7, 8, 9]), (20_000, 3, [START]), (900, 4, [START, *range(40, 60)])]
    requests = [(prompt_of(spec, a_wave(samples, seed), text), greedily(20, logprobs=0)) for samples, seed, text in asked]
    num_blocks = sum(-(-len(prompt) // 16) for prompt, _ in requests) + 2
    alone = check_that_no_bit_changes(worker, requests, num_blocks)
    worker.runner.graphs._recordable = False  # type: ignore[attr-defined]
    try:
        for first, again in zip(alone, run(engine_for(worker, enable_prefix_caching=False), requests), strict=True):
            assert logprobs_of(again) == logprobs_of(first)
    finally:
        worker.runner.graphs._recordable = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(("dtype", "more"), [
    ("bfloat16", {}), ("float32", {"kv_cache_dtype": "int8"}), ("float32", {"quant": "int8"}),
])  # fmt: skip
def test_other_types_are_near(dtype: str, more: dict[str, Any], folder: Path) -> None:
    worker = worker_for(folder, dtype=dtype, num_blocks=32, **more)
    assert worker.sight is not None
    assert worker.sight.senses.hearing is not None
    text = (START, *range(60, 70))
    prompt = prompt_of(worker.sight.senses.hearing, a_wave(7000), list(text))
    (output,) = run(engine_for(worker), [(prompt, greedily(1, logprobs=20))])
    top = dict(output.outputs[0].logprobs[0].top)  # type: ignore[index]
    truth = expected(7000, 0, text)[-1]
    assert max(abs(truth[token].item() - logprob) for token, logprob in top.items()) < 0.4


# ---- from a sound to a text ----


def quiet_at(*seconds: float, length: float) -> np.ndarray:
    values = np.random.default_rng(1).uniform(0.5, 1, round(length * RATE)).astype("<f4")
    for each in seconds:
        values[round((each - 0.1) * RATE) : round((each + 0.1) * RATE)] = 0.01
    return values


@pytest.mark.parametrize(("quiet", "length", "ends"), [
    ((3.0,), 30.0, []), ((15.0, 24.0), 40.0, [24.0]), ((10.0, 22.0, 28.0, 49.0), 70.0, [28.0, 49.0]), ((25.0,), 30.5, [25.0]),
    ((22.0, 28.0), 30.5, [22.0]),
])  # fmt: skip
def test_sounds_are_cut_where_it_is_quiet(quiet: tuple[float, ...], length: float, ends: list[float]) -> None:
    """In the last third of half a minute, and four seconds from the end at least."""
    pieces = cut(quiet_at(*quiet, length=length), LONGEST)
    assert [first for first, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == round(length * RATE)
    assert [end / RATE for _, end in pieces[:-1]] == pytest.approx(ends, abs=0.1)
    assert all(end - first <= LONGEST for first, end in pieces)
    assert pieces[-1][1] - pieces[-1][0] >= 4 * RATE - 1


def test_silence_is_cut_as_late_as_it_may_be() -> None:
    assert cut(np.zeros(50 * RATE, np.float32), LONGEST)[0] == (0, 30 * RATE - RATE // 20)
    assert quietest(np.zeros(100, np.float32), 50, 100) == 100


@pytest.fixture(scope="module")
def scribe(folder: Path, spec: HearingSpec) -> PlainScribe:
    found = any_scribe_of(spec, Tokenizer.from_folder(folder), {"decoder_start_token_id": START, "eos_token_id": END}, 4096)
    assert found == PlainScribe(START, END, TEXT_LEN)
    return found


def written(
    scribe: PlainScribe, spec: HearingSpec, folder: Path, values: np.ndarray, longest: float, wishes: Wishes = Wishes()
) -> tuple[list[tuple[float, float]], list[Passage]]:
    """By a model that comes to an end in what is no longer than so many seconds: what it was asked for, and what came of it."""
    asked: list[tuple[float, float]] = []

    def answer(ask: Any) -> list[Answered]:
        assert isinstance(ask, Ask)
        assert ask.prompt == TokenIds([START] * len(ask.prompt))
        (placed,) = ask.prompt.images
        assert spec.fits([placed], len(ask.prompt))
        sound = placed.image
        assert isinstance(sound, Sound)
        asked.append((sound.frames / RATE, ask.params.max_tokens or 0))
        ids = [65, 66, END] if sound.frames <= longest * RATE else [67] * (ask.params.max_tokens or 0)
        return [Answered(ids, [-0.5] * len(ids))]

    clip = Clip((Sound.of(values.tobytes(), len(values), len(values), 1),), len(values) / RATE)
    heard, *steps = driven(dictate_by(scribe, spec, Tokenizer.from_folder(folder), clip, wishes), answer)
    assert heard == Heard(None, len(values) / RATE)
    return asked, [passage for step in steps for passage in step]  # type: ignore[union-attr]


def test_a_text_that_does_not_end_is_written_in_halves(scribe: PlainScribe, spec: HearingSpec, folder: Path) -> None:
    asked, passages = written(scribe, spec, folder, quiet_at(5.0, length=12.0), 8)
    assert [round(seconds, 1) for seconds, _ in asked] == [12.0, 5.0, 7.0]
    assert [each.text for each in passages] == [" AB", " AB"]
    assert (passages[0].start, passages[0].end) == (0.0, passages[1].start)
    assert passages[1].end == 12.0
    assert passages[0].mean_logprob == pytest.approx(-0.5)
    asked, passages = written(scribe, spec, folder, quiet_at(length=7.9), 5)
    assert (len(asked), passages[0].text) == (1, " " + "C" * (TEXT_LEN - 1)), "nothing shorter than eight seconds is cut"
    asked, passages = written(scribe, spec, folder, quiet_at(length=12.0), 8, Wishes(sampling={"max_tokens": 5}))
    assert (asked, passages[0].text) == ([(12.0, 5)], " CCCCC"), "who says how many gets them"


def test_a_text_has_as_much_room_as_its_piece_is_long(scribe: PlainScribe) -> None:
    room = scribe._replace(text_len=194).room
    assert [room(round(seconds * RATE)) for seconds in (0.1, 1, 4, 14, 30)] == [8, 13, 52, 182, 193]


def test_the_library_writes_what_transformers_writes(folder: Path) -> None:
    """Of a WAV file, greedily, up to where a text is cut off."""
    data = saved(noise(2 * RATE, 3))
    with LLM(folder, dtype="float32", threads=2, num_blocks=160) as llm:
        found = transcribe(llm, data)
        assert llm.hearing is not None
        (whole,) = read_sound(data, llm.hearing, "it").images
        with pytest.raises(UnsupportedError, match="knows no times of words"):
            llm.pooled([prompt_of(llm.hearing, whole, [START, 65, END])], Alignment(((0, 0),), 0, 3), None)
    made = moonshine().generate(input_values=heard(whole), max_new_tokens=26, do_sample=False)[0, 1:].tolist()
    (passage,) = found.passages
    assert list(passage.token_ids) == [each for each in made if each != END]
    assert (found.language, found.seconds, passage.start, passage.end) == (None, 2.0, 0.0, 2.0)


@pytest.mark.parametrize("wishes", [
    {"task": "translate"}, {"timed": True}, {"words": True}, {"language": "de"}, {"prompt": "Ada"}, {"rise": 0.5}, {"tries": 2},
    {"most_squeezed": 3.0}, {"conditioned": False}, {"carried": True},
])  # fmt: skip
def test_what_it_knows_nothing_of_is_refused(
    wishes: dict[str, Any], scribe: PlainScribe, spec: HearingSpec, folder: Path
) -> None:
    with pytest.raises(UnsupportedError):
        written(scribe, spec, folder, quiet_at(length=1.0), 30, Wishes(**wishes))
    if "language" in wishes:
        written(scribe, spec, folder, quiet_at(length=1.0), 30, Wishes("auto"))


def test_doors(folder: Path, doors: Doors, tmp_path: Path) -> None:
    sound = tmp_path / "talk.wav"
    sound.write_bytes(saved(noise(RATE, 3)))
    args = ("run", str(folder), "--audio", str(sound), "-t", "2", "--kv-cache", "20M", "-q")
    code, out, _ = doors.command(*args, "-n", "4")
    assert (code, bool(out)) == (0, True)
    for flag in (["--subtitles", "srt"], ["--language", "de"]):
        code, out, err = doors.command(*args, *flag)
        assert (code, out) == (2, "")
        assert "is for Whispers" in err
    code, _, err = doors.command(*args, "Ada")
    assert code != 0
    assert "knows nothing of a prompt" in err


@pytest.mark.parametrize(("fields", "told"), [
    ({}, None), ({"language": "de"}, "a language that is named"), ({"response_format": "verbose_json"}, "knows nothing of times"),
    ({"prompt": "Ada"}, "a prompt"), ({"task": "translate"}, "translations"),
])  # fmt: skip
def test_a_servers_dictation(fields: dict[str, Any], told: str | None, spec: HearingSpec, folder: Path) -> None:
    """Whose model, here, has one thing to say."""
    facts = SimpleNamespace(hearing=spec, context_len=4096)
    model = SimpleNamespace(
        facts=facts, tokenizer=Tokenizer.from_folder(folder), generation_config={}, default_params=SamplingParams()
    )
    usual = dict.fromkeys((*SAMPLING, "max_completion_tokens", "timestamp_granularities", "language", "prompt"))
    body = SimpleNamespace(**{**usual, "response_format": "json", "file": saved(noise(RATE, 3)), **fields})
    nobody, task = cast(Any, None), fields.get("task", "transcribe")
    made = dictations.Dictation(nobody, cast(Any, model), cast(Any, body), task, nobody, Turns())

    async def answered(ask: Ask) -> list[Answered]:
        return [Answered([72, 105, END], [-0.1] * 3)]

    made._answered = answered  # type: ignore[method-assign]
    if told is None:
        asyncio.run(dictations.whole(made))
        assert made.text == "Hi"
        return
    with pytest.raises(ApiError, match=told) as refused:
        asyncio.run(dictations.whole(made))
    assert refused.value.status == 400
    assert body.file, "refused before it is read"


# ---- what is refused ----


def test_a_prompt_is_a_piece_and_a_text(worker: Worker, spec: HearingSpec) -> None:
    engine = engine_for(worker)
    good = prompt_of(spec, a_wave(7000), [START])
    late = TokenIds([5, *good], [spec.placed(a_wave(7000), 1)])
    short, long = (TokenIds(good, [spec.placed(a_wave(samples), 0)]) for samples in (894, LONGEST + 1))
    for prompt in ([START], late, short, long, TokenIds(good[:10], good.images)):
        with pytest.raises(UsageError, match=r"piece of a sound|as the model hears them"):
            engine.add("1", prompt, greedily(3))
    assert not engine.has_unfinished()


@pytest.mark.parametrize(("wrong", "kind", "told"), [
    ({"decoder_num_key_value_heads": 1}, UnsupportedError, "fewer heads"),
    ({"decoder_hidden_act": "relu6"}, UnsupportedError, "activation"),
    ({"max_position_embeddings": 1 << 20}, CheckpointError, "positions"), ({"hidden_size": -1}, CheckpointError, "hidden_size"),
    ({"decoder_num_hidden_layers": 1 << 20}, CheckpointError, "layers"),
    ({"partial_rotary_factor": 2.0}, CheckpointError, "rotary"),
])  # fmt: skip
def test_what_is_no_moonshine_is_refused(wrong: dict[str, Any], kind: type[NanovllmError], told: str) -> None:
    config = config_of().to_dict() | {"rope_parameters": None}
    with pytest.raises(kind, match=told):
        spec_from_hf(config | wrong, MOONSHINE)


@pytest.mark.parametrize(("wrong", "sounds", "kind", "told"), [
    ({"encoder_num_key_value_heads": 1}, {}, UnsupportedError, "fewer heads"),
    ({"attention_bias": True}, {}, UnsupportedError, "biases"),
    ({"encoder_num_attention_heads": 5}, {}, CheckpointError, "evenly"),
    ({"encoder_num_attention_heads": 16, "encoder_num_key_value_heads": 16}, {}, UnsupportedError, "of 3"),
    ({"encoder_num_hidden_layers": 1 << 20}, {}, CheckpointError, "layers"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, {}, UnsupportedError, "scaled"),
    ({}, {"sampling_rate": 8000}, UnsupportedError, "sampling_rate"),
    ({}, {"do_normalize": True}, UnsupportedError, "do_normalize"),
])  # fmt: skip
def test_what_no_tower_hears_is_refused(
    wrong: dict[str, Any], sounds: dict[str, Any], kind: type[NanovllmError], told: str
) -> None:
    config = config_of().to_dict() | {"rope_parameters": None} | wrong
    with pytest.raises(kind, match=told):
        EARS["MoonshineForConditionalGeneration"].read(ConfigReader(config, "config.json"), ConfigReader(sounds, "it"))


def test_another_vocabulary_is_refused(spec: HearingSpec, folder: Path, tmp_path: Path) -> None:
    from test_llm import write_byte_tokenizer

    for wrong in ({"decoder_start_token_id": 5}, {"eos_token_id": [END, 3]}):
        with pytest.raises(CheckpointError, match="the vocabulary has"):
            any_scribe_of(spec, Tokenizer.from_folder(folder), wrong, 4096)
    write_byte_tokenizer(tmp_path, ("<x>", "</x>"), bos_token="<x>", eos_token="</x>")
    with pytest.raises(CheckpointError, match="lacks <s>"):
        any_scribe_of(spec, Tokenizer.from_folder(tmp_path), {}, 4096)
