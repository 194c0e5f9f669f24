"""From a model to a quantized one: unit by unit into parts, from these to an output that appears whole, with its quality card.

    parts       .NAME.quantizing beside the target: what is finished, also after a run that was killed
    output      .NAME.partial, which gets its name when everything is in it

The original is only read. What is done twice gives the same bytes: nothing depends on time, threads or chance.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nanovllm_cli.errors import RequestError, UnsupportedError, UsageError
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quantization.algorithms import (
    Algorithm,
    Calibrated,
    RoundToNearest,
    by_awq,
    by_gptq,
    check_awq,
    check_gptq,
)
from nanovllm_cli.quantization.allocation import with_target
from nanovllm_cli.quantization.card import Card, measure, measure_vectors, windows_of
from nanovllm_cli.quantization.folder import write_folder
from nanovllm_cli.quantization.gguf_file import write_gguf
from nanovllm_cli.quantization.importance import from_file, measured, weighable
from nanovllm_cli.quantization.logits import check_reads_texts
from nanovllm_cli.quantization.original import Original
from nanovllm_cli.quantization.parts import Parts
from nanovllm_cli.quantization.passages import Cut, Reading, embeds, reading_of
from nanovllm_cli.quantization.plan import Plan
from nanovllm_cli.quantization.texts import WINDOW, NamedText, window_of, windows
from nanovllm_cli.quantization.vector_quality import AnyQuality
from nanovllm_cli.quantization.walk import Walk
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import Checkpoint, open_checkpoint
from nanovllm_cli.weights.files import split_parts
from nanovllm_cli.weights.heads import classifies
from nanovllm_cli.weights.imatrix import ImportanceFile
from nanovllm_cli.weights.writer import OutputFile, OutputFolder, as_json, check_room, exists_already

QUALITY_FILE = "quality.json"
AlgorithmName = Literal["rtn", "gptq", "awq", "imatrix"]
_ANOTHER = "give another --calibration"
_LONGER = "give a longer --verify-text, more --verify-tokens, or --no-verify"
_VERSION = 2  # of what parts hold; another one means that they are made anew


@dataclass(frozen=True, slots=True)
class Method:
    """How numbers are chosen. text: for calibration; num_samples: most pieces of it, or for a reranker pairs with as many tokens
    as these. importance: of imatrix, what to go by in place of a calibration."""

    algorithm: AlgorithmName
    text: NamedText
    num_samples: int = 128
    importance: ImportanceFile | None = None

    def sequences(self, original: Original) -> list[list[int]]:
        """Token ids to calibrate with. UsageError where there are none."""
        tokenizer, spec = original.tokenizer(), original.spec
        if classifies(original.checkpoint):
            cut = Cut(num_tokens=WINDOW * self.num_samples)
            return list(map(list, reading_of(original.checkpoint, spec, tokenizer, self.text, cut, _ANOTHER).ids))
        whole = embeds(original.checkpoint, spec)  # which reads whole texts
        pieces = windows(tokenizer, self.text, spec.vocab_size, size=window_of(spec), ended=whole)
        found = list(islice(pieces, self.num_samples))
        if not found:
            raise UsageError(f"{self.text.name} has nothing to calibrate with", _ANOTHER)
        return found


@dataclass(frozen=True, slots=True)
class Verification:
    """What the quality card is measured on. num_tokens: most of the text's, or of what is made of it for a reranker."""

    text: NamedText
    num_tokens: int = 4096

    def check(self, original: Original) -> None:
        """Raises UsageError where the text is too short, and UnsupportedError where nothing can be measured of such a model."""
        check_reads_texts(original.checkpoint)
        self._reading(original) if self._by_vectors(original) else self._windows(original)

    def quality(self, original: Original, quantized: Checkpoint, progress: LoadProgress) -> AnyQuality:
        """What was lost: of probabilities, or of a model that embeds or ranks, of vectors or scores. RequestError where these are
        no numbers."""
        found: AnyQuality
        if self._by_vectors(original):
            found = measure_vectors(original.checkpoint, quantized, self._reading(original), progress)
        else:
            found = measure(original.checkpoint, quantized, self._windows(original), progress)
        if not found.is_finite:
            raise RequestError("what the models give is not finite numbers", "--no-verify leaves the quality card out")
        return found

    def _by_vectors(self, original: Original) -> bool:
        return embeds(original.checkpoint, original.spec)

    def _windows(self, original: Original) -> list[list[int]]:
        spec = original.spec
        return windows_of(original.tokenizer(), self.text, self.num_tokens, spec.vocab_size, size=window_of(spec))

    def _reading(self, original: Original) -> Reading:
        cut = Cut(num_tokens=self.num_tokens)
        try:
            return reading_of(original.checkpoint, original.spec, original.tokenizer(), self.text, cut, _LONGER)
        except UnsupportedError as refusal:
            raise UnsupportedError(refusal.message, "--no-verify leaves the quality card out") from refusal


