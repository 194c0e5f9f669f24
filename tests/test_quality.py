"""A quality card's statistics, against numpy in float64 on random logits; what it reads and compares, against transformers."""

from __future__ import annotations

import gc
import json
import math
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import random_model, save
from nanovllm_cli.errors import RequestError, UsageError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quantization.card import measure, windows_of
from nanovllm_cli.quantization.logits import MeasuredModel
from nanovllm_cli.quantization.original import open_original
from nanovllm_cli.quantization.pipeline import Method
from nanovllm_cli.quantization.quality import Comparison
from nanovllm_cli.quantization.texts import NamedText, bundled_text
from nanovllm_cli.weights.checkpoint import open_checkpoint
from quantizing import TINY, quantize


def compared(p: np.ndarray, q: np.ndarray, targets: np.ndarray, pieces: int = 1) -> Comparison:
    comparison = Comparison()
    for part in np.array_split(np.arange(len(targets)), pieces):
        comparison.add(torch.from_numpy(p[part]), torch.from_numpy(q[part]), torch.from_numpy(targets[part]))
    return comparison


def test_every_statistic_is_numpys() -> None:
    rng = np.random.default_rng(7)
    p = (rng.normal(size=(101, 37)) * 4).astype(np.float32)
    q = (p + rng.normal(size=p.shape)).astype(np.float32)
    targets = rng.integers(0, 37, 101)
    quality = compared(p, q, targets, pieces=3).quality()

    def probabilities(logits: np.ndarray) -> np.ndarray:
        weights = np.exp(logits.astype(np.float64))
        return weights / weights.sum(1, keepdims=True)

    a, b = probabilities(p), probabilities(q)
    kl = (a * np.log(a / b)).sum(1)
    assert quality.tokens == 101
    assert quality.kl_mean == pytest.approx(kl.mean(), rel=1e-10)
    assert quality.kl_error == pytest.approx(kl.std(ddof=1) / math.sqrt(101), rel=1e-10)
    assert quality.kl_median == pytest.approx(np.sort(kl)[50], rel=1e-10)
    assert quality.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=1e-10)
    assert quality.kl_max == pytest.approx(kl.max(), rel=1e-10)
    assert quality.same_top == pytest.approx((p.argmax(1) == q.argmax(1)).mean())
    for perplexity, probability in ((quality.before, a), (quality.after, b)):
        nll = -np.log(probability[np.arange(101), targets])
        assert perplexity.value == pytest.approx(math.exp(nll.mean()), rel=1e-10)
        assert perplexity.error == pytest.approx(math.exp(nll.mean()) * nll.std(ddof=1) / math.sqrt(101), rel=1e-10)


def test_a_model_compared_with_itself_has_lost_nothing() -> None:
    logits = np.random.default_rng(1).normal(size=(40, 1000)).astype(np.float32) * 30
    quality = compared(logits, logits, np.zeros(40, np.int64)).quality()
    assert (quality.kl_mean, quality.kl_max, quality.same_top) == (0.0, 0.0, 1.0)
    assert quality.before == quality.after


def test_logits_shifted_by_a_constant_are_the_same_distribution() -> None:
    logits = np.random.default_rng(2).normal(size=(20, 50)).astype(np.float32)
    quality = compared(logits, logits + 1000, np.zeros(20, np.int64)).quality()
    assert quality.kl_max < 1e-6


def test_extreme_logits_give_numbers() -> None:
    p = np.full((4, 8), -1e30, np.float32)
    p[:, 0] = 1e30
    quality = compared(p, -p, np.ones(4, np.int64)).quality()
    assert quality.same_top == 0.0
    assert not math.isnan(quality.kl_mean)
    assert math.isfinite(quality.before.value)


# ---- what is read and compared ----


def windows(text: str, num_tokens: int) -> list[list[int]]:
    with open_original("tiny", TINY) as original:
        return windows_of(original.tokenizer(), NamedText("a.txt", text), num_tokens, original.spec.vocab_size)


