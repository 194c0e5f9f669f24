"""The kernels' tests on the PTX that NVRTC makes of them, and the machine that runs it (ptx/) against the PTX ISA's own words,
torch's roundings and planted errors."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import test_kernel_gemm as gemm_tests
import test_kernel_packed_wgmma as wgmma_tests
import test_kernel_prefill_attention as prefill
from emulation import few_cases
from emulation.compare import close_to_rounding, random
from emulation.emulator import KernelFailed, missing_ptx
from emulation.quantized import quantized
from nanovllm_cli.kernels import norm
from nanovllm_cli.kernels.gemm import gemm
from ptx import device
from ptx.code import UnknownCode
from ptx.device import PtxMachine

pytestmark = pytest.mark.skipif(missing_ptx() is not None, reason=str(missing_ptx()))
HERE = Path(__file__).parent
BF16, FP16 = torch.bfloat16, torch.float16
TAKES_LONG = "takes most of a minute: run where CI is not set"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [90] if os.environ.get("CI") else [75, 90])
def test_kernels_run_as_ptx(capability: int) -> None:
    """One case of each test, for those GPUs with the most instructions of their own; for the oldest, of the kernels that copy and
    multiply otherwise there; in CI, of those with instructions that no other kernel has.
    `TEST_NANOVLLM_PTX=80 pytest tests/test_kernel_*.py` runs all, for any."""
    settings = {"TEST_NANOVLLM_PTX": str(capability), "TEST_NANOVLLM_CASES": "1"}
    files = sorted(HERE.glob("test_kernel_*.py"))
    if capability != 90:
        files = [HERE / f"test_kernel_{name}.py" for name in ("gemm", "packed_gemm", "decode_attention", "prefill_attention")]
    elif os.environ.get("CI"):
        files = [HERE / f"test_kernel_{name}.py" for name in ("packed_wgmma", "prefill_attention")]
    few_cases.run([str(file) for file in files], os.environ | settings)


@pytest.mark.timeout(600)
def test_an_engine_on_ptx_has_the_tokens_of_a_cpu() -> None:
    if os.environ.get("CI"):
        pytest.skip(TAKES_LONG)
    tests = [f"{HERE}/test_cuda_engine.py::test_greedy_tokens_are_those_of_the_cpu"]
    tests += [f"{HERE}/test_cuda_quantized.py::test_gguf_files_of_mixed_types"]
    few_cases.run(tests, os.environ | {"TEST_NANOVLLM_PTX": "90", "TEST_NANOVLLM_CASES": "2"})


# ---- errors planted in the PTX of real kernels ----


def gemm_is_right(machine: PtxMachine) -> None:
    x, weight = random(40, 136, dtype=BF16), random(33, 136, dtype=BF16)
    close_to_rounding(gemm(machine, x, weight, None, tile=gemm_tests.TINY), gemm_tests.product(x, weight))


def norm_is_right(machine: PtxMachine) -> None:
    x, weight = random(2, 1000, dtype=BF16), random(1000, dtype=BF16)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close_to_rounding(norm.add_rms_norm(machine, x, None, weight, 1e-5, 0.0), expected)


def prefill_is_right(machine: PtxMachine) -> None:
    case = prefill.case(*prefill.SMALL, 4, 2, 64, BF16)
    prefill.assert_close(case, prefill.run(case, machine))


def wgmma_is_right(machine: PtxMachine) -> None:
    weight, meaning = quantized(wgmma_tests.INT4, 70, 544)
    x = random(11, 544, dtype=BF16)
    got = wgmma_tests.run(machine, x, weight)
    close_to_rounding(got, wgmma_tests.product(x, meaning), wgmma_tests.ONE_IN_256)


SOUND = {"gemm": gemm_is_right, "norm": norm_is_right, "prefill": prefill_is_right, "wgmma": wgmma_is_right}
MMA = r"(mma\.sync\S+ \{[^}]*\},)"
PLANTED = {
    "rows of A exchanged": ("gemm", MMA + r"\{(%r\d+),(%r\d+),", r"\1{\3,\2,"),
    "B's halves exchanged": ("gemm", MMA + r"(\{[^}]*\},)\{(%r\d+),(%r\d+)\}", r"\1\2{\4,\3}"),
    "matrices not transposed": ("prefill", r"\.x4\.trans\.", ".x4."),
    "matrices transposed": ("gemm", r"ldmatrix(\S+)\.x4\.", r"ldmatrix\1.x4.trans."),
    "matrices exchanged": ("gemm", r"(ldmatrix\S+ )\{(%r\d+),(%r\d+),", r"\1{\3,\2,"),
    "a pair's halves exchanged": ("prefill", r"(cvt\.rn\.bf16x2\.f32 %r\d+, )(%f\d+), (%f\d+)", r"\1\3, \2"),
    "no barrier": ("gemm", r"bar\.sync\s+0;", ""),
    "no barrier in a sum": ("norm", r"bar\.sync\s+0;", ""),
    "no wait for copies": ("gemm", r"cp\.async\.wait_group \d+", "cp.async.wait_group 9"),
    "a lane's neighbour": ("norm", r"(shfl\.sync\.bfly\S+\s+\S+, \S+) [^,]+,", r"\1 0,"),
    "sums exchanged": ("wgmma", r"(wgmma\.mma_async\S+ )\{(%f\d+),(%f\d+),", r"\1{\3,\2,"),
    "B transposed": ("wgmma", r",1,1,1,0;", ",1,1,1,1;"),
    "sums read early": ("wgmma", r"wgmma\.wait_group\.sync\.aligned 0;", ""),
    "numbers written early": ("wgmma", r"wgmma\.wait_group\.sync\.aligned 1;", ""),
    "no fence": ("wgmma", r"fence\.proxy\.async\.shared::cta;", ""),
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("order", [0, 1, 7])
def test_sound_ptx_passes(name: str, order: int) -> None:
    SOUND[name](PtxMachine(order))


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_error_is_found(planted: str) -> None:
    name, pattern, by = PLANTED[planted]

    def change(ptx: str) -> str:
        changed, count = re.subn(pattern, by, ptx)
        assert count, "nothing to change"
        return changed

    with pytest.raises((AssertionError, KernelFailed)) as failed:
        SOUND[name](PtxMachine(change=change))
    assert not isinstance(failed.value, UnknownCode)
    assert "nothing to change" not in str(failed.value)


# ---- a few lines of PTX ----

HEADER = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry lines(.param .u64 data, .param .u64 out)
{
.shared .align 16 .b8 own[256];
.reg .b64 %in, %to, %at, %id, %t, %a, %b, %c, %d, %m, %n, %o, %s, %x, %y;
.reg .pred %p, %q;
ld.param.u64 %in, [data];
ld.param.u64 %to, [out];
mov.u32 %t, %tid.x;
cvt.u64.u32 %id, %t;
"""
OFFSETS = "shl.b64 %at, %id, 3;\nadd.s64 %in, %in, %at;\nadd.s64 %to, %to, %at;\nld.global.u64 %a, [%in];\n"


