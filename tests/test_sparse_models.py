"""Models with sparse attention against transformers: DeepSeek-V3.2 and GLM-5, from folders and GGUF files; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV32Config, GlmMoeDsaConfig

from engines import engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli.bench.sweep import Trial
from nanovllm_cli.bench.work import ModelWork
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from test_convert_families import fields, make_gguf, tensors
from test_latent import EVEN, EXPERTS, STRETCHED, write
from test_models import INDEXER, prompts
from test_quant_engine import difference, expected_logits, logits_of

SPARSE = EVEN | EXPERTS | INDEXER
ONE_GROUP = {"n_group": 1, "topk_group": 1}
CONFIGS = {
    "v3.2": DeepseekV32Config(**SPARSE, n_group=4, topk_group=2),
    "v3.2, stretched": DeepseekV32Config(**SPARSE | {"index_topk": 1, "index_n_heads": 64}, **ONE_GROUP, **STRETCHED),
    "glm": GlmMoeDsaConfig(**SPARSE | {"index_topk": 30, "index_head_dim": 12}, **ONE_GROUP),
    "glm, some choose": GlmMoeDsaConfig(
        **SPARSE | {"num_hidden_layers": 4}, **ONE_GROUP, indexer_types=["full", "shared", "shared", "full"]
    ),
    "glm, all are seen": GlmMoeDsaConfig(**SPARSE | {"index_topk": 64}, **ONE_GROUP),
}  # fmt: skip


def tokens_of(engine: Engine, asked: list[list[int]], count: int) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in run(engine, [(ids, greedy(count)) for ids in asked])]


@pytest.mark.parametrize("case", CONFIGS)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model, tokens = random_model(CONFIGS[case]), prompts(EVEN["vocab_size"])[:6]
    folder = save(model, tmp_path / "m")
    assert difference(logits_of(worker_for(folder, dtype="float32"), tokens), expected_logits(model, tokens)) < 1e-5


@pytest.mark.parametrize("types", [["F32"], ["Q8_0", "F16", "Q5_1", "Q4_0"]], ids=["plain", "mixed"])
@pytest.mark.parametrize("case", CONFIGS)
def test_a_gguf_file_is_read(case: str, types: list[str], tmp_path: Path) -> None:
    config = CONFIGS[case]
    kinds = getattr(config, "indexer_types", ["full"])
    keys = {"attention.indexer.types": [kind == "full" for kind in kinds]} if "shared" in kinds else {}
    model = random_model(config)
    path = write(tmp_path / "m.gguf", model, types, **keys)
    tokens = prompts(EVEN["vocab_size"])[:5]
    assert difference(logits_of(worker_for(path, dtype="float32"), tokens), expected_logits(model, tokens)) < 1e-4


@pytest.mark.parametrize("case", CONFIGS)
def test_a_folder_becomes_the_file_that_llama_cpp_makes(case: str, tmp_path: Path) -> None:
    config = type(CONFIGS[case])(**CONFIGS[case].to_dict() | {"eos_token_id": 4089, "bos_token_id": 4087, "vocab_size": 4100})
    model = random_model(config)
    make_gguf(save(model, tmp_path / "folder"), tmp_path / "made.gguf")
    kinds = getattr(config, "indexer_types", ["full"])
    more = {"attention.indexer.types": [kind == "full" for kind in kinds]} if "shared" in kinds else {}
    expected = write(tmp_path / "expected.gguf", model, ["F32"], **more)
    wanted, found = tensors(expected), tensors(tmp_path / "made.gguf")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not np.array_equal(found[name].reshape(wanted[name].shape), wanted[name])] == []
    keys = fields(tmp_path / "made.gguf")
    for key, value in fields(expected).items():
        if not key.startswith(("GGUF.", "tokenizer.")):
            assert keys[key] == pytest.approx(value), key
    ids = prompts(4000)[:5]
    assert difference(logits_of(worker_for(tmp_path / "made.gguf", dtype="float32"), ids), expected_logits(model, ids)) < 1e-4


@pytest.mark.parametrize(("case", "together"), [("glm", False), ("v3.2", True)])
def test_rotary_pairs_of_what_chooses_lie_in_a_file_as_others_of_its_kind(case: str, together: bool, tmp_path: Path) -> None:
    """Of a GLM's side by side, of a DeepSeek's apart, whatever a folder says."""
    config = type(CONFIGS[case])(**CONFIGS[case].to_dict() | {"eos_token_id": 4089, "bos_token_id": 4087, "vocab_size": 4100})
    folder = save(random_model(config), tmp_path / "folder")
    said = json.loads((folder / "config.json").read_text()) | {"indexer_rope_interleave": together}
    (folder / "config.json").write_text(json.dumps(said))
    make_gguf(folder, tmp_path / "made.gguf")
    ids = prompts(4000)[:5]
    own, made = (logits_of(worker_for(path, dtype="float32"), ids) for path in (folder, tmp_path / "made.gguf"))
    assert difference(made, own) < 1e-4


@pytest.mark.parametrize("case", ["v3.2", "glm, some choose"])
def test_greedy_answers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Step by step, from recordings behind the first, several sequences at once and past the tokens that one sees."""
    model = random_model(CONFIGS[case])
    folder = save(model, tmp_path / "m")
    asked = [ids[:20] for ids in prompts(EVEN["vocab_size"])[1:5]]
    expected = []
    for ids in asked:
        made = model.generate(torch.tensor([ids]), max_new_tokens=25, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(made[0, len(ids):].tolist())  # fmt: skip
    assert tokens_of(engine_for(worker_for(folder, dtype="float32")), asked, 25) == expected


def test_bits_do_not_depend_on_others_chunks_or_tables(tmp_path: Path) -> None:
    folder = save(random_model(CONFIGS["glm, some choose"]), tmp_path / "m")
    asked = prompts(EVEN["vocab_size"])[1:6]
    kinds: tuple[dict[str, Any], ...] = {}, {"max_num_batched_tokens": 7}, {"kv_cache_dtype": "int8"}
    engines = [engine_for(worker_for(folder, **settings), **settings) for settings in kinds]
    whole, cut, coarse = (tokens_of(engine, asked, 20) for engine in engines)
    assert cut == whole == [tokens_of(engines[0], [ids], 20)[0] for ids in asked]
    assert [len(ids) for ids in coarse] == [20] * len(asked)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"indexer_types": ["full", "shared", "full"]}, [True, False, True]),
        ({"indexer_types": None, "index_topk_pattern": "FSS"}, [True, False, False]),
        ({"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 1}, [True, False, True]),
        ({"indexer_types": None, "index_topk_freq": 4}, [True, True, False]),
        ({"indexer_types": None}, [True, True, True]),
    ],
)
def test_which_layers_choose(changes: dict[str, Any], kinds: list[bool]) -> None:
    """As transformers' config has it."""
    said = GlmMoeDsaConfig(**SPARSE | {"num_hidden_layers": 3}, **ONE_GROUP, **changes)
    assert [kind == "full" for kind in said.indexer_types] == kinds
    config = said.to_dict() | {"architectures": ["GlmMoeDsaForCausalLM"]} | changes
    config = {name: value for name, value in config.items() if value is not None}
    spec = spec_from_hf(config, hf_family(config))
    indexers = [attention.latent.indexer for attention in spec.attentions if attention.latent is not None]
    assert [indexer is not None and indexer.chooses for indexer in indexers] == kinds


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"index_topk": 0}, CheckpointError, "'index_topk' must be a whole number of at least 1"),
        ({"index_topk": 1 << 30}, CheckpointError, "an indexer of 1073741824 tokens"),
        ({"index_n_heads": 1 << 20}, CheckpointError, "an indexer of 1048576 heads"),
        ({"index_head_dim": 21}, UnsupportedError, "heads of 21 dims"),
        ({"index_head_dim": 8}, UnsupportedError, "heads of 8 dims, of which 12 rotate"),
        ({"q_lora_rank": None}, UnsupportedError, "queries are made of the hidden state"),
        ({"indexer_types": ["shared", "full", "full"]}, CheckpointError, "the first layer goes by"),
        ({"indexer_types": ["full"]}, CheckpointError, "indexer_types"),
        ({"indexer_types": ["full", "half", "full"]}, UnsupportedError, "layer type 'half'"),
        ({"indexer_types": None, "index_topk_pattern": "FX"}, CheckpointError, "'index_topk_pattern' must be F or S"),
    ],
    ids=str,
)
def test_configs_that_can_not_be_followed(changes: dict[str, Any], kind: type[NanovllmError], said: str) -> None:
    config = GlmMoeDsaConfig(**SPARSE | {"num_hidden_layers": 3}, **ONE_GROUP).to_dict()
    config |= {"architectures": ["GlmMoeDsaForCausalLM"], **changes}
    config = {name: value for name, value in config.items() if value is not None or name == "q_lora_rank"}
    with pytest.raises(kind, match=said):
        spec_from_hf(config, hf_family(config))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"attention.indexer.top_k": None}, "has no 'glm-dsa.attention.indexer.top_k'"),
        ({"attention.indexer.types": [True]}, "must be true or false for each layer"),
        ({"attention.indexer.types": [0, 1, 1, 1]}, "the first layer goes by"),
        ({"attention.indexer.types": [1, 2, 1, 1]}, "must be true or false for each layer"),
        ({"attention.indexer.key_length": 14}, "indexer"),
    ],
    ids=str,
)
def test_gguf_keys_that_can_not_be_followed(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", random_model(CONFIGS["glm"]), ["F32"], **keys)
    with pytest.raises(CheckpointError, match=said):
        worker_for(path, dtype="float32")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", random_model(CONFIGS["glm"]), ["F32"], leave_out="blk.1.indexer.attn_k.weight")
    with pytest.raises(CheckpointError, match=r"blk\.1\.indexer\.attn_k"):
        worker_for(path, dtype="float32")


def test_the_work_of_a_token_goes_by_what_it_sees() -> None:
    """Of two drawn tokens behind 100: each sees 9, by three heads of 76 numbers in four layers, twice, and ranks all by 20 heads
    of 20 in the two that choose. One behind 5 sees six, and ranks none."""
    config = CONFIGS["glm, some choose"].to_dict() | {"architectures": ["GlmMoeDsaForCausalLM"]}
    work = ModelWork.of(spec_from_hf(config, hf_family(config)), 0.0, (torch.float32, torch.float32))
    matrices = work.linear_flops + work.head_flops
    looks, ranks = 2 * 2 * 4 * 3 * 76, 2 * 2 * 20 * 20
    assert work.of_token(Trial(0, 2, 100), 1).flops - matrices == looks * 9 + ranks * (101 + 102) / 2
    assert work.of_token(Trial(0, 1, 5), 1).flops - matrices == looks * 6
    assert work.of_token(Trial(0, 2, 100), 1).num_bytes == 4 * 76 * 4 * 9
