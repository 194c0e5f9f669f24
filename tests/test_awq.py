"""AWQ: the float model is the same to rounding, and rounding it costs less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from nanovllm_cli.mixer_spec import AttentionSpec, IndexerSpec, LatentSpec
from nanovllm_cli.mlp_spec import MLPSpec
from nanovllm_cli.model_spec import BlockSpec
from nanovllm_cli.quant import awq
from nanovllm_cli.quant.awq import scale_and_clip
from nanovllm_cli.quant.format import Format, Fp8, Integer, Nf4
from nanovllm_cli.quant.statistics import InputStatistics
from test_calibration import FAMILIES, INPUTS, block_weights, set_weight, setting

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
HIDDEN, INNER, HEAD = 64, 128, 16


def formats(form: Format | None) -> dict[str, Format | None]:
    return {f"{name}.weight": form for name in MATRICES}


def statistics(width: int, generator: torch.Generator, loud: int = 4) -> InputStatistics:
    """Inputs of which a few columns are a hundred times as large."""
    inputs = torch.randn(400, width, generator=generator)
    inputs[:, torch.randperm(width, generator=generator)[:loud]] *= 100
    return InputStatistics(inputs.T @ inputs / 400, inputs.abs().mean(0), inputs)


Block = tuple[BlockSpec, dict[str, torch.Tensor], dict[str, InputStatistics]]


def block(heads: int = 4, kv_heads: int = 2, order: str = "pre") -> Block:
    generator = torch.Generator().manual_seed(0)
    q, kv = heads * HEAD, kv_heads * HEAD
    shapes = {"q": (q, HIDDEN), "k": (kv, HIDDEN), "v": (kv, HIDDEN), "o": (HIDDEN, q)}
    shapes |= {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}
    norms = ("attention_norm",) if order == "parallel" else ("attention_norm", "mlp_norm")
    weights |= {f"{name}.weight": torch.rand(HIDDEN, generator=generator) + 0.5 for name in norms}
    weights |= {f"{name}.bias": torch.randn(HIDDEN, generator=generator) for name in norms}
    weights |= {f"{name}.bias": torch.randn(shapes[name][0], generator=generator) for name in ("v", "up")}
    seen = {"qkv": statistics(HIDDEN, generator), "o": statistics(q, generator)}
    seen |= {"gate_up": statistics(HIDDEN, generator), "down": statistics(INNER, generator)}
    spec = BlockSpec(AttentionSpec(heads, kv_heads, HEAD, None), MLPSpec(INNER), order)  # type: ignore[arg-type]
    return spec, weights, seen


def loss(off: torch.Tensor, seen: InputStatistics) -> float:
    """Mean squared error of all outputs in float64."""
    d = off.double().numpy()
    return float(np.einsum("nk,kj,nj->", d, seen.hessian.double().numpy(), d))


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_leave_the_logits_of_a_model_as_they_are(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers, with the changed weights put into its model: biases, QK norms, shared key-value heads."""
    monkeypatch.setattr(awq, "_clip", lambda weight, *_: weight)
    model, spec, sequences, calibration = setting(family)
    ids = torch.tensor([sequences[3]])
    with torch.no_grad():
        before = model(ids).logits
    changed: set[str] = set()
    for i in range(spec.num_layers):
        weights = block_weights(model, i)
        calibration.load(weights)
        after = scale_and_clip(weights, calibration.observe(), spec.blocks[i], spec.norm.offset, formats(Integer(2, 2)))
        calibration.advance()
        for name, value in after.items():
            if not torch.equal(value, weights[name]):
                changed.add(name)
                set_weight(model, i, name, value)
    with torch.no_grad():
        after_logits = model(ids).logits
    assert {"attention_norm.weight", "mlp_norm.weight", "v.weight", "up.weight", "down.weight"} <= changed
    assert ("v.bias" in changed) == (family == "qwen2")
    assert float((after_logits - before).abs().max()) < 1e-5 * max(1.0, float(before.abs().max()))


def test_what_reads_the_residual_stream_as_it_is_keeps_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awq, "_clip", lambda weight, *_: weight)
    spec, weights, seen = block(order="post")
    after = scale_and_clip(weights, seen, spec, 0.0, formats(Integer(3, 32)))
    changed = {name for name in weights if not torch.equal(after[name], weights[name])}
    assert {"v.weight", "o.weight"} <= changed <= {"v.weight", "v.bias", "o.weight", "up.weight", "up.bias", "down.weight"}


