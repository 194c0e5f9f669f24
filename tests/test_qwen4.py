"""Qwen4-Exp against transformers: gated streams, gates by sigmoid, embeddings of n-grams, attention to blocks that are chosen,
images and videos; what steps it is computed in changes no bit; what is refused."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Qwen4ExpConfig, Qwen4ExpTextConfig

from engines import engine_for, greedy, logprobs_of, random_model, run, save, worker_for
from nanovllm_cli.config import EngineConfig, Lora
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.outline import shapes_of
from nanovllm_cli.models.qwen4 import multipliers_of, primes_from
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.planning.facts import facts_of
from nanovllm_cli.planning.plan import make_plan
from nanovllm_cli.state_spec import DeltaSpec, NGramSpec
from nanovllm_cli.vision_spec import TokenIds
from nanovllm_cli.weights.checkpoint import open_checkpoint
from quantizing import quantize
from test_convert_families import make_gguf
from test_delta import (  # noqa: F401  # run here for the folder of this file
    LONG,
    PROMPTS,
    SETTINGS,
    alone,
    test_a_conversation_goes_on_from_a_state_that_was_kept_in_its_answer,
    test_a_recorded_step_has_the_bits_of_one_that_is_not,
    test_a_step_that_failed_behind_its_kernels_is_repeated,
    test_answers_do_not_depend_on_what_else_runs,
    test_forks_draw_what_each_would_draw_alone,
    test_prefixes_are_found,
    test_prompts_that_begin_alike_share_what_lies_behind_a_power_of_two_and_where_two_parted,
    test_saved_blocks_have_the_states,
)
from test_llm import write_byte_tokenizer
from test_models import DELTA, QWEN_IDS, SMALL, prompts
from test_quant_engine import difference, expected_logits, logits_of
from test_video_models import a_video, filmed_for_transformers, prompt_of, token_of
from test_vision import MODELS, QWEN_TOWER, opened, parts_of, prompt_with, seen_by_transformers

SHAPE: dict[str, Any] = {name: value for name, value in SMALL.items() if name != "intermediate_size"} | DELTA | {
    "num_hidden_layers": 4, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 33,
    "shared_expert_intermediate_size": 41, "hc_count": 3, "hc_lowrank": 13,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]},
}  # fmt: skip
ALL_SEEN = {
    "indexer_n_heads": 5, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 600, "indexer_compress_ratio": 6,
}  # fmt: skip
CHOSEN = ALL_SEEN | {"indexer_n_heads": 9, "indexer_budget": 15, "indexer_compress_ratio": 3}
NGRAMS = {
    "ple_layer_ids": [1, 3], "ple_embed_dim": 40, "ngram_size": 3, "heads_per_ngram": 4, "ngram_vocab_size_base": 50,
    "split_ngram_parts": 7, "make_ngram_vocab_size_divisible_by": 8,
}  # fmt: skip
KINDS = ["linear_attention", "full_attention", "linear_attention", "indexed_attention"]
CONFIGS = {
    "all is seen": ALL_SEEN,
    "gates by sigmoid": ALL_SEEN | {"output_gate_type": "sigmoid", "norm_topk_prob": False, "layer_types": KINDS},
    "n-grams": ALL_SEEN | NGRAMS,
    "4-grams, two taps, ends in a list": ALL_SEEN | NGRAMS | {
        "ngram_size": 4, "heads_per_ngram": 2, "ple_embed_dim": 48, "ple_conv_kernel_size": 2, "eos_token_id": [1, 2],
        "ple_layer_ids": [2], "seed": 7,
    },
    "chosen blocks": CHOSEN | {"layer_types": KINDS},
    "blocks of a token": CHOSEN | {"indexer_budget": 7, "indexer_compress_ratio": 1},
    "all of it": CHOSEN | NGRAMS | {"output_gate_type": "sigmoid"},
}  # fmt: skip


def config_of(case: str) -> Qwen4ExpTextConfig:
    return Qwen4ExpTextConfig(**SHAPE | CONFIGS[case])


def calm_model(config: Any) -> Any:
    """Of weights so small that transformers' own numbers are close to those in float64."""
    model = random_model(config)
    for parameter in model.parameters():
        parameter.data *= 0.4 if parameter.dim() > 1 else 1.0
    return model


