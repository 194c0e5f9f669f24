"""Writes the manual pages into `man/`: one a command from the Typer tree, and nanovllm-config(5) for the settings files.

    python scripts/manual.py            writes what has changed, removes what no command has any more

The same tree gives the same bytes: no date, no machine. `tests/test_man.py` fails where `man/` is not what this writes.
Escapes are those of groff_char(7); the layout follows man-pages(7).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from typer.main import get_command

from nanovllm_cli import __version__
from nanovllm_cli.cli.command_tree import Page, Parameter, page, sections
from nanovllm_cli.cli.examples import EXAMPLES
from nanovllm_cli.cli.program import PROGRAM, build

FOLDER = Path(__file__).resolve().parents[1] / "man"
STALE = "run: python scripts/manual.py"

EXIT_STATUS = {
    "0": "Done, or the reader of standard output closed the pipe.",
    "1": "Failed: a broken checkpoint or template, the network, a file that cannot be written, a request that failed.",
    "2": "Usage: a flag, a setting or an input that has no meaning.",
    "3": "No such model, or not on this machine while offline.",
    "4": "Access refused: a gated or private repository, a file that may not be read.",
    "5": "Does not fit: memory, disk or context.",
    "6": "Not supported: architecture, tensor type, file format, device.",
    "7": "What was compared differs: verify, perplexity with --fail-above, bench compare with --fail-under.",
    "130, 143, 129": "Ended by Ctrl-C, SIGTERM, SIGHUP.",
}
ENVIRONMENT = {
    "HF_HOME, HF_HUB_CACHE": "Where downloads are kept; ~/.cache/huggingface/hub without them.",
    "HF_TOKEN": "For gated and private repositories.",
    "HF_ENDPOINT": "Another hub.",
    "HF_HUB_OFFLINE": "As --offline.",
    "NO_COLOR, FORCE_COLOR, TERM=dumb": "Colour and cursor movement, on a terminal; a pipe never gets any.",
    "XDG_CONFIG_HOME, XDG_STATE_HOME, XDG_CACHE_HOME": "In place of ~/.config, ~/.local/state and ~/.cache.",
    "NUMBA_NUM_THREADS": "Most threads that there can be; -t cannot go above it. On a Mac, one a fast core unless it is set.",
}
FILES = {
    "nanovllm.toml": "Settings of a project: of this folder or the nearest above, within the repository.",
    "~/.config/nanovllm/config.toml": "Settings of the user. Both are described in nanovllm-config(5).",
    "~/.local/state/nanovllm/": "What was said: the last run, for --continue, and conversations.",
    "~/.cache/huggingface/hub/": "Models from the hub.",
    "~/.cache/nanovllm/": "CPU kernels, compiled for this processor.",
}
SETTINGS_EXAMPLE = """\
[default]
temp = 0.7

[run]
ctx-size = "32K"

[models."qwen3:8b"]
top-k = 20

