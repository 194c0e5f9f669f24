"""Tasks of a mixture of experts on a GPU: what `route` makes of the router's logits, and the kernels of few rows work off.

Legend: T tokens, P pairs of a token and an expert it takes, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm_cli.kernels.kernel import Kernel, Launcher, check

MATRIX_WORDS = 4
"""Addresses of a matrix: of three tensors and the bias."""
FEW_ROWS, MANY_ROWS = 8, 64
"""Most pairs of a task: for kernels of few rows, and for those of many (gemm.cu)."""


class Tasks(NamedTuple):
    """words [most_tasks, words_of(rows)] int64, on the device. A pair is one of `tokens` tokens and one of the `taken` of so many
    experts that it takes, and has the number token * taken + place. Each is in one task, of `rows` pairs at the most. Tasks at
    the end may have none."""

    words: torch.Tensor
    tokens: int
    taken: int
    experts: int
    rows: int = FEW_ROWS

    @property
    def num_pairs(self) -> int:
        return self.tokens * self.taken

    @property
    def most_rows(self) -> int:
        """Of a task: an expert has a token once."""
        return min(self.rows, self.tokens)

    @property
    def likely(self) -> float:
        """Tasks with pairs, by the mean of tokens that choose evenly and each by itself; one of an expert's is half full."""
        in_use = self.experts * (1 - (1 - self.taken / self.experts) ** self.tokens)
        return max(in_use, self.num_pairs / self.rows + in_use / 2)


def words_of(rows: int) -> int:
    """Of int64, as experts.cuh has them: addresses of an expert's two matrices; as int32, the number of pairs, and pairs."""
    return -(-(8 * 2 * MATRIX_WORDS + 4 * (1 + rows)) // 128) * 16


def most_tasks(tokens: int, taken: int, num_experts: int, rows: int = FEW_ROWS) -> int:
    """Tasks there can be: each expert in use has one that is not full, at the most."""
    pairs = tokens * taken
    return min(pairs, min(num_experts, pairs) + pairs // rows)


def from_tasks(kernel: Kernel, matrix: int) -> Kernel:
    """The kernel for rows of tasks and the first (0) or the second (1) matrix of their experts."""
    return kernel._replace(constants=(*kernel.constants, ("EXPERTS", matrix + 1)))


def blocks_of(tasks: Tasks, tiles: int, at_once: int) -> int:
    """Blocks of each task, which has so many tiles, on a GPU that runs so many blocks at once."""
    return max(1, min(tiles, int(at_once / tasks.likely)))


def check_rows(launcher: Launcher, x: torch.Tensor, tasks: Tasks, matrix: int, width: int) -> None:
    assert tasks.tokens > 0, "no tokens have no tasks"
    check(x, launcher, x.dtype, tasks.num_pairs if matrix else tasks.tokens, width)
    most = most_tasks(tasks.tokens, tasks.taken, tasks.experts, tasks.rows)
    check(tasks.words, launcher, torch.int64, most, words_of(tasks.rows))
