"""Pickled weights: what torch.save wrote becomes safetensors, what somebody else wrote runs nothing and breaks nothing."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from engines import random_model
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.weights import convert, pickled_child
from nanovllm_cli.weights.pickled import PickledCheckpoint
from test_convert import BASE, SETTINGS, TINY, converted, stored


def save_sharded(folder: Path, state: dict[str, torch.Tensor], count: int) -> None:
    names = list(state)
    where = {name: f"pytorch_model-{i % count + 1:05d}-of-{count:05d}.bin" for i, name in enumerate(names)}
    for shard in set(where.values()):
        torch.save({name: state[name] for name in names if where[name] == shard}, folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))


def test_a_bin_becomes_the_same_safetensors_and_the_same_gguf(tmp_path: Path) -> None:
    config = LlamaConfig(**BASE)
    model = random_model(config).bfloat16()
    folders = [tmp_path / name for name in ("safe", "old", "shards")]
    for folder in folders:
        folder.mkdir()
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        for name in SETTINGS:
            (folder / name).write_bytes((TINY / name).read_bytes())
    model.save_pretrained(folders[0])
    state = model.state_dict()
    torch.save(state, folders[1] / "pytorch_model.bin", _use_new_zipfile_serialization=False)  # as before torch 1.6
    save_sharded(folders[2], state, 3)
    for folder in folders:
        converted(folder, tmp_path / f"{folder.name}.gguf", "gguf")
        assert stored(tmp_path / f"{folder.name}.gguf") == stored(tmp_path / "safe.gguf")
    converted(folders[2], tmp_path / "out", "hf")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()


def folder_with(path: Path, content: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"architectures": ["Any"]}')
    if isinstance(content, bytes):
        (path / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, path / "pytorch_model.bin")
    return path


def test_views_scalars_and_types_come_as_they_are(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    state = {
        "turned": base.t(), "part": base[1::2, 3:], "shared": base, "scalar": torch.tensor(3.5), "none": torch.empty(0, 4),
        "codes": torch.arange(9, dtype=torch.int32), "flag": torch.tensor([True, False]), "half": base.half(),
        "eight": base.to(torch.float8_e4m3fn),
    }  # fmt: skip
    converted(folder_with(tmp_path / "m", {"state_dict": collections.OrderedDict(state)}), tmp_path / "out", "hf")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float()), name


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def zipped(data: bytes) -> bytes:
    """A pickle where torch.load looks for one."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


GOOD = saved({"a": torch.ones(500)})
MALICIOUS: dict[str, Callable[[Path], bytes]] = {
    "a bare pickle that makes a folder": lambda path: pickle.dumps(Runs(path)),
    "one inside of a zip": lambda path: zipped(pickle.dumps({"a": Runs(path)}, protocol=2)),
    "one beside tensors": lambda path: saved({"a": torch.ones(3), "b": Runs(path)}),
    "a command": lambda path: zipped(pickle.dumps(Calls(os.system, f"mkdir {path}"), protocol=2)),
    "code for eval": lambda path: zipped(
        pickle.dumps(Calls(eval, f"__import__('os').mkdir({str(path)!r})"), protocol=2)
    ),
    "a file that it opens": lambda path: zipped(pickle.dumps(Calls(open, str(path), "w"), protocol=2)),
    "a tensor of a petabyte": lambda path: zipped(pickle.dumps({"a": Calls(bytearray, 1 << 50)}, protocol=2)),
    "no tensors": lambda path: saved({}),
    "a list": lambda path: saved([torch.ones(3)]),
    "text beside tensors": lambda path: saved({"a": torch.ones(3), "b": "text"}),
    "names that are numbers": lambda path: saved({1: torch.ones(3)}),
    "a sparse tensor": lambda path: saved({"a": torch.eye(3).to_sparse()}),
    "a tensor without data": lambda path: saved({"a": torch.empty(3, device="meta")}),
    "a quantized tensor": lambda path: saved({"a": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)}),
    "complex numbers": lambda path: saved({"a": torch.ones(3, dtype=torch.complex64)}),
    "one number that is a billion": lambda path: saved({"a": torch.zeros(1).expand(1 << 15, 1 << 15)}),
    "the same numbers under many names": lambda path: saved(dict.fromkeys(map(str, range(100)), torch.ones(5000))),
    "a cut file": lambda path: GOOD[: len(GOOD) // 2],
    "no pickle": lambda path: b"hello" * 100,
    "nothing": lambda path: b"",
    "an empty zip": lambda path: b"PK\x05\x06" + bytes(18),
}


