"""What the tensors of a checkpoint are called: our names -> its names.

A model that also sees or hears has the one that writes text as a part, whose tensors have a prefix; all others are left aside.
Folders of models that embed texts are often of the model without its head, whose tensors lack the prefix that others have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.models.families import text_config
from nanovllm_cli.models.family import ANOTHER, Family
from nanovllm_cli.models.names import ADAPTERS_OF_SENSES, HF_IGNORED, MTP_GGUF_NAMES
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.registry_gguf import gguf_family
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.further import gguf_dense_tensors
from nanovllm_cli.weights.heads import head_tensors

_OUTER, _INNER = "model.", (
    "language_model.model.", "language_model.backbone.", "model.language_model.", "model.text_model.", "thinker.model.",
)  # fmt: skip
_AGAIN = "encoder."  # in front of the layers of a Qianfan-OCR that transformers has written
_HEADS = "language_model.", "thinker."
_BACKBONE = "backbone."  # with _OUTER in front of all, in Codestral Mamba; or _OUTER in its place, in Nemotron Puzzle
_GUESSES = "model.mtp_"  # where they have no place among the layers, in ERNIE
_ALWAYS_APART = ("mtp.", "model.mtp.")  # in Qwen3.5, whose configs need not speak of them
_LAYER, _BLOCK = re.compile(r"(?:model\.(?:language_model\.)?)?layers\.(\d{1,6})\."), re.compile(r"blk\.(\d{1,6})\.")
_KEY_OR_VALUE = re.compile(r"\b(?:layers|blk)\.(\d{1,6})\.(?:self_attn\.[kv]_(?:proj|norm)|attn_[kv](?:_norm)?)\.weight$")
_NUMBERED = re.compile(r".*\blayers\.(?=\{i\}\.)")
_MTP_PLACE, _LATER_MTP = re.compile(r"mtp\.|.*\blayers\.\d+\.|blk\.\d+\."), re.compile(r"mtp\.layers\.[1-9]")
_NUM_LAYERS = "num_hidden_layers", "block_count"
_SEES = (
    "visual.", "mlp_AR.", "vit.", "model.sam_model.", "model.qwen2_model.", "model.projector.", "model.view_seperator",
    "model.vision_model.", "model.image_newline",
    "vision_model.", "vision_tower.", "vit_large_projector.", "audio_tower.", "siglip2.", "merger.",
)  # fmt: skip
"""Where the part that writes has no prefix: in Qwen2-VL, in what thinks in a Qwen's Omni, in PaddleOCR-VL, HunYuan-VL,
both DeepSeek-OCRs, Step3-VL, dots.ocr and Youtu-VL."""


def family_of(checkpoint: Checkpoint) -> Family:
    """UnsupportedError for one that is not known, CheckpointError where the checkpoint doesn't say."""
    return hf_family(checkpoint.config) if checkpoint.format == "hf" else gguf_family(checkpoint.config, checkpoint.names())


