"""DeepSeek-V4 against transformers: windows, digests that are all seen or chosen, streams that are mixed, experts by a table;
what steps it is computed in changes no bit; folders as they are published and saved; what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config

from engines import (
    SMALL,
    check_that_no_bit_changes,
    engine_for,
    greedy,
    num_parameters,
    poison_what_is_out_of_reach,
    random_model,
    run,
    save,
    worker_for,
)
from nanovllm_cli.attention.cpu import CpuAttention
from nanovllm_cli.attention.kv_cache import block_bytes, near_bytes
from nanovllm_cli.attention.reach import near_reach
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.layers.shared_key import SharedKeyAttention
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.planning.facts import facts_of
from nanovllm_cli.planning.plan import make_plan
from nanovllm_cli.quant.format import Blocks, Fp8
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.quantized import open_reader
from quantizing import quantize
from test_adapters import trained
from test_convert_families import fields, make_gguf, tensors
from test_llm import write_byte_tokenizer
from test_models import prompts
from test_quant_engine import difference, expected_logits, logits_of
from test_tensor_parallel import gives_the_same, quick, server  # noqa: F401  # two are fixtures

WINDOW, CHOSEN, ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
TABLE, SCORE = "hash_moe", "moe"
OF_LETTERS = {"W": WINDOW, "C": CHOSEN, "A": ALL, "t": TABLE, "s": SCORE}
SHAPE = {name: value for name, value in SMALL.items() if name not in ("intermediate_size", "num_key_value_heads")} | {
    "moe_intermediate_size": 32, "q_lora_rank": 26, "num_experts_per_tok": 2, "n_routed_experts": 5, "sliding_window": 11,
    "partial_rotary_factor": 1 / 3, "o_groups": 3, "o_lora_rank": 10, "index_n_heads": 20, "index_head_dim": 20, "index_topk": 4,
    "hc_mult": 3, "hc_sinkhorn_iters": 4, "swiglu_limit": 1.5,
}  # fmt: skip
"""So many index heads that no digest's score is zero by all of them: of equal ones transformers takes any."""


def config_of(kinds: str, routes: str = "", rates: tuple[int, int] = (4, 16), **others: Any) -> DeepseekV4Config:
    """kinds, routes: a letter a layer; rates: tokens of a digest where they are chosen, and where all are seen."""
    routes = routes or "t" + "s" * (len(kinds) - 1)
    layers = {
        "layer_types": [OF_LETTERS[each] for each in kinds], "mlp_layer_types": [OF_LETTERS[each] for each in routes],
        "num_hidden_layers": len(kinds), "compress_rates": dict(zip((CHOSEN, ALL), rates, strict=True)),
    }  # fmt: skip
    return DeepseekV4Config(**SHAPE | layers | others)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
CASES: dict[str, DeepseekV4Config] = {
    "windows alone": config_of("WW", "ss"),
    "a window of one": config_of("WC", sliding_window=1),
    "all are chosen": config_of("C", "s", index_topk=600),
    "a few are chosen": config_of("CC", "ss"),
    "all are seen": config_of("AA", "ss"),
    "of so many tokens that blocks have none": config_of("AC", rates=(20, 40)),
    "of odd numbers": config_of("ACA", rates=(3, 5)),
    "of each token": config_of("CA", rates=(1, 1)),
    "by a table alone": config_of("WW", "tt", num_experts_per_tok=3),
    "all of it": config_of("WCACA", "ttsss"),
    "stretched": config_of("WCA", rope_parameters=YARN),
    "two streams, made even once": config_of("CA", hc_mult=2, hc_sinkhorn_iters=1, hc_eps=0.02, routed_scaling_factor=0.7),
    "one group, a tied head": config_of("CW", o_groups=1, tie_word_embeddings=True, num_attention_heads=5, hc_mult=4),
}


