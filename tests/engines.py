"""Helpers of the model and engine tests: tiny random checkpoints by transformers, and engines on them without a tokenizer."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.attention.reach import num_near, reaches
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.checked_images import Seeing
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.near import NearParts
from nanovllm_cli.engine.outputs import RequestOutput
from nanovllm_cli.engine.plan import Plan, StepOutput
from nanovllm_cli.engine.sequence import Sequence
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.outline import shapes_of
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import open_checkpoint

SMALL = {
    "vocab_size": 513, "hidden_size": 48, "intermediate_size": 70, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip


def random_model(config: Any, seed: int = 0, dtype: torch.dtype = torch.float32, auto: Any = None) -> Any:
    """A transformers model whose weights are large enough that every part of it matters to the output. auto: the class of
    transformers that makes it, AutoModelForCausalLM if None."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    config = copy.deepcopy(config)  # to save a model notes its dtype there, and the next would be made in it
    config._experts_implementation = "eager"  # of its others one wants rows of 16 bytes
    model = (auto or AutoModelForCausalLM).from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            width = parameter.shape[-1] if parameter.shape[-1] > 1 else math.prod(parameter.shape[1:])
            parameter.data = torch.randn(parameter.shape, generator=generator) * width**-0.5 * 1.5
        elif name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
        else:
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias", "balancing_biases")):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
        elif name.endswith("tid2eid"):
            rows = torch.rand(len(buffer), config.n_routed_experts, generator=generator)
            buffer.copy_(rows.argsort(1)[:, : buffer.shape[1]])
        elif name.endswith("layer_scalar"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    turns = {module: module.freqs_ci for module in model.modules() if hasattr(module, "freqs_ci")}
    model = model.to(dtype)
    for module, complex_numbers in turns.items():  # which lose a part of them there
        module.freqs_ci = complex_numbers
    return model


def num_parameters(spec: ModelSpec) -> int:
    """Of all that such a model's layers take."""
    return sum(map(math.prod, shapes_of(spec).values()))


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def worker_for(folder: Path, **settings: Any) -> Worker:
    with open_checkpoint(folder) as checkpoint:
        return Worker(checkpoint, EngineConfig(**{"threads": 2, "num_blocks": 256} | settings))


def engine_for(worker: Worker, eos_ids: tuple[int, ...] = (), *, token_work: int | None = None, **settings: Any) -> Engine:
    """token_work: what an image's layers are held against, instead of the model's own."""
    work = worker.spec.prompt_work if token_work is None else token_work
    return Engine(
        worker,
        EngineConfig(**settings),
        vocab_size=worker.spec.vocab_size,
        max_model_len=worker.max_model_len,
        num_blocks=settings.get("num_blocks", worker.num_blocks),
        eos_ids=eos_ids,
        seeing=worker.sight and Seeing(worker.sight.senses, None, None, work),
    )


def poison_what_is_out_of_reach(patch: pytest.MonkeyPatch) -> list[int]:
    """Of workers that are made from now on: near parts of a sequence's blocks behind all windows are one whose memory is NaNs, to
    whoever reads it. How many such blocks there were at each step of a sequence."""
    found: list[int] = []
    make, hold = KVCache.__init__, NearParts.hold

    def with_poison(cache: KVCache, *args: Any) -> None:
        *others, num_parts = args if len(args) == 5 else (*args, 0)
        make(cache, *others, num_parts + bool(num_parts))
        if num_parts:
            for layer, mixer, reach in zip(cache.layers, args[1], reaches(args[1]), strict=True):
                for side in layer[: num_near(mixer, reach, len(layer))]:
                    side[num_parts].view(torch.uint8).fill_(0xFF)

    def hold_and_poison(parts: NearParts, sequence: Sequence, end: int) -> None:
        hold(parts, sequence, end)
        if parts.num_parts:
            sequence.near_table[: sequence.near_start] = [parts.num_parts] * sequence.near_start
            found.append(sequence.near_start)

    patch.setattr(KVCache, "__init__", with_poison)
    patch.setattr(NearParts, "hold", hold_and_poison)
    return found


def run(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]], salt: str | None = None
) -> list[RequestOutput]:
    """All requests at once; outputs in their order."""
    for i, (ids, params) in enumerate(requests):
        engine.add(str(i), ids, params, cache_salt=salt)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return [done[str(i)] for i in range(len(requests))]


