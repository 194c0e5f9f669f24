"""Which files of a folder make the model, and what is said when none does."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from nanovllm_cli.errors import (
    AccessRefusedError,
    CheckpointError,
    ModelNotFoundError,
    NanovllmError,
    UnsupportedError,
    UsageError,
)
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.json_file import read_json_file, reading


def hf(path: Path, file: str = "model.safetensors", value: float = 1.0) -> Path:
    path.mkdir(exist_ok=True, parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": torch.full((2, 2), value)}, path / file)
    return path


def gguf_file(path: Path, value: float = 2.0) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", np.full((2, 32), value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def first_value(path: Path) -> float:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.tensor("w")[0, 0].item()


def test_folder_gives_config_and_generation_config(tmp_path: Path) -> None:
    hf(tmp_path)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.format == "hf"
        assert checkpoint.path == tmp_path
        assert checkpoint.config == {"model_type": "llama"}
        assert checkpoint.generation_config == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.generation_config == {"temperature": 0.6}


@pytest.mark.parametrize(
    ("config", "ends"),
    [({"eos_token_id": 7}, 7), ({"eos_token_id": [7, 9], "text_config": {"eos_token_id": 1}}, [7, 9]),
     ({"eos_token_id": None, "text_config": {"eos_token_id": 1}}, 1), ({"eos_token_id": 0}, 0), ({"text_config": {}}, None)],
)  # fmt: skip
def test_ends_are_config_jsons_where_no_generation_config_is(config: dict[str, Any], ends: Any, tmp_path: Path) -> None:
    hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert GenerationConfig.from_model_config({**config}).eos_token_id == ends
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.generation_config == ({} if ends is None else {"eos_token_id": ends})
    (tmp_path / "generation_config.json").write_text("{}")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.generation_config == {}


def test_model_is_taken_before_its_duplicates(tmp_path: Path) -> None:
    hf(tmp_path, "consolidated.safetensors", 3)
    assert first_value(tmp_path) == 3
    hf(tmp_path, "weights.safetensors", 4)
    assert first_value(tmp_path) == 4
    hf(tmp_path, "model.safetensors", 5)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    gguf_file(tmp_path / "m.gguf")
    assert first_value(tmp_path) == 5
    assert first_value(tmp_path / "weights.safetensors") == 4
    assert first_value(tmp_path / "m.gguf") == 2


def test_folder_with_one_gguf_is_that_gguf(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert first_value(tmp_path) == 2


def test_beside_safetensors_a_gguf_is_taken_where_no_config_says_what_they_are(tmp_path: Path) -> None:
    hf(tmp_path, "other.safetensors")
    gguf_file(tmp_path / "m.gguf")
    assert first_value(tmp_path) == 1
    (tmp_path / "config.json").unlink()
    assert first_value(tmp_path) == 2


def test_folder_with_several_ggufs_lists_them(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m-Q4_K_M.gguf")
    gguf_file(tmp_path / "m-Q8_0.gguf")
    with pytest.raises(UsageError, match=r"2 GGUF models in it: m-Q4_K_M\.gguf, m-Q8_0\.gguf"):
        open_checkpoint(tmp_path)


def test_gguf_is_recognized_by_its_content(tmp_path: Path) -> None:
    """As the blobs of the hub's cache have no extension."""
    assert first_value(gguf_file(tmp_path / "sha256-abc")) == 2


def test_several_safetensors_without_index_are_named(tmp_path: Path) -> None:
    hf(tmp_path, "a.safetensors")
    hf(tmp_path, "b.safetensors")
    with pytest.raises(CheckpointError, match=r"no index: a\.safetensors, b\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_opened(name: str, tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(pickle.dumps(Touch()))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UnsupportedError) as raised:
            open_checkpoint(path)
        assert ".safetensors" in str(raised.value.hint)
        assert raised.value.exit_code == 6
    assert not (tmp_path / "ran").exists()


def test_nothing_there_is_model_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError) as raised:
        open_checkpoint(tmp_path / "missing")
    assert raised.value.exit_code == 3


def test_folder_without_weights_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \.safetensors or \.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="adapter"):
        open_checkpoint(tmp_path)


def test_missing_config_is_said(tmp_path: Path) -> None:
    (hf(tmp_path) / "config.json").unlink()
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            open_checkpoint(path)


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "config.json/x"])
def test_impossible_paths_are_typed_errors(path: str, tmp_path: Path) -> None:
    hf(tmp_path)
    with pytest.raises(NanovllmError):
        open_checkpoint(tmp_path / path)


def test_other_files_are_unsupported(tmp_path: Path) -> None:
    hf(tmp_path)
    with pytest.raises(UnsupportedError):
        open_checkpoint(tmp_path / "config.json")


def test_special_files_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NanovllmError):
        open_checkpoint(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="no such file"):
        read_json_file(tmp_path / "pipe.safetensors", 100)


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (FileNotFoundError(2, "gone"), CheckpointError, "f: no such file"),
        (PermissionError(13, "no"), AccessRefusedError, "f: permission denied"),
        (OSError(5, "Input/output error"), CheckpointError, "f: cannot be read: Input/output error"),
    ],
)
def test_what_the_system_says_of_a_file_is_a_typed_error(failure: OSError, kind: type[NanovllmError], message: str) -> None:
    with pytest.raises(kind, match=rf"^{message}(\n|$)"), reading(Path("f")):
        raise failure


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files_are_access_refused(tmp_path: Path) -> None:
    (hf(tmp_path) / "model.safetensors").chmod(0)
    with pytest.raises(AccessRefusedError):
        open_checkpoint(tmp_path)


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not JSON"),
    "cut off": (b'{"a": [1, 2', "not JSON"),
    "two values": (b"{} {}", "not JSON"),
    "not utf-8": (b'{"a": "\xff"}', "UTF-8"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "UTF-8"),
    "list": (b"[1]", "object"),
    "null": (b"null", "null"),
    "NaN": (b'{"a": NaN}', "NaN"),
    "infinity": (b'{"a": -Infinity}', "Infinity"),
    "deep": (b"[" * 200_000, "nested"),
    "deep and closed": (b'{"a":' * 300 + b"1" + b"}" * 300, "nested"),
    "control character": (b'{"a": "\x01"}', "not JSON"),
    "digits": (b'{"a": ' + b"1" * 10_000 + b"}", "digits"),
    "too large": (b'{"a": "' + b"x" * 300_000 + b'"}', "larger than"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_json_is_a_typed_error(case: str, tmp_path: Path) -> None:
    data, fragment = BROKEN[case]
    (path := tmp_path / "config.json").write_bytes(data)
    with pytest.raises(CheckpointError) as raised:
        read_json_file(path, 250_000)
    assert fragment in raised.value.message
    assert str(path) in raised.value.message
    assert "\n" not in raised.value.message


def test_an_infinity_of_configs_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "config.json").write_bytes(b'{"time_step_limit": [0.0, Infinity]}')
    assert read_json_file(path, 100, infinity=True) == {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    for other in (b"NaN", b"-Infinity"):
        path.write_bytes(b'{"a": ' + other + b"}")
        with pytest.raises(CheckpointError, match="not a JSON number"):
            read_json_file(path, 100, infinity=True)


def test_json_as_it_was_written(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, "ż"], "b": {"c": {}}}
    (path := tmp_path / "config.json").write_text(json.dumps(value), encoding="utf-8-sig")
    assert read_json_file(path, 1000) == value
    with pytest.raises(CheckpointError, match="no such file"):
        read_json_file(tmp_path / "other.json", 1000)
