"""Small random models that give labels to texts, and to tokens, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForTokenClassification,
    BertConfig,
    DistilBertConfig,
    ModernBertConfig,
    XLMRobertaConfig,
)
from transformers.models.openai_privacy_filter.configuration_openai_privacy_filter import OpenAIPrivacyFilterConfig

from embedders import write_tokenizer
from engines import random_model
from test_rerank_heads import SMALL, classifier
from test_tokenizer_encoders import bert, xlm_roberta

NAMES = {0: "calm", 1: "Angry", 2: "sad"}
THREE = {"id2label": NAMES, "label2id": {name: i for i, name in NAMES.items()}, "pad_token_id": 0}
ENCODERS: dict[str, tuple[Any, Any]] = {
    "bert": (BertConfig, bert),
    "distilbert": (DistilBertConfig, bert),
    "modernbert": (ModernBertConfig, bert),
    "xlm-roberta": (XLMRobertaConfig, xlm_roberta),
}
BIOES = ("O", "B-a", "I-a", "E-a", "S-a", "B-b", "I-b", "E-b", "S-b")


def encoder(folder: Path, kind: str, **changes: Any) -> Path:
    """Random, with a small tokenizer of its kind."""
    folder.mkdir(exist_ok=True)
    make, vocabulary = ENCODERS[kind]
    theirs = vocabulary(folder)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    sizes = {key: value for key, value in SMALL.items() if key != "num_labels"}
    if kind == "distilbert":
        sizes |= {"dim": 48, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
    pad = {"pad_token_id": 1, "type_vocab_size": 1} if kind == "xlm-roberta" else {}
    config = make(**sizes | THREE | {"vocab_size": len(theirs), "max_position_embeddings": 200} | pad | changes)
    classifier(config, folder)
    for file, content in kept.items():
        folder.joinpath(file).write_bytes(content)
    return folder


def marker(config: Any, labels: tuple[str, ...], folder: Path) -> Any:
    """transformers' own model, whose labels vary."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: i for i, label in enumerate(labels)}
    model = random_model(config, auto=AutoModelForTokenClassification)
    generator = torch.Generator().manual_seed(5)
    head = model.classifier if hasattr(model, "classifier") else model.score
    ids = torch.arange(10, 80)[None]
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator))
        head.bias.copy_(-head.weight @ model.base_model(ids).last_hidden_state[0].mean(0))
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    model.save_pretrained(folder)
    for file, content in kept.items():
        folder.joinpath(file).write_bytes(content)
    return model.eval()


def privacy_filter(folder: Path, labels: tuple[str, ...] = BIOES) -> Any:
    """As OpenAI's, with other sizes: no token reaches further than twelve others."""
    folder.mkdir(exist_ok=True)
    config = OpenAIPrivacyFilterConfig(
        vocab_size=4100, hidden_size=48, intermediate_size=32, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        head_dim=8, num_local_experts=6, num_experts_per_tok=2, sliding_window=4, max_position_embeddings=512, pad_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = marker(config, labels, folder)
    write_tokenizer(folder)
    return model
