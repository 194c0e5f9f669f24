"""What is one tensor in a GGUF file and several on the way to it:

    blk.3.ffn_gate_exps.5.weight [N, K], of E experts       blk.3.ffn_gate_exps.weight [E, N, K]; up and down alike, biases [E, N]
    gate and up of each, in Gemma 4                         blk.3.ffn_gate_up_exps.weight [E, 2 N, K]
    altup_proj.0.weight [N, K], of each further stream      altup_proj.weight [S - 1, N, K], in Gemma 3n
    blk.3.ssm_beta.weight and ssm_alpha.weight [N, K]       blk.3.ssm_ba.weight [2 N, K], in Qwen3-Next, as its folders have it

The left side is what `stacked.py` makes of either format. No stack is ever in memory: its matrices are written one by one. And
what is one tensor in a folder and two in a file:

    kv_b_proj.weight [H (D + V), R]                         blk.3.attn_k_b.weight [H, R, D] and attn_v_b.weight [H, V, R]
"""

from __future__ import annotations

import re
from functools import partial

import torch

from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.family import Family
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.convert_tensors import Step, gguf_type
from nanovllm_cli.weights.quantized_weight import Unpacked
from nanovllm_cli.weights.stacked import stack_of

_EXPERT = re.compile(r"(blk\.\d+\.(?:ffn|attn)_)(gate|up|down|v)_exps\.(\d+)(\.(?:weight|bias))")
_STREAM = re.compile(r"(altup_(?:unembd_)?proj)\.(\d+)(\.weight)")
_KV_B = re.compile(r"(blk\.\d+\.attn_)kv_b\.weight")
_FROM_BA = re.compile(r"(blk\.\d+\.)ssm_(alpha|beta)\.weight")

Named = dict[str, tuple[str, tuple[int, ...]]]
"""A folder's name of a tensor -> its GGUF name, and its shape."""


def stack_name(name: str, family: Family) -> str:
    """What a family's files call the tensor that a matrix goes into; `name` itself for one that is no expert's, nor makes one of
    several streams."""
    if (stream := _STREAM.fullmatch(name)) is not None:
        return stream[1] + stream[3]
    found = _EXPERT.fullmatch(name)
    if found is None:
        return name
    place, part, _, kind = found.groups()
    return f"{place}{'gate_up' if family.gguf_gate_up and part != 'down' else part}_exps{kind}"


def with_ba_as_one(named: Named, source: Checkpoint) -> Named:
    """The same where `source` has b and a of a layer in one tensor, which llama.cpp takes as it is."""
    joined: Named = {}
    for name, (theirs, shape) in named.items():
        whole = source.stack_of(name) if isinstance(source, Unpacked) else stack_of(source, name)
        found = _FROM_BA.fullmatch(theirs)
        if found is None or whole == name:
            joined[name] = theirs, shape
        else:
            joined[whole] = f"{found[1]}ssm_ba.weight", (2 * shape[0], shape[1])
    return joined


def by_head(steps: list[Step], spec: ModelSpec, outtype: str, family: Family) -> list[Step]:
    """The same with a matrix a head of what latent attention makes keys and values of, those of keys turned over, where a
    family's files have that."""
    attention = next((each for each in spec.attentions if each.latent is not None), None)
    has_heads = "blocks.{i}.k_b.{e}.weight" in family.gguf_names
    if attention is None or (latent := attention.latent) is None or not has_heads:
        return steps
    found: list[Step] = []
    for step in steps:
        place = _KV_B.fullmatch(step.name)
        if place is None:
            found.append(step)
            continue
        heads = attention.num_heads
        sizes = latent.key_dim, latent.value_dim
        for part, shape in (("k_b", (heads, latent.rank, latent.key_dim)), ("v_b", (heads, latent.value_dim, latent.rank))):
            name = f"{place[1]}{part}.weight"
            found.append(step._replace(
                name=name, shape=shape, after=gguf_type(name, shape, step.before, outtype), before_bytes=step.before_bytes // 2,
                reorder=partial(_of_heads, sizes, part == "k_b"), rows_together=sum(sizes),
            ))  # fmt: skip
    return found


def _of_heads(sizes: tuple[int, int], keys: bool, rows: torch.Tensor) -> torch.Tensor:
    """Rows of whole heads [n * (D + V), R] -> [n, R, D], or [n, V, R]."""
    of_keys, of_values = torch.split(rows.view(-1, sum(sizes), rows.shape[1]), list(sizes), dim=1)
    return (of_keys.transpose(1, 2) if keys else of_values).contiguous()


def stacked(steps: list[Step], family: Family) -> list[Step]:
    """The same with the experts of a layer in one step."""
    stacks: dict[str, list[Step]] = {}
    for step in steps:
        stacks.setdefault(stack_name(step.name, family), []).append(step)
    return [parts[0] if parts[0].name == name else _stack(name, parts) for name, parts in stacks.items()]


def _stack(name: str, parts: list[Step]) -> Step:
    """In the order of experts, whose gates come before their ups."""
    parts = sorted(parts, key=_expert)
    count = _expert(parts[-1]) + 1
    assert len(parts) % count == 0, f"{name}: {len(parts)} matrices of {count} experts"
    kinds = {part.after for part in parts}
    if len(kinds) > 1:  # a tensor has one type
        parts = [part._replace(after="F32") for part in parts]
    rows, *width = parts[0].shape
    first = parts[0]
    before = first.before if len({part.before for part in parts}) == 1 else "F32"
    return first._replace(
        name=name, source=None, shape=(count, len(parts) // count * rows, *width), before=before, parts=tuple(parts),
        before_bytes=sum(part.before_bytes for part in parts),
    )  # fmt: skip


def _expert(step: Step) -> int:
    if (stream := _STREAM.fullmatch(step.name)) is not None:
        return int(stream[2])
    found = _EXPERT.fullmatch(step.name)
    assert found is not None
    return int(found[3])
