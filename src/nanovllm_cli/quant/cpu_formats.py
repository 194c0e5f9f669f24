"""Which storage keeps which format on a CPU."""

from __future__ import annotations

import torch

from nanovllm_cli.quant.cpu_integer import CpuInteger
from nanovllm_cli.quant.cpu_storage import CpuStorage
from nanovllm_cli.quant.cpu_values import CpuValues
from nanovllm_cli.quant.format import Affine, Blocks, Format, Integer


def make_storage(form: Format, num_rows: int, width: int, dtype: torch.dtype, *, rounds: bool) -> CpuStorage:
    """An empty weight in a format; dtype is what is computed in. rounds: activations become 8 bits where the format says so.

    UnsupportedError for widths and groups that don't fit.
    """
    if rounds and (isinstance(form, Affine | Blocks) or (isinstance(form, Integer) and form.activation == "int8")):
        return CpuInteger(form, num_rows, width, dtype)
    return CpuValues(form, num_rows, width, dtype, rounds=rounds)
