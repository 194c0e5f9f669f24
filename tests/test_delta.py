"""The gated delta rule, and Mamba-2's, on a CPU: the kernel against the formula in float64, and engines whose past is a state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GraniteMoeHybridConfig, LlamaConfig, Qwen3_5TextConfig

from deltas import CASES, CHANNELS, SPACES, TURNED, Case, Kept, check, check_same_bits
from emulation.compare import GENERATOR, close_to_rounding, random
from engines import SMALL, engine_for, failing_once, greedy, random_model, run, save, worker_for
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import cpu, delta, gates, reference
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.loader import WeightFormats
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.tensor_names import checkpoint_name, names_of
from quantizing import TINY, quantize
from test_convert import SETTINGS as SETTINGS_OF_TINY
from test_models import DELTA, DELTA_LAYERS, GRANITE, GRANITE_4_H, prompts
from test_quant_engine import difference, logits_of

BF16, FP32 = torch.bfloat16, torch.float32


pytestmark = pytest.mark.usefixtures("eight_rows_may_have_guesses")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("case", [*CASES, *TURNED, *CHANNELS, *SPACES])
def test_equal_to_the_formula(case: Case, dtype: torch.dtype, threads: int) -> None:
    cpu.set_num_threads(threads)
    check(case, dtype, delta.gated_delta)


@pytest.mark.parametrize("mamba", [False, True])
@pytest.mark.parametrize("values", [(2, 40), (2, 64), (8, 64)])
def test_a_token_has_the_same_bits_whatever_it_is_computed_with(values: tuple[int, int], mamba: bool) -> None:
    check_same_bits(delta.gated_delta, Case((2 if values[0] == 8 else 1, 24), values, 4, [[83]], mamba=mamba, bias=mamba))
    if not mamba:
        check_same_bits(delta.gated_delta, Case((values[0], 24), values, 4, [[83]], by_channel=True))


@pytest.mark.parametrize("case", [CASES[3], CHANNELS[1], SPACES[1], SPACES[5]])
def test_heads_that_share_keys_have_the_same_bits_together(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (1, 8):
        monkeypatch.setattr(delta, "MOST_TOGETHER", most)
        monkeypatch.setattr(delta, "TASKS_A_THREAD", 0.1)
        torch.manual_seed(0)
        GENERATOR.manual_seed(GENERATOR.initial_seed())
        kept = Kept(case, BF16)
        found.append([delta.gated_delta(**kept.step(chunks)[0]).clone() for chunks in case.steps])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_state_that_is_not_there_gives_no_numbers() -> None:
    kept = Kept(CASES[1], BF16)
    kept.step([5, 37, 1])
    kept.states.stamps.zero_()
    args, _ = kept.step([1, 1, 1])
    assert delta.gated_delta(**args).isnan().all()


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 17), (5, 256)])
def test_gates_are_sigmoids_of_columns_or_of_a_number_for_several(rows: int, width: int, dtype: torch.dtype) -> None:
    wider = random(rows, 2 * width + 3, dtype=dtype, scale=30.0)
    for gate in (wider[:, 3 : 3 + width], random(rows, 1), *([wider[:, 3:19]] if width % 16 == 0 else [])):
        for softplus in (False, True):
            x = random(rows, width, dtype=dtype)
            expected = reference.sigmoid_gate(x.double(), gate.double(), softplus=softplus)
            assert gates.sigmoid_gate(x, gate, softplus=softplus) is x
            close_to_rounding(x, expected)


# ---- engines ----


SHAPE = SMALL | {"num_hidden_layers": 4, "max_position_embeddings": 2048}
MODELS = {
    "delta rule": Qwen3_5TextConfig(**SHAPE, **DELTA, layer_types=DELTA_LAYERS),
    "state space": GraniteMoeHybridConfig(**GRANITE_4_H | SHAPE, **GRANITE),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(MODELS[request.param], dtype=BF16), tmp_path_factory.mktemp("states"))


LONG = [(7 * i + i * i) % 500 for i in range(600)]
PROMPTS = [[7, 8, 9, 10], LONG[:300], LONG[:520], [*LONG[:256], 3], [5], LONG[:255], LONG[300:570]]


def check_nothing_is_lost(engine: Engine) -> None:
    states = engine._blocks.states
    assert engine.stats().used_blocks == 0
    assert states.pool.num_free + states.pool.num_kept == engine._executor.num_states


def answers(folder: Path, params: SamplingParams, prompts: list[list[int]] = PROMPTS, **settings: Any) -> list[list[list[int]]]:
    worker = worker_for(folder)
    worker.num_states = settings.pop("num_states", worker.num_states)
    engine = engine_for(worker, **settings)
    outputs = run(engine, [(ids, params) for ids in prompts])
    check_nothing_is_lost(engine)
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[list[int]]]:
    """Each by itself, without a cache of prefixes."""
    return [answers(folder, greedy(20), [ids], enable_prefix_caching=False)[0] for ids in PROMPTS]


SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks": {"max_num_batched_tokens": 37},
    "with few blocks": {"num_blocks": 38, "max_num_batched_tokens": 100},
    "with few states": {"num_states": 3, "max_num_batched_tokens": 90},
    "with one state": {"num_states": 1},
    "two at a time": {"max_num_seqs": 2},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_answers_do_not_depend_on_what_else_runs(case: str, folder: Path, alone: list[list[list[int]]]) -> None:
    assert answers(folder, greedy(20), **dict(SETTINGS[case])) == alone


def test_prefixes_are_found(folder: Path, alone: list[list[list[int]]]) -> None:
    """The second time, all whole blocks but a prompt's last token, where they are long enough for a state to be kept."""
    engine = engine_for(worker_for(folder))
    for _ in range(2):
        outputs = run(engine, [(ids, greedy(20)) for ids in PROMPTS])
        assert [[list(each.token_ids) for each in output.outputs] for output in outputs] == alone
    found = [output.metrics.num_cached_tokens for output in outputs]
    assert found == [(len(ids) - 1) // 16 * 16 if len(ids) > 128 else 0 for ids in PROMPTS]
    check_nothing_is_lost(engine)


def test_prompts_that_begin_alike_share_what_lies_behind_a_power_of_two_and_where_two_parted(folder: Path) -> None:
    engine = engine_for(worker_for(folder))
    prompts = [[*LONG[:390], *[i] * 40] for i in range(4)]
    for prompt, cached in zip(prompts, (0, 256, 384, 384), strict=True):
        (output,) = run(engine, [(prompt, greedy(20))])
        assert output.metrics.num_cached_tokens == cached
        assert [list(output.outputs[0].token_ids)] == answers(folder, greedy(20), [prompt], enable_prefix_caching=False)[0]


def test_a_conversation_goes_on_from_a_state_that_was_kept_in_its_answer(folder: Path) -> None:
    engine = engine_for(worker_for(folder))
    (first,) = run(engine, [(LONG[:250], greedy(350))])
    turn = [*LONG[:250], *first.outputs[0].token_ids, 1, 2, 3]
    (second,) = run(engine, [(turn, greedy(20))])
    assert second.metrics.num_cached_tokens == 576
    assert [list(second.outputs[0].token_ids)] == answers(folder, greedy(20), [turn], enable_prefix_caching=False)[0]


def test_a_step_that_failed_behind_its_kernels_is_repeated(folder: Path, alone: list[list[list[int]]]) -> None:
    worker = worker_for(folder)
    failed = failing_once(worker)
    outputs = run(engine_for(worker, max_num_batched_tokens=51), [(ids, greedy(20)) for ids in PROMPTS])
    assert any(start % 16 and count > 1 for key in failed for _, start, count in key)
    assert [[list(each.token_ids) for each in output.outputs] for output in outputs] == alone


def test_what_ends_behind_a_whole_block_leaves_its_state_there(folder: Path) -> None:
    engine = engine_for(worker_for(folder))
    run(engine, [(LONG[:32], greedy(1))])
    (output,) = run(engine, [(LONG[:64], greedy(20))])
    assert output.metrics.num_cached_tokens == 32
    assert [list(output.outputs[0].token_ids)] == answers(folder, greedy(20), [LONG[:64]], enable_prefix_caching=False)[0]


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 34, "max_num_batched_tokens": 90}, {"num_states": 2}])
def test_forks_draw_what_each_would_draw_alone(settings: dict[str, Any], folder: Path) -> None:
    """Three answers to a prompt begin in one block, of which each writes on in a copy."""
    params = SamplingParams(temperature=1.0, n=3, seed=11, max_tokens=12, ignore_eos=True)
    expected = [answers(folder, params, [ids], enable_prefix_caching=False)[0] for ids in PROMPTS[:4]]
    assert answers(folder, params, PROMPTS[:4], **dict(settings)) == expected
    assert len({tuple(each) for each in expected[0]}) == 3


