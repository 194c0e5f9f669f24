"""Conversions lose nothing: every family and rope scaling there and back, bit by bit; and read by other libraries."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGUFValueType
from gguf.gguf_writer import GGUFValue
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engines import SMALL, random_model
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.quant.gguf_blocks import dequantize
from nanovllm_cli.quant.gguf_encode import ENCODED, encode
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import GGUFCheckpoint, open_checkpoint
from nanovllm_cli.weights.convert_names import halves_to_pairs, pairs_to_halves
from nanovllm_cli.weights.convert_tensors import BLOCK_TYPES
from nanovllm_cli.weights.safetensors import DTYPES
from nanovllm_cli.weights.source import resolve
from test_models import CASES as MODELS
from test_models import DIVISORS, rope

TINY = resolve("tiny").path
STORIES = Path(__file__).resolve().parents[2] / "shared" / "data" / "stories260K" / "stories260K.gguf"
NAMES = ("deepseek-llm", "gpt-2", "llama-spm")
VOCABULARIES = [
    path for name in NAMES if (path := STORIES.parents[1] / "tokenizers" / f"ggml-vocab-{name}.gguf").exists()
]
VOCAB = 4100  # four rows more than the tokenizer has tokens
BASE = SMALL | {"vocab_size": VOCAB, "num_hidden_layers": 2, "eos_token_id": 4089, "bos_token_id": 4087}
TEXTS = (
    "Once upon a time, there was 1 girl; she didn't know.",
    "  def f(x):\n\treturn x  \n\n<think>é Straße 你好 😀</think><|im_end|> next",
)
CASES: dict[str, tuple[Any, torch.dtype]] = {
    "llama": (LlamaConfig(**BASE), torch.bfloat16),
    "llama, biases, tied": (
        LlamaConfig(**BASE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}), torch.float32
    ),
    "llama, llama3": (
        LlamaConfig(**BASE, **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                   original_max_position_embeddings=64)), torch.float16,
    ),
    "llama, linear": (LlamaConfig(**BASE, **rope("linear", factor=4.0)), torch.bfloat16),
    "llama, longrope": (
        LlamaConfig(**BASE, **rope("longrope", factor=4.0, original_max_position_embeddings=128,
                                   short_factor=DIVISORS[1], long_factor=DIVISORS[4])), torch.bfloat16,
    ),
    "mistral, window": (MistralConfig(**BASE | {"sliding_window": 20}), torch.bfloat16),
    "qwen2": (Qwen2Config(**BASE), torch.float32),
    "qwen3, yarn, tied": (
        Qwen3Config(**BASE | {"head_dim": 40, "tie_word_embeddings": True},
                    **rope("yarn", factor=2.0, original_max_position_embeddings=256, beta_fast=24.0, beta_slow=2.0,
                           attention_factor=1.2)), torch.bfloat16,
    ),
}  # fmt: skip
SETTINGS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make(folder: Path, config: Any, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A random model with the bundled model's tokenizer."""
    random_model(config).to(dtype).save_pretrained(folder)
    for name in SETTINGS:
        shutil.copy(TINY / name, folder / name)
    settings = {"eos_token_id": [4089, 4087], "temperature": 0.7, "top_p": 0.95, "top_k": 20, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def converted(source: Path, output: Path, target: str, outtype: str = "auto", split: int | None = None) -> convert.Plan:
    with convert.open_source(source) as checkpoint:
        made = convert.plan(checkpoint, target, outtype, split)  # type: ignore[arg-type]
        convert.write(checkpoint, made, output)
    return made


def tensors(path: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}


def stored(path: Path) -> dict[str, tuple[str, bytes]]:
    with open_checkpoint(path) as checkpoint:
        return {
            name: (checkpoint.info(name).dtype_name, checkpoint.raw(name).numpy().tobytes())
            for name in checkpoint.names()
        }


@pytest.mark.parametrize("case", CASES)
def test_folder_to_gguf_and_back_loses_nothing(case: str, tmp_path: Path) -> None:
    config, dtype = CASES[case]
    source = make(tmp_path / "source", config, dtype)
    converted(source, tmp_path / "m.gguf", "gguf")
    converted(tmp_path / "m.gguf", tmp_path / "back", "hf")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back"))
    assert new["architectures"] == old["architectures"]
    assert new["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert (
        dataclasses.replace(spec_from_hf(new, hf_family(new)), max_position=0)
        == dataclasses.replace(spec_from_hf(old, hf_family(old)), max_position=0)
        or "longrope" in case
    )  # where the way back has a name for the same numbers only
    generation = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert {k: generation[k] for k in ("temperature", "top_p", "top_k", "do_sample")} == {
        "temperature": 0.7, "top_p": 0.95, "top_k": 20, "do_sample": True
    }  # fmt: skip
    assert set(generation["eos_token_id"]) == {4089, 4087}
    theirs, ours = Tokenizer.from_folder(source), Tokenizer.from_folder(tmp_path / "back")
    assert ours.vocab_size == theirs.vocab_size
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_templates == theirs.chat_templates

    converted(tmp_path / "back", tmp_path / "again.gguf", "gguf")
    assert stored(tmp_path / "again.gguf") == stored(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "case", ["llama, biases, tied", "llama, llama3", "mistral, window", "qwen2", "qwen3, yarn, tied"]
)
def test_a_folder_from_gguf_is_the_same_model_in_transformers(case: str, tmp_path: Path) -> None:
    """transformers reads the original and what came back: config and rope are its own reading of both."""
    config, _ = CASES[case]
    source = make(tmp_path / "source", config, torch.float32)
    converted(source, tmp_path / "m.gguf", "gguf")
    converted(tmp_path / "m.gguf", tmp_path / "back", "hf")
    ids = torch.randint(0, 4000, (1, 70), generator=torch.Generator().manual_seed(1))
    logits = []
    for folder in (source, tmp_path / "back"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(*logits)
    theirs, ours = (AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "back"))
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3, yarn, tied"])
def test_transformers_reads_our_gguf_as_the_same_weights(case: str, tmp_path: Path) -> None:
    """Its reader has names and row order of its own."""
    config, dtype = CASES[case]
    source = make(tmp_path / "source", config, dtype)
    converted(source, tmp_path / "m.gguf", "gguf", "f32")
    model = AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=model)["tensors"]
    wanted = load_file(source / "model.safetensors")
    assert theirs.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(torch.as_tensor(theirs[name]), tensor.float()), name


