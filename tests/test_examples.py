"""Every example of the help, the manual, the README and its pages is run as it stands: in a shell, at a home of its own, offline.

Names of models on the hub stand for the bundled one (by [aliases], as a person could do it); files that examples read are made
beforehand. Settings of the environment keep answers, repetitions and calibration short. What is not run is in NOT_RUN, with the
reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hearing import hearing_model
from label_models import encoder, privacy_filter
from nanovllm_cli.cli.examples import EXAMPLES
from nanovllm_cli.weights.aliases import ALIASES
from openai_server import OpenAIServer, Reply, Request
from perceiving import perceiving_model
from seeing import png, seeing_model
from sounding import noise, wav
from test_cli_driver import environment
from tiny_adapter import write_adapter
from vectors_gguf import named, random_directions, write_vector
from warm_command import warm_command

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # where compiled kernels are
SHORT = {
    "PREDICT": "8", "NUM_SAMPLES": "1", "VERIFY_TOKENS": "32", "REPETITIONS": "1", "NO_WARMUP": "1", "ROOFLINE": "off",
    "WARMUP": "0", "CTX_SIZE": "1024", "NUM_PROMPTS": "2", "INPUT_LEN": "16", "OUTPUT_LEN": "8",
}  # fmt: skip
MODELS = dict.fromkeys(
    ("qwen3-vl:4b", "gemma3:4b", "smolvlm:500m", "lightonocr:1b", "paddleocr-vl", "glm-ocr", "deepseek-ocr"), "seeing"
) | {
    "distilbert-sst2": "classifying", "go-emotions": "classifying", "skywork-reward:0.6b": "classifying",
    "privacy-filter": "marking", "bert-ner": "marking",
    "qwen3-asr:0.6b": "hearing", "qwen2-audio:7b": "hearing", "granite-speech:1b": "hearing", "gemma4:e2b": "perceiving",
}  # fmt: skip
GPU, INSTALL = "needs a GPU", "installs something"
NOT_RUN = {
    r"^(brew |python3 -m venv|pip |make |\.venv/bin/pip)": INSTALL,
    r"cuda": GPU,
    r"expert_used_count|num_experts_per_tok": "the bundled model has no experts; tests/test_overrides.py has it",
    r"-x ": "the bundled model writes no code; tests/test_cli_run.py has it",
    r"--against transformers": "takes ten seconds; tests/test_verify.py has it",
    r"--target-bpw": "takes minutes where nothing is compiled; tests/test_quantize_cli.py has it",
    r"--algorithm imatrix": "takes ten seconds; tests/test_importance.py has it",
    r"audio/transcriptions": "the stand-in server reads no forms; tests/test_transcripts.py has it",
    r"run (whisper:|moonshine)": "no stand-in transcribes; tests/test_whisper_doors.py and tests/test_moonshine.py have it",
    r"run (nllb|m2m100):": "no stand-in translates; tests/test_bart_doors.py has it",
    r"--video": "no stand-in sees videos; tests/test_videos.py has it",
    r"models pull": "asks the hub; tests/test_models_command.py has one",
    r"models rm": "nothing is in the cache; tests/test_models_command.py has it",
    r"nanovllm serve": "runs until it is ended; tests/test_serve_command.py has it",
    r"bench .*-tp": "loads a model in two processes and in one; `run -tp 2` is run",
    r"random-weights": "takes long; tests/test_bench_real.py has it",
}
BEFORE = {
    r"nanovllm run .*--continue": "nanovllm run tiny -q Hello >said.txt",
    r"nanovllm (verify|perplexity) .*tiny-int8": "mv quantized tiny-int8",
    r"nanovllm chat .*--continue": "echo Hello | nanovllm chat tiny -q >said.txt",
}
"""What a person had done before."""
IN_ANOTHER_SHELL = {"completion zsh": "zsh", "completion fish": "fish"}


@dataclass(frozen=True)
class Line:
    """An example: where it stands, the command it is about, and itself."""

    source: str
    command: str
    text: str

    @property
    def left_out(self) -> str | None:
        return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, self.text)), None)


def examples() -> Iterator[Line]:
    seen = set()
    for command, found in EXAMPLES.items():
        for line in found:
            if line not in seen:
                yield Line("help", command, line)
            seen.add(line)
    pages = "".join(page.read_text() for page in PAGES)
    for block in re.findall(r"^```sh\n(.*?)^```", pages, re.MULTILINE | re.DOTALL):
        for text in block.splitlines():
            line = re.sub(r"\s+# .*", "", text).strip()
            if line and line not in seen and not line.startswith("#"):
                seen.add(line)
                command = re.search(r"nanovllm (\w+)", line)
                yield Line("pages", command[1] if command else "", line)


LINES = list(examples())


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with warm_command(tmp_path_factory.mktemp("warm")) as folder:
        yield folder


@pytest.fixture(scope="module")
def server() -> Iterator[OpenAIServer]:
    async def answer(reply: Reply, request: Request) -> None:
        if not request.body.get("stream"):
            await reply.whole("200 OK", {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
            return
        await reply.begin()
        for _ in range(2):
            await reply.piece(" a")
        await reply.usage(7, 2)
        await reply.done()

    with OpenAIServer(answer) as running:
        yield running


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> Path:
    """The files that examples read."""
    folder = tmp_path_factory.mktemp("material")
    bundled = Path(__file__).resolve().parents[1] / "src/nanovllm_cli/assets/tiny"
    shutil.copytree(bundled, folder / "folder")
    for name in ("notes.txt", "more.txt", "book.txt"):
        (folder / name).write_text("Buy milk.\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "Hello"}\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
    asked = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello", "max_tokens": 4}}'
    (folder / "requests.jsonl").write_text(asked + "\n")
    for name in ("adapter", "other"):
        write_adapter(folder / name)
    for name, word in (("happy.txt", "wonderful"), ("sad.txt", "awful")):
        (folder / name).write_text(f"What a day! It is {word}\nThis is {word}\n")
    for name in ("happy.gguf", "formal.gguf"):
        write_vector(folder / name, named(random_directions(256, 4, size=0.1)))
    seeing_model(folder / "seeing")
    for name in ("photo.jpg", "page.png", "table.png", "a.png", "b.png", "board.png"):
        (folder / name).write_bytes(png())
    hearing_model(folder / "hearing")
    perceiving_model(folder / "perceiving")
    labels = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
    encoder(folder / "classifying", "distilbert", **labels, max_position_embeddings=1100)
    private = tuple(f"{role}-{kind}" for kind in ("private_email", "secret") for role in "BIES")
    privacy_filter(folder / "marking", ("O", *private))
    for name in ("talk.wav", "memo.wav", "bell.mp3"):  # a name says nothing
        (folder / name).write_bytes(wav(noise(4000)))
    tools = {"command": sys.executable, "args": [str(Path(__file__).with_name("mcp_server.py")), "read_it"]}
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"files": tools}}))
    make = (
        "nanovllm convert tiny -q -o model.gguf && nanovllm convert tiny -q --to gguf --split-max-size 2500K -o parts &&"
        "for part in parts/*; do mv $part model${part#parts/parts}; done &&"
        "nanovllm quantize tiny -q --to int8 --no-verify -o quantized &&"
        "nanovllm bench tiny -q -p 8 -n 2 -o json >before.json && tee after.json llama.json ours.json <before.json"
    )
    done = shell(make, folder, programs, folder / "home")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def place(tmp_path: Path, material: Path) -> Path:
    """A folder where an example runs, with a home in it."""
    shutil.copytree(material, tmp_path, copy_function=os.link, dirs_exist_ok=True)
    (tmp_path / "home/.config/nanovllm").mkdir(parents=True, exist_ok=True)
    (tmp_path / "home/.config/fish/completions").mkdir(parents=True)
    aliases = "".join(f'"{alias}" = "{MODELS.get(alias, "tiny")}"\n' for alias in ALIASES)
    (tmp_path / "home/.config/nanovllm/config.toml").write_text(f"[aliases]\n{aliases}")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def shell(text: str, folder: Path, programs: Path, home: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    variables = environment(home, XDG_CACHE_HOME=CACHE, HF_HOME=str(home / "hub"), HF_HUB_OFFLINE="1", **extra)
    variables |= {f"NANOVLLM_{name}": value for name, value in SHORT.items()}
    variables["PATH"] = f"{programs}:/usr/local/bin:/usr/bin:/bin"
    program = next((name for part, name in IN_ANOTHER_SHELL.items() if part in text), "bash")
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    if program == "zsh":
        text = f"autoload -U compinit; compinit -u -D; {text}"
    return subprocess.run(
        [program, "-c", text], cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.source}: {line.text}")
def test_an_example_runs_as_it_stands(line: Line, place: Path, programs: Path, server: OpenAIServer) -> None:
    if line.left_out:
        pytest.skip(line.left_out)
    if " jq " in line.text and shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    if "--mcp" in line.text:
        pytest.importorskip("mcp")
    text = re.sub(r"http://127\.0\.0\.1:80[08]0", server.url, line.text)
    before = [done for pattern, done in BEFORE.items() if re.search(pattern, text)]
    where = {"NANOVLLM_URL": server.url} if "bench serve" in text else {}
    done = shell("; ".join(["set -eo pipefail", *before, text]), place, programs, place / "home", **where)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr
    assert "\x1b[" not in done.stdout  # models without training write any byte
    if written := re.search(r"--json .*>(\S+\.json)", text):
        assert json.loads((place / written[1]).read_text())["answers"]


def test_every_command_has_examples_and_they_are_about_it() -> None:
    from typer.main import get_command

    from nanovllm_cli.cli.command_tree import page
    from nanovllm_cli.cli.program import PROGRAM, build

    commands = {each.name: each for each in page(get_command(build()), PROGRAM).every()}
    assert commands.keys() - EXAMPLES.keys() <= {
        name for name, each in commands.items() if each.commands and not each.arguments
    }
    assert EXAMPLES.keys() <= commands.keys()
    for name, found in EXAMPLES.items():
        words = " ".join(commands[name].words) if name else PROGRAM
        assert all(words in line for line in found), name
        assert all(len(line) <= 110 and does.endswith(".") for line, does in found.items()), name


def test_what_is_left_out_is_there() -> None:
    """A pattern that no example needs any more goes."""
    for pattern in NOT_RUN:
        assert any(re.search(pattern, line.text) for line in LINES), pattern
