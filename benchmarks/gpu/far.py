"""A section about weights that stay in the machine's memory: how fast the GPU reads them there, by copies and by kernels of one
row, and a model that has nothing on the GPU against the same that has all."""

from __future__ import annotations

from typing import Any

import torch

from gpu.engine_runs import measure, room
from gpu.engines import ALL_LAYERS, gpu, load, overlaps, release
from gpu.quantized import LOADED_ROWS, first_rows, quantized_rows, repeated
from gpu.report import SMALLEST
from gpu.sections import Output
from gpu.shapes import SHAPES
from gpu.timing import seconds_in_graph, seconds_of
from nanovllm_cli.kernels.device import Device
from nanovllm_cli.quant.cuda_far import FarMemory
from nanovllm_cli.quant.cuda_formats import CudaFormats
from nanovllm_cli.quant.format_names import parse_format

COPIED_BYTES = 256 << 20
OUTPUTS, WIDTH = 12288, 4096
NAMES = ("bf16", "int4", "q4_k")
COUNTS = (1, 8, 64)
"""Rows: two that read a weight where it is, and one that copies it."""
BF16 = torch.bfloat16


def section(output: Output) -> None:
    output.attempt(copies, output, gpu(), COPIED_BYTES)
    for name in NAMES:
        output.attempt(products, output, gpu(overlaps()), name, OUTPUTS, WIDTH)
        release()
    output.attempt(_models, output)


def copies(output: Output, device: Device, num_bytes: int) -> None:
    pages = device.host_pages(num_bytes)
    near = torch.empty(num_bytes, dtype=torch.uint8, device=device.launcher.device)
    pages.host.random_()
    by_copy = seconds_of(lambda: near.copy_(pages.host, non_blocking=True))
    is_right = torch.equal(near, pages.seen)
    output.put("copy", {"GB/s": num_bytes / by_copy / 1e9, "seen alike": is_right})
    if not is_right:
        raise RuntimeError("a kernel sees other bytes than the host has")


def products(output: Output, device: Device, name: str, outputs: int, width: int) -> None:
    """Of one far weight, and whether they are those of the same on the GPU."""
    formats = CudaFormats(device.launcher, rounds=True, deterministic=False)
    form = None if name == "bf16" else parse_format(name)
    storages = [formats.make(form, outputs, width, BF16, far) for far in (FarMemory(device), None)]
    rows: Any = torch.randn(outputs, width, device=device.launcher.device).to(BF16) if form is None else None
    many = None if form is None else repeated(quantized_rows(form, width, device.launcher.device))
    for storage in storages:
        for first in range(0, outputs, LOADED_ROWS):
            count = min(LOADED_ROWS, outputs - first)
            storage.load_rows(first, rows[first : first + count] if many is None else first_rows(many, count))
    for count in COUNTS:
        x = torch.randn(count, width, device=device.launcher.device).to(BF16)
        same = torch.equal(*(storage.matmul(x, None, BF16) for storage in storages))
        seconds = seconds_in_graph([lambda x=x: storages[0].matmul(x, None, BF16)], repeats=5, least=2)  # type: ignore[misc]
        output.put(f"{name}, {count}", {"GB/s": storages[0].num_bytes / seconds / 1e9, "same bits": same})


def _models(output: Output) -> None:
    shape, answers = SHAPES[SMALLEST], []
    for title, layers in (("on the GPU", ALL_LAYERS), ("in the machine's memory", 0)):
        loaded = load(shape, gpu(), **room(1, 512), n_gpu_layers=layers)
        result, last = measure(loaded, shape, 1, 32, rounds=1)
        answers.append(last.outputs[0].outputs[0].token_ids)
        output.put(f"{SMALLEST} {title}", result | {"same tokens": answers[-1] == answers[0]})
        del loaded
        release()
