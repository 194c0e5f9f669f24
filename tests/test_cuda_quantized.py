"""Quantized models in the GPU's engine on emulated kernels: against transformers on the weights that the format's own arithmetic
dequantized, and the same whether steps are recorded or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from emulation.compare import GENERATOR, close_to_rounding, random, relative_error
from emulation.device import EmulatedDevice
from emulation.emulator import Emulator, needs_emulation
from engines import SMALL, greedy, random_model, run, save
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import packed
from nanovllm_cli.kernels.packed_gemm import new_counters
from nanovllm_cli.quant import cuda_unpacked
from nanovllm_cli.quant.cuda_blocks import CudaBlocks
from nanovllm_cli.quant.cuda_choice import TABLE, choose
from nanovllm_cli.quant.cuda_formats import CudaFormats
from nanovllm_cli.quant.cuda_packed import CudaPacked
from nanovllm_cli.quant.cuda_stacked import CudaStacked
from nanovllm_cli.quant.dense_cuda import CudaDense
from nanovllm_cli.quant.format import NF4, Blocks, Fp8, Integer, Nf4
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_cpu_integer import rounded
from test_cuda_engine import engine_on, kernels_not_rehearsed
from test_quant_engine import dequantized, difference, expected_logits, logits_of, write_gguf
from test_quantized_mlx import MODELS as MLX_MODELS
from test_quantized_mlx import save_mlx

pytestmark = needs_emulation
SHAPE = SMALL | {"num_hidden_layers": 1, "vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "head_dim": 64,
                 "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip
FEW, MANY = [[3, 4, 5]], [[3, 4, 5], [7], list(range(20, 41))]
# What is lost by rounding activations to int8 or e4m3, and by bfloat16. Each format compiles kernels of its own.
FORMATS = {"int8": 0.05, "fp8": 0.15, "int4:group=32": 0.03}


def worker_on(path: Path, device: EmulatedDevice, **settings: Any) -> Worker:
    config = EngineConfig(**{"num_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16, "dtype": "bfloat16"} | settings)
    with open_checkpoint(path) as checkpoint:
        return Worker(checkpoint, config, platform=CudaPlatform(config, device))


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_while_loading(name: str, tmp_path: Path) -> None:
    model = random_model(Qwen3Config(**SHAPE | {"tie_word_embeddings": name != "int8"}))
    worker = worker_on(save(model, tmp_path), EmulatedDevice(), quant=name)
    model = dequantized(model, name)
    for tokens in (FEW, MANY):
        assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < FORMATS[name]


@pytest.mark.parametrize(("name", "deterministic"), [*((name, False) for name in FORMATS), ("q8_0", False), ("q8_0", True)])
def test_no_answer_waits_for_the_compiler(name: str, deterministic: bool, tmp_path: Path) -> None:
    folder = save(random_model(Qwen3Config(**SHAPE)), tmp_path)
    assert kernels_not_rehearsed(folder, quant=name, deterministic=deterministic) == set()


@pytest.mark.parametrize("name", FORMATS)
def test_recorded_steps_are_those_that_run(name: str, tmp_path: Path) -> None:
    folder = save(random_model(Qwen3Config(**SHAPE | {"tie_word_embeddings": True})), tmp_path)
    device = EmulatedDevice()
    answers = [
        [output.outputs[0].token_ids for output in run(engine, [(prompt, greedy(5)) for prompt in MANY])]
        for engine in (engine_on(folder, device, quant=name), engine_on(folder, EmulatedDevice(), quant=name, eager=True))
    ]
    assert device.graphs
    assert answers[0] == answers[1]


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}


def test_gguf_files_of_mixed_types(tmp_path: Path) -> None:
    """q, k and v, gate and up in types of their own."""
    model, path = random_model(Qwen3Config(**SHAPE)), tmp_path / "model.gguf"
    write_gguf(path, model, ["Q4_0", "Q8_0", "F16"])
    worker = worker_on(path, EmulatedDevice())
    for tokens in (FEW, MANY):
        assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < 0.07
    device = EmulatedDevice()
    answers = [
        [output.outputs[0].token_ids for output in run(engine, [(prompt, greedy(5)) for prompt in MANY])]
        for engine in (engine_on(path, device), engine_on(path, EmulatedDevice(), eager=True))
    ]
    assert device.graphs
    assert answers[0] == answers[1]


@pytest.mark.parametrize("case", ["llama, head of its own, mixed", "qwen3_moe"])
def test_folders_of_mlx(case: str, tmp_path: Path) -> None:
    """Codes with minima, of several widths, the experts' too."""
    model = save_mlx(tmp_path, *MLX_MODELS[case])
    assert difference(logits_of(worker_on(tmp_path, EmulatedDevice()), MANY), expected_logits(model, MANY)) < 0.06
    device = EmulatedDevice()
    answers = [
        [output.outputs[0].token_ids for output in run(engine, [(prompt, greedy(4)) for prompt in FEW])]
        for engine in (engine_on(tmp_path, device), engine_on(tmp_path, EmulatedDevice(), eager=True))
    ]
    assert device.graphs
    assert answers[0] == answers[1]
    assert kernels_not_rehearsed(tmp_path) == set()