def run(lines: str, data: torch.Tensor, threads: int, order: int = 0, machine: PtxMachine | None = None) -> torch.Tensor:
    """What threads make of int64 [num]; they store to %to."""
    out, program = torch.full_like(data, -1), device.load(HEADER + lines + "ret;\n}\n", "lines")
    (machine or PtxMachine(order)).run("lines", program, (1, 1, 1), (threads, 1, 1), (data, out))
    return out


def each(instruction: str, values: torch.Tensor) -> torch.Tensor:
    """%d of an instruction on %a, for each value, as int64."""
    found = [
        run(OFFSETS + instruction + "\nst.global.u64 [%to], %d;\n", part.contiguous(), len(part))
        for part in values.to(torch.int64).split(1024)
    ]
    return torch.cat(found)


def one(instruction: str, a: int = 0) -> int:
    """The lower 64 bits of %d."""
    return int(each(instruction, torch.tensor([a], dtype=torch.int64))) & 0xFFFF_FFFF_FFFF_FFFF


SINGLE = {
    "prmt.b32 %d, 0x33221100, 0x77665544, 0x5140;": 0x55114400,
    "prmt.b32 %d, 0x80, 0x7f, 0xc8c8;": 0x00FF00FF,
    "bfi.b32 %d, 0xff, 0, 4, 6;": 0x3F0,
    "bfi.b32 %d, 0xff, 0x12345678, 28, 8;": 0xF2345678,
    "bfi.b64 %d, 1, 0, 40, 1;": 1 << 40,
    "shr.s32 %d, -8, 40;": 0xFFFFFFFF,
    "shr.u32 %d, -8, 40;": 0,
    "shl.b32 %d, 1, 32;": 0,
    "shr.s16 %d, 0x8000, 15;": 0xFFFF,
    "mul.hi.s32 %d, -2, 3;": 0xFFFFFFFF,
    "mul.hi.u32 %d, 0xfffffffe, 3;": 2,
    "mul.wide.s16 %d, -2, 3;": 0xFFFFFFFA,
    "mul.wide.u32 %d, 0xffffffff, 0xffffffff;": 0xFFFFFFFE00000001,
    "mad.lo.s32 %d, 0x10000, 0x10000, 5;": 5,
    "div.s32 %d, -7, 2;": 0xFFFFFFFD,
    "rem.s32 %d, -7, 2;": 0xFFFFFFFF,
    "clz.b32 %d, 0x00ffffff;": 8,
    "popc.b32 %d, 0x80f00001;": 6,
    "cvt.s32.s8 %d, 0x1ff; cvt.u32.u64 %d, %d;": 0xFFFFFFFF,
    "cvt.s8.s32 %x, -1; cvt.s64.s16 %d, %x;": 0xFFFFFFFFFFFFFFFF,
    "max.ftz.f32 %d, 0f80000000, 0f00000000;": 0,
    "min.ftz.f32 %d, 0f00000000, 0f80000000;": 0x80000000,
    "cvt.s64.s32 %d, 0x80000000;": 0xFFFFFFFF80000000,
    "cvt.rzi.ftz.s32.f32 %d, 0f4F000000;": 0x7FFFFFFF,
    "cvt.rzi.ftz.s32.f32 %d, 0fC0200000; cvt.u32.u64 %d, %d;": 0xFFFFFFFE,
    "cvt.rzi.ftz.s32.f32 %d, 0f7FC00000;": 0,
    "cvt.rni.ftz.s32.f32 %d, 0f40200000;": 2,
    "cvt.rzi.ftz.u64.f32 %d, 0fBF800000;": 0,
    "cvt.ftz.sat.f32.f32 %d, 0f40000000;": 0x3F800000,
    "cvt.ftz.sat.f32.f32 %d, 0f7FC00000;": 0,
    "cvt.rn.bf16x2.f32 %d, 0f3F800000, 0f40000000;": 0x3F804000,
    "cvt.rn.satfinite.e4m3x2.f32 %d, 0f447A0000, 0f3F800000;": 0x7E38,
    "add.ftz.f32 %d, 0f00000001, 0f80000002;": 0,
    "add.f32 %d, 0f00000001, 0f00000002;": 3,
    "mul.ftz.f32 %d, 0f00800000, 0f3F000000;": 0,
    "max.ftz.f32 %d, 0f7FC00000, 0fC0000000;": 0xC0000000,
    "copysign.f32 %d, 0fC0000000, 0f3F800000;": 0xBF800000,
    # 1 + 2^-23 times itself lies between 1 + 2^-22 and the next number up.
    "fma.rm.ftz.f32 %d, 0f3F800001, 0f3F800001, 0f00000000;": 0x3F800002,
    "fma.rm.ftz.f32 %d, 0fBF800001, 0f3F800001, 0f00000000;": 0xBF800003,
    # Half of 2^-23 and half of that.
    "add.rz.ftz.f32 %d, 0f3F800000, 0f33C00000;": 0x3F800000,
    "add.rz.ftz.f32 %d, 0fBF800000, 0fB3C00000;": 0xBF800000,
    # By 2^127, of which the quotients would be 2^-118 or so, and infinity.
    "div.approx.ftz.f32 %d, 0f43E00000, 0f7F000000;": 0,
    "div.approx.ftz.f32 %x, 0f7F800000, 0f7F000000; setp.nan.ftz.f32 %p, %x, %x; selp.u32 %d, 1, 0, %p;": 1,
    "ex2.approx.ftz.f32 %d, 0f80000000;": 0x3F800000,
    "fma.rn.bf16x2 %d, 0x40003f80, 0x3f803f80, 0x3f803c00;": 0x40403F81,
    "sub.f16x2 %d, 0x40003c00, 0x3c003c00;": 0x3C000000,
    "setp.lt.ftz.f32 %p, 0f7FC00000, 0f3F800000; selp.u32 %d, 1, 0, %p;": 0,
    "setp.ltu.ftz.f32 %p, 0f7FC00000, 0f3F800000; selp.u32 %d, 1, 0, %p;": 1,
    "setp.nan.ftz.f32 %p, 0f7FC00000, 0f3F800000; selp.u32 %d, 1, 0, %p;": 1,
    "setp.lt.s32 %p, -1, 1; selp.u32 %d, 1, 0, %p;": 1,
    "setp.lt.u32 %p, -1, 1; selp.u32 %d, 1, 0, %p;": 0,
    "mov.u32 %d, 1; setp.eq.s32 %p, 1, 1; @!%p mov.u32 %d, 2;": 1,
    "mov.b32 {%x, %y}, 0x00020001; mov.b32 %d, {%y, %x};": 0x00010002,
    "{.reg .b16 x; mov.b16 x, 7; cvt.u32.u16 %d, x;}": 7,
}


