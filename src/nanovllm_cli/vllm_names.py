"""What a program that was written for vLLM says, and what it is here: settings, methods, arguments, classes.

Names that mean the same here are parameters and methods where they belong. These are the others: each is told what serves
instead, and a setting that asks for nothing but what is so anyway is taken. Fields of SamplingParams are in `sampling_fields.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm_cli.errors import AbsentError, UsageError

SETTINGS = {
    "enforce_eager": "eager", "quantization": "quant", "num_gpu_blocks_override": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_bytes", "scheduling_policy": "policy", "hf_overrides": "overrides",
}  # fmt: skip
"""What is the same setting by another name."""

AS_IT_IS: dict[str, tuple[object, ...]] = {
    "trust_remote_code": (False,), "enable_chunked_prefill": (True, None), "swap_space": (0, None), "cpu_offload_gb": (0,),
    "disable_log_stats": (True,), "load_format": ("auto",), "task": ("auto",), "runner": ("auto",), "convert": ("auto",),
    "tokenizer": (None,), "tokenizer_mode": ("auto",), "tokenizer_revision": (None,), "skip_tokenizer_init": (False,),
    "pipeline_parallel_size": (1,), "data_parallel_size": (1,), "enable_expert_parallel": (False,), "enable_lora": (False,),
    "disable_custom_all_reduce": (False,), "enable_sleep_mode": (False,), "seed": (None,), "config_format": ("auto",),
    "model_impl": ("auto",), "speculative_config": (None,), "download_dir": (None,), "quantization_param_path": (None,),
}  # fmt: skip
"""Values that ask for what is so in any case."""

_SEEN = "a folder's or file's form is seen: leave it out"
_FINDS = "what a model can do is seen: generate, chat, embed, rank, classify"
_OWN_TOKENIZER = "a model's own files have it: leave it out"
_ONE = "tensor_parallel_size divides a model between processes, in no other way"
SETTING_HINTS = {
    "trust_remote_code": "no code that comes with a model is ever run: leave it out",
    "seed": "each request has its own: SamplingParams(seed=…)",
    "swap_space": "a sequence that has to wait is computed anew: leave it out",
    "disable_log_stats": "nothing is logged unasked: leave it out",
    "speculative_config": "settings of their own say it: draft_model, mtp, num_speculative_tokens",
    "limit_mm_per_prompt": "images are bounded by the context alone: leave it out",
    "mm_processor_kwargs": "image_max_tokens, video_fps and video_max_frames say how finely a model looks",
    "enable_lora": "adapters need no leave: lora_modules, or SamplingParams(lora=…)",
    **dict.fromkeys(("max_loras", "max_lora_rank", "max_cpu_loras", "fully_sharded_loras"),
                    "adapters take what room they need: leave it out"),
    "enable_chunked_prefill": "prompts are always read in chunks, of max_num_batched_tokens: leave it out",
    "cpu_offload_gb": "n_gpu_layers and n_cpu_moe say what stays in the machine's memory",
    "download_dir": "HF_HUB_CACHE in the environment says where downloads are kept",
    **dict.fromkeys(("load_format", "config_format", "model_impl", "quantization_param_path"), _SEEN),
    **dict.fromkeys(("task", "runner", "convert"), _FINDS),
    **dict.fromkeys(("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"), _OWN_TOKENIZER),
    "code_revision": "no code that comes with a model is ever run: leave it out",
    "hf_token": "HF_TOKEN in the environment, or `hf auth login`",
    "served_model_name": "a program's model needs no name: leave it out",
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"), _ONE),
    **dict.fromkeys(("distributed_executor_backend", "worker_cls", "disable_custom_all_reduce"),
                    "processes of a model find one another: leave it out"),
    **dict.fromkeys(("compilation_config", "cuda_graph_sizes", "max_seq_len_to_capture", "optimization_level"),
                    "steps are recorded as graphs; eager=True has none"),
    "reasoning_parser": "reasoning_format, beside the model's name",
    "tool_call_parser": "tool_format, beside the model's name",
    **dict.fromkeys(("structured_outputs_config", "guided_decoding_backend"),
                    "each request has its form: SamplingParams(constraint=…)"),
    **dict.fromkeys(("pooler_config", "override_pooler_config"), "embed(texts, pooling) takes another pooling than the model's"),
    "rope_scaling": "rope=RopeChange(…), of nanovllm_cli.config",
    "rope_theta": "rope=RopeChange(base=…), of nanovllm_cli.config",
    **dict.fromkeys(("generation_config", "override_generation_config"),
                    "default_params has the model's own: replace them in yours"),
    "enable_sleep_mode": "close() lets go of a model",
    "logits_processors": "logit_bias, bad_words and allowed_token_ids of SamplingParams say what is drawn",
    "max_logprobs": "up to 100 may be asked for: leave it out",
    "allowed_local_media_path": "images are sent as data URLs, which data_url(bytes) makes",
    "chat_template_content_format": "what a template takes is tried: leave it out",
}  # fmt: skip
"""Of settings that there are not."""

_ADAPTERS = "SamplingParams(lora=NAME), of the model's lora_modules"
_CUT = "a prompt is never cut: leave it out"
ARGUMENT_HINTS = {
    "lora_request": _ADAPTERS,
    "prompt_token_ids": 'a list of ids is a prompt, as {"prompt_token_ids": ids} is',
    "priority": "requests of a program run in their order: leave it out",
    **dict.fromkeys(("tokenization_kwargs", "truncate_prompt_tokens", "truncation_size"), _CUT),
    **dict.fromkeys(("guided_options_request", "prompt_adapter_request"), "SamplingParams(constraint=…) says an answer's form"),
    "chat_template": "LLM(…, chat_template=SOURCE)",
    "chat_template_content_format": "what a template takes is tried: leave it out",
    "template_kwargs": "here it is chat_template_kwargs",
    "mm_processor_kwargs": "image_max_tokens and video_fps are settings of the model: LLM(…, image_max_tokens=…)",
    "use_activation": "here it is activation",
    "pooling_params": "pooling names one, where the model's own is not wanted",
    "pooling_task": "pooling names one, where the model's own is not wanted",
    "params": "here it is sampling_params",
}  # fmt: skip
"""Of arguments of LLM's methods."""

