"""Rotary positions as configs describe them: config.json in both of its forms, GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

from nanovllm_cli.config import AS_TRAINED, RopeChange, RopeKind
from nanovllm_cli.errors import CheckpointError, UnsupportedError, UsageError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER, ReadValues
from nanovllm_cli.rope_spec import RopeSpec, TemperatureSpec

MAX_HEAD_DIM = 1 << 16
_AS_IT_IS = "leave --rope-scaling, --rope-scale, --rope-freq-base and --yarn-orig-ctx out"
STANDS_STILL = 1e30
"""What divides a frequency that is to be 0, as GGUF files have it."""
WOVEN = ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")
"""Architectures of GGUF files whose sections lie in turns; the files don't say so."""


def rope_section(read: ConfigReader) -> ConfigReader:
    """Where config.json describes its rotary positions; empty where it has no scaling."""
    return read.section("rope_parameters" if read.values.get("rope_parameters") else "rope_scaling")


def check_one_rope(config: Mapping[str, Any]) -> None:
    """UnsupportedError for a config of transformers 5 into which somebody wrote what those before it had, meaning something else.
    There that one would count, without the base of its rotations."""
    new, old = (config.get(key) for key in ("rope_parameters", "rope_scaling"))
    if not isinstance(new, Mapping) or not isinstance(old, Mapping) or not new or not old:
        return
    kinds = [each.get("rope_type", each.get("type", "default")) for each in (new, old)]
    same_kind = kinds[0] == kinds[1] or {*map(str, kinds)} <= {"default", "mrope", "none"}
    if not same_kind or any(new.get(key) != value for key, value in old.items() if key not in ("rope_type", "type")):
        raise UnsupportedError(
            "config.json says two things of rotary positions: 'rope_parameters' and 'rope_scaling'",
            "put what is meant into rope_parameters, and take rope_scaling out",
        )


