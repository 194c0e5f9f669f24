"""Encoders that know positions by how far keys lie from queries: MPNet's buckets, and Jina's slopes (ALiBi)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from embedders import body, write_json, write_tokenizer
from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from nanovllm_cli import LLM
from nanovllm_cli.errors import CheckpointError, PromptTooLongError, UnsupportedError
from nanovllm_cli.layers.distances import alibi_slopes, buckets
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_convert import converted
from test_cuda_encoders import embed, engine_on
from test_encoders import FLOATS, TEXTS, changed, far

SIZES: dict[str, Any] = {
    "vocab_size": 4100, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "max_position_embeddings": 300,
}  # fmt: skip


def published_slopes(count: int) -> list[float]:
    """As ALiBi's authors write them: beyond a power of two, every other one of twice as many."""
    if math.log2(count).is_integer():
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start**place for place in range(1, count + 1)]
    below = 2 ** math.floor(math.log2(count))
    return published_slopes(below) + published_slopes(2 * below)[0::2][: count - below]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 12, 16, 20, 40])
def test_slopes_are_those_of_alibi(count: int) -> None:
    assert alibi_slopes(count).tolist() == pytest.approx(published_slopes(count))
    assert alibi_slopes(8).tolist() == [2.0**-place for place in range(1, 9)]


@pytest.mark.parametrize(("count", "farthest"), [(32, 128), (8, 20), (64, 500)])
def test_buckets_are_those_of_mpnet(count: int, farthest: int) -> None:
    places = torch.arange(-700, 700)
    theirs = MPNetEncoder.relative_position_bucket(places, num_buckets=count, max_distance=farthest)
    assert torch.equal(buckets(places, count, farthest), theirs)


class Gated(torch.nn.Module):
    """What Jina's layers have in place of BERT's MLP: gate and up in one, without a bias."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gated_layers = torch.nn.Linear(width, 2 * inner, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gated_layers(hidden).chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate) * up


def jina(folder: Path, heads: int) -> Any:
    """transformers' BERT without positions and with such MLPs, saved as Jina's models are published; called with ids, it adds to
    its scores what ALiBi does."""
    model = body(BertConfig(**SIZES, num_attention_heads=heads), folder)
    torch.manual_seed(5)
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.zero_()
        for layer in model.encoder.layer:
            layer.intermediate = Gated(SIZES["hidden_size"], SIZES["intermediate_size"])
            torch.nn.init.normal_(layer.intermediate.gated_layers.weight, std=0.3)
    model.eval()
    slopes = torch.tensor(published_slopes(heads))

    def run(ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1])
        biases = -slopes[:, None, None] * (places[None] - places[:, None]).abs()
        hidden = model.embeddings(ids)
        for layer in model.encoder.layer:
            hidden = layer(hidden, attention_mask=biases[None])
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return hidden

    weights = {}
    for name, tensor in model.state_dict().items():
        ours = name.replace("intermediate.gated_layers", "mlp.gated_layers")
        if ".output." in name and "attention" not in name:
            ours = name.replace("output.dense", "mlp.wo").replace("output.LayerNorm", "mlp.layernorm")
        if "position_embeddings" not in name and "position_ids" not in name:
            weights[ours] = tensor.contiguous()
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    own = {"architectures": ["JinaBertForMaskedLM"], "position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    write_json(folder / "config.json", config | own)
    write_tokenizer(folder)
    return run


def means(run: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [run(torch.tensor([ids]))[0].double().mean(0) for ids in TEXTS]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("jina") / "m"
    return jina(folder, heads=6), folder


def test_vectors_are_those_of_bert_with_such_scores(made: tuple[Any, Path]) -> None:
    run, folder = made
    llm = LLM(folder, config=FLOATS)
    assert llm.max_model_len == 300
    assert far(llm.embed(TEXTS, "mean"), means(run)) < 1e-5
    lone = LLM(folder, config=replace(FLOATS, threads=1, max_num_batched_tokens=16, max_num_seqs=1))
    assert lone.embed(TEXTS, "mean") == llm.embed(TEXTS, "mean")
    with pytest.raises(PromptTooLongError, match="301 tokens"):
        llm.embed([[5] * 301])


def test_files_are_the_same_models(made: tuple[Any, Path], tmp_path: Path) -> None:
    run, folder = made
    converted(folder, tmp_path / "m.gguf", "gguf", outtype="f32")
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.config["general.architecture"] == "jina-bert-v2"
        assert checkpoint.info("blk.0.ffn_gate.weight").shape == checkpoint.info("blk.0.ffn_up.weight").shape == (80, 48)
        assert {"blk.0.ffn_down.bias", "blk.0.attn_output_norm.bias", "blk.0.layer_output_norm.bias"} <= set(checkpoint.names())
    assert far(LLM(tmp_path / "m.gguf", config=FLOATS).embed(TEXTS, "mean"), means(run)) < 1e-5


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_it_can_be_rounded(made: tuple[Any, Path], quant: str) -> None:
    run, folder = made
    llm = LLM(folder, config=replace(FLOATS, quant=quant))
    assert far(llm.embed(TEXTS, "mean"), means(run)) < {"int8": 0.05, "fp8": 0.15}[quant]


def test_llama_cpp_computes_the_same(made: tuple[Any, Path], tmp_path: Path) -> None:
    """It takes the approximation by tanh for all of GELU."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    run, folder = made
    converted(folder, tmp_path / "m.gguf", "gguf", outtype="f32")
    mean = llama_cpp.LLAMA_POOLING_TYPE_MEAN
    peer = llama_cpp.Llama(str(tmp_path / "m.gguf"), embedding=True, n_ctx=512, n_ubatch=512, pooling_type=mean, verbose=False)
    text = "Once upon a time there was a cat that sat on a mat, and a dog that did not."
    ids = peer.tokenize(text.encode(), add_bos=True, special=False)
    with torch.no_grad():
        wanted = run(torch.tensor([ids]))[0].double().mean(0)
    assert LLM(tmp_path / "m.gguf", config=FLOATS).tokenizer.encode(text) == ids
    assert far([peer.embed(text, normalize=False)], [wanted]) < 5e-3