def test_saved_blocks_have_the_states(folder: Path, tmp_path: Path) -> None:
    def engine() -> Engine:
        return engine_for(worker_for(folder))

    first, second = engine(), engine()
    run(first, [(LONG[:520], greedy(4))])
    assert first.kv_files.save(tmp_path / "kv", "the same", LONG[:520]) == 512
    assert second.kv_files.load(tmp_path / "kv", "the same") == 512
    (output,) = run(second, [(LONG[:520], greedy(20))])
    assert output.metrics.num_cached_tokens == 512
    assert [list(output.outputs[0].token_ids)] == answers(folder, greedy(20), [LONG[:520]])[0]


def test_files_of_prompts_that_begin_alike_have_states_where_they_part(folder: Path, tmp_path: Path) -> None:
    found = []
    for i in range(3):
        engine, prompt = engine_for(worker_for(folder)), [*LONG[:390], *[i] * 40]
        engine.kv_files.load(tmp_path / "kv", "the same", prompt)
        (output,) = run(engine, [(prompt, greedy(20))])
        assert [list(output.outputs[0].token_ids)] == answers(folder, greedy(20), [prompt], enable_prefix_caching=False)[0]
        found.append(output.metrics.num_cached_tokens)
        engine.kv_files.save(tmp_path / "kv", "the same", prompt)
        check_nothing_is_lost(engine)
    assert found == [0, 256, 384]


