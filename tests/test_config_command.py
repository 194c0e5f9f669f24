"""Settings files and `nanovllm config`: what counts, where it is said to come from, and changes that keep the rest."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nanovllm_cli.cli.toml_text import TomlText
from nanovllm_cli.errors import UsageError
from test_cli_driver import Result, nanovllm

USER = """\
# my settings
[default]
temp = 0.7  # warm
stop = [
    "a # b",
    "c",
]

[run]
ctx-size = "32K"

[models."qwen3:8b"]
top-k = 20

[aliases]
mine = "org/x"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / ".config/nanovllm"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(USER)
    return tmp_path


def user(home: Path) -> Path:
    return home / ".config/nanovllm/config.toml"


def ok(result: Result) -> str:
    assert (result.code, result.err) == (0, "")
    return result.out


def records(home: Path, *arguments: str, **extra: str) -> dict[tuple[str, str], dict[str, object]]:
    """By key, and first command or model."""
    found = json.loads(ok(nanovllm(home, "config", "--json", *arguments, **extra)))
    return {(each["key"], each["model"] or (each["commands"] or [""])[0]): each for each in found}


# ---- what counts ----


def test_a_flag_wins_over_the_environment_that_over_the_project_that_over_the_user(home: Path) -> None:
    """As `run` itself computes with it, and as `config get` says."""

    def temperature(*flags: str, **extra: str) -> str:
        out = ok(nanovllm(home, "run", "-q", "tiny", "params", *flags, **extra))
        return out.partition("temperature=")[2].partition(",")[0]

    def told(**extra: str) -> str:
        return ok(nanovllm(home, "config", "get", "run.temp", **extra)).strip()

    assert temperature() == told() == "0.7"
    (home / "nanovllm.toml").write_text("[default]\ntemp = 0.6\n")
    assert temperature() == told() == "0.6"
    (home / "nanovllm.toml").write_text("[default]\ntemp = 0.6\n[run]\ntemp = 0.5\n")
    assert temperature() == told() == "0.5"
    assert temperature(NANOVLLM_TEMP="0.4") == told(NANOVLLM_TEMP="0.4") == "0.4"
    assert temperature("--temp", "0.3", NANOVLLM_TEMP="0.4") == "0.3"
    assert told(NANOVLLM_TEMP="") == "0.5"


def test_a_variable_may_have_any_long_flags_name(home: Path) -> None:
    for name in ("NANOVLLM_PREDICT", "NANOVLLM_N_PREDICT"):
        assert ok(nanovllm(home, "run", "-q", "tiny", "params", **{name: "5"})) == "Sampl\n", "five tokens"
        assert ["predict", "=", "5", name, "run"] in [
            line.split() for line in ok(nanovllm(home, "config", "run", **{name: "5"})).splitlines()
        ]
        wrong = nanovllm(home, "run", "-q", "tiny", "params", **{name: "x"})
        assert f"the value comes from the environment variable {name}" in wrong.err
    assert ok(nanovllm(home, "config", "get", "serve.parallel", NANOVLLM_MAX_NUM_SEQS="4")).strip() == "4"


def test_a_models_settings_win_over_its_commands(home: Path) -> None:
    (home / "nanovllm.toml").write_text('[run]\ntop-k = 5\n[models.tiny]\ntop-k = 6\n[aliases]\nsmall = "tiny"\n')
    assert ok(nanovllm(home, "config", "get", "run.top-k")) == "5\n"
    assert ok(nanovllm(home, "config", "get", "models.tiny.top-k")) == "6\n"
    assert ok(nanovllm(home, "config", "get", "models.small.top_k")) == "6\n"
    assert "top_k=6" in ok(nanovllm(home, "run", "-q", "small", "params"))


