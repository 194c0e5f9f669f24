"""Transcripts by a Whisper: its way through a sound against transformers', what it is told, and how its passages are written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from listening import (
    DE,
    EN,
    END,
    FR,
    LANGUAGES,
    NOTHING,
    PREVIOUS,
    START,
    TEXT_LEN,
    TIMES,
    TRANSCRIBE,
    TRANSLATE,
    UNTIMED,
    WORDS,
    generation_config,
    whisper,
    whisper_folder,
)  # fmt: skip
from nanovllm_cli import LLM, Wishes, transcribe
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.sounds.reading import read_sound
from nanovllm_cli.text import spoken
from nanovllm_cli.text.dictation import FORGETS_ABOVE, Answered, Ask, Heard, Passage, dictate
from nanovllm_cli.text.scribe import Scribe, scribe_of
from nanovllm_cli.text.subtitles import subtitles
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.transcribing import driven, passages_of, scribe_for
from nanovllm_cli.vision_spec import Sound
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.hearing import read_hearing
from sounding import noise
from sounding import wav as saved
from test_llm import write_byte_tokenizer
from test_whisper import by_transformers as left_by_transformers

pytest.importorskip("transformers")
PLAIN: dict[str, Any] = {"temperature": 0.0, "most_squeezed": None, "least_likely": None, "silent": None, "conditioned": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_folder(tmp_path_factory.mktemp("whisper") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", threads=2, num_blocks=32) as model:
        yield model


def sound_of(seconds: float, seed: int = 0) -> bytes:
    return saved(noise(round(16_000 * seconds), seed), bits=32, kind=3)


def features_of(llm: LLM, sound: bytes) -> torch.Tensor:
    assert llm.hearing is not None
    (whole,) = read_sound(sound, llm.hearing, "it").images
    return torch.from_numpy(np.frombuffer(whole.values, "<f4").reshape(whole.frames, 9).copy()).T[None]


def by_transformers(features: torch.Tensor, **options: Any) -> Any:
    from transformers import GenerationConfig

    model = whisper()
    model.generation_config = GenerationConfig(**generation_config())
    with torch.inference_mode():
        return model.generate(input_features=features, task="transcribe", return_segments=True, **options)


# ---- against transformers ----


def test_a_spectrogram_is_that_of_transformers() -> None:
    from transformers import WhisperFeatureExtractor

    from test_sounds import QWEN3

    spec = HearingSpec(QWEN3.tower, QWEN3.tokens, 3000, ("", ""), QWEN3.transcript, padded=True, leads=True)
    bins = spec.tower.num_bins
    samples = noise(16_000 * 2).astype(np.float32)
    (whole,) = read_sound(saved(samples, bits=32, kind=3), spec, "it").images
    expected = WhisperFeatureExtractor(feature_size=bins)(samples, sampling_rate=16_000, return_tensors="np").input_features[0].T
    assert (whole.frames, whole.heard) == (3000, 200)
    np.testing.assert_allclose(np.frombuffer(whole.values, "<f4").reshape(-1, bins), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("seconds", [1.0, 3.3])
def test_a_sound_is_gone_through_as_transformers_does(seconds: float, llm: LLM) -> None:
    """A window, and a longer sound, whose windows begin where passages end."""
    sound = sound_of(seconds, 4)
    mine = transcribe(llm, sound, Wishes("en", timed=True, **PLAIN, sampling={"max_tokens": None}))
    theirs = by_transformers(features_of(llm, sound), language="en", return_timestamps=True, condition_on_prev_tokens=False)
    (segments,) = theirs["segments"]
    said = [each for each in segments if each["end"] > each["start"]
            and llm.tokenizer.decode([token for token in each["tokens"].tolist() if token < END]).strip()]  # fmt: skip
    assert len(mine.passages) == len(said) > 0
    for passage, segment in zip(mine.passages, said, strict=True):
        own = [token for token in passage.token_ids if token >= TIMES][:1] + [t for t in passage.token_ids if t < END]
        tokens = [token for token in segment["tokens"].tolist() if token != END]
        assert own == [token for token in tokens if token >= TIMES][:1] + [token for token in tokens if token < END]
        assert passage.start == pytest.approx(float(segment["start"]))
        assert passage.end == pytest.approx(float(segment["end"]))


def test_without_times_a_window_is_what_transformers_writes(llm: LLM) -> None:
    sound = sound_of(0.8)
    mine = transcribe(llm, sound, Wishes("de", **PLAIN, sampling={"max_tokens": None}))
    theirs = by_transformers(features_of(llm, sound), language="de", return_timestamps=False)
    (passage,) = mine.passages
    ids = theirs["sequences"][0].tolist() if isinstance(theirs, dict) else theirs[0].tolist()
    written = [each for each in ids if each < END]
    assert [each for each in passage.token_ids if each < END] == written
    assert (passage.start, passage.end, mine.seconds) == (0.0, 0.8, 0.8)


@pytest.mark.parametrize("timed", [True, False])
def test_log_probabilities_are_of_what_rules_leave(*, timed: bool, llm: LLM) -> None:
    """OpenAI's avg_logprob: of logits as its filters leave them, at temperature 1, the end included."""
    for seed, temperature in ((4, 0.0), (5, 0.7)):
        sound = sound_of(0.9, seed)
        own: dict[str, Any] = {**PLAIN, "temperature": temperature, "tries": 1, "sampling": {"max_tokens": 20}}
        found: list[Any] = []
        list(passages_of(llm, sound, Wishes("en", timed=timed, **own), found.append))
        answer = found[-1].outputs[0]
        drawn = [*answer.token_ids]
        begins = [START, EN, TRANSCRIBE, *([] if timed else [UNTIMED])]
        with torch.inference_mode():
            text = torch.tensor([[*begins, *drawn]])
            logits = whisper()(input_features=features_of(llm, sound), decoder_input_ids=text).logits[0]
        rules = scribe_for(llm).rules(timed=timed)
        expected = []
        for i, token in enumerate(drawn):
            row = logits[len(begins) - 1 + i]
            left = torch.tensor(sorted(left_by_transformers(drawn[:i], row, timed=timed, rules=rules)))
            expected.append((row[token].double() - row[left].double().logsumexp(0)).item())
        mine = [each.logprob for each in answer.logprobs]
        assert mine == pytest.approx(expected, abs=1e-4)
        assert sum(mine) > sum(logits.log_softmax(-1)[len(begins) - 1 + i, token].item() for i, token in enumerate(drawn)) + 0.1