def with_ends(tokens: list[list[int]]) -> list[list[int]]:
    """Each with some tokens that end a text, side by side and apart."""
    return [[1 if i % 11 in (3, 8, 9) else token for i, token in enumerate(ids)] for ids in tokens]


def edited(folder: Path, changes: dict[str, Any]) -> Path:
    """config.json with other values; None: without."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize("case", CONFIGS)
def test_log_probabilities_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model, tokens = calm_model(config_of(case)), with_ends(prompts(SHAPE["vocab_size"]))
    worker = worker_for(save(model, tmp_path), dtype="float32")
    found, expected = (rows.log_softmax(-1) for rows in (logits_of(worker, tokens), expected_logits(model, tokens)))
    assert float((found - expected).abs().max()) < 1e-4


def test_without_an_indexer_all_is_seen(tmp_path: Path) -> None:
    """Which transformers says is right, and does not make."""
    model, tokens = random_model(config_of("all is seen")), prompts(SHAPE["vocab_size"])
    folder = edited(save(model, tmp_path), dict.fromkeys(ALL_SEEN))
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "indexer" not in name}
    save_file(tensors, folder / "model.safetensors")
    assert difference(logits_of(worker_for(folder, dtype="float32"), tokens), expected_logits(model, tokens)) < 1e-4


@pytest.mark.parametrize("case", ["all of it", "4-grams, two taps, ends in a list"])
def test_greedy_answers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Step by step, from recordings behind the first, several sequences at once and past the tokens that one sees."""
    model = random_model(config_of(case))
    asked = with_ends([ids[:20] for ids in prompts(SHAPE["vocab_size"])[1:5]])
    expected = []
    for ids in asked:
        made = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(made[0, len(ids):].tolist())  # fmt: skip
    engine = engine_for(worker_for(save(model, tmp_path), dtype="float32"))
    assert [list(out.outputs[0].token_ids) for out in run(engine, [(ids, greedy(40)) for ids in asked])] == expected


# ---- steps ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16, of which what is imported from test_delta.py asks whether steps change a bit."""
    even = {"moe_intermediate_size": 34, "shared_expert_intermediate_size": 42, "hc_lowrank": 14}  # what can be recorded
    more = {"indexer_budget": 48, "max_position_embeddings": 2048}
    config = Qwen4ExpTextConfig(**SHAPE | CONFIGS["all of it"] | even | more)
    return save(random_model(config, dtype=torch.bfloat16), tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_a_coarse_cache_gives_the_same_in_any_steps(kept: Any, folder: Path) -> None:
    settings: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 37}]
    found = []
    for own in settings:
        engine = engine_for(worker_for(folder, kv_cache_dtype=kept, **own), **own)
        found.append([out.outputs[0].token_ids for out in run(engine, [(ids, greedy(12)) for ids in PROMPTS])])
    assert found[0] == found[1]


# ---- images ----

TEXT = config_of("all of it").to_dict()
MODELS.setdefault("qwen4", Qwen4ExpConfig(
    text_config=TEXT, **QWEN_IDS,
    vision_config=QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48, "num_position_embeddings": 16},
))  # fmt: skip


@pytest.mark.parametrize("is_filmed", [False, True], ids=["images", "a video"])
def test_what_follows_images_is_what_transformers_has(is_filmed: bool, tmp_path: Path) -> None:
    """Blocks begin within images, and are rotated where these are."""
    model, worker, vision, token = opened("qwen4", tmp_path)
    token = token_of(vision, token) if is_filmed else token
    made, prompt = seen_by_transformers, prompt_with(vision, parts_of(vision), token)
    if is_filmed:
        made, prompt = filmed_for_transformers, prompt_of(vision, token, 5, a_video(vision, 4, (0, 3, 7, 9)), 6)
    (output,) = run(engine_for(worker), [(prompt, greedy(12, logprobs=0))])
    answer = output.outputs[0]
    whole = TokenIds([*prompt, *answer.token_ids], prompt.images)
    with torch.inference_mode():
        logits = model(**made(model, vision, whole, token)).logits[0, len(prompt) - 1 : -1]
    assert len(prompt) > 2 * CHOSEN["indexer_budget"]
    assert list(answer.token_ids) == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(logprobs_of(output)), expected, rtol=1e-4, atol=1e-4)


