"""What is asked of an engine or a server: requests, each a prompt and how many tokens its answer has.

    random_lengths(…)      made-up prompts of given lengths
    prefix_repetition(…)   made-up prompts of which groups begin alike: what a prefix cache is for
    sharegpt(…)            first questions and the lengths of their answers, from a file of conversations
    prompts_file(…)        one prompt a line: text, or JSON with "prompt" and perhaps "max_tokens"

Made-up prompts are token ids where the vocabulary is known, and words of one syllable where it is not (a server of somebody
else's), of which most tokenizers make one token each. A seed gives the same requests everywhere. Lengths are in tokens.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm_cli.bench.record import read_text
from nanovllm_cli.errors import UsageError

MAX_FILE_BYTES = 1 << 30
# What vLLM leaves out of a file of conversations: too short to mean anything, too long to be usual.
MIN_LEN, MAX_PROMPT_LEN, MAX_TOTAL_LEN = 4, 1024, 2048
CHARACTERS_A_TOKEN = 4

Count = Callable[[str], int]
"""How many tokens a text has."""


class Request(NamedTuple):
    """prompt: text, or token ids. max_tokens: the length of the answer, which goes on past the model's own end."""

    prompt: str | list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in their order. name, settings: how they came to be, for the result."""

    name: str
    requests: list[Request]
    settings: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)


def drawn_ids(draw: random.Random, count: int, vocab_size: int, reserved: Collection[int]) -> list[int]:
    """Token ids of a made-up prompt. reserved: those that stand for images or sounds, which such a prompt has none of. They
    become the one beside them, so that a seed gives all others as without them."""

    def plain(token: int) -> int:
        return next(each for each in itertools.chain(range(token, -1, -1), range(token, vocab_size)) if each not in reserved)

    return [plain(draw.randrange(vocab_size)) for _ in range(count)]


def estimated_count(text: str) -> int:
    """Tokens of a text where no tokenizer is at hand: four characters each, as in English."""
    return -(-len(text) // CHARACTERS_A_TOKEN)


def random_lengths(
    count: int,
    input_len: int,
    output_len: int,
    *,
    range_ratio: float = 0.0,
    vocab_size: int | None = None,
    reserved: Collection[int] = (),
    seed: int = 0,
) -> Workload:
    """`count` prompts that have nothing in common. Lengths are uniform between (1 - range_ratio) and (1 + range_ratio) times what
    is given, and at least 1. reserved: see drawn_ids. Raises UsageError."""
    _check(count=count, input_len=input_len, output_len=output_len)
    if not 0.0 <= range_ratio < 1.0:
        raise UsageError(f"a range ratio lies between 0 and 1 (excluded), not {range_ratio}")
    draw = random.Random(seed)
    requests = []
    for _ in range(count):
        lens = [draw.randint(*_around(length, range_ratio)) for length in (input_len, output_len)]
        requests.append(Request(_made_up(draw, lens[0], vocab_size, reserved), lens[1]))
    settings = {"input_len": input_len, "output_len": output_len, "range_ratio": range_ratio, "seed": seed}
    return Workload("random", requests, settings)


def prefix_repetition(
    count: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    *,
    num_prefixes: int = 10,
    vocab_size: int | None = None,
    reserved: Collection[int] = (),
    seed: int = 0,
) -> Workload:
    """`count` prompts in random order, each one of `num_prefixes` beginnings and an end of its own. reserved: see drawn_ids.
    Raises UsageError."""
    _check(count=count, prefix_len=prefix_len, suffix_len=suffix_len, output_len=output_len, num_prefixes=num_prefixes)
    draw = random.Random(seed)
    prefixes = [_made_up(draw, prefix_len, vocab_size, reserved) for _ in range(num_prefixes)]
    requests = [
        Request(_joined(prefixes[i % num_prefixes], _made_up(draw, suffix_len, vocab_size, reserved)), output_len)
        for i in range(count)
    ]
    draw.shuffle(requests)
    settings = {
        "prefix_len": prefix_len, "suffix_len": suffix_len, "output_len": output_len, "num_prefixes": num_prefixes, "seed": seed
    }  # fmt: skip
    return Workload("prefix", requests, settings)


def sharegpt(
    path: str | Path, count: int, *, output_len: int | None = None, tokens: Count = estimated_count, seed: int = 0
) -> Workload:
    """Conversations: [{"conversations": [{"value": question}, {"value": answer}, …]}, …], as ShareGPT's dump has them.

    The first question is the prompt, the length of its answer is the answer's (or `output_len`). What vLLM leaves out is left out
    here: either side below 4 tokens, a question above 1,024, both above 2,048. Raises UsageError.
    """
    _check(count=count, output_len=1 if output_len is None else output_len)
    try:
        dialogues = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(dialogues, list):
        raise UsageError(f"{path} is not a list of conversations")
    pairs = [pair for dialogue in dialogues if (pair := _first_turns(dialogue)) is not None]
    random.Random(seed).shuffle(pairs)
    requests: list[Request] = []
    for question, answer in pairs:
        if len(requests) == count:
            break
        asked, said = tokens(question), tokens(answer) if output_len is None else output_len
        fits = asked <= MAX_PROMPT_LEN and asked + said <= MAX_TOTAL_LEN
        if fits and asked >= MIN_LEN and (said >= MIN_LEN or output_len is not None):
            requests.append(Request(question, said))
    settings = {"path": str(path), "output_len": output_len, "seed": seed}
    return Workload("sharegpt", _enough(requests, count, path), settings)


def prompts_file(path: str | Path, count: int | None, output_len: int) -> Workload:
    """The first `count` prompts of a file (all with None), in order. A line is a prompt, or, where it is a JSON object, holds one
    under "prompt" and perhaps its answer's length under "max_tokens". Raises UsageError."""
    _check(count=1 if count is None else count, output_len=output_len)
    requests: list[Request] = []
    for number, line in enumerate(_read(path).split("\n"), 1):  # splitlines would cut within JSON's strings
        if len(requests) == count:
            break
        if line.strip():
            requests.append(_request(line.removesuffix("\r"), f"{path}:{number}", output_len))
    return Workload("file", _enough(requests, count, path), {"path": str(path), "output_len": output_len})


