"""Runs planted.cu under the sanitizers: each kind of error in a process of its own, which it ends. Prints reports as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from emulation.emulator import Emulator, load
from nanovllm_cli.kernels.kernel import Kernel

KERNEL = Kernel(str(Path(__file__).with_name("planted")), "planted", ())
KINDS = ("sound", "global store", "global load", "dynamic shared", "static shared", "stack", "misaligned", "overflow")
THREADS = 64


def report(kind: str) -> tuple[int, str]:
    """Exit status of the process and what it wrote to standard error."""
    with tempfile.TemporaryFile("w+") as errors:
        if (process := os.fork()) == 0:
            os.dup2(errors.fileno(), 2)
            launch(kind)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        errors.seek(0)
        return status, errors.read()


def launch(kind: str) -> None:
    data = torch.zeros(2 * THREADS)
    args = (data, np.int32(data.numel()), np.int32(KINDS.index(kind)))
    for _ in range(3):  # stacks of threads are used again
        Emulator(7).launch(KERNEL, (5, 1, 1), (THREADS, 1, 1), args, THREADS * 4)


if __name__ == "__main__":
    load(KERNEL)
    json.dump({kind: report(kind) for kind in KINDS}, sys.stdout)
