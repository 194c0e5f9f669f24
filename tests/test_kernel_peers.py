"""peers.cu: one GPU of several, the others' part written by the test, which is their part of the agreement."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import pytest
import torch

from emulation.emulator import ORDERS, Emulator, emulation_alone
from nanovllm_cli.distributed.division import Division
from nanovllm_cli.kernels import peers

pytestmark = emulation_alone
AREA = 4096


class Group(NamedTuple):
    """regions: of each, as its GPU writes it. lost [1]: the word that ends all waiting."""

    emulator: Emulator
    regions: list[torch.Tensor]
    lost: torch.Tensor
    here: peers.Peers

    def area(self, rank: int, count: int) -> torch.Tensor:
        first = peers.HEAD_BYTES + count % 2 * AREA
        return self.regions[rank][first : first + AREA]

    def tell(self, rank: int, count: int) -> None:
        """That a GPU has come to its meeting of this number."""
        self.regions[rank][: peers.HEAD_BYTES].view(torch.int64)[:: peers.LINE // 8] = count

    def told(self, rank: int) -> list[int]:
        found: list[int] = self.regions[rank][: peers.HEAD_BYTES].view(torch.int64)[:: peers.LINE // 8].tolist()
        return found


def group(rank: int, size: int, order: int = 0, bugs: tuple[str, ...] = ()) -> Group:
    regions = [torch.zeros(peers.HEAD_BYTES + 2 * AREA, dtype=torch.uint8) for _ in range(size)]
    lost = torch.zeros(1, dtype=torch.int64)
    emulator = Emulator(order, bugs=bugs)
    here = peers.peers(emulator, lost.data_ptr(), rank, [each.data_ptr() for each in regions], AREA)
    emulator.by_address = [*regions, lost]
    return Group(emulator, regions, lost, here)


def parts(whole: torch.Tensor, division: Division) -> list[torch.Tensor]:
    """What each GPU has of the columns."""
    ranges = [division.ranges(rank) for rank in range(division.size)]
    return [torch.cat([whole[:, own.start : own.stop] for own in each], 1).contiguous() for each in ranges]


def columns(group: Group, division: Division, itemsize: int) -> peers.Columns:
    pieces = [(piece.rank, piece.own, piece.whole, piece.num) for piece in division.pieces]
    return peers.columns(group.emulator, pieces, division.size, division.num_rows, itemsize)


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def put(group: Group, rank: int, count: int, part: torch.Tensor) -> None:
    found = part.reshape(-1).view(torch.uint8)
    group.area(rank, count)[: len(found)] = found


# Sections of the whole, whose parts are units of 2, 4, 8 and 16 bytes; more rows than an area has room for.
DIVISIONS = [
    (3, torch.bfloat16, Division((17,), 2)),
    (1, torch.bfloat16, Division((10, 10), 2)),
    (5, torch.float32, Division((18, 18), 3)),
    (2, torch.bfloat16, Division((128, 64), 2)),
    (19, torch.float32, Division((128,), 2)),
    (70, torch.bfloat16, Division((64,), 4, units=4)),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("index", range(len(DIVISIONS)))
def test_columns_of_all_in_their_places(index: int, order: int) -> None:
    rows, dtype, division = DIVISIONS[index]
    for rank in range(division.size):
        one = group(rank, division.size, order)
        of = columns(one, division, dtype.itemsize)
        assert of.unit in peers.UNITS
        most = AREA // (max(of.widths) * of.unit)
        for turn in range(3):  # both areas, and the first one again
            whole = numbers(rows, division.num_rows, dtype=dtype) + turn
            own = parts(whole, division)
            launches = -(-rows // most)
            found = torch.empty_like(whole)
            for first in range(0, rows, most):  # what the wrapper does in several launches, as here nobody else runs meanwhile
                count, part = turn * launches + first // most + 1, slice(first, first + most)
                for other in set(range(division.size)) - {rank}:
                    put(one, other, count, own[other][part])
                    one.tell(other, count)
                peers.gather(one.emulator, one.here, own[rank][part].contiguous(), of, out=found[part])
                expected = own[rank][part].reshape(-1).view(torch.uint8)
                assert torch.equal(one.area(rank, count)[: len(expected)], expected)
                assert one.told(rank) == [count] * peers.BLOCKS
            assert torch.equal(found, whole)


def test_more_rows_than_an_area_has_room_for_are_several_launches() -> None:
    rows, dtype, division = DIVISIONS[4]
    one, of = group(0, 2), None
    of = columns(one, division, dtype.itemsize)
    one.lost[0] = 1  # nobody answers
    peers.gather(one.emulator, one.here, parts(numbers(rows, 128, dtype=dtype), division)[0], of)
    assert one.emulator.launches == {"gather": 2}
    assert one.told(0) == [2] * peers.BLOCKS


def test_who_gives_nothing_and_who_takes_nothing() -> None:
    division, whole = Division((32,), 2), numbers(3, 32, dtype=torch.float32)
    own = parts(whole, division)
    first, second = group(0, 2), group(1, 2)
    put(first, 1, 1, own[1])
    first.tell(1, 1)
    second.tell(0, 1)
    found = peers.gather(first.emulator, first.here, own[0], columns(first, division, 4), gives=False)
    assert torch.equal(found, whole)
    assert not first.area(0, 1).any()
    peers.gather(second.emulator, second.here, own[1], columns(second, division, 4), takes=False)
    assert torch.equal(second.area(1, 1)[: own[1].nbytes], own[1].reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("bugs", [(), ("NO_WAIT",)])
def test_it_waits_until_all_have_come(bugs: tuple[str, ...]) -> None:
    one, division, whole = group(0, 2, bugs=bugs), Division((32,), 2), numbers(2, 32, dtype=torch.bfloat16)
    own = parts(whole, division)

    def come() -> None:
        time.sleep(0.2)
        put(one, 1, 1, own[1])
        one.tell(1, 1)

    of = columns(one, division, 2)
    peers.gather(one.emulator, group(0, 2).here._replace(control=_lost(one)), own[0], of)  # compiled before the clock runs
    other = threading.Thread(target=come)
    other.start()
    found = peers.gather(one.emulator, one.here, own[0], of)
    other.join()
    assert torch.equal(found, whole) != bool(bugs)


def _lost(one: Group) -> torch.Tensor:
    """The control of a group in which somebody is lost."""
    lost = torch.ones(1, dtype=torch.int64)
    control = one.here.control.clone()
    control[0] = lost.data_ptr()
    one.emulator.by_address = [*one.emulator.by_address, lost]
    return control


def test_it_waits_for_nobody_where_somebody_is_lost() -> None:
    one = group(0, 2)
    one.lost[0] = 1
    peers.gather(one.emulator, one.here, numbers(1, 16, dtype=torch.bfloat16), columns(one, Division((32,), 2), 2))


def test_an_area_that_others_still_read_is_left_alone() -> None:
    """With a single one what is given at once behind is there before the last has been read."""
    for bugs in ((), ("ONE_AREA",)):
        one, division = group(0, 2, bugs=bugs), Division((32,), 2)
        of, own = columns(one, division, 2), numbers(2, 16, dtype=torch.bfloat16)
        one.tell(1, 2)
        for add in (0, 1):
            peers.gather(one.emulator, one.here, own + add, of)
        kept = one.area(0, 1)[: own.nbytes].view(torch.bfloat16).view(own.shape)
        assert torch.equal(kept, own) != bool(bugs)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("table", [None, torch.tensor([4, 8, 0, 3, 9, 5])])
def test_rows_of_a_table(table: torch.Tensor | None, order: int) -> None:
    """With padding, and ids outside it; two of three have some of ten rows."""
    bounds, weight = torch.tensor([0, 4, 4, 10]), numbers(10, 24, dtype=torch.bfloat16)
    ids = torch.tensor([3, 0, -1, 4, 9, 5, 3, 11])
    real = ids if table is None else torch.tensor([table[i] if 0 <= i < len(table) else -1 for i in ids])
    expected = torch.stack([weight[i] if 0 <= i < 10 else torch.zeros(24, dtype=torch.bfloat16) for i in real])
    for rank in range(3):
        one = group(rank, 3, order)
        own, whose = peers.find_rows(one.emulator, one.here, bounds, ids, table)
        assert whose.tolist() == [-1 if not 0 <= i < 10 else 0 if i < 4 else 2 for i in real.tolist()]
        mine = [bool(bounds[rank] <= i < bounds[rank + 1]) for i in real]
        assert own.tolist() == [i - int(bounds[rank]) if has else -1 for i, has in zip(real.tolist(), mine, strict=True)]
        x = torch.where(torch.tensor(mine)[:, None], expected, torch.full((), 7.0, dtype=torch.bfloat16)).contiguous()
        for other in {0, 1, 2} - {rank}:
            theirs = torch.where((whose == other)[:, None], expected, torch.full((), 9.0, dtype=torch.bfloat16))
            put(one, other, 1, theirs.contiguous())
            one.tell(other, 1)
        assert torch.equal(peers.gather_rows(one.emulator, one.here, x, whose), expected)
        shown = one.area(rank, 1)[: x.nbytes].view(torch.bfloat16).view(x.shape)
        assert torch.equal(shown[mine], x[mine])
        assert not shown[[not has for has in mine]].any(), "nobody asks for others' rows here"


def test_shapes_are_checked() -> None:
    one, division = group(0, 2), Division((32,), 2)
    of = columns(one, division, 2)
    for own in (numbers(2, 15, dtype=torch.bfloat16), numbers(16, 2, dtype=torch.bfloat16).t()):
        with pytest.raises(AssertionError):
            peers.gather(one.emulator, one.here, own, of)
    with pytest.raises(AssertionError):
        peers.gather(one.emulator, one.here, numbers(2, 16, dtype=torch.bfloat16), of, out=numbers(2, 31, dtype=torch.bfloat16))
    wide = columns(one, Division((8 * AREA,), 2), 2)
    with pytest.raises(AssertionError, match="a row of megabytes"):
        peers.gather(one.emulator, one.here, numbers(1, 4 * AREA, dtype=torch.bfloat16), wide)