def _request(line: str, where: str, output_len: int) -> Request:
    if not line.lstrip().startswith("{"):
        return Request(line, output_len)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    prompt, length = value.get("prompt"), value.get("max_tokens", output_len)
    if not isinstance(prompt, str) or not prompt:
        raise UsageError(f'{where} has no text under "prompt"')
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise UsageError(f'{where}: "max_tokens" is not a number of tokens')
    return Request(prompt, length)


def _first_turns(dialogue: Any) -> tuple[str, str] | None:
    turns = dialogue.get("conversations", dialogue.get("conversation")) if isinstance(dialogue, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    values = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    question, answer = values
    return (question, answer) if isinstance(question, str) and isinstance(answer, str) else None


def _enough(requests: list[Request], count: int | None, path: str | Path) -> list[Request]:
    if not requests or (count is not None and len(requests) < count):
        raise UsageError(f"{path} has {len(requests)} usable prompts, {count or 'some'} were asked for", "lower --num-prompts")
    return requests


def _read(path: str | Path) -> str:
    return read_text(Path(path), MAX_FILE_BYTES, "a dataset")


def _made_up(draw: random.Random, length: int, vocab_size: int | None, reserved: Collection[int]) -> str | list[int]:
    if vocab_size is not None:
        return drawn_ids(draw, length, vocab_size, reserved)
    return " ".join(draw.choices(_WORDS.split(), k=length))


def _joined(first: str | list[int], second: str | list[int]) -> str | list[int]:
    if isinstance(first, str) or isinstance(second, str):
        return f"{first} {second}"
    return first + second


def _around(length: int, ratio: float) -> tuple[int, int]:
    return max(1, int(length * (1.0 - ratio))), max(1, int(length * (1.0 + ratio)))


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise UsageError(f"{name.replace('_', ' ')} must be at least 1, not {number}")


_WORDS = """
air arm art back ball bank bed bird boat book box boy bread case chair child city cloud coat cold corn cup day deep
dog door dream dry dust east egg end eye face farm field fire fish floor food foot full game gate girl glass gold good
grass green hair half hand hard head heart hill home horse hot house ice iron island key king lake land leaf leg light
line lion long low man map mark milk mind moon most mouth name neck new night north nose oil old page park part past
path peace pen place plan plant pool rain red rest rice ring river road rock roof room rope rose round salt sand
school sea seed ship shop side sign silk sky sleep slow small snow soft song sound south star stone storm street sun
table tall team test time town tree voice wall warm water wave way week west wheel white wide wind wine wing winter
wood word work world year young
"""
