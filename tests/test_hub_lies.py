"""A hub that lies, a store behind it, and others who write into the same cache: nothing leads out of the cache, no token leaves
the hub, and what is wrong is named in one line."""

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hub_server import COMMIT, Hub, client, etag, serving
from nanovllm_cli.weights import hub as hub_module
from nanovllm_cli.weights import hub_http
from nanovllm_cli.weights.hub_http import HubUnreachableError, content, endpoint, file_info, list_files

WEIGHTS = bytes(range(256)) * 6000  # as large files are: with a SHA-256
SETTINGS = {"config.json": b'{"model_type": "qwen3"}', "tokenizer.json": b'{"version": "1.0"}'}
FILES = {**SETTINGS, "README.md": b"read me", "model.safetensors": WEIGHTS}
RESOLVE = f"/org/m/resolve/{COMMIT}/"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving({"org/m": FILES}) as running:
        yield running


@pytest.fixture
def store() -> Iterator[Hub]:
    with serving({"org/m": FILES}) as running:
        yield running


def around(home: Path) -> set[str]:
    """What lies beside the cache's folder, and in it what is not of its kind."""
    beside = {path.name for path in home.parent.iterdir()} - {home.name}
    return beside | {path.name for path in (home / "hub").iterdir()} - {"models--org--m", ".locks"}


def error(result: dict[str, Any]) -> str:
    assert "error" in result, result
    assert result["error"] not in ("KeyError", "AssertionError")
    assert "\n" not in result["message"]
    return f"{result['error']}: {result['message']}"


@pytest.mark.parametrize("named", [("{}/planted", "../../../../planted", "..", "a/b"), (".", "\xe9", "x" * 300, "0.incomplete")])
def test_an_etag_is_no_path(named: tuple[str, ...], hub: Hub, tmp_path: Path) -> None:
    hub.lies = {name: {"ETag": f'"{etag_.format(tmp_path)}"'} for name, etag_ in zip(FILES, named, strict=True)}
    hub.listed = json.dumps({"sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}).encode()
    home = tmp_path / "home"
    path = Path(client(home, hub.url, "org/m")["path"])
    assert {file.name: file.read_bytes() for file in path.iterdir()} == FILES
    assert around(home) == set()
    assert {blob.is_file() for blob in (home / "hub/models--org--m/blobs").iterdir()} == {True}


def test_a_commit_in_an_answer_is_no_path(hub: Hub, tmp_path: Path) -> None:
    hub.lies["config.json"] = {"X-Repo-Commit": "../../../../planted"}
    home = tmp_path / "home"
    assert Path(client(home, hub.url, "org/m")["path"]).name == COMMIT
    assert around(home) == set()


def test_files_of_a_listing_that_lead_elsewhere_are_not_the_models(hub: Hub, tmp_path: Path) -> None:
    odd = ["../../x.json", "/tmp/planted/x.json", "a\0b.json", "\x1b[2Jx.json", "c:\\x.json", "a/../../../../x.json", ".."]
    names = ["x" * 300 + ".safetensors", "é" * 140, "a/" * 600 + "x.json", "additional_chat_templates/" + "y" * 300 + ".jinja"]
    names += [*odd, *(f"additional_chat_templates/{name}" for name in odd if "\\" not in name)]
    hub.repos = {"org/m": {**FILES, **dict.fromkeys(names, b"{}")}}
    home = tmp_path / "home"
    assert "path" in client(home, hub.url, "org/m")
    assert all(".." not in path.split("/") and path.isprintable() and len(path) < 300 for path in hub.downloaded())
    assert around(home) == set()


def test_a_token_stays_with_the_hub(hub: Hub, store: Hub, tmp_path: Path) -> None:
    """And so at another port, by another name, by an address with a name and a password in it."""
    port = store.url.rpartition(":")[2]
    for place in (f"http://localhost:{port}", f"http://hf:secret@127.0.0.1:{port}"):
        store.tokens.clear()
        for name in FILES:
            hub.moved[RESOLVE + name] = place + RESOLVE + name
        hub.moved["/api/models/org/m/revision/main"] = f"{place}/api/models/org/m/revision/main"
        result = client(tmp_path / place[-20:].replace("/", ""), hub.url, "org/m", {"HF_TOKEN": "hf_secret"})
        assert (Path(result["path"]) / "model.safetensors").read_bytes() == WEIGHTS
        assert hub.tokens == {"Bearer hf_secret"}
        assert not any("hf_secret" in token for token in store.tokens)


def test_what_a_store_sends_is_compared_with_what_the_hub_said(hub: Hub, store: Hub, tmp_path: Path) -> None:
    name = "model.safetensors"
    hub.moved[RESOLVE + name] = store.url + RESOLVE + name
    store.corrupt.add(name)
    store.lies[name] = {"ETag": f'"{hashlib.sha256(WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1])).hexdigest()}"'}
    result = client(tmp_path, hub.url, "org/m")
    assert "arrived damaged" in error(result)
    assert not list(tmp_path.rglob(name))


@pytest.mark.parametrize(
    "place", ["https://huggingface.co/again", "/again", "file:///etc/passwd", "ftp://127.0.0.1/x", "https://[::1", "https:///"]
)
def test_redirects_to_nowhere_end(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = answered(monkeypatch, lambda request: (307, {"Location": place}, b""))
    monkeypatch.setattr(hub_module, "RETRY_WAITS", (0,))
    with pytest.raises(HubUnreachableError):
        hub_module.list_repo("org/m", "main")
    assert len(seen) <= 11


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'"' + b"a" * (17 << 20) + b'"', "more than 16 MiB"),
        (b"[]", "expected a JSON object"),
        (b'{"sha": "../../x", "siblings": []}', "no commit"),
        (b'{"sha": 1e400}', "no commit"),
        (b'{"sha": NaN}', "NaN"),
        *(
            (json.dumps({"sha": COMMIT, "siblings": files}).encode(), "makes no sense")
            for files in (
                {"a": 1}, [5], [{}], [{"rfilename": 5}], [{"rfilename": "a", "size": -1}], [{"rfilename": "a", "size": "1"}],
                [{"rfilename": "a", "size": 1e300}], [{"rfilename": "a", "size": 1 << 70}], [{"rfilename": "a", "size": True}],
                [{"rfilename": "a", "lfs": {"sha256": "../x"}}], [{"rfilename": "a", "lfs": {"sha256": 5}}],
            )
        ),
    ],
)  # fmt: skip
def test_listings_that_make_no_sense(listed: bytes, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, lambda request: (200, {}, listed))
    with pytest.raises(HubUnreachableError, match=told):
        list_files("org/m", "main")


