"""Trains the bundled model `tiny` on one CPU core and writes its folder.

    python scripts/train_tiny.py --minutes 45        # the whole thing
    python scripts/train_tiny.py --export-only       # the latest checkpoint as a folder, while training goes on

Time is counted in the process's CPU seconds, so a paused or crowded machine changes nothing but the clock on the wall;
the learning rate follows the elapsed share of the budget and always ends at zero. A document is a row of its own, rows
of like length share a batch; the first stage has short ones only, in the second a share of rows holds many in a line.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import tiny_corpus as corpus
from tiny_export import Report, export, train_tokenizer
from tiny_model import TinyConfig, TinyModel

FOLDER = Path(__file__).parents[1] / "src" / "nanovllm_cli" / "assets" / "tiny"
CHECKPOINT = Path(tempfile.gettempdir()) / "nanovllm-tiny.pt"
SEED = 1
TOKENIZER_DOCUMENTS = 10_000
POOL_DOCUMENTS = 3_000  # documents sorted by length at a time
MICRO_BATCH_TOKENS = 2048
MICRO_BATCHES = 2  # a step
PAD_TO = 16
MATRIX_RATE, MATRIX_MOMENTUM, MATRIX_DECAY = 0.005, 0.95, 0.02  # at 0.02 attention drowns in this batch's noise
VECTOR_RATE, VECTOR_BETAS = 1.5e-3, (0.9, 0.98)
WARMUP, DECAY_FROM = 0.01, 0.35  # shares of the budget
CHECKPOINT_SECONDS = 180
HELD_OUT_DOCUMENTS = 400


@dataclass(frozen=True)
class Stage:
    """A part of the training: short documents first, as they hold more to learn a token."""

    until: float  # share of the budget
    mixture: corpus.Mixture
    max_row: int  # tokens; longer documents are left out
    packed: float = 0.0  # share of the documents that goes into rows of max_row tokens, many in a row


DRILL_ONLY, DRILL_UNTIL = 0.08, 0.13  # shares of the budget: drills alone with few tokens, then drills beside text
DRILL_TOKENS = 256
DRILL_LENGTHS = (6, 24)
STAGES = (
    Stage(0.30, {"story": 0.15, "plain": 0.05, "chat": 0.70, "tools": 0.10}, max_row=256),
    Stage(1.00, corpus.KINDS, max_row=1024, packed=0.06),
)


class Row(NamedTuple):
    """Token ids, and for each whether it is learnt as a target."""

    ids: list[int]
    learnt: list[bool]


@dataclass
class Progress:
    """What has been done so far."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    documents: int = 0


class Encoder:
    """Documents to rows. A token of the context is learnt with the probability that is its segment's weight."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def rows(self, documents: list[corpus.Document], r: Random) -> list[Row]:
        segments = [segment for document in documents for segment in document.segments]
        encoded = iter(self.tokenizer.encode_batch_fast([s.text for s in segments], add_special_tokens=False))
        rows = []
        for document in documents:
            row = Row([], [])
            for segment in document.segments:
                ids = next(encoded).ids
                learnt = [r.random() < segment.weight for _ in ids]
                if segment.skip_first and learnt:
                    learnt[0] = False
                row.ids.extend(ids)
                row.learnt.extend(learnt)
            rows.append(row)
        return rows


def batches(encoder: Encoder, progress: Progress, budget: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches (ids [B, T + 1], learnt [B, T]) without end; no index of the corpus is used twice."""
    r = Random(SEED)
    index = 0
    while True:
        stage = next(stage for stage in STAGES if progress.seconds / budget < stage.until)
        pool = list(islice(corpus.documents("train", SEED, index, stage.mixture), POOL_DOCUMENTS))
        index += 2 * POOL_DOCUMENTS  # more than the pool has looked at
        rows = encoder.rows(pool, r)
        cut = int(len(rows) * stage.packed)
        single = [row for row in rows[cut:] if len(row.ids) <= stage.max_row]
        progress.documents += cut + len(single)
        rows = pack(rows[:cut], stage.max_row) + single
        rows.sort(key=lambda row: len(row.ids))
        cuts, start = [], 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or padded(len(rows[end].ids)) * (end + 1 - start) > MICRO_BATCH_TOKENS:
                cuts.append((start, end))
                start = end
        r.shuffle(cuts)
        for start, end in cuts:
            yield collate(rows[start:end])


