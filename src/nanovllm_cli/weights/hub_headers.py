"""A model on the hub as far as its headers say: what it is made of, without its weights.

`fetch_headers` makes a folder that `open_checkpoint` opens like any other: files of the right length, in which only the headers
are written and everything else is a hole that takes no room on the disk. So the readers that trust nothing check a model
before it is downloaded exactly as they will afterwards. Weights read from such a folder are zeros.
"""

from __future__ import annotations

from pathlib import Path

from nanovllm_cli.errors import CheckpointError, DownloadError, OutputError
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.weights import hub
from nanovllm_cli.weights.files import MAX_INDEX_BYTES, is_of_embedding
from nanovllm_cli.weights.gguf import MAX_METADATA_BYTES, GGUFFile
from nanovllm_cli.weights.json_file import MAX_CONFIG_BYTES
from nanovllm_cli.weights.loader import GGUF_EXTRAS
from nanovllm_cli.weights.safetensors import MAX_HEADER_BYTES
from nanovllm_cli.weights.source import RemoteModel

FIRST_BYTES = 256 << 10
MAX_EXTRA_BYTES = 64 << 10  # of a GGUF's tables of rotary divisors, which belong to the settings
_CONFIGS = ("config.json", "generation_config.json")


def fetch_headers(remote: RemoteModel, folder: Path, progress: LoadProgress) -> Path:
    """Fills `folder`, and gives the path to open. Raises what `hub.list_repo` raises, CheckpointError for a broken index, and
    OutputError where the folder cannot hold such files."""
    fetch = _Fetch(remote, folder)
    for name in remote.weights.files:
        if name in _CONFIGS or is_of_embedding(name):
            fetch.whole(name, MAX_CONFIG_BYTES)
    if remote.weights.index_file:
        fetch.whole(remote.weights.index_file, MAX_INDEX_BYTES)
    files = [name for name in remote.weights.with_shards(folder).files if name.endswith((".safetensors", ".gguf"))]
    progress.stage(f"reading headers of {remote.repo}", len(files), "tensors")
    try:
        for name in files:
            fetch.gguf(name) if name.endswith(".gguf") else fetch.safetensors(name)
            progress.advance(1)
    finally:
        progress.done()
    return folder / remote.weights.entry if remote.weights.entry else folder


class _Fetch:
    """Files of one repository, at one commit, into one folder."""

    def __init__(self, remote: RemoteModel, folder: Path) -> None:
        self._remote = remote
        self._folder = folder

    def whole(self, name: str, max_bytes: int) -> None:
        """A small file. One byte more than is allowed is asked for, so that whoever reads it sees that it is too long."""
        self._write(name, 0, self._read(name, 0, max_bytes + 1), None)

    def safetensors(self, name: str) -> None:
        size = self._size(name)
        start = self._read(name, 0, FIRST_BYTES)
        length = 8 + int.from_bytes(start[:8], "little")
        if len(start) < length <= 8 + MAX_HEADER_BYTES:
            start += self._read(name, len(start), length - len(start))
        self._write(name, 0, start[:length], size)

    def gguf(self, name: str) -> None:
        """Where a GGUF's header ends is known only when it has been read, so twice as much is fetched until it has."""
        size = self._size(name)
        have, wanted = 0, min(4 * FIRST_BYTES, size)
        while True:
            data = self._read(name, have, wanted - have)
            self._write(name, have, data, size)
            have += len(data)
            last = have < wanted or have >= min(size, MAX_METADATA_BYTES)
            try:
                file = GGUFFile(self._folder / name)
            except CheckpointError:
                if last:
                    raise
            else:
                with_header = min((entry.start for entry in file.entries.values()), default=have) <= have
                extras = [file.entries[extra] for extra in GGUF_EXTRAS & file.entries.keys()]
                file.close()
                if with_header or last:
                    break
            wanted = min(2 * wanted, size, MAX_METADATA_BYTES)
        for entry in extras:
            if entry.num_bytes <= MAX_EXTRA_BYTES:
                self._write(name, entry.start, self._read(name, entry.start, entry.num_bytes), size)

    def _size(self, name: str) -> int:
        size = self._remote.listing.sizes.get(name, 0)
        if size <= 0:
            raise DownloadError(f"{self._remote.repo}: the hub does not say how large {name} is", "download it: models pull")
        return size

    def _read(self, name: str, first: int, count: int) -> bytes:
        return hub.read_range(self._remote.repo, self._remote.listing.commit, name, first, count)

    def _write(self, name: str, first: int, data: bytes, size: int | None) -> None:
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.seek(first)
                file.write(data)
                if size is not None:
                    file.truncate(size)
        except OSError as failure:
            raise OutputError(f"cannot write {path}: {failure.strerror or failure}", "set TMPDIR to another folder") from failure
