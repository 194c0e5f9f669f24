"""Folders that transformers has saved with other names, or rows, than those that are published, and one that it renames.

    OLMo Hybrid  layers.3.feedforward_layer_norm.weight      of a layer with attention: layers.3.post_attention_layernorm.weight
                 linear_attn.q_conv1d.weight, k_…, v_…       of any lengths: taps of q, k and v behind each other
    Kimi Linear  layers.0.block_sparse_moe.up_proj.weight    of a layer without experts: layers.0.mlp.up_proj.weight
    Mamba        backbone.embedding.weight                   backbone.embeddings.weight
    Zamba 2      layers.6.mamba_decoder.mamba.…              layers.6.mamba.…, as in layers without attention; what several layers
                                                             share counts in the first of them
    HRM          H_module.layers.3.attn.gqkv_proj.weight     layers.11.self_attn.gate_proj.weight, q_proj, k_proj and v_proj, one
                                                             behind the other; those of L_module are layers.0, 1, 2, …;
                                                             mlp.gate_up_proj is gate_proj and up_proj alike
    Dory         backbone.layers.3.self_attn.g_proj.weight   backbone.layers.6.mixer.g_proj.weight: attention and MLP are layers
                 backbone.layers.3.lambda_2                  of their own; backbone.layers.7.mlp_alpha

    Qwen4-Exp    ngram_embedding.weight, a table in one      ngram_embedding.shard_0.weight
    Talkie       embed.weight, blocks.3.attn.…               model.embed.weight, model.blocks.3.attn.…
                 lm_head                                     lm_head.weight

What is published is read as it is, but for Hy4 and DeepSeek-V4, whose tensors have transformers' names here, which renames and
saves others:

    Hy4          layers.0.hc_attn_layer.hc_pre.hc_fn         layers.0.attn_hc.fn; hc_base, hc_scale and hc_mlp_layer alike
                 hc_head.hc_head_fn                          hc_head.hc_fn
                 self_attn.learnable_sink_param              self_attn.sinks
                 self_attn.linear_gate.weight                self_attn.gate_proj.weight

    DeepSeek-V4  layers.0.attn.wq_a.weight                   model.layers.0.self_attn.q_a_proj.weight; and so on, see _DEEPSEEK4;
                 layers.0.attn.norm.weight                   self_attn.kv_norm.weight, which is published as kv_norm
                 layers.0.attn.wq_a.scale                    self_attn.q_a_proj.weight_scale_inv, of each weight that has one

Molmo 2's have those of what transformers makes of them: `molmo_names.py`.

Not covered: pickles.
"""

from __future__ import annotations

import itertools
import re

import torch

from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.passes_spec import LoopSpec, PassesSpec
from nanovllm_cli.weights.checkpoint import Checkpoint, CheckpointView, TensorInfo, as_bytes
from nanovllm_cli.weights.molmo_names import Piece, of_a_molmo

_NORM = re.compile(r"(model\.layers\.\d+)\.post_feedforward_layernorm\.weight")
_TAPS = re.compile(r"(model\.layers\.\d+\.linear_attn)\.q_conv1d\.weight")
_DENSE = re.compile(r"(model\.layers\.\d+)\.block_sparse_moe\.((?:gate|up|down)_proj\..+)")

