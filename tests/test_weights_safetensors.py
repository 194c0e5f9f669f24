"""Safetensors reading against the `safetensors` package, which wrote the files, and against files that lie."""

import json
import random
import struct
import time
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.files import stays_inside
from nanovllm_cli.weights.safetensors import SafetensorsFile
from untrusted_files import open_and_read, refusal

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def folder(path: Path, config: str = '{"architectures": ["X"]}') -> Path:
    path.mkdir(exist_ok=True, parents=True)
    (path / "config.json").write_text(config)
    return path


def handmade(header: dict[str, Any] | bytes, data: bytes = b"", header_len: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if header_len is None else header_len) + text + data


def f32(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_equals_what_the_package_reads(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(7, 5).mul(10).to(dtype)
    save_file({"w": values, "scalar": values[0, 0].clone(), "none": values[:0]}, tmp_path / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_checkpoint(folder(tmp_path)) as checkpoint, safe_open(tmp_path / "model.safetensors", "pt") as theirs:
            assert sorted(checkpoint.names()) == sorted(theirs.keys())
            for name in checkpoint.names():
                ours, expected = checkpoint.tensor(name), theirs.get_tensor(name)
                assert ours.dtype == expected.dtype
                assert ours.shape == expected.shape == checkpoint.info(name).shape
                assert ours.view(torch.uint8).equal(expected.view(torch.uint8)) if ours.ndim else ours == expected
                assert checkpoint.info(name).dtype_name == theirs.get_slice(name).get_dtype()
                assert checkpoint.info(name).num_bytes == expected.nbytes
            assert checkpoint.tensor("w").data_ptr() == checkpoint.tensor("w").data_ptr()
            assert checkpoint.raw("w").shape == (7, 5 * dtype.itemsize)
            assert checkpoint.raw("w").flatten().equal(values.view(torch.uint8).flatten())
            assert checkpoint.raw("none").numel() == 0
            assert checkpoint.total_bytes == sum(checkpoint.info(name).num_bytes for name in checkpoint.names())


def test_rows(tmp_path: Path) -> None:
    values = torch.randn(9, 4, dtype=torch.bfloat16)
    save_file({"w": values}, tmp_path / "model.safetensors")
    with open_checkpoint(folder(tmp_path)) as checkpoint:
        assert checkpoint.tensor("w", rows=(2, 5)).equal(values[2:5])
        with pytest.raises(CheckpointError, match="no tensor 'x'"):
            checkpoint.tensor("x")


def test_tensor_at_an_odd_offset_is_right(tmp_path: Path) -> None:
    """Data that does not start at a multiple of the item size: allowed, though no writer does it."""
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    for pad in range(8):
        padded = header + b" " * pad
        (tmp_path / "model.safetensors").write_bytes(handmade(padded, struct.pack("<2f", 1.5, -2)))
        with open_checkpoint(folder(tmp_path)) as checkpoint:
            assert checkpoint.tensor("w").tolist() == [1.5, -2]
            assert checkpoint.tensor("w").data_ptr() % 4 == 0


def test_dtype_of_less_than_a_byte_is_named(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    (tmp_path / "model.safetensors").write_bytes(handmade(header, b"ab"))
    with open_checkpoint(folder(tmp_path)) as checkpoint:
        assert checkpoint.raw("w").tolist() == [[97, 98]]
        with pytest.raises(UnsupportedError, match="'w' has the dtype F4"):
            checkpoint.tensor("w")
    header["w"]["shape"] = [4, 1]  # rows of half a byte
    (tmp_path / "model.safetensors").write_bytes(handmade(header, b"ab"))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.raw("w").tolist() == [[97, 98]]


TWO = {"a": f32(0, 8), "b": f32(8, 16)}
CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "seven bytes": (b"1234567", "too few"),
    "header over the cap": (struct.pack("<Q", 100_000_001) + b"{}", "100000001"),
    "header of 2**63": (struct.pack("<Q", 2**63) + b"{}", "9223372036854775808"),
    "header past the end": (handmade(b"{}", header_len=3), "the file ends after 2"),
    "header of nothing": (handmade(b""), "not JSON"),
    "header is not json": (handmade(b"{'a': 1}"), "not JSON"),
    "header is not utf-8": (handmade(b'{"\xff": 1}'), "UTF-8"),
    "header is a list": (handmade(b"[]"), "object"),
    "header is a number": (handmade(b"7"), "object"),
    "header with a key twice": (handmade(b'{"b": 0, "a": 1, "a": 2}'), "'a' occurs twice"),
    "field twice": (handmade(b'{"a":{"dtype":"F32","dtype":"F32","shape":[0],"data_offsets":[0,0]}}'), "twice"),
    "header nested deep": (handmade(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested"),
    "header nested 500": (handmade(b'{"a":' + b"[" * 500 + b"]" * 500 + b"}"), "nested"),
    "header with NaN": (handmade(b'{"a": NaN}'), "NaN"),
    "number of 5000 digits": (handmade(b'{"a": ' + b"9" * 5000 + b"}"), "digits"),
    "metadata of numbers": (handmade({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata is a string": (handmade({"__metadata__": "x"}), "__metadata__"),
    "entry is a list": (handmade({"a": []}), "'a': expected dtype"),
    "entry without dtype": (handmade({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "'a': expected"),
    "entry with more": (handmade({"a": {**f32(0, 8), "x": 1}}, bytes(8)), "'a': expected"),
    "dtype is a number": (handmade({"a": {**f32(0, 8), "dtype": 5}}, bytes(8)), "unknown dtype"),
    "dtype is a list": (handmade({"a": {**f32(0, 8), "dtype": []}}, bytes(8)), "unknown dtype []"),
    "dtype unknown": (handmade({"a": {**f32(0, 8), "dtype": "F31"}}, bytes(8)), "unknown dtype 'F31'"),
    "shape is a number": (handmade({"a": f32(0, 8, shape=2)}, bytes(8)), "shape"),  # type: ignore[arg-type]
    "shape of floats": (handmade({"a": f32(0, 8, shape=[2.0])}, bytes(8)), "shape"),
    "shape of booleans": (handmade({"a": f32(0, 4, shape=[True])}, bytes(4)), "shape"),
    "shape negative": (handmade({"a": f32(0, 8, shape=[-2])}, bytes(8)), "shape"),
    "shape negative twice": (handmade({"a": f32(0, 8, shape=[-1, -2])}, bytes(8)), "shape"),
    "shape of 33 dims": (handmade({"a": f32(0, 4, shape=[1] * 33)}, bytes(4)), "shape"),
    "shape wraps": (handmade({"a": f32(0, 8, shape=[2**32, 2**32, 2])}, bytes(8)), "elements"),
    "zero hides an overflow": (handmade({"a": f32(0, 0, shape=[0, 2**62, 2**62])}), "elements"),
    "shape too small": (handmade({"a": f32(0, 8, shape=[1])}, bytes(8)), "takes 4 bytes, its offsets say 8"),
    "shape too large": (handmade({"a": f32(0, 8, shape=[3])}, bytes(8)), "takes 12 bytes, its offsets say 8"),
    "half a byte": (handmade({"a": f32(0, 1, shape=[1], dtype="F4")}, bytes(1)), "takes"),
    "three offsets": (handmade({"a": {**f32(0, 8), "data_offsets": [0, 4, 8]}}, bytes(8)), "data_offsets"),
    "offsets reversed": (handmade({"a": {**f32(0, 8), "data_offsets": [8, 0]}}, bytes(8)), "data_offsets"),
    "offsets negative": (handmade({"a": {**f32(0, 8), "data_offsets": [-8, 0]}}, bytes(8)), "data_offsets"),
    "offset of 2**64": (handmade({"a": {**f32(0, 8), "data_offsets": [2**64, 2**64 + 8]}}, bytes(8)), "data_offsets"),
    "overlap": (handmade({"a": f32(0, 8), "b": f32(4, 12)}, bytes(12)), "'b' overlaps"),
    "the same bytes twice": (handmade({"a": f32(0, 8), "b": f32(0, 8)}, bytes(8)), "overlaps"),
    "gap": (handmade({"a": f32(0, 8), "b": f32(12, 20)}, bytes(20)), "'b' leaves a gap"),
    "gap at the start": (handmade({"a": f32(4, 12)}, bytes(12)), "'a' leaves a gap"),
    "data missing": (handmade(TWO, bytes(15)), "the tensors end at"),
    "data left over": (handmade(TWO, bytes(17)), "the tensors end at"),
    "data without tensors": (handmade({}, bytes(1)), "the tensors end at"),
}


@pytest.mark.parametrize("case", CASES)
def test_malformed_file_is_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    data, fragment = CASES[case]
    path = folder(tmp_path) / "model.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    started = time.thread_time()
    try:
        with pytest.raises((CheckpointError, UnsupportedError)) as raised:
            open_checkpoint(tmp_path)
        assert time.thread_time() - started < 2
        assert tracemalloc.get_traced_memory()[1] < 4_000_000 + 60 * len(data)
    finally:
        tracemalloc.stop()
    assert fragment in raised.value.message
    assert str(path) in raised.value.message
    assert "\n" not in raised.value.message


def test_metadata_may_be_null(tmp_path: Path) -> None:
    """As MLX writes a file that has none."""
    (tmp_path / "m.safetensors").write_bytes(handmade({"__metadata__": None, "a": f32(0, 8)}, bytes(8)))
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.metadata == {}
    assert list(file.entries) == ["a"]


VALID = handmade({"__metadata__": {"format": "pt"}, **TWO, "c": f32(16, 24, [2, 2], "BF16")}, bytes(24))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.safetensors"
    path.write_bytes(VALID)
    open_and_read(tmp_path)
    for length in range(len(VALID)):
        path.write_bytes(VALID[:length])
        with pytest.raises(CheckpointError):
            open_and_read(tmp_path)


def test_flipped_bytes_never_crash(tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.safetensors"
    rng = random.Random(3)
    characters = b'0123456789[]{}",:-eE.\\u \x00\xff'
    for _ in range(2000):
        data = bytearray(VALID)
        for _ in range(rng.choice([1, 1, 2, 3])):
            data[rng.randrange(len(VALID) - 24)] = rng.choice(characters)
        path.write_bytes(data)
        assert "\n" not in refusal(tmp_path)


def sharded(path: Path) -> dict[str, torch.Tensor]:
    """Two shards and their index, as transformers writes them."""
    tensors = {f"t{index}": torch.full((3, 2), float(index)) for index in range(4)}
    weight_map = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        part = {key: value for index, (key, value) in enumerate(tensors.items()) if index // 2 == number - 1}
        save_file(part, folder(path) / name)
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {"total_size": 96}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def test_the_only_index_may_have_any_name(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "x.safetensors.index.json")
    with open_checkpoint(tmp_path) as checkpoint:
        assert all(checkpoint.tensor(name).equal(value) for name, value in tensors.items())


def change_index(path: Path, change: Any) -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    change(index["weight_map"])
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("named", ["", "model-00002-of-00002.safetensors"])
def test_sharded_model_is_read_whole(named: str, tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    with open_checkpoint(tmp_path / named) as checkpoint:
        assert checkpoint.path == tmp_path / named
        assert set(checkpoint.names()) == set(tensors)
        assert all(checkpoint.tensor(name).equal(value) for name, value in tensors.items())
        assert checkpoint.total_bytes == 96


def test_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"1 of 2 shards are missing: model-00002-of-00002\.safetensors"
    ) as raised:
        open_checkpoint(tmp_path)
    assert "download" in str(raised.value.hint)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    sharded(tmp_path)
    change_index(tmp_path, lambda weights: weights.update(t9="model-00001-of-00002.safetensors"))
    with pytest.raises(
        CheckpointError, match=r"1 tensors that model\.safetensors\.index\.json expects are not in it: t9"
    ):
        open_checkpoint(tmp_path)
    sharded(tmp_path)
    change_index(tmp_path, lambda weights: weights.pop("t1"))
    with pytest.raises(CheckpointError, match="does not name: t1"):
        open_checkpoint(tmp_path)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file(
        {"t0": torch.ones(1), "t2": torch.ones(1), "t3": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors"
    )
    with pytest.raises(CheckpointError, match="does not name: t0"):
        open_checkpoint(tmp_path)


OUTSIDE = [
    "../x.safetensors",
    "/etc/x.safetensors",
    "a/../../x.safetensors",
    "..\\x.safetensors",
    "C:\\x.safetensors",
    "C:x",
]
OUTSIDE += ["\\x.safetensors", "", ".", "..", "x\0.safetensors", "x\n.safetensors"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_index_cannot_lead_out_of_its_folder(name: str, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    sharded(inner)
    save_file({"t9": torch.ones(1)}, tmp_path / "x.safetensors")
    change_index(inner, lambda weights: weights.update(t9=name))
    assert not stays_inside(name)
    with pytest.raises(CheckpointError, match="not a file of this folder") as raised:
        open_checkpoint(inner)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("value", [None, 5, [], {}, {"t": 5}, {"t": None}, {"t": ["x"]}, "x"])
def test_weight_map_of_other_kinds_is_refused(value: Any, tmp_path: Path) -> None:
    (folder(tmp_path) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


def test_index_of_pickles_is_unsupported(tmp_path: Path) -> None:
    (folder(tmp_path) / "model.safetensors.index.json").write_text('{"weight_map": {"t": "pytorch_model.bin"}}')
    with pytest.raises(UnsupportedError) as raised:
        open_checkpoint(tmp_path)
    assert ".safetensors" in str(raised.value.hint)


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    """The cache keeps blobs beside snapshots, and a snapshot's files are links that lead up and out."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    tensors = sharded(snapshot)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("../../blobs") / str(number))
    with open_checkpoint(snapshot) as checkpoint:
        assert all(checkpoint.tensor(name).equal(value) for name, value in tensors.items())


def test_a_name_that_no_tensor_has_is_refused(tmp_path: Path) -> None:
    """What takes names apart at their dots would take gigabytes for one of 100 KB."""
    longest = "a." * 512
    path = folder(tmp_path) / "model.safetensors"
    path.write_bytes(handmade({longest: f32(0, 4)}, b"abcd"))
    assert refusal(tmp_path) == ""
    path.write_bytes(handmade({longest + "a": f32(0, 4)}, b"abcd"))
    assert "a tensor's name has 1025 characters, at most 1024 are read" in refusal(tmp_path)
    assert len(refusal(tmp_path)) < 300