def test_texts_are_embedded_alike_in_any_chunks(folder: Path) -> None:
    def embedded(**settings: Any) -> torch.Tensor:
        engine = engine_for(worker_for(folder), **settings)
        engine.embed("1", LONG[:300], "mean")
        found = None
        while engine.has_unfinished():
            for output in engine.step():
                found = output.pooled
        return torch.tensor(found)

    assert torch.allclose(embedded(), embedded(max_num_batched_tokens=41), rtol=1e-6)


REPEATING = [[*[i, i + 1, i + 2, i + 3] * 9, *LONG[: 40 * i]] for i in range(5)]
GUESSES: dict[str, dict[str, Any]] = {
    "looked up": {"num_speculative_tokens": 8},
    "looked up, in chunks": {"num_speculative_tokens": 5, "max_num_batched_tokens": 37},
    "looked up, with few blocks": {"num_speculative_tokens": 8, "num_blocks": 24, "max_num_batched_tokens": 60},
    "looked up, with few states": {"num_speculative_tokens": 8, "num_states": 2},
    "by itself": {"draft_model": "itself", "draft_min_p": 0.0},
    "by itself, with few blocks": {"draft_model": "itself", "draft_min_p": 0.0, "num_blocks": 24, "max_num_batched_tokens": 60},
    "by itself, where it is sure": {"draft_model": "itself", "draft_min_p": 0.003},
    "by another": {"draft_model": "another", "draft_min_p": 0.0},
}


