"""Folders that mlx-lm and mlx-vlm have written, as if transformers had: what they call, stack or turn in another way.

    quantization: {bits, group_size, …, module: {…}}    quantization_config with "quant_method": "mlx", and settings by module
                                                         in "layers", under the names that modules have here
    mlp.switch_mlp.gate_proj.weight [E, N, …]           mlp.experts.5.gate_proj.weight [N, …], or what a family calls it; up_proj,
                                                         down_proj, fc1 and fc2, scales, biases and bias alike; switch_glu and
                                                         experts in place of switch_mlp, too
    linear_attn.conv1d.weight [N, K, 1]                 [N, 1, K]; LFM2's conv.conv.weight alike
    norms of Qwen3-Next and Qwen3.5, plus 1             as they were, where a convolution shows that MLX has been there
    vision_tower.….weight [N, h, w, 3]                  [N, 3, h, w]; [N, t, h, w, 3] alike
    mlp.gate_proj of a dense Granite 4                  shared_mlp.gate_proj; up_proj alike, down_proj is output_linear; LFM2's
                                                         layers without experts: feed_forward.w1, w3 and w2
    language_model.model.… of a Qwen that sees          model.language_model.…; vision_tower.… is model.visual.…, and of a
                                                         Llama 3.2 that sees vision_model.…
    self_attn.embed_q.weight [H, R, D]                   kv_b_proj.weight [H (D + V), R]: of each head embed_q, turned over, and
        and unembed_out.weight [H, V, R]                 unembed_out; quantized ones are `quantized_mlx.py`'s

All numbers are the same to the bit; those of raised norms are float32, as 1 is taken off.

Not covered: what mlx-lm has multiplied into weights (Falcon-H1's factors). Source: the `sanitize` of mlx-lm's and mlx-vlm's
models.

Legend: E experts, N rows, K taps; H heads of D numbers, V of a value, R of what is kept for all heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from nanovllm_cli.errors import CheckpointError, NanovllmError
from nanovllm_cli.models.experts import MAX_EXPERTS
from nanovllm_cli.weights.checkpoint import Checkpoint, CheckpointView, TensorInfo, as_bytes
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN
from nanovllm_cli.weights.tensor_names import names_of

METHOD = "mlx"
MAX_PARTS = 1 << 19
"""Tensors of experts, three of them a weight."""
_DIMS = {"bias": 2, "global_scale": 1}
"""Of stacks; of others 3."""
_KINDS = "weight", "scales", "biases", "bias"
_STACK = re.compile(
    r".*\blayers\.(\d{1,6})\..+?\.(switch_mlp|switch_glu|experts)\.(gate_proj|up_proj|down_proj|fc1|fc2)\."
    r"(weight|scales|biases|bias|global_scale)"
)
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "fc1": "up", "fc2": "down"}
_TAPS = re.compile(r".*\blayers\.\d{1,6}\.(?:.+\.)?(?:[qkv]_)?(?:conv1d|conv\.conv)\.weight")
_RAISED = re.compile(r".*(?:\.(?:input|post_attention)_layernorm|\.[qk]_norm|model\.norm)\.weight")
_RAISED_KINDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
_IMAGES = re.compile(r"(?:vision_tower|vision_model|visual|model\.visual|model\.vision_tower)\..+\.weight")
_LATENT = re.compile(r"(.*)\.embed_q\.weight")
_DENSE = re.compile(r".*\blayers\.(\d{1,6})\.(?:mlp|feed_forward)\.(gate|up|down)_proj\.(weight|scales|biases|bias)")
_DENSE_KINDS = "granitemoehybrid", "lfm2_moe"
_QWENS = {
    "language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.", "vision_tower.": "model.visual.",
}  # fmt: skip
_OUTER: dict[object, Mapping[str, str]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWENS),
    "mllama": {"vision_tower.": "vision_model."},
}
"""Beginnings of names, by the kind of model."""
_FLOATS = "F16", "BF16", "F32"


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the files. expert: which part of it, None for all of it. change: what is done to it. beside: another one
    that is a part, too."""

    stored: str
    expert: int | None = None
    change: Literal["", "taps", "images", "lowered", "heads"] = ""
    beside: str | None = None


def is_of_mlx(settings: Any) -> bool:
    """Whether these are MLX's settings of a quantized model, which don't say so."""
    return isinstance(settings, Mapping) and "quant_method" not in settings and {"bits", "group_size"} <= settings.keys()