def test_what_an_alias_stands_for_is_told_where_that_is_not_there(home: Path) -> None:
    (home / "nanovllm.toml").write_text('[aliases]\nmine = "missing"\nother = "tiny"\n')
    for words in (["mine", "hi"], ["-m", "mine", "hi"]):
        gone = nanovllm(home, "run", *words)
        assert (gone.code, gone.err.splitlines()[-2]) == (3, "error: no model named missing")
        told = r"hint: mine stands for missing in \S*nanovllm\.toml:2; did you mean tiny\?"
        assert re.fullmatch(told, gone.err.splitlines()[-1])
    assert "stands for" not in nanovllm(home, "run", "missing", "hi").err, "nobody said mine"


def test_a_model_that_a_file_names_has_its_settings_too(home: Path) -> None:
    (home / "nanovllm.toml").write_text('[default]\nmodel = "tiny"\n[models.tiny]\ntop-k = 6\n[models.other]\ntop-k = 7\n')
    assert "top_k=6" in ok(nanovllm(home, "run", "-q", "params"))
    assert "top_k=7" in ok(nanovllm(home, "run", "-q", "-m", "other", "params"))
    assert "top_k=7" in ok(nanovllm(home, "run", "-q", "params", NANOVLLM_MODEL="other"))


def test_what_the_environment_may_set_a_file_may_set_unless_it_names_a_file(home: Path) -> None:
    (home / "nanovllm.toml").write_text('[run]\nsystem-prompt = "Be brief."\nquiet = true\n')
    assert nanovllm(home, "run", "tiny", "hi").err == ""
    assert "Be brief." in nanovllm(home, "run", "tiny", "hi").out
    for key in ("log-file", "output", "prompt", "batch", "overwrite"):
        (home / "nanovllm.toml").write_text(f"[run]\n{key} = 'x'\n")
        refused = nanovllm(home, "run", "tiny", "hi")
        assert refused.code == 2
        assert f"nanovllm.toml:2: '{key}' is no setting in [run]" in refused.err


def test_a_peers_name_in_a_file_is_answered_with_ours_as_on_the_command_line(home: Path) -> None:
    (home / "nanovllm.toml").write_text("[run]\nmax_tokens = 3\n")
    told = nanovllm(home, "run", "tiny", "hi").err
    assert "nanovllm.toml:2: 'max-tokens' is no setting in [run]\nhint: did you mean predict?\n" in told
    (home / "nanovllm.toml").unlink()
    assert "did you mean temp?\n" in nanovllm(home, "config", "set", "run.temperature", "0.5").err


# ---- what is shown ----


def test_each_value_has_its_place(home: Path) -> None:
    shown = records(home, NANOVLLM_THREADS="3")
    file = str(user(home))
    place = {"from": "user", "file": file, "model": None}
    temp = shown["temp", "run"]
    assert {"key": "temp", "value": 0.7, "line": 3, "table": "default", "commands": temp["commands"]} | place == temp
    assert "chat" in temp["commands"]  # type: ignore[operator]
    assert (shown["stop", "run"]["line"], shown["stop", "run"]["value"]) == (4, ["a # b", "c"])
    assert (shown["ctx-size", "run"]["line"], shown["ctx-size", "run"]["commands"]) == (10, ["run"])
    assert (shown["top-k", "qwen3:8b"]["line"], shown["top-k", "qwen3:8b"]["table"]) == (13, 'models."qwen3:8b"')
    assert (shown["mine", ""]["line"], shown["mine", ""]["value"]) == (16, "org/x")
    assert shown["threads", "run"]["variable"] == "NANOVLLM_THREADS"
    assert len(shown) == 6


def test_one_command_with_one_model(home: Path) -> None:
    assert "top-k" not in {key for key, _ in records(home, "run", "-m", "other")}
    shown = records(home, "run", "-m", "qwen3:8b", "--all")
    assert (shown["top-k", "run"]["value"], shown["top-k", "run"]["line"]) == (20, 13)
    assert (shown["min-p", "run"]["value"], shown["min-p", "run"]["default"]) == (None, "the model's own, else 0")
    assert ("mine", "") not in shown
    assert nanovllm(home, "config", "plan", "--all").out.startswith("model (none) ")