@pytest.mark.parametrize("case", GUESSES)
def test_guesses_change_nothing_but_the_steps(case: str, folder: Path, tmp_path: Path) -> None:
    """What did not hold is taken back from states, whoever guessed it; where a model drafts for itself, everything holds."""
    settings = dict(GUESSES[case])
    num_states = settings.pop("num_states", None)
    if "draft_model" in settings:
        kind = json.loads((folder / "config.json").read_text())["model_type"]
        other = random_model(next(each for each in MODELS.values() if each.model_type == kind), seed=5, dtype=BF16)
        settings["draft_model"] = str(folder if settings["draft_model"] == "itself" else save(other, tmp_path))
    few = {"allowed_token_ids": (3, 4)}
    kinds = greedy(45), greedy(60, **few), SamplingParams(temperature=0.8, seed=3, max_tokens=50, ignore_eos=True, **few)
    asked = [(ids, params) for ids in REPEATING for params in kinds]
    plain = run(engine_for(worker_for(folder)), asked)
    worker = worker_for(folder, max_num_seqs=3, **settings)
    worker.num_states = num_states or worker.num_states
    engine = engine_for(worker, max_num_seqs=3, **settings)
    found = run(engine, asked)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
    check_nothing_is_lost(engine)
    counts = [(each.metrics.num_guessed_tokens, each.metrics.num_held_tokens) for each in found]
    if "by itself" in case:
        guessed, held = (sum(column) for column in zip(*counts[::3], strict=True))
        assert guessed > 20
        assert held == guessed
    else:
        guessed, held = (sum(column) for column in zip(*counts, strict=True))
        assert guessed > 60
        assert held < guessed
        assert held > 20 or case == "by another"


def test_a_model_with_states_does_not_draft_for_one_without(folder: Path, tmp_path: Path) -> None:
    large = save(random_model(LlamaConfig(**SMALL), dtype=BF16), tmp_path)
    with pytest.raises(UnsupportedError, match="model can't draft for a llama model, which keeps no states"):
        worker_for(large, draft_model=str(folder))


def test_states_are_found_behind_guesses_that_held(folder: Path) -> None:
    """An answer that jumps over the tokens behind which copies are due leaves some all the same, and they are right."""
    settings = {"num_speculative_tokens": 8}
    engine = engine_for(worker_for(folder, **settings), **settings)
    (first,) = run(engine, [([3, 4, 5] * 60, greedy(300, logit_bias={3: 9.0}))])
    assert first.metrics.num_held_tokens > 150
    turn = [*[3, 4, 5] * 60, *first.outputs[0].token_ids, 1, 2, 3]
    (second,) = run(engine, [(turn, greedy(20))])
    assert second.metrics.num_cached_tokens >= 448
    assert [list(second.outputs[0].token_ids)] == answers(folder, greedy(20), [turn], enable_prefix_caching=False)[0]