[aliases]
mine = "someone/something-GGUF:Q4_K_M"
"""


def pages() -> dict[str, str]:
    """File name -> text."""
    root = page(get_command(build()), PROGRAM)
    made = {f"{'-'.join(each.words)}.1": "\n".join(_command(each, root)) + "\n" for each in root.every()}
    return made | {f"{PROGRAM}-config.5": "\n".join(_settings(root)) + "\n"}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    for path in FOLDER.glob("*.[15]"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="ascii")
    print(f"{len(made)} pages in {FOLDER.name}/", file=sys.stderr)


def _command(command: Page, root: Page) -> Iterator[str]:
    name = "-".join(command.words)
    yield _title(name, 1)
    yield from _heading("Name")
    yield f"{_text(name)} \\- {_text(_lowered(command.summary))}"
    yield from _heading("Synopsis")
    yield from _synopsis(command)
    if command.text:
        yield from _heading("Description")
        yield from _paragraphs(command.text)
    if command.commands:
        yield from _heading("Commands")
        for inner in command.commands:
            yield from _entry(_bold(inner.words[-1]), f"{inner.summary} See {_reference(inner)}.")
    yield from _heading("Options")
    for title, members in sections(command.parameters).items():
        yield f".SS {_text(title)}"
        for each in members:
            yield from _entry(_flags(each), each.help)
    yield from _examples(command.name)
    yield from _heading("Exit status")
    for code, meaning in EXIT_STATUS.items():
        yield from _entry(_bold(code), meaning)
    yield from _environment(command, root)
    yield from _heading("Files")
    for path, meaning in FILES.items():
        yield from _entry(f"\\fI{_text(path)}\\fR", meaning)
    yield from _see_also(command, root)


def _synopsis(command: Page) -> Iterator[str]:
    words = _bold(" ".join(command.words))
    arguments = [_argument(each) for each in command.arguments]
    if command.arguments or not command.commands:
        yield " ".join([words, "[\\fIoptions\\fR]", *arguments])
    if command.commands:
        if command.arguments:
            yield ".br"
        yield f"{words} \\fIcommand\\fR [\\fIoptions\\fR] ..."


def _argument(each: Parameter) -> str:
    shown = f"\\fI{each.value}\\fR{' ...' if each.repeats else ''}"
    return shown if each.required else f"[{shown}]"


def _examples(name: str) -> Iterator[str]:
    if name not in EXAMPLES:
        return
    yield from _heading("Examples")
    for line, does in EXAMPLES[name].items():
        yield from [".PP", _line(does), ".PP", ".RS 4", ".EX", _line(line), ".EE", ".RE"]


def _environment(command: Page, root: Page) -> Iterator[str]:
    yield from _heading("Environment")
    variables = [each.variables[0] for each in command.options if each.variables]
    if variables:
        without = [
            max(each.flags, key=len)
            for each in command.options
            if not each.variables and each.name not in ("help", "version")
        ]
        exception = f" Not for {', '.join(without)}." if without else ""
        sample = next((name for name in ("NANOVLLM_TEMP", "NANOVLLM_MODEL") if name in variables), variables[0])
        yield _line(
            f"Any option can be given by its long name in capitals, with NANOVLLM_ before it and _ for each dash: {sample}."
            f"{exception} A flag wins over it."
        )
    if command is root:
        for names, meaning in ENVIRONMENT.items():
            yield from _entry(_bold(names), meaning)
    else:
        yield from [".PP", _line(f"Those that all commands know are in {PROGRAM}(1).")]


def _see_also(command: Page, root: Page) -> Iterator[str]:
    yield from _heading("See also")
    near = [command, *command.commands] if command.commands else root.commands
    names = {_reference(root): None} | {_reference(each): None for each in near} | {f"{PROGRAM}-config(5)": None}
    names.pop(_reference(command), None)
    yield ",\n".join(f".BR {_text(each[:-3])} {each[-3:]}" for each in names).replace(",\n", " ,\n")


def _settings(root: Page) -> Iterator[str]:
    yield _title(f"{PROGRAM}-config", 5)
    yield from _heading("Name")
    yield f"{PROGRAM}\\-config \\- settings of nanovllm in files"
    yield from _heading("Synopsis")
    for path in ("nanovllm.toml", "~/.config/nanovllm/config.toml"):
        yield f"\\fI{_text(path)}\\fR"
        yield ".br"
    yield from _heading("Description")
    yield from _paragraphs(SETTINGS_TEXT)
    yield from _heading("Tables")
    for table, meaning in TABLES.items():
        yield from _entry(_bold(table), meaning)
    yield from _heading("Keys")
    yield from _paragraphs([KEYS_TEXT])
    owners: dict[str, list[str]] = {}
    settings: dict[str, Parameter] = {}
    for command in root.every():
        for each in command.settings:
            owners.setdefault(str(each.key), []).append(command.name)
            settings.setdefault(str(each.key), each)
    for title in dict.fromkeys(each.section for each in settings.values()):
        yield f".SS {_text(title)}"
        for key, each in settings.items():
            if each.section == title:
                value = _text(each.value or "true|false")
                yield from _entry(f"{_bold(key)} = \\fI{value}\\fR", f"{each.help} ({', '.join(owners[key])})")
    yield from _heading("Examples")
    yield from [".EX", *map(_line, SETTINGS_EXAMPLE.splitlines()), ".EE"]
    yield from _heading("See also")
    yield f".BR {PROGRAM} (1) ,\n.BR {PROGRAM}\\-config (1)"


SETTINGS_TEXT = [
    "A settings file gives options a value where neither the command line nor the environment has one. An option is looked up "
    "in this order: the flag; its environment variable; nanovllm.toml of the project; config.toml of the user; the default.",
    "The project's file is the one in the working folder or the nearest above it, but not beyond the repository (a folder with "
    ".git) that the working folder is in. The user's is in ~/.config/nanovllm, or in $XDG_CONFIG_HOME/nanovllm.",
    "Both are TOML. A table or a key that has no meaning is an error, with the line it is on and the nearest name that has one. "
    "nanovllm config shows every value that is set and where it comes from.",
]
TABLES = {
    "[default]": "For every command that has such an option.",
    "[run], [chat], [bench], ...": "For one command. A command in a group has a table in the group's: [bench.serve].",
    '[models."NAME"]': "For one model, by the name that it is called by or the one an alias leads to. This wins over the "
    "command's table, and that over [default], within a file.",
    "[aliases]": 'Short names of your own: mine = "someone/something-GGUF:Q4_K_M". They win over those that nanovllm knows.',
}
KEYS_TEXT = (
    "Keys are the long flags without their dashes; _ is taken for a dash. A switch is true or false, an option that can be "
    "repeated a list. Options that name files, servers or secrets cannot be set: a file in a project that you look at does not "
    "say what is read or written. In parentheses: the commands that know the key."
)


def _title(name: str, section: int) -> str:
    version = f"{PROGRAM} {__version__}"
    left_and_whole_words = ".nh\n.ad l"
    title = f'.TH {_text(name.upper())} {section} "" "{version}" "{PROGRAM} manual"\n{left_and_whole_words}'
    return f'.\\" Written by scripts/manual.py.\n{title}'


def _heading(title: str) -> list[str]:
    return [f".SH {title.upper()}"]


def _paragraphs(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from [".PP", _line(text)]


def _entry(term: str, text: str) -> list[str]:
    return [".TP", term, _line(text) or "\\&"]


def _flags(parameter: Parameter) -> str:
    names = ", ".join(map(_bold, parameter.flags)) or f"\\fI{_text(parameter.value)}\\fR"
    if parameter.off:
        names += ", " + ", ".join(map(_bold, parameter.off))
    return f"{names} \\fI{_text(parameter.value)}\\fR" if parameter.flags and parameter.value else names


def _reference(command: Page) -> str:
    return f"{'-'.join(command.words)}(1)"


def _lowered(text: str) -> str:
    text = text.removesuffix(".")
    return text[:1].lower() + text[1:]


def _bold(text: str) -> str:
    return f"\\fB{_text(text)}\\fR"


def _line(text: str) -> str:
    """Escaped, wrapped, and with nothing at a line's begin that roff would take for a request."""
    escaped = _text(text)
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in escaped.split("\n"))


_ESCAPES = {"\\": "\\(rs", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti", '"': "\\(dq", "…": "..."}


def _text(text: str) -> str:
    return "".join(_ESCAPES.get(c, c if ord(c) < 128 else f"\\[u{ord(c):04X}]") for c in text)


if __name__ == "__main__":
    main()
