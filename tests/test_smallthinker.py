"""SmallThinker, whose experts are chosen before attention: answers in steps, in batches and in pieces, on an emulated GPU and in
other formats, against the formula of test_llamas.py."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from emulation.emulator import needs_emulation
from emulation.on_gpu import know_addresses
from engines import engine_for, greedy, num_parameters, run, worker_for
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.quantization.walk import Walk
from same_answers import check_chunks_and_prefixes, check_guesses_and_few_blocks
from test_convert_families import make_gguf
from test_cuda_engine import PROMPTS, depend_on_the_request_alone, engine_on, recorded_tokens, tokens
from test_llamas import CASES, SMALLTHINKER, expected, folder_of, random_tensors, write
from test_models import prompts
from test_quant_engine import difference, logits_of

CASE = CASES["smallthinker"]
TENSORS = random_tensors(CASE)
CONFIG = SMALLTHINKER | {"sliding_window_size": 20}


def made(folder: Path, **changes: Any) -> Path:
    folder_of(folder, "smallthinker", TENSORS)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("smallthinker") / "model")


def test_tokens_are_those_of_the_formula(folder: Path) -> None:
    """In pieces, and with rows that go on alone behind the last layer's attention."""
    asked, worker = prompts(4000), worker_for(folder, dtype="float32")
    outputs = run(engine_for(worker, max_num_batched_tokens=50), [(ids, greedy(24)) for ids in asked])
    for ids, output in zip(asked, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        logits = expected(CASE, TENSORS, ids + answer[:-1])[len(ids) - 1 :]
        assert answer == logits.argmax(-1).tolist()


@pytest.mark.parametrize("quant", [None, "int8"])
def test_tokens_are_the_same_in_chunks_behind_prefixes_and_alone(quant: str | None, folder: Path) -> None:
    """Greedy and their likelihoods to the bit."""
    settings = {} if quant is None else {"quant": quant}
    check_chunks_and_prefixes(worker_for(folder, deterministic=True, **settings), prompts(4000))


def test_guesses_and_few_blocks_change_nothing(folder: Path) -> None:
    check_guesses_and_few_blocks(folder, "auto")


@pytest.mark.parametrize(("settings", "most"), [({"dtype": "bfloat16"}, 0.05), ({"quant": "int8-weight-only"}, 0.05)], ids=str)
def test_in_fewer_bits(settings: dict[str, Any], most: float, folder: Path) -> None:
    """A token of which others are chosen by a hair is another altogether: half of them must be as they should."""
    wanted, asked = expected(CASE, TENSORS, prompts(4000)[4]), [prompts(4000)[4]]
    found = logits_of(worker_for(folder, **settings), asked)
    each = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert each.median() < most


@needs_emulation
def test_a_gpus_tokens_are_those_of_the_cpu_and_steps_are_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    know_addresses(monkeypatch)
    answers = recorded_tokens(folder)
    assert [own[:4] for own in answers] == [own[:4] for own in tokens(engine_on(folder, None), greedy(6))]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer[0] == int(expected(CASE, TENSORS, prompt)[-1].argmax())
    depend_on_the_request_alone(folder)


def test_numbers_are_counted_as_they_are(folder: Path) -> None:
    spec = worker_for(folder).spec
    assert num_parameters(spec) == sum(tensor.numel() for tensor in TENSORS.values())
    taken = spec.blocks[0].num_weights(spec.hidden_size) - spec.blocks[0].num_active(spec.hidden_size)
    assert taken == 3 * 3 * 70 * 48


def test_a_router_that_reads_what_experts_read(tmp_path: Path) -> None:
    asked = prompts(4000)[2:5]
    late = made(tmp_path / "model", moe_enable_early_router=False)
    wanted = torch.cat([expected(replace(CASE, early=False), TENSORS, ids) for ids in asked])
    assert difference(logits_of(worker_for(late, dtype="float32"), asked), wanted) < 1e-4
    with pytest.raises(UnsupportedError, match="no router that reads what a layer finds"):
        make_gguf(late, tmp_path / "made.gguf")


def test_windows_that_llama_cpp_has_not_stay_in_folders(tmp_path: Path) -> None:
    """There they are of 4096 tokens, whatever a file says, and in all layers but each fourth."""
    with pytest.raises(UnsupportedError, match="other windows and positions than published ones"):
        make_gguf(made(tmp_path / "model"), tmp_path / "made.gguf")


def test_it_is_not_calibrated() -> None:
    class Original:
        spec = spec_from_hf(CONFIG, hf_family(CONFIG))

    original: Any = Original()
    with pytest.raises(UnsupportedError, match="its router reads what they do not"):
        Walk(original, [], None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"moe_enable_secondary_experts": True}, UnsupportedError, "a SmallThinker whose 'moe_enable_secondary_experts' is true"),
        ({"moe_shared_primary_experts": 1}, UnsupportedError, "experts that every token takes"),
        ({"moe_layer_layout": [1, 0, 1]}, UnsupportedError, "whose layers do not all have experts"),
        ({"norm_topk_prob": False}, UnsupportedError, "'norm_topk_prob' is false"),
        ({"use_qk_norm": True}, UnsupportedError, "'use_qk_norm' is true"),
        ({"hidden_act": "silu"}, UnsupportedError, "activation 'silu' in a SmallThinker"),
        ({"rope_layout": [0, 1]}, CheckpointError, "'rope_layout' must be a list of 3 layers' 0 or 1"),
        ({"sliding_window_layout": [0, 1, 2]}, CheckpointError, "'sliding_window_layout' must be a list of 3 layers' 0 or 1"),
        ({"moe_num_active_primary_experts": 6}, CheckpointError, "a token can't take 6 of 5 experts"),
    ],
    ids=str,
)
def test_configs_that_can_not_be_followed(changes: dict[str, Any], kind: type[NanovllmError], said: str) -> None:
    config = CONFIG | changes
    with pytest.raises(kind, match=said):
        spec_from_hf(config, hf_family(config))


