"""--api-key-file while the server runs: what changes in it counts at once, and nothing that happens to it opens the door."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from http_server import running
from nanovllm_cli.errors import AccessRefusedError, NanovllmError, UsageError
from nanovllm_cli.server.keys import MAX_FILE_BYTES, KeyFile, Keys
from nanovllm_cli.server.settings import ServeSettings

OLD, NEW, GIVEN = "the-old-key-1", "the-new-key-1", "given-key-123"


def replace(path: Path, text: str) -> None:
    """As one rotates: written beside it, and renamed."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.rename(path)


def link(path: Path, text: str) -> None:
    """As Kubernetes does: the name is a link, and leads to another file now."""
    target = path.with_name(f"version-{len(list(path.parent.iterdir()))}")
    target.write_text(text)
    beside = path.with_suffix(".link")
    beside.symlink_to(target)
    beside.rename(path)


@pytest.mark.parametrize("change", [Path.write_text, replace, link])
def test_what_changes_counts_with_the_next_request(tmp_path: Path, change: Callable[[Path, str], object]) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{OLD}\n")
    settings = ServeSettings(port=0, api_keys=(GIVEN,), key_file=KeyFile(str(path)))
    with running(settings) as server:

        def statuses() -> list[int]:
            return [server.ask("GET", "/v1/models", x_api_key=key).status for key in (GIVEN, OLD, NEW)]

        assert statuses() == [200, 200, 401]
        change(path, f"# rotated\n{NEW}\n")
        assert statuses() == [200, 401, 200]
        change(path, f"{NEW}\n{OLD}\n")
        assert statuses() == [200, 200, 200]
        change(path, f"{OLD}\n")
        assert statuses() == [200, 200, 401]


def no_permission(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path.chmod(0)


@pytest.mark.parametrize(
    "break_it",
    [
        Path.unlink,
        lambda path: path.write_text(""),
        lambda path: path.write_text("\n# none\n"),
        lambda path: path.write_text(f"{NEW}\nshort\n"),
        lambda path: path.write_text(f"{NEW}\nwith space in it\n"),
        lambda path: path.write_bytes(b"\xff\xfe" * 20),
        lambda path: path.write_text(f"{NEW}\n" * MAX_FILE_BYTES),
        lambda path: (path.unlink(), path.mkdir()),
        no_permission,
    ],
    ids=["gone", "empty", "comments", "short", "spaces", "bytes", "large", "folder", "forbidden"],
)
def test_a_file_that_is_broken_leaves_the_keys_from_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, break_it: Callable[[Path], object]
) -> None:
    path = tmp_path / "keys"
    path.write_text(OLD)
    keys = Keys((), KeyFile(str(path)))
    before = keys.tenant_of(OLD.encode())
    assert before is not None
    with caplog.at_level(logging.WARNING, "nanovllm_cli.server.reread"):
        break_it(path)
        for _ in range(3):
            assert keys.tenant_of(OLD.encode()) == before
            for key in (b"", NEW.encode(), b"short"):
                assert keys.tenant_of(key) is None
    assert len(caplog.records) == 1
    assert OLD not in caplog.text
    assert NEW not in caplog.text
    if path.is_dir():
        path.rmdir()
    replace(path, NEW)
    assert keys.tenant_of(NEW.encode()) is not None
    assert keys.tenant_of(OLD.encode()) is None


def test_changes_within_one_tick_of_the_clock_are_seen(tmp_path: Path) -> None:
    """Same size, same file, and the times of a file system that counts in milliseconds."""
    path = tmp_path / "keys"
    path.write_text(OLD)
    file = KeyFile(str(path))
    for key in (NEW, OLD) * 20:
        path.write_text(key)
        assert file.keys == (key,)


def test_a_file_that_rests_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text(OLD)
    file = KeyFile(str(path))
    monkeypatch.setattr("nanovllm_cli.server.reread.SETTLED_NS", 0)
    assert file.keys == (OLD,)
    monkeypatch.setattr(file._file, "_make", lambda: pytest.fail("read again"))
    assert file.keys == (OLD,)


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """--api-key-file <(vault read …)"""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(OLD,))
    writer.start()
    file = KeyFile(str(path))
    writer.join()
    assert file.keys == file.keys == (OLD,)


def test_the_first_reading_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("12345678")
    assert KeyFile(str(tmp_path / "keys")).keys == ("12345678",)
    for content, told in (
        ("", "has no key"), ("1234567", "too short"), ("schlüssel-123", "odd characters"), ("1234\x005678", "odd characters"),
    ):  # fmt: skip
        (tmp_path / "keys").write_text(content)
        with pytest.raises(UsageError, match=told):
            KeyFile(str(tmp_path / "keys"))
    for path in ("nowhere", ".", "a\0b"):
        with pytest.raises(UsageError, match="cannot read"):
            KeyFile(path)
    if os.geteuid() != 0:
        (tmp_path / "keys").chmod(0)
        with pytest.raises(AccessRefusedError):
            KeyFile(str(tmp_path / "keys"))


def test_a_file_lets_a_server_listen_beyond_this_machine(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(OLD)
    assert ServeSettings(host="0.0.0.0", key_file=KeyFile(str(tmp_path / "keys"))).needs_key
    with pytest.raises(NanovllmError):
        ServeSettings(host="0.0.0.0")
