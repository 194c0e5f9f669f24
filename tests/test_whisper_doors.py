"""Whispers from the command line and a server, by a tiny model: what doors say, not what is said."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hearing import WORDS as CHAT_WORDS
from hearing import hearing_model
from listening import LANGUAGES, ROWS, TIMES, generation_config, whisper_folder
from live_server import LiveServer, live_server
from nanovllm_cli import LLM, SamplingParams, Wishes, transcribe
from nanovllm_cli.cli import dictating
from nanovllm_cli.cli.question import Question, TranscriptWishes
from nanovllm_cli.errors import RequestError, UnsupportedError
from nanovllm_cli.server import dictations
from nanovllm_cli.sounds import reading
from nanovllm_cli.sounds.source import SOUND as MEDIUM
from nanovllm_cli.text.dictation import Heard, Passage
from nanovllm_cli.text.subtitles import subtitles
from nanovllm_cli.text.transcripts import asks
from nanovllm_cli.text.words import Word
from nanovllm_cli.transcribing import Transcript
from nanovllm_cli.weights import aliases
from sounding import noise
from sounding import wav as saved
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors
from test_sounds import QWEN3

pytest.importorskip("transformers")
SOUND = saved(noise(16_000 * 2, 3))
ARGS = ("-t", "2", "--kv-cache", "20M", "-q")
BRIEFLY = ("--temp", "0.2", "-n", "20")
"""A temperature that is told is the only one, and windows of a few words take no time."""
SERVED: dict[str, Any] = {"temperature": 0.2, "extra_body": {"max_completion_tokens": 20}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Which writes letters and punctuation alone, and seldom times."""
    others = [*generation_config()["suppress_tokens"], *range(32), *range(127, 256), *range(TIMES + 2, TIMES + ROWS - 4)]
    return whisper_folder(tmp_path_factory.mktemp("whisper") / "model", suppress_tokens=others)


@pytest.fixture(scope="module")
def library(folder: Path) -> Iterator[tuple[Transcript, Transcript]]:
    """What the library makes of the sound, told its language, without words and with them."""
    with LLM(folder, threads=2, num_blocks=64) as llm:
        wishes = Wishes("de", temperature=0.2, sampling={"max_tokens": 20})
        yield transcribe(llm, SOUND, wishes), transcribe(llm, SOUND, dataclasses.replace(wishes, words=True))
        with pytest.raises(UnsupportedError, match="writes down what is said, and embeds nothing"):
            llm.embed("hello")


@pytest.fixture(scope="module")
def looked_for(folder: Path) -> list[Transcript]:
    """The text at temperature 0 alone, drawn and by eight beams."""
    with LLM(folder, threads=2, num_blocks=64) as llm:
        return [
            transcribe(llm, SOUND, Wishes("de", rise=0.0, sampling={"max_tokens": 20, "num_beams": beams})) for beams in (1, 8)
        ]


@pytest.fixture(scope="module")
def told(library: tuple[Transcript, Transcript]) -> Transcript:
    return library[0]


@pytest.fixture(scope="module")
def words(library: tuple[Transcript, Transcript]) -> list[Word]:
    return [word for each in library[1].passages for word in each.words]


def test_words_are_those_of_the_text(told: Transcript, library: tuple[Transcript, Transcript], words: list[Word]) -> None:
    """Asking for them changes no token; each is said behind the one before, within the sound."""
    with_words = library[1]
    assert [each.token_ids for each in with_words.passages] == [each.token_ids for each in told.passages]
    assert "".join(each.text for each in words) == "".join(each.text for each in with_words.passages)
    assert len(words) > len(with_words.passages)
    for passage in with_words.passages:
        starts, ends = [each.start for each in passage.words], [each.end for each in passage.words]
        assert (starts, ends) == (sorted(starts), sorted(ends))
        assert all(0 <= each.start <= each.end <= 3 and 0 < each.probability <= 1 for each in passage.words)
    assert not any(each.words for each in told.passages)


