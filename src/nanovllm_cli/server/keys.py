"""Who may ask: API keys that were given, and those of a file, which may change while the server runs."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from nanovllm_cli.errors import AccessRefusedError, UsageError
from nanovllm_cli.server.reread import Reread

SHORTEST = 8
MAX_FILE_BYTES = 1 << 20


def check_keys(keys: Iterable[str]) -> None:
    """Raises UsageError."""
    if any(not key.isascii() or not key.isprintable() or " " in key or len(key) < SHORTEST for key in keys):
        raise UsageError("an API key is too short or has odd characters", f"at least {SHORTEST} of ASCII, without spaces")


class KeyFile:
    """Keys, one a line; lines that begin with # and empty ones are none.

    Raises UsageError or AccessRefusedError where the file cannot be read, has no key, or one that is none.
    """

    def __init__(self, path: str) -> None:
        self._file = Reread((path,), partial(_read, path))

    @property
    def keys(self) -> tuple[str, ...]:
        """As the file has them now. While it is away, empty or broken, those that it had last: then neither everybody gets in,
        nor nobody."""
        return self._file.now()


class Keys:
    """Those who are let in. Without any keys everybody is."""

    def __init__(self, given: tuple[str, ...], file: KeyFile | None) -> None:
        self._given, self._file = given, file
        self._from_file: tuple[str, ...] = ()
        self._tenants = _tenants(given)

    def tenant_of(self, given: bytes) -> str | None:
        """Whose key it is; None for nobody's."""
        if self._file is not None and (keys := self._file.keys) is not self._from_file:
            self._from_file, self._tenants = keys, _tenants((*self._given, *keys))
        tenant = None
        for key, its_tenant in self._tenants.items():
            if hmac.compare_digest(given, key):
                tenant = its_tenant
        return tenant


def _read(path: str) -> tuple[str, ...]:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except PermissionError:
        raise AccessRefusedError(f"cannot read {path}: no permission") from None
    except (OSError, ValueError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else "it is no path"
        raise UsageError(f"cannot read {path}: {reason}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{path} is no list of keys: it has more than {MAX_FILE_BYTES >> 20} MiB")
    lines = [line.strip() for line in data.decode("utf-8-sig", "replace").splitlines() if not line.startswith("#")]
    keys = tuple(dict.fromkeys(filter(None, lines)))
    if not keys:
        raise UsageError(f"{path} has no key", "one a line")
    try:
        check_keys(keys)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from None
    return keys


def _tenants(keys: Iterable[str]) -> dict[bytes, str]:
    """By key: a name that does not tell it."""
    return {key.encode(): hashlib.blake2b(key.encode(), digest_size=16, person=b"nanovllm tenant").hexdigest() for key in keys}
