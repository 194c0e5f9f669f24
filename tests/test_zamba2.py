"""Zamba 2: what layers share lies in memory once, on an emulated GPU as well; bits, folders as they are published, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Zamba2Config

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import greedy, random_model, save, worker_for
from nanovllm_cli.errors import NanovllmError, UnsupportedError
from nanovllm_cli.mixer_spec import PairSpec
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.quantization.walk import Walk
from same_answers import check_chunks_and_prefixes, check_guesses_and_few_blocks
from test_cuda_engine import PROMPTS, engine_on, recorded_tokens, tokens
from test_cuda_quantized import worker_on
from test_models import CASES, ZAMBA2, prompts
from test_quant_engine import difference, expected_logits, logits_of

ARCHITECTURE = {"architectures": ["Zamba2ForCausalLM"]}
ADAPTERS = "zamba2, one shared, adapters of attention, positions, groups, time steps that are held"


def spec_of(**config: Any) -> Any:
    return spec_from_hf(config | ARCHITECTURE, hf_family(ARCHITECTURE))


@needs_emulation
def test_a_gpu_gives_what_transformers_does_and_records_its_steps(tmp_path: Path) -> None:
    config = ZAMBA2 | {
        "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 80, "num_hidden_layers": 2, "time_step_min": 0.3,
        "n_mamba_heads": 4, "layers_block_type": ["linear_attention", "hybrid"], "use_mem_rope": True, "adapter_rank": 16,
    }  # fmt: skip
    random = random_model(Zamba2Config(**config), dtype=torch.bfloat16)
    model, texts = save(random, tmp_path), [prompt[:12] for prompt in PROMPTS]
    answers = recorded_tokens(model)
    assert [own[0] for own in answers] == [own[0] for own in tokens(engine_on(model, None), greedy(6))]
    assert difference(logits_of(worker_on(model, EmulatedDevice()), texts), expected_logits(random.float(), texts)) < 0.05


@pytest.mark.parametrize("case", ["zamba2, two shared", ADAPTERS])
def test_tokens_are_the_same_in_chunks_behind_prefixes_and_alone(case: str, tmp_path: Path) -> None:
    worker = worker_for(save(random_model(CASES[case]), tmp_path), deterministic=True)
    check_chunks_and_prefixes(worker, prompts(513))


@pytest.mark.parametrize("kept", ["auto", "int8"])
def test_guesses_and_few_blocks_change_nothing(kept: str, tmp_path: Path) -> None:
    """Words that repeat are guessed, and most guesses are wrong; where blocks run short, sequences begin again."""
    folder = save(random_model(CASES["zamba2, two shared"]), tmp_path)
    check_guesses_and_few_blocks(folder, kept)


def test_a_folder_that_has_what_is_shared_in_all_layers_is_the_same(tmp_path: Path) -> None:
    """Only the first of each counts."""
    folder = save(random_model(CASES["zamba2, two shared"]), tmp_path)
    expected = logits_of(worker_for(folder), [[3, 4, 5]])
    tensors = load_file(folder / "model.safetensors")
    first, third = "layers.1.shared", "layers.3.shared"
    again = {name.replace(first, third): torch.zeros_like(own) for name, own in tensors.items() if first in name}
    assert again
    save_file(tensors | again, folder / "model.safetensors")
    assert difference(logits_of(worker_for(folder), [[3, 4, 5]]), expected) == 0


def test_an_adapter_of_one_use_of_what_is_shared_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model  # takes seconds, in each process that collects this file

    config = CASES["zamba2, two shared"]
    folder = save(random_model(config), tmp_path / "model")
    targets = r".*layers\.1\.shared_transformer\.self_attn\.q_proj"
    adapter = get_peft_model(random_model(config), LoraConfig(r=4, target_modules=targets))
    adapter.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedError, match="one layer's use of weights that several layers share"):
        worker_for(folder, lora=(str(tmp_path / "adapter"),))


REFUSED: dict[str, tuple[dict[str, Any], type[NanovllmError], str]] = {
    "biases": ({"add_bias_linear": True}, UnsupportedError, "a Zamba 2 whose 'add_bias_linear' is true"),
    "a head of its own": ({"tie_word_embeddings": False}, UnsupportedError, "a head of its own"),
    "no attention": ({"layers_block_type": ["mamba"] * 4}, UnsupportedError, "no layer has attention"),
    "another kind": ({"layers_block_type": ["mamba", "attention", "mamba", "mamba"]}, UnsupportedError, "layer type 'attention'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_other_zambas_have_is_named(what: str) -> None:
    values, kind, message = REFUSED[what]
    with pytest.raises(kind, match=message):
        spec_of(**CASES["zamba2, two shared"].to_dict() | values)


def test_what_a_config_leaves_out_is_as_transformers_has_it() -> None:
    like: Any = Zamba2Config()
    spec = spec_of()
    led = [i for i, mixer in enumerate(spec.mixers) if isinstance(mixer, PairSpec)]
    assert led == like.hybrid_layer_ids
    attention = spec.attention
    assert (attention.num_heads, attention.head_dim, attention.rope) == (like.num_attention_heads, like.head_dim, None)
    assert attention.num_kv_heads == like.num_key_value_heads
    first = spec.mixers[led[0]]
    assert (first.ahead.inner, first.ahead.rank, first.ahead.uses) == (like.intermediate_size, like.adapter_rank, tuple(range(9)))
    assert (first.state.num_values, first.state.value_dim, first.state.key_dim) == (8, like.mamba_headdim, like.mamba_d_state)
    assert (spec.max_position, spec_of(use_long_context=True).max_position) == (4096, 16384)


def test_a_calibration_is_refused() -> None:
    class Original:
        spec = spec_of(**CASES["zamba2, two shared"].to_dict())

    original: Any = Original()
    with pytest.raises(UnsupportedError, match="its layers share weights"):
        Walk(original, [], None)  # type: ignore[arg-type]