def drill(r: Random, vocabulary: list[int]) -> tuple[Tensor, Tensor]:
    """A micro-batch of noise in which a stretch comes twice; only its second coming is learnt.

    Text alone rewards looking back so rarely that a small model takes most of its budget to find out how. This takes two
    minutes, and tool names, arguments and users' words are copied from then on.
    """
    length = r.randint(*DRILL_LENGTHS)
    before, between = (r.choice((0, 0, r.randint(0, length))) for _ in range(2))
    width = before + length + between + length
    rows = MICRO_BATCH_TOKENS // width
    ids = torch.tensor(r.choices(vocabulary, k=rows * width)).view(rows, width)
    ids[:, -length:] = ids[:, before : before + length]
    learnt = torch.zeros(rows, width - 1, dtype=torch.bool)
    learnt[:, 1 - length :] = True
    return ids, learnt


def pack(rows: list[Row], length: int) -> list[Row]:
    """Rows of exactly `length` tokens, documents one after the other."""
    ids = [i for row in rows for i in row.ids]
    learnt = [x for row in rows for x in row.learnt]
    return [Row(ids[s : s + length], learnt[s : s + length]) for s in range(0, len(ids) - length, length)]


def padded(length: int) -> int:
    return math.ceil(length / PAD_TO) * PAD_TO


