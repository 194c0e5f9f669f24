"""Outputs that appear whole or not at all, and files of both formats written in slices."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from gguf.constants import GGMLQuantizationType

from nanovllm_cli.errors import CheckpointError, DoesNotFitError, OutputError, UsageError
from nanovllm_cli.quant.gguf_types import TENSOR_TYPES
from nanovllm_cli.weights.gguf_writer import GGUFPartWriter, GGUFTensor, HeaderBuilder
from nanovllm_cli.weights.writer import (
    OutputFile,
    OutputFolder,
    SafetensorsWriter,
    TensorOut,
    check_replaceable,
    check_room,
    index_file,
    shards,
)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_has_its_name_only_when_it_is_committed(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    with OutputFile(target) as output:
        output.file.write(b"whole")
        assert names(tmp_path) == [".model.gguf.partial"]
        output.commit()
    assert names(tmp_path) == ["model.gguf"]
    assert target.read_bytes() == b"whole"


def test_nothing_stays_of_what_was_not_committed(tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), OutputFile(tmp_path / "a") as output:
        output.file.write(b"half")
        raise KeyboardInterrupt
    with contextlib.suppress(KeyboardInterrupt), OutputFolder(tmp_path / "b") as folder:
        folder.write("additional_chat_templates/x.jinja", b"half")
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_what_exists_is_replaced_only_when_asked(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.write_bytes(b"old")
    with pytest.raises(UsageError, match="exists already"):
        OutputFile(target)
    with OutputFile(target, replace=True) as output:
        output.file.write(b"new")
        assert target.read_bytes() == b"old"
        output.commit()
    assert target.read_bytes() == b"new"


def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with OutputFile(target) as output:
        output.file.write(b"ours")
        target.write_bytes(b"theirs")
        with pytest.raises(UsageError, match="exists already"):
            output.commit()
    assert target.read_bytes() == b"theirs"
    assert names(tmp_path) == ["model"]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for number in ("1", "2"):
        with OutputFolder(target, replace=True) as output:
            output.write("config.json", number.encode())
            output.write(f"only-{number}.json", b"{}")
            output.commit()
    assert names(tmp_path) == ["model"]
    assert names(target) == ["config.json", "only-2.json"]


@pytest.mark.parametrize("extra", ["thesis.docx", "src"])
def test_a_folder_with_anything_else_in_it_is_never_replaced(tmp_path: Path, extra: str) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.json").write_text("{}")
    check_replaceable(tmp_path / "home")
    (tmp_path / "home" / extra).mkdir()
    with pytest.raises(UsageError, match=extra):
        OutputFolder(tmp_path / "home", replace=True)
    assert names(tmp_path / "home") == sorted(["config.json", extra])


@pytest.mark.parametrize("name", ["notes.txt", "src.bin", "tokenizer.json", "additional_chat_templates"])
def test_what_lies_in_folders_of_a_model_is_never_replaced(tmp_path: Path, name: str) -> None:
    home = tmp_path / "home"
    (home / name).mkdir(parents=True)
    (home / "config.json").write_text("{}")
    (home / name / "thesis.docx").write_text("years")
    with pytest.raises(UsageError, match=name):
        OutputFolder(home, replace=True)
    (home / name / "thesis.docx").rename(home / name / "tools.jinja")
    if name == "additional_chat_templates":
        check_replaceable(home)


@pytest.mark.parametrize("kind", [OutputFile, OutputFolder])
def test_the_root_is_never_replaced(kind: type[OutputFile | OutputFolder]) -> None:
    with pytest.raises(UsageError, match="not replaced"):
        kind(Path("/"), replace=True)


def test_a_folder_that_is_no_model_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.md").write_text("dear")
    with pytest.raises(UsageError, match="diary"):
        OutputFolder(tmp_path / "notes", replace=True)


def test_what_a_killed_run_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".file.partial").write_bytes(b"x" * 1000)
    (tmp_path / ".folder.partial").mkdir()
    (tmp_path / ".folder.partial" / "model.safetensors").write_bytes(b"old")
    with OutputFile(tmp_path / "file") as file, OutputFolder(tmp_path / "folder") as folder:
        file.file.write(b"new")
        file.commit()
        folder.write("config.json", b"{}")
        folder.commit()
    assert names(tmp_path) == ["file", "folder"]
    assert (tmp_path / "file").read_bytes() == b"new"
    assert names(tmp_path / "folder") == ["config.json"]


def test_another_name_of_a_file_in_the_outputs_place_leaves_that_file_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"dear diary")
    (tmp_path / ".file.partial").hardlink_to(tmp_path / "mine")
    with OutputFile(tmp_path / "file") as output:
        output.file.write(b"new")
        output.commit()
    assert [(tmp_path / name).read_bytes() for name in names(tmp_path)] == [b"new", b"dear diary"]


def test_what_a_killed_run_to_the_other_kind_left_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / ".model.partial").write_bytes(b"of a file")
    with OutputFolder(tmp_path / "model") as folder:
        folder.commit()
    (tmp_path / "model").rmdir()
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "config.json").write_text("of a folder")
    with OutputFile(tmp_path / "model") as file:
        file.file.write(b"whole")
        with pytest.raises(OutputError, match="another process"):
            OutputFolder(tmp_path / "model")
        file.commit()
    assert names(tmp_path) == ["model"]
    assert (tmp_path / "model").read_bytes() == b"whole"


def test_a_run_killed_between_the_two_renames_is_undone_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".model.replaced").mkdir()
    (tmp_path / ".model.replaced" / "config.json").write_text("old")
    with pytest.raises(UsageError, match="exists already"):
        OutputFolder(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_text() == "old"


def test_what_is_left_of_a_folder_deleted_halfway_never_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while the old folder goes, and then the new one is deleted by its owner: there is nothing to go back to."""
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("{}")

    def killed(path: Path, **_: object) -> None:
        if path.exists():
            raise KeyboardInterrupt

    with OutputFolder(target, replace=True) as output:
        output.write("config.json", b'{"new": 1}')
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", killed)
            with pytest.raises(KeyboardInterrupt):
                output.commit()
    shutil.rmtree(target)
    OutputFolder(target).close()
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", [OutputFile, OutputFolder])
def test_an_interrupt_before_any_instruction_of_the_beginning_leaves_nothing(
    tmp_path: Path, kind: type[OutputFile | OutputFolder]
) -> None:
    writer = kind.__init__.__code__.co_filename
    count = wanted = 0

    def trace(frame: types.FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != writer or frame.f_code.co_name in ("close", "__del__"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == wanted:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)  # for nothing: Python 3.12 tells of no instruction of the first call in which that is asked for
    kind(tmp_path / "model").close()
    sys.settrace(None)
    finished = False
    while not finished:
        count, wanted = 0, wanted + 1
        sys.settrace(trace)
        try:
            kind(tmp_path / "model").close()
            finished = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert names(tmp_path) == [], f"instruction {wanted}"
    assert wanted > 100


@pytest.mark.parametrize("kind", [OutputFile, OutputFolder])
def test_two_runs_do_not_write_the_same_output(tmp_path: Path, kind: type[OutputFile | OutputFolder]) -> None:
    with kind(tmp_path / "model"):
        with pytest.raises(OutputError, match="another process"):
            kind(tmp_path / "model")
        assert names(tmp_path) == [".model.partial"]
    kind(tmp_path / "model").close()


@pytest.mark.parametrize("kind", [OutputFile, OutputFolder])
def test_a_file_system_without_locks_is_written_to(
    tmp_path: Path, kind: type[OutputFile | OutputFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """exFAT under macOS, and many network folders."""

    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    kind(tmp_path / "given up").close()
    assert names(tmp_path) == []
    with kind(tmp_path / "model") as output:
        output.commit()
    assert names(tmp_path) == ["model"]


def test_a_lock_that_fails_for_another_reason_is_not_taken_for_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of an NFS share under Linux, whose handle can only be read."""

    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OutputError, match="Bad file descriptor"):
        OutputFile(tmp_path / "model")


def test_a_lock_outlives_a_rename_by_the_process_that_held_it(tmp_path: Path) -> None:
    """A handle to a partial file that got its name meanwhile must not be written to."""
    first = OutputFile(tmp_path / "model")
    stale = os.open(tmp_path / ".model.partial", os.O_RDWR)
    first.file.write(b"done")
    first.commit()
    first.close()
    fcntl.flock(stale, fcntl.LOCK_EX)
    os.close(stale)
    with OutputFile(tmp_path / "model", replace=True) as second:
        second.file.write(b"x")
    assert (tmp_path / "model").read_bytes() == b"done"


def test_no_folder_to_write_into_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        OutputFile(tmp_path / "no" / "model")
    assert caught.value.hint == "create its folder first"


def test_a_full_disk_is_an_output_error_and_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from nanovllm_cli.weights.writer import *\n"
        "try:\n"
        "    with OutputFile(Path(sys.argv[1])) as output:\n"
        "        output.file.write(b'x' * 100_000)\n"
        "        output.commit()\n"
        "except OutputError as error: print(error.message, error.hint, sep='|')\n"
    )

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model")], preexec_fn=limit, capture_output=True, text=True
    )
    assert "cannot write" in done.stdout, done.stderr
    assert names(tmp_path) == []


def test_too_little_room_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_room(tmp_path / "model", 1000)
    with pytest.raises(DoesNotFitError, match="left"):
        check_room(tmp_path / "model", 1 << 60)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**7, 10**7, 2_000_000))  # type: ignore[attr-defined]
    with pytest.raises(DoesNotFitError, match=r"will have 7\.7 MB, and .* has 2\.0 MB left"):
        check_room(tmp_path / "model", 7_700_000)


def test_a_file_to_copy_that_cannot_be_read_is_not_one_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name, message in (("gone", "gone: no such file"), ("there", "there: cannot be read: Is a directory")):
        with pytest.raises(CheckpointError, match=message), OutputFolder(tmp_path / "model") as folder:
            folder.copy(tmp_path / name, "README.md")
    assert names(tmp_path) == ["there"]


def test_a_safetensors_file_in_slices_equals_the_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "é.weight": torch.randn(7, 5).bfloat16(), "none": torch.empty(0, 3), "scalar": torch.tensor(2.5),
        "codes": torch.randint(0, 255, (3, 3), dtype=torch.uint8), "half": torch.randn(4).half(),
    }  # fmt: skip
    with (tmp_path / "model.safetensors").open("wb") as file:
        writer = SafetensorsWriter(file, [TensorOut(name, tuple(t.shape), t.dtype) for name, t in tensors.items()])
        for name, tensor in tensors.items():
            writer.write(name, tensor.split(2) if tensor.ndim and len(tensor) else [tensor])
        writer.finish()
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_shards_hold_all_tensors_in_order_and_none_too_many() -> None:
    tensors = [TensorOut(str(i), (size,), torch.uint8) for i, size in enumerate((3, 4, 20, 1, 1, 5, 3))]
    groups = shards(tensors, 8)
    assert [[len(range(t.num_bytes)) for t in group] for group in groups] == [[3, 4], [20], [1, 1, 5], [3]]
    index = json.loads(index_file(groups))
    assert index["metadata"]["total_size"] == 37
    assert index["weight_map"]["2"] == "model-00002-of-00004.safetensors"


def test_a_gguf_file_in_slices_is_read_by_the_gguf_package(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, blocks = torch.randn(5, 7), torch.randn(6, 64)
    encoded = torch.from_numpy(gguf.quantize(blocks.numpy(), GGMLQuantizationType.Q8_0))
    builder = HeaderBuilder("llama")
    builder.add_name("ein Name")
    builder.add_token_list(["a", "b"])
    builder.add_rope_freq_base(10000.0)
    table = [GGUFTensor("x", (5, 7), TENSOR_TYPES["F32"]), GGUFTensor("y", (6, 64), TENSOR_TYPES["Q8_0"])]
    with (tmp_path / "m.gguf").open("wb") as file:
        writer = GGUFPartWriter(file, builder.header(), table)
        writer.write("x", plain.split(2))
        writer.write("y", encoded.split(4))
        writer.finish()
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert np.array_equal(found["x"].data, plain.numpy())
    assert np.array_equal(found["y"].data, encoded.numpy())
    assert found["y"].tensor_type == GGMLQuantizationType.Q8_0
    assert reader.fields["general.name"].contents() == "ein Name"
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]


def test_a_name_that_llama_cpp_could_not_read_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "m").open("wb") as file, pytest.raises(CheckpointError, match="longer"):
        GGUFPartWriter(file, HeaderBuilder("llama").header(), [GGUFTensor("x" * 64, (1,), TENSOR_TYPES["F32"])])


def test_values_of_the_wrong_type_are_left_out_of_a_header_by_name() -> None:
    builder = HeaderBuilder("llama")
    builder.add_name(["not", "a", "name"])
    builder.add_author("somebody")
    builder.add_tags(["a", 5])
    builder.add_sampling_top_k(2**40)
    builder.add_sampling_temp("warm")
    assert set(builder.dropped()) == {"general.name", "general.tags", "general.sampling.top_k", "general.sampling.temp"}
    assert builder.header().keys() == {"general.architecture", "general.author"}