def calm_model(config: Any, **how: Any) -> Any:
    """Of weights so small that transformers' own numbers are close to those in float64."""
    model = random_model(config, **how)
    for parameter in model.parameters():
        parameter.data *= 0.6 if parameter.dim() > 1 else 1.0
    return model


def edited(folder: Path, changes: dict[str, Any]) -> Path:
    """config.json with other values; None: without."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model, tokens = calm_model(CASES[case]), [*prompts(SHAPE["vocab_size"]), [i * i % 509 for i in range(135)]]
    worker = worker_for(save(model, tmp_path), dtype="float32")
    found, expected = (rows.log_softmax(-1) for rows in (logits_of(worker, tokens), expected_logits(model, tokens)))
    assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("case", ["windows alone", "all of it", "of odd numbers"])
def test_greedy_answers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Step by step, from recordings behind the first, several sequences at once and past the ends of many digests."""
    model = random_model(CASES[case])
    asked = [ids[:20] for ids in prompts(SHAPE["vocab_size"])[1:4]]
    expected = []
    for ids in asked:
        made = model.generate(torch.tensor([ids]), max_new_tokens=45, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(made[0, len(ids):].tolist())  # fmt: skip
    engine = engine_for(worker_for(save(model, tmp_path), dtype="float32"))
    assert [list(out.outputs[0].token_ids) for out in run(engine, [(ids, greedy(45)) for ids in asked])] == expected


# ---- steps ----


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    model = random_model(config_of("WCACA", "ttsss", rates=(4, 40)))
    return worker_for(save(model, tmp_path_factory.mktemp("steps")), dtype=request.param)


def asked_of(count: int = 20) -> list[tuple[list[int], SamplingParams]]:
    many = [[i * i % 509 for i in range(length)] for length in (150, 77, 150, 41, 5)]
    many[2] = many[0][:100] + [i % 500 for i in range(50)]  # they part within a digest
    return [(ids, greedy(count, logprobs=1)) for ids in many]


def test_steps_change_no_bit(worker: Worker) -> None:
    others: tuple[dict[str, Any], ...] = {"max_num_batched_tokens": 1}, {"num_speculative_tokens": 3}
    check_that_no_bit_changes(worker, asked_of(), 22, *others)


def test_forks_draw_what_each_would_draw_alone(worker: Worker) -> None:
    ids, _ = asked_of()[0]
    together = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=30, ignore_eos=True, logprobs=0)
    found = run(engine_for(worker), [(ids, together)])[0].outputs
    again = run(engine_for(worker, max_num_batched_tokens=9, enable_prefix_caching=False), [(ids, together)])[0].outputs
    assert [each.token_ids for each in found] == [each.token_ids for each in again]
    assert len({tuple(each.token_ids) for each in found}) == 3


def test_a_recorded_step_has_the_bits_of_one_that_is_not(worker: Worker) -> None:
    assert worker.runner.graphs._recordable  # type: ignore[attr-defined]
    found = run(engine_for(worker), asked_of())
    worker.runner.graphs._recordable = False  # type: ignore[attr-defined]
    plain = run(engine_for(worker), asked_of())
    worker.runner.graphs._recordable = True  # type: ignore[attr-defined]
    for one, other in zip(found, plain, strict=True):
        assert (one.outputs[0].token_ids, one.outputs[0].logprobs) == (other.outputs[0].token_ids, other.outputs[0].logprobs)


# ---- what is kept ----


def test_what_is_kept_of_a_token() -> None:
    """By hand: of the published sizes a digest of 512 numbers and one of 128 for four tokens, or one of 512 in each block; and
    within reach of the window keys, and what digests are made of."""
    layers = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0]}
    spec = spec_from_hf(FLASH | layers, hf_family(FLASH))
    layout = CpuAttention({64}, torch.bfloat16, (torch.bfloat16, torch.bfloat16))
    far = 4 * (512 + 128) + 512
    near = 16 * (3 * 512 + 2 * 2 * (512 + 128) + 2 * 512)
    assert block_bytes(spec.mixers, layout) == 2 * (far + near)
    assert near_bytes(spec.mixers, layout) == 2 * near
    assert near_reach(spec.mixers) == 128


