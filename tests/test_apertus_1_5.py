"""Apertus 1.5's text: a head with fewer rows than the embedding, whose other tokens are read and never drawn."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Apertus1p5Config, Apertus1p5TextConfig, AutoModelForMultimodalLM

from engines import SMALL, engine_for, greedy, num_parameters, random_model, run, save, worker_for
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.outline import shapes_of
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.planning.facts import facts_of
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quantization.logits import ON_CPU, MeasuredModel
from nanovllm_cli.quantization.perplexity import check_fits, cut, perplexity
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_convert import SETTINGS, TINY
from test_convert_families import fields, make_gguf, same, with_tokenizer
from test_models import ORIGINAL, check_what_it_writes, chosen, prompts, rope, whole_batch
from test_quant_engine import expected_logits

ROWS = 301
"""Of the head."""
TEXT = SMALL | {"head_dim": 8} | rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL
)
PROMPT = [7, 512, 40, 301, 300, 99, 510]  # of which three are never drawn


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(Apertus1p5TextConfig(**TEXT, output_vocab_size=ROWS))


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("pruned"))


def test_logits_are_transformers_and_behind_them_nothing(model: Any, folder: Path) -> None:
    worker, tokens = worker_for(folder), [PROMPT, *prompts(513)[::3]]
    with torch.inference_mode():
        hidden = worker.model.run(worker.model.prepare(whole_batch(tokens)), worker.runner.cache)
        found = worker.model.logits(hidden)
    assert found.shape == (sum(map(len, tokens)), 513)
    assert torch.equal(found[:, ROWS:], torch.full_like(found[:, ROWS:], -torch.inf))
    expected = expected_logits(model, tokens)
    assert float((found[:, :ROWS] - expected).norm() / expected.norm()) < 1e-4
    with open_checkpoint(folder) as checkpoint:
        counted = facts_of(checkpoint).num_parameters - 3 * 4  # those of activations, which a file has as settings
    assert counted == num_parameters(worker.spec)
    assert shapes_of(worker.spec)["head.weight"] == (ROWS, 48)


def test_greedy_tokens_are_transformers(model: Any, folder: Path) -> None:
    tokens = [PROMPT, *prompts(513)[1:4]]
    outputs = run(engine_for(worker_for(folder), max_num_batched_tokens=24), [(ids, greedy(12)) for ids in tokens])
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    assert answers == [chosen(model, ids, answer) for ids, answer in zip(tokens, answers, strict=True)]


def test_log_probabilities_are_of_what_may_be_drawn(model: Any, folder: Path) -> None:
    """Of a prompt's tokens that are never drawn, they are those of 0."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (output,) = run(engine_for(worker_for(folder)), [(PROMPT, params)])
    expected = torch.log_softmax(expected_logits(model, [PROMPT]).double(), -1)
    assert output.prompt_logprobs is not None
    told = [entry.logprob for entry in output.prompt_logprobs[1:] if entry is not None]
    wanted = [float(row[token]) if token < ROWS else -np.inf for row, token in zip(expected, PROMPT[1:], strict=False)]
    assert told == pytest.approx(wanted, abs=1e-4)
    (drawn,) = output.outputs[0].logprobs or ()
    assert drawn.logprob == pytest.approx(float(expected[-1].max()), abs=1e-4)
    best = expected[-1].topk(3)
    assert [token for token, _ in drawn.top] == best.indices.tolist()


FAR = dict.fromkeys(range(ROWS, 513, 3), 100.0)
DRAWS = {
    "hot": {"temperature": 5.0},
    "wanted": {"temperature": 1.0, "logit_bias": FAR},
    "wanted, greedy": {"temperature": 0.0, "logit_bias": FAR},
    "few": {"temperature": 2.0, "top_k": 400, "min_p": 1e-6, "top_p": 0.999},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.7, "presence_penalty": -2.0, "frequency_penalty": -2.0},
    "dry": {"temperature": 1.0, "dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
    "of some": {"temperature": 1.0, "allowed_token_ids": (3, 300, 301, 512)},
}  # fmt: skip


@pytest.mark.parametrize("how", DRAWS)
def test_no_way_to_draw_gives_others(how: str, folder: Path) -> None:
    params = SamplingParams(**{"max_tokens": 40, "seed": 3, "ignore_eos": True} | DRAWS[how])
    outputs = run(engine_for(worker_for(folder)), [(PROMPT, params), (PROMPT[::-1], params)])
    for output in outputs:
        assert output.outputs[0].error is None
        assert len(output.outputs[0].token_ids) == 40
        assert max(output.outputs[0].token_ids) < ROWS
    if how == "of some":
        assert {token for output in outputs for token in output.outputs[0].token_ids} == {3, 300}


def test_a_request_for_others_alone_fails_alone(folder: Path) -> None:
    asked = [(PROMPT, SamplingParams(max_tokens=4, allowed_token_ids=(301, 512))), (PROMPT, greedy(4))]
    failed, other = run(engine_for(worker_for(folder)), asked)
    assert failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].error is not None
    assert len(other.outputs[0].token_ids) == 4


