"""Nanbeige 4.2, a Llama whose layers are gone through several times: folders and GGUF files against transformers' Llama, whose
stack is called as often; answers in steps, in batches and on an emulated GPU.

What our files of it give was held against llama.cpp's logits once, of llama-cpp-python 0.3.36: they differ by less than 1e-5 of
their norm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import SMALL, engine_for, greedy, random_model, run, save, worker_for
from gguf_anew import written_anew
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from same_answers import check_chunks_and_prefixes, check_guesses_and_few_blocks
from test_convert_families import fields, make_gguf, same, tensors
from test_cuda_engine import SHAPE, engine_on, kernels_not_rehearsed, tokens
from test_models import prompts
from test_quant_engine import difference, logits_of

SIZES = SMALL | {"vocab_size": 4096, "num_hidden_layers": 3}
KINDS = {"normed": {"num_loops": 3}, "as it is": {"num_loops": 2, "skip_loop_final_norm": True}, "once": {"num_loops": 1}}


def made(folder: Path, model: Any, **changes: Any) -> Path:
    save(model, folder)
    said = json.loads((folder / "config.json").read_text())
    own = {"architectures": ["NanbeigeForCausalLM"], "model_type": "nanbeige"} | changes
    (folder / "config.json").write_text(json.dumps(said | own))
    return folder


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(LlamaConfig(**SIZES))


def expected(model: Any, ids: list[int], num_loops: int = 1, skip_loop_final_norm: bool = False) -> torch.Tensor:
    """Each call of the stack ends with its norm; without it in between, it is one of as many layers."""
    stack = model.model
    with torch.no_grad():
        rows = stack.embed_tokens(torch.tensor([ids]))
        if skip_loop_final_norm:
            config = LlamaConfig(**SIZES | {"num_hidden_layers": num_loops * SIZES["num_hidden_layers"]})
            longer, count = random_model(config), len(stack.layers)
            for i, layer in enumerate(longer.model.layers):
                layer.load_state_dict(stack.layers[i % count].state_dict())
            longer.model.norm.load_state_dict(stack.norm.state_dict())
            return model.lm_head(longer.model(inputs_embeds=rows).last_hidden_state)[0]
        for _ in range(num_loops):
            rows = stack(inputs_embeds=rows).last_hidden_state
        return model.lm_head(rows)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_folders_and_of_the_files_that_they_become(kind: str, model: Any, tmp_path: Path) -> None:
    folder, asked = made(tmp_path / "folder", model, **KINDS[kind]), prompts(4096)
    wanted = torch.cat([expected(model, ids, **KINDS[kind]) for ids in asked])
    assert difference(logits_of(worker_for(folder), asked), wanted) < 1e-4
    assert make_gguf(folder, tmp_path / "made.gguf") == []
    keys = fields(tmp_path / "made.gguf")
    assert (keys["general.architecture"], keys["nanbeige.block_count"]) == ("nanbeige", 3)
    assert keys["nanbeige.num_loops"] == KINDS[kind]["num_loops"]
    assert keys["nanbeige.skip_loop_final_norm"] is (kind == "as it is")
    rows = tensors(tmp_path / "made.gguf")["blk.1.attn_q.weight"].reshape(6, 12, 2, -1)  # pairs lie side by side
    apart = model.model.layers[1].self_attn.q_proj.weight.detach().numpy().reshape(6, 2, 12, -1)
    assert (rows == apart.swapaxes(1, 2)).all()
    same(folder, tmp_path / "made.gguf")


def test_a_file_that_says_nothing_is_a_llama(model: Any, tmp_path: Path) -> None:
    make_gguf(made(tmp_path / "folder", model, **KINDS["normed"]), tmp_path / "made.gguf")
    none = {"nanbeige.num_loops": None, "nanbeige.skip_loop_final_norm": None}
    path, asked = written_anew(tmp_path / "made.gguf", tmp_path / "plain.gguf", none), prompts(4096)[2:4]
    assert difference(logits_of(worker_for(path), asked), torch.cat([expected(model, ids) for ids in asked])) < 1e-4


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("nanbeige") / "model", model, **KINDS["normed"])


def test_tokens_are_those_of_the_stack(model: Any, folder: Path) -> None:
    asked, engine = prompts(4096)[2:5], engine_for(worker_for(folder, dtype="float32"), max_num_batched_tokens=50)
    outputs = run(engine, [(ids, greedy(24)) for ids in asked])
    for ids, output in zip(asked, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        assert answer == expected(model, ids + answer[:-1], 3)[len(ids) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("quant", [None, "int8"])
def test_tokens_are_the_same_in_chunks_behind_prefixes_and_alone(quant: str | None, folder: Path) -> None:
    settings = {} if quant is None else {"quant": quant}
    check_chunks_and_prefixes(worker_for(folder, deterministic=True, **settings), prompts(4000))


def test_guesses_and_few_blocks_change_nothing(folder: Path) -> None:
    check_guesses_and_few_blocks(folder, "auto")


def test_layers_are_there_once_and_have_a_cache_for_each_time(folder: Path) -> None:
    worker = worker_for(folder)
    assert len(worker.model.blocks) == 3
    assert len(worker.runner.cache.layers) == 9


@needs_emulation
@pytest.mark.parametrize("kind", ["normed", "as it is"])
def test_a_gpus_tokens_are_those_of_the_cpu(kind: str, tmp_path: Path) -> None:
    small = random_model(LlamaConfig(**SHAPE | {"num_hidden_layers": 2}), seed=2, dtype=torch.bfloat16)
    own, device = made(tmp_path / "model", small, **KINDS[kind]), EmulatedDevice()
    assert tokens(engine_on(own, device), greedy(6)) == tokens(engine_on(own, None), greedy(6))
    assert device.graphs
    assert not kernels_not_rehearsed(own)


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_loops": 0}, "num_loops"), ({"num_loops": 400}, "400 passes through 3 layers; at most 1024 layers are believed"),
    ({"skip_loop_final_norm": 3}, "skip_loop_final_norm"),
])  # fmt: skip
def test_configs_that_can_not_be_followed(changes: dict[str, Any], message: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    with pytest.raises(CheckpointError, match=message):
        spec_from_hf(config, hf_family(config))


@pytest.mark.parametrize(("changes", "message"), [
    ({"attention_bias": True}, "a bias behind attention"), ({"mlp_bias": True}, "biases of mlps"),
])  # fmt: skip
def test_what_no_file_can_say(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    biased = random_model(LlamaConfig(**SIZES | changes))
    with pytest.raises(UnsupportedError, match=message):
        make_gguf(made(tmp_path / "folder", biased, **KINDS["normed"]), tmp_path / "made.gguf")