def test_sizes_that_lie(hub: Hub, tmp_path: Path) -> None:
    listed: dict[str, Any] = {"sha": COMMIT, "siblings": [{"rfilename": name, "size": len(FILES[name])} for name in FILES]}
    listed["siblings"][0]["size"] -= 1
    hub.listed = json.dumps(listed).encode()
    assert "23 by itself" in error(client(tmp_path / "1", hub.url, "org/m"))
    listed["siblings"][0]["size"] = 1 << 49
    hub.listed = json.dumps(listed).encode()
    assert error(client(tmp_path / "2", hub.url, "org/m")).startswith("DoesNotFitError")
    hub.listed = json.dumps({"sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}).encode()
    hub.lies["config.json"] = {"Content-Length": ""}  # nobody says, and an empty file is not what is meant
    assert "how large org/m/config.json is" in error(client(tmp_path / "4", hub.url, "org/m"))
    assert not list((tmp_path / "4").rglob("config.json"))
    hub.listed = None
    hub.lies["config.json"] = {"X-Linked-Size": "23"}  # as listed, and then there is less
    hub.repos = {"org/m": {**FILES, "config.json": b"{}"}}
    assert "by itself" in error(client(tmp_path / "3", hub.url, "org/m"))


@pytest.mark.parametrize("size", ["1" * 400, "-5", "1e3", str(1 << 51), "\xb2", "0x1"])
def test_sizes_in_headers_that_make_no_sense(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"X-Linked-Etag": b"b", "X-Linked-Size": size.encode("latin-1"), "Location": b"//x"}
    answered(monkeypatch, lambda request: (302, told, b""))
    with pytest.raises(HubUnreachableError, match="no size"):
        file_info("org/m", COMMIT, "a")


def test_another_part_than_the_one_that_was_asked_for(hub: Hub, tmp_path: Path) -> None:
    """Of a file without a SHA-256, where only its place says so."""
    part = tmp_path / "hub/models--org--m/blobs" / f"{etag(FILES['README.md'])}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(FILES["README.md"][:3])
    hub.lies["README.md"] = {"Content-Range": "bytes 0-3/7"}
    assert "sends another part" in error(client(tmp_path, hub.url, "org/m"))


def test_what_others_put_where_a_download_grows_is_not_followed(hub: Hub, tmp_path: Path) -> None:
    home, mine = tmp_path / "home", tmp_path / "mine"
    blobs = home / "hub/models--org--m/blobs"
    blobs.mkdir(parents=True)
    mine.write_bytes(b"dear diary")
    places = ("model.safetensors", "config.json", "README.md")
    link, hard_link, pipe = (blobs / f"{etag(FILES[name])}.incomplete" for name in places)
    link.symlink_to(mine)
    hard_link.hardlink_to(mine)
    os.mkfifo(pipe)
    path = Path(client(home, hub.url, "org/m")["path"])
    assert {file.name: file.read_bytes() for file in path.iterdir()} == FILES
    assert mine.read_bytes() == b"dear diary"


def test_a_branch_that_is_a_pipe_stands_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--m/refs").mkdir(parents=True)
    (tmp_path / "models--org--m/snapshots" / COMMIT).mkdir(parents=True)
    os.mkfifo(tmp_path / "models--org--m/refs/main")
    (tmp_path / "models--org--m/refs/mine").write_text(f"{COMMIT}\n")
    assert hub_module.cached_snapshot("org/m", "main") is None
    assert hub_module.cached_snapshot("org/m", "mine") == (COMMIT, tmp_path / "models--org--m/snapshots" / COMMIT)


def test_a_blob_of_another_length_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    blob = tmp_path / "hub/models--org--m/blobs" / etag(WEIGHTS)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(WEIGHTS[:1000])
    assert (Path(client(tmp_path, hub.url, "org/m")["path"]) / "model.safetensors").read_bytes() == WEIGHTS


def answered(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any], tuple[int, Any, bytes]]) -> list[Any]:
    """Requests of `hub_http` are answered by `answer`, in this process; gives them as they come."""
    utils = importlib.import_module("huggingface_hub.utils")
    http = importlib.import_module(type(utils.get_session()).__module__.partition(".")[0])
    seen = []

    def handle(request: Any) -> Any:
        seen.append(request)
        status, headers, body = answer(request)
        return http.Response(status, headers=headers, content=iter([body]))

    session = http.Client(transport=http.MockTransport(handle))
    monkeypatch.setattr(utils, "get_session", lambda: session)
    monkeypatch.setattr(utils, "build_hf_headers", lambda: {"authorization": "Bearer hf_secret"})
    return seen


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("http://huggingface.co/x", "from https to http"),
        ("http://127.0.0.1/x", "from https to http"),
        ("http://169.254.169.254/latest/meta-data", "from https to http"),
        ("file:///etc/passwd", "from https to file"),
        ("https://huggingface.co:444/x", None),
        ("https://huggingface.co.example/x", None),
        ("https://user:password@example.org/x", None),
        ("//example.org/x", None),
    ],
)
def test_where_https_leads(place: str, told: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = answered(monkeypatch, lambda request: (200, {}, b"x") if len(seen) > 1 else (302, {"Location": place}, b""))
    if told is not None:
        with pytest.raises(HubUnreachableError, match=told), content("org/m", COMMIT, "a"):
            pass
        assert len(seen) == 1
    else:
        with content("org/m", COMMIT, "a") as answer:
            assert answer.read() == b"x"
        assert ["hf_secret" in str(request.headers.raw) for request in seen] == [True, False]


def test_compressed_answers_are_refused_before_they_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = answered(monkeypatch, lambda request: (200, {"Content-Encoding": "gzip"}, b"not even gzip"))
    with pytest.raises(HubUnreachableError, match="compressed"):
        list_files("org/m", "main")
    assert seen[0].headers["Accept-Encoding"] == "identity"


def test_messages_do_not_tell_the_password_in_the_hubs_address(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "https://user:p@ss@hub.example/path")
    assert endpoint() == "https://hub.example/path"
    assert hub_http._refusal(404, None, "org/m", "org/m").message.endswith("is not on https://hub.example/path")
