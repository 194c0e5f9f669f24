"""`nanovllm models show`: what one model is, from the headers of its files. The reading is `planning/facts.py`'s work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nanovllm_cli.cli import signals
from nanovllm_cli.cli.command import OUTPUT, expand, is_typed, option
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import named_model
from nanovllm_cli.cli.options import MessageOptions, ModelName, ModelWord, Revision
from nanovllm_cli.cli.output import Console, one_line
from nanovllm_cli.cli.progress_line import ProgressLine, size
from nanovllm_cli.cli.table import aligned
from nanovllm_cli.errors import ModelNotFoundError, NanovllmError, UsageError

if TYPE_CHECKING:
    from nanovllm_cli.planning.facts import Facts
    from nanovllm_cli.progress import LoadProgress
    from nanovllm_cli.text.tokenizer import Tokenizer
    from nanovllm_cli.vision_spec import TowerSpec
    from nanovllm_cli.weights.checkpoint import Checkpoint
    from nanovllm_cli.weights.source import ResolvedModel

EXAMPLE = "for example: nanovllm models show tiny"
TEMPLATE_LINES, _SOME = 6, 8
_LICENCE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """Which of a model's revisions, and what of it."""

    model: ModelName = None
    revision: Revision = None
    template: bool = option(
        "--template", help="The chat template, whole, and nothing else.", default=False, panel=OUTPUT, envvar=None
    )
    json: bool = option("--json", help="One JSON object.", default=False, panel=OUTPUT)


@expand
def show(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    options: ShowOptions,
    messages: MessageOptions,
) -> None:
    """Show what a model is: shape, tensors by class and type, context, vocabulary, template, licence, defaults.

    Only headers are read, of files that are on this machine; no weight is loaded and nothing is downloaded.
    """
    screen = screen_for(messages)
    name = named_model(ctx.obj, model_word or options.model, EXAMPLE)
    if options.template and is_typed(ctx, "json"):
        raise UsageError("--template and --json cannot be used together", "--json has the template as well")
    screen.announce(f"opening {name}")
    with signals.insisting():
        from nanovllm_cli.planning.facts import facts_of
        from nanovllm_cli.weights.checkpoint import open_checkpoint
    found = here(name, options.revision, ProgressLine(screen))
    with open_checkpoint(found.path) as checkpoint:
        facts = facts_of(checkpoint)
        tokenizer = _tokenizer(checkpoint, screen)
        screen.status("")
        template = None if tokenizer is None else tokenizer.chat_templates.get("default")
        if options.template:
            if template is None:
                raise UsageError(f"{name} has no chat template")
            screen.answer(template if template.endswith("\n") else template + "\n")
        elif options.json:
            screen.record(_record(found, checkpoint, facts, tokenizer, template))
        else:
            _print(found, checkpoint, facts, tokenizer, template, screen)


def here(name: str, revision: str | None, progress: LoadProgress) -> ResolvedModel:
    """The model on this machine; nobody is asked for it. Raises ModelNotFoundError."""
    from nanovllm_cli.weights.source import cached_copy, meaning, resolve, with_revision

    meant = with_revision(meaning(name), revision, name, progress)
    if isinstance(meant, Path):
        return resolve(name)
    found = cached_copy(meant, name)
    if found is None:
        raise ModelNotFoundError(
            f"{name} is not in the cache, at least not completely",
            f"nanovllm plan {name} says what it would take; nanovllm models pull {name} downloads it",
        )
    return found


def _tokenizer(checkpoint: Checkpoint, screen: Console) -> Tokenizer | None:
    from nanovllm_cli.weights.tokenizer import load_tokenizer

    try:
        return load_tokenizer(checkpoint)
    except NanovllmError as error:
        screen.say(f"the tokenizer can't be read: {error.message}")
        return None


def _licence(checkpoint: Checkpoint) -> str | None:
    """What the files say: a GGUF's metadata, or the `license:` line at the top of a folder's README.md."""
    if checkpoint.format == "gguf":
        said = checkpoint.config.get("general.license")
        return one_line(said)[:80] if isinstance(said, str) else None
    readme = (checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent) / "README.md"
    try:
        with readme.open("rb") as file:
            lines = file.read(_LICENCE_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:]:
        if line.strip() == "---":
            break
        key, _, value = line.partition(":")
        if key == "license":
            return one_line(value)[:80] or None
    return None