@pytest.mark.parametrize("lines", SINGLE)
def test_instruction_means_what_the_isa_says(lines: str) -> None:
    assert one(lines) == SINGLE[lines]


def of_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.to({2: torch.int16, 4: torch.int32}[dtype.itemsize]).view(dtype)


@pytest.mark.parametrize(("name", "dtype"), [("f16", FP16), ("bf16", BF16)])
def test_small_floats_round_as_torch_does(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=generator)
    bits[:65536:4] = bits[:65536:4] & ~0xFFF | 0x1000  # ties of half, and of bf16 in the next
    bits[1:65536:4] = bits[1:65536:4] & ~0xFFFF | 0x8000
    bits[2:65536:4] = 0x38000000 + bits[2:65536:4] % 0x4000000  # what half has few bits for
    floats = of_bits(bits, torch.float32)
    got = of_bits(each(f"cvt.rn.{name}.f32 %d, %a;", bits) & 0xFFFF, dtype)
    assert torch.equal(got.isnan(), floats.isnan())
    assert torch.equal(got.nan_to_num(7), floats.to(dtype).nan_to_num(7))


@pytest.mark.parametrize(("name", "dtype"), [("f16", FP16), ("bf16", BF16)])
def test_all_small_floats_are_read_as_torch_does(name: str, dtype: torch.dtype) -> None:
    bits = torch.arange(1 << 16)
    got = of_bits(each(f"cvt.f32.{name} %d, %a;", bits) & 0xFFFFFFFF, torch.float32)
    assert torch.equal(got.nan_to_num(7), of_bits(bits, dtype).float().nan_to_num(7))


