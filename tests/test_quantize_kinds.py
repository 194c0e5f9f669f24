"""GPTQ and AWQ in models whose layers are of other kinds: experts, state spaces, latent attention, and what layers of Gemma 4
have of each other and of each token."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import (
    AXK2Config,
    BailingHybridConfig,
    BitNetConfig,
    DeepseekV32Config,
    FalconH1Config,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from engines import random_model, save, worker_for
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quant.format import Integer
from nanovllm_cli.quant.sensitivity import Candidate
from nanovllm_cli.quantization.allocation import _together
from nanovllm_cli.quantization.original import open_original
from nanovllm_cli.quantization.pipeline import Method, plan_with_target
from nanovllm_cli.quantization.plan import Choices, make_plan
from nanovllm_cli.quantization.texts import bundled_text
from quantizing import TINY, digest_of, plan_of, quantize
from test_convert import SETTINGS as SETTINGS_OF_TINY
from test_convert_families import make_gguf, with_tokenizer
from test_experts import EXPERTS, SHAPE
from test_latent import CONFIGS
from test_llm import write_byte_tokenizer
from test_models import CASES as MODELS
from test_models import FALCON_H1, GRANITE, GRANITE_4_H, JAMBA, LING_3, NEMOTRON, NEMOTRON_EXPERTS
from test_quant_engine import difference, logits_of
from test_quantize_model import StopAt
from test_sparse_models import SPARSE

EVEN = SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
GEMMA = EVEN | {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 64,
    "sliding_window": 20, "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "hidden_size_per_layer_input": 0,
}
KINDS: dict[str, PreTrainedConfig] = {
    "experts": Qwen3MoeConfig(**SHAPE | EXPERTS, mlp_only_layers=[1]),
    "state spaces": GraniteMoeHybridConfig(
        **GRANITE_4_H | EVEN | {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_state": 32,
                                "shared_intermediate_size": 192, "vocab_size": 4096}, **GRANITE,
    ),
    "keys of other layers, numbers a layer": Gemma4TextConfig(**GEMMA | {
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": EVEN["vocab_size"], "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    }),
    "keys are values": Gemma4TextConfig(**GEMMA, attention_k_eq_v=True, num_global_key_value_heads=1),
    "sublayers": NemotronHConfig(
        **NEMOTRON | NEMOTRON_EXPERTS | {name: value for name, value in EVEN.items() if name != "num_hidden_layers"} | {
            "hybrid_override_pattern": "M-*EM-", "mamba_head_dim": 32, "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64, "moe_latent_size": 32,
        },
    ),
    "selective scans": JambaConfig(
        **{name: value for name, value in (JAMBA | EVEN).items() if name != "head_dim"}, num_experts=1, mamba_d_conv=3,
    ),
    "side by side": FalconH1Config(**FALCON_H1 | EVEN | {"num_hidden_layers": 2, "mamba_d_ssm": 96, "mamba_d_head": 16}),
    "norms inside": BitNetConfig(**EVEN | {"num_hidden_layers": 2, "head_dim": EVEN["hidden_size"] // 4}),
    "latent": CONFIGS["youtu"],
    "latent, queries at once": CONFIGS["youtu, queries at once"],
    "latent, softmaxed experts": CONFIGS["v2, weights scaled"],
    "latent, experts": CONFIGS["v3, groups"],
    "latent, some of what is before": DeepseekV32Config(
        **SPARSE | {"first_k_dense_replace": 9, "index_topk": 24}, n_group=1, topk_group=1
    ),
    "latent, gates beside queries and behind norms": AXK2Config(
        **SPARSE | {"first_k_dense_replace": 9, "index_topk": 24}, gated_norm_rank=6
    ),
}  # fmt: skip
KINDS["decays with a floor, latent with gates of heads"] = BailingHybridConfig(**LING_3 | EVEN | {
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 32,
    "num_key_value_heads": 4, "moe_intermediate_size": 64, "first_k_dense_replace": 9,
})  # fmt: skip
FORM = "int4-weight-only:group=32"


def source_of(kind: str, tmp_path: Path) -> Path:
    folder = save(random_model(KINDS[kind]), tmp_path / "source")
    if kind == "state spaces":
        for name in SETTINGS_OF_TINY:
            shutil.copy(TINY / name, folder / name)
    else:
        write_byte_tokenizer(folder)
    return folder


def lost(folder: Path, source: Path) -> float:
    """Relative error of the logits of some of the text that it was calibrated with."""
    with open_original("m", source) as original:
        texts = list(Method("rtn", bundled_text("calibration"), 4).sequences(original))
    tokens = [list(ids)[:60] for ids in texts]
    return difference(*(logits_of(worker_for(each, dtype="float32"), tokens) for each in (folder, source)))


CASES = [(kind, "gptq") for kind in KINDS if kind != "state spaces"] + [
    ("latent", "awq"), ("latent, queries at once", "awq"), ("state spaces", "awq"), ("keys are values", "awq"),
    ("keys of other layers, numbers a layer", "awq"), ("side by side", "awq"), ("norms inside", "awq"),
    ("selective scans", "awq"), ("latent, some of what is before", "awq"),
    ("latent, gates beside queries and behind norms", "awq"), ("decays with a floor, latent with gates of heads", "awq"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "algorithm"), CASES)
def test_calibrated_weights_lose_less(kind: str, algorithm: str, tmp_path: Path) -> None:
    """State spaces in block types: their folders have several matrices in one tensor."""
    source, form, name = source_of(kind, tmp_path), *(("q4_0", "m.gguf") if kind == "state spaces" else (FORM, "m"))
    losses = []
    for each in ("rtn", algorithm):
        (tmp_path / each).mkdir()
        quantize(form, tmp_path / each / name, source, algorithm=each, num_samples=4)
        losses.append(lost(tmp_path / each / name, source))
    assert losses[1] < (0.7 if algorithm == "gptq" else 0.98) * losses[0]  # no columns of a random model are loud


def test_a_run_that_is_resumed_among_experts_gives_the_same_bytes(tmp_path: Path) -> None:
    source = source_of("experts", tmp_path)
    quantize(FORM, tmp_path / "whole", source, algorithm="gptq", num_samples=1)
    first = list(plan_of(FORM, source).units().values())[:3]
    stop = StopAt("quantizing", sum(item.weight.stored_bytes for unit in first for item in unit) - 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        quantize(FORM, tmp_path / "resumed", source, algorithm="gptq", num_samples=1, progress=stop)
    done = {path.stem for path in (tmp_path / ".resumed.quantizing").glob("*.safetensors")}
    assert done == {"blocks.0", "blocks.0.experts.0", "blocks.0.experts.1"}
    quantize(FORM, tmp_path / "resumed", source, algorithm="gptq", num_samples=1)
    assert digest_of(tmp_path / "resumed") == digest_of(tmp_path / "whole")


def test_what_is_not_calibrated_is_refused(tmp_path: Path) -> None:
    source = source_of("experts", tmp_path)
    with pytest.raises(UnsupportedError, match="awq of a model with experts"):
        quantize(FORM, tmp_path / "out", source, algorithm="awq", num_samples=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["experts", "latent, experts"])
def test_target_bpw_is_kept_and_a_layers_experts_share_a_format(kind: str, tmp_path: Path) -> None:
    with open_original("m", source_of(kind, tmp_path)) as original:
        plan = make_plan(original, Choices("int4:group=32"))
        chosen = plan_with_target(original, plan, 14.0, Method("rtn", bundled_text("calibration"), 2), NullProgress())
        assert 13.5 < chosen.bits_a_weight <= 14.0
        formats = {item.weight.ours: item.format for item in chosen.items if ".experts." in item.weight.ours}
        by_layer: dict[tuple[str, bool], set[str]] = {}
        for ours, form in formats.items():
            assert form is not None
            by_layer.setdefault((ours.split(".")[1], ours.endswith("down.weight")), set()).add(form.name)
        assert by_layer
        assert all(len(names) == 1 for names in by_layer.values())
        assert len(set(formats.values())) > 1


def test_experts_that_nobody_takes_do_not_count() -> None:
    forms = Integer(4, 32), Integer(8)
    made = [(count, [Candidate(form, bits, error) for form, bits, error in zip(forms, (4.0, 8.0), errors, strict=True)])
            for count, errors in ((3, (0.4, 0.1)), (1, (0.8, 0.3)), (0, (9.0, 9.0)))]  # fmt: skip
    assert _together(made) == [Candidate(forms[0], 12.0, 0.5), Candidate(forms[1], 24.0, pytest.approx(0.15))]


def test_where_no_type_has_rows_of_a_models_widths_that_is_told(tmp_path: Path) -> None:
    folder = save(random_model(with_tokenizer(MODELS["qwen3"])), tmp_path / "model")
    make_gguf(folder, tmp_path / "model.gguf")
    with pytest.raises(UsageError, match=r"^nothing would be quantized: token_embd.weight .*: no type has rows of 48"):
        plan_of("q8_0", tmp_path / "model.gguf")