def _special(tokenizer: Tokenizer) -> dict[str, list[tuple[str, int]]]:
    """The tokens with a role: (text, id)."""
    roles: dict[str, list[int | None]] = {
        "bos": [tokenizer.bos_id], "eos": [*tokenizer.eos_ids], "pad": [tokenizer.pad_id], "unk": [tokenizer.unk_id],
    }  # fmt: skip
    return {
        role: [(tokenizer.id_to_token(i) or "", i) for i in ids if i is not None]
        for role, ids in roles.items()
        if any(i is not None for i in ids)
    }


def _record(
    found: ResolvedModel, checkpoint: Checkpoint, facts: Facts, tokenizer: Tokenizer | None, template: str | None
) -> dict[str, Any]:
    from nanovllm_cli.planning.facts import generation_defaults, rope_words

    spec = facts.spec
    return {
        "name": found.name, "repo": found.repo, "revision": found.revision, "quant": found.quant, "path": str(found.path),
        "format": found.format, "file_bytes": found.num_bytes, "architecture": spec.architecture,
        "parameters": facts.num_parameters, "active_parameters": facts.num_active,
        "stored": facts.stored, "tensor_bytes": facts.num_bytes, "disk_bytes": facts.disk_bytes,
        "layers": spec.num_layers, "encoder_layers": 0 if spec.encoder is None else spec.encoder.num_layers,
        "hidden_size": spec.hidden_size, "context": spec.max_position, "rope": rope_words(spec),
        "attention": _heads(facts), "mtp": facts.predicts_further, "images": _images(facts),
        "sounds": _sounds(facts), "videos": _videos(facts), "vocabulary": spec.vocab_size,
        "tokenizer": None if tokenizer is None else {"tokens": tokenizer.vocab_size, "special": _special(tokenizer)},
        "embedding": {"pooling": facts.embedding.pooling, "prompts": dict(facts.embedding.prompts),
                      "numbers": None if facts.embedding.judges else facts.embedding.width(spec.hidden_size),
                      "ranks": facts.embedding.ranks, "labels": list(facts.embedding.labels),
                      "default_prompt": facts.embedding.default_prompt, "only": not spec.has_head,
                      "refusal": None if facts.embedding.refusal is None else facts.embedding.refusal.message},
        "template": template, "licence": _licence(checkpoint), "defaults": generation_defaults(_settings(checkpoint, tokenizer)),
        "languages": _languages(tokenizer),
        "tensors": [
            {"class": each.name, "count": each.count, "numbers": each.numbers, "bytes": each.num_bytes,
             "types": dict(each.types), "bits": round(each.bits, 4)}
            for each in facts.classes
        ],
    }  # fmt: skip