@pytest.fixture
def sound(tmp_path: Path) -> str:
    (tmp_path / "talk.wav").write_bytes(SOUND)
    return str(tmp_path / "talk.wav")


def test_run_writes_down_what_is_said(folder: Path, told: Transcript, sound: str, doors: Doors) -> None:
    code, out, _ = doors.command("run", str(folder), "--audio", sound, "--language", "German", *BRIEFLY, *ARGS)
    assert (code, out) == (0, told.text + "\n"), "the same as the library's"
    assert len(told.passages) > 1
    assert told.language == "de"


def test_run_looks_for_the_likeliest_text(folder: Path, looked_for: list[Transcript], sound: str, doors: Doors) -> None:
    drawn, found = (each.text for each in looked_for)
    assert found != drawn
    more = "--language", "de", "-tpi", "0", "-n", "20", *ARGS
    code, out, _ = doors.command("run", str(folder), "--audio", sound, "--beams", "8", *more)
    assert (code, out) == (0, found + "\n")
    code, out, _ = doors.command("run", str(folder), "--audio", sound, *more)
    assert (code, out) == (0, drawn + "\n")


@pytest.mark.parametrize("form", ["srt", "vtt"])
def test_run_writes_subtitles(form: Any, folder: Path, told: Transcript, sound: str, doors: Doors, tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    more = "--language", "de", "--subtitles", form, "-o", output, *BRIEFLY
    code, out, _ = doors.command("run", str(folder), "--audio", sound, *more, *ARGS)
    assert (code, out) == (0, "")
    assert Path(output).read_text() == subtitles(told.passages, form)


def test_run_as_json(folder: Path, told: Transcript, sound: str, doors: Doors) -> None:
    code, out, _ = doors.command("run", str(folder), "--audio", sound, "--language", "de", "--json", *BRIEFLY, *ARGS)
    record = json.loads(out)
    assert code == 0
    assert (record["answers"][0]["text"].strip(), record["answers"][0]["language"]) == (told.text, "de")
    code, out, _ = doors.command("run", str(folder), "--audio", sound, "--jsonl", *BRIEFLY, *ARGS)
    assert json.loads(out.splitlines()[-1])["answers"][0]["language"] in LANGUAGES, "which it has heard"


def test_run_tells_times_of_words(folder: Path, words: list[Word], library: Any, sound: str, doors: Doors) -> None:
    more = "--language", "de", *BRIEFLY, *ARGS
    code, out, _ = doors.command("run", str(folder), "--audio", sound, "--json", "--word-times", *more)
    answer = json.loads(out)["answers"][0]
    assert code == 0
    assert [each["text"] for each in answer["segments"]] == [each.text for each in library[1].passages]
    found = [(each["word"], each["start"], each["end"]) for segment in answer["segments"] for each in segment["words"]]
    assert found == [(each.text, each.start, each.end) for each in words]
    code, out, _ = doors.command("run", str(folder), "--audio", sound, "--jsonl", "--word-times", *more)
    *events, end = map(json.loads, out.splitlines())
    assert [segment for event in events for segment in event.get("segments", ())] == answer["segments"]
    assert "segments" not in end["answers"][0]
    code, out, _ = doors.command("run", str(folder), "--audio", sound, "--subtitles", "srt", "--max-words", "1", *more)
    assert (code, out.count(" --> ")) == (0, len(words))
    for width, count in (("1", len(words)), ("100", len(library[1].passages))):
        code, out, _ = doors.command("run", str(folder), "--audio", sound, "--subtitles", "vtt", "-ml", width, *more)
        assert (code, out.count(" --> ")) == (0, count)


def test_several_sounds_are_answers(folder: Path, told: Transcript, sound: str, doors: Doors, tmp_path: Path) -> None:
    other = tmp_path / "other.wav"
    other.write_bytes(saved(noise(16_000, 5)))
    more = "--language", "de", *BRIEFLY, *ARGS
    code, out, _ = doors.command("run", str(folder), "--audio", sound, "--audio", str(other), "--json", *more)
    first, second = json.loads(out)["answers"]
    assert (code, first["index"], second["index"]) == (0, 0, 1)
    assert first["text"].strip() == told.text
    code, alone, _ = doors.command("run", str(folder), "--audio", str(other), "--json", *more)
    (answer,) = json.loads(alone)["answers"]
    assert {**answer, "index": 1} == second
    code, out, _ = doors.command("run", str(folder), "--audio", sound, "--audio", str(other), *more)
    assert (code, out) == (0, f"{told.text}\n---\n{answer['text'].strip()}\n")


@pytest.mark.parametrize("form", ["text", "json", "srt", "file"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RequestError("the transcript failed")])
def test_what_was_heard_is_kept_where_it_is_broken_off(
    form: str, failure: BaseException, folder: Path, sound: str, doors: Doors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passages_of(*_: Any) -> Iterator[Any]:
        yield Heard("de", 60.0)
        yield [Passage(0.0, 2.0, " Good morning.", (), 0, 0.0, -0.1, 1.0, 0.1)]
        raise failure

    monkeypatch.setattr(dictating, "passages_of", passages_of)
    path = tmp_path / "talk.srt"
    path.write_text("before")
    as_srt = "--subtitles", "srt"
    words = {"text": (), "json": ("--json",), "srt": as_srt, "file": (*as_srt, "-o", str(path))}[form]
    code, out, err = doors.command("run", str(folder), "--audio", sound, *words, *ARGS[:-1])
    subtitle = "1\n00:00:00,000 --> 00:00:02,000\nGood morning.\n\n"
    assert code == (130 if isinstance(failure, KeyboardInterrupt) else 1)
    if form == "json":
        (answer,) = json.loads(out)["answers"]
        assert (answer["text"], answer["finish_reason"]) == ("Good morning.", "interrupted")
    else:
        assert out == {"text": "Good morning.\n", "srt": subtitle, "file": ""}[form]
    if form == "file":
        assert (path.read_text(), (tmp_path / "talk.srt.partial").read_text()) == ("before", subtitle)
        assert "talk.srt.partial" in err


def test_run_takes_openais_thresholds(folder: Path, sound: str, doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Wishes] = []

    def passages_of(llm: Any, sound: Any, wishes: Wishes, *_: Any) -> Iterator[Any]:
        asked.append(wishes)
        return iter([Heard("de", 2.0)])

    monkeypatch.setattr(dictating, "passages_of", passages_of)
    own = (
        "-tpi", "0.5", "-bo", "2", "--compression-ratio-threshold", "none", "-lpt", "-0.7", "-nth", "0.9",
        "--no-condition-on-previous-text", "--carry-initial-prompt",
    )  # fmt: skip
    for words in ((), own):
        code, _, err = doors.command("run", str(folder), "--audio", sound, *words, *ARGS, "Ada")
        assert code == 0, err
    assert asked[0] == Wishes(prompt="Ada")
    assert asked[1] == Wishes(prompt="Ada", rise=0.5, tries=2, most_squeezed=None, least_likely=-0.7, silent=0.9,
                              conditioned=False, carried=True)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--audio", "SOUND", "--max-words", "3"), "--subtitles"),
        (("--audio", "SOUND", "-ml", "0", "--subtitles", "srt"), "1 or more"),
        (("--audio", "SOUND", "--word-times"), "--json"), (("--audio", "SOUND", "-bo", "0"), "1 to 64"),
        (("--audio", "SOUND", "--beams", "3", "--temp", "0.5"), "--beams has no effect"),
        (("--audio", "SOUND", "-tpi", "-1"), "rise by"), (("--audio", "SOUND", "-lpt", "much"), "number, or none"),
        (("--audio", "SOUND", "-lpt", "nan"), "number, or none"),
        (("--batch", "SOUND", "--best-of", "3"), "cannot be used together"),
        (("--audio", "BROKEN"), "broken.wav is damaged"), (("hello",), "writes down what is said in a sound"),
        (("--audio", "SOUND", "--audio", "SOUND", "--subtitles", "srt"), "of one sound, and this is about 2"),
        (("--audio", "SOUND", "--language", "klingon"), "does not know the language 'klingon'"),
        (("--audio", "SOUND", "--language", "it"), "does not know the language 'it'"),
        (("--audio", "SOUND", "--language", "germn"), "german (de)"), (("--audio", "SOUND", "--video", "FILM"), "looks at no"),
        (("--audio", "SOUND", "--num-answers", "2"), "--num-answers has no meaning for a transcript"),
        (("--audio", "SOUND", "--continue", "--translate"), "cannot be used together"),
        (("--audio", "SOUND", "--json", "--logprobs", "1"), "--logprobs has no meaning for a transcript"),
        (("--audio", "SOUND", "--reasoning-budget", "1"), "--reasoning-budget has no meaning for a transcript"),
        (("--audio", "SOUND", "--prompt-cache", "CACHE"), "--prompt-cache has no meaning: this model writes down sounds"),
        (("--audio", "SOUND", "--chat-template", "chatml"), "--chat-template has no meaning: this"),
        (("--audio", "SOUND", "--subtitles", "ass"), "srt"),
        (("--batch", "SOUND", "--language", "de"), "cannot be used together"),
    ],
)  # fmt: skip
def test_run_refuses_what_makes_no_sense(words: tuple[str, ...], said: str, folder: Path, sound: str, doors: Doors) -> None:
    (film := Path(sound).with_name("film.avi")).write_bytes(b"RIFF\0\0\0\0AVI " + bytes(100))
    (broken := film.with_name("broken.wav")).write_bytes(SOUND[:12])
    named = {"SOUND": sound, "CACHE": str(film.with_name("cache")), "FILM": str(film), "BROKEN": str(broken)}
    code, out, err = doors.command("run", str(folder), *(named.get(each, each) for each in words), *ARGS)
    assert (code, out) == (2, ""), err
    assert said in err


