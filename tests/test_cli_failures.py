"""What goes wrong, and how it is said: the exit code, one line of what, one of what to do, never a traceback."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import test_cli_driver
from nanovllm_cli.cli.failures import explanation
from nanovllm_cli.errors import UsageError
from nanovllm_cli.processors import check_thread_limit
from test_cli_driver import Result, environment, nanovllm

DRIVER = [sys.executable, test_cli_driver.__file__]


def failure(result: Result) -> str:
    """The message, after checking that stderr ends as it should and that stdout is clean."""
    lines = result.err.splitlines()
    assert 1 <= len([line for line in lines if line.startswith(("error: ", "hint: "))]) <= 2
    if lines[-1].startswith("hint: "):
        assert len(lines[-1]) > len("hint: ")
        lines.pop()
    assert lines[-1].startswith("error: ")
    return result.err[result.err.index("error: ") :]


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("missing", 3, "no model named missing\nhint: did you mean tiny?"),
        ("gated", 4, "org/gated is gated\nhint: accept its license"),
        ("huge", 5, "needs 900 GiB, 8 GiB free\nhint: try --ctx-size"),
        ("memory", 5, "out of memory"),
        ("odd", 6, "unknown architecture 'Odd'; known: Even"),
        ("bug", 1, "internal error: KeyError: 'a fault\\nof ours \\x1b[31m'\nhint: run it again with --debug"),
    ],
)
def test_exit_codes(tmp_path: Path, model: str, code: int, message: str) -> None:
    result = nanovllm(tmp_path, "run", model, "hello")
    assert (result.code, result.out) == (code, "")
    assert failure(result).startswith(f"error: {message}")


def test_not_here_while_offline(tmp_path: Path) -> None:
    assert nanovllm(tmp_path, "run", "--offline", "remote", "hello").code == 3
    assert nanovllm(tmp_path, "run", "remote", "hello", NANOVLLM_OFFLINE="1").code == 3


BAD_USAGE = {
    "run": "no model was named",
    "run tiny": "there is no prompt",
    "run tiny ''": "there is no prompt",
    "run -m tiny": "there is no prompt\nhint: ",
    "run 'Once upon a time'": "there is no prompt: 'Once upon a time' is taken for the model\nhint: for example: nanovllm",
    "run tiny hi --tempp 1": "no such option: --tempp\nhint: did you mean --temp",
    "run tiny hi -ot exps=CPU": "no such option: -ot\nhint: --n-gpu-layers and --n-cpu-moe say what a GPU reads",
    "run tiny hi -ngl most": "invalid value for '-ngl' / '--n-gpu-layers' / '--gpu-layers': 'most' is not a number of layers",
    "run tiny hi -ncmoe -1": "--n-cpu-moe must be at least 0, not -1",
    "run tiny hi --temperature 0": "no such option: --temperature\nhint: here it is --temp",
    "run tiny hi --max-tokens=5": "no such option: --max-tokens\nhint: here it is --predict",
    "run tiny hi -fa": "no such option: -fa\nhint: that is always so",
    "run -m tiny -ngl 99 -nkvo -fa on --jinja --temp 0 --mmap -p --mlock": "no such options: -nkvo, -fa, --jinja and --mmap\n"
    "hint: -nkvo: the KV cache is on the device that computes: --device auto, cpu, cuda or cuda:N; "
    "-fa, --jinja and --mmap: that is always so: leave it out\n",
    "run tiny hi --max_tokens 3 -- -ot": "no such option: --max_tokens\nhint: here it is --predict",
    "run -hf org/repo hi": "no such option: -hf\nhint: a hub's model is named like any other",
    "run tiny -cnv": "no such option: -cnv\nhint: nanovllm chat MODEL is the conversation",
    "convert tiny --temperature 0": "no such option: --temperature\nhint: nanovllm run, chat, serve and others have --temp; nano",
    "run tiny hi --grammars x": "no such option: --grammars",
    "run tiny hi --grammar x": "the grammar can't be used",
    "run tiny -5": "no such option: -5\nhint: put -- before a prompt that begins with a dash",
    "run tiny -hello": "no such option: -hello\nhint: put -- before a prompt that begins with a dash",
    "tokenize tiny -5": "no such option: -5\nhint: put -- before a prompt that begins with a dash",
    "plan tiny -hello": "no such option: -hello\nhint: nanovllm plan --help lists the options",
    "bench tiny -5": "no such option: -5\nhint: nanovllm bench --help lists the options",
    "models list '--what is this?'": "no such option: --what is this?\nhint: nanovllm models list --help lists the options",
    "chat tiny --json": "no such option: --json\nhint: nanovllm run, embed, classify and others have --json; did you",
    "chat tiny -N 2": "no such option: -N\nhint: nanovllm run, serve and run-batch have -N; nanovllm chat --help lists",
    "bench tiny --host x": "no such option: --host\nhint: nanovllm serve has --host; nanovllm bench --help lists",
    "embed tiny -p hi": "no such option: -p\nhint: each argument behind the model is a text",
    "bench serve --temperature 1": "no such option: --temperature\nhint: --extra-body",
    "serve tiny --grammar x": "no such option: --grammar\nhint: a request says what form its answer has",
    "tiny hi": "no such command 'tiny'\nhint: a model and what it is asked stand behind a command: nanovllm run MODEL PROMPT",
    "qwen3:8b": "no such command 'qwen3:8b'\nhint: a model and what it is asked stand behind a command",
    "'Once upon a time'": "no such command 'Once upon a time'\nhint: a model and what it is asked stand behind a command",
    "nosuch hi": "no such command 'nosuch'\nhint: commands: bench, chat",
    "run tiny '--what is this?'": "no such option: --what is this?\nhint: put -- before a prompt that begins with a dash",
    "run tiny hi --top_k 5": "no such option: --top_k\nhint: did you mean --top-k?",
    "run tiny hi --path x": "no such option: --path\nhint: ",
    "-V": "no such option: -V\nhint: here it is --version",
    "models remove x": "no such command 'remove'\nhint: here it is nanovllm models rm",
    "run tiny hi -l 5-inf": "invalid value for '-l' / '--logit-bias': '5-inf' is not a token id with a bias, such as 15043+1 or "
    "15043-1.5; -100 all but forbids",
    "run tiny hi --temp": "option '--temp' requires an argument",
    "run tiny hi --temp=": "invalid value for '--temp': '' is not a number",
    "run tiny hi --temp warm": "invalid value for '--temp'",
    "run tiny hi --temp nan": "--temp must be a number from 0 to 100",
    "run tiny hi --temp=-1": "--temp must be a number from 0 to 100",
    "run tiny hi --top-p 1.5": "--top-p must be a number from 0 to 1",
    "run tiny hi --top-k 1.5": "invalid value for '--top-k'",
    "run tiny hi -n 1e3": "invalid value for '-n'",
    "run tiny hi -n=many": "invalid value for '-n' / '--predict' / '--n-predict': 'many' is not a whole number",
    "run tiny hi -n= --temp 0": "-n= has no value\nhint: -n takes one",
    "run tiny hi -q=1": "-q takes no value\nhint: write -q",
    "run tiny hi -n 99999999999999999999": "--predict must be",
    "run tiny hi -s -2": "--seed must be",
    "run tiny hi -N 0": "--num-answers must be a whole number",
    "run tiny hi -N 1000000": "--num-answers must be a whole number",
    "run tiny hi --min-tokens 5 -n 3": "--min-tokens (5) must not be above --predict (3)",
    "run tiny hi -l 5": "invalid value for '-l' / '--logit-bias': '5' is not a token id with a bias",
    "run tiny hi -l 5+101": "--logit-bias[5] must be a number from -100 to 100",
    "run tiny hi --stop ''": "--stop must be strings of 1 to 1024 characters",
    "run tiny hi --logprobs 5": "--logprobs has no place in plain text",
    "run tiny hi --logprobs 101 --json": "--logprobs must be",
    "run tiny hi -c lots": "invalid value for '-c' / '--ctx-size': 'lots' is not a number of tokens",
    "run tiny hi --kv-cache 2X": "invalid value for '--kv-cache': '2X' is not a size such as 512M",
    "run tiny hi -ctk q4_0": "invalid value for '-ctk' / '--cache-type-k': 'q4_0' is not a KV cache type: auto, float32,",
    "run tiny hi -t 0": "--threads must be at least 1",
    "run tiny hi --dtype int3": "invalid value for '--dtype'",
    "run tiny hi --dtype fp16": "invalid value for '--dtype': 'fp16' is not one of 'auto', 'float32', 'bfloat16', 'float16'\n"
    "hint: did you mean float16?",
    "chat tiny --think true": "invalid value for '--think': 'true' is not one of 'on', 'off'\nhint: did you mean on?",
    "run tiny hi --reasoning shwo": "invalid value for '--reasoning': 'shwo' is not one of 'show', 'hide', 'auto'\nhint: did you",
    "run tiny hi --device CUDA1": "invalid value for '--device': 'CUDA1' is not a device: auto, cpu, cuda, cuda:N; did you mean",
    "run tiny hi --reasoning off": "invalid value for '--reasoning': 'off' is not one of 'show', 'hide', 'auto'\n"
    "hint: here it is --think off; --reasoning hide leaves out what the model thinks",
    "run tiny hi --reasoning maybe": "invalid value for '--reasoning'",
    "run tiny hi --think maybe": "invalid value for '--think'",
    "run tiny hi --think on": "--think has no meaning: the template of tiny has no such switch",
    "run tiny hi --raw -sys x": "--system-prompt has no meaning: --raw leaves the chat template out",
    "run tiny hi --raw --chat-template chatml": "--chat-template has no meaning: --raw leaves the chat template out",
    "run tiny hi -n many": "invalid value for '-n' / '--predict' / '--n-predict': 'many' is not a whole number",
    "run tiny hi --choice": "option '--choice' requires an argument\nhint: nanovllm run --help",
    "serve tiny --swap-timeout 5": "--swap-timeout has no meaning without --max-models",
    "serve tiny --ssl-key-password-file x": "--ssl-key-password-file has no meaning without --ssl-key-file",
    "serve tiny --unix-socket x.sock --port 8080": "--port has no meaning with --unix-socket",
    "quantize tiny --to int8 --no-verify --verify-tokens 5": "--verify-tokens is given, and --no-verify leaves",
    "-m tiny hi": "-m stands before any command\nhint: the command comes first: nanovllm run -m …",
    "--verson": "no such option: --verson\nhint: did you mean --version?",
    "-hf org/repo": "-hf stands before any command",
    "--temp=1 tiny": "--temp stands before any command",
    "run tiny -p a -p b": "-p was given twice\nhint: make one text of them; --batch FILE answers several",
    "chat tiny --prompt=a -p b": "--prompt was given twice\nhint: make one text of them\n",
    "run tiny hi --choice ''": "--choice is empty\nhint: leave it out for an answer of any form",
    "run tiny hi --regex ''": "--regex is empty\n",
    "run tiny hi --json-schema ''": "--json-schema is empty\n",
    "run tiny hi -jf /dev/null": "--json-schema-file is empty\n",
    "run tiny hi --grammar ' '": "--grammar is empty\n",
    "run tiny hi --no-warmup": "no such option: --no-warmup\nhint: nothing is run beforehand: leave it out",
    "bench tiny -mmp 0": "no such option: -mmp\nhint: weights are mapped while they load",
    "run tiny hi -n 0": "--predict must be a whole number from 1 on, -1 or -2, not 0\nhint: -1 and -2: no limit but",
    "run tiny hi -b 0": "--batch-size must be at least 1, not 0",
    "serve tiny --top-p 5": "--top-p must be a number from 0 to 1, not 5.0",
    "plan tiny -np 0": "--max-num-seqs must be at least 1, not 0",
    "serve tiny --unix-socket x.sock --allowed-host a.example": "--allowed-host has no meaning with --unix-socket",
    "serve tiny --max-models 1 --swap-timeout 5": "--swap-timeout has no meaning: --max-models 1 has room for all of them",
    "serve -q tiny --access-log": "--access-log has no meaning with --quiet",
    "run -q -v tiny hi": "-q and -v cannot be used together\nhint: with --log-file, -v is for the file",
    "run tiny hi --think on --chat-template-kwargs '{\"enable_thinking\":false}'": "--think and the enable_thinking of --chat-",
    "chat tiny --think on --chat-template-kwargs '{\"thinking\":false}'": "--think and the thinking of --chat-",
    "chat --list-sessions tiny": "MODEL has no meaning with --list-sessions",
    "chat --list-sessions --temp 0": "--temp has no meaning with --list-sessions",
    "chat --delete-session x --continue": "--continue has no meaning with --delete-session",
    "bench serve --burstiness 2": "--burstiness has no meaning where all requests are sent at once\nhint: give --req",
    "bench serve --dataset-path x --seed 1": "--seed has no meaning for --dataset file",
    "bench throughput tiny --dataset-path x --seed 1": "--seed has no meaning for --dataset file",
    "plan tiny --check --roofline cached": "--roofline cached has no meaning with --check",
    "models show tiny --template --json": "--template and --json cannot be used together",
    "verify tiny --dtype-b float32": "--dtype-b has no meaning without OTHER",
    "run base hi -sys x": "--system-prompt has no meaning: base has no chat template",
    "run tiny hi --chat-template nosuch": "",
    f"run tiny hi --chat-template {300 * 'a'}": "unknown chat template",
    "run tiny hi --chat-template /dev/null": "/dev/null is no chat template",
    "run tiny hi --chat-template ./nosuch.jinja": "there is no file ./nosuch.jinja",
    "run tiny hi --chat-template-kwargs {": "--chat-template-kwargs is not JSON",
    "run tiny hi --chat-template-kwargs [1]": "--chat-template-kwargs is not a JSON object",
    "run tiny hi --json --jsonl": "--json and --jsonl cannot be used together",
    "run tiny hi --json -x": "--json and --extract cannot be used together",
    "run tiny --batch x.jsonl --json": "--json and --batch cannot be used together",
    "run tiny hi --batch x.jsonl": "--batch has its prompts in its file",
    "run tiny --batch x.jsonl --continue": "--batch and --continue cannot be used together",
    "run tiny --batch nosuch.jsonl": "there is no file nosuch.jsonl",
    "run tiny hi --overwrite": "--overwrite has no meaning without --batch",
    "run tiny --continue more": "there is no run to continue",
    "run tiny -f nosuch.txt": "there is no file nosuch.txt",
    "run tiny -f .": ". is a folder",
    "run tiny -o '' hi": "-o needs the name of a file",
    "rum tiny hi": "no such command 'rum'\nhint: did you mean run?",
    "pull qwen3": "no such command 'pull'\nhint: here it is nanovllm models pull",
    "models rm tiny": "tiny comes with the package, and stays",
    "completion": "missing argument 'SHELL': bash, zsh, fish",
    "ppl tiny": "no such command 'ppl'\nhint: here it is nanovllm perplexity",
    "detokenize tiny 1": "no such command 'detokenize'\nhint: here it is nanovllm tokenize MODEL --decode",
    "run tiny hi --verbose-prompt": "no such option: --verbose-prompt\nhint: nanovllm tokenize MODEL --chat",
    "perplexity a b c": "got unexpected extra argument(s) (c)\nhint: here it is nanovllm perplexity MODEL OTHER",
    "perplexity tiny --kl-divergence": "no such option: --kl-divergence\nhint: nanovllm perplexity MODEL OTHER",
    "tokenize tiny --show-count x": "no such option: --show-count\nhint: here it is --count",
    "ps": "no such command 'ps'\nhint: nothing stays in memory",
    "quantize in.gguf out q4_k": "got unexpected extra argument(s) (out q4_k)\nhint: here it is nanovllm quantize MODEL",
    "--nosuch": "no such option: --nosuch",
    "": "missing command",
}


@pytest.mark.parametrize("line", BAD_USAGE)
def test_bad_usage_is_refused_in_words(tmp_path: Path, line: str) -> None:
    result = nanovllm(tmp_path, *shlex.split(line))
    assert (result.code, result.out) == (2, "")
    assert failure(result).startswith(f"error: {BAD_USAGE[line]}")


def test_a_share_of_memory_that_is_none(tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "run", "tiny", "hi", "--gpu-memory-utilization", "1.5")
    assert result.code == 2
    assert "--gpu-memory-utilization must be above 0 and at most 1" in failure(result)


def test_what_is_no_text_is_told_from_text_in_another_encoding(tmp_path: Path) -> None:
    binary = nanovllm(tmp_path, "run", "tiny", stdin=b"\x7fELF\x00\xff")
    assert (binary.code, failure(binary).splitlines()[1]) == (2, "hint: it holds zero bytes: it is no text")
    latin = nanovllm(tmp_path, "run", "tiny", stdin="gr\u00fcn".encode("latin-1"))
    assert failure(latin).splitlines()[1].startswith("hint: if it is ISO-8859-1")


def test_an_option_that_was_given_twice_is_warned_of_and_its_last_value_counts(tmp_path: Path) -> None:
    """An alias may have the first; a list takes both, and the same value again changes nothing."""
    twice = ["-n", "5", "--predict=6", "--top-k", "1", "--top-k", "2", "--stop", "a", "--stop", "b"]
    same = ["--temp", "1", "--temp", "1", "-v", "-v", "-p", "params", "-p", "params", "--no-stats", "--stats", "--no-stats"]
    told = nanovllm(tmp_path, "run", "tiny", *twice, *same)
    assert [line for line in told.err.splitlines() if line.startswith("warning")] == [
        "warning: -n was given twice: the last one counts", "warning: --top-k was given twice: the last one counts",
    ]  # fmt: skip
    quiet = nanovllm(tmp_path, "run", "tiny", "-q", *twice, "--predict", "999", "params")
    assert (quiet.code, quiet.err) == (0, "")
    assert "top_k=2" in quiet.out
    assert "max_tokens=999" in quiet.out


def test_the_source_of_a_bad_value_is_named(tmp_path: Path) -> None:
    odd = nanovllm(tmp_path, "run", "tiny", "hi", NANOVLLM_JSON="maybe")
    assert failure(odd).splitlines() == [
        "error: invalid value for '--json': 'maybe' is neither on nor off: write 1 or 0",
        "hint: the value comes from the environment variable NANOVLLM_JSON",
    ]
    result = nanovllm(tmp_path, "run", "tiny", "hi", NANOVLLM_TEMP="warm")
    assert result.code == 2
    assert "hint: the value comes from the environment variable NANOVLLM_TEMP" in failure(result)
    (tmp_path / "nanovllm.toml").write_text("[default]\ntop-k = 'many'\n")
    result = nanovllm(tmp_path, "run", "tiny", "hi")
    assert result.code == 2
    assert f"hint: the value comes from {tmp_path / 'nanovllm.toml'}:2" in failure(result)
    (tmp_path / "nanovllm.toml").write_text("[default]\ntopk = 5\n")
    assert "'topk' is no setting" in failure(nanovllm(tmp_path, "run", "tiny", "hi"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ctx-size = ['32K']", "--ctx-size takes one value, not a list"),
        ("regex = ['a', 'b']", "--regex takes one value, not a list"),  # and not the text that Python has for it
        ("ignore-eos = [true]", "--ignore-eos takes one value, not a list"),
        ("stop = [['a'], ['b']]", "--stop takes values, not lists of them"),
        ("stop = [{a = 1}]", "--stop takes values, not lists of them"),
        ("control-vector-layer-range = 3", "invalid value for '--control-vector-layer-range': 2 values are required"),
        ("temp = true", "invalid value for '--temp': 'true' is not a number"),
        ("n-predict = false", "invalid value for '-n' / '--predict' / '--n-predict': 'false' is not a whole number"),
    ],
)
def test_a_value_of_another_kind_in_a_file_is_refused_at_its_place(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "nanovllm.toml").write_text(f"[run]\n{line}\n")
    result = nanovllm(tmp_path, "run", "tiny", "hi")
    error, hint = failure(result).splitlines()
    assert error.startswith(f"error: {says}")
    assert (result.code, hint) == (2, f"hint: the value comes from {tmp_path / 'nanovllm.toml'}:2")


def test_a_value_of_another_kind_in_a_file_is_no_matter_beside_one_that_was_typed(tmp_path: Path) -> None:
    (tmp_path / "nanovllm.toml").write_text("[default]\nbatch-size = [64, 512]\n")  # for bench
    assert nanovllm(tmp_path, "run", "tiny", "hi").code == 2
    assert nanovllm(tmp_path, "run", "tiny", "hi", "-b", "64").code == 0


@pytest.mark.parametrize("name", ["typer", "nanovllm_cli.errors"])
def test_an_installation_that_lacks_something_says_so(name: str) -> None:
    code = f"import sys; from nanovllm_cli.cli.app import main; sys.modules[{name!r}] = None; main(['--version'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert name in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("line", ["cors-origin = ['*']", "allowed-host = ['*']", "api-key = ['aaaaaaaa']", "mmproj = 'a'"])
def test_a_folder_does_not_say_who_gets_in_or_what_is_read(line: str, tmp_path: Path) -> None:
    """Where somebody starts a server in a project of others, pages of others must not be let into it."""
    (tmp_path / "nanovllm.toml").write_text(f"[serve]\n{line}\n")
    assert "is no setting in [serve]" in failure(nanovllm(tmp_path, "serve", "tiny", "--port", "0"))


def test_the_source_of_a_value_that_is_out_of_bounds_or_contradicts_is_named(tmp_path: Path) -> None:
    """One that is a number, as its option has it: it is refused only when it is put to use."""
    file = tmp_path / "nanovllm.toml"
    file.write_text("[default]\ntemp = -1\njson = true\n")
    assert failure(nanovllm(tmp_path, "run", "tiny", "hi")).splitlines() == [
        "error: --temp must be a number from 0 to 100, not -1.0", f"hint: the value comes from {file}:2",
    ]  # fmt: skip
    assert failure(nanovllm(tmp_path, "run", "tiny", "hi", "--temp", "0", "--jsonl")).splitlines() == [
        "error: --json and --jsonl cannot be used together", f"hint: --json comes from {file}:3",
    ]  # fmt: skip
    file.write_text("[default]\nctx-size = '1K'\n")
    typed = failure(nanovllm(tmp_path, "run", "tiny", "hi", "--temp=-2"))
    assert typed == "error: --temp must be a number from 0 to 100, not -2.0\n"
    set_twice = failure(nanovllm(tmp_path, "run", "tiny", "hi", "--temp=1", NANOVLLM_MIN_TOKENS="5", NANOVLLM_PREDICT="3"))
    assert set_twice.splitlines() == [
        "error: --min-tokens (5) must not be above --predict (3)",
        "hint: --predict comes from the environment variable NANOVLLM_PREDICT; "
        "--min-tokens comes from the environment variable NANOVLLM_MIN_TOKENS",
    ]


def test_the_source_of_a_value_that_an_error_speaks_of_is_named(tmp_path: Path) -> None:
    """Without its option's name, or with that in the hint alone."""
    file = tmp_path / "nanovllm.toml"
    file.write_text("[default]\nmodel = 'missing'\ntop-k = 100\n")
    assert failure(nanovllm(tmp_path, "run", "hi")).endswith(f"; --model comes from {file}:2\n")
    assert "comes from" not in failure(nanovllm(tmp_path, "run", "hi", "-m", "gated"))
    file.write_text("[default]\ntop-k = 100\nctx-size = 900\n")
    assert failure(nanovllm(tmp_path, "run", "huge", "hi")).endswith(f"hint: try --ctx-size; the value comes from {file}:3\n")