def looked_for(features: torch.Tensor, num_beams: int, most: int, rules: Any, *, timed: bool) -> list[int]:
    """The best text by transformers' logits, of which the rules leave what transformers' own do."""
    begins = [START, EN, TRANSCRIBE, *([] if timed else [UNTIMED])]
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    found: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        with torch.inference_mode():
            text = torch.tensor([[*begins, *ids] for _, ids in beams])
            rows = whisper()(input_features=features.expand(len(beams), -1, -1), decoder_input_ids=text).logits[:, -1]
        longer = []
        for (total, ids), row in zip(beams, rows, strict=True):
            left = torch.tensor(sorted(left_by_transformers(ids, row, timed=timed, rules=rules)))
            logprobs = row[left].double().log_softmax(0)
            longer += [(total + one, [*ids, token]) for one, token in zip(logprobs.tolist(), left.tolist(), strict=True)]
        longer.sort(key=lambda each: -each[0])
        ended = [each for each in longer[:num_beams] if each[1][-1] == END or length == most]
        found = sorted([*found, *((total / length, ids) for total, ids in ended)], key=lambda each: -each[0])[:num_beams]
        beams = [each for each in longer if each[1][-1] != END][:num_beams]
        if len(found) == num_beams and beams[0][0] / length <= found[-1][0]:
            break
    return found[0][1]


