"""What a folder's model sees by, as a GGUF file of its own beside the model's: names, order of rows and keys as llama.cpp's
converter has them (`mmproj.py` reads it). What it hears by, where it does both, is in the same file (`convert_ears.py`).

A tower that such a file can't say is left out, with a note; whoever reads the metadata again must find the same one. Numbers are
as the folder has them, or in the plain type that was asked for; a model's block types are none of a tower's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.towers import TOWERS, tower_family
from nanovllm_cli.models.towers_gguf import PROJECTORS, Projector, names_in_gguf, vision_from_gguf
from nanovllm_cli.vision_spec import TowerSpec, VisionSpec
from nanovllm_cli.weights.checkpoint import Checkpoint, CheckpointView, TensorInfo
from nanovllm_cli.weights.convert_ears import EarPart, ear_file, ear_part
from nanovllm_cli.weights.convert_names import halves_to_pairs
from nanovllm_cli.weights.convert_tensors import PLAIN_TYPES, Step, file_type, gguf_type
from nanovllm_cli.weights.convert_towers import TowerFile, check_spec, plain_type_of, tower_header
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.tensor_names import names_of
from nanovllm_cli.weights.tokenizer import load_tokenizer
from nanovllm_cli.weights.vision import arranged, bounds_of, read_vision, read_whole, tower_parts, turned_as

_CONVOLVED = ("v.patch_embd.weight", "v.patch_embd.weight.1", "mm.patch_merger.weight", "mm.input_projection.weight")
"""Which llama.cpp computes with in float16 or float32 alone."""

_IN_FULL = (
    ".attn.pos_h.weight", ".attn.pos_w.weight", "v.position_embd.weight", "v.view_seperator", "v.resample_query_768.weight",
    "v.resample_query_1024.weight",
)  # fmt: skip
"""Of SAM, and what is behind it, beside kernels: what llama.cpp stretches, or puts beside other rows, in float32 alone."""
_LEAST_PATCHES = 8
"""Of a Kimi K2.5's image, as llama.cpp's converter has it."""
_OF_ANY_SIZE = 256
"""What llama.cpp's converter says is the side of images where it means nothing."""


def tower_or_note(source: Checkpoint, outtype: str, name: str) -> tuple[TowerFile | None, list[str]]:
    """What it sees or hears by, or a line for why that is left out."""
    try:
        tower = tower_file(source, outtype, name)
        return tower, [] if tower is None else list(tower.notes)
    except (CheckpointError, UnsupportedError) as error:
        sees = tower_family(source.config) is not None and source.config.get("vision_config") is not None
        return None, [f"what it {'sees' if sees else 'hears'} by: {error.message}"]


def tower_file(source: Checkpoint, outtype: str, name: str) -> TowerFile | None:
    """Of a model that sees, or hears, or both; None for one that does neither. name: of the model. Raises UnsupportedError for a
    tower that such a file can't say, CheckpointError for one that is broken; what a model hears by, beside what it sees by, is
    left out then, with a note."""
    spec = read_vision(source)
    if spec is None:
        return ear_file(source, outtype, name)
    parts = tower_parts(source, spec)
    label, projector = _projector(source)
    view = _TowerView(source, spec.tower, parts, projector)
    kind = outtype if outtype in PLAIN_TYPES else "auto"
    infos = [view.info(each) for each in view.names()]
    matrices = {info.dtype_name if kind == "auto" else kind.upper() for info in infos if len(info.shape) == 2}
    steps = []
    for info in infos:
        after = gguf_type(info.name, info.shape, info.dtype_name, kind)
        is_kernel = info.name in _CONVOLVED or len(info.shape) == 4
        if is_kernel:  # an Idefics3's in full, as llama.cpp's converter has it
            after = "F16" if matrices == {"F16"} and label != "idefics3" else "F32"
        if spec.tower.sam is not None and (is_kernel or info.name.endswith(_IN_FULL)):
            after = "F32"
        steps.append(Step.of(info, after))
    if label == "pixtral":
        steps.append(_line_end(source, spec))
    keys, kind_of_file = _keys(spec, label), file_type(plain_type_of(steps))
    _check(keys, {info.name: info.shape for info in infos}, spec)
    names = frozenset(each for own in parts.values() for each in own)
    ears, notes = _ears(source, outtype)
    if ears is None:
        return TowerFile(view, steps, tower_header(name, kind_of_file, keys), names, len(spec.tower.deep), notes=tuple(notes))
    header = tower_header(name, kind_of_file, keys | ears.keys)
    both, all_steps, all_names = _BothViews(view, ears.view), [*steps, *ears.steps], names | ears.names
    return TowerFile(both, all_steps, header, all_names, len(spec.tower.deep), "sees and hears")


def _ears(source: Checkpoint, outtype: str) -> tuple[EarPart | None, list[str]]:
    """Of a model that sees, and may hear; or a line for why that is left out."""
    try:
        return ear_part(source, outtype), []
    except (CheckpointError, UnsupportedError) as error:
        return None, [f"what it hears by: {error.message}"]


