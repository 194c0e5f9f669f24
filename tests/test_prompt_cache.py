"""`run --prompt-cache FILE` and `serve --prompt-cache FOLDER`: nothing is read twice, whatever ended in between."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import nanovllm_cli
from live_server import live_server
from nanovllm_cli.cli.prompt_cache import PromptCache, prompt_cache
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import OutputError, UsageError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.engine_client import EngineClient
from nanovllm_cli.server.messages import Start
from nanovllm_cli.server.ports import EngineState
from nanovllm_cli.vision_spec import Image, PlacedImage, TokenIds
from test_cli_real import nanovllm as real
from test_server_engine import collect

TINY = Path(nanovllm_cli.__file__).parent / "assets" / "tiny"
TEXT = "A mutex lets one thread at a time through, and the others wait for it. " * 8


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


class Model:
    """An LLM that notes what is kept."""

    def __init__(self) -> None:
        self.saved: list[list[int]] = []

    def save_kv(self, ids: Sequence[int], path: Path) -> int:
        self.saved.append(list(ids))
        return len(ids)


def kept(*noted: tuple[Sequence[int], int, Sequence[int]], is_read_only: bool = False) -> list[list[int]]:
    model, cache = Model(), PromptCache(Path("it"), is_read_only=is_read_only)
    for each in noted:
        cache.note(*each)
    cache.write(model)  # type: ignore[arg-type]
    return model.saved


def test_a_prompt_is_kept_with_its_answer_unless_the_file_had_most_of_it() -> None:
    prompt = list(range(800))
    assert kept((prompt, 0, [5, 6])) == [[*prompt, 5, 6]]
    assert kept((prompt, 699, [5])) == [[*prompt, 5]]
    assert kept((prompt, 700, [5])) == []
    assert kept((prompt, 0, [5]), is_read_only=True) == []
    assert kept() == []


def test_a_prompt_that_its_answer_makes_another_is_kept_alone_and_what_cannot_be_kept_is_said(
    caplog: pytest.LogCaptureFixture
) -> None:
    class Picky(Model):
        def save_kv(self, ids: Sequence[int], path: Path) -> int:
            return super().save_kv(ids, path) if len(ids) == 40 else 0

    caplog.set_level("WARNING", "nanovllm_cli")
    for length, expected in ((40, 1), (41, 0)):
        model, cache = Picky(), PromptCache(Path("it"), is_read_only=False)
        cache.note(range(length), 0, [5])
        cache.write(model)  # type: ignore[arg-type]
        assert len(model.saved) == expected
    assert [record.message for record in caplog.records] == [
        "it: nothing is kept: no whole block of the prompt can be found again"
    ]


def test_of_several_prompts_their_common_beginning_is_kept() -> None:
    first, second = [1, 2, 3, 4, 5], [1, 2, 3, 9]
    assert kept((first, 0, ()), (second, 3, ())) == [[1, 2, 3]]
    assert kept((first, 3, ()), (second, 3, ())) == []
    assert kept((first, 0, ()), ([7], 0, ())) == []


def test_what_comes_with_an_image_is_not_kept() -> None:
    image = PlacedImage(Image.of(1, 1, bytes(3)), 3, 1, 2)
    assert kept((TokenIds([1, 2, 3, 4, 5, 6], (image,)), 0, [8])) == [[1, 2, 3]]
    assert kept((TokenIds([4, 5, 6], (image._replace(start=0),)), 0, [8])) == []


def test_what_is_no_file_of_it_is_never_replaced(tmp_path: Path) -> None:
    assert prompt_cache(None, is_read_only=False) is None
    with pytest.raises(UsageError, match="no meaning without --prompt-cache"):
        prompt_cache(None, is_read_only=True)
    (tmp_path / "notes.txt").write_text("important")
    (tmp_path / "empty").touch()
    for name in ("notes.txt", "empty", "."):
        with pytest.raises(UsageError, match="no file that this option has made"):
            prompt_cache(str(tmp_path / name), is_read_only=False)
    for name in ("", "-"):
        with pytest.raises(UsageError):
            prompt_cache(name, is_read_only=False)
    with pytest.raises(UsageError, match="no such file"):
        prompt_cache(str(tmp_path / "none"), is_read_only=True)
    with pytest.raises(OutputError, match="no folder that you may write to"):
        prompt_cache(str(tmp_path / "none" / "it"), is_read_only=False)
    assert prompt_cache(str(tmp_path / "new"), is_read_only=False) is not None


def usage(tmp_path: Path, *args: str) -> tuple[str, int]:
    done = real(tmp_path, "run", "tiny", "--temp", "0", "-n", "5", "--json", *args)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return answer["answers"][0]["text"], answer["usage"]["cached_tokens"]


def test_a_second_run_reads_only_what_is_new(tmp_path: Path) -> None:
    cache = ["--prompt-cache", str(tmp_path / "it.kv")]
    expected, cached = usage(tmp_path, TEXT + "Why?")
    assert cached == 0
    assert usage(tmp_path, TEXT + "Why?", *cache) == (expected, 0)
    assert stat.S_IMODE((tmp_path / "it.kv").stat().st_mode) == 0o600
    before = (tmp_path / "it.kv").read_bytes()
    text, cached = usage(tmp_path, TEXT + "Why?", *cache)
    assert (text, cached > 150) == (expected, True)
    text, cached = usage(tmp_path, TEXT + "How?", *cache)
    assert (text, cached > 150) == (usage(tmp_path, TEXT + "How?")[0], True)
    assert usage(tmp_path, "Something else, long enough for blocks of its own: " + TEXT, *cache, "--prompt-cache-ro")[1] < 32
    assert (tmp_path / "it.kv").read_bytes() == before


def test_a_batch_keeps_what_its_prompts_begin_with(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"prompt": f"{TEXT}{i}?"}) + "\n" for i in range(3)))
    args = ["run", "tiny", "-n", "2", "--batch", str(lines), "--prompt-cache", str(tmp_path / "it.kv")]
    cached = []
    for _ in range(2):
        done = real(tmp_path, *args)
        assert done.returncode == 0, done.stderr
        cached.append([json.loads(line)["usage"]["cached_tokens"] for line in done.stdout.splitlines()])
    assert cached[0][0] == 0
    assert min(cached[1]) > 150


def test_a_server_has_it_for_its_own_model_only(tmp_path: Path) -> None:
    done = real(tmp_path, "run", "--url", "http://127.0.0.1:9", "--prompt-cache", "it.kv", "Hello")
    assert (done.returncode, "it is the server's business" in done.stderr) == (2, True)


# ---- serve ----


def test_a_server_that_is_started_again_has_what_it_had_read(tmp_path: Path) -> None:
    body = {"prompt": TEXT, "max_tokens": 4, "temperature": 0}
    answers = []
    for _ in range(2):
        with live_server("tiny", "--prompt-cache", str(tmp_path / "kept" / "here")) as server:
            status, answer = server.post("/v1/completions", body)
            assert status == 200
            answers.append((answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]))
    (first, none), (second, cached) = answers
    assert (first, none) == (second, 0)
    assert cached > 150
    (file,) = (tmp_path / "kept" / "here").iterdir()
    assert file.name.startswith("tiny-")


@pytest.mark.parametrize(("path", "says"), [("", "not a folder"), ("file", "not a folder"), ("file/under", "cannot make")])
def test_what_is_no_folder_is_refused_before_anything_is_loaded(tmp_path: Path, path: str, says: str) -> None:
    (tmp_path / "file").touch()
    done = real(tmp_path, "serve", "tiny", "--port", "0", "--prompt-cache", path and str(tmp_path / path))
    assert done.returncode in (1, 2)
    assert says in done.stderr


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_a_model_that_slept_has_what_it_had_read(
    runner: asyncio.Runner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tiny.kv"
    engine = EngineClient("tiny", Start(str(TINY), EngineConfig(num_blocks=512, threads=1), kept=str(path)))
    caplog.set_level("INFO", "nanovllm_cli")

    async def ask(prompt: list[int]) -> int:
        return (await collect(engine.generate(prompt, SamplingParams(max_tokens=3)))).num_cached_tokens

    async def scenario() -> None:
        await engine.load()
        assert await ask(list(range(300, 400))) == 0
        await engine.unload()
        assert "96 tokens are kept" in caplog.text
        written = path.stat().st_mtime_ns
        await engine.load()
        assert await ask(list(range(300, 400))) == 96
        await engine.unload(EngineState.STOPPED)
        assert path.stat().st_mtime_ns == written, "nothing new had been read"
        await engine.load()
        assert await ask(list(range(200, 280))) == 0
        stream = engine.generate(list(range(300, 420)), SamplingParams(max_tokens=1500, ignore_eos=True))
        await anext(stream)
        unloading = asyncio.create_task(engine.unload())  # in the middle of an answer
        await asyncio.sleep(0)
        unloading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unloading
        assert engine.pid is None, "it ends all the same"
        assert engine.state is EngineState.ASLEEP
        await engine.load()
        assert await ask(list(range(300, 400))) == 96
        path.unlink()
        path.mkdir()
        assert await ask(list(range(100, 180))) == 0
        await engine.unload()
        assert "what was read is not kept" in caplog.text

    runner.run(scenario())