def _settings(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> dict[str, Any]:
    from nanovllm_cli.weights.reading import own_settings

    return own_settings(checkpoint, None if tokenizer is None else tokenizer.languages)


def _languages(tokenizer: Tokenizer | None) -> list[str]:
    """Codes of those that it is told; none of most models."""
    known = None if tokenizer is None else tokenizer.languages
    return [] if known is None else list(known.codes)


def _heads(facts: Facts) -> dict[str, int]:
    """Empty of a model without attention."""
    if not facts.spec.attentions:
        return {}
    attention = facts.spec.attention
    window = max(each.window or 0 for each in facts.spec.attentions)
    found = {"heads": attention.num_heads, "kv_heads": attention.num_kv_heads, "head_dim": attention.head_dim}
    if (latent := attention.latent) is not None:
        found |= {"latent_rank": latent.rank, "rotary_dim": latent.rotary_dim, "head_dim": latent.query_dim}
    return found | ({"window": window} if window else {})


def _images(facts: Facts) -> dict[str, int]:
    """Empty of a model that reads none. bytes: of what reads them, in 16 bits."""
    if facts.vision is None:
        return {}
    import torch

    from nanovllm_cli.images.sizes import most_tokens
    from nanovllm_cli.weights.vision import vision_bytes

    return {"tokens": most_tokens(facts.vision), "bytes": vision_bytes(facts.vision, torch.bfloat16)}


def _layers_in_words(tower: TowerSpec) -> str:
    """SAM's are others than those behind it, if there are any."""
    kinds = [(tower.num_layers, tower.hidden_size)] if tower.num_layers else []
    kinds = kinds if tower.sam is None else [(tower.sam.num_layers, tower.sam.hidden_size), *kinds]
    return " and ".join(f"{count} layers of {width:,}" for count, width in kinds) or "no layers"


def _videos(facts: Facts) -> dict[str, float]:
    """Empty of a model that reads none. frames: at most, or of any, if there is no fps, of each second."""
    video = None if facts.vision is None else facts.vision.video
    if video is None:
        return {}
    fps = {} if video.num_frames or not video.fps else {"fps": video.fps}
    return {"frames": video.num_frames or video.most_frames, **fps}


def _sounds(facts: Facts) -> dict[str, int]:
    """Empty of a model that hears nothing. tokens: for a minute, of about that; bytes: of what hears it, in 16 bits."""
    if (hearing := facts.hearing) is None:
        return {}
    import torch

    from nanovllm_cli.hearing_spec import RATE
    from nanovllm_cli.weights.hearing import hearing_bytes

    minute = 60 * RATE // hearing.hop * hearing.tower.num_made(hearing.piece) / hearing.piece
    return {"tokens": round(minute), "bytes": hearing_bytes(hearing, torch.bfloat16)}


def _heads_in_words(facts: Facts) -> str:
    heads = _heads(facts)
    if not heads:
        return "states alone, without attention"
    if "latent_rank" in heads:
        shared = f"{heads['latent_rank']} numbers and {heads['rotary_dim']} rotated ones of a token"
        return f"{heads['heads']} heads of {heads['head_dim']} dims, whose keys and values are made of {shared}"
    numbers = [(each.num_heads, each.num_kv_heads, each.head_dim) for each in facts.spec.attentions]
    queries, keys, dims = (f"{min(of)}" if min(of) == max(of) else f"{min(of)} to {max(of)}" for of in zip(*numbers, strict=True))
    return f"{queries} heads over {keys} of keys and values, {dims} dims a head"


def _embedding_in_words(facts: Facts) -> str | None:
    """None of a model whose files say nothing of it, and that has a head."""
    embedding = facts.embedding
    pooling, prompts, default = embedding.pooling, embedding.prompts, embedding.default_prompt
    if embedding.ranks:
        return "none, it ranks: nanovllm embed --query, or /v1/rerank of a server"
    if embedding.pooling == "each":
        return "none, it labels tokens: nanovllm redact, or /v1/spans of a server"
    if embedding.labels:
        return "none, it classifies: nanovllm classify, or /classify of a server"
    if embedding.refusal is not None:
        return one_line(f"none: {embedding.refusal.message}")
    if pooling is None and not prompts and facts.spec.has_head:
        return None
    ways = {"mean": "the mean of all tokens", "last": "the last token", "cls": "the first token"}
    words = [f"by {ways[pooling or 'mean']}" + ("" if pooling is not None else ", for want of a word")]
    if embedding.layers:
        widths = [embedding.layers[0].shape[1], *(layer.shape[0] for layer in embedding.layers)]
        words.append("through dense layers: " + " to ".join(f"{width:,}" for width in widths))
    if prompts:
        words.append("prompts " + ", ".join(f"{name} (the default)" if name == default else name for name in prompts))
    if not facts.spec.has_head:
        words.append("nothing else: it has no head")
    return one_line("; ".join(words))


def _print(
    found: ResolvedModel, checkpoint: Checkpoint, facts: Facts, tokenizer: Tokenizer | None, template: str | None, screen: Console
) -> None:
    from nanovllm_cli.planning.facts import generation_defaults, rope_words

    spec, heads = facts.spec, _heads(facts)
    defaults = generation_defaults(_settings(checkpoint, tokenizer))
    lines = [
        ("model", str(found)),
        ("architecture", f"{spec.architecture}: {spec.num_layers} layers of {spec.hidden_size:,}, {_heads_in_words(facts)}"),
        ("parameters", f"{count(facts.num_parameters)} ({facts.num_parameters:,})"
         + (f", {count(facts.num_active)} of them for each token" if spec.num_idle else "")),
        ("context", f"{spec.max_position:,} tokens" + (f", window {heads['window']:,}" if "window" in heads else "")),
        ("rope", rope_words(spec)),
        ("vocabulary", f"{spec.vocab_size:,}" + ("" if tokenizer is None else f", {tokenizer.vocab_size:,} in the tokenizer")),
        ("licence", _licence(checkpoint) or "not said in its files"),
        ("defaults", ", ".join(f"{key} {value}" for key, value in defaults.items()) or "none"),
    ]  # fmt: skip
    if spec.encoder is not None:
        lines.insert(2, ("encoder", f"{spec.encoder.num_layers} layers of {spec.hidden_size:,}, which read what is asked"))
    if codes := _languages(tokenizer):
        some = ", ".join(codes[:_SOME]) + (", …" if len(codes) > _SOME else "")
        lines.insert(3, ("languages", one_line(f"{len(codes)}, told by --target-language: {some}")))
    if (words := _embedding_in_words(facts)) is not None:
        lines.insert(3, ("embedding", words))
    if (vision := facts.vision) is not None:
        tower, (tokens, num_bytes) = vision.tower, _images(facts).values()
        of_any = "whatever its size" if tower.resampler is not None else f"of {tower.cell} x {tower.cell} pixels"
        lines.insert(3, ("images", f"{tokens:,} tokens at most for each, {of_any}; read by "
                                   f"{_layers_in_words(tower)}, {size(num_bytes)} in 16 bits"))
    if facts.vision is not None and (video := facts.vision.video) is not None:
        paced = f", {video.fps:g} a second" if "fps" in _videos(facts) else ""
        told = f"{_videos(facts)['frames']} frames at most{paced}; --video-fps and --video-max-frames change that"
        lines.insert(4, ("videos", told))
    if (hearing := facts.hearing) is not None:
        ear, (tokens, num_bytes) = hearing.tower, _sounds(facts).values()
        lines.insert(3, ("sounds", f"{tokens:,} tokens for a minute; heard by {ear.num_layers} layers of {ear.hidden_size:,}, "
                                   f"{size(num_bytes)} in 16 bits"))
    if facts.predicts_further:
        lines.insert(3, ("guesses", "by a layer of its own: --mtp"))
    if tokenizer is not None:
        shown = (f"{role} {', '.join(f'{text} ({i})' for text, i in tokens)}" for role, tokens in _special(tokenizer).items())
        lines.append(("special", one_line("; ".join(shown)) or "none"))
    if facts.disk_bytes:
        lines.insert(3, ("n-grams", f"{size(facts.disk_bytes)} of tables, which stay on the disk: a token reads a few rows"))
    out = aligned(lines, left=(0, 1))
    cells = [("tensors", "count", "numbers", "stored as", "", "bits a number")]
    cells += [
        (each.name, f"{each.count:,}", count(each.numbers), ", ".join(each.types), size(each.num_bytes), f"{each.bits:.2f}")
        for each in facts.classes
    ]
    out += ["", *aligned(cells, left=(0, 3)), ""]
    if template is None:
        out.append("no chat template")
    else:
        first = template.splitlines()
        out += [f"template ({len(template):,} characters; --template prints it)"]
        out += ["  " + one_line(line) for line in first[:TEMPLATE_LINES]] + (["  …"] if len(first) > TEMPLATE_LINES else [])
    screen.lines(out)


def count(number: float) -> str:
    """Parameters as people say them: 596 M, 8.03 B."""
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= limit:
            shown = number / limit
            return f"{shown:.0f} {letter}" if shown >= 100 else f"{shown:.3g} {letter}"
    return str(int(number))
