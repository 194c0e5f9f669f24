"""Muse Glimmer's text: logits and greedy tokens against transformers, GGUF files, and what is refused of either."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, MuseGlimmerConfig

from calibrating import check_walk
from engines import SMALL, engine_for, greedy, num_parameters, random_model, run, save, worker_for
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.families import spec_from_gguf, spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.registry_gguf import gguf_family
from nanovllm_cli.planning.facts import facts_of
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.weight_reader import PlainReader
from quantizing import quantize
from test_convert_families import fields, make_gguf, tensors, with_tokenizer
from test_models import check_what_it_writes, chosen, prompts
from test_quant_engine import difference, logits_of

VISION = {
    "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2, "patch_size": 2,
    "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip
LARGE = {"rms_norm_eps": 0.03, "post_norm_eps": 0.2}
"""Of norms, or none of them would matter."""


def config(**text: Any) -> Any:
    text = SMALL | {"num_hidden_layers": 5, "sliding_window": 20} | text
    return MuseGlimmerConfig(
        text_config=text, vision_config=VISION, out_hidden_size=64, projector_hidden_size=16, image_token_id=512,
        video_token_id=511, tie_word_embeddings=text["tie_word_embeddings"],
    )  # fmt: skip


def made(path: Path, **text: Any) -> tuple[Any, Path]:
    model = random_model(config(**text), auto=AutoModelForImageTextToText)
    return model, save(model, path)


BLOCKS = {"rms_norm_eps": 0.03, "hidden_size": 96, "intermediate_size": 64}
"""Widths that blocks of 32 divide."""
CASES: dict[str, dict[str, Any]] = {
    "as published": {},
    "numbers that matter": LARGE | {"output_multiplier": 0.9, "final_logit_softcapping": 3.0, "qk_scale_factor": 1.7},
    "tied, layers of its own": LARGE | {
        "tie_word_embeddings": True, "num_hidden_layers": 3, "layer_rope_theta": [0, 500.0, 0], "hidden_activation": "gelu",
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_part_that_writes_is_equal_to_transformers(case: str, tmp_path: Path) -> None:
    model, folder = made(tmp_path, **CASES[case])
    check_what_it_writes(model, folder)
    worker, tokens = worker_for(folder), prompts(500)[1::3]
    outputs = run(engine_for(worker, max_num_batched_tokens=24), [(ids, greedy(12)) for ids in tokens])
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    assert answers == [chosen(model, ids, answer) for ids, answer in zip(tokens, answers, strict=True)]
    with open_checkpoint(folder) as checkpoint:
        assert facts_of(checkpoint).num_parameters == num_parameters(worker.spec)


def spec_of(**text: Any) -> ModelSpec:
    said = config().to_dict() | {"architectures": ["MuseGlimmerForConditionalGeneration"]}
    return spec_from_hf(said | {"text_config": said["text_config"] | text}, hf_family(said))


@pytest.mark.parametrize("layers", [1, 5, 8])
def test_what_a_config_leaves_out_is_what_transformers_has(layers: int) -> None:
    text = config(num_hidden_layers=layers).text_config.to_dict()
    before = spec_of(**text)
    windows = [kind == "sliding_attention" for kind in text["layer_types"]]
    assert [attention.window is not None for attention in before.attentions] == windows
    assert [attention.rope is not None for attention in before.attentions] == windows
    whole = {"architectures": ["MuseGlimmerForConditionalGeneration"], "text_config": text}
    for key in ("layer_types", "layer_rope_theta", "hidden_activation", "attention_bias"):
        rest = {name: value for name, value in text.items() if name != key}
        assert spec_from_hf(whole | {"text_config": rest}, hf_family(whole)) == before, key
    none, usual = ({"text_config": text} for text in ({}, MuseGlimmerConfig().text_config.to_dict()))
    assert spec_from_hf(whole | none, hf_family(whole)) == spec_from_hf(whole | usual, hf_family(whole))


REFUSED: dict[str, tuple[dict[str, Any], type[NanovllmError], str]] = {
    "no window": ({"sliding_window": None}, UnsupportedError, "a Muse Glimmer without a window"),
    "biases": ({"attention_bias": True}, UnsupportedError, "gated attention with biases"),
    "another base": ({"layer_rope_theta": [1e4, 0, 500.0, 0, 1e4]}, UnsupportedError, "a rotary base of 500 in some layers"),
    "bases of fewer layers": ({"layer_rope_theta": [0] * 4}, CheckpointError, "must be a list of 5 numbers"),
    "bases that are none": ({"layer_rope_theta": [0, 0, True, 0, 0]}, CheckpointError, "must be a list of 5 numbers"),
    "a base for all": ({"layer_rope_theta": 1e4}, CheckpointError, "must be a list of 5 numbers"),
    "no cap": ({"final_logit_softcapping": None}, CheckpointError, "has no 'final_logit_softcapping'"),
    "a factor of 0": ({"qk_scale_factor": 0}, CheckpointError, "'qk_scale_factor' must be a number of at least"),
    "another activation": ({"hidden_activation": "relu"}, UnsupportedError, "activation 'relu' is not supported"),
    "other layers": ({"layer_types": ["x"] * 5}, UnsupportedError, "layer type 'x' is not supported"),
    "too many layers": ({"num_hidden_layers": 1 << 30, "layer_types": None}, CheckpointError, "at most 1024 are believed"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_configs_of_others_are_refused(what: str) -> None:
    values, kind, message = REFUSED[what]
    with pytest.raises(kind, match=message):
        spec_of(**values)


# ---- GGUF ----


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder and the file that is made of it."""
    where = tmp_path_factory.mktemp("muse")
    model = random_model(with_tokenizer(config(**BLOCKS)), auto=AutoModelForImageTextToText)
    folder, path = save(model, where / "folder"), where / "m.gguf"
    notes = make_gguf(folder, path)
    assert [note for note in notes if "tensors of what sees or hears" in note] == notes
    return folder, path