@pytest.mark.parametrize("timed", [True, False])
def test_beams_find_the_likeliest_of_what_rules_leave(*, timed: bool, llm: LLM) -> None:
    differ = 0
    for seed in range(4):
        sound = sound_of(0.9, seed)
        found: list[Any] = []
        for beams in (1, 3):
            own = {"max_tokens": 8, "num_beams": beams, "length_penalty": 1.0}
            list(passages_of(llm, sound, Wishes("en", timed=timed, **PLAIN, sampling=own), found.append))
        greedy, looked = (list(each.outputs[0].token_ids) for each in found[-2:] if each.outputs[0].token_ids)
        assert looked == looked_for(features_of(llm, sound), 3, 8, scribe_for(llm).rules(timed=timed), timed=timed)
        differ += looked != greedy
    assert differ, "beams that find what is drawn show nothing"


def test_beams_are_of_the_first_try_alone(llm: LLM) -> None:
    """Texts that are never good enough are drawn at higher temperatures, as if there were no beams."""
    found: list[Any] = []
    wishes = Wishes("en", most_squeezed=0.0, silent=None, tries=2, sampling={"max_tokens": 4, "num_beams": 3})
    list(passages_of(llm, sound_of(0.5), wishes, found.append))
    assert [len(each.outputs) for each in found] == [1, 1, 2, 2, 2, 2, 2]  # whether anybody speaks, and six temperatures


def test_a_language_is_heard_as_transformers_hears_it(llm: LLM) -> None:
    found = set()
    for seed in range(4):
        sound = sound_of(0.6, seed)
        with torch.inference_mode():
            logits = whisper()(input_features=features_of(llm, sound), decoder_input_ids=torch.tensor([[START]])).logits[0, -1]
        likeliest = LANGUAGES[int(logits[EN : FR + 1].argmax())]
        for nothing in (None, "", " Auto "):
            assert transcribe(llm, sound, Wishes(nothing, **PLAIN)).language == likeliest
        silent = transcribe(llm, sound, Wishes(**PLAIN)).passages[0].silent
        assert silent == pytest.approx(logits.softmax(-1)[NOTHING].item(), rel=1e-3)
        found.add(likeliest)
    assert found <= set(LANGUAGES)


# ---- the way, of answers that are written here ----


@pytest.fixture(scope="module")
def spec(folder: Path) -> HearingSpec:
    with open_checkpoint(folder) as checkpoint:
        found = read_hearing(checkpoint)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def scribe(spec: HearingSpec, tokenizer: Tokenizer) -> Scribe:
    found = scribe_of(spec, tokenizer, generation_config(), 64 + TEXT_LEN)
    assert found is not None
    return found


TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""As openai/whisper has them."""


class Model:
    """Answers texts by turns, [ids] or ([ids], log-probability of each), or a tuple of such, one for each answer. asked: windows,
    prompts and parameters."""

    def __init__(self, *texts: Any, silent: float = 0.1, language: int = DE) -> None:
        self.texts = list(texts)
        self.silent, self.language = silent, language
        self.asked: list[Ask] = []

    def __call__(self, ask: Ask) -> list[Answered]:
        allowed = ask.params.allowed_token_ids
        if allowed == (NOTHING,):
            return [Answered([NOTHING], [math.log(self.silent)])]
        if allowed is not None:
            assert set(allowed) == {EN, DE, FR}
            return [Answered([self.language], [-0.2])]
        self.asked.append(ask)
        text = self.texts[min(len(self.asked), len(self.texts)) - 1]
        several = text if isinstance(text, tuple) and not isinstance(text[1], float) else (text,) * ask.params.n
        assert len(several) == ask.params.n
        pairs = [each if isinstance(each, tuple) else (each, -0.1) for each in several]
        return [Answered(ids, [logprob] * (len(ids) + 1)) for ids, logprob in pairs]

    @property
    def prompts(self) -> list[list[int]]:
        """Behind what stands for the sound."""
        return [list(each.prompt)[64:] for each in self.asked]


def timed(*passages: tuple[int, str, int]) -> list[int]:
    return [token for start, text, end in passages for token in (TIMES + start, *text.encode(), TIMES + end)]


@pytest.fixture
def dictated(spec: HearingSpec, scribe: Scribe, tokenizer: Tokenizer) -> Any:
    def run(model: Model, seconds: float, **wishes: Any) -> tuple[Heard, list[Passage]]:
        clip = read_sound(sound_of(seconds), spec, "it")
        heard, *found = driven(dictate(scribe, spec, tokenizer, clip, Wishes(**wishes)), model)
        assert isinstance(heard, Heard)
        return heard, [passage for each in found if not isinstance(each, Heard) for passage in each]

    return run


def test_windows_begin_where_passages_end(dictated: Any) -> None:
    model = Model(
        [*timed((0, " one", 20), (20, " two", 30)), TIMES + 30],  # another has begun: the next window begins there
        timed((5, " three", 40)),  # one time alone at the end: nothing is said behind it
        timed((0, " four", 10)),
    )
    heard, passages = dictated(model, 2.2)
    assert (heard.language, heard.seconds) == ("de", 2.2)
    told = [(round(each.start, 2), round(each.end, 2), each.text, each.seek) for each in passages]
    assert told == [(0.0, 0.4, " one", 0), (0.4, 0.6, " two", 0), (0.6, 1.4, " three", 60), (1.6, 1.8, " four", 160)]
    assert [prompt[-3:] for prompt in model.prompts] == [[START, DE, TRANSCRIBE]] * 3, "long sounds have times in any case"
    first, second, third = (each.prompt.images[0].image for each in model.asked)
    assert isinstance(second, Sound)
    assert (second.frames, second.heard) == (100, 100)
    assert second.values[: 40 * 36] == first.values[60 * 36 :], "windows overlap"
    assert third.values[60 * 36 :] == bytes(40 * 36), "behind the sound are zeros"


def test_what_was_written_stands_in_front_of_the_next(dictated: Any) -> None:
    one, two = timed((0, " one", 50)), timed((0, " two", 50))
    model = Model(one, two)
    dictated(model, 1.9, language="en", prompt=" Ada ")
    begins = [START, EN, TRANSCRIBE]
    said = list(b" Ada")
    assert model.prompts == [[PREVIOUS, *said, *begins], [PREVIOUS, *said, *one, *begins]]
    model = Model(one, two)
    dictated(model, 1.9, language="English", conditioned=False)
    assert model.prompts == [begins, begins]
    long = Model(timed((0, "x" * 60, 50)), two)
    dictated(long, 1.9, language="en", most_squeezed=None)
    assert len(long.prompts[1]) == TEXT_LEN // 2 - 1 + 1 + len(begins), "half of a text at the most"


def test_a_bad_text_is_drawn_again(dictated: Any) -> None:
    repeats, unlikely, good = list(b" ha" * 40), ([*b" eh"], -3.0), [*b" Well."]
    model = Model(repeats, unlikely, good)
    _, (passage,) = dictated(model, 0.9, language="en")
    assert (passage.text, passage.temperature) == (" Well.", TEMPERATURES[2])
    assert [each.params.temperature for each in model.asked] == list(TEMPERATURES[:3])
    assert FORGETS_ABOVE == 0.5
    model = Model(repeats)
    _, (passage,) = dictated(model, 0.9, language="en")
    assert (passage.temperature, len(model.asked)) == (1.0, len(TEMPERATURES)), "the last one stays"
    assert passage.squeezed == 119 / 14
    model = Model(repeats)
    _, (passage,) = dictated(model, 0.9, language="en", temperature=0.3)
    assert (passage.temperature, len(model.asked)) == (0.3, 1), "one that was told is the only one"
    hot = Model(*[unlikely] * 5, timed((0, " a", 50)), timed((0, " b", 50)))
    dictated(hot, 1.9, language="en")
    assert hot.asked[5].params.temperature > FORGETS_ABOVE
    assert hot.prompts[-1] == [START, EN, TRANSCRIBE], "what was drawn so hot is not gone on from"


def test_of_several_texts_the_likeliest_counts(dictated: Any) -> None:
    """Five side by side at each temperature above 0, as OpenAI's command line and whisper.cpp have them."""
    repeats = list(b" ha" * 40)
    texts = (([*b" a"], -0.9), ([*b" be"], -0.5), ([*b" c"], -0.45), (repeats, -0.8), ([*b" e"], -0.5))
    model = Model(repeats, texts)
    _, (passage,) = dictated(model, 0.9, language="en")
    assert [each.params.n for each in model.asked] == [1, 5]
    assert passage.text == " be", "the sum with the end, divided by the tokens without: -0.5 * 4 / 3, and -0.45 * 3 / 2"
    assert passage.mean_logprob == pytest.approx(-0.5)
    model = Model(repeats, texts[:2])
    assert dictated(model, 0.9, language="en", tries=2)[1][0].text == " be"
    model = Model(repeats, [*b" x"])
    dictated(model, 0.9, language="en", tries=1)
    assert [each.params.n for each in model.asked] == [1, 1]
    nothing = Model(repeats, (([], -0.1), ([*b" x"], math.nan)))
    assert dictated(nothing, 0.9, language="en", tries=2)[1] == [], "a text without a token has a likelihood as well"


