"""Files of what models see or hear by, whichever it is: how they are written, and that they are read again as they were meant."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from gguf.constants import GGUFType

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.hearing_spec import ConformerSpec, Sense
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.vision_spec import VisionSpec
from nanovllm_cli.weights.checkpoint import TOWER, Checkpoint
from nanovllm_cli.weights.convert_gguf import QUANTIZATION_VERSION
from nanovllm_cli.weights.convert_tensors import Step, main_type, slices
from nanovllm_cli.weights.files import some, without_quant
from nanovllm_cli.weights.gguf_writer import GGUFPartWriter, Header, HeaderBuilder
from nanovllm_cli.weights.mmproj import check_mmproj, open_mmproj, read_mmproj
from nanovllm_cli.weights.writer import OutputFile


class Written(NamedTuple):
    """A file, and whether it is new: one of its name, which holds the same, stays."""

    path: Path
    is_new: bool
    does: str = "sees"

    def __str__(self) -> str:
        return f"what it {self.does} by: {self.path}" + ("" if self.is_new else ", which is there already, and stays")


@dataclass
class TowerFile:
    """What will be written. names: of the folder's tensors that it holds; num_deep: of decoder layers behind which it adds.
    does: what the model does by it. notes: of what it does, too, and that is left out."""

    checkpoint: Checkpoint
    steps: list[Step]
    header: Header
    names: frozenset[str]
    num_deep: int
    does: str = "sees"
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(step.num_bytes for step in self.steps)

    def path(self, output: Path) -> Path:
        """Beside a model's file, or in the folder of its parts."""
        stem = without_quant(output.name.removesuffix(".gguf")) or "model"
        is_file = output.suffix == ".gguf" or output.is_file()  # else parts are in a folder
        return (output.parent if is_file else output) / f"mmproj-{stem}-{plain_type_of(self.steps)}.gguf"

    def write(self, output: Path, *, replace: bool, progress: LoadProgress) -> Written:
        """For a model that was written there. The file appears whole or not at all, and has been read again before it does."""
        path = self.path(output)
        if path.exists() and not replace:
            return Written(path, False, self.does)
        by_name = {step.name: step for step in self.steps}
        progress.stage(f"converting what it {self.does} by", self.num_bytes, "B")
        try:
            with OutputFile(path, replace=replace) as file:
                writer = GGUFPartWriter(file.file, self.header, [step.gguf() for step in self.steps])
                writer.write_all(lambda tensor: slices(self.checkpoint, by_name[tensor.name]), progress)
                file.file.flush()
                with open_mmproj(file.temporary) as written:
                    check_mmproj(written, read_mmproj(written))
                file.commit()
        finally:
            progress.done()
        return Written(path, True, self.does)


def plain_type_of(steps: list[Step]) -> str:
    """That the layers' matrices have."""
    return main_type([step for step in steps if ".blk." in step.name])


def tower_header(name: str, kind: int, keys: Mapping[str, Any]) -> Header:
    """keys: beside those that all such files have."""
    builder = HeaderBuilder(TOWER)
    builder.add_type(GGUFType.MMPROJ)
    builder.add_name(name)
    builder.add_file_type(kind)
    builder.add_quantization_version(QUANTIZATION_VERSION)
    add = {bool: builder.add_bool, int: builder.add_uint32, float: builder.add_float32, str: builder.add_string,
           list: builder.add_array}  # fmt: skip
    for key, value in keys.items():
        add[type(value)](key, value)
    return builder.header()


def check_spec(wanted: Sense, found: Sense) -> None:
    """found: what a file's header is read as. UnsupportedError where that is another tower. Files say nothing of videos, which
    are as published then."""
    if isinstance(wanted, VisionSpec) and isinstance(found, VisionSpec):
        wanted, found = (replace(each, video=None, tower=replace(each.tower, films=False)) for each in (wanted, found))
    if lost := sorted(_differences(asdict(wanted), asdict(found))):
        raise UnsupportedError(f"a GGUF file can't say this of a tower: {some(lost)}", "keep the model as a Hugging Face folder")


def _differences(wanted: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    for key, value in wanted.items():
        if isinstance(value, ConformerSpec):
            yield from _differences(value._asdict(), found[key]._asdict())
        elif isinstance(value, dict):
            yield from _differences(value, found[key])
        elif isinstance(value, float):
            if not math.isclose(value, found[key], rel_tol=1e-6):
                yield key
        elif value != found[key]:
            yield key
