"""Models without files: of the shapes that are published, the same every time, and usable like any other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.bench.work import ModelWork
from nanovllm_cli.errors import CheckpointError, DoesNotFitError, ModelNotFoundError, UnsupportedError
from nanovllm_cli.kernels import dense
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.outline import shapes_of
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.text.byte_tokenizer import byte_tokenizer
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.random_weights import POOL, RandomCheckpoint
from nanovllm_cli.weights.shapes import SHAPES, shape_config
from nanovllm_cli.weights.source import resolve

# Numbers of parameters that the hub shows for each repository, of tensors as they are stored.
PUBLISHED = {
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824, "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "mistral-7b": 7_248_023_552,
    "tinyllama-1.1b": 1_100_048_384, "smollm2-135m": 134_515_008,
    "qwen3-30b-a3b": 30_532_122_624, "mixtral-8x7b": 46_702_792_704, "gpt-oss-20b": 20_914_757_184,
    # of the part that writes; with three digits, what llama.cpp's benchmark says of its files
    "qwen3.5-0.8b": 752_393_024, "qwen3.5-2b": 1_881_825_088, "qwen3.5-4b": 4_205_751_296, "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464, "qwen3.5-35b-a3b": 34_660_610_688,
    "lfm2-350m": 354_483_968, "lfm2-1.2b": 1_170_340_608,
    "lfm2-8b-a1b": 8_339_929_856 + 22 * 32,  # with the biases that choose, which are no parameters to PyTorch
    # as transformers' models count theirs, made without memory of these shapes; Gemma 4's with a buffer a layer
    "gemma-3n-e2b": 4_435_182_688, "gemma-3n-e4b": 6_835_235_568,
    "gemma-4-e2b": 4_628_569_344 + 35, "gemma-4-e4b": 7_463_013_376 + 42, "gemma-4-26b-a4b": 25_233_141_760 + 30,
    "gemma-4-31b": 30_697_345_280 + 60, "granite-4.0-h-1b": 1_461_538_368, "granite-4.0-h-micro": 3_191_396_096,
    "deepseek-v2-lite": 15_706_484_224, "moonlight-16b-a3b": 15_960_108_544 + 26 * 64,
    "glm-4.7-flash": 29_943_390_976 + 46 * 64, "youtu-2b": 1_961_560_064,
    "olmo-2-1b": 1_484_916_736, "olmo-2-7b": 7_298_617_344, "olmo-2-13b": 13_716_198_400, "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136, "olmo-3-32b": 32_233_522_176, "exaone-4.0-1.2b": 1_279_391_488,
    "exaone-4.0-32b": 32_003_216_384, "hunyuan-1.8b": 1_791_080_448, "hunyuan-80b-a13b": 80_393_183_232,
    "llama-4-scout": 107_769_861_120, "llama-4-maverick": 400_711_848_960,
    "apertus-8b": 8_053_338_176 - 2 * 32, "apertus-70b": 70_599_864_480 - 2 * 80,  # without the numbers of activations
    "ling-mini-2.0": 16_255_638_528 + 19 * 256, "ling-flash-2.0": 102_889_697_280 + 31 * 256,
    "command-r-35b": 34_980_831_232, "command-r7b": 8_028_033_024,
    "olmoe-7b-a1b": 6_919_161_856, "minimax-m2": 228_689_748_992 + 62 * 256, "dots.llm1-142b": 142_774_373_888 + 61 * 128,
    "solar-open-100b": 102_651_793_408 + 48 * 128, "k-exaone-236b-a23b": 236_571_150_336 + 47 * 128,
    "trinity-mini": 26_123_974_400,
    "nemotron-h-8b": 8_100_852_736, "nemotron-nano-9b-v2": 8_888_227_328,
    "nemotron-3-nano-30b-a3b": 31_577_937_344 + 23 * 128, "afm-4.5b": 4_619_184_640,
    # one by the numbers of its tensors, all by the paper (arXiv 2503.14456)
    "rwkv7-0.1b": 191_034_624, "rwkv7-0.4b": 450_767_872, "rwkv7-1.5b": 1_527_404_544, "rwkv7-2.9b": 2_947_735_040,
    "granite-4.0-h-tiny": 6_939_037_248, "granite-4.0-h-small": 32_207_337_984,
}  # fmt: skip


def small(**changes: Any) -> dict[str, Any]:
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 80, "intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 24, "vocab_size": 300,
    }  # fmt: skip
    return shape_config("qwen3-0.6b") | sizes | changes


def write(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_the_published_models(name: str) -> None:
    assert resolve(f"random:{name}").num_bytes == 2 * PUBLISHED[name]


class _OnMeta(TorchDispatchMode):
    """Names of what is done to tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(each, torch.Tensor) and each.is_meta for each in args) and not func.is_view:
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "gemma-3n-e2b", "deepseek-v2-lite", "granite-4.0-h-tiny", "exaone-4.0-1.2b"])
def test_shapes_are_known_without_computing(name: str) -> None:
    """torch takes seconds to import what multiplies tensors without memory, and every model that is loaded is looked at so."""
    config = shape_config(name)
    with _OnMeta() as done:
        shapes_of(spec_from_hf(config, hf_family(config)))
    assert done.names == {"aten.fill_.Scalar"}