def reason_in_a_fork(file: Path) -> str:
    """What the reading process would answer: its own limits and its own loading, without its import of torch."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            pickled_child.limit([file])
            pickled_child.listing(pickled_child.load([file]))
            answer = "read"
        except Exception as error:
            answer = pickled_child.reason(error)
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(pid, 0)
    return answer


@pytest.mark.parametrize("case", MALICIOUS)
def test_a_bad_pickle_runs_nothing_and_has_a_reason_of_one_line(case: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    file = tmp_path / "m.bin"
    file.write_bytes(MALICIOUS[case](mark))
    answer = reason_in_a_fork(file)
    if case == "no tensors":
        assert answer == "read"  # the parent says what is missing
    else:
        assert answer not in ("", "read")
        assert "\n" not in answer
        assert "weights_only" not in answer
    assert not mark.exists()


@pytest.mark.parametrize("case", ["one beside tensors", "no tensors", "a cut file"])
def test_a_bad_pickle_leaves_nothing_and_is_a_typed_error(case: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", MALICIOUS[case](tmp_path / "ran"))
    with pytest.raises(CheckpointError) as caught:
        converted(folder, tmp_path / "out", "hf")
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_what_asks_for_code_is_said_so(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", zipped(pickle.dumps(Calls(os.system, "true"), protocol=2)))
    with pytest.raises(CheckpointError, match="asks for code to be run"):
        converted(folder, tmp_path / "out", "hf")


INDEXES: dict[str, tuple[Any, str]] = {  # what else an index may say: test_weights_safetensors.py
    "a shard that is not there": ({"a": "x.bin"}, "missing"),
    "a path that leads out": ({"a": "../m.bin"}, "not a file"),
    "another format": ({"a": "x.txt"}, r"not a \.bin or"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_bad_indexes_are_refused(case: str, tmp_path: Path) -> None:
    weight_map, words = INDEXES[case]
    folder = folder_with(tmp_path / "m", {"a": torch.ones(3)})
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises((CheckpointError, UnsupportedError), match=words):
        convert.open_source(folder)


def test_one_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"a": torch.ones(3)})
    torch.save({"a": torch.ones(3)}, folder / "second.bin")
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"a": "pytorch_model.bin", "b": "second.bin"}})
    )
    with pytest.raises(CheckpointError, match="two files"):
        convert.open_source(folder)


def test_several_files_without_an_index_are_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"a": torch.ones(3)})
    (folder / "pytorch_model.bin").rename(folder / "a.bin")
    torch.save({"a": torch.ones(3)}, folder / "b.bin")
    torch.save({"a": 1}, folder / "training_args.bin")
    with pytest.raises(CheckpointError, match=r"a\.bin, b\.bin"):
        convert.open_source(folder)
    (folder / "b.bin").unlink()
    with convert.open_source(folder) as source:
        assert source.names() == ["a"]


@pytest.mark.parametrize(
    "answer",
    [
        b"{", b"[]", b"\xff", b'{"tensors": 5}', b'{"tensors": [5]}', b'{"tensors": [{"name": "a", "dtype": "F32"}]}',
        b'{"tensors": [{"name": "a", "dtype": ["F32"], "shape": [1]}]}',
        b'{"tensors": [{"name": "a", "dtype": "F32", "shape": [-1]}]}', b'{"error": 5}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_nothing_that_the_child_answers_is_believed(answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever got through torch's own protection speaks in the child's place."""
    (tmp_path / "answer").write_bytes(len(answer).to_bytes(8, "little") + answer)
    child = tmp_path / "child"
    child.write_text(f"#!/bin/sh\nread -r line\ncat {tmp_path / 'answer'}\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    with pytest.raises(CheckpointError, match="answers what it must not"):
        PickledCheckpoint(folder_with(tmp_path / "m", {"a": torch.ones(3)}))


def test_the_child_ends_with_the_checkpoint_and_cannot_write(tmp_path: Path) -> None:
    source = PickledCheckpoint(folder_with(tmp_path / "m", {"a": torch.arange(12.0).reshape(4, 3)}))
    assert torch.equal(source.tensor("a", rows=(1, 3)), torch.arange(3.0, 9.0).reshape(2, 3))
    assert source.raw("a").shape == (4, 12)
    process = source._child
    limits = Path(f"/proc/{process.pid}/limits")
    if limits.exists():
        assert "Max file size 0 0" in " ".join(limits.read_text().split())
    process.kill()
    process.wait()
    with pytest.raises(CheckpointError, match="ended"):
        source.tensor("a")
    source.close()
    assert process.poll() is not None
