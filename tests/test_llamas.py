"""Models that transformers lacks, most of which are read as GGUF files alone, against their formula in plain torch: random
tensors by the names that llama.cpp has for them.

What the formula makes of SmallThinker and PLaMo 3 was held against llama.cpp's own logits once, of llama-cpp-python 0.3.36: they
differ by less than 6e-6 of their norm. Windows of a SmallThinker are of 4096 tokens there, and the prompt was of 4150.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import DbrxConfig

from engines import random_model, worker_for
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.families import spec_from_gguf, spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.registry_gguf import gguf_family
from test_convert_families import fields, make_gguf, tensors
from test_models import prompts
from test_quant_engine import difference, expected_logits, logits_of

VOCAB, WIDTH, DIM, EPS = 4096, 48, 8, 1e-5
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model of three layers. By layer: heads of queries, of keys, the width of its MLP, and of its window, 0 for none."""

    heads: tuple[int, ...] = (6, 6, 6)
    keys: tuple[int, ...] = (6, 6, 6)
    inner: tuple[int, ...] = (70, 70, 70)
    fused: bool = False
    biased: bool = False
    layer_norms: bool = False
    head_norms: bool = False
    gates: bool = False
    parallel: bool = False
    ungated: bool = False
    act: str = "silu"
    positions: str = "halves"
    scale: float = DIM**-0.5
    windows: tuple[int, ...] = (0, 0, 0)
    dims: tuple[int, int] = (DIM, DIM)  # that rotate where there is no window, and where there is
    bases: tuple[float, float] = (1e4, 1e4)
    tied: bool = False
    experts: int = 0
    taken: int = 2
    limit: float = math.inf
    sigmoids: bool = False
    early: bool = False
    sandwich: bool = False
    values: int = DIM
    turned: tuple[bool, ...] = (True, True, True)
    said: dict[str, Any] = field(default_factory=dict)


SIZES = {"attention.head_count": [2, 4, 6], "attention.head_count_kv": [1, 2, 2], "feed_forward_length": [24, 40, 70],
         "attention.key_length": DIM, "attention.value_length": DIM}  # fmt: skip
EXPERTS_SAID = {"attention.head_count_kv": 2, "expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 70,
                "attention.key_length": DIM, "attention.value_length": DIM}  # fmt: skip
WINDOWS = {"attention.sliding_window": 20, "attention.sliding_window_pattern": [True, False, True], "rope.freq_base": 1e4,
           "rope.freq_base_swa": 1e3, "rope.dimension_count": 2, "rope.dimension_count_swa": DIM}  # fmt: skip
