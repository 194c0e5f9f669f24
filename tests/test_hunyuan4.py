"""Hy4: residual streams that all layers read and write, sparse latent attention with sinks and gates, names; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf.quants import quantize as quantize_blocks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, HYV4Config, HYV4VLConfig

from engines import engine_for, random_model, save, worker_for
from gguf_anew import written_anew
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from quantizing import quantize
from test_convert_families import fields, make_gguf, same, tensors
from test_latent import EVEN
from test_llm import write_byte_tokenizer
from test_models import CASES, INDEXER, LATENT_EXPERTS, check_what_it_writes, prompts
from test_quant_engine import difference, expected_logits, logits_of
from test_sparse_models import tokens_of

_EXPERTS = {name: value for name, value in LATENT_EXPERTS.items() if name != "first_k_dense_replace"}
CONFIG = HYV4Config(**EVEN | _EXPERTS | INDEXER | {"num_hidden_layers": 4}, indexer_types=["full", "shared", "full", "full"])
NAME = "hy 4, a layer goes by another"
Q8_0 = GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(CONFIG)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))


def test_greedy_answers_are_those_of_transformers(model: Any, folder: Path) -> None:
    """Step by step, from recordings behind the first, several sequences at once and past the tokens that one sees."""
    asked = [ids[:20] for ids in prompts(EVEN["vocab_size"])[1:5]]
    expected = []
    for ids in asked:
        made = model.generate(torch.tensor([ids]), max_new_tokens=25, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(made[0, len(ids):].tolist())  # fmt: skip
    assert tokens_of(engine_for(worker_for(folder, dtype="float32")), asked, 25) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_others_chunks_or_guesses(dtype: str, folder: Path) -> None:
    asked = prompts(EVEN["vocab_size"])[1:6]
    kinds: tuple[dict[str, Any], ...] = {}, {"max_num_batched_tokens": 7}, {"num_speculative_tokens": 3}
    engines = [engine_for(worker_for(folder, dtype=dtype, **settings), **settings) for settings in kinds]
    whole, *others = (tokens_of(engine, asked, 20) for engine in engines)
    assert whole == [tokens_of(engines[0], [ids], 20)[0] for ids in asked]
    assert others == [whole, whole]


ALL_TAKEN = EVEN | _EXPERTS | INDEXER | {"index_topk": 600, "num_experts_per_tok": 5, "moe_intermediate_size": 64}


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """One that chooses nothing, so that no rounding decides much."""
    model = random_model(HYV4Config(**ALL_TAKEN))
    folder = save(model, tmp_path_factory.mktemp("smooth"))
    write_byte_tokenizer(folder)
    return model, folder


@pytest.mark.parametrize(("quant", "most"), [("int8", 0.06), ("fp8", 0.4)])
def test_rounded_weights(quant: str, most: float, smooth: tuple[Any, Path]) -> None:
    """What decides how streams are mixed stays as it is."""
    model, folder = smooth
    tokens = prompts(EVEN["vocab_size"])[:4]
    worker = worker_for(folder, quant=quant, dtype="float32")
    assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < most
    matrices = [connection.matrix for block in worker.model.blocks for connection in block.connections]
    assert torch.equal(matrices[0], model.model.layers[0].attn_hc.fn.detach())


def test_a_quantized_folder_is_read(tmp_path: Path) -> None:
    """Of layers without experts, which no folder is written of that has them in one tensor."""
    model = random_model(HYV4Config(**ALL_TAKEN, mlp_layer_types=["dense"] * 3))
    write_byte_tokenizer(folder := save(model, tmp_path / "m"))
    quantize("int8", tmp_path / "q", folder)
    tokens = prompts(EVEN["vocab_size"])[:4]
    found = logits_of(worker_for(tmp_path / "q", dtype="float32"), tokens)
    assert difference(found, expected_logits(model, tokens)) < 0.06
    with pytest.raises(UnsupportedError, match="is not calibrated yet: it has several streams"):
        quantize("int4-weight-only:group=32", tmp_path / "g", folder, algorithm="gptq", num_samples=1)


PUBLISHED = {  # transformers' name of a part -> Tencent's, where it stands in front of or behind that of its table
    "own": {".hc_pre.hc_attn_layer.": ".attn_hc.", ".hc_pre.hc_mlp_layer.": ".ffn_hc.", "hc_pre.hc_head.hc_head_": "hc_head.hc_",
            "learnable_sink_param": "sinks", "linear_gate": "gate_proj"},
    "behind": {".hc_pre.hc_attn_layer.": ".hc_attn_layer.hc_pre.", ".hc_pre.hc_mlp_layer.": ".hc_mlp_layer.hc_pre.",
               "hc_pre.hc_head.": "hc_head.", "mlp.linear_gate": "mlp.gate_proj", "experts.linear_gate": "experts.gate_proj"},
}  # fmt: skip


@pytest.mark.parametrize("names", PUBLISHED)
def test_tensors_by_their_other_names_and_layers_that_guess(names: str, model: Any, folder: Path, tmp_path: Path) -> None:
    """As transformers has them, and as they are published; layers that guess are left aside."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for saved, other in PUBLISHED[names].items():
            name = name.replace(saved, other)
        found[name.replace(".attn_hc.hc_", ".attn_hc.").replace(".ffn_hc.hc_", ".ffn_hc.")] = tensor
    assert any(("attn_hc" if names == "own" else "hc_attn_layer.hc_pre") in name for name in found)
    found |= {"model.mtp_layers.0.eh_proj.weight": torch.zeros(3, 3), "model.mtp_layers.0.enorm.weight": torch.zeros(3)}
    save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tokens = prompts(EVEN["vocab_size"])[:3]
    assert difference(logits_of(worker_for(tmp_path, dtype="float32"), tokens), expected_logits(model, tokens)) < 1e-5


