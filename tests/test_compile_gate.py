"""No kernel spills, and kernel_resources.json says what each takes. A few are compiled here: `make kernels` has compiled all that
changed since the table was made."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path

import pytest

from conftest import TURN

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import kernel_resources as gate
from nanovllm_cli.kernels import compiler, decode_attention, packed_wgmma
from nanovllm_cli.kernels.compiler import Resources
from nanovllm_cli.kernels.kernel import SOURCES, Kernel, read_sources

pytest.importorskip("cupy")
JOBS = gate.jobs()
SPILLING = """
#include "common.cuh"
// More live numbers than the 64 registers that 1024 threads leave each.
KERNEL __launch_bounds__(1024) spilling(float* data) {
  float kept[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) kept[i] = data[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) data[threadIdx.x + 1024 * i] = kept[(7 * i + 1) % 96] * kept[i];
}
"""


def some() -> list[tuple[Kernel, int]]:
    """Of each source a job, any variant on any architecture: in CI another with each commit."""
    turn = os.environ.get(TURN, "0")
    jobs = sorted(JOBS, key=lambda job: hashlib.sha256(f"{turn}{gate.name(*job)}".encode()).digest())
    return list({kernel.stem: (kernel, capability) for kernel, capability in jobs}.values())


def test_every_source_is_in_some_modules_variants() -> None:
    assert {kernel.stem for kernel, _ in JOBS} == {source.stem for source in SOURCES.glob("*.cu")}
    assert len(set(JOBS)) == len(JOBS)


def test_table_has_every_kernel_on_every_architecture() -> None:
    names = {gate.name(kernel, capability) for kernel, capability in JOBS}
    assert gate.read().kernels.keys() == names, "run python scripts/kernel_resources.py --write"


def test_table_knows_a_kernel_by_all_that_its_code_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known isn't compiled again by `make kernels`."""
    for file in SOURCES.glob("norm.cu"), SOURCES.glob("*.cuh"):
        for source in file:
            (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(gate, "SOURCES", tmp_path)
    digest, (kernel, capability) = gate.digest.__wrapped__, next(job for job in JOBS if job[0].stem == "norm")
    name, before = gate.name(kernel, capability), digest("norm")
    assert before == gate.digest("norm")
    table = gate.Table("13.5", {"norm": before}, {name: Resources(1, 2, 3, 4)})
    assert gate.is_known(table, kernel, capability)
    assert not gate.is_known(table._replace(kernels={}), kernel, capability)
    assert not gate.is_known(table._replace(sources={"norm": "another"}), kernel, capability)
    for changed in "norm.cu", "common.cuh":
        text = (tmp_path / changed).read_text()
        (tmp_path / changed).write_text(text + "\n")
        assert digest("norm") != before
        (tmp_path / changed).write_text(text)
    tools = compiler.toolchain()
    for other in tools._replace(nvrtc_version="1.0"), tools._replace(headers_version="1.0"):
        monkeypatch.setattr(compiler, "toolchain", lambda other=other: other)
        assert digest("norm") != before
    monkeypatch.setattr(compiler, "toolchain", lambda: tools)
    monkeypatch.setattr(compiler, "OPTIONS", ("-O0",))
    assert digest("norm") != before


def test_nothing_in_the_table_spills() -> None:
    assert gate.spilling(gate.read().kernels) == []


def test_kernels_take_what_the_table_says() -> None:
    """Where another compiler is installed, such as the older one that torch's CUDA builds bring, all the same compile."""
    resources, errors = gate.measure(some())
    table, nvrtc = gate.read(), compiler.toolchain().nvrtc_version
    expected = table._replace(kernels={name: taken for name, taken in table.kernels.items() if name in resources})
    assert errors == []
    assert gate.differences(expected, resources, nvrtc) == [], "see scripts/kernel_resources.py"
    assert nvrtc != table.nvrtc or gate.spilling(resources) == []


def test_spills_are_seen(tmp_path: Path) -> None:
    (tmp_path / "spilling.cu").write_text(SPILLING)
    kernel = Kernel(str(tmp_path / "spilling"), "spilling", ())
    resources, errors = gate.measure([(kernel, 80)])
    assert errors == []
    (taken,) = resources.values()
    assert taken.spills > 0
    assert taken.registers == 64
    assert len(gate.spilling(resources)) == 1


def test_kernel_that_does_not_compile_is_seen(tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text("nothing")
    resources, errors = gate.measure([(Kernel(str(tmp_path / "broken"), "broken", ()), 80)])
    assert resources == {}
    assert len(errors) == 1


@pytest.mark.parametrize("index", [0, 11, 19], ids=["int4", "int8", "nf4"])
def test_products_of_warpgroups_read_registers_that_were_made_before_their_fence(index: int) -> None:
    """PTX ISA, wgmma.fence: else what they read is undefined. ptxas mends it, by ending a group of products early."""
    written = written_behind_the_fence(packed_wgmma.variants()[index])
    assert len(written) == 4, "two halves of two products"
    assert not set().union(*written)


def test_registers_made_behind_the_fence_are_seen() -> None:
    nf4 = packed_wgmma.variants()[19]
    written = written_behind_the_fence(nf4._replace(constants=(*nf4.constants, ("BUG_LATE_NUMBERS", 1))))
    assert any(written)


def written_behind_the_fence(kernel: Kernel) -> list[set[str]]:
    """Of each wgmma, in order, the registers of A and of its sums that PTX gives a value between the last fence and it."""
    found, written = [], None
    for line in ptx(kernel).splitlines():
        line = line.strip()
        product = re.match(r"wgmma\.mma_async\S+ \{([^}]*)\}, ?\{([^}]*)\},", line)
        if product:
            assert written is not None, "no fence before the first product"
            found.append(written & set(re.findall(r"%\w+", product[1] + "," + product[2])))
        elif line.startswith("wgmma.fence"):
            written = set()
        elif written is not None and (target := re.match(r"(?:@!?%\w+ )?[a-z][\w.:]*\s+(\{[^}]*\}|%\w+)", line)):
            written.update(re.findall(r"%\w+", target[1]))
    return found


@pytest.mark.parametrize("index", [3, -1], ids=["tensor cores", "CUDA cores"])
def test_lengths_and_block_tables_are_read_past_the_l1_until_the_kernel_ahead_has_ended(index: int) -> None:
    """What else is read by then and not past the L1, in longer loads, are gains."""
    text = ptx(decode_attention.variants()[index], "-DPDL")
    before = text[: text.rindex("griddepcontrol.wait")]
    assert re.search(r"ld\.global\.cg\.s32", before)
    assert not re.search(r"ld\.global\.[a-z]32\s", before)


def ptx(kernel: Kernel, *more: str) -> str:
    tools, name = compiler.toolchain(), f"{kernel.stem}.cu"
    program = tools.nvrtc.createProgram(read_sources(SOURCES / name, SOURCES)[name], name, (), ())
    options = [option for option in compiler.OPTIONS if "ptxas" not in option] + [*kernel.defines, *more, "-arch=compute_90a"]
    folders = [f"-I{folder}" for folder in (SOURCES, *tools.folders)]
    try:
        tools.nvrtc.compileProgram(program, (*options, *folders))
        return tools.nvrtc.getPTX(program).decode()
    finally:
        tools.nvrtc.destroyProgram(program)


def test_differences_are_told() -> None:
    taken, more = Resources(32, 128, 0, 0), Resources(40, 128, 0, 0)
    table = gate.Table("13.5", {}, {"a": taken, "gone": taken, "changed": taken})
    measured = {"a": taken, "changed": more, "new": taken}
    complaints = gate.differences(table, measured, "13.5")
    assert [line.split()[0] for line in complaints] == ["new", "gone", "changed"]
    # Another compiler allots registers its own way.
    assert [line.split()[0] for line in gate.differences(table, measured, "13.6")] == ["new", "gone"]


def test_table_is_written_a_line_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "TABLE", tmp_path / "table.json")
    table = gate.Table("13.5", {"x": "1f", "y": "2e"}, {"b": Resources(1, 2, 3, 4), "a<X=1>": Resources(5, 6, 7, 8)})
    gate.write(table)
    lines = gate.TABLE.read_text().splitlines()
    assert [line for line in lines if "registers" in line] == [
        '"a<X=1>": {"registers": 5, "shared": 6, "stack": 7, "spills": 8},',
        '"b": {"registers": 1, "shared": 2, "stack": 3, "spills": 4}',
    ]
    assert json.loads("\n".join(lines))["nvrtc"] == "13.5"
    assert gate.read() == table