def quantize_model(
    original: Original,
    plan: Plan,
    method: Method,
    output: Path,
    verification: Verification | None,
    progress: LoadProgress,
    *,
    replace: bool = False,
) -> Card | None:
    """Writes `output`, and returns its quality card unless that was not asked for.

    Raises UsageError (the output is there, or is the input), OutputError (it can't be written; what is finished stays beside it),
    DoesNotFitError (the disk is too small), and what reading and loading raise.
    """
    check_apart(original, plan, output)
    if verification is not None:
        verification.check(original)  # not after hours
    if plan.kind == "gguf":
        convert.plan(original.checkpoint, "gguf")  # refuses what such a file can't say of the model
    write = _write_folder if plan.kind == "hf" else _write_file
    card = write(_Run(original, plan, method, output, verification, progress), replace)
    progress.done()
    return card


class _Run(NamedTuple):
    """See quantize_model."""

    original: Original
    plan: Plan
    method: Method
    output: Path
    verification: Verification | None
    progress: LoadProgress

    def finished_parts(self) -> Parts:
        """All units, quantized now or earlier."""
        parts = Parts(self.output, _identity(self.original, self.plan, self.method))
        try:
            check_room(self.output, self.plan.bytes_after + _bytes_of_parts(self.plan, parts))
            _quantize(self.original, self.plan, self.method, parts, self.progress)
        except BaseException:
            if not parts.num_finished:  # nothing to go on from
                parts.remove()
            raise
        return parts

    def card(self, path: Path) -> Card | None:
        """Of the quantized model at `path`."""
        if self.verification is None:
            return None
        with open_checkpoint(path) as quantized:
            quality = self.verification.quality(self.original, quantized, self.progress)
        text, window = self.verification.text.name, window_of(self.original.spec)
        return Card(self.original.name, self.plan, self.method.algorithm, text, quality, window)


def _write_folder(run: _Run, replace: bool) -> Card | None:
    with OutputFolder(run.output, replace=replace) as folder:
        parts = run.finished_parts()
        write_folder(run.original, run.plan, parts, folder, run.progress)
        card = run.card(folder.path)
        if card is not None:
            folder.write(QUALITY_FILE, as_json(card.as_json()))
        folder.write("README.md", _model_card(run.original, run.plan, card).encode())
        folder.commit()
    parts.remove()
    return card


def _write_file(run: _Run, replace: bool) -> Card | None:
    """The card lies beside the file. One of a file that is replaced goes with it."""
    card_path = _card_path(run.output)
    with OutputFile(run.output, replace=replace) as file:
        if run.verification is not None and not replace and os.path.lexists(card_path):
            raise exists_already(card_path)
        parts = run.finished_parts()
        made = write_gguf(run.original, run.plan, parts, file, run.progress)
        for note in made.notes:
            run.progress.note(f"not carried: {note}")
        card = run.card(file.temporary)
        file.commit()
    if made.tower is not None:
        run.progress.note(str(made.tower.write(run.output, replace=replace, progress=run.progress)))
    if card is not None:
        with OutputFile(card_path, replace=replace) as beside:
            beside.file.write(as_json(card.as_json()))
            beside.commit()
    elif replace:
        with contextlib.suppress(OSError):
            card_path.unlink()
    parts.remove()
    return card


def _card_path(output: Path) -> Path:
    """Of a file's card. What stands behind another dot is part of its name: m.q4 and m.q8 are two files."""
    return output.with_name(f"{output.name.removesuffix('.gguf')}.{QUALITY_FILE}")


def plan_with_target(
    original: Original, plan: Plan, bits_a_weight: float, method: Method, progress: LoadProgress
) -> Plan:
    """See `allocation.with_target`."""
    return with_target(plan, bits_a_weight, Walk(original, method.sequences(original), progress), progress)