def test_rows_of_llama_are_turned_as_llama_cpp_turns_them() -> None:
    """Its formula, straight: reshape(heads, 2, dim / 2, ...), swap the middle axes."""
    rows = np.arange(3 * 8 * 5).reshape(24, 5)
    wanted = rows.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)
    turned = halves_to_pairs(torch.from_numpy(rows), 8, 8)
    assert np.array_equal(turned.numpy(), wanted)
    assert torch.equal(pairs_to_halves(turned, 8, 8), torch.from_numpy(rows))
    partial = halves_to_pairs(torch.from_numpy(rows), 8, 4)
    assert partial[:8, 0].tolist() == [0, 10, 5, 15, 20, 25, 30, 35]
    assert torch.equal(pairs_to_halves(partial, 8, 4), torch.from_numpy(rows))


def test_llama3_becomes_the_divisors_of_transformers_frequencies(tmp_path: Path) -> None:
    config, _ = CASES["llama, llama3"]
    source = make(tmp_path / "source", config)
    converted(source, tmp_path / "m.gguf", "gguf")
    found = tensors(tmp_path / "m.gguf")["rope_freqs.weight"]
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 10000.0 ** (torch.arange(0, 24, 2).double() / 24)
    torch.testing.assert_close(found.double(), plain / scaled.double(), rtol=1e-6, atol=0)
    assert found.dtype == torch.float32
    assert found.unique().numel() > 1


