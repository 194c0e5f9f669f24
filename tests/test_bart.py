"""BART and its kin against transformers, by tiny random models: what a decoder makes of the text that an encoder reads; and that
no bit of it depends on steps, neighbours, or what was found again."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from barts import END, KINDS, PADDING, VOCAB, a_source, bart, bart_folder, begun_by, expected
from engines import check_that_no_bit_changes, engine_for, logprobs_of, run, worker_for
from nanovllm_cli.config import Lora
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import (
    CheckpointError,
    DoesNotFitError,
    NanovllmError,
    PromptTooLongError,
    UnsupportedError,
    UsageError,
)
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.sampling_params import SamplingParams
from reading import check_greedy_answers, greedily

pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_what_transformers_writes(kind: str, tmp_path: Path) -> None:
    """Alone and in one batch: sources of less than a block, of whole ones, and of more than a tile of the kernels."""
    worker = worker_for(bart_folder(tmp_path, kind), dtype="float32", num_blocks=64)
    check_greedy_answers(worker, [a_source(length, length) for length in (1, 5, 16, 17, 150)], partial(expected, kind))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: bart_folder(tmp_path_factory.mktemp(kind), kind) for kind in ("bart", "mbart", "m2m100", "marian")}


@pytest.fixture(scope="module")
def workers(folders: dict[str, Path]) -> dict[str, Worker]:
    return {kind: worker_for(folder, dtype="float32", num_blocks=64) for kind, folder in folders.items()}


def told(folder: Path, to: Path, *, config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None) -> Path:
    """A copy whose files say this, too."""
    shutil.copytree(folder, to)
    for name, more in (("config.json", config), ("generation_config.json", generation)):
        if more is not None:
            (to / name).write_text(json.dumps(json.loads((to / name).read_text()) | more))
    return to


@pytest.mark.parametrize("kind", KINDS)
def test_what_configs_leave_out_is_as_in_transformers(kind: str) -> None:
    import transformers

    name = KINDS[kind][0]
    config = getattr(transformers, f"{name}Config")().to_dict()
    architecture = "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration"
    family = hf_family({"architectures": [architecture]})
    whole = spec_from_hf(config | {"architectures": [architecture]}, family)
    assert spec_from_hf({"architectures": [architecture], "dtype": config.get("dtype")}, family) == whole


@pytest.mark.parametrize("kind", ["bart", "m2m100"])
def test_beams_find_what_those_of_transformers_do(kind: str, workers: dict[str, Worker]) -> None:
    """Each begins behind the same text, which is encoded once."""
    engine, source = engine_for(workers[kind], (END,)), a_source(21)
    (output,) = run(engine, [(list(source), SamplingParams(num_beams=4, n=4, max_tokens=9, logprobs=0))])
    check_beams_are(kind, source, output, max_new_tokens=9)
    assert engine.stats().scheduled_tokens < 9 * 4 * 32, "the text is read once"


def check_beams_are(
    kind: str, source: tuple[int, ...], output: Any, *, begun: int = 0, penalty: float = 1.0, ends: Any = END, **asked: Any
) -> None:
    """What transformers finds. begun: tokens that it draws, and that are told here."""
    theirs = bart(kind).generate(
        torch.tensor([source]), num_beams=4, num_return_sequences=4, do_sample=False, eos_token_id=ends, length_penalty=penalty,
        decoder_start_token_id=begun_by(kind), pad_token_id=PADDING, return_dict_in_generate=True, output_scores=True,
        forced_eos_token_id=None, early_stopping=False, use_cache=False, **asked,
    )  # fmt: skip
    for answer, row, score in zip(output.outputs, theirs.sequences.tolist(), theirs.sequences_scores.tolist(), strict=True):
        ids = list(answer.token_ids)
        assert ids == row[1 + begun : 1 + begun + len(ids)]
        assert set(row[1 + begun + len(ids) :]) <= {PADDING}
        total = sum(each.logprob for each in answer.logprobs or ())
        assert total / (len(ids) + begun) ** penalty == pytest.approx(score, abs=1e-4)


def test_beams_behind_what_a_decoder_is_told_are_scored_with_it(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers draws it, with certainty. Many tokens end an answer, so that those of many lengths are compared."""
    folder, source = told(folders["m2m100"], tmp_path / "model", config={"forced_bos_token_id": 7}), a_source(30, 3)
    worker, ends = worker_for(folder, dtype="float32", num_blocks=64), tuple(range(2, 7)) + tuple(range(8, 70))
    asked = SamplingParams(num_beams=4, n=4, max_tokens=12, logprobs=0, length_penalty=2.0)
    lengths = set()
    for seed in range(4):
        (output,) = run(engine_for(worker, ends), [(list(a_source(30, seed)), asked)])
        own = {"begun": 1, "penalty": 2.0, "ends": list(ends)}
        check_beams_are("m2m100", a_source(30, seed), output, **own, max_new_tokens=13, forced_bos_token_id=7)
        lengths |= {len(answer.token_ids) for answer in output.outputs}
    assert len(lengths) > 2
    (greedy,) = run(engine_for(worker), [(list(source), greedily(8, logprobs=0))])
    ids = greedy.outputs[0].token_ids
    logprobs = expected("m2m100", source, ids, begins=(begun_by("m2m100"), 7))[:-1]
    assert list(ids) == logprobs.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(logprobs_of(greedy)), logprobs.max(-1).values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [2, 3])
