"""`run --prompt-cache FILE`: what was read of a prompt outlasts the process, for the next one that begins like it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_cli.cli import signals
from nanovllm_cli.errors import OutputError, UsageError
from nanovllm_cli.prompts import num_equal
from nanovllm_cli.vision_spec import TokenIds

if TYPE_CHECKING:
    from nanovllm_cli.llm import LLM

ENOUGH = 7 / 8
"""Of a prompt. A file that had so much of it stays as it is: to write it takes longer than to read a few tokens again."""

logger = logging.getLogger(__name__)


class PromptCache:
    """One file, for the prompts of one run: their common beginning, or one prompt with its answer, up to the first image."""

    def __init__(self, path: Path, *, is_read_only: bool) -> None:
        self._path = path
        self._is_read_only = is_read_only
        self._common: list[int] | None = None
        self._answer: list[int] = []
        self._num_found = 0

    def read(self, llm: LLM, prompt: Sequence[int] | None = None) -> None:
        """What the file has of a prompt, or all of it, before anything else is read."""
        with signals.held(firmly=False):
            found = llm.load_kv(self._path, prompt)
        logger.info("%s: %d tokens", self._path, found)

    def note(self, prompt: Sequence[int], num_found: int, answer: Sequence[int] = ()) -> None:
        """A prompt has been read, of which so many tokens were there already; the answer to it, where it is the only one."""
        images = prompt.images if isinstance(prompt, TokenIds) else ()
        own = list(prompt[: images[0].start] if images else prompt)
        if self._common is None:
            self._common, self._num_found = own, num_found
            self._answer = [] if images else list(answer)
        else:
            self._common, self._answer = self._common[: num_equal(self._common, own)], []
            self._num_found = min(self._num_found, num_found)  # the first one's: what others found, it had read

    def write(self, llm: LLM) -> None:
        """Replaces the file where that is worth it. Raises OutputError and DoesNotFitError."""
        if self._is_read_only or not self._common or self._num_found >= ENOUGH * len(self._common):
            return
        with signals.held(firmly=False):
            # Where angles follow the prompt's length (ModelSpec.rope_regime), that with its answer is another prompt.
            kept = llm.save_kv(self._common + self._answer, self._path) or llm.save_kv(self._common, self._path)
        if kept:
            logger.info("%s: %d tokens are kept", self._path, kept)
        else:
            logger.warning("%s: nothing is kept: no whole block of the prompt can be found again", self._path)


def prompt_cache(path: str | None, *, is_read_only: bool) -> PromptCache | None:
    """Raises UsageError and OutputError for what can't be such a file, before anything slow happens."""
    if path is None:
        if is_read_only:
            raise UsageError("--prompt-cache-ro has no meaning without --prompt-cache")
        return None
    target = Path(path)
    if path in ("", "-") or (target.exists() and not _is_ours(target)):
        raise UsageError(f"--prompt-cache {path!r}: no file that this option has made", "a new name makes one")
    if is_read_only and not target.exists():
        raise UsageError(f"--prompt-cache {path}: no such file", "without --prompt-cache-ro it is made")
    if not is_read_only and not os.access(target.resolve().parent, os.W_OK):
        raise OutputError(f"cannot write {path}: no folder that you may write to", "--prompt-cache-ro leaves it as it is")
    return PromptCache(target, is_read_only=is_read_only)


def _is_ours(path: Path) -> bool:
    """Whether it may be replaced. Raises OutputError."""
    if not path.is_file():
        return False
    with signals.insisting():
        from nanovllm_cli.engine.kv_file import MAGIC
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as failure:
        raise OutputError(f"cannot read {path}: {failure.strerror}") from failure