def test_divisors_that_are_no_llama3_go_into_lists(tmp_path: Path) -> None:
    source = make(tmp_path / "source", CASES["llama, llama3"][0])
    converted(source, tmp_path / "m.gguf", "gguf")
    with convert.open_source(tmp_path / "m.gguf") as checkpoint:
        made = convert.plan(checkpoint, "gguf")
        made.steps = [
            step._replace(source=None, value=torch.linspace(1, 7, 12)) if step.name == "rope_freqs.weight" else step
            for step in made.steps
        ]
        convert.write(checkpoint, made, tmp_path / "other.gguf")
    converted(tmp_path / "other.gguf", tmp_path / "back", "hf")
    scaling = json.loads((tmp_path / "back" / "config.json").read_text())["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["short_factor"] == scaling["long_factor"] == torch.linspace(1, 7, 12).tolist()
    frequencies, factor = ROPE_INIT_FUNCTIONS["longrope"](
        LlamaConfig.from_pretrained(tmp_path / "back"), torch.device("cpu"), seq_len=10
    )
    assert factor == 1.0
    plain = 1 / 10000.0 ** (torch.arange(0, 24, 2).double() / 24)
    torch.testing.assert_close(frequencies.double(), plain / torch.linspace(1, 7, 12).double(), rtol=1e-6, atol=0)


def metadata_of_llama_cpp(folder: Path, num_parameters: int) -> dict[str, Any]:
    """What the converter leaves to the `gguf` package: name, card, sampling, roles of tokens, merges, template."""
    writer = gguf.GGUFWriter(None, "qwen3")
    metadata = gguf.Metadata.load(None, folder, None, num_parameters)
    metadata.size_label = metadata.size_label or gguf.size_label(num_parameters, num_parameters, 0, 0)
    metadata.set_gguf_meta_model(writer)
    gguf.SpecialVocab(folder, load_merges=True).add_to_gguf(writer, quiet=True)
    fields = {key: field.value for key, field in writer.kv_data[0].items()}
    return {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in fields.items()}


def test_the_bundled_model_there_and_back(tmp_path: Path) -> None:
    made = converted(TINY, tmp_path / "m.gguf", "gguf")
    assert made.notes == []
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items()}
    wanted = {
        "general.architecture": "qwen3", "general.type": "model", "general.name": "Tiny", "general.license": "apache-2.0",
        "general.languages": ["en"], "general.tags": ["text-generation"], "general.size_label": "3.8M",
        "general.file_type": 32, "general.quantization_version": 2, "general.sampling.top_k": 20,
        "qwen3.block_count": 4, "qwen3.context_length": 2048, "qwen3.embedding_length": 256,
        "qwen3.feed_forward_length": 640, "qwen3.attention.head_count": 4, "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 64, "qwen3.attention.value_length": 64, "qwen3.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.eos_token_id": 4089,
        "tokenizer.ggml.padding_token_id": 4087, "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip
    assert {key: fields[key] for key in wanted} == wanted
    for key, value in metadata_of_llama_cpp(TINY, 3_806_720).items():
        assert fields[key] == value, key
    assert fields["qwen3.attention.layer_norm_rms_epsilon"] == np.float32(1e-6)
    assert converted(tmp_path / "m.gguf", tmp_path / "back", "hf").notes == []
    assert stored(tmp_path / "back") == stored(TINY)
    for name in ("config.json", "generation_config.json"):
        old, new = (json.loads((folder / name).read_text()) for folder in (TINY, tmp_path / "back"))
        assert new["bos_token_id"] == old["bos_token_id"], name
    converted(tmp_path / "back", tmp_path / "again.gguf", "gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()


def test_tokens_that_are_never_drawn_are_carried(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    wrong = "tokenizer.ggml.suppress_tokens, which is not what it should be"
    for written, name, notes in (([9, 4080], "a", []), ([2**40], "b", [wrong])):
        (folder / "generation_config.json").write_text(json.dumps({**config, "suppress_tokens": written}))
        assert converted(folder, tmp_path / f"{name}.gguf", "gguf").notes == notes
    field = gguf.GGUFReader(tmp_path / "a.gguf").fields["tokenizer.ggml.suppress_tokens"]
    assert (field.contents(), field.types[-1]) == ([9, 4080], gguf.GGUFValueType.INT32)  # as llama.cpp's converter has it
    with open_checkpoint(tmp_path / "a.gguf") as checkpoint:
        assert checkpoint.generation_config["suppress_tokens"] == [9, 4080]
    converted(tmp_path / "a.gguf", tmp_path / "back", "hf")
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text())["suppress_tokens"] == [9, 4080]


@pytest.mark.skipif(not STORIES.exists(), reason="the stories260K checkpoint is not beside this project")
def test_a_sentencepiece_model_there_and_back(tmp_path: Path) -> None:
    import sentencepiece

    converted(STORIES, tmp_path / "stories", "hf")
    converted(tmp_path / "stories", tmp_path / "m.gguf", "gguf")
    assert stored(tmp_path / "m.gguf") == stored(STORIES)
    with open_checkpoint(STORIES) as old, open_checkpoint(tmp_path / "m.gguf") as new:
        for key in ("tokens", "scores", "token_type", "bos_token_id", "eos_token_id"):
            assert new.config[f"tokenizer.ggml.{key}"] == old.config[f"tokenizer.ggml.{key}"]
        theirs = Tokenizer.from_gguf(old.config)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "stories" / "tokenizer.model"))
    fast = AutoTokenizer.from_pretrained(tmp_path / "stories")
    for text in ("Once upon a time, there was a little girl.", "  two  spaces é 你", "x"):
        assert pieces.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert fast(text)["input_ids"] == theirs.encode(text)


