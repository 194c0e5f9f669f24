"""`nanovllm run` as its users see it: what goes in, what comes out, on which stream."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from test_cli_driver import environment, nanovllm


def test_the_answer_is_all_there_is_on_stdout(tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "run", "tiny", "say", "hello")
    assert (result.code, result.out) == (0, "hello\n")
    first, last = result.err.splitlines()
    assert first == "tiny: org/fake@abc123 (1.0 MB)"
    assert last.startswith("prompt 15 tokens, ")
    assert "answer 5 tokens" in last
    assert "first token" in last
    assert "memory" in last


def test_quiet_is_silent_and_stats_can_be_had_all_the_same(tmp_path: Path) -> None:
    assert nanovllm(tmp_path, "run", "-q", "tiny", "say hello").err == ""
    assert nanovllm(tmp_path, "run", "-q", "--stats", "tiny", "say hello").err.startswith("prompt 15 tokens")
    assert nanovllm(tmp_path, "run", "--no-stats", "tiny", "say hello").err.startswith("tiny: ")


@pytest.mark.parametrize(
    ("args", "stdin", "prompt"),
    [
        (["tiny", "one", "two"], None, "one two"),
        (["-m", "tiny", "one", "two"], None, "one two"),
        (["tiny", "-p", "one", "two"], None, "one two"),
        (["tiny", "args"], "from stdin\n", "from stdin\n\nargs"),
        (["tiny"], "only stdin\n\n", "only stdin\n"),
        (["tiny", "args"], "", "args"),
        (["tiny", "-", "args"], "in", "in\n\nargs"),
        (["tiny", "-f", "a.txt", "args"], "in", "in\n\nA\n\nargs"),
        (["tiny", "-f", "a.txt", "-f", "b.txt"], None, "A\n\nB\nb"),
        (["tiny", "-f", "-"], "in", "in"),
        (["tiny", "--", "-5 + 3"], None, "-5 + 3"),
        (["tiny", "ünï 語"], "ö".encode(), "ö\n\nünï 語"),
        (["tiny", "x\x1b[31m"], None, "x\x1b[31m"),
    ],
)
def test_stdin_then_files_then_arguments(
    tmp_path: Path, args: list[str], stdin: str | bytes | None, prompt: str
) -> None:
    (tmp_path / "a.txt").write_text("A\n")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfB\nb\r\n")
    result = nanovllm(tmp_path, "run", "-q", *args, stdin=stdin)
    assert (result.code, result.out) == (0, f"[<u>{prompt}<a>]\n")


def test_prompts_go_through_the_template_or_raw(tmp_path: Path) -> None:
    def answer(*args: str) -> str:
        result = nanovllm(tmp_path, "run", "-q", *args)
        assert result.code == 0, result.err
        return result.out

    assert answer("tiny", "-sys", "be brief", "hi") == "[<s>be brief<u>hi<a>]\n"
    assert answer("tiny", "--raw", "hi") == "[hi]\n"
    assert answer("base", "hi") == "[hi]\n"
    assert answer("thinker", "--think", "off", "hi") == "[<{'enable_thinking': False}><u>hi<a>]\n"
    kwargs = '{"effort": "low"}'
    assert answer("tiny", "--chat-template-kwargs", kwargs, "hi") == "[<{'effort': 'low'}><u>hi<a>]\n"


SAMPLING_FLAGS = (
    "-n 5000 --temp 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --top-nsigma 1.5 --typical 0.8 -s 42 --repeat-penalty 1.1"
    " --presence-penalty 0.2"
    " --frequency-penalty 0.3 --repeat-last-n 64 --dry-multiplier 0.8 --dry-base 1.5 --dry-allowed-length 3"
    " --dry-penalty-last-n 100 --dry-sequence-breaker \\n --dry-sequence-breaker ; --xtc-probability 0.5"
    " --xtc-threshold 0.2 -l 5+1 -l 6-2.5 --ignore-eos --stop END --stop \\n\\n --bad-word no --min-tokens 2 -N 2"
)


def test_every_sampling_flag_arrives(tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "run", "-q", "tiny", *SAMPLING_FLAGS.split(), "params")
    from nanovllm_cli.sampling_params import SamplingParams

    wanted = SamplingParams(
        max_tokens=5000, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, top_n_sigma=1.5, typical_p=0.8, seed=42,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, penalty_last_n=64, dry_multiplier=0.8, dry_base=1.5,
        dry_allowed_length=3, dry_penalty_last_n=100, dry_sequence_breakers=("\n", ";"), xtc_probability=0.5,
        xtc_threshold=0.2, logit_bias={5: 1.0, 6: -2.5}, ignore_eos=True, stop=("END", "\n\n"), bad_words=("no",),
        min_tokens=2, n=2,
    )  # fmt: skip
    assert result.out == f"{wanted!r}\n---\n{wanted!r}\n"


def test_every_engine_flag_arrives(tmp_path: Path) -> None:
    flags = "-c 2k -b 256 -t 3 --kv-cache 8M --dtype bfloat16 --device cpu --deterministic --offline --revision r"
    flags += " --kv-cache-dtype int8 -ctk bf16 --cache-type-v fp8"
    result = nanovllm(tmp_path, "run", "-q", "tiny", *flags.split(), "--chat-template", "chatml", "config")
    for words in (
        "dtype='bfloat16'", "device='cpu'", "max_model_len=2000", "kv_cache_bytes=8388608",
        "max_num_batched_tokens=256",
        "kv_cache_dtype='int8'", "cache_type_k='bfloat16'", "cache_type_v='fp8'",
        "threads=3", "deterministic=True", "'revision': 'r'", "<|im_start|>",
    ):  # fmt: skip
        assert words in result.out


def test_flags_beat_the_environment_which_beats_settings(tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "nanovllm"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        '[run]\ntemp = 0.1\nmin-p = 0.3\n[models.tiny]\ntop-k = 1\n[models.other]\ntop-p = 0.5\n[aliases]\nt = "tiny"\n'
    )
    (tmp_path / "nanovllm.toml").write_text("[default]\ntop-k = 2\n")

    def params(*args: str, **extra: str) -> str:
        return nanovllm(tmp_path, "run", "-q", *args, "params", **extra).out

    assert "temperature=0.1, top_k=2, top_p=1.0, min_p=0.3" in params("t")
    assert "temperature=0.2, top_k=2" in params("t", NANOVLLM_TEMP="0.2")
    assert "temperature=0.3, top_k=2" in params("t", "--temp", "0.3", NANOVLLM_TEMP="0.2")
    assert "top_p=0.5" in params(NANOVLLM_MODEL="other")
    assert "stop=('a', 'b')" in params("t", NANOVLLM_STOP="a b", NANOVLLM_OFFLINE="1")


def test_a_setting_of_log_probabilities_is_for_answers_that_show_them(tmp_path: Path) -> None:
    (tmp_path / "nanovllm.toml").write_text("[default]\nlogprobs = 1\n")
    assert nanovllm(tmp_path, "run", "-q", "tiny", "say hi").out == "hi\n"
    assert "logprobs=None" in nanovllm(tmp_path, "run", "-q", "tiny", "params").out
    assert "logprobs" in json.loads(nanovllm(tmp_path, "run", "tiny", "--json", "say hi").out)["answers"][0]


def test_one_json_object(tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "run", "tiny", "--json", "--logprobs", "1", "-N", "2", "say hé\\x1b[m")
    assert "\x1b" not in result.out
    value = json.loads(result.out)
    assert set(value) == {"model", "answers", "usage", "statistics"}
    first, second = value["answers"]
    assert (first["index"], second["index"]) == (0, 1)
    assert first["text"] == "h\u00c3\u00a9\x1b[m"
    assert (first["finish_reason"], first["stop_reason"], first["num_tokens"]) == ("stop", None, 6)
    assert first["logprobs"][0] == {
        "token": "h", "token_id": 104, "logprob": -0.5, "rank": 1,
        "top": [{"token": "h", "token_id": 104, "logprob": -0.5}, {"token": "!", "token_id": 33, "logprob": None}],
    }  # fmt: skip
    assert value["usage"] == {"prompt_tokens": 18, "cached_tokens": 0, "answer_tokens": 12}
    assert value["statistics"]["peak_memory_bytes"] > 1 << 20


def test_json_lines_while_it_writes_and_statistics_at_the_end(tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "run", "thinker", "--jsonl", "say <think>hm</think>yes")
    *events, end = map(json.loads, result.out.splitlines())
    assert {event["event"] for event in events} == {"token"}
    assert "".join(event["text"] for event in events) == "yes"
    assert "".join(event["reasoning"] for event in events) == "hm"
    assert [i for event in events for i in event["token_ids"]] == list(map(ord, "<think>hm</think>yes"))
    assert end["event"] == "end"
    assert end["answers"] == [{"index": 0, "finish_reason": "stop", "stop_reason": None, "num_tokens": 20}]
    assert end["statistics"]["answer_tokens"] == 20


def test_reasoning_is_dropped_in_a_pipe_unless_asked_for(tmp_path: Path) -> None:
    prompt = "say <think>let me see</think>\\n\\nForty-two."
    assert nanovllm(tmp_path, "run", "-q", "thinker", prompt).out == "Forty-two.\n"
    assert nanovllm(tmp_path, "run", "-q", "thinker", prompt).err == ""
    shown = nanovllm(tmp_path, "run", "-q", "--reasoning", "show", "thinker", prompt)
    assert (shown.out, shown.err) == ("Forty-two.\n", "let me see\n")
    hidden = json.loads(nanovllm(tmp_path, "run", "--json", "--reasoning", "hide", "thinker", prompt).out)
    assert "reasoning" not in hidden["answers"][0]
    whole = json.loads(nanovllm(tmp_path, "run", "--json", "thinker", prompt).out)
    assert whole["answers"][0]["reasoning"] == "let me see"


def test_a_pipe_gets_a_transcript_without_its_language(tmp_path: Path) -> None:
    prompt = "say language English<asr_text>Good morning."
    assert nanovllm(tmp_path, "run", "-q", "listener", prompt).out == "Good morning.\n"
    whole = json.loads(nanovllm(tmp_path, "run", "--json", "listener", prompt).out)
    assert whole["answers"][0]["reasoning"] == "English"
    assert nanovllm(tmp_path, "run", "-q", "listener", "say Good morning.").out == "Good morning.\n"
    assert nanovllm(tmp_path, "run", "-q", "tiny", prompt).out == "language English<asr_text>Good morning.\n"


def test_an_answer_that_is_cut_off_in_its_reasoning_says_why_nothing_is_there(tmp_path: Path) -> None:
    words = ["thinker", "say <think>let me see</think>Forty-two.", "--no-stats"]
    cut = nanovllm(tmp_path, "run", *words, "-n", "12")
    assert (cut.code, cut.out.strip()) == (0, "")
    assert cut.err.endswith("cut off while it reasoned: a larger -n leaves room for an answer, --reasoning show shows the rest\n")
    for more in (["-n", "30"], ["-n", "12", "--reasoning", "show"], ["-n", "12", "--json"], ["-n", "12", "-q"]):
        assert "cut off" not in nanovllm(tmp_path, "run", *words, *more).err


def test_no_limit_is_said_as_in_llama_cpp(tmp_path: Path) -> None:
    """-1 is without end there, -2 until the context is full: here it is full before there is no end."""
    for none in ("-1", "-2"):
        assert "max_tokens=None" in nanovllm(tmp_path, "run", "-q", "short", "-n", none, "params").out
    assert "-1 or -2 until the context is full" in " ".join(nanovllm(tmp_path, "run", "--help").out.split())


def test_one_token_is_no_tokens(tmp_path: Path) -> None:
    assert "| answer 1 token |" in nanovllm(tmp_path, "run", "tiny", "-n", "1", "say hi").err


def test_only_the_code(tmp_path: Path) -> None:
    answer = r"say Sure!\n```python\nprint(1)\n```\nDone."
    assert nanovllm(tmp_path, "run", "-q", "-x", "tiny", answer).out == "print(1)\n"
    cut = nanovllm(tmp_path, "run", "-x", "tiny", r"say ```\nhalf")
    assert (cut.code, cut.out) == (0, "half\n")
    assert "ends inside its code block" in cut.err
    none = nanovllm(tmp_path, "run", "-q", "-x", "tiny", "say no code here")
    assert (none.code, none.out) == (1, "")
    assert none.err.startswith("no code here\nerror: the answer has no code block\n")


def test_an_answer_into_a_file(tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "run", "tiny", "-o", "out.txt", "say hello")
    assert (result.code, result.out) == (0, "")
    assert (tmp_path / "out.txt").read_text() == "hello\n"
    assert nanovllm(tmp_path, "run", "tiny", "-o", "-", "say hello").out == "hello\n"
    assert nanovllm(tmp_path, "run", "-q", "tiny", "-o", "/dev/stdout", "say hello").out == "hello\n"
    os.mkfifo(tmp_path / "fifo")
    reader = subprocess.Popen(["cat", tmp_path / "fifo"], stdout=subprocess.PIPE)
    assert nanovllm(tmp_path, "run", "-q", "tiny", "-o", "fifo", "say hello").code == 0
    assert reader.communicate(timeout=10)[0] == b"hello\n"


def test_the_last_run_is_continued(tmp_path: Path) -> None:
    def answer(*args: str) -> str:
        return nanovllm(tmp_path, "run", "-q", *args).out

    assert answer("tiny", "say one two", "-n", "3") == "one\n"
    assert answer("tiny", "--continue") == "one two<a>one\n"
    saved = json.loads((tmp_path / ".local/state/nanovllm/last-run.json").read_text())
    assert saved["messages"][-1] == {"role": "assistant", "content": "oneone two<a>one"}
    assert answer("tiny", "--no-save", "unrelated").startswith("[")
    answer("tiny", "say three", "--continue")
    assert answer("tiny", "--continue", "and?") == (
        "[<u>say one two<a>oneone two<a>one<u>say three<a>three<u>and?<a>]\n"
    )
    assert stat.S_IMODE((tmp_path / ".local/state/nanovllm/last-run.json").stat().st_mode) == 0o600
    assert answer("thinker", "say <think>long", "-n", "10") == ""
    silent = nanovllm(tmp_path, "run", "-q", "--continue")
    assert (silent.code, silent.err.splitlines()[0]) == (2, "error: the last run has no answer to continue")
    assert answer("--continue", "-p", "and?") == "[<u>say <think>long<a><u>and?<a>]\n"


def test_an_answer_that_was_at_its_end_is_told_so(tmp_path: Path) -> None:
    assert nanovllm(tmp_path, "run", "-q", "tiny", "say one").out == "one\n"
    kept = tmp_path / ".local/state/nanovllm/last-run.json"
    kept.write_text(kept.read_text().replace('"one"', '"<u>say "'))  # behind which the model says nothing
    more = nanovllm(tmp_path, "run", "--continue")
    assert (more.code, more.out.strip(), more.err.count("nothing follows: that answer was at its end")) == (0, "", 1)
    assert "nothing follows" not in nanovllm(tmp_path, "run", "--continue", "-p", "say ").err


def test_without_a_model_the_last_runs_is_continued(tmp_path: Path) -> None:
    nothing = nanovllm(tmp_path, "run", "--continue")
    assert (nothing.code, nothing.err.splitlines()[0]) == (2, "error: there is no run to continue")
    assert nanovllm(tmp_path, "run", "-q", "base", "say one").out == "one\n"
    assert nanovllm(tmp_path, "run", "-q", "--continue", "-n", "3").out == "one\n"
    assert nanovllm(tmp_path, "run", "-q", "--continue", "-p", " two", stdin="").out == "oneoneone two\n"
    assert nanovllm(tmp_path, "run", "-q", "--continue", "and three").out == "oneoneone twooneoneone twoand three\n"
    (tmp_path / "a b").mkdir()
    assert nanovllm(tmp_path, "run", "-q", "--continue", "a b", "more").code != 0, "a path with a blank is a model"
    assert nanovllm(tmp_path, "run", "-q", "tiny", "--continue").code == 2, "a model that is named is taken"
    words = nanovllm(tmp_path, "run", "--continue", "missing", "that's", "all")
    assert (words.code, words.err.splitlines()[-1]) == (
        3, "hint: without MODEL the prompt stands behind -p: nanovllm run --continue -p 'missing that'\"'\"'s all'",
    )  # fmt: skip


def test_nothing_to_continue_where_nothing_could_be_kept(tmp_path: Path) -> None:
    nowhere = nanovllm(tmp_path, "run", "--continue", XDG_STATE_HOME="/proc/self")
    assert nowhere.err.splitlines() == [
        "error: there is no run to continue",
        "hint: nothing can be kept in /proc/self/nanovllm; XDG_STATE_HOME names another place",
    ]


def test_short_flags_take_an_equals_sign_as_long_ones_do(tmp_path: Path) -> None:
    assert nanovllm(tmp_path, "run", "-q", "-m=tiny", "say hello", "-n=3").out == "hel\n"
    assert nanovllm(tmp_path, "run", "-q", "-n=3", "tiny", "say =a=b").out == "=a=\n"
    assert nanovllm(tmp_path, "run", "-q", "tiny", "-o=out.txt", "say hello").out == ""
    assert (tmp_path / "out.txt").read_text() == "hello\n"
    assert nanovllm(tmp_path, "run", "-q", "tiny", "-p", "-n=3").out == "[<u>-n=3<a>]\n", "a value is left as it is"
    assert nanovllm(tmp_path, "run", "-q", "tiny", "--", "-n=3").out == "[<u>-n=3<a>]\n"


def test_the_last_raw_run_is_continued(tmp_path: Path) -> None:
    assert nanovllm(tmp_path, "run", "-q", "base", "say one").out == "one\n"
    assert nanovllm(tmp_path, "run", "-q", "base", "--continue", " two").out == "oneone two\n"
    mixed = nanovllm(tmp_path, "run", "-q", "tiny", "--continue", "x")
    assert mixed.code == 2
    assert "--raw" in mixed.err


def test_a_limit_of_the_model_s_own_is_said(tmp_path: Path) -> None:
    assert "the model's own limit is 7 tokens; -n raises it" in nanovllm(tmp_path, "run", "short", "say 123456789").err
    assert "cut off" not in nanovllm(tmp_path, "run", "short", "-n", "3", "say 123456789").err


def test_logs_go_to_their_file(tmp_path: Path) -> None:
    nanovllm(tmp_path, "run", "-q", "tiny", "--log-file", "log.jsonl", "--log-json", "say hi")
    record: dict[str, Any] = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert record["level"] == "info"
    assert record["message"].startswith("prompt 12 tokens")
    assert "info: prompt 12 tokens" in nanovllm(tmp_path, "run", "-v", "--no-stats", "tiny", "say hi").err
    full = nanovllm(tmp_path, "run", "-q", "tiny", "--log-file", "/dev/full", "say hi")
    assert (full.code, full.out) == (0, "hi\n")
    assert full.err == "warning: the log /dev/full is not complete: No space left on device\n"


def test_help_imports_no_torch_and_no_rich(tmp_path: Path) -> None:
    program = """if True:
        import os, sys
        from nanovllm_cli.cli.app import main
        def leave(code, really=os._exit):
            heavy = {"torch", "numpy", "numba", "rich", "transformers", "huggingface_hub", "jinja2"} & set(sys.modules)
            print(code, sorted(heavy), file=sys.stderr, flush=True)
            really(code)
        os._exit = leave
        main(sys.argv[1:])
    """
    for args in (["--help"], ["run", "--help"], ["--version"], ["run", "--version"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *args],
            capture_output=True,
            text=True,
            env=environment(tmp_path),
            timeout=60,
        )
        assert done.stderr == "0 []\n"
        assert "nanovllm" in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())


def test_what_is_around_the_model_imports_no_torch(tmp_path: Path) -> None:
    """The model here is one that needs none; names are looked up as they always are."""
    program = """if True:
        import os, sys, test_cli_driver
        def leave(code, really=os._exit):
            print(code, "torch" in sys.modules, flush=True)
            really(code)
        os._exit = leave
        sys.argv = ["nanovllm", "run", "-q", "tiny", "say hello"]
        test_cli_driver.main()
    """
    there = environment(tmp_path) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=there, timeout=60)
    assert (done.stdout, done.stderr) == ("hello\n0 False\n", "")


def test_python_m_is_the_same_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nanovllm_cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("nanovllm ")


UNUSED = {
    "--temp 0 --top-k 40 --seed 7": "--top-k and --seed change nothing: at --temp 0 the likeliest token is taken",
    "--temp 0 --top-p 1 --min-p 0 --top-k 0 --seed -1 --xtc-probability 0": None,  # what is off has not been asked for
    "--temp 0 --stop x --min-tokens 1 --repeat-penalty 1.1": None,
    "--repeat-last-n 64": "--repeat-last-n changes nothing: there is no penalty",
    "--repeat-last-n 64 --repeat-penalty 1.1": None,
    "--repeat-last-n 0 --presence-penalty 1": "--presence-penalty changes nothing: --repeat-last-n is 0",
    "--dry-base 2 --dry-sequence-breaker none": "--dry-base and --dry-sequence-breaker change nothing: --dry-multiplier is 0",
    "--dry-base 2 --dry-multiplier 1": None,
    "--dry-multiplier 1 --dry-penalty-last-n 0": "--dry-multiplier changes nothing: --dry-penalty-last-n is 0",
    "--xtc-threshold 0.2": "--xtc-threshold changes nothing: --xtc-probability is 0",
    "--xtc-threshold 0.6 --xtc-probability 0.5": "--xtc-probability changes nothing: --xtc-threshold is above 0.5",
    "--xtc-threshold 0.2 --xtc-probability 0.5": None,
    "--mirostat 2 --top-k 5 --adaptive-target 0.5": "--top-k and --adaptive-target change nothing: --mirostat is in its place",
    "--mirostat 2 --temp 0": "--mirostat changes nothing: at --temp 0 the likeliest token is taken",
    "--mirostat 1 --repeat-penalty 1.1 --mirostat-lr 0.2 --mirostat-ent 3": None,
    "--max-repeat-size 5": "--max-repeat-size changes nothing: --max-repeats is 0",
    "--max-repeats 5 --max-repeat-size 5 --min-repeat-size 2": None,
    "--mirostat-lr 0.2 --mirostat-ent 3": "--mirostat-tau and --mirostat-eta change nothing: --mirostat is 0",
    "--dynatemp-exp 2": "--dynatemp-exponent changes nothing: --dynatemp-range is 0",
    "--adaptive-decay 0.5": "--adaptive-decay changes nothing: --adaptive-target is below 0",
    "--samplers top_k;temperature --top-p 0.5": "--top-p changes nothing: --samplers leaves that out",
    "--samplers top-k,top_p,temp --top-p 0.5 --top-k 3": None,
    "--sampler-seq pt --top-p 0.5 --temp 0.7": None,
    "--beams 3 --temp 0.7 --top-k 5 --seed 3": "--temp and --top-k and --seed change nothing: --beams takes the likeliest answer",
    "--beams 3 --length-penalty 2 --top-k 0": None,
    "--length-penalty 2": "--length-penalty changes nothing: there are no --beams",
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--samplers top_k;frobnicate", "--samplers: 'frobnicate' is none of 'penalties', 'dry', 'temperature', 'top_n_sigma', "),
        ("--sampler-seq kz", "--sampler-seq: 'z' is none of edtsmkypxa"),
        ("--samplers top_k --sampler-seq k", "--samplers and --sampler-seq cannot be used together"),
        ("--max-repeats 1", "--max-repeats must be 0 or at least 2"),
        ("--max-repeats 3 --min-repeat-size 65", "--min-repeat-size (65) must not be above --max-repeat-size (64)"),
        ("--mirostat 3", "--mirostat must be a whole number from 0 to 2, not 3"),
        ("--mirostat-tau -1", "--mirostat-tau must be a number from 0 to 100, not -1.0"),
        ("--dynatemp-range x", "--dynatemp-range"),
        ("--beams 65", "--beams must be a whole number from 1 to 64, not 65"),
        ("--beams 2 -N 3", "--num-answers (3) must not be above --beams (2)"),
        ("--beams 2 --repeat-penalty 1.1", "--repeat-penalty has no part in a search by beams"),
        ("--beams 2 --choice a --choice b", "an answer has no form where it is looked for by --beams"),
        ("--beams 2 --reasoning-budget 5", "the reasoning of an answer has no budget where it is looked for by --beams"),
    ],
)
def test_steps_that_make_no_sense_are_refused(tmp_path: Path, flags: str, says: str) -> None:
    done = nanovllm(tmp_path, "run", "tiny", "say hi", *flags.split())
    assert (done.code, done.out) == (2, "")
    assert says in done.err


@pytest.mark.parametrize("flags", UNUSED)
def test_what_changes_nothing_beside_other_options_is_said(tmp_path: Path, flags: str) -> None:
    done = nanovllm(tmp_path, "run", "--no-stats", "--no-save", "tiny", "say hi", *flags.split())
    assert (done.code, done.out) == (0, "hi\n")
    wanted = UNUSED[flags]
    assert done.err.splitlines()[1:] == ([] if wanted is None else [wanted])
    assert nanovllm(tmp_path, "run", "-q", "tiny", "say hi", *flags.split()).err == ""


def test_what_is_said_of_unused_options_is_said_in_a_chat_and_a_batch_too_and_not_of_defaults(tmp_path: Path) -> None:
    note = "--top-k changes nothing: at --temp 0 the likeliest token is taken"
    flags = ("--temp", "0", "--top-k", "4")
    assert note in nanovllm(tmp_path, "chat", "--no-save", "tiny", *flags, stdin="say hi\n").err
    (tmp_path / "lines").write_text('{"prompt": "say hi"}\n')
    assert note in nanovllm(tmp_path, "run", "tiny", *flags, "--batch", "lines").err
    assert note in nanovllm(tmp_path, "run", "tiny", "hi", "--top-k", "4", NANOVLLM_TEMP="0").err
    assert note not in nanovllm(tmp_path, "run", "tiny", "hi", "--temp", "0", NANOVLLM_TOP_K="4").err


def test_a_typed_v_wins_over_a_quiet_environment(tmp_path: Path) -> None:
    done = nanovllm(tmp_path, "run", "-v", "tiny", "say hi", NANOVLLM_QUIET="1")
    assert done.err.count("prompt 12 tokens") == 1  # and not once more as a record of the log
    assert nanovllm(tmp_path, "run", "tiny", "say hi", NANOVLLM_QUIET="1", NANOVLLM_VERBOSE="1").err == ""
    assert nanovllm(tmp_path, "run", "-q", "-v", "--log-file", "log", "tiny", "say hi").err == ""
    assert " INFO " in (tmp_path / "log").read_text()
