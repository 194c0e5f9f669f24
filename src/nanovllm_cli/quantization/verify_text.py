"""Whether two models make the same tokens of the same words: texts of many kinds, control tokens, ends, chat templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nanovllm_cli.errors import NanovllmError, UnsupportedError
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.gguf_export import PROBES
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.files import folder_of
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.tokenizer import end_ids, load_tokenizer

Messages = Sequence[Mapping[str, Any]]
CHATS: tuple[Messages, ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is 1 + 1? \n"}],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "<|im_end|> Ünïcödé 🙂"},
    ],
)


class Words(Protocol):
    """One side. ends, controls: ids that end an answer, and control tokens; None where that is not known."""

    ends: set[int] | None
    controls: dict[str, int] | None

    def encode(self, text: str) -> list[int]: ...

    def render(self, messages: Messages) -> str | None:
        """The prompt; None without a template, or where it refuses the messages."""


class OurWords:
    def __init__(self, path: Path) -> None:
        with open_checkpoint(path) as checkpoint:
            self.tokenizer: Tokenizer = load_tokenizer(checkpoint)
            spec = read_spec(checkpoint, open_reader(checkpoint))
            ends = end_ids(checkpoint.generation_config, self.tokenizer, spec.vocab_size)
        self.ends: set[int] | None = set(ends) if spec.has_head else None
        self.controls: dict[str, int] | None = dict(self.tokenizer.control_tokens)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def render(self, messages: Messages) -> str | None:
        if "default" not in self.tokenizer.chat_templates:
            return None
        try:
            return ChatTemplate.of(self.tokenizer).render(messages)
        except NanovllmError:
            return None


def loaded_by_transformers(path: Path, what: str, load: Callable[[Any, Path], Any]) -> Any:
    """What transformers makes of a model's folder, with no code of the model's own. what: it is called, in front of the folder.
    UnsupportedError where transformers is not installed, or refuses it, and for a GGUF file: what lies beside that is another
    model."""
    try:
        import transformers
    except ImportError as failure:
        raise UnsupportedError("transformers is not installed", "pip install transformers") from failure
    if path.suffix == ".gguf":
        raise UnsupportedError(f"{path} is GGUF, and transformers reads folders", "nanovllm convert makes one of it")
    folder = folder_of(path)
    try:
        return load(transformers, folder)
    except Exception as failure:  # whatever a library does with a model that it can't read
        reason = str(failure).strip().split("\n")[0][:200]
        raise UnsupportedError(f"transformers can't load {what}{folder}: {reason}", "name a folder that it can") from failure


class TransformersWords:
    """Raises what `loaded_by_transformers` raises."""

    ends: set[int] | None = None
    controls: dict[str, int] | None = None

    def __init__(self, path: Path) -> None:
        def load(library: Any, folder: Path) -> Any:
            return library.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)

        self._tokenizer = loaded_by_transformers(path, "the tokenizer of ", load)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)

    def render(self, messages: Messages) -> str | None:
        if not self._tokenizer.chat_template:
            return None
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        except Exception:  # a template that refuses
            return None


def differences(a: Words, b: Words) -> list[str]:
    """What differs, a line each; of many texts the first."""
    found = []
    for text in PROBES:
        one, other = a.encode(text), b.encode(text)
        if one != other:
            at = _parting(one, other)
            found.append(f"the text {text[:40]!r}: token {at} of {one[at : at + 3]} … and {other[at : at + 3]} …")
            break
    if a.ends is not None and b.ends is not None and a.ends != b.ends:
        found.append(f"tokens that end an answer: {sorted(a.ends)} and {sorted(b.ends)}")
    if a.controls is not None and b.controls is not None and a.controls != b.controls:
        apart = sorted(text for text, _ in a.controls.items() ^ b.controls.items())
        found.append(f"control tokens: {', '.join(dict.fromkeys(apart))[:200]}")
    for messages in CHATS:
        one_chat, other_chat = a.render(messages), b.render(messages)
        if one_chat != other_chat:
            found.append(f"the template, for {messages[-1]['content']!r}: {_around(one_chat, other_chat)}")
            break
    return found


def _around(one: str | None, other: str | None) -> str:
    """Where two renderings part."""
    if one is None or other is None:
        return f"{'nothing' if one is None else 'a prompt'} and {'nothing' if other is None else 'a prompt'}"
    at = _parting(one, other)
    return f"character {at}, {one[at : at + 30]!r} and {other[at : at + 30]!r}"


def _parting(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