def test_no_ngram_is_written_twice(size: int, workers: dict[str, Worker]) -> None:
    """As in transformers, greedily and by beams, which also end no sooner than they may."""
    found = 0
    for seed in range(4):
        source = a_source(12, seed)
        engine = engine_for(workers["bart"], (END,))
        asked = SamplingParams(temperature=0.0, max_tokens=24, no_repeat_ngram_size=size, min_tokens=6)
        (greedy,) = run(engine, [(list(source), asked)])
        theirs = bart("bart").generate(
            torch.tensor([source]), do_sample=False, max_new_tokens=24, eos_token_id=END, decoder_start_token_id=begun_by("bart"),
            pad_token_id=PADDING, forced_eos_token_id=None, no_repeat_ngram_size=size, min_length=7,
        )  # fmt: skip
        ids = list(greedy.outputs[0].token_ids)
        assert ids == theirs[0, 1 : 1 + len(ids)].tolist()
        (plain,) = run(engine, [(list(source), dataclasses.replace(asked, no_repeat_ngram_size=0))])
        found += plain.outputs[0].token_ids != tuple(ids)
        asked = SamplingParams(num_beams=4, n=4, max_tokens=14, logprobs=0, no_repeat_ngram_size=size, min_tokens=6)
        (output,) = run(engine, [(list(source), asked)])
        check_beams_are("bart", source, output, max_new_tokens=14, no_repeat_ngram_size=size, min_length=7)
        assert all(len(answer.token_ids) >= 6 for answer in output.outputs)
    assert found, "or nothing was tested"


def test_marians_padding_is_never_written(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its logit is as large as this model's bias makes it; with "renormalize_logits" transformers, too, knows of no other."""
    folder = told(folders["marian"], tmp_path / "model", generation={"bad_words_ids": [[PADDING]]})
    tensors = load_file(folder / "model.safetensors")
    tensors["final_logits_bias"][0, PADDING] = 9.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source, engine = a_source(20), engine_for(worker_for(folder, dtype="float32", num_blocks=64), (END,))
    (greedy,) = run(engine, [(list(source), greedily(10, logprobs=0))])
    ids = greedy.outputs[0].token_ids
    logits = expected("marian", source, ids)[:-1].index_fill(1, torch.tensor(PADDING), -torch.inf)
    assert list(ids) == logits.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(logprobs_of(greedy)), logits.log_softmax(-1).max(-1).values, rtol=1e-4, atol=1e-4)
    (beams,) = run(engine, [(list(source), SamplingParams(num_beams=4, n=4, max_tokens=10))])
    assert not any(PADDING in answer.token_ids for answer in beams.outputs)
    (drawn,) = run(engine, [(list(source), SamplingParams(temperature=5.0, n=8, seed=1, max_tokens=40, ignore_eos=True))])
    assert not any(PADDING in answer.token_ids for answer in drawn.outputs)


