"""PLaMo 2: state spaces whose heads share a time step and a decay, in turn with attention whose heads are normed by gains of
their own; as GGUF files, against the formula in plain torch.

What that makes of both cases was held against llama.cpp's own logits once, of llama-cpp-python 0.3.36: they differ by less than
3e-6 of their norm. No dims rotate there where the first layer is said to have no heads of queries, which is why files of the
first case have a number of them for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import engine_for, greedy, num_parameters, run, worker_for
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from same_answers import check_chunks_and_prefixes, check_guesses_and_few_blocks
from test_cuda_engine import PROMPTS, depend_on_the_request_alone, recorded_tokens
from test_cuda_quantized import worker_on
from test_llamas import CASES as OTHERS
from test_llamas import random_tensors as tensors_of_another
from test_llamas import turned
from test_llamas import write as write_another
from test_models import prompts
from test_quant_engine import difference, logits_of

VOCAB, WIDTH, INNER, EPS = 4096, 48, 70, 1e-5
RANK = 64  # of time steps: a sixteenth of the width, and so many at least
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """heads: of queries and keys, and their numbers. states: heads of a state space, their numbers, a state's, and taps."""

    attends: tuple[bool, ...] = (False, True, False, True)
    heads: tuple[int, int, int] = (6, 2, 8)
    states: tuple[int, int, int, int] = (4, 12, 16, 4)
    tied: bool = True
    said: dict[str, Any] = field(default_factory=dict)


CASES = {
    "plamo2": Case(),
    "plamo2, attention first, a head of its own": Case(
        (True, False, False), (4, 4, 16), (6, 20, 8, 3), tied=False,
        said={"rope.freq_base": 1e6, "attention.head_count": [4, 0, 0]},
    ),
}  # fmt: skip


def random_tensors(case: Case) -> Tensors:
    draw = torch.Generator().manual_seed(0)
    heads, keys, dim = case.heads
    count, size, state, taps = case.states
    channels = count * size
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    shapes |= {} if case.tied else {"output.weight": (VOCAB, WIDTH)}
    for i, attends in enumerate(case.attends):
        norms = dict.fromkeys(("attn_norm.weight", "ffn_norm.weight", "post_attention_norm", "post_ffw_norm"), (WIDTH,))
        mlp = {"ffn_up.weight": (2 * INNER, WIDTH), "ffn_down.weight": (WIDTH, INNER)}
        mixer: dict[str, tuple[int, ...]]
        if attends:
            mixer = {
                "attn_qkv.weight": ((heads + 2 * keys) * dim, WIDTH), "attn_output.weight": (WIDTH, heads * dim),
                "attn_q_norm.weight": (heads, dim), "attn_k_norm.weight": (keys, dim),
            }  # fmt: skip
        else:
            mixer = {
                "ssm_in.weight": (2 * channels, WIDTH), "ssm_conv1d.weight": (channels, taps), "ssm_dt.bias": (count,),
                "ssm_x.weight": (2 * state + RANK, channels), "ssm_dt.weight": (count, RANK), "ssm_a": (count,),
                "ssm_d": (count,), "ssm_out.weight": (WIDTH, channels), "ssm_dt_norm": (RANK,), "ssm_b_norm": (state,),
                "ssm_c_norm": (state,),
            }  # fmt: skip
        shapes |= {f"blk.{i}.{name}": shape for name, shape in (norms | mlp | mixer).items()}
    found = {}
    for name, shape in shapes.items():
        is_table = len(shape) == 1 or "_norm" in name
        numbers = torch.rand(shape, generator=draw) + 0.5 if is_table else torch.randn(shape, generator=draw) * shape[-1] ** -0.5
        found[name] = numbers
        found[name] = -found[name] if name.endswith("ssm_a") else found[name]
    return found


def expected(case: Case, t: Tensors, ids: list[int]) -> torch.Tensor:
    """Logits [T, V]."""
    x = t["token_embd.weight"][ids]
    for i, attends in enumerate(case.attends):
        own = {name.removeprefix(f"blk.{i}."): tensor for name, tensor in t.items() if name.startswith(f"blk.{i}.")}
        mixed = (attended if attends else scanned)(case, own, normed(x, own["attn_norm.weight"]))
        x = x + normed(mixed, own["post_attention_norm"])
        gate, up = (normed(x, own["ffn_norm.weight"]) @ own["ffn_up.weight"].T).chunk(2, -1)
        x = x + normed((F.silu(gate) * up) @ own["ffn_down.weight"].T, own["post_ffw_norm"])
    return normed(x, t["output_norm.weight"]) @ t["token_embd.weight" if case.tied else "output.weight"].T


