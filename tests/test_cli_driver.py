"""Not tests: the `nanovllm` command with a model that needs no torch, for tests of everything around the model.

Run as a script, it puts a module of its own in the place of `nanovllm_cli.llm` and calls `main()`. The product knows
nothing of it. What the model does is said by the first word of the prompt (`_script`); its tokens are characters.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from forked import HEAVY, LIGHT, prepare
from nanovllm_cli.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.errors import (
    AccessRefusedError,
    DoesNotFitError,
    ModelNotFoundError,
    PromptTooLongError,
    UnsupportedError,
    UsageError,
)
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.answer_format import AnswerFormat
from nanovllm_cli.text.tool_formats import tool_format_named

SOURCE = str(Path(__file__).resolve().parent.parent / "src")
VOCABULARY = 0x110000
CONTEXT = 2000
SERVE = "--serve-tests"
WITH_TORCH = ("convert", "quantize", "verify", "plan", "tokenize", "perplexity", "control-vector")
"""Commands that import it, in the process that is forked."""
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # where compiled kernels are


@dataclasses.dataclass(frozen=True)
class Resolved:
    name: str
    path: str = "random:fake"  # which has no files
    repo: str | None = "org/fake"
    revision: str | None = "abc123"
    quant: str | None = None
    num_bytes: int = 1 << 20
    format: str = "hf"

    def __str__(self) -> str:
        return "org/fake@abc123 (1.0 MB)"

    def told_as(self, name: str) -> str:
        return f"{name}: {self}"


class Tokenizer:
    def __init__(self, word: str = "") -> None:
        self.word = word  # a token beside characters

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def id_to_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def token_to_id(self, token: str) -> int | None:
        return ord(token) if len(token) == 1 else VOCABULARY if token == self.word else None


class Template:
    def __init__(self, source: str) -> None:
        self.source = source


class LLM:
    """The shape of nanovllm_cli.llm.LLM."""

    @staticmethod
    def find(model: str, *, offline: bool = False, **options: Any) -> Resolved:
        refusals = {
            "missing": ModelNotFoundError("no model named missing", "did you mean tiny?"),
            "gated": AccessRefusedError("org/gated is gated", "accept its license"),
        }
        if model in refusals:
            raise refusals[model]
        if offline and model == "remote":
            raise ModelNotFoundError("remote is not on this machine", "leave --offline out")
        path = model if "/" in model and os.path.isdir(model) else Resolved.path
        return Resolved(model, path, revision=options["revision"] or "abc123")

    def __init__(self, found: Resolved, *, config: Any, progress: Any, **options: Any) -> None:
        model = found.name
        if os.environ.get("FAKE_SLEEP_IN_LOAD"):
            progress.stage("loading weights", 100, "tensors")
            time.sleep(30)
        time.sleep(float(os.environ.get("FAKE_LOAD_SECONDS", "0")))
        refusals = {
            "huge": DoesNotFitError("needs 900 GiB, 8 GiB free", "try --ctx-size"),
            "odd": UnsupportedError("unknown architecture 'Odd'; known: Even"),
            "bug": KeyError("a fault\nof ours \x1b[31m"),
            "memory": MemoryError(),
        }
        if os.environ.get("FAKE_LOADS_ONCE") and hasattr(sys.modules[__name__], "is_loaded"):
            model = "huge"
        if model in refusals:
            raise refusals[model]
        sys.modules[__name__].is_loaded = True  # type: ignore[attr-defined]
        progress.stage("loading", 3, "tensors")
        for _ in range(3):
            progress.advance(1)
        progress.done()
        self.name = model
        self.resolved = found
        self.config, self.options = config, options | {"revision": found.revision}
        self.lora, self.draft_model, self.mtp = config.lora, config.draft_model, config.mtp
        self.lora_modules = config.lora_modules
        self.tokenizer = Tokenizer("<asr_text>" if model == "listener" else "")
        source = "{{messages}} <think></think> enable_thinking" if model == "thinker" else "{{messages}}"
        self.chat_template = None if model == "base" else Template(options.get("chat_template") or source)
        self.answer_format = AnswerFormat(None, tool_format_named("hermes")) if model == "caller" else None
        self.default_params = SamplingParams(max_tokens=7) if model == "short" else SamplingParams()
        self.max_model_len = config.max_model_len or CONTEXT
        self.num_parameters, self.weight_bytes, self.kv_bytes, self.threads = 1000, 1 << 20, 1 << 19, config.threads or 1
        self.dtype, *self.kv_dtypes = ("float32" if kind == "auto" else kind for kind in (config.dtype, *config.cache_types))
        self.mmproj = config.mmproj
        self.spec = types.SimpleNamespace(vocab_size=VOCABULARY, has_head=True, encoder=None)
        self.senses = self.vision = self.hearing = None

    def encode_chat(self, messages: Sequence[Any], *, tools: Any = None, chat_template_kwargs: Any = None) -> list[int]:
        if any(message["role"] == "martian" for message in messages):
            raise UsageError("unknown role martian")
        texts = [f"<{message['role'][0]}>{message['content']}" for message in messages]
        extra = f"<{chat_template_kwargs}>" if chat_template_kwargs else ""
        extra += f"<{' '.join(each['function']['name'] for each in tools)}>" if tools else ""
        return self.tokenizer.encode(extra + "".join(texts) + "<a>")

    def stream(self, prompt: str | list[int], params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        yield from self._run("0", ids, params or self.default_params)

    def generate_iter(self, requests: Iterable[tuple[str, list[int], SamplingParams]]) -> Iterator[RequestOutput]:
        """Two at a time, the second first: results out of order."""
        waiting = iter(requests)
        while True:
            pair = []
            for request in itertools.islice(waiting, 2):
                if self.tokenizer.decode(request[1]).endswith("refuse<a>"):
                    raise UsageError("refused")
                pair.append(request)
            if not pair:
                return
            for request_id, ids, params in reversed(pair):
                yield list(self._run(request_id, ids, params))[-1]

    @property
    def engine(self) -> LLM:
        return self

    def check_length(self, num_tokens: int) -> None:
        if num_tokens >= self.max_model_len:
            raise PromptTooLongError(num_tokens, self.max_model_len)

    def close(self) -> None:
        pass

    def _run(self, request_id: str, ids: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
        self.check_length(len(ids))
        params.check_vocabulary(VOCABULARY)
        text, delay, error, reason = self._script(self.tokenizer.decode(ids), params)
        began = time.monotonic()
        limit = params.max_tokens or self.max_model_len - len(ids)
        if self.name == "slowreader":
            for done in range(0, len(ids), 64):
                yield RequestOutput(
                    request_id,
                    tuple(ids),
                    self._outputs(params, "", "", None),
                    False,
                    RequestMetrics(began, began, None, None, 0, done),
                )
                time.sleep(0.2)
        if len(text) > limit:
            text, reason = text[:limit], "length"
        first = time.monotonic()
        for at, character in enumerate(text):
            if delay:
                time.sleep(delay)
            metrics = RequestMetrics(began, began, first, None, 0, len(ids))
            yield RequestOutput(
                request_id, tuple(ids), self._outputs(params, text[: at + 1], character, None), False, metrics
            )
        metrics = RequestMetrics(began, began, first, time.monotonic(), 0, len(ids))
        yield RequestOutput(request_id, tuple(ids), self._outputs(params, text, "", reason, error), True, metrics)

    def _outputs(
        self, params: SamplingParams, text: str, delta: str, reason: Any, error: str | None = None
    ) -> tuple[CompletionOutput, ...]:
        logprobs = None
        if params.logprobs is not None:
            logprobs = tuple(TokenLogprobs(ord(c), -0.5, 1, ((ord(c), -0.5), (33, float("-inf")))) for c in text)
        ids, delta_ids = tuple(map(ord, text)), tuple(map(ord, delta))
        return tuple(
            CompletionOutput(
                index, text, ids, delta, delta_ids, logprobs, reason, error=error, unmeetable=error == "every token is banned"
            )
            for index in range(params.n)
        )

    def _script(self, prompt: str, params: SamplingParams) -> tuple[str, float, str | None, str]:
        """What to answer, seconds a token, an error, how it ends. The prompt's last turn decides."""
        said = prompt.rsplit("<u>", 1)[-1].removesuffix("<a>")
        if "<t>" in said:
            return f"it said {said.rsplit('<t>', 1)[1]}", 0.0, None, "stop"
        word, _, rest = said.partition(" ")
        if word == "say":
            return rest.encode().decode("unicode_escape"), 0.0, None, "stop"
        if word == "call":  # NAME ARGUMENTS; …
            parts = [each.partition(" ") for each in rest.split("; ")]
            calls = [f'<tool_call>{{"name": "{name}", "arguments": {given}}}</tool_call>' for name, _, given in parts]
            return "let me see" + "".join(calls), 0.0, None, "stop"
        if word == "slowly":
            return "slow but steady " * 50, 0.02, None, "stop"
        if word == "long":
            return "line after line\n" * 60, 0.0, None, "stop"
        if word == "fail":
            return "half an answ", 0.0, "NaN logits", "error"
        if word == "unmeetable":
            return "", 0.0, "every token is banned", "error"
        if word == "hold" and not os.environ.get("FAKE_HOLDS_NOT"):
            time.sleep(30)
        if word == "params":
            return repr(params), 0.0, None, "stop"
        if word == "config":
            return repr((self.config, self.options)), 0.0, None, "stop"
        if word == "crash":
            raise ValueError("a fault in the engine")
        return f"[{prompt}]", 0.0, None, "stop"


