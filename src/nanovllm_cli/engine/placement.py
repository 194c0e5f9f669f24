"""Which weights of a model lie on a GPU, and which stay in the machine's memory, where the GPU has no room for all.

What costs least goes first: an embedding, of which a step reads a few rows; then experts, of which a token takes some, layer by
layer; then layers as a whole; and the head at last. So a number of layers says it all, as with llama.cpp's options.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.outline import shapes_of

ALWAYS_NEAR = ("k_b", "v_b", "kv_b", "router", "per_layer_projection")
"""Parts of layers that are small, or no weights by themselves on a GPU."""


class Part(NamedTuple):
    """Weights that stay together. layer: of experts and of layers, which are what else there is in one."""

    kind: Literal["embedding", "experts", "layer", "head"]
    layer: int = 0


class Placement(NamedTuple):
    """far: what is not on the GPU. tied: the head is the embedding."""

    far: frozenset[Part] = frozenset()
    tied: bool = False

    def is_far(self, name: str) -> bool:
        """Of a weight by our name."""
        return bool(self.far) and group_of(name, tied=self.tied) in self.far


NEAR = Placement()


def group_of(name: str, *, tied: bool) -> Part | None:
    """None for what is always on the GPU."""
    match name.split("."):
        case ["blocks", number, "experts", *_] | ["blocks", number, "values" | "seen", "experts", *_]:
            return Part("experts", int(number))
        case ["blocks", number, part, *_]:
            return None if part in ALWAYS_NEAR else Part("layer", int(number))
        case ["embedding" | "per_layer_embedding" as part, *_]:
            return Part("head" if tied and part == "embedding" else "embedding")
        case ["head", *_]:
            return Part("head")
    return None


def sizes_of(spec: ModelSpec, num_bytes: Callable[[str, int, int], float]) -> dict[Part, int]:
    """Bytes of each. num_bytes: of a matrix, by our name, rows and columns."""
    sizes: Counter[Part] = Counter()
    for name, shape in shapes_of(spec).items():
        group = group_of(name, tied=spec.tied_head)
        if group is not None and len(shape) == 2:
            sizes[group] += math.ceil(num_bytes(name, *shape))
    return dict(sizes)


def asked_for(config: EngineConfig, num_layers: int) -> frozenset[Part]:
    """What the config wants far, of a model of so many layers. The head counts as a layer, the last one."""
    far = {Part("experts", layer) for layer in range(min(config.n_cpu_moe, num_layers))}
    if config.n_gpu_layers is not None and config.n_gpu_layers <= num_layers:
        first_near = num_layers + 1 - config.n_gpu_layers
        far |= _layers(range(min(first_near, num_layers))) | {Part("embedding")}
        far |= {Part("head")} if first_near > num_layers else set()
    return frozenset(far)


def fitted(sizes: Mapping[Part, int], far: frozenset[Part], num_layers: int, needed: int, room: int) -> frozenset[Part]:
    """`far`, and as much more as is needed for the rest of `needed` bytes in all to take no more than room; all there is, where
    that is not enough."""
    order = [Part("embedding"), *(Part("experts", layer) for layer in range(num_layers))]
    order += [*(Part("layer", layer) for layer in range(num_layers)), Part("head")]
    near = needed - bytes_of(far, sizes)
    moved = set(far)
    for group in order:
        if near <= room:
            break
        if group not in moved:
            moved.add(group)
            near -= sizes.get(group, 0)
    return frozenset(moved)


def bytes_of(groups: Iterable[Part], sizes: Mapping[Part, int]) -> int:
    return sum(sizes.get(group, 0) for group in groups)


def num_near_layers(far: frozenset[Part], num_layers: int) -> int:
    """As --n-gpu-layers counts them."""
    return num_layers + 1 - sum(group.kind in ("layer", "head") for group in far)


def num_far_mixtures(far: frozenset[Part], spec: ModelSpec) -> int:
    """Layers whose experts are far."""
    return sum(isinstance(block.mlp, MoESpec) and Part("experts", layer) in far for layer, block in enumerate(spec.blocks))


def in_words(far: frozenset[Part], spec: ModelSpec) -> str:
    """The options that ask for as much. far: not empty."""
    layers, mixtures = num_near_layers(far, spec.num_layers), num_far_mixtures(far, spec)
    words = [f"--n-gpu-layers {layers}"] if layers <= spec.num_layers else []
    return " ".join(words + ([f"--n-cpu-moe {mixtures}"] if mixtures > spec.num_layers + 1 - layers else [])) or "the embedding"


def _layers(layers: range) -> set[Part]:
    return {Part(kind, layer) for layer in layers for kind in ("experts", "layer")}
