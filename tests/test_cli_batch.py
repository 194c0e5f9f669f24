"""`nanovllm run --batch`: every line has its answer or its error, in order, and an interrupted batch loses nothing."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pexpect
import pytest

import test_cli_driver
from forked import Forked
from nanovllm_cli.cli.local import LocalAnswerer
from nanovllm_cli.cli.model import Loaded
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import CheckpointError
from test_cli_driver import environment, nanovllm

DRIVER = [sys.executable, test_cli_driver.__file__]


def lines_of(text: str) -> list[dict[str, Any]]:
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def write(path: Path, *lines: object) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def bash(folder: Path, line: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["bash", "-c", line], cwd=folder, env=environment(folder), capture_output=True, timeout=60)


def test_results_are_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    write(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": "say one"},
        "",
        {"id": 7, "messages": [{"role": "user", "content": "say two"}]},
        {"prompt": "say three", "max_tokens": 3, "n": 2, "logprobs": 0},
        {"prompt": "params", "temperature": 0.5, "stop": "x", "logit_bias": {"5": 1}},
        {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]},
        {"prompt": "hi"},
    )
    result = nanovllm(tmp_path, "run", "tiny", "--batch", "in.jsonl", "--top-k", "9", "-sys", "be brief")
    assert result.code == 0
    records = lines_of(result.out)
    assert [record["line"] for record in records] == [1, 3, 4, 5, 6, 7]
    assert [record["id"] for record in records] == ["a", 7, None, None, None, None]
    texts = [[answer["text"] for answer in record["answers"]] for record in records]
    assert texts[:3] == [["one"], ["two"], ["thr", "thr"]]
    assert [answer["finish_reason"] for answer in records[2]["answers"]] == ["length", "length"]
    assert len(records[2]["answers"][0]["logprobs"]) == 3
    assert "temperature=0.5, top_k=9" in texts[3][0]
    assert "logit_bias={5: 1.0}" in texts[3][0]
    assert texts[4:] == [["[<s>own<u>hi<a>]"], ["[<s>be brief<u>hi<a>]"]]
    assert set(records[0]) == {"id", "line", "model", "answers", "usage", "key"}
    assert "6 lines (0 kept, 0 failed)" in result.err


def test_broken_lines_have_their_error_in_their_place(tmp_path: Path) -> None:
    bad = {
        "{": "not JSON: Expecting property name enclosed in double quotes at character 2",
        "[1]": "not a JSON object",
        '"prompt"': "not a JSON object",
        "{}": "either a prompt or messages",
        '{"prompt": "a", "messages": []}': "either a prompt or messages",
        '{"prompt": 5}': "prompt is not a text",
        '{"prompt": ""}': "or an empty one",
        '{"messages": []}': "not a list of messages",
        '{"messages": ["hi"]}': "not an object with a",
        '{"messages": [{"role": "user", "content": 5}]}': "neither text nor a list",
        '{"messages": [{"role": "martian", "content": "x"}]}': "unknown role martian",
        '{"prompt": "a", "temprature": 1}': "unknown field 'temprature'",
        '{"prompt": "a", "temperature": "hot"}': "temperature must be a number",
        '{"prompt": "a", "temperature": NaN}': "not JSON",
        '{"prompt": "a", "top_k": 1e5}': "top_k must be a whole number",
        '{"prompt": "a", "seed": %s}' % ("9" * 5000): "not JSON",
        '{"prompt": "a", "n": true}': "n must be a whole number",
        '{"prompt": "a", "logit_bias": {"x": 1}}': "not a token id",
        '{"prompt": "a", "logit_bias": {"99999999": 1}}': "outside the vocabulary",
        '{"prompt": "\\ud800"}': "not valid Unicode",
        '{"prompt": "a", "id": [1]}': "an id is a string or a number",
        '{"prompt": "a", "id": "\\ud800"}': "the id is not valid Unicode",
        "[" * 100_000: "nested too deeply",
        '{"prompt": "%s"}' % ("long " * 500): "tokens, the context holds 2000",
        '{"prompt": "fail"}': "NaN logits",
    }
    content = "\n".join(["\ufeff" + '{"prompt": "say first"}', *bad, '{"id": "z", "prompt": "say last"}'])
    (tmp_path / "in.jsonl").write_bytes(content.encode() + b'\n{"prompt": "caf\xe9"}')
    result = nanovllm(tmp_path, "run", "-q", "tiny", "--batch", "in.jsonl")
    first, *errors, last, latin = lines_of(result.out)
    assert first["answers"][0]["text"] == "first"
    assert last["answers"][0]["text"] == "last"
    assert [record["line"] for record in errors] == list(range(2, len(bad) + 2))
    for record, says in zip(errors, bad.values(), strict=True):
        assert says in record["error"]["message"]
    assert "it is not UTF-8: byte 0xe9 at offset 15" in latin["error"]["message"]
    assert errors[11]["error"]["hint"] == "did you mean temperature?"
    assert result.code == 1
    assert result.err.splitlines()[0] == f"error: {len(bad) + 1} of {len(bad) + 3} lines failed"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ({"text": "a"}, "here it is prompt"),
        ({"prompt": "a", "max_new_tokens": 3}, "here it is max_tokens"),
        ({"prompt": "a", "custom_id": "x"}, "here it is id"),
        ({"prompt": "a", "zzz": 1}, None),
    ],
)
def test_other_programs_names_of_fields_are_answered_with_ours(tmp_path: Path, line: dict[str, Any], hint: str | None) -> None:
    write(tmp_path / "in.jsonl", line)
    (record,) = lines_of(nanovllm(tmp_path, "run", "-q", "tiny", "--batch", "in.jsonl").out)
    assert record["error"]["message"].startswith("line 1: unknown field")
    assert record["error"].get("hint") == hint


def test_a_request_refused_by_the_engine_fails_alone(tmp_path: Path) -> None:
    """Not caught before it: what was running with it starts again."""
    write(tmp_path / "in.jsonl", *({"prompt": word} for word in ("say a", "say b", "say c", "refuse", "say d")))
    result = nanovllm(tmp_path, "run", "-q", "tiny", "--batch", "in.jsonl")
    records = lines_of(result.out)
    assert [record.get("error", {}).get("message") for record in records] == [None, None, None, "refused", None]
    assert result.code == 1


def test_a_batch_from_stdin_and_without_a_template(tmp_path: Path) -> None:
    lines = '{"prompt": "raw text"}\n{"messages": [{"role": "user", "content": "x"}]}'
    result = nanovllm(tmp_path, "run", "-q", "base", "--batch", "-", stdin=lines)
    first, second = lines_of(result.out)
    assert first["answers"][0]["text"] == "[raw text]"
    assert "messages need a model with a chat template" in second["error"]["message"]
    result = nanovllm(tmp_path, "run", "-q", "tiny", "--raw", "--batch", "-", stdin=lines)
    first, second = lines_of(result.out)
    assert first["answers"][0]["text"] == "[raw text]"
    assert second["error"]["message"] == "messages need a chat template, and --raw leaves it out"
    assert second["error"]["hint"] == "use prompt, or leave --raw out"


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_batch_of_nothing_is_refused(tmp_path: Path, content: str) -> None:
    result = nanovllm(tmp_path, "run", "tiny", "--batch", "-", stdin=content)
    assert result.code == 2
    assert "standard input has no prompts" in result.err


def test_a_second_run_does_only_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", {"prompt": "say one"}, {"prompt": "fail"}, "broken")
    args = ["run", "tiny", "--batch", "in.jsonl", "-o", "out.jsonl"]
    first = nanovllm(tmp_path, *args)
    assert (first.code, first.out) == (1, "")
    before = lines_of((tmp_path / "out.jsonl").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    write(tmp_path / "in.jsonl", {"prompt": "say zero"}, {"prompt": "say one"}, {"prompt": "fail"})
    second = nanovllm(tmp_path, *args)
    assert "1 of 3 results are there already" in second.err
    after = lines_of((tmp_path / "out.jsonl").read_text())
    assert after[0]["answers"][0]["text"] == "zero"
    assert after[1] == before[0] | {"line": 2}, "the same result, of another line now"
    assert after[2]["error"]["message"] == "NaN logits"


def test_results_of_other_settings_are_not_lost(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", {"prompt": "say one"})
    args = ["run", "tiny", "--batch", "in.jsonl", "-o", "out.jsonl"]
    assert nanovllm(tmp_path, *args).code == 0
    kept = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "adapter").mkdir()
    for other in (["--temp", "0.3"], ["--raw"], ["-sys", "x"], ["--lora", "adapter"], ["--lora-scaled", "adapter:2"],
                  ["--lora-modules", "a=adapter"], ["--reasoning", "hide"], ["--quant", "int2"], ["--dtype", "bfloat16"],
                  ["-c", "48"], ["--activations", "exact"], ["--kv-cache-dtype", "int8"], ["-ctv", "bfloat16"],
                  ["--deterministic"], ["--rope-scaling", "linear"], ["--rope-scale", "2"], ["--rope-freq-base", "5e5"],
                  ["--override-kv", "rms_norm_eps=float:1"], ["--hf-overrides", '{"rms_norm_eps": 1}']):  # fmt: skip
        refused = nanovllm(tmp_path, *args, *other)
        assert refused.code == 2
        assert "holds results of other prompts, another model or other settings" in refused.err
        assert (tmp_path / "out.jsonl").read_text() == kept
    assert nanovllm(tmp_path, *args, "--temp", "0.3", "--overwrite").code == 0
    assert (tmp_path / "out.jsonl").read_text() != kept


def test_settings_that_no_answer_depends_on_do_not_matter(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", {"prompt": "say one"})
    args = ["run", "tiny", "--batch", "in.jsonl", "-o", "out.jsonl"]
    assert nanovllm(tmp_path, *args).code == 0
    for other in (["-t", "3"], ["-b", "64"], ["--kv-cache", "1G"], ["--gpu-memory-utilization", "0.5"], ["-tp", "2"], ["--eager"],
                  ["--speculate", "3"], ["--draft-min-p", "0.5"], ["-c", "0"], ["--dtype", "float32"], ["--reasoning", "show"],
                  ["--image-max-tokens", "9"], ["--no-stats"], ["-v"], ["--hf-overrides", "{}"]):  # fmt: skip
        again = nanovllm(tmp_path, *args, *other)
        assert (again.code, "1 of 1 results are there already" in again.err) == (0, True), other


def test_another_model_in_the_same_place_is_another_model(tmp_path: Path) -> None:
    for name in ("m/model.safetensors", "m/config.json", "a/adapter_model.safetensors", "a/adapter_config.json", "t.jinja"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{{messages}}")
    write(tmp_path / "in.jsonl", {"prompt": "say one"})
    args = ["run", "./m", "--batch", "in.jsonl", "-o", "out.jsonl", "--lora-modules", "x=a", "--chat-template", "t.jinja"]
    assert nanovllm(tmp_path, *args).code == 0
    (tmp_path / "m/notes.txt").write_text("of no model")
    for name in ("m/model.safetensors", "m/config.json", "a/adapter_model.safetensors", "a/adapter_config.json", "t.jinja"):
        assert "1 of 1 results are there already" in nanovllm(tmp_path, *args).err
        (tmp_path / name).write_text("{{ messages }}")
        refused = nanovllm(tmp_path, *args)
        assert (refused.code, "another model or other settings" in refused.err) == (2, True), name
        assert nanovllm(tmp_path, *args, "--overwrite").code == 0


def test_what_images_are_read_by_is_part_of_what_answers(tmp_path: Path) -> None:
    def identity(vision: object = None, **settings: Any) -> list[str]:
        config = EngineConfig(**settings)
        llm = types.SimpleNamespace(
            resolved=types.SimpleNamespace(path="random:fake"), lora=(), lora_modules=(), threads=1, dtype="float32",
            kv_dtypes=("float32", "float32"), chat_template=None, vision=vision, mmproj=config.mmproj,
        )  # fmt: skip
        prompting = types.SimpleNamespace(chats=False)
        return LocalAnswerer(Loaded(llm, 0.0), prompting, config).identity  # type: ignore[arg-type]

    file = tmp_path / "mmproj-m.gguf"
    file.write_text("one")
    before = identity("sees", mmproj=str(file))
    assert before == identity("sees", mmproj=str(file)) != identity("sees")
    assert before != identity("sees", mmproj=str(file), image_max_tokens=9)
    file.write_text("another")
    assert before != identity("sees", mmproj=str(file))
    file.unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        identity("sees", mmproj=str(file))


def test_the_input_is_not_overwritten_by_a_slip(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", {"prompt": "say one"})
    refused = nanovllm(tmp_path, "run", "tiny", "--batch", "in.jsonl", "-o", "in.jsonl")
    assert refused.code == 2
    assert "are kept" not in refused.err, "there are none"
    assert lines_of((tmp_path / "in.jsonl").read_text()) == [{"prompt": "say one"}]
    assert [path.name for path in tmp_path.glob("in*")] == ["in.jsonl"]


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_interrupted_batch_loses_nothing(tmp_path: Path, stop: signal.Signals, code: int) -> None:
    write(tmp_path / "in.jsonl", *({"prompt": f"say {n}"} for n in range(4)), {"prompt": "hold"}, {"prompt": "say x"})
    args = ["run", "tiny", "--batch", "in.jsonl", "-o", "out.jsonl"]
    process = Forked([*DRIVER, *args], light=True, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE)
    journal = tmp_path / "out.jsonl.partial"
    deadline = time.monotonic() + 30
    while not journal.exists() or len(journal.read_text().splitlines()) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(stop)
    _, err = process.communicate(timeout=10)
    assert process.returncode == code
    assert b"Traceback" not in err
    assert (b"kept in out.jsonl.partial; the same command goes on" in err) == (stop != signal.SIGKILL)
    assert not (tmp_path / "out.jsonl").exists()
    done = [record["line"] for record in lines_of(journal.read_text())]
    assert sorted(done) == [1, 2, 3, 4, 6]
    resumed = nanovllm(tmp_path, *args, FAKE_HOLDS_NOT="1")
    assert (resumed.code, "5 of 6 results are there already" in resumed.err) == (0, True)
    assert [record["line"] for record in lines_of((tmp_path / "out.jsonl").read_text())] == [1, 2, 3, 4, 5, 6]
    assert not journal.exists()


def test_a_full_disk_keeps_what_was_written(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", *({"prompt": "say " + "x" * 500} for _ in range(10)))
    args = ["run", "-q", "tiny", "--batch", "in.jsonl", "-o", "out.jsonl"]
    limited = f"ulimit -f 4; exec {shlex.join(DRIVER)} {shlex.join(args)}"
    done = subprocess.run(
        ["bash", "-c", limited], cwd=tmp_path, env=environment(tmp_path), capture_output=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: cannot write out.jsonl.partial: File too large\nhint: make room")
    assert os.path.getsize(tmp_path / "out.jsonl.partial") > 0
    assert nanovllm(tmp_path, *args).code == 0
    assert len(lines_of((tmp_path / "out.jsonl").read_text())) == 10


def test_progress_is_not_written_into_what_the_reader_of_a_pipe_writes(tmp_path: Path) -> None:
    """Standard error is a terminal, on which `cat` writes as well."""
    write(tmp_path / "in.jsonl", *({"prompt": "slowly", "max_tokens": 10} for number in range(5)))
    shell = f"{shlex.join(DRIVER)} run tiny --no-stats --batch in.jsonl | cat"
    child = pexpect.spawn("bash", ["-c", shell], cwd=tmp_path, env=environment(tmp_path), timeout=60, dimensions=(24, 500))
    child.expect(pexpect.EOF)
    child.close()
    text = child.before.decode().replace("\r\n", "\n")
    shown = text[text.index("{") :]
    assert "\x1b" not in shown
    assert [record["line"] for record in lines_of(shown)] == [1, 2, 3, 4, 5]


def test_a_reader_that_has_enough_ends_it_quietly(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", *({"prompt": "say x"} for _ in range(200)))
    shell = f"{shlex.join(DRIVER)} run -q tiny --batch in.jsonl | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, env=environment(tmp_path), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(lines_of(done.stdout.decode())) == 1