def names_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Of its slots, {i} for the layer -> those in the file."""
    family = family_of(checkpoint)
    table, prefix = family.names(checkpoint.format), _prefix(checkpoint)
    if family.also_embedded and checkpoint.format == "hf" and table["embedding.weight"] not in (names := set(checkpoint.names())):
        return table | {"embedding.weight": next(filter(names.__contains__, family.also_embedded), table["embedding.weight"])}
    if (embedding := table["embedding.weight"]).startswith(_BACKBONE):
        if _OUTER + embedding in checkpoint.names():
            return {ours: _OUTER + theirs for ours, theirs in table.items()}
        if embedding.replace(_BACKBONE, _OUTER) in checkpoint.names():
            return {ours: theirs.replace(_BACKBONE, _OUTER) for ours, theirs in table.items()}
    if prefix is None:
        return bare_names(table, family_of(checkpoint)) if is_bare(checkpoint) else table
    outer = _BACKBONE if table["embedding.weight"].startswith(_BACKBONE) else _OUTER
    renamed = {ours: prefix + theirs.removeprefix(outer) for ours, theirs in table.items() if theirs.startswith(outer)}
    if any(name.startswith(f"{prefix}{_AGAIN}layers.") for name in checkpoint.names()):
        renamed = {ours: theirs.replace(f"{prefix}layers.", f"{prefix}{_AGAIN}layers.") for ours, theirs in renamed.items()}
    heads = {before + table["head.weight"] for before in _HEADS}.intersection(checkpoint.names())
    return table | renamed | dict.fromkeys(["head.weight"] if heads else [], min(heads, default=""))


def vector_name(checkpoint: Checkpoint) -> str | None:
    """What it calls the matrix that vectors of texts go through behind the pooling; None where its family has none."""
    name = family_of(checkpoint).vector_names.get(checkpoint.format)
    prefix = _prefix(checkpoint)
    return name if name is None or prefix is None else prefix + name


def bare_names(table: Mapping[str, str], family: Family) -> dict[str, str]:
    """The same in a folder of the model without its head."""
    return {ours: theirs.removeprefix(family.outer) for ours, theirs in table.items()}


def is_bare(checkpoint: Checkpoint) -> bool:
    """Whether its tensors lack the prefix that those of a model with a head have in a folder."""
    if checkpoint.format == "gguf":
        return False
    family, names = family_of(checkpoint), set(checkpoint.names())
    embedding = family.names("hf")["embedding.weight"]
    return embedding not in names and embedding.removeprefix(family.outer) in names


def mtp_names_of(checkpoint: Checkpoint) -> dict[str, str] | None:
    """The same of the layer behind a model's own that predicts further tokens, the first if there are several; None where there
    is none, or none that is known of the family. In the file's names the layer's number stands already."""
    table, names = mtp_names(checkpoint), set(checkpoint.names())
    if table.get("join.weight") not in names:
        return None
    if table["norm.weight"] not in names:
        table["norm.weight"] = names_of(checkpoint)["norm.weight"]
    return table


def mtp_names(checkpoint: Checkpoint) -> dict[str, str]:
    """What its names are if it has one; empty where none is known of the family."""
    family, config = family_of(checkpoint), checkpoint.config
    if not family.mtp_names:
        return {}
    if checkpoint.format == "gguf":
        arch = config["general.architecture"]
        count, further = (config.get(f"{arch}.{key}") for key in ("block_count", "nextn_predict_layers"))
        return mtp_gguf_names(family, count - further) if type(count) is int and type(further) is int else {}
    count = text_config(config).get("num_hidden_layers")
    own = "mtp.layers.0." if family.mtp_names["join.weight"].startswith("mtp.") else rf"\g<0>{count}."
    every = names_of(checkpoint) | dict(family.mtp_names)
    return {ours: _NUMBERED.sub(own, theirs).replace("{i}.", "") for ours, theirs in every.items()}


def mtp_gguf_names(family: Family, layer: int) -> dict[str, str]:
    """What a GGUF file calls them, of a layer of this number."""
    every = family.names("gguf") | MTP_GGUF_NAMES | dict(family.mtp_gguf_names)
    return {ours: theirs.replace("{i}", str(layer)) for ours, theirs in every.items()}


def of_that_layer(table: Mapping[str, str], names: Iterable[str]) -> set[str]:
    """Those of `names` that belong to the layer whose table `mtp_names_of` gave."""
    place = _MTP_PLACE.match(table["join.weight"])
    assert place is not None
    return {name for name in names if name.startswith(place[0]) and not _LATER_MTP.match(name)}


def checkpoint_name(ours: str, table: Mapping[str, str]) -> str:
    """The checkpoint's name for one of ours, by a table of patterns with {i} for the layer and {e} for the expert or head.
    UnsupportedError where the table has none: no model of the family has such a tensor."""
    parts, number, expert = ours.split("."), "", ""
    first = int(parts[0] == "encoder")
    if parts[first] == "blocks":
        number, parts[first + 1] = parts[first + 1], "{i}"
        at = 4 if parts[2] in ("values", "seen") else 3
        if parts[at - 1] in ("experts", "k_b", "v_b", "uses", "shards") and parts[at].isdecimal():
            expert, parts[at] = parts[at], "{e}"
    elif len(parts) == 3 and parts[1].isdecimal():
        expert, parts[1] = parts[1], "{e}"
    pattern = ".".join(parts)
    if pattern not in table:
        raise UnsupportedError(f"a model of this family with {pattern.removeprefix('blocks.{i}.')!r}", ANOTHER)
    return table[pattern].replace("{i}", number).replace("{e}", expert)


def left_aside(checkpoint: Checkpoint, names: Iterable[str]) -> set[str]:
    """Those of `names` that belong to other parts than the one that writes text, or to what guesses further tokens, or that no
    layer reads, or that a pooled vector goes through behind the layers."""
    names = set(names)
    family = family_of(checkpoint)
    aside = {name for name in names if name.startswith(family.aside or ("\0",))}
    aside -= {names_of(checkpoint)["embedding.weight"]} if family.also_embedded else set()
    aside |= {name for name in names if name.endswith(ADAPTERS_OF_SENSES)}
    aside |= _of_experts_elsewhere(checkpoint, names)
    aside |= {name for name in names if checkpoint.format == "gguf" and name.endswith(family.gguf_told_by)}
    behind = (head_tensors(checkpoint) | gguf_dense_tensors(checkpoint) | {vector_name(checkpoint) or ""}) & names
    return aside | behind | _other_parts(checkpoint, names) | _unread(checkpoint, names)


def matrix_types(checkpoint: Checkpoint) -> set[str]:
    """What the model's matrices are stored as: of what is left aside, numbers of positions for instance, nobody asks."""
    names = set(checkpoint.names())
    own = (name for name in names - left_aside(checkpoint, names) if not name.endswith(HF_IGNORED))
    infos = (checkpoint.info(name) for name in own)
    return {info.dtype_name for info in infos if len(info.shape) > 1}