def test_a_file_says_what_the_folder_does(both: tuple[Path, Path]) -> None:
    """As llama.cpp's converter has it: 1 more in the gains of layers' norms, the factor as gains of queries' norms."""
    folder, path = both
    specs = []
    for each in both:
        with open_checkpoint(each) as checkpoint:
            specs.append(read_spec(checkpoint, PlainReader(checkpoint)))
    assert specs[1].attention.scale == pytest.approx(specs[0].attention.scale)
    keys, found = fields(path), tensors(path)
    assert keys["general.architecture"] == "muse-glimmer"
    assert keys["muse-glimmer.logit_scale"] == pytest.approx(0.196116135)
    assert keys["muse-glimmer.final_logit_softcapping"] == 20.0
    assert keys["muse-glimmer.attention.sliding_window"] == 20
    assert keys["muse-glimmer.attention.sliding_window_pattern"] == [False, True, True, True, False]
    assert np.array_equal(found["blk.3.attn_q_norm.weight"], np.full(24, 3.87, np.float32))
    assert np.array_equal(found["blk.3.attn_k_norm.weight"], np.ones(24, np.float32))
    with open_checkpoint(folder) as checkpoint:
        names = {"norm": "norm", "layers.1.post_attention_layernorm": "after", "layers.1.self_attn.gate_proj": "gate",
                 "layers.1.self_attn.q_proj": "q"}  # fmt: skip
        own = {ours: checkpoint.tensor(f"model.language_model.{name}.weight").numpy() for name, ours in names.items()}
    assert np.array_equal(found["output_norm.weight"], own["norm"])
    assert np.allclose(found["blk.1.post_attention_norm.weight"], own["after"] + 1)
    assert np.array_equal(found["blk.1.attn_gate.weight"], own["gate"])
    pairs = own["q"].reshape(6, 2, 12, 96).transpose(0, 2, 1, 3)
    assert np.array_equal(found["blk.1.attn_q.weight"].reshape(pairs.shape), pairs)


def test_a_file_gives_the_logits_of_the_folder(both: tuple[Path, Path]) -> None:
    assert difference(*(logits_of(worker_for(each), prompts(512)) for each in both)) < 1e-5


def test_llama_cpp_gives_the_logits_of_the_file(both: tuple[Path, Path]) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    ids = prompts(512)[-1]
    theirs = llama_cpp.Llama(str(both[1]), n_ctx=128, n_threads=2, logits_all=True, verbose=False, type_k=0, type_v=0)
    theirs.eval(ids)
    expected = torch.from_numpy(np.array(theirs.scores[: len(ids)]))
    assert math.isfinite(float(expected.sum()))
    assert difference(logits_of(worker_for(both[1], dtype="float32"), [ids]), expected) < 1e-4


