"""Whole models in every format: the engine's logits against transformers on weights that the format's own arithmetic dequantized,
GGUF files of mixed types against the same, and answers that do not depend on the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import LlamaConfig, Qwen3Config

from engines import SMALL, add_shape, engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.quant.format import Integer
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_models import prompts, whole_batch

SHAPE = SMALL | {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_attention_heads": 6}
# What activations lose where they are rounded as well: int8 with a scale a group or a token, e4m3 with three bits.
FORMATS = {
    "int8": 0.05, "int8-weight-only": 0.02, "int4:group=32": 0.05, "int4:group=64:zeros": 0.05, "int3:group=32": 0.05,
    "int2:group=32:zeros": 0.05, "int4-weight-only:group=32": 0.02, "fp8": 0.15, "fp8-weight-only": 0.02, "nf4": 0.02,
    "q8_0": 0.05, "q4_0": 0.05, "q4_1": 0.05, "q5_0": 0.05, "q5_1": 0.05,
}  # fmt: skip


def logits_of(worker: Worker, tokens: list[list[int]]) -> torch.Tensor:
    with torch.inference_mode():
        worker.platform.enter()
        inputs = worker.model.prepare(whole_batch(tokens))
        return worker.model.logits(worker.model.run(inputs, worker.runner.cache))


def expected_logits(model: Any, tokens: list[list[int]]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([ids])).logits[0] for ids in tokens])


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def dequantized(model: Any, name: str) -> Any:
    """The model with every matrix rounded by its format; embedding and head by int8 where the format has fewer bits."""
    form = parse_format(name)
    for key, parameter in model.named_parameters():
        if parameter.dim() == 2:
            outer = "embed" in key or "lm_head" in key
            own = Integer(8) if outer and form.row_bytes(1024) < 1024 else form
            parameter.data = own.dequantize(own.quantize(parameter.data))
    return model


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_while_loading(name: str, dtype: str, tmp_path: Path) -> None:
    model = random_model(Qwen3Config(**SHAPE | {"tie_word_embeddings": dtype == "float32"}))
    worker = worker_for(save(model, tmp_path), quant=name, dtype=dtype)
    tokens = prompts(SHAPE["vocab_size"])[:5]
    error = difference(logits_of(worker, tokens), expected_logits(dequantized(model, name), tokens))
    assert error < (1e-4 if dtype == "float32" else FORMATS[name] + 0.02)  # in fp32 activations are not rounded


@pytest.mark.parametrize("name", ["int8", "fp8", "q4_0"])
def test_activations_are_rounded_or_not_as_asked(name: str, tmp_path: Path) -> None:
    model = random_model(Qwen3Config(**SHAPE))
    folder, tokens = save(model, tmp_path), prompts(SHAPE["vocab_size"])[:5]
    expected = expected_logits(dequantized(model, name), tokens)
    errors = {}
    for activations in ("auto", "exact", "rounded"):
        worker = worker_for(folder, quant=name, dtype="float32", activations=activations)
        errors[activations] = difference(logits_of(worker, tokens), expected)
    assert errors["auto"] == errors["exact"] < 1e-4 < errors["rounded"] < FORMATS[name] + 0.02
    with pytest.raises(UsageError, match="unknown activations 'int8'"):
        worker_for(folder, quant=name, activations="int8")


MIXES = {
    "one type": ["Q8_0"],
    "a type each": ["Q4_0", "Q5_1", "Q8_0", "Q5_0", "Q4_1"],
    "blocks and plain": ["Q4_0", "F16", "BF16", "Q8_0"],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gguf_of_mixed_types(mix: str, dtype: str, tmp_path: Path) -> None:
    """q, k and v, gate and up in types of their own."""
    model = random_model(Qwen3Config(**SHAPE))
    path = tmp_path / "mixed.gguf"
    write_gguf(path, model, MIXES[mix])
    worker = worker_for(path, dtype=dtype)
    tokens = prompts(SHAPE["vocab_size"])[:5]
    error = difference(logits_of(worker, tokens), expected_logits(model, tokens))
    assert error < (1e-4 if dtype == "float32" else 0.07)


def write_gguf(path: Path, model: Any, types: list[str]) -> None:
    """A file with the types by turns; the model's own weights become what the file says."""
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen3")
    add_shape(writer, config)
    writer.add_rope_freq_base(10000.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    matrices = 0
    for key, parameter in model.named_parameters():
        name = names.get_name(key, (".weight", ".bias"))
        if parameter.dim() == 1:
            writer.add_tensor(name, parameter.detach().numpy())
            continue
        kind = gguf.GGMLQuantizationType[types[matrices % len(types)]]
        matrices += 1
        data = quantize(parameter.detach().numpy(), kind)
        parameter.data = torch.from_numpy(np.ascontiguousarray(dequantize(data, kind))).view(parameter.shape)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["int8", "int4:group=32", "fp8", "nf4", "q4_0"])
def test_answers_do_not_depend_on_the_batch(name: str, tmp_path: Path) -> None:
    worker = worker_for(save(random_model(Qwen3Config(**SHAPE)), tmp_path), quant=name, dtype="bfloat16")
    tokens = prompts(SHAPE["vocab_size"])
    params = greedy(24, logprobs=2)
    together = run(engine_for(worker, max_num_batched_tokens=33), [(ids, params) for ids in tokens])
    for ids, output in zip(tokens, together, strict=True):
        alone = run(engine_for(worker), [(ids, params)], salt=str(len(ids)))[0]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs


@pytest.mark.parametrize("name", ["int8", "int4:group=32", "nf4"])
def test_preempted_sequences_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    worker = worker_for(save(random_model(Qwen3Config(**SHAPE)), tmp_path), quant=name, dtype="bfloat16")
    requests = [
        (ids, SamplingParams(temperature=0.9, seed=i, max_tokens=30, ignore_eos=True))
        for i, ids in enumerate(prompts(513))
    ]
    pressed = run(engine_for(worker, num_blocks=12), requests)
    free = run(engine_for(worker), requests)
    assert sum(output.metrics.num_preemptions for output in pressed) > 0
    assert [o.outputs[0].token_ids for o in pressed] == [o.outputs[0].token_ids for o in free]


def test_memory_is_that_of_the_format(tmp_path: Path) -> None:
    shape = SHAPE | {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1024, "tie_word_embeddings": True}
    shape |= {"num_attention_heads": 8}
    folder = save(random_model(LlamaConfig(**shape)), tmp_path)
    plain = 2 * sum(worker_for(folder, dtype="bfloat16").formats.values())
    for name, share in (("int8", 0.5), ("fp8", 0.5), ("int4:group=32", 0.3), ("q4_0", 0.3), ("nf4", 0.3)):
        worker = worker_for(folder, dtype="bfloat16", quant=name)
        outer = 512 * 1024  # the tied head, which has eight bits
        assert worker.weight_bytes - outer < 1.1 * share * (plain - 2 * outer), name


def test_a_width_that_does_not_fit_names_what_would(tmp_path: Path) -> None:
    folder = save(random_model(Qwen3Config(**SMALL)), tmp_path)
    with pytest.raises(UnsupportedError, match="groups of 64"):
        worker_for(folder, quant="int4:group=64")


def test_quantizing_what_is_quantized_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "q8.gguf"
    write_gguf(path, random_model(Qwen3Config(**SHAPE)), ["Q8_0"])
    with open_checkpoint(path) as checkpoint, pytest.raises(UsageError, match="q8_0 already"):
        Worker(checkpoint, EngineConfig(quant="int4", num_blocks=16))