def that_guess(checkpoint: Checkpoint, names: Iterable[str]) -> set[str]:
    """Those of `names` that guess further tokens."""
    return _further(checkpoint, set(names))


def _other_parts(checkpoint: Checkpoint, names: set[str]) -> set[str]:
    prefix = _prefix(checkpoint)
    if prefix is None:
        flat = checkpoint.format == "hf" and checkpoint.config.get("vision_config") is not None
        return {name for name in names if (flat and name.startswith(_SEES))} | _further(checkpoint, names)
    heads = {before + "lm_head.weight" for before in ("", *_HEADS)}
    others = {name for name in names if not name.startswith((prefix, "language_model.")) and name not in heads}
    return others | _further(checkpoint, names)


def _further(checkpoint: Checkpoint, names: set[str]) -> set[str]:
    """Layers behind the model's own that are for speculation."""
    if family_of(checkpoint).assists:
        return set()
    is_folder = checkpoint.format == "hf"
    count, end = _said(checkpoint, "num_nextn_predict_layers", "nextn_predict_layers"), _said(checkpoint, *_NUM_LAYERS)
    apart = {name for name in names if is_folder and name.startswith(_ALWAYS_APART)}
    if not isinstance(count, int) or count < 1 or not isinstance(end, int):
        return apart
    end -= 0 if is_folder else count
    places = {name: (_LAYER if is_folder else _BLOCK).match(name) for name in names}
    behind = {name for name, found in places.items() if found is not None and int(found[1]) >= end}
    return apart | behind | {name for name in names if name.startswith(_GUESSES)}


def _of_experts_elsewhere(checkpoint: Checkpoint, names: set[str]) -> set[str]:
    """What a layer has that no router stands in, and only layers with experts read."""
    family = family_of(checkpoint)
    if not family.unread_without_experts or checkpoint.format != "hf":
        return set()
    found = {name: _LAYER.match(name) for name in names if name.endswith(family.unread_without_experts)}
    router = names_of(checkpoint)["blocks.{i}.router.weight"]
    there = set(checkpoint.names())
    return {name for name, place in found.items() if place is not None and router.replace("{i}", place[1]) not in there}


def _unread(checkpoint: Checkpoint, names: set[str]) -> set[str]:
    """Keys and values of layers that read those of others, which published Gemmas have all the same."""
    count, layers = _said(checkpoint, "num_kv_shared_layers", "attention.shared_kv_layers"), _said(checkpoint, *_NUM_LAYERS)
    if type(count) is not int or type(layers) is not int or count < 1:
        return set()
    found = {name: _KEY_OR_VALUE.search(name) for name in names}
    return {name for name, place in found.items() if place is not None and int(place[1]) >= layers - count}


def _said(checkpoint: Checkpoint, of_folder: str, of_file: str) -> Any:
    """Of the part that writes text, by a key of its config, or by one of a GGUF file's without the architecture."""
    if checkpoint.format == "hf":
        return text_config(checkpoint.config).get(of_folder)
    return checkpoint.config.get(f"{checkpoint.config.get('general.architecture')}.{of_file}")


def _prefix(checkpoint: Checkpoint) -> str | None:
    if checkpoint.format == "gguf" or checkpoint.config.get("text_config") is None:
        return None
    inner = (*_INNER, "language_model.") if family_of(checkpoint).vector_names else _INNER
    return next((prefix for prefix in inner if any(name.startswith(prefix) for name in checkpoint.names())), None)
