"""Kernels compiled by NVRTC, without a GPU; and the cache of what it made."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest

from nanovllm_cli import folders
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import compiler, cpu, norm
from nanovllm_cli.kernels.compiler import Compiled
from nanovllm_cli.kernels.kernel import Kernel

pytest.importorskip("cupy")
KERNEL = norm.variants()[0]
ELF = b"\x7fELF"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nanovllm" / "cuda"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that the compiler, rather than the cache, had to make."""
    made: list[Kernel] = []
    genuine = compiler._compile

    def counted(source: str, kernel: Kernel, *rest: object) -> tuple[bytes, str]:
        made.append(kernel)
        return genuine(source, kernel, *rest)

    monkeypatch.setattr(compiler, "_compile", counted)
    return made


def entry(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


def test_machine_code_and_what_it_takes(cache: Path) -> None:
    cubin, resources = compiler.compile(KERNEL, "sm_90a")
    assert cubin.startswith(ELF)
    assert KERNEL.entry.encode() in cubin
    assert 16 <= resources.registers <= 64  # 1024 threads a block leave 64
    assert resources == (resources.registers, 128, 0, 0)


def test_second_compilation_comes_from_the_cache(cache: Path, compilations: list[Kernel]) -> None:
    first = compiler.compile(KERNEL, "sm_80")
    assert compiler.compile(KERNEL, "sm_80") == first
    assert len(compilations) == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry(cache).stat().st_mode) == 0o600