def test_scales_of_many_columns(tmp_path: Path) -> None:
    model, path = random_model(Qwen3Config(**SHAPE | WIDE)), tmp_path / "model.gguf"
    write_gguf(path, model, ["TQ2_0"])
    assert difference(logits_of(worker_on(path, EmulatedDevice()), MANY), expected_logits(model, MANY)) < 0.05


@pytest.mark.parametrize("name", ["int8", "fp8", "int4:group=32", "q4_0"])
def test_deterministic_answers_depend_on_the_request_alone(name: str, tmp_path: Path) -> None:
    folder = save(random_model(Qwen3Config(**SHAPE)), tmp_path)

    def answers(prompts: list[list[int]]) -> list[Any]:
        engine = engine_on(folder, EmulatedDevice(), quant=name, deterministic=True)
        return [output.outputs[0].logprobs for output in run(engine, [(prompt, greedy(4, logprobs=1)) for prompt in prompts])]

    together = answers(MANY)
    assert [answers([prompt])[0] for prompt in MANY] == together


def test_a_deterministic_gpu_multiplies_blocks_as_they_are_whatever_the_rows() -> None:
    form, launcher, half = Blocks("Q4_K"), Emulator(), torch.float16
    storage = CudaBlocks(form, 64, 512, half, launcher, deterministic=True, rounds=True)
    quantized, x = form.quantize(random(64, 512)), random(70, 512, dtype=half)
    storage.load_rows(0, quantized)
    expected = rounded(x.float(), 32) @ form.dequantize(quantized).double().t()
    logits = storage.matmul(x, None, torch.float32)
    assert relative_error(logits, expected) < 1e-6
    gated, residual = storage.gated_matmul(x, None, "silu"), torch.ones(70, 64, dtype=half)
    storage.add_matmul(x, None, residual)
    assert launcher.launches.keys() == {"round_blocks", "block_gemv", "gated_activation"}, "nothing is unpacked"
    for few in (slice(0, 0), slice(0, 1), slice(3, 5), slice(20, 53)):
        alone = torch.ones(70, 64, dtype=half)[few].clone()
        storage.add_matmul(x[few], None, alone)
        assert torch.equal(alone, residual[few])
        assert torch.equal(storage.matmul(x[few], None, torch.float32), logits[few])
        assert torch.equal(storage.gated_matmul(x[few], None, "silu"), gated[few])


PACKED = [
    Integer(4, 32), Integer(3, 64, zeros=True), Integer(2), Integer(8, 64, zeros=True, scales="float32"), Integer(4, 1024),
    Integer(4, 96, ordered=True, scales="float16"), Nf4(32), Fp8(), Fp8(128, "none"),
]  # fmt: skip