def test_what_is_published_says_little() -> None:
    """Which layers choose, which have experts, and what streams are mixed with, as transformers takes them."""
    little = {"architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4",
              "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}  # fmt: skip
    spec, whole = (spec_from_hf(config, hf_family(config)) for config in (little, HYV4Config(**little).to_dict() | little))
    assert spec == whole
    indexers = [attention.indexer for attention in spec.attentions]
    assert [i for i, indexer in enumerate(indexers) if indexer is not None and indexer.chooses] == [0, *range(1, 34, 4)]


@pytest.mark.parametrize("place", ["model.", "model.language_model."])
def test_of_one_that_sees_the_part_that_writes(place: str, tmp_path: Path) -> None:
    """As it is published, with what sees beside it, and as transformers has it."""
    said = ("model_type", "architectures", "dtype", "transformers_version")
    text = {key: value for key, value in CASES[NAME].to_dict().items() if key not in said}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    sees = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "out_hidden_size": 48,
            "max_image_size": 64}  # fmt: skip
    config = HYV4VLConfig(text_config=text, vision_config=sees, image_token_id=512, video_token_id=511)
    model = random_model(config, auto=AutoModelForImageTextToText)
    tensors = load_file(save(model, tmp_path) / "model.safetensors")
    assert any(name.startswith("vit.") for name in tensors)
    if place != "model.":
        tensors = {name.replace("vit.", "model.vision_tower.").replace("model.layers.", f"{place}layers.")
                   .replace("model.norm.", f"{place}norm.").replace("model.embed", f"{place}embed")
                   .replace("model.hc_head.", f"{place}hc_head."): tensor for name, tensor in tensors.items()}  # fmt: skip
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_what_it_writes(model, tmp_path)


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"hc_mult": 1}, UnsupportedError, "1 residual streams"),
        ({"hc_mult": 99}, UnsupportedError, "99 residual streams"),
        ({"layer_types": ["indexed_attention", "full_attention", "indexed_attention"]}, UnsupportedError, "'full_attention'"),
        ({"indexer_types": ["shared", "full", "full"]}, CheckpointError, "the first layer goes by"),
        ({"mlp_layer_types": ["dense", "sparse", "none"]}, CheckpointError, "'mlp_layer_types'"),
        ({"attention_bias": True}, UnsupportedError, "latent attention with biases"),
        ({"hidden_act": "relu"}, UnsupportedError, "activation 'relu'"),
        ({"swiglu_limit": "high"}, CheckpointError, "'swiglu_limit'"),
        ({"q_lora_rank": None}, UnsupportedError, "queries are made of the hidden state"),
    ],
    ids=str,
)
def test_configs_that_can_not_be_followed(changes: dict[str, Any], kind: type[NanovllmError], said: str) -> None:
    config = CASES[NAME].to_dict() | {"architectures": ["HYV4ForCausalLM"]} | changes
    with pytest.raises(kind, match=said):
        spec_from_hf(config, hf_family(config))


def test_a_file_of_the_part_that_writes(tmp_path: Path) -> None:
    """Rotary pairs lie side by side on both sides; how it sees is left out, and said."""
    said = ("model_type", "architectures", "dtype", "transformers_version")
    text = {key: value for key, value in CASES[NAME].to_dict().items() if key not in said} | {"vocab_size": 4096}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    sees = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "out_hidden_size": 48,
            "max_image_size": 64}  # fmt: skip
    config = HYV4VLConfig(text_config=text, vision_config=sees, image_token_id=4090, video_token_id=4091)
    folder = save(random_model(config, auto=AutoModelForImageTextToText), tmp_path / "folder")
    notes = make_gguf(folder, tmp_path / "made.gguf")
    assert any("vit." in note or "sees" in note for note in notes), notes
    assert fields(tmp_path / "made.gguf")["general.architecture"] == "hy_v4"
    same(folder, tmp_path / "made.gguf")


def test_what_weighs_streams_may_be_rounded_in_a_file(tmp_path: Path) -> None:
    """Like any matrix: as the same numbers in float32."""
    text = {key: value for key, value in CASES[NAME].to_dict().items() if key != "vocab_size"}
    folder = save(random_model(HYV4Config(**text, vocab_size=4096)), tmp_path / "folder")
    make_gguf(folder, tmp_path / "made.gguf")
    names = ("blk.0.hc_attn_fn.weight", "blk.1.hc_ffn_fn.weight", "output_hc_fn.weight")
    numbers = tensors(tmp_path / "made.gguf")
    plain = {name: dequantize(quantize_blocks(numbers[name], Q8_0), Q8_0) for name in names}
    files = [
        written_anew(tmp_path / "made.gguf", tmp_path / "plain.gguf", tensors=plain),
        written_anew(tmp_path / "made.gguf", tmp_path / "rounded.gguf", rounded=dict.fromkeys(names, Q8_0)),
    ]
    logits = [logits_of(worker_for(each, dtype="float32"), prompts(512)[:5]) for each in files]
    assert torch.equal(*logits)
