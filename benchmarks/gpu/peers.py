"""transformers on the same card, in the same run: model.generate with a StaticCache, its decode step compiled by torch.compile
with CUDA graphs, which is what generate does by itself with such a cache. Random weights of the same shape, the same lengths."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from gpu.sections import Output
from gpu.shapes import SHAPES, Shape
from gpu.workload import PROMPT, prompt

SHORT, LONG = 16, 144
"""Answers whose times differ by the steps between them, and by nothing else."""
BATCHES = (1, 32)


def transformers_section(output: Output) -> None:
    shape = SHAPES["qwen3-0.6b"]
    model = make_model(shape, "cuda")
    for batch in BATCHES:
        torch._dynamo.reset()  # else the second size is compiled for any size, and slower
        output.put(f"compiled, {batch}", decode_rate(model, shape, batch, SHORT, LONG, cache="static"))
    for batch in BATCHES:
        output.put(f"eager, {batch}", decode_rate(model, shape, batch, SHORT, 3 * SHORT, cache="dynamic"))


def make_model(shape: Shape, device: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {k: v for k, v in shape.config.items() if k not in ("architectures", "model_type")}
    settings |= {"rope_theta": dict(shape.rope)["rope_theta"], "bos_token_id": None, "eos_token_id": None}  # transformers 4's
    config = AutoConfig.for_model(shape.config["model_type"], **settings)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def decode_rate(model: Any, shape: Shape, batch: int, short: int, long: int, cache: str) -> dict[str, Any]:
    """Tokens a second between the short and the long answer. The first calls, which compile, are not counted."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    ids = torch.tensor([prompt(PROMPT, i, shape.vocab) for i in range(batch)], device=model.device)

    def seconds(count: int) -> float:
        """Stopped from outside: an answer that says how long it will be has a StaticCache, and compiled code, of that length."""

        def ends(so_far: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            return torch.full((batch,), so_far.shape[1] >= PROMPT + count, device=so_far.device)

        begin = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=long, do_sample=False, eos_token_id=None, pad_token_id=0,
            stopping_criteria=[ends], **({} if cache == "dynamic" else {"cache_implementation": "static"}),
        )  # fmt: skip
        if out.is_cuda:
            torch.cuda.synchronize()
        assert out.shape == (batch, PROMPT + count)
        return time.perf_counter() - begin

    begin = time.perf_counter()
    for _ in range(2):
        seconds(short)
    warm = time.perf_counter() - begin
    times = sorted(seconds(long) - seconds(short) for _ in range(3))
    return {"tok/s": batch * (long - short) / times[1], "ms a step": 1e3 * times[1] / (long - short), "warm-up s": warm}
