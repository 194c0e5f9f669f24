"""A step's tensors: of decodes, which are put together by a way of their own, they are those of any chunks of a token."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest
import torch

from nanovllm_cli.engine import step_batch
from nanovllm_cli.engine.plan import Scheduled
from nanovllm_cli.engine.step_batch import build_batch
from nanovllm_cli.kernels import angles
from nanovllm_cli.kernels.cpu_ops import CpuOps
from nanovllm_cli.layers.rope import Rope
from nanovllm_cli.rope_spec import RopeSpec

BLOCK = 16


def shares(count: int, most_tokens: int, seed: int) -> list[Scheduled]:
    pick = random.Random(seed)
    found = []
    for i in range(count):
        start, tokens = pick.randrange(0, 400), pick.randint(1, most_tokens)
        table = pick.sample(range(1000), -(-(start + tokens) // BLOCK) + pick.randrange(3))
        draws = (i,) if pick.random() < 0.8 else ()
        ids = [pick.randrange(500) for _ in range(tokens)]
        found.append(Scheduled(i, ids, start, table, draws, prompt_len=pick.randrange(1, 500), state=pick.randrange(9)))
    return found


@pytest.mark.parametrize("count", [1, 2, 17])
def test_decodes_are_chunks_of_a_token(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5):
        scheduled = shares(count, 1, seed)
        batch, owners = build_batch(scheduled, BLOCK)
        monkeypatch.setattr(step_batch, "_of_decodes", step_batch._of_chunks)
        other, others = build_batch(scheduled, BLOCK)
        monkeypatch.undo()
        assert owners == others
        for field in fields(batch):
            mine, theirs = getattr(batch, field.name), getattr(other, field.name)
            if isinstance(mine, torch.Tensor):
                assert mine.dtype == theirs.dtype, field.name
                assert mine.is_contiguous()
                assert torch.equal(mine, theirs), field.name
            else:
                assert mine is theirs is None


@pytest.mark.parametrize(("count", "most"), [(1, 1), (5, 1), (1, 40), (6, 40)])
def test_each_token_is_where_its_sequence_has_it(count: int, most: int) -> None:
    """One by one, in plain Python."""
    scheduled = shares(count, most, 7 * count + most)
    batch, owners = build_batch(scheduled, BLOCK)
    token = 0
    for i, share in enumerate(scheduled):
        assert batch.query_starts[i] == token
        assert batch.kv_lens[i] == batch.known_lens[i] == share.start + len(share.token_ids)
        assert batch.states[i] == share.state
        assert batch.block_tables[i, : len(share.block_table)].tolist() == share.block_table
        for j, token_id in enumerate(share.token_ids):
            place = share.start + j
            assert batch.token_ids[token] == token_id
            assert batch.positions[token] == place
            assert batch.rope_lens[token] == max(place + 1, share.prompt_len)
            assert batch.slots[token] == share.block_table[place // BLOCK] * BLOCK + place % BLOCK
            token += 1
    assert batch.num_tokens == token
    drawing = [share for share in scheduled if share.draws]
    assert [share for share, _ in owners] == drawing
    lasts = np.cumsum([len(share.token_ids) for share in scheduled]) - 1
    assert batch.logit_rows.tolist() == [int(last) for last, share in zip(lasts, scheduled, strict=True) if share.draws]


@pytest.mark.parametrize("spec", [RopeSpec(32, 10000.0), RopeSpec(32, 500000.0, scaling="linear", factor=4.0)])
def test_angles_that_are_kept_are_those_of_the_formula(spec: RopeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64; the same bits whoever asked first, and beyond what is kept, too."""
    monkeypatch.setattr(angles, "MOST_KEPT", 1024)
    lengths, asked = torch.ones(3, dtype=torch.int64), torch.tensor([[0, 700, 3], [255, 256, 257], [1, 1023, 511], [5, 1024, 2]])
    one_by_one = {}
    upwards, at_once = Rope(spec, CpuOps()), Rope(spec, CpuOps())
    assert all(side.shape == (0, 16) for side in upwards.tables(torch.empty(0, dtype=torch.int64), lengths[:0]))
    at_once.tables(torch.arange(1000), torch.ones(1000, dtype=torch.int64))
    for position in sorted(set(asked[:3].flatten().tolist())):
        one_by_one[position] = upwards.tables(torch.tensor([position]), lengths[:1])
    for positions in asked:
        sides = at_once.tables(positions, lengths)
        turned = positions.double()[:, None] * (spec.theta ** -(torch.arange(0, 32, 2).double() / 32)) / spec.factor
        for found, exact in zip(sides, (turned.cos(), turned.sin()), strict=True):
            assert found.shape == (3, 16)
            assert found.is_contiguous()
            assert (found.double() - exact).abs().max() < 2e-4, "angles are rounded to fp32"
        for i, position in enumerate(positions.tolist()):
            for found, alone in zip(sides, one_by_one.get(position, ()), strict=False):
                assert torch.equal(found[i], alone[0])
