"""Encoders: models whose tokens see those behind them, against transformers; texts are computed as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    DistilBertConfig,
    EuroBertConfig,
    Gemma3TextConfig,
    GteConfig,
    LlamaConfig,
    ModernBertConfig,
    MPNetConfig,
    NomicBertConfig,
    Qwen2Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from embedders import body, write_json, write_tokenizer
from nanovllm_cli import LLM
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import CheckpointError, NanovllmError, PromptTooLongError, UnsupportedError
from nanovllm_cli.model_spec import Pooling
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.registry_gguf import gguf_family
from nanovllm_cli.planning import check
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quantization.verify import compare, context_of, trace, trace_transformers
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.tensor_names import matrix_types
from test_convert import converted
from test_verify import verify

SIZES: dict[str, Any] = {
    "vocab_size": 4100, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 300,
}  # fmt: skip
BEHIND_PADDING = SIZES | {"max_position_embeddings": 302, "pad_token_id": 1, "layer_norm_eps": 1e-5}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, Any] = {
    "bert": BertConfig(**SIZES),
    "bert with tanh": BertConfig(**SIZES | {"hidden_act": "gelu_new"}),
    "distilbert": DistilBertConfig(vocab_size=4100, dim=48, hidden_dim=80, n_layers=3, n_heads=4, max_position_embeddings=300),
    "roberta": RobertaConfig(**BEHIND_PADDING),
    "xlm-roberta": XLMRobertaConfig(**BEHIND_PADDING | {"type_vocab_size": 1}),
    "modernbert": ModernBertConfig(
        **SIZES | ENDS | {"num_hidden_layers": 5}, local_attention=20, cls_token_id=1, sep_token_id=2
    ),
    "mpnet": MPNetConfig(**BEHIND_PADDING),
    "nomic-bert": NomicBertConfig(**SIZES),
    "gte": GteConfig(**SIZES),
    "gte without segments": GteConfig(**SIZES | {"type_vocab_size": 0, "hidden_act": "silu"}),
    "eurobert": EuroBertConfig(**SIZES | ENDS, num_key_value_heads=2, mask_token_id=3),
    "gemma": Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 7}, num_key_value_heads=2, head_dim=24, sliding_window=20, query_pre_attn_scalar=24,
        use_bidirectional_attention=True,
    ),
}  # fmt: skip
GENERATOR = torch.Generator().manual_seed(0)
TEXTS = [torch.randint(5, 4100, (count,), generator=GENERATOR).tolist() for count in (1, 9, 20, 171, 300)]
FLOATS = EngineConfig(threads=2, num_blocks=64, dtype="float32")


def pooled(hidden: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """hidden [T, H]."""
    return {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling]


def far(found: list[list[float]], expected: list[torch.Tensor]) -> float:
    """The largest distance of two vectors, as a share of the second's length."""
    pairs = zip(found, expected, strict=True)
    return max(float((torch.tensor(one).double() - other).norm() / other.norm()) for one, other in pairs)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """transformers' models and their folders."""
    found = {}
    for name, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp("model") / "m"
        torch.manual_seed(1)
        found[name] = body(config, folder), folder
        write_tokenizer(folder)
    return found


def expected(model: Any, pooling: Pooling) -> list[torch.Tensor]:
    with torch.no_grad():
        return [pooled(model(torch.tensor([ids])).last_hidden_state[0].double(), pooling) for ids in TEXTS]


@pytest.mark.parametrize("name", CONFIGS)
def test_vectors_are_those_of_transformers(name: str, made: dict[str, tuple[Any, Path]]) -> None:
    """In float32, whole texts of a token and of as many as there are positions, together."""
    model, folder = made[name]
    llm = LLM(folder, config=FLOATS)
    assert llm.max_model_len == 300
    for pooling in ("mean", "cls", "last"):
        assert far(llm.embed(TEXTS, pooling), expected(model, pooling)) < 3e-5  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bert", "modernbert", "mpnet", "gemma"])