@pytest.mark.parametrize("settings", [{"num_speculative_tokens": 8}, {"draft_model": "itself", "draft_min_p": 0.0}], ids=str)
def test_saved_states_have_the_guesses(settings: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    settings |= {"draft_model": str(folder)} if "draft_model" in settings else {}
    first, second = (engine_for(worker_for(folder, **settings), **settings) for _ in range(2))
    prompt = [3, 4, 5] * 50
    (output,) = run(first, [(prompt, greedy(150, logit_bias={3: 9.0}))])
    told = [*prompt, *output.outputs[0].token_ids]
    count = first.kv_files.save(tmp_path / "kv", "the same", told)
    assert count > len(prompt)
    assert second.kv_files.load(tmp_path / "kv", "the same") == count
    (output,) = run(second, [([*told, 1], greedy(20))])
    assert output.metrics.num_cached_tokens == count
    assert [list(output.outputs[0].token_ids)] == answers(folder, greedy(20), [[*told, 1]])[0]


def test_a_recorded_step_has_the_bits_of_one_that_is_not(folder: Path) -> None:
    found = []
    for recordable in (True, False):
        worker = worker_for(folder)
        worker.runner.graphs._recordable = recordable  # type: ignore[attr-defined]
        params = greedy(20, logprobs=2)
        found.append([[each.logprobs for each in output.outputs] for output in
                      run(engine_for(worker), [(ids, params) for ids in PROMPTS])])  # fmt: skip
        assert bool(worker.runner.graphs._graphs) == recordable  # type: ignore[attr-defined]
    assert found[0] == found[1]


# ---- quantized, adapted ----


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With rows that divide into groups, and heads that do not begin where blocks of 64 do."""
    shape = SMALL | {"num_hidden_layers": 4, "hidden_size": 256, "head_dim": 40, "intermediate_size": 256,
                     "num_attention_heads": 8, "num_key_value_heads": 2}  # fmt: skip
    delta_shape = DELTA | {"linear_value_head_dim": 64}
    config = Qwen3_5TextConfig(**shape, **delta_shape, layer_types=DELTA_LAYERS)
    return save(random_model(config, dtype=BF16), tmp_path_factory.mktemp("wide"))


def rounded(folder: Path, quant: str, target: Path) -> Path:
    """The folder with what its quantized weights stand for, in float32."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    form = parse_format(quant)
    with open_checkpoint(folder) as checkpoint:
        formats = WeightFormats(checkpoint, open_reader(checkpoint), form)
        found = {name: formats.of(name) for name in ours_of()}
    for name, of in found.items():
        theirs = checkpoint_name(name, names_of(checkpoint))
        if of is not None:
            tensors[theirs] = of.dequantize(of.quantize(tensors[theirs].float()))
    save_file({name: tensor.float() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def ours_of() -> list[str]:
    delta_parts = ("delta_qkv", "delta_z", "delta_b", "delta_a", "delta_out")
    parts = {"linear_attention": delta_parts, "full_attention": ("q", "k", "v", "o")}
    names = [f"blocks.{i}.{part}" for i, kind in enumerate(DELTA_LAYERS) for part in (*parts[kind], "gate", "up", "down")]
    return [f"{name}.weight" for name in (*names, "embedding", "head")]


@pytest.mark.parametrize("quant", ["int8-weight-only", "int4-weight-only:group=32:zeros", "fp8-weight-only", "nf4"])
def test_quantized_weights_are_multiplied_as_what_they_stand_for(quant: str, wide: Path, tmp_path: Path) -> None:
    """Rows of queries and of gates lie elsewhere than in the file; what decides how much of a state is kept stays plain."""
    tokens = prompts(513)
    wanted = logits_of(worker_for(rounded(wide, quant, tmp_path / "rounded")), tokens)
    worker = worker_for(wide, dtype="float32", quant=quant, activations="exact")
    assert difference(logits_of(worker, tokens), wanted) < 1e-4
    assert worker.formats[None] == 2 * 4 * 256 * 3


def test_adapters_of_gated_attention_mean_the_same_beside_quantized_weights(wide: Path, tmp_path: Path) -> None:
    """Added to plain weights they are rows among others; beside quantized ones they come in the order that the layer has."""
    place = "base_model.model.model.layers.{i}.{part}"
    parts = {(2, "self_attn.q_proj"): (640, 256), (2, "self_attn.o_proj"): (256, 320), (0, "linear_attn.in_proj_qkv"): (320, 256),
             (1, "linear_attn.in_proj_z"): (256, 256), (3, "linear_attn.out_proj"): (256, 256)}  # fmt: skip
    tensors = {}
    for (i, part), (rows, columns) in parts.items():
        name = place.format(i=i, part=part)
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = random(8, columns, scale=0.05), random(rows, 8)
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    targets = sorted({part.split(".")[1] for _, part in parts})
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": targets, "bias": "none"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    tokens, lora = prompts(513), {"lora": ((str(tmp_path / "adapter"), 1.0),)}
    plain = rounded(wide, "int8-weight-only", tmp_path / "rounded")
    quantize("int8-weight-only", tmp_path / "int8", wide, head="int8-weight-only")
    tensors = load_file(plain / "model.safetensors")
    tensors["model.embed_tokens.weight"] = load_file(wide / "model.safetensors")["model.embed_tokens.weight"].float()
    save_file(tensors, plain / "model.safetensors")
    merged = logits_of(worker_for(plain, **lora), tokens)
    beside = logits_of(worker_for(tmp_path / "int8", dtype="float32", activations="exact", **lora), tokens)
    assert difference(beside, merged) < 1e-3
    assert difference(logits_of(worker_for(plain), tokens), merged) > 0.3


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_calibrated_weights_lose_less(algorithm: str, tmp_path: Path) -> None:
    shape = SMALL | {"vocab_size": 4096, "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96}
    del shape["num_hidden_layers"]
    delta_shape = DELTA | {"linear_value_head_dim": 32}
    config = Qwen3_5TextConfig(**shape, **delta_shape, layer_types=DELTA_LAYERS[1:3], num_hidden_layers=2)
    model = random_model(config, dtype=BF16)
    model.model.embed_tokens.weight.data *= 20  # layers add little each, so that errors add up
    model.model.layers[0].input_layernorm.weight.data[:6] += 8  # channels worth scaling
    spoken = save(model, tmp_path / "spoken")
    for name in SETTINGS_OF_TINY:
        shutil.copy(TINY / name, spoken / name)
    errors = {}
    with torch.inference_mode():
        wanted = logits_of(worker_for(spoken, dtype="float32"), prompts(4096))
    for each in ("rtn", algorithm):
        quantize("int4:group=32", tmp_path / each, spoken, algorithm=each, num_samples=8)
        worker = worker_for(tmp_path / each, dtype="float32", activations="exact")
        errors[each] = difference(logits_of(worker, prompts(4096)), wanted)
        assert {form.name for form in worker.formats if form is not None} == {"int4:group=32"}
    assert errors[algorithm] < 0.98 * errors["rtn"]
    found, usual = (load_file(tmp_path / each / "model.safetensors") for each in (algorithm, "rtn"))
    changed = {name.split(".")[-2] for name in found if ".linear_attn." in name and not torch.equal(found[name], usual[name])}
    folded = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
    assert changed == (folded if algorithm == "awq" else {"in_proj_qkv", "in_proj_z", "out_proj"})


@pytest.mark.parametrize("num_keys", [4, 2])
def test_a_quantized_file_is_that_of_the_converted_model(num_keys: int, tmp_path: Path) -> None:
    """Where value heads share key heads, columns lie otherwise in a file, and are moved before they are rounded together."""
    shape = SMALL | {"num_hidden_layers": 4, "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 256}
    delta_shape = DELTA | {"linear_num_key_heads": num_keys, "linear_value_head_dim": 64}
    folder = save(random_model(Qwen3_5TextConfig(**shape, **delta_shape, layer_types=DELTA_LAYERS)), tmp_path / "folder")
    for name in SETTINGS_OF_TINY:
        shutil.copy(TINY / name, folder / name)
    whole, found, wanted, stood_for = (tmp_path / f"{name}.gguf" for name in ("whole", "found", "wanted", "stood_for"))
    _in_float32(folder, whole)
    quantize("q4_k_m", wanted, whole)
    _in_float32(wanted, stood_for)
    if num_keys == 2:
        with pytest.raises(UnsupportedError, match="columns in another order than its GGUF file"):
            quantize("q4_k_m", found, folder, algorithm="gptq")
        assert not found.exists()
    quantize("q4_k_m", found, folder)
    ours, theirs = ({tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors} for path in (found, wanted))
    assert [ours[name].tensor_type for name in ours] == [theirs[name].tensor_type for name in ours]
    assert all(np.array_equal(each.data, theirs[name].data) for name, each in ours.items())
    settings, tokens = {"dtype": "float32", "activations": "exact"}, prompts(4096)
    logits = [logits_of(worker_for(path, **settings), tokens) for path in (folder, whole, wanted, stood_for)]
    assert difference(logits[1], logits[0]) < 1e-4
    assert difference(logits[2], logits[3]) < 1e-4
    assert difference(logits[2], logits[0]) > 0.01


def _in_float32(model: Path, path: Path) -> None:
    with open_checkpoint(model) as checkpoint:
        convert.write(checkpoint, convert.plan(checkpoint, "gguf", outtype="f32"), path)
