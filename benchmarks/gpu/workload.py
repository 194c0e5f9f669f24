"""Requests of the engine's runs: fixed by a seed, the same on every machine."""

from __future__ import annotations

import random
from typing import NamedTuple

PROMPT = 128
"""Tokens before a decode that is measured."""


class Request(NamedTuple):
    prompt: list[int]
    answer_len: int


def prompt(length: int, salt: int, vocab: int) -> list[int]:
    return [(7919 * (i + 1) + 104729 * salt) % vocab for i in range(length)]


def nano_vllm(sequences: int = 256, longest: int = 1024) -> list[Request]:
    """nano-vllm's bench.py: lengths of prompts and answers uniform from 100 to 1024; its answers have 133,966 tokens in all."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, longest))] for _ in range(sequences)]
    return [Request(ids, draw.randint(100, longest)) for ids in prompts]