def test_a_text_has_the_same_bits_whatever_is_computed_beside_it(name: str, made: dict[str, tuple[Any, Path]]) -> None:
    """Alone, in steps that hold less than it, and where the cache holds one at a time; in bfloat16, near to float32."""
    model, folder = made[name]
    together = LLM(folder, config=EngineConfig(threads=2, num_blocks=64, dtype="bfloat16")).embed(TEXTS, "mean")
    assert far(together, expected(model, "mean")) < 0.1
    narrow = EngineConfig(threads=1, num_blocks=19, dtype="bfloat16", max_num_batched_tokens=8, max_num_seqs=2, policy="priority")
    llm = LLM(folder, config=narrow)
    assert llm.embed(TEXTS, "mean") == together
    assert [llm.embed([ids], "mean")[0] for ids in TEXTS] == together
    assert llm.stats().prefix_hit_tokens == 0


def test_a_quantized_encoder_is_near_to_what_it_was(made: dict[str, tuple[Any, Path]]) -> None:
    model, folder = made["bert"]
    for quant, most in (("int8", 0.03), ("fp8", 0.06)):
        llm = LLM(folder, config=EngineConfig(threads=2, num_blocks=64, dtype="float32", quant=quant))
        assert far(llm.embed(TEXTS, "mean"), expected(model, "mean")) < most


def test_as_many_tokens_fit_as_there_are_positions(made: dict[str, tuple[Any, Path]]) -> None:
    llm = LLM(made["roberta"][1], config=FLOATS)
    with pytest.raises(PromptTooLongError, match="the prompt has 301 tokens, the context holds 300"):
        llm.embed([[5] * 301])
    with pytest.raises(UnsupportedError, match="it has no head to draw tokens from"):
        llm.generate([[5, 6]])


# ---- folders ----


