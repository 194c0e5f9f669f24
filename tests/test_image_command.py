"""`nanovllm run --image` and what the other commands say of a model that reads images, in this process."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from nanovllm_cli import LLM, EngineConfig, SamplingParams, data_url
from seeing import png, seeing_model
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors

ARGS = ("-t", "2", "-n", "8", "--temp", "0", "-q")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_model(tmp_path_factory.mktemp("model") / "seeing")


class Run:
    def __init__(self, doors: Doors, folder: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._doors, self._folder, self._patch = doors, folder, monkeypatch
        monkeypatch.chdir(files)
        monkeypatch.setenv("XDG_STATE_HOME", str(files / "state"))
        for seed, name in enumerate("ab"):
            (files / f"{name}.png").write_bytes(png(seed=seed))

    def __call__(self, *words: str, stdin: bytes = b"", command: str = "run") -> tuple[int, str, str]:
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return self._doors.command(command, str(self._folder), *words)

    def answer(self, *words: str, stdin: bytes = b"") -> str:
        code, out, err = self(*words, *ARGS, stdin=stdin)
        assert code == 0, err
        return out

    def refused(self, *words: str, stdin: bytes = b"") -> str:
        code, out, err = self(*words, *ARGS, stdin=stdin)
        assert (code, out) == (2, ""), err
        return err


@pytest.fixture
def run(doors: Doors, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(doors, folder, tmp_path, monkeypatch)


def test_images_stand_before_what_is_said_of_them(run: Run, folder: Path, tmp_path: Path) -> None:
    with LLM(folder, config=EngineConfig(threads=2)) as llm:
        parts = [{"type": "image_url", "image_url": {"url": data_url(png(seed=seed))}} for seed in (1, 0)]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What differs?"}]}]
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8))
    assert run.answer("--image", "b.png", "--image", "a.png", "What differs?").rstrip("\n") == output.outputs[0].text.rstrip("\n")


def test_an_image_may_come_by_a_pipe_and_words_beside_an_image_too(run: Run) -> None:
    expected = run.answer("--image", "a.png", "What?")
    assert run.answer("--image", "-", "What?", stdin=png()) == expected
    assert run.answer("--image", "a.png", stdin=b"What?\n") == expected
    assert run.answer("--image", "b.png", "What?") != expected
    assert run.answer("--image", "a.png") != expected  # nothing is said of it


def test_the_next_turn_still_sees_it(run: Run, folder: Path, tmp_path: Path) -> None:
    first = run.answer("--image", "a.png", "What?").removesuffix("\n")
    second = run.answer("--continue", "And?")
    kept = json.loads((tmp_path / "state/nanovllm/last-run.json").read_text())["messages"]
    assert [part["type"] for part in kept[0]["content"]] == ["image_url", "text"]
    with LLM(folder, config=EngineConfig(threads=2)) as llm:
        messages = [kept[0], {"role": "assistant", "content": first}, {"role": "user", "content": "And?"}]
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8))
    assert second.removesuffix("\n") == output.outputs[0].text.removesuffix("\n")


def test_lines_of_a_batch_bring_their_own(run: Run, tmp_path: Path) -> None:
    def line(*parts: dict[str, object]) -> str:
        return json.dumps({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]})

    good = {"type": "image_url", "image_url": {"url": data_url(png())}}
    bad = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    (tmp_path / "lines.jsonl").write_text("\n".join([line(good), line(bad), line()]))
    code, out, _ = run("--batch", "lines.jsonl", *ARGS)
    assert code == 1
    seen, refused, text = map(json.loads, out.splitlines())
    assert seen["answers"][0]["text"] == run.answer("--image", "a.png", "What?").removesuffix("\n")
    assert "none is opened here" in json.dumps(refused)
    assert text["answers"][0]["text"] != seen["answers"][0]["text"]


def test_what_is_no_image_is_told_before_a_model_is_loaded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "cut.png").write_bytes(png()[:100])
    assert "notes.txt is no image" in run.refused("--image", "notes.txt", "What?")
    assert "near it: a.png" in run.refused("--image", "aa.png", "What?")
    assert "is a folder" in run.refused("--image", ".", "What?")
    assert "standard input is empty" in run.refused("--image", "-", "What?")
    assert "one thing only" in run.refused("--image", "-", "-f", "-", "What?", stdin=png())
    assert "is damaged" in run.refused("--image", "cut.png", "What?")
    assert "there is no file https:" in run.refused("--image", "https://example.com/a.png", "What?")


def test_where_images_have_no_place(run: Run, doors: Doors, tmp_path: Path) -> None:
    assert "without a chat template" in run.refused("--raw", "--image", "a.png", "What?")
    (tmp_path / "lines.jsonl").write_text('{"prompt": "a"}\n')
    assert "--batch has its prompts in its file" in run.refused("--batch", "lines.jsonl", "--image", "a.png")
    code, out, err = doors.command("run", "tiny", "--image", "a.png", "What?", *ARGS)
    assert (code, out) == (6, "")
    assert "this model reads no images" in err


def test_an_image_has_no_more_tokens_than_it_may_have(run: Run, tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(png(64, 64))

    def prompt_tokens(*words: str) -> int:
        return int(json.loads(run.answer("--image", "large.png", "What?", "--json", *words))["usage"]["prompt_tokens"])

    assert prompt_tokens() - prompt_tokens("--image-max-tokens", "16") == 64 - 16
    assert "image-max-tokens" in run.refused("--image", "large.png", "--image-max-tokens", "0", "What?")


def test_commands_say_that_it_reads_images(run: Run, folder: Path, doors: Doors) -> None:
    code, out, _ = doors.command("models", "show", str(folder))
    assert code == 0
    assert "of 8 x 8 pixels; read by 2 layers of 32" in out
    code, out, _ = doors.command("models", "show", str(folder), "--json")
    assert json.loads(out)["images"]["bytes"] > 0
    code, out, _ = doors.command("plan", str(folder), "--roofline", "off")
    assert "images and videos are read" in out
    code, out, _ = doors.command("models", "show", "tiny", "--json")
    assert json.loads(out)["images"] == {}