def test_a_long_text_takes_what_its_digests_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What belongs to tokens out of reach is gone; digests stay, as do answers."""
    behind = poison_what_is_out_of_reach(monkeypatch)
    folder = save(random_model(config_of("WCA", rates=(4, 40), max_position_embeddings=2048)), tmp_path)
    worker = worker_for(folder, max_num_batched_tokens=96)
    part = worker.near_bytes
    room = 128 * (worker.block_bytes - part) + 26 * part
    assert part > worker.block_bytes - part
    near_worker = worker_for(folder, num_blocks=None, kv_cache_bytes=room, max_model_len=2000, max_num_batched_tokens=96)
    assert near_worker.near.reach == 40
    assert near_worker.num_blocks >= 125 > room // worker.block_bytes
    asked = [([i * i % 509 for i in range(1200)], greedy(100, logprobs=2))]
    found, expected = (run(engine_for(each, max_num_batched_tokens=96), asked)[0].outputs[0] for each in (near_worker, worker))
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert max(behind) == (1300 - 1 - 40 - 64) // 64 * 64 // 16


# ---- folders ----

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024,
    "o_lora_rank": 1024, "o_groups": 8, "sliding_window": 128, "compress_rope_theta": 160000, "rope_theta": 10000,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
    "num_hash_layers": 3, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0, "vocab_size": 129280, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1048576, "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
    "expert_dtype": "fp4", "torch_dtype": "bfloat16",
}  # fmt: skip
"""DeepSeek-V4-Flash's, as it is published, but for its quantization."""


def test_what_is_published_is_what_transformers_makes_of_it() -> None:
    whole = DeepseekV4Config(**FLASH).to_dict()
    assert whole["rope_parameters"]["compress"]["attention_factor"] == 1.0
    spec, other = (spec_from_hf(each, hf_family(FLASH)) for each in (FLASH, whole))
    assert spec == other
    assert [own.window for own in spec.attentions] == [128] * 43
    made = [own.shared.digests for own in spec.attentions if own.shared is not None]
    assert [0 if own is None else own.rate for own in made] == [0, 0, *[4, 128] * 20, 4]
    assert [0 if own is None or own.indexer is None else own.indexer.most for own in made] == [0, 0, *[512, 0] * 20, 512]
    assert [block.mlp.table_rows for block in spec.blocks if isinstance(block.mlp, MoESpec)] == [129280] * 3 + [0] * 40
    assert spec.max_position == 1 << 20


def test_a_config_that_says_nothing_has_what_transformers_takes() -> None:
    little = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    assert spec_from_hf(little, hf_family(little)) == spec_from_hf(DeepseekV4Config().to_dict() | little, hf_family(little))


PUBLISHED = {  # parts of transformers' names -> of DeepSeek's
    "model.embed_tokens.": "embed.", "lm_head.": "head.", "model.norm.": "norm.", "model.hc_head.hc_": "hc_head_",
    "model.layers.": "layers.", ".compressor.indexer.scorer.weights_proj.": ".indexer.weights_proj.",
    ".compressor.indexer.q_b_proj.": ".indexer.wq_b.", ".compressor.indexer.": ".indexer.compressor.",
    ".compressor.kv_norm.": ".compressor.norm.", ".self_attn.": ".attn.", ".mlp.": ".ffn.", ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".ffn_norm.", ".attn_hc.": ".hc_attn_", ".ffn_hc.": ".hc_ffn_", ".position_bias": ".ape",
    ".sinks": ".attn_sink", ".q_a_norm.": ".q_norm.", ".gate.e_score_correction_bias": ".gate.bias",
    ".shared_experts.gate_proj.": ".shared_experts.w1.", ".shared_experts.down_proj.": ".shared_experts.w2.",
    ".shared_experts.up_proj.": ".shared_experts.w3.", ".q_a_proj.": ".wq_a.", ".q_b_proj.": ".wq_b.", ".kv_proj.": ".wkv.",
    ".gate_proj.": ".wgate.", ".o_a_proj.": ".wo_a.", ".o_b_proj.": ".wo_b.",
}  # fmt: skip
IN_FP8 = (".wq_a.weight", ".wq_b.weight", ".attn.wkv.weight", ".wo_a.weight", ".wo_b.weight", "shared_experts.w1.weight",
          "shared_experts.w2.weight", "shared_experts.w3.weight")  # fmt: skip
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
PUBLISHED_SHAPE = {
    "hidden_size": 64, "moe_intermediate_size": 64, "q_lora_rank": 64, "o_lora_rank": 64, "o_groups": 2, "head_dim": 32,
    "num_attention_heads": 6, "partial_rotary_factor": 0.5, "swiglu_limit": 10.0,
}  # fmt: skip