class _BothViews(CheckpointView):
    """Tensors of two, as names have it."""

    def __init__(self, first: CheckpointView, second: CheckpointView) -> None:
        super().__init__(first)
        self._of = {name: each for each in (first, second) for name in each.names()}

    def names(self) -> list[str]:
        return list(self._of)

    def info(self, name: str) -> TensorInfo:
        return self._of[name].info(name)

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        return self._of[name].tensor(name, rows)

    def release(self, name: str) -> None:
        self._of[name].release(name)


class _TowerView(CheckpointView):
    """A folder's tower under the names of a GGUF file, rows in the order that they have there."""

    def __init__(self, source: Checkpoint, spec: TowerSpec, parts: dict[str, list[str]], projector: Projector) -> None:
        super().__init__(source)
        self.format = "gguf"
        self._reader = open_reader(source)
        self._spec = spec
        self._parts = parts
        self._turned = projector.stored or spec.stored
        width = spec.hidden_size if spec.sam is None else spec.sam.hidden_size
        self._kernel: tuple[int, ...] = width, 3, spec.patch_size, spec.patch_size
        if spec.projector in ("shuffled", "direct"):  # a matrix there, too
            self._kernel = width, 3 * (spec.patch_size if spec.projector == "shuffled" else spec.cell) ** 2
        there = {"v.blk.0.attn_qkv.weight": ()} if projector.fused else {}
        self._own = {theirs: (ours, place, len(names)) for ours, names in names_in_gguf(spec, there).items()
                     for place, theirs in enumerate(names) if not ours.startswith("film.")}  # fmt: skip
        self._last: tuple[str, torch.Tensor] | None = None

    def names(self) -> list[str]:
        return list(self._own)

    def info(self, name: str) -> TensorInfo:
        ours, place, count = self._own[name]
        if ours.endswith(".bounds"):
            return TensorInfo(name, (1,), "F32", 4)
        infos = [self._inner.info(each) for each in self._parts[ours]]
        if len(infos) == count:  # which need not be as large as each other
            infos, count = [infos[place]], 1
        rows, *others = infos[0].shape
        if ours == "positions.weight" and self._turned == self._spec.stored == "pairs":  # a Kimi-VL's square
            rows, others = rows * others[0], others[1:]
        shape = self._kernel if ours == "patch.weight" else (rows * len(infos) // count, *others)
        if self._spec.projector == "lined" and ours == "positions.weight":
            shape = self._spec.positions, self._spec.hidden_size
        if self._spec.projector == "direct" and ours == "positions.weight":
            shape = 2, self._spec.positions, self._spec.hidden_size
        if ours == "separator.weight":
            shape = 1, *shape
        kind = "F32" if self._is_gain(ours) else infos[0].dtype_name
        return TensorInfo(name, shape, kind, sum(info.num_bytes for info in infos) // count)

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = name, self._arranged(*self._own[name])
        return self._last[1] if rows is None else self._last[1][slice(*rows)]

    def release(self, name: str) -> None:
        """Reading lets pages go."""

    def _arranged(self, ours: str, place: int, count: int) -> torch.Tensor:
        if ours.endswith(".bounds"):
            return bounds_of(self._inner, [self._parts[ours][place]])
        theirs = self._parts[ours]
        is_apart = len(theirs) == count > 1
        theirs = [theirs[place]] if is_apart else theirs
        whole = torch.cat([read_whole(self._reader, each) for each in theirs])
        if ours == "separator.weight":
            return whole[None]
        if self._spec.projector == "direct":
            return arranged(ours, whole, self._spec).contiguous()
        if ours == "patch.weight":
            kernel = whole[:, :, place] if self._spec.frames else arranged(ours, whole, self._spec)
            return kernel.reshape(self._kernel).contiguous()
        if self._spec.projector == "lined" and ours == "positions.weight":
            return arranged(ours, whole, self._spec)
        if ours == "positions.weight" and self._turned == self._spec.stored == "pairs":
            return whole.flatten(0, 1)
        if ".qkv." in ours and self._turned != self._spec.stored:
            q, k, v = whole.chunk(3)
            heads = self._spec.num_heads
            whole = torch.cat([*(turned_as(each, heads, self._spec.stored, self._turned) for each in (q, k)), v])
        part = whole if is_apart else whole.chunk(count)[place]
        if ours.endswith(".qkv.weight") and self._spec.dealt and place < 2:
            return halves_to_pairs(part, self._spec.head_dim, self._spec.head_dim)
        return part.to(torch.float32) + 1 if self._is_gain(ours) else part

    def _is_gain(self, ours: str) -> bool:
        """Whether it is a Gemma's, of which folders have all but 1."""
        return ours == "projector.norm.weight" and self._spec.projector == "pooled"


def _line_end(source: Checkpoint, spec: VisionSpec) -> Step:
    """The row of the token behind an image's lines, which llama.cpp puts there itself."""
    token = load_tokenizer(source).token_to_id(spec.tokens.line_end)
    name = names_of(source)["embedding.weight"]
    if token is None or not 0 <= token < source.info(name).shape[0]:
        raise CheckpointError(f"{source.path}: its tokenizer has no {spec.tokens.line_end}", "take the publisher's own folder")
    return Step.made("v.token_embd.img_break", source.tensor(name, (token, token + 1))[0].to(torch.float32))


def _projector(source: Checkpoint) -> tuple[str, Projector]:
    family = tower_family(source.config)
    for label, projector in PROJECTORS.items():
        if family is not None and family.read in {TOWERS[model].read for model in (projector.model, *projector.also)}:
            return label, projector
    raise UnsupportedError(f"{source.path}: no file is written of what such a model sees by", f"known: {', '.join(PROJECTORS)}")


def _keys(spec: VisionSpec, label: str) -> dict[str, Any]:
    tower, size = spec.tower, spec.size
    known = {"padded": 0, "tiles": size.tile, "canvas": size.tile, "slices": size.tile, "grid": _OF_ANY_SIZE}
    side = known.get(size.kind, size.longest_side)
    if label == "paddleocr":  # its largest images', as llama.cpp's converter has it
        side = math.isqrt(size.max_pixels)
    eps = tower.projector_eps if label in ("pixtral", "kimik25", "gemma4uv") and tower.projector_eps else tower.eps
    mean, std, where = list(spec.mean), list(spec.std), "clip.projector_type"
    if tower.projector == "scaled":  # which takes off a half and divides by one itself
        mean, std = [one - other for one, other in zip(mean, std, strict=True)], [2 * each for each in std]
    if tower.projector in ("scaled", "direct"):  # whose models also hear
        where = "clip.vision.projector_type"
    keys: dict[str, Any] = {
        "clip.has_vision_encoder": True, where: label, "clip.vision.projection_dim": tower.out_size,
        "clip.vision.image_size": side or (math.isqrt(tower.positions) or 40) * tower.patch_size,
        "clip.vision.patch_size": tower.patch_size, "clip.vision.embedding_length": tower.hidden_size,
        "clip.vision.feed_forward_length": tower.intermediate_size, "clip.vision.block_count": tower.num_layers,
        "clip.vision.attention.head_count": tower.num_heads, "clip.vision.image_mean": mean,
        "clip.vision.image_std": std, "clip.vision.attention.layer_norm_epsilon": eps,
    }  # fmt: skip
    if tower.activation != "quick_gelu" or tower.sam is not None:  # which says it of SAM
        keys["clip.use_silu" if tower.activation == "silu" and tower.sam is None else "clip.use_gelu"] = True
    scaled = "pooled", "joined", "scaled", "shuffled", "direct"
    is_scale = tower.projector in scaled or label in ("kimivl", "kimik25", "dots_ocr")
    if label != "pixtral" or not is_scale:
        keys["clip.vision.projector.scale_factor" if is_scale else "clip.vision.spatial_merge_size"] = tower.merge
    if size.kind == "area":
        keys |= {"clip.vision.image_min_pixels": size.min_pixels, "clip.vision.image_max_pixels": size.max_pixels}
    if label == "kimik25":
        patch = tower.patch_size**2
        keys |= {"clip.vision.image_min_pixels": _LEAST_PATCHES * patch, "clip.vision.image_max_pixels": size.most_tiles * patch}
    if size.kind == "tiles":
        keys["clip.vision.preproc_image_size"] = size.longest_side
    if size.kind in ("canvas", "pages"):
        keys |= {"clip.vision.preproc_min_tiles": size.least_tiles, "clip.vision.preproc_max_tiles": size.most_tiles}
    if (sam := tower.sam) is not None:
        keys |= {"clip.vision.sam.block_count": sam.num_layers, "clip.vision.sam.embedding_length": sam.hidden_size,
                 "clip.vision.sam.head_count": sam.num_heads, "clip.vision.window_size": sam.window,
                 "clip.vision.attention.head_count_kv": tower.key_heads or tower.num_heads}  # fmt: skip
    if tower.shrinks is not None:
        keys["clip.vision.wa_layer_indexes"] = [tower.shrinks]
    if tower.key_heads:
        keys["clip.vision.attention.head_count_kv"] = tower.key_heads
    if tower.window:
        keys["clip.vision.window_size"] = tower.window * tower.cell
        keys["clip.vision.n_wa_pattern"] = (tower.full[0] if tower.full else tower.num_layers) + 1
    if label == "qwen3vl_merger":
        keys["clip.vision.is_deepstack_layers"] = [layer in tower.deep for layer in range(tower.num_layers)]
    return keys


def _check(keys: dict[str, Any], shapes: dict[str, tuple[int, ...]], spec: VisionSpec) -> None:
    """Reads the keys as they will be read. Which token stands for an image is not their matter."""
    found = vision_from_gguf(ConfigReader(keys, "the file"), shapes)
    spec = replace(spec, tower=replace(spec.tower, stored=found.tower.stored))
    check_spec(replace(spec, tokens=replace(found.tokens, before=spec.tokens.before)), found)
