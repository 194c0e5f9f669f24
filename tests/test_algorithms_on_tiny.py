"""What GPTQ and AWQ save on the bundled model: KL to the original on documents that nobody was shown, by transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import nanovllm_cli
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.models.families import QWEN3, spec_from_hf
from nanovllm_cli.quant.awq import scale_and_clip
from nanovllm_cli.quant.format import Integer
from nanovllm_cli.quant.gptq import quantize_gptq
from nanovllm_cli.quant.statistics import InputStatistics
from nanovllm_cli.quantization.calibration import Calibration
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.json_file import read_json_file
from test_calibration import INPUTS, block_weights, set_weight

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import tiny_corpus as corpus

TINY = Path(nanovllm_cli.__file__).parent / "assets" / "tiny"
FORM = Integer(4, 32)
Weights = dict[str, torch.Tensor]
Choose = Callable[[Weights, dict[str, InputStatistics], Any], Weights]


def rounded(weights: Weights) -> Weights:
    """Matrices rounded to nearest and back."""
    return {n: FORM.dequantize(FORM.quantize(w)) if w.dim() == 2 else w for n, w in weights.items()}


def by_gptq(weights: Weights, seen: dict[str, InputStatistics], block: Any) -> Weights:
    result = dict(weights)
    for name, parts in INPUTS.items():
        matrices = [weights[f"{part}.weight"] for part in parts]
        values = FORM.dequantize(quantize_gptq(torch.cat(matrices), seen[name].hessian, FORM))
        split = values.split([len(each) for each in matrices])
        result |= {f"{part}.weight": value for part, value in zip(parts, split, strict=True)}
    return result


def by_awq(weights: Weights, seen: dict[str, InputStatistics], block: Any) -> Weights:
    formats = {f"{part}.weight": FORM for parts in INPUTS.values() for part in parts}
    return rounded(scale_and_clip(weights, seen, block, 0.0, formats))


class Bench:
    """tiny in float32, texts of both splits, and the original's log-probabilities on those it wasn't trained on."""

    def __init__(self) -> None:
        tokenizer = Tokenizer.from_folder(TINY)
        self.spec = spec_from_hf(read_json_file(TINY / "config.json", 10000), QWEN3)
        self.model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        self.originals = [block_weights(self.model, i) for i in range(self.spec.num_layers)]
        train = [d.text for d in islice(corpus.documents("train", seed=99), 48)]
        held_out = [d.text for d in islice(corpus.documents("held_out", seed=7), 32)]
        self.calibration = [ids[:512] for ids in tokenizer.encode_batch(train)]
        self.held_out = [ids[:512] for ids in tokenizer.encode_batch(held_out)]
        self.reference = self._logprobs()

    def chosen(self, choose: Choose) -> list[Weights]:
        """Every block quantized with what the quantized ones before it give."""
        platform = CpuPlatform(EngineConfig(threads=2), None)
        embedding = self.model.state_dict()["model.embed_tokens.weight"]
        calibration = Calibration(self.spec, self.calibration, embedding, platform, torch.bfloat16)
        blocks = []
        for weights, block in zip(self.originals, self.spec.blocks, strict=True):
            calibration.load(weights)
            blocks.append(choose(weights, calibration.observe(), block))
            calibration.load(blocks[-1])
            calibration.advance()
        return blocks

    def loss(self, blocks: list[Weights]) -> float:
        """Mean KL divergence."""
        for i, weights in enumerate(blocks):
            for name, value in weights.items():
                set_weight(self.model, i, name, value)
        found = self._logprobs()
        return float((self.reference.exp() * (self.reference - found)).sum(-1).double().mean())

    @torch.no_grad()
    def _logprobs(self) -> torch.Tensor:
        return torch.cat([self.model(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in self.held_out])


def test_gptq_and_awq_lose_less_than_rounding_to_nearest() -> None:
    bench = Bench()
    nearest = bench.loss([rounded(weights) for weights in bench.originals])
    gptq, awq = (bench.loss(bench.chosen(choose)) for choose in (by_gptq, by_awq))
    print(f"KL: nearest {nearest:.6f}, GPTQ {gptq / nearest:.3f} of it, AWQ {awq / nearest:.3f}")
    assert gptq < 0.6 * nearest
    assert awq < 0.8 * nearest