def test_e4m3_is_read_and_rounded_as_torch_does() -> None:
    bits = torch.arange(1 << 8)
    values = bits.to(torch.uint8).view(torch.float8_e4m3fn).float()
    got = of_bits(each("cvt.rn.f16x2.e4m3x2 %d, %a;", bits) & 0xFFFF, FP16)
    assert torch.equal(got.float().nan_to_num(7), values.nan_to_num(7))
    floats = torch.linspace(-448, 448, 20_001)
    floats = torch.cat((floats, floats * 2**-10, (values + values.roll(-1)).nan_to_num(0).clamp(-448, 448) / 2))
    rounded = each("cvt.rn.satfinite.e4m3x2.f32 %d, 0f00000000, %a;", floats.view(torch.int32)) & 0xFF
    assert torch.equal(rounded, floats.to(torch.float8_e4m3fn).view(torch.uint8).long())


@pytest.mark.parametrize("name", ["ex2", "rsqrt", "rcp"])
def test_approximations_are_two_units_off(name: str) -> None:
    """What CUDA's guide says of them at worst, so that nothing counts on better ones."""
    numbers = torch.linspace(0.5, 20, 2001)
    exact = {"ex2": numbers.double().exp2(), "rsqrt": numbers.double().rsqrt(), "rcp": 1 / numbers.double()}[name]
    got = each(f"{name}.approx.ftz.f32 %d, %a;", numbers.view(torch.int32)) & 0xFFFFFFFF
    assert (got - exact.float().view(torch.int32)).unique().tolist() == [-2, -1, 0, 1, 2]