_HY4_KINDS = "hy_v4", "hy_v4_vl"
_HY4 = (
    (re.compile(r"\.hc_pre(?=\.hc_)"), ""), (re.compile(r"\.hc_attn_layer\.hc_"), ".attn_hc."),
    (re.compile(r"\.hc_mlp_layer\.hc_"), ".ffn_hc."), (re.compile(r"\.hc_head\.hc_head_"), ".hc_head.hc_"),
    (re.compile(r"\.learnable_sink_param$"), ".sinks"), (re.compile(r"\.linear_gate\."), ".gate_proj."),
)  # fmt: skip
"""In this order; where a name has .hc_pre differs."""
_DEEPSEEK4 = tuple((re.compile(pattern), other) for pattern, other in (
    (r"^(?=layers\.|embed\.|norm\.|hc_head_)", "model."), (r"^model\.embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."), (r"^model\.hc_head_", "model.hc_head.hc_"),
    (r"(\.\d+)\.attn\.", r"\1.self_attn."), (r"(\.\d+)\.ffn\.", r"\1.mlp."),
    (r"(\.\d+)\.attn_norm\.", r"\1.input_layernorm."), (r"(\.\d+)\.ffn_norm\.", r"\1.post_attention_layernorm."),
    (r"(\.\d+)\.hc_(attn|ffn)_", r"\1.\2_hc."), (r"\.attn_sink$", ".sinks"),
    (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"(self_attn|compressor|indexer)\.norm\.", r"\1.kv_norm."), (r"\.ape$", ".position_bias"),
    (r"\.w(q_[ab]|kv|gate|o_[ab])\.", r".\1_proj."), (r"\.self_attn\.q_norm\.", ".self_attn.q_a_norm."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"(experts(?:\.\d+)?)\.w1\.", r"\1.gate_proj."), (r"(experts(?:\.\d+)?)\.w2\.", r"\1.down_proj."),
    (r"(experts(?:\.\d+)?)\.w3\.", r"\1.up_proj."),
))  # fmt: skip
"""In this order."""
_QWEN4_KINDS = "qwen4_exp", "qwen4_exp_text"
_LED = re.compile(r"(model\.layers\.\d+)\.mamba_decoder\.(.+)")
_SHARED = re.compile(r"model\.layers\.(\d+)\.shared_transformer\..+")

_IN_ONE_ROW = "hrm_text", "dory"
_STACKED = re.compile(r"model\.([HL])_module\.layers\.(\d{1,6})\.(.+)")
_PAIRED = re.compile(r"(?:model|backbone)\.layers\.(\d{1,6})\.(self_attn|mlp|lambda_1|lambda_2)(?:\.(.+))?")
_HALVES = {"self_attn": (0, "mixer"), "lambda_1": (0, "attn_alpha"), "mlp": (1, "mixer"), "lambda_2": (1, "mlp_alpha")}
_JOINED = {"self_attn.gqkv": ("gate", "q", "k", "v"), "mlp.gate_up": ("gate", "up")}
"""Of those stacks' layers: what is one tensor of what."""
_KINDS = (
    "olmo_hybrid", "kimi_linear", "mamba", "zamba2", "talkie", "deepseek_v4", "molmo2", *_IN_ONE_ROW, *_HY4_KINDS, *_QWEN4_KINDS,
)  # fmt: skip
_WHOLE_TABLE, _FIRST_SHARD = ".ngram_embedding.weight", ".ngram_embedding.shard_0.weight"
_FIRST_EMBEDDING = "backbone.embedding.weight"


