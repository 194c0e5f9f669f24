"""Encoders with biases and rotary positions, nomic-bert's second version, which has experts, and Jina's third BERT, from GGUF
files as llama.cpp's converter names things: vectors near to those that float64 gives, on the CPU and in the GPU's engine on
emulated kernels."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch.nn import functional

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from nanovllm_cli import LLM, EngineConfig
from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.mlp_spec import MoESpec
from test_cuda_encoders import distance, embed, engine_on
from test_encoders import far

HIDDEN, INNER, HEADS, LAYERS, EXPERTS, TAKEN, WORDS, LONGEST = 64, 96, 2, 4, 5, 2, 300, 90
EPS, THETA = 1e-5, 1000.0
NOMIC, JINA = "nomic-bert-moe", "jina-bert-v3"
Numbers = dict[str, np.ndarray]
GENERATOR = torch.Generator().manual_seed(0)
TEXTS = [torch.randint(5, WORDS, (count,), generator=GENERATOR).tolist() for count in (1, 9, 20, 90)]


def numbers(arch: str) -> Numbers:
    random = np.random.default_rng(0)

    def drawn(*shape: int, scale: float = 1.0) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32) * scale * float(shape[-1]) ** -0.5

    def norm(name: str) -> Numbers:
        return {f"{name}.weight": 1 + drawn(HIDDEN), f"{name}.bias": drawn(HIDDEN)}

    found = {"token_embd.weight": drawn(WORDS, HIDDEN), "token_types.weight": drawn(1, HIDDEN), **norm("token_embd_norm")}
    for i in range(LAYERS):
        own = {"attn_qkv.weight": drawn(3 * HIDDEN, HIDDEN, scale=2), "attn_qkv.bias": drawn(3 * HIDDEN),
               "attn_output.weight": drawn(HIDDEN, HIDDEN), "attn_output.bias": drawn(HIDDEN),
               **norm("attn_output_norm"), **norm("layer_output_norm")}  # fmt: skip
        if arch == NOMIC and i % 2:
            own |= {"ffn_gate_inp.weight": drawn(EXPERTS, HIDDEN, scale=3), "ffn_up_exps.weight": drawn(EXPERTS, INNER, HIDDEN),
                    "ffn_down_exps.weight": drawn(EXPERTS, HIDDEN, INNER)}  # fmt: skip
        else:
            own |= {"ffn_up.weight": drawn(INNER, HIDDEN), "ffn_up.bias": drawn(INNER),
                    "ffn_down.weight": drawn(HIDDEN, INNER), "ffn_down.bias": drawn(HIDDEN)}  # fmt: skip
        found |= {f"blk.{i}.{name}": values for name, values in own.items()}
    return found


def write(path: Path, arch: str, tensors: Numbers, taken: int = TAKEN) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(LONGEST)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(EPS)
    writer.add_rope_freq_base(THETA)
    writer.add_causal_attention(False)
    if arch == NOMIC:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(taken)
        writer.add_uint32(f"{arch}.moe_every_n_layers", 2)
    writer.add_token_type_count(1)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("bert")
    writer.add_token_list([f"word{i}" for i in range(WORDS)])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def expected(ids: list[int], tensors: Numbers) -> torch.Tensor:
    """The mean of the last layer's rows, in float64."""
    own = {name: torch.from_numpy(values).double() for name, values in tensors.items()}

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, own[f"{name}.weight"], own[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(x, (HIDDEN,), own[f"{name}.weight"], own[f"{name}.bias"], EPS)

    dim = HIDDEN // HEADS
    angles = torch.arange(len(ids))[:, None] * THETA ** -(torch.arange(0, dim, 2).double() / dim)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1)

    def mixed(x: torch.Tensor, name: str) -> torch.Tensor:
        shares, chosen = (x @ own[f"{name}_gate_inp.weight"].T).softmax(-1).topk(TAKEN)
        up, down = own[f"{name}_up_exps.weight"][chosen], own[f"{name}_down_exps.weight"][chosen]
        inner = functional.gelu(torch.einsum("tenk,tk->ten", up, x))
        return torch.einsum("te,tehn,ten->th", shares, down, inner)

    x = norm(own["token_embd.weight"][ids] + own["token_types.weight"][0], "token_embd_norm")
    for i in range(LAYERS):
        q, k, v = (part.view(-1, HEADS, dim).transpose(0, 1) for part in linear(x, f"blk.{i}.attn_qkv").chunk(3, dim=-1))
        seen = (turned(q) @ turned(k).transpose(1, 2) * dim**-0.5).softmax(-1) @ v
        x = norm(x + linear(seen.transpose(0, 1).flatten(1), f"blk.{i}.attn_output"), f"blk.{i}.attn_output_norm")
        dense = f"blk.{i}.ffn"
        has_experts = f"{dense}_gate_inp.weight" in own
        added = mixed(x, dense) if has_experts else linear(functional.gelu(linear(x, f"{dense}_up")), f"{dense}_down")
        x = norm(x + added, f"blk.{i}.layer_output_norm")
    return x.mean(0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Numbers]]:
    found = {}
    for arch in (NOMIC, JINA):
        tensors = numbers(arch)
        found[arch] = write(tmp_path_factory.mktemp("encoder") / "m.gguf", arch, tensors), tensors
    return found


@pytest.mark.parametrize("arch", [NOMIC, JINA])
@pytest.mark.parametrize(
    ("settings", "most"), [({"dtype": "float32"}, 1e-5), ({"quant": "int8"}, 0.05), ({"quant": "q8_0"}, 0.05)]
)
def test_vectors_are_those_of_float64(
    arch: str, settings: dict[str, str], most: float, made: dict[str, tuple[Path, Numbers]]
) -> None:
    path, tensors = made[arch]
    llm = LLM(path, config=EngineConfig(threads=2, num_blocks=64, **settings))  # type: ignore[arg-type]
    assert [isinstance(block.mlp, MoESpec) for block in llm.spec.blocks] == [False, arch == NOMIC] * 2
    assert far(llm.embed(TEXTS, "mean"), [expected(ids, tensors) for ids in TEXTS]) < most  # type: ignore[arg-type]


def test_more_experts_than_there_are_is_told(made: dict[str, tuple[Path, Numbers]], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a token can't take 6 of 5 experts"):
        LLM(write(tmp_path / "m.gguf", NOMIC, made[NOMIC][1], taken=6), config=EngineConfig(threads=2))


@needs_emulation
@pytest.mark.parametrize("arch", [NOMIC, JINA])
def test_the_gpus_kernels_give_the_same(arch: str, made: dict[str, tuple[Path, Numbers]]) -> None:
    path, tensors = made[arch]
    found = embed(engine_on(path, EmulatedDevice()), TEXTS)
    assert distance(found, [expected(ids, tensors) for ids in TEXTS]) < 0.05
