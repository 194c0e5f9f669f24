"""Every hint about a peer's name leads to something that exists here, and says nothing of a name that does."""

from __future__ import annotations

import pytest
import typer
from typer.main import get_command

from nanovllm_cli.cli import habits, peer_options
from nanovllm_cli.cli.command_tree import page
from nanovllm_cli.cli.failures import explanation
from nanovllm_cli.cli.program import PROGRAM, build

PAGES = list(page(get_command(build()), PROGRAM).every())
NAMES = {" ".join(each.words[1:]) for each in PAGES}
FLAGS = {each.name: {flag for param in each.parameters for flag in param.flags} for each in PAGES}
EVERY_FLAG = set().union(*FLAGS.values())


def test_hints_of_options_name_options() -> None:
    assert set(peer_options.OPTIONS) <= EVERY_FLAG
    assert [flag for flag in habits._RENAMED if not flag.startswith("-") or flag == "-"] == []


def test_what_run_chat_and_serve_call_so_themselves_is_no_habit() -> None:
    for command in ("run", "chat", "serve"):
        known = FLAGS[command]
        assert not [flag for flag in known if flag in habits._SENTENCES], command
        assert not [flag for flag in known if flag in habits._RENAMED and habits._RENAMED[flag] in known], command


def test_a_peers_flag_is_never_read_as_one_of_ours_with_a_value() -> None:
    """`-ot x` would write the answer into a file called t, `-mli` would run the model li."""
    command = get_command(build()).commands["run"]  # type: ignore[attr-defined]
    calls = (["tiny", "-ot", "x"], "-ot"), (["-mli"], "-mli"), (["tiny", "-hft", "x"], "-hft"), (["tiny", "-ptc", "4"], "-ptc")
    calls += (["tiny", "-fa=on", "hi"], "-fa"), (["-mmu", "x"], "-mmu"), (["tiny", "-fitt", "1024"], "-fitt")
    calls += (["tiny", "-osrt"], "-osrt"), (["tiny", "-of", "talk"], "-of"), (["tiny", "-tr"], "-tr")
    for words, flag in calls:
        with pytest.raises(typer.TyperException) as refused:
            command.make_context("run", words)
        assert explanation(refused.value).hint == (habits._SENTENCES | habits._SENTENCES_THERE["run"])[flag]


@pytest.mark.parametrize(
    ("command", "words", "hint"),
    [
        ("quantize", ["--to", "q8_0", "-ofreq", "10"], "an interrupted run goes on from where it was: leave it out"),
        ("tokenize", ["-mm", "x", "hi"], "nanovllm run, chat, serve and others have -mm; "),
        ("tokenize", ["-pg", "512,128"], "nanovllm bench has -pg; "),
        ("run", ["-oe", "md", "hi"], "nanovllm bench has -oe; "),
    ],
)
def test_a_flag_of_one_command_is_never_read_as_one_of_another_with_a_value(command: str, words: list[str], hint: str) -> None:
    """`quantize -ofreq 10` would write a model called freq, `tokenize -mm x` would read one called m."""
    root = get_command(build())
    with pytest.raises(typer.TyperException) as refused, root.make_context(PROGRAM, [command, "tiny", *words]) as ctx:
        root.invoke(ctx)
    assert (explanation(refused.value).hint or "").startswith(hint)


@pytest.mark.parametrize("value", ["de", "auto"])
def test_a_language_as_whisper_cpp_takes_it_is_no_bias(value: str) -> None:
    command = get_command(build()).commands["run"]  # type: ignore[attr-defined]
    with pytest.raises(typer.TyperException) as refused:
        command.make_context("run", ["tiny", "-l", value])
    assert f"a language is --language {value}" in refused.value.message


def test_hints_of_commands_name_commands() -> None:
    assert set(habits._COMMANDS.values()) <= NAMES
    assert set(habits._EXTRA_WORDS) <= NAMES
    assert not ({*habits._COMMANDS} | {*habits._NO_COMMANDS}) & NAMES
    assert habits.command_hint("llama-cli", NAMES) == "here it is nanovllm run"
    assert habits.command_hint("llama-quantize", NAMES) == "here it is nanovllm quantize"
    assert habits.command_hint("llama-tokenize", NAMES) == "here it is nanovllm tokenize"
    assert habits.command_hint("llama-perplexity", NAMES) == "here it is nanovllm perplexity"
    assert habits.command_hint("llama-nosuch", NAMES) is None
    of_ollama = ("run", "pull", "list", "ls", "show", "ps", "stop", "rm", "cp", "create", "push", "signin", "signout", "help",
                 "launch")  # fmt: skip
    assert [each for each in of_ollama if each not in NAMES and habits.command_hint(each, NAMES) is None] == []
    windows = "how a window of -c tokens is read is decided here: leave it out"
    assert habits.option_hint("-b", FLAGS["perplexity"], "perplexity") == windows
    assert str(habits.option_hint("--mcp-servers-config", FLAGS["serve"], "serve")).startswith("run and chat --mcp FILE")
    assert habits.command_hint("version") == "here it is nanovllm --version"


