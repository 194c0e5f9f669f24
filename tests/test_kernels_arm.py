"""The CPU's kernels for 64-bit ARM, on any machine: what is read of the processor, what is built and what it computes."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

import arm_intrinsics
import other_processor
from nanovllm_cli import system
from nanovllm_cli.kernels import arm_features, simd, simd_int, simd_ir, simd_products
from nanovllm_cli.kernels.simd_ir import I64, LANES, VI

# The systems' own lines
RASPBERRY_PI_4 = "fp asimd evtstrm crc32 cpuid"
RASPBERRY_PI_5 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
GRAVITON_3 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 asimddp "
    "sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs paca pacg dcpodp svei8mm svebf16 i8mm bf16 dgh rng"
)
X86 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu vme avx2 asimddp\n"


def cpuinfo(*features: str) -> str:
    return "".join(f"processor\t: {i}\nFeatures\t: {line}\nCPU part\t: 0xd0b\n\n" for i, line in enumerate(features))


@pytest.mark.parametrize(
    ("text", "added"),
    [
        (cpuinfo(RASPBERRY_PI_4), ",-dotprod,-i8mm"),
        (cpuinfo(RASPBERRY_PI_5, RASPBERRY_PI_5), ",+dotprod,-i8mm"),
        (cpuinfo(GRAVITON_3), ",+dotprod,+i8mm"),
        (cpuinfo(GRAVITON_3, RASPBERRY_PI_5), ",+dotprod,-i8mm"),
        (cpuinfo("fp asimd svei8mm"), ",-dotprod,-i8mm"),
        (X86, ""),
        ("", ""),
        ("Features", ""),
    ],
)
def test_what_multiplies_bytes_is_read_from_the_systems_features(text: str, added: str) -> None:
    assert arm_features.described(system.arm_features_in(text), "+neon,-sve") == f"+neon,-sve{added}"


def test_a_mac_of_which_llvm_knows_but_the_name_has_its_features_too() -> None:
    """M1 and M2: `llvm::sys::getHostCPUFeatures` has nothing for macOS on ARM."""
    assert arm_features.described({"asimd", "asimddp"}, "") == "+neon,+dotprod,-i8mm"
    assert arm_features.described({"asimd", "asimddp", "i8mm"}, "") == "+neon,+dotprod,+i8mm"
    assert arm_features.described(None, "") == ""


def test_llvm_need_not_know_any_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("failed to get host cpu features.")  # as llvmlite did until LLVM 20

    monkeypatch.setattr(llvm, "get_host_cpu_features", fails)
    monkeypatch.setattr(system, "arm_features", lambda: {"asimd", "asimddp"})
    assert arm_features.of_this_processor() == "+neon,+dotprod,-i8mm"


# ---- products, built for ARM and run on this processor ----


@pytest.mark.parametrize(("dot", "mixed"), [(False, False), (True, False), (True, True)], ids=["neon", "dotprod", "i8mm"])
@pytest.mark.parametrize("small", [True, False])
def test_sums_of_products_are_exact(small: bool, dot: bool, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limits too: 255 * 127, all of one sign; with 16-bit sums in between, two products of -128 * 127."""
    monkeypatch.setattr(simd_products, "NEON", True)
    monkeypatch.setattr(simd_products, "_ARM_DOT", dot)
    monkeypatch.setattr(simd_products, "_ARM_MIXED_DOT", mixed)
    monkeypatch.setattr(simd_products, "known_function", arm_intrinsics.known_function)
    products = simd_products.products_of(small)
    most = simd_products.MOST_SMALL if small else 255
    generator = np.random.default_rng(0)
    for codes, x in (
        *((np.full(64, code, np.uint8), np.full(64, one, np.int8)) for code in (0, most) for one in (-127, 127)),
        (generator.integers(0, most + 1, 64).astype(np.uint8), generator.integers(-127, 128, 64).astype(np.int8)),
    ):
        acc = generator.integers(-(1 << 30), 1 << 30, LANES).astype(np.int32)
        taken = codes.astype(np.int64) - products.bias
        expected = acc + (taken * x).reshape(LANES, 4).sum(1)
        with added_up(products) as add:
            add(acc.ctypes.data, codes.ctypes.data, x.ctypes.data)
        assert (acc == expected).all()