@pytest.mark.parametrize("kind", ["bart", "mbart", "m2m100"])
def test_neither_steps_nor_neighbours_change_a_bit(kind: str, workers: dict[str, Worker]) -> None:
    """Alone, cut anywhere, beside others, recorded or not, behind a found prefix, and computed again after a preemption."""
    worker = workers[kind]
    sources = [a_source(40), a_source(40), a_source(33, 3), (*a_source(32)[:-1], 3)]
    requests = [(list(source), greedily(20, logprobs=0)) for source in sources]
    num_blocks = sum(-(-len(source) // 16) + 1 for source in sources) + 2
    alone = check_that_no_bit_changes(worker, requests, num_blocks)
    assert logprobs_of(alone[0]) != logprobs_of(alone[3]), "what they have in common is not found by its beginning"
    assert worker.runner.graphs._recordable, "steps are recorded"  # type: ignore[attr-defined]
    worker.runner.graphs._recordable = False  # type: ignore[attr-defined]
    try:
        for first, again in zip(alone, run(engine_for(worker, enable_prefix_caching=False), requests), strict=True):
            assert logprobs_of(again) == logprobs_of(first)
    finally:
        worker.runner.graphs._recordable = True  # type: ignore[attr-defined]


def test_texts_and_answers_end_where_positions_do(workers: dict[str, Worker], folders: dict[str, Path]) -> None:
    """200 of each, whatever the other has left."""
    worker = workers["bart"]
    engine = engine_for(worker)
    with pytest.raises(PromptTooLongError, match="201 tokens, the context holds 200") as told_of:
        engine.add("a", list(a_source(201)), greedily(2))
    assert "sentences" in str(told_of.value.hint)
    (long,) = run(engine, [(list(a_source(200)), greedily(5, logprobs=0))])
    ids = long.outputs[0].token_ids
    logprobs = expected("bart", a_source(200), ids)[:-1]
    torch.testing.assert_close(torch.tensor(logprobs_of(long)), logprobs.max(-1).values, rtol=1e-4, atol=1e-4)
    (output,) = run(engine, [(list(a_source(5)), SamplingParams(temperature=0.0, ignore_eos=True))])
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (199, "length")
    with pytest.raises(DoesNotFitError, match="the model holds"):
        worker_for(folders["bart"], max_model_len=2000)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"encoder_layers": 5000}, CheckpointError, "5000 layers"),
        ({"max_position_embeddings": 1 << 30}, CheckpointError, "positions; at most 65536"),
        ({"max_position_embeddings": 100}, CheckpointError, "expected"),
        ({"max_position_embeddings": 2}, CheckpointError, "2 positions"),
        ({"encoder_attention_heads": 7}, CheckpointError, "with 7 heads"),
        ({"decoder_attention_heads": 0}, CheckpointError, "decoder_attention_heads|num_attention_heads"),
        ({"activation_function": "tanh"}, UnsupportedError, "'tanh'"),
        ({"decoder_start_token_id": VOCAB}, CheckpointError, "of 300 tokens"),
        ({"forced_bos_token_id": VOCAB}, CheckpointError, "'forced_bos_token_id' is 300"),
        ({"decoder_vocab_size": 200}, UnsupportedError, "a vocabulary each"),
        ({"share_encoder_decoder_embeddings": False}, UnsupportedError, "a vocabulary each"),
        ({"bad_words_ids": [[3, 4]]}, UnsupportedError, "several tokens"),
        ({"bad_words_ids": [[VOCAB]]}, CheckpointError, "300 tokens"),
        ({"bad_words_ids": [3]}, CheckpointError, "lists of tokens"),
        ({"decoder_layers": 2}, CheckpointError, "not part of the model"),
        ({"d_model": 10**9}, CheckpointError, "parameters|heads|columns"),
    ],
)
def test_configs_that_make_no_sense_are_refused(
    changes: dict[str, Any], error: type[NanovllmError], said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = told(folders["bart"], tmp_path / "model", config=changes)
    (folder / "generation_config.json").unlink()
    with pytest.raises(error, match=said):
        engine_for(worker_for(folder, num_blocks=16))


def test_sines_are_no_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    """Files that have them have the same numbers; an odd width has none."""
    tensors = load_file(folders["marian"] / "model.safetensors")
    folder = told(folders["marian"], tmp_path / "model")
    for half in ("encoder", "decoder"):
        tensors[f"model.{half}.embed_positions.weight"] = getattr(bart("marian").model, half).embed_positions.weight.data
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (output,) = run(engine_for(worker_for(folder, dtype="float32")), [(list(a_source(9)), greedily(4))])
    ids = output.outputs[0].token_ids
    assert list(ids) == expected("marian", a_source(9), ids)[:-1].argmax(-1).tolist()
    with pytest.raises(NanovllmError, match="47"):
        worker_for(told(folder, tmp_path / "odd", config={"d_model": 47, "decoder_attention_heads": 1}))


def test_a_head_without_biases_has_none(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, tensors = told(folders["bart"], tmp_path / "model"), load_file(folders["bart"] / "model.safetensors")
    biases = tensors.pop("final_logits_bias")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (output,) = run(engine_for(worker_for(folder, dtype="float32")), [(list(a_source(9)), greedily(4))])
    logprobs = expected("bart", a_source(9), output.outputs[0].token_ids)[:-1] - biases
    assert list(output.outputs[0].token_ids) == logprobs.argmax(-1).tolist()


@pytest.mark.parametrize("quant", [None, "int8"])
def test_an_adapter_of_both_halves(quant: str | None, folders: dict[str, Path], tmp_path: Path) -> None:
    """Added to weights, or beside quantized ones."""
    model, generator = bart("bart"), torch.Generator().manual_seed(0)
    weights = {
        "model.encoder.layers.1.self_attn.q_proj": model.model.encoder.layers[1].self_attn.q_proj.weight,
        "model.decoder.layers.2.encoder_attn.v_proj": model.model.decoder.layers[2].encoder_attn.v_proj.weight,
        "model.decoder.layers.0.fc1": model.model.decoder.layers[0].fc1.weight,
    }
    tensors = {}
    for name, weight in weights.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(2, weight.shape[1], generator=generator) * 0.6
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(weight.shape[0], 2, generator=generator) * 0.6
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    worker = worker_for(folders["bart"], dtype="float32", num_blocks=32, lora=(Lora(str(tmp_path), 1.0),), quant=quant)
    source = a_source(20)
    (output,) = run(engine_for(worker), [(list(source), greedily(8, logprobs=0))])
    ids, found = output.outputs[0].token_ids, torch.tensor(logprobs_of(output))
    before = {name: weight.clone() for name, weight in weights.items()}
    unchanged = expected("bart", source, ids)[:-1].gather(1, torch.tensor(ids)[:, None])[:, 0]
    with torch.inference_mode():
        for name, weight in weights.items():
            weight += tensors[f"base_model.model.{name}.lora_B.weight"] @ tensors[f"base_model.model.{name}.lora_A.weight"]
        wanted = expected("bart", source, ids)[:-1].gather(1, torch.tensor(ids)[:, None])[:, 0]
        for name, weight in weights.items():
            weight.copy_(before[name])
    near = 1e-4 if quant is None else 0.5
    torch.testing.assert_close(found, wanted, rtol=0, atol=near)
    assert (found - unchanged).abs().max() > 2 * near


@pytest.mark.parametrize("kind", ["bart", "m2m100"])
@pytest.mark.parametrize(("dtype", "cache", "quant"), [("bfloat16", "auto", None), ("float32", "int8", None),
                                                      ("float32", "auto", "int8")])  # fmt: skip
def test_other_types_are_near(kind: str, dtype: str, cache: str, quant: str | None, folders: dict[str, Path]) -> None:
    worker = worker_for(folders[kind], dtype=dtype, num_blocks=32, kv_cache_dtype=cache, quant=quant)
    source = a_source(30)
    (output,) = run(engine_for(worker), [(list(source), greedily(10, logprobs=0))])
    ids = output.outputs[0].token_ids
    wanted = expected(kind, source, ids)[:-1].gather(1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs_of(output)), wanted, rtol=0, atol=0.5)


def test_what_it_can_not_do_is_told(workers: dict[str, Worker], folders: dict[str, Path]) -> None:
    engine, source = engine_for(workers["bart"]), list(a_source(5))
    with pytest.raises(UnsupportedError, match="that an encoder reads"):
        engine.add("a", source, greedily(2, prompt_logprobs=0))
    for field in ("source_language", "target_language"):
        with pytest.raises(UsageError, match=f"{field} has no meaning"):
            engine.add("a", source, greedily(2, **{field: "de"}))
    with pytest.raises(UnsupportedError, match="a draft model"):
        worker_for(folders["bart"], draft_model=str(folders["bart"]))
