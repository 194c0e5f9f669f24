"""`nanovllm verify`: where two models, or two ways to compute one, part. The work is in `quantization/verify.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nanovllm_cli.cli import signals
from nanovllm_cli.cli.command import OUTPUT, expand, is_typed, option
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import named_models
from nanovllm_cli.cli.options import MessageOptions, ModelWord, SourceOptions
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.perplexity import measured_text
from nanovllm_cli.cli.progress_line import ProgressLine
from nanovllm_cli.config import DTypeName
from nanovllm_cli.errors import DifferenceError, UsageError

if TYPE_CHECKING:
    from nanovllm_cli.quantization.verify import Difference
    from nanovllm_cli.text.tokenizer import Tokenizer

EXAMPLE = "for example: nanovllm verify tiny tiny-int8"
COMPARISON = "Comparison"


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What is compared with what."""

    against: Literal["model", "float32", "transformers"] | None = option(
        "--against",
        help="The other side: model is the second argument; float32 is MODEL itself in float32 on the CPU; transformers is "
        "MODEL there, in float32. [model, or float32 without one]",
        panel=COMPARISON, envvar=None,
    )
    dtype: DTypeName = option("--dtype", help="What MODEL computes in. [auto]", default="auto", panel=COMPARISON)
    dtype_b: DTypeName = option(
        "--dtype-b", help="What OTHER computes in. [auto]", default="auto", panel=COMPARISON, envvar=None
    )
    text: str | None = option(
        "--text", help="What both read; - is standard input. [bundled]",
        panel=COMPARISON, metavar="FILE", envvar=None,
    )
    tokens: int = option(
        "--tokens", help="How much of it. [256]", default=256, panel=COMPARISON, min=2, max=512, envvar=None
    )
    tolerance: float | None = option(
        "--tolerance",
        help="Relative error of a token at a layer that still counts as equal. [0.05; 0.001 where both are float32]",
        panel=COMPARISON, min=0.0, metavar="SHARE",
    )
    json: bool = option("--json", help="The result as one JSON object.", default=False, panel=OUTPUT)


@expand
def verify(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    other_word: Annotated[
        str | None,
        typer.Argument(metavar="OTHER", help="Another form of the same model: quantized, converted, a copy."),
    ] = None,
    source: SourceOptions,
    options: VerifyOptions,
    messages: MessageOptions,
) -> None:
    """Find the first layer and the first token where two forms of a model part.

    Both read the same tokens. For each layer: the relative error of the residual stream, and the first token whose error is
    above the tolerance; then the first token after which the two choose otherwise, and whether tokenizers and templates
    agree. Exit code 0: equal within the tolerance; 7: different; any other: they could not be compared.
    """
    screen = screen_for(messages)
    names = [word for word in (source.model, model_word, other_word) if word]
    names = named_models(ctx.obj, names, EXAMPLE)
    if len(names) > 2:
        raise UsageError("more than two models were named", EXAMPLE)
    against = options.against or ("model" if len(names) == 2 else "float32")
    if (against == "model") != (len(names) == 2):
        raise UsageError(f"--against {against} and {len(names)} models contradict each other", EXAMPLE)
    if against != "model" and is_typed(ctx, "dtype_b"):
        raise UsageError("--dtype-b has no meaning without OTHER", f"{against} computes in float32; OTHER may be MODEL again")
    screen.announce(f"opening {names[0]}")
    with signals.insisting():
        from nanovllm_cli.quantization import verify as verification
        from nanovllm_cli.quantization.verify_text import OurWords, TransformersWords, differences
        from nanovllm_cli.weights.source import resolve
    progress = ProgressLine(screen)
    paths = [resolve(name, offline=source.offline, revision=source.revision, progress=progress).path for name in names]
    words = OurWords(paths[0])
    most = min(options.tokens, *map(verification.context_of, paths))
    ids = _ids(options, words.tokenizer, most, screen)
    apart: list[str] = []
    if against == "transformers":
        apart = differences(words, TransformersWords(paths[0]))
    elif against == "model":
        apart = differences(words, OurWords(paths[1]))
    a = verification.trace(paths[0], ids, options.dtype, progress)
    if against == "transformers":
        b = verification.trace_transformers(paths[0], ids)
    elif against == "model":
        b = verification.trace(paths[1], ids, options.dtype_b, progress)
    else:
        b = verification.trace(paths[0], ids, "float32", progress)
    progress.done()
    found = verification.compare(a, b, apart, options.tolerance)
    if options.json:
        screen.record(found.as_json())
    else:
        _print(found, words.tokenizer, ids, screen)
    if not found.equal:
        raise typer.Exit(DifferenceError.exit_code)


def _ids(options: VerifyOptions, tokenizer: Tokenizer, most: int, screen: Console) -> list[int]:
    ids = tokenizer.truncated(tokenizer.encode(measured_text(options.text, screen).text), most)
    if len(ids) < 2:
        raise UsageError("the text is too short to compare anything", "give a longer --text")
    return ids


def _print(found: Difference, tokenizer: Tokenizer, ids: list[int], screen: Console) -> None:
    lines = [f"{'':<14}{'mean error':>12}{'worst':>12}{'at token':>10}  first token above {found.tolerance:g}"]
    for layer in found.layers:
        first = "-" if layer.first_token is None else f"{layer.first_token} {_shown(tokenizer, ids[layer.first_token])}"
        lines.append(f"{layer.name:<14}{layer.mean:>12.3g}{layer.worst:>12.3g}{layer.worst_token:>10}  {first}")
    if found.same_top is not None:
        lines.append(f"same most likely next token: {found.same_top:.2%} of {found.tokens}")
    if found.top is not None:
        top = found.top
        lines.append(
            f"first other choice: after token {top.token} {_shown(tokenizer, ids[top.token])}, "
            f"{_shown(tokenizer, top.a)} and {_shown(tokenizer, top.b)}"
        )
    lines += [f"tokenizers differ: {line}" for line in found.tokenizer]
    if found.equal:
        lines.append("equal to the bit" if found.same_bits else "equal within the tolerance")
    elif found.first_layer is not None:
        lines.append(f"different: first at {found.first_layer.name}, token {found.first_layer.first_token}")
    else:
        lines.append("different")
    screen.lines(lines)


def _shown(tokenizer: Tokenizer, token_id: int) -> str:
    return repr(tokenizer.id_to_bytes(token_id).decode("utf-8", "replace"))