def test_what_a_config_leaves_out_is_the_smaller_ones() -> None:
    config = {"architectures": ["SmallThinkerForCausalLM"], "model_type": "smallthinker"}
    spec = spec_from_hf(config, hf_family(config))
    assert spec.num_layers == 32
    assert spec.mixture is not None
    assert (spec.mixture.num_experts, spec.mixture.experts_per_token, spec.mixture.scoring) == (32, 4, "sigmoid")
    assert all(attention.window is None and attention.rope is not None for attention in spec.attentions)
    assert math.isclose(sum(block.num_weights(1536) for block in spec.blocks) + 151936 * 1536, 4e9, rel_tol=0.02)
    assert math.isclose(sum(block.num_active(1536) for block in spec.blocks), 0.6e9, rel_tol=0.06)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"expert_weights_scale": 1.5}, "weights of experts times 1.5"),
        ({"attention.sliding_window_pattern": 2}, "other windows than in all layers but each fourth"),
        ({"rope.dimension_count_swa": 4}, "4 rotary dims in layers with a window"),
        ({"expert_gating_func": 3}, "experts that are not weighed by a softmax or a sigmoid"),
    ],
    ids=str,
)
def test_files_that_can_not_be_followed(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=said):
        worker_for(write(tmp_path / "m.gguf", "smallthinker", CASE, TENSORS, **keys))


def test_windows_of_a_file_may_have_a_rotary_base_of_their_own(tmp_path: Path) -> None:
    """llama.cpp reads it of this architecture, too; its converter does not write it."""
    ids = prompts(4000)[4]
    worker = worker_for(write(tmp_path / "m.gguf", "smallthinker", CASE, TENSORS, **{"rope.freq_base_swa": 1e3}), dtype="float32")
    wanted = expected(replace(CASE, bases=(1e4, 1e3)), TENSORS, ids)
    assert difference(logits_of(worker, [ids]), wanted) < 1e-4