@dataclasses.dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def environment(home: Path, **extra: str) -> dict[str, str]:
    """The test's own environment without what could change an answer, and with a home of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NANOVLLM", "XDG_", "HF_"))}
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        kept.pop(name, None)
    return kept | {"HOME": str(home), "TERM": "xterm-256color", "PYTHONPATH": SOURCE} | extra


def nanovllm(home: Path, *args: str | bytes, stdin: str | bytes | None = None, **extra: str) -> Result:
    """Runs the command in `home` with pipes at both ends; standard input is empty unless given. The process is a fork
    of one that has the imports behind it."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    heavy = bool(args) and args[0] in WITH_TORCH
    if heavy:
        extra = {"XDG_CACHE_HOME": CACHE} | extra  # a new home would compile kernels again
    request = {
        "args": [os.fsdecode(arg) for arg in args],
        "home": str(home),
        "stdin": None if data is None else data.decode("latin-1"),
        "environment": environment(home, **extra),
    }
    server = _server(heavy)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    result = Result(*json.loads(server.stdout.readline()))
    assert "Traceback" not in result.err or "--debug" in args or extra.get("NANOVLLM_DEBUG")
    assert "\x1b" not in result.err or extra.get("FORCE_COLOR")
    return result


@functools.cache
def _server(heavy: bool) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, SERVE, *(["heavy"] if heavy else [])]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(Path("/"))
    )
    atexit.register(server.kill)
    return server


def serve(modules: Sequence[str]) -> None:
    """For each request on standard input: a child that runs it, and a line with what became of it."""
    prepare(modules)
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write((request["stdin"] or "").encode("latin-1"))
            given.seek(0)
            child = os.fork()
            if child == 0:
                source = given if request["stdin"] is not None else open(os.devnull, "rb")  # noqa: SIM115
                for number, file in enumerate((source, out, err)):
                    os.dup2(file.fileno(), number)
                os.environ.clear()
                os.environ.update(request["environment"])
                os.chdir(request["home"])
                sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
                sys.argv = ["nanovllm", *request["args"]]
                main()
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = [_all_of(file) for file in (out, err)]
        print(json.dumps([code, *texts]), flush=True)


def _all_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def main() -> None:
    if sys.argv[1:2] == [SERVE]:
        serve(HEAVY if sys.argv[2:] else LIGHT)
        return
    module = types.ModuleType("nanovllm_cli.llm")
    module.LLM = LLM  # type: ignore[attr-defined]
    sys.modules["nanovllm_cli.llm"] = module
    from nanovllm_cli.cli.app import main as nanovllm

    nanovllm()


if __name__ == "__main__":
    main()
