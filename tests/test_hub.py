"""Downloads with the real `huggingface_hub` client, against a hub that runs here and fails on request."""

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hub_server import COMMIT, Hub, client, etag, finish_client, serving, start_client

INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
BIG = random.Random(5).randbytes(10 << 20)  # more than hub.RESUMABLE_BYTES

SETTINGS = {
    "config.json": b'{"model_type": "qwen3"}',
    "generation_config.json": b'{"top_k": 20}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"---\nlicense: mit\n---\n",
}
CLUTTER = {
    ".gitattributes": b"x",
    "pytorch_model.bin": b"p" * 1000,
    "consolidated.safetensors": b"c" * 1000,
    "original/consolidated.00.pth": b"o" * 1000,
    "onnx/model.onnx": b"n" * 1000,
    "tf_model.h5": b"t" * 1000,
}
REPOS: dict[str, dict[str, bytes]] = {
    "org/small": {**SETTINGS, **CLUTTER, "model.safetensors": b"weights " * 1000},
    "org/sharded": {
        **SETTINGS,
        **CLUTTER,
        INDEX: json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode(),
        SHARDS[0]: b"one" * 100,
        SHARDS[1]: b"two" * 100,
        "model-00001-of-00003.safetensors": b"of an older version",
    },
    "org/big": {**SETTINGS, "model.safetensors": BIG},
    "org/m-GGUF": {
        "README.md": b"read me",
        "config.json": b"{}",
        "m-Q8_0.gguf": b"GGUF8" * 100,
        "m-q4_k_m.gguf": b"GGUF4" * 100,
        "m-F16-00001-of-00002.gguf": b"first",
        "m-F16-00002-of-00002.gguf": b"second",
        "mmproj-F16.gguf": b"projector",
        "IQ2/m-UD-IQ2_XXS.gguf": b"in a folder",
    },
    "org/other-GGUF": {"m-Q5_K_S.gguf": b"5", "m-Q6_K.gguf": b"6"},
    "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"p"},
    "org/escaping": {
        **SETTINGS,
        INDEX: json.dumps({"weight_map": {"a": "../../../../escaped.safetensors"}}).encode(),
    },
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(REPOS) as running:
        yield running


def notes(result: dict[str, Any]) -> str:
    return "\n".join(event[1] for event in result["events"] if event[0] == "note")


def advanced(result: dict[str, Any]) -> int:
    return sum(event[1] for event in result["events"] if event[0] == "advance")


def blobs(home: Path) -> list[Path]:
    return sorted(home.glob("hub/models--*/blobs/*"))


def test_cold_then_warm_then_offline(hub: Hub, tmp_path: Path) -> None:
    cold = client(tmp_path, hub.url, "org/small")
    snapshot = tmp_path / "hub" / "models--org--small" / "snapshots" / COMMIT
    wanted = {**SETTINGS, "model.safetensors": REPOS["org/small"]["model.safetensors"]}
    assert cold["path"] == str(snapshot)
    assert (cold["repo"], cold["revision"], cold["format"], cold["quant"]) == ("org/small", COMMIT, "hf", None)
    assert cold["num_bytes"] == sum(map(len, wanted.values()))
    assert hub.downloaded() == set(wanted) == {file.name for file in snapshot.iterdir()}
    assert all((snapshot / name).read_bytes() == data for name, data in wanted.items())
    stages = [event for event in cold["events"] if event[0] == "stage"]
    assert stages == [["stage", "download org/small", cold["num_bytes"], "B"]]
    assert advanced(cold) == cold["num_bytes"]
    assert cold["events"][-1] == ["done"]
    assert cold["imported"] == ["huggingface_hub"]

    hub.forget()
    warm = client(tmp_path, hub.url, "org/small")
    assert warm["path"] == cold["path"]
    assert hub.paths() == ["/api/models/org/small/revision/main"]
    assert warm["events"] == []

    hub.forget()
    pinned = client(tmp_path, hub.url, f"org/small@{COMMIT}")
    assert pinned["path"] == cold["path"]
    for offline in (
        client(tmp_path, hub.url, "org/small", offline=True),
        client(tmp_path, hub.url, "org/small", {"HF_HUB_OFFLINE": "1"}),
    ):
        assert offline["path"] == cold["path"]
        assert offline["imported"] == []
    assert hub.paths() == []


def test_offline_without_a_copy_is_model_not_found(hub: Hub, tmp_path: Path) -> None:
    for arguments in ({"offline": True}, {"env": {"HF_HUB_OFFLINE": "1"}}):
        result = client(tmp_path, hub.url, "org/small", **arguments)
        assert (result["error"], result["exit_code"]) == ("ModelNotFoundError", 3)
        assert "org/small" in result["message"]
        assert "offline" in result["message"]
    assert hub.paths() == []


def test_warm_copy_serves_when_the_hub_cannot_be_reached(hub: Hub, tmp_path: Path) -> None:
    path = client(tmp_path, hub.url, "org/small")["path"]
    nowhere = client(tmp_path, "http://127.0.0.1:9", "org/small")
    assert nowhere["path"] == path
    assert "using the copy in the cache" in notes(nowhere)
    hub.fail_status = 503
    down = client(tmp_path, hub.url, "org/small")
    assert down["path"] == path
    assert "503" in notes(down)


def test_unreachable_hub_without_a_copy_is_a_download_error(hub: Hub, tmp_path: Path) -> None:
    hub.fail_status = 502
    for url in ("http://127.0.0.1:9", "http://no-such-host.invalid", hub.url):
        result = client(tmp_path, url, "org/small")
        assert result["exit_code"] == 1
        assert "Unreachable" in result["error"]
        assert url in result["message"]
        assert result["hint"]
        assert "\n" not in result["message"]
        assert "Errno" not in result["message"]
    assert 2 <= len(hub.paths()) <= 8


def test_only_the_shards_of_the_index_are_fetched(hub: Hub, tmp_path: Path) -> None:
    result = client(tmp_path, hub.url, "org/sharded")
    assert hub.downloaded() == {*SETTINGS, INDEX, *SHARDS}
    assert result["num_bytes"] == sum(len(REPOS["org/sharded"][name]) for name in hub.downloaded())


def test_index_that_leads_outside_fetches_nothing_there(hub: Hub, tmp_path: Path) -> None:
    result = client(tmp_path, hub.url, "org/escaping")
    assert result["error"] == "CheckpointError"
    assert hub.downloaded() == {INDEX}
    assert not list(tmp_path.rglob("escaped*"))


def test_half_a_model_is_not_used_offline(hub: Hub, tmp_path: Path) -> None:
    path = Path(client(tmp_path, hub.url, "org/sharded")["path"])
    (path / SHARDS[1]).unlink()
    result = client(tmp_path, hub.url, "org/sharded", offline=True)
    assert (result["error"], result["exit_code"]) == ("ModelNotFoundError", 3)
    assert "not completely" in result["message"]
    hub.forget()
    assert client(tmp_path, hub.url, f"org/sharded@{COMMIT}")["path"] == str(path)
    assert "/resolve/" not in "".join(hub.paths("GET"))  # its blob was still there
    assert (path / SHARDS[1]).read_bytes() == REPOS["org/sharded"][SHARDS[1]]


@pytest.mark.parametrize(
    ("refusal", "error", "exit_code", "hint"),
    [
        ((401, ""), "AccessRefusedError", 4, "hf auth login"),
        ((403, ""), "AccessRefusedError", 4, "HF_TOKEN"),
        ((401, "GatedRepo"), "AccessRefusedError", 4, "accept its licence"),
        ((403, "GatedRepo"), "AccessRefusedError", 4, "accept its licence"),
        ((404, ""), "ModelNotFoundError", 3, "org/small"),
    ],
)
def test_refusals(refusal: Any, error: str, exit_code: int, hint: str, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hub" / "models--org--small" / "snapshots").mkdir(parents=True)  # a name to suggest
    for repo in ("org/smal", "org/big"):
        hub.refuse[repo] = refusal
    hub.repos = {**REPOS, "org/smal": REPOS["org/small"]}
    hub.forget()
    result = client(tmp_path, hub.url, "org/smal")
    assert (result["error"], result["exit_code"]) == (error, exit_code)
    assert hint in result["hint"]
    assert "org/smal" in result["message"]
    assert len(hub.paths()) <= 3
    assert client(tmp_path, hub.url, "org/big")["exit_code"] == exit_code


def test_unknown_repository_and_revision(hub: Hub, tmp_path: Path) -> None:
    result = client(tmp_path, hub.url, "org/missing")
    assert (result["error"], result["exit_code"]) == ("ModelNotFoundError", 3)
    result = client(tmp_path, hub.url, "org/small@v9")
    assert result["exit_code"] == 3
    assert "'v9'" in result["message"]


def test_token_is_sent(hub: Hub, tmp_path: Path) -> None:
    client(tmp_path, hub.url, "org/big", {"HF_TOKEN": "hf_secret"})
    assert hub.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_dropped_connection_goes_on_where_it_was(reset: bool, hub: Hub, tmp_path: Path) -> None:
    hub.reset = reset
    hub.drops["model.safetensors"] = [3 << 20, 4 << 20, 2 << 20, 100_000]
    result = client(tmp_path, hub.url, "org/big")
    assert (Path(result["path"]) / "model.safetensors").read_bytes() == BIG
    ranges = [range_ for method, path, range_ in hub.log if method == "GET" and path.endswith(".safetensors")]
    assert ranges[0] is None
    assert len(ranges) == 5
    assert all(ranges[1:])
    assert hub.served < len(BIG) * 1.3
    assert advanced(result) == result["num_bytes"]
    assert "trying again" in notes(result)


def test_large_files_come_by_plain_http_from_a_hub_that_has_xet_too(hub: Hub, tmp_path: Path) -> None:
    """Which goes on where it was, as here."""
    pytest.importorskip("hf_xet")
    hub.has_xet = True
    hub.drops["model.safetensors"] = [3 << 20]
    result = client(tmp_path, hub.url, "org/big", {"HF_HUB_DISABLE_XET": "0"})
    assert (Path(result["path"]) / "model.safetensors").read_bytes() == BIG
    assert "/xet-token" not in hub.paths()


def test_drops_of_a_small_file_are_survived(hub: Hub, tmp_path: Path) -> None:
    hub.drops["model.safetensors"] = [1000]
    hub.reset = True
    result = client(tmp_path, hub.url, "org/small")
    assert (Path(result["path"]) / "model.safetensors").read_bytes() == REPOS["org/small"]["model.safetensors"]
    assert advanced(result) == result["num_bytes"]


def test_download_goes_on_in_the_next_process(hub: Hub, tmp_path: Path) -> None:
    """The first one gives up (or is killed); the second one asks for the rest."""
    hub.drops["model.safetensors"] = [5 << 20] + [0] * 20
    first = client(tmp_path, hub.url, "org/big")
    assert first["exit_code"] == 1
    assert client(tmp_path, hub.url, "org/big", offline=True)["exit_code"] == 3
    hub.drops.clear()
    hub.forget()
    second = client(tmp_path, hub.url, "org/big")
    assert (Path(second["path"]) / "model.safetensors").read_bytes() == BIG
    assert hub.served < 6 << 20
    assert not [blob for blob in blobs(tmp_path) if blob.name.endswith(".incomplete")]


def test_hub_that_ignores_ranges_is_survived(hub: Hub, tmp_path: Path) -> None:
    hub.ignore_range = True
    hub.drops["model.safetensors"] = [3 << 20]
    result = client(tmp_path, hub.url, "org/big")
    assert (Path(result["path"]) / "model.safetensors").read_bytes() == BIG
    assert advanced(result) == result["num_bytes"]
    assert hub.served < len(BIG) * 1.4


def test_damaged_part_is_found_by_its_checksum(hub: Hub, tmp_path: Path) -> None:
    hub.corrupt.add("model.safetensors")
    result = client(tmp_path, hub.url, "org/big")
    assert result["exit_code"] == 1
    assert "damaged" in result["message"]
    hub.corrupt.clear()
    result = client(tmp_path, hub.url, "org/big")
    assert (Path(result["path"]) / "model.safetensors").read_bytes() == BIG


@pytest.mark.parametrize("left", [b"x" * 1000, b"y" * len(BIG), b"z" * (len(BIG) + 1000)])
def test_foreign_part_of_any_length_is_replaced(left: bytes, hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--org--big" / "blobs"
    folder.mkdir(parents=True)
    (folder / f"{etag(BIG)}.incomplete").write_bytes(left)
    result = client(tmp_path, hub.url, "org/big")
    if result.get("error"):
        assert "damaged" in result["message"]
        result = client(tmp_path, hub.url, "org/big")
    assert (Path(result["path"]) / "model.safetensors").read_bytes() == BIG


def test_two_processes_download_once(hub: Hub, tmp_path: Path) -> None:
    processes = [start_client(tmp_path, hub.url, "org/big") for _ in range(2)]
    results = [finish_client(process) for process in processes]
    assert results[0]["path"] == results[1]["path"]
    assert (Path(results[0]["path"]) / "model.safetensors").read_bytes() == BIG
    assert hub.served < len(BIG) * 1.1
    assert not [blob for blob in blobs(tmp_path) if blob.name.endswith(".incomplete")]


def test_killed_download_leaves_nothing_under_its_name(hub: Hub, tmp_path: Path) -> None:
    slow = "import time; hub._Meter.reached = lambda self, position: time.sleep(0.2)"
    process = start_client(tmp_path, hub.url, "org/big", setup=slow)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=2)
    process.kill()
    process.communicate()
    assert not list(tmp_path.rglob("model.safetensors"))
    assert client(tmp_path, hub.url, "org/big", offline=True)["exit_code"] == 3
    result = client(tmp_path, hub.url, "org/big")
    assert (Path(result["path"]) / "model.safetensors").read_bytes() == BIG


def test_full_disk_is_known_before_the_first_byte(hub: Hub, tmp_path: Path) -> None:
    setup = "import collections as c; hub.shutil.disk_usage = lambda _: c.namedtuple('Usage', 'free')({})"
    result = client(tmp_path, hub.url, "org/big", setup=setup.format(5 << 20))
    assert (result["error"], result["exit_code"]) == ("DoesNotFitError", 5)
    assert "0.0 GiB are free" in result["message"]
    assert "HF_HOME" in result["hint"]
    assert not any("/resolve/" in path for path in hub.paths())

    free = (64 << 20) + (3 << 20)  # what is to stay free, and a third of the file: the rest is here already
    assert client(tmp_path, hub.url, "org/big", setup=setup.format(free))["exit_code"] == 5
    part = tmp_path / "hub" / "models--org--big" / "blobs" / f"{etag(BIG)}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(BIG[: 8 << 20])
    assert "path" in client(tmp_path, hub.url, "org/big", setup=setup.format(free))


def test_disk_that_fills_up_is_a_typed_error(hub: Hub, tmp_path: Path) -> None:
    setup = (
        "import errno\ndef full(*_): raise OSError(errno.ENOSPC, 'No space left on device')\nhub._continue_part = full"
    )
    result = client(tmp_path, hub.url, "org/big", setup=setup)
    assert (result["error"], result["exit_code"]) == ("DoesNotFitError", 5)
    assert "full" in result["message"]


@pytest.mark.parametrize(
    ("name", "quant", "files"),
    [
        ("org/m-GGUF", "Q4_K_M", ["m-q4_k_m.gguf"]),
        ("org/m-GGUF:q8_0", "Q8_0", ["m-Q8_0.gguf"]),
        ("hf://org/m-GGUF:Q4_K_M@main", "Q4_K_M", ["m-q4_k_m.gguf"]),
        ("org/m-GGUF:f16", "F16", ["m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"]),
        ("org/m-GGUF:UD-IQ2_XXS", "UD-IQ2_XXS", ["IQ2/m-UD-IQ2_XXS.gguf"]),
        (
            "hf.co/org/m-GGUF/m-F16-00002-of-00002.gguf",
            "F16",
            ["m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"],
        ),
        ("org/m-GGUF/IQ2/m-UD-IQ2_XXS.gguf", "UD-IQ2_XXS", ["IQ2/m-UD-IQ2_XXS.gguf"]),
        ("org/other-GGUF", "Q5_K_S", ["m-Q5_K_S.gguf"]),
    ],
)
def test_quantization_picks_its_files(name: str, quant: str, files: list[str], hub: Hub, tmp_path: Path) -> None:
    result = client(tmp_path, hub.url, name)
    assert hub.downloaded() == set(files)
    assert result["quant"] == quant
    assert result["format"] == "gguf"
    assert result["path"].endswith(f"/snapshots/{COMMIT}/{files[0]}")
    assert Path(result["path"]).is_file()
    assert ("took" in notes(result)) == (":" not in name.removeprefix("hf://") and not name.endswith(".gguf"))
    assert client(tmp_path, hub.url, name, offline=True)["path"] == result["path"]


def test_unknown_quantization_lists_what_there_is(hub: Hub, tmp_path: Path) -> None:
    result = client(tmp_path, hub.url, "org/m-GGUF:Q3_K_S")
    assert (result["error"], result["exit_code"]) == ("UsageError", 2)
    assert result["hint"] == "there are: F16, Q4_K_M, Q8_0, UD-IQ2_XXS"
    assert "no GGUF files" in client(tmp_path, hub.url, "org/small:Q4_K_M")["message"]
    assert hub.downloaded() == set()


def test_pickles_are_not_even_downloaded(hub: Hub, tmp_path: Path) -> None:
    result = client(tmp_path, hub.url, "org/pickled")
    assert (result["error"], result["exit_code"]) == ("UnsupportedError", 6)
    assert ".safetensors" in result["hint"]
    assert hub.downloaded() == set()
