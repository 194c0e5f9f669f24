"""`nanovllm models` and `nanovllm plan` against a small hub; what is expected is transformers' or worked out by hand."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors import safe_open
from transformers import Qwen3Config

import hub_server
from engines import SMALL, random_model
from forked import Terminal
from forked_commands import Commands
from hub_server import Hub
from nanovllm_cli.cli import progress_line
from nanovllm_cli.kernels import compact
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.weights import convert
from quantizing import TINY, quantize
from test_llm import VOCAB, write_byte_tokenizer

SHAPE = SMALL | {"vocab_size": VOCAB, "head_dim": 32, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 5000}
OTHER_COMMIT = "f" * 40
README = b"---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def to_gguf(folder: Path, target: Path, outtype: str) -> Path:
    with convert.open_source(folder) as checkpoint:
        made = convert.plan(checkpoint, "gguf", outtype)
        convert.write(checkpoint, made, target, progress=NullProgress())
    return target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    model = random_model(Qwen3Config(**SHAPE), dtype=torch.bfloat16)
    for name, size in (("dense", "5GB"), ("sharded", "150KB")):
        model.save_pretrained(root / name, max_shard_size=size)
        write_byte_tokenizer(root / name)
    (root / "dense" / "README.md").write_bytes(README)
    generation = {"temperature": 0.6, "top_k": 20, "eos_token_id": 257}
    (root / "dense" / "generation_config.json").write_text(json.dumps(generation))
    (root / "quants").mkdir()
    for outtype in ("q8_0", "f16"):
        to_gguf(TINY, root / "quants" / f"tiny-{outtype.upper()}.gguf", outtype)
    quantize("int4:group=32", root / "int4")
    (root / "rwkv").mkdir()
    shutil.copytree(root / "dense", root / "rwkv", dirs_exist_ok=True)
    config = json.loads((root / "dense" / "config.json").read_text())
    (root / "rwkv" / "config.json").write_text(json.dumps(config | {"architectures": ["RwkvForCausalLM"]}))
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def hub(folders: dict[str, Path]) -> Iterator[Hub]:
    repos = {f"org/{name}": contents(folder) for name, folder in folders.items()}
    with hub_server.serving({**repos, "org/gated": repos["org/dense"], "org/empty": {"notes.txt": b"none"}}) as hub:
        hub.refuse["org/gated"] = (403, "GatedRepo")
        yield hub


@pytest.fixture(scope="module")
def commands(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    environ = hub_server.environment(tmp_path_factory.mktemp("home"), hub.url)
    return Commands({key: value for key, value in environ.items() if not key.startswith("NANOVLLM_")})


@pytest.fixture
def home(tmp_path: Path, commands: Commands, hub: Hub) -> Path:
    """An empty cache of its own for each test."""
    hub.forget()
    hub.commit = hub_server.COMMIT
    return tmp_path / "hub"


def pulled(commands: Commands, home: Path, *words: str) -> None:
    result = commands.run("models", "pull", *words, HF_HUB_CACHE=str(home))
    assert result.code == 0, result.err


# ---- models ----


def test_pull_downloads_once_and_prints_where(commands: Commands, home: Path, hub: Hub) -> None:
    first = commands.run("models", "pull", "org/dense", HF_HUB_CACHE=str(home))
    assert first.code == 0
    assert Path(first.out.strip()) == home / "models--org--dense" / "snapshots" / hub.commit
    hub.forget()
    again = commands.run("models", "pull", "org/dense", "--json", HF_HUB_CACHE=str(home))
    assert (again.json["repo"], again.json["revision"], again.json["path"]) == ("org/dense", hub.commit, first.out.strip())
    assert not hub.downloaded()
    one = commands.run("models", "pull", "org/quants:Q8_0", "-q", HF_HUB_CACHE=str(home))
    assert (one.code, one.err, hub.downloaded()) == (0, "", {"tiny-Q8_0.gguf"})


def test_list_says_what_is_there_and_why_it_does_not_run(commands: Commands, home: Path, folders: dict[str, Path]) -> None:
    for name in ("org/dense", "org/quants:Q8_0", "org/quants:F16", "org/rwkv", "org/int4", "org/sharded"):
        pulled(commands, home, name)
    snapshot = next((home / "models--org--sharded" / "snapshots").iterdir())
    (snapshot / "model-00002-of-00003.safetensors").unlink(missing_ok=True)
    (home / "models--org--strange" / "snapshots" / OTHER_COMMIT).mkdir(parents=True)
    listed = commands.run("models", "list", "--json", HF_HUB_CACHE=str(home)).json["models"]
    rows = {row["name"]: row for row in listed}
    assert next(row["name"] for row in listed) == "tiny"
    dense = rows["org/dense"]
    assert (dense["stored"], dense["refs"], dense["loadable"]) == ("BF16", ["main"], True)
    files = ("README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    assert dense["bytes"] == sum((folders["dense"] / name).stat().st_size for name in files)
    assert rows["org/quants:Q8_0"]["stored"] == "Q8_0"
    assert rows["org/quants:F16"]["bytes"] == (folders["quants"] / "tiny-F16.gguf").stat().st_size
    assert rows["org/int4"]["stored"] == "compressed-tensors"
    assert rows["org/int4"]["loadable"]
    assert "RwkvForCausalLM" in rows["org/rwkv"]["problem"]
    assert "incomplete" in rows["org/sharded"]["problem"]
    table = commands.run("models", "list", HF_HUB_CACHE=str(home))
    assert table.code == 0
    lines = table.out.splitlines()
    assert lines[0].split()[:3] == ["name", "short", "weights"]
    assert any(line.startswith("org/rwkv ") and "can't run: " in line for line in lines)
    assert len(lines) == len(listed) + 1


def test_list_of_an_empty_cache_and_short_names(commands: Commands, home: Path, tmp_path: Path) -> None:
    empty = commands.run("models", "list", "-q", HF_HUB_CACHE=str(home))
    assert (empty.code, empty.err) == (0, "")
    assert [line.split()[0] for line in empty.out.splitlines()] == ["name", "tiny"]
    (tmp_path / "config" / "nanovllm").mkdir(parents=True)
    (tmp_path / "config" / "nanovllm" / "config.toml").write_text('[aliases]\nmine = "org/dense"\n')
    pulled(commands, home, "org/dense")
    settings = {"HF_HUB_CACHE": str(home), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    names = commands.run("models", "list", "--short-names", "--json", **settings).json
    assert names["short_names"]["mine"] == "org/dense"
    assert names["short_names"]["qwen3:4b"] == "Qwen/Qwen3-4B"
    assert names["cached"] == ["org/dense"]
    rows = commands.run("models", "list", "--json", **settings).json["models"]
    assert [row["short_name"] for row in rows] == [None, "mine"]
    assert commands.run("models", "show", "mine", "--json", **settings).json["repo"] == "org/dense"


def test_show_says_what_transformers_and_the_file_say(commands: Commands, home: Path, folders: dict[str, Path]) -> None:
    shown = commands.run("models", "show", str(folders["dense"]), "--json").json
    with safe_open(folders["dense"] / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    assert shown["parameters"] == sum(sizes.values())
    by_class = {row["class"]: row for row in shown["tensors"]}
    wanted = {
        "embedding": "embed_tokens", "attention": "_proj.weight", "mlp": ".mlp.", "norms": "norm", "head": "lm_head",
    }  # fmt: skip
    for name, mark in wanted.items():
        mine = [size for key, size in sizes.items() if mark in key and (name == "mlp" or ".mlp." not in key)]
        assert (by_class[name]["count"], by_class[name]["numbers"], by_class[name]["bits"]) == (len(mine), sum(mine), 16.0)
    assert (shown["licence"], shown["defaults"]) == ("apache-2.0", {"temperature": 0.6, "top_k": 20})
    assert (shown["context"], shown["vocabulary"], shown["layers"]) == (5000, VOCAB, 3)
    assert shown["attention"] == {"heads": 6, "kv_heads": 2, "head_dim": 32}
    assert ["</s>", 257] in shown["tokenizer"]["special"]["eos"]
    text = commands.run("models", "show", str(folders["dense"])).out
    assert "apache-2.0" in text
    assert "6 heads over 2 of keys and values" in text
    template = commands.run("models", "show", str(folders["dense"]), "--template").out
    assert template.rstrip("\n") == shown["template"]


def test_show_of_a_gguf_file_counts_its_blocks(commands: Commands, folders: dict[str, Path]) -> None:
    path = folders["quants"] / "tiny-Q8_0.gguf"
    shown = commands.run("models", "show", str(path), "--json").json
    tensors = GGUFReader(path).tensors
    assert shown["tensor_bytes"] == sum(int(tensor.n_bytes) for tensor in tensors)
    assert shown["parameters"] == sum(int(tensor.n_elements) for tensor in tensors)
    q8 = sum(int(tensor.n_elements) for tensor in tensors if tensor.tensor_type == GGMLQuantizationType.Q8_0)
    assert sum(row["types"].get("Q8_0", 0) for row in shown["tensors"]) == q8
    assert {row["class"]: row["bits"] for row in shown["tensors"]}["mlp"] == 8.5


def test_show_of_what_is_not_here_says_what_to_do(commands: Commands, home: Path, hub: Hub) -> None:
    result = commands.run("models", "show", "org/dense", HF_HUB_CACHE=str(home))
    assert (result.code, result.out, hub.log) == (3, "", [])
    assert "nanovllm plan org/dense" in result.err
    assert "nanovllm models pull org/dense" in result.err
    assert commands.run("models", "show", "nothing-like-it", HF_HUB_CACHE=str(home)).code == 3
    assert commands.run("models", "show", "/no/such/file.gguf", HF_HUB_CACHE=str(home)).code == 3


def test_show_says_where_a_revision_is_not_looked_at(commands: Commands) -> None:
    result = commands.run("models", "show", "tiny", "--revision", "v2")
    assert result.code == 0
    assert result.err == "revision v2 is not looked at: tiny does not come from the hub\n"


def test_rm_keeps_what_another_revision_uses(commands: Commands, home: Path, hub: Hub) -> None:
    pulled(commands, home, "org/dense")
    hub.commit = OTHER_COMMIT
    pulled(commands, home, f"org/dense@{OTHER_COMMIT}")
    repo = home / "models--org--dense"
    blobs = sorted(path.name for path in (repo / "blobs").iterdir())
    one = commands.run("models", "rm", "-y", f"org/dense@{OTHER_COMMIT[:8]}", HF_HUB_CACHE=str(home))
    assert one.code == 0, one.err
    assert [path.name for path in (repo / "snapshots").iterdir()] == [hub_server.COMMIT]
    assert sorted(path.name for path in (repo / "blobs").iterdir()) == blobs
    rest = commands.run("models", "rm", "-y", "org/dense", HF_HUB_CACHE=str(home))
    assert (rest.code, rest.out) == (0, "")
    assert not repo.exists()


def test_rm_touches_nothing_outside_of_the_cache(
    commands: Commands, home: Path, hub: Hub, folders: dict[str, Path], tmp_path: Path
) -> None:
    pulled(commands, home, "org/dense")
    hub.commit = OTHER_COMMIT
    pulled(commands, home, f"org/dense@{OTHER_COMMIT}")
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("dear")
    snapshot = home / "models--org--dense" / "snapshots" / OTHER_COMMIT
    (snapshot / "thesis.txt").symlink_to(thesis)
    for name in (f"org/dense@{OTHER_COMMIT}", "org/dense"):
        commands.run("models", "rm", "-y", name, HF_HUB_CACHE=str(home))
        assert thesis.read_text() == "dear", name


def test_a_commit_of_two_repositories_is_removed_from_the_one_that_was_named(commands: Commands, home: Path) -> None:
    """Commits are the same in a copy that was pushed with git; hub_server has one commit for all repositories."""
    names = ("org/dense", "org/sharded", "org/quants:Q8_0")
    for name in names:
        pulled(commands, home, name)
    result = commands.run("models", "rm", "-y", "org/sharded", HF_HUB_CACHE=str(home))
    assert result.code == 0, result.err
    assert sorted(path.name for path in home.glob("models--*")) == ["models--org--dense", "models--org--quants"]
    assert "org/sharded: 1 revision (" in result.err


def test_what_is_left_of_a_download_is_listed_and_can_be_removed(commands: Commands, home: Path) -> None:
    """A cache that its owner has tidied by hand, and one in which no file was ever finished."""
    tidied, begun = home / "models--org--tidied", home / "models--org--begun"
    (tidied / "snapshots" / OTHER_COMMIT).mkdir(parents=True)
    (tidied / "snapshots" / OTHER_COMMIT / "model.safetensors").symlink_to("../../blobs/gone")
    for folder in (tidied, begun):
        (folder / "blobs").mkdir(parents=True)
        (folder / "blobs" / "abc.incomplete").write_bytes(bytes(5000))
    (begun / "snapshots").mkdir()
    listed = json.loads(commands.run("models", "list", "--json", HF_HUB_CACHE=str(home)).out)["models"]
    rows = {row["name"]: row for row in listed}
    for name in ("org/tidied", "org/begun"):
        assert (rows[name]["bytes"], rows[name]["loadable"]) == (5000, False)
        assert "models rm" in rows[name]["problem"]
        asked = commands.run("models", "rm", name, HF_HUB_CACHE=str(home))
        assert (asked.code, "no whole revision, 4.9 KiB" in asked.err) == (2, True), asked.err
        assert commands.run("models", "rm", "-y", name, HF_HUB_CACHE=str(home)).code == 0
    assert not list(home.glob("models--*"))


def test_rm_leaves_a_download_that_is_under_way(commands: Commands, home: Path) -> None:
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    pulled(commands, home, "org/dense")
    part = home / "models--org--begun" / "blobs" / "abc.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(5000))
    (part.parent.parent / "snapshots").mkdir()
    for name in ("begun", "dense"):
        folder = home / f"models--org--{name}"
        locks = home / ".locks" / folder.name
        locks.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(locks / "abc.lock"):
            result = commands.run("models", "rm", "-y", f"org/{name}", HF_HUB_CACHE=str(home))
            assert (result.code, f"org/{name} is being downloaded" in result.err) == (1, True), result.err
            assert folder.is_dir()
        os.mkfifo(locks / "pipe.lock")  # nobody ever writes into it
        assert commands.run("models", "rm", "-y", f"org/{name}", HF_HUB_CACHE=str(home)).code == 0
        assert not folder.exists()
    assert not part.exists()


def test_rm_counts_what_a_broken_off_download_has_left(commands: Commands, home: Path) -> None:
    pulled(commands, home, "org/dense")
    blobs = home / "models--org--dense" / "blobs"
    (blobs / "abc.incomplete").write_bytes(bytes(3 << 20))
    held = sum(path.stat().st_size for path in blobs.iterdir())
    result = commands.run("models", "rm", "-y", "org/dense", HF_HUB_CACHE=str(home))
    assert f"removed; {progress_line.size(held)} are free again" in result.err
    assert not list(home.glob("models--*"))


def test_a_revision_is_found_by_the_short_commit_that_the_list_shows(commands: Commands, home: Path) -> None:
    pulled(commands, home, f"org/dense@{hub_server.COMMIT}")
    listed = json.loads(commands.run("models", "list", "--json", HF_HUB_CACHE=str(home)).out)["models"]
    name = listed[1]["name"]
    assert name == f"org/dense@{hub_server.COMMIT[:7]}"
    for words in (("models", "show", name), ("models", "pull", "--offline", name), ("models", "pull", name)):
        result = commands.run(*words, HF_HUB_CACHE=str(home))
        assert result.code == 0, result.err
    shorter = commands.run("models", "show", f"org/dense@{hub_server.COMMIT[:6]}", HF_HUB_CACHE=str(home))
    assert shorter.code == 3


def test_rm_refuses_what_is_not_in_the_cache(commands: Commands, home: Path, folders: dict[str, Path]) -> None:
    pulled(commands, home, "org/dense")
    for name in (str(folders["dense"]), "tiny", ".", "org/dense:Q8_0"):
        assert commands.run("models", "rm", "-y", name, HF_HUB_CACHE=str(home)).code == 2, name
    for name in ("org/other", "org/dense@nobranch", "/no/such/folder"):
        assert commands.run("models", "rm", "-y", name, HF_HUB_CACHE=str(home)).code == 3, name
    assert (folders["dense"] / "config.json").exists()
    assert len(list((home / "models--org--dense" / "snapshots").iterdir())) == 1


def test_rm_asks_on_a_terminal_and_needs_yes_elsewhere(commands: Commands, home: Path) -> None:
    pulled(commands, home, "org/dense")
    script = commands.run("models", "rm", "org/dense", HF_HUB_CACHE=str(home))
    assert (script.code, "-y" in script.err) == (2, True)
    environ = {**os.environ, "HF_HUB_CACHE": str(home), "TERM": "xterm"}
    for reply, code, stays in (("", 1, True), ("n", 1, True), ("y", 0, False)):
        child = Terminal(sys.executable, ["-m", "nanovllm_cli", "models", "rm", "org/dense"], light=True, env=environ, timeout=60)
        child.expect_exact("remove org/dense from the cache? [y/N] ")
        child.sendline(reply) if reply else child.sendeof()
        child.expect(pexpect.EOF)
        child.close()
        assert child.before.count(b"\r\n") == 2  # behind the question, and behind what came of it
        assert child.exitstatus == code
        assert (home / "models--org--dense").exists() is stays


def test_rm_leaves_a_download_that_began_while_it_asked(commands: Commands, home: Path) -> None:
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    pulled(commands, home, "org/dense")
    environ = {**os.environ, "HF_HUB_CACHE": str(home), "TERM": "xterm"}
    child = Terminal(sys.executable, ["-m", "nanovllm_cli", "models", "rm", "org/dense"], light=True, env=environ, timeout=60)
    child.expect_exact("[y/N]")
    locks = home / ".locks" / "models--org--dense"
    locks.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(locks / "abc.lock"):
        child.sendline("y")
        child.expect_exact("org/dense is being downloaded")
        child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 1
    assert (home / "models--org--dense" / "snapshots").exists()


# ---- plan ----


def planned(commands: Commands, home: Path, *words: str) -> Any:
    result = commands.run("plan", *words, "--json", "--device", "cpu", HF_HUB_CACHE=str(home))
    assert result.code == 0, result.err
    return result.json


@pytest.mark.parametrize("name", ["dense", "sharded", "quants:Q8_0", "int4"])
def test_a_plan_before_the_download_is_the_plan_after_it(commands: Commands, home: Path, hub: Hub, name: str) -> None:
    before = planned(commands, home, f"org/{name}")
    assert not home.exists(), "nothing is kept"
    assert hub.served < 3 << 20
    assert all(wanted for _, path, wanted in hub.log if path.endswith((".safetensors", ".gguf")))
    assert before["download_bytes"] > 0
    pulled(commands, home, f"org/{name}")
    after = planned(commands, home, f"org/{name}")
    assert (after["download_bytes"], before.pop("check")) == (0, None)
    same = set(before) - {"where", "download_bytes", "free_bytes", "kv_cache_room_bytes"}
    if name == "int4":  # of weights that others quantized only the size in the file is known before
        same -= {"weights"}
        sizes = [each["weights"][0]["weight_bytes"] for each in (before, after)]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
    for key in same - {"weights"}:
        assert before[key] == after[key], key
    if "weights" in same:
        drop = ("longest_context",)
        assert [{k: v for k, v in row.items() if k not in drop} for row in before["weights"]] == [
            {k: v for k, v in row.items() if k not in drop} for row in after["weights"]
        ]


def bf16_bytes(rows: int, width: int) -> int:
    """64 outputs at a time. In 12 bits: a table, 1.5 bytes a number, room for a list of those that are not in the table."""
    each = 64 + 64 * width * 3 // 2 + 8 * (1 + max(16, width // 8)) if compact.AVAILABLE else 2 * 64 * width
    return -(-rows // 64) * each


def test_memory_and_speed_by_hand(commands: Commands, home: Path, folders: dict[str, Path]) -> None:
    made = planned(commands, home, str(folders["dense"]), "-c", "1000")
    hidden, width, heads, kv_heads, dim, layers = 64, 96, 6, 2, 32, 3
    matrices = layers * (hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * width)
    norms = hidden + layers * (2 * hidden + 2 * dim)
    numbers = matrices + norms + 2 * VOCAB * hidden
    assert made["parameters"] == numbers
    rows = {row["quant"]: row for row in made["weights"]}
    inner = [heads * dim, kv_heads * dim, kv_heads * dim, width, width]
    shapes = [*((rows, hidden) for rows in inner), (hidden, heads * dim), (hidden, width)]
    outer = bf16_bytes(VOCAB, hidden)
    assert rows[None]["weight_bytes"] == layers * sum(bf16_bytes(*shape) for shape in shapes) + 2 * outer + 2 * norms
    of_rows = layers * (2 * heads * dim + 2 * kv_heads * dim + 2 * width + 2 * hidden - heads * dim) + 2 * VOCAB
    assert rows["int8"]["weight_bytes"] == matrices + 2 * VOCAB * hidden + 2 * of_rows + 2 * norms, "a scale of 2 bytes a row"
    cache = {(row["cache_type"], row["context"]): row["num_bytes"] for row in made["kv_cache"]}
    assert sorted(length for kind, length in cache if kind == "int8") == [1000, 4096, 5000]
    for batch, found in zip((1, 8, 32), cache["bfloat16", 4096], strict=True):
        assert found == batch * 4096 * layers * 2 * kv_heads * dim * 2
    assert cache["int8", 5000][0] == 5008 * layers * 2 * kv_heads * (dim + 4), "whole blocks; a byte each, and a scale"
    # A token 512 deep reads every matrix but the embedding, and K and V; at 20 GB/s, or 200 GFLOP/s.
    read = rows[None]["weight_bytes"] - outer + 512 * layers * 2 * kv_heads * dim * 2
    work = 2 * (matrices + VOCAB * hidden) + 4 * 512 * layers * heads * dim
    assert rows[None]["decode"] == pytest.approx(1 / max(read / 20e9, work / 200e9))
    # A prompt leaves out the head, and the last layer's MLP.
    work = 512 * (2 * (matrices - 3 * hidden * width) + 4 * 256 * layers * heads * dim)
    assert rows[None]["prefill"] == pytest.approx(512 / (work / 200e9))


def test_the_machine_is_as_kept_measured_anew_or_left_out(commands: Commands, home: Path) -> None:
    rooflines = [planned(commands, home, "tiny", "--roofline", how) for how in ("cached", "measure", "off")]
    assert [made["roofline"] and made["roofline"]["read_gb_s"] for made in rooflines] == [20.0, 40.0, None]
    assert [row["decode"] is None for made in rooflines for row in made["weights"][:1]] == [False, False, True]
    table = commands.run("plan", "tiny", "--roofline", "off", "--device", "cpu")
    assert "GB/s" not in table.out
    assert "speeds are" not in table.out
    assert table.err == ""
    for_gpus = commands.run("plan", "tiny", "--roofline", "off", "--device", "cpu", "--gpu-memory-utilization", "0.5")
    free = re.compile(r"[\d.]+ GiB of memory")  # what the machine has changes meanwhile
    assert free.sub("", for_gpus.out) == free.sub("", table.out)
    assert for_gpus.err == "gpu-memory-utilization is for GPUs, and changes nothing on a CPU\n"


def test_what_does_not_fit_is_said(commands: Commands, home: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """A config of a large model, and a file as long as that; nobody could load its zeros."""
    large = tmp_path / "large"
    large.mkdir()
    config = json.loads((folders["dense"] / "config.json").read_text())
    config |= {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
               "head_dim": 128, "num_hidden_layers": 80, "vocab_size": 128256, "max_position_embeddings": 131072}  # fmt: skip
    (large / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": [128256, 8192], "lm_head.weight": [128256, 8192], "model.norm.weight": [8192]}
    for layer in range(80):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{part}_proj.weight": shape for part, shape in
                   {"q": [8192, 8192], "k": [1024, 8192], "v": [1024, 8192], "o": [8192, 8192]}.items()}  # fmt: skip
        shapes |= {f"{prefix}self_attn.{part}_norm.weight": [128] for part in "qk"}
        shapes |= {f"{prefix}mlp.{part}_proj.weight": [28672, 8192] for part in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": [8192, 28672]}
        shapes |= {f"{prefix}{part}_layernorm.weight": [8192] for part in ("input", "post_attention")}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (large / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    made = planned(commands, home, str(large))
    assert made["parameters"] == pytest.approx(70.55e9, rel=0.001), "Llama 3 70B, and norms of q and k"
    assert not made["fits"]
    assert made["weights"][0]["longest_context"] == 0
    table = commands.run("plan", str(large), "--device", "cpu")
    assert "does not fit beside the weights" in table.out
    assert commands.run("plan", str(large), "--check", "--device", "cpu").code == 5


def test_what_was_planned_is_what_happens(commands: Commands, home: Path) -> None:
    made = planned(commands, home, "tiny", "--check", "--quant", "int8")
    assert [row["quant"] for row in made["weights"]] == ["int8"]
    found = {row["what"]: row for row in made["check"]}
    assert found["weights"]["share"] == pytest.approx(1.0, abs=0.1)
    assert found["KV cache"]["share"] == pytest.approx(1.0, abs=0.1)
    assert found["whole process"]["found"] < found["whole process"]["planned"] * 1.5
    assert all(row["found"] > 0 for row in found.values())


def test_a_context_with_no_room_for_an_answer_is_compared_by_its_prompt(commands: Commands, home: Path) -> None:
    found = {row["what"]: row["found"] for row in planned(commands, home, "tiny", "--check", "-c", "4")["check"]}
    assert found.keys() == {"weights", "KV cache", "whole process", "prompt of 4"}
    assert found["prompt of 4"] > 0


@pytest.mark.parametrize(("name", "code", "words"), [
    ("org/missing", 3, "private, or there is no such model|not on"), ("org/gated", 4, "gated"),
    ("org/empty", 6, "no .safetensors"),
    ("org/rwkv", 6, "RwkvForCausalLM"), ("org/quants:Q5_K_M", 2, "no quantization"), ("org/dense@nobranch", 3, "no revision"),
    ("nothing", 3, "no model is called"), ("/no/such/path", 3, "no such file"),
])  # fmt: skip
def test_a_plan_is_refused_as_a_run_is(commands: Commands, home: Path, name: str, code: int, words: str) -> None:
    result = commands.run("plan", name, HF_HUB_CACHE=str(home))
    assert (result.code, result.out) == (code, "")
    assert any(word in result.err for word in words.split("|")), result.err


def test_a_plan_offline_needs_the_cache(commands: Commands, home: Path) -> None:
    assert commands.run("plan", "org/dense", "--offline", HF_HUB_CACHE=str(home)).code == 3
    pulled(commands, home, "org/dense")
    assert commands.run("plan", "org/dense", "--offline", HF_HUB_CACHE=str(home)).code == 0


def test_a_hub_that_sends_no_parts_is_read_no_further_than_needed(commands: Commands, home: Path, hub: Hub) -> None:
    hub.ignore_range = True
    try:
        assert planned(commands, home, "org/quants:Q8_0")["stored"] == "Q8_0"
    finally:
        hub.ignore_range = False


@pytest.mark.parametrize("damage", [
    lambda data: (1 << 40).to_bytes(8, "little") + data[8:], lambda data: data[:8] + b"}" + data[9:], lambda data: data[:30],
])  # fmt: skip
def test_broken_headers_on_the_hub_are_refused(commands: Commands, home: Path, hub: Hub, damage: Any) -> None:
    files = hub.repos["org/dense"]
    hub.repos["org/broken"] = files | {"model.safetensors": damage(files["model.safetensors"])}
    result = commands.run("plan", "org/broken", HF_HUB_CACHE=str(home))
    assert result.code == 1, result.err
    assert "model.safetensors" in result.err