# a and b: words of A for each lane, columns up to 7 and from 8 on, and of B.
SUMS = """
shr.u64 %b, %a, 32;
cvt.u32.u64 %a, %a;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%m,%n,%o,%s}},{{%a,%a,%b,%b}},{{{b},{b}}},{{{c},{c},{c},{c}}};
cvt.u64.u32 %d, %m;
"""
TWO_TO_THE_12TH, TWO_TO_THE_13TH = 0x0C000C00, 0x08000800  # two halves of 2^-12, and of 2^-13


@pytest.mark.parametrize(
    ("words", "b", "c", "expected"),
    [
        ([TWO_TO_THE_12TH << 32 | TWO_TO_THE_12TH] * 32, TWO_TO_THE_12TH, "0f3F800000", 0x3F800008),  # 16 products of 2^-24
        ([TWO_TO_THE_12TH << 32 | TWO_TO_THE_12TH] * 32, TWO_TO_THE_13TH, "0f3F800000", 0x3F800000),  # each is cut off
        ([TWO_TO_THE_12TH, TWO_TO_THE_12TH & 0xFFFF, 0, 0] * 8, TWO_TO_THE_12TH, "0f3F800000", 0x3F800001),  # 1 + 1.5 * 2^-23
        ([TWO_TO_THE_12TH, TWO_TO_THE_12TH & 0xFFFF, 0, 0] * 8, TWO_TO_THE_12TH, "0fBF800000", 0xBF7FFFFD),  # 3 * 2^-24 - 1
        ([TWO_TO_THE_12TH << 32 | TWO_TO_THE_12TH] * 32, TWO_TO_THE_13TH, "0f00000000", 0x35000000),  # nothing larger
    ],
)
def test_tensor_cores_cut_off_what_they_add(words: list[int], b: int, c: str, expected: int) -> None:
    got = run(OFFSETS + SUMS.format(b=b, c=c) + "st.global.u64 [%to], %d;\n", torch.tensor(words), 32)
    assert got.tolist() == [expected] * 32


LANES = torch.arange(32)


