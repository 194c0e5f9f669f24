"""What a run of `quantize` has finished, in a folder beside its target, so that the next run goes on from there.

    .NAME.quantizing/journal.jsonl           first what is being made of what; then a line a unit, with its file's digest
    .NAME.quantizing/blocks.3.safetensors    the unit's rows, as `quant/rows.py` has them, and float weights that were changed

A unit counts once its line is on the disk, and is read only if its digest fits. What belongs to another model, other formats or
another algorithm is thrown away. The lock is the output's: whoever makes one has opened that first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from nanovllm_cli.errors import OutputError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quant.rows import BlockRows, Fp8Rows, IntegerRows, Nf4Rows, QuantizedRows
from nanovllm_cli.weights.safetensors import SafetensorsFile
from nanovllm_cli.weights.tensor_names import checkpoint_name
from nanovllm_cli.weights.writer import SafetensorsWriter, TensorOut, sync_folder

Rows = torch.Tensor | QuantizedRows
_KINDS: dict[str, Any] = {"integer": IntegerRows, "fp8": Fp8Rows, "nf4": Nf4Rows, "blocks": BlockRows}
_JOURNAL = "journal.jsonl"


class Parts:
    """The finished units of one run. identity: what the result depends on, as JSON has it."""

    def __init__(self, target: Path, identity: Mapping[str, Any]) -> None:
        target = Path(os.path.realpath(target))
        self.folder = target.with_name(f".{target.name}.quantizing")
        self._begin = json.dumps(identity, sort_keys=True)
        try:
            done = self._read_journal()
            if done is None:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(exist_ok=True)
                self._append(self._begin)
                sync_folder(self.folder.parent)
        except OSError as failure:
            raise _failed(self.folder, failure) from failure
        self._done = done or {}

    @property
    def num_finished(self) -> int:
        return len(self._done)

    def __contains__(self, unit: str) -> bool:
        """Whether the unit is finished, and its file is what was written."""
        if unit not in self._done:
            return False
        try:
            if _digest(self._path(unit)) == self._done[unit]:
                return True
        except OSError:
            pass
        del self._done[unit]
        return False

    def add(self, unit: str, rows: Mapping[str, Rows]) -> None:
        """The unit's weights by our names. They are on the disk when this returns. OutputError where they can't be."""
        tensors = dict(_flat(rows))
        path = self._path(unit)
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                outs = [TensorOut(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
                SafetensorsWriter(file, outs).write_all(lambda out: [tensors[out.name]], NullProgress())
                file.flush()
                os.fsync(file.fileno())
            digest = _digest(partial)
            partial.rename(path)
            sync_folder(self.folder)
            self._append(json.dumps({"unit": unit, "blake2b": digest}))
        except OSError as failure:
            raise _failed(self.folder, failure) from failure
        self._done[unit] = digest

    def read(self, unit: str) -> dict[str, Rows]:
        """What `add` was given: views of the mapped file."""
        file = SafetensorsFile(self._path(unit))
        fields: dict[str, dict[str, torch.Tensor]] = {}
        for name in file.entries:
            ours, _, field = name.partition("/")
            fields.setdefault(ours, {})[field] = file.tensor(name)
        file.close()  # the views keep the mapping
        return {ours: _rows(found) for ours, found in fields.items()}

    def changed_floats(self, units: Iterable[str], names: dict[str, str]) -> dict[str, tuple[str, str]]:
        """Plain weights that these units changed, by the names of a checkpoint: the unit, and our name."""
        return {
            checkpoint_name(ours, names): (unit, ours)
            for unit in units
            for ours, rows in self.read(unit).items()
            if isinstance(rows, torch.Tensor)
        }

    def remove(self) -> None:
        """Once the output is there."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, unit: str) -> Path:
        return self.folder / f"{unit}.safetensors"

    def _append(self, line: str) -> None:
        with (self.folder / _JOURNAL).open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read_journal(self) -> dict[str, str] | None:
        """Units and digests; None where there is no journal of this very work. A line that was cut short ends it."""
        try:
            lines = (self.folder / _JOURNAL).read_text().splitlines(keepends=True)
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            return None
        if not lines or lines[0] != self._begin + "\n":
            return None
        found: dict[str, str] = {}
        for line in lines[1:]:
            try:
                entry = json.loads(line)
                found[str(entry["unit"])] = str(entry["blake2b"])
            except (ValueError, KeyError, TypeError, RecursionError):
                break
        good = [self._begin, *(json.dumps({"unit": unit, "blake2b": digest}) for unit, digest in found.items())]
        if "".join(line + "\n" for line in good) != "".join(lines):  # what is appended must find whole lines before it
            partial = (self.folder / _JOURNAL).with_suffix(".partial")
            partial.write_text("".join(line + "\n" for line in good))
            partial.rename(self.folder / _JOURNAL)
        return found


def _flat(rows: Mapping[str, Rows]) -> list[tuple[str, torch.Tensor]]:
    flat = []
    for ours, value in rows.items():
        if isinstance(value, torch.Tensor):
            flat.append((f"{ours}/float", value))
            continue
        kind = next(kind for kind, form in _KINDS.items() if isinstance(value, form))
        found = value._asdict()
        flat += [(f"{ours}/{kind}.{field}", tensor) for field, tensor in found.items() if tensor is not None]
    return flat


def _rows(fields: Mapping[str, torch.Tensor]) -> Rows:
    if "float" in fields:
        return fields["float"]
    kind = next(iter(fields)).partition(".")[0]
    rows: Rows = _KINDS[kind](**{name.partition(".")[2]: tensor for name, tensor in fields.items()})
    return rows


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _failed(folder: Path, failure: OSError) -> OutputError:
    return OutputError(
        f"cannot write {folder}: {failure.strerror or failure}",
        "free some space, or choose another output; the same command goes on from what is finished",
    )