def normed(x: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], None, EPS) * gains


def attended(case: Case, t: Tensors, x: torch.Tensor) -> torch.Tensor:
    heads, keys, dim = case.heads
    q, k, v = (x @ t["attn_qkv.weight"].T).view(len(x), -1, dim).split([heads, keys, keys], 1)
    base = case.said.get("rope.freq_base", 1e4)
    q, k = (turned(normed(each, t[f"attn_{part}_norm.weight"]), "halves", dim, base) for part, each in (("q", q), ("k", k)))
    k, v = (each.repeat_interleave(heads // keys, 1) for each in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * dim**-0.5
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    found = torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return found.flatten(1) @ t["attn_output.weight"].T


def scanned(case: Case, t: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Gu and Dao 2023, but that all of a head share a time step and a decay: a head's z and x lie side by side."""
    count, size, state_size, taps = case.states
    z, x = (x @ t["ssm_in.weight"].T).view(len(x), count, 2, size).unbind(2)
    known = F.pad(x.flatten(1), (0, 0, taps - 1, 0))
    x = F.silu(sum(known[i : i + len(x)] * t["ssm_conv1d.weight"][:, i] for i in range(taps)))
    b, c, dt = (x @ t["ssm_x.weight"].T).split([state_size, state_size, RANK], -1)
    b, c, dt = (normed(each, t[f"ssm_{part}_norm"]) for part, each in (("b", b), ("c", c), ("dt", dt)))
    steps = F.softplus(dt @ t["ssm_dt.weight"].T + t["ssm_dt.bias"])
    x = x.view(len(x), count, size)
    state, found = torch.zeros(count, size, state_size), []
    for step, each, to, by in zip(steps, x, b, c, strict=True):
        state = state * (t["ssm_a"] * step).exp()[:, None, None] + (step[:, None] * each)[:, :, None] * to
        found.append(state @ by + t["ssm_d"][:, None] * each)
    return (torch.stack(found) * F.silu(z)).flatten(1) @ t["ssm_out.weight"].T


def write(path: Path, case: Case, found: Tensors, **more: Any) -> Path:
    writer = gguf.GGUFWriter(path, "plamo2")
    heads, keys, dim = case.heads
    count, size, state, taps = case.states
    shape = {
        "block_count": len(case.attends), "context_length": 512, "embedding_length": WIDTH, "vocab_size": VOCAB,
        "attention.head_count": heads,
        "attention.head_count_kv": [keys * attends for attends in case.attends], "attention.key_length": dim,
        "attention.value_length": dim, "feed_forward_length": INNER, "attention.layer_norm_rms_epsilon": EPS,
        "ssm.conv_kernel": taps, "ssm.inner_size": count * size, "ssm.state_size": state, "ssm.time_step_rank": count,
        "ssm.group_count": 0, "rope.dimension_count": dim,
    }  # fmt: skip
    writer.add_tokenizer_model("no_vocab")
    for key, value in (shape | case.said | more).items():
        add: Any = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"plamo2.{key}", value)
    for name, tensor in found.items():
        writer.add_tensor(name, tensor.numpy())
    for done in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        done()
    return path


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Tensors, Path]:
    case = CASES[request.param]
    found = random_tensors(case)
    return case, found, write(tmp_path_factory.mktemp("plamo2") / "m.gguf", case, found)


def test_a_file_gives_the_logits_of_its_formula(model: tuple[Case, Tensors, Path]) -> None:
    case, found, path = model
    asked, worker = prompts(4000), worker_for(path, dtype="float32")
    wanted = torch.cat([expected(case, found, ids) for ids in asked[2:6]])
    assert difference(logits_of(worker, asked[2:6]), wanted) < 1e-4
    assert num_parameters(worker.spec) == sum(tensor.numel() for tensor in found.values())
    counted = sum(block.num_weights(WIDTH) for block in worker.spec.blocks)
    weights = (tensor.numel() for name, tensor in found.items() if name.startswith("blk.") and "norm" not in name)
    assert counted == sum(weights)


def test_tokens_are_those_of_the_formula(model: tuple[Case, Tensors, Path]) -> None:
    case, found, path = model
    asked, worker = prompts(4000)[:5], worker_for(path, dtype="float32")
    outputs = run(engine_for(worker, max_num_batched_tokens=50), [(ids, greedy(16)) for ids in asked])
    for ids, output in zip(asked, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        assert answer == expected(case, found, ids + answer[:-1])[len(ids) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("quant", [None, "int8"])
def test_tokens_are_the_same_in_chunks_behind_prefixes_and_alone(quant: str | None, model: tuple[Case, Tensors, Path]) -> None:
    settings = {} if quant is None else {"quant": quant}
    check_chunks_and_prefixes(worker_for(model[2], deterministic=True, **settings), prompts(4000))


def test_guesses_and_few_blocks_change_nothing(model: tuple[Case, Tensors, Path]) -> None:
    check_guesses_and_few_blocks(model[2], "auto")


@needs_emulation
def test_a_gpus_tokens_are_the_formulas_but_for_ties(model: tuple[Case, Tensors, Path]) -> None:
    """As near as bf16 lets one see: the likeliest of so many tokens is more than three deviations from the mean."""
    case, found, path = model
    answers = recorded_tokens(path)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = expected(case, found, prompt + list(answer[:-1]))[len(prompt) - 1 :]
        lost = logits.amax(1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (lost < 0.5 * logits.std(1)).all()
    on_gpu, on_cpu = worker_on(path, EmulatedDevice()), worker_for(path, dtype="bfloat16")
    assert difference(logits_of(on_gpu, PROMPTS), logits_of(on_cpu, PROMPTS)) < 0.05
    depend_on_the_request_alone(path)


@pytest.mark.parametrize(
    ("keys", "kind", "said"),
    [
        ({"ssm.group_count": 2}, UnsupportedError, "a PLaMo 2 whose states are in groups"),
        ({"ssm.time_step_rank": 5}, CheckpointError, "5 heads of a state space can't share 48 channels"),
        ({"attention.head_count_kv": [0, 0, 0, 0]}, CheckpointError, "layers' heads, alike or 0"),
    ],
    ids=str,
)
def test_keys_that_can_not_be_followed(keys: dict[str, Any], kind: type[NanovllmError], said: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=said):
        worker_for(write(tmp_path / "m.gguf", CASES["plamo2"], random_tensors(CASES["plamo2"]), **keys))


@pytest.fixture(scope="module", params=["plamo3", "plamo3 without windows"])
def third(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = OTHERS[request.param]
    return write_another(tmp_path_factory.mktemp("plamo3") / "m.gguf", "plamo3", case, tensors_of_another(case))


@pytest.mark.parametrize("quant", [None, "int8"])
def test_tokens_of_a_plamo_3_are_the_same_in_chunks_behind_prefixes_and_alone(quant: str | None, third: Path) -> None:
    settings = {} if quant is None else {"quant": quant}
    check_chunks_and_prefixes(worker_for(third, deterministic=True, **settings), prompts(4000))


@needs_emulation
def test_a_plamo_3_on_a_gpu(third: Path) -> None:
    """Values narrower than keys, out of one matrix with them."""
    recorded_tokens(third)
    on_gpu, on_cpu = worker_on(third, EmulatedDevice()), worker_for(third, dtype="bfloat16")
    assert difference(logits_of(on_gpu, PROMPTS), logits_of(on_cpu, PROMPTS)) < 0.05


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"attention.value_length": 16}, "values of 16 numbers, which are wider than keys"),
        ({"rope.dimension_count_swa": 4}, "4 rotary dims in layers with a window, where others have 8"),
    ],
    ids=str,
)
def test_keys_of_a_plamo_3_that_can_not_be_followed(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    case = OTHERS["plamo3"]
    with pytest.raises(UnsupportedError, match=said):
        worker_for(write_another(tmp_path / "m.gguf", "plamo3", case, tensors_of_another(case), **keys))