def is_quantized_by_mlx(checkpoint: Checkpoint) -> bool:
    """Of one that `as_transformers_has_it` has seen."""
    settings = checkpoint.config.get("quantization_config")
    return isinstance(settings, Mapping) and settings.get("quant_method") == METHOD


def as_transformers_has_it(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` itself where nothing differs. CheckpointError for more experts than are believed, UnsupportedError for what is
    not covered."""
    if checkpoint.format != "hf":
        return checkpoint
    settings = _settings(checkpoint)
    names = checkpoint.names()
    sources = _sources(checkpoint, names)
    if settings is None and not sources:
        return checkpoint
    return _AsTransformers(checkpoint, sources, settings)


def _settings(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    found = [checkpoint.config.get(key) for key in ("quantization", "quantization_config")]
    return next((settings for settings in found if is_of_mlx(settings)), None)


def _sources(checkpoint: Checkpoint, names: list[str]) -> dict[str, _Source]:
    """What differs, by the names that it has here."""
    found: dict[str, _Source] = {}
    patterns: dict[str, str] | None = None
    turned = False
    for name in names:
        if _IMAGES.fullmatch(name) or _TAPS.fullmatch(name):
            shape = checkpoint.info(name).shape
            of_images = _IMAGES.fullmatch(name) is not None
            if of_images and len(shape) in (4, 5) and shape[-1] == 3 != shape[-2] == shape[-3]:  # a patch's colours
                found[name] = _Source(name, change="images")
            elif not of_images and len(shape) == 3 and shape[2] == 1 < shape[1]:
                found[name], turned = _Source(name, change="taps"), True
        elif (latent := _LATENT.fullmatch(name)) and (source := _of_heads(checkpoint, latent[1], names)) is not None:
            found[f"{latent[1]}.kv_b_proj.weight"] = source
        elif place := _STACK.fullmatch(name):
            if patterns is None:
                patterns = _patterns(checkpoint)
            found |= _experts(checkpoint, name, place, patterns)
    kind = checkpoint.config.get("model_type")
    for name in names if turned and kind in _RAISED_KINDS else ():
        if _RAISED.fullmatch(name) and len(checkpoint.info(name).shape) == 1:
            found[name] = _Source(name, change="lowered")
    for dense in filter(None, map(_DENSE.fullmatch, names if kind in _DENSE_KINDS else ())):
        patterns = patterns or _patterns(checkpoint)
        if (theirs := patterns.get(f"blocks.{{i}}.{dense[2]}.weight")) is not None:
            found[f"{theirs.removesuffix('weight')}{dense[3]}".replace("{i}", dense[1])] = _Source(dense[0])
    prefixes = _OUTER.get(kind) if isinstance(kind, str) else None
    return found if prefixes is None else _by_other_prefixes(found, names, prefixes)


def _of_heads(checkpoint: Checkpoint, module: str, names: list[str]) -> _Source | None:
    """Of latent attention's two matrices that are plain numbers; None of others."""
    first, other = f"{module}.embed_q.weight", f"{module}.unembed_out.weight"
    infos = [checkpoint.info(first), checkpoint.info(other)] if other in names else []
    if len(infos) < 2 or any(len(info.shape) != 3 for info in infos) or infos[0].dtype_name != infos[1].dtype_name:
        return None
    heads, rank, _ = infos[0].shape
    fits = infos[1].shape[0] == heads and infos[1].shape[2] == rank
    return _Source(first, change="heads", beside=other) if fits and infos[0].dtype_name in _FLOATS else None


def _by_other_prefixes(found: dict[str, _Source], names: list[str], prefixes: Mapping[str, str]) -> dict[str, _Source]:
    """The same, and what else has a prefix of mlx-vlm's, with those that transformers has."""
    gone = {name for source in found.values() for name in (source.stored, source.beside)}
    whole = {**{name: _Source(name) for name in names if name not in gone}, **found}
    renamed: dict[str, _Source] = {}
    for name, source in whole.items():
        prefix = next(filter(name.startswith, prefixes), None)
        if prefix is not None:
            renamed[prefixes[prefix] + name.removeprefix(prefix)] = source
        elif name in found:
            renamed[name] = source
    return renamed


def _patterns(checkpoint: Checkpoint) -> dict[str, str]:
    try:
        return names_of(checkpoint)
    except NanovllmError:  # what reads the model tells of it
        return {}


def _experts(checkpoint: Checkpoint, name: str, place: re.Match[str], patterns: Mapping[str, str]) -> dict[str, _Source]:
    layer, _, part, kind = place.groups()
    shape = checkpoint.info(name).shape
    weight = patterns.get(f"blocks.{{i}}.experts.{{e}}.{_PARTS[part]}.{'bias' if kind == 'bias' else 'weight'}")
    if weight is None or len(shape) != _DIMS.get(kind, 3):
        return {}
    if shape[0] > MAX_EXPERTS:
        most = f"at most {MAX_EXPERTS} are believed"
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} has {shape[0]} experts; {most}", DOWNLOAD_AGAIN)
    own = weight if kind in ("weight", "bias") else f"{weight.removesuffix('.weight')}.{kind}"
    own = own.replace("{i}", layer)
    return {own.replace("{e}", str(e)): _Source(name, expert=e) for e in range(shape[0])}


def _module(name: str) -> str:
    """Of a tensor's name: what its settings are found by."""
    head, _, last = name.rpartition(".")
    return head if last in _KINDS else name


def of_heads(embed_q: torch.Tensor, unembed_out: torch.Tensor) -> torch.Tensor:
    """[H (D + V), R] of [H, R, D] and [H, V, R]."""
    return torch.cat([embed_q.transpose(1, 2), unembed_out], 1).flatten(0, 1)


class _AsTransformers(CheckpointView):
    """sources: what differs, by name. settings: MLX's, of a quantized model."""

    def __init__(self, inner: Checkpoint, sources: dict[str, _Source], settings: Mapping[str, Any] | None) -> None:
        super().__init__(inner)
        if len(sources) > MAX_PARTS:
            raise CheckpointError(f"{inner.path}: more than {MAX_PARTS} tensors of experts are not believed", DOWNLOAD_AGAIN)
        self._sources = sources
        self._last = {source.stored: name for name, source in sources.items()}
        gone = {*self._last, *(source.beside for source in sources.values())}
        self._names = [*(name for name in inner.names() if name not in gone), *sources]
        if settings is not None:
            own = {key: value for key, value in settings.items() if isinstance(value, Mapping | bool)}
            layers: dict[str, Any] = {}
            for name in self._names:
                stored = sources[name].stored if name in sources else name
                if (module := _module(stored)) in own:
                    layers[_module(name)] = own[module]
            general = {key: value for key, value in settings.items() if key not in own}
            config = {key: value for key, value in inner.config.items() if key != "quantization"}
            self.config = {**config, "quantization_config": {**general, "quant_method": METHOD, "layers": layers}}

    def close(self) -> None:
        self._inner.close()

    def names(self) -> list[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        if name not in self._sources:
            return super().info(name)
        source = self._sources[name]
        info = super().info(source.stored)
        if source.expert is not None:
            return TensorInfo(name, info.shape[1:], info.dtype_name, info.num_bytes // info.shape[0])
        if source.change == "lowered":  # of which 16 bits have fewer than what is left
            return TensorInfo(name, info.shape, "F32", 4 * info.shape[0])
        if source.beside is not None:
            beside = super().info(source.beside)
            num_rows = info.shape[0] * (info.shape[2] + beside.shape[1])
            return TensorInfo(name, (num_rows, info.shape[1]), info.dtype_name, info.num_bytes + beside.num_bytes)
        shape = info.shape if source.change == "" else (info.shape[0], info.shape[-1], *info.shape[1:-1])
        return info._replace(name=name, shape=shape)

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        if name not in self._sources:
            return super().tensor(name, rows)
        source = self._sources[name]
        if source.expert is not None:
            own = self._inner.tensor(source.stored, (source.expert, source.expert + 1))[0]
            return own if rows is None else own[rows[0] : rows[1]]
        if source.beside is not None:
            whole = of_heads(self._inner.tensor(source.stored), self._inner.tensor(source.beside))
            return whole if rows is None else whole[rows[0] : rows[1]]
        own = self._inner.tensor(source.stored, rows)
        if source.change == "lowered":
            return own.float() - 1
        return own.movedim(-1, 1).contiguous() if source.change else own

    def raw(self, name: str) -> torch.Tensor:
        if name not in self._sources:
            return super().raw(name)
        source = self._sources[name]
        if source.expert is not None:
            shape = self._inner.info(source.stored).shape
            return self._inner.raw(source.stored).flatten().view(*shape[: len(shape) - 1], -1)[source.expert]
        return as_bytes(self.tensor(name)) if source.change else super().raw(source.stored)

    def release(self, name: str) -> None:
        """A stack's pages go when its last expert is read: those of two experts may lie on one."""
        if name not in self._sources:
            super().release(name)
        elif self._last[self._sources[name].stored] == name:
            super().release(self._sources[name].stored)