def rope_from_hf(read: ConfigReader, head_dim: int, max_position: int) -> RopeSpec:
    """ "rope_parameters" (transformers 5), or "rope_theta" beside "rope_scaling" (before)."""
    rope = rope_section(read)
    theta = rope.number("rope_theta") if rope.has("rope_theta") else read.number("rope_theta", 10000.0)
    share = rope.number("partial_rotary_factor", read.number("partial_rotary_factor", 1.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    key = "original_max_position_embeddings"  # outside of the section it counts for more
    original = read.integer(key, rope.integer(key, max(2, max_position), least=2), least=2)
    whole = kind == "proportional"  # its frequencies are those of the whole head, and 0 beyond the share
    base = RopeSpec(dim=head_dim if whole else int(head_dim * share), theta=theta, original_len=original)
    checked_rope(base, head_dim, read)
    if rope.has("mrope_section"):
        base = with_sections(base, rope.values["mrope_section"], read)
    if rope.has("attention_factor"):
        base = replace(base, attention_factor=rope.number("attention_factor"))
    match kind:
        case "default" | "none" | "mrope":
            return base
        case "linear":
            return replace(base, scaling="linear", factor=rope.number("factor"))
        case "proportional":
            if head_dim > MAX_HEAD_DIM:
                raise _too_wide(read, head_dim)
            turning = min(int(share * head_dim / 2), head_dim // 2)
            divisors = (rope.number("factor", 1.0),) * turning + (STANDS_STILL,) * (head_dim // 2 - turning)
            return replace(base, scaling="divisors", short_divisors=divisors)
        case "dynamic":
            if base.dim < 4:  # the exponent of its base is dim / (dim - 2)
                raise UnsupportedError(f"{rope.where}: dynamic scaling of {base.dim} rotary dims", ANOTHER)
            return replace(base, scaling="dynamic", factor=rope.number("factor"), original_len=max_position)
        case "ntk" if rope.values.get("mixed_b") is None:  # Su 2023, as Alibaba's encoders and vLLM have it, at all lengths
            factor = rope.number("factor")
            if head_dim > MAX_HEAD_DIM:
                raise _too_wide(read, head_dim)
            divisors = tuple(factor ** ((2 * pair + 2) / base.dim) for pair in range(base.dim // 2))
            return replace(base, scaling="divisors", short_divisors=divisors)
        case "llama3":
            return replace(
                base, scaling="llama3", factor=rope.number("factor"),
                low_freq=rope.number("low_freq_factor"), high_freq=rope.number("high_freq_factor"),
            )  # fmt: skip
        case "yarn":
            return replace(
                base, scaling="yarn", factor=rope.number("factor", max_position / original),
                beta_fast=rope.number("beta_fast", 32.0), beta_slow=rope.number("beta_slow", 1.0),
                truncate=rope.does("truncate", True),
                mscale=rope.number("mscale", 0.0, positive=False),
                mscale_all_dim=rope.number("mscale_all_dim", 0.0, positive=False),
            )  # fmt: skip
        case "longrope" | "su":
            return replace(
                base, scaling="longrope", factor=rope.number("factor", max_position / original),
                short_divisors=rope.numbers("short_factor", base.dim // 2),
                long_divisors=rope.numbers("long_factor", base.dim // 2),
            )  # fmt: skip
    raise UnsupportedError(
        f"rope scaling {kind[:80]!r} is not supported",
        "known: default, linear, dynamic, ntk, llama3, yarn, longrope, proportional",
    )


def _too_wide(read: ConfigReader, head_dim: int) -> CheckpointError:
    return CheckpointError(f"{read.where}: heads of {head_dim} dims; at most {MAX_HEAD_DIM} are believed", BROKEN)


def stretched(rope: RopeSpec, max_position: int) -> int:
    """The context that a scaling makes of the one in the config; vLLM's rule. llama3 and longrope configs say it themselves."""
    if rope.scaling in ("linear", "dynamic"):
        return int(max_position * rope.factor)
    if rope.scaling == "yarn":
        return max(max_position, int(rope.original_len * rope.factor))
    return max_position


def rope_from_gguf(
    read: ConfigReader, key: Callable[[str], str], head_dim: int, max_position: int, interleaved: bool, values: ReadValues
) -> RopeSpec:
    original = read.integer(key("rope.scaling.original_context_length"), max(2, max_position), least=2)
    base = RopeSpec(
        dim=read.integer(key("rope.dimension_count"), head_dim),
        theta=read.number(key("rope.freq_base"), 10000.0),
        interleaved=interleaved,
        original_len=original,
    )
    checked_rope(base, head_dim, read)
    if read.has(sections := key("rope.dimension_sections")):
        base = with_sections(base, read.values[sections], read)
        base = replace(base, woven=read.text("general.architecture") in WOVEN)
    divisors, short, long = (values(f"rope_{name}.weight") for name in ("freqs", "factors_short", "factors_long"))
    for name, found in (("freqs", divisors), ("factors_short", short), ("factors_long", long)):
        if found is not None and (len(found) != base.dim // 2 or not all(0 < v < math.inf for v in found)):
            raise CheckpointError(f"tensor 'rope_{name}.weight' must hold {base.dim // 2} positive numbers", BROKEN)
    kind = read.text(key("rope.scaling.type"), "linear")  # as llama.cpp has it where files say a factor alone
    factor = read.number(key("rope.scaling.factor"), read.number(key("rope.scale_linear"), 1.0))
    is_scaled = kind != "none" and factor != 1.0
    if short and long:
        if is_scaled:  # llama.cpp divides positions by it beside the tensors
            raise UnsupportedError(f"{read.where}: a factor of {factor:g} beside longrope's factors is not supported", ANOTHER)
        grown = max_position / original
        spec = replace(base, scaling="longrope", factor=grown, short_divisors=short, long_divisors=long)
        if read.has(key("rope.scaling.attn_factor")):
            spec = replace(spec, attention_factor=read.number(key("rope.scaling.attn_factor")))
        return spec
    if (scores := read.number(key("rope.scaling.attn_factor"), 1.0)) != 1:
        raise UnsupportedError(f"rope.scaling.attn_factor {scores:g} in GGUF without longrope's factors", ANOTHER)
    if divisors:
        if is_scaled:
            raise UnsupportedError(f"rope scaling {kind[:80]!r} beside a tensor 'rope_freqs.weight' is not supported", ANOTHER)
        return replace(base, scaling="divisors", short_divisors=divisors)
    if not is_scaled:
        return base
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"rope scaling {kind[:80]!r} in GGUF is not supported", "known: none, linear, yarn, longrope")
    spec = replace(base, scaling=kind, factor=factor)  # type: ignore[arg-type]
    if kind == "linear":
        return spec
    stretch = key("rope.scaling.yarn_attn_factor")  # what llama.cpp's converter makes of config.json's attention_factor
    return replace(
        spec,
        beta_fast=read.number(key("rope.scaling.yarn_beta_fast"), spec.beta_fast),
        beta_slow=read.number(key("rope.scaling.yarn_beta_slow"), spec.beta_slow),
        attention_factor=read.number(stretch) if read.has(stretch) else None,
    )


def rescaled(spec: ModelSpec, change: RopeChange) -> ModelSpec:
    """`spec` with what is asked for, in layers that see as far as a sequence goes; others turn as they were trained to. Raises
    UsageError for what has no meaning for such a model, UnsupportedError for what can't be changed."""
    if change == AS_TRAINED:
        return spec
    ropes = {attention.rope for attention in spec.attentions if attention.rope is not None and attention.window is None}
    if len(ropes) != 1 or spec.attention.latent is not None:
        raise UnsupportedError(f"the rotary positions of {spec.architecture} models are not changed", _AS_IT_IS)
    (old,) = ropes
    trained = {"none": spec.max_position, "yarn": old.original_len}.get(old.scaling, int(spec.max_position / old.factor))
    new = _rescaled(old, change, trained)
    reaches = {"none": trained, "yarn": max(trained, int(new.original_len * new.factor))}
    reach = reaches.get(new.scaling, int(trained * new.factor))
    spec = spec.each_attention(lambda layer, a: replace(a, rope=new) if a.rope == old and a.window is None else a)
    return spec if new.scaling == old.scaling and change.scale is None else replace(spec, max_position=max(1, reach))


def _rescaled(old: RopeSpec, change: RopeChange, trained: int) -> RopeSpec:
    """trained: tokens of its longest sequences then."""
    same = replace(old, theta=old.theta if change.base is None else change.base)
    if change == RopeChange(base=change.base):
        return same
    if old.scaling not in get_args(RopeKind):
        raise UnsupportedError(f"its rotary positions are scaled already, by {old.scaling}", _AS_IT_IS)
    kind = change.scaling or ("linear" if old.scaling == "none" else old.scaling)
    if change.original_len is not None and kind != "yarn":
        raise UsageError("--yarn-orig-ctx has no meaning without --rope-scaling yarn")
    plain = RopeSpec(same.dim, same.theta, same.interleaved, original_len=trained, sections=old.sections, woven=old.woven,
                     dealt=old.dealt, backwards=old.backwards)  # fmt: skip
    if kind == "none":
        if change.scale is not None:
            raise UsageError("--rope-scale has no meaning with --rope-scaling none", "leave one of them out")
        return plain
    factor = change.scale or (old.factor if kind == old.scaling else None)
    if factor is None:
        raise UsageError(f"--rope-scaling {kind} needs to know how far", f"--rope-scale 4, for {4 * trained:,} tokens")
    if kind == old.scaling:
        return replace(same, factor=factor, original_len=change.original_len or old.original_len)
    return replace(plain, scaling=kind, factor=factor, original_len=change.original_len or trained)


def tempered(spec: ModelSpec, scale: float, length: int | None = None) -> ModelSpec:
    """The same whose queries grow, behind each multiple of a length, by the logarithm of how many there were. length: None for
    the one that its rotary positions are stretched from."""
    rope = spec.attention.rope
    assert rope is not None
    temperature = TemperatureSpec(rope.original_len if length is None else length, scale) if scale else None
    return spec.with_attention(temperature=temperature)


def with_sections(rope: RopeSpec, sections: Any, read: ConfigReader) -> RopeSpec:
    """With frequencies divided among the positions of an image's tokens: a list of three counts, or of four; a 0 where a
    fourth would be is none (GGUF)."""
    counts = list(sections)[:4] if isinstance(sections, list | tuple) else []
    if counts[3:] == [0]:
        counts.pop()
    if [*map(type, counts)] not in ([int] * 3, [int] * 4) or min(counts) < 0:
        raise CheckpointError(f"{read.where}: sections of rotary positions must be 3 or 4 counts", BROKEN)
    return replace(rope, sections=tuple(counts)) if sum(counts) <= MAX_HEAD_DIM else rope


def normed_when_turned(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """With norms of heads behind their rotation, and what changes."""
    return spec.with_attention(qk_norm_of="turned head", **changes).each_rope(without_growth)


def without_growth(rope: RopeSpec) -> RopeSpec:
    """The same, whose heads grow by nothing: a norm behind their rotation undoes it."""
    return replace(rope, attention_factor=1.0) if rope.scaling in ("yarn", "longrope") else rope


def woven(spec: ModelSpec, sections: tuple[int, int, int]) -> ModelSpec:
    """With sections in turns; these where a config says none."""
    return spec.each_rope(lambda own: replace(own, sections=own.sections or sections, woven=True))


def rope_of_windows(
    rope: RopeSpec, read: ConfigReader, key: Callable[[str], str], local_theta: float | None, head_dim: int
) -> RopeSpec:
    """Of layers with a window, by a file that has `rope` for the others. local_theta: see `Family`."""
    theta = read.number(key("rope.freq_base_swa"), local_theta or rope.theta)
    dim = read.integer(key("rope.dimension_count_swa"), rope.dim)
    if local_theta is not None:  # whose scaling is of layers without a window
        rope = RopeSpec(rope.dim, theta, interleaved=rope.interleaved, original_len=rope.original_len)
    if dim == rope.dim:
        return replace(rope, theta=theta)
    if rope.short_divisors and dim > rope.dim:
        raise UnsupportedError(f"{read.where}: {dim} rotary dims of layers with a window, and divisors of {rope.dim}", ANOTHER)
    short, long = rope.short_divisors[: dim // 2], rope.long_divisors[: dim // 2]  # the first ones count
    return checked_rope(replace(rope, dim=dim, theta=theta, short_divisors=short, long_divisors=long), head_dim, read)


def checked_rope(rope: RopeSpec, head_dim: int, read: ConfigReader) -> RopeSpec:
    """It, if it has what the kernels and the formulas of layers/rope.py take for granted."""
    if not 2 <= rope.dim <= head_dim or rope.dim % 2:
        raise CheckpointError(f"{read.where}: {rope.dim} rotary dims do not fit heads of {head_dim}", BROKEN)
    if rope.theta <= 1:
        raise CheckpointError(f"{read.where}: the rotary base must be above 1, not {rope.theta:g}", BROKEN)
    return rope
