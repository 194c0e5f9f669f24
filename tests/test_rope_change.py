"""Rotary positions other than a model's files say, for longer contexts: as transformers computes a config that says them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

from engines import SMALL, random_model, save, worker_for
from nanovllm_cli.cli import parsers
from nanovllm_cli.cli.shared_options import rope_change
from nanovllm_cli.config import EngineConfig, RopeChange
from nanovllm_cli.errors import DoesNotFitError, UnsupportedError, UsageError
from test_convert_families import make_gguf
from test_models import CASES, prompts, rope
from test_quant_engine import difference, expected_logits, logits_of

TRAINED, YARN_FROM = 64, 32
SHORT = SMALL | {"max_position_embeddings": TRAINED}
LLAMA3 = CASES["llama, llama3"]
WAYS: dict[str, tuple[RopeChange, dict[str, Any], int]] = {
    "linear": (RopeChange(scale=4.0), rope("linear", factor=4.0), 256),
    "dynamic": (RopeChange("dynamic", 4.0), rope("dynamic", factor=4.0), 256),
    "yarn": (RopeChange("yarn", 4.0), rope("yarn", factor=4.0, original_max_position_embeddings=TRAINED), 256),
    "yarn from less, and a base": (
        RopeChange("yarn", 8.0, 5e5, YARN_FROM),
        rope("yarn", factor=8.0, original_max_position_embeddings=YARN_FROM, rope_theta=5e5), 256,
    ),
    "a base": (RopeChange(base=1e6), rope("default", rope_theta=1e6), TRAINED),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_logits_are_those_of_a_config_that_says_so(name: str, tmp_path: Path) -> None:
    change, said, reach = WAYS[name]
    folder = save(random_model(Qwen3Config(**SHORT)), tmp_path)
    model = random_model(Qwen3Config(**SHORT | said))
    tokens = prompts(SHORT["vocab_size"])
    worker = worker_for(folder, rope=change)
    assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < 1e-5
    assert worker.spec.max_position == worker.max_model_len == reach
    assert difference(logits_of(worker_for(folder), tokens), expected_logits(model, tokens)) > 1e-2, "it matters"


def test_layers_with_a_window_turn_as_they_were_trained_to(tmp_path: Path) -> None:
    config = copy.deepcopy(CASES["gemma3, ropes of two bases"])
    assert isinstance(config, Gemma3TextConfig)
    folder = save(random_model(config), tmp_path)
    config.rope_parameters["full_attention"] = {"rope_type": "linear", "factor": 3.0, "rope_theta": 7e5}
    tokens = prompts(config.vocab_size)
    found = logits_of(worker_for(folder, rope=RopeChange("linear", 3.0, 7e5)), tokens)
    assert difference(found, expected_logits(random_model(config), tokens)) < 1e-5


def test_what_is_scaled_already_is_scaled_otherwise(tmp_path: Path) -> None:
    said = rope("yarn", factor=2.0, original_max_position_embeddings=YARN_FROM, beta_fast=16.0)
    folder = save(random_model(LlamaConfig(**SHORT | said)), tmp_path)
    tokens = prompts(SHORT["vocab_size"])
    for change, other, reach in (
        (RopeChange(scale=4.0), said["rope_parameters"] | {"factor": 4.0}, 128),
        (RopeChange("none"), {"rope_type": "default", "rope_theta": 1e4}, YARN_FROM),
    ):
        worker = worker_for(folder, rope=change)
        model = random_model(LlamaConfig(**SHORT | {"rope_parameters": other}))
        assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < 1e-5
        assert worker.spec.max_position == reach


def test_of_a_gguf_file_too(tmp_path: Path) -> None:
    folder = save(random_model(LlamaConfig(**SHORT | {"vocab_size": 4096})), tmp_path / "folder")
    make_gguf(folder, tmp_path / "model.gguf")
    change, tokens = WAYS["yarn"][0], prompts(4096)
    expected = logits_of(worker_for(folder, rope=change), tokens)
    assert difference(logits_of(worker_for(tmp_path / "model.gguf", rope=change), tokens), expected) < 1e-5


def test_a_saved_cache_is_for_who_turns_alike(tmp_path: Path) -> None:
    folder = save(random_model(LlamaConfig(**SHORT)), tmp_path)
    assert worker_for(folder).cache_kind != worker_for(folder, rope=RopeChange(base=5e5)).cache_kind


def test_a_context_reaches_as_far_as_it_is_stretched(tmp_path: Path) -> None:
    folder = save(random_model(LlamaConfig(**SHORT)), tmp_path)
    assert worker_for(folder, rope=RopeChange("yarn", 4.0), max_model_len=256).max_model_len == 256
    with pytest.raises(DoesNotFitError, match="the model holds 64") as caught:
        worker_for(folder, max_model_len=65)
    assert "--rope-scaling yarn" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        (LlamaConfig(**SHORT), RopeChange("yarn"), "yarn needs to know how far"),
        (LlamaConfig(**SHORT), RopeChange("none", 2.0), "no meaning with --rope-scaling none"),
        (LlamaConfig(**SHORT), RopeChange(scale=2.0, original_len=32), "no meaning without --rope-scaling yarn"),
        (LLAMA3, RopeChange(scale=2.0), "scaled already, by llama3"),
        (CASES["deepseek v3, 3 of 5 and shared"], RopeChange(scale=2.0), "are not changed"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_said(config: Any, change: RopeChange, said: str, tmp_path: Path) -> None:
    with pytest.raises((UsageError, UnsupportedError), match=said):
        worker_for(save(random_model(config), tmp_path), rope=change)


@pytest.mark.parametrize(
    ("change", "said"),
    [(RopeChange("ntk"), "unknown scaling"), (RopeChange(scale=0.0), "the scale of"), (RopeChange(scale=True), "the scale of"),
     (RopeChange(base=float("nan")), "the base of"), (RopeChange(original_len=1), "the original length of"),
     (RopeChange(original_len=64.0), "the original length of"),  # type: ignore[arg-type]
     (("yarn", 4.0), "must be a RopeChange")],
)  # fmt: skip
def test_settings_out_of_bounds_are_refused(change: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EngineConfig(rope=change)


def test_flags_count_for_more_than_json() -> None:
    said = parsers.rope_scaling('{"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}')
    assert rope_change(said, None, None, None) == RopeChange("yarn", 4, None, 32768)
    assert rope_change(said, 2.0, 1e6, None) == RopeChange("yarn", 2.0, 1e6, 32768)
    assert rope_change(None, 0.0, None, None) == RopeChange(scale=0.0), "which the engine refuses"
    assert parsers.rope_scaling("YaRN") == RopeChange("yarn")
    for text in ("ntk", "{", '{"factor": 4, "beta": 1}', '{"type": "yarn", "rope_type": "yarn"}'):
        with pytest.raises(ValueError, match=r"rotary|JSON|not known here"):
            parsers.rope_scaling(text)
