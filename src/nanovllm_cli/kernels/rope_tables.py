"""cos and sin of one step's positions, on the device (rope_tables.cu), so that a decode graph needs nothing from the host.

Not covered: `dynamic` scaling, whose base is a power of each token's length. Its tables come from `layers.rope` on the host.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import Kernel, Launcher, check

THREADS = 256


def rope_tables(
    launcher: Launcher,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    attention_factor: float,
    lengths: torch.Tensor | None = None,
    long_frequencies: torch.Tensor | None = None,
    original_len: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [T, half] fp32, multiplied by attention_factor, for positions [T] int64 and frequencies [half] fp32.

    For `longrope` also lengths [T] int64 and long_frequencies [half], which tokens with lengths past original_len take. See
    `reference.rope_tables`.
    """
    tokens, half = positions.shape[0], frequencies.shape[0]
    assert (lengths is None) == (long_frequencies is None)
    check(positions, launcher, torch.int64, tokens)
    check(frequencies, launcher, torch.float32, half)
    if lengths is not None and long_frequencies is not None:
        check(lengths, launcher, torch.int64, tokens)
        check(long_frequencies, launcher, torch.float32, half)
    cos, sin = (torch.empty((tokens, half), dtype=torch.float32, device=positions.device) for _ in range(2))
    count = tokens * half
    if count:
        args = (
            positions, lengths, frequencies, long_frequencies, cos, sin,
            np.int64(count), np.int32(half), np.int64(original_len), np.float32(attention_factor),
        )  # fmt: skip
        launcher.launch(variant(), (-(-count // THREADS), 1, 1), (THREADS, 1, 1), args)
    return cos, sin


def variant() -> Kernel:
    return Kernel("rope_tables", "rope_tables", ())


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant()]