def test_a_fault_of_a_library_that_the_environment_made_another_names_the_variable(tmp_path: Path) -> None:
    odd = failure(nanovllm(tmp_path, "run", "bug", "x", NUMBA_DISABLE_JIT="1", NUMBA_NUM_THREADS="2"))
    assert "hint: try without NUMBA_DISABLE_JIT in the environment; else run it again with --debug" in odd


@pytest.mark.parametrize("value", ["0", "-1", "abc", "1.5", " ", "99999999999999999999"])
def test_a_number_of_threads_that_is_none(value: str) -> None:
    with pytest.raises(UsageError, match=f"NUMBA_NUM_THREADS is '{value}', not a number of threads"):
        check_thread_limit({"NUMBA_NUM_THREADS": value})


def test_a_number_of_threads_that_is_none_is_refused_before_numba_sees_it(tmp_path: Path) -> None:
    """It reads the variable when it is imported."""
    check_thread_limit({"NUMBA_NUM_THREADS": "3"})
    check_thread_limit(nothing := {"NUMBA_NUM_THREADS": "", "HOME": "/"})
    assert nothing == {"HOME": "/"}
    check_thread_limit({})
    words = [sys.executable, "-m", "nanovllm_cli", "run", "tiny", "hi"]
    odd = environment(tmp_path, NUMBA_NUM_THREADS="0")
    done = subprocess.run(words, env=odd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: NUMBA_NUM_THREADS is '0', not a number of threads\nhint: write 1 to ")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    result = nanovllm(tmp_path, "run", "tiny", "-f", "latin.txt")
    assert result.code == 2
    assert "latin.txt is not UTF-8: byte 0xe9 at offset 3" in failure(result)
    result = nanovllm(tmp_path, "run", "tiny", "hi", stdin=b"\xff\xfeh\0i\0")
    assert "standard input is not UTF-8: byte 0xff at offset 0" in failure(result)
    result = nanovllm(tmp_path, "run", "tiny", b"caf\xe9")
    assert result.code == 2
    assert "not valid Unicode" in failure(result)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("x")
    (tmp_path / "secret.txt").chmod(0)
    result = nanovllm(tmp_path, "run", "tiny", "-f", "secret.txt")
    assert result.code == 4
    assert failure(result) == "error: cannot read secret.txt: Permission denied\n"


def test_a_prompt_that_is_too_long_is_never_cut(tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "run", "tiny", "-c", "1k", stdin="word " * 1000)
    assert (result.code, result.out) == (5, "")
    assert "the prompt has 5006 tokens, the context holds 1000" in failure(result)


def test_an_answer_that_fails_half_way(tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "run", "tiny", "fail")
    assert (result.code, result.out) == (1, "half an answ\n")
    assert "the answer failed: NaN logits" in failure(result)
    result = nanovllm(tmp_path, "run", "tiny", "unmeetable")
    assert (result.code, result.out) == (2, "")
    assert "the answer failed: every token is banned" in failure(result)
    result = nanovllm(tmp_path, "run", "tiny", "crash")
    assert result.code == 1
    assert "internal error: ValueError: a fault in the engine" in failure(result)


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    assert "KeyError" in nanovllm(tmp_path, "run", "bug", "x", "--debug").err
    assert "Traceback (most recent call last)" in nanovllm(tmp_path, "run", "bug", "x", "--debug").err
    assert "Traceback" in nanovllm(tmp_path, "run", "bug", "x", NANOVLLM_DEBUG="1").err
    assert "Traceback" not in nanovllm(tmp_path, "run", "bug", "--", "--debug").err


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("no/such/folder/out.txt", "No such file or directory\nhint: create its folder first"),
        (".", "Is a directory\nhint: name a file"),
        ("/dev/full", "No space left on device"),
        ("x" * 300, "File name too long"),
    ],
)
def test_an_answer_that_cannot_be_written(tmp_path: Path, target: str, says: str) -> None:
    result = nanovllm(tmp_path, "run", "tiny", "-o", target, "say hi")
    assert (result.code, result.out) == (1, "")
    assert failure(result).startswith("error: cannot write ")
    assert says in failure(result)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".local"] == []


