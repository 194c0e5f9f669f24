"""T5s, tiny and random, by transformers; and what they make of a text."""

from __future__ import annotations

import functools
import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import engine_for, logprobs_of, random_model, run, save
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.sampling_params import SamplingParams
from test_llm import write_byte_tokenizer

START, END, VOCAB = 0, 1, 300
SHAPE = {
    "vocab_size": VOCAB, "d_model": 48, "d_kv": 12, "d_ff": 70, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 5,
    "feed_forward_proj": "gated-gelu", "decoder_start_token_id": START, "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 40, "n_positions": 256,
}  # fmt: skip
"""Of more heads than a width of d_model has room for, another number of layers in the decoder, and distances beyond the last
bucket in short texts."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {"feed_forward_proj": "relu"}),
    "flan-t5": ("T5", {"tie_word_embeddings": False}),
    "ul2": ("T5", {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False}),
    "mt5": ("MT5", {"tie_word_embeddings": False}),
    "umt5": ("UMT5", {"tie_word_embeddings": False}),
    "t5 as a file": ("T5", {"feed_forward_proj": "relu", "relative_attention_max_distance": 128}),
    "umt5 as a file": ("UMT5", {"tie_word_embeddings": False, "relative_attention_max_distance": 128}),
}
"""By what they are known as: transformers' name, and what differs from SHAPE."""


@functools.cache
def t5(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Those whose config says that the head is none of the embedding's have one of their own, as published ones do."""
    import transformers

    name, changes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SHAPE | changes)
    model = random_model(config, 1, dtype, transformers.AutoModelForSeq2SeqLM)
    for part, weight in model.named_parameters():  # scores are not scaled, so queries are small, as T5's were in the beginning
        if part.endswith("Attention.q.weight"):
            weight.data *= SHAPE["d_kv"] ** -0.5
    if changes.get("tie_word_embeddings") is False:
        weight = torch.randn(model.shared.weight.shape, generator=torch.Generator().manual_seed(7)) * 0.3
        model.lm_head.weight = torch.nn.Parameter(weight.to(dtype))
    return model


def t5_folder(folder: Path, kind: str = "flan-t5", dtype: torch.dtype = torch.float32) -> Path:
    """With a tokenizer whose tokens are bytes, and which puts END behind a text."""
    save(t5(kind, dtype), folder)
    write_byte_tokenizer(folder, ("<pad>", "</s>"), bos_token="<pad>", eos_token="</s>")
    return folder


def pieces() -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    generator = random.Random(0)
    words = ["".join(generator.choices("abcde\u00e9", k=generator.randint(1, 7))) for _ in range(300)]
    lines = (" ".join(generator.choices(words, k=12)) for _ in range(400))
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=buffer, vocab_size=180, hard_vocab_limit=False, model_type="unigram", pad_id=0,
        eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    return buffer.getvalue()


def with_pieces(folder: Path) -> Path:
    """The same with a vocabulary as Google's folders have it, of which there is no tokenizer.json."""
    (folder / "tokenizer.json").unlink()
    (folder / "spiece.model").write_bytes(pieces())
    told = {"tokenizer_class": "T5Tokenizer", "extra_ids": 100, "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


@torch.inference_mode()
def expected(kind: str, source: tuple[int, ...], text: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities behind each token of a text, START in front of it."""
    found = t5(kind)(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[START, *text]]))
    logprobs: torch.Tensor = found.logits[0].log_softmax(-1)
    return logprobs


def a_source(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (*torch.randint(2, VOCAB, (length - 1,), generator=generator).tolist(), END)


def greedily(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


def check_greedy_answers(worker: Worker, sources: Sequence[Sequence[int]], expected: Callable[..., torch.Tensor]) -> None:
    """Alone and in one batch. expected: of a source and what was written, the log-probabilities of what comes next."""
    together = run(engine_for(worker), [(list(source), greedily(30, logprobs=0)) for source in sources])
    for source, output in zip(sources, together, strict=True):
        ids = output.outputs[0].token_ids
        logprobs = expected(source, tuple(ids))[:-1]
        assert list(ids) == logprobs.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(logprobs_of(output)), logprobs.max(-1).values, rtol=1e-4, atol=1e-4)
        (alone,) = run(engine_for(worker), [(list(source), greedily(30, logprobs=0))])
        assert logprobs_of(alone) == logprobs_of(output)
        assert output.prompt_token_ids == source
