"""Kernels of attention to digests, of streams that are mixed and of experts by a table against their rules in plain torch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from nanovllm_cli.kernels import connections, cpu, digest_rules, digests, reference
from nanovllm_cli.kernels.cpu_mixture import route as cpu_route
from nanovllm_cli.kernels.cpu_mixture import route_by_table
from nanovllm_cli.kernels.mixture import Scoring

GENERATOR = torch.Generator().manual_seed(11)
BLOCK = cpu.BLOCK
DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(error) < (2e-6 if dtype == torch.float32 else 1e-2)


def angles_of(count: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turned = torch.rand(count, half, generator=GENERATOR) * 6
    return turned.cos(), turned.sin()


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_and_turned_and_turned_back(dtype: torch.dtype) -> None:
    x, gains, angles = randn(7, 3, 20, dtype=dtype), randn(20, dtype=dtype), angles_of(7, 4)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    for own, offset in ((None, 0.0), (gains, 0.0), (gains, 1.0)):
        factor = 1.0 if own is None else offset + own.double()
        expected = digest_rules.turned_last(normed * factor, *(each.double() for each in angles))
        found = digests.turn_last(x.flatten(1).clone(), 3, angles, gains=own, eps=1e-5, offset=offset)
        assert close(found.view_as(x), expected, dtype)
    there = digests.turn_last(x.flatten(1).clone(), 3, angles)
    assert torch.equal(there.view_as(x)[..., :12], x[..., :12])
    assert close(digests.turn_last(there, 3, angles, back=True).view_as(x), x, dtype)


class Paged:
    """Sequences whose rows and digests lie in blocks in random order, of tables of their own; all else are NaNs."""

    def __init__(self, lens: list[int], width: int, dim: int, rate: int, dtype: torch.dtype) -> None:
        self.lens, self.rate, self.width = lens, rate, max(-(-n // BLOCK) for n in lens)
        many = len(lens) * self.width + 2
        self.tables, self.near = (
            torch.randperm(many, generator=GENERATOR).int()[: len(lens) * self.width].view(len(lens), -1).contiguous()
            for _ in range(2)
        )
        self.raw, self.keys, self.digests = (
            torch.full((many, rows, columns), float("nan"), dtype=dtype)
            for rows, columns in ((BLOCK, width), (BLOCK, dim), (digests.digest_room(rate), dim))
        )
        self.rows = [randn(n, width, dtype=dtype) for n in lens]
        self.own_keys = [randn(n, dim, dtype=dtype) for n in lens]

    def where(self, tokens: list[tuple[int, int]]) -> digests.Where:
        """Of a step of these: sequences and positions."""
        tiles = [(seq, row, 1, position, position + 1) for row, (seq, position) in enumerate(tokens)]
        return digests.Where(torch.tensor(tiles), self.tables, self.near)

    def keep(self, tokens: list[tuple[int, int]]) -> None:
        slots = torch.tensor([int(self.near[seq, place // BLOCK]) * BLOCK + place % BLOCK for seq, place in tokens])
        for own, kept in ((self.rows, self.raw), (self.own_keys, self.keys)):
            digests.keep_rows(torch.stack([own[seq][place] for seq, place in tokens]), slots, kept)

    def found(self, sequence: int) -> torch.Tensor:
        """All whole digests of a sequence."""
        places = [i * self.rate + self.rate - 1 for i in range(self.lens[sequence] // self.rate)]
        at = [(int(self.tables[sequence, place // BLOCK]), place % BLOCK // min(self.rate, BLOCK)) for place in places]
        return torch.stack([self.digests[block, slot] for block, slot in at])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rate", "parts"), [(1, 2), (3, 2), (4, 2), (5, 1), (16, 1), (40, 1), (20, 2)])
def test_digests_are_those_of_the_rule_in_any_steps(rate: int, parts: int, dtype: torch.dtype) -> None:
    dim, lens, half = 12, [130, 41, 83], 2
    at, gates = 5, 5 + parts * dim
    paged = Paged(lens, gates + parts * dim + 3, dim, rate, dtype)
    bias, gains, turned = randn(rate, parts * dim), randn(dim, dtype=dtype), angles_of(140, half)
    maker = digests.DigestMaker(at, gates, parts, bias, gains, 1e-5, 0.5)
    done = [0, 0, 0]
    for some in (3, 1, 60, 1, 140):
        tokens = [(seq, place) for seq, n in enumerate(lens) for place in range(done[seq], min(n, done[seq] + some))]
        paged.keep(tokens)
        firsts = torch.tensor([place // rate for _, place in tokens])
        digests.make_digests(paged.raw, paged.digests, maker, (turned[0][firsts], turned[1][firsts]), rate, paged.where(tokens))
        done = [min(n, before + some) for n, before in zip(lens, done, strict=True)]
    for seq, rows in enumerate(paged.rows):
        count = len(rows) // rate
        summed, weighing = (rows[:, first : first + parts * dim] for first in (at, gates))
        cos, sin = (each[:count].double() for each in turned)
        wide = (each.double() for each in (summed, weighing, bias, gains))
        expected = digest_rules.digests(*wide, 1e-5, 0.5, rate, cos, sin)
        assert close(paged.found(seq), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rate", "most"), [(4, 3), (3, 7), (20, 2), (4, 100)])
def test_a_token_sees_the_digests_that_score_highest_and_its_window(rate: int, most: int, dtype: torch.dtype) -> None:
    dim, heads, lens, window = 8, 5, [130, 41, 3], 11
    paged = Paged(lens, 4, dim, rate, dtype)
    tokens = [(seq, place) for seq, n in enumerate(lens) for place in range(n)]
    paged.keep(tokens)
    made = [randn(n // rate, dim, dtype=dtype) for n in lens]
    for seq, own in enumerate(made):
        for i, row in enumerate(own):
            place = i * rate + rate - 1
            paged.digests[paged.tables[seq, place // BLOCK].long(), place % BLOCK // min(rate, BLOCK)] = row
    q, weights, where = randn(len(tokens), heads, dim, dtype=dtype), randn(len(tokens), heads), paged.where(tokens)
    chosen = digests.choose(q.flatten(1), weights, paged.digests, rate, most, where)
    asked = tokens[40:48]
    some = slice(40, 48)
    room = min(most, paged.width * BLOCK // rate)
    seen, tiles = digests.gather_seen(some, paged.keys, paged.digests, chosen, rate, window, where, room)
    rest = None, rate, window, where, paged.width * BLOCK // rate
    every, all_tiles = digests.gather_seen(some, paged.keys, paged.digests, *rest)
    first = 0
    for seq, n in enumerate(lens):
        of = slice(first, first + n)
        ranked = digest_rules.scores(q[of], weights[of], made[seq], rate)
        for place in range(n):
            whole = (place + 1) // rate
            best = torch.sort(ranked[place, :whole], descending=True, stable=True).indices[:most].sort().values
            assert chosen[first + place, : len(best)].tolist() == best.tolist()
            if (seq, place) not in asked:
                continue
            row, near = asked.index((seq, place)), paged.own_keys[seq][max(0, place + 1 - window) : place + 1]
            for kept, told, digested in ((seen, tiles, made[seq][best]), (every, all_tiles, made[seq][:whole])):
                expected, blocks = torch.cat([digested, near]), len(kept) // len(asked)
                assert told[row].tolist() == [row, row, 1, len(expected) - 1, len(expected)]
                rows = kept[row * blocks : (row + 1) * blocks, 0].permute(0, 2, 1, 3).reshape(-1, dim)
                assert torch.equal(rows[: len(expected)], expected)
                used = -(-len(expected) // BLOCK) * BLOCK
                assert not rows[len(expected) : used].any()
        first += n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "rounds"), [(2, 1), (3, 4), (4, 20)])
def test_streams_are_mixed_by_matrices_whose_sums_are_one(count: int, rounds: int, dtype: torch.dtype) -> None:
    streams, found = randn(count, 9, 20, dtype=dtype), randn(9, 20, dtype=dtype)
    shares = count * (2 + count)
    tables = randn(shares, count * 20) / 4, randn(shares), randn(3) + 1
    read, weights = connections.read_streams(streams, *tables, 1e-6, 1e-3, 2.0, rounds)
    wide = [each.double() for each in (streams, *tables)]
    expected, wanted = reference.read_streams(*wide, 1e-6, 1e-3, 2.0, rounds)
    assert close(read, expected, dtype)
    assert close(weights, wanted, torch.float32)
    matrices = weights[:, count:].view(-1, count, count)
    assert float((matrices.sum(1) - 1).abs().max()) < 2e-2
    assert rounds < 20 or float((matrices.sum(2) - 1).abs().max()) < 2e-2
    by_hand = torch.stack([
        weights[:, k, None].double() * found.double()
        + sum(matrices[:, j, k, None].double() * streams[j].double() for j in range(count))
        for k in range(count)
    ])  # fmt: skip
    connections.write_streams(streams, found, weights)
    assert close(streams, by_hand, dtype)
    assert close(streams, reference.write_streams(wide[0], found.double(), weights.double()), dtype)
    alone, none = connections.read_streams(streams, tables[0][:count], tables[1][:count], tables[2][:1], 1e-6, 1e-3, 2.0, rounds)
    assert none.shape == (9, 0)
    assert close(alone, reference.read_streams(streams.double(), *(each[:n].double() for each, n in zip(
        tables, (count, count, 1), strict=True)), 1e-6, 1e-3, 2.0, rounds)[0], dtype)  # fmt: skip


def test_experts_are_weighed_by_roots_of_softpluses_and_taken_by_a_table() -> None:
    logits = torch.cat([randn(40, 6) * 20, torch.tensor([[-200.0] * 6, [150.0, -150.0, 0.0, 30.0, -30.0, 1.0]])])
    scoring = Scoring(bias=randn(6), scale=1.5, root_softplus=True)
    chosen, weights = cpu_route(logits, 3, True, scoring)
    wanted, expected = reference.route(logits.double(), 3, True, scoring)
    assert torch.equal(chosen[:-2], wanted[:-2])
    sound = torch.arange(len(logits)) != 40  # whose scores are all 0: no weight rather than NaN
    assert torch.allclose(weights[sound].double(), expected[sound], rtol=1e-5)
    assert not weights[40].any()
    table = torch.stack([torch.randperm(6, generator=GENERATOR)[:3].sort().values for _ in range(50)])
    table[7] = torch.tensor([2, 2, 4])
    by_table, ids = scoring._replace(table=table), torch.randint(0, 50, (len(logits),), generator=GENERATOR)
    ids[3] = 7
    chosen, weights = route_by_table(logits, ids, 3, True, by_table)
    wanted, expected = digest_rules.route_by_table(logits.double(), ids, True, by_table)
    assert torch.equal(chosen, wanted)
    assert torch.equal(chosen, table[ids])
    assert torch.allclose(weights[sound].double(), expected[sound], rtol=1e-5)
    assert all(int(one) <= int(other) for row in chosen for one, other in pairwise(row))