def test_a_relative_cache_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As XDG asks: code would lie in whatever folder a command is called from, and be missed in all others."""
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)
    monkeypatch.chdir(tmp_path)
    compiler.compile(KERNEL, "sm_80")
    cpu._use_own_cache_folder()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert len(list((tmp_path / "home/.cache/nanovllm/cuda").iterdir())) == 1
    assert numba.config.CACHE_DIR.startswith(str(tmp_path / "home/.cache/nanovllm/kernels/"))


@pytest.mark.parametrize("change", ["architecture", "constants", "options", "header", "source", "driver", "entry"])
def test_whatever_changes_the_result_names_another_entry(
    change: str, cache: Path, compilations: list[Kernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("norm.cu", "common.cuh"):
        (sources / name).write_text((compiler.SOURCES / name).read_text())
    monkeypatch.setattr(compiler, "SOURCES", sources)
    kernel, arch, extra = KERNEL, "sm_90a", ()
    compiler.compile(kernel, arch, extra)
    if change == "architecture":
        arch = "sm_80"
    elif change == "constants":
        kernel = norm.variants()[1]
    elif change == "options":
        extra = ("-DPDL",)
    elif change == "header":
        (sources / "common.cuh").write_text((sources / "common.cuh").read_text() + "// new")
    elif change == "source":
        (sources / "norm.cu").write_text((sources / "norm.cu").read_text() + "// new")
    elif change == "driver":
        newer = compiler.toolchain()._replace(driver_version="99.0")
        monkeypatch.setattr(compiler, "toolchain", lambda: newer)
    elif change == "entry":
        text = (sources / "norm.cu").read_text().replace("add_rms_norm", "renamed")
        (sources / "norm.cu").write_text(text)
        kernel = kernel._replace(entry="renamed")
    compiler.compile(kernel, arch, extra)
    assert len(compilations) == 2
    assert len(list(cache.iterdir())) == 2


def test_header_that_a_kernel_does_not_include_is_nothing_to_it(tmp_path: Path) -> None:
    for name, text in (("a.cu", '#include "b.cuh"\n#include <cuda_fp16.h>'), ("b.cuh", '  x\n#include "c.cuh"'), ("c.cuh", "")):
        (tmp_path / name).write_text(text)
    before = compiler.read_sources(tmp_path / "a.cu", tmp_path)
    assert list(before) == ["a.cu", "b.cuh", "c.cuh"]
    (tmp_path / "d.cuh").write_text("// new")
    assert compiler.read_sources(tmp_path / "a.cu", tmp_path) == before


def test_programmatic_launch_compiles_to_other_code(cache: Path) -> None:
    assert compiler.compile(KERNEL, "sm_90a").cubin != compiler.compile(KERNEL, "sm_90a", ("-DPDL",)).cubin


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGE = {
    "empty": lambda content: b"",
    "cut short": lambda content: content[:-1],
    "cut in the checksum": lambda content: content[:40],
    "a bit in the code": lambda content: flip(content, len(content) // 2),
    "a bit in the resources": lambda content: flip(content, content.index(b"\n[") + 2 if b"\n[" in content else 85),
    "a bit in the checksum": lambda content: flip(content, 30),
    "another program's": lambda content: ELF + content,
    "text": lambda content: b"x" * 5000,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_broken_entry_is_built_again(damage, cache: Path, compilations: list[Kernel]) -> None:
    first = compiler.compile(KERNEL, "sm_80")
    path = entry(cache)
    sound = path.read_bytes()
    path.write_bytes(damage(sound))
    assert compiler.compile(KERNEL, "sm_80") == first
    assert len(compilations) == 2
    assert entry(cache).read_bytes() == sound


def test_entry_under_another_name_is_not_used(cache: Path, compilations: list[Kernel]) -> None:
    compiler.compile(norm.variants()[1], "sm_80")
    other = entry(cache).read_bytes()
    first = compiler.compile(KERNEL, "sm_80")
    (path,) = (path for path in cache.iterdir() if path.read_bytes() != other)
    path.write_bytes(other)
    assert compiler.compile(KERNEL, "sm_80") == first
    assert len(compilations) == 3


def test_entry_that_others_may_write_is_not_used(cache: Path, compilations: list[Kernel]) -> None:
    compiler.compile(KERNEL, "sm_80")
    entry(cache).chmod(0o666)
    compiler.compile(KERNEL, "sm_80")
    assert len(compilations) == 2
    assert stat.S_IMODE(entry(cache).stat().st_mode) == 0o600


def test_folder_that_others_may_write_is_not_used(cache: Path, compilations: list[Kernel]) -> None:
    compiler.compile(KERNEL, "sm_80")
    cache.chmod(0o777)
    written = entry(cache).stat().st_mtime_ns
    compiler.compile(KERNEL, "sm_80")
    assert len(compilations) == 2
    assert entry(cache).stat().st_mtime_ns == written


def test_links_and_files_of_other_users_are_not_used(
    cache: Path, compilations: list[Kernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(KERNEL, "sm_80")
    path = entry(cache)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    compiler.compile(KERNEL, "sm_80")
    assert len(compilations) == 2
    assert not path.is_symlink()
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    compiler.compile(KERNEL, "sm_80")
    assert len(compilations) == 3


def test_cache_that_can_not_be_written_is_no_error(cache: Path, compilations: list[Kernel]) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder would be")
    assert compiler.compile(KERNEL, "sm_80") == compiler.compile(KERNEL, "sm_80")
    assert len(compilations) == 2


@pytest.mark.parametrize(("version", "asked"), [("12.8", False), ("12.9", True), ("13.0", True)])
def test_machine_code_does_not_come_out_of_the_drivers_cache(version: str, asked: bool, cache: Path) -> None:
    """Which NVRTC reads from 12.9 on, where there is a driver; before, it does not know the option. What comes from there has no
    log of ptxas, and cost the shared memory of a kernel, and so all that would run it."""
    given: list[str] = []
    log = "Compiling entry function 'add_rms_norm' 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads,"
    log += "Used 9 registers"
    nvrtc = SimpleNamespace(
        NVRTCError=RuntimeError, getSupportedArchs=lambda: [80], createProgram=lambda *args: 1,
        compileProgram=lambda program, options: given.extend(options), getCUBIN=lambda program: ELF, destroyProgram=id,
        getProgramLog=lambda program: log if "--no-cache" in given or version < "12.9" else "",
    )  # fmt: skip
    tools = compiler.toolchain()._replace(nvrtc=nvrtc, nvrtc_version=version)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "toolchain", lambda: tools)
        assert compiler.compile(KERNEL, "sm_80").resources.registers == 9
    assert ("--no-cache" in given) == asked


def test_full_disk_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert isinstance(compiler.compile(KERNEL, "sm_80"), Compiled)
    assert list(cache.iterdir()) == []


def test_entries_that_nobody_has_used_for_long_are_removed(
    cache: Path, compilations: list[Kernel]
) -> None:
    long_ago = time.time() - 91 * 86_400
    compiler.compile(KERNEL, "sm_80")
    (used,) = cache.iterdir()
    for path in (used, cache / ("0" * 64), cache / "notes"):
        path.touch()
        os.utime(path, (long_ago, long_ago))
    folders.remove_unused.cache_clear()
    compiler.compile(KERNEL, "sm_80")  # from the cache
    compiler.compile(KERNEL, "sm_90a")
    assert len(compilations) == 2
    assert used.exists()
    assert len(list(cache.iterdir())) == 3, "the two and the notes"


def test_kernel_that_does_not_compile_says_where(cache: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"add_rms_norm<DTYPE=nothing> .*sm_80.*: .*norm\.cu.* error: .*nothing"):
        compiler.compile(Kernel("norm", "add_rms_norm", (("DTYPE", "nothing"),)), "sm_80")
    assert not cache.exists()


def test_architecture_that_the_compiler_does_not_know(cache: Path) -> None:
    with pytest.raises(UnsupportedError, match="knows no sm_70") as raised:
        compiler.compile(KERNEL, "sm_70")
    assert "pip install" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("capability", "name"), [(75, "sm_75"), (89, "sm_89"), (90, "sm_90a"), (100, "sm_100a"), (120, "sm_120")]
)
def test_architecture_of_a_device(capability: int, name: str) -> None:
    assert compiler.architecture(capability) == name


def test_missing_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.toolchain.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(UnsupportedError, match="CuPy") as raised:
        compiler.toolchain()
    assert raised.value.hint == "pip install 'nanovllm-cli[cuda13]'"


def test_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    compiler.toolchain.cache_clear()
    monkeypatch.setattr("cupy.cuda.nvrtc", SimpleNamespace(getVersion=missing))
    with pytest.raises(UnsupportedError, match="libnvrtc") as raised:
        compiler.toolchain()
    assert "nvidia-cuda-nvrtc" in str(raised.value.hint)


def test_compiler_that_cupy_does_not_find_is_loaded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import nvrtc

    answers = [RuntimeError("CuPy failed to load libnvrtc.so.13"), nvrtc.getVersion()]

    def version() -> tuple[int, int]:
        answer = answers.pop(0)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    loaded: list[str] = []
    monkeypatch.setattr("ctypes.CDLL", loaded.append)
    assert compiler._version_of(SimpleNamespace(getVersion=version)) == nvrtc.getVersion()
    assert all("libnvrtc" in name for name in loaded)


def test_what_the_compiler_opens_by_name_is_loaded_from_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel of NVRTC 13.0.88 has no run path: `failed to open libnvrtc-builtins.so.13.0`, at the first kernel."""
    from cupy.cuda import nvrtc

    compiler.toolchain()  # loads it
    major, minor = nvrtc.getVersion()
    loaded: list[str] = []
    monkeypatch.setattr("ctypes.CDLL", loaded.append)
    assert compiler._version_of(nvrtc) == (major, minor)
    assert [Path(name).name for name in loaded] == [f"libnvrtc-builtins.so.{major}.{minor}"]
    assert list(Path(loaded[0]).parent.glob(f"libnvrtc.so.{major}*"))


def test_headers_are_found_where_a_toolkit_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    major = int(compiler.toolchain().nvrtc_version.split(".")[0])
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / compiler.HEADER).touch()
    monkeypatch.setattr(compiler, "_places", lambda package: [])
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda name: None)
    for found in (major, major - 1):  # headers of another version are none
        (tmp_path / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {found}020\n")
        compiler.toolchain.cache_clear()
        if found == major:
            assert compiler.toolchain().folders[0] == tmp_path / "include"
            assert compiler.toolchain().headers_version == f"{major}.2"
        elif not compiler._headers_version(Path("/usr/local/cuda/include"))[0]:
            with pytest.raises(UnsupportedError, match=f"no headers of CUDA {major}") as raised:
                compiler.toolchain()
            assert "nvidia-cuda-runtime" in str(raised.value.hint)
            assert "CUDA_PATH" in str(raised.value.hint)


@pytest.fixture(autouse=True)
def genuine_toolchain_afterwards():
    yield
    compiler.toolchain.cache_clear()