def test_the_text_says_the_same(home: Path) -> None:
    lines = ok(nanovllm(home, "config", "run", NANOVLLM_THREADS="3")).splitlines()
    assert [line.split() for line in lines] == [
        ["temp", "=", "0.7", ".config/nanovllm/config.toml:3", "[default]", "run"],
        ["stop", "=", '["a', "#", 'b",', '"c"]', ".config/nanovllm/config.toml:4", "[default]", "run"],
        ["ctx-size", "=", "32K", ".config/nanovllm/config.toml:10", "[run]", "run"],
        ["threads", "=", "3", "NANOVLLM_THREADS", "run"],
        ["top-k", "=", "20", ".config/nanovllm/config.toml:13", '[models."qwen3:8b"]', "run,", "with", "qwen3:8b"],
    ]


def test_nothing_set_is_said_where_people_read(tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "config")
    assert (result.code, result.out) == (0, "")
    assert "nothing is set" in result.err


def test_a_list_is_shown_as_one_however_short_and_wherever_it_stands(home: Path) -> None:
    """What the environment has of it is split at white space, as the option does."""
    user(home).write_text('[run]\nstop = ["x"]\nbad-word = []\n')
    lines = ok(nanovllm(home, "config", "run", NANOVLLM_CHOICE="yes  no")).splitlines()
    assert [line.split(" .config")[0].split(" NANO")[0].rstrip() for line in lines] == [
        'stop = ["x"]', "bad-word = []", 'choice = ["yes", "no"]',
    ]  # fmt: skip
    assert ok(nanovllm(home, "config", "get", "run.choice", NANOVLLM_CHOICE="yes  no")) == "yes\nno\n"
    assert nanovllm(home, "config", "set", "stop", "y").err.startswith('stop = ["y"] in ')


# ---- variables that no option reads ----


def test_a_variable_that_no_option_has_is_warned_of_by_every_command(home: Path) -> None:
    """Not of one that another command has, nor of what Kubernetes sets beside a service of this name."""
    user(home).unlink()
    odd = {"NANOVLLM_TMEP": "1", "NANOVLLM_TOOL_CALL_PARSER": "x", "NANOVLLM_DEBUG": "0", "NANOVLLM_OLD": ""}
    odd |= {"NANOVLLM_SERVICE_HOST": "10.0.0.1", "NANOVLLM_PORT_80_TCP_ADDR": "10.0.0.1"}
    warning = "warning: NANOVLLM_TMEP is no option's variable; did you mean NANOVLLM_TEMP?\n"
    for words in (["run", "tiny", "hi", "--no-stats"], ["config"], ["config", "get", "debug"], ["bench", "compare", "x"]):
        told = nanovllm(home, *words, **odd)
        assert told.err.startswith(warning), words
        assert (told.err.count("NANOVLLM"), "TMEP" in told.out) == (2, False)
    assert ok(nanovllm(home, "run", "tiny", "-q", "hi", **odd))
    assert ok(nanovllm(home, "config", "path", **odd))
    assert ok(nanovllm(home, "--version", **odd))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("NANOVLLM_MAX_TOKENS", "; did you mean NANOVLLM_PREDICT?"),
        ("NANOVLLM_TEMPERATURE", "; did you mean NANOVLLM_TEMP?"),
        ("NANOVLLM_PROMPT", ": --prompt is for the command line alone"),
        ("NANOVLLM_FROBNICATE", ""),
    ],
)
def test_what_a_variable_may_have_been_meant_for(home: Path, name: str, told: str) -> None:
    assert nanovllm(home, "config", "get", "temp", **{name: "1"}).err == f"warning: {name} is no option's variable{told}\n"


