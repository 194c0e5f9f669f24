"""The manual pages: current, whole, and accepted by man without a warning."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from nanovllm_cli import errors
from nanovllm_cli.cli.command_tree import Page, page
from nanovllm_cli.cli.program import PROGRAM, build

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import manual

MADE = manual.pages()
COMMANDS = list(page(get_command(build()), PROGRAM).every())
needs_man = pytest.mark.skipif(
    shutil.which("man") is None or shutil.which("groff") is None, reason="needs man and groff"
)


def test_the_checked_in_pages_are_current() -> None:
    there = {path.name: path.read_text() for path in manual.FOLDER.iterdir()}
    stale = sorted(name for name in there.keys() | MADE.keys() if there.get(name) != MADE.get(name))
    assert not stale, manual.STALE


def test_the_pages_say_nothing_of_when_and_where_they_were_made() -> None:
    everything = "".join(MADE.values())
    assert str(Path.home()) not in everything
    assert not re.search(r"20\d\d-\d\d", everything)


def test_every_exit_code_is_explained() -> None:
    def codes(kind: type[errors.NanovllmError]) -> set[int]:
        return {kind.exit_code}.union(*(codes(each) for each in kind.__subclasses__()))

    assert {str(code) for code in codes(errors.NanovllmError)} <= manual.EXIT_STATUS.keys()


@needs_man
def test_man_has_no_warning(tmp_path: Path) -> None:
    """All pages in one call; a locale without UTF-8 has the characters in some form too."""
    paths = [tmp_path / name for name in MADE]
    for path in paths:
        path.write_text(MADE[path.name])
    for locale in ("C.UTF-8", "C"):
        shown = formatted(paths, locale)
        assert shown.stderr == ""
        assert shown.returncode == 0
        assert all(f"{path.stem.upper()}({path.suffix[1]})" in shown.stdout for path in paths)


@needs_man
def test_warnings_are_seen(tmp_path: Path) -> None:
    bad = tmp_path / "bad.1"
    bad.write_text('.TH BAD 1 "" "" ""\n.SH NAME\nbad \\- \\[nosuchcharacter]\n.NOSUCHMACRO\n')
    assert "NOSUCHMACRO" in formatted([bad], "C.UTF-8").stderr


@needs_man
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(command.words))
def test_a_page_shows_all_there_is(command: Page, tmp_path: Path) -> None:
    path = tmp_path / f"{'-'.join(command.words)}.1"
    path.write_text(MADE[path.name])
    shown = formatted([path], "C.UTF-8").stdout
    words = re.sub(r"\s+", " ", shown)
    for each in command.parameters:
        for flag in (*each.flags, *each.off):
            assert f" {flag}" in words
        assert re.sub(r"\s+", " ", each.help).replace("…", "...") in words
    for inner in command.commands:
        assert f"{'-'.join(inner.words)}(1)" in words
    headings = re.findall(r"^[A-Z][A-Z ]+$", shown, re.MULTILINE)
    wanted = ["NAME", "SYNOPSIS", "OPTIONS", "EXAMPLES", "EXIT STATUS", "ENVIRONMENT", "FILES", "SEE ALSO"]
    assert [each for each in headings if each in wanted] == wanted


def test_what_roff_would_take_for_a_request_is_text() -> None:
    assert manual._line(".toml is 'it' - \\n…") == "\\&.toml is \\(aqit\\(aq \\- \\(rsn..."
    assert "-" not in re.sub(r"\\[-]", "", manual._flags(COMMANDS[1].options[0]))


def formatted(paths: list[Path], locale: str) -> subprocess.CompletedProcess[str]:
    environment = {"LC_ALL": locale, "MANWIDTH": "80", "MANPAGER": "cat", "PATH": "/usr/bin:/bin", "MANROFFOPT": ""}
    command = ["man", "--warnings=w", "-l", *map(str, paths)]
    return subprocess.run(
        command, capture_output=True, env=environment, check=False, encoding="utf-8", errors="replace"
    )
