"""How much a token costs at the least: bytes that must be read, operations that must be done.

Counted from the model's description, for work that is done as well as it can be: each weight is read once a step, however many
sequences are in it; K and V of everything before a token are read once for it, or once for a chunk of a prompt. Activations
and the tables of a step are small, and left out. So are windows: a layer that looks back less far costs less than this.
A multiply-add is two operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nanovllm_cli.bench.sweep import Trial
from nanovllm_cli.mixer_spec import state_in
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.planning.estimate import multiplied

if TYPE_CHECKING:
    import torch


class Work(NamedTuple):
    """Of one token."""

    num_bytes: float
    flops: float


class ModelWork(NamedTuple):
    """What a model's shape says. read_bytes: of weights, each step; expert_bytes: those of experts among them, of which a token
    takes expert_share. kv_bytes: K and V of one token. state_bytes: read and written of a sequence's states, each step.
    linear_flops: of the layers' matrices and states, a token; head_flops: of the head, a row of logits; attention_flops: of a
    token, for each token that it looks at. prompt_share, prompt_look_share: of linear and attention_flops, what a prompt's token
    needs that is not drawn from (see ModelSpec.for_prompts). sees_all: a token looks at those behind it, too. most_seen: tokens
    that one looks at, in sparse attention; index_flops: to choose them, of a token for each up to it."""

    read_bytes: float
    kv_bytes: float
    linear_flops: float
    head_flops: float
    attention_flops: float
    expert_bytes: float = 0.0
    expert_share: float = 1.0
    state_bytes: float = 0.0
    prompt_share: float = 1.0
    prompt_look_share: float = 1.0
    sees_all: bool = False
    most_seen: int | None = None
    index_flops: float = 0.0

    @classmethod
    def of(
        cls, spec: ModelSpec, read_bytes: float, kv_dtypes: tuple[torch.dtype, torch.dtype], expert_bytes: float = 0.0
    ) -> ModelWork:
        """read_bytes, expert_bytes: as the weights are kept (see LLM.read_bytes)."""
        kv_bytes = state_bytes = 0.0
        for mixer in spec.mixers:
            if (state := state_in(mixer)) is not None:
                state_bytes += 8 * state.key_dim * state.values
        for attention in spec.attentions:
            kept = kv_dtypes if attention.latent is None and attention.shared is None else kv_dtypes[:1]
            dims, rows = (attention.head_dim, attention.found_dim), attention.num_kv_heads * attention.rows_a_token
            kv_bytes += rows * sum(dim * kind.itemsize for dim, kind in zip(dims, kept, strict=False))
        head = 2.0 * spec.num_drawn * spec.hidden_size
        linear, looks, prompts = multiplied(spec), _looks(spec), spec.for_prompts
        shares = multiplied(prompts) / linear, _looks(prompts) / looks if looks else 1.0
        return cls(
            read_bytes, kv_bytes, 2 * linear, head, 2 * looks, expert_bytes, spec.expert_share, state_bytes, *shares,
            spec.reads_both_ways, spec.most_seen,
            sum(2.0 * attention.index_products for attention in spec.attentions),
        )  # fmt: skip

    def step_bytes(self, num_tokens: int) -> float:
        """Of weights that a step of so many tokens reads. Of experts that none of them takes, by the mean of tokens that choose
        evenly and each by itself."""
        return self.read_bytes - self.expert_bytes * (1 - self.expert_share) ** num_tokens

    def of_token(self, trial: Trial, step_size: int) -> Work:
        """The mean over the tokens of a trial, whose steps take `step_size` tokens."""
        prompts, answers = trial.num_prompt * trial.num_parallel, trial.num_gen * trial.num_parallel
        before, many = trial.depth + trial.num_prompt, trial.num_parallel
        prefill_steps = -(-prompts // step_size)
        if trial.embeds:  # the mean of all rows is a vector, so none is left out
            looked_at = prompts * (trial.num_prompt if self.sees_all else (trial.num_prompt + 1) / 2)
            num_bytes = prefill_steps * self.step_bytes(min(step_size, prompts)) + self.kv_bytes * prompts
            return Work(num_bytes / prompts, self.linear_flops + self.attention_flops * looked_at / prompts)
        chunk = min(step_size, trial.num_prompt)
        chunk_ends = [trial.depth + min(end, trial.num_prompt) for end in range(chunk, trial.num_prompt + chunk, chunk or 1)]
        most = self.most_seen
        generated = _sum_to(before + trial.num_gen, most) - _sum_to(before, most)  # each looks at all before it, and itself
        read = many * (sum(min(end, most or end) for end in chunk_ends) + generated)
        looked_at = many * (self.prompt_look_share * (_sum_to(before, most) - _sum_to(trial.depth, most)) + generated)
        heads = answers + (many if prompts else 0)
        num_bytes = prefill_steps * self.step_bytes(min(step_size, prompts)) + trial.num_gen * self.step_bytes(many)
        num_bytes += self.kv_bytes * read + self.state_bytes * many * (len(chunk_ends) + trial.num_gen)
        flops = self.linear_flops * (self.prompt_share * (prompts + answers - heads) + heads) + self.head_flops * heads
        flops += self.attention_flops * looked_at
        if most is not None and before + trial.num_gen > most:
            flops += self.index_flops * many * (_sum_to(before + trial.num_gen) - _sum_to(trial.depth))
        return Work(num_bytes / (prompts + answers), flops / (prompts + answers))


def _looks(spec: ModelSpec) -> float:
    """Multiply-adds of a token with each that it looks at."""
    return sum(each.rows_a_token * each.num_heads * (each.head_dim + each.found_dim) for each in spec.attentions)


def _sum_to(count: int, most: int | None = None) -> int:
    """1 + 2 + … + count, of which none counts for more than `most`."""
    growing = count if most is None else min(count, most)
    return growing * (growing + 1) // 2 + (count - growing) * growing