# ---- mistakes ----


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("[default]\n\ntmep = 1", ":3: 'tmep' is no setting in [default]", "temp"),
        ("[default]\nstop = [\n'a',\n]\ntop_kk = 1", ":5: 'top-kk' is no setting", "top-k"),
        ("\n[rnu]\ntemp = 1", ":2: 'rnu' is no table", "run"),
        ("[models.x]\n\n\ntemperature = 1", ":4: 'temperature' is no setting in [models.\"x\"]", "temp"),
        ("[foo]", ":1: 'foo' is no table", "settings stand below the [name] of a table: aliases, bench,"),
        ("temp = 1", ":1: 'temp' is no table", "default, embed, models, perplexity, plan"),
        ("models.x.tmep = 1", ":1: 'tmep' is no setting", "temp"),
        ("[aliases]\na = 'b'\nc = 3", ":3: [aliases] c is not the name", ""),
        ("[default]\ntemp = \n", "(at line 2", "line"),
        ("[default]\ntemp = " + "[" * 5000, "is not TOML", "line"),
        ("a." * 50000 + "b = 1", "a key of more than 100 parts", "line"),
        ("x = {" + '"a!" . ' * 50000 + "b = 1}", "a key of more than 100 parts", "line"),
    ],
)
def test_a_mistake_has_its_line_and_the_nearest_name(home: Path, text: str, says: str, hint: str) -> None:
    (home / "nanovllm.toml").write_text(text)
    for command in (["run", "tiny", "hi"], ["config"]):
        result = nanovllm(home, *command)
        assert (result.code, result.out) == (2, "")
        assert says in result.err
        assert hint in result.err.partition("hint:")[2]


@pytest.mark.parametrize("place", [".config/nanovllm/config.toml", "nanovllm.toml"])
def test_a_folder_in_a_files_place_is_refused_and_nothing_in_it_is_nothing(home: Path, place: str) -> None:
    user(home).unlink()
    (home / place).mkdir()
    result = nanovllm(home, "config")
    assert (result.code, result.out) == (2, "")
    assert f"cannot read {home / place}: Is a directory" in result.err
    (home / place).rmdir()
    (home / place).symlink_to("/dev/null")
    assert nanovllm(home, "config").code == 0


def test_a_file_too_long_is_refused(home: Path) -> None:
    (home / "nanovllm.toml").write_bytes(b"#" * (1 << 20) + b"\n")
    assert "longer than 1 MiB" in nanovllm(home, "config").err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["get", "tmep"], "'tmep' is no setting of any command\nhint: did you mean temp"),
        (["get", "rum.temp"], "no command 'rum' that has settings\nhint: did you mean run"),
        (["set", "prompt", "x"], "--prompt can't be set in a file\nhint: give it on the command line\n"),
        (["set", "api-key", "x"], "--api-key can't be set in a file\nhint: give it on the command line, or as NANOVLLM_API"),
        (["get", "run.log-file"], "'log-file' is no setting of run"),
        (["get", "aliases."], "an alias has no name"),
        (["get"], "missing argument"),
        (["set", "temp"], "missing argument"),
        (["set", "temp", "warm"], "invalid value for '--temp'"),
        (["set", "temp", "5000"], "--temp must be a number from 0 to 100, not 5000"),
        (["set", "run.stop", "x", ""], "--stop must be strings of 1 to"),
        (["set", "models.tiny.threads", "0"], "--threads must be at least 1"),
        (["set", "temp", "1", "2"], "temp takes one value, not 2"),
        (["set", "dtype", "float33"], "invalid value for '--dtype'"),
        (["set", "ctx-size", "12x"], "is not a number of tokens"),
        (["set", "offline", "perhaps"], "'perhaps' is neither true nor false"),
        (["set", "aliases.x", ""], "takes the name of one model"),
        (["set", "run.stop", b"\xff"], "the value of run.stop is not valid Unicode"),
        (["unset", "top-p"], "top-p is not set in"),
        (["rum"], "no command 'rum' that has settings"),
        (["list"], "no command 'list' that has settings\nhint: nanovllm config alone shows everything that is set"),
        (["gte"], "there is no command 'gte'"),
        (["set", "config.set.quiet", "1"], "no command 'config.set' that has settings"),
    ],
)
def test_mistakes_change_nothing(home: Path, arguments: list[str | bytes], says: str) -> None:
    result = nanovllm(home, "config", *arguments)
    assert (result.code, result.out) == (2, "")
    assert says in result.err
    assert user(home).read_text() == USER