@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_vocabularies_there_and_back_make_the_same_tokens(path: Path, tmp_path: Path) -> None:
    from nanovllm_cli.text.gguf_export import gguf_vocabulary, same_tokens
    from nanovllm_cli.text.hf_export import hf_tokenizer
    from nanovllm_cli.weights.gguf import GGUFFile

    metadata = GGUFFile(path).metadata
    exported = hf_tokenizer(metadata, 2048)
    for name, data in exported.files.items():
        (tmp_path / name).write_bytes(data)
    back = gguf_vocabulary(tmp_path, len(metadata["tokenizer.ggml.tokens"]))
    source = Tokenizer.from_gguf(metadata)
    published = path.with_suffix(".gguf.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    for other in (Tokenizer.from_folder(tmp_path), Tokenizer.from_gguf(back.fields)):
        assert same_tokens(source, other, published) is None
    assert back.fields["tokenizer.ggml.pre"] == metadata.get("tokenizer.ggml.pre", "default")


def test_only_blocks_that_become_other_blocks_are_rounded_twice(tmp_path: Path) -> None:
    converted(TINY, tmp_path / "q4.gguf", "gguf", "q4_0")
    with convert.open_source(tmp_path / "q4.gguf") as blocks:
        assert len(convert.plan(blocks, "gguf", "q2_k").requantized) == 25  # 640 wide rows of 4 layers stay Q4_0
        for target, outtype in (("gguf", "auto"), ("gguf", "q4_0"), ("gguf", "f16"), ("hf", "bf16")):
            assert not convert.plan(blocks, target, outtype).requantized  # type: ignore[arg-type]
    with convert.open_source(TINY) as plain:
        assert not convert.plan(plain, "gguf", "q2_k").requantized


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0", "q5_1"])
def test_types_are_those_of_the_gguf_package_bit_by_bit(kind: str, tmp_path: Path) -> None:
    source = make(
        tmp_path / "source", Qwen2Config(**BASE | {"hidden_size": 64, "intermediate_size": 72}), torch.float32
    )
    converted(source, tmp_path / "m.gguf", "gguf", kind)
    wanted = load_file(source / "model.safetensors")
    numbers = gguf.GGMLQuantizationType[kind.upper()]
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    up, down = found["blk.1.ffn_up.weight"], found["blk.1.ffn_down.weight"]
    assert up.tensor_type == numbers
    encoded = gguf.quantize(wanted["model.layers.1.mlp.up_proj.weight"].numpy(), numbers)
    assert up.data.tobytes() == encoded.tobytes()
    assert down.tensor_type == (gguf.GGMLQuantizationType.F16 if kind[0] == "q" else numbers)  # rows of 72
    assert found["blk.0.attn_q.bias"].tensor_type == gguf.GGMLQuantizationType.F32


def test_yarn_says_what_llama_cpps_converter_says_of_it(tmp_path: Path) -> None:
    made = converted(make(tmp_path / "source", CASES["qwen3, yarn, tied"][0]), tmp_path / "m.gguf", "gguf")
    assert ["rope attention_factor: written, but llama.cpp does not read it" in note for note in made.notes] == [True]
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    found = {key.removeprefix("qwen3.rope.scaling."): field.contents() for key, field in fields.items() if "scaling" in key}
    assert found == {
        "type": "yarn", "factor": 2.0, "original_context_length": 256, "yarn_beta_fast": 24.0, "yarn_beta_slow": 2.0,
        "yarn_attn_factor": np.float32(1.2),
    }  # fmt: skip


def test_origins_are_carried_there_and_back(tmp_path: Path) -> None:
    source = make(tmp_path / "Some-1B-Instruct", LlamaConfig(**BASE))
    (source / "README.md").write_text(
        "---\nlicense: mit\nbase_model: [Org/Some-1B-Base, b/C-7B-v0.1]\ndatasets:\n- a/b\n---\n# Hello\n"
    )
    converted(source, tmp_path / "m.gguf", "gguf")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["general.base_model.1.repo_url"].contents() == "https://huggingface.co/b/C-7B-v0.1"
    assert converted(tmp_path / "m.gguf", tmp_path / "back", "hf").notes == []
    card = gguf.Metadata.load_model_card(tmp_path / "back")
    assert (card["base_model"], card["datasets"]) == (["Org/Some-1B-Base", "b/C-7B-v0.1"], ["a/b"])
    converted(tmp_path / "back", tmp_path / "again.gguf", "gguf")
    again = gguf.GGUFReader(tmp_path / "again.gguf").fields
    assert {k: f.contents() for k, f in again.items()} == {k: f.contents() for k, f in fields.items()}


@pytest.mark.parametrize("change", [{"general.base_model.0.repo_url": "https://elsewhere/b"}, {"general.base_model.count": 3}])
def test_origins_that_no_card_can_say_are_named(change: dict[str, Any], tmp_path: Path) -> None:
    source = make(tmp_path / "source", LlamaConfig(**BASE))
    (source / "README.md").write_text("---\nbase_model: a/b\n---\n")
    converted(source, tmp_path / "m.gguf", "gguf")
    with convert.open_source(tmp_path / "m.gguf") as checkpoint:
        assert isinstance(checkpoint, GGUFCheckpoint)
        checkpoint.config.update(change)  # type: ignore[attr-defined]
        made = convert.plan(checkpoint, "hf")
    assert "general.base_model.0.repo_url" in " ".join(made.notes)
    assert b"base_model" not in made.files["README.md"]


def test_a_ternary_file_keeps_embedding_and_head_in_float16(tmp_path: Path) -> None:
    """As llama.cpp's converter does."""
    source = make(tmp_path / "source", Qwen3Config(**BASE | {"hidden_size": 256, "intermediate_size": 256}))
    converted(source, tmp_path / "m.gguf", "gguf", "tq2_0")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert (types["token_embd.weight"], types["output.weight"]) == ("F16", "F16")
    assert (types["blk.0.ffn_down.weight"], types["blk.1.attn_q.weight"]) == ("TQ2_0", "TQ2_0")
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_TQ2_0


@pytest.mark.parametrize(("kind", "number", "file_type"), [("q1_0", 41, 40), ("q2_0", 42, 41)])
def test_types_that_the_package_does_not_know_are_written_and_read(
    kind: str, number: int, file_type: int, tmp_path: Path
) -> None:
    """Numbers and sizes as in llama.cpp's ggml.h and llama.h. What does not divide into blocks is Q4_0, as in its quantizer."""
    source = make(tmp_path / "source", Qwen3Config(**BASE | {"hidden_size": 128, "intermediate_size": 96}))
    converted(source, tmp_path / "m.gguf", "gguf", kind)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        types = {name: checkpoint.info(name).dtype_name for name in checkpoint.names()}
        assert isinstance(checkpoint, GGUFCheckpoint)
        assert checkpoint.config["general.file_type"] == file_type
        up = checkpoint.tensor("blk.0.ffn_up.weight")
    assert (types["token_embd.weight"], types["blk.1.attn_q.weight"], types["blk.0.ffn_down.weight"]) == (
        kind.upper(), kind.upper(), "Q4_0",
    )  # fmt: skip
    name = b"blk.0.ffn_up.weight"
    table = (tmp_path / "m.gguf").read_bytes().partition(name)[2]
    assert table[:24] == struct.pack("<IQQI", 2, 128, 96, number)
    wanted = load_file(source / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].float()
    assert torch.equal(up, dequantize(kind.upper(), encode(kind.upper(), wanted)))


def test_every_type_that_can_be_encoded_is_offered() -> None:
    assert {kind.upper() for kind in BLOCK_TYPES} == set(ENCODED)


def test_rows_too_narrow_for_a_k_quant_get_blocks_of_32(tmp_path: Path) -> None:
    config = Qwen2Config(
        **BASE | {"hidden_size": 288, "intermediate_size": 512, "num_attention_heads": 12, "head_dim": 24}
    )
    converted(make(tmp_path / "source", config), tmp_path / "m.gguf", "gguf", "q4_k")
    found = {name: kind for name, (kind, _) in stored(tmp_path / "m.gguf").items()}
    assert (found["blk.0.ffn_down.weight"], found["blk.0.ffn_up.weight"]) == ("Q4_K", "Q5_0")


def test_numbers_past_what_a_type_carries_name_their_tensor(tmp_path: Path) -> None:
    source = make(tmp_path / "source", LlamaConfig(**BASE | {"hidden_size": 96}), torch.float32)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.mlp.gate_proj.weight"][0] = 1e30
    save_file(weights, source / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"gate_proj"):
        converted(source, tmp_path / "m.gguf", "gguf", "q8_0")


def test_a_model_of_the_hub_is_called_by_its_repository(tmp_path: Path) -> None:
    """Its folder's name is a commit."""
    source = make(tmp_path / "0123abcd", LlamaConfig(**BASE))
    with convert.open_source(source) as checkpoint:
        header = convert.plan(checkpoint, "gguf", name="someone/Good-Model-Instruct-v1.5").header
    assert header["general.name"].value == "Good Model Instruct v1.5"
    assert header["general.finetune"].value == "Instruct"
    assert header["general.basename"].value == "Good-Model"


def test_gguf_of_an_architecture_that_nobody_here_knows_is_copied_and_split(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mystery")
    writer.add_uint8("mystery.u8", 7)
    writer.add_array("mystery.flags", [True, False])
    writer.add_array("mystery.halves", [0.5, 1.5])
    writer.add_tensor("experts", np.arange(2 * 3 * 32, dtype=np.float32).reshape(2, 3, 32))
    writer.add_tensor("codes", np.arange(5, dtype=np.int32))
    writer.add_tensor("nothing", np.zeros((3, 0), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    converted(tmp_path / "m.gguf", tmp_path / "copy.gguf", "gguf")
    assert (tmp_path / "copy.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    converted(tmp_path / "m.gguf", tmp_path / "q8.gguf", "gguf", "q8_0")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "q8.gguf").tensors}
    assert found["experts"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert found["codes"].tensor_type == gguf.GGMLQuantizationType.I32
    with pytest.raises(UnsupportedError, match="mystery"):
        converted(tmp_path / "m.gguf", tmp_path / "folder", "hf")
    nameless = (tmp_path / "m.gguf").read_bytes().replace(b"general.architecture", b"general.architectUre")
    (tmp_path / "m.gguf").write_bytes(nameless)
    with pytest.raises(CheckpointError, match=r"no 'general\.architecture'"):
        converted(tmp_path / "m.gguf", tmp_path / "other.gguf", "gguf")


def test_parts_hold_the_whole_and_become_one_file_again(tmp_path: Path) -> None:
    whole = converted(TINY, tmp_path / "m.gguf", "gguf")
    converted(TINY, tmp_path / "parts", "gguf", split=1_000_000)
    parts = sorted((tmp_path / "parts").iterdir())
    assert [part.name for part in parts][:1] == [f"parts-00001-of-{len(parts):05d}.gguf"]
    assert len(parts) > 4
    assert stored(tmp_path / "parts") == stored(tmp_path / "m.gguf")
    converted(parts[2], tmp_path / "one.gguf", "gguf")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    assert [step.name for step in whole.steps] == list(stored(tmp_path / "one.gguf"))


def test_shards_and_dtypes_of_folders(tmp_path: Path) -> None:
    source = make(tmp_path / "source", LlamaConfig(**BASE), torch.float32)
    converted(source, tmp_path / "shards", "hf", split=200_000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    assert stored(tmp_path / "shards") == stored(source)
    converted(tmp_path / "shards", tmp_path / "half", "hf", "bf16")
    assert sorted(path.name for path in (tmp_path / "half").glob("*.safetensors")) == ["model.safetensors"]
    wanted = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    found = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name in SETTINGS:
        assert (tmp_path / "half" / name).read_bytes() == (source / name).read_bytes()


def test_what_lies_beside_the_weights_comes_along_or_is_named(tmp_path: Path) -> None:
    source = make(tmp_path / "source", LlamaConfig(**BASE))
    for name in ("LICENSE", "quality.json", "vectors.npz", "modeling_x.py", ".hidden", "pytorch_model.bin.index.json"):
        (source / name).write_text(name)
    (source / "onnx").mkdir()
    assert converted(source, tmp_path / "m", "hf", "f32").notes == ["files: modeling_x.py, vectors.npz"]
    files = {"config.json", "generation_config.json", "model.safetensors", "LICENSE", "quality.json", *SETTINGS}
    assert {path.name for path in (tmp_path / "m").iterdir()} == files


def test_a_tokenizer_that_merges_nothing_is_refused_before_it_is_written(tmp_path: Path) -> None:
    source = make(tmp_path / "source", LlamaConfig(**BASE))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedError, match="BPE without any merges has no place in GGUF"):
        converted(source, tmp_path / "m.gguf", "gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_an_id_far_above_the_others_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    """As many tokens as the model has rows, and one of them with an id of none: the library makes a list up to the highest."""
    shutil.copytree(TINY, tmp_path / "m")
    path = tmp_path / "m" / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"][next(token for token, number in data["model"]["vocab"].items() if number == 3884)] = 1 << 16
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="the tokenizer has 65537 tokens and the model 4096"):
        converted(tmp_path / "m", tmp_path / "m.gguf", "gguf")


def test_any_architecture_can_change_its_dtype(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyKnows"], "x": 1}')
    values = {"a": torch.randn(3, 4), "codes": torch.arange(5), "e": torch.empty(0, 2), "s": torch.tensor(1.5)}
    save_file(values, tmp_path / "model.safetensors")
    converted(tmp_path, tmp_path.parent / "any-half", "hf", "f16")
    found = load_file(tmp_path.parent / "any-half" / "model.safetensors")
    assert torch.equal(found["a"], values["a"].half())
    assert torch.equal(found["codes"], values["codes"])


def test_halves_of_surrogate_pairs_are_carried(tmp_path: Path) -> None:
    """JSON can say them, UTF-8 can't."""
    folder = make(tmp_path / "m", LlamaConfig(**BASE))
    config = json.loads((folder / "config.json").read_text()) | {"note": "\ud800 é"}
    (folder / "config.json").write_text(json.dumps(config))
    converted(folder, tmp_path / "half", "hf", "f16")
    assert json.loads((tmp_path / "half" / "config.json").read_text(encoding="utf-8"))["note"] == "\ud800 é"


def test_settings_without_a_word_in_json_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", LlamaConfig(**BASE))
    config = (folder / "config.json").read_text().rstrip()
    (folder / "config.json").write_text(f'{config[:-1]}, "note": 1e999}}')  # which Python reads as infinite
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        converted(folder, tmp_path / "half", "hf", "f16")
    (folder / "config.json").write_text(config)
    with convert.open_source(folder) as source:
        made = convert.plan(source, "gguf")
        made.header["general.sampling.temp"] = GGUFValue(math.nan, GGUFValueType.FLOAT32)
        convert.write(source, made, tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        converted(tmp_path / "m.gguf", tmp_path / "back", "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.gguf"]


def test_every_type_of_whole_bytes_is_copied(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyKnows"]}')
    kinds = {name: dtype for name, (_, dtype) in DTYPES.items() if dtype is not None}
    values = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in kinds.items()}
    save_file(values, tmp_path / "model.safetensors")
    converted(tmp_path, tmp_path.parent / "any-copy", "hf")
    found = load_file(tmp_path.parent / "any-copy" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == kinds
    assert all(torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in values.items())


def test_blocks_become_floats_that_lose_nothing(tmp_path: Path) -> None:
    converted(TINY, tmp_path / "m.gguf", "gguf", "q4_0")
    made = converted(tmp_path / "m.gguf", tmp_path / "back", "hf")
    assert any("float32" in note for note in made.notes)
    found = load_file(tmp_path / "back" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}["blk.0.ffn_up.weight"]
    assert np.array_equal(found.numpy(), gguf.dequantize(reader.data, reader.tensor_type))
    converted(tmp_path / "m.gguf", tmp_path / "narrow", "hf", "bf16")
    assert torch.equal(
        load_file(tmp_path / "narrow" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"], found.bfloat16()
    )


def test_what_cannot_be_carried_is_named(tmp_path: Path) -> None:
    source = make(tmp_path / "source", LlamaConfig(**BASE, **rope("dynamic", factor=6.0)))
    config = json.loads((source / "config.json").read_text()) | {"secret_sauce": 3, "use_cache": True}
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").write_text('{"max_new_tokens": 5, "eos_token_id": [1, 2, 3, 4089]}')
    made = converted(source, tmp_path / "m.gguf", "gguf")
    notes = "\n".join(made.notes)
    for words in ("dynamic", "secret_sauce", "max_new_tokens", "eos_token_id 3"):
        assert words in notes
    assert "use_cache" not in notes


def test_ends_that_only_the_generation_config_knows_are_kept(tmp_path: Path) -> None:
    source = make(tmp_path / "source", LlamaConfig(**BASE))
    (source / "generation_config.json").write_text('{"eos_token_id": [4089, 17, 18]}')
    made = converted(source, tmp_path / "m.gguf", "gguf")
    assert made.notes == []
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert {4089, 17, 18} <= set(Tokenizer.from_gguf(checkpoint.config).eos_ids)


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ("---\nlicense: [1, 2\n---\n", "model card"),
        ("---\nname: 5\ntags: [a, 5]\nlicense: {a: b}\n---\n", "general.name"),
        ("---\nbase_model: [[[1]]]\n---\n", ""),
        ("---\n" + "a: &a [" + "x," * 50 + "]\n---\n", ""),
        ("\xff\xfe", ""),
    ],
)
def test_a_strange_model_card_breaks_nothing(card: str, words: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", LlamaConfig(**BASE))
    (source / "README.md").write_bytes(card.encode("latin-1"))
    made = converted(source, tmp_path / "m.gguf", "gguf")
    assert words in "\n".join(made.notes)


BAD: dict[str, tuple[dict[str, Any], type[NanovllmError], str]] = {
    "an activation that GGUF has no word for": ({"hidden_act": "gelu"}, UnsupportedError, "gelu"),
    "windows in some layers only": (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
         "layer_types": ["full_attention", "sliding_attention"]}, CheckpointError, "attn|bias|window",
    ),
    "another number of layers": ({"num_hidden_layers": 3}, CheckpointError, "missing"),
    "another width": ({"intermediate_size": 71}, CheckpointError, "misshapen"),
    "a tied head too little": ({"tie_word_embeddings": False, "num_hidden_layers": 1}, CheckpointError, "not part"),
    "an unknown architecture": ({"architectures": ["Foo"]}, UnsupportedError, "Foo"),
    "no architecture": ({"architectures": None}, CheckpointError, "architectures"),
    "weights that are quantized": ({"quantization_config": {"quant_method": "aqlm"}}, UnsupportedError, "quantized"),
    "fewer rows than tokens": ({"vocab_size": 4000}, CheckpointError, "misshapen"),
    "a model far larger than its files": ({"hidden_size": 1 << 20}, CheckpointError, "parameters"),
    "a scaling that nobody knows": ({"rope_parameters": {"rope_type": "x", "rope_theta": 1e4}}, UnsupportedError, "'x'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_folder_that_makes_no_gguf_is_refused(case: str, tmp_path: Path) -> None:
    changes, error, words = BAD[case]
    source = make(tmp_path / "source", LlamaConfig(**BASE))
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=words):
        converted(source, tmp_path / "m.gguf", "gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_windows_in_some_layers_are_refused_for_gguf(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 25, "max_window_layers": 1}
    source = make(tmp_path / "source", Qwen2Config(**BASE | window))
    with pytest.raises(UnsupportedError, match="window"):
        converted(source, tmp_path / "m.gguf", "gguf")


def test_numbers_that_a_type_cannot_hold_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    source = make(tmp_path / "source", LlamaConfig(**BASE | {"hidden_size": 96}), torch.float32)
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for value, kinds in ((1e6, ("f16",)), (float("nan"), ("q8_0", "q4_0"))):
        weights[name][3, 5] = value
        save_file(weights, source / "model.safetensors")
        for kind in kinds:
            with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
                converted(source, tmp_path / "m.gguf", "gguf", kind)
    converted(source, tmp_path / "m.gguf", "gguf", "bf16")  # plain numbers stay as they are, NaN too
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "source"]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("tokenizer.json", lambda t: t["model"].update(merges=[]), "merges"),
        ("tokenizer.json", lambda t: t.update(normalizer={"type": "Lowercase"}), "Lowercase"),
        ("tokenizer.json", lambda t: t["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="e+"), "pre-tokenizer"),
        ("tokenizer.json", lambda t: t.update(pre_tokenizer=None), "pre-tokenizer"),
        ("tokenizer.json", lambda t: t["model"].update(type="WordLevel", unk_token="a"), "WordLevel|broken"),
        ("tokenizer.json", lambda t: t.pop("model"), "broken"),
        ("tokenizer_config.json", lambda t: t.update(add_bos_token=True, bos_token="<|im_start|>"), None),
    ],
)  # fmt: skip
def test_tokenizers_without_an_equal_in_gguf_are_refused(
    name: str, change: Any, words: str | None, tmp_path: Path
) -> None:
    source = make(tmp_path / "source", LlamaConfig(**BASE))
    state = json.loads((source / name).read_text())
    change(state)
    (source / name).write_text(json.dumps(state))
    if words is None:
        converted(source, tmp_path / "m.gguf", "gguf")
        with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
            assert Tokenizer.from_gguf(checkpoint.config).encode("x") == Tokenizer.from_folder(source).encode("x")
    else:
        with pytest.raises(NanovllmError, match=words):
            converted(source, tmp_path / "m.gguf", "gguf")


def test_every_rope_of_the_model_tests_is_carried_or_named(tmp_path: Path) -> None:
    cases = [name for name, config in MODELS.items() if name.startswith("llama,") and config.hidden_act == "silu"]
    for number, case in enumerate(cases):
        config = MODELS[case]
        config = type(config)(**config.to_dict() | {"vocab_size": VOCAB, "num_hidden_layers": 1})
        source = make(tmp_path / f"{number}", config)
        made = converted(source, tmp_path / f"{number}.gguf", "gguf")
        named = " ".join(made.notes)
        assert ("dynamic" in case) == ("dynamic" in named), case
        assert ("mscale" in case) == ("mscale" in named), case