METHOD_HINTS = {
    "beam_search": "generate(prompts, SamplingParams(num_beams=4, n=4, max_tokens=64)) looks for the likeliest answers",
    "encode": "embed(texts) makes vectors, classify(texts) classes, tokenizer.encode(text) token ids",
    "reward": "classify(texts, activation=False) has a model's reward, where it has one for a whole text",
    "score": "rank(query, documents) scores documents, by a reranker or by vectors",
    "get_default_sampling_params": "default_params has them",
    "reset_prefix_cache": "LLM(…, enable_prefix_caching=False) keeps nothing of a prompt",
    "reset_mm_cache": "LLM(…, enable_prefix_caching=False) keeps nothing of a prompt",
    **dict.fromkeys(("sleep", "wake_up"), "close() lets go of a model and its memory; LLM(…) loads it again"),
    "shutdown": "close(), or `with LLM(…) as llm:`",
    **dict.fromkeys(("start_profile", "stop_profile"), "nothing is profiled here; Python's own profilers may look on"),
    "get_metrics": "stats() has counts, and each output its metrics",
    "llm_engine": "engine, for who has a loop of its own",
    **dict.fromkeys(("enqueue", "wait_for_completion"), "generate_iter takes requests as room appears, threads may share an LLM"),
    "set_tokenizer": "a model's own files have its tokenizer",
    "preprocess_chat": "encode_chat makes token ids of messages",
    **dict.fromkeys(("apply_model", "collective_rpc"), "what computes a model is not reached into"),
    "model_config": "spec says what the model is, max_model_len how far it reads",
}  # fmt: skip
"""Of methods and attributes of an LLM."""

CLASS_HINTS = {
    "BeamSearchParams": METHOD_HINTS["beam_search"],
    "PoolingParams": "embed(texts, pooling) takes another pooling than the model's",
    **dict.fromkeys(("StructuredOutputsParams", "GuidedDecodingParams"),
                    'SamplingParams(constraint=Constraint("json_schema", …)), of nanovllm_cli.constraint'),
    "LoRARequest": _ADAPTERS,
    **dict.fromkeys(("AsyncLLMEngine", "AsyncLLM", "AsyncEngineArgs"),
                    "LLM.stream yields an answer as it grows; nanovllm serve has HTTP"),
    "LLMEngine": "LLM(…).engine, for who has a loop of its own",
    "EngineArgs": "EngineConfig has what an engine is told",
    **dict.fromkeys(("TextPrompt", "TokensPrompt"),
                    "a text or a list of token ids is a prompt, or {'prompt': …}, {'prompt_token_ids': …}"),
}  # fmt: skip
"""Of what the package would be asked for."""

_DTYPES = {"half": "float16", "float": "float32", "fp8_e4m3": "fp8"}


def setting(name: str, value: Any) -> Any:
    """A setting's value as it is called here: of vLLM's names of types, and of torch's types."""
    if name.endswith("dtype"):
        word = str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value
        return _DTYPES.get(word, word) if isinstance(word, str) else word
    return value


def is_so_anyway(name: str, value: object) -> bool:
    """Whether a setting that there is not asks for what is so in any case."""
    return any(type(value) is type(each) and value == each for each in AS_IT_IS.get(name, ()))


def refuse_others(method: str, others: Mapping[str, object], known: Iterable[str] = ()) -> None:
    """Raises UsageError for the first argument of a method that has none of that name; a peer's that is None asks for nothing."""
    for name, value in others.items():
        if value is None and name in ARGUMENT_HINTS:
            continue
        near = difflib.get_close_matches(name, [*known, "sampling_params", "progress", "use_tqdm"], n=1)
        meant = f"did you mean {near[0]}?" if near else f"help(LLM.{method}) lists what it takes"
        raise UsageError(f"{method} has no argument {name!r}", ARGUMENT_HINTS.get(name, meant))


def absent(owner: str, name: str, hints: Mapping[str, str] = METHOD_HINTS) -> AttributeError:
    """What asking for an attribute raises that there is not: an AbsentError where something serves instead."""
    if name in hints:
        return AbsentError(f"{owner} has no {name!r}", hints[name])
    return AttributeError(f"{owner!r} object has no attribute {name!r}")