def test_programs_are_known_by_all_their_names() -> None:
    assert habits.command_hint("convert_hf_to_gguf.py", NAMES) == "here it is nanovllm convert"
    assert habits.command_hint("gguf_dump", NAMES) == "here it is nanovllm models show"
    assert habits.command_hint("llama-completion", NAMES) == "here it is nanovllm run MODEL --raw", "not a shell's completions"
    assert habits.command_hint("main", NAMES) == "here it is nanovllm run", "as llama-cli was called"
    assert habits.command_hint("llama-fit-params", NAMES) == "here it is nanovllm plan"
    for theirs, ours in (("gemma3-cli", "mtmd-cli"), ("lookahead", "lookup"), ("speculative-simple", "speculative")):
        assert habits.command_hint(f"llama-{theirs}", NAMES) == habits.command_hint(f"llama-{ours}", NAMES) is not None
    assert habits.command_hint("llama-tts", NAMES) == "no speech is made here; models that hear take --audio FILE"
    assert habits.subcommand_hint("models", "remove") == "here it is nanovllm models rm"
    assert habits.subcommand_hint("models", "server") is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--temprature", ["--temp"]), ("-temp", ["--temp"]), ("--top_k", ["--top-k"]), ("-prompt", ["--prompt"]),
        ("--context-size", ["--ctx-size"]), ("--api-keys", ["--api-key"]), ("--reasoning-parse", ["--reasoning-parser"]),
        ("--path", []), ("--rpcs", []), ("-lcx", []), ("--load-mod", []),
    ],
)  # fmt: skip
def test_only_what_is_spelt_much_alike_is_a_slip(typed: str, meant: list[str]) -> None:
    assert habits.near_flags(typed, FLAGS["run"] | FLAGS["serve"])[: len(meant) or None] == meant


def test_what_one_command_is_asked_for_is_answered_there_alone() -> None:
    for command, sentences in habits._SENTENCES_THERE.items():
        assert command in NAMES or command.replace(".", " ") in NAMES
        assert not FLAGS[command] & set(sentences), command
    assert habits.option_hint("--host", {"--url"}, "bench.serve") == "here it is --url http://HOST:PORT"
    assert habits.option_hint("--host", {"--url"}, "run") is None
    assert habits.option_hint("--temperature", {"--temp"}, "serve") == "here it is --temp"


def test_a_flag_that_this_command_has_no_word_for_gets_no_hint() -> None:
    assert habits.option_hint("--temperature", {"--temp"}) == "here it is --temp"
    assert habits.option_hint("--temperature", {"--to"}) is None
    assert habits.option_hint("--nosuch", {"--temp"}) is None
    told = habits.option_hint("--reasoning-format", FLAGS["run"], "run")
    assert told is not None
    assert "--think" not in told, "none and deepseek are no values of it"
    assert habits.option_hint("--max_tokens", {"--predict"}) == "here it is --predict", "as fields of requests are written"


def test_a_peers_flag_stands_in_one_place() -> None:
    names = [name for names in (*peer_options.OPTIONS.values(), *peer_options.EXPLAINED) for name in names]
    assert sorted(name for name in set(names) if names.count(name) > 1 and name != "--warmup") == []


@pytest.mark.parametrize(
    ("command", "flag", "hint"),
    [
        ("tokenize", "--temperature", "nanovllm run, chat, serve and others have --temp; nanovllm tokenize --help lists"),
        ("perplexity", "--typical-p", "nanovllm run, chat, serve and others have --typical; "),
        ("plan", "--no-mmproj", "nanovllm run, chat, serve and others have --no-mmproj; "),
        ("quantize", "--in-file", "here it is --calibration FILE"),
        ("control-vector", "--pca-iter", "a principal component is computed whole"),
        ("serve", "--shutdown-timeout", "here it is --drain-timeout"),
        ("run", "--trust_remote_code", "no code that comes with a model is ever run: leave it out"),
    ],
)
def test_a_peers_flag_is_answered_also_where_another_command_has_it(command: str, flag: str, hint: str) -> None:
    root = get_command(build())
    with pytest.raises(typer.TyperException) as refused, root.make_context(PROGRAM, [command, "tiny", flag]) as ctx:
        root.invoke(ctx)
    assert (explanation(refused.value).hint or "").startswith(hint)