def collate(rows: list[Row]) -> tuple[Tensor, Tensor]:
    width = padded(len(rows[-1].ids))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    learnt = torch.zeros(len(rows), width - 1, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        learnt[i, : len(row.ids) - 1] = torch.tensor(row.learnt[1:])
    return ids, learnt


def loss_sum(model: TinyModel, ids: Tensor, learnt: Tensor) -> Tensor:
    """Summed cross entropy of the learnt targets; only they pass through the head."""
    hidden = model(ids)[:, :-1][learnt]
    return F.cross_entropy(model.logits(hidden).float(), ids[:, 1:][learnt], reduction="sum")


class Muon:
    """Momentum whose matrix updates are orthogonalized by Newton-Schulz steps (K. Jordan et al., 2024).

    Matrices of one shape are stacked and updated together.
    """

    def __init__(self, matrices: list[torch.nn.Parameter]) -> None:
        shapes = sorted({tuple(m.shape) for m in matrices})
        self.groups = [[m for m in matrices if tuple(m.shape) == shape] for shape in shapes]
        self.momenta = [torch.zeros(len(group), *group[0].shape) for group in self.groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradient = torch.stack([m.grad for m in group if m.grad is not None])
            momentum.lerp_(gradient, 1 - MATRIX_MOMENTUM)
            update = orthogonalize(gradient.lerp(momentum, MATRIX_MOMENTUM))
            scale = max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            for m, u in zip(group, update, strict=True):
                m.mul_(1 - rate * MATRIX_DECAY).add_(u, alpha=-rate * scale)


def orthogonalize(g: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices of a stack [N, rows, columns], roughly."""
    x = g.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    wide = x.mT if x.shape[1] > x.shape[2] else x
    for _ in range(5):
        a = wide @ wide.mT
        wide = 3.4445 * wide + (-4.7750 * a + 2.0315 * a @ a) @ wide
    return (wide.mT if x.shape[1] > x.shape[2] else wide).float()


def schedule(share: float) -> float:
    """The learning rate's factor when `share` of the budget is used."""
    if share < WARMUP:
        return share / WARMUP
    return max(0.0, min(1.0, (1 - share) / (1 - DECAY_FROM)))


@torch.no_grad()
def perplexity(model: TinyModel, encoder: Encoder) -> tuple[float, float]:
    """Held-out perplexity of (all tokens, answers only), with the weights rounded as they are exported."""
    rounded = TinyModel(TinyConfig(vocab_size=model.embed_tokens.num_embeddings))
    rounded.load_state_dict({name: p.bfloat16().float() for name, p in model.state_dict().items()})
    totals = {"all": [0.0, 0.0], "answers": [0.0, 0.0]}
    for document in islice(corpus.documents("held_out", SEED), HELD_OUT_DOCUMENTS):
        answers_only = corpus.Document(
            document.kind, tuple(s._replace(weight=float(s.weight == corpus.ANSWER_WEIGHT)) for s in document.segments)
        )
        everything = corpus.Document(
            document.kind, tuple(s._replace(weight=1.0, skip_first=False) for s in document.segments)
        )
        for name, counted in (("all", everything), ("answers", answers_only)):
            (row,) = encoder.rows([counted], Random(0))
            ids, learnt = torch.tensor([row.ids]), torch.tensor([row.learnt[1:]])
            totals[name][0] += loss_sum(rounded, ids, learnt).item()
            totals[name][1] += learnt.sum().item()
    return tuple(math.exp(total / count) for total, count in totals.values())  # type: ignore[return-value]


def train(minutes: float, checkpoint: Path) -> None:
    """Train for the given CPU minutes; the result is in the checkpoint."""
    torch.manual_seed(SEED)
    config = TinyConfig()
    texts = (d.text for d in islice(corpus.documents("train", SEED), TOKENIZER_DOCUMENTS))
    tokenizer = train_tokenizer(texts, config.vocab_size)
    encoder = Encoder(tokenizer)
    model = TinyModel(config)
    for layer in model.layers:
        layer.compile(dynamic=True)
    matrices = [p for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    vectors = [p for name, p in model.named_parameters() if not name.endswith("_proj.weight")]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(vectors, betas=VECTOR_BETAS, eps=1e-8, weight_decay=0.0, fused=True)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {tokenizer.get_vocab_size()} tokens in the vocabulary", flush=True)

    progress = Progress()
    r = Random(SEED)
    everything = list(range(config.vocab_size))
    few = r.sample(everything, DRILL_TOKENS)
    stream = batches(encoder, progress, minutes * 60)
    saved, shown = 0.0, 0.0
    losses: list[float] = []  # of each micro-batch since the last line
    while progress.seconds < minutes * 60:
        share = progress.seconds / (minutes * 60)
        if share < DRILL_ONLY:
            step_batches = [drill(r, few)]
        elif share < DRILL_UNTIL:
            step_batches = [drill(r, everything), next(stream)]
        else:
            step_batches = [next(stream) for _ in range(MICRO_BATCHES)]
        targets = sum(int(learnt.sum()) for _, learnt in step_batches)
        for ids, learnt in step_batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_sum(model, ids, learnt)
            (loss / targets).backward()
            losses.append(loss.item() / int(learnt.sum()))
            progress.tokens += ids.numel()
        factor = schedule(share)
        muon.step(MATRIX_RATE * factor)
        for group in adam.param_groups:
            group["lr"] = VECTOR_RATE * factor
        adam.step()
        model.center_embeddings()
        model.zero_grad()
        progress.steps += 1
        progress.seconds = time.process_time()
        if progress.seconds - shown > 20:
            print(f"{progress.seconds:6.0f} s  step {progress.steps:5d}  {progress.tokens / 1e6:6.2f} M tokens  "
                  f"loss {fmean(losses):.4f}  rate x{factor:.3f}", flush=True)  # fmt: skip
            shown = progress.seconds
            losses.clear()
        if progress.seconds - saved > CHECKPOINT_SECONDS:
            save_checkpoint(checkpoint, model, tokenizer, progress)
            saved = progress.seconds
    save_checkpoint(checkpoint, model, tokenizer, progress)


def save_checkpoint(path: Path, model: TinyModel, tokenizer: Tokenizer, progress: Progress) -> None:
    """Write the checkpoint whole or not at all."""
    temporary = path.with_suffix(".part")
    state = {"model": model.state_dict(), "tokenizer": tokenizer.to_str(), "progress": asdict(progress)}
    torch.save(state, temporary)
    os.replace(temporary, path)


def export_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Write the folder from a checkpoint and say how good it is."""
    state = torch.load(checkpoint, weights_only=True)
    tokenizer = Tokenizer.from_str(state["tokenizer"])
    config = TinyConfig()
    model = TinyModel(config)
    model.load_state_dict(state["model"])
    progress = Progress(**state["progress"])
    everything, answers = perplexity(model, Encoder(tokenizer))
    report = Report(
        progress.seconds / 60,
        progress.steps,
        progress.tokens,
        progress.documents,
        everything,
        answers,
        HELD_OUT_DOCUMENTS,
    )
    export(folder, model, config, tokenizer, report)
    print(f"{folder}: held-out perplexity {everything:.3f}, answers {answers:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=45, help="CPU minutes to train")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write the model")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="where to keep the state")
    parser.add_argument("--export-only", action="store_true", help="export the checkpoint, do not train")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.export_only:
        train(options.minutes, options.checkpoint)
    export_checkpoint(options.checkpoint, options.folder)


if __name__ == "__main__":
    main()
