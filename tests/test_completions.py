"""Completion in the real shells: lines are typed under a pty, Tab is pressed, and what the shell makes of it is run.

The `nanovllm` of these tests answers `__complete` as the real one does and prints its arguments otherwise.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from typer.main import get_command

import forked
from nanovllm_cli.cli import completion_words as words
from nanovllm_cli.cli.command_tree import page
from nanovllm_cli.cli.completion_scripts import SHELLS, script
from nanovllm_cli.cli.program import PROGRAM, build
from nanovllm_cli.cli.settings_view import target_of
from test_cli_driver import environment, nanovllm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import completions

ROOT = Path(__file__).resolve().parents[1]
TREE = page(get_command(build()), PROGRAM)
BASH_COMPLETION = Path("/usr/share/bash-completion/bash_completion")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\x1b[()]B|\x1b\][^\x07]*\x07|\r")


# ---- scripts ----


def test_the_checked_in_scripts_are_current() -> None:
    made = completions.scripts()
    there = {path.name: path.read_text() for path in completions.FOLDER.iterdir()}
    assert there == made, completions.STALE


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_the_same_script(tmp_path: Path, shell: str) -> None:
    result = nanovllm(tmp_path, "completion", shell)
    assert (result.code, result.err) == (0, "")
    assert result.out == script(shell, TREE)


def test_another_shell_is_refused(tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "completion", "tcsh")
    assert (result.code, result.out) == (2, "")
    assert "'bash'" in result.err


def test_the_words_are_those_of_their_owners() -> None:
    from nanovllm_cli.cli import parsers
    from nanovllm_cli.quant.format_names import FORMAT_NAMES, parse_format
    from nanovllm_cli.quantization.mixes import MIXES
    from nanovllm_cli.text.builtin_templates import BUILTIN_TEMPLATES
    from nanovllm_cli.weights.convert_tensors import BLOCK_TYPES, PLAIN_TYPES

    assert {word for word in words.FORMATS if ":" not in word} == set(FORMAT_NAMES)
    for word in words.FORMATS:
        parse_format(word)
    assert set(words.MIXES) == set(MIXES) - set(FORMAT_NAMES)
    assert set(words.TEMPLATES) == set(BUILTIN_TEMPLATES)
    assert [parsers.cache_type(word) for word in words.CACHE_TYPES] == list(words.CACHE_TYPES)
    assert set(words.OUTTYPES) == {"auto", *PLAIN_TYPES, *BLOCK_TYPES}


def test_what_takes_a_file_or_a_model_is_completed() -> None:
    """By the name of the value in the help: one that says FILE or MODEL gets files or models."""
    for command in TREE.every():
        for each in command.parameters:
            kind = words.values(TREE, command, each).kind
            if "FILE" in each.value or "PATH" in each.value:
                assert kind == "files", (command.words, each)
            if each.value == "MODEL":
                assert kind in ("models", "cached-models"), (command.words, each)


def test_what_config_is_offered_it_takes_and_a_key_that_lets_in_is_nobodys_word(tmp_path: Path) -> None:
    asked = [(command, each) for command in TREE.every() for each in command.parameters]
    offered = {(command.name, each.name): words.values(TREE, command, each).words for command, each in asked}
    commands = offered["config", "words"]
    assert {"run", "bench", "bench.throughput", "serve"} <= set(commands)
    for each in commands:
        assert nanovllm(tmp_path, "config", each).code == 0, each
    for key in offered["config.get", "key"]:
        assert target_of(TREE, key).key == key
    assert not any(found for (_, name), found in offered.items() if name == "api_key")


# ---- what the program answers ----


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a short name of one's own, a repository in the cache, conversations, and a program."""
    (tmp_path / ".config/nanovllm").mkdir(parents=True)
    (tmp_path / ".config/nanovllm/config.toml").write_text(
        '[aliases]\nmycoder = "org/coder"\n"$(touch pwned)" = "x/y"\n"b`id`" = "x/y"\nnumber = 3\n[no-such-table]\n'
    )
    (tmp_path / ".cache/huggingface/hub/models--org--cached-model/snapshots").mkdir(parents=True)
    (tmp_path / ".local/state/nanovllm/sessions").mkdir(parents=True)
    for name in ("about-cats", "my session"):
        (tmp_path / f".local/state/nanovllm/sessions/{name}.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "a file.txt").write_text("x")
    (tmp_path / "local.gguf").write_text("x")
    program = tmp_path / "bin/nanovllm"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\n[ "$1" = __complete ] && exec {sys.executable} -m nanovllm_cli "$@"\nprintf "<%s>" "$@"; echo " end"\n'
    )
    program.chmod(0o755)
    return tmp_path


