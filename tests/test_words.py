"""Words of a text and their times: what becomes of the moments at which tokens begin. Expected values are what OpenAI's rules
give, by hand; subtitles that are cut by words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from listening import DE, EN, END, START, TEXT_LEN, TIMES, TRANSCRIBE, UNTIMED, WORDS, generation_config, whisper_folder
from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.text.dictation import Align, Passage, dictate
from nanovllm_cli.text.scribe import Scribe, scribe_of
from nanovllm_cli.text.subtitles import Line, lines, subtitles
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.wishes import Wishes
from nanovllm_cli.text.words import Said, Spoken, Word, spoken, words_of
from nanovllm_cli.transcribing import driven
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.hearing import read_hearing
from test_dictation import Model, sound_of, timed
from test_llm import write_byte_tokenizer

pytest.importorskip("transformers")
HEADS = [[1, 0], [2, 2]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("words")
    write_byte_tokenizer(folder, WORDS, bos_token=WORDS[0], eos_token=WORDS[0])
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("text", "language", "words"),
    [
        (" Hello, world.", "en", [" Hello", ",", " world", "."]),
        ("Hello", None, ["Hello"]),
        (" don't stop", "en", [" don", "'t", " stop"]),
        (" Grüße -- ja", "de", [" Grüße", " ", "-", "-", " ja"]),  # of bytes, where a space is a token by itself
        ("東京。", "ja", ["東", "京", "。"]),
        (" 東京 。", "en", [" 東京", " 。"]),
        ("", "en", []),
    ],
)
def test_words_are_parted_by_spaces_or_characters(
    text: str, language: str | None, words: list[str], tokenizer: Tokenizer
) -> None:
    found = words_of(tokenizer, list(text.encode()), language)
    assert found == [(each, len(each.encode())) for each in words]


def test_bytes_that_are_no_character_are_words(tokenizer: Tokenizer) -> None:
    assert words_of(tokenizer, [0xE6, *b" a", 0xFF], "en") == [("\ufffd", 1), (" a\ufffd", 3)]
    for cut_off in ([0xE6], [0xE6, 0x97], [0xF0, 0x9F, 0x98]):
        found = words_of(tokenizer, [*b" a", *cut_off], "ja")
        assert sum(count for _, count in found) == 2 + len(cut_off)
        assert all(count > 0 for _, count in found)


def rows_of(*words: tuple[str, float, float]) -> tuple[list[int], list[float]]:
    """Ids of words that begin when the first number says; the last one ends when its second does."""
    ids, begins = [], []
    for text, start, end in words:
        data = list(text.encode())
        ids += data
        begins += [start + (end - start) * i / len(data) for i in range(len(data))]
    return ids, [*begins, words[-1][2]]


def said(ids: list[int], start: float, end: float, chance: float = 0.5) -> Said:
    return Said(ids, [chance] * len(ids), start, end)


class Pieces:
    """A tokenizer of tokens that are several characters long."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def decode(self, ids: list[int]) -> str:
        return "".join(self.texts[each] for each in ids)


def test_punctuation_is_its_neighbours() -> None:
    texts = ' "', "Ada", ",", " Lord", "!", " -", " By", "ron", '"'
    begins = [0.1, 0.2, 0.6, 0.7, 1.0, 1.1, 1.2, 1.3, 1.5, 1.6]
    pieces: Any = Pieces(*texts)
    (found,) = spoken(pieces, [said(list(range(9)), 0.0, 2.0)], begins, 0.0, "en", 0.3)
    assert [each.text for each in found.words] == [' "Ada,', " Lord!", ' - Byron"']
    assert [(each.start, each.end) for each in found.words] == [(0.1, 0.6), (0.7, 1.0), (1.2, 1.5)], "its own times stay"
    assert all(each.probability == pytest.approx(0.5) for each in found.words)


def test_times_are_of_the_whole_sound(tokenizer: Tokenizer) -> None:
    """Rounded to hundredths, behind the offset of the window; a passage begins and ends with its words."""
    ids, begins = rows_of((" one", 0.301, 0.5), (" two", 0.5, 0.7))
    more, later = rows_of((" red", 0.7, 1.0))
    passages = [said(ids, 30.2, 30.9, 0.25), said(more, 30.9, 31.0)]
    found = spoken(tokenizer, passages, [*begins[:-1], *later], 30.0, "en", 29.9)
    assert found == [
        Spoken((Word(" one", 30.3, 30.5, 0.25), Word(" two", 30.5, 30.7, 0.25)), 30.3, 30.7),
        Spoken((Word(" red", 30.7, 31.0, 0.5),), 30.7, 31.0),
    ]


