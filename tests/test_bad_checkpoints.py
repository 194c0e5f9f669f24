"""Checkpoints that are broken, foreign or too large, end to end: what LLM raises, and what the command makes of it.

The files are damaged copies of two tiny random models, one in each format. Every case goes through both doors and must say in
one line what is wrong and in another what to do, with the exit code of its kind. Nothing is computed here, only loaded.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from engines import SMALL, random_model, save
from nanovllm_cli import LLM, EngineConfig
from nanovllm_cli.cli import app, output, signals
from nanovllm_cli.engine import cpu_platform
from nanovllm_cli.errors import CheckpointError, DoesNotFitError, NanovllmError, UnsupportedError
from nanovllm_cli.kernels import dense
from test_llm import VOCAB, write_byte_tokenizer

Tensors = dict[str, Any]
LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, CONTEXT = 2, 32, 4, 2, 8, 40, 64
MISSING = object()
BFLOAT16 = torch.bfloat16


class Expected(NamedTuple):
    """error: exactly this type. words: each is in the message or in the hint."""

    error: type[NanovllmError]
    words: tuple[str, ...]


class Doors:
    """Both ways to load a model: the library and, in this process, the command."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def refuse(self, path: Path, expected: Expected, flags: tuple[str, ...] = (), **config: Any) -> NanovllmError:
        with pytest.raises(NanovllmError) as raised:
            LLM(path, config=EngineConfig(threads=1, **config))
        error = raised.value
        assert type(error) is expected.error
        for word in expected.words:
            assert word in f"{error.message} {error.hint}"
        assert "\n" not in error.message
        assert error.hint
        assert "\n" not in error.hint
        code, out, err = self.command("run", str(path), "hi", "-n", "1", *flags)
        assert (code, out) == (error.exit_code, "")
        assert err.splitlines() == [
            f"error: {output.one_line(error.message)}",
            f"hint: {output.one_line(error.hint)}",
        ]
        return error

    def command(self, *words: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of `nanovllm` with these words."""
        output.console.cache_clear()
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            app.main(words)
        out, err = self.capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, out, err


@pytest.fixture
def doors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Doors]:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "NANOVLLM_DEBUG", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(signals, "install", lambda: None)
    monkeypatch.setattr(app, "_leave", sys.exit)
    yield Doors(capsys)
    output.console.cache_clear()


# ---- Hugging Face folders ----


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        **SMALL
        | {
            "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
            "max_position_embeddings": CONTEXT,
        }
    )  # fmt: skip
    folder = save(random_model(config), tmp_path_factory.mktemp("good"))
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture
def folder(good_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good_folder, tmp_path / "model"))


def test_the_undamaged_models_load(good_folder: Path, good_gguf: Path) -> None:
    for path in (good_folder, good_folder / "model.safetensors", good_gguf):
        with LLM(path, config=EngineConfig(threads=1, num_blocks=4)) as llm:
            assert (llm.spec.vocab_size, llm.spec.num_layers, llm.max_model_len) == (VOCAB, LAYERS, CONTEXT)


QWEN3_WINDOWS = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
QWEN3_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], Expected]] = {
    "unknown architecture": (
        {"architectures": ["RwkvForCausalLM"]},
        Expected(UnsupportedError, ("unknown architecture 'RwkvForCausalLM'", "docs/models.md lists what runs")),
    ),
    "another model of a name": (
        {"architectures": ["Qwen3VLForCausalLM"]},
        Expected(UnsupportedError, ("unknown architecture 'Qwen3VLForCausalLM'", "nearest that is known is Qwen3ForCausalLM")),
    ),
    "more experts a token than there are": (
        QWEN3_EXPERTS | {"num_experts_per_tok": 5}, Expected(CheckpointError, ("can't take 5 of 4 experts",)),
    ),
    "no experts a token": (
        QWEN3_EXPERTS | {"num_experts_per_tok": 0}, Expected(CheckpointError, ("'num_experts_per_tok' must be",)),
    ),
    "experts a token not said": (
        QWEN3_EXPERTS | {"num_experts_per_tok": MISSING}, Expected(CheckpointError, ("no 'num_experts_per_tok'",)),
    ),
    "minus one experts": (QWEN3_EXPERTS | {"num_experts": -1}, Expected(CheckpointError, ("'num_experts' must be",))),
    "a billion experts": (QWEN3_EXPERTS | {"num_experts": 10**9}, Expected(CheckpointError, ("1000000000 experts",))),
    "experts of a billion": (
        QWEN3_EXPERTS | {"moe_intermediate_size": 10**9}, Expected(CheckpointError, ("describes a model of",)),
    ),
    "as many experts as are believed, of nothing": (
        QWEN3_EXPERTS | {"num_experts": 1024, "moe_intermediate_size": 1, "num_hidden_layers": 1000, "head_dim": 2,
                         "num_attention_heads": 2},
        Expected(CheckpointError, ("describes a model of",)),
    ),
    "experts of no size": (
        QWEN3_EXPERTS | {"moe_intermediate_size": MISSING}, Expected(CheckpointError, ("no 'moe_intermediate_size'",)),
    ),
    "experts in every 0th layer": (
        QWEN3_EXPERTS | {"decoder_sparse_step": 0}, Expected(CheckpointError, ("'decoder_sparse_step' must be",)),
    ),
    "dense layers that are no list": (
        QWEN3_EXPERTS | {"mlp_only_layers": 1}, Expected(CheckpointError, ("'mlp_only_layers' must be a list",)),
    ),
    "experts that are not there": (
        QWEN3_EXPERTS, Expected(CheckpointError, ("don't match a qwen3_moe model", "missing: ", "mlp.experts.")),
    ),
    "no experts in a model of experts": (
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 0},
        Expected(CheckpointError, ("'num_local_experts' must be",)),
    ),
    "no architecture": ({"architectures": MISSING}, Expected(CheckpointError, ("no 'architectures'",))),
    "architecture is no list": ({"architectures": "LlamaForCausalLM"}, Expected(CheckpointError, ("'architectures'",))),
    **{
        f"no {key}": ({key: MISSING}, Expected(CheckpointError, (f"has no {key!r}",)))
        for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size")
    },
    **{
        f"{key} {value!r}": ({key: value}, Expected(CheckpointError, (f"{key!r} must be", f"not {value!r}")))
        for key, value in (
            ("hidden_size", 0), ("hidden_size", -32), ("hidden_size", "32"), ("hidden_size", 1.5), ("hidden_size", True),
            ("hidden_size", 2**31), ("num_hidden_layers", 0), ("num_attention_heads", -1), ("num_key_value_heads", 0),
            ("intermediate_size", [40]), ("vocab_size", 0), ("max_position_embeddings", 0), ("rms_norm_eps", 0),
            ("rms_norm_eps", "tiny"), ("tie_word_embeddings", "no"), ("hidden_act", 3), ("head_dim", -8),
        )
    },
    "integer past any float": ({"rms_norm_eps": 10**400}, Expected(CheckpointError, ("'rms_norm_eps' must be",))),
    "heads that do not divide": (
        {"num_attention_heads": 3}, Expected(CheckpointError, ("3 query heads can't share 2 key-value heads",)),
    ),
    "more heads than numbers": (
        {"num_attention_heads": 64, "head_dim": MISSING}, Expected(CheckpointError, ("'head_dim' must be", "not 0")),
    ),
    "odd heads": ({"head_dim": 7}, Expected(UnsupportedError, ("head dim 7",))),
    "a billion layers": ({"num_hidden_layers": 10**9}, Expected(CheckpointError, ("1000000000 layers", "1024"))),
    "a vocabulary of a billion": ({"vocab_size": 10**9}, Expected(CheckpointError, ("describes a model of 3.2e+10",))),
    "layers of a billion": ({"hidden_size": 10**9}, Expected(CheckpointError, ("describes a model of",))),
    "everything huge": (
        dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "head_dim"), 2**31 - 2),
        Expected(CheckpointError, ("describes a model of",)),
    ),
    "twice as wide": (
        {"intermediate_size": 80},
        Expected(CheckpointError, ("mlp.down_proj.weight (expected [32, 80], found [32, 40])", "and 1 more")),
    ),
    "one layer too many": (
        {"num_hidden_layers": 3},
        Expected(CheckpointError, ("9 missing: model.layers.2.input_layernorm.weight", "and 4 more")),
    ),
    "one layer too few": (
        {"num_hidden_layers": 1},
        Expected(CheckpointError, ("9 not part of the model: model.layers.1.input_layernorm.weight",)),
    ),
    "unknown activation": ({"hidden_act": "relu6"}, Expected(UnsupportedError, ("activation 'relu6'", "known: gelu"))),
    "unknown rope scaling": (
        {"rope_parameters": {"rope_type": "spiral"}},
        Expected(UnsupportedError, ("rope scaling 'spiral'", "known: default, linear")),
    ),
    "rope scaling without its factor": (
        {"rope_parameters": {"rope_type": "linear"}}, Expected(CheckpointError, ("rope_parameters has no 'factor'",)),
    ),
    "rope scaling by nothing": (
        {"rope_parameters": {"rope_type": "linear", "factor": 0}}, Expected(CheckpointError, ("'factor' must be",)),
    ),
    "rope scaling past any float": (
        {"rope_parameters": {"rope_type": "linear", "factor": 1e308}}, Expected(CheckpointError, ("'factor' must be",)),
    ),
    "rope scaling by next to nothing": (
        {"rope_parameters": {"rope_type": "linear", "factor": 1e-30}}, Expected(CheckpointError, ("'factor' must be",)),
    ),
    "yarn by next to nothing": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2, "beta_fast": 1e-320}},
        Expected(CheckpointError, ("'beta_fast' must be",)),
    ),
    "dynamic rope of two dims": (
        {"partial_rotary_factor": 0.25, "rope_parameters": {"rope_type": "dynamic", "factor": 2}},
        Expected(UnsupportedError, ("dynamic scaling of 2 rotary dims",)),
    ),
    "rope of base 1": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}},
        Expected(CheckpointError, ("rotary base must be above 1",)),
    ),
    "longrope of one position": (
        {
            "rope_parameters": {
                "rope_type": "longrope", "factor": 2, "original_max_position_embeddings": 1,
                "short_factor": [1] * 4, "long_factor": [1] * 4,
            }
        },
        Expected(CheckpointError, ("'original_max_position_embeddings' must be",)),
    ),
    "longrope with too few divisors": (
        {"rope_parameters": {"rope_type": "longrope", "factor": 2, "short_factor": [1], "long_factor": [1] * 4}},
        Expected(CheckpointError, ("'short_factor' must be a list of 4 numbers",)),
    ),
    "more rotary dims than a head has": (
        {"partial_rotary_factor": 2.0}, Expected(CheckpointError, ("16 rotary dims do not fit heads of 8",)),
    ),
    "no rotary dims": ({"partial_rotary_factor": 0.1}, Expected(CheckpointError, ("0 rotary dims",))),
    "rope parameters that are none": ({"rope_parameters": [1]}, Expected(CheckpointError, ("'rope_parameters' must be",))),
    "too many layer types": (
        QWEN3_WINDOWS | {"layer_types": ["full_attention"] * 5},
        Expected(CheckpointError, ("'layer_types' must be a list of 2 kinds",)),
    ),
    "unknown layer type": (
        QWEN3_WINDOWS | {"layer_types": ["full_attention", "mamba"]},
        Expected(UnsupportedError, ("layer type 'mamba'", "known: full_attention")),
    ),
    "no window": (QWEN3_WINDOWS | {"sliding_window": -1}, Expected(CheckpointError, ("'sliding_window' must be",))),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_config_that_makes_no_sense(case: str, folder: Path, doors: Doors) -> None:
    changes, expected = CONFIGS[case]
    path = folder / "config.json"
    config = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not MISSING}
    if not changes.keys() & {"rope_parameters", "partial_rotary_factor"}:
        assert config["rope_parameters"]  # transformers 5 writes it, so that the tests below replace something
    path.write_text(json.dumps(config))
    doors.refuse(folder, expected)


def poison(name: str, value: float, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].to(dtype)
        tensors[name].view(-1)[-1] = value

    return change


def replace(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = make(tensors[name]).contiguous()

    return change


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
TENSORS: dict[str, tuple[Callable[[Tensors], Any], Expected]] = {
    "missing": (lambda t: t.pop(UP), Expected(CheckpointError, ("don't match a llama model", f"1 missing: {UP}"))),
    "extra": (
        lambda t: t.update({"model.layers.0.router.weight": torch.ones(4)}),
        Expected(CheckpointError, ("1 not part of the model: model.layers.0.router.weight",)),
    ),
    "misshapen": (
        replace(UP, lambda t: t[:-1]), Expected(CheckpointError, (f"{UP} (expected [40, 32], found [39, 32])",)),
    ),
    "transposed": (replace(UP, torch.t), Expected(CheckpointError, (f"{UP} (expected [40, 32], found [32, 40])",))),
    "empty": (
        replace(NORM, lambda t: t[:0]), Expected(CheckpointError, (f"{NORM} (expected [32], found [0])",)),
    ),
    "all at once": (
        lambda t: (t.pop(UP), t.update(more=torch.ones(1)), t.update({NORM: torch.ones(31)})),
        Expected(CheckpointError, (f"1 missing: {UP}", "1 not part of the model: more", f"{NORM} (expected [32]")),
    ),
    "NaN": (poison(UP, torch.nan), Expected(CheckpointError, (repr(UP), "NaN or infinite"))),
    "infinity": (poison(UP, torch.inf, BFLOAT16), Expected(CheckpointError, (repr(UP), "NaN or infinite"))),
    "minus infinity": (poison(NORM, -torch.inf), Expected(CheckpointError, (repr(NORM), "NaN or infinite"))),
    "NaN of 16 bits": (
        poison("lm_head.weight", torch.nan, torch.float16), Expected(CheckpointError, ("'lm_head.weight'", "NaN")),
    ),
    "integers": (replace(UP, lambda t: t.to(torch.int8)), Expected(CheckpointError, (repr(UP), "torch.int8"))),
    "floats of 8 bits": (
        replace(UP, lambda t: t.to(torch.float8_e4m3fn)), Expected(UnsupportedError, (repr(UP), "float8_e4m3fn")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit(case: str, folder: Path, doors: Doors) -> None:
    change, expected = TENSORS[case]
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    doors.refuse(folder, expected)


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return damage


def write(name: str, content: str | bytes) -> Callable[[Path], Any]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def remove(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def index(shard: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))

    return damage


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
WEIGHTS = "model.safetensors"
FILES: dict[str, tuple[Callable[[Path], Any], Expected]] = {
    "weights cut off": (cut(WEIGHTS, 0.7), Expected(CheckpointError, (WEIGHTS, "download it again"))),
    "weights cut off in the header": (cut(WEIGHTS, 0.001), Expected(CheckpointError, (WEIGHTS, "download it again"))),
    "weights empty": (write(WEIGHTS, b""), Expected(CheckpointError, ("the file is empty",))),
    "a pointer of git-lfs": (write(WEIGHTS, LFS), Expected(CheckpointError, (WEIGHTS, "git lfs pull"))),
    "a page of a web server": (write(WEIGHTS, "<!doctype html>"), Expected(CheckpointError, ("a page of the web", "/resolve/"))),
    "a page of a hub": (write("config.json", "\n<!DOCTYPE html>"), Expected(CheckpointError, ("config.json: a page",))),
    "pickled weights only": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        Expected(UnsupportedError, ("pytorch_model.bin", "never opened")),
    ),
    "no weights": (remove(WEIGHTS), Expected(CheckpointError, ("no .safetensors or .gguf file",))),
    "an index that leads out": (
        index("../model/model-00001-of-00001.safetensors"),
        Expected(CheckpointError, ("not a file of this folder", "do not use this model")),
    ),
    "an index to pickles": (index("model.bin"), Expected(UnsupportedError, ("not a .safetensors file",))),
    "an index to nothing": (index("other.safetensors"), Expected(CheckpointError, ("1 of 1 shards are missing",))),
    "no config": (remove("config.json"), Expected(CheckpointError, ("no config.json",))),
    "config cut off": (cut("config.json", 0.5), Expected(CheckpointError, ("config.json", "not JSON"))),
    "config that is no object": (write("config.json", "[1]"), Expected(CheckpointError, ("config.json", "an array"))),
    "config that is empty": (write("config.json", "{}"), Expected(CheckpointError, ("no 'architectures'",))),
    "no tokenizer": (remove("tokenizer.json"), Expected(CheckpointError, ("no tokenizer in model", "copy"))),
    "tokenizer cut off": (cut("tokenizer.json", 0.5), Expected(CheckpointError, ("tokenizer.json",))),
    "tokenizer settings that are no JSON": (
        write("tokenizer_config.json", "{"), Expected(CheckpointError, ("tokenizer_config.json is not JSON",)),
    ),
    "tokenizer of another model": (
        lambda folder: write_byte_tokenizer(folder, tuple(f"<|{i}|>" for i in range(300))),
        Expected(CheckpointError, ("the tokenizer has 556 tokens and the model 260", "different models")),
    ),
    "defaults that make no sense": (
        write("generation_config.json", '{"temperature": "hot"}'), Expected(CheckpointError, ("temperature", "'hot'")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_broken_or_missing(case: str, folder: Path, doors: Doors) -> None:
    damage, expected = FILES[case]
    damage(folder)
    doors.refuse(folder, expected)


# ---- GGUF ----

KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": CONTEXT,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": ["t", "1", *(f"t{i}" for i in range(1, VOCAB - 1))],
    "tokenizer.ggml.merges": ["t 1"],
    "tokenizer.ggml.eos_token_id": 0,
}


def gguf_tensors() -> Tensors:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns), np.float32)

    tensors: Tensors = {"token_embd.weight": matrix(VOCAB, HIDDEN), "output_norm.weight": np.ones(HIDDEN, np.float32)}
    q, kv = HEADS * DIM, KV_HEADS * DIM
    for i in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", q, HIDDEN), ("attn_k", kv, HIDDEN), ("attn_v", kv, HIDDEN), ("attn_output", HIDDEN, q),
            ("ffn_gate", INNER, HIDDEN), ("ffn_up", INNER, HIDDEN), ("ffn_down", HIDDEN, INNER),
        ):  # fmt: skip
            tensors[f"blk.{i}.{name}.weight"] = matrix(rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{i}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    return tensors


def write_gguf(path: Path, keys: Mapping[str, Any], tensors: Tensors) -> Path:
    writer = gguf.GGUFWriter(str(path), "unused")
    writer.kv_data[0].clear()  # what the constructor says about itself
    for key, value in keys.items():
        kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        kinds[type(value)](key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def good_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "good.gguf", KEYS, gguf_tensors())


GGUF_KEYS: dict[str, tuple[dict[str, Any], Expected]] = {
    "unknown architecture": (
        {"general.architecture": "rwkv7"},
        Expected(UnsupportedError, ("unknown architecture 'rwkv7'", "docs/models.md lists what runs")),
    ),
    "no architecture": ({"general.architecture": MISSING}, Expected(CheckpointError, ("no 'general.architecture'",))),
    "no heads": (
        {"llama.attention.head_count": MISSING}, Expected(CheckpointError, ("no 'llama.attention.head_count'",)),
    ),
    "heads by layer": (
        {"llama.attention.head_count": [4, 4]}, Expected(CheckpointError, ("'llama.attention.head_count' must be",)),
    ),
    "no width": ({"llama.embedding_length": 0}, Expected(CheckpointError, ("'llama.embedding_length' must be",))),
    "a billion layers": ({"llama.block_count": 10**9}, Expected(CheckpointError, ("1000000000 layers",))),
    "layers of a billion": ({"llama.feed_forward_length": 10**9}, Expected(CheckpointError, ("describes a model of",))),
    "heads that do not divide": (
        {"llama.attention.head_count": 3}, Expected(CheckpointError, ("3 query heads can't share 2",)),
    ),
    "more experts a token than there are": (
        {"llama.expert_count": 8, "llama.expert_used_count": 9}, Expected(CheckpointError, ("can't take 9 of 8 experts",)),
    ),
    "experts a token not said": ({"llama.expert_count": 8}, Expected(CheckpointError, ("no 'llama.expert_used_count'",))),
    "a million experts": (
        {"llama.expert_count": 10**6, "llama.expert_used_count": 1}, Expected(CheckpointError, ("1000000 experts",)),
    ),
    "values of another width": (
        {"llama.attention.value_length": 16}, Expected(UnsupportedError, ("keys and values of different lengths",)),
    ),
    "too many rotary dims": ({"llama.rope.dimension_count": 64}, Expected(CheckpointError, ("64 rotary dims",))),
    "unknown rope scaling": (
        {"llama.rope.scaling.type": "spiral", "llama.rope.scaling.factor": 2.0},
        Expected(UnsupportedError, ("rope scaling 'spiral'", "known: none, linear")),
    ),
    "unknown tokenizer": ({"tokenizer.ggml.model": "rwkv"}, Expected(UnsupportedError, ("tokenizer model 'rwkv'",))),
    "no tokenizer": ({"tokenizer.ggml.model": MISSING}, Expected(UnsupportedError, ("has no tokenizer",))),
    "tokenizer of another model": (
        {"tokenizer.ggml.tokens": ["t", "1", *(f"t{i}" for i in range(1, 400))]},
        Expected(CheckpointError, ("the tokenizer has 401 tokens and the model 260",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GGUF_KEYS)
def test_metadata_that_make_no_sense(case: str, tmp_path: Path, doors: Doors) -> None:
    changes, expected = GGUF_KEYS[case]
    keys = {key: value for key, value in (KEYS | changes).items() if value is not MISSING}
    doors.refuse(write_gguf(tmp_path / "bad.gguf", keys, gguf_tensors()), expected)


EXPERTS = {"llama.expert_count": 3, "llama.expert_used_count": 2}
UP_EXPERTS = "blk.1.ffn_up_exps.weight"
STACKS: dict[str, tuple[Callable[[Tensors], Any], Expected]] = {
    "a stack is missing": (
        lambda t: t.pop(UP_EXPERTS), Expected(CheckpointError, ("3 missing: blk.1.ffn_up_exps.0.weight",)),
    ),
    "an expert is missing": (
        lambda t: t.update({UP_EXPERTS: t[UP_EXPERTS][:2]}),
        Expected(CheckpointError, ("1 missing: blk.1.ffn_up_exps.2.weight",)),
    ),
    "an expert too many": (
        lambda t: t.update({UP_EXPERTS: np.ones((4, INNER, HIDDEN), np.float32)}),
        Expected(CheckpointError, ("1 not part of the model: blk.1.ffn_up_exps.3.weight",)),
    ),
    "of another shape": (
        lambda t: t.update({UP_EXPERTS: t[UP_EXPERTS].transpose(0, 2, 1).copy()}),
        Expected(CheckpointError, ("3 of the wrong shape: blk.1.ffn_up_exps.0.weight (expected [40, 32], found [32, 40])",)),
    ),
    "not stacked": (
        lambda t: t.update({UP_EXPERTS: t[UP_EXPERTS][:, 0].copy()}),
        Expected(CheckpointError, ("3 missing: blk.1.ffn_up_exps.0.weight", f"1 not part of the model: {UP_EXPERTS}")),
    ),
    "ten thousand experts": (
        lambda t: t.update({UP_EXPERTS: np.ones((10_000, 1, 2), np.float32)}),
        Expected(CheckpointError, (repr(UP_EXPERTS), "10000 experts", "at most 1024")),
    ),
    "a router of another shape": (
        lambda t: t.update({"blk.0.ffn_gate_inp.weight": np.ones((2, HIDDEN), np.float32)}),
        Expected(CheckpointError, ("blk.0.ffn_gate_inp.weight (expected [3, 32], found [2, 32])",)),
    ),
    "NaN": (
        lambda t: t[UP_EXPERTS].__setitem__((1, 3, 5), np.nan),
        Expected(CheckpointError, ("'blk.1.ffn_up_exps.1.weight'", "NaN")),
    ),
}  # fmt: skip


def stacked_tensors() -> Tensors:
    rng, tensors = np.random.default_rng(1), gguf_tensors()
    for i in range(LAYERS):
        for part, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            del tensors[f"blk.{i}.ffn_{part}.weight"]
            tensors[f"blk.{i}.ffn_{part}_exps.weight"] = rng.standard_normal((3, *shape), np.float32)
        tensors[f"blk.{i}.ffn_gate_inp.weight"] = rng.standard_normal((3, HIDDEN), np.float32)
    return tensors


@pytest.mark.parametrize("case", STACKS)
def test_experts_that_do_not_fit(case: str, tmp_path: Path, doors: Doors) -> None:
    change, expected = STACKS[case]
    tensors = stacked_tensors()
    change(tensors)
    doors.refuse(write_gguf(tmp_path / "bad.gguf", KEYS | EXPERTS, tensors), expected)


def test_undamaged_experts_load(tmp_path: Path) -> None:
    with LLM(write_gguf(tmp_path / "m.gguf", KEYS | EXPERTS, stacked_tensors()), config=EngineConfig(threads=1)) as llm:
        assert llm.num_parameters == sum(tensor.size for tensor in stacked_tensors().values())


def poison_gguf(name: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name].flat[-1] = value

    return change


GGUF_TENSORS: dict[str, tuple[Callable[[Tensors], Any], Expected]] = {
    "no embedding": (
        lambda t: t.pop("token_embd.weight"), Expected(CheckpointError, ("'token_embd.weight' is missing", "incomplete")),
    ),
    "missing": (
        lambda t: t.pop("blk.1.ffn_up.weight"), Expected(CheckpointError, ("1 missing: blk.1.ffn_up.weight",)),
    ),
    "extra": (
        lambda t: t.update({"blk.0.ffn_gate_inp.weight": np.ones(8, np.float32)}),
        Expected(CheckpointError, ("1 not part of the model: blk.0.ffn_gate_inp.weight",)),
    ),
    "misshapen": (
        lambda t: t.update({"blk.0.attn_k.weight": np.ones((8, HIDDEN), np.float32)}),
        Expected(CheckpointError, ("blk.0.attn_k.weight (expected [16, 32], found [8, 32])",)),
    ),
    "NaN": (
        poison_gguf("blk.1.ffn_down.weight", np.nan), Expected(CheckpointError, ("'blk.1.ffn_down.weight'", "NaN")),
    ),
    "infinity": (poison_gguf("output_norm.weight", np.inf), Expected(CheckpointError, ("'output_norm.weight'", "NaN"))),
    "NaN in rope divisors": (
        lambda t: t.update({"rope_freqs.weight": np.full(DIM // 2, np.nan, np.float32)}),
        Expected(CheckpointError, ("'rope_freqs.weight' must hold 4 positive numbers",)),
    ),
    "too many rope divisors": (
        lambda t: t.update({"rope_freqs.weight": np.ones(DIM, np.float32)}),
        Expected(CheckpointError, ("'rope_freqs.weight' must hold 4 positive numbers",)),
    ),
    "rope divisors that would fill the memory": (
        lambda t: t.update({"rope_freqs.weight": np.ones((1 << 16) + 1, np.float32)}),
        Expected(CheckpointError, ("'rope_freqs.weight' holds 65537 numbers",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GGUF_TENSORS)
def test_gguf_tensors_that_do_not_fit(case: str, tmp_path: Path, doors: Doors) -> None:
    change, expected = GGUF_TENSORS[case]
    tensors = gguf_tensors()
    change(tensors)
    doors.refuse(write_gguf(tmp_path / "bad.gguf", KEYS, tensors), expected)


def test_a_bias_of_nothing_that_the_model_does_not_have_adds_nothing(tmp_path: Path) -> None:
    tensors = gguf_tensors() | {"blk.1.attn_k.bias": np.empty(0, np.float32)}
    with LLM(write_gguf(tmp_path / "odd.gguf", KEYS, tensors), config=EngineConfig(threads=1, num_blocks=4)) as llm:
        assert llm.spec.num_layers == LAYERS


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda data: data[: len(data) * 2 // 3], Expected(CheckpointError, ("bytes", "download it again"))),
        (lambda data: data[:500], Expected(CheckpointError, ("bad.gguf", "download it again"))),
        (lambda data: LFS.encode(), Expected(CheckpointError, ("bad.gguf: what Git LFS keeps", "git lfs pull"))),
        (lambda data: b"PK\3\4" + data, Expected(CheckpointError, ("not a GGUF file",))),
        (lambda data: b"lmgg" + data[4:], Expected(UnsupportedError, ("before GGUF",))),
        (lambda data: data[:4] + b"\1\0\0\0" + data[8:], Expected(UnsupportedError, ("GGUF version 1",))),
    ],
    ids=["cut off", "cut off in the header", "a pointer of git-lfs", "an archive", "an older format", "an older version"],
)
def test_gguf_files_that_are_none(
    make: Callable[[bytes], bytes], expected: Expected, good_gguf: Path, tmp_path: Path, doors: Doors
) -> None:
    (tmp_path / "bad.gguf").write_bytes(make(good_gguf.read_bytes()))
    doors.refuse(tmp_path / "bad.gguf", expected)


def test_other_formats_are_unsupported(good_gguf: Path, tmp_path: Path, doors: Doors) -> None:
    for name in ("model.onnx", "model.pt"):
        (tmp_path / name).write_bytes(b"\x80\x04" + bytes(100))
        doors.refuse(tmp_path / name, Expected(UnsupportedError, (name,)))


# ---- what this machine, or the model, is too small for ----


def test_dtype_that_a_cpu_does_not_compute(good_folder: Path, doors: Doors) -> None:
    expected = Expected(UnsupportedError, ("float16", "--dtype bfloat16"))
    assert doors.refuse(good_folder, expected, ("--dtype", "float16"), dtype="float16").exit_code == 6


def test_context_larger_than_the_model(good_folder: Path, doors: Doors) -> None:
    expected = Expected(DoesNotFitError, ("100000 tokens was asked for; the model holds 64", "--ctx-size 64 or less"))
    assert doors.refuse(good_folder, expected, ("-c", "100000"), max_model_len=100_000).exit_code == 5


def test_kv_cache_smaller_than_a_block_or_than_the_context(good_folder: Path, doors: Doors) -> None:
    expected = Expected(DoesNotFitError, ("no room for the KV cache", "KiB"))
    doors.refuse(good_folder, expected, ("--kv-cache", "1000"), kv_cache_bytes=1000)
    expected = Expected(DoesNotFitError, ("a context of 64 tokens needs", "--ctx-size 32 or less"))
    room = 2 * 16 * LAYERS * 2 * KV_HEADS * 16 * 4  # two blocks; heads are padded to 16 dims
    flags = ("--kv-cache", str(room), "-c", "64")
    error = doors.refuse(good_folder, expected, flags, kv_cache_bytes=room, max_model_len=64)
    assert error.exit_code == 5


def test_weights_larger_than_free_memory(folder: Path, doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has a hole of 4 GiB, which nobody may read."""
    rows, width = 1 << 21, 1024
    entry = {"dtype": "BF16", "shape": [rows, width], "data_offsets": [0, 2 * rows * width]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * rows * width)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows, "hidden_size": width}))
    monkeypatch.setattr(cpu_platform, "available_bytes", lambda: 3 << 30)
    needed = f"the weights need {dense.num_bytes(rows, width, torch.bfloat16) / 2**30:.1f} GiB"
    expected = Expected(DoesNotFitError, (needed, "3.0 GiB of memory are free", "smaller model"))
    assert doors.refuse(folder, expected).exit_code == 5