def test_a_language_is_told_to_models_that_chat_as_well(tmp_path: Path, sound: str, doors: Doors) -> None:
    model = hearing_model(tmp_path / "hearing", words=(*CHAT_WORDS, "<asr_text>"))
    more = "-n", "9", "--temp", "0", *ARGS
    code, out, _ = doors.command("run", str(model), "--audio", sound, "--language", "en", *more)
    with LLM(model, threads=2, num_blocks=64) as llm:
        part = {"type": "audio_url", "audio_url": {"url": MEDIUM.data_url(SOUND)}}
        asked = asks(llm.hearing.transcript, llm.tokenizer, part, "en")  # type: ignore[union-attr]
        assert asked.begins[-1] == llm.tokenizer.token_to_id("<asr_text>")
        (output,) = llm.generate(llm.encode_chat(asked.messages) + asked.begins, SamplingParams(temperature=0.0, max_tokens=9))
    assert (code, out.rstrip("\n")) == (0, output.outputs[0].text.rstrip("\n"))
    for words in (("--subtitles", "srt"), ("--best-of", "3"), ("--word-times", "--json"), ("--no-condition-on-previous-text",)):
        code, _, err = doors.command("run", str(model), "--audio", sound, *words, *more)
        assert (code, "is for Whispers" in err) == (2, True)


