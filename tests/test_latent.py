"""Latent attention on the CPU against its formula in float64, and its GGUF files against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from gguf.quants import quantize as to_blocks
from transformers import DeepseekV2Config, DeepseekV3Config, YoutuConfig

from engines import SMALL, engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli.attention.backend import LatentWeights
from nanovllm_cli.attention.cpu import CpuAttention
from nanovllm_cli.batch import Batch
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.kernels import dense, reference, warm
from nanovllm_cli.kernels.cpu_ops import CpuOps
from nanovllm_cli.mixer_spec import AttentionSpec, LatentSpec
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.planning.estimate import plan_weights
from nanovllm_cli.planning.facts import facts_of, reader_of
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.rope_spec import RopeSpec
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.loader import WeightFormats
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.shapes import shape_config
from quantized_checkpoints import fp8
from quantizing import quantize
from test_convert_families import fields, make_gguf, tensors, with_tokenizer
from test_models import CASES, prompts, rope
from test_quant_engine import difference, expected_logits, logits_of
from test_quantized_models import FP8_BLOCKS, build

GENERATOR = torch.Generator().manual_seed(23)
EVEN = {name: value for name, value in SMALL.items() if name != "head_dim"} | {
    "hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 32,
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 12, "v_head_dim": 32,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
           "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}  # fmt: skip
STRETCHED = rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.7)


# ---- the backend ----


class Paged:
    """Sequences over a cache whose blocks lie in random order, with stale memory poisoned."""

    def __init__(self, heads: int, latent: LatentSpec, lens: list[int], dtype: torch.dtype, interleaved: bool = True) -> None:
        self.latent, self.lens, self.dtype = latent, lens, dtype
        spec_rope = RopeSpec(latent.rotary_dim, 100.0, interleaved)
        self.spec = AttentionSpec(heads, 1, latent.rotary_dim + latent.rank, spec_rope, scale=0.3, latent=latent)
        tokens = sum(lens)
        self.q, self.kept = (
            torch.randn(tokens, width, generator=GENERATOR).to(dtype)
            for width in (heads * latent.query_dim, latent.rank + latent.rotary_dim)
        )
        self.norm = torch.rand(latent.rank, generator=GENERATOR).to(dtype)
        self.keys = torch.randn(heads, latent.rank, latent.key_dim, generator=GENERATOR).to(dtype) / latent.key_dim**0.5
        self.values = torch.randn(heads, latent.value_dim, latent.rank, generator=GENERATOR).to(dtype) / latent.rank**0.5
        matrices = [CpuOps().head_matrices(heads, *each.shape[1:], dtype) for each in (self.keys, self.values)]
        for made, rows in zip(matrices, (self.keys, self.values), strict=True):
            for head in range(heads):
                made.load(head, rows[head])
        self.weights = LatentWeights(self.norm, 1e-5, 0.5, *matrices)
        width = max(-(-n // 16) for n in lens)
        blocks = torch.randperm(width * len(lens) + 3, generator=GENERATOR).int()
        self.tables = blocks[: width * len(lens)].reshape(len(lens), width).contiguous()
        self.backend = CpuAttention({heads}, dtype, (dtype, dtype))
        parts = self.backend.block_parts(self.spec)
        self.cache = tuple(torch.full((len(blocks), *shape), float("nan"), dtype=kind) for shape, kind in parts)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.latent.rotary_dim // 2
        turned = positions[:, None] / 100 ** (torch.arange(half) / half)
        return turned.cos(), turned.sin()

    def step(self, first: list[int], counts: list[int]) -> list[torch.Tensor]:
        """What `counts` tokens of each sequence find, from its first on."""
        begins = np.cumsum([0, *self.lens])
        rows = torch.cat([torch.arange(b + f, b + f + n) for b, f, n in zip(begins, first, counts, strict=False)])
        positions = torch.cat([torch.arange(f, f + n) for f, n in zip(first, counts, strict=True)])
        sequences = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        slots = self.tables[sequences, positions // 16].long() * 16 + positions % 16
        lens = torch.tensor([f + n for f, n in zip(first, counts, strict=True)], dtype=torch.int32)
        batch = Batch(
            token_ids=rows, positions=positions, rope_lens=positions, query_starts=starts, kv_lens=lens, known_lens=lens,
            slots=slots, block_tables=self.tables, logit_rows=rows, states=lens,
        )  # fmt: skip
        found = self.backend.attend_latent(
            self.spec, self.q[rows], self.kept[rows], self.weights, self.angles(positions), self.cache,
            self.backend.prepare(batch, batch),
        )  # fmt: skip
        return list(found.split(counts))

    def expected(self) -> list[torch.Tensor]:
        wide = [each.double() for each in (self.norm, self.keys, self.values)]
        found = []
        for q, kept in zip(self.q.double().split(self.lens), self.kept.double().split(self.lens), strict=True):
            cos, sin = self.angles(torch.arange(len(q)))
            norm, keys, values = wide
            assert self.spec.rope is not None
            found.append(reference.latent_attention(
                q, kept, norm, 1e-5, 0.5, keys, values, cos.double(), sin.double(), self.spec.rope.interleaved, 0.3
            ))  # fmt: skip
        return found


SHAPES = [
    # heads, query_rank, rank, key_dim, rotary_dim, value_dim, lens
    (1, LatentSpec(None, 2, 2, 2, 1), [1, 3]),
    (3, LatentSpec(None, 40, 18, 12, 22), [33, 1, 17]),
    (16, LatentSpec(None, 64, 32, 16, 32), [70]),
    (5, LatentSpec(None, 130, 66, 6, 65), [5, 100, 64]),
    (50, LatentSpec(None, 34, 10, 8, 3), [40, 2]),
    (2, LatentSpec(None, 512, 128, 64, 128), [19]),
    (20, LatentSpec(None, 96, 48, 32, 64), [129]),
    (4, LatentSpec(None, 62, 30, 2, 129), [16, 15, 31]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "latent", "lens"), SHAPES)
def test_equal_to_the_formula(heads: int, latent: LatentSpec, lens: list[int], dtype: torch.dtype) -> None:
    for interleaved in (True, False):
        paged = Paged(heads, latent, lens, dtype, interleaved)
        for found, expected in zip(paged.step([0] * len(lens), lens), paged.expected(), strict=True):
            error = (found.double() - expected).norm() / expected.norm()
            assert error < (2e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_in_any_chunks(dtype: torch.dtype) -> None:
    heads, latent, lens = SHAPES[3]
    whole = Paged(heads, latent, lens, dtype)
    at_once = torch.cat(whole.step([0, 0, 0], lens))
    whole.cache = tuple(torch.full_like(side, float("nan")) for side in whole.cache)
    parts: list[list[torch.Tensor]] = [[], [], []]
    done = [0, 0, 0]
    for most in (3, 1, 40, 1, 100):
        counts = [min(most, n - d) for n, d in zip(lens, done, strict=True)]
        some = [i for i, count in enumerate(counts) if count]
        if not some:
            break
        for own, found in zip(parts, whole.step(done, counts), strict=True):
            own.append(found)
        done = [d + c for d, c in zip(done, counts, strict=True)]
    assert torch.equal(torch.cat([torch.cat(own) for own in parts]), at_once)


# ---- GGUF, with llama.cpp's names ----

ARCHITECTURES = {"deepseek_v32": "deepseek32", "glm_moe_dsa": "glm-dsa"}
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "self_attn.kv_b_proj": "attn_kv_b",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.weights_proj": "indexer.proj", "self_attn.indexer.k_norm": "indexer.k_norm",
}  # fmt: skip


def write(path: Path, model: Any, types: list[str], *, by_head: bool = True, leave_out: str = "", **keys: Any) -> Path:
    """A file with the types by turns; the model's weights become what it says. keys: values instead of its own, None for none."""
    config = model.config
    arch = ARCHITECTURES.get(config.model_type, "deepseek2")
    writer = gguf.GGUFWriter(path, arch)
    rank, rotary, key_dim, value_dim = (
        config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
    )  # fmt: skip
    kept = {"key_length": rank + rotary, "value_length": rank, "key_length_mla": key_dim + rotary, "value_length_mla": value_dim}
    legacy = {"key_length": key_dim + rotary, "value_length": value_dim}
    attention = {
        "head_count": config.num_attention_heads, "head_count_kv": 1 if by_head else config.num_attention_heads,
        "layer_norm_rms_epsilon": config.rms_norm_eps, "kv_lora_rank": rank, "q_lora_rank": config.q_lora_rank,
        **(kept if by_head else legacy),
    }  # fmt: skip
    said: dict[str, Any] = {f"attention.{name}": value for name, value in attention.items()} | {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "rope.dimension_count": rotary, "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }  # fmt: skip
    if config.rope_parameters["rope_type"] == "yarn":
        stretched = config.rope_parameters
        said |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": stretched["factor"],
            "rope.scaling.original_context_length": stretched["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * stretched["mscale_all_dim"],
        }  # fmt: skip
    if hasattr(config, "n_routed_experts"):
        by_sigmoid = config.model_type != "deepseek_v2"
        said |= {
            "expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size, "expert_shared_count": config.n_shared_experts,
            "expert_weights_scale": config.routed_scaling_factor, "expert_weights_norm": bool(config.norm_topk_prob),
            "expert_gating_func": 2 if by_sigmoid else 1, "leading_dense_block_count": config.first_k_dense_replace,
        }  # fmt: skip
        if (config.n_group or 1) > 1:
            said |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if hasattr(config, "index_topk"):
        indexer = {"head_count": config.index_n_heads, "key_length": config.index_head_dim, "top_k": config.index_topk}
        said |= {f"attention.indexer.{name}": value for name, value in indexer.items()}
    for name, value in (said | keys).items():
        add_value = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
                     list: writer.add_array}  # fmt: skip
        if value is not None:
            add_value[type(value)](f"{arch}.{name}", value)
    writer.add_tokenizer_model("no_vocab")
    turn = 0

    def add(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What a reader takes it for."""
        nonlocal turn
        if name == leave_out:
            return tensor
        if tensor.dim() == 1 or "gate_inp" in name:
            writer.add_tensor(name, tensor.numpy())
            return tensor
        kind = gguf.GGMLQuantizationType[types[turn % len(types)]]
        turn += 1
        data = to_blocks(np.ascontiguousarray(tensor.numpy()), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        return torch.from_numpy(np.ascontiguousarray(dequantize(data, kind))).view(tensor.shape)

    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    biases = {key: buffer for key, buffer in model.named_buffers() if key.endswith("correction_bias")}
    for key, parameter in {**dict(model.named_parameters()), **biases}.items():
        tensor = parameter.detach()
        if key in outer:
            parameter.data = add(outer[key], tensor)
            continue
        _, _, layer, *rest = key.split(".")
        place, own = f"blk.{layer}.", ".".join(rest).removesuffix(".weight")
        if own.endswith(".bias"):
            writer.add_tensor(f"{place}{NAMES[own.removesuffix('.bias')]}.bias", tensor.numpy())
        elif own.endswith("correction_bias"):
            writer.add_tensor(f"{place}exp_probs_b.bias", tensor.numpy())
        elif own == "mlp.experts.gate_up_proj":
            halves = zip(("gate", "up"), tensor.chunk(2, 1), strict=True)
            parameter.data = torch.cat([add(f"{place}ffn_{part}_exps.weight", half.contiguous()) for part, half in halves], 1)
        elif own == "mlp.experts.down_proj":
            parameter.data = add(f"{place}ffn_down_exps.weight", tensor)
        elif own == "self_attn.kv_b_proj" and by_head:
            heads = tensor.view(config.num_attention_heads, key_dim + value_dim, rank)
            keys_of = add(f"{place}attn_k_b.weight", heads[:, :key_dim].transpose(1, 2).contiguous()).transpose(1, 2)
            values_of = add(f"{place}attn_v_b.weight", heads[:, key_dim:].contiguous())
            parameter.data = torch.cat([keys_of, values_of], 1).reshape(tensor.shape)
        else:
            parameter.data = add(f"{place}{NAMES[own]}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


CONFIGS = {
    "youtu": YoutuConfig(**EVEN),
    "youtu, queries at once": YoutuConfig(**EVEN | {"q_lora_rank": None, "tie_word_embeddings": True}),
    "v2, stretched": DeepseekV2Config(**EVEN, **EXPERTS | {"routed_scaling_factor": 1.0}, **STRETCHED),
    "v2, weights scaled": DeepseekV2Config(**EVEN, **EXPERTS),
    "v3, stretched": DeepseekV3Config(**EVEN, **EXPERTS, n_group=1, topk_group=1, **STRETCHED),
    "v3, groups": DeepseekV3Config(**EVEN, **EXPERTS, n_group=4, topk_group=2),
}


@pytest.mark.parametrize("types", [["F32"], ["Q8_0", "F16", "Q5_1", "Q4_0"]], ids=["plain", "mixed"])
@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("case", CONFIGS)
def test_a_gguf_file_is_read(case: str, by_head: bool, types: list[str], tmp_path: Path) -> None:
    model = random_model(CONFIGS[case])
    path = write(tmp_path / "m.gguf", model, types, by_head=by_head)
    tokens = prompts(EVEN["vocab_size"])[:5]
    assert difference(logits_of(worker_for(path, dtype="float32"), tokens), expected_logits(model, tokens)) < 1e-4


def test_the_first_files_of_glm_do_not_say_how_experts_are_chosen() -> None:
    """By their layers and tokens, which is how llama.cpp knows them."""
    from nanovllm_cli.models.deepseek import DEEPSEEK2, DEEPSEEK3, YOUTU, family_of_gguf

    said = {"deepseek2.expert_count": 64, "deepseek2.block_count": 47, "tokenizer.ggml.tokens": ["a"] * 154880}
    assert family_of_gguf(said) is DEEPSEEK3
    assert family_of_gguf(said | {"deepseek2.expert_gating_func": 1}) is DEEPSEEK2
    assert family_of_gguf(said | {"tokenizer.ggml.tokens": ["a"] * 9}) is DEEPSEEK2
    assert family_of_gguf(said | {"deepseek2.expert_count": 0}) is YOUTU


@pytest.mark.parametrize(
    ("keys", "kind", "said"),
    [
        ({"attention.kv_lora_rank": None}, CheckpointError, "has no 'deepseek2.attention.kv_lora_rank'"),
        ({"attention.key_length_mla": 12}, CheckpointError, "key_length_mla' must be a whole number of at least 13"),
        ({"attention.value_length_mla": None}, CheckpointError, "has no 'deepseek2.attention.value_length_mla'"),
        ({"attention.kv_lora_rank": 1 << 20}, CheckpointError, "a rank of 1048576; at most 16384 are believed"),
        ({"attention.kv_lora_rank": 63}, UnsupportedError, "a rank of 63 is not an even number"),
        ({"attention.kv_lora_rank": 62}, CheckpointError, "attn_kv_a_mqa"),
        ({"attention.q_lora_rank": None}, CheckpointError, "blk.0.attn_q.weight"),
        ({"expert_group_count": 3}, CheckpointError, "8 experts don't make 3 groups"),
        ({"expert_group_count": 8}, CheckpointError, "8 experts don't make 8 groups"),
        ({"expert_group_count": 4, "expert_group_used_count": 1}, CheckpointError, "3 experts of 1 of 4 groups"),
        ({"expert_group_count": 4, "expert_group_used_count": 5}, CheckpointError, "of 5 of 4 groups"),
        ({"expert_gating_func": 7}, UnsupportedError, "not weighed by a"),
        ({"rope.dimension_count": 11}, CheckpointError, "11 rotary dims"),
    ],
    ids=str,
)
def test_keys_that_can_not_be_followed(keys: dict[str, Any], kind: type[NanovllmError], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", random_model(CONFIGS["v3, stretched"]), ["F32"], **keys)
    with pytest.raises(kind, match=said):
        worker_for(path, dtype="float32")


@pytest.mark.parametrize("name", ["blk.1.attn_k_b.weight", "blk.0.attn_v_b.weight", "blk.2.attn_kv_a_norm.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", random_model(CONFIGS["youtu"]), ["F32"], leave_out=name)
    with pytest.raises(CheckpointError, match=name.removesuffix(".weight").replace(".", r"\.")):
        worker_for(path, dtype="float32")


@pytest.mark.parametrize("case", CONFIGS)
def test_a_folder_becomes_the_file_that_llama_cpp_makes(case: str, tmp_path: Path) -> None:
    config = type(CONFIGS[case])(**CONFIGS[case].to_dict() | {"eos_token_id": 4089, "bos_token_id": 4087, "vocab_size": 4100})
    model = random_model(config)
    make_gguf(save(model, tmp_path / "folder"), tmp_path / "made.gguf")
    expected = write(tmp_path / "expected.gguf", model, ["F32"])
    wanted, found = tensors(expected), tensors(tmp_path / "made.gguf")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not np.array_equal(found[name].reshape(wanted[name].shape), wanted[name])] == []
    keys = fields(tmp_path / "made.gguf")
    for key, value in fields(expected).items():
        if not key.startswith(("GGUF.", "tokenizer.")):
            assert keys[key] == pytest.approx(value), key
    ids = prompts(4000)[:5]
    assert difference(logits_of(worker_for(tmp_path / "made.gguf", dtype="float32"), ids), expected_logits(model, ids)) < 1e-4


@pytest.mark.parametrize(
    "changes", [{}, {"rope_interleave": None}, {"q_lora_rank": None}], ids=["by way of fewer numbers", "of null", "at once"]
)
def test_rotary_pairs_that_are_apart_lie_side_by_side_in_a_file(changes: dict[str, Any], tmp_path: Path) -> None:
    usual = {"eos_token_id": 4089, "bos_token_id": 4087, "vocab_size": 4100}
    config = YoutuConfig(**EVEN | usual | {"rope_interleave": False} | changes)
    model = random_model(config)
    make_gguf(save(model, tmp_path / "folder"), tmp_path / "made.gguf")
    ids = prompts(4000)[:5]
    assert difference(logits_of(worker_for(tmp_path / "made.gguf", dtype="float32"), ids), expected_logits(model, ids)) < 1e-4


def test_what_a_file_can_not_say_is_refused(tmp_path: Path) -> None:
    two = rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.5)
    folder = save(random_model(YoutuConfig(**EVEN | two)), tmp_path / "folder")
    with pytest.raises(UnsupportedError, match="yarn of two shares"):
        make_gguf(folder, tmp_path / "made.gguf")
    assert not (tmp_path / "made.gguf").exists()


@pytest.mark.parametrize(
    ("case", "shares", "notes"),
    [("youtu", {}, ["rope scaling yarn without mscale_all_dim: llama.cpp computes other scores for this architecture"]),
     ("youtu", {"mscale": 0.7, "mscale_all_dim": 0.7}, []), ("ling 3, 3 of 8 in two of four groups", {}, []),
     ("ling 3, 3 of 8 in two of four groups", {"mscale": 0.7, "mscale_all_dim": 0.7},
      ["rope mscale_all_dim: written, but llama.cpp does not read it for this architecture"])],
    ids=str,
)  # fmt: skip
def test_yarn_that_llama_cpp_computes_otherwise_is_noted(
    case: str, shares: dict[str, Any], notes: list[str], tmp_path: Path
) -> None:
    """As llama-cpp-python 0.3.36 has it: its logits of such files are a third off, and those of the others are ours."""
    scaled = rope("yarn", factor=4.0, original_max_position_embeddings=32, **shares)
    config = with_tokenizer(type(CASES[case])(**CASES[case].to_dict() | scaled))
    found = make_gguf(save(random_model(config), tmp_path / "folder"), tmp_path / "made.gguf")
    assert [note for note in found if "llama.cpp" in note] == notes


def test_llama_cpp_gives_the_logits_of_the_file(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    config = YoutuConfig(**EVEN | {"eos_token_id": 4089, "bos_token_id": 4087, "vocab_size": 4100} | STRETCHED)
    model = random_model(config)
    make_gguf(save(model, tmp_path / "folder"), tmp_path / "made.gguf")
    ids, settings = prompts(4000)[5], {"n_ctx": 128, "n_threads": 2, "logits_all": True, "verbose": False}
    theirs = llama_cpp.Llama(str(tmp_path / "made.gguf"), type_k=0, type_v=0, **settings)
    theirs.eval(ids)
    found = torch.from_numpy(np.array(theirs.scores[: len(ids)]))
    assert difference(found, expected_logits(model, [ids])) < 1e-4


# ---- configs, formats, quantizing ----


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"attention_bias": True}, UnsupportedError, "biases"),
        ({"moe_layer_freq": 2}, UnsupportedError, "experts in some layers only"),
        ({"topk_method": "noaux"}, UnsupportedError, "experts chosen by 'noaux'"),
        ({"kv_lora_rank": 511}, UnsupportedError, "a rank of 511"),
        ({"qk_nope_head_dim": 1 << 15}, CheckpointError, "a key_dim of 32768"),
        ({"v_head_dim": 0}, CheckpointError, "'v_head_dim'"),
        ({"qk_rope_head_dim": 7}, CheckpointError, "7 rotary dims"),
        ({"q_lora_rank": "x"}, CheckpointError, "'q_lora_rank'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}, "rope_scaling": None}, UnsupportedError,
         "32 rotary dims of 64"),
        ({"topk_method": "group_limited_greedy", "n_group": 7, "topk_group": 2}, CheckpointError, "don't make 7 groups"),
        ({"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 9}, CheckpointError, "of 9 of 8 groups"),
    ],
    ids=str,
)
def test_configs_that_can_not_be_followed(changes: dict[str, Any], kind: type[NanovllmError], said: str) -> None:
    config = shape_config("deepseek-v2-lite") | changes
    with pytest.raises(kind, match=said):
        spec_from_hf(config, hf_family(config))


def test_what_is_taken_apart_by_head_stays_plain(tmp_path: Path) -> None:
    """With --quant, and in a folder that was quantized."""
    folder = save(random_model(CONFIGS["youtu"]), tmp_path / "plain")
    quantize("int8", tmp_path / "int8", folder)
    ignored = json.loads((tmp_path / "int8/config.json").read_text())["quantization_config"]["ignore"]
    assert any("kv_b_proj" in name for name in ignored)
    tokens = prompts(EVEN["vocab_size"])[:5]
    form = parse_format("int8")
    for source, settings, outer in ((folder, {"quant": "int8"}, True), (tmp_path / "int8", {}, False)):
        model = random_model(CONFIGS["youtu"])
        for key, parameter in model.named_parameters():
            is_outer = "embed_tokens" in key or "lm_head" in key
            if parameter.dim() == 2 and "kv_b_proj" not in key and (outer or not is_outer):
                parameter.data = form.dequantize(form.quantize(parameter.data))
        worker = worker_for(source, dtype="float32", activations="exact", **settings)
        assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < 1e-4


@pytest.mark.parametrize("ranks", [1, 2])
def test_matrices_of_heads_count_among_the_weights(ranks: int, tmp_path: Path) -> None:
    """What a head has for its keys and its values, here most of the model, takes memory, and a step reads it."""
    sizes = {"num_hidden_layers": 2, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 128}
    model = random_model(YoutuConfig(**EVEN | sizes))
    by_name = {key: 4 * each.numel() for key, each in model.named_parameters() if each.dim() == 2}
    of_heads, of_tokens = (sum(n for key, n in by_name.items() if part in key) for part in ("kv_b_proj", "embed_tokens"))
    worker = worker_for(save(model, tmp_path), dtype="float32", tensor_parallel_size=ranks)
    try:
        assert of_heads > sum(by_name.values()) / 3
        assert sum(by_name.values()) <= worker.weight_bytes < sum(by_name.values()) + of_heads * 3 / 4
        assert worker.read_bytes <= worker.weight_bytes - of_tokens
        assert worker.read_bytes > sum(by_name.values()) - 2 * of_tokens
    finally:
        worker.close()


@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_of_heads_are_foretold_as_large_as_they_become(dtype: str, by_head: bool, tmp_path: Path) -> None:
    """They are kept as numbers of the compute type, also out of a file that has them in blocks."""
    sizes = {"num_hidden_layers": 2, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 128}
    path = write(tmp_path / "m.gguf", random_model(YoutuConfig(**EVEN | sizes)), ["Q8_0"], by_head=by_head)
    worker = worker_for(path, dtype=dtype)
    with open_checkpoint(path) as checkpoint:
        foretold = WeightFormats(checkpoint, open_reader(checkpoint), None).num_bytes(worker.dtype, dense.num_bytes)
    assert foretold == pytest.approx(worker.weight_bytes, rel=0.1)  # rows are filled up


def test_of_headers_alone_matrices_of_heads_are_planned_in_the_compute_type(tmp_path: Path) -> None:
    """As they are where the weights are there, in whatever others have packed them."""
    sizes = {"num_hidden_layers": 2, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 128}
    build(tmp_path, YoutuConfig(**EVEN | sizes), fp8("block", "weight_scale_inv"), FP8_BLOCKS)
    found = []
    with open_checkpoint(tmp_path) as checkpoint:
        for alone in (True, False):
            facts, reader = facts_of(checkpoint, headers_only=alone), reader_of(checkpoint, headers_only=alone)
            assert (reader is None) == alone
            found.append(plan_weights(facts, checkpoint, reader, torch.bfloat16, None, dense.num_bytes).num_bytes)
    assert found[0] == pytest.approx(found[1], rel=0.1)  # kv_a, which is in float32 here, counts as it is stored


def test_a_folder_is_quantized_to_a_file(tmp_path: Path) -> None:
    config = DeepseekV3Config(**EVEN | {"eos_token_id": 4089, "bos_token_id": 4087, "vocab_size": 4100}, **EXPERTS,
                              n_group=4, topk_group=2)  # fmt: skip
    model = random_model(config)
    make_gguf(save(model, tmp_path / "folder"), tmp_path / "made.gguf")
    quantize("q8_0", tmp_path / "q8_0.gguf", tmp_path / "folder")
    readers = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("made", "q8_0"))
    plain, rounded = ({tensor.name: tensor.tensor_type.name for tensor in reader.tensors} for reader in readers)
    assert plain.keys() == rounded.keys()
    kept = {name for name, kind in rounded.items() if kind != "Q8_0"}
    assert {name.partition(".")[2].partition(".")[2] for name in kept} - {""} == {
        "attn_norm.weight", "ffn_norm.weight", "attn_q_a_norm.weight", "attn_kv_a_norm.weight", "attn_k_b.weight",
        "attn_v_b.weight", "ffn_gate_inp.weight", "exp_probs_b.bias",
    }  # fmt: skip
    ids = prompts(4000)[:5]
    exact = expected_logits(model, ids)
    assert 1e-4 < difference(logits_of(worker_for(tmp_path / "q8_0.gguf", dtype="float32"), ids), exact) < 0.3  # experts change


def test_values_are_not_kept_as_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "warm_up", lambda *_: None)  # what is compiled for two types takes long, and none of it is used
    folder = save(random_model(CONFIGS["youtu"]), tmp_path)
    for keys, values in ((None, "int8"), ("int8", "fp8"), ("int8", "float32")):
        with pytest.raises(UnsupportedError, match=f"values kept as {values} where keys are as {keys or 'auto'}"):
            worker_for(folder, cache_type_k=keys, cache_type_v=values)
    tokens = prompts(EVEN["vocab_size"])[:3]
    alone, both = ({name: "int8", "dtype": "bfloat16"} for name in ("cache_type_k", "kv_cache_dtype"))
    assert torch.equal(logits_of(worker_for(folder, **alone), tokens), logits_of(worker_for(folder, **both), tokens))


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_what_is_kept_may_have_eight_bits(kept: str, tmp_path: Path) -> None:
    folder = save(random_model(CONFIGS["youtu"]), tmp_path)
    tokens = prompts(EVEN["vocab_size"])
    workers = {kind: worker_for(folder, dtype="bfloat16", kv_cache_dtype=kind) for kind in ("auto", kept)}
    plain, rounded = (logits_of(worker, tokens) for worker in workers.values())
    assert 1e-4 < difference(rounded, plain) < 0.2
    outputs = run(engine_for(workers[kept]), [(ids, greedy(8)) for ids in tokens])
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