@pytest.mark.parametrize(
    ("wishes", "temperatures"),
    [
        ({}, TEMPERATURES), ({"temperature": 0.0}, (0.0,)), ({"temperature": 0.3}, (0.3,)), ({"rise": 0}, (0.0,)),
        ({"rise": 0.5}, (0.0, 0.5, 1.0)), ({"temperature": 0.3, "rise": 0.2}, (0.3, 0.5, 0.7, 0.9)),
        ({"temperature": 0.9, "rise": 0.2}, (0.9,)), ({"temperature": 1.5, "rise": 0.2}, (1.5,)), ({"rise": 3}, (0.0,)),
    ],
)  # fmt: skip
def test_temperatures_rise_as_openais(wishes: dict[str, Any], temperatures: tuple[float, ...]) -> None:
    """numpy.arange(temperature, 1.0 + 1e-6, increment), of its command line; a temperature alone is the only one."""
    assert Wishes(**wishes).temperatures == temperatures
    if wishes.get("temperature", 0.0) <= 1 and (rise := wishes.get("rise", 0.2 if not wishes else 0)):
        by_numpy = np.arange(wishes.get("temperature", 0.0), 1.0 + 1e-6, rise)
        assert temperatures == pytest.approx(by_numpy.tolist())


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": "hot"}, {"temperature": True}, {"rise": -0.2},
        {"rise": 0.001}, {"rise": math.inf}, {"tries": 0}, {"tries": 65}, {"tries": 2.0}, {"tries": True},
        {"most_squeezed": math.inf}, {"least_likely": "x"}, {"silent": math.nan},
        *({"sampling": {name: value}} for name, value in {
            "n": 2, "temperature": 0.5, "logprobs": None, "stop": ("x",), "stop_token_ids": (5,), "transcript": None,
            "nonsense": 1,
        }.items()),
        {"temperature": 0.2, "sampling": {"num_beams": 2}}, {"sampling": {"num_beams": 2, "presence_penalty": 0.5}},
    ],
)  # fmt: skip
def test_wishes_without_a_meaning_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        Wishes(**wrong)
    assert len(caught.value.message) < 100


