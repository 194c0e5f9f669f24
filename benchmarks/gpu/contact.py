"""First contact with a GPU, in a minute: the vendor's products that the engine asks torch for; and steps of a small model,
launched one by one, recorded, and recorded with kernels that overlap, against transformers. What is wrong here is wrong in all
that follows; what hangs here takes no bar with it, and where that is kernels that overlap, the sections behind do without."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.checks import NEAR_TIE
from gpu.engines import gpu, load, release, serve
from gpu.peers import make_model
from gpu.report import EAGER, LAST_BEGUN, ONE_BY_ONE, OVERLAPPED, SMALLEST
from gpu.sections import Output
from gpu.shapes import SHAPES, RandomCheckpoint, Shape
from gpu.workload import Request, prompt
from nanovllm_cli.kernels import library, scaled_matmul
from nanovllm_cli.kernels.device import Device
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.launcher import CudaLauncher
from nanovllm_cli.kernels.scaled_matmul import BLOCK, Scaled

LAYERS = 2
SEQUENCES, PROMPT_LEN, ANSWER_LEN = 8, 600, 24
ROOM = {"num_blocks": 64 * SEQUENCES, "max_num_seqs": SEQUENCES, "max_model_len": 1024, "max_num_batched_tokens": 8192}
"""All prompts are one step, and each is long enough for torch's flash attention."""
WAYS: tuple[tuple[str, bool, dict[str, Any]], ...] = (
    (EAGER, False, {"eager": True}),
    (ONE_BY_ONE, False, {}),
    (OVERLAPPED, True, {}),
)
"""Programmatic launch, and settings."""
MOST_ERROR = 1e-2
ROWS, OUTPUTS, WIDTH = 20, 272, 512
NARROW, FULL = (20, 3072, 9216), (300, 8192, 512)
"""Rows, outputs and columns of products for which a library likes to divide the columns among blocks; and that fill a GPU."""
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def section(output: Output) -> None:
    for name, find in products(CudaLauncher()).items():
        output.attempt(_judge, output, name, find)
    shape = replace(SHAPES[SMALLEST], layers=LAYERS, tied=False)  # a tied head of random weights repeats the last token
    found: list[list[tuple[int, ...]]] = []
    for title, programmatic, settings in WAYS:
        output.put(LAST_BEGUN, title)
        output.attempt(_answer, output, title, shape, programmatic, settings, found)
        release()
        if title == ONE_BY_ONE:  # before kernels overlap, which may hang
            output.attempt(_compare, output, shape, found)


def _judge(output: Output, name: str, relative_error: Callable[[], float]) -> None:
    error = relative_error()
    output.put(name, {"relative error": error, "right": error <= MOST_ERROR})
    if not error <= MOST_ERROR:
        raise RuntimeError(f"{name}: the product is wrong by {error:.3g} of it")


def _answer(
    output: Output, title: str, shape: Shape, programmatic: bool, settings: dict[str, Any], found: list[list[tuple[int, ...]]]
) -> None:
    output.put(title, answered(shape, gpu(programmatic), settings, found))


def _compare(output: Output, shape: Shape, found: list[list[tuple[int, ...]]]) -> None:
    if not found:
        return
    gaps = [gap for answers in found for gap in behind_transformers(shape, torch.device("cuda", 0), answers)]
    output.put("against transformers", {"tokens": len(gaps), "largest gap": max(gaps), "near-ties only": max(gaps) <= NEAR_TIE})


def behind_transformers(shape: Shape, device: torch.device, answers: list[tuple[int, ...]]) -> list[float]:
    """Of each token the log-probability by which it is behind the first, as transformers has them in float32."""
    checkpoint = RandomCheckpoint(shape, device)
    model = make_model(shape, str(device)).float()
    model.load_state_dict({name: checkpoint.tensor(name).float() for name in checkpoint.names()})
    gaps: list[float] = []
    for i, answer in enumerate(answers):
        ids = torch.tensor([[*prompt(PROMPT_LEN, i, shape.vocab), *answer]], device=device)
        with torch.inference_mode():
            scores = model(ids).logits[0, PROMPT_LEN - 1 : -1].log_softmax(-1)
        taken = scores.gather(1, ids[0, PROMPT_LEN:, None])[:, 0]
        gaps += (scores.amax(1) - taken).tolist()
    return gaps