def test_other_models_take_no_subtitles(sound: str, doors: Doors) -> None:
    for words, said in ((("--subtitles", "srt"), "hears nothing"), (("--language", "de"), "hears nothing")):
        code, out, err = doors.command("run", "tiny", "--audio", sound, *words, "-q")
        assert (code, out, said in err) == (2, "", True), err


@pytest.mark.parametrize(
    ("words", "said", "codes"),
    [
        (("chat", "MODEL"), "run MODEL --audio FILE", (2,)),
        (("embed", "MODEL", "hello"), "embeds nothing", (6,)),
        (("convert", "MODEL", "-o", "OUT.gguf"), "GGUF has no Whisper", (6,)),
        (("quantize", "MODEL", "--to", "int8", "-o", "OUT"), "--no-verify", (6,)),
        (("perplexity", "MODEL", "-c", "64"), "begin with a sound", (6,)),
        (("bench", "MODEL", "-p", "16", "-n", "4"), "begins with half a minute of sound", (2, 5)),
    ],
)  # fmt: skip
def test_commands_for_texts_refuse_it(
    words: tuple[str, ...], said: str, codes: tuple[int, ...], folder: Path, doors: Doors, tmp_path: Path
) -> None:
    places = {"MODEL": str(folder), "OUT": str(tmp_path / "out"), "OUT.gguf": str(tmp_path / "out.gguf")}
    code, _, err = doors.command(*(places.get(each, each) for each in words))
    assert code in codes, err
    assert said in err
    assert not any(tmp_path.iterdir())


