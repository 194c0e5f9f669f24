"""Folders of Molmo 2, in which tensors have names of their own, as ours of a Qwen3, or of an OLMo 2, that sees.

    model.transformer.wte.embedding, …new_embedding     model.language_model.embed_tokens.weight, one behind the other
    …blocks.3.self_attn.att_proj.weight                 …layers.3.self_attn.q_proj.weight, k_proj and v_proj; biases alike
    …blocks.3.mlp.ff_proj.weight                        …layers.3.mlp.up_proj.weight, and then gate_proj
    …blocks.3.attn_norm.weight, ff_norm                 …layers.3.input_layernorm.weight, post_attention_layernorm; or
                                                        post_attention_layernorm, post_feedforward_layernorm (norm_after)
    model.vision_backbone.image_vit.transformer.resblocks.3.…   model.vision_tower.layers.3.…
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from nanovllm_cli.models.families import text_config
from nanovllm_cli.weights.checkpoint import Checkpoint


class Piece(NamedTuple):
    """Rows of a tensor of the files."""

    stored: str
    first: int
    end: int


_TEXT = "model.language_model."
_EMBEDDING, _FURTHER = "model.transformer.wte.embedding", "model.transformer.wte.new_embedding"
_BLOCK = re.compile(r"model\.transformer\.blocks\.(\d{1,6})\.(.+)")
_ROOTS = {
    "model.transformer.ln_f.": f"{_TEXT}norm.",
    "model.vision_backbone.image_vit.transformer.resblocks.": "model.vision_tower.layers.",
    "model.vision_backbone.image_vit.": "model.vision_tower.",
    "model.vision_backbone.": "model.multi_modal_projector.",
}
"""The first that fits counts."""
_PARTS = {"self_attn.attn_out.": "self_attn.o_proj.", "mlp.ff_out.": "mlp.down_proj."}
_BEFORE = {"attn_norm.": "input_layernorm.", "ff_norm.": "post_attention_layernorm."}
_BEHIND = {"attn_norm.": "post_attention_layernorm.", "ff_norm.": "post_feedforward_layernorm."}


def of_a_molmo(checkpoint: Checkpoint, names: set[str]) -> tuple[dict[str, str], dict[str, list[Piece]]]:
    """Names -> those of the files; and -> what lies behind each other in theirs. What is of other sizes than the config says
    keeps its name, which nothing knows."""
    renamed: dict[str, str] = {}
    divided: dict[str, list[Piece]] = {}
    config = text_config(checkpoint.config)
    parts = _PARTS | (_BEHIND if config.get("norm_after") is True else _BEFORE)
    heads = _row_counts(config.get("num_attention_heads", 32), config.get("num_key_value_heads", 8), config.get("head_dim", 128))
    for name in sorted(names):
        if name == _EMBEDDING:
            tables = [each for each in (_EMBEDDING, _FURTHER) if each in names]
            divided[f"{_TEXT}embed_tokens.weight"] = [Piece(each, 0, _rows(checkpoint, each)) for each in tables]
        elif (place := _BLOCK.fullmatch(name)) is not None:
            layer, part = f"{_TEXT}layers.{place[1]}.", place[2]
            num_rows = _rows(checkpoint, name)
            if part.startswith("self_attn.att_proj.") and sum(heads) == num_rows:
                divided |= _divided(name, part, "att_proj", layer, ("q_proj", "k_proj", "v_proj"), heads)
            elif part.startswith("mlp.ff_proj.") and num_rows % 2 == 0:
                divided |= _divided(name, part, "ff_proj", layer, ("up_proj", "gate_proj"), [num_rows // 2] * 2)
            else:
                theirs = next((each for each in parts if part.startswith(each)), "")
                renamed[layer + parts.get(theirs, "") + part.removeprefix(theirs)] = name
        elif root := next((each for each in _ROOTS if name.startswith(each)), None):
            renamed[_ROOTS[root] + name.removeprefix(root)] = name
    return renamed, divided


def _divided(
    name: str, part: str, whole: str, layer: str, parts: Sequence[str], counts: Sequence[int]
) -> dict[str, list[Piece]]:
    ends = list(itertools.accumulate(counts))
    return {
        layer + part.replace(whole, each): [Piece(name, end - count, end)]
        for each, count, end in zip(parts, counts, ends, strict=True)
    }


def _rows(checkpoint: Checkpoint, name: str) -> int:
    shape = checkpoint.info(name).shape
    return shape[0] if shape else 0


def _row_counts(heads: object, key_heads: object, head_dim: object) -> list[int]:
    """Of q, k and v; none where the config says no numbers, which whoever reads it tells."""
    said = heads, key_heads, head_dim
    numbers = [each for each in said if isinstance(each, int) and 0 < each < 1 << 20]
    if len(numbers) < len(said):
        return []
    own, keys, dim = numbers
    return [own * dim, keys * dim, keys * dim]
