"""What a name means: paths, hub names, aliases, the cache; no request is made here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.platforms import select_platform
from nanovllm_cli.errors import AccessRefusedError, ModelNotFoundError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.weights import hub, source
from nanovllm_cli.weights.aliases import ALIASES
from nanovllm_cli.weights.files import choose, quant_of, split_parts
from nanovllm_cli.weights.source import HubName, parse_hub_name, resolve

COMMIT = "89abcdef" * 5


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and an empty working directory; nothing may be asked of the hub."""
    for key in [key for key in os.environ if key.startswith(("HF_", "HUGGINGFACE_", "TRANSFORMERS_"))]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a request")

    monkeypatch.setattr(hub, "list_repo", refuse)
    monkeypatch.setattr(hub, "fetch", refuse)
    return tmp_path / "home"


def cached(home: Path, repo: str, files: dict[str, str], revision: str | None = "main") -> Path:
    folder = home / "hub" / ("models--" + repo.replace("/", "--"))
    for name, text in files.items():
        path = folder / "snapshots" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if revision:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / revision).write_text(COMMIT)
    return folder / "snapshots" / COMMIT


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/repo", HubName("org/repo")),
        ("org/repo:Q4_K_M", HubName("org/repo", quant="Q4_K_M")),
        ("org/repo@v1.0", HubName("org/repo", revision="v1.0")),
        ("org/repo:q8_0@refs/pr/7", HubName("org/repo", "q8_0", "refs/pr/7")),
        ("org/repo/m.Q4_0.gguf", HubName("org/repo", file="m.Q4_0.gguf")),
        ("org/repo/sub/m.gguf@v2", HubName("org/repo", revision="v2", file="sub/m.gguf")),
        ("hf:org/repo", HubName("org/repo")),
        ("hf://org/repo:Q4_0", HubName("org/repo", "Q4_0")),
        ("HF:org/repo", HubName("org/repo")),
        ("hf:gpt2", HubName("gpt2")),
        ("hf.co/org/repo", HubName("org/repo")),
        ("hf.co/org/repo:Q8_0", HubName("org/repo", "Q8_0")),
        ("huggingface.co/org/repo", HubName("org/repo")),
        ("https://huggingface.co/org/repo", HubName("org/repo")),
        ("https://huggingface.co/org/repo/", HubName("org/repo")),
        ("https://hf.co/org/repo@abc", HubName("org/repo", revision="abc")),
        ("https://huggingface.co/org/repo/tree/v2", HubName("org/repo", revision="v2")),
        ("https://huggingface.co/org/repo/tree/refs%2Fpr%2F1", HubName("org/repo", revision="refs/pr/1")),
        ("https://huggingface.co/org/repo/blob/main/m.gguf", HubName("org/repo", revision="main", file="m.gguf")),
        (
            "https://huggingface.co/org/repo/resolve/main/a/m.gguf?download=true",
            HubName("org/repo", revision="main", file="a/m.gguf"),
        ),
        ("Qwen/Qwen2.5-0.5B-Instruct_x", HubName("Qwen/Qwen2.5-0.5B-Instruct_x")),
    ],
)
def test_hub_name_is_parsed(name: str, expected: HubName) -> None:
    assert parse_hub_name(name) == expected


NO_HUB_NAMES = [
    "",
    "repo",
    "repo:4b",
    "./org/repo",
    "/org/repo",
    "../x",
    "~/x/y",
    "org/",
    "/repo",
    "org//repo",
    "org/repo/",
]
NO_HUB_NAMES += ["folder/model.gguf", "folder/model.safetensors", "https://example.com/org/repo", "org/re po", "a--b/c"]
NO_HUB_NAMES += [
    "org/..",
    "org/" + "x" * 100,
    "@x",
    ":x",
    "ftp://hf.co/org/repo",
    "org/\0",
    "órg/repo",
    "org\\repo",
    "o/r\n",
]


