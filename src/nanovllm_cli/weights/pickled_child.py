"""The process that opens pickled weights for `pickled.py`: torch first, whose own memory is not counted, then
limits, then answers until stdin ends.

Answers are eight bytes of length and a JSON object; the bytes of a tensor's rows follow without one.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

from nanovllm_cli import system

MEMORY_BYTES = (
    8 << 30
)  # of address space, beside three times the files: mapped, and copied where a file is of the old format
CPU_SECONDS = 3600
MAX_REPEATS = 4  # bytes of all tensors for one of the files; tied weights come twice


def limit(files: list[Path]) -> None:
    """No file may grow, no core is dumped, memory and time end somewhere; and it ends with its parent."""
    size = sum(file.stat().st_size for file in files if file.is_file())
    for what, most in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, CPU_SECONDS)):
        _, hard = resource.getrlimit(what)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (bound, bound))
    system.limit_address_space(MEMORY_BYTES + 3 * size)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this one


def load(files: list[Path]) -> dict[str, Any]:
    """Tensor name -> tensor, of all files. ValueError for anything else that they hold."""
    import torch

    tensors: dict[str, Any] = {}
    for file in files:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            state = torch.load(
                file, map_location="cpu", weights_only=True
            )  # the format before torch 1.6 has no mapping
        if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
            state = state["state_dict"]
        if not isinstance(state, dict):
            raise ValueError(f"{file.name} holds a {type(state).__name__}, not tensors by name")
        for name, tensor in state.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                raise ValueError(f"{file.name}: {str(name)[:100]!r} is not a dense tensor with a name")
            if tensor.is_quantized or tensor.device.type != "cpu":
                raise ValueError(f"{file.name}: the tensor {name[:100]!r} is quantized, or has no data")
            if name in tensors:
                raise ValueError(f"the tensor {name[:100]!r} is in two files")
            tensors[name] = tensor.detach()
    size, stored = sum(tensor.nbytes for tensor in tensors.values()), sum(file.stat().st_size for file in files)
    if size > MAX_REPEATS * stored:  # strides of 0, or many views of one storage
        raise ValueError(f"its tensors would take {size} bytes, which its {stored} cannot hold")
    return tensors


def listing(tensors: dict[str, Any]) -> dict[str, Any]:
    from nanovllm_cli.weights.writer import SAFETENSORS_DTYPES

    read = {name for name, tensor in tensors.items() if tensor.dtype in SAFETENSORS_DTYPES and not tensor.is_complex()}
    unknown = next((name for name in tensors if name not in read), None)
    if unknown is not None:
        raise ValueError(f"the tensor {unknown[:100]!r} has the type {tensors[unknown].dtype}, which is not read")
    return {
        "tensors": [
            {"name": name, "dtype": SAFETENSORS_DTYPES[tensor.dtype], "shape": list(tensor.shape)}
            for name, tensor in tensors.items()
        ]
    }


def send(out: BinaryIO, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    out.write(len(data).to_bytes(8, "little") + data)


def main(files: list[Path]) -> None:
    from nanovllm_cli.weights.writer import write_tensor  # and torch with it

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    tensors: dict[str, Any] = {}
    limit(files)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            if "list" in request:
                tensors = load(files)
                send(out, listing(tensors))
            else:
                tensor = tensors[request["name"]]
                rows = tensor if request["rows"] is None else tensor[slice(*request["rows"])]
                assert rows.numel() * rows.dtype.itemsize == request["num_bytes"]
                send(out, {"ok": True})
                write_tensor(out, rows)
        except Exception as error:
            send(out, {"error": reason(error)})
        out.flush()


def reason(error: Exception) -> str:
    """One line. torch's own explains at length how to switch its protection off."""
    text = str(error)
    if "weights_only" in text or "WeightsUnpickler" in text or "Unsupported global" in text:
        wanted = text.partition("GLOBAL ")[2].split(" ")[0]
        return "it asks for code to be run" + (f" ({wanted[:100]})" if wanted else "") + ", which is refused"
    return f"it cannot be read: {text.splitlines()[0][:200] if text else type(error).__name__}"


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