@pytest.mark.parametrize("form", PACKED, ids=str)
def test_packed_weights_are_the_formats_numbers(form: Any) -> None:
    """Loaded in slices, some of them floats; unpacked here by the layout's own definition."""
    width, rows = 4096 if getattr(form, "group", 0) == 1024 else 192, 40
    floats = random(rows, width)
    if getattr(form, "ordered", False):
        order = torch.randperm(width, generator=GENERATOR).int()
        plain = replace(form, ordered=False).quantize(floats[:, order.long()])
        codes = torch.empty_like(plain.codes)
        codes[:, order.long()] = plain.codes
        quantized: Any = plain._replace(codes=codes, order=order)
    else:
        quantized = form.quantize(floats)
    launcher = EmulatedDevice().launcher
    storage = CudaPacked(form, rows, width, torch.bfloat16, launcher, False, torch.zeros(1, dtype=torch.int32))
    for first, last in ((0, 5), (5, 37), (37, 40)):
        parts = (part if part is None or part.dim() < 2 else part[first:last] for part in quantized)
        storage.load_rows(first, type(quantized)(*parts))
    weight = storage._weight
    codes, scales, zeros = packed.unpack_rows(weight, 0, rows)
    columns = torch.arange(width) if weight.order is None else torch.argsort(weight.order)
    groups = columns // (weight.group or width)
    if weight.kind == "fp8":
        values = codes.view(torch.float8_e4m3fn).double()
    elif weight.kind == "nf4":
        values = torch.tensor(NF4, dtype=torch.float64)[codes.long()]
    else:
        middle = 8 if weight.kind == "int4" else 128
        values = codes.double() - (middle if zeros is None else zeros[:, groups].double())
    torch.testing.assert_close(values * scales[:, groups].double(), form.dequantize(quantized).double(), rtol=1e-6, atol=0)
    assert storage.num_bytes <= 1.7 * rows * form.row_bytes(width) + 4 * width or form.bits < 4


def test_a_group_without_a_kernel_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="groups of 16 columns on a GPU"):
        CudaPacked(Nf4(16), 16, 64, torch.bfloat16, EmulatedDevice().launcher, False, torch.zeros(1, dtype=torch.int32))


def test_each_format_has_its_storage() -> None:
    def kind(form: Any, capability: int = 90, rows: int = 64, **asked: bool) -> str:
        formats = CudaFormats(Emulator(capability=capability), **{"rounds": True, "deterministic": False} | asked)
        return type(formats.make(form, rows, 256, torch.float16)).__name__

    assert kind(None) == "CudaDense"
    assert kind(Integer(8)) == kind(Fp8()) == kind(Fp8(128)) == kind(Fp8(0, "static")) == "CudaScaled"
    assert kind(Integer(8, 128)) == kind(Integer(8, zeros=True)) == kind(Integer(8, activation="none")) == "CudaPacked"
    assert kind(Fp8(), 80) == kind(Fp8(128), 89) == kind(Fp8(128), 100) == kind(Fp8(0, "none")) == "CudaPacked"
    assert kind(Fp8(), 89) == kind(Fp8(), 120) == kind(Integer(8), 75) == "CudaScaled"
    assert kind(Integer(8), rows=63) == kind(Integer(8), rounds=False) == kind(Fp8(), deterministic=True) == "CudaPacked"
    assert kind(Integer(8), deterministic=True) == "CudaScaled", "whole numbers have the same bits in any order"
    assert kind(Integer(4, 32)) == kind(Nf4()) == "CudaPacked"
    assert kind(Blocks("Q4_K")) == kind(Blocks("IQ2_XS")) == kind(Blocks("TQ1_0")) == "CudaBlocks"


