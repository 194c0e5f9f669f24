"""A file mapped read-only, tensors that look into it, and giving its pages back.

The size is taken once, when the file is opened; every offset is checked against it by the readers. A file that
somebody cuts while it is mapped ends the process (SIGBUS), as with every mapped file.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import stat
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import torch

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.weights.json_file import check_is_the_file, reading

DOWNLOAD_AGAIN = "the file is damaged or incomplete: download it again"


class MappedFile:
    """`data` is a read-only window over the whole file; `size` is in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
                raise CheckpointError(f"{path}: not a regular file")
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size == 0:
                    raise CheckpointError(f"{path}: the file is empty", DOWNLOAD_AGAIN)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self._map)
        check_is_the_file(path, self._map[:64])
        self._bytes: np.ndarray | None = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def data(self) -> mmap.mmap:
        return self._map

    def array(self, start: int, num_bytes: int) -> np.ndarray:
        """`num_bytes` bytes from `start` on as uint8, without a copy. The array keeps the mapping alive. None at all may be asked
        for anywhere: readers place a tensor without elements where its file says."""
        assert self._bytes is not None, f"{self.path} is closed"
        if num_bytes == 0:
            return self._bytes[:0]
        assert 0 <= start <= start + num_bytes <= self.size
        return self._bytes[start : start + num_bytes]

    def tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of `shape` over the file: writing to it is a fault. A copy where the file's offset is not a multiple
        of the item size, which torch does not promise to read."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        array = self.array(start, num_bytes)
        if array.ctypes.data % dtype.itemsize:
            array = array.copy()
        _silence_read_only_warning()
        return torch.from_numpy(array).view(dtype).reshape(shape)

    def release(self, start: int, num_bytes: int) -> None:
        """Drops these pages from resident memory; touching them again reads them from the page cache or the disk."""
        if num_bytes == 0 or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, start + num_bytes - first)

    def close(self) -> None:
        """Unmaps, or leaves that to the last tensor which still looks into the file."""
        self._bytes = None
        with contextlib.suppress(BufferError):
            self._map.close()


@cache
def _silence_read_only_warning() -> None:
    """torch warns once in a process that a view of read-only memory must not be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(b"\0", dtype=np.uint8))
