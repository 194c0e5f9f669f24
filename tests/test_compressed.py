"""Compressed convolutional attention's kernels and its routers' on a CPU against plain torch, and what of ZAYA1 is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ZayaConfig

from engines import random_model, save, worker_for
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.kernels import compressed, compressed_rules
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.quantization.walk import Walk
from same_answers import check_chunks_and_prefixes, check_guesses_and_few_blocks
from test_models import CASES, prompts

DTYPES = [torch.float32, torch.bfloat16]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    bits = 2e-2 if found.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found, wanted, rtol=bits, atol=bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "keys", "dim"), [(6, 2, 20), (1, 1, 2), (4, 4, 34), (8, 1, 128)])
def test_heads_that_meet(heads: int, keys: int, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    width = (heads + keys) * dim
    half = keys * dim // 2
    rows = [random(17, width + keys * dim), random(17, width), random(width), random(17, width + half + 3)]
    projected, convolved, bias, before = (each.to(dtype) for each in rows)
    projected[3], convolved[3], bias[:dim] = 0, 0, 0  # a query without a length
    arguments = projected, convolved, bias, before, random(keys), dim, keys, 1e-6
    found = compressed.met_heads(*arguments)
    close(found, compressed_rules.met_heads(*arguments))
    assert torch.equal(found[3, :dim], torch.zeros(dim, dtype=dtype))
    one = projected[5:6].contiguous(), convolved[5:6].contiguous()
    assert torch.equal(compressed.met_heads(*one, bias, before[5:6], *arguments[4:]), found[5:6])


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_rescaled_and_gates_opened(dtype: torch.dtype) -> None:
    x, shift, gains = torch.randn(31, 33).to(dtype), torch.randn(33), torch.randn(33)
    close(compressed.rescale(x.clone(), shift, gains), compressed_rules.rescaled(x, shift, gains))
    assert torch.equal(compressed.with_open_gates(x, 17), compressed_rules.with_open_gates(x, 17))


@pytest.mark.parametrize("count", [2, 5, 17])
def test_sigmoids_of_what_is_left_of_logits_are_the_softmax_of_the_best(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    logits, bias = 4 * torch.randn(63, count, generator=generator), 0.3 * torch.randn(count, generator=generator)
    found = compressed.of_the_best(logits, bias)
    torch.testing.assert_close(found, compressed_rules.of_the_best(logits, bias), rtol=1e-5, atol=2e-5)
    weights, best = logits.softmax(-1), (logits.softmax(-1) + bias).argmax(-1)
    wanted = torch.zeros(63, count).scatter(-1, best[:, None], weights.gather(-1, best[:, None]))[:, :-1]
    torch.testing.assert_close(found.sigmoid(), wanted, rtol=1e-5, atol=1e-6)
    assert (best == count - 1).any(), "some take none"
    assert torch.equal(compressed.of_the_best(logits[7:8].clone(), bias), found[7:8])


def test_a_logit_that_is_no_number_stays_one() -> None:
    logits = torch.zeros(2, 3)
    logits[0, 1] = torch.nan
    found = compressed.of_the_best(logits, torch.zeros(3))
    assert found[0].isnan().any()
    assert not found[1].isnan().any()


REFUSED: dict[str, tuple[dict[str, Any], type[NanovllmError], str]] = {
    "biases": ({"attention_bias": True}, UnsupportedError, "a ZAYA1 whose 'attention_bias' is true"),
    "several experts": ({"num_experts_per_tok": 2}, UnsupportedError, "take several experts"),
    "no convolution": ({"cca_time0": 1, "cca_time1": 1}, UnsupportedError, "convolutions over 1 tokens"),
    "a long convolution": ({"cca_time0": 999}, UnsupportedError, "convolutions over 1000 tokens"),
    "another kind": ({"layer_types": ["mamba"] * 3}, UnsupportedError, "layer type 'mamba'"),
    "no window": ({"layer_types": ["hybrid_sliding"] * 3}, CheckpointError, "'sliding_window' is missing"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_other_zayas_have_is_named(what: str) -> None:
    values, kind, message = REFUSED[what]
    config = CASES["zaya, 1 of 5 or none"].to_dict() | {"architectures": ["ZayaForCausalLM"]} | values
    with pytest.raises(kind, match=message):
        spec_from_hf(config, hf_family(config))


def test_what_the_published_config_leaves_out_is_as_transformers_has_it() -> None:
    """With a rope's type beside the ropes of each kind, as it is published."""
    like: Any = ZayaConfig()
    ropes = {"hybrid": {"rope_theta": 5e6, "partial_rotary_factor": 0.5, "rope_type": "default"}, "rope_type": "default"}
    for config in ({}, {"rope_parameters": ropes}):
        whole = {"architectures": ["ZayaForCausalLM"]} | config
        spec = spec_from_hf(whole, hf_family(whole))
        attention = spec.attention
        assert isinstance(attention, AttentionSpec)
        assert attention.rope is not None
        assert (attention.rope.theta, attention.rope.dim, attention.window) == (5e6, like.head_dim // 2, None)
        assert attention.convolved is not None
        assert (attention.convolved.taps, attention.convolved.head_taps) == (like.cca_time0, like.cca_time1)
        assert spec.mixture is not None
        assert spec.mixture.router is not None
        assert (spec.mixture.num_experts, spec.mixture.router.width) == (like.num_experts, like.router_hidden_size)
        assert (spec.vocab_size, spec.hidden_size, spec.num_layers) == (like.vocab_size, like.hidden_size, like.num_hidden_layers)
        assert spec.tied_head


@pytest.mark.parametrize("quant", [None, "int8"])
def test_tokens_are_the_same_in_chunks_behind_prefixes_and_alone(quant: str | None, tmp_path: Path) -> None:
    """Greedy and their likelihoods to the bit: what routers hand on, and convolutions keep, are each token's own."""
    config = CASES["zaya, longer convolutions, windows, a head of its own"]
    worker = worker_for(save(random_model(config), tmp_path), deterministic=True, **({} if quant is None else {"quant": quant}))
    check_chunks_and_prefixes(worker, prompts(config.vocab_size))


@pytest.mark.parametrize("kept", ["auto", "int8"])
def test_guesses_and_few_blocks_change_nothing(kept: str, tmp_path: Path) -> None:
    """Words that repeat are guessed, and most guesses are wrong; where blocks run short, sequences begin again."""
    folder = save(random_model(CASES["zaya, longer convolutions, windows, a head of its own"]), tmp_path)
    check_guesses_and_few_blocks(folder, kept)


def test_a_calibration_is_refused() -> None:
    class Original:
        spec = spec_from_hf(
            CASES["zaya, 1 of 5 or none"].to_dict() | {"architectures": ["ZayaForCausalLM"]},
            hf_family({"architectures": ["ZayaForCausalLM"]}),
        )

    original: Any = Original()
    with pytest.raises(UnsupportedError, match="a zaya model is not calibrated yet"):
        Walk(original, [], None)  # type: ignore[arg-type]