def test_what_is_not_set_has_an_exit_code_of_its_own(home: Path) -> None:
    result = nanovllm(home, "config", "get", "top-p")
    assert (result.code, result.out) == (1, "")
    assert "top-p is not set" in result.err


# ---- changes ----


@pytest.mark.parametrize(
    ("arguments", "before", "after"),
    [
        (["temp", "0.5"], "temp = 0.7  # warm\n", "temp = 0.5  # warm\n"),
        (["temp", "1"], "temp = 0.7  # warm\n", "temp = 1  # warm\n"),
        (["temp", ".5"], "temp = 0.7  # warm\n", 'temp = ".5"  # warm\n'),
        (["default.top_k", "5"], '    "c",\n]\n', '    "c",\n]\ntop-k = 5\n'),
        (["stop", "x", 'y "z" #'], 'stop = [\n    "a # b",\n    "c",\n]\n', 'stop = ["x", "y \\"z\\" #"]\n'),
        (["run.offline", "ON"], 'ctx-size = "32K"\n', 'ctx-size = "32K"\noffline = true\n'),
        (["models.qwen3:8b.top-p", "0.9"], "top-k = 20\n", "top-k = 20\ntop-p = 0.9\n"),
        (['models."qwen3:8b".top-p', "0.9"], "top-k = 20\n", "top-k = 20\ntop-p = 0.9\n"),
        (["aliases.'mine'", "org/y"], 'mine = "org/x"\n', 'mine = "org/y"\n'),
        (["aliases.a b", "org/ü"], 'mine = "org/x"\n', 'mine = "org/x"\n"a b" = "org/ü"\n'),
        (["models.a/b.GGUF.temp", "1"], 'mine = "org/x"\n', 'mine = "org/x"\n\n[models."a/b.GGUF"]\ntemp = 1\n'),
        (["verbose", "2"], '    "c",\n]\n', '    "c",\n]\nverbose = 2\n'),
    ],
)
def test_a_change_touches_its_own_lines(home: Path, arguments: list[str], before: str, after: str) -> None:
    result = nanovllm(home, "config", "set", *arguments)
    assert (result.code, result.out) == (0, "")
    assert before in USER
    assert user(home).read_text() == USER.replace(before, after)
    assert nanovllm(home, "config", "get", arguments[0]).code == 0


def test_a_value_is_taken_out_again(home: Path) -> None:
    nanovllm(home, "config", "unset", "-q", "stop")
    nanovllm(home, "config", "unset", "-q", "models.qwen3:8b.top-k")
    assert user(home).read_text() == USER.replace('stop = [\n    "a # b",\n    "c",\n]\n', "").replace("top-k = 20\n", "")


def test_a_key_may_be_spelt_otherwise_in_the_file(home: Path) -> None:
    """With _, or by an option's other long name."""
    text = "[default]\ntop_k = 20  # mine\n\n[models.tiny]\nmin_p = 0.2\nn_predict = 4\npredict = 5\n"
    user(home).write_text(text)
    shown = records(home)
    assert [(each["key"], each["model"], each["value"], each["line"]) for each in shown.values()] == [
        ("top-k", None, 20, 2), ("predict", "tiny", 5, 7), ("min-p", "tiny", 0.2, 5),
    ]  # fmt: skip
    assert ok(nanovllm(home, "config", "get", "models.tiny.n-predict")) == "5\n"
    assert ok(nanovllm(home, "run", "-q", "tiny", "params")) == "Sampl\n", "five tokens"
    assert "top_k = 7 in [default]" in nanovllm(home, "config", "set", "top-k", "7").err
    nanovllm(home, "config", "set", "-q", "models.tiny.min-p", "0.3")
    assert user(home).read_text() == text.replace("20", "7").replace("0.2", "0.3")
    for key in ("top-k", "models.tiny.min_p"):
        assert nanovllm(home, "config", "unset", "-q", key).code == 0
    assert user(home).read_text() == "[default]\n\n[models.tiny]\nn_predict = 4\npredict = 5\n"