def by_published_names(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` itself where nothing differs."""
    kind = checkpoint.config.get("model_type")
    if checkpoint.format != "hf" or kind not in _KINDS:
        return checkpoint
    names = set(checkpoint.names())
    if kind == "molmo2":
        return _Published(checkpoint, *of_a_molmo(checkpoint, names), set())
    if kind == "dory":
        halves = {published: name for name in names if (published := _of_halves(name)) != name}
        return _Published(checkpoint, halves, {}, set()) if halves else checkpoint
    if kind == "hrm_text":
        return _Published(checkpoint, *_numbered(checkpoint, names), set())
    renamed: dict[str, str] = {}
    divided: dict[str, list[Piece]] = {}
    count: object = checkpoint.config.get("num_mem_blocks", 1)
    sharing = sorted({int(found[1]) for name in names if (found := _SHARED.fullmatch(name))})
    again = sharing[count:] if kind == "zamba2" and isinstance(count, int) and count > 0 else []
    for name in names:
        if kind == "zamba2":
            if found := _LED.fullmatch(name):
                renamed[f"{found[1]}.{found[2]}"] = name
        elif kind == "talkie":
            if (other := _of_a_talkie(name)) != name:
                renamed[other] = name
        elif kind == "mamba":
            if name == _FIRST_EMBEDDING:
                renamed["backbone.embeddings.weight"] = name
        elif kind in _QWEN4_KINDS:
            if name.endswith(_WHOLE_TABLE):
                renamed[name.replace(_WHOLE_TABLE, _FIRST_SHARD)] = name
        elif kind in _HY4_KINDS:
            if (other := _as_transformers_has_it(name)) != name:
                renamed[other] = name
        elif kind == "deepseek_v4":
            if (other := _of_deepseek4(name, names)) != name:
                renamed[other] = name
        elif kind == "kimi_linear" and (found := _DENSE.fullmatch(name)):
            renamed[f"{found[1]}.mlp.{found[2]}"] = name
        elif found := _NORM.fullmatch(name):
            saved, published = (f"{found[1]}.{norm}.weight" for norm in ("feedforward_layer_norm", "post_attention_layernorm"))
            if saved in names and published not in names:
                renamed[published] = saved
        elif kind == "olmo_hybrid" and (found := _TAPS.fullmatch(name)):
            divided |= _divided(checkpoint, names, [f"{found[1]}.{part}_conv1d.weight" for part in "qkv"])
    left_out = {name for name in names if (found := _SHARED.fullmatch(name)) and int(found[1]) in again}
    return _Published(checkpoint, renamed, divided, left_out) if renamed or divided else checkpoint


def _as_transformers_has_it(name: str) -> str:
    for pattern, other in _HY4:
        name = pattern.sub(other, name)
    return name


def _of_deepseek4(name: str, names: set[str]) -> str:
    """Layers that guess keep their names."""
    if name.startswith("mtp."):
        return name
    module, _, last = name.rpartition(".")
    if last == "scale" and f"{module}.weight" in names:
        name = f"{module}.weight_scale_inv"
    for pattern, other in _DEEPSEEK4:
        name = pattern.sub(other, name)
    return name


def _of_a_talkie(name: str) -> str:
    if name == "lm_head":
        return "lm_head.weight"
    return f"model.{name}" if name.startswith(("embed.", "blocks.")) else name


def in_one_row(name: str, spec: ModelSpec) -> str:
    """What is published of a tensor that code for a model whose layers are gone through several times has by this name."""
    if isinstance(spec.passes, PassesSpec):
        return _of_one_stack(name, spec.num_layers // 2)
    return _of_halves(name) if isinstance(spec.passes, LoopSpec) else name


def _of_halves(name: str) -> str:
    """Of a Dory's layer as of one of its two halves, which are published as layers."""
    if name == "model.embed_tokens.weight":
        return "backbone.embeddings.weight"
    if (place := _PAIRED.fullmatch(name)) is None:
        return name
    half, part = _HALVES[place[2]]
    inner = [] if place[3] is None else [re.sub(r"^gate_proj\b", "g_proj", place[3]) if half == 0 else place[3]]
    return ".".join([f"backbone.layers.{2 * int(place[1]) + half}", part, *inner])


def _of_one_stack(name: str, count: int) -> str:
    """The name of a layer's tensor as if both stacks, of so many layers each, were one; that of any other as it is."""
    place = _STACKED.fullmatch(name)
    return name if place is None else f"model.layers.{int(place[2]) + count * (place[1] == 'H')}.{place[3]}"


def _numbered(checkpoint: Checkpoint, names: set[str]) -> tuple[dict[str, str], dict[str, list[Piece]]]:
    """Layers of two stacks as those of one, what renames them, and parts of what is made of attention's input."""
    found = {name: place for name in names if (place := _STACKED.fullmatch(name)) is not None}
    count = 1 + max((int(place[2]) for place in found.values()), default=-1)
    renamed: dict[str, str] = {}
    divided: dict[str, list[Piece]] = {}
    for name, place in found.items():
        part = re.sub(r"^attn\.", "self_attn.", place[3])
        layer = _of_one_stack(name, count).removesuffix(f".{place[3]}")
        shape = checkpoint.info(name).shape
        whole = next((whole for whole in _JOINED if part.startswith(f"{whole}_proj.")), None)
        if whole is None or not shape or shape[0] % len(_JOINED[whole]):
            renamed[f"{layer}.{part}"] = name
            continue
        own = _JOINED[whole]
        rows = shape[0] // len(own)
        for i, each in enumerate(own):
            module, _, last = whole.rpartition(".")
            divided[f"{layer}.{module}.{each}{part.removeprefix(f'{module}.{last}')}"] = [Piece(name, i * rows, (i + 1) * rows)]
    return renamed, divided


def _divided(checkpoint: Checkpoint, names: set[str], taps: list[str]) -> dict[str, list[Piece]]:
    """Of a layer's three, which transformers divides evenly, whatever they are of. Empty where they are as they should be."""
    keys = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
    said = [checkpoint.config.get(f"linear_{key}") for key in keys]
    if not names.issuperset(taps) or any(type(each) is not int or not 0 < each < 1 << 20 for each in said):
        return {}
    num_keys, key_dim, num_values, value_dim = (int(each or 0) for each in said)
    wanted = [num_keys * key_dim, num_keys * key_dim, num_values * value_dim]
    infos = [checkpoint.info(name) for name in taps]
    there = [info.shape[0] if info.shape else 0 for info in infos]
    if there == wanted or sum(there) != sum(wanted) or len({(info.shape[1:], info.dtype_name) for info in infos}) > 1:
        return {}
    starts, ends = ([0, *itertools.accumulate(counts)] for counts in (there, wanted))
    found: dict[str, list[Piece]] = {}
    for name, begin, end in zip(taps, ends, ends[1:], strict=False):
        found[name] = []
        for stored, own, behind in zip(taps, starts, starts[1:], strict=False):
            first, last = max(begin, own), min(end, behind)
            if first < last:
                found[name].append(Piece(stored, first - own, last - own))
    return found


class _Published(CheckpointView):
    """renamed: names -> those of the files. divided: names -> what lies behind each other in theirs. left_out: of the
    files'."""

    def __init__(self, inner: Checkpoint, renamed: dict[str, str], divided: dict[str, list[Piece]], left_out: set[str]) -> None:
        super().__init__(inner)
        self._renamed = renamed
        self._divided = divided
        gone = {*left_out, *renamed.values(), *(piece.stored for pieces in divided.values() for piece in pieces)}
        self._names = [*(name for name in inner.names() if name not in gone), *renamed, *divided]

    def close(self) -> None:
        self._inner.close()

    def names(self) -> list[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        if name not in self._divided:
            return super().info(self._renamed.get(name, name))._replace(name=name)
        pieces = self._divided[name]
        info, count = super().info(pieces[0].stored), sum(piece.end - piece.first for piece in pieces)
        return info._replace(name=name, shape=(count, *info.shape[1:]), num_bytes=info.num_bytes // info.shape[0] * count)

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        if name not in self._divided:
            return super().tensor(self._renamed.get(name, name), rows)
        whole = torch.cat([self._inner.tensor(piece.stored, (piece.first, piece.end)) for piece in self._divided[name]])
        return whole if rows is None else whole[rows[0] : rows[1]]

    def raw(self, name: str) -> torch.Tensor:
        return as_bytes(self.tensor(name)) if name in self._divided else super().raw(self._renamed.get(name, name))

    def release(self, name: str) -> None:
        """Pages of what lies in several tensors go with the file."""
        if name not in self._divided:
            super().release(self._renamed.get(name, name))