def test_a_pause_is_no_part_of_a_word(tokenizer: Tokenizer) -> None:
    """At the end of a sentence no mark, and no word behind one, is longer than twice the usual word, which is the median."""
    ids, begins = rows_of((" a", 0.0, 0.2), (" b", 0.2, 0.4), (".", 0.4, 3.0), (" c", 3.0, 3.2), (" d", 3.2, 3.4))
    (found,) = spoken(tokenizer, [said(ids, 0.0, 3.4)], begins, 0.0, "en", 0.0)
    assert [(each.text, each.start, each.end) for each in found.words][1:3] == [(" b.", 0.2, 0.4), (" c", 3.0, 3.2)]
    ids, begins = rows_of((" a", 0.0, 0.2), (".", 0.2, 0.4), (" b", 0.4, 3.0), (" c", 3.0, 3.2), (" d", 3.2, 3.4))
    (found,) = spoken(tokenizer, [said(ids, 0.0, 3.4)], begins, 0.0, "en", 0.0)
    assert [(each.text, each.start, each.end) for each in found.words][1] == (" b", 2.6, 3.0)
    ids, begins = rows_of((" a", 0.0, 3.0), (" b", 3.0, 3.2), (" c", 3.2, 3.4))
    (found,) = spoken(tokenizer, [said(ids, 0.0, 3.4)], begins, 0.0, "en", 0.0)
    assert found.words[0][1:3] == (2.6, 3.0), "nor the first behind one"
    assert found.start == 2.6
    ids, begins = rows_of((" a", 0.0, 3.0), (" b", 3.0, 5.0), (" c", 5.0, 5.2), (" d", 5.2, 5.4), (" e", 5.4, 5.6))
    (found,) = spoken(tokenizer, [said(ids, 0.0, 5.6)], begins, 0.0, "en", 0.0)
    assert [each[1:3] for each in found.words[:2]] == [(4.2, 4.6), (4.6, 5.0)], "nor the second"


def test_words_far_beyond_a_passage_end_with_it(tokenizer: Tokenizer) -> None:
    ids, begins = rows_of((" a", 0.0, 1.0), (" b", 1.0, 1.3), (" c", 1.3, 3.0))
    (found,) = spoken(tokenizer, [said(ids, 0.8, 1.9)], begins, 0.0, "en", -9.0)
    assert found.words[0].start == pytest.approx(0.3), "the usual length in front of its end, which is 0.7 at most"
    assert (found.words[-1].end, found.start, found.end) == (2.0, 0.8, 1.9)


def test_what_has_no_times_has_no_words(tokenizer: Tokenizer) -> None:
    assert spoken(tokenizer, [said([], 1.0, 2.0)], [0.0], 0.0, "en", 0.0) == [Spoken((), 1.0, 2.0)]
    ids, begins = rows_of((" one", 0.0, 0.5), (" two", 0.5, 1.0))
    (found,) = spoken(tokenizer, [said([*ids, *b" three"], 0.0, 2.0)], begins, 0.0, "en", 0.0)
    assert [each.text for each in found.words] == [" one", " two"], "of what did not fit the model's text there are none"
    instant = spoken(tokenizer, [said([*b" x"], 1.0, 2.0)], [1.5, 1.5, 1.5], 0.0, "en", 0.0)
    assert instant == [Spoken((Word(" x", 1.5, 1.5, 0.5),), 1.0, 2.0)], "a passage is never without length"


# ---- in a dictation ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_folder(tmp_path_factory.mktemp("whisper") / "model", alignment_heads=HEADS)


@pytest.fixture(scope="module")
def spec(folder: Path) -> HearingSpec:
    with open_checkpoint(folder) as checkpoint:
        found = read_hearing(checkpoint)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def scribe(spec: HearingSpec, tokenizer: Tokenizer) -> Scribe:
    found = scribe_of(spec, tokenizer, generation_config(alignment_heads=HEADS), 64 + TEXT_LEN)
    assert found is not None
    return found


