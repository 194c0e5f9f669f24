"""What a run of `quantize` has finished: what the next run finds of it, whole, damaged, or of other work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanovllm_cli.errors import OutputError
from nanovllm_cli.quant.rows import BlockRows, Fp8Rows, IntegerRows, Nf4Rows
from nanovllm_cli.quantization.parts import Parts, Rows

IDENTITY = {"version": 1, "formats": {"a": "int8", "b": "fp8"}}
ROWS: dict[str, dict[str, Rows]] = {
    "blocks.0": {
        "blocks.0.q.weight": IntegerRows(torch.arange(6, dtype=torch.uint8).view(2, 3), torch.ones(2, 1), None),
        "blocks.0.k.weight": IntegerRows(
            torch.ones(2, 3, dtype=torch.uint8), torch.full((2, 1), 0.5), torch.tensor([[7], [8]], dtype=torch.uint8)
        ),
        "blocks.0.attention_norm.weight": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    },
    "blocks.1": {"blocks.1.down.weight": Fp8Rows(torch.full((1, 4), 0x38, dtype=torch.uint8), torch.ones(1, 1))},
    "head": {"head.weight": BlockRows(torch.arange(34, dtype=torch.uint8).view(1, 34))},
}


def parts_of(tmp_path: Path, identity: dict[str, object] = IDENTITY) -> Parts:
    return Parts(tmp_path / "out", identity)


def finished(tmp_path: Path) -> Path:
    parts = parts_of(tmp_path)
    for unit, rows in ROWS.items():
        parts.add(unit, rows)
    return tmp_path / ".out.quantizing"


def test_the_next_run_finds_what_was_added(tmp_path: Path) -> None:
    finished(tmp_path)
    parts = parts_of(tmp_path, dict(reversed(IDENTITY.items())))
    assert parts.num_finished == 3
    assert "blocks.2" not in parts
    for unit, rows in ROWS.items():
        assert unit in parts
        found = parts.read(unit)
        assert found.keys() == rows.keys()
        for name, value in rows.items():
            assert type(found[name]) is type(value)
            for one, other in zip(found[name], value, strict=True):
                assert (one is None and other is None) or (one.dtype == other.dtype and torch.equal(one, other))
    parts.remove()
    assert not list(tmp_path.iterdir())
    assert parts_of(tmp_path).num_finished == 0


def test_a_part_of_other_work_is_thrown_away(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    parts = parts_of(tmp_path, IDENTITY | {"version": 2})
    assert (parts.num_finished, "head" in parts) == (0, False)
    assert [path.name for path in folder.iterdir()] == ["journal.jsonl"]


def test_parts_that_are_damaged_or_gone_do_not_count(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    data = bytearray((folder / "head.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "head.safetensors").write_bytes(data)
    (folder / "blocks.1.safetensors").unlink()
    parts = parts_of(tmp_path)
    assert [unit in parts for unit in ROWS] == [True, False, False]
    assert parts.num_finished == 1
    parts.add("head", ROWS["head"])
    assert "head" in parts_of(tmp_path)


@pytest.mark.parametrize("damage", [b'{"unit": "head", "bl', b"{}\n", b"[]\n", b"{\n", b'{"unit": "head"}\n'])
def test_a_line_that_is_none_ends_the_journal_and_what_is_added_then_is_found(tmp_path: Path, damage: bytes) -> None:
    journal = finished(tmp_path) / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:2]) + damage + (lines[3] if damage.endswith(b"\n") else b""))
    parts = parts_of(tmp_path)
    assert [unit in parts for unit in ROWS] == [True, False, False]
    parts.add("blocks.1", ROWS["blocks.1"])
    assert [unit in parts_of(tmp_path) for unit in ROWS] == [True, True, False]


def test_a_journal_that_is_no_text_is_none(tmp_path: Path) -> None:
    (finished(tmp_path) / "journal.jsonl").write_bytes(b"\xff\xfe\n")
    assert parts_of(tmp_path).num_finished == 0


def test_a_file_in_the_folders_place_is_told(tmp_path: Path) -> None:
    (tmp_path / ".out.quantizing").write_text("mine")
    with pytest.raises(OutputError, match=r"cannot write .*\.out\.quantizing: File exists"):
        parts_of(tmp_path)
    assert (tmp_path / ".out.quantizing").read_text() == "mine"


def test_nf4_goes_through_a_file(tmp_path: Path) -> None:
    rows = Nf4Rows(torch.arange(16, dtype=torch.uint8).view(1, 16), torch.ones(1, 1))
    parts_of(tmp_path).add("blocks.0", {"blocks.0.q.weight": rows})
    found = parts_of(tmp_path).read("blocks.0")["blocks.0.q.weight"]
    assert isinstance(found, Nf4Rows)
    assert torch.equal(found.codes, rows.codes)