CASES = {
    "qwen": Case(fused=True, biased=True, said={"feed_forward_length": 140}),
    "baichuan": Case(positions="pairs"),
    "refact": Case(keys=(1, 1, 1), positions="distances", tied=True, said={"attention.head_count_kv": 1}),
    "jais": Case(
        fused=True, biased=True, layer_norms=True, positions="distances", scale=1 / DIM, said={"attention.max_alibi_bias": 8.0}
    ),
    "plamo": Case(keys=(2, 2, 2), parallel=True, said={"attention.head_count_kv": 2}),
    "codeshell": Case(
        keys=(2, 2, 2), fused=True, biased=True, layer_norms=True, ungated=True, act="gelu_tanh",
        said={"attention.head_count_kv": 2, "rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
    ),
    "openelm": Case(
        heads=(2, 4, 6), keys=(1, 2, 2), inner=(24, 40, 70), fused=True, head_norms=True, tied=True, said=SIZES
    ),
    "spark2_5": Case(
        keys=(2, 2, 2), fused=True, gates=True, act="gelu", windows=(20, 0, 20), dims=(2, DIM), bases=(1e4, 1e3), tied=True,
        said={"attention.head_count_kv": 2, **WINDOWS},
    ),
    "maple": Case(
        keys=(2, 2, 2), head_norms=True, windows=(20, 0, 20), turned=(True, False, True), bases=(1e4, 1e3), experts=5, limit=0.5,
        said={"attention.head_count_kv": 2, "attention.sliding_window": 20, "rope.freq_base": 1e4, "rope.freq_base_swa": 1e3,
              "attention.sliding_window_pattern": [True, False, True], "expert_count": 5, "expert_used_count": 2,
              "expert_feed_forward_length": 70, "swiglu_clamp_exp": [0.5, 0.5, 0.5]},
    ),
    # All layers rotate where none has a window, else those that have one.
    "smallthinker": Case(
        keys=(2, 2, 2), act="relu", experts=5, early=True, sigmoids=True, windows=(0, 20, 20), turned=(False, True, True),
        tied=True, said=EXPERTS_SAID | {"attention.sliding_window": 20, "expert_gating_func": 2},
    ),
    "smallthinker without windows": Case(
        keys=(2, 2, 2), act="relu", experts=5, early=True,
        said=EXPERTS_SAID | {"expert_gating_func": 1},
    ),
    "plamo3": Case(
        keys=(2, 2, 2), fused=True, head_norms=True, sandwich=True, values=4, windows=(20, 20, 0), bases=(1e4, 1e3), tied=True,
        said={"attention.head_count_kv": 2, "attention.key_length": DIM, "attention.value_length": 4, "rope.freq_base": 1e4,
              "attention.sliding_window": 20, "attention.sliding_window_pattern": 3, "rope.freq_base_swa": 1e3},
    ),
    "plamo3 without windows": Case(
        keys=(2, 2, 2), fused=True, head_norms=True, sandwich=True,
        said={"attention.head_count_kv": 2, "attention.key_length": DIM, "attention.value_length": DIM},
    ),
}  # fmt: skip


BEHIND = ("post_attention_norm", "post_ffw_norm")
"""PLaMo's files have these without an ending."""


def random_tensors(case: Case) -> Tensors:
    draw = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, WIDTH), "output_norm": (WIDTH,)}
    shapes |= {} if case.tied else {"output": (VOCAB, WIDTH)}
    for i, (heads, keys, inner) in enumerate(zip(case.heads, case.keys, case.inner, strict=True)):
        q, k, v = heads * DIM, keys * DIM, keys * case.values
        own: dict[str, tuple[int, ...]] = {"attn_norm": (WIDTH,), "attn_output": (WIDTH, heads * case.values)}
        parts = {"qkv": q + k + v} if case.fused else {"q": q, "k": k, "v": v}
        own |= {f"attn_{part}": (rows, WIDTH) for part, rows in parts.items()}
        own |= {"attn_q_norm": (DIM,), "attn_k_norm": (DIM,)} if case.head_norms else {}
        own |= {"attn_gate": (heads, WIDTH)} if case.gates else {}
        own |= {} if case.parallel else {"ffn_norm": (WIDTH,)}
        own |= dict.fromkeys(BEHIND, (WIDTH,)) if case.sandwich else {}
        mlp = {} if case.ungated or case.sandwich else {"ffn_gate": (inner, WIDTH)}
        mlp |= {"ffn_up": (inner * (1 + case.sandwich), WIDTH), "ffn_down": (WIDTH, inner)}
        stacks = {f"{name}_exps": (case.experts, *shape) for name, shape in mlp.items()}
        own |= {"ffn_gate_inp": (case.experts, WIDTH), **stacks} if case.experts else mlp
        shapes |= {f"blk.{i}.{name}": shape for name, shape in own.items()}
    found = {}
    for name, shape in shapes.items():
        numbers = torch.randn(shape, generator=draw) * shape[-1] ** -0.5 * 1.5
        full = name if name.endswith(BEHIND) else f"{name}.weight"
        found[full] = numbers if len(shape) > 1 else 0.5 + torch.rand(shape, generator=draw)
        everywhere = case.layer_norms and name not in ("token_embd", "output")
        if case.biased and (everywhere or name.endswith("attn_qkv")):
            found[f"{name}.bias"] = torch.randn(shape[0], generator=draw) * 0.5
    return found