def test_the_work_of_a_known_model_is_twice_its_weights() -> None:
    """A token multiplies with every weight once: all of a tied model's matrices, 596 million less its norms."""
    config = shape_config("qwen3-0.6b")
    work = ModelWork.of(spec_from_hf(config, hf_family(config)), 0, (torch.bfloat16,) * 2)
    assert work.linear_flops + work.head_flops == pytest.approx(2 * 596_049_920, rel=1e-3)
    assert work.kv_bytes == 112 * 1024  # 28 layers, 8 heads of 128, two bytes, K and V


def test_a_slice_is_the_same_however_the_rest_is_cut() -> None:
    checkpoint = RandomCheckpoint(small(vocab_size=POOL // 40))  # an embedding of twice the pool
    name = "model.embed_tokens.weight"
    whole = checkpoint.tensor(name)
    rows = whole.shape[0]
    for first, last in ((0, 5), (rows // 2 - 3, rows // 2 + 3), (rows - 2, rows)):
        assert torch.equal(checkpoint.tensor(name, rows=(first, last)), whole[first:last])
    assert torch.equal(whole, RandomCheckpoint(small(vocab_size=POOL // 40)).tensor(name))
    assert not torch.equal(whole[:9], RandomCheckpoint(small(), seed=1).tensor(name)[:9])


def test_numbers_are_of_a_size_that_a_model_computes_with() -> None:
    checkpoint = RandomCheckpoint(small(architectures=["Qwen2ForCausalLM"]))
    matrix = checkpoint.tensor("model.layers.1.mlp.up_proj.weight").float()
    assert matrix.std() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(matrix, checkpoint.tensor("model.layers.0.mlp.up_proj.weight").float())
    assert checkpoint.tensor("model.norm.weight").float().mean() == pytest.approx(1, abs=0.1)
    assert checkpoint.tensor("model.layers.0.self_attn.q_proj.bias").float().abs().max() < 0.1
    assert checkpoint.raw("model.norm.weight").shape == (1, 160)


@pytest.mark.parametrize(
    ("activations", "dtype", "whole"),
    [("auto", "auto", True), ("exact", "auto", False), ("auto", "float32", False), ("rounded", "float32", True)],
)
def test_what_is_multiplied_is_known(tmp_path: Path, activations: Any, dtype: Any, whole: bool) -> None:
    path = write(tmp_path, small())
    config = EngineConfig(max_model_len=32, num_blocks=2, quant="int8", activations=activations, dtype=dtype)
    with LLM(f"random:{path}", config=config) as llm:
        assert llm.multiplies_whole is whole
        assert {form.name if form else None for form in llm.formats} == {"int8"}
        assert sum(llm.formats.values()) == 300 * 80 + 2 * (80 * 24 * (4 + 2 + 2 + 4) + 3 * 80 * 112)
        assert llm.read_bytes == llm.weight_bytes


def test_an_embedding_that_is_no_head_is_not_read_whole(tmp_path: Path) -> None:
    path = write(tmp_path, small(tie_word_embeddings=False, vocab_size=320, hidden_size=128))
    with LLM(f"random:{path}", config=EngineConfig(max_model_len=32, num_blocks=2)) as llm:
        assert not llm.multiplies_whole
        assert llm.weight_bytes - llm.read_bytes == dense.num_bytes(320, 128, torch.bfloat16)
        assert llm.threads is not None


@pytest.mark.parametrize("quant", [None, "int8", "q4_k"])
def test_a_model_without_files_answers(tmp_path: Path, quant: str | None) -> None:
    wide = small(hidden_size=256, intermediate_size=256, head_dim=64, quantization_config={"quant_method": "gptq"})
    path = write(tmp_path, wide)
    config = EngineConfig(max_model_len=64, num_blocks=8, quant=quant)
    answers = []
    for name in (f"random:{path}", f"random:{tmp_path}"):
        with LLM(name, config=config) as llm:
            (output,) = llm.generate("héllo", SamplingParams(temperature=0.0, max_tokens=5))
            answers.append(output.outputs[0].token_ids)
            assert len(output.prompt_token_ids) == 6
            assert llm.tokenizer.decode(output.prompt_token_ids) == "héllo"
    assert answers[0] == answers[1]
    assert len(answers[0]) == 5


def test_matrices_that_folders_have_turned_over_are_made_as_models_have_them(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 320}
    path.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes}))
    with LLM(f"random:{path}", config=EngineConfig(max_model_len=32, num_blocks=8)) as llm:
        (output,) = llm.generate("gpt", SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 3


def test_bytes_are_a_vocabulary() -> None:
    tokenizer = byte_tokenizer()
    text = "a b\n\tÄ語🙂 <|endoftext|>"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert sorted(tokenizer.id_to_bytes(i) for i in range(256)) == [bytes([i]) for i in range(256)]
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (256, ())


def test_what_is_no_shape(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("random:qwen3-0.5b")
    assert caught.value.hint is not None
    assert "qwen3-0.6b" in caught.value.hint
    with pytest.raises(ModelNotFoundError):
        open_checkpoint(f"random:{tmp_path / 'none.json'}")
    bounded = json.dumps(small(time_step_limit=[0.0, math.inf]))  # as configs of state spaces have it
    (tmp_path / "config.json").write_text(bounded)
    assert shape_config(str(tmp_path))["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError):
        resolve(f"random:{tmp_path}")
    with pytest.raises(UnsupportedError, match="unknown architecture"):
        resolve(f"random:{write(tmp_path, small(architectures=['Odd']))}")


def test_a_shape_that_does_not_fit_takes_no_memory(tmp_path: Path) -> None:
    huge = small(hidden_size=1 << 16, intermediate_size=1 << 20, num_hidden_layers=50)
    with pytest.raises(DoesNotFitError, match="GiB"):
        LLM(f"random:{write(tmp_path, huge)}", config=EngineConfig(max_model_len=64))


WINDOWED = ("gpt-oss", "gemma-3n", "gemma-4", "olmo-3", "exaone-4.0-32b", "k-exaone", "trinity", "command-r7b")


@pytest.mark.parametrize("name", [name for name in SHAPES if not name.startswith(WINDOWED)])
def test_no_layer_of_these_has_a_window(name: str) -> None:
    """Not even where transformers has one for a config that says nothing, as for Mistral."""
    config = shape_config(name)
    assert {attention.window for attention in spec_from_hf(config, hf_family(config)).attentions} <= {None}