def test_a_disk_that_fills_up_leaves_no_half_file(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("the old one")
    limited = f"ulimit -f 0; {shlex.join(DRIVER)} run tiny -o out.txt long"
    done = subprocess.run(
        ["bash", "-c", limited], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "error: cannot write out.txt: File too large" in done.stderr
    assert (tmp_path / "out.txt").read_text() == "the old one"
    assert [path.name for path in tmp_path.iterdir() if path.name != ".local"] == ["out.txt"]


@pytest.mark.parametrize(
    ("shell", "code", "out", "err"),
    [
        ("{} run -q tiny long | head -c 10; exit ${{PIPESTATUS[0]}}", 0, "line after", ""),
        ("{} run tiny slowly 2>&1 | head -c 3; exit ${{PIPESTATUS[0]}}", 0, "tin", ""),
        ("{} run -q tiny --jsonl long | true; exit ${{PIPESTATUS[0]}}", 0, "", ""),
        ("{} run --help | true; exit ${{PIPESTATUS[0]}}", 0, "", ""),
        (
            "{} run -q tiny say hi > /dev/full",
            1,
            "",
            "error: cannot write to standard output: No space left on device\n",
        ),
        ("{} run --help >/dev/full", 1, "", "error: cannot write to standard output: No space left on device\n"),
        ("{} --version >/dev/full", 1, "", "error: cannot write to standard output: No space left on device\n"),
        ("{} --help >&-", 1, "", "error: standard output is closed\n"),
        ("{} run -q tiny say hi >&-", 1, "", "error: standard output is closed\n"),
        ("{} run tiny say hi 2>&-", 0, "hi\n", ""),
        ("{} run tiny say hi 2>/dev/full", 0, "hi\n", ""),
        ("{} run -q tiny say hi <&-", 0, "hi\n", ""),
        ("{} run -q tiny say hi 0>/dev/null", 0, "hi\n", ""),  # what nohup leaves
        ("{} chat -q tiny 0>/dev/null", 0, "", ""),
        ("{} run missing hi 2>&-", 3, "", ""),
    ],
)
def test_streams_that_go_away(tmp_path: Path, shell: str, code: int, out: str, err: str) -> None:
    done = subprocess.run(
        ["bash", "-c", shell.format(shlex.join(DRIVER))],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_a_folder_that_was_deleted_is_told_before_a_library_ends_the_process(tmp_path: Path) -> None:
    """By the real program: MKL, which torch loads, ends it with words of its own."""
    home, here = tmp_path / "home", tmp_path / "gone"
    home.mkdir()

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        line = shlex.join([sys.executable, "-m", "nanovllm_cli", *words])
        here.mkdir()
        return subprocess.run(
            ["sh", "-c", f"rmdir {shlex.quote(str(here))} && {line}"], cwd=here, env=environment(home),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    told = run("models", "list")
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.endswith("error: this folder is not there any more\nhint: go to another one\n")
    assert run("config").returncode == 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("libx.so: failed to map segment from shared object", 5),
        ("libx.so: failed to map segment from shared object: Operation not permitted", 1),  # a disk mounted noexec
        ("no module named x", 1),
    ],
)
def test_a_library_that_memory_has_no_room_for_is_no_fault_of_ours(text: str, code: int) -> None:
    assert explanation(ImportError(f"\n\nPlease read this\n{text}")).exit_code == code
