"""Responses that are kept for a later request: `previous_response_id`, `item_reference`, and GET. In memory only, gone with the
server; the least recently used goes first, of the API key that has most there: one takes nothing from another. Each sees its own.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from nanovllm_cli.server.responses_items import Item

Tenant = str | None

MAX_BYTES = 64 << 20
MAX_RESPONSES = 4096


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """body: the response as JSON. items: what its request brought, then what was answered; `num_input` are the request's."""

    id: str
    body: bytes
    items: Sequence[Item]
    num_input: int
    previous: str | None = None
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.body) + sum(len(msgspec.json.encode(item)) for item in self.items))

    @property
    def input_items(self) -> Sequence[Item]:
        return self.items[: self.num_input]


class ResponseStore:
    """Sizes are in bytes of JSON. What is larger than all of it is not kept."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_responses: int = MAX_RESPONSES) -> None:
        self._max_bytes, self._max_responses = max_bytes, max_responses
        self._kept: OrderedDict[tuple[Tenant, str], StoredResponse] = OrderedDict()
        self._items: dict[tuple[Tenant, str], dict[str, Item]] = {}  # by the responses that hold it, the latest last
        self._bytes: Counter[Tenant] = Counter()
        self._counts: Counter[Tenant] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._bytes.total()

    def put(self, tenant: Tenant, response: StoredResponse) -> None:
        if response.size > self._max_bytes:
            return
        self._kept[tenant, response.id] = response
        self._bytes[tenant] += response.size
        self._counts[tenant] += 1
        for item in response.items:
            self._items.setdefault((tenant, item["id"]), {})[response.id] = item
        while self.num_bytes > self._max_bytes:
            self._forget_oldest(self._bytes)
        while len(self._kept) > self._max_responses:
            self._forget_oldest(self._counts)

    def get(self, tenant: Tenant, response_id: str) -> StoredResponse | None:
        found = self._kept.get((tenant, response_id))
        if found is not None:
            self._kept.move_to_end((tenant, response_id))
        return found

    def delete(self, tenant: Tenant, response_id: str) -> bool:
        if (tenant, response_id) not in self._kept:
            return False
        self._forget((tenant, response_id))
        return True

    def item(self, tenant: Tenant, item_id: str) -> Item | None:
        held = self._items.get((tenant, item_id))
        return held[next(reversed(held))] if held else None

    def conversation(self, tenant: Tenant, response_id: str) -> list[Item] | None:
        """All items up to and with this response's; None where it, or one before it, is gone."""
        chain: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            found = self.get(tenant, wanted)
            if found is None:
                return None
            chain.append(found)
            wanted = found.previous
        return [item for response in reversed(chain) for item in response.items]

    def _forget_oldest(self, shares: Counter[Tenant]) -> None:
        """Of whom has the largest share."""
        ((largest, _),) = shares.most_common(1)
        self._forget(next(key for key in self._kept if key[0] == largest))

    def _forget(self, key: tuple[Tenant, str]) -> None:
        gone = self._kept.pop(key)
        self._bytes[key[0]] -= gone.size
        self._counts[key[0]] -= 1
        if not self._counts[key[0]]:
            del self._bytes[key[0]], self._counts[key[0]]
        for item_id in {item["id"] for item in gone.items}:
            held = self._items[key[0], item_id]
            del held[gone.id]
            if not held:
                del self._items[key[0], item_id]