def turned(x: torch.Tensor, how: str, dim: int, base: float) -> torch.Tensor:
    """x: [T, H, D], of which the first `dim` rotate."""
    angles = torch.arange(len(x))[:, None] * base ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    rotary, rest = x[..., :dim], x[..., dim:]
    halves = how == "halves"
    a, b = rotary.chunk(2, -1) if halves else (rotary[..., ::2], rotary[..., 1::2])
    parts = a * cos - b * sin, b * cos + a * sin
    return torch.cat([torch.cat(parts, -1) if halves else torch.stack(parts, -1).flatten(-2), rest], -1)


def slopes(heads: int) -> torch.Tensor:
    """ALiBi's, Press et al. 2022: of as many heads as the next lower power of two, then each second of twice as many."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return torch.tensor(first + [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)])


EXPERTS = ("ffn_gate_inp", *(f"ffn_{part}_exps" for part in ("gate", "up", "down")))


def mixture(case: Case, t: Tensors, x: torch.Tensor, chosen_by: torch.Tensor) -> torch.Tensor:
    """Of those with the largest logits, by their softmax or the shares of their sigmoids, gate and up held."""
    logits, experts = (chosen_by @ t["ffn_gate_inp"].T).topk(case.taken)
    weights = F.normalize(logits.sigmoid(), 1, -1) if case.sigmoids else logits.softmax(-1)
    gate, up = (torch.einsum("tkij,tj->tki", t[f"ffn_{part}_exps"][experts], x) for part in ("gate", "up"))
    inner = activated(case, gate.clamp(max=case.limit)) * up.clamp(-case.limit, case.limit)
    return torch.einsum("tk,tkij,tkj->ti", weights, t["ffn_down_exps"][experts], inner)


def activated(case: Case, gate: torch.Tensor) -> torch.Tensor:
    if case.act.startswith("gelu"):
        return F.gelu(gate, approximate="tanh" if case.act == "gelu_tanh" else "none")
    return F.relu(gate) if case.act == "relu" else F.silu(gate)


def expected(case: Case, t: Tensors, ids: list[int]) -> torch.Tensor:
    """Logits [T, V]."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    def norm(name: str, x: torch.Tensor, centered: bool = case.layer_norms) -> torch.Tensor:
        if centered:
            return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], EPS)
        return F.rms_norm(x, x.shape[-1:], t[f"{name}.weight"], EPS)

    x, place = t["token_embd.weight"][ids], torch.arange(len(ids))
    distance = place[:, None] - place
    for i, (heads, keys) in enumerate(zip(case.heads, case.keys, strict=True)):
        blk, window = f"blk.{i}", case.windows[i]
        h = norm(f"{blk}.attn_norm", x)
        if case.fused:
            q, k, v = linear(f"{blk}.attn_qkv", h).split([heads * DIM, keys * DIM, keys * case.values], -1)
        else:
            q, k, v = (linear(f"{blk}.attn_{part}", h) for part in "qkv")
        q, k, v = (each.view(len(ids), -1, dim) for each, dim in ((q, DIM), (k, DIM), (v, case.values)))
        if case.head_norms:
            q, k = (norm(f"{blk}.attn_{part}_norm", each) for part, each in (("q", q), ("k", k)))
        if case.positions != "distances" and case.turned[i]:
            q, k = (turned(each, case.positions, case.dims[bool(window)], case.bases[bool(window)]) for each in (q, k))
        k, v = (each.repeat_interleave(heads // keys, 1) for each in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * case.scale
        if case.positions == "distances":
            scores = scores - slopes(heads)[:, None, None] * distance
        hidden = (distance < 0) | (distance >= (window or len(ids)))
        found = torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        if case.gates:
            found = found * linear(f"{blk}.attn_gate", h).sigmoid()[..., None]
        mixed = linear(f"{blk}.attn_output", found.flatten(1))
        mixed = F.rms_norm(mixed, mixed.shape[-1:], t[f"{blk}.{BEHIND[0]}"], EPS) if case.sandwich else mixed
        m = h if case.parallel else norm(f"{blk}.ffn_norm", x + mixed)
        if case.experts:
            own = {name: t[f"{blk}.{name}.weight"] for name in EXPERTS}
            x = x + mixed + mixture(case, own, m, x if case.early else m)
            continue
        up = linear(f"{blk}.ffn_up", m)
        if case.sandwich:
            gate, up = up.chunk(2, -1)
        else:
            gate = up if case.ungated else linear(f"{blk}.ffn_gate", m)
        gate = activated(case, gate)
        fed = linear(f"{blk}.ffn_down", gate if case.ungated else gate * up)
        x = x + mixed + (F.rms_norm(fed, fed.shape[-1:], t[f"{blk}.{BEHIND[1]}"], EPS) if case.sandwich else fed)
    return F.linear(norm("output_norm", x), t["token_embd.weight" if case.tied else "output.weight"])


def write(path: Path, arch: str, case: Case, found: Tensors, **more: Any) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    shape = {
        "block_count": 3, "context_length": 512, "embedding_length": WIDTH, "vocab_size": VOCAB, "attention.head_count": 6,
        "attention.head_count_kv": 6, "feed_forward_length": 70,
        f"attention.layer_norm_{'' if case.layer_norms else 'rms_'}epsilon": EPS,
    }  # fmt: skip
    writer.add_tokenizer_model("no_vocab")
    for key, value in (shape | case.said | more).items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array, str: writer.add_string}[type(value)]
        add(f"{arch}.{key}", value)
    for name, tensor in found.items():
        writer.add_tensor(name, tensor.numpy())
    for done in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        done()
    return path


@pytest.mark.parametrize("arch", CASES)
def test_a_file_gives_the_logits_of_its_formula(arch: str, tmp_path: Path) -> None:
    case = CASES[arch]
    found, tokens = random_tensors(case), prompts(4000)[2:5]
    worker = worker_for(write(tmp_path / "m.gguf", arch.split()[0], case, found), dtype="float32")
    wanted = torch.cat([expected(case, found, ids) for ids in tokens])
    assert difference(logits_of(worker, tokens), wanted) < 1e-4


def dbrx_file(path: Path, model: Any) -> Path:
    """As llama.cpp's converter makes it: w2 of an expert is turned over."""
    config, writer = model.config, gguf.GGUFWriter(path, "dbrx")
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.ffn_config.ffn_hidden_size)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.attn_config.kv_n_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_clamp_kqv(config.attn_config.clip_qkv)
    writer.add_expert_count(config.ffn_config.moe_num_experts)
    writer.add_expert_used_count(config.ffn_config.moe_top_k)
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DBRX, config.n_layers)
    for key, tensor in model.state_dict().items():
        name = names.get_name(key, (".weight",))
        assert name is not None, key
        if ".experts." in key:
            tensor = tensor.view(config.ffn_config.moe_num_experts, -1, config.d_model)
            tensor = tensor.transpose(1, 2).contiguous() if key.endswith("w2") else tensor
        writer.add_tensor(name.removesuffix(".weight") + ".weight", tensor.numpy())
    for done in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        done()
    return path