def test_norms_without_gains_and_values_that_are_held_between_limits_take_no_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """OLMo has both: only what lies between up and down can be scaled."""
    monkeypatch.setattr(awq, "_clip", lambda weight, *_: weight)
    spec, weights, seen = block()
    assert isinstance(spec.mixer, AttentionSpec)
    bare = {name: weight for name, weight in weights.items() if not name.endswith(("norm.weight", "norm.bias"))}
    after = scale_and_clip(bare, seen, replace(spec, mixer=replace(spec.mixer, clip=8.0)), 0.0, formats(Integer(3, 32)))
    assert {name for name in bare if not torch.equal(after[name], bare[name])} == {"up.weight", "up.bias", "down.weight"}


@pytest.mark.parametrize("order", ["pre", "sandwich", "parallel"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_product_through_a_fold_stays(order: str, offset: float, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products worked in float64: (offset + norm) * column for every reader of a norm, and what its bias becomes there; o after
    v, for the value head that each query head reads; down after up."""
    monkeypatch.setattr(awq, "_clip", lambda weight, *_: weight)
    spec, weights, seen = block(4, kv_heads, order)
    after = scale_and_clip(weights, seen, spec, offset, formats(Integer(3, 32)))

    def products(w: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        n = {name.removesuffix(".weight"): value.double().numpy() for name, value in w.items()}
        mlp = n["attention_norm" if order == "parallel" else "mlp_norm"]
        found = {part: (offset + n["attention_norm"]) * n[part] for part in ("q", "k", "v")}
        found |= {part: (offset + mlp) * n[part] for part in ("gate", "up")}
        found |= {f"{part} of a bias": n[part] @ n["attention_norm.bias"] for part in ("q", "k")}
        found["down"] = n["down"] @ np.column_stack([found["up"], n["up.bias"]])
        values = np.column_stack([found["v"], n["v.bias"]])
        for head in range(4):
            mine = slice(head * HEAD, (head + 1) * HEAD)
            first = head // (4 // kv_heads) * HEAD
            found[f"o{head}"] = n["o"][:, mine] @ values[first : first + HEAD]
        # v and up stand in products only: their own rows are scaled
        return {name: value for name, value in found.items() if name not in ("v", "up")}

    for (name, expected), found in zip(products(weights).items(), products(after).values(), strict=True):
        assert np.allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()), name
    assert not torch.equal(after["o.weight"], weights["o.weight"])
    assert not torch.equal(after["q.weight"], weights["q.weight"])


def test_what_chooses_tokens_reads_the_norms_of_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """With scales in these that it did not get, it would choose others."""
    monkeypatch.setattr(awq, "_clip", lambda weight, *_: weight)
    generator, indexer = torch.Generator().manual_seed(0), IndexerSpec(4, 16, 9)
    readers = {"q_a": HIDDEN, "kv_a": HIDDEN, "q_b": 32, "index_k": HIDDEN, "index_weights": HIDDEN, "index_q": 32}
    weights = {f"{name}.weight": torch.randn(48, width, generator=generator) for name, width in readers.items()}
    norms = {"attention_norm": HIDDEN, "q_a_norm": 32}
    gains = {f"{name}.weight": torch.rand(width, generator=generator) + 0.5 for name, width in norms.items()}
    seen = {"qkv": statistics(HIDDEN, generator), "q_b": statistics(32, generator)}
    attention = AttentionSpec(3, 1, 76, None, latent=LatentSpec(32, 64, 32, 12, 32, indexer=indexer))
    forms: dict[str, Format | None] = {f"{name}.weight": Integer(2, 2) for name in ("q_a", "kv_a", "q_b")}
    after = scale_and_clip(weights | gains, seen, BlockSpec(attention, None), 0.0, forms)
    assert not torch.equal(after["attention_norm.weight"], gains["attention_norm.weight"])
    for name in readers:
        norm = "q_a_norm.weight" if name in ("q_b", "index_q") else "attention_norm.weight"
        torch.testing.assert_close(after[f"{name}.weight"] * after[norm], weights[f"{name}.weight"] * gains[norm])


def test_what_goes_into_a_square_is_scaled_by_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """down @ relu(up) ** 2 in float64."""
    monkeypatch.setattr(awq, "_clip", lambda weight, *_: weight)
    spec, weights, seen = block()
    del weights["gate.weight"]
    after = scale_and_clip(weights, seen, replace(spec, mlp=MLPSpec(INNER, "relu2")), 0.0, formats(Integer(8)))
    assert not torch.equal(after["down.weight"], weights["down.weight"])
    x = torch.randn(HIDDEN, dtype=torch.float64)
    outputs = []
    for each in (weights, after):
        n = {name: value.double() for name, value in each.items()}
        inner = n["up.weight"] @ (n["mlp_norm.weight"] * x) + n["up.bias"]
        outputs.append(n["down.weight"] @ inner.relu() ** 2)
    assert torch.allclose(*outputs, rtol=1e-5, atol=1e-5 * float(outputs[0].abs().max()))


def column_scales(weights: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By which the columns of what reads an input were multiplied: what its source was divided by."""
    return {
        "qkv": weights["attention_norm.weight"] / after["attention_norm.weight"],
        "gate_up": weights["mlp_norm.weight"] / after["mlp_norm.weight"],
        "down": weights["up.bias"] / after["up.bias"],
        "o": (weights["v.bias"] / after["v.bias"]).view(2, 1, HEAD).expand(2, 2, HEAD).flatten(),
    }


@pytest.mark.parametrize("form", [Integer(4, 32), Integer(4, 32, zeros=True), Nf4(), Integer(8), Fp8()], ids=lambda f: f.name)
def test_outputs_of_loud_columns_are_nearer(form: Format) -> None:
    spec, weights, seen = block()
    after = scale_and_clip(weights, seen, spec, 0.0, formats(form))
    scales = column_scales(weights, after)
    rows = {"v": weights["v.bias"] / after["v.bias"], "up": weights["up.bias"] / after["up.bias"]}
    found = nearest = 0.0
    for name, parts in INPUTS.items():
        for part in parts:
            weight, changed = weights[f"{part}.weight"], after[f"{part}.weight"]
            nearest += loss(form.dequantize(form.quantize(weight)) - weight, seen[name])
            back = form.dequantize(form.quantize(changed)) / scales[name] * rows.get(part, torch.ones(1))[:, None]
            found += loss(back - weight, seen[name])
    assert found < (1.01 if isinstance(form, Fp8) else 0.5) * nearest


def test_clipping_makes_no_matrix_worse_for_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once columns are scaled, it sees inputs that were divided by as much."""
    spec, weights, seen = block()
    form = Integer(2, 16)
    clipped = scale_and_clip(weights, seen, spec, 0.0, formats(form))
    monkeypatch.setattr(awq, "_clip", lambda weight, *_: weight)
    scaled = scale_and_clip(weights, seen, spec, 0.0, formats(form))
    scales = column_scales(weights, scaled)
    for name, parts in INPUTS.items():
        for slot in (f"{part}.weight" for part in parts):
            off = [(form.dequantize(form.quantize(each[slot])) - scaled[slot]) / scales[name] for each in (clipped, scaled)]
            assert loss(off[0], seen[name]) < 0.999 * loss(off[1], seen[name]), slot

    def errors(weight: torch.Tensor) -> torch.Tensor:
        """Of each row of "o"."""
        off = ((form.dequantize(form.quantize(weight)) - scaled["o.weight"]) / scales["o"]).double()
        return ((off @ seen["o"].hessian.double()) * off).sum(-1)

    ours = errors(clipped["o.weight"])
    for first in range(0, 64, 16):
        whole = scaled["o.weight"][:, first : first + 16]
        for share in (1.0, 0.9, 0.8, 0.7, 0.6):
            other, largest = clipped["o.weight"].clone(), whole.abs().amax(1, keepdim=True) * share
            other[:, first : first + 16] = whole.clamp(-largest, largest)
            assert float((ours <= errors(other) * 1.0001).float().mean()) > 0.9, (first, share)


def test_what_keeps_its_format_is_left_alone() -> None:
    spec, weights, seen = block()
    untouched = scale_and_clip(weights, seen, spec, 0.0, formats(None))
    assert all(torch.equal(untouched[name], weight) for name, weight in weights.items())
    after = scale_and_clip(weights, seen, spec, 0.0, formats(None) | {"q.weight": Integer(8)})
    changed = {name for name, weight in weights.items() if not torch.equal(after[name], weight)}
    norm = {"attention_norm.weight", "attention_norm.bias"}
    assert changed == {"q.weight", "k.weight", "v.weight"} | norm, "k and v read the same norm"
    products = [each["k.weight"] * each["attention_norm.weight"] for each in (after, weights)]
    assert torch.allclose(*products)


def test_columns_that_saw_nothing_do_no_harm() -> None:
    spec, weights, seen = block()
    quiet = {name: with_silence(each) for name, each in seen.items()}
    after = scale_and_clip(weights, quiet, spec, 0.0, formats(Integer(4, 32)))
    assert all(bool(torch.isfinite(weight).all()) for weight in after.values())


def with_silence(seen: InputStatistics) -> InputStatistics:
    inputs = seen.sample.clone()
    inputs[:, :5] = 0
    return InputStatistics(inputs.T @ inputs / len(inputs), inputs.abs().mean(0), inputs)
