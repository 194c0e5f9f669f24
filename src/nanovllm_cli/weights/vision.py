"""From a folder to a vision tower: what the model sees by, whether its tensors are there, and the tower itself.

Three steps, so that a model is told of by its configs and a broken file by its headers, while weights are read when the first
image comes: `read_vision`, `check_tower`, `load_tower`. Folders call a tower's tensors by several prefixes, as transformers'
versions did. Towers that others quantized become plain numbers. Not covered: GGUF files, whose towers are files of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.tower import tower_dtype, tower_of, tower_shapes
from nanovllm_cli.models.tower_fastvit import fastvit_stored
from nanovllm_cli.models.tower_layers import Seeing
from nanovllm_cli.models.tower_sam import sam_stored
from nanovllm_cli.models.tower_tiles import tiles_arranged, tiles_stored
from nanovllm_cli.models.tower_videos import with_video
from nanovllm_cli.models.towers import TowerFamily, tower_family
from nanovllm_cli.vision_spec import Stored, TowerSpec, VisionSpec
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.files import folder_of, some
from nanovllm_cli.weights.json_file import MAX_CONFIG_BYTES, read_json_file
from nanovllm_cli.weights.loader import MISSHAPEN, OTHER_MODEL
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.weight_reader import WeightReader

_ROOTS = (
    "visual", "vision_tower", "vision_model", "multi_modal_projector", "projector", "connector", "embed_vision", "mlp1", "vit",
    "merger", "layerwise_projectors", "spatial_projectors", "sam_model", "qwen2_model",
    "visual_embeddings_table", "mm_projector", "aligner", "vision_embedder", "resampler_model",
)  # fmt: skip
_ALSO = {
    "vision_encoder": "vision_tower", "vision_projection": "multi_modal_projector", "mlp_AR": "projector",
    "image_tower": "vision_tower", "vision_projector": "projector",
}  # fmt: skip
"""LightOnOCR's, PaddleOCR-VL's, Video-LLaVA's and HyperCLOVA X Vision's names for what others have."""
_ROOT = re.compile(
    rf"(?:model\.|thinker\.)?(?:({'|'.join((*_ROOTS, *_ALSO))})\.(?:vision_model\.)?|(?=(?:image_newline|view_seperator)$))"
)
_UNREAD = re.compile(
    r".*\.(?:inv_freq|position_ids)|(?:vision_tower|visual)\.head\..*|.*\.packing_position_embedding\..*|vit\.perceive\.image_sep"
    r"|vision_model\.connector\.fine\..*|.*\.num_batches_tracked"
)
"""Numbers that follow from the config, SigLIP's head, which makes one vector of an image, a row and positions of nothing, the
finer of a Granite Docling's connectors, and what training counted."""
_UNREAD_WHOLE = re.compile(rf"{_UNREAD.pattern}|vision_tower\.vit_merger\..*")
"""And where patches are not joined within a tower, what a MiniCPM-V's has for that."""
_SECTIONS = "vision_config", "vit_config"
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_PLACES = "{i}", "{j}"


def is_of_tower(name: str) -> bool:
    """Whether a folder's tensor is of what images are read by, by its name."""
    return _ROOT.match(name) is not None


def read_vision(checkpoint: Checkpoint) -> VisionSpec | None:
    """What a model sees by. None where it is of a kind that doesn't see, or its folder lacks all of the tower's tensors, or it is
    a GGUF file.

    Raises CheckpointError for configs that are broken, UnsupportedError for what they ask and no tower here can be.
    """
    family = tower_family(checkpoint.config) if checkpoint.format == "hf" else None
    if family is None or not any(checkpoint.config.get(key) is not None for key in _SECTIONS):
        return None
    if not any(map(is_of_tower, checkpoint.names())):
        return None
    config, folder = ConfigReader(checkpoint.config, "config.json"), folder_of(checkpoint.path)
    images = settings_of(folder, "image_processor")
    if family.asks_processor:
        images = ConfigReader({**images.values, "processor": _of_processor(folder)}, images.where)
    return with_video(family.read(config, images), family.video, config, _of_videos(folder, images))


