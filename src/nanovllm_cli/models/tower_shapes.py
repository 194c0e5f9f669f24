"""What a vision tower is made of: the shapes of its tensors, by our names. See `tower.py`."""

from __future__ import annotations

from nanovllm_cli.models.tower_fastvit import fastvit_shapes
from nanovllm_cli.models.tower_patches import patch_shapes
from nanovllm_cli.models.tower_projectors import Shapes, projector_shapes
from nanovllm_cli.models.tower_sam import sam_shapes
from nanovllm_cli.models.tower_tiles import tiles_shapes
from nanovllm_cli.vision_spec import TowerSpec


def tower_shapes(spec: TowerSpec) -> dict[str, tuple[int, ...]]:
    """What a tower is made of, by our names. Matrices are [out, in]. layers.{i}.qkv: rows of q, k and v behind each other;
    layers.{i}.up: gate and up, where it is gated; bounds: of each of these, the least and the most that it reads and that it
    gives. What joins a cell reads its patches behind each other, line by line. film: reads a patch's colours, of each its frames
    behind each other; `patch` reads one as if it were all of them."""
    if spec.sam is not None:
        return sam_shapes(spec)
    if spec.fastvit is not None:
        return fastvit_shapes(spec)
    if spec.tiles is not None:
        return tiles_shapes(spec)
    if spec.projector == "direct":
        return patch_shapes(spec)
    hidden, inner, joined = spec.hidden_size, spec.intermediate_size, spec.joins * spec.hidden_size
    shapes = Shapes(spec)
    matrix, norm = shapes.matrix, shapes.norm
    matrix("patch", hidden, 3 * spec.patch_size**2, spec.patch_bias)
    if spec.films:
        matrix("film", hidden, 3 * spec.frames * spec.patch_size**2, spec.patch_bias)
    if spec.positions:
        shapes["positions.weight"] = (*((2,) if spec.by_axis else ()), spec.positions + spec.lead, hidden)
    if spec.lead:
        shapes["lead.weight"] = (1, hidden)
    if spec.pre_norm:
        norm("pre_norm")
    if spec.squares:
        shapes["line_end.weight"] = (spec.out_size,)
    for i in range(spec.num_layers):
        norm(f"layers.{i}.attention_norm")
        if i in spec.convolves:
            matrix(f"layers.{i}.conv_in", 3 * hidden, hidden)
            shapes[f"layers.{i}.conv.weight"] = (hidden, 1, spec.taps, spec.taps)
            matrix(f"layers.{i}.conv_out", hidden, hidden)
        else:
            matrix(f"layers.{i}.qkv", spec.qkv_rows, hidden, spec.bias and spec.qkv_bias)
            matrix(f"layers.{i}.out", hidden, hidden)
        norm(f"layers.{i}.mlp_norm")
        matrix(f"layers.{i}.up", 2 * inner if spec.gated else inner, hidden)
        matrix(f"layers.{i}.down", hidden, inner)
        if (spec.qk_norm or spec.normed) and i not in spec.convolves:
            shapes[f"layers.{i}.head_norm.weight"] = (2 * spec.head_dim,)
        if spec.scaled:
            shapes |= dict.fromkeys((f"layers.{i}.attention_scale.weight", f"layers.{i}.mlp_scale.weight"), (hidden,))
        if spec.normed:
            norm(f"layers.{i}.after_attention_norm", kind="rms")
            norm(f"layers.{i}.after_mlp_norm", kind="rms")
        if spec.clipped:
            for name, parts in (("qkv", 3), ("out", 1), ("up", 2 if spec.gated else 1), ("down", 1)):
                shapes[f"layers.{i}.{name}.bounds"] = (parts, 4)
    if spec.shrinks is not None:
        norm("shrink.attention_norm")
        matrix("shrink.qkv", 3 * hidden, hidden)
        matrix("shrink.out", hidden, hidden)
        norm("shrink.norm", 4 * hidden)
        matrix("shrink.up", 4 * inner, 4 * hidden)
        matrix("shrink.down", hidden, 4 * inner)
    if spec.post_norm:
        norm("post_norm")
    for i in range(len(spec.deep)):
        norm(f"deep.{i}.norm", joined)
        between = spec.out_size if spec.projector == "placed" else joined
        matrix(f"deep.{i}.up", between, joined)
        matrix(f"deep.{i}.down", spec.out_size, between)
    return shapes | projector_shapes(spec)