def test_forms_are_followed(tmp_path: Path) -> None:
    """The vocabulary has more rows than the tokenizer has tokens, the head none for its last ones."""
    model = random_model(Apertus1p5TextConfig(**with_tokenizer(Apertus1p5TextConfig(**TEXT)).to_dict() | {
        "vocab_size": 4200, "output_vocab_size": 4095, "eos_token_id": 4089,
    }))  # fmt: skip
    folder = save(model, tmp_path / "folder")
    for name in SETTINGS:
        shutil.copy(TINY / name, folder / name)
    with LLM(folder, config=EngineConfig(threads=2, num_blocks=16)) as llm:
        for temperature in (0.0, 1.5):
            params = SamplingParams(temperature=temperature, seed=1, constraint=Constraint("regex", "[0-9]{3}-[a-f]{2}"))
            (output,) = llm.generate(["a"], params)
            assert output.outputs[0].text[3:4] == "-"
            assert len(output.outputs[0].text) == 6


def test_measuring_leaves_others_out(model: Any, folder: Path) -> None:
    """Or a divergence of two zeros would be no number."""
    ids = [token % ROWS for token in prompts(513)[-1]]
    with open_checkpoint(folder) as checkpoint:
        measured = MeasuredModel(checkpoint, len(ids), replace(ON_CPU, dtype="float32"))
        logits = measured.logits(measured.hidden(ids))
        windows = cut([511, *ids], [], 40, whole=True)
        check_fits(windows, measured.model.spec)
        found = perplexity(measured, windows, NullProgress())
        with pytest.raises(UsageError, match="token 512, which the model reads and never writes"):
            check_fits(cut([*ids[:39], 512], [], 40, whole=True), measured.model.spec)
    expected = expected_logits(model, [ids])
    assert logits.shape == (len(ids), ROWS)
    assert float((logits - expected).norm() / expected.norm()) < 1e-4
    rows = [torch.log_softmax(expected_logits(model, [each]).double(), -1) for each in windows.ids]
    told = [-float(row[i, token]) for row, each in zip(rows, windows.ids, strict=True) for i, token in enumerate(each[1:])]
    assert found.value == pytest.approx(float(np.exp(np.mean(told))), rel=1e-3)


# ---- with what sees and hears ----

SENSES = {
    "vision_config": {
        "codebook_size": 8, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1],
        "num_res_blocks": 1, "attn_resolutions": [],
    },
    "audio_config": {
        "model_type": "wavtokenizer_encoder", "codebook_size": 15, "hidden_size": 8, "codebook_dim": 8, "num_filters": 2,
    },
    "image_token_id": 5, "audio_token_id": 6, "image_token_offset": 490, "audio_token_offset": 498,
}  # fmt: skip


def test_of_a_whole_one_the_part_that_writes(tmp_path: Path) -> None:
    config = Apertus1p5Config(text_config=TEXT, **SENSES)
    model = random_model(config, auto=AutoModelForMultimodalLM)
    folder = save(model, tmp_path)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Apertus1p5ForConditionalGeneration"]
    check_what_it_writes(model, folder)
    worker = worker_for(folder)
    assert (worker.spec.head_rows, worker.spec.num_drawn) == (0, 513)
    assert len({mlp.curve for mlp in worker.spec.mlps}) == 3, "layers' own numbers, by the names that they have there"


def test_a_file_has_no_place_for_a_head_of_fewer_rows(tmp_path: Path) -> None:
    whole = with_tokenizer(Apertus1p5TextConfig(**TEXT))
    pruned = Apertus1p5TextConfig(**whole.to_dict() | {"output_vocab_size": ROWS})
    with pytest.raises(UnsupportedError, match="of an Apertus: a head of fewer rows than the embedding"):
        make_gguf(save(random_model(pruned), tmp_path / "pruned"), tmp_path / "m.gguf")
    folder = save(random_model(whole), tmp_path / "whole")
    make_gguf(folder, tmp_path / "m.gguf")
    assert fields(tmp_path / "m.gguf")["general.architecture"] == "apertus"
    same(folder, tmp_path / "m.gguf")


REFUSED: dict[str, tuple[dict[str, Any], type[NanovllmError], str]] = {
    "more rows": ({"output_vocab_size": 514}, CheckpointError, "a head of 514 rows, of 513 tokens"),
    "none": ({"output_vocab_size": 0}, CheckpointError, "'output_vocab_size' must be a whole number of at least 1"),
    "no number": ({"output_vocab_size": "x"}, CheckpointError, "'output_vocab_size' must be a whole number"),
    "tied": ({"output_vocab_size": 512, "tie_word_embeddings": True}, UnsupportedError, "is the embedding and has fewer rows"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_configs_of_others_are_refused(what: str) -> None:
    values, kind, message = REFUSED[what]
    config = Apertus1p5TextConfig(**TEXT).to_dict() | {"architectures": ["Apertus1p5TextForCausalLM"]}
    with pytest.raises(kind, match=message):
        spec_from_hf(config | values, hf_family(config))
    as_many = spec_from_hf(config | {"output_vocab_size": 513}, hf_family(config))
    assert as_many == spec_from_hf(config, hf_family(config))


def test_a_head_of_other_rows_than_its_config_has_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    for rows in (None, ROWS + 1):
        (tmp_path / "config.json").write_text(json.dumps(config | {"output_vocab_size": rows}))
        with pytest.raises(CheckpointError, match=r"lm_head.weight \(expected \[\d+, 48\], found \[301, 48\]\)"):
            worker_for(tmp_path)