def test_of_several_spellings_one_is_left(home: Path) -> None:
    """The last one counts, so that a change of another one would change nothing."""
    text = "[default]\npredict = 3\nn-predict = 9  # more\nn_predict = 8\n"
    user(home).write_text(text)
    assert ok(nanovllm(home, "config", "get", "predict")) == ok(nanovllm(home, "config", "get", "run.predict")) == "8\n"
    nanovllm(home, "config", "set", "-q", "n_predict", "5")
    assert user(home).read_text() == "[default]\npredict = 5\n"
    assert ok(nanovllm(home, "config", "get", "predict")) == "5\n"
    assert ok(nanovllm(home, "run", "-q", "tiny", "params")) == "Sampl\n"
    user(home).write_text(text)
    assert nanovllm(home, "config", "unset", "predict").err.startswith("predict and n-predict and n_predict are out of [default]")
    assert user(home).read_text() == "[default]\n"
    assert nanovllm(home, "config", "unset", "predict").code == 2


def test_a_name_that_is_another_commands_own_stays(home: Path) -> None:
    """--max-num-seqs is serve's other name for --parallel, which of `bench` is something else."""
    user(home).write_text("[default]\nparallel = 4\n[serve]\nparallel = 5\n")
    nanovllm(home, "config", "set", "-q", "max-num-seqs", "8")
    nanovllm(home, "config", "set", "-q", "serve.max-num-seqs", "9")
    assert user(home).read_text() == "[default]\nparallel = 4\nmax-num-seqs = 8\n[serve]\nparallel = 9\n"
    assert ok(nanovllm(home, "config", "get", "serve.parallel")) == "9\n"
    assert nanovllm(home, "config", "unset", "-q", "max-num-seqs").code == 0
    assert user(home).read_text() == "[default]\nparallel = 4\n[serve]\nparallel = 9\n"


def test_the_first_setting_makes_its_file(tmp_path: Path) -> None:
    assert ok(nanovllm(tmp_path, "config", "set", "-q", "temp", "1")) == ""
    assert user(tmp_path).read_text() == "[default]\ntemp = 1\n"
    assert ok(nanovllm(tmp_path, "config", "set", "-q", "--project", "run.top-k", "3")) == ""
    assert (tmp_path / "nanovllm.toml").read_text() == "[run]\ntop-k = 3\n"
    assert ok(nanovllm(tmp_path, "config", "path")) == f"{user(tmp_path)}\n"
    assert ok(nanovllm(tmp_path, "config", "path", "--project")) == f"{tmp_path}/nanovllm.toml\n"


def test_a_file_that_is_wrong_can_be_mended(home: Path) -> None:
    """`set`, `unset`, `path`, `edit` and the shells' scripts work where every other command refuses."""
    user(home).write_text("[default]\ntmep = 1\n")
    assert nanovllm(home, "run", "tiny", "hi").code == 2
    assert nanovllm(home, "config", "path").code == nanovllm(home, "completion", "bash").code == 0
    still = nanovllm(home, "config", "edit", EDITOR="true")
    assert (still.code, ":2: 'tmep'" in still.err) == (2, True)
    editor = home / "editor"
    editor.write_text('#!/bin/sh\nsed -i s/tmep/temp/ "$2"\n')
    editor.chmod(0o755)
    assert nanovllm(home, "config", "edit", EDITOR="false", VISUAL=f"{editor} -w").code == 0
    assert ok(nanovllm(home, "config", "get", "temp")) == "1\n"
    assert nanovllm(home, "config", "edit", EDITOR="false").code == 1
    assert "cannot run no-such-editor" in nanovllm(home, "config", "edit", EDITOR="no-such-editor").err
    unfinished = nanovllm(home, "config", "edit", EDITOR="vi '")
    assert (unfinished.code, unfinished.err.splitlines()[0]) == (2, "error: cannot run vi ': No closing quotation")


