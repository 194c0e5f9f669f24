"""K2 Horizon: folders and GGUF files against float64, and what is refused of either. transformers has none; the rules are those
of the published code, and of llama.cpp."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from calibrating import check_walk
from emulation.emulator import needs_emulation
from engines import greedy, worker_for
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.families import spec_from_gguf, spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.registry_gguf import gguf_family
from nanovllm_cli.text.tokenizer import Tokenizer
from quantizing import quantize
from same_answers import check_chunks_and_prefixes, check_guesses_and_few_blocks
from test_convert import SETTINGS, TINY
from test_convert_families import fields, make_gguf, same, tensors
from test_cuda_engine import depend_on_the_request_alone, engine_on, kernels_not_rehearsed, recorded_tokens, tokens
from test_models import prompts
from test_quant_engine import difference, logits_of

DENSE: dict[str, Any] = {
    "architectures": ["K2HorizonForCausalLM"], "model_type": "k2_horizon", "dtype": "float32", "vocab_size": 4096,
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 24, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "layernorm_num_groups": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_experts": 0, "mova_num_experts": 0,
    "attention_gate_func": None, "query_key_norm": False, "rope_head_dim": 24, "mlp_only_layers": [0, 1, 2],
}  # fmt: skip
MIXED = DENSE | {
    "mlp_only_layers": [0], "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_shared_experts": 2,
    "moe_gate_bias": True, "norm_topk_prob": True, "router_score_func": "sigmoid", "router_scaling_factor": 2.5,
    "layernorm_num_groups": 2,
}  # fmt: skip
BY_SOFTMAX = MIXED | {"router_score_func": "softmax", "norm_topk_prob": False, "moe_gate_bias": False,
                      "router_scaling_factor": None, "num_shared_experts": 0}  # fmt: skip
VALUES = MIXED | {"mova_num_experts": 6, "mova_num_experts_per_tok": 3, "attention_gate_func": "softplus"}
CASES = {"dense": DENSE, "mixed": MIXED, "by softmax": BY_SOFTMAX, "values": VALUES}


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, small = (config[key] for key in ("hidden_size", "intermediate_size", "moe_intermediate_size"))

    def drawn(*shape: int) -> torch.Tensor:
        return 2 * torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def mlp(place: str, width: int) -> dict[str, torch.Tensor]:
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        return {f"{place}.{part}_proj.weight": drawn(*shape) for part, shape in shapes.items()}

    found = {f"{name}.weight": drawn(config["vocab_size"], hidden) for name in ("model.embed_tokens", "lm_head")}
    norms = ["model.norm"] + [f"model.layers.{i}.{part}_layernorm" for i in range(3) for part in ("input", "post_attention")]
    found |= {f"{norm}.weight": 1 + 0.3 * torch.randn(hidden, generator=generator) for norm in norms}
    for i in range(3):
        place = f"model.layers.{i}"
        of_experts = config["mova_num_experts"] * (i not in config["mlp_only_layers"])
        heads = {"q": 4, "k": 2} | ({} if of_experts else {"v": 2}) | ({"gate": 4} if config["attention_gate_func"] else {})
        for part, count in heads.items():
            found[f"{place}.self_attn.{part}_proj.weight"] = drawn(count * config["head_dim"], hidden)
        for e in range(of_experts):
            found[f"{place}.self_attn.v_experts.{e}.weight"] = drawn(2 * config["head_dim"], hidden)
        if of_experts:
            found[f"{place}.self_attn.v_router.weight"] = drawn(of_experts, hidden)
            found[f"{place}.self_attn.v_router.bias"] = 0.5 * torch.randn(of_experts, generator=generator)
        found[f"{place}.self_attn.o_proj.weight"] = drawn(hidden, 4 * config["head_dim"])
        if i in config["mlp_only_layers"]:
            found |= mlp(f"{place}.mlp", inner)
            continue
        found[f"{place}.mlp.gate.weight"] = drawn(config["num_experts"], hidden)
        if config["moe_gate_bias"]:
            found[f"{place}.mlp.gate.bias"] = 0.5 * torch.randn(config["num_experts"], generator=generator)
        for e in range(config["num_experts"]):
            found |= mlp(f"{place}.mlp.experts.{e}", small)
        if config["num_shared_experts"]:
            found |= mlp(f"{place}.mlp.shared_experts", small * config["num_shared_experts"])
    return found


def expected(config: dict[str, Any], found: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """Logits of every token, float64."""
    own, count = {name: tensor.double() for name, tensor in found.items()}, len(ids)

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        parts = x.view(count, config["layernorm_num_groups"], -1)
        parts = parts / (parts.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()
        return parts.reshape(x.shape) * own[f"{name}.weight"]

    def turned(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(count).double()[:, None] * 1e6 ** (-torch.arange(0, 24, 2).double() / 24)
        one, other = x.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

    def mlp(x: torch.Tensor, place: str) -> torch.Tensor:
        gate, up, down = (own[f"{place}.{part}_proj.weight"].T for part in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down

    def chosen_of(x: torch.Tensor, router: str, taken: int, every: list[torch.Tensor]) -> torch.Tensor:
        logits = x @ own[f"{router}.weight"].T
        scores = logits.sigmoid() if config["router_score_func"] == "sigmoid" else logits.softmax(-1)
        chosen = (scores + own.get(f"{router}.bias", torch.zeros(1))).topk(taken).indices
        shares = scores.gather(1, chosen)
        shares = shares / shares.sum(-1, keepdim=True) if config["norm_topk_prob"] else shares
        shares = shares * (config["router_scaling_factor"] or 1.0)
        return (torch.stack(every, 1)[torch.arange(count)[:, None], chosen] * shares[..., None]).sum(1)

    def values(x: torch.Tensor, place: str) -> torch.Tensor:
        if f"{place}.v_proj.weight" in own:
            return x @ own[f"{place}.v_proj.weight"].T
        every = [torch.nn.functional.silu(x @ own[f"{place}.v_experts.{e}.weight"].T) for e in range(6)]
        return chosen_of(x, f"{place}.v_router", 3, every)

    def mixture(x: torch.Tensor, place: str) -> torch.Tensor:
        total = chosen_of(x, f"{place}.gate", 2, [mlp(x, f"{place}.experts.{e}") for e in range(5)])
        return total + mlp(x, f"{place}.shared_experts") if config["num_shared_experts"] else total

    x = own["model.embed_tokens.weight"][ids]
    unseen = torch.ones(count, count).triu(1).bool()
    for i in range(3):
        place = f"model.layers.{i}"
        h = normed(x, f"{place}.input_layernorm")
        q, k = (h @ own[f"{place}.self_attn.{part}_proj.weight"].T for part in "qk")
        v = values(h, f"{place}.self_attn")
        q, k, v = turned(q.view(count, 4, 24)), turned(k.view(count, 2, 24)), v.view(count, 2, 24)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 24**0.5
        seen = torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v.repeat_interleave(2, 1))
        seen = seen.reshape(count, -1)
        if config["attention_gate_func"]:
            seen = seen * torch.log2(1 + 2 ** (h @ own[f"{place}.self_attn.gate_proj.weight"].T))
        x = x + seen @ own[f"{place}.self_attn.o_proj.weight"].T
        h = normed(x, f"{place}.post_attention_layernorm")
        x = x + (mlp if i in config["mlp_only_layers"] else mixture)(h, f"{place}.mlp")
    return normed(x, "model.norm") @ own["lm_head.weight"].T


def folder_of(path: Path, config: dict[str, Any], found: dict[str, torch.Tensor]) -> Path:
    path.mkdir(parents=True)
    save_file(found, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    for name in SETTINGS:
        shutil.copy(TINY / name, path / name)
    return path


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, Path]:
    """A config, its folder, and its file."""
    config = {"moe_intermediate_size": 0} | CASES[request.param]
    folder = folder_of(tmp_path_factory.mktemp("k2") / "folder", config, weights(config))
    make_gguf(folder, path := folder.parent / "m.gguf")
    return config, folder, path


def test_logits(case: tuple[dict[str, Any], Path, Path]) -> None:
    config, folder, _ = case
    asked, found = prompts(4096), weights(config)
    wanted = torch.cat([expected(config, found, ids) for ids in asked])
    assert difference(logits_of(worker_for(folder), asked).double(), wanted) < 5e-6


def test_a_calibration_sees_what_the_model_computes(case: tuple[dict[str, Any], Path, Path]) -> None:
    if case[0]["mova_num_experts"]:
        with pytest.raises(UnsupportedError, match="its values are of experts"):
            check_walk(case[1], 500)
    else:
        check_walk(case[1], 500)


def test_tokens_are_the_same_in_chunks_behind_prefixes_and_alone(case: tuple[dict[str, Any], Path, Path]) -> None:
    for settings in ({}, {"quant": "int8"}):
        assert worker_for(case[1], **settings).recordable
    check_chunks_and_prefixes(worker_for(case[1], deterministic=True), prompts(4000))
    check_guesses_and_few_blocks(case[1], "auto")


@needs_emulation
@pytest.mark.parametrize("name", ["dense", "mixed", "values"])
def test_a_gpus_tokens_are_those_of_the_cpu_and_steps_are_recorded(name: str, tmp_path: Path) -> None:
    config = {"moe_intermediate_size": 0} | CASES[name]
    config |= {"dtype": "bfloat16", "head_dim": 32, "rope_head_dim": 32, "vocab_size": 300}
    found = {key: tensor.bfloat16() for key, tensor in weights(config, 4).items()}
    folder = folder_of(tmp_path / "m", config, found)
    assert recorded_tokens(folder, 4) == tokens(engine_on(folder, None), greedy(4))
    depend_on_the_request_alone(folder)
    assert not kernels_not_rehearsed(folder)


# ---- GGUF ----


def test_a_file_says_what_llama_cpps_converter_writes(case: tuple[dict[str, Any], Path, Path]) -> None:
    config, folder, path = case
    keys, found, given = fields(path), tensors(path), weights(config)
    said = {"block_count": 3, "attention.group_norm_groups": config["layernorm_num_groups"], "attention.key_length": 24,
            "rope.dimension_count": 24, "feed_forward_length": 160}  # fmt: skip
    if config["num_experts"]:
        said |= {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 64, "leading_dense_block_count": 1,
                 "moe_every_n_layers": 1, "expert_gating_func": 2 if config["moe_gate_bias"] else 1,
                 "expert_weights_scale": config["router_scaling_factor"] or 1.0,
                 "expert_weights_norm": config["norm_topk_prob"]}  # fmt: skip
        assert keys.get("k2-horizon.expert_shared_count", 0) == config["num_shared_experts"]
        assert keys.get("k2-horizon.expert_shared_feed_forward_length", 0) == 64 * config["num_shared_experts"]
        stacked = torch.stack([given[f"model.layers.2.mlp.experts.{e}.down_proj.weight"] for e in range(5)])
        assert torch.equal(torch.from_numpy(found["blk.2.ffn_down_exps.weight"].copy()), stacked)
        assert ("blk.1.exp_probs_b.bias" in found) is config["moe_gate_bias"]
    assert {key: keys[f"k2-horizon.{key}"] for key in said} == pytest.approx(said)
    same(folder, path)


def gguf_spec(**keys: Any) -> Any:
    metadata = {
        "general.architecture": "k2-horizon", "k2-horizon.block_count": 2, "k2-horizon.embedding_length": 96,
        "k2-horizon.feed_forward_length": 160, "k2-horizon.attention.head_count": 4, "k2-horizon.attention.head_count_kv": 2,
        "k2-horizon.attention.key_length": 24, "k2-horizon.attention.value_length": 24, "k2-horizon.context_length": 512,
        "k2-horizon.attention.layer_norm_rms_epsilon": 1e-6,
    } | {f"k2-horizon.{key.replace('__', '.')}": value for key, value in keys.items()}  # fmt: skip
    return spec_from_gguf(metadata, gguf_family(metadata), 100, {"output.weight"}, lambda name: None)


def test_files_that_say_nothing_of_groups_have_one() -> None:
    assert gguf_spec().norm.groups == 1
    assert gguf_spec(attention__group_norm_groups=8).norm.groups == 8


# ---- texts ----


def test_the_template_for_answers_counts(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", DENSE, weights(DENSE | {"moe_intermediate_size": 0}))
    (folder / "chat_template_generation.jinja").write_text("{{ messages[0].content }}!")
    assert Tokenizer.from_folder(folder).chat_templates["default"] == "{{ messages[0].content }}!"
    (folder / "config.json").write_text('{"model_type": "llama"}')  # whose file of that name is for training
    assert Tokenizer.from_folder(folder).chat_templates == Tokenizer.from_folder(TINY).chat_templates


# ---- what is left out, and what is refused ----


def test_what_a_config_leaves_out_is_that_of_the_smallest() -> None:
    config = {"architectures": ["K2HorizonForCausalLM"]}
    spec = spec_from_hf(config, hf_family(config))
    rope = spec.attention.rope
    assert rope is not None
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.mixture, spec.norm.groups) == (64256, 1536, 28, None, 1)
    assert (rope.scaling, rope.factor, rope.original_len, rope.theta, rope.dim) == ("yarn", 16.0, 8192, 1e6, 64)


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        ({"mova_num_experts": 4}, CheckpointError, "0 of 4 experts of values"),
        ({"mova_num_experts": 4, "mova_num_experts_per_tok": 5}, CheckpointError, "5 of 4 experts of values"),
        ({"mova_num_experts": 10**6, "mova_num_experts_per_tok": 5}, CheckpointError, "5 of 1000000 experts of values"),
        ({"attention_gate_func": "silu"}, UnsupportedError, "a K2 Horizon with gates by 'silu'"),
        ({"query_key_norm": True}, UnsupportedError, "a K2 Horizon whose 'query_key_norm' is true"),
        ({"attention_bias": True}, UnsupportedError, "a K2 Horizon whose 'attention_bias' is true"),
        ({"rope_head_dim": 12}, UnsupportedError, "rotates 12 of 24 dims"),
        ({"layernorm_num_groups": 5}, CheckpointError, "5 groups of rows of 96"),
        ({"layernorm_num_groups": 0}, CheckpointError, "'layernorm_num_groups'"),
        ({"router_score_func": "tanh", "num_experts": 5}, UnsupportedError, "weighed by 'tanh'"),
    ],
)
def test_configs_of_others(said: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        spec_from_hf(MIXED | said, hf_family(MIXED))


@pytest.mark.parametrize("changes", [
    {"attention_gate_func": None}, {"norm_topk_prob": False}, {"mova_num_experts": 0},
])  # fmt: skip
def test_what_a_file_can_not_say_of_values(changes: dict[str, Any], tmp_path: Path) -> None:
    config = VALUES | changes
    with pytest.raises(UnsupportedError, match="GGUF cannot say this of a k2_horizon model"):
        make_gguf(folder_of(tmp_path / "m", config, weights(config)), tmp_path / "m.gguf")


@pytest.mark.parametrize("to", ["int8", "q8_0"])
def test_quantized(to: str, case: tuple[dict[str, Any], Path, Path], tmp_path: Path) -> None:
    """Experts of values as well, which are most of their layers."""
    _, folder, path = case
    output = tmp_path / ("m.gguf" if to.startswith("q") else "m")
    quantize(to, output, folder)
    asked = prompts(4096)
    wanted = logits_of(worker_for(folder), asked)
    found = logits_of(worker_for(output), asked)
    errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(errors.median()) < 0.2  # of some tokens other experts are taken
    if to == "q8_0":
        quantize(to, tmp_path / "again.gguf", path)
        kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "again.gguf").tensors}
        assert {kind for name, kind in kinds.items() if name.endswith("_exps.weight")} <= {"Q8_0"}
        assert {kind for name, kind in kinds.items() if name.endswith("attn_v_gate.weight")} <= {"F32"}


def test_files_with_experts_of_values(case: tuple[dict[str, Any], Path, Path]) -> None:
    config, _, path = case
    count, keys, found = config["mova_num_experts"], fields(path), tensors(path)
    assert keys.get("k2-horizon.attention.value_expert_count", 0) == count
    if count:
        assert keys["k2-horizon.attention.value_expert_used_count"] == 3
        given = weights(config)
        stacked = torch.stack([given[f"model.layers.1.self_attn.v_experts.{e}.weight"] for e in range(count)])
        assert torch.equal(torch.from_numpy(found["blk.1.attn_v_exps.weight"].copy()), stacked)
        own = {"1.attn_v_gate.weight", "1.attn_v_gate.bias", "0.attn_v.weight", "0.attn_gate.weight"}
        assert {f"blk.{name}" for name in own} < found.keys()