@pytest.mark.parametrize("name", NO_HUB_NAMES)
def test_other_text_is_no_hub_name(name: str) -> None:
    assert parse_hub_name(name) is None
    with pytest.raises(ModelNotFoundError):
        resolve(name, offline=True)


@pytest.mark.parametrize("name", ["x" * 10_000, "\udcff", "a\0b", "~\0", "~nobody-here/x", "\x1b[31mred", "a\nb"])
def test_strange_names_are_typed_errors_on_one_line(name: str) -> None:
    with pytest.raises(NanovllmError) as raised:
        resolve(name, offline=True)
    assert raised.value.message.isprintable()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["hf:", "hf://", "hf.co/", "https://", "huggingface.co", "/", ":", "@", "..", "org", "Q4_0"]
            ),
            st.sampled_from(
                ["tree/main", "blob/", ".gguf", "-00001-of-00002", "?", "#", "[", "%2F", "%00", "~", "tiny"]
            ),
            st.text(max_size=4),
        ),
        max_size=8,
    )
)
def test_any_text_ends_in_a_typed_error_or_a_path(pieces: list[str]) -> None:
    try:
        resolve("".join(pieces), offline=True)
    except NanovllmError as error:
        message = error.message
    else:
        message = "it was a path"
    assert "\n" not in message


def test_in_a_folder_that_may_not_be_looked_into_names_are_none_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, *args: Any, **more: Any) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(AccessRefusedError, match="tiny: permission denied"):
        source._existing_path("tiny")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert source._existing_path("tiny") is None
    with pytest.raises(AccessRefusedError, match="tiny: permission denied"):
        source._existing_path("./tiny")


def test_existing_path_wins_over_everything(tmp_path: Path) -> None:
    for name in ("qwen3", "org/repo", "tiny"):
        folder = tmp_path / "work" / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"12345")
        model = resolve(name)
        assert model == source.ResolvedModel(Path(name), name, None, None, None, 5, "hf")
        assert str(model) == model.told_as(name) == f"{name} (0.0 MB)", "a path is not said twice"
        assert model.told_as(f"./{name}") == str(model)
        assert model.told_as("mine") == f"mine: {name} (0.0 MB)"


def test_paths_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(b"x" * number)
    model = resolve("~/m-00002-of-00002.gguf")
    assert (model.path, model.format, model.num_bytes) == (tmp_path / "m-00002-of-00002.gguf", "gguf", 3)
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    assert resolve(str(tmp_path / "model.safetensors")).format == "hf"
    assert resolve(str(tmp_path)).format == "hf"
    (tmp_path / "model.safetensors").unlink()
    assert resolve(str(tmp_path)).format == "gguf"


def test_quantization_picks_from_a_folder(tmp_path: Path) -> None:
    for quant in ("Q4_K_M", "Q8_0"):
        (tmp_path / f"m-{quant}.gguf").write_bytes(b"x")
    assert resolve(str(tmp_path), quant="q8_0").path == tmp_path / "m-Q8_0.gguf"
    with pytest.raises(UsageError, match="no quantization Q6_K") as raised:
        resolve(str(tmp_path), quant="Q6_K")
    assert raised.value.hint == "there are: Q4_K_M, Q8_0"
    with pytest.raises(UsageError, match="is Q8_0, not Q4_0"):
        resolve(str(tmp_path / "m-Q8_0.gguf"), quant="Q4_0")