@pytest.mark.parametrize(
    ("shuffle", "sources"),
    [
        ("bfly.b32 %d|%p, %a, 1, 0x1f, -1;", LANES ^ 1),
        ("bfly.b32 %d, %a, 8, 0x181f, -1;", LANES & ~8),  # past the end of segments of eight lanes: its own
        ("up.b32 %d|%p, %a, 3, 0, -1;", torch.where(LANES < 3, LANES, LANES - 3)),
        ("idx.b32 %d|%p, %a, 5, 0x1f, -1;", torch.full_like(LANES, 5)),
        ("idx.b32 %d|%p, %a, 1, 0x1c1f, -1;", LANES // 4 * 4 + 1),
    ],
)
def test_lanes_read_the_lane_that_the_isa_says(shuffle: str, sources: torch.Tensor) -> None:
    values = LANES * 3 + 100
    got = run(OFFSETS + f"shfl.sync.{shuffle}\nst.global.u64 [%to], %d;\n", values, 32)
    assert torch.equal(got, values[sources])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("setp.gt.u64 %p, %a, 122; vote.sync.ballot.b32 %d, %p, -1;", 0xFFFFFF00),
        ("setp.le.u64 %p, %a, 192; vote.sync.ballot.b32 %d, %p, -1;", 0x7FFFFFFF),
        ("xor.b32 %x, %a, 0x80000000; redux.sync.max.u32 %d, %x, -1;", 0x800000C1),
        ("sub.u32 %x, 100, %a; redux.sync.max.u32 %d, %x, -1;", 0xFFFFFFFF),
    ],
)
def test_lanes_vote_and_compare_as_the_isa_says(lines: str, expected: int) -> None:
    got = run(OFFSETS + lines + "\ncvt.u64.u32 %d, %d; st.global.u64 [%to], %d;\n", LANES * 3 + 100 + (LANES == 0), 32)
    assert got.tolist() == [expected] * 32


EXCHANGE = """
shl.b32 %o, %t, 2;
mov.u32 %s, own;
add.s32 %s, %s, %o;
st.shared.u32 [%s], %t;
{barrier}
xor.b32 %n, %o, {distance};
mov.u32 %m, own;
add.s32 %m, %m, %n;
ld.shared.u32 %d, [%m];
st.global.u64 [%to], %d;
"""