def test_aliases_are_openais() -> None:
    named = {
        "whisper": "tiny", "whisper:tiny": "tiny", "whisper:large-v3": "large-v3", "whisper:turbo": "large-v3-turbo",
        "whisper:base.en": "base.en",
    }  # fmt: skip
    for name, theirs in named.items():
        assert aliases.ALIASES[name] == f"openai/whisper-{theirs}"


# ---- a server ----


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveServer]:
    with live_server(str(folder), "--alias", "whisper") as server:
        yield server


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Any:
    return pytest.importorskip("openai").OpenAI(base_url=live.base_url, api_key="none")


def test_the_line_to_copy_asks_for_what_it_does(live: LiveServer, tmp_path: Path) -> None:
    (tmp_path / "talk.wav").write_bytes(SOUND)
    line = ["bash", "-c", live.line("curl ").strip()]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["text"]


def test_openais_client_gets_every_form(client: Any, told: Transcript, words: list[Word]) -> None:
    asked: dict[str, Any] = {"model": "whisper", "file": ("talk.wav", SOUND), "language": "de", **SERVED}
    create = client.audio.transcriptions.create
    import openai

    done = create(**asked)
    assert done.text == told.text
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens > len(told.passages)
    assert create(**asked, response_format="text") == told.text + "\n"
    assert create(**asked, response_format="srt") == subtitles(told.passages, "srt")
    assert create(**asked, response_format="vtt") == subtitles(told.passages, "vtt")
    verbose = create(**asked, response_format="verbose_json", timestamp_granularities=["segment"])
    assert (verbose.text, verbose.language, verbose.duration) == (told.text, "german", 2.0)
    assert [each.text for each in verbose.segments] == [each.text for each in told.passages]
    assert [each.start for each in verbose.segments] == pytest.approx([each.start for each in told.passages], abs=1e-3)
    assert [each.avg_logprob for each in verbose.segments] == pytest.approx([each.mean_logprob for each in told.passages])
    assert verbose.usage.seconds == 2
    for kinds in (["word"], ["word", "segment"]):
        spoken = create(**asked, response_format="verbose_json", timestamp_granularities=kinds)
        assert [(each.word, each.start, each.end) for each in spoken.words] == [(w.text.strip(), w.start, w.end) for w in words]
        assert (spoken.segments is None, spoken.text) == ("segment" not in kinds, told.text)
    assert verbose.words is None
    heard = create(**asked | {"language": openai.omit, "temperature": 0.4}, response_format="verbose_json")
    assert heard.language in ("english", "german", "french")
    assert {each.temperature for each in heard.segments} <= {0.4}
    assert len(LANGUAGES) == 3


