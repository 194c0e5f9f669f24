"""What users of llama.cpp, Ollama, vLLM and mlx-lm type out of habit, and what to type here; and what is typed by mistake.

Only hints are made of this: a name that means two things is learned once, an alias would be kept forever. The options themselves
are in `peer_options`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from nanovllm_cli.cli.peer_options import EXPLAINED, OPTIONS, SPLIT, THERE, TOKEN

_RENAMED = {theirs: ours for ours, names in OPTIONS.items() for theirs in names}
_SENTENCES = {name: sentence for names, sentence in EXPLAINED.items() for name in names}
_SENTENCES_THERE = {
    command: {name: sentence for names, sentence in found.items() for name in names} for command, found in THERE.items()
}

_COMMANDS = {
    "list": "models list", "ls": "models list", "pull": "models pull", "download": "models pull", "get": "models pull",
    "rm": "models rm", "remove": "models rm", "show": "models show", "info": "models show", "cli": "run", "generate": "run",
    "complete": "run", "simple": "run", "server": "serve", "start": "serve", "inspect": "models show", "gguf": "models show",
    "gguf-dump": "models show", "delete": "models rm", "simple-chat": "chat", "convert-hf-to-gguf": "convert",
    "ppl": "perplexity", "encode": "tokenize", "tokenise": "tokenize", "embedding": "embed", "embeddings": "embed",
    "classification": "classify", "anonymize": "redact", "anonymise": "redact", "mask": "redact", "pii": "redact",
    "cvector-generator": "control-vector", "main": "run", "fit-params": "plan",
}  # fmt: skip

_VALUES = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32",
    "float": "float32", "true": "on", "false": "off",
}  # fmt: skip

_VALUES_ELSEWHERE = {
    ("--reasoning", "on"): "here it is --think on",
    ("--reasoning", "off"): "here it is --think off; --reasoning hide leaves out what the model thinks",
}
"""What a peer's option of one of our names takes, and ours does not."""

_ALIAS = "a model gets a name of yours by nanovllm config set aliases.NAME MODEL"
_ENDS = "nothing stays in memory behind a command; Ctrl-C or SIGTERM ends a server"
_LOOKUP = "here it is nanovllm run MODEL --speculate 8"
_SMALLER = "here it is nanovllm run MODEL --draft-model SMALLER"
_SEES = "here it is nanovllm run MODEL --mmproj FILE --image FILE"
_RANKS = "nanovllm embed MODEL -f FILE --query TEXT ranks lines, by a reranker or by vectors; a server does at /v1/rerank"
_NO_COMMANDS = {
    "ps": "nothing stays in memory behind a command; a server says what it holds at /api/ps",
    "help": "nanovllm --help lists the commands, nanovllm COMMAND --help what one of them takes",
    "version": "here it is nanovllm --version",
    "stop": _ENDS,
    "unload": _ENDS,
    "load": "nothing stays in memory behind a command; nanovllm serve MODEL keeps a model",
    "create": _ALIAS,
    "cp": _ALIAS,
    "detokenize": "here it is nanovllm tokenize MODEL --decode IDS",
    "kl-divergence": "here it is nanovllm perplexity MODEL OTHER",
    "batch": "nanovllm run MODEL --batch FILE takes prompts, nanovllm run-batch MODEL FILE what OpenAI's batches have",
    "push": "nothing is uploaded here; hf upload does that",
    "login": TOKEN,
    "signin": TOKEN,
    "signout": "hf auth logout does that",
    "logout": "hf auth logout does that",
    "collect-env": "nanovllm bench tiny tells the machine and the versions behind its table",
    "launch": "nanovllm serve MODEL has the APIs that other programs ask for: OpenAI's, Anthropic's and Ollama's",
    "search": "huggingface.co has a search; nanovllm models list --short-names lists what has a short name here",
    "lookup": _LOOKUP,
    "lookahead": _LOOKUP,
    "speculative": _SMALLER,
    "speculative-simple": _SMALLER,
    "export-lora": "here it is nanovllm convert MODEL --lora ADAPTER",
    "convert-lora-to-gguf": "an adapter is taken as it is: nanovllm run MODEL --lora FOLDER",
    "mtmd-cli": _SEES,
    "llava-cli": _SEES,
    "gemma3-cli": _SEES,
    "minicpmv-cli": _SEES,
    "qwen2vl-cli": _SEES,
    "tts": "no speech is made here; models that hear take --audio FILE",
    "finetune": "nothing is trained here; --lora PATH takes an adapter that was trained elsewhere",
    "imatrix": "nanovllm quantize --algorithm imatrix measures by itself, --imatrix FILE goes by one that is there",
    "rerank": _RANKS,
    "retrieval": _RANKS,
    "infill": "a server does so: nanovllm serve MODEL, then POST /infill",
    "batched-bench": "here it is nanovllm bench MODEL -npl 1,2,4",
    "gguf-split": SPLIT,
    "split": SPLIT,
}