def test_cached_model_is_found_offline(home: Path) -> None:
    snapshot = cached(home, "Qwen/Qwen3-0.6B", {"config.json": "{}", "model.safetensors": "x" * 98, "README.md": "?"})
    for name in ("Qwen/Qwen3-0.6B", "qwen3", "QWEN3:0.6B", "hf:Qwen/Qwen3-0.6B@main", f"qwen3:0.6b@{COMMIT}"):
        model = resolve(name, offline=True)
        assert (model.path, model.name, model.repo) == (snapshot, name, "Qwen/Qwen3-0.6B")
        assert (model.revision, model.num_bytes, model.format) == (COMMIT, 101, "hf")
        assert str(model) == "Qwen/Qwen3-0.6B@89abcde (0.0 MB)"
    assert resolve(f"Qwen/Qwen3-0.6B@{COMMIT}").path == snapshot  # pinned: nothing to ask
    assert resolve("qwen3", revision=COMMIT).path == snapshot
    with pytest.raises(AssertionError, match="a request"):
        resolve("qwen3")


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": "{}"},
        {"model.safetensors": "x"},
        {"config.json": "{}", "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors"}})},
        {"config.json": "{}", "model.safetensors.index.json": "broken"},
        {"m-00001-of-00002.gguf": "x"},
    ],
)
def test_incomplete_copy_is_not_found_offline(files: dict[str, str], home: Path) -> None:
    cached(home, "org/repo", files)
    with pytest.raises(ModelNotFoundError, match="not completely") as raised:
        resolve("org/repo", offline=True)
    assert "org/repo" in str(raised.value.hint)


def test_reference_that_leads_elsewhere_is_not_followed(home: Path) -> None:
    cached(home, "org/repo", {"config.json": "{}", "model.safetensors": "x"})
    reference = home / "hub" / "models--org--repo" / "refs" / "main"
    for text in ("../../../..", "", "main", COMMIT[:-1]):
        reference.write_text(text)
        assert hub.cached_snapshot("org/repo", "main") is None


def test_aliases_of_the_user_come_first(home: Path, tmp_path: Path) -> None:
    snapshot = cached(home, "org/mine", {"m-Q4_0.gguf": "4", "m-Q8_0.gguf": "8"})
    aliases = {"Mine": "org/mine:Q8_0", "qwen3": "mine", "here": str(tmp_path), "loop": "pool", "pool": "loop"}
    for name in ("mine", "qwen3"):
        model = resolve(name, offline=True, aliases=aliases)
        assert (model.path, model.quant, model.name) == (snapshot / "m-Q8_0.gguf", "Q8_0", name)
    assert resolve("here", aliases=aliases).path == tmp_path
    with pytest.raises(UsageError, match="circle"):
        resolve("loop", aliases=aliases)


def test_every_alias_is_a_hub_name_and_every_family_a_member() -> None:
    assert ALIASES["qwen3"] == ALIASES["qwen3:0.6b"] == "Qwen/Qwen3-0.6B"
    for alias, repo in ALIASES.items():
        assert parse_hub_name(repo) == HubName(repo)
        assert alias == alias.lower()
        assert "/" not in alias
        assert alias.split(":")[0] in ALIASES


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("qwen3:0.6", "qwen3:0.6b"),
        ("qwen-3", "qwen3"),
        ("lama3.2:1b", "llama3.2:1b"),
        ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("tin", "tiny"),
        ("my-model", "org/my-modell"),
    ],
)
def test_miss_suggests_the_nearest(name: str, nearest: str, home: Path) -> None:
    cached(home, "org/my-modell", {"config.json": "{}"})
    with pytest.raises(ModelNotFoundError) as raised:
        resolve(name)
    assert raised.value.exit_code == 3
    assert name in raised.value.message
    assert nearest in str(raised.value.hint)


def test_bundled_model_is_found() -> None:
    if not (Path(source.__file__).parents[1] / "assets" / "tiny").is_dir():
        with pytest.raises(ModelNotFoundError, match="bundled"):
            resolve("tiny")
        pytest.skip("assets/tiny is not built yet")
    model = resolve("tiny", offline=True)
    assert (model.repo, model.revision, model.name) == (None, None, "tiny")
    assert (model.path / "config.json").is_file()


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("tinyllama-1.1b-chat-v1.0.Q8_0.gguf", "Q8_0"),
        ("ggml-model-q4_0.gguf", "Q4_0"),
        ("Llama-3.2-1B-UD-IQ1_S.gguf", "UD-IQ1_S"),
        ("BF16/m-BF16-00001-of-00002.gguf", "BF16"),
        ("m-fp16.gguf", "FP16"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("m-TQ1_0.gguf", "TQ1_0"),
        ("m.IQ4_XS.gguf", "IQ4_XS"),
        ("m-Q4_K_M-v2.gguf", "Q4_K_M"),
        ("stories260K.gguf", "stories260K"),
        ("Q8_0.gguf", "Q8_0"),
    ],
)
def test_quantization_is_read_from_the_name(name: str, quant: str) -> None:
    assert quant_of(name) == quant