def check_apart(original: Original, plan: Plan, output: Path) -> None:
    """UsageError where the output is the input or one of its files, or a folder that holds it or lies in it."""
    source, target = Path(os.path.realpath(original.checkpoint.path)), Path(os.path.realpath(output))
    nested = plan.kind == "hf" and (original.folder.resolve() in (target, *target.parents) or target in source.parents)
    if target == source or convert.is_input_file(original.checkpoint, target) or nested:
        raise UsageError(f"{output}: the output would be where the model itself is", "-o names another output")


def _parts_of(file: Path) -> list[Path]:
    """All files of a GGUF model of which this is one."""
    return [file.with_name(name) for name in split_parts(file.name)]


def _quantize(original: Original, plan: Plan, method: Method, parts: Parts, progress: LoadProgress) -> None:
    units = plan.units()
    if parts.num_finished:
        progress.note(f"an earlier run has finished {parts.num_finished} of {len(units)} parts: going on from there")
    progress.stage(f"quantizing to {plan.to}", sum(i.weight.stored_bytes for u in units.values() for i in u), "B")
    algorithm = _algorithm(original, plan, method, progress)
    for unit, items in units.items():
        if unit in parts:
            algorithm.resume(unit, parts.read(unit))
        else:
            parts.add(unit, algorithm.quantize(unit, items))
        progress.advance(sum(item.weight.stored_bytes for item in items))


def check_method(original: Original, plan: Plan, method: Method) -> None:
    """UnsupportedError for a plan that the method can't carry out."""
    if method.algorithm == "rtn":
        return
    if method.algorithm == "imatrix":
        weighable(plan, inside=method.importance is None)
        return
    if any(item.weight.dealt is not None for item in plan.items):
        raise UnsupportedError(
            f"{original.name} has columns in another order than its GGUF file, and is not calibrated for one",
            "make a file of it first, and quantize that: nanovllm convert MODEL; or use --algorithm imatrix, or rtn",
        )
    {"gptq": check_gptq, "awq": check_awq}[method.algorithm](plan)


def _algorithm(original: Original, plan: Plan, method: Method, progress: LoadProgress) -> Algorithm:
    check_method(original, plan, method)  # before anything is read
    if method.algorithm == "rtn":
        return RoundToNearest(original)
    if method.algorithm == "imatrix":
        if method.importance is not None:
            return RoundToNearest(original, from_file(plan, method.importance, progress))
        return RoundToNearest(original, measured(plan, Walk(original, method.sequences(original), progress), progress))
    walk = Walk(original, method.sequences(original), progress)
    return Calibrated(original, plan, walk, {"gptq": by_gptq, "awq": by_awq}[method.algorithm])


def _model_card(original: Original, plan: Plan, card: Card | None) -> str:
    """The original's README.md, with a section before its text."""
    readme = original.folder / "README.md"
    text = readme.read_text(errors="replace") if readme.is_file() else ""
    front = ""
    if text.startswith("---\n") and "\n---\n" in text:
        front, _, text = text.partition("\n---\n")
        front += "\n---\n\n"
    unmeasured = f"## Quantized with nanovllm\n\n{original.name} in {plan.to}; not measured.\n"
    return f"{front}{unmeasured if card is None else card.as_markdown()}\n{text.lstrip()}"


def _identity(original: Original, plan: Plan, method: Method) -> dict[str, Any]:
    """What the parts depend on. The original by its files' sizes and times: reading them all would take as long as the work. What
    else lies beside them may change: other models, and cards of what was quantized before."""
    if original.checkpoint.format == "gguf":
        files = _parts_of(original.checkpoint.path)
    else:
        files = [file for file in sorted(original.folder.iterdir()) if file.suffix in (".safetensors", ".json")]
        files = [file for file in files if not file.name.endswith(QUALITY_FILE)]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return {
        "version": _VERSION,
        "source": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        "formats": {item.weight.ours: repr(item.format) for item in plan.items},
        "method": _by(method),
    }


def _by(method: Method) -> list[Any]:
    if method.algorithm == "rtn":
        return [method.algorithm]
    if method.importance is not None:
        return [method.algorithm, method.importance.digest]
    text = hashlib.blake2b(method.text.text.encode(), digest_size=16).hexdigest()
    return [method.algorithm, text, method.num_samples]


def _bytes_of_parts(plan: Plan, parts: Parts) -> int:
    """What is not there yet: a byte a code, and some for scales."""
    items = [item for unit, items in plan.units().items() if unit not in parts for item in items]
    weights = sum(math.prod(item.weight.shape) for item in items)
    return weights + weights // 8