DBRX = DbrxConfig(
    d_model=WIDTH, n_heads=6, n_layers=2, max_seq_len=512, vocab_size=513,
    rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    attn_config={"clip_qkv": 0.8, "kv_n_heads": 2, "rope_theta": 5e5},
    ffn_config={"hidden_size": WIDTH, "ffn_hidden_size": 36, "moe_num_experts": 5, "moe_top_k": 2},
)  # fmt: skip


def test_a_dbrx_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    reference, tokens = random_model(DBRX), prompts(513)[2:5]
    worker = worker_for(dbrx_file(tmp_path / "m.gguf", reference), dtype="float32")
    assert difference(logits_of(worker, tokens), expected_logits(reference, tokens)) < 1e-4


def test_of_a_baichuan_the_larger_one_does_not_rotate() -> None:
    """No key says so: its layers are 40."""
    read = dict.fromkeys(("attention.head_count", "attention.head_count_kv"), 6) | {"block_count": 40, "embedding_length": WIDTH}
    read |= {"feed_forward_length": 70, "attention.layer_norm_rms_epsilon": EPS}
    metadata = {"general.architecture": "baichuan"} | {f"baichuan.{key}": value for key, value in read.items()}
    spec = spec_from_gguf(metadata, gguf_family(metadata), VOCAB, set(), lambda name: None)
    assert spec.attention.rope is None
    assert spec.distances is not None
    del metadata["baichuan.attention.layer_norm_rms_epsilon"]
    with pytest.raises(CheckpointError, match="layer_norm_rms_epsilon"):
        spec_from_gguf(metadata, gguf_family(metadata), VOCAB, set(), lambda name: None)


