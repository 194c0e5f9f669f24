"""What a calibration sees against what a model computes."""

from __future__ import annotations

from pathlib import Path

import torch

from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quantization.original import open_original
from nanovllm_cli.quantization.verify import trace
from nanovllm_cli.quantization.walk import Walk


def check_walk(folder: Path, vocab_size: int) -> None:
    """Each layer of a float32 folder is calibrated on the residual stream that the engine has before it."""
    ids = torch.randint(2, vocab_size, (90,), generator=torch.Generator().manual_seed(5)).tolist()
    streams = trace(folder, ids, "float32", NullProgress()).streams
    with open_original("m", folder) as original:
        walk = Walk(original, [ids], NullProgress())
        for layer in range(original.spec.num_layers):
            walk.enter(layer)
            (found,) = walk.calibration.residuals
            assert torch.allclose(found, streams[layer], rtol=1e-4, atol=1e-4 * float(streams[layer].abs().max()))