def test_blanks_alone_are_no_word_over_http() -> None:
    """OpenAI's clients would have a word without a letter."""
    words = (Word(" Good", 0.0, 0.5, 0.9), Word(" ", 0.5, 0.6, 0.9), Word(" morning.", 0.6, 1.0, 0.9), Word("\n", 1.0, 1.0, 0.1))
    passage = Passage(0.0, 2.0, " Good  morning.\n", (), 0, 0.0, -0.1, 1.0, 0.1, words=words)
    found = [{"word": "Good", "start": 0.0, "end": 0.5}, {"word": "morning.", "start": 0.6, "end": 1.0}]
    assert dictations.words_in([passage, passage._replace(words=())]) == found


class Turned:
    """Dictations of sounds of so many seconds, by a model that says nothing; those of more than one are long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hearing = dataclasses.replace(QWEN3, piece=100, leads=True)
        self.model = SimpleNamespace(facts=SimpleNamespace(hearing=hearing), tokenizer=None)
        self.under_way: list[float] = []
        self.most = 0
        monkeypatch.setattr(reading, "MAX_SECONDS", 1)
        monkeypatch.setattr(dictations, "dictate_by", self._dictate)
        monkeypatch.setattr(dictations, "_scribe", lambda model: None)
        monkeypatch.setattr(dictations, "_wishes", lambda *_: None)

    def _dictate(self, scribe: Any, hearing: Any, tokenizer: Any, clip: Any, wishes: Any) -> Iterator[Any]:
        self.under_way.append(clip.seconds)
        self.most = max(self.most, len(self.under_way))
        for _ in range(3):
            time.sleep(0.02)
            yield [Passage(0.0, clip.seconds, " Hm.", (), 0, 0.0, 0.0, 1.0, None)]
        self.under_way.remove(clip.seconds)

    async def text(self, turns: dictations.Turns, seconds: int) -> str:
        body = cast(Any, SimpleNamespace(file=saved(noise(16_000 * seconds))))
        dictation = dictations.Dictation(
            cast(Any, None), cast(Any, self.model), body, "transcribe", cast(Any, None), turns
        )
        await dictations.whole(dictation)
        assert not body.file
        return dictation.text


@pytest.mark.parametrize("seconds", [1, 2])
def test_long_sounds_wait_for_each_other(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As each has a spectrogram of hundreds of megabytes; short ones go by."""
    turned = Turned(monkeypatch)

    async def together() -> list[str]:
        turns = dictations.Turns()
        return await asyncio.gather(*[turned.text(turns, seconds) for _ in range(3)])

    assert asyncio.run(together()) == ["Hm. Hm. Hm."] * 3
    assert (turned.most == 1) == (seconds > 1)


def test_short_sounds_go_by_however_many_long_ones_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = Turned(monkeypatch)

    async def together() -> None:
        turns = dictations.Turns()
        async with turns._long:  # as one that takes an hour has it
            waiting = [asyncio.create_task(turned.text(turns, 2)) for _ in range(dictations.MOST_AT_ONCE)]
            await asyncio.sleep(0.5)
            assert await asyncio.wait_for(turned.text(turns, 1), 10) == "Hm. Hm. Hm."
            assert not any(task.done() for task in waiting)
        assert await asyncio.gather(*waiting) == ["Hm. Hm. Hm."] * len(waiting)

    asyncio.run(together())