def products(launcher: Launcher) -> dict[str, Callable[[], float]]:
    """What torch computes for the engine, and how far that is from the same in float64."""
    device = launcher.device

    def far(got: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((got.cpu().double() - wanted).norm() / wanted.norm())

    def plain(dtype: torch.dtype) -> float:
        x, weight = torch.randn(ROWS, WIDTH).to(BF16), torch.randn(OUTPUTS, WIDTH).to(BF16)
        got = library.matmul(launcher, x.to(device), weight.to(device), None, out_dtype=dtype)
        return far(got, x.double() @ weight.double().T)

    def scaled(
        code: torch.dtype, grouped: bool, dtype: torch.dtype = BF16, sizes: tuple[int, int, int] = (ROWS, OUTPUTS, WIDTH)
    ) -> float:
        rows, outputs, width = sizes
        groups = width // BLOCK if grouped else 1

        def side(count: int) -> Scaled:
            codes = torch.randint(-99, 99, (count, width)).to(code)
            return Scaled(codes, torch.rand(groups, count) / 99)

        x, weight = side(rows), side(outputs)
        wide = [each.codes.double() * each.scales.double().T.repeat_interleave(width // groups, 1) for each in (x, weight)]
        there = [Scaled(*(part.to(device) for part in each)) for each in (x, weight)]
        return far(scaled_matmul.matmul(launcher, *there, None, dtype=BF16, out_dtype=dtype), wide[0] @ wide[1].T)

    def flash() -> float:
        q, k, v = (torch.randn(1, heads, ROWS, 64).to(BF16) for heads in (4, 2, 2))
        attention = torch.nn.functional.scaled_dot_product_attention
        wanted = attention(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            got = attention(q.to(device), k.to(device), v.to(device), is_causal=True, enable_gqa=True)
        return far(got, wanted)

    return {
        "bf16": lambda: plain(BF16),
        "bf16 to float32": lambda: plain(torch.float32),
        "int8": lambda: scaled(torch.int8, False),
        "int8, many columns": lambda: scaled(torch.int8, False, sizes=NARROW),
        "e4m3, a scale a row": lambda: scaled(FP8, False),
        "e4m3, a scale a row, many columns": lambda: scaled(FP8, False, sizes=NARROW),
        "e4m3, a scale a row, many rows": lambda: scaled(FP8, False, sizes=FULL),
        "e4m3 to float32": lambda: scaled(FP8, False, torch.float32),
        "e4m3, a scale for 128 columns": lambda: scaled(FP8, True),
        "e4m3, a scale for 128 columns, to float32": lambda: scaled(FP8, True, torch.float32),
        "e4m3, a scale for 128 columns, many columns": lambda: scaled(FP8, True, sizes=NARROW),
        "flash attention": flash,
    }


def answered(
    shape: Shape, device: Device, settings: dict[str, Any], before: list[list[tuple[int, ...]]]
) -> dict[str, Any]:
    """Greedily, all at once. before: answers of the ways that came first; these are added."""
    begin = time.perf_counter()
    loaded = load(shape, device, **ROOM, **settings)
    requests = [Request(prompt(PROMPT_LEN, i, loaded.vocab), ANSWER_LEN) for i in range(SEQUENCES)]
    outputs = serve(loaded, requests, 0.0)[1]
    graphs = loaded.worker.runner.decode.num_graphs  # type: ignore[attr-defined]
    if not graphs and not settings:
        raise RuntimeError("no step could be recorded: the log says why")
    before.append([output.outputs[0].token_ids for output in outputs])
    return {"same tokens": before[-1] == before[0], "graphs": graphs, "seconds": time.perf_counter() - begin}
