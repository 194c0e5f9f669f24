"""The gated short convolution on a CPU: the kernel against the formula in float64, and engines whose past it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import Lfm2Config

from convolutions import CASES, check, check_same_bits
from engines import SMALL, engine_for, failing_once, greedy, random_model, run, save, worker_for
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import conv, cpu
from nanovllm_cli.sampling_params import SamplingParams
from quantizing import TINY, quantize
from test_convert import SETTINGS as SETTINGS_OF_TINY
from test_models import prompts
from test_quant_engine import difference, logits_of

BF16, FP32 = torch.bfloat16, torch.float32
LAYERS = ["conv", "full_attention", "conv", "conv"]
TAPS = "model.layers.0.conv.conv.weight"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("index", [i for i, case in enumerate(CASES) if case.block_size == cpu.BLOCK])
def test_equal_to_the_formula(index: int, dtype: torch.dtype, threads: int) -> None:
    cpu.set_num_threads(threads)
    check(CASES[index], dtype, conv.gated_conv)


def test_a_token_has_the_same_bits_whatever_it_is_computed_with() -> None:
    check_same_bits(conv.gated_conv, 600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Lfm2Config(**SMALL | {"num_hidden_layers": 4}, layer_types=LAYERS)
    return save(random_model(config, dtype=BF16), tmp_path_factory.mktemp("lfm2"))


PROMPTS = [[7, 8, 9, 10], list(range(40)), list(range(20)), [*range(33), 2, 4], [5], list(range(100, 190))]


def answers(folder: Path, params: SamplingParams, prompts: list[list[int]] = PROMPTS, **settings: Any) -> list[list[list[int]]]:
    worker = worker_for(folder, **{name: value for name, value in settings.items() if name == "num_speculative_tokens"})
    outputs = run(engine_for(worker, **settings), [(ids, params) for ids in prompts])
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[list[int]]]:
    """Each by itself, without a cache of prefixes."""
    return [answers(folder, greedy(40), [ids], enable_prefix_caching=False)[0] for ids in PROMPTS]


SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks": {"max_num_batched_tokens": 7},
    "under pressure": {"num_blocks": 9, "max_num_batched_tokens": 24},
    "two at a time": {"max_num_seqs": 2},
    "with guesses": {"num_speculative_tokens": 6},
    "with guesses under pressure": {"num_speculative_tokens": 6, "num_blocks": 9, "max_num_batched_tokens": 24},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_answers_do_not_depend_on_what_else_runs(case: str, folder: Path, alone: list[list[list[int]]]) -> None:
    assert answers(folder, greedy(40), **SETTINGS[case]) == alone


def test_prefixes_are_found(folder: Path, alone: list[list[list[int]]]) -> None:
    """The second time, all whole blocks but a prompt's last token."""
    engine = engine_for(worker_for(folder))
    for _ in range(2):
        outputs = run(engine, [(ids, greedy(40)) for ids in PROMPTS])
        assert [[list(each.token_ids) for each in output.outputs] for output in outputs] == alone
    found = [output.metrics.num_cached_tokens for output in outputs]
    assert found == [(len(ids) - 1) // 16 * 16 for ids in PROMPTS]


def test_a_step_that_failed_behind_its_kernels_is_repeated(folder: Path, alone: list[list[list[int]]]) -> None:
    """Chunks that begin within a block find what was before them, though they were computed once already."""
    worker = worker_for(folder)
    failed = failing_once(worker)
    outputs = run(engine_for(worker, max_num_batched_tokens=11), [(ids, greedy(40)) for ids in PROMPTS])
    assert any(start % 16 and count > 1 for key in failed for _, start, count in key)
    assert [[list(each.token_ids) for each in output.outputs] for output in outputs] == alone


@pytest.mark.parametrize("settings", [{}, {"num_speculative_tokens": 4}, {"num_blocks": 24, "max_num_batched_tokens": 20}])
def test_forks_draw_what_each_would_draw_alone(settings: dict[str, Any], folder: Path) -> None:
    """Three answers to a prompt begin in one block, of which each writes on in a copy."""
    params = SamplingParams(temperature=1.0, n=3, seed=11, max_tokens=24, ignore_eos=True)
    expected = [answers(folder, params, [ids], enable_prefix_caching=False)[0] for ids in PROMPTS[:4]]
    assert answers(folder, params, PROMPTS[:4], **settings) == expected
    assert len({tuple(each) for each in expected[0]}) == 3


# ---- quantized ----


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the bundled tokenizer, whose texts calibrate it."""
    shape = SMALL | {"vocab_size": 4096, "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 3}
    folder = tmp_path_factory.mktemp("spoken")
    save(random_model(Lfm2Config(**shape, layer_types=LAYERS[:3], conv_bias=True), dtype=BF16), folder)
    for name in SETTINGS_OF_TINY:
        shutil.copy(TINY / name, folder / name)
    return folder


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_calibrated_weights_lose_less(algorithm: str, spoken: Path, tmp_path: Path) -> None:
    errors = {}
    with torch.inference_mode():
        wanted = logits_of(worker_for(spoken, dtype="float32"), prompts(4096))
    for each in ("rtn", algorithm):
        quantize("int4:group=32", tmp_path / each, spoken, algorithm=each, num_samples=8)
        worker = worker_for(tmp_path / each, dtype="float32", activations="exact")
        errors[each] = difference(logits_of(worker, prompts(4096)), wanted)
        assert {form.name for form in worker.formats if form is not None} == {"int4:group=32"}
        assert load_file(tmp_path / each / "model.safetensors")[TAPS].dtype == BF16
    assert errors[algorithm] < 0.95 * errors["rtn"]


def test_a_gguf_file_keeps_its_taps(spoken: Path, tmp_path: Path) -> None:
    """In float32, as llama.cpp has them. Its architecture has no biases: a model with some is refused."""
    with pytest.raises(UnsupportedError, match="GGUF cannot say this of a lfm2 model: bias"):
        quantize("q4_k_m", tmp_path / "m.gguf", spoken)
    shape = SMALL | {"vocab_size": 4096, "hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "intermediate_size": 256}
    config = Lfm2Config(**shape, layer_types=LAYERS[:3], block_auto_adjust_ff_dim=False)
    plain = save(random_model(config, dtype=BF16), tmp_path / "folder")
    for name in SETTINGS_OF_TINY:
        shutil.copy(TINY / name, plain / name)
    quantize("q6_k", tmp_path / "m.gguf", plain)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.0.shortconv.conv.weight"] == "F32"
    assert types["blk.0.shortconv.in_proj.weight"] == types["blk.0.shortconv.out_proj.weight"] == "Q6_K"
    found, wanted = (logits_of(worker_for(path, dtype="float32", activations="exact"), prompts(4096))
                     for path in (tmp_path / "m.gguf", plain))  # fmt: skip
    assert difference(found, wanted) < 0.1
