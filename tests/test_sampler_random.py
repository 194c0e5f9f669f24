"""Philox: the published vectors, and that its numbers are uniform and unrelated."""

from __future__ import annotations

import numpy as np
import pytest

from nanovllm_cli.engine.sampling_random import DRAW_TOKEN, EXCLUDE_TOP_CHOICES, philox4x32, philox_uniforms

# Random123's kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    found = philox4x32(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert found[:, 0].tolist() == expected


def test_a_batch_of_counters_gives_what_each_gives_alone() -> None:
    counters = np.array([case[0] for case in KNOWN_ANSWERS], dtype=np.uint64).T
    keys = np.array([case[1] for case in KNOWN_ANSWERS], dtype=np.uint64).T
    assert philox4x32(counters, keys).T.tolist() == [case[2] for case in KNOWN_ANSWERS]


def test_a_uniform_is_made_of_the_first_two_words() -> None:
    expected = ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) / 2**53
    assert philox_uniforms([0], [0], DRAW_TOKEN).tolist() == [expected]


def test_uniforms_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in (
        philox_uniforms([1234] * 20_000, range(20_000), DRAW_TOKEN),
        philox_uniforms(range(20_000), [0] * 20_000, DRAW_TOKEN),
    ):
        counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
        assert ((counts - 400) ** 2 / 400).sum() < 85.4  # chi-square, 49 degrees of freedom, 0.1 %
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_streams_differ_by_every_bit_of_seed_position_and_purpose() -> None:
    numbers = {philox_uniforms([seed], [0], DRAW_TOKEN)[0] for seed in (0, *(1 << bit for bit in range(64)))}
    numbers |= {philox_uniforms([0], [1 << bit], DRAW_TOKEN)[0] for bit in range(62)}
    numbers |= {philox_uniforms([0], [0], EXCLUDE_TOP_CHOICES)[0]}
    assert len(numbers) == 65 + 62 + 1
    assert philox_uniforms([2**64 + 5], [0], DRAW_TOKEN) == philox_uniforms([5], [0], DRAW_TOKEN)