def changed(folder: Path, target: Path, prefix: str, architecture: str, others: dict[str, torch.Tensor]) -> Path:
    """The same with another prefix of its tensors, and other ones beside them."""
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".json":
            target.joinpath(file.name).write_bytes(file.read_bytes())
    weights = {prefix + name: tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights | others, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    write_json(target / "config.json", config | {"architectures": [architecture]})
    return target


@pytest.mark.parametrize(
    ("name", "prefix", "architecture", "others"),
    [
        ("bert", "bert.", "BertForMaskedLM", ("cls.predictions.bias", "bert.pooler.dense.bias", "bert.embeddings.position_ids")),
        ("xlm-roberta", "roberta.", "XLMRobertaForMaskedLM", ("lm_head.dense.weight", "lm_head.bias")),
        ("mpnet", "mpnet.", "MPNetForMaskedLM", ("lm_head.bias", "mpnet.pooler.dense.bias", "mpnet.embeddings.position_ids")),
        ("distilbert", "distilbert.", "DistilBertForMaskedLM", ("vocab_transform.weight", "vocab_projector.bias")),
        ("modernbert", "model.", "ModernBertForMaskedLM", ("head.dense.weight", "decoder.bias")),
    ],
)
def test_heads_for_other_tasks_are_left_aside(
    name: str, prefix: str, architecture: str, others: tuple[str, ...], made: dict[str, tuple[Any, Path]], tmp_path: Path
) -> None:
    model, folder = made[name]
    own = {other: torch.ones(3, 5) for other in others}
    llm = LLM(changed(folder, tmp_path / "m", prefix, architecture, own), config=FLOATS)
    assert far(llm.embed(TEXTS, "mean"), expected(model, "mean")) < 1e-5
    with pytest.raises(CheckpointError, match=r"not part of the model: another\.weight"):
        LLM(changed(folder, tmp_path / "n", prefix, architecture, own | {"another.weight": torch.ones(2)}), config=FLOATS)


def test_numbers_of_positions_do_not_make_it_another_type(made: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    """Which many published BERTs have among their tensors: what is all float32 is computed so."""
    folder = changed(made["bert"][1], tmp_path / "m", "", "BertModel", {"embeddings.position_ids": torch.arange(300)[None]})
    llm = LLM(folder, config=EngineConfig(threads=2, num_blocks=64))
    assert llm.dtype == torch.float32
    with open_checkpoint(folder) as checkpoint:
        assert matrix_types(checkpoint) == {"F32"}


def test_a_folder_with_the_keys_of_gpt_2_is_the_same_nomic_bert(made: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    """As nomic-embed-text is published."""
    model, folder = made["nomic-bert"]
    target = changed(folder, tmp_path / "m", "", "NomicBertModel", {})
    own = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 4100, "n_embd": 48, "n_inner": 80,
        "n_layer": 3, "n_head": 4, "n_positions": 300, "layer_norm_epsilon": 1e-12, "activation_function": "swiglu",
        "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "qkv_proj_bias": False, "type_vocab_size": 2, "prenorm": False,
        "rotary_scaling_factor": None, "max_trained_positions": 2048,
    }  # fmt: skip
    write_json(target / "config.json", own)
    assert far(LLM(target, config=FLOATS).embed(TEXTS, "mean"), expected(model, "mean")) < 1e-5
    for key, value in {"prenorm": True, "mlp_fc1_bias": True, "num_experts": 8, "rotary_scaling_factor": 2.0}.items():
        write_json(target / "config.json", own | {key: value})
        with pytest.raises(UnsupportedError, match=f"a nomic-bert with {key} is not supported"):
            LLM(target, config=FLOATS)


def both_ways(architecture: str, config: Any, folder: Path, said: dict[str, Any]) -> tuple[Any, Path]:
    """A decoder whose config says that its tokens see those behind them, and the same of transformers."""
    model = body(config, folder)
    write_tokenizer(folder)
    written = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", written | {"architectures": [architecture]} | said)
    for layer in model.layers:
        layer.self_attn.is_causal = False
    return model, folder


@pytest.mark.parametrize(
    ("architecture", "config", "said"),
    [
        ("Qwen2Model", Qwen2Config(**SIZES, num_key_value_heads=2), {"is_causal": False}),
        ("LlamaBidirectionalModel", LlamaConfig(**SIZES, num_key_value_heads=2), {}),
    ],
    ids=["said", "by name"],
)
def test_decoders_that_were_turned_into_encoders(
    architecture: str, config: Any, said: dict[str, Any], tmp_path: Path
) -> None:
    """gte-Qwen2, llama-embed and their like."""
    model, folder = both_ways(architecture, config, tmp_path / "m", said)
    wanted = []
    for ids in TEXTS:
        mask = torch.zeros(1, 1, len(ids), len(ids))  # nothing is hidden
        with torch.no_grad():
            wanted.append(model(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0].double().mean(0))
    assert far(LLM(folder, config=FLOATS).embed(TEXTS, "mean"), wanted) < 1e-5


# ---- what is refused ----


@pytest.mark.parametrize(
    ("name", "said", "kind", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, UnsupportedError, "with 'relative_key' positions"),
        ("bert", {"is_decoder": True}, UnsupportedError, "bert as a decoder"),
        ("bert", {"hidden_act": "silu"}, UnsupportedError, "activation 'silu' is not supported"),
        ("bert", {"max_position_embeddings": 2**30}, CheckpointError, "describes a model of"),
        ("bert", {"type_vocab_size": -1}, CheckpointError, "'type_vocab_size' must be a whole number of at least 0"),
        ("bert", {"num_hidden_layers": 4}, CheckpointError, "16 missing"),
        ("roberta", {"max_position_embeddings": 2}, UnsupportedError, "2 positions, of which 2 are for padding"),
        ("roberta", {"pad_token_id": -5}, CheckpointError, "'pad_token_id' must be a whole number"),
        ("modernbert", {"norm_bias": True}, UnsupportedError, "norms have shifts"),
        ("eurobert", {"hidden_act": "relu"}, UnsupportedError, "activation 'relu'"),
    ],
)
def test_configs_that_are_refused(
    name: str, said: dict[str, Any], kind: type[NanovllmError], message: str, made: dict[str, tuple[Any, Path]], tmp_path: Path
) -> None:
    config = json.loads((made[name][1] / "config.json").read_text())
    folder = changed(made[name][1], tmp_path / "m", "", config["architectures"][0], {})
    write_json(folder / "config.json", config | said)
    with pytest.raises(kind, match=message):
        LLM(folder, config=FLOATS)


def test_windows_of_decoders_that_see_both_ways_are_refused(tmp_path: Path) -> None:
    """Nobody says whether they are as wide on either side, or together."""
    config = Qwen2Config(**SIZES, num_key_value_heads=2, use_sliding_window=True, sliding_window=20, max_window_layers=1)
    _, folder = both_ways("Qwen2Model", config, tmp_path / "m", {"is_causal": False})
    with open_checkpoint(folder) as checkpoint, pytest.raises(UnsupportedError, match="qwen2: attention in both directions"):
        read_spec(checkpoint, open_reader(checkpoint))


@pytest.mark.parametrize("name", ["T5EncoderModel", "DreamModel", "ElectraModel"])
def test_other_kinds_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}: this kind of attention in both directions"):
        hf_family({"architectures": [name]})