def test_steps_change_no_bit_of_what_follows_images(tmp_path: Path) -> None:
    _, worker, vision, token = opened("qwen4", tmp_path, num_blocks=64)
    parts = parts_of(vision)
    asked = [(prompt_with(vision, own, token), greedy(24, logprobs=0)) for own in (parts, [*parts[:4], 9], [7])]
    alone_ = [run(engine_for(worker, enable_prefix_caching=False), [each])[0] for each in asked]
    for setting in ({}, {"max_num_batched_tokens": 7}, {"num_blocks": 7}):
        engine = engine_for(worker, **setting)
        for one, other in zip(alone_, run(engine, asked), strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            assert logprobs_of(one) == logprobs_of(other)
        assert (engine.stats().preemptions > 0) == ("num_blocks" in setting)


# ---- checkpoints ----


def ngrams_of(worker: Worker) -> list[NGramSpec]:
    return [mixer.ngrams for mixer in worker.spec.mixers if isinstance(mixer, DeltaSpec) and mixer.ngrams is not None]


@pytest.fixture(scope="module")
def with_ngrams(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = calm_model(Qwen4ExpTextConfig(**SHAPE | CONFIGS["n-grams"] | {"ngram_vocab_size_base": 5000}))
    folder = save(model, tmp_path_factory.mktemp("n-grams"))
    write_byte_tokenizer(folder)
    return model, folder


TABLE = "model.layers.{}.ple.ple_embedding.ngram_embedding"


def changed(folder: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("way", ["in one", "in others", "of bfloat16", "without buffers", "other buffers"])
def test_a_table_is_read_as_it_lies(way: str, with_ngrams: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = with_ngrams
    tokens, tensors = with_ends(prompts(SHAPE["vocab_size"])[:5]), load_file(folder / "model.safetensors")
    if way == "of bfloat16":
        model = copy.deepcopy(model)
        for table in (model.model.layers[layer].ple.ple_embedding.ngram_embedding.weight for layer in (0, 2)):
            table.data = table.data.bfloat16().float()
    expected = expected_logits(model, tokens)
    for layer in (0, 2):
        place = TABLE.format(layer)
        whole = torch.cat([tensors.pop(f"{place}.shard_{i}.weight") for i in range(7)])
        if way == "in one":
            tensors[f"{place}.weight"] = whole
            continue
        parts = whole.split([5, 9000, len(whole) - 9005] if way == "in others" else -(-len(whole) // 7))
        parts = tuple(part.bfloat16() for part in parts) if way == "of bfloat16" else parts
        tensors |= {f"{place}.shard_{i}.weight": part.contiguous() for i, part in enumerate(parts)}
        for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"):
            if way == "without buffers":
                del tensors[f"{place.removesuffix('.ngram_embedding')}.{name}"]
        if way == "other buffers":
            tensors[f"{place.removesuffix('.ngram_embedding')}.layer_multipliers"] = torch.tensor([5, 9, 11])
    worker = worker_for(changed(folder, tmp_path, tensors), dtype="float32")
    found = logits_of(worker, tokens)
    if way == "other buffers":
        assert [ngrams.multipliers for ngrams in ngrams_of(worker)] == [(5, 9, 11)] * 2
        assert difference(found, expected) > 1e-2
    else:
        assert difference(found, expected) < 1e-5


def test_a_table_stays_in_its_file(with_ngrams: tuple[Any, Path]) -> None:
    """Weights are rounded, and the table is not, nor counted as memory."""
    model, folder = with_ngrams
    tokens = with_ends(prompts(SHAPE["vocab_size"])[:4])
    worker = worker_for(folder, quant="int8", dtype="float32")
    assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < 0.1
    ngrams = worker.model.blocks[0].ngrams
    assert ngrams is not None
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(ngrams._pieces[3], stored[f"{TABLE.format(0)}.shard_3.weight"])
    maps = Path("/proc/self/maps")
    if maps.exists():
        ranges = [line.split()[0].split("-") for line in maps.read_text().splitlines() if str(folder) in line]
        assert any(int(low, 16) <= ngrams._pieces[3].data_ptr() < int(high, 16) for low, high in ranges)
    on_disk = sum(4 * each.num_stored for each in ngrams_of(worker))
    with open_checkpoint(folder) as checkpoint:
        facts, plan = facts_of(checkpoint), make_plan(checkpoint, EngineConfig(), ["int8"], None)
    (tables,) = (each for each in facts.classes if each.name == "n-grams")
    assert tables.num_bytes == on_disk
    assert facts.num_parameters == sum(torch.Size(shape).numel() for shape in shapes_of(worker.spec).values()) + 2 * (3 + 8 + 8)
    assert facts.num_active < facts.num_parameters - on_disk // 4
    assert plan.facts.disk_bytes == on_disk
    assert plan.formats[0].weight_bytes < worker.weight_bytes < on_disk


def test_what_is_published_says_little() -> None:
    """As transformers takes it, layers that are told in either way."""
    little = {"architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text", "hidden_act": "sigmoid"}
    whole = Qwen4ExpTextConfig().to_dict() | little | {"hidden_act": "silu"}
    spec = spec_from_hf(little | {"hidden_act": "silu", "rope_parameters": {"rope_theta": 1e4}}, hf_family(little))
    assert spec == spec_from_hf(whole | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, hf_family(whole))
    assert [i for i, mixer in enumerate(spec.mixers) if not isinstance(mixer, DeltaSpec)] == list(range(3, 40, 4))


def test_hashes_are_those_of_transformers() -> None:
    from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

    for vocab, longest, place, seed in ((248320, 3, 0, 1234), (513, 5, 7, 0), (1, 2, 1, 2**31 - 1)):
        expected = theirs._build_layer_multipliers(vocab, longest, place, seed).tolist()
        assert list(multipliers_of(vocab, longest, place, seed)) == expected
    for base in (1, 2, 50, 20_000_000):
        primes = primes_from(base)
        assert [next(primes) for _ in range(20)] == [theirs._find_nth_prime_after(base - 1, i + 1) for i in range(20)]


PLE = NGRAMS | ALL_SEEN
BAD: list[tuple[dict[str, Any], type[NanovllmError], str]] = [
    ({"hc_count": 1}, UnsupportedError, "1 residual streams"),
    ({"hc_count": 17}, UnsupportedError, "17 residual streams"),
    ({"hc_lowrank": 0}, CheckpointError, "'hc_lowrank' must be a whole number of at least 1"),
    ({"hc_lowrank": 1 << 20}, CheckpointError, "at most 65536 are believed"),
    ({"output_gate_type": "tanh"}, UnsupportedError, "gates by 'tanh' behind the delta rule"),
    ({"hidden_act": "gelu"}, UnsupportedError, "another activation than silu"),
    ({"attention_bias": True}, UnsupportedError, "gated attention with biases"),
    ({"layer_types": ["linear_attention"] * 4}, CheckpointError, "no layer has attention"),
    ({"layer_types": ["sliding_attention"] * 4}, UnsupportedError, "layer type 'sliding_attention' is not supported"),
    ({"indexer_budget": None}, CheckpointError, "no 'indexer_budget'"),
    ({"indexer_kv_heads": 2}, UnsupportedError, "an indexer with 2 keys of a token"),
    ({"indexer_compress_ratio": 7}, CheckpointError, "600 tokens are no whole blocks of 7"),
    ({"indexer_budget": 1 << 21, "indexer_compress_ratio": 1}, CheckpointError, "an indexer of 2097152 tokens"),
    ({"indexer_head_dim": 10}, UnsupportedError, "heads of 10 dims, of which 12 rotate"),
    ({"num_experts": 0}, CheckpointError, "'num_experts' must be a whole number of at least 1"),
    ({"ple_layer_ids": [0]}, CheckpointError, "a list of layers from 1 to 4"),
    ({"ple_layer_ids": [5]}, CheckpointError, "a list of layers from 1 to 4"),
    ({"ple_layer_ids": [4]}, UnsupportedError, "n-grams in front of layer 4, which has attention"),
    ({"ple_embed_dim": 41}, CheckpointError, "41 numbers of a token are not 8 rows"),
    ({"ngram_size": 1}, CheckpointError, "'ngram_size' must be a whole number of at least 2"),
    ({"ngram_size": 9}, CheckpointError, "9 tokens of an n-gram; at most 8"),
    ({"heads_per_ngram": 1000}, CheckpointError, "2000 rows of a token; at most 256"),
    ({"ple_conv_kernel_size": 65}, CheckpointError, "65 taps; at most 64"),
    ({"split_ngram_parts": 1 << 20}, CheckpointError, "1048576 parts of a table"),
    ({"eos_token_id": None}, CheckpointError, "'eos_token_id', which it lacks"),
    ({"eos_token_id": []}, CheckpointError, "'eos_token_id', which it lacks"),
    ({"eos_token_id": -1}, CheckpointError, "'eos_token_id', which it lacks"),
]


@pytest.mark.parametrize(("changes", "kind", "said"), BAD, ids=[said for *_, said in BAD])
def test_configs_that_can_not_be_followed(changes: dict[str, Any], kind: type[NanovllmError], said: str) -> None:
    config = Qwen4ExpTextConfig(**SHAPE | PLE).to_dict() | {"architectures": ["Qwen4ExpForCausalLM"]} | changes
    with pytest.raises(kind, match=re.escape(said)) as raised:
        spec_from_hf(config, hf_family(config))
    assert raised.value.hint


def test_a_table_of_tens_of_gib_is_described_at_once() -> None:
    """By the config alone; the published one is so large."""
    config = {"architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text", "ple_layer_ids": [2], "eos_token_id": 7}
    (ngrams,) = (m.ngrams for m in spec_from_hf(config, hf_family(config)).mixers if isinstance(m, DeltaSpec) and m.ngrams)
    assert (len(ngrams.shards), ngrams.row_width, ngrams.sizes[0]) == (512, 128, 20_000_003)
    assert sum(ngrams.shards) % 128 == 0


BUFFERS = "model.layers.{}.ple.ple_embedding.{}"
SIZES = BUFFERS.format(0, "ngram_heads_vocab_sizes")
TABLES: dict[str, tuple[str, Any, str]] = {
    "a part is missing": (f"{TABLE.format(0)}.shard_6.weight", None, "1 missing: model.layers.0.ple"),
    "a part is too long": (f"{TABLE.format(0)}.shard_6.weight", lambda t: t.repeat(2, 1), "1 of the wrong shape"),
    "of half precision": (f"{TABLE.format(2)}.shard_1.weight", lambda t: t.half(), "a table of n-grams in F16"),
    "sizes that go beyond": (SIZES, lambda t: t + 900, "does not fit its table"),
    "a size of nothing": (SIZES, lambda t: t * 0, "does not fit its table"),
    "offsets that overlap": (BUFFERS.format(2, "ngram_heads_offsets"), lambda t: t + 1, "does not fit its table"),
    "sizes that are no numbers": (SIZES, lambda t: t.double() * float("nan"), "is no whole numbers"),
    "multipliers below nothing": (BUFFERS.format(0, "layer_multipliers"), lambda t: -t, "is no whole numbers"),
    "a multiplier too few": (BUFFERS.format(0, "layer_multipliers"), lambda t: t[:2], "does not fit its table"),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLES)
def test_tables_that_do_not_fit(case: str, with_ngrams: tuple[Any, Path], tmp_path: Path) -> None:
    name, change, said = TABLES[case]
    tensors = load_file(with_ngrams[1] / "model.safetensors")
    tensors = {key: value for key, value in tensors.items() if key != name} | ({name: change(tensors[name])} if change else {})
    with pytest.raises((CheckpointError, UnsupportedError), match=re.escape(said)):
        worker_for(changed(with_ngrams[1], tmp_path, {key: value.contiguous() for key, value in tensors.items()}))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "guesses": ({"num_speculative_tokens": 3}, "what it keeps of n-grams cannot be taken back"),
    "several processes": ({"tensor_parallel_size": 2}, "is not divided among processes: it has gated streams"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_are_refused(case: str, with_ngrams: tuple[Any, Path]) -> None:
    settings, said = REFUSED[case]
    with open_checkpoint(with_ngrams[1]) as checkpoint, pytest.raises(UnsupportedError, match=re.escape(said)) as raised:
        make_plan(checkpoint, EngineConfig(**settings), ["int8"], None)
    assert raised.value.hint


def test_no_gguf_file_is_made(with_ngrams: tuple[Any, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"GGUF has no Qwen4-Exp: llama\.cpp knows none"):
        make_gguf(with_ngrams[1], tmp_path / "m.gguf")


def test_one_that_sees_is_read_for_its_texts(tmp_path: Path) -> None:
    """By names that begin with model.language_model."""
    model = random_model(MODELS["qwen4"], auto=AutoModelForImageTextToText)
    folder, tokens = save(model, tmp_path), with_ends(prompts(500)[:5])
    assert any(name.startswith("model.language_model.layers.0.ple.") for name in load_file(folder / "model.safetensors"))
    assert difference(logits_of(worker_for(folder, dtype="float32"), tokens), expected_logits(model, tokens)) < 1e-5


def test_a_gpu_and_adapters_are_refused_by_name(with_ngrams: tuple[Any, Path], tmp_path: Path) -> None:
    with open_checkpoint(with_ngrams[1]) as checkpoint:
        spec = facts_of(checkpoint).spec
    platform = CudaPlatform.__new__(CudaPlatform)
    with pytest.raises(UnsupportedError, match=r"\(Qwen4-Exp\) on a GPU are not supported yet"):
        platform.backend(spec, torch.bfloat16)
    with pytest.raises(UnsupportedError, match="adapters of a qwen4_exp model are not supported"):
        worker_for(with_ngrams[1], lora=(Lora(str(tmp_path)),))


def test_a_quantized_folder_is_read(with_ngrams: tuple[Any, Path], tmp_path: Path) -> None:
    """Its table is what it was; calibration is refused."""
    model, folder = with_ngrams
    quantize("int8", tmp_path / "q", folder)
    tokens = with_ends(prompts(SHAPE["vocab_size"])[:4])
    assert difference(logits_of(worker_for(tmp_path / "q", dtype="float32"), tokens), expected_logits(model, tokens)) < 0.1
    name = f"{TABLE.format(2)}.shard_5.weight"
    stored, kept = (load_file(next(each.glob("*.safetensors")))[name] for each in (folder, tmp_path / "q"))
    assert torch.equal(stored, kept)
    with pytest.raises(UnsupportedError, match="is not calibrated yet: it has several streams"):
        quantize("int8", tmp_path / "g", folder, algorithm="gptq", num_samples=1)


@pytest.mark.parametrize("place", ["model.layers", "model.language_model.layers"])
def test_stacked_experts_are_never_turned_over(place: str, tmp_path: Path) -> None:
    """As the hub's folders have them, and what sees by the name that the first ones gave it; what guesses is left aside."""
    text = TEXT | {"moe_intermediate_size": 24}
    model = random_model(Qwen4ExpTextConfig(**SHAPE | CONFIGS["all of it"] | {"moe_intermediate_size": 24}))
    if "language" in place:
        config = Qwen4ExpConfig(text_config=text, vision_config=MODELS["qwen4"].vision_config.to_dict(), **QWEN_IDS)
        model = random_model(config, auto=AutoModelForImageTextToText)
    folder, tokens = save(model, tmp_path), with_ends(prompts(500)[:5])
    if "language" in place:
        said = json.loads((folder / "config.json").read_text())["vision_config"]
        edited(folder, {"vision_config": said | {"model_type": "qwen4_exp"}})
    tensors = load_file(folder / "model.safetensors") | {"mtp.fc.weight": torch.ones(48, 96)}
    for i in range(4):
        parts = {part: torch.stack([tensors.pop(f"{place}.{i}.mlp.experts.{e}.{part}_proj.weight") for e in range(5)])
                 for part in ("gate", "up", "down")}  # fmt: skip
        tensors[f"{place}.{i}.mlp.experts.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        tensors[f"{place}.{i}.mlp.experts.down_proj"] = parts["down"]
    save_file(tensors, folder / "model.safetensors")
    worker = worker_for(folder, dtype="float32")
    assert (worker.sight is not None) == ("language" in place)
    assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < 1e-4