def test_a_windows_text_is_asked_once_more(spec: HearingSpec, scribe: Scribe, tokenizer: Tokenizer) -> None:
    model, asked = Model([*timed((0, " one,", 20), (20, " two", 30)), TIMES + 30], timed((0, " red", 40))), list[Align]()

    def answer(ask: Any) -> Any:
        if not isinstance(ask, Align):
            return model(ask)
        asked.append(ask)
        return [float(2 * i) for i in range(len(ask.prompt) - ask.prompt.images[0].end - 4)]

    from nanovllm_cli.sounds.reading import read_sound

    wishes = Wishes("de", words=True, sampling={"lora": [("own", 1.0)]})
    _, *found = driven(dictate(scribe, spec, tokenizer, read_sound(sound_of(1.5), spec, "it"), wishes), answer)
    passages = [each for step in found if isinstance(step, list) for each in step]
    assert [each.text for each in passages] == [" one,", " two", " red"], "as if nobody had asked"
    begins = [START, DE, TRANSCRIBE, UNTIMED]
    assert [list(each.prompt)[64:] for each in asked] == [[*begins, *b" one, two", END], [*begins, *b" red", END]]
    assert [each.alignment for each in asked] == [Alignment(((1, 0), (2, 2)), 3, 50), Alignment(((1, 0), (2, 2)), 3, 45)]
    assert [each.lora for each in asked] == [[("own", 1.0)]] * 2
    words = [[(each.text, each.start, each.end) for each in passage.words] for passage in passages]
    assert words == [[(" one,", 0.0, 0.16)], [(" two", 0.2, 0.36)], [(" red", 0.6, 0.76)]]
    assert passages[0].words[0].probability == pytest.approx(math.exp(-0.1))
    assert (passages[2].start, passages[2].end) == (0.6, 0.76)
    way = dictate(scribe, spec, tokenizer, read_sound(sound_of(0.5), spec, "it"), Wishes("en"))
    assert not any(each.words for step in driven(way, Model([*b" x"])) if isinstance(step, list) for each in step)


def test_words_are_found_of_texts_with_times(spec: HearingSpec, scribe: Scribe, tokenizer: Tokenizer) -> None:
    from nanovllm_cli.sounds.reading import read_sound

    model = Model(timed((0, " a", 20)))
    way = dictate(scribe, spec, tokenizer, read_sound(sound_of(0.5), spec, "it"), Wishes("en", words=True))
    list(driven(way, lambda ask: [0.0] * 3 if isinstance(ask, Align) else model(ask)))
    assert model.prompts == [[START, EN, TRANSCRIBE]]


def test_heads_are_those_of_the_files(spec: HearingSpec, scribe: Scribe, tokenizer: Tokenizer) -> None:
    assert scribe.heads == ((1, 0), (2, 2))
    bare = scribe_of(spec, tokenizer, generation_config(), 64 + TEXT_LEN)
    assert bare is not None
    assert bare.heads == tuple((layer, head) for layer in (1, 2) for head in range(3)), "else of the later half of the layers"
    pairs = [[3, 0]], [[0, 3]], [[-1, 0]], [[1.0, 0]], [[True, 0]], [[0, 0]] * 10
    for wrong in ("all", [], [1, 0], [[1]], [[1, 0, 0]], {}, *pairs):
        with pytest.raises(CheckpointError, match="alignment_heads"):
            scribe_of(spec, tokenizer, generation_config(alignment_heads=wrong), 64 + TEXT_LEN)


# ---- subtitles ----


def passage(text: str, start: float, end: float, *words: tuple[str, float, float]) -> Passage:
    return Passage(start, end, text, (), 0, 0.0, 0.0, 1.0, None, (), tuple(Word(*each, 1.0) for each in words))


LONG = passage(" To be or not", 1.0, 3.0, (" To", 1.0, 1.2), (" be", 1.2, 1.5), (" or", 1.5, 2.0), (" not", 2.0, 2.8))


EACH = [(1.0, 1.2, "To"), (1.2, 1.5, "be"), (1.5, 2.0, "or"), (2.0, 2.8, "not")]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((None, None), [(1.0, 3.0, "To be or not")]), ((9, 99), [(1.0, 2.8, "To be or not")]),
        ((2, None), [(1.0, 1.5, "To be"), (1.5, 2.8, "or not")]), ((None, 5), [(1.0, 1.5, "To be"), *EACH[2:]]),
        ((3, 6), [(1.0, 1.5, "To be"), (1.5, 2.8, "or not")]), ((None, 1), EACH), ((1, None), EACH),
    ],
)  # fmt: skip
def test_subtitles_are_cut_at_words(limits: tuple[int | None, int | None], expected: list[tuple[float, float, str]]) -> None:
    bare = passage(" Hm. ", 3.0, 4.0)
    assert list(lines([LONG, bare], *limits)) == [Line(*each) for each in expected] + [Line(3.0, 4.0, "Hm.")]
    assert subtitles([bare], "srt") == "1\n00:00:03,000 --> 00:00:04,000\nHm.\n\n"