def test_a_context_beyond_all_models_asks_for_no_memory(made: tuple[Any, Path], tmp_path: Path) -> None:
    folder = changed(made[1], tmp_path / "m", "", "JinaBertForMaskedLM", {})
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"max_position_embeddings": 10**9})
    with pytest.raises(UnsupportedError, match="a context of 1000000000 tokens"):
        LLM(folder, config=FLOATS)


@pytest.mark.parametrize("said", [{"position_embedding_type": "absolute"}, {"feed_forward_type": "reglu"}])
def test_other_kinds_are_refused_by_name(made: tuple[Any, Path], tmp_path: Path, said: dict[str, str]) -> None:
    folder = changed(made[1], tmp_path / "m", "", "JinaBertForMaskedLM", {})
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | said)
    (key, value), *_ = said.items()
    with pytest.raises(UnsupportedError, match=f"a Jina BERT with {key} '{value}'"):
        LLM(folder, config=FLOATS)


def test_norms_of_heads_are_not_left_aside(made: tuple[Any, Path], tmp_path: Path) -> None:
    """Which the one for code has."""
    own = {"encoder.layer.0.attention.self.layer_norm_q.weight": torch.ones(48)}
    folder = changed(made[1], tmp_path / "m", "", "JinaBertForMaskedLM", own)
    with pytest.raises(CheckpointError, match=r"not part of the model: encoder\.layer\.0\.attention\.self\.layer_norm_q"):
        LLM(folder, config=FLOATS)


def test_the_bucket_of_every_layer_is_the_same_tensor(tmp_path: Path) -> None:
    from transformers import MPNetConfig

    settings = SIZES | {"max_position_embeddings": 302, "num_attention_heads": 4, "pad_token_id": 1}
    model = body(MPNetConfig(**settings), tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    with torch.no_grad():  # large enough that a wrong one would show
        torch.nn.init.normal_(model.encoder.relative_attention_bias.weight, std=2.0)
    model.save_pretrained(tmp_path / "m")
    llm = LLM(tmp_path / "m", config=FLOATS)
    with torch.no_grad():
        wanted = [model(torch.tensor([ids])).last_hidden_state[0].double().mean(0) for ids in TEXTS]
    assert far(llm.embed(TEXTS, "mean"), wanted) < 1e-5
    with pytest.raises(UnsupportedError, match="GGUF has no MPNet"):
        converted(tmp_path / "m", tmp_path / "m.gguf", "gguf")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    del weights["encoder.relative_attention_bias.weight"]
    save_file(weights, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match="relative_attention_bias"):
        LLM(tmp_path / "m", config=FLOATS)


def test_the_padding_of_mpnet_is_transformers_own(tmp_path: Path) -> None:
    """Which takes no token of the config for it, and no other count of buckets."""
    from transformers import MPNetConfig

    settings = SIZES | {"max_position_embeddings": 302, "num_attention_heads": 4}
    for padding in (0, 5):
        model = body(MPNetConfig(**settings, pad_token_id=padding), tmp_path / "m")
        write_tokenizer(tmp_path / "m")
        with torch.no_grad():
            wanted = [model(torch.tensor([ids])).last_hidden_state[0].double().mean(0) for ids in TEXTS]
        llm = LLM(tmp_path / "m", config=FLOATS)
        assert llm.max_model_len == 300
        assert far(llm.embed(TEXTS, "mean"), wanted) < 1e-5
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    write_json(tmp_path / "m" / "config.json", config | {"relative_attention_num_buckets": 64})
    with pytest.raises(UnsupportedError, match="an MPNet with 64 buckets"):
        LLM(tmp_path / "m", config=FLOATS)
    write_json(tmp_path / "m" / "config.json", config | {"max_position_embeddings": 2**31 - 1})
    with pytest.raises(UnsupportedError, match="a context of 2147483645 tokens"):  # and no 64 GiB are asked for
        LLM(tmp_path / "m", config=FLOATS)


@needs_emulation
def test_a_gpu_computes_the_same(made: tuple[Any, Path]) -> None:
    run, folder = made
    settings = {"num_blocks": 64, "max_num_batched_tokens": 64}
    assert far(embed(engine_on(folder, EmulatedDevice(), **settings), TEXTS), means(run)) < 0.03
