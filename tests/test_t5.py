"""T5 and its kin against transformers, by tiny random models: what a decoder makes of the text that an encoder reads; and that no
bit of it depends on steps, neighbours, or what was found again."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import check_that_no_bit_changes, engine_for, logprobs_of, run, worker_for
from nanovllm_cli.config import Lora, LoraModule
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import CheckpointError, NanovllmError, PromptTooLongError, UnsupportedError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.vision_spec import PlacedImage, Sound, TokenIds
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.control_vector import check_led
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.quantized import open_reader
from reading import (
    END,
    KINDS,
    START,
    VOCAB,
    a_source,
    check_greedy_answers,
    expected,
    greedily,
    t5,
    t5_folder,
    with_pieces,
)
from test_convert import converted

pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_what_transformers_writes(kind: str, tmp_path: Path) -> None:
    """Alone and in one batch: sources of less than a block, of whole ones, and of more than a tile of the kernels."""
    worker = worker_for(t5_folder(tmp_path, kind), dtype="float32", num_blocks=64)
    check_greedy_answers(worker, [a_source(length, length) for length in (1, 5, 16, 17, 150)], partial(expected, kind))


@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_beams_find_what_those_of_transformers_do(kind: str, tmp_path: Path) -> None:
    """Each begins behind the same text, which is encoded once."""
    engine, source = engine_for(worker_for(t5_folder(tmp_path, kind), dtype="float32", num_blocks=64), (END,)), a_source(21)
    (output,) = run(engine, [(list(source), SamplingParams(num_beams=4, n=4, max_tokens=9, logprobs=0))])
    theirs = t5(kind).generate(
        torch.tensor([source]), num_beams=4, num_return_sequences=4, max_new_tokens=9, do_sample=False, eos_token_id=END,
        decoder_start_token_id=START, pad_token_id=START, return_dict_in_generate=True, output_scores=True,
        use_cache=False,  # which has no room for a decoder of more layers than the encoder
    )  # fmt: skip
    for answer, row, score in zip(output.outputs, theirs.sequences.tolist(), theirs.sequences_scores.tolist(), strict=True):
        ids = list(answer.token_ids)
        assert ids == row[1 : 1 + len(ids)]
        assert set(row[1 + len(ids) :]) <= {START}
        assert sum(each.logprob for each in answer.logprobs or ()) / len(ids) == pytest.approx(score, abs=1e-4)
    assert engine.stats().scheduled_tokens < 9 * 4 * 32, "the text is read once"


@pytest.mark.parametrize("kind", ["t5 as a file", "umt5 as a file"])
def test_gguf_files_are_llama_cpps(kind: str, tmp_path: Path) -> None:
    """By the names that its own package has, in what `convert` writes; and by the numbers that come of them."""
    gguf = pytest.importorskip("gguf")
    (tmp_path / "folder").mkdir()
    converted(with_pieces(t5_folder(tmp_path / "folder", kind)), tmp_path / "a.gguf", "gguf")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    patterns = {gguf.TENSOR_NAMES[each] + ".weight" for each in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.T5]}
    assert {re.sub(r"blk\.\d+", "blk.{bid}", tensor.name) for tensor in reader.tensors} <= patterns
    said = {key: field.contents() for key, field in reader.fields.items()}
    keys = gguf.Keys.Attention.REL_BUCKETS_COUNT, gguf.Keys.LLM.DECODER_START_TOKEN_ID, gguf.Keys.LLM.DECODER_BLOCK_COUNT
    assert [said[key.format(arch="t5")] for key in keys] == [16, START, 3]
    assert (said["general.architecture"], said["t5.block_count"], said["t5.context_length"]) == ("t5", 2, 256)
    worker, source = worker_for(tmp_path / "a.gguf", dtype="float32", num_blocks=64), a_source(100)
    (output,) = run(engine_for(worker), [(list(source), greedily(16, logprobs=0))])
    ids = output.outputs[0].token_ids
    logprobs = expected(kind, source, ids)[:-1]
    assert list(ids) == logprobs.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(logprobs_of(output)), logprobs.max(-1).values, rtol=1e-4, atol=1e-4)


def test_distances_that_no_file_can_say_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="GGUF cannot say this of a t5 model: distances"):
        converted(folder, tmp_path / "a.gguf", "gguf")


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"relative_attention_num_buckets": 6}, CheckpointError, "6 buckets"),
        ({"relative_attention_max_distance": 8}, CheckpointError, "up to 8"),
        ({"num_layers": 5000}, CheckpointError, "5000 layers"),
        ({"feed_forward_proj": "gated-tanh"}, UnsupportedError, "gated-tanh"),
        ({"decoder_start_token_id": VOCAB}, CheckpointError, "of 300 tokens"),
        ({"d_kv": 7}, UnsupportedError, "not an even number"),
        ({"n_positions": 2**31 - 1}, UnsupportedError, "a context of 2147483647 tokens"),
        ({"num_decoder_layers": 2}, CheckpointError, "not part of the model"),
    ],
)
def test_configs_that_make_no_sense_are_refused(
    changes: dict[str, Any], error: type[NanovllmError], said: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model" / "generation_config.json").unlink()
    with pytest.raises(error, match=said):
        worker_for(tmp_path / "model")


def test_an_embedding_under_its_other_name_is_found(folder: Path, worker: Worker, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["decoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    asked = [(list(a_source(9)), greedily(4, logprobs=0))]
    (found,), (wanted,) = run(engine_for(worker_for(tmp_path / "model", dtype="float32")), asked), run(engine_for(worker), asked)
    assert logprobs_of(found) == logprobs_of(wanted)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return t5_folder(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:
    return worker_for(folder, dtype="float32", num_blocks=64)


def test_neither_steps_nor_neighbours_change_a_bit(worker: Worker) -> None:
    """Alone, cut anywhere, beside others, recorded or not, behind a found prefix, and computed again after a preemption."""
    sources = [a_source(40), a_source(40), a_source(33, 3), (*a_source(32)[:-1], 1)]
    requests = [(list(source), greedily(20, logprobs=0)) for source in sources]
    num_blocks = sum(-(-len(source) // 16) + 1 for source in sources) + 2
    alone = check_that_no_bit_changes(worker, requests, num_blocks)
    assert logprobs_of(alone[0]) != logprobs_of(alone[3]), "what they have in common is not found by its beginning"
    worker.runner.graphs._recordable = False  # type: ignore[attr-defined]
    try:
        for first, again in zip(alone, run(engine_for(worker, enable_prefix_caching=False), requests), strict=True):
            assert logprobs_of(again) == logprobs_of(first)
    finally:
        worker.runner.graphs._recordable = True  # type: ignore[attr-defined]


def test_the_same_text_is_encoded_once(worker: Worker) -> None:
    sight = worker.sight
    assert sight is not None
    engine, before = engine_for(worker), sight.num_computed
    source = list(a_source(20, 11))
    for count in (2, 3, 20):
        (output,) = run(engine, [(source, greedily(count))])
    assert sight.num_computed - before == 1
    assert engine.stats().prefix_hit_tokens == 2 * 32, "the encoder's rows; what was written is not the next answer's beginning"
    assert output.metrics.num_cached_tokens == len(source), "and no more than were sent"
    run(engine, [([*source[:16], *a_source(4, 12)], greedily(2))])
    assert engine.stats().prefix_hit_tokens == 2 * 32, "what is cached is of the whole text alone"
    assert sight.num_computed - before == 2


def test_answers_are_forked_sampled_and_stopped(worker: Worker) -> None:
    source = list(a_source(20))
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12, ignore_eos=True)
    (output,) = run(engine_for(worker), [(source, params)])
    assert len({each.token_ids for each in output.outputs}) > 1
    for i, answer in enumerate(output.outputs):
        assert (answer.index, answer.error, len(answer.token_ids)) == (i, None, 12)
    (first,) = run(engine_for(worker), [(source, dataclasses.replace(params, n=1))])
    assert first.outputs[0].token_ids == output.outputs[0].token_ids
    (whole,) = run(engine_for(worker), [(source, greedily(8))])
    stop = whole.outputs[0].token_ids[2]
    (ended,) = run(engine_for(worker), [(source, greedily(8, stop_token_ids=(stop,)))])
    assert ended.outputs[0].finish_reason == "stop"
    assert ended.outputs[0].token_ids == whole.outputs[0].token_ids[: whole.outputs[0].token_ids.index(stop) + 1]


def test_penalties_are_of_what_is_written(worker: Worker) -> None:
    """As in transformers: not of what the encoder has read, whatever of it comes next."""
    source = a_source(60)
    (plain,) = run(engine_for(worker), [(list(source), greedily(1, logprobs=0))])
    likeliest = plain.outputs[0].token_ids[0]
    again = [likeliest, *source]
    (other,) = run(engine_for(worker), [(again, greedily(1))])
    (penalized,) = run(engine_for(worker), [(again, greedily(1, repetition_penalty=50.0))])
    assert penalized.outputs[0].token_ids == other.outputs[0].token_ids
    written = [START]
    with torch.inference_mode():
        for _ in range(12):
            logits = t5("flan-t5")(torch.tensor([source]), decoder_input_ids=torch.tensor([written])).logits[0, -1]
            factors = torch.ones_like(logits).index_fill(0, torch.tensor(written), 1.3)
            written.append(int(torch.where(logits > 0, logits / factors, logits * factors).argmax()))
    (ours,) = run(engine_for(worker), [(list(source), greedily(12, repetition_penalty=1.3))])
    assert list(ours.outputs[0].token_ids) == written[1:]


def test_guesses_change_no_token(worker: Worker, folder: Path) -> None:
    looks_up = worker_for(folder, dtype="float32", num_blocks=64, num_speculative_tokens=3)
    requests = [(list(a_source(length)), greedily(24, logprobs=0)) for length in (7, 40)]
    plain = run(engine_for(worker), requests)
    found = run(engine_for(looks_up, num_speculative_tokens=3), requests)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.metrics.num_guessed_tokens for each in found) > 0


@pytest.mark.parametrize("quant", [None, "int8"])
def test_an_adapter_of_both_halves(quant: str | None, folder: Path, tmp_path: Path) -> None:
    """Added to weights, or beside quantized ones."""
    model, generator = t5("flan-t5"), torch.Generator().manual_seed(0)
    weights = {
        "encoder.block.1.layer.0.SelfAttention.q": model.encoder.block[1].layer[0].SelfAttention.q.weight,
        "decoder.block.2.layer.1.EncDecAttention.v": model.decoder.block[2].layer[1].EncDecAttention.v.weight,
        "decoder.block.0.layer.2.DenseReluDense.wi_1": model.decoder.block[0].layer[2].DenseReluDense.wi_1.weight,
    }  # fmt: skip
    tensors = {}
    for name, weight in weights.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(2, weight.shape[1], generator=generator) * 0.3
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(weight.shape[0], 2, generator=generator) * 0.3
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    worker = worker_for(folder, dtype="float32", num_blocks=32, lora=(Lora(str(tmp_path), 1.0),), quant=quant)
    source = a_source(20)
    (output,) = run(engine_for(worker), [(list(source), greedily(8, logprobs=0))])
    ids, found = output.outputs[0].token_ids, torch.tensor(logprobs_of(output))
    before = {name: weight.clone() for name, weight in weights.items()}
    unchanged = expected("flan-t5", source, ids)[:-1].gather(1, torch.tensor(ids)[:, None])[:, 0]
    with torch.inference_mode():
        for name, weight in weights.items():
            weight += tensors[f"base_model.model.{name}.lora_B.weight"] @ tensors[f"base_model.model.{name}.lora_A.weight"]
        wanted = expected("flan-t5", source, ids)[:-1].gather(1, torch.tensor(ids)[:, None])[:, 0]
        for name, weight in weights.items():
            weight.copy_(before[name])
    near = 1e-4 if quant is None else 0.5
    torch.testing.assert_close(found, wanted, rtol=0, atol=near)
    assert (found - unchanged).abs().max() > 2 * near


def test_what_it_can_not_do_is_told(worker: Worker, folder: Path) -> None:
    engine, source = engine_for(worker), list(a_source(5))
    with pytest.raises(UnsupportedError, match="that an encoder reads"):
        engine.add("a", source, greedily(2, prompt_logprobs=0))
    with pytest.raises(UnsupportedError, match="reads no images"):
        engine.add("a", TokenIds(source, [PlacedImage(Sound.of_text(source), 0, 1, 5)]), greedily(2))
    with pytest.raises(UnsupportedError, match="adapters that requests choose"):
        worker_for(folder, lora_modules=(LoraModule("own", str(folder)),))
    with pytest.raises(UnsupportedError, match="a draft model"):
        worker_for(folder, draft_model=str(folder))
    with open_checkpoint(folder) as checkpoint:
        spec = read_spec(checkpoint, open_reader(checkpoint))
    with pytest.raises(UnsupportedError, match="is not led"):
        check_led(spec)


def test_long_texts_have_room(folder: Path) -> None:
    """More than the files say, where that is asked for: all distances from some on are one."""
    source = a_source(700)
    with pytest.raises(PromptTooLongError):
        engine_for(worker_for(folder, dtype="float32", num_blocks=64)).add("a", list(source), greedily(2))
    worker = worker_for(folder, dtype="float32", num_blocks=64, max_model_len=800)
    (output,) = run(engine_for(worker, max_num_batched_tokens=64), [(list(source), greedily(12, logprobs=0))])
    ids = output.outputs[0].token_ids
    logprobs = expected("flan-t5", source, ids)[:-1]
    assert list(ids) == logprobs.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(logprobs_of(output)), logprobs.max(-1).values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "cache", "quant"), [("bfloat16", "auto", None), ("float32", "int8", None),
                                                      ("float32", "auto", "int8")])  # fmt: skip
def test_other_types_are_near(dtype: str, cache: str, quant: str | None, folder: Path) -> None:
    worker = worker_for(folder, dtype=dtype, num_blocks=32, kv_cache_dtype=cache, quant=quant)
    source = a_source(30)
    (output,) = run(engine_for(worker), [(list(source), greedily(10, logprobs=0))])
    ids = output.outputs[0].token_ids
    wanted = expected("flan-t5", source, ids)[:-1].gather(1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs_of(output)), wanted, rtol=0, atol=0.5)