def test_what_cannot_be_changed_line_by_line_is_refused_and_stays(home: Path) -> None:
    text = "default = { temp = 1, top-k = 2 }\n"
    user(home).write_text(text)
    assert nanovllm(home, "config", "get", "top-k").out == "2\n"
    result = nanovllm(home, "config", "set", "top-k", "3")
    assert (result.code, "nanovllm config edit" in result.err) == (2, True)
    assert nanovllm(home, "config", "unset", "top-k").code == 2
    assert user(home).read_text() == text


# ---- lines of TOML ----

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
VALUES = st.one_of(
    st.booleans(), st.integers(-10, 1 << 40), st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=3),
)  # fmt: skip


@given(KEYS, KEYS, VALUES, VALUES)
def test_whatever_is_set_is_read_back_by_tomllib(table: str, key: str, first: object, second: object) -> None:
    text = TomlText(USER).with_value(("models", table), key, first)
    again = TomlText(text).with_value(("models", table), key, second)
    assert tomllib.loads(again)["models"][table][key] == second
    assert tomllib.loads(TomlText(again).without(("models", table), key))["aliases"] == {"mine": "org/x"}
    line = TomlText(again).line_of("models", table, key)
    assert line is not None
    assert "=" in again.split("\n")[line - 1]


def test_statements_of_several_lines_are_counted_whole() -> None:
    text = 'a = """\n[b]\nc = 1\n"""\n\n[b]\nc = [\n  1, # ]\n]\nd.e = 2\n[f.g]\n'
    lines = TomlText(text)
    assert [lines.line_of(*path.split(".")) for path in ("a", "b", "b.c", "b.d", "b.d.e", "f", "f.g", "x")] == [
        1, 6, 7, 10, 10, 11, 11, None,
    ]  # fmt: skip


LINES = ("x = 1", '"', "'", '""', "''", "]", "[", "}", "#", "\\\\", '\\"', "")
PARTS = st.lists(st.sampled_from(LINES), max_size=4).map("\n".join)
LITERALS = st.one_of(
    PARTS.filter(lambda text: '"""' not in text).map(lambda text: f'"""{text}"""'),
    PARTS.filter(lambda text: "'''" not in text).map(lambda text: f"'''{text}'''"),
    PARTS.map(json.dumps),
    PARTS.filter(lambda text: "'" not in text and "\n" not in text).map(lambda text: f"'{text}'"),
    st.sampled_from(["1", "true", "[ # ]\n 1,\n]", "[['[', \"]\"],\n[]]", "{a = '}', b = {c = 1}}"]),
)


@given(st.lists(st.tuples(LITERALS, st.sampled_from(["", " # a 'b \" [", "\n", "\n# ]"])), max_size=6))
def test_every_statement_is_found_where_it_was_written(written: list[tuple[str, str]]) -> None:
    blocks = [f"[t{i}]\nkey = {value}{behind}\n" for i, (value, behind) in enumerate(written)]
    for block in blocks:
        try:
            tomllib.loads(block)
        except tomllib.TOMLDecodeError:
            assume(False)  # the text's own quotation marks end the literal too early
    found = TomlText("".join(blocks))
    starts = [2 + "".join(blocks[:i]).count("\n") for i in range(len(blocks))]
    assert [found.line_of(f"t{i}", "key") for i in range(len(blocks))] == starts


def test_the_time_it_takes_grows_with_the_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a string of many lines each line might be its last."""
    parsed: list[int] = []
    real = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: parsed.append(len(text)) or real(text))
    for text in ('a = """\n' + "x]\n" * 5000 + '"""\n', "a = [\n" + "1, # ]\n" * 5000 + "]\n"):
        parsed.clear()
        assert TomlText(text + "b = 1\n").line_of("b") == 5003
        assert sum(parsed) <= 2 * len(text) + 20


def test_a_file_without_a_last_newline() -> None:
    assert TomlText("[a]\nb = 1").with_value(("a",), "c", 2) == "[a]\nb = 1\nc = 2\n"
    with pytest.raises(UsageError, match="has no line of its own"):
        TomlText("[a]\nb = 1").without(("a",), "c")