def logprobs_of(output: RequestOutput) -> list[float]:
    """Of its first answer's tokens, of a request that asked for them."""
    return [each.logprob for each in output.outputs[0].logprobs or ()]


def check_that_no_bit_changes(
    worker: Worker,
    requests: list[tuple[list[int], SamplingParams]],
    num_blocks: int,
    *others: dict[str, Any],
    finds: bool = True,
) -> list[RequestOutput]:
    """Requests that ask for log-probabilities get the same ones alone in a step each, cut anywhere, beside others, behind a found
    prefix, and computed again after a preemption. num_blocks: too few for all of them. others: further settings. finds: whether
    anything is found of such prompts. What each got alone is returned."""
    alone = [run(engine_for(worker, enable_prefix_caching=False), [request])[0] for request in requests]
    settings: list[dict[str, Any]] = [
        {}, {"max_num_batched_tokens": 7}, {"max_num_batched_tokens": 23, "enable_prefix_caching": False},
        {"num_blocks": num_blocks}, *others,
    ]  # fmt: skip
    for setting in settings:
        engine = engine_for(worker, **setting)
        for _ in range(2):  # the second time finds what the first one left
            for first, again in zip(alone, run(engine, requests), strict=True):
                assert again.outputs[0].token_ids == first.outputs[0].token_ids
                assert logprobs_of(again) == logprobs_of(first) != []
        assert (engine.stats().preemptions > 0) == ("num_blocks" in setting)
        assert (engine.stats().prefix_hit_tokens > 0) == (finds and setting.get("enable_prefix_caching", True))
    return alone


def each_alone(folder: Path, asked: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    """Tokens and log-probabilities of each by itself, by steps that are not recorded."""
    worker = worker_for(folder)
    worker.runner.graphs._recordable = False  # type: ignore[attr-defined]
    found = [run(engine_for(worker, enable_prefix_caching=False), [each])[0].outputs[0] for each in asked]
    return [(each.token_ids, each.logprobs) for each in found]


def failing_once(worker: Worker) -> set[tuple[tuple[int, int, int], ...]]:
    """Steps of several sequences will fail behind their kernels, each once: their (seq_id, start, count), as they do."""
    execute, failed = worker.runner.run, set()

    def failing(plan: Plan) -> StepOutput:
        output = execute(plan)
        key = tuple((share.seq_id, share.start, len(share.token_ids)) for share in plan.scheduled)
        if len(key) > 1 and key not in failed:
            failed.add(key)
            raise RuntimeError("once")
        return output

    worker.runner.run = failing  # type: ignore[method-assign]
    return failed


def greedy(max_tokens: int = 64, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def add_shape(writer: Any, config: Any) -> None:
    """To a GGUFWriter, what every architecture's files say of a model, by transformers' config of it."""
    writer.add_block_count(config.num_hidden_layers)
    if "mamba" in config.model_type:  # has neither attention nor a longest sequence
        writer.add_context_length(1 << 20)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        return
    places = ("max_position_embeddings", "max_seq_len")
    writer.add_context_length(next((getattr(config, name) for name in places if hasattr(config, name)), 2048))
    writer.add_embedding_length(config.hidden_size)
    values = config.to_dict()  # whose own layers' values a Gemma 4 asks for by name
    inner = ("intermediate_size", "n_inner", "ffn_hidden_size")
    sizes = [getattr(config, name) for name in inner if hasattr(config, name)]
    writer.add_feed_forward_length(sizes[0] if sizes else 4 * config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    heads, kinds = values.get("num_key_value_heads"), getattr(config, "layer_types", None) or []
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads) if heads is None else heads
    writer.add_head_count_kv([0 if kind == "conv" else heads for kind in kinds] if config.model_type[:4] == "lfm2" else heads)
    head_dim = values.get("head_dim") or getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if hasattr(config, "layer_norm_eps"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
    elif config.model_type not in ("nemotron", "olmo") and not {"layer_norm_epsilon", "norm_epsilon"} & vars(config).keys():
        # families of their own write these
        writer.add_layer_norm_rms_eps(config.norm_eps if hasattr(config, "norm_eps") else config.rms_norm_eps)