@contextmanager
def added_up(products: simd_products.Products) -> Iterator[Callable[[int, int, int], None]]:
    """add(acc, codes, x): one vector of dots at an address, plus its products."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 3), "add")
    b = ir.IRBuilder(function.append_basic_block())
    acc, codes, x = (b.inttoptr(address, VI.as_pointer()) for address in function.args)
    dots = {(0, 0): b.load(acc, align=4)}
    new = products.add(b, dots, 0, lambda *_: b.load(codes, align=1), lambda *_: b.load(x, align=1))
    b.store(new[0, 0], acc, align=4)
    b.ret_void()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    compiled = llvm.parse_assembly(str(module))
    compiled.verify()
    with llvm.create_mcjit_compiler(compiled, llvm.Target.from_default_triple().create_target_machine(jit=True)) as engine:
        engine.finalize_object()
        yield ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(engine.get_function_address("add"))


def test_kernels_for_arm_compute_what_they_compute_here() -> None:
    """All of them, with codes - 128 where there is but `sdot`."""
    instructions = Path(arm_intrinsics.__file__)
    program = instructions.with_name("arm_cpu.py")
    settings = other_processor.kept({"NUMBA_CPU_FEATURES": "+neon,+dotprod"}, instructions, program)
    command = [sys.executable, str(program), other_processor.__file__]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["bf16 dot"], found["wide"], found["byte dot"]) == (False, False, True)
    assert found["integers"] == other_processor.integers()
    assert found["floats"] < 1e-6
    assert found["attention"] < 4e-3
    assert found["values"] < 3e-3


# ---- what LLVM makes of the inner loops ----

LINUX, MACOS = "aarch64-linux-gnu", "arm64-apple-macosx"
CORTEX_A76, NEOVERSE_V1 = (LINUX, "cortex-a76", "+neon,+dotprod"), (LINUX, "neoverse-v1", "+neon,+dotprod,+i8mm")
APPLE_M1, APPLE_M2 = (MACOS, "apple-m1", "+neon,+dotprod,-i8mm"), (MACOS, "apple-m2", "+neon,+dotprod,+i8mm")


@pytest.fixture
def built_for_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (simd_ir, simd, simd_products):
        monkeypatch.setattr(module, "NEON", True)
    monkeypatch.setattr(simd, "WIDE", False)
    monkeypatch.setattr(simd_int, "FEW_ROWS", 0)


@pytest.mark.usefixtures("built_for_arm")
@pytest.mark.parametrize(
    ("processor", "dot"), [(CORTEX_A76, "sdot"), (NEOVERSE_V1, "usdot"), (APPLE_M1, "sdot"), (APPLE_M2, "usdot")]
)
@pytest.mark.parametrize("rows", range(1, 7))
def test_products_of_bytes_are_one_instruction_each_in_registers(
    rows: int, processor: tuple[str, str, str], dot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simd_products, "_ARM_DOT", True)
    monkeypatch.setattr(simd_products, "_ARM_MIXED_DOT", dot == "usdot")
    vectors = simd_int.tiles(wide=False, neon=True, byte_dot=True)[rows]
    loop = inner_loop(lambda b, args: simd_int._write_tile(b, rows, vectors, 1, 1, *args), 14, *processor)
    assert Counter(re.match(r"\w+", line)[0] for line in loop)[dot] == 4 * rows * vectors
    assert not touching_the_stack(loop)


@pytest.mark.usefixtures("built_for_arm")
@pytest.mark.parametrize("products", [simd._WIDENED, simd._FLOATS], ids=["bf16", "f32"])
@pytest.mark.parametrize("processor", [CORTEX_A76, APPLE_M1], ids=["cortex-a76", "apple-m1"])
@pytest.mark.parametrize("rows", range(1, 7))
def test_sums_stay_in_registers_and_activations_come_from_a_lane(
    rows: int, processor: tuple[str, str, str], products: simd._Products
) -> None:
    vectors = {1: 4, 2: 2}.get(rows, 1)
    _, code = simd._make_tile(rows, vectors, products, False, False)._defn(None, *[None] * 12)
    loop = inner_loop(lambda b, args: code(SimpleNamespace(get_dummy_value=lambda: None), b, None, args), 12, *processor)
    multiplied = [line for line in loop if line.startswith("fmla")]
    assert len(multiplied) == 4 * rows * vectors * len(products)
    assert all(line.endswith("[0]") for line in multiplied), "from one lane: none was spread by an instruction of its own"
    assert not touching_the_stack(loop)


def touching_the_stack(lines: list[str]) -> list[str]:
    return [line for line in lines if "[sp" in line]


def inner_loop(write: Callable[[ir.IRBuilder, list[Any]], object], num_arguments: int, *processor: str) -> list[str]:
    """The instructions of the longest loop without another one in it."""
    assembly = built_for(write, num_arguments, *processor)
    loops: list[list[str]] = []
    for block in re.split(r"^(?=\.?LBB\w+:)", assembly, flags=re.MULTILINE):
        label, *lines = (line.strip() for line in block.splitlines())
        back = [i for i, line in enumerate(lines) if re.fullmatch(rf"b\.\w+\s+{re.escape(label.split(':')[0])}", line)]
        loops += [[line for line in lines[: i + 1] if line[0].isalpha()] for i in back]
    return max(loops, key=len)


def built_for(
    write: Callable[[ir.IRBuilder, list[Any]], object], num_arguments: int, triple: str, cpu: str, features: str
) -> str:
    """What LLVM makes of a loop, as text."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * num_arguments), "tile")
    b = ir.IRBuilder(function.append_basic_block())
    write(b, list(function.args))
    b.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3)
    built = llvm.parse_assembly(str(module))
    built.triple, built.data_layout = target.triple, str(target.target_data)
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(built, passes)
    return str(target.emit_assembly(built))
