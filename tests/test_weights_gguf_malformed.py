"""GGUF files that lie: every case of llama.cpp's tests/test-gguf.cpp and more, each built byte by byte.

What is expected of each: one typed error that says what is wrong and what to do, at once, without a large allocation.
"""

import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.weights.checkpoint import open_checkpoint
from untrusted_files import open_and_read, refusal

U8, U32, I32, F32_VALUE, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10
F32, F16, Q4_0, Q8_0, I8, I64 = 0, 1, 2, 8, 24, 27
MINUS_ONE = 2**64 - 1


def string(text: str | bytes, num_bytes: int | None = None) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data) if num_bytes is None else num_bytes) + data


def kv(key: str | bytes, value_type: int, value: bytes, key_bytes: int | None = None) -> bytes:
    return string(key, key_bytes) + struct.pack("<I", value_type) + value


def array(item_type: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", item_type, count) + data


def tensor(
    name: str | bytes,
    dims: list[int],
    tensor_type: int = F32,
    offset: int = 0,
    num_dims: int | None = None,
    name_bytes: int | None = None,
) -> bytes:
    """`dims` as the file has them: the length of a row first."""
    counted = struct.pack("<I", len(dims) if num_dims is None else num_dims)
    sizes = b"".join(struct.pack("<Q", dim % 2**64) for dim in dims)
    return string(name, name_bytes) + counted + sizes + struct.pack("<IQ", tensor_type, offset % 2**64)


def gguf(
    kvs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_kvs: int | None = None,
    alignment: int = 32,
) -> bytes:
    kvs = [kv("general.architecture", STRING, string("llama"))] if kvs is None else kvs
    tensors = [] if tensors is None else tensors
    counts = (len(tensors) if num_tensors is None else num_tensors, len(kvs) if num_kvs is None else num_kvs)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(kvs) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def align(value_type: int, value: bytes) -> list[bytes]:
    return [kv("general.alignment", value_type, value)]


def nested(levels: int) -> bytes:
    return b"".join(array(ARRAY, 1) for _ in range(levels)) + array(U8, 1, b"x")


ONE = [tensor("t", [32])]
DATA = bytes(128)

CASES: dict[str, tuple[bytes, type[NanovllmError], str]] = {
    # the header
    "empty file": (b"", CheckpointError, "empty"),
    "two bytes": (b"GG", CheckpointError, "not a GGUF"),
    "only magic": (b"GGUF", CheckpointError, "file ends"),
    "bad magic": (gguf(magic=b"FUGG"), CheckpointError, "not a GGUF"),
    "old magic": (gguf(magic=b"tjgg"), UnsupportedError, "old GGML"),
    "version 0": (gguf(version=0), CheckpointError, "version 0"),
    "version 1": (gguf(version=1), UnsupportedError, "version 1"),
    "version future": (gguf(version=4), UnsupportedError, "version 4"),
    "version max": (gguf(version=2**32 - 1), UnsupportedError, "version 4294967295"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedError, "big-endian"),
    "num tensors -1": (gguf(num_tensors=MINUS_ONE), CheckpointError, "tensors do not fit"),
    "num tensors 2**40": (gguf(num_tensors=2**40), CheckpointError, "tensors do not fit"),
    "num tensors one too many": (gguf(tensors=ONE, num_tensors=2), CheckpointError, ""),
    "num kvs -1": (gguf(num_kvs=MINUS_ONE), CheckpointError, "keys do not fit"),
    "num kvs one too many": (gguf(num_kvs=2), CheckpointError, ""),
    # metadata
    "key size -1": (gguf([kv("k", U8, b"x", key_bytes=MINUS_ONE)]), CheckpointError, "18446744073709551615 bytes"),
    "key size past the end": (gguf([kv("k", U8, b"x", key_bytes=4000)]), CheckpointError, "4000 bytes"),
    "key larger than allowed": (gguf([kv("k" * 65536, U8, b"x")]), CheckpointError, "65536"),
    "empty key": (gguf([kv("", U8, b"x")]), CheckpointError, "empty"),
    "key not utf-8": (gguf([kv(b"\xff\xfe", U8, b"x")]), CheckpointError, "UTF-8"),
    "bad kv type": (gguf([kv("k", 13, b"x" * 16)]), CheckpointError, "unknown type 13"),
    "bad kv type max": (gguf([kv("k", 2**32 - 1, b"x" * 16)]), CheckpointError, "unknown type"),
    "duplicate key": (gguf([kv("k", U8, b"x"), kv("k", U8, b"y")]), CheckpointError, "twice"),
    "value string size -1": (gguf([kv("k", STRING, string("v", MINUS_ONE))]), CheckpointError, "'k'"),
    "value cut off": (gguf([kv("k", U64, b"xx")], alignment=1), CheckpointError, "file ends"),
    "array of -1 bytes": (gguf([kv("k", ARRAY, array(U8, MINUS_ONE))]), CheckpointError, "elements of 'k'"),
    "array of 2**61 numbers": (gguf([kv("k", ARRAY, array(U64, 2**61))]), CheckpointError, "elements of 'k'"),
    "array of -1 strings": (gguf([kv("k", ARRAY, array(STRING, MINUS_ONE))]), CheckpointError, "elements of 'k'"),
    "array of -1 arrays": (gguf([kv("k", ARRAY, array(ARRAY, MINUS_ONE))]), CheckpointError, "elements of 'k'"),
    "array cut off": (
        gguf([kv("k", ARRAY, array(U64, 3, bytes(16)))], alignment=1),
        CheckpointError,
        "3 elements of 'k'",
    ),
    "string in array too long": (
        gguf([kv("k", ARRAY, array(STRING, 2, string("a") + string("b", 2**63)))]),
        CheckpointError,
        "element 1 of 'k'",
    ),
    "array of strings cut off": (
        gguf([kv("k", ARRAY, array(STRING, 2, string("a" * 20)))], alignment=1),
        CheckpointError,
        "element 1 of 'k'",
    ),
    "array of unknown type": (gguf([kv("k", ARRAY, array(99, 0))]), CheckpointError, "unknown type 99"),
    "arrays nested one too deep": (gguf([kv("k", ARRAY, nested(4))]), CheckpointError, "nested"),
    "arrays nested too deep": (gguf([kv("k", ARRAY, nested(20))]), CheckpointError, "nested"),
    "arrays nested thousandfold": (gguf([kv("k", ARRAY, nested(50_000))]), CheckpointError, "nested"),
    "alignment 0": (gguf(align(U32, struct.pack("<I", 0)), ONE, DATA), CheckpointError, "alignment is 0"),
    "alignment 3": (gguf(align(U32, struct.pack("<I", 3)), ONE, DATA), CheckpointError, "alignment is 3"),
    "alignment 13": (gguf(align(U32, struct.pack("<I", 13)), ONE, DATA), CheckpointError, "alignment is 13"),
    "alignment 2**31": (gguf(align(U32, struct.pack("<I", 2**31)), ONE, DATA), CheckpointError, "alignment is"),
    "alignment is a string": (gguf(align(STRING, string("32")), ONE, DATA), CheckpointError, "alignment is not"),
    "alignment is an empty string": (gguf(align(STRING, string("")), ONE, DATA), CheckpointError, "alignment is not"),
    "alignment is signed": (gguf(align(I32, struct.pack("<i", 32)), ONE, DATA), CheckpointError, "alignment is not"),
    "alignment is an array": (gguf(align(ARRAY, array(U32, 0)), ONE, DATA), CheckpointError, "alignment is not"),
    # the tensor table
    "name too long": (gguf(tensors=[tensor("n" * 65, [32])], data=DATA), CheckpointError, "65 bytes"),
    "name size -1": (gguf(tensors=[tensor("t", [32], name_bytes=MINUS_ONE)], data=DATA), CheckpointError, "name of"),
    "name not utf-8": (gguf(tensors=[tensor(b"\xc3", [32])], data=DATA), CheckpointError, "UTF-8"),
    "duplicate name": (
        gguf(tensors=[tensor("t", [32]), tensor("t", [32], offset=128)], data=DATA * 2),
        CheckpointError,
        "'t' occurs twice",
    ),
    "too many dims": (gguf(tensors=[tensor("t", [1] * 5)], data=DATA), CheckpointError, "5 dimensions"),
    "dims -1": (gguf(tensors=[tensor("t", [32], num_dims=2**32 - 1)], data=DATA), CheckpointError, "dimensions"),
    "negative shape": (gguf(tensors=[tensor("t", [-1, -1])], data=DATA), CheckpointError, "does not fit"),
    "negative and positive": (gguf(tensors=[tensor("t", [32, -1])], data=DATA), CheckpointError, "does not fit"),
    "shape product overflows": (
        gguf(tensors=[tensor("t", [4 * (2**31 - 1)] * 2)], data=DATA),
        CheckpointError,
        "does not fit",
    ),
    "shape product wraps to 32": (
        gguf(tensors=[tensor("t", [2**32, 2**32, 32])], data=DATA),
        CheckpointError,
        "does not fit",
    ),
    "bytes overflow": (gguf(tensors=[tensor("t", [2**31 + 64, 2**30], I64)], data=DATA), CheckpointError, "not fit"),
    "zero hides an overflow": (gguf(tensors=[tensor("t", [2**62, 2**62, 0])], data=DATA), CheckpointError, "not fit"),
    "two halves of memory": (
        gguf(tensors=[tensor("a", [2**63 - 64], I8), tensor("b", [2**63 - 64], I8, offset=2**63 - 64)], data=bytes(32)),
        CheckpointError,
        "does not fit",
    ),
    "blocks of no dimension": (gguf(tensors=[tensor("t", [], Q4_0)], data=DATA), CheckpointError, "does not fit"),
    "row is no multiple of blocks": (gguf(tensors=[tensor("t", [33], Q8_0)], data=DATA), CheckpointError, "blocks"),
    "bad type": (gguf(tensors=[tensor("t", [32], 4242)], data=DATA), UnsupportedError, "'t' has the unknown type 4242"),
    "removed type": (gguf(tensors=[tensor("t", [32], 4)], data=DATA), UnsupportedError, "unknown type 4"),
    "type -1": (gguf(tensors=[tensor("t", [32], 2**32 - 1)], data=DATA), UnsupportedError, "unknown type"),
    "offset -1": (gguf(tensors=[tensor("t", [32], offset=-1)], data=DATA), CheckpointError, "does not fit"),
    "offset past the end": (gguf(tensors=[tensor("t", [32], offset=160)], data=DATA), CheckpointError, "not fit"),
    "offset misaligned": (gguf(tensors=[tensor("t", [16], offset=8)], data=DATA), CheckpointError, "multiple of 32"),
    "written with another alignment": (
        gguf(tensors=[tensor("a", [1]), tensor("b", [1], offset=4)], data=DATA, alignment=1),
        CheckpointError,
        "multiple of 32",
    ),
    "tensors overlap": (
        gguf(tensors=[tensor("a", [32]), tensor("b", [32], offset=96)], data=DATA * 2),
        CheckpointError,
        "'b' overlaps 'a'",
    ),
    "same offset": (gguf(tensors=[tensor("a", [32]), tensor("b", [32])], data=DATA * 2), CheckpointError, "overlaps"),
    # the data
    "data one byte short": (gguf(tensors=ONE, data=DATA[:-1]), CheckpointError, "should end at byte"),
    "no data": (gguf(tensors=ONE), CheckpointError, ""),
    "data of a small alignment short": (
        gguf(align(U32, struct.pack("<I", 1)), ONE, DATA[:-1], alignment=1),
        CheckpointError,
        "should end",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_malformed_file_is_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    data, kind, fragment = CASES[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    started = time.thread_time()
    with pytest.raises(kind) as raised:
        open_checkpoint(path)
    seconds = time.thread_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    error = raised.value
    assert type(error) is kind
    assert fragment in error.message
    assert str(path) in error.message
    assert "\n" not in error.message
    assert error.hint
    assert "\n" not in error.hint
    assert peak < 4_000_000 + 2 * len(data)
    assert seconds < 2


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (gguf([], []), []),
        (gguf(), []),
        (gguf(version=2), []),
        (gguf(tensors=ONE, data=DATA), ["t"]),
        (gguf(align(U32, struct.pack("<I", 1)), ONE, DATA, alignment=1), ["t"]),
        (gguf(align(U32, struct.pack("<I", 1 << 20)), ONE, DATA, alignment=1 << 20), ["t"]),
        (gguf(tensors=[tensor("n" * 64, [32])], data=DATA), ["n" * 64]),
        (gguf(tensors=[tensor("t", [32, 0])], data=DATA), ["t"]),
        (gguf(tensors=[tensor("t", [])], data=DATA), ["t"]),
        (gguf(tensors=[tensor("t", [4, 2, 2, 2])], data=DATA), ["t"]),
        (gguf([kv("k", ARRAY, nested(3))]), []),
        (gguf([kv("k", ARRAY, array(ARRAY, 1, array(U8, 0)))], alignment=1), []),
        (gguf([kv("k", ARRAY, array(U32, 0))]), []),
        (gguf([kv("k", STRING, string(""))]), []),
    ],
)
def test_unusual_but_valid_file_is_read(data: bytes, names: list[str], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(data)
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        assert checkpoint.names() == names
        for name in names:
            assert checkpoint.tensor(name).shape == checkpoint.info(name).shape
            assert checkpoint.raw(name).numel() == checkpoint.info(name).num_bytes


@pytest.mark.parametrize(
    ("limit", "most", "kept", "refused"),
    [
        ("MAX_ENTRIES", 2, [kv("a", U8, b"x"), kv("b", U8, b"x")], kv("c", U8, b"x")),
        ("MAX_ARRAY_ELEMENTS", 16, [kv("a", ARRAY, array(U8, 16, bytes(16)))], kv("c", ARRAY, array(U8, 1, b"x"))),
        ("MAX_ARRAY_ELEMENTS", 16, [kv("a", ARRAY, array(ARRAY, 2, array(U8, 0) * 2))], kv("c", ARRAY, array(U8, 1, b"x"))),
    ],
)
def test_what_a_file_may_hold_in_all_is_bounded(
    limit: str, most: int, kept: list[bytes], refused: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array within an array counts eight times: its list is that much larger than a number."""
    monkeypatch.setattr(f"nanovllm_cli.weights.gguf.{limit}", most)
    (tmp_path / "model.gguf").write_bytes(gguf(kept))
    open_checkpoint(tmp_path / "model.gguf").close()
    (tmp_path / "model.gguf").write_bytes(gguf([*kept, refused]))
    with pytest.raises(CheckpointError, match=f" {most} "):
        open_checkpoint(tmp_path / "model.gguf")


VALID = gguf(
    [
        kv("general.architecture", STRING, string("llama")),
        kv("general.alignment", U32, struct.pack("<I", 32)),
        kv("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, string("a") + string("bc") + string(""))),
        kv("tokenizer.ggml.scores", ARRAY, array(F32_VALUE, 3, struct.pack("<3f", 0.5, -1, 2))),
        kv("nested", ARRAY, array(ARRAY, 2, array(U8, 2, b"xy") + array(BOOL, 1, b"\1"))),
    ],
    [tensor("a", [32, 2]), tensor("b", [32, 2], Q8_0, offset=256), tensor("c", [4], F16, offset=352)],
    bytes(range(256)) + bytes(96) + bytes(32),
)


def test_every_truncation_of_a_valid_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(VALID)
    open_and_read(path)
    last_used = len(VALID) - 32 + 8  # the last tensor has 8 bytes, the rest is padding
    for length in range(last_used):
        path.write_bytes(VALID[:length])
        with pytest.raises(NanovllmError):
            open_and_read(path)


def test_a_tensor_without_elements_may_lie_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(tensors=[*ONE, tensor("empty", [32, 0], Q4_0, offset=160)], data=DATA))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensor("empty").shape == checkpoint.tensor("empty", rows=(0, 0)).shape == (0, 32)
        assert checkpoint.raw("empty").numel() == 0


def test_flipped_bytes_never_crash(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    rng = random.Random(7)
    for _ in range(2000):
        data = bytearray(VALID)
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            data[rng.randrange(len(data))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        path.write_bytes(data)
        assert "\n" not in refusal(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.integers(0, len(VALID)),
    removed=st.integers(0, 40),
    inserted=st.one_of(st.binary(max_size=24), st.integers(0, 2**64 - 1).map(lambda n: struct.pack("<Q", n))),
)
def test_spliced_bytes_never_crash(tmp_path: Path, start: int, removed: int, inserted: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(VALID[:start] + inserted + VALID[start + removed :])
    assert "\n" not in refusal(path)