NAMES = {
    "attn_qkv": "self_attn.q_k_v_proj", "attn_output": "self_attn.out_proj", "attn_gate": "self_attn.g_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip
MAPLE_NAMES = {
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate", **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
}  # fmt: skip
SPARK: dict[str, Any] = {
    "architectures": ["Spark2_5ForCausalLM"], "model_type": "spark2_5", "hidden_size": WIDTH, "intermediate_size": 70,
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": DIM, "vocab_size": VOCAB,
    "hidden_act": "gelu", "max_position_embeddings": 512, "rms_norm_eps": EPS, "sliding_window": 20, "tie_word_embeddings": True,
    "gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True, "attention_bias": False, "mlp_bias": False,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e4},
        "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 1e3},
    },
}  # fmt: skip


MAPLE: dict[str, Any] = SPARK | {
    "architectures": ["MapleForCausalLM"], "model_type": "maple", "hidden_act": "silu", "intermediate_size": None,
    "moe_intermediate_size": 70, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True, "rope_parameters": None,
    "nope_on_global_attention": True, "rope_theta": 1e3, "partial_rotary_factor": 0.5, "tie_word_embeddings": False,
}  # fmt: skip
SMALLTHINKER: dict[str, Any] = {
    "architectures": ["SmallThinkerForCausalLM"], "model_type": "smallthinker", "hidden_size": WIDTH, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": DIM, "vocab_size": VOCAB, "max_position_embeddings": 512,
    "rms_norm_eps": EPS, "rope_theta": 1e4, "sliding_window_size": 4096, "sliding_window_layout": [0, 1, 1],
    "rope_layout": [0, 1, 1], "moe_layer_layout": [1, 1, 1], "moe_num_primary_experts": 5, "moe_num_active_primary_experts": 2,
    "moe_ffn_hidden_size": 70, "moe_primary_router_apply_softmax": False, "moe_enable_early_router": True,
    "moe_enable_secondary_experts": False, "norm_topk_prob": True, "tie_word_embeddings": True,
}  # fmt: skip
SMALLTHINKER_4B = {key: value for key, value in SMALLTHINKER.items() if key not in ("rope_layout", "sliding_window_layout")} | {
    "moe_primary_router_apply_softmax": True, "tie_word_embeddings": False,
}  # fmt: skip
SMALLTHINKER_NAMES = MAPLE_NAMES | {
    "ffn_gate_inp": "block_sparse_moe.primary_router", "ffn_exps": "block_sparse_moe.experts.{e}.{part}",
}  # fmt: skip
HELD = {"limit": 7.0, "dims": (4, 4), "bases": (1e3, 1e3)}
FOLDERS = {
    "spark2_5": (SPARK, NAMES, "embedding", CASES["spark2_5"]),
    "maple": (MAPLE, MAPLE_NAMES, "word_embeddings", replace(CASES["maple"], **HELD, said=CASES["maple"].said | {
        "swiglu_clamp_exp": [7.0] * 3, "rope.freq_base": 1e3, "rope.dimension_count": 4,
    })),
    "smallthinker": (SMALLTHINKER, SMALLTHINKER_NAMES, "embed_tokens", replace(
        CASES["smallthinker"], windows=(0, 4096, 4096), said=CASES["smallthinker"].said | {"attention.sliding_window": 4096},
    )),
    "smallthinker without windows": (
        SMALLTHINKER_4B, SMALLTHINKER_NAMES, "embed_tokens", CASES["smallthinker without windows"],
    ),
}  # fmt: skip