def ask(home: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "nanovllm_cli", "__complete", *arguments]
    done = forked.run(command, light=True, capture_output=True, text=True, env=environment(home), cwd=home)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_models_are_ones_own_then_ours_then_those_in_the_cache(home: Path) -> None:
    (home / "nanovllm.toml").write_text('[aliases]\n"team:1b" = "org/team"\nqwen3 = "org/mine"\n')
    lines = ask(home, "models")
    names = [line.split("\t")[0] for line in lines]
    assert lines[:3] == ["mycoder\torg/coder", "team:1b\torg/team", "qwen3\torg/mine"]
    assert names[3] == "tiny"
    assert "qwen3:0.6b\tQwen/Qwen3-0.6B" in lines
    assert lines[-1] == "org/cached-model\tin the cache"
    assert len(set(names)) == len(names)
    assert not [name for name in names if "pwned" in name or "`" in name]


def test_settings_that_cannot_be_read_are_no_reason_to_say_nothing(home: Path) -> None:
    (home / "nanovllm.toml").write_text("[aliases\n")
    assert "tiny\tcomes with the package" in ask(home, "models")
    (home / "nanovllm.toml").write_text("aliases = 3\n")
    assert "tiny\tcomes with the package" in ask(home, "models")


def test_sessions_are_completed_by_their_names(home: Path) -> None:
    assert ask(home, "sessions") == ["about-cats\tconversation"]


def test_nothing_is_said_to_what_makes_no_sense(home: Path) -> None:
    assert ask(home) == ask(home, "nonsense") == []


def test_an_answer_needs_no_parser_and_no_torch(home: Path) -> None:
    code = """
import os, sys
def stop(code):
    print(*sys.modules)
    raise SystemExit
os._exit = stop
from nanovllm_cli.cli.app import main
main(["__complete", sys.argv[1]])
"""
    for kind in ("models", "sessions"):
        command = [sys.executable, "-c", code, kind]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(home), cwd=home, check=False)
        loaded = set(done.stdout.splitlines()[-1].split())
        assert "nanovllm_cli.cli.complete" in loaded
        assert not loaded & {"torch", "typer", "rich", "numpy", "jinja2", "httpx", "pydantic"}


# ---- the shells ----


class Shell:
    """A shell under a pty with our script loaded."""

    def __init__(self, name: str, home: Path) -> None:
        folder = ROOT / "completions"
        commands = {
            "bash": ["bash", "--norc", "--noprofile"],
            "bash with bash-completion": ["bash", "--norc", "--noprofile"],
            "zsh": ["zsh", "-f"],
            "fish": ["fish", "--no-config"],
        }
        bash = f"bind 'set show-all-if-ambiguous on'; bind 'set page-completions off'; source {folder}/nanovllm"
        set_up = {
            "bash": bash,
            "bash with bash-completion": f"source {BASH_COMPLETION}; {bash}",
            "zsh": f"fpath=({folder} $fpath); autoload -U compinit; compinit -u -D; LISTMAX=0; PS1='> '",
            "fish": f"set -g fish_autosuggestion_enabled 0; source {folder}/nanovllm.fish",
        }
        variables = environment(home, TERM="xterm", PATH=f"{home}/bin:/usr/bin:/bin", LC_ALL="C.UTF-8")
        command, *arguments = commands[name]
        self.child = pexpect.spawn(
            command, arguments, env=variables, cwd=str(home), encoding="utf-8", timeout=20, dimensions=(60, 160)
        )
        self.child.sendline(f"{set_up[name]}; echo rea''dy")
        self.child.expect("ready\r\n")

    def line(self, typed: str) -> str:
        """The arguments that the program gets when this is typed, with a Tab at its end, and run."""
        self.child.send(typed + "\t")
        self.child.send("\r")
        self.child.expect(r"(<.*>) end\r\n")
        return ESCAPES.sub("", self.child.match[1]).rsplit("\n", 1)[-1]

    def offers(self, typed: str, *wanted: str) -> None:
        """That Tab shows these words; the line is run and over then."""
        self.child.send(typed + "\t")
        for _ in wanted:
            self.child.expect("|".join(map(re.escape, wanted)))
        self.child.send("\r")
        self.child.expect(" end\r\n")


@pytest.fixture(params=["bash", "bash with bash-completion", "zsh", "fish"])
def shell(request: pytest.FixtureRequest, home: Path) -> Iterator[Shell]:
    name = request.param
    if shutil.which(name.split()[0], path="/usr/bin:/bin") is None:
        pytest.skip(f"{name} is not installed")
    if "with" in name and not BASH_COMPLETION.is_file():
        pytest.skip("bash-completion is not installed")
    started = Shell(name, home)
    yield started
    started.child.close(force=True)


