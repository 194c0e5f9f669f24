"""Commands inside commands: a plain group, and a group that is a command itself where none of its own is named."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command

from nanovllm_cli.cli.command import ENGINE, Command, DefaultGroup, expand, group, typer_option
from nanovllm_cli.cli.failures import explanation

SEEN: list[tuple[str, Any]] = []


@expand
def measure(
    *,
    model_word: Annotated[list[str] | None, typer.Argument(metavar="MODEL")] = None,
    model: Annotated[list[str] | None, typer_option("-m", "--model", help="Which.", panel="Model")] = None,
    threads: Annotated[str, typer_option("-t", "--threads", help="How many.", panel=ENGINE)] = "2",
) -> None:
    """Measure something."""
    SEEN.append(("measure", [*(model_word or []), *(model or []), threads]))


@expand
def serve(*, rate: Annotated[float, typer_option("--rate", help="How often.", panel=ENGINE)] = 1.0) -> None:
    """Serve something."""
    SEEN.append(("serve", rate))


@expand
def listing(*, threads: Annotated[str, typer_option("-t", "--threads", help="How many.", panel=ENGINE)] = "2") -> None:
    """List something."""
    SEEN.append(("list", threads))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    app = group("A program.", name="program", context_settings={"help_option_names": ["-h", "--help"]})
    app.callback()(lambda: None)
    app.command("other", cls=Command)(listing)
    bench = group("Measure.", DefaultGroup)
    bench.command("bench", cls=Command)(measure)
    bench.command("serve", cls=Command)(serve)
    app.add_typer(bench, name="bench")
    models = group("Models.")
    models.command("list", cls=Command)(listing)
    app.add_typer(models, name="models")
    command = get_command(app)
    SEEN.clear()

    def run(*words: str) -> Any:
        with command.make_context("program", list(words)) as ctx:
            command.invoke(ctx)
        return SEEN.pop()

    return run


def test_a_default_group_is_a_command_and_has_commands(program: Any) -> None:
    assert program("bench") == ("measure", ["2"])
    assert program("bench", "tiny", "-t", "3") == ("measure", ["tiny", "3"])
    assert program("bench", "serve", "--rate", "2") == ("serve", 2.0)
    assert program("models", "list") == ("list", "2")


def test_a_model_called_like_a_command_is_reached_by_m(program: Any) -> None:
    assert program("bench", "-m", "serve") == ("measure", ["serve", "2"])
    assert program("bench", "./serve") == ("measure", ["./serve", "2"])


def test_a_file_called_almost_like_a_command_is_a_model(program: Any) -> None:
    Path("serv").touch()
    assert program("bench", "serv") == ("measure", ["serv", "2"])


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (
            ["bench", "serv"],
            "bench has no command 'serv'",
            "did you mean serve? A model of that name is reached by -m serv",
        ),
        (["models", "lsit"], "no such command 'lsit'", "did you mean list?"),
        (["models", "zzz"], "no such command 'zzz'", "commands: list"),
        (["models"], "missing command", "commands: list"),
        (["bench", "serve", "--raet", "1"], "no such option: --raet", "did you mean --rate?"),
        (["bench", "tiny", "--thread", "1"], "no such option: --thread", "did you mean --threads?"),
    ],
)
def test_mistakes_are_named(program: Any, words: list[str], message: str, hint: str) -> None:
    with pytest.raises(Exception) as caught:
        program(*words)
    told = explanation(caught.value)
    assert told.exit_code == 2
    assert told.message == message
    assert told.hint is not None
    assert told.hint.startswith(hint)


def test_help_of_a_default_group_has_options_and_commands(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        program("bench", "--help")
    shown = capsys.readouterr().out
    assert "program bench [OPTIONS] [MODEL]" in shown
    assert "--threads" in shown
    assert "Commands:\n  serve" in shown
    with pytest.raises(typer.Exit):
        program("models", "-h")
    assert "list" in capsys.readouterr().out


def test_settings_of_nested_commands(program: Any) -> None:
    Path("nanovllm.toml").write_text(
        "[default]\nthreads = 7\n[bench]\nthreads = 5\n[bench.serve]\nrate = 3\n[models.tiny]\nthreads = 9\n"
        "[models.list]\nthreads = 11\n"
    )
    assert program("bench") == ("measure", ["5"])
    assert program("bench", "tiny") == ("measure", ["tiny", "9"])
    assert program("bench", "-m", "tiny") == ("measure", ["tiny", "9"])
    assert program("bench", "tiny", "other") == ("measure", ["tiny", "other", "5"])
    assert program("bench", "serve") == ("serve", 3.0)
    assert program("models", "list") == ("list", "7")  # [models.list] is about a model called list
    assert program("other") == ("list", "7")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[bench.srve]\nrate = 1", "'srve' is no command of bench"),
        ("[bench.serve]\nthreads = 1", "'threads' is no setting in .bench.serve."),
        ("[bench]\nserve = 1", "'serve' is no setting in .bench."),
        ("[bench.threads]\nx = 1", "is a table, not a value"),
    ],
)
def test_nested_settings_without_effect_are_refused(program: Any, text: str, message: str) -> None:
    Path("nanovllm.toml").write_text(text)
    with pytest.raises(Exception, match=message):
        program("bench")