@pytest.mark.parametrize("name", ["neo-bert", "t5encoder"])
def test_so_are_their_files(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}: this kind of attention in both directions"):
        gguf_family({"general.architecture": name})



# ---- GGUF ----


def written(folder: Path, path: Path, outtype: str = "f32") -> tuple[Path, list[str]]:
    return path, converted(folder, path, "gguf", outtype=outtype).notes


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("bert with tanh", "mpnet") and "gte" not in name])
def test_files_are_the_same_models(name: str, made: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    model, folder = made[name]
    path, notes = written(folder, tmp_path / "m.gguf")
    assert not [note for note in notes if "config.json" in note]
    llm = LLM(path, config=FLOATS)
    assert llm.max_model_len == 300
    assert not llm.spec.has_head
    for pooling in ("mean", "cls"):
        assert far(llm.embed(TEXTS, pooling), expected(model, pooling)) < 3e-5  # type: ignore[arg-type]


def test_keys_of_files_are_those_of_llama_cpp(made: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    """As its converter has them (conversion/bert.py, gemma.py)."""
    keys = {
        "roberta": ("bert", {"context_length": 300, "attention.layer_norm_epsilon": 1e-5, "attention.causal": False}),
        "modernbert": ("modern-bert", {"attention.sliding_window": 20, "rope.freq_base": 160000.0, "rope.freq_base_swa": 1e4}),
        "nomic-bert": ("nomic-bert", {"rope.freq_base": 1000.0, "feed_forward_length": 80}),
        "gemma": ("gemma-embedding", {"attention.sliding_window": 20, "attention.layer_norm_rms_epsilon": 1e-6}),
    }
    for name, (architecture, wanted) in keys.items():
        path, _ = written(made[name][1], tmp_path / f"{name}.gguf")
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.config["general.architecture"] == architecture
            found = {key: checkpoint.config[f"{architecture}.{key}"] for key in wanted}
            assert found == pytest.approx(wanted)
    with open_checkpoint(tmp_path / "roberta.gguf") as checkpoint:
        assert checkpoint.info("position_embd.weight").shape == (300, 48)
        assert torch.equal(
            checkpoint.tensor("position_embd.weight"),
            load_file(made["roberta"][1] / "model.safetensors")["embeddings.position_embeddings.weight"][2:],
        )


def test_what_files_cannot_say_of_an_encoder_is_refused(made: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="the activation lone_gelu_tanh has no place in GGUF"):
        written(made["bert with tanh"][1], tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["bert", "nomic-bert", "modernbert", "gemma"])
def test_llama_cpp_computes_the_same(name: str, made: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    """It takes the approximation by tanh for all of GELU."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model, folder = made[name]
    path, _ = written(folder, tmp_path / "m.gguf")
    mean = llama_cpp.LLAMA_POOLING_TYPE_MEAN
    peer = llama_cpp.Llama(str(path), embedding=True, n_ctx=512, n_ubatch=512, pooling_type=mean, verbose=False)
    text = "Once upon a time there was a cat that sat on a mat, and a dog that did not."
    ids = peer.tokenize(text.encode(), add_bos=True, special=False)
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).last_hidden_state[0].double().mean(0)
    assert LLM(path, config=FLOATS).tokenizer.encode(text) == ids
    assert far([peer.embed(text, normalize=False)], [wanted]) < 5e-3


# ---- verify ----


@pytest.mark.parametrize("name", ["bert", "modernbert", "gemma"])
def test_layers_are_those_of_transformers(name: str, made: dict[str, tuple[Any, Path]]) -> None:
    """Of models without a head layers are all that is compared."""
    folder = made[name][1]
    ids = TEXTS[-1][: context_of(folder)]
    found = compare(trace(folder, ids, "float32", NullProgress()), trace_transformers(folder, ids), [])
    assert found.equal
    assert (found.same_top, found.top, found.layers[-1].name) == (None, None, f"layer {len(found.layers) - 2}, norm")


def test_a_file_of_an_encoder_is_verified_by_its_context(made: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    """Whose texts end as its folder's do, though that names no token which ends an answer."""
    path, _ = written(made["bert"][1], tmp_path / "m.gguf")
    done = verify(str(made["bert"][1]), str(path), "--tokens", "512")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "equal to the bit"
    assert "most likely" not in done.stdout


def test_a_plan_is_checked_without_answers(made: dict[str, tuple[Any, Path]]) -> None:
    prompts, answers = check._rates(LLM(made["bert"][1], config=FLOATS), 20, 0)
    assert prompts > 0
    assert answers == 0


def test_gte_as_it_is_published(made: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    """By the names of Alibaba's code, and with frequencies of a longer context (NTK, fixed), which transformers does not name."""
    model, folder = made["gte"]
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["NewModel"], "model_type": "new", "rope_theta": 20000.0, "rope_scaling": {"type": "ntk", "factor": 8.0},
        "position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True, "logn_attention_scale": False,
    }  # fmt: skip
    del config["rope_parameters"]
    write_json(tmp_path / "config.json", config)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    write_tokenizer(tmp_path)
    dims = 12
    own = torch.tensor([(20000.0 * 8) ** (-i / dims) / 8 ** (2 / dims) for i in range(0, dims, 2)], dtype=torch.float64)
    rotary = model.rotary_emb
    before = rotary.inv_freq
    rotary.inv_freq = own.float()
    try:
        wanted = expected(model, "cls")
    finally:
        rotary.inv_freq = before
    assert far(LLM(tmp_path, config=FLOATS).embed(TEXTS, "cls"), wanted) < 3e-5
    assert far(LLM(folder, config=FLOATS).embed(TEXTS, "cls"), wanted) > 1e-2
    for key, value in (("logn_attention_scale", True), ("position_embedding_type", "absolute"), ("pack_qkv", False)):
        write_json(tmp_path / "config.json", config | {key: value})
        with open_checkpoint(tmp_path) as checkpoint, pytest.raises(UnsupportedError, match=f"a GTE encoder with {key}"):
            read_spec(checkpoint, open_reader(checkpoint))
    mixed = config | {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.5}}
    write_json(tmp_path / "config.json", mixed)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(UnsupportedError, match="rope scaling 'ntk'"):
        read_spec(checkpoint, open_reader(checkpoint))
    write_json(tmp_path / "config.json", config | {"hidden_size": 4 << 17})
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match="dims; at most 65536 are believed"):
        read_spec(checkpoint, open_reader(checkpoint))
    with pytest.raises(UnsupportedError, match="GTE encoder"):
        converted(folder, tmp_path / "m.gguf", "gguf")
