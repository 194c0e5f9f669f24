"""What a folder's model hears by, as a GGUF file of its own beside the model's, as `convert_mmproj.py` has what one sees by."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.hearing_spec import ConformerSpec, EarSpec, HearingSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.ear import ear_shapes
from nanovllm_cli.models.ears import EARS, ear_family
from nanovllm_cli.models.ears_gguf import EAR_PROJECTORS, ear_names_in_gguf, hearing_from_gguf
from nanovllm_cli.models.tower_layers import waves
from nanovllm_cli.weights.checkpoint import Checkpoint, CheckpointView, TensorInfo
from nanovllm_cli.weights.convert_tensors import PLAIN_TYPES, Step, file_type, gguf_type
from nanovllm_cli.weights.convert_towers import TowerFile, check_spec, plain_type_of, tower_header
from nanovllm_cli.weights.hearing import ear_parts, put_together, read_hearing
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.vision import bounds_of, read_whole

_CONVOLVED = "a.conv1d.", "a.conv2d.", "a.conv_out."
"""Whose matrices llama.cpp wants in float16; its converter leaves an Audio Flamingo's, as it was trained in bfloat16, in full."""
_WHOLE = re.compile(r"a\.conv1d\..*|a\.input_projection\..*|a\.blk\.\d+\.conv_dw\..*")
"""Those of a conformer that it wants in float32."""
_WHOLE_GRANITE = re.compile(r"a\.blk\.\d+\.(?:conv_.*|attn_rel_pos_emb)|a\.proj_query")
_POSITIONS = "a.position_embd.weight"
_NUM_WAVES = 1500
"""Positions that its files have of those that follow from nothing but their number."""


class EarPart(NamedTuple):
    """What a file is to have of what hears. view: the folder, of which the steps are. names: of its tensors that are in it."""

    view: CheckpointView
    steps: list[Step]
    keys: dict[str, Any]
    names: frozenset[str]


def ear_file(source: Checkpoint, outtype: str, name: str) -> TowerFile | None:
    """As `convert_mmproj.tower_file`; None for a model that hears nothing."""
    part = ear_part(source, outtype)
    if part is None:
        return None
    header = tower_header(name, file_type(plain_type_of(part.steps)), part.keys)
    return TowerFile(part.view, part.steps, header, part.names, 0, "hears")


def ear_part(source: Checkpoint, outtype: str) -> EarPart | None:
    """None for a model that hears nothing. Raises as `convert_mmproj.tower_file`."""
    spec = read_hearing(source)
    if spec is None:
        return None
    parts, label = ear_parts(source, spec), _label(source)
    view = _EarView(source, spec, parts, label)
    kind = outtype if outtype in PLAIN_TYPES else "auto"
    steps = []
    for info in map(view.info, view.names()):
        after = gguf_type(info.name, info.shape, info.dtype_name, kind)
        if label == "granite_speech":
            after = "F32" if _WHOLE_GRANITE.fullmatch(info.name) else after
        elif isinstance(spec.tower, ConformerSpec):
            after = "F32" if _WHOLE.fullmatch(info.name) else after
        elif info.name.startswith(_CONVOLVED) or info.name == _POSITIONS:
            is_short = info.name.endswith(".weight") and info.name != _POSITIONS and label != "musicflamingo"
            after = "F16" if is_short else "F32"
        steps.append(Step.of(info, after))
    shapes = {step.name: step.shape for step in steps}
    if isinstance(spec.tower, EarSpec) and spec.tower.front != "pairs" and not spec.tower.positions:
        steps.append(Step.made(_POSITIONS, waves(_NUM_WAVES, spec.tower.hidden_size)))
    keys = _keys(spec, label)
    found = hearing_from_gguf(ConfigReader(keys, "the file"), shapes)
    check_spec(replace(spec, tokens=found.tokens), found)
    return EarPart(view, steps, keys, frozenset(each for names in parts.values() for each in names))


