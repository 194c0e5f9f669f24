"""The front of kernels/cpu_gather.py: what each process has of a tensor's columns comes together, now or in a recording."""

from __future__ import annotations

from typing import NamedTuple

from nanovllm_cli.kernels import cpu, cpu_gather
from nanovllm_cli.kernels.cpu import launch

THREADED_BYTES = 1 << 18
"""Of a tensor from which on it is worth to wake all threads for it, three times."""


class Gather(NamedTuple):
    """The arguments of `cpu_gather.gather`, in its order."""

    control: int
    own: int
    own_bytes: int
    out: int
    out_bytes: int
    rows: int
    pieces: int
    num_pieces: int
    chunk: int
    gives: int


def gather(it: Gather, *, in_one: bool = False) -> None:
    """in_one: by one kernel, however large it is."""
    if in_one or it.rows * it.out_bytes < THREADED_BYTES:
        launch(cpu_gather.gather, 0, "", it)
        return
    for first in range(0, it.rows, it.chunk):
        rows, own, out = min(it.chunk, it.rows - first), it.own + first * it.own_bytes, it.out + first * it.out_bytes
        if it.gives:
            launch(cpu_gather.give, cpu.SERIAL_WORK, "", (it.control, own, it.own_bytes, rows))
        launch(cpu_gather.meet, 0, "", (it.control,))
        table = it.pieces, it.num_pieces
        launch(cpu_gather.take, cpu.SERIAL_WORK, "", (it.control, own, it.own_bytes, out, it.out_bytes, rows, *table))