def test_a_text_is_read_up_to_its_number_of_tokens() -> None:
    """Of more than one window; a single token that would be left has no next one to be compared at."""
    text = " ".join(str(i) for i in range(1000))
    whole = [token for window in windows(text, 1 << 20) for token in window]
    for wanted, lengths in ((600, [512, 88]), (514, [512, 2]), (513, [512]), (300, [300])):
        found = windows(text, wanted)
        assert list(map(len, found)) == lengths
        assert [token for window in found for token in window] == whole[: sum(lengths)]


def test_two_tokens_are_too_few_for_a_card_and_three_are_not() -> None:
    assert list(map(len, windows("one two three four", 3))) == [3]
    with pytest.raises(UsageError, match="too short for a quality card"):
        windows("one two three four", 2)


def test_a_card_compares_what_transformers_computes(tmp_path: Path) -> None:
    """Row by row, the next token of each but the last: in float32, the original's type, whatever the other's weights have. The
    windows are longer than the rows whose logits are made at once, and shorter."""
    from transformers import AutoModelForCausalLM

    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    tensors = {name: tensor.float() for name, tensor in load_file(TINY / "model.safetensors").items()}
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.5
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 4000, (n,), generator=generator).tolist() for n in (66, 2, 130)]

    with open_checkpoint(source) as original, open_checkpoint(TINY) as quantized:
        quality = measure(original, quantized, texts, NullProgress())

    logs = []
    for path in (source, TINY):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            logs.append([torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1) for ids in texts])
    p, q = (torch.cat(each) for each in logs)
    targets = torch.tensor([token for ids in texts for token in ids[1:]])
    assert quality.tokens == 65 + 1 + 129
    assert quality.kl_mean == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    for perplexity, log in ((quality.before, p), (quality.after, q)):
        assert perplexity.value == pytest.approx(float((-log.gather(-1, targets[:, None])).mean().exp()), rel=1e-4)


def test_no_more_is_read_at_once_than_a_model_has_positions(tmp_path: Path) -> None:
    """Of learned positions there are no others: the card's perplexity is transformers' over windows as long as these."""
    from transformers import OPTConfig

    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = random_model(OPTConfig(vocab_size=4096, max_position_embeddings=96, **sizes))
    folder = save(model, tmp_path / "folder")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    card = quantize("int8-weight-only", tmp_path / "made", folder, verify_tokens=300)
    assert card is not None
    assert "in windows of 96." in card.as_markdown()
    text = bundled_text("verification")
    with open_original("folder", folder) as original:
        ids = original.tokenizer().encode(text.text, add_special_tokens=False)[:300]
        assert [len(window) for window in Method("gptq", text, 3).sequences(original)] == [96, 96, 96]
    losses = []
    for window in (ids[first : first + 96] for first in range(0, 300, 96)):
        with torch.no_grad():
            logits = model(torch.tensor([window])).logits[0, :-1].double()
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="none").tolist()
    assert card.quality.before.value == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("to", ["int8-weight-only", "q8_0"])
def test_a_card_of_logits_that_are_no_numbers_is_refused_as_such(to: str, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "folder")
    weights = load_file(TINY / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)
    save_file(weights, tmp_path / "folder" / "model.safetensors")
    with pytest.raises(RequestError, match="not finite") as refusal:
        quantize(to, tmp_path / "made.gguf", tmp_path / "folder", verify_tokens=100)
    assert "--no-verify" in (refusal.value.hint or "")
    assert not (tmp_path / "made.gguf").exists()


def test_of_a_model_whose_layers_are_forgotten_the_head_alone_stays() -> None:
    with open_checkpoint(TINY) as checkpoint:
        model = MeasuredModel(checkpoint, 4)
        rows = model.hidden([5, 6, 7])
        before = model.logits(rows)
        gone = [weakref.ref(model.model.blocks[0]), weakref.ref(model.model.embedding), weakref.ref(model._cache)]
        model.forget_layers()
        gc.collect()
        assert [each() for each in gone] == [None] * 3
        assert torch.equal(model.logits(rows), before)