def vision_bytes(spec: VisionSpec, dtype: torch.dtype) -> int:
    """What the tower's weights take."""
    shapes = tower_shapes(spec.tower)
    return sum(math.prod(shape) * tower_dtype(name, dtype).itemsize for name, shape in shapes.items())


def check_tower(checkpoint: Checkpoint, spec: VisionSpec) -> None:
    """Compares names and shapes with those of the spec's tower, by headers alone. All differences are one CheckpointError."""
    tower_parts(checkpoint, spec)


def tower_parts(checkpoint: Checkpoint, spec: VisionSpec) -> dict[str, list[str]]:
    """Our names -> the folder's tensors, whose rows lie behind each other in ours. Raises as `check_tower`."""
    return _compared(checkpoint, spec.tower, open_reader(checkpoint))


def load_tower(
    checkpoint: Checkpoint, spec: VisionSpec, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Seeing:
    """The tower with its weights, to compute in `dtype`. CheckpointError names missing, extra and misshapen tensors, and those
    with NaN."""
    reader, tensors = open_reader(checkpoint), {}
    for ours, theirs in _compared(checkpoint, spec.tower, reader).items():
        whole = torch.cat(read_parts(checkpoint, reader, ours, theirs))
        tensors[ours] = arranged(ours, whole, spec.tower).to(device, tower_dtype(ours, dtype)).contiguous()
    return tower_of(spec.tower, tensors, (spec.mean, spec.std))


def settings_of(folder: Path, processor: str) -> ConfigReader:
    """Of the image processor or feature extractor, as transformers finds them; empty where the folder has none."""
    whole, own = folder / "processor_config.json", folder / "preprocessor_config.json"
    if whole.is_file():
        section = ConfigReader(read_json_file(whole, MAX_CONFIG_BYTES), whole.name)
        if section.has(processor):
            return section.section(processor)
    return ConfigReader(read_json_file(own, MAX_CONFIG_BYTES) if own.is_file() else {}, own.name)


def _of_processor(folder: Path) -> Mapping[str, object]:
    """What has image processor and tokenizer says of itself."""
    whole = folder / "processor_config.json"
    return read_json_file(whole, MAX_CONFIG_BYTES) if whole.is_file() else {}


def _of_videos(folder: Path, images: ConfigReader) -> ConfigReader:
    """Settings of the video processor; where a folder has none, those of images."""
    own = folder / "video_preprocessor_config.json"
    if (found := settings_of(folder, "video_processor")).where.startswith("processor_config"):
        return found
    return ConfigReader(read_json_file(own, MAX_CONFIG_BYTES), own.name) if own.is_file() else images


def _compared(checkpoint: Checkpoint, spec: TowerSpec, reader: WeightReader) -> dict[str, list[str]]:
    """See `tower_parts`."""
    family = tower_family(checkpoint.config)
    assert family is not None
    plain = {name: _ROOT.sub(_plain_root, name, count=1) for name in reader.names() if is_of_tower(name)}
    unread = _UNREAD if spec.shrinks is not None else _UNREAD_WHOLE
    plain = {name: own for name, own in plain.items() if not (unread.fullmatch(own) or _is_behind(own, family, spec))}
    return compared(checkpoint.path, reader, plain, family.names, stored_shapes(spec))


def _is_behind(name: str, family: TowerFamily, spec: TowerSpec) -> bool:
    """Whether it is of what a family leaves out; of layers, those behind the last one that is computed."""
    found = family.unread.fullmatch(name)
    return found is not None and (not found.re.groups or not found[1] or int(found[1]) >= spec.num_layers)


def _plain_root(found: re.Match[str]) -> str:
    return "" if found[1] is None else _ALSO.get(found[1], found[1]) + "."


def compared(
    path: Path,
    reader: WeightReader,
    plain: Mapping[str, str],
    patterns: Mapping[str, tuple[str, ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, list[str]]:
    """Our names of a tower's tensors -> the folder's. plain: its names -> without what they may begin with. patterns: our names,
    {i} for a layer, {j} for one in that -> those. shapes: of what is stored for each of ours. Raises as `match_tensors`."""
    there: dict[str, str] = {}
    extra = []
    for name in sorted(plain):
        if plain[name] in there:
            extra.append(name)
        else:
            there[plain[name]] = name
    names: dict[str, list[str]] = {}
    wanted: dict[str, tuple[int, ...]] = {}
    for ours, (_, *others) in shapes.items():
        names[ours] = _of_layer(ours, patterns)
        each_rows = rows_of_parts(ours, len(names[ours]), shapes)
        wanted |= {name: (own, *others) for name, own in zip(names[ours], each_rows, strict=True)}
    match_tensors(path, wanted, {own: (name, reader.shape(name) or (1,)) for own, name in there.items()}, extra)
    return {ours: [there[each] for each in own] for ours, own in names.items()}


def _of_layer(ours: str, patterns: Mapping[str, tuple[str, ...]]) -> list[str]:
    """See `compared`."""
    pattern, numbers = ours, list(zip(_PLACES, _LAYER.findall(ours), strict=False))
    for place, _ in numbers:
        pattern = _LAYER.sub(place, pattern, count=1)
    theirs = list(patterns[pattern])
    for place, number in numbers:
        theirs = [each.replace(place, number) for each in theirs]
    return theirs


def rows_of_parts(ours: str, count: int, shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """Of each of so many tensors that lie behind each other in ours."""
    rows, (module, _, kind) = shapes[ours][0], ours.rpartition(".")
    if module.endswith(".qkv") and kind in ("weight", "bias") and count == 3:  # queries are as wide as what they are made of
        width = shapes[f"{module}.weight"][1]
        return [width, (rows - width) // 2, (rows - width) // 2]
    if module.endswith(".qkv") and kind == "weight" and count == 2:  # keys and values are one
        width = shapes[ours][1]
        return [width, rows - width]
    return [rows // count] * count


def match_tensors(
    path: Path, wanted: Mapping[str, tuple[int, ...]], there: Mapping[str, tuple[str, tuple[int, ...]]], extra: Iterable[str] = ()
) -> None:
    """One CheckpointError for all that is not as wanted, if anything. there: name -> what the file at `path` calls it, and its
    shape. extra: what else is in it and should not be."""
    missing = wanted.keys() - there.keys()
    extra = [*extra, *(there[name][0] for name in there.keys() - wanted.keys())]
    misshapen = [
        f"{there[name][0]} (expected {list(shape)}, found {list(there[name][1])})"
        for name, shape in wanted.items()
        if name in there and there[name][1] != shape
    ]
    problems = [("missing", missing), ("not part of it", extra), (MISSHAPEN, misshapen)]
    lines = [f"{len(names)} {what}: {some(sorted(names))}" for what, names in problems if names]
    if lines:
        raise CheckpointError(f"{path}: tensors don't match the tower: {'; '.join(lines)}", OTHER_MODEL)


def stored_shapes(spec: TowerSpec, *, of_file: bool = False) -> dict[str, tuple[int, ...]]:
    """Of what folders have for each of ours, or GGUF files, whose patches all have kernels: all that lies behind each other in it
    taken together."""
    if spec.sam is not None:
        return sam_stored(spec, of_file=of_file)
    if spec.fastvit is not None:
        return fastvit_stored(spec)
    if spec.tiles is not None:
        return tiles_stored(spec)
    if spec.projector == "direct":
        return tower_shapes(spec) | ({} if of_file else {"positions.weight": (spec.positions, 2, spec.hidden_size)})
    shapes = {ours: (math.prod(shape),) if ours.endswith(".bounds") else shape for ours, shape in tower_shapes(spec).items()}
    are_matrices = spec.projector in ("scaled", "attended", "timed") or spec.stretch == "areas"
    if of_file or not are_matrices:
        side = (spec.patch_size, spec.patch_size)
        shapes["patch.weight"] = (spec.hidden_size, 3, *((spec.frames,) if spec.frames else ()), *side)
    if spec.films:
        shapes["film.weight"] = shapes["patch.weight"]
    if spec.projector == "shuffled":  # a matrix, of each colour's pixels behind each other
        shapes["patch.weight"] = (spec.hidden_size, 3 * spec.patch_size**2)
    is_moonvit = spec.projector == "merger" and spec.stored != "halves"
    if is_moonvit and (not of_file or spec.stored == "axes"):  # as llama.cpp's files of a Kimi K2.5 have it, too
        shapes["positions.weight"] = (*(2 * (math.isqrt(spec.positions),)), spec.hidden_size)
    if spec.taps:  # a matrix over colours, frames, lines and columns
        shapes["patch.weight"] = (spec.hidden_size, 3 * spec.frames * spec.patch_size**2)
    if spec.projector == "gated":  # a kernel over a cell
        shapes["projector.join.weight"] = (spec.out_size, spec.hidden_size, spec.merge, spec.merge)
    if spec.projector == "lined":  # kernels, too; and a position more, of nothing
        shapes["projector.join.weight"] = (2 * spec.hidden_size, spec.hidden_size, spec.merge, spec.merge)
        shapes["projector.first.weight"] = (4 * spec.hidden_size, 2 * spec.hidden_size, 1, 1)
        shapes["positions.weight"] = (spec.positions + (not of_file), spec.hidden_size)
    if spec.marks:  # both are of one table
        table = (spec.projector_size + spec.marks, spec.out_size)
        shapes |= {"projector.out.weight": table, "marks.table": table}
    if spec.queries:
        tables = [ours for ours in shapes if ours.endswith(".table")]
        shapes |= {ours: (1, math.prod(shapes[ours][:-1]), spec.hidden_size) for ours in tables}
    if spec.projector == "pooled":
        shapes["projector.out.weight"] = shapes["projector.out.weight"][::-1]
    if spec.projector == "averaged":  # timm's
        shapes |= {name: (1, *shapes[name]) for name in ("lead.weight", "positions.weight") if name in shapes}
    elif spec.lead and spec.norm_placed and not of_file:  # CLIP's
        shapes["lead.weight"] = (spec.hidden_size,)
    elif spec.lead and not of_file:
        shapes |= {"lead.weight": (1, 1, spec.hidden_size), "positions.weight": (1, *shapes["positions.weight"])}
    return shapes


def arranged(ours: str, stored: torch.Tensor, spec: TowerSpec) -> torch.Tensor:
    """As `tower_shapes` has it."""
    if spec.tiles is not None:
        return tiles_arranged(ours, stored, spec)
    if spec.fastvit is not None:  # of kernels of single patches, and gains of lines and columns, what is left without these
        return stored.flatten(stored.dim() - 3) if stored.dim() > 2 and stored.shape[-2:] == (1, 1) else stored
    if spec.sam is not None and ours == "positions.weight":
        return stored.flatten(0, 2)
    if spec.sam is not None and ours in ("separator.weight", "line_end.weight", "behind.lead"):
        return stored.flatten()
    if ours == "film.weight":
        return stored.flatten(1)
    if ours == "patch.weight" and spec.projector not in ("shuffled", "timed"):
        if spec.taps:
            stored = stored.view(len(stored), 3, spec.frames, spec.patch_size, spec.patch_size)
        if stored.dim() == 2:  # a pixel's colours are behind each other there
            return stored.view(len(stored), -1, 3).transpose(1, 2).flatten(1)
        kernel = stored.to(torch.float32).sum(dim=2) if spec.frames else stored  # all frames show the same
        return kernel.flatten(1)
    if ours.endswith(".bounds"):
        return stored.view(-1, 4)
    if ours.startswith("patch_norm."):  # as its pixels
        return stored.view(-1, 3).T.flatten()
    if ours == "positions.weight" and spec.projector == "direct":
        return stored.transpose(0, 1)
    if spec.stored != "halves" and ours.endswith((".qkv.weight", ".qkv.bias")):
        q, k, v = stored.chunk(3)
        return torch.cat([*(turned_as(each, spec.num_heads, spec.stored, "halves") for each in (q, k)), v])
    if spec.projector == "shuffled" and ours == "positions.weight":  # that of what leads is behind the others
        return stored.roll(1, 0)
    if ours == "positions.weight" and stored.dim() == 3 and not spec.by_axis:
        return stored.flatten(0, -2)
    if ours.endswith(".query.table"):
        return stored[0]
    if ours.endswith(".places.table"):  # of patches line by line there
        side, merge = spec.query_side, spec.merge
        return stored.view(side, merge, side, merge, -1).transpose(1, 2).reshape(side**2, merge**2, -1)
    if spec.projector == "scaled" and ours.endswith(".qkv.weight"):
        q, k, v = stored.chunk(3)
        return torch.cat([_axes_joined(q, spec.num_heads), _axes_joined(k, spec.num_heads), v])
    if spec.projector == "scaled" and ours.endswith(".head_norm.weight"):
        return _axes_joined(stored, 2)
    if ours == "projector.out.weight" and spec.projector == "pooled":
        return stored.T
    if spec.marks and ours in ("projector.out.weight", "marks.table"):
        return stored[: -spec.marks].T if ours.startswith("projector.") else stored[-spec.marks :]
    if ours == "projector.norm.weight" and spec.projector == "pooled":
        return stored.to(torch.float32) + 1
    if spec.lead and ours in ("lead.weight", "positions.weight"):
        return stored.view(-1, spec.hidden_size)
    if spec.projector_gated and ours.startswith("projector.up."):  # the gate is behind what it gates there
        return stored.roll(spec.projector_size, 0)
    if spec.projector == "lined" and ours == "positions.weight":
        return stored[-spec.positions :]
    if spec.projector == "lined" and ours == "projector.first.weight":
        return stored.flatten(1)
    if ours == "projector.join.weight" and spec.projector != "placed":  # a dimension's patches are behind each other there
        return stored.view(len(stored), spec.hidden_size, spec.merge**2).transpose(1, 2).flatten(1)
    return stored


def turned_as(rows: torch.Tensor, heads: int, stored: Stored, wanted: Stored) -> torch.Tensor:
    """Rows of queries, or of keys, whose heads' numbers are stored in one order, in another."""
    of_head = rows.shape[0] // heads
    match stored:
        case "halves":
            parts = rows.view(heads, 2, 2, of_head // 4, -1).flip(2).permute(0, 2, 3, 1, 4)
        case "axes":
            parts = rows.view(heads, 2, of_head // 4, 2, -1)
        case "pairs":
            parts = rows.view(heads, of_head // 4, 2, 2, -1).transpose(1, 2)
    if wanted == "halves":
        parts = parts.permute(0, 3, 1, 2, 4).flip(2)
    elif wanted == "pairs":
        parts = parts.transpose(1, 2)
    return parts.reshape(rows.shape)


def _axes_joined(stored: torch.Tensor, heads: int) -> torch.Tensor:
    """Heads whose halves, of columns and of lines, each turn by themselves, as ones that turn as a whole, lines first."""
    return stored.view(heads, 4, len(stored) // (4 * heads), *stored.shape[1:])[:, [2, 0, 3, 1]].flatten(0, 2)


def read_parts(checkpoint: Checkpoint, reader: WeightReader, ours: str, theirs: Iterable[str]) -> list[torch.Tensor]:
    """What one of our tensors is made of, as plain numbers; bounds are one tensor already."""
    return [bounds_of(checkpoint, theirs)] if ours.endswith(".bounds") else [read_whole(reader, name) for name in theirs]


def bounds_of(checkpoint: Checkpoint, names: Iterable[str]) -> torch.Tensor:
    """Numbers that stand alone; where nothing is cut off, they are infinite."""
    bounds = torch.stack([checkpoint.tensor(name).to(torch.float32).reshape(()) for name in names])
    if bounds.isnan().any():
        raise CheckpointError(f"{checkpoint.path}: bounds that are NaN, among {some(sorted(names))}", OTHER_MODEL)
    return bounds


def read_whole(reader: WeightReader, name: str) -> torch.Tensor:
    """As plain numbers."""
    form = reader.format(name)
    parts = []
    for rows, _ in reader.slices(name):
        if isinstance(rows, torch.Tensor):
            parts.append(rows.clone())  # nothing holds the file
        else:
            assert form is not None
            parts.append(form.dequantize(rows))
    return torch.cat(parts)
