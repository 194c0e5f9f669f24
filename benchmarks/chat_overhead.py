"""What `chat` costs over `run`: tokens a second of one model through both, on a pseudo-terminal, taking turns in one process.

    python benchmarks/chat_overhead.py --output benchmarks/results/chat_overhead.json
    python benchmarks/chat_overhead.py --models tiny

Models: tiny, the bundled one, and random weights of benchmarks/shapes.py. The engine works as it always does; the text of its
tokens is replaced by Markdown with paragraphs, lists, a table and code, some four characters a token, so that there is something
to render. `run` prints it as it is (`cli/answer.py`); `chat` goes through `chat/turn.py` and the terminal's display with Markdown
on and the keyboard watched. A third side renders nothing (`--markdown never`). Time counts from the first token to the last line.
Reported: the median over rounds, and the loss against `run` as the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from common import made_up, medians, save

PROMPT, CHARACTERS = 32, 4
TOKENS = {"tiny": 400, "small": 400}
DEFAULT_TOKENS = 96
TEXT = """## A heading

A paragraph with **bold words**, `code`, a [link](https://example.org/page) and enough plain text behind it to be wrapped at the
width of a terminal, because most of what a model says is plain text after all, sentence after sentence of it.

- one item of a list
- another, which is longer, *with emphasis*
  - and one within it

| name | value | meaning |
|------|------:|---------|
| alpha | 1.5 | how fast |
| beta | 20 | how long |

```python
def mean(values: list[float]) -> float:
    \"\"\"The mean of some values.\"\"\"
    return sum(values) / len(values)  # of at least one
```

"""


class Scripted:
    """An LLM whose tokens have another text."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.max_model_len = llm.max_model_len
        self.first = 0.0

    def stream(self, ids: list[int], params: Any) -> Iterator[Any]:
        pieces = itertools.cycle(TEXT[i : i + CHARACTERS] for i in range(0, len(TEXT), CHARACTERS))
        self.first = 0.0
        for output in self._llm.stream(ids, params):
            answer = output.outputs[0]
            text = "".join(itertools.islice(pieces, len(answer.delta_ids)))
            if answer.token_ids and not self.first:
                self.first = time.perf_counter()
            yield output._replace(outputs=(dataclasses.replace(answer, delta_text=text),))


def measure(model: str, num_tokens: int, threads: int, rounds: int) -> list[dict[str, float]]:
    """Tokens a second of each side, a dictionary a round. Runs on the terminal."""
    from nanovllm_cli import LLM, EngineConfig, SamplingParams
    from nanovllm_cli.chat.keys import AnswerKeys
    from nanovllm_cli.chat.terminal import TerminalDisplay
    from nanovllm_cli.chat.turn import Turn
    from nanovllm_cli.cli import signals
    from nanovllm_cli.cli.answer import TextPrinter
    from nanovllm_cli.cli.local import LocalAnswering
    from nanovllm_cli.cli.output import console

    llm = LLM(model, config=EngineConfig(threads=threads, max_model_len=2048, enable_prefix_caching=False))
    scripted: Any = Scripted(llm)
    ids = made_up(PROMPT, 0, llm.spec.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    screen = console()
    assert screen.out.moves_cursor, "this side belongs on a terminal"

    def run() -> None:
        printer = TextPrinter(screen, screen.answer, reasoning="auto", extract=False)
        for pieces in LocalAnswering(scripted, ids, params):
            signals.check()
            printer.step(pieces)
        screen.end_answer()

    def chat(markdown: bool) -> None:
        keys = AnswerKeys(0)
        display = TerminalDisplay(screen, markdown=markdown, keys=keys)
        answering = LocalAnswering(scripted, ids, params)
        turn = Turn(answering, display, shows_reasoning=True, limit=None, on_begin=lambda: None)
        turn.run()
        turn.flush()
        turn.end(None)
        keys.release()

    sides: dict[str, Callable[[], None]] = {
        "run": run,
        "chat": lambda: chat(True),
        "chat, no markdown": lambda: chat(False),
    }
    results = []
    for number in range(rounds + 1):
        speeds = {}
        for name in sorted(sides, key=lambda name: (list(sides).index(name) + number) % len(sides)):
            sides[name]()
            speeds[name] = (num_tokens - 1) / (time.perf_counter() - scripted.first)
        if number:  # the first round warms up
            results.append(speeds)
    return results


def on_a_terminal(command: list[str]) -> None:
    """Runs a command on a pseudo-terminal of 100 columns that somebody reads."""
    import fcntl
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    seen = bytearray()

    def drain() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(leader, 1 << 16):
                seen.extend(data)
                del seen[:-4000]

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    environ = os.environ | {"TERM": "xterm-256color"}
    done = subprocess.run(command, stdin=follower, stdout=follower, stderr=follower, env=environ, check=False)
    os.close(follower)
    reader.join(timeout=5)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{seen.decode(errors='replace')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=["tiny", "small", "qwen3-0.6b"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        results = measure(options.side, options.tokens, options.threads, options.rounds)
        options.output.write_text(json.dumps(results))
        return
    from shapes import SHAPES, write_gguf

    report: dict[str, Any] = {"threads": options.threads, "rounds": {}, "loss": {}}
    print("| model | run tok/s | chat tok/s | loss | chat, no markdown | loss |")
    print("|---|---|---|---|---|---|")
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            name = str(write_gguf(Path(folder) / "random.gguf", model)) if model in SHAPES else model
            result = Path(folder) / "result.json"
            command = [sys.executable, __file__, "--side", name, "--output", str(result)]
            command += ["--tokens", str(TOKENS.get(model, DEFAULT_TOKENS)), "--threads", str(options.threads)]
            on_a_terminal([*command, "--rounds", str(options.rounds)])
            rounds = json.loads(result.read_text())
        (found,) = medians({model: rounds}).values()
        loss = {side: 1 - statistics.median(each[side] / each["run"] for each in rounds) for side in rounds[0]}
        report["rounds"][model], report["loss"][model] = rounds, loss
        cells = [f"{found[side]:.1f} | {loss[side]:.1%}" for side in ("chat", "chat, no markdown")]
        print(f"| {model} | {found['run']:.1f} | {' | '.join(cells)} |", flush=True)
    save(options.output, report)


if __name__ == "__main__":
    main()
