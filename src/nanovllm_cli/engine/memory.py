"""How much memory there is, and how much of it the KV cache gets."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from nanovllm_cli import control_groups, system
from nanovllm_cli.attention.reach import near_reach
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.cross_spec import LEAD
from nanovllm_cli.engine.near import kept_blocks
from nanovllm_cli.errors import DoesNotFitError
from nanovllm_cli.model_spec import ModelSpec

GIB = 1 << 30
KEPT_STATES = 8
MOST_EMPTY = 1 << 17
"""Blocks of a cache in which no layer keeps anything, so that they are only counted: those of all sequences at their longest, up
to this, and those of one that was asked for; a file may claim any length, and each is some bytes to count."""
# What a process takes besides weights and KV: the interpreter, libraries, activations of one step.
OVERHEAD_BYTES = 512 << 20


def available_bytes() -> int:
    """Memory that can be taken without swapping: the system's figure, or less where a control group sets a limit."""
    return min(system.available_bytes(), control_groups.memory_left())


def check_weights_fit(num_bytes: int, available: int, processes: int = 1) -> None:
    """Before anything is loaded. DoesNotFitError says what is needed and what is there."""
    overhead = processes * OVERHEAD_BYTES
    if num_bytes + overhead > available:
        raise DoesNotFitError(
            f"the weights need {num_bytes / GIB:.1f} GiB, the program {overhead / GIB:.1f} GiB, and "
            f"{available / GIB:.1f} GiB of memory are free",
            "try a smaller model, or a machine with more memory",
        )


class CacheSize(NamedTuple):
    """num_blocks of the KV cache; the longest sequence that the engine takes, in tokens; states, of a model that keeps some; near
    parts, where there are fewer of them than blocks, else 0."""

    num_blocks: int
    max_model_len: int
    num_states: int = 0
    num_near: int = 0

    def num_bytes(self, block_bytes: int, state_bytes: int = 0, near_bytes: int = 0) -> int:
        """Of a cache of this size, when it is full."""
        without = self.num_blocks - self.num_near if self.num_near else 0
        return self.num_blocks * block_bytes - without * near_bytes + self.num_states * state_bytes