@pytest.mark.parametrize("order", [0, 1, 7])
def test_threads_that_meet_may_read_what_others_wrote(order: int) -> None:
    for barrier, distance in (("bar.sync 0;", 128), ("bar.sync 0;", 4), ("bar.warp.sync -1;", 4)):
        lines = OFFSETS + EXCHANGE.format(barrier=barrier, distance=distance)
        assert torch.equal(run(lines, torch.zeros(64, dtype=torch.int64), 64, order), torch.arange(64) ^ distance // 4)


COPY = "mov.u32 %s, own; shl.b32 %o, %t, 4; add.s32 %s, %s, %o;\ncp.async.cg.shared.global [%s], [%in], 16, 16;\n"
FORBIDDEN = {
    "a race": (EXCHANGE.format(barrier="", distance=4), "a race in shared memory"),
    "a race of warps": (EXCHANGE.format(barrier="bar.warp.sync -1;", distance=128), "a race in shared memory"),
    "other values in one place": ("st.shared.u32 [own], %t;", "writes what thread"),
    "written while others read": (
        "ld.shared.u32 %x, [own+4]; setp.eq.s32 %p, %t, 9; @%p st.shared.u32 [own+4], %t;", "writes what several threads read"
    ),
    "past shared memory": ("st.shared.u32 [own+256], %t;", "outside of the block's shared memory"),
    "past a tensor": ("st.global.u64 [%to+512], %t;", "outside of the launch's tensors"),
    "before a tensor": ("ld.global.u64 %x, [%to+-512];", "outside of the launch's tensors"),
    "null": ("mov.u64 %x, 0; ld.global.u32 %y, [%x];", "null pointer"),
    "no boundary": ("ld.global.u64 %x, [%in+4];", "no multiple"),
    "generic shared": ("cvta.shared.u64 %x, 512; ld.u32 %y, [%x];", "outside of the block's shared memory"),
    "a barrier that one misses": ("setp.eq.s32 %p, %t, 9; @%p bra $END; bar.sync 0; bra $END; $END: bar.sync 0;", "deadlock"),
    "a shuffle of some": (
        "setp.lt.s32 %p, %t, 9; @!%p bra $END; shfl.sync.bfly.b32 %d, %t, 1, 31, -1; bra $END; $END: bar.sync 0;", "deadlock"
    ),
    "a lane that is not there": ("setp.lt.s32 %p, %t, 9; @!%p ret; shfl.sync.idx.b32 %d, %t, 20, 31, -1;", "takes no part"),
    "a mask without oneself": ("shfl.sync.idx.b32 %d, %t, 0, 31, 1;", "a mask that leaves it out"),
    "no wait at the end": (COPY, "not waited for"),
    "read under way": (COPY + "ld.shared.u32 %d, [%s]; cp.async.commit_group; cp.async.wait_group 0;", "under way"),
    "read without a barrier": (
        COPY + "cp.async.commit_group; cp.async.wait_group 0; xor.b32 %o, %s, 16; ld.shared.u32 %d, [%o];", "under way|a race"
    ),
    "division by zero": ("div.u32 %d, %t, 0;", "does not define"),
    "a barrier with a number": ("bar.sync 1;", "a barrier with a number"),
    "a barrier of some threads": ("bar.sync 0, 64;", "a barrier of some threads"),
    "a barrier of some lanes": ("bar.warp.sync 0xffff;", "leaves it out|a barrier of some lanes"),
    "too few operands": ("cp.async.cg.shared.global [%s], [%in], 16;", "an operand that is not there"),
}


@pytest.mark.parametrize("order", [0, 1, 7])
@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_a_gpu_would_not_say_is_said(what: str, order: int) -> None:
    lines, message = FORBIDDEN[what]
    threads = 16 if lines.startswith(COPY) else 64  # which fill `own`
    with pytest.raises(KernelFailed, match=message):
        run(("" if lines.startswith(COPY) else OFFSETS) + lines, torch.zeros(64, dtype=torch.int64), threads, order)


@pytest.mark.parametrize("order", [0, 1, 7])
def test_a_warp_may_write_what_it_read_ahead_of_its_barrier(order: int) -> None:
    lines = "ld.shared.u32 %x, [own]; bar.warp.sync -1; setp.eq.s32 %p, %t, 0; @!%p bra $END; ld.shared.u32 %x, [own]; "
    run(lines + "st.shared.u32 [own], %x; $END: bar.sync 0;", torch.zeros(32, dtype=torch.int64), 32, order)


def test_all_lanes_may_write_the_same() -> None:
    run("st.shared.u32 [own], 5;", torch.zeros(64, dtype=torch.int64), 32)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("add.u33 %d, %t, 1;", "without a meaning: add.u33"), ("bra $NOWHERE;", r"no label \$NOWHERE"),
        ("mov.u32 %d, elsewhere;", "nothing declares: elsewhere"), ("ld.global.u32 %d, [%t+%t];", "an address like"),
        ("mov.u32 %d, %smid;", "nothing declares: %smid"), ("setp.lt.s32 %p|%q, %t, 1;", "two results"),
        ("cp.async.cg.shared.global [%s], [%in+16], 16, 16;", "an address with an offset"), (".loc 1 2 3\nret;", "line"),
        ("ld.global.v4.b64 {%a, %b, %c, %d}, [%in];", "more than 16 bytes"),
        ("!", "line"), ("{", "without an end"),
    ],
)  # fmt: skip
def test_unknown_code_is_refused(lines: str, message: str) -> None:
    with pytest.raises(UnknownCode, match=message):
        device.load(HEADER + lines + "\nret;\n}\n", "lines")


def test_an_entry_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnknownCode, match="no entry other"):
        device.load(HEADER + "ret;\n}\n", "other")