class _EarView(CheckpointView):
    """A folder's tower under the names of a GGUF file. Some of ours are other parts there than in a folder: a Granite Speech's
    keys and values are two, and a batch norm's four tensors are two."""

    def __init__(self, source: Checkpoint, spec: HearingSpec, parts: dict[str, list[str]], label: str) -> None:
        super().__init__(source)
        self.format = "gguf"
        self._reader = open_reader(source)
        self._tower = spec.tower
        self._ones = 1 if spec.tower.front == "line" else 2
        names = ear_names_in_gguf(spec.tower, EAR_PROJECTORS[label])
        self._shapes = ear_shapes(spec.tower)
        same = {ours: len(theirs) == len(parts[ours]) for ours, theirs in names.items()}
        self._own = {each: own for ours, theirs in names.items() if same[ours]
                     for each, own in zip(theirs, parts[ours], strict=True)}  # fmt: skip
        self._regrouped = {each: (parts[ours], place, len(theirs)) for ours, theirs in names.items() if not same[ours]
                           for place, each in enumerate(theirs)}  # fmt: skip
        self._ours = {each: ours for ours, theirs in names.items() for each in theirs}

    def names(self) -> list[str]:
        return list(self._ours)

    def info(self, name: str) -> TensorInfo:
        if name in self._regrouped:
            parts, _, count = self._regrouped[name]
            first, (rows, *others) = self._inner.info(parts[0]), self._shapes[self._ours[name]]
            is_table = self._ours[name].endswith(".table")
            return TensorInfo(name, (rows // count, *others) if not is_table else tuple(others),
                              "F32" if is_table else first.dtype_name, first.num_bytes)  # fmt: skip
        info = self._inner.info(self._own[name])
        kind = "F32" if self._is_exact(name) else info.dtype_name
        return TensorInfo(name, self._shape(name, info.shape), kind, info.num_bytes)

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        if name in self._regrouped:
            parts, place, count = self._regrouped[name]
            whole = put_together(self._ours[name], [read_whole(self._reader, each) for each in parts], self._tower)
            part = whole.chunk(count)[place].view(self.info(name).shape)
            return part if rows is None else part[slice(*rows)]
        own, ours = self._own[name], self._ours[name]
        if ours.endswith(".bounds"):
            return bounds_of(self._inner, [own])
        whole = read_whole(self._reader, own)
        if ours.endswith(".query_scale"):
            return functional.softplus(whole.to(torch.float32))
        whole = whole.view(self._shape(name, tuple(whole.shape)))
        return whole if rows is None else whole[slice(*rows)]

    def release(self, name: str) -> None:
        """Reading lets pages go."""

    def _shape(self, name: str, own: tuple[int, ...]) -> tuple[int, ...]:
        """A convolution's bias has a row for each channel there; a bound is a vector of one; of a convolution along time, whose
        channels see nothing but themselves, is not said that each sees one."""
        if name.startswith(_CONVOLVED) and name.endswith(".bias"):
            return *own, *(1,) * self._ones
        if self._ours[name].endswith(".kernel"):
            return own[0], own[-1]
        if name.endswith((".conv_pw1.weight", ".conv_pw2.weight")):
            return self._shapes[self._ours[name]]
        return own or (1,)

    def _is_exact(self, name: str) -> bool:
        return self._ours[name].endswith((".bounds", ".query_scale"))


def _label(source: Checkpoint) -> str:
    family = ear_family(source.config)
    for label, projector in EAR_PROJECTORS.items():
        if EARS[projector.model] is family:
            return label
    raise UnsupportedError(f"{source.path}: no file is written of what such a model hears by")


def _keys(spec: HearingSpec, label: str) -> dict[str, Any]:
    tower, where = spec.tower, "clip.audio.projector_type" if label in ("qwen3a", "gemma4a") else "clip.projector_type"
    keys: dict[str, Any] = {
        "clip.has_audio_encoder": True, where: label,
        "clip.audio.projection_dim": tower.out_size, "clip.audio.embedding_length": tower.hidden_size,
        "clip.audio.feed_forward_length": tower.intermediate_size, "clip.audio.block_count": tower.num_layers,
        "clip.audio.attention.head_count": tower.num_heads, "clip.audio.num_mel_bins": tower.num_bins,
        "clip.audio.attention.layer_norm_epsilon": tower.eps,
    }  # fmt: skip
    if isinstance(tower, EarSpec) and (shaw := tower.shaw) is not None:
        keys |= {
            "clip.audio.num_mel_bins": 2 * tower.num_bins, "clip.audio.chunk_size": shaw.block,
            "clip.audio.conv_kernel_size": shaw.kernel, "clip.audio.max_pos_emb": shaw.farthest,
            "clip.audio.projector.window_size": shaw.window, "clip.audio.projector.head_count": shaw.query_heads,
            "clip.audio.projector.downsample_rate": shaw.window // shaw.queries,
        } | ({"clip.audio.feature_layer": list(shaw.kept)} if shaw.kept else {})  # fmt: skip
    if isinstance(tower, EarSpec) and label == "voxtral":
        keys["clip.audio.projector.stack_factor"] = tower.joined
    return keys