class Near(NamedTuple):
    """Of a model with windows (see `near.py`). num_bytes: of a block's near part; reach: of the widest window. longest_step:
    tokens that a sequence may be fed at once."""

    num_bytes: int
    reach: int
    longest_step: int

    def least(self, block_size: int) -> int:
        """Parts without which one sequence could not go on."""
        return kept_blocks(self.reach, block_size) + -(-self.longest_step // block_size) + 1

    def needed(self, block_size: int, answers: int, num_blocks: int) -> int:
        """Parts with which so many sequences of so many blocks together never wait for each other."""
        return min(num_blocks, self.least(block_size) + (answers - 1) * (kept_blocks(self.reach, block_size) + 1))


def near_of(spec: ModelSpec, config: EngineConfig, num_bytes: int, longest_image: int = 0) -> Near | None:
    """Of a model whose blocks have near parts of so many bytes. Those that keep states, those that attend to what an encoder has
    made, and those that read texts as a whole, keep all. longest_image: tokens of one that no step may cut."""
    reads_others = spec.cross is not None or spec.looks is not None
    if not num_bytes or spec.has_states or spec.reads_both_ways or reads_others:
        return None
    return Near(num_bytes, near_reach(spec.mixers), config.max_num_batched_tokens + longest_image)


def with_room_for_leads(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """The same; where an encoder reads prompts, what fills up a block behind one, and what the decoder begins with, come beside
    the tokens that were asked for."""
    if spec.encoder is None or config.max_model_len is None:
        return config
    return replace(config, max_model_len=config.max_model_len + LEAD)


def context_of(config: EngineConfig, max_position: int) -> int:
    """Tokens of the longest sequence, as far as the model and the settings go."""
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise DoesNotFitError(
            f"a context of {config.max_model_len} tokens was asked for; the model holds {max_position}",
            f"use --ctx-size {max_position} or less; models that their publishers say it of reach further by --rope-scaling yarn",
        )
    return config.max_model_len or max_position


def size_cache(
    config: EngineConfig,
    max_position: int,
    block_bytes: int,
    budget: int,
    state_bytes: int = 0,
    near: Near | None = None,
    *,
    whole: bool = False,
) -> CacheSize:
    """What was asked for, or what fits. Told numbers are kept or refused; numbers of our own give way to memory.

    max_position: the model's own limit. budget: bytes that a cache of our own choice may take. The context is max_model_len
    where given (at most max_position), and the cache holds max_num_seqs of them if the budget allows it. Of a model with states,
    of state_bytes each, every sequence has one, and as many and KEPT_STATES are there to be kept; they get what one such context
    leaves, and half at least where nobody asked for it. Blocks that hold nothing, beside states alone, are bounded by no memory.
    near: of a model with windows. As long as there is room for all that is asked for, blocks keep their near parts for good, as
    then any prefix can be found; where there isn't, there are fewer of these.
    whole: a text is computed in one step, behind which nothing of it is kept: there are blocks for two such steps, as one may be
    planned while another is computed.
    """
    length = context_of(config, max_position)
    size = config.block_size
    room = budget if config.kv_cache_bytes is None else config.kv_cache_bytes
    states = 0
    if state_bytes:
        keeps = config.max_num_seqs + KEPT_STATES if config.enable_prefix_caching else 0
        least = 0 if config.max_model_len is not None else room // 2
        kept = max(room - -(-length // size) * block_bytes, least) // state_bytes
        states = config.max_num_seqs + keeps
        states = states if config.num_blocks is not None else max(1, min(states, kept))
        room -= states * state_bytes
    each = -(-length // size)
    most = each * config.max_num_seqs
    if whole:
        most = min(most, 2 * (-(-max(length, config.max_num_batched_tokens) // size) + config.max_num_seqs))
    told = 0 if config.max_model_len is None else each
    if config.num_blocks is not None:
        blocks = config.num_blocks
    elif not block_bytes:
        blocks = max(told, min(most, MOST_EMPTY)) if room >= 0 else 0
    elif config.kv_cache_bytes is not None:
        blocks = room // block_bytes
    else:
        blocks = min(most, room // block_bytes)
    num_near = 0
    if near is not None and config.num_blocks is None and blocks < each * config.max_num_seqs:
        blocks, num_near = _with_near_parts(config, near, each, told, block_bytes, room) or (blocks, 0)
    if blocks < 1:
        raise DoesNotFitError(
            f"no room for the KV cache: one block of {size} tokens takes {block_bytes / 1024:.0f} KiB"
            + (f", the state of a sequence {state_bytes / 1024:.0f} KiB" if state_bytes else ""),
            "use a larger --kv-cache" if config.kv_cache_bytes else "give it more memory, or use a smaller model",
        )
    if blocks * size < length:
        if config.max_model_len is not None:
            least = least_bytes(each, block_bytes, size, near)
            raise DoesNotFitError(
                f"a context of {length} tokens needs {_told(least)} of KV cache, and it gets "
                f"{_told(min(room, blocks * block_bytes))}",
                f"use --ctx-size {blocks * size} or less, or a larger --kv-cache",
            )
        length = blocks * size
    return CacheSize(blocks, length, states, num_near)


def _with_near_parts(
    config: EngineConfig, near: Near, each: int, told: int, block_bytes: int, room: int
) -> tuple[int, int] | None:
    """Blocks, and fewer near parts, where that makes more blocks; None where it doesn't. each: blocks of one sequence at its
    longest; told: those that there must be. Parts get what all sequences need, but not more than half, unless there is more."""
    size, far = config.block_size, block_bytes - near.num_bytes
    most = each * config.max_num_seqs
    least = near.least(size)

    def beside(parts: int) -> int:
        left = room - parts * near.num_bytes
        return most if not far and left >= 0 else min(most, left // far) if far else 0

    blocks = beside(max(least, min(near.needed(size, config.max_num_seqs, most), room // 2 // near.num_bytes)))
    if blocks < told:
        blocks = min(told, beside(least))
    parts = (room - blocks * far) // near.num_bytes
    if blocks <= room // block_bytes or parts < least:
        return None
    return blocks, min(parts, blocks)


def least_bytes(each: int, block_bytes: int, size: int, near: Near | None) -> int:
    """Of a cache for one sequence of so many blocks."""
    if near is None or near.least(size) >= each:
        return each * block_bytes
    return each * (block_bytes - near.num_bytes) + near.least(size) * near.num_bytes


def _told(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"