@pytest.mark.parametrize(
    ("wishes", "silent", "logprob", "tries", "found"),
    [  # of decode_with_fallback, and of the check for silence behind it, in openai/whisper's transcribe.py
        ({}, 0.1, -0.5, 1, True), ({}, 0.1, -2.0, 6, True), ({}, 0.9, -2.0, 1, False), ({}, 0.9, -0.5, 1, True),
        ({}, 0.9, -1.0, 1, False), ({}, 0.1, -1.0, 1, True), ({}, 0.6, -2.0, 6, True),
        ({"least_likely": None}, 0.9, -2.0, 1, False), ({"least_likely": None}, 0.1, -9.0, 1, True),
        ({"silent": None}, 0.9, -2.0, 6, True), ({"silent": None, "least_likely": None}, 0.9, -9.0, 1, True),
    ],
)  # fmt: skip
def test_a_window_is_tried_again_or_left_out_as_openai_does(
    wishes: dict[str, Any], silent: float, logprob: float, tries: int, *, found: bool, dictated: Any
) -> None:
    model = Model(([*b" Yes."], logprob), silent=silent)
    _, passages = dictated(model, 0.9, language="en", **wishes)
    assert (len(model.asked), bool(passages)) == (tries, found)


def test_most_tokens_of_a_window_are_half_of_a_text(dictated: Any) -> None:
    """OpenAI's sample_len: n_text_ctx // 2."""
    model = Model([*b" x"])
    dictated(model, 0.9, language="en")
    dictated(model, 0.9, language="en", sampling={"max_tokens": 5})
    assert [each.params.max_tokens for each in model.asked] == [TEXT_LEN // 2, 5]


def test_a_prompt_may_be_carried_along(dictated: Any) -> None:
    """OpenAI's carry_initial_prompt: it stands in front of each window, whatever else does."""
    one, two, begins = timed((0, " one", 50)), timed((0, " two", 50)), [START, EN, TRANSCRIBE]
    said, room = list(b" Ada"), TEXT_LEN // 2 - 1
    model = Model(one, two)
    dictated(model, 1.9, language="en", prompt="Ada", carried=True)
    assert model.prompts == [[PREVIOUS, *said, *begins], [PREVIOUS, *said, *one, *begins]]
    model = Model(one, two)
    dictated(model, 1.9, language="en", prompt="Ada", carried=True, conditioned=False)
    assert model.prompts == [[PREVIOUS, *said, *begins]] * 2
    long = timed((0, "x" * 60, 50))
    model = Model(long, two)
    dictated(model, 1.9, language="en", prompt="Ada", carried=True, most_squeezed=None)
    assert model.prompts[1] == [PREVIOUS, *said, *long[-(room - len(said)) :], *begins]
    model = Model(one, two)
    dictated(model, 1.9, language="en", prompt="A" * 100, carried=True)
    assert model.prompts[1] == [PREVIOUS, *b"A" * room, *begins], "there is room for nothing else"


def test_silence_is_left_out(dictated: Any) -> None:
    model = Model(([*b" Thanks."], -2.0), silent=0.9)
    assert dictated(model, 0.9, language="en")[1] == []
    assert len(model.asked) == 1, "nor is it tried again"
    assert [each.text for each in dictated(Model([*b" Thanks."], silent=0.9), 0.9, language="en")[1]] == [" Thanks."]
    assert dictated(Model(timed((3, "", 3)), silent=0.1), 0.9, timed=True)[1] == [], "an empty passage is none"


def test_no_answer_stops_the_way(dictated: Any) -> None:
    """However short a passage is, the next window begins further on."""
    model = Model([TIMES, *b" x", TIMES + 1, TIMES + 1])
    _, passages = dictated(model, 1.2, language="en", **PLAIN | {"temperature": None})
    assert [each.seek for each in passages] == list(range(0, 120, 2))
    assert dictated(Model([]), 2.5, language="en", **PLAIN)[1] == []


def test_english_alone_and_translations(spec: HearingSpec, tokenizer: Tokenizer, dictated: Any) -> None:
    model = Model([*b" Yes."])
    dictated(model, 0.9, language="fr", task="translate")
    assert model.prompts == [[START, FR, TRANSLATE, UNTIMED]]
    english = scribe_of(spec, tokenizer, generation_config(is_multilingual=False), 64 + TEXT_LEN)
    assert english is not None
    clip = read_sound(sound_of(0.9), spec, "it")
    model = Model([*b" Yes."])
    heard, _ = driven(dictate(english, spec, tokenizer, clip, Wishes("English")), model)
    assert (heard, model.prompts) == (Heard(None, 0.9), [[START, UNTIMED]])
    for wishes, told in ((Wishes("de"), "'de'"), (Wishes(task="translate"), "knows English alone")):
        with pytest.raises(NanovllmError, match=told):
            list(driven(dictate(english, spec, tokenizer, clip, wishes), model))


# ---- what a vocabulary and a config say ----


def test_a_scribe_is_what_the_files_say(scribe: Scribe, spec: HearingSpec, tmp_path: Path) -> None:
    assert (scribe.start, scribe.end, scribe.first_time) == (START, END, TIMES)
    assert (scribe.nothing, scribe.previous) == (NOTHING, PREVIOUS)
    assert scribe.languages == {"en": EN, "de": DE, "fr": FR}
    assert (scribe.first_bans, scribe.latest, scribe.text_len) == ((32, END), 20, TEXT_LEN)
    assert scribe.rules(timed=False).first_time is None
    for wrong in (
        {"is_multilingual": 1}, {"max_initial_timestamp_index": -1}, {"suppress_tokens": "7"}, {"suppress_tokens": [[7]]},
        {"begin_suppress_tokens": [7] * 5000},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            scribe_of(spec, Tokenizer.from_folder(_written(tmp_path, WORDS)), generation_config(**wrong), 128)
    for lacking in ("<|startoftranscript|>", "<|notimestamps|>", "<|startoflm|>"):
        words = tuple(each for each in WORDS if each != lacking)
        with pytest.raises(CheckpointError, match="no Whisper's"):
            scribe_of(spec, Tokenizer.from_folder(_written(tmp_path, words)), {}, 128)
    silent = Tokenizer.from_folder(_written(tmp_path, tuple(each for each in WORDS if each != "<|startofprev|>")))
    bare = scribe_of(spec, silent, {}, 128)
    assert bare is not None
    with pytest.raises(UnsupportedError, match="startofprev"):
        next(dictate(bare, spec, silent, read_sound(sound_of(0.5), spec, "it"), Wishes("en", prompt="Ada")))


def _written(folder: Path, words: tuple[str, ...]) -> Path:
    write_byte_tokenizer(folder, words, bos_token=words[0], eos_token=words[0])
    return folder


def test_languages_are_those_that_transformers_knows() -> None:
    from transformers.models.whisper import tokenization_whisper as theirs

    assert dict(spoken.LANGUAGES) == theirs.LANGUAGES
    for name, code in theirs.TO_LANGUAGE_CODE.items():
        assert spoken.language_of(f" {name.title()} ", spoken.LANGUAGES) == code
    assert spoken.language_of("en-US", spoken.LANGUAGES) == "en"
    for said in ("xx", "", "klingon", "<|en|>", "e" * 5000):
        with pytest.raises(UsageError, match="does not know the language") as caught:
            spoken.language_of(said, ("en", "de"))
        assert len(caught.value.message) < 100
    with pytest.raises(UsageError) as caught:
        spoken.language_of("fr", ("en", "de"))
    assert caught.value.hint == "known are de, en"


# ---- subtitles ----


def test_subtitles_are_as_their_formats_have_them() -> None:
    passages = [
        Passage(0.0, 2.5, " Hello,\n there. ", (), 0, 0.0, 0.0, 1.0, None),
        Passage(3599.9996, 3661.25, " a --> b <i> & c", (), 0, 0.0, 0.0, 1.0, None),
    ]
    assert subtitles(passages, "srt") == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello, there.\n\n2\n01:00:00,000 --> 01:01:01,250\na -> b <i> & c\n\n"
    )
    assert subtitles(passages, "vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello, there.\n\n"
        "01:00:00.000 --> 01:01:01.250\na -> b &lt;i> &amp; c\n\n"
    )
    assert (subtitles([], "srt"), subtitles([], "vtt")) == ("", "WEBVTT\n\n")