_EXTRA_WORDS = {
    "quantize": "nanovllm quantize MODEL --to q4_k_m -o OUTPUT",
    "convert": "nanovllm convert MODEL -o OUTPUT",
    "perplexity": "nanovllm perplexity MODEL OTHER -f FILE",
    "serve": "nanovllm serve MODEL; each further one by --model",
}


def our_name(flag: str) -> str | None:
    """What a peer's flag is called here, by whichever command."""
    return _RENAMED.get(flag.replace("_", "-"))


def renamed(flag: str, known: Collection[str]) -> str | None:
    """Ours, of those in `known`, for a peer's flag."""
    ours = _RENAMED.get(flag)
    return ours if ours in known else None


def option_hint(flag: str, known: Collection[str], command: str = "") -> str | None:
    """What to type instead of a peer's flag; None where nothing is to be said. known: the flags of `command`, which is called as
    in settings files (`bench.serve`)."""
    flag = flag.replace("_", "-")
    there = _SENTENCES_THERE.get(command, {}).get(flag)
    if there:
        return there
    if flag in _RENAMED:
        ours = renamed(flag, known)
        return f"here it is {ours}" if ours else None
    return _SENTENCES.get(flag)


def command_hint(name: str, known: Collection[str] = ()) -> str | None:
    """The same of a command that the program does not have. known: those that it has, which llama.cpp's may only be prefixed."""
    bare = name.removesuffix(".py").replace("_", "-").removeprefix("llama-")
    if bare == "completion":
        return "here it is nanovllm run MODEL --raw"  # and not what prints a shell's completions
    told = _NO_COMMANDS.get(bare)
    if told:
        return told
    ours = _COMMANDS.get(bare) or (bare if bare in known else None)
    return f"here it is nanovllm {ours}" if ours else None


def subcommand_hint(group: str, name: str) -> str | None:
    """The same of a command inside a group, such as `nanovllm models`."""
    ours = _COMMANDS.get(name, "")
    return f"here it is nanovllm {ours}" if ours.startswith(f"{group} ") else None


def words_hint(command: str | None) -> str | None:
    """How a command is called, where peers name more by place."""
    usage = _EXTRA_WORDS.get(command or "")
    return f"here it is {usage}" if usage else None


def value_hint(flags: Collection[str], value: str) -> str | None:
    """What to type instead of a peer's value, where that is of another option."""
    return next((told for (flag, word), told in _VALUES_ELSEWHERE.items() if flag in flags and word == value), None)


def near_values(value: str, choices: Collection[str]) -> list[str]:
    """Those of an option's words that `value` may stand for: a peer's name, or a slip."""
    ours = _VALUES.get(value.lower(), "")
    return [ours] if ours in choices else difflib.get_close_matches(value.lower(), choices, n=1)


def near_flags(flag: str, known: Collection[str]) -> list[str]:
    """At most three of `known` that a flag which is none of them may be a slip of; its dashes do not count."""
    word = flag.replace("_", "-").lstrip("-")
    names = {each.lstrip("-"): each for each in sorted(known) if len(each.lstrip("-")) > 2}
    return [names[word]] if word in names else [names[each] for each in nearest(word, names, cutoff=0.75)]


def near_settings(key: str, known: Collection[str]) -> list[str]:
    """At most three of the settings `known` that a file's key, which is none of them, may stand for: a peer's name, or a slip."""
    ours = renamed(f"--{key}", {f"--{each}" for each in known})
    return [ours.removeprefix("--")] if ours else nearest(key, known)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """At most three that may have been meant: spelt much alike, or one the beginning of the other (temperature, temp)."""
    names = list(names)
    begun = [each for each in names if min(len(each), len(name)) > 2 and (name.startswith(each) or each.startswith(name))]
    return list(dict.fromkeys([*difflib.get_close_matches(name, names, n=3, cutoff=cutoff), *begun]))[:3]


def is_habit(flag: str) -> bool:
    """Whether it is a peer's, of any command."""
    return flag in _RENAMED or flag in _SENTENCES or any(flag in there for there in _SENTENCES_THERE.values())
