"""GGUF files of architectures that llama.cpp has learnt lately and the gguf package does not know: against transformers in fp32,
names, keys and numbers written down here as llama.cpp's converter makes them.

What our own files of them give was held against llama.cpp's logits once, of llama-cpp-python 0.3.36: they differ by less than
1e-5 of their norm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import HrmTextConfig

from engines import random_model, save, worker_for
from gguf_anew import add, written_anew
from nanovllm_cli.errors import CheckpointError, NanovllmError
from test_convert_families import fields, make_gguf, same, tensors, with_tokenizer
from test_models import CASES as TEXTS
from test_models import HRM, prompts
from test_quant_engine import difference, expected_logits, logits_of

Arrays = dict[str, np.ndarray]


def write(path: Path, arch: str, keys: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Path:
    """keys: without the architecture."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        add(writer, f"{arch}.{key}", value)
    for name, numbers in arrays.items():
        writer.add_tensor(name, np.ascontiguousarray(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def numbers_of(model: Any) -> Arrays:
    """Of a model of transformers, by its own names."""
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def check_written(model: Any, expected: Path, folder: Path) -> list[str]:
    """That what we make of its folder has the same tensors, and all these keys; what got lost."""
    notes = make_gguf(save(model, folder / "folder"), folder / "made.gguf")
    found, wanted = tensors(folder / "made.gguf"), tensors(expected)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name].size != wanted[name].size] == []
    assert [name for name in wanted if not np.allclose(found[name].reshape(-1), wanted[name].reshape(-1), rtol=1e-6)] == []
    keys = fields(folder / "made.gguf")
    for key, value in fields(expected).items():
        if not key.startswith("GGUF."):
            assert keys[key] == pytest.approx(value), key
    same(folder / "folder", folder / "made.gguf")
    return notes


HRM_PARTS = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v", "gate")}, "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}  # fmt: skip
HRM_CASES = ("hrm, twice three and one", "hrm, three times one and one, tied")


def hrm_file(path: Path, model: Any, **changes: Any) -> Path:
    config = model.config
    arrays: Arrays = {}
    for name, numbers in numbers_of(model).items():
        if (place := re.fullmatch(r"model\.([LH])_module\.layers\.(\d+)\.(.+)\.weight", name)) is not None:
            layer = int(place[2]) + config.num_layers_per_stack * (place[1] == "H")
            arrays[f"blk.{layer}.{HRM_PARTS[place[3]]}.weight"] = numbers
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            rest = {"model.z_L_init": "hrm.z_l_init", "model.embed_tokens.weight": "token_embd.weight",
                    "lm_head.weight": "output.weight"}  # fmt: skip
            arrays[rest[name]] = numbers
    keys = {
        "block_count": config.num_layers_per_stack * config.H_cycles * (config.L_cycles + 1),
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": config.head_dim, "embedding_scale": float(config.embedding_scale),
        "hrm.layers_per_stack": config.num_layers_per_stack, "hrm.h_cycles": config.H_cycles, "hrm.l_cycles": config.L_cycles,
    }  # fmt: skip
    if config.rope_parameters["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rope_parameters["factor"])}
    return write(path, "hrm_text", keys | changes, arrays)


@pytest.mark.parametrize("case", HRM_CASES)
def test_an_hrm_is_equal_to_transformers(case: str, tmp_path: Path) -> None:
    """Also where the file says that tokens of prompts see each other, which llama.cpp reads from left to right as well."""
    model, tokens = random_model(TEXTS[case]), prompts(513)
    expected = expected_logits(model, tokens)
    plain = logits_of(worker_for(hrm_file(tmp_path / "m.gguf", model)), tokens)
    assert difference(plain, expected) < 1e-4
    prefixed = hrm_file(tmp_path / "prefixed.gguf", model, **{"hrm.prefix_lm": True})
    assert plain.equal(logits_of(worker_for(prefixed), tokens))


@pytest.mark.parametrize("case", HRM_CASES)
def test_a_folder_of_an_hrm_becomes_that_file(case: str, tmp_path: Path) -> None:
    model = random_model(with_tokenizer(TEXTS[case]))
    notes = check_written(model, hrm_file(tmp_path / "expected.gguf", model), tmp_path)
    assert notes == ["config.json: prefix_lm"]


def test_another_scale_and_more_passes_of_an_hrms_file_count(tmp_path: Path) -> None:
    """Its weights are in it once, however often they are gone through."""
    model, tokens = random_model(HrmTextConfig(**HRM)), prompts(513)[2:4]
    other = random_model(HrmTextConfig(**HRM | {"H_cycles": 3, "L_cycles": 1, "embedding_scale": 7.5}))
    keys = {"block_count": 12, "hrm.h_cycles": 3, "hrm.l_cycles": 1, "embedding_scale": 7.5}
    found = logits_of(worker_for(hrm_file(tmp_path / "m.gguf", model, **keys)), tokens)
    assert difference(found, expected_logits(other, tokens)) < 1e-4
    none = {key: 0.0 if key == "embedding_scale" else value for key, value in keys.items()}
    assert worker_for(hrm_file(tmp_path / "none.gguf", model, **none)).spec.embedding_scale == 1.0


@pytest.mark.parametrize(("keys", "message"), [
    ({"block_count": 4}, "asks for 4 layers, which are not 2 times 3 and one passes through 2"),
    ({"hrm.layers_per_stack": 1, "block_count": 8}, "16 not part of the model"),
    ({"hrm.h_cycles": 129, "block_count": 2 * 129 * 4}, "at most 1024 layers are believed"),
    ({"hrm.l_cycles": 0, "block_count": 4}, "hrm.l_cycles"),
    ({"hrm.h_cycles": "2"}, "hrm.h_cycles"),
])  # fmt: skip
def test_files_of_an_hrm_that_can_not_be_followed(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = hrm_file(tmp_path / "m.gguf", random_model(HrmTextConfig(**HRM)), **keys)
    with pytest.raises(CheckpointError, match=message):
        worker_for(path)


def test_a_file_of_an_hrm_without_its_numbers(tmp_path: Path) -> None:
    path = hrm_file(tmp_path / "m.gguf", random_model(HrmTextConfig(**HRM)))
    with pytest.raises(NanovllmError, match="layers_per_stack"):
        worker_for(written_anew(path, tmp_path / "less.gguf", {"hrm_text.hrm.layers_per_stack": None}))