def test_who_leaves_while_a_sound_is_read_takes_no_thread_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading four hours of it takes minutes."""
    turned, ended = Turned(monkeypatch), []

    def read_while_wanted(data: bytes, spec: Any, where: str, wanted: Any, *, if_short: bool) -> None:
        deadline = time.monotonic() + 20
        while wanted() and time.monotonic() < deadline:
            time.sleep(0.01)
        ended.append(time.monotonic() < deadline)

    monkeypatch.setattr(dictations, "read_while_wanted", read_while_wanted)

    async def leave() -> None:
        turns = dictations.Turns()
        tasks = [asyncio.create_task(turned.text(turns, 1)) for _ in range(20)]
        await asyncio.sleep(0.2)
        await asyncio.wait_for(asyncio.to_thread(len, "others wait for none of them"), 5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert turns._waiting == 0
        turns._threads.shutdown()

    asyncio.run(leave())
    assert ended
    assert all(ended)


def test_few_bytes_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = Turned(monkeypatch)
    monkeypatch.setattr(dictations, "MOST_WAITING", 3 * 32_044)

    async def together() -> list[Any]:
        turns = dictations.Turns()
        return await asyncio.gather(*[turned.text(turns, 1) for _ in range(5)], return_exceptions=True)

    found = asyncio.run(together())
    assert found[:3] == ["Hm. Hm. Hm."] * 3
    assert [each.status for each in found[3:]] == [429] * 2
    monkeypatch.setattr(dictations, "MOST_WAITING", 10)
    assert asyncio.run(turned.text(dictations.Turns(), 1)) == "Hm. Hm. Hm.", "one may be larger"


def test_a_transcript_streams(client: Any, told: Transcript) -> None:
    created = client.audio.transcriptions.create(model="whisper", file=("t.wav", SOUND), language="de", stream=True, **SERVED)
    events = list(created)
    *deltas, last = events
    assert {each.type for each in deltas} == {"transcript.text.delta"}
    assert len(deltas) > 1
    assert "".join(each.delta for each in deltas).strip() == told.text
    assert (last.type, last.text) == ("transcript.text.done", told.text)


def test_translations(client: Any) -> None:
    done = client.audio.translations.create(model="whisper", file=("talk.wav", SOUND), response_format="verbose_json", **SERVED)
    assert (done.language, done.segments[0].start >= 0) == ("english", True)


def test_what_a_server_refuses(client: Any) -> None:
    import openai

    asked: dict[str, Any] = {"model": "whisper", "file": ("talk.wav", SOUND), **SERVED}
    create = client.audio.transcriptions.create
    for more, said in (
        ({"language": "klingon"}, "does not know the language"), ({"response_format": "diarized_json"}, "speakers"),
        ({"response_format": "verbose_json", "timestamp_granularities": ["letter"]}, "timestamp_granularities"),
        ({"timestamp_granularities": ["segment"]}, "verbose_json"), ({"timestamp_granularities": ["word"]}, "verbose_json"),
        ({"response_format": "srt", "stream": True}, "not streamed"),
        ({"file": ("talk.wav", b"text")}, "no sound of a kind"), ({"temperature": 999}, "at most 100"),
        ({"extra_body": {"num_beams": 3, "repetition_penalty": 1.1}}, "no part in a search by beams"),
        ({"extra_body": {"num_beams": 3}}, "num_beams has no effect"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError, match=said) as raised:
            create(**asked | more)
        assert (raised.value.param == "file") == ("file" in more), "what is blamed is what is wrong"
    with pytest.raises(openai.BadRequestError, match="begins with half a minute of sound"):
        client.completions.create(model="whisper", prompt="hello", max_tokens=3)
    with pytest.raises(openai.BadRequestError, match="audio/transcriptions"):
        client.chat.completions.create(model="whisper", messages=[{"role": "user", "content": "x"}])
    assert create(**asked, language="de").text
    heard = [create(**asked, language=nothing).text for nothing in ("", "auto")]
    assert heard == [create(**asked).text] * 2, "as many clients send it where nobody chose one"


@pytest.mark.parametrize(("form", "expected"), [("vtt", "WEBVTT\n\n"), ("srt", ""), (None, "")])
def test_a_file_of_subtitles_in_which_nobody_speaks_is_one(form: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dictating, "passages_of", lambda *_: iter([Heard("en", 1.0)]))
    question = Question(sounds=["data:audio/wav;base64,"], wishes=TranscriptWishes(subtitles=form))
    answering = dictating.DictationAnswering(cast(Any, SimpleNamespace(name="whisper", hearing=None)), question, {})
    assert "".join(piece.content for pieces in answering for piece in pieces) == expected
    assert answering.result.answers[0].content == expected
