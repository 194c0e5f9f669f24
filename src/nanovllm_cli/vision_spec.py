"""How a model sees, as plain values: what an image is made into before a tower reads it, what the tower is, and which tokens of a
prompt stand for it.

Frozen values without tensors, which cross to other processes as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from nanovllm_cli.canvas_spec import Canvas, Lying, Markers, are_canvases
from nanovllm_cli.fastvit_spec import FastVitSpec
from nanovllm_cli.mosaic import Mosaic
from nanovllm_cli.pictures import Clip as Clip
from nanovllm_cli.pictures import Image as Image
from nanovllm_cli.pictures import Picture as Picture
from nanovllm_cli.pictures import Sound as Sound
from nanovllm_cli.pictures import Video as Video
from nanovllm_cli.resampler_spec import PoolSpec, ResamplerSpec
from nanovllm_cli.sam_spec import SamSpec
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.tiles_spec import TilesSpec
from nanovllm_cli.tokens_spec import ImageTokens as ImageTokens
from nanovllm_cli.video_spec import Filmed, Moment, VideoSpec, are_moments


class PlacedImage(NamedTuple):
    """An image in a prompt, or a piece of a sound, or the text that an encoder reads, which are one line: from token `start` on,
    `rows` lines of `columns` tokens each stand for what a tower makes of it.

    ends_lines: behind each line is a token more, which is read as any other. has_grid: as a rotary position each has that of the
    image's beginning, its row and its column, and what follows begins behind the largest of them (M-RoPE, Wang et al. 2024).
    whole: its tokens see all of it, those behind them, too, so that one step has them all; in_windows: only in layers with a
    window. framed: in front of its lines is a token more that stands for it, and one behind them; and as rotary positions each
    but those two has its own, its column, its row, and that of the image among all, `ordinal`, from 0 on (XD-RoPE, HunYuan).
    behind: so many tokens behind those that stand for it belong to what is whole (PaliGemma's prompt), or fill up its blocks.
    leads: it is in front of a prompt and no part of the text, which begins behind it; see `CrossSpec`. shown: and which token of
    the prompt is the first that sees it, as it stands for it in the text; see `leading.py`.
    canvas: with a grid that it shares with others; `start` is then a token in front of its lines, which is read as any other, as
    are those behind. moment: of an image of a video.
    """

    image: Image | Sound
    start: int
    rows: int
    columns: int
    ends_lines: bool = False
    has_grid: bool = False
    whole: bool = False
    in_windows: bool = False
    framed: bool = False
    ordinal: int = 0
    canvas: Canvas | None = None
    behind: int = 0
    leads: bool = False
    shown: int | None = None
    moment: Moment | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that stand for it, with those beside them that have positions of its grid, and those that belong to it."""
        beside = self.behind if self.canvas is None else self.behind + 1 + self.canvas.num_behind
        return self.rows * (self.columns + self.ends_lines) + 2 * self.framed + beside

    @property
    def num_rows(self) -> int:
        """Of what a tower makes of it."""
        return self.rows * self.columns + 2 * self.framed

    @property
    def num_alike(self) -> int:
        """Of its rows, those that the same token stands for; with what else has that token."""
        if self.shown is not None:
            return self.num_tokens + 1
        mosaic = self.image.mosaic if isinstance(self.image, Image) else None
        return self.num_rows - (0 if mosaic is None else mosaic.num_marks)

    def salted(self, salt: str) -> PlacedImage:
        """The same under a digest that nobody has without the salt."""
        own = hashlib.blake2b(salt.encode("utf-8", "surrogatepass") + self.image.digest, digest_size=16).digest()
        image = self.image
        return self._replace(image=replace(image, digest=own) if isinstance(image, Sound) else image._replace(digest=own))

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def extent(self) -> int:
        """Rotary positions that it takes."""
        if self.leads:
            return 0
        if self.moment is not None:
            return self.moment.extent
        if self.canvas is not None:
            return self.canvas.extent
        return max(self.rows, self.columns) if self.has_grid else self.num_tokens


class TokenIds(list[int]):
    """A prompt's tokens, and the images, or pieces of sounds, that some of them stand for, in their order."""

    def __init__(self, ids: Iterable[int] = (), images: Iterable[PlacedImage] = ()) -> None:
        super().__init__(ids)
        self.images = tuple(images)

    def __add__(self, behind: list[int]) -> TokenIds:  # type: ignore[override]
        """With tokens behind these; their images stay where they are."""
        assert not isinstance(behind, TokenIds) or not behind.images
        return TokenIds([*self, *behind], self.images)


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
    "attended" (Molmo 2: see `PoolSpec`; behind it an MLP that is gated by a SiLU, projector_size rows wide);
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
        "shuffled", "averaged", "resampled", "direct", "attended",
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


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """All that a model needs to see. mean, std: of the three colours, from 0 to 1, which are taken off and divided by. has_grid:
    see `PlacedImage`. whole: tokens of an image see all of it, also what is behind them; whole_in_windows: only in
    layers with a window. markers: of pieces that share a canvas; see `PlacedImage`. prefix: a prompt is an image and a text
    behind it, so many tokens at most, all of which see each other; 0: it is anything. video: how it sees one, if it does. added:
    what a tower makes is added to the embedding of the token that stands for it. most_images: of a prompt; 0: any number."""

    tower: TowerSpec
    size: SizeRule
    tokens: ImageTokens
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    has_grid: bool = False
    whole: bool = False
    whole_in_windows: bool = False
    markers: Markers | None = None
    prefix: int = 0
    video: VideoSpec | None = None
    added: bool = False
    most_images: int = 0

    def limited(self, most: int, fps: float | None = None, most_frames: int = 768) -> VisionSpec:
        """The same for images of at most so many tokens, with those at the ends of lines, where their size is not fixed, and for
        videos of frames that are no larger; see `VideoSpec.limited`."""
        tower = self.tower
        each = 0 if tower.resampler is None else tower.resampler.queries
        size = self.size.limited(most, tower.cell, ends=self._ends, framed=self._framed, squares=tower.squares, each=each)
        video = None if self.video is None else self.video.limited(most, tower.cell, fps, most_frames)
        return replace(self, size=size, video=video)

    @property
    def leads(self) -> bool:
        """Whether images lie in front of a prompt; see `leading.py`."""
        return self.tower.tiles is not None

    def asked(self, most: int, usual: int) -> int:
        """So many tokens of an image at the most, `usual` being what nobody has asked for: those in front of a text are no part
        of it, and are fewer only where somebody wants fewer."""
        return 1 << 31 if self.leads and most >= usual else most

    @property
    def least_tokens(self) -> int:
        """Of an image, however small."""
        rule = self.size
        if rule.margin:
            side = rule.tile // rule.multiple
            return Mosaic(1, 1, side, side, rule.margin, int(rule.ends)).num_rows(side, 0)
        if self.tower.resampler is not None:
            return self.tower.resampler.queries * rule.num_shown
        is_tile = rule.kind not in ("area", "grid", "padded") and (rule.kind != "slices" or rule.grows == "always")
        side = rule.longest_side if rule.kind in ("square", "framed", "pages") else rule.tile if is_tile else 0
        side = (side or self.tower.cell) // self.tower.cell
        beside = 3 if rule.apart else self.leads or rule.kind in ("mosaic", "pages")
        return (1 + rule.always_cut) * (side * (side + self._ends) + 2 * self._framed + beside)

    def num_tokens(self, picture: Picture | Clip | Video) -> int:
        """That stand for it, beside what is around them."""
        assert isinstance(picture, Picture | Video)
        return sum(self.placed(image, 0).num_tokens for image in picture.images)

    def fits(self, images: Iterable[PlacedImage], num_tokens: int) -> bool:
        """Whether images are as `placed` gives them, and in their order in a prompt of so many tokens."""
        end, images = 0, list(images)
        filmed = [Filmed(each.start, each.end, *each[2:4], each._replace(moment=None).extent, each.moment) for each in images]
        if not are_moments(filmed) or (self.video is None and any(each.moment for each in filmed)):
            return False
        if self.markers is not None and not are_canvases(Lying(each.start, each.end, *each[2:4], each.canvas) for each in images):
            return False
        for ordinal, placed in enumerate(images):
            if not isinstance(placed.image, Image):
                return False
            height, width, pixels, _, mosaic, frames = placed.image
            if frames != 1 and (placed.moment is None or not self.tower.films or frames != self.tower.frames):
                return False
            if mosaic is None and self.size.kind == "mosaic" and placed.moment is None:
                return False
            if self.tower.sam is not None and height != width and self.size.kind != "pages":
                return False
            if self.size.kind == "pages" and not self.size.is_page(height, width):
                return False
            size, cell = self.size, self.tower.cell
            if mosaic is not None and not mosaic.fits(height, width, size.tile // cell, size.grids, size.laid):
                return False
            if self.prefix and (placed.start or ordinal or not 0 <= placed.behind <= num_tokens or placed.end > self.prefix):
                return False
            plain = placed._replace(moment=None) if self.markers is None else placed._replace(canvas=None)
            plain = plain._replace(behind=0) if self.prefix or self.leads else plain
            plain = plain._replace(shown=None) if self.leads else plain
            if self.leads and (height // size.tile) * (width // size.tile) > size.most_tiles:
                return False
            if plain != self.placed(placed.image, placed.start, ordinal) or not 0 < 3 * frames * height * width == len(pixels):
                return False
            unit = size.tile if self.leads else self.tower.cell
            if height % unit or width % unit or placed.start < end:
                return False
            end = placed.end
        return end <= num_tokens

    @property
    def _framed(self) -> bool:
        """See `PlacedImage`."""
        return self.tower.projector == "lined"

    @property
    def _ends(self) -> int:
        """Tokens behind each line of an image, or rows of a tower's."""
        return int(self._framed or bool(self.tokens.line_end) or self.size.in_lines)

    def placed(self, image: Image | Sound, start: int, ordinal: int = 0) -> PlacedImage:
        """An image where its first token is the prompt's `start`, with so many images before it."""
        assert isinstance(image, Image)
        if image.mosaic is not None:
            columns = image.mosaic.num_rows(image.width // self.tower.cell, self.tower.squares)
            return PlacedImage(image, start, 1, columns, whole=self.whole)
        cell, framed = self.tower.cell, self._framed
        if self.leads:
            count = image.height * image.width // self.size.tile**2
            return PlacedImage(image, start, 1, count * (self.tower.positions + 1), leads=True)
        if self.tower.resampler is not None:
            return PlacedImage(image, start, 1, self.tower.resampler.queries)
        if self.tower.sam is not None:
            return PlacedImage(image, start, 1, self.tower.sam.num_rows(image.height // cell, image.width // cell))
        return PlacedImage(
            image, start, image.height // cell, image.width // cell + framed, bool(self.tokens.line_end), self.has_grid,
            self.whole, self.whole_in_windows, framed, ordinal if framed else 0,
        )  # fmt: skip

    def filmed(self, video: Video, number: int, start: int) -> PlacedImage:
        """The image of a video with that number, from 0 on, where its first token is the prompt's `start`."""
        placed = self.placed(video.images[number], start)
        if not video.times:
            return placed._replace(moment=Moment(0, placed.extent))
        time, is_last = video.times[number], number == len(video.images) - 1
        extent = max(time + 1, placed.rows, placed.columns) if is_last else 0
        return placed._replace(moment=Moment(time, extent))
