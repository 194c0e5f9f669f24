"""What a vision tower is, as plain values: its layers, and what makes of its rows those that a decoder reads. What an image
is made into before, and which tokens stand for it, is in `vision_spec.py`.

Frozen values without tensors, which cross to other processes as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from nanovllm_cli.fastvit_spec import FastVitSpec
from nanovllm_cli.pictures import Image, Sound
from nanovllm_cli.resampler_spec import PoolSpec, ResamplerSpec
from nanovllm_cli.sam_spec import SamSpec
from nanovllm_cli.tiles_spec import TilesSpec


class Query(NamedTuple):
    """Rows that a Q-Former makes of a tower's, `behind` one of its layers, and that are added in front of a decoder's layer
    `before`, its first instead of embeddings. corner: of a cell's four patches that is the query; None: their mean."""

    behind: int
    before: int
    corner: int | None


Stretch = Literal["corners", "areas", "bilinear", "bicubic", "tenth", "nearest", "steps"]
"""How a square table of positions becomes an image's: linearly, from corner to corner; as a picture is made smaller, by the areas
of its pixels; linearly, or by cubic polynomials, between the middles of pixels; as "bilinear", for sides that are a tenth of a
patch longer than they are; each patch has that in which its beginning lies; that, with what rounding of a patch's length makes of
it."""