def test_parts_of_a_split_model() -> None:
    assert split_parts("a/m-00002-of-00003.gguf") == [f"a/m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert split_parts("m.gguf") == ["m.gguf"]
    assert split_parts("m-00001-of-00000.gguf") == ["m-00001-of-00000.gguf"]


def test_names_that_leave_the_folder_are_never_chosen() -> None:
    names = ["config.json", "../model.safetensors", "/m-Q8_0.gguf", "..\\m-Q4_K_M.gguf", "a/../../m-Q4_0.gguf"]
    with pytest.raises(UnsupportedError):
        choose(names, "org/repo")
    with pytest.raises(UsageError):
        choose(names, "org/repo", quant="Q8_0")
    with pytest.raises(UsageError):
        choose(names, "org/repo", file="../m-Q8_0.gguf")


def test_safetensors_come_before_gguf_and_one_file_before_shards() -> None:
    names = ["config.json", "consolidated.safetensors", "m.gguf"]
    assert choose(names, "r").files == ("config.json", "consolidated.safetensors")
    names += ["model.safetensors.index.json", "model-00001-of-00001.safetensors"]
    assert choose(names, "r").index_file == "model.safetensors.index.json"
    names += ["model.safetensors"]
    assert choose(names, "r").files == ("config.json", "model.safetensors")
    assert choose(names, "r", quant="m").entry == "m.gguf"


def test_missing_part_of_a_split_model_is_named() -> None:
    with pytest.raises(UsageError, match=r"no file m-00002-of-00002\.gguf"):
        choose(["m-00001-of-00002.gguf"], "org/repo")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HOME": "/a/home"},
        {"HF_HUB_CACHE": "/b/cache", "HF_HOME": "/a/home"},
        {"HUGGINGFACE_HUB_CACHE": "/c/cache"},
        {"XDG_CACHE_HOME": "/d/xdg"},
        {"HF_HOME": "~/elsewhere"},
        {"HF_HOME": "$XDG_CACHE_HOME/x", "XDG_CACHE_HOME": "/e"},
    ],
)
def test_cache_is_where_huggingface_hub_has_it(variables: dict[str, str]) -> None:
    code = (
        "import nanovllm_cli.weights.hub as ours; mine = ours.cache_folder(), ours.offline_by_environment();"
        "from huggingface_hub import constants as theirs;"
        "assert mine == (type(mine[0])(theirs.HF_HUB_CACHE), theirs.HF_HUB_OFFLINE), mine"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_", "HUGGINGFACE_"))}
    for offline in ({}, {"HF_HUB_OFFLINE": "yes"}):
        subprocess.run([sys.executable, "-c", code], check=True, env={**env, **variables, **offline})


def test_completion_needs_no_heavy_import(home: Path) -> None:
    cached(home, "org/repo-x", {"config.json": "{}"})
    code = (
        "import sys; from nanovllm_cli.weights import source; from nanovllm_cli.weights.hub import cached_repos;"
        "print(cached_repos(), [m for m in ('torch', 'numpy', 'huggingface_hub', 'gguf') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output == "['org/repo-x'] []\n"


def test_a_misspelt_file_is_met_with_those_that_are_there(home: Path) -> None:
    Path("model-q4.gguf").touch()
    Path("folder").mkdir()
    Path("notes-q4.txt").touch()
    for name, near in (("model-q4.ggf", "model-q4.gguf"), ("./modl-q4.gguf", "model-q4.gguf"), ("./foldr", "folder")):
        with pytest.raises(ModelNotFoundError) as missing:
            resolve(name)
        assert missing.value.hint == f"did you mean {near}?"
    with pytest.raises(ModelNotFoundError) as missing:
        resolve("./notes-q4.gguf")
    assert missing.value.hint is None or "notes" not in missing.value.hint


def test_a_misspelt_path_that_looks_like_a_repository_is_met_with_the_file(home: Path) -> None:
    Path("models").mkdir()
    Path("models/story.gguf").touch()
    for name in ("models/story", "models/stry.gguff"):
        with pytest.raises(ModelNotFoundError) as missing:
            resolve(name, offline=True)
        assert str(missing.value.hint).startswith("did you mean models/story.gguf? run once without --offline")


def test_a_name_of_ollamas_is_met_with_ours(home: Path) -> None:
    with pytest.raises(ModelNotFoundError) as missing:
        resolve("qwen3:latest")
    assert str(missing.value.hint).startswith("did you mean qwen3 ")


def test_a_revision_of_what_is_not_on_the_hub_is_said_to_be_none(home: Path) -> None:
    class Notes(NullProgress):
        def note(self, message: str) -> None:
            heard.append(message)

    heard: list[str] = []
    resolve("tiny", revision="v1", progress=Notes())
    assert heard == ["revision v1 is not looked at: tiny does not come from the hub"]
    cached(home, "org/repo", {"config.json": "{}", "model.safetensors": "x"}, revision="v1")
    resolve("org/repo", revision="v1", offline=True, progress=Notes())
    resolve("org/repo@v1", revision="v1", offline=True, progress=Notes())
    resolve("tiny", progress=Notes())
    assert len(heard) == 1
    assert resolve("org/repo@v1", revision="v2", offline=True, progress=Notes()).revision is not None
    assert heard[1:] == ["revision v2 is not looked at: org/repo@v1 has one of its own"]


@pytest.mark.parametrize(("settings", "said"), [
    ({"eager": True}, "eager is for GPUs"), ({"gpu_memory_utilization": 0.5}, "gpu-memory-utilization is for GPUs"), ({}, ""),
    ({"kv_cache_dtype": "int8", "cache_type_k": "fp8"}, ""),
    ({"kv_cache_dtype": "int8", "cache_type_k": "fp8", "cache_type_v": "fp8"}, "kv-cache-dtype changes nothing"),
])  # fmt: skip
def test_what_only_a_gpu_has_is_said_on_a_cpu(settings: dict[str, Any], said: str) -> None:
    class Notes(NullProgress):
        def note(self, message: str) -> None:
            heard.append(message)

    heard: list[str] = []
    select_platform(EngineConfig(device="cpu", **settings), Notes())
    assert [line[: len(said)] for line in heard] == ([said] if said else [])


def test_no_revision_is_remembered_outside_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    for revision in ("../../escaped", "x/../../escaped", str(tmp_path / "escaped"), ""):
        hub.remember_revision("org/m", revision, "c" * 40)
    assert [path.name for path in tmp_path.iterdir()] == ["work"]  # the folder of all tests in this file
    hub.remember_revision("org/m", "refs/pr/1", "c" * 40)
    assert (tmp_path / "cache" / "models--org--m" / "refs" / "refs" / "pr" / "1").read_text() == "c" * 40


def test_a_link_to_nowhere_and_others_addresses_are_called_that(home: Path) -> None:
    Path("model-q4.gguf").symlink_to("gone.gguf")
    for name, what in (
        ("model-q4.gguf", "model-q4.gguf is a link to a file that is not there"),
        ("https://example.com/m.gguf", "https://example.com/m.gguf is no model's address"),
        ("file:///m.gguf", "file:///m.gguf is no model's address"),
    ):
        with pytest.raises(ModelNotFoundError) as missing:
            resolve(name)
        assert missing.value.message == what
        assert missing.value.hint is not None
    with pytest.raises(ModelNotFoundError) as missing:
        resolve("model-q5.gguf")
    assert missing.value.hint is None or "model-q4" not in missing.value.hint