def test_stacked_weights_are_one_with_all_their_rows() -> None:
    launcher, half = EmulatedDevice().launcher, torch.float16
    weight, bias, x = (random(*shape, dtype=half) for shape in ((48, 16), (48,), (9, 16)))
    stacked = CudaStacked([CudaDense(rows, 16, half, launcher, False) for rows in (10, 30, 8)], half, launcher)
    whole = CudaDense(48, 16, half, launcher, False)
    for first, last in ((0, 10), (10, 27), (27, 40), (40, 48)):
        stacked.load_rows(first, weight[first:last])
        whole.load_rows(first, weight[first:last])
    assert stacked.num_bytes == whole.num_bytes
    assert torch.equal(stacked.matmul(x, bias, half), whole.matmul(x, bias, half))
    assert torch.equal(stacked.gated_matmul(x, bias, "silu"), whole.gated_matmul(x, bias, "silu"))
    residual = random(9, 48, dtype=half)
    expected = residual.double() + x.double() @ weight.double().t() + bias.double()
    stacked.add_matmul(x, bias, residual)
    assert ((residual.double() - expected).abs() <= 2.0**-9 * (expected.abs() + 16)).all(), "two roundings"


def test_ways_are_chosen_by_rows() -> None:
    ways = [choose("int4", rows, 90) for rows in (0, 1, 8, 9, 64, 65, 2048, 100_000)]
    assert ways == ["library", "gemv", "gemv", "gemm", "gemm", "wgmma", "wgmma", "library"]
    assert [choose("int4", rows, 100) for rows in (64, 65, 193)] == ["gemm", "gemm", "library"], "wgmma is Hopper's alone"
    assert [choose("int4", rows, 75) for rows in (8, 9, 64)] == ["gemv", "gemm", "library"]
    assert [choose("blocks", rows, 75) for rows in (0, 1, 64, 65)] == ["library", "gemv", "gemv", "library"]
    assert all(line.gemv_rows <= line.gemm_rows and line.reason for line in TABLE)
    on_the_oldest = {kind for line in TABLE if line.min_capability == 75 for kind in line.kinds}
    assert on_the_oldest == {*packed.BITS, "blocks"}


@pytest.mark.parametrize(
    ("capability", "deterministic", "entry"),
    [(90, False, "packed_wgmma"), (90, True, "packed_gemm"), (100, False, "packed_gemm")],
)
def test_prompts_go_through_warpgroups_where_there_are_any(capability: int, deterministic: bool, entry: str) -> None:
    form, launcher = Integer(4, 32), Emulator(capability=capability)
    storage = CudaPacked(form, 40, 64, torch.bfloat16, launcher, deterministic, new_counters(launcher))
    quantized, x = form.quantize(random(40, 64)), random(70, 64, dtype=torch.bfloat16)
    storage.load_rows(0, quantized)
    residual = torch.zeros(70, 40, dtype=torch.bfloat16)
    storage.add_matmul(x, None, residual)
    expected = x.double() @ form.dequantize(quantized).double().t()
    assert relative_error(residual, expected) < 0.005
    assert launcher.launches == {entry: 1}


def test_a_large_weight_is_unpacked_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_unpacked, "SCRATCH_BYTES", 2 * 64 * 32)
    weight, x, bias = (random(*shape, dtype=torch.bfloat16) for shape in ((100, 64), (5, 64), (100,)))
    expected = x.double() @ weight.double().t() + bias.double()
    for deterministic in (False, True):
        pieces: list[tuple[int, int]] = []

        def unpack(first: int, count: int, pieces: list[tuple[int, int]] = pieces) -> torch.Tensor:
            pieces.append((first, count))
            return weight[first : first + count]

        def multiply(residual: torch.Tensor | None, unpack: Any = unpack, deterministic: bool = deterministic) -> torch.Tensor:
            return cuda_unpacked.matmul(Emulator(), x, 100, unpack, bias, residual=residual, deterministic=deterministic)

        close_to_rounding(multiply(None), expected)
        assert pieces == [(0, 32), (32, 32), (64, 32), (96, 4)]
        residual = torch.ones(5, 100, dtype=torch.bfloat16)
        assert multiply(residual) is residual
        assert ((residual.double() - 1 - expected).abs() <= 2.0**-7 * (expected.abs() + 1)).all()