def folder_of(folder: Path, arch: str, found: Tensors) -> Path:
    config, names, embedding, _ = FOLDERS[arch]
    folder.mkdir()
    outer = {"token_embd": f"model.{embedding}", "output_norm": "model.norm", "output": "lm_head"}
    own = {}
    for name, tensor in found.items():
        *_, layer, part, _ = ("", *name.split("."))
        if part.endswith("_exps"):
            which = part.removeprefix("ffn_").removesuffix("_exps")
            place = names.get("ffn_exps", "mlp.experts.{e}.{part}_proj")
            own |= {f"model.layers.{layer}.{place.format(e=e, part=which)}.weight": each.clone() for e, each in enumerate(tensor)}
        else:
            own[f"{outer[part]}.weight" if part in outer else f"model.layers.{layer}.{names[part]}.weight"] = tensor
    save_file(own, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def test_a_file_that_says_no_rotary_dims_of_windows_has_the_others(tmp_path: Path) -> None:
    """llama.cpp's rule, which it has for all architectures."""
    case = CASES["spark2_5"]
    case = replace(case, dims=(2, 2), said={key: value for key, value in case.said.items() if key != "rope.dimension_count_swa"})
    found, tokens = random_tensors(case), prompts(4000)[2:5]
    path = write(tmp_path / "m.gguf", "spark2_5", case, found)
    wanted = torch.cat([expected(case, found, ids) for ids in tokens])
    assert difference(logits_of(worker_for(path, dtype="float32"), tokens), wanted) < 1e-4


@pytest.mark.parametrize("arch", FOLDERS)
def test_a_folder_is_read_and_made_into_its_file(arch: str, tmp_path: Path) -> None:
    case = FOLDERS[arch][-1]
    found, tokens = random_tensors(case), prompts(4000)[2:5]
    folder = folder_of(tmp_path / "folder", arch, found)
    wanted = torch.cat([expected(case, found, ids) for ids in tokens])
    assert difference(logits_of(worker_for(folder, dtype="float32"), tokens), wanted) < 1e-4
    assert make_gguf(folder, tmp_path / "made.gguf") == []
    arch = arch.split()[0]
    theirs = write(tmp_path / "expected.gguf", arch, case, found)
    made, wanted_tensors = tensors(tmp_path / "made.gguf"), tensors(theirs)
    assert made.keys() == wanted_tensors.keys()
    assert [name for name in made if (made[name] != wanted_tensors[name]).any()] == []
    said = fields(tmp_path / "made.gguf")
    for key, value in fields(theirs).items():
        assert not key.startswith(f"{arch}.") or said[key] == pytest.approx(value), key


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gate_attn_act_mode": "silu"}, "gates 'silu' of a Spark"),
        ({"headwise_attn_output_gate": False}, "'headwise_attn_output_gate' is false"),
    ],
    ids=str,
)
def test_sparks_that_can_not_be_followed(changes: dict[str, Any], said: str) -> None:
    config = SPARK | changes
    with pytest.raises(UnsupportedError, match=said):
        spec_from_hf(config, hf_family(config))


@pytest.mark.parametrize(
    ("arch", "keys", "kind", "said"),
    [
        ("jais", {"attention.max_alibi_bias": 4.0}, UnsupportedError, "a Jais whose scores are told by 4"),
        ("openelm", {"attention.head_count": [2, 3, 6]}, CheckpointError, "3 heads don't share 2 of keys"),
        ("openelm", {"attention.head_count_kv": [1, 0, 2]}, CheckpointError, "a whole number of at least 1"),
        ("openelm", {"feed_forward_length": [24, 40]}, CheckpointError, "a number for each of 3 layers"),
        ("spark2_5", {"rope.dimension_count_swa": 3}, CheckpointError, "3 rotary dims do not fit heads of 8"),
    ],
    ids=str,
)
def test_keys_that_can_not_be_followed(
    arch: str, keys: dict[str, Any], kind: type[NanovllmError], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", arch, CASES[arch], random_tensors(CASES[arch]), **keys)
    with pytest.raises(kind, match=said):
        worker_for(path, dtype="float32")