UNSAYABLE: dict[str, tuple[dict[str, Any], str]] = {
    "a tied head": ({"tie_word_embeddings": True}, "that it has no head of its own"),
    "no layer with a window": (
        {"layer_types": ["full_attention"] * 5, "layer_rope_theta": [0, 1e4] * 2 + [0]}, "that it has no layers with windows",
    ),
    "positions elsewhere": ({"layer_rope_theta": [1e4] * 5}, "positions in other layers than those with a window"),
    "another number behind layers": ({"post_norm_eps": 1e-5}, "a muse_glimmer model: after_eps"),
    "another activation": ({"hidden_activation": "gelu"}, "the activation gelu has no place in GGUF"),
}


@pytest.mark.parametrize("what", UNSAYABLE)
def test_what_a_file_can_not_say_is_refused(what: str, tmp_path: Path) -> None:
    values, message = UNSAYABLE[what]
    model = random_model(with_tokenizer(config(**values)), auto=AutoModelForImageTextToText)
    with pytest.raises(UnsupportedError, match=message):
        make_gguf(save(model, tmp_path / "folder"), tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def gains(name: str) -> tuple[float, ...] | None:
    return {"q": (3.0,) * 24, "k": (1.0,) * 24}.get(name.removesuffix("_norm.weight")[-1]) if ".attn_" in name else None


Change = Callable[[tuple[float, ...]], tuple[float, ...] | None]
GAINS: dict[str, tuple[str, Change, str]] = {
    "none of queries": ("q", lambda own: None, "whose keys have gains, or queries none"),
    "fewer of keys": ("k", lambda own: own[1:], "whose keys have gains, or queries none"),
    "keys'": ("k", lambda own: (2.0, *own[1:]), "whose keys have gains, or queries none"),
    "queries' of several": ("q", lambda own: (2.0, *own[1:]), "whose queries have several factors"),
    "queries' that are no numbers": ("q", lambda own: (float("nan"),) * len(own), "whose queries have several factors"),
    "queries' below 0": ("q", lambda own: (-1.0,) * len(own), "whose queries have several factors"),
}


@pytest.mark.parametrize("what", GAINS)
def test_other_gains_of_heads_are_refused(what: str, both: tuple[Path, Path]) -> None:
    part, change, message = GAINS[what]
    with open_checkpoint(both[1]) as checkpoint:
        metadata, names = dict(checkpoint.config), set(checkpoint.names())

    def values(name: str) -> tuple[float, ...] | None:
        own = gains(name)
        return change(own) if own and f"attn_{part}_norm" in name else own

    with pytest.raises(UnsupportedError, match=message):
        spec_from_gguf(metadata, gguf_family(metadata), 4096, names, values)


def test_files_may_have_a_base_for_windows_and_no_cap(both: tuple[Path, Path]) -> None:
    with open_checkpoint(both[1]) as checkpoint:
        metadata, names = dict(checkpoint.config), set(checkpoint.names())
    said = metadata | {"muse-glimmer.rope.freq_base_swa": 500.0, "muse-glimmer.final_logit_softcapping": 0.0}
    spec = spec_from_gguf(said, gguf_family(said), 4096, names, gains)
    assert ({rope.theta for rope in spec.ropes}, spec.logit_softcap) == ({500.0}, None)
    assert spec.attention.score_scale == pytest.approx(3 * 24**-0.5)


def test_quantizing_keeps_the_gains(both: tuple[Path, Path], tmp_path: Path) -> None:
    """They are no matrices, and are written beside those of the model."""
    quantize("q8_0", tmp_path / "m.gguf", both[0])
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert {kinds[f"blk.{i}.attn_{part}_norm.weight"] for i in range(5) for part in "qk"} == {"F32"}
    tokens = prompts(512)
    assert difference(logits_of(worker_for(tmp_path / "m.gguf"), tokens), logits_of(worker_for(both[0]), tokens)) < 0.3


def test_a_calibration_sees_what_the_model_computes(both: tuple[Path, Path]) -> None:
    """What is embedded is normed."""
    check_walk(both[0], 500)
