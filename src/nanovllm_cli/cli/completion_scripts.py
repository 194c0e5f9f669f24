"""Completion for bash, zsh and fish as scripts: commands, options and their choices stand in them, so that only names of models
and sessions need the program (`complete.py`).

Each `*_script` takes the whole command line as `command_tree.page` gives it. What is the same for every command line is in
`completion_shells/`; here is what the tree adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nanovllm_cli.cli.command_tree import Page, Parameter
from nanovllm_cli.cli.completion_words import Values, values

SHELLS = ("bash", "zsh", "fish")
_FOLDER = Path(__file__).parent / "completion_shells"


def script(shell: str, root: Page) -> str:
    """The script for one of SHELLS."""
    parts = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](root)
    template = (_FOLDER / f"nanovllm.{shell}").read_text("utf-8")
    return template.replace("# [the commands]\n", "".join(f"{line}\n" for line in parts))


# ---- bash: functions that are asked for the command at hand ----


def _bash(root: Page) -> Iterator[str]:
    yield from ["_nanovllm_commands() {", '    case "$1" in']
    for each in _groups(root):
        yield f"        {_quoted(_path(each))}) commands={_quoted(' '.join(inner.words[-1] for inner in each.commands))} ;;"
    yield from ["    esac", "}", ""]
    yield from ["_nanovllm_options() {", '    case "$1" in']
    for each in root.every():
        flags = [flag for option in each.options for flag in (*option.flags, *option.off)]
        yield f"        {_quoted(_path(each))}) options={_quoted(' '.join(flags))} ;;"
    yield from ["    esac", "}", ""]
    yield from ["_nanovllm_value() {", '    case "$1 $2" in']
    for each in root.every():
        for found, options in _by_values(root, each).items():
            patterns = " | ".join(_quoted(f"{_path(each)} {flag}") for option in options for flag in option.flags)
            yield f"        {patterns}) {_bash_action(found)} ;;"
    yield from ["        *) return 1 ;;", "    esac", "}", ""]
    yield from ["_nanovllm_argument() {", '    case "$1 $2" in']
    for each in root.every():
        for number, argument in enumerate(each.arguments):
            found = values(root, each, argument)
            if found.kind != "nothing":
                yield f"        {_quoted(f'{_path(each)} ')}{'[0-9]*' if argument.repeats else number}) {_bash_action(found)} ;;"
    yield from ["    esac", "}"]


def _bash_action(found: Values) -> str:
    """A function and its words, which the script runs when it has looked up all that it needs."""
    words = " ".join(found.words)
    function = {
        "nothing": ":", "words": "_nanovllm_offer", "files": "_nanovllm_files", "folders": "_nanovllm_folders",
        "models": "_nanovllm_models",
    }.get(found.kind, f"_nanovllm_ask {found.kind}")  # fmt: skip
    return f"action={_quoted(f'{function} {words}'.strip())}"


# ---- zsh: a function for each command, which hands everything to _arguments ----


def _zsh(root: Page) -> Iterator[str]:
    for each in _groups(root):
        yield from [f"_nanovllm_commands{_suffix(each)}() {{", "    local -a commands=("]
        for inner in each.commands:
            yield f"        {_quoted(inner.words[-1] + ':' + _short(inner.summary))}"
        yield from ["    )", "    _describe command commands", "}", ""]
    for each in root.every():
        specs = [spec for option in each.options for spec in _zsh_option(root, each, option)]
        arguments = [
            _zsh_argument(number, argument, found)
            for number, argument in enumerate(each.arguments, 1)
            if (found := values(root, each, argument)).kind != "nothing"  # its message would stand in the way of the options
        ]
        if each.commands:
            first = f"_nanovllm_commands{_suffix(each)}"
            if arguments:
                first = "{ " + f"{first}; {_zsh_action(values(root, each, each.arguments[0]))}" + " }"
            arguments = [f"1:command:{first}", *arguments[1:]]
        lines = [f"        {_quoted(spec)}" for spec in (*specs, *arguments)]
        yield from [f"_nanovllm-{'-'.join(each.words[1:])}() {{", "    _arguments : \\", " \\\n".join(lines), "}", ""]


def _zsh_option(root: Page, command: Page, option: Parameter) -> Iterator[str]:
    names = (*option.flags, *option.off)
    words = option.value.split()  # of most that take one, it is one
    many = (option.repeats and len(words) == 1) or option.name == "verbose"
    before = "*" if many else f"({' '.join(names)})" if len(names) > 1 else ""
    text = _zsh_escaped(_short(option.help))
    for name in names:
        if not option.value:
            yield f"{before}{name}[{text}]"
        else:
            joined = "=" if name.startswith("--") else ""
            action = _zsh_action(values(root, command, option))
            yield f"{before}{name}{joined}[{text}]" + "".join(f":{_zsh_escaped(word)}:{action}" for word in words)


def _zsh_argument(number: int, argument: Parameter, found: Values) -> str:
    return f"{'*' if argument.repeats else number}:{argument.value}:{_zsh_action(found)}"


def _zsh_action(found: Values) -> str:
    words = "_nanovllm_offer " + " ".join(word.replace(":", "\\:") for word in found.words)
    if found.words and found.kind == "files":
        return "{ " + words + "; _files }"
    return {
        "nothing": " ", "words": words, "files": "_files", "folders": "_files -/", "models": "_nanovllm_models",
    }.get(found.kind, f"_nanovllm_ask {found.kind}")  # fmt: skip


def _zsh_escaped(text: str) -> str:
    for character in "\\[]:":
        text = text.replace(character, "\\" + character)
    return text


# ---- fish: a line for each option, with the condition that its command is the one at hand ----


def _fish(root: Page) -> Iterator[str]:
    inner = [each for each in root.every() if each is not root]
    yield f"set -g __nanovllm_commands {' '.join(_quoted(_path(each).partition(' ')[2]) for each in inner)}"
    taking = {flag: None for each in root.every() for option in each.options if option.value for flag in option.flags}
    yield f"set -g __nanovllm_taking {' '.join(taking)}"
    yield ""
    for each in root.every():
        path = _quoted(_path(each).partition(" ")[2])
        for command in each.commands:
            condition = _quoted(f"__nanovllm_argument {path} 0")
            yield f"complete -c nanovllm -n {condition} -a {command.words[-1]} -d {_quoted(_short(command.summary))}"
        for number, argument in enumerate(each.arguments):
            number_or_more = f"{number} more" if argument.repeats else str(number)
            for action in _fish_actions(values(root, each, argument)):
                condition = _quoted(f"__nanovllm_argument {path} {number_or_more}")
                yield f"complete -c nanovllm -n {condition} {action.replace('-x ', '').replace('-r ', '')}"
        for option in each.options:
            condition = _quoted(f"__nanovllm_at {path}")
            flags = " ".join(map(_fish_flag, (*option.flags, *option.off)))
            value = " ".join(_fish_actions(values(root, each, option)) or ["-x"]) if option.value else ""
            description = _quoted(_short(option.help))
            yield " ".join(filter(None, ["complete -c nanovllm -n", condition, flags, value, "-d", description]))


def _fish_flag(flag: str) -> str:
    kind = "-l" if flag.startswith("--") else "-s" if len(flag) == 2 else "-o"
    return f"{kind} {flag.lstrip('-')}"


def _fish_actions(found: Values) -> list[str]:
    words = [f"-a {_quoted(' '.join(found.words))}"] if found.words else []
    return {
        "nothing": [], "words": ["-x", *words], "files": ["-r -F", *words],
        "folders": ["-x -a '(__fish_complete_directories)'"],
        "models": ["-x -a '(__nanovllm_ask models; __fish_complete_suffix .gguf)'"],
    }.get(found.kind, [f"-x -a '(__nanovllm_ask {found.kind})'"])  # fmt: skip


# ---- what they share ----


def _path(command: Page) -> str:
    return " ".join(command.words)


def _suffix(command: Page) -> str:
    return "".join(f"_{word}" for word in command.words[1:])


def _groups(root: Page) -> list[Page]:
    return [each for each in root.every() if each.commands]


def _by_values(root: Page, command: Page) -> dict[Values, list[Parameter]]:
    """The options that take a value, by what can be completed for them."""
    found: dict[Values, list[Parameter]] = {}
    for option in command.options:
        if option.value:
            found.setdefault(values(root, command, option), []).append(option)
    return found


def _short(text: str) -> str:
    """The first sentence, or part of one: there is one line in a list."""
    return text.split(". ")[0].split("; ")[0].split(" [")[0].rstrip(".:")


def _quoted(text: str) -> str:
    """As one word of bash, zsh and fish alike."""
    return "'" + text.replace("'", "'\\''") + "'"