Stored = Literal["halves", "axes", "pairs"]
"""How files have a head's numbers, of which pairs turn together: the first of all pairs, lines' and then columns', and behind
them the second ones, as they are here; a pair's two side by side, all columns' and then all lines' (Llama 4), or columns' and
lines' in turn (MoonViT)."""


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """A vision transformer (Dosovitskiy et al. 2020), and what makes of its rows those that a decoder reads.

    Patches of patch_size x patch_size pixels become rows of hidden_size; a cell of merge x merge of them, one row of
    out_size. frames: of its patches' kernel, for videos; an image is shown to all of them alike; films: it reads videos, so that
    there is the kernel of each. activation: of an MLP,
    down(act(up(x))), or gated, down(act(gate(x)) * up(x)). norm: layer norms, or RMS norms. bias: of all matrices, if
    qkv_bias of queries, keys and values, too; patch_bias of the patches'; projector_bias of the two layers of "joined".
    positions: a learned table of so many rows, a square that is stretched to an image's grid; 0: none. lead: in front of all
    patches is a row, the same for all images, with a position in front of theirs; it is left out in the end (ViT's class
    token). squares: an image is a `Mosaic`, and rows of its squares are put
    together, with a row that is the same for all behind each line, about so many squares of them at most; 0: it is one square.
    stretch: how; see `Stretch`. by_axis: two tables of so many rows instead, of columns and of lines, whose sum
    counts. theta: of rotary positions, of lines in the first half of a head's pairs, of columns in the second; None: none.
    Where there is a lead, it has position 0, and those of patches begin at 1. stored: how files have a head's numbers that turn
    together; see `Stored`. reads: what is projected is rows behind so many layers, side by side, instead of behind the last one
    (VipLLaVA). dealt: a head's frequencies go to lines and columns in turn (Pixtral), else both have the same ones. key_heads: of
    keys and values; 0: as many as of queries. convolves: layers that have, instead of attention, a gated convolution of each
    dimension over squares of taps x taps patches, beyond the image zeros (LFM3-VL). window: of attention in all layers but
    `full`, in cells on a side; 0: none. pre_norm, post_norm: of the patches' rows, without their positions, or with these and
    what leads (norm_placed), and of those behind the last layer. qk_norm: of each head's queries and keys, an RMS norm.
    normed: all that attention reads has a norm, each head's queries, keys and, without a gain, values, and its scores are not
    scaled; and there are norms behind attention and MLP. clipped: bounds of what each of the layers' matrices, without a
    bias, reads and gives. shrinks: a layer behind which the patches of a square of 2 x 2 see each other alone, by attention,
    and are joined to one, by a norm and two layers with a GELU (tanh), 4 * intermediate_size rows between them, beside their
    mean (MiniCPM-V 4.6); None: none. scaled: what attention and MLP add is multiplied with a gain (Touvron et al. 2021).
    projector: "merger" (Qwen: norm, join a cell, two layers with a GELU; LFM3-VL: the norm is a layer norm, projector_size rows
    between the layers; merged_size rows behind them, and one matrix more, where that is not 0), "pooled" (Gemma 3: a cell's mean,
    RMS norm, one matrix), "patch_merger" (Mistral 3: norm, join a cell by a matrix, two layers with a GELU), "scaled" (Gemma 4: a
    cell's mean, times the root of hidden_size, RMS norm without a gain, one matrix), "joined" (Idefics3: join a cell, one matrix;
    LFM2-VL: join a cell, norm, two layers with a GELU, projector_size rows between them, or gated by a SiLU where
    projector_gated), "gated" (GLM-4V: join a cell by a matrix with a bias, another matrix, layer norm, GELU, an MLP that is gated
    by a SiLU, projector_size rows wide), "lined" (HunYuan-VL: RMS norm, join a cell by a matrix, activation, another matrix,
    behind each line a row that is the same for all, one more matrix, a row in front of all and one behind, RMS norm), "placed"
    (Granite Docling: layer norm, join a cell by a matrix, add sines of its column and line, layer norm, GELU, another matrix,
    layer norm), "queried" (Granite 4 Vision: see `tower_queries.py`; `queries` are made in windows of query_side cells on a side,
    projector_size rows wide), "tabled" (Ovis2: join a cell, one matrix, layer norm and softmax over projector_size entries of a
    table, whose rows are added up so weighed; `marks` rows more of that table are those between squares that lie apart),
    "shuffled" (Llama 4: join a cell, three matrices with a GELU behind the first two, projector_size rows between them),
    "averaged" (Perception LM: two layers with a GELU, projector_size rows between them, of which a cell's mean is taken),
    "resampled" (Idefics 2: see `ResamplerSpec`), "direct" (Gemma 4 12B: there are no layers, see `tower_patches.py`),
    "attended" (Molmo 2: see `PoolSpec`; behind it an MLP that is gated by a SiLU, projector_size rows wide), "timed" (ERNIE 4.5
    VL: join a cell, two layers with a GELU, layer norm; that of two moments of a video side by side, or an image's twice, two
    layers with a GELU, layer norm; another matrix, RMS norm);
    projector_eps: of its norm, 0 where "joined" has none. standardized: before that norm, a mean is taken off and a scale
    multiplied with. out_scale: of rows, but for those of `deep`. sam: what is in front of it, or instead of it, where it has no
    layers; see `SamSpec`. fastvit: what it is instead of a transformer, whose layers are blocks; see `FastVitSpec`. tiles: how it
    reads all tiles of an image at once; see `TilesSpec`. deep:
    layers, in order, whose rows, merged by mergers of their own, are added behind the decoder's first layers (DeepStack, Meng
    et al. 2024).
    """

    patch_size: int
    merge: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    out_size: int
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu"]
    norm: Literal["layer", "rms"]
    eps: float
    projector: Literal[
        "merger", "pooled", "patch_merger", "scaled", "joined", "gated", "lined", "placed", "queried", "tabled",
        "shuffled", "averaged", "resampled", "direct", "attended", "timed",
    ]
    projector_eps: float
    projector_size: int = 0
    merged_size: int = 0
    frames: int = 0
    films: bool = False
    gated: bool = False
    bias: bool = True
    qkv_bias: bool = True
    patch_bias: bool = False
    projector_bias: bool = False
    projector_gated: bool = False
    positions: int = 0
    lead: bool = False
    squares: int = 0
    marks: int = 0
    stretch: Stretch = "corners"
    by_axis: bool = False
    theta: float | None = None
    stored: Stored = "halves"
    reads: tuple[int, ...] = ()
    dealt: bool = False
    key_heads: int = 0
    convolves: tuple[int, ...] = ()
    taps: int = 0
    window: int = 0
    full: tuple[int, ...] = ()
    shrinks: int | None = None
    pre_norm: bool = False
    norm_placed: bool = False
    post_norm: bool = False
    qk_norm: bool = False
    normed: bool = False
    clipped: bool = False
    scaled: bool = False
    standardized: bool = False
    out_scale: float = 1.0
    deep: tuple[int, ...] = ()
    query_side: int = 0
    queries: tuple[Query, ...] = ()
    resampler: ResamplerSpec | None = None
    pool: PoolSpec | None = None
    sam: SamSpec | None = None
    fastvit: FastVitSpec | None = None
    tiles: TilesSpec | None = None

    @property
    def num_stages(self) -> int:
        """That an image is computed in."""
        return self.num_layers + (0 if self.sam is None else self.sam.num_layers) or 1

    @property
    def deep_behind(self) -> tuple[int, ...]:
        """Layers of the decoder behind which rows are added."""
        if not self.queries:
            return tuple(range(len(self.deep)))
        return tuple(query.before - 1 for query in self.queries if query.before)

    @property
    def query_names(self) -> list[str]:
        """Of what makes the `queries`, in our names of tensors."""
        layerwise = sum(query.corner is None for query in self.queries)
        return [f"layerwise.{i}" if query.corner is None else f"spatial.{i - layerwise}" for i, query in enumerate(self.queries)]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def qkv_rows(self) -> int:
        """Of queries, keys and values of all heads."""
        return (self.num_heads + 2 * (self.key_heads or self.num_heads)) * self.head_dim

    @property
    def joins(self) -> int:
        """Rows behind the last layer that become one of its output."""
        return self.merge**2 // (1 if self.shrinks is None else 4)

    @property
    def cell(self) -> int:
        """Pixels on a side of what one row of its output stands for."""
        return self.patch_size * self.merge

    def layer_work(self, image: Image | Sound) -> int:
        """Multiplications of one stage, on average."""
        assert isinstance(image, Image)
        if self.sam is not None:
            short, long = sorted((image.height, image.width))
            rows = (1 if self.sam.beside else 2) * (short // self.cell) ** 2
            matrices = 4 * self.hidden_size + (3 if self.gated else 2) * self.intermediate_size
            behind = rows * self.hidden_size * (matrices + 2 * rows)
            before = self.sam.work((short // self.patch_size) ** 2)
            return long // short * (before + behind * self.num_layers) // self.num_stages
        if self.projector == "direct":
            return image.height * image.width // self.cell**2 * self.hidden_size * (3 * self.cell**2 + self.out_size)
        if self.fastvit is not None:
            return self.fastvit.work(image.height * image.width) // self.num_layers
        patches = image.height * image.width // self.patch_size**2
        if self.tiles is not None:
            patches = self.tiles.most * self.tiles.filled(self.positions + 1)
        matrices = 4 * self.hidden_size + (3 if self.gated else 2) * self.intermediate_size
        num_full = len(self.full) if self.window else self.num_layers - len(self.convolves)
        whole = patches // image.num_squares
        inside = min(patches, (self.window * self.merge) ** 2) * (self.num_layers - num_full)
        seen = (num_full * whole + inside) // self.num_layers
        work = patches * self.hidden_size * (matrices + 2 * seen)
        if self.shrinks is None:
            return work
        before = self.shrinks + 1  # behind them a quarter of the patches sees a quarter
        return work * (4 * before + self.num_layers - before) // (4 * self.num_layers)