def by_published_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With experts one by one."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        place, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e, (gate, up) in enumerate(each.chunk(2) for each in tensor):
                found |= {f"{place}.{e}.w1.weight": gate, f"{place}.{e}.w3.weight": up}
        elif last == "down_proj":
            found |= {f"{place}.{e}.w2.weight": each for e, each in enumerate(tensor)}
        else:
            found[name] = tensor
    for theirs, published in PUBLISHED.items():
        found = {name.replace(theirs, published): tensor for name, tensor in found.items()}
    return found


def powers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return (torch.randint(-4, 0, shape, generator=generator) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def publish(model: Any, folder: Path, *, experts: str = "fp4") -> Path:
    """As DeepSeek does; the model's weights become what that stands for."""
    generator, tensors = torch.Generator().manual_seed(3), {}
    with torch.no_grad():
        for name, weight in by_published_names(dict(model.state_dict())).items():
            place, is_expert = name.removesuffix(".weight"), ".experts." in name
            if is_expert and experts == "fp4":
                codes = torch.randint(0, 16, weight.shape, generator=generator, dtype=torch.uint8)
                tensors[name] = (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
                scales = tensors[f"{place}.scale"] = powers(generator, len(weight), weight.shape[1] // 32)
                weight.copy_(E2M1[codes.long()] * scales.float().repeat_interleave(32, 1) / 4)
                tensors[f"{place}.scale"] = (scales.view(torch.uint8) - 2).view(torch.float8_e8m0fnu)
            elif is_expert or name.endswith(IN_FP8):
                codes = (weight * 16).to(torch.float8_e4m3fn)
                blocks = [-(-size // 128) for size in weight.shape]
                scales = powers(generator, *blocks)
                tensors |= {name: codes, f"{place}.scale": scales}
                spread = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
                weight.copy_(codes.float() * spread[: len(weight), : weight.shape[1]])
            else:
                tensors[name] = weight
    tensors |= {"mtp.0.enorm.weight": torch.ones(3), "mtp.0.ffn.experts.0.w1.weight": torch.ones(3, 3, dtype=torch.int8)}
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def published_config(**others: Any) -> dict[str, Any]:
    shape = {name: value for name, value in (SHAPE | PUBLISHED_SHAPE).items() if name != "partial_rotary_factor"}
    return shape | {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_hidden_layers": 3, "num_hash_layers": 1,
        "compress_ratios": [0, 4, 128, 0], "qk_rope_head_dim": 16, "num_nextn_predict_layers": 1, "expert_dtype": "fp4",
        "rope_scaling": FLASH["rope_scaling"] | {"original_max_position_embeddings": 64}, "max_position_embeddings": 1024,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
                                "activation_scheme": "dynamic"},
    } | others  # fmt: skip


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_a_folder_as_it_is_published(experts: str, tmp_path: Path) -> None:
    """Matrices in FP8 and experts in FP4, scales of powers of two, layers that guess, and a config as DeepSeek writes it."""
    config = published_config()
    model = random_model(DeepseekV4Config(**{key: value for key, value in config.items() if "quant" not in key}))
    publish(model, tmp_path, experts=experts)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = [*prompts(513)[:6], [i * i % 509 for i in range(270)]]
    worker = worker_for(tmp_path, dtype="float32")
    assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < 1e-4
    with open_checkpoint(tmp_path) as checkpoint:
        reader = open_reader(checkpoint)
        formats = [reader.format(f"model.layers.0.{name}.weight") for name in ("mlp.experts.4.up_proj", "self_attn.o_a_proj")]
    assert formats == [Blocks("MXFP4") if experts == "fp4" else Fp8(128, "dynamic"), Fp8(128, "dynamic")]


@pytest.mark.parametrize("names", ["saved", "of modules", "published"])
def test_tensors_by_each_of_their_names(names: str, tmp_path: Path) -> None:
    model = calm_model(CASES["all of it"])
    folder = save(model, tmp_path / "m")
    stored = load_file(folder / "model.safetensors")
    if names == "saved":
        assert "model.layers.0.attn.norm.weight" in stored
    else:
        state = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
        assert "model.layers.0.mlp.experts.gate_up_proj" in state
        state = by_published_names(state) if names == "published" else state
        save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
        assert names != "published" or {"layers.1.attn.kv_norm.weight", "hc_head_fn", "head.weight"} <= state.keys()
    tokens = prompts(SHAPE["vocab_size"])[:5]
    assert difference(logits_of(worker_for(folder, dtype="float32"), tokens), expected_logits(model, tokens)) < 1e-5


@pytest.mark.parametrize("way", ["as whole numbers of 32 bits", "some twice", "of numbers", "of experts that are not there"])
def test_a_table_of_experts(way: str, tmp_path: Path) -> None:
    """Which are added up as often as a token's row has them."""
    model = calm_model(config_of("WC", "tt"))
    folder = save(model, tmp_path)
    stored = load_file(folder / "model.safetensors")
    table = stored[name := "model.layers.1.ffn.gate.tid2eid"]
    assert table.dtype == torch.int64
    if way == "some twice":
        table[::3, 1] = table[::3, 0]
    if way == "of experts that are not there":
        table[7, 1] = 5
    stored[name] = table.int() if "32" in way else table.float() if way == "of numbers" else table
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    if way in ("of numbers", "of experts that are not there"):
        with pytest.raises(CheckpointError, match="expected I32 or I64" if "numbers" in way else "a table of 5 experts names"):
            worker_for(folder)
        return
    model.model.layers[1].mlp.gate.tid2eid.copy_(table)
    tokens = prompts(SHAPE["vocab_size"])[:5]
    assert difference(logits_of(worker_for(folder, dtype="float32"), tokens), expected_logits(model, tokens)) < 1e-5


BAD: list[tuple[dict[str, Any], type[NanovllmError], str]] = [
    ({"compress_ratios": [0, 4]}, CheckpointError, "'compress_ratios' must be a list of 3 whole numbers"),
    ({"compress_ratios": [0, 4, 2]}, UnsupportedError, "a layer with one row for 2 tokens"),
    ({"compress_ratios": None, "layer_types": ["full_attention"] * 3}, UnsupportedError, "layer type 'full_attention'"),
    ({"compress_ratios": None, "layer_types": [WINDOW] * 2}, CheckpointError, "'layer_types' must be a list of 3 kinds"),
    ({"mlp_layer_types": ["dense"] * 3}, UnsupportedError, "layer type 'dense' is not supported"),
    ({"attention_bias": True}, UnsupportedError, "'attention_bias' of a DeepSeek-V4"),
    ({"mlp_bias": True}, UnsupportedError, "'mlp_bias' of a DeepSeek-V4"),
    ({"num_key_value_heads": 2}, UnsupportedError, "2 keys for the heads of a layer"),
    ({"n_shared_experts": 2}, UnsupportedError, "2 experts for all tokens"),
    ({"scoring_func": "sigmoid"}, UnsupportedError, "weighed by 'sigmoid'"),
    ({"hc_mult": 1}, UnsupportedError, "1 residual streams"),
    ({"hc_mult": 17}, UnsupportedError, "17 residual streams"),
    ({"hc_sinkhorn_iters": 0}, CheckpointError, "'hc_sinkhorn_iters' must be a whole number of at least 1"),
    ({"hc_sinkhorn_iters": 5000}, CheckpointError, "5000 rounds that make a matrix even; at most 1000"),
    ({"o_groups": 5}, CheckpointError, "6 heads don't make 5 groups"),
    ({"q_lora_rank": 25}, UnsupportedError, "a rank of 25 is not an even number"),
    ({"o_lora_rank": 1 << 20}, CheckpointError, "1048576 numbers of a group of heads"),
    ({"sliding_window": 0}, CheckpointError, "'sliding_window' must be a whole number of at least 1"),
    ({"sliding_window": 1 << 21}, CheckpointError, "2097152 tokens in a window"),
    ({"index_head_dim": 12}, CheckpointError, "heads of 12 numbers, of which 16 turn"),
    ({"index_head_dim": 21}, UnsupportedError, "heads of 21 numbers, which are not even"),
    ({"index_topk": 1 << 21}, CheckpointError, "2097152 digests that a token sees"),
    ({"compress_rate_hca": 1 << 20}, CheckpointError, "1048576 tokens of a digest"),
    ({"compress_rates": {CHOSEN: 0}}, CheckpointError, f"'{CHOSEN}' must be a whole number of at least 1"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedError, "angles depend on a text's length"),
    ({"rope_scaling": "far"}, CheckpointError, "'rope_parameters' must be an object"),
    ({"qk_rope_head_dim": 64}, CheckpointError, "64 rotary dims do not fit heads of 32"),
    ({"swiglu_limit": 0}, CheckpointError, "'swiglu_limit' must be a number of at least"),
    ({"hidden_act": "gelu"}, UnsupportedError, "activation 'gelu' that is held"),
]


@pytest.mark.parametrize(("changes", "kind", "said"), BAD, ids=str)
def test_configs_that_can_not_be_followed(changes: dict[str, Any], kind: type[NanovllmError], said: str) -> None:
    config = published_config(**changes)
    with pytest.raises(kind, match=said) as caught:
        spec_from_hf(config, hf_family(config))
    assert caught.value.hint


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Of sizes that formats divide, with a row for each token of the bundled tokenizer."""
    shape = PUBLISHED_SHAPE | {"vocab_size": 4096, "hc_mult": 4, "num_attention_heads": 4, "max_position_embeddings": 2048}
    model = calm_model(config_of("WCA", rates=(4, 128), rope_parameters=YARN, **shape))
    folder = save(model, tmp_path_factory.mktemp("even"))
    write_byte_tokenizer(folder)
    return model, folder


@pytest.mark.parametrize("first", ["W", "A"])
def test_a_folder_becomes_a_file_and_is_the_same(first: str, even: tuple[Any, Path], tmp_path: Path) -> None:
    """With names and keys of llama.cpp, which computes the same of such a file (0.3.36 of its Python package: the largest
    difference of log-probabilities was 2e-5 in 200 tokens)."""
    model, folder = even
    if first == "A":  # as V4-Pro, none of whose layers turns by the usual base
        values = {**model.config.to_dict(), "layer_types": [ALL, CHOSEN, ALL], "mlp_layer_types": [TABLE, TABLE, SCORE]}
        model = calm_model(DeepseekV4Config(**values))
        folder = save(model, tmp_path / "folder")
    notes = make_gguf(folder, tmp_path / "m.gguf")
    assert notes == []
    keys, found = fields(tmp_path / "m.gguf"), tensors(tmp_path / "m.gguf")
    own = {key.removeprefix("deepseek4."): value for key, value in keys.items()}
    assert keys["general.architecture"] == "deepseek4"
    assert own["attention.compress_ratios"] == [0 if first == "W" else 128, 4, 128]
    assert (own["hash_layer_count"], own["expert_gating_func"]) == (1 if first == "W" else 2, 4)
    assert (own["rope.freq_base"], own["attention.compress_rope_freq_base"]) == (1e4, 160000.0)
    assert (own["rope.scaling.type"], own["rope.scaling.factor"]) == ("yarn", 4.0)
    assert found["blk.0.ffn_gate_tid2eid.weight"].dtype == "int32"
    names = ("blk.1.attn_compressor_ape", "blk.1.indexer_compressor_gate", "blk.1.indexer.proj", "blk.2.attn_output_a",
             "blk.2.attn_kv", "blk.2.attn_kv_a_norm", "blk.2.attn_sinks", "output_hc_fn", "blk.0.hc_ffn_base")  # fmt: skip
    assert {f"{name}.weight" for name in names} <= found.keys()
    tokens = [*prompts(4000)[:5], [i * i % 4000 for i in range(150)]]
    assert difference(logits_of(worker_for(tmp_path / "m.gguf", dtype="float32"), tokens), expected_logits(model, tokens)) < 1e-5


@pytest.mark.parametrize(
    ("kinds", "routes", "rates", "others", "said"),
    [
        ("WC", "ts", (3, 128), {}, "digests of other numbers of tokens"),
        ("WA", "ts", (4, 16), {}, "digests of other numbers of tokens"),
        ("WA", "ts", (4, 4), {}, "digests of other numbers of tokens"),
        ("WA", "st", (4, 128), {}, "experts by a table behind others"),
        ("WA", "ts", (4, 128), {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "other angles than plain"),
    ],
)
def test_what_a_file_can_not_say_is_refused(
    kinds: str, routes: str, rates: tuple[int, int], others: dict[str, Any], said: str, tmp_path: Path
) -> None:
    shape = PUBLISHED_SHAPE | {"vocab_size": 4096} | others
    folder = save(random_model(config_of(kinds, routes, rates, **shape)), tmp_path / "folder")
    with pytest.raises(UnsupportedError, match=f"GGUF cannot say this of a DeepSeek-V4: {said}"):
        make_gguf(folder, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"attention.compress_ratios": [0, 4]}, CheckpointError, "'compress_ratios' must be a list of 3"),
        ({"attention.compress_ratios": None}, CheckpointError, "lacks 'deepseek4.attention.compress_ratios'"),
        ({"attention.compress_ratios": [0, 4, 7]}, UnsupportedError, "one row for 7 tokens"),
        ({"expert_gating_func": 2}, UnsupportedError, "not weighed by a root of a softplus"),
        ({"expert_shared_count": 0}, UnsupportedError, "without one for all tokens"),
        ({"hyper_connection.count": 1}, UnsupportedError, "1 residual streams"),
        ({"attention.output_group_count": 3}, CheckpointError, "4 heads don't make 3 groups"),
    ],
)
def test_files_that_can_not_be_followed(
    changes: dict[str, Any], kind: type[NanovllmError], said: str, even: tuple[Any, Path], tmp_path: Path
) -> None:
    make_gguf(even[1], tmp_path / "m.gguf")
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        checkpoint.config = {**checkpoint.config, **{f"deepseek4.{key}": value for key, value in changes.items()}}
        with pytest.raises(kind, match=said):
            read_spec(checkpoint, open_reader(checkpoint))


def test_rounded_weights_and_a_folder_of_them(even: tuple[Any, Path], tmp_path: Path) -> None:
    """What decides, and what is taken apart by groups of heads, stays as it is; a table of experts is copied."""
    model, folder = even
    tokens = prompts(4000)[:4]
    worker = worker_for(folder, quant="int8", dtype="float32")
    assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < 0.1
    mixer = worker.model.blocks[1].mixer
    assert isinstance(mixer, SharedKeyAttention)
    assert mixer.digests is not None
    own = model.model.layers[1].self_attn.compressor
    kept = torch.cat([own.kv_proj.weight, own.gate_proj.weight, own.indexer.kv_proj.weight, own.indexer.gate_proj.weight])
    assert torch.equal(mixer.digests.raw.weight.rows(torch.arange(len(kept)), None), kept)
    quantize("int8", tmp_path / "q", folder)
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert torch.equal(stored["model.layers.0.mlp.gate.tid2eid"], model.model.layers[0].mlp.gate.tid2eid)
    assert stored["model.layers.0.self_attn.q_b_proj.weight"].dtype == torch.int8
    assert difference(logits_of(worker_for(tmp_path / "q", dtype="float32"), tokens), expected_logits(model, tokens)) < 0.1
    with pytest.raises(UnsupportedError, match="is not calibrated yet: it has several streams"):
        quantize("int4-weight-only:group=32", tmp_path / "g", folder, algorithm="gptq", num_samples=1)


def test_what_it_is_said_to_be(even: tuple[Any, Path]) -> None:
    model, folder = even
    with open_checkpoint(folder) as checkpoint:
        facts, plan = facts_of(checkpoint), make_plan(checkpoint, EngineConfig(device="cpu"), ["int8"], None)
    tables = sum(layer.mlp.gate.tid2eid.numel() for layer in model.model.layers if layer.mlp.is_hash)
    biases = sum(name.endswith("correction_bias") for name, _ in model.named_buffers()) * 5
    assert facts.num_parameters == sum(each.numel() for each in model.parameters()) + tables + biases
    assert num_parameters(facts.spec) == facts.num_parameters
    assert {row.cache_type for row in plan.cache} == {"bfloat16"}


def test_an_adapter_is_that_of_peft(even: tuple[Any, Path], tmp_path: Path) -> None:
    targets = ["q_a_proj", "q_b_proj", "self_attn.kv_proj", "o_b_proj", "shared_experts.up_proj"]
    model = trained(even[0].config, tmp_path, base=copy.deepcopy(even[0]), target_modules=targets)
    tokens = prompts(4000)[:5]
    found = logits_of(worker_for(even[1], lora=(str(tmp_path),), dtype="float32"), tokens)
    assert difference(found, expected_logits(model, tokens)) < 1e-4
    assert difference(found, expected_logits(even[0], tokens)) > 0.01


def test_several_processes_give_the_same_bits(quick: Any, tmp_path: Path) -> None:  # noqa: F811
    """Each has all of a layer's attention, and some of its experts' columns."""
    shape = {"hidden_size": 128, "moe_intermediate_size": 64, "q_lora_rank": 64, "o_lora_rank": 64}
    folder = save(random_model(config_of("WCA", **shape), dtype=torch.bfloat16), tmp_path)
    gives_the_same(folder, least_saved=1.0)


def test_what_is_not_supported_says_so(even: tuple[Any, Path], tmp_path: Path) -> None:
    folder = even[1]
    for kept in ("int8", "fp8"):
        with pytest.raises(UnsupportedError, match=f"a KV cache of {kept} of a deepseek4 model"):
            worker_for(folder, kv_cache_dtype=kept)
    make_gguf(folder, tmp_path / "m.gguf")
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint, pytest.raises(UnsupportedError, match="folders of deepseek4 models"):
        convert.plan(checkpoint, "hf")
    with open_checkpoint(folder) as checkpoint:
        spec = read_spec(checkpoint, open_reader(checkpoint))
    platform = object.__new__(CudaPlatform)  # it asks nothing of a GPU before it refuses
    with pytest.raises(UnsupportedError, match="attention to digests of tokens") as caught:
        platform.backend(spec, torch.bfloat16)
    assert caught.value.hint == "add --device cpu"