def test_what_a_shell_completes(shell: Shell) -> None:
    for typed, expected in {
        "nanovllm quan": "<quantize>",
        "nanovllm run qwen3:0": "<run><qwen3:0.6b>",
        "nanovllm run -m qwen3:0": "<run><-m><qwen3:0.6b>",
        "nanovllm run --model=qwen3:0": "<run><--model=qwen3:0.6b>",
        "nanovllm run mycod": "<run><mycoder>",
        "nanovllm run org/cach": "<run><org/cached-model>",
        "nanovllm run loc": "<run><local.gguf>",
        "nanovllm run tiny --dtype b": "<run><tiny><--dtype><bfloat16>",
        "nanovllm run tiny --dtype=b": "<run><tiny><--dtype=bfloat16>",
        "nanovllm quantize tiny --to fp8:": "<quantize><tiny><--to><fp8:block=128>",
        "nanovllm quantize tiny --to=fp8:": "<quantize><tiny><--to=fp8:block=128>",
        "nanovllm run tiny -f no": "<run><tiny><-f><notes.txt>",
        "nanovllm run tiny -f a": "<run><tiny><-f><a file.txt>",
        "nanovllm run tiny --determ": "<run><tiny><--deterministic>",
        "nanovllm run --stats mycod": "<run><--stats><mycoder>",
        "nanovllm run -n 5 mycod": "<run><-n><5><mycoder>",
        "nanovllm verify tiny mycod": "<verify><tiny><mycoder>",
        "nanovllm completion fi": "<completion><fish>",
        "nanovllm config get repeat-p": "<config><get><repeat-penalty>",
        "nanovllm config und": "<config><und>",
        "nanovllm config uns": "<config><unset>",
        "nanovllm chat --session ab": "<chat><--session><about-cats>",
        "nanovllm models rm org": "<models><rm><org/cached-model>",
        "nanovllm bench ser": "<bench><serve>",
        "nanovllm bench mycod": "<bench><mycoder>",
        "nanovllm bench latency mycod": "<bench><latency><mycoder>",
        "nanovllm bench --random-weights smol": "<bench><--random-weights><smollm2-135m>",
        "nanovllm run tiny -n 1": "<run><tiny><-n><1>",
        "nanovllm run nosuchmodel": "<run><nosuchmodel>",
    }.items():
        assert shell.line(typed) == expected, typed


def test_what_a_shell_offers(shell: Shell) -> None:
    sizes = ("1.7b", "4b-instruct", "4b-thinking", "8b", "14b", "32b")
    shell.offers("nanovllm run qwen3:", *sizes)
    shell.offers("nanovllm ", *(each.words[-1] for each in TREE.commands))
    shell.offers("nanovllm run tiny --no-s", "--no-stats", "--no-save")
    shell.offers("nanovllm run tiny --think o", "on", "off")


def test_the_script_can_be_sourced(shell: Shell, home: Path) -> None:
    """As `nanovllm completion` tells people to, where no file of share/ is found."""
    name = (
        shell.child.command.decode().rsplit("/", 1)[-1]
        if isinstance(shell.child.command, bytes)
        else shell.child.command
    )
    file = home / "script"
    file.write_text(script(os.path.basename(name), TREE))
    shell.child.sendline(f"source {file}; echo sour''ced")
    shell.child.expect("sourced\r\n")
    assert shell.line("nanovllm run qwen3:0") == "<run><qwen3:0.6b>"


# ---- installed ----


def test_the_wheel_brings_pages_and_scripts_to_where_they_are_looked_for(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("man", "completions"):
        shutil.copytree(ROOT / name, tmp_path / name)
    package = tmp_path / "src/nanovllm_cli/cli"
    shutil.copytree(ROOT / "src/nanovllm_cli/cli", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package.parent / "__init__.py").write_text('__version__ = "0"\n')
    build_wheel = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build_wheel, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        names = {name.partition(".data/data/")[2] for name in wheel.namelist()}
        assert any(name.endswith("cli/completion_shells/nanovllm.bash") for name in wheel.namelist())
    pages = {f"share/man/man{path.suffix[1]}/{path.name}" for path in (ROOT / "man").iterdir()}
    assert pages | {
        "share/bash-completion/completions/nanovllm",
        "share/zsh/site-functions/_nanovllm",
        "share/fish/vendor_completions.d/nanovllm.fish",
    } == names - {""}
