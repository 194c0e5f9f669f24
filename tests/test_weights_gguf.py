"""GGUF reading against the `gguf` package, which wrote the files and whose dequantization is the reference."""

import time
import warnings
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.weights.checkpoint import open_checkpoint

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="shared/data is not here")

PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


def can_dequantize(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


BLOCKS = [kind for kind in GGMLQuantizationType if kind.name not in PLAIN and can_dequantize(kind)]
UNREADABLE = [kind for kind in GGMLQuantizationType if kind.name not in (*PLAIN, "Q1_0") and not can_dequantize(kind)]


def write(path: Path, tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType | None]], **keys: object) -> Path:
    """A GGUF by the `gguf` package's own writer; block types are given as bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](key.replace("__", "."), value)  # type: ignore[operator]
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: GGMLQuantizationType, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Any bytes are a valid block of any type (some scales are infinite or NaN then)."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, blocks * GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)


def reference(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(dequantize(data, kind))


def same_bits(tensor: torch.Tensor, expected: np.ndarray) -> bool:
    return tensor.contiguous().numpy().tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("blocks", [1, 3])
def test_block_type_dequantizes_to_the_bit(kind: GGMLQuantizationType, blocks: int, tmp_path: Path) -> None:
    data = random_blocks(kind, 17, blocks)
    with open_checkpoint(write(tmp_path / "m.gguf", {"w": (data, kind)})) as checkpoint:
        info = checkpoint.info("w")
        assert info == ("w", (17, blocks * GGML_QUANT_SIZES[kind][0]), kind.name, data.nbytes)
        whole = checkpoint.tensor("w")
        assert whole.dtype == torch.float32
        assert same_bits(whole, reference(data, kind))
        assert same_bits(checkpoint.tensor("w", rows=(3, 8)), reference(data, kind)[3:8])
        assert checkpoint.tensor("w", rows=(5, 5)).shape == (0, info.shape[1])
        assert same_bits(checkpoint.raw("w"), data)


def test_every_type_of_the_package_is_covered() -> None:
    assert len(BLOCKS) >= 23
    assert {kind.name for kind in UNREADABLE} == {"Q8_1", "Q8_K"}


@pytest.mark.parametrize(
    ("kind", "worst"),
    [("Q4_0", 0.12), ("Q4_1", 0.12), ("Q5_0", 0.07), ("Q5_1", 0.07), ("Q8_0", 0.01), ("MXFP4", 0.2)],
)
def test_quantized_weights_come_back(kind: str, worst: float, tmp_path: Path) -> None:
    tensor_type = GGMLQuantizationType[kind]
    weights = np.random.default_rng(1).standard_normal((9, 512)).astype(np.float32)
    path = write(tmp_path / "m.gguf", {"w": (quantize(weights, tensor_type), tensor_type)})
    with open_checkpoint(path) as checkpoint:
        error = (checkpoint.tensor("w") - torch.from_numpy(weights)).norm() / np.linalg.norm(weights)
    assert 0 < error < worst


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_ternary_weights_come_back_exactly(kind: str, tmp_path: Path) -> None:
    tensor_type = GGMLQuantizationType[kind]
    weights = np.random.default_rng(1).integers(-1, 2, (9, 512)).astype(np.float32) * 0.5
    path = write(tmp_path / "m.gguf", {"w": (quantize(weights, tensor_type), tensor_type)})
    with open_checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint.tensor("w"), torch.from_numpy(weights))


@pytest.mark.parametrize("kind", UNREADABLE, ids=lambda kind: kind.name)
def test_type_without_dequantization_is_named(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"blk.0.w": (random_blocks(kind, 2, 1), kind)})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.raw("blk.0.w").shape[0] == 2
        with pytest.raises(UnsupportedError, match=rf"'blk\.0\.w' has the type {kind.name}"):
            checkpoint.tensor("blk.0.w")


@pytest.mark.parametrize("name", PLAIN)
def test_plain_numbers_are_views_of_the_file(name: str, tmp_path: Path) -> None:
    dtype = PLAIN[name]
    values = (torch.arange(15).reshape(3, 5) - 4).to(dtype)
    raw = values.view(torch.int16).numpy() if dtype == torch.bfloat16 else values.numpy()
    kind = GGMLQuantizationType.BF16 if dtype == torch.bfloat16 else None
    data = raw.view(np.uint8) if kind else raw
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_checkpoint(write(tmp_path / "m.gguf", {"w": (data, kind)})) as checkpoint:
            view = checkpoint.tensor("w")
            assert view.dtype == dtype
            assert torch.equal(view, values)
            assert view.data_ptr() == checkpoint.tensor("w").data_ptr()
            assert checkpoint.info("w").shape == (3, 5)
            assert torch.equal(checkpoint.tensor("w", rows=(1, 3)), values[1:3])


def test_dequantizing_needs_little_beside_its_result(tmp_path: Path) -> None:
    kind, rows, blocks = GGMLQuantizationType.Q8_0, 8192, 64  # 64 MB as float32
    path = write(tmp_path / "m.gguf", {"w": (np.zeros((rows, blocks * 34), dtype=np.uint8), kind)})
    with open_checkpoint(path) as checkpoint:
        checkpoint.tensor("w", rows=(0, 64))
        process = psutil.Process()
        before = process.memory_info().rss
        tensor = checkpoint.tensor("w")
        checkpoint.release("w")
        assert process.memory_info().rss - before < tensor.nbytes + 24_000_000


def test_release_gives_back_resident_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"w": (np.ones((4096, 4096), dtype=np.float32), None)})
    with open_checkpoint(path) as checkpoint:
        process = psutil.Process()
        before = process.memory_info().rss
        view = checkpoint.tensor("w")
        assert view.sum() == 4096 * 4096
        assert process.memory_info().rss - before > 50_000_000
        checkpoint.release("w")
        assert process.memory_info().rss - before < 8_000_000
        assert view[0, 0] == 1


def test_tensor_outlives_its_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"w": (np.full((64, 64), 3, dtype=np.float32), None)})
    checkpoint = open_checkpoint(path)
    view = checkpoint.tensor("w")
    checkpoint.close()
    path.unlink()
    assert view.sum() == 3 * 64 * 64


def test_metadata_is_read_as_it_was_written(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e-300)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "zażółć 🦙\n")
    writer.add_array("strings", ["a", "", "ß"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -0.25])
    writer.add_array("bools", [True, False])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_array("bytes", b"\x00\xff")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        config = dict(checkpoint.config)
    assert config == {
        "general.architecture": "qwen3",
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 0.5,
        "f64": 1e-300,
        "yes": True,
        "no": False,
        "text": "zażółć 🦙\n",
        "strings": ["a", "", "ß"],
        "ints": [1, -2, 3],
        "floats": [0.5, -0.25],
        "bools": [True, False],
        "nested": [[1, 2], [3]],
        "bytes": [0, 255],
    }
    assert all(type(config[key]) is bool for key in ("yes", "no"))


def test_sampling_defaults_get_their_usual_names(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf",
        {},
        general__sampling__temp=0.5,
        general__sampling__top_k=40,
        general__sampling__penalty_repeat=1.25,
        general__sampling__mirostat=1,
        general__sampling__xtc_threshold=0.25,
        general__sampling__sequence="top_k;top_p;temperature",
        another__top_p=0.5,
    )
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "gguf"
        assert checkpoint.generation_config == {
            "temperature": 0.5, "top_k": 40, "repetition_penalty": 1.25, "mirostat": 1, "xtc_threshold": 0.25,
            "samplers": ["top_k", "top_p", "temperature"],
        }  # fmt: skip


def test_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    tokens = [f"token{index}" for index in range(151_936)]
    path = write(tmp_path / "m.gguf", {}, tokens=tokens, merges=tokens, types=[1] * len(tokens))
    best = min(timed_open(path) for _ in range(3))
    assert best < 0.6  # 0.1 to 0.2 s on a machine with nothing else to do


def timed_open(path: Path) -> float:
    started = time.thread_time()
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["tokens"][-1] == "token151935"
    return time.thread_time() - started


def split_writer(folder: Path, parts: int) -> list[Path]:
    """Parts as llama.cpp's gguf-split writes them: two tensors each, metadata in the first."""
    paths = []
    for index in range(parts):
        path = folder / f"m-{index + 1:05d}-of-{parts:05d}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if index == 0:
            writer.add_uint32("llama.block_count", 7)
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", 2 * parts)
        for which in range(2):
            writer.add_tensor(f"t{2 * index + which}", np.full((2, 32), 2 * index + which, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


@pytest.mark.parametrize("named", [0, 1, 2, None])
def test_split_model_opens_by_any_part_or_folder(named: int | None, tmp_path: Path) -> None:
    paths = split_writer(tmp_path, 3)
    with open_checkpoint(tmp_path if named is None else paths[named]) as checkpoint:
        assert checkpoint.names() == [f"t{index}" for index in range(6)]
        assert [checkpoint.tensor(name)[0, 0].item() for name in checkpoint.names()] == [0, 1, 2, 3, 4, 5]
        assert checkpoint.config["llama.block_count"] == 7
        assert checkpoint.total_bytes == 6 * 2 * 32 * 4


def test_missing_parts_are_named(tmp_path: Path) -> None:
    paths = split_writer(tmp_path, 3)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 parts are missing: m-00002-of-00003\.gguf"):
        open_checkpoint(paths[2])


def test_renamed_parts_are_refused(tmp_path: Path) -> None:
    paths = split_writer(tmp_path, 2)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(paths[0].read_bytes())
    with pytest.raises(CheckpointError, match="part 1 of 2, but its name does not say so"):
        open_checkpoint(alone)
    alone.unlink()
    first, second = paths[0].read_bytes(), paths[1].read_bytes()
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    with pytest.raises(CheckpointError, match="expected part 1 of 2 by its name, found part 2 of 2"):
        open_checkpoint(paths[0])
    paths[0].write_bytes(first)
    with pytest.raises(CheckpointError, match="expected part 2 of 2"):
        open_checkpoint(paths[0])


def test_part_number_outside_its_count_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "m-00004-of-00003.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="not one of 1 to 3"):
        open_checkpoint(path)


def test_parts_with_too_few_tensors_are_refused(tmp_path: Path) -> None:
    paths = split_writer(tmp_path, 2)
    other = tmp_path / "other"
    other.mkdir()
    data = bytearray(split_writer(other, 3)[0].read_bytes())
    data[data.index(b"split.count") + len("split.count") + 4] = 2  # says that it is of two, and counts for three
    paths[0].write_bytes(data)
    with pytest.raises(CheckpointError, match="should hold 6 tensors, they hold 4"):
        open_checkpoint(paths[1])


@needs_data
def test_real_model_has_the_weights_of_the_original() -> None:
    """llama2.c's checkpoint: seven int32, then token embedding, attention norms and so on, as float32."""
    legacy = np.fromfile(DATA / "stories260K" / "checkpoint_legacy.bin", dtype=np.float32)
    with open_checkpoint(DATA / "stories260K" / "stories260K.gguf") as checkpoint:
        assert len(checkpoint.names()) == 48
        embedding = checkpoint.tensor("token_embd.weight")
        assert embedding.shape == (512, 64)
        assert same_bits(embedding, legacy[7 : 7 + 512 * 64])
        norms = legacy[7 + 512 * 64 :][: 5 * 64].reshape(5, 64)
        for layer in range(5):
            assert same_bits(checkpoint.tensor(f"blk.{layer}.attn_norm.weight"), norms[layer])


@needs_data
@pytest.mark.parametrize("name", ["stories260K/stories260K", "tokenizers/ggml-vocab-llama-spm"])
def test_real_file_is_read_like_the_package_reads_it(name: str) -> None:
    path = DATA / f"{name}.gguf"
    reader = gguf.GGUFReader(path)
    with open_checkpoint(path) as checkpoint:
        expected = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert list(checkpoint.config) == list(expected)
        for key, field in expected.items():
            if len(field.data) < 2000:  # the package takes seconds for a vocabulary
                assert checkpoint.config[key] == field.contents()
            else:
                assert len(checkpoint.config[key]) == len(field.data)
                for index in (0, 1, 777, len(field.data) - 1):
                    assert checkpoint.config[key][index] == field.contents(index)
        assert checkpoint.names() == [tensor.name for tensor in reader.tensors]
