"""What users of llama.cpp, Ollama, vLLM and mlx-lm type out of habit, and what to type here; and what is typed by mistake.

Only hints are made of this: a name that means two things is learned once, an alias would be kept forever. Names that are the same
everywhere (`-c`, `--temp`, `-np`, …) are options of ours and not in here.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

_OPTIONS = {
    "--temp": ("--temperature",),
    "--predict": ("--max-tokens", "--max-new-tokens", "--max-completion-tokens", "--num-predict"),
    "--ctx-size": ("--max-model-len", "--num-ctx", "--n-ctx", "--max-context", "--max-kv-size"),
    "--batch-size": ("--ubatch-size", "-ub", "--max-num-batched-tokens"),
    "--max-num-seqs": ("--n-parallel",),
    "--threads": ("--threads-batch", "-tb", "--num-threads"),
    "--repeat-penalty": ("--repetition-penalty",),
    "--stop": ("--reverse-prompt", "-r"),
    "--typical": ("--typical-p",),
    "--top-nsigma": ("--top-n-sigma",),
    "--eager": ("--enforce-eager",),
    "--quant": ("--quantization",),
    "--device": ("--main-gpu", "-mg", "-dev"),
    "--system-prompt": ("--system", "--sys-prompt"),
    "--output": ("--output-file", "--out", "--outfile", "--save-path", "--mlx-path"),
    "--think": ("--enable-thinking", "--reasoning-format", "-rea"),
    "--stats": ("--show-timings", "--perf"),
    "--url": ("--server-base",),
    "--json-object": ("--format",),
    "--chat-template": ("--chat-template-file",),
    "--model": ("--hf-path", "--model-path"),
    "--to": ("--q-bits", "--type", "--ftype"),
    "--allowed-host": ("--allowed-hosts", "--trusted-host"),
    "--ssl-cert-file": ("--ssl-certfile",),
    "--ssl-key-file": ("--ssl-keyfile",),
    "--cors-origin": ("--allowed-origins", "--cors-origins"),
    "--unix-socket": ("--uds",),
    "--max-models": ("--models-max",),
    "--lora": ("--adapter-path", "--adapter", "--lora-path"),
    "--draft-model": ("--model-draft", "-md", "--hf-repo-draft", "-hfd", "-hfrd", "--spec-draft-hf", "--spec-draft-model"),
    "--draft-min-p": ("--draft-p-min", "--spec-draft-p-min"),
    "--speculate": ("--draft", "--draft-n", "--draft-max", "--spec-draft-n-max", "--num-draft-tokens"),
    "--head": ("--output-tensor-type",),
    "--embedding": ("--token-embedding-type",),
    "--otlp-endpoint": ("--otlp-traces-endpoint",),
    "--verbose": ("--log-verbosity", "-lv", "--verbosity", "--log-verbose", "--uvicorn-log-level"),
    "--file": ("--binary-file", "-bf"),
    "--count": ("--show-count",),
    "--timeout": ("-to",),
    "--help": ("--usage",),
    "--version": ("-V",),
    "--ping-interval": ("--sse-ping-interval",),
    "--n-prompt": ("-npp",),
    "--n-gen": ("-ntg",),
    "--repetitions": ("--num-iters",),
    "--warmup": ("--num-iters-warmup",),
    "--sleep-idle": ("--sleep-idle-seconds", "--keep-alive", "--ttl"),
}
_RENAMED = {theirs: ours for ours, names in _OPTIONS.items() for theirs in names}

_ALWAYS = "that is always so: leave it out"
_TOKEN = "the token is read from HF_TOKEN, or from where hf auth login keeps it"
_EXPLAINED = {
    ("-ngl", "--n-gpu-layers", "--gpu-layers", "-ot", "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-nkvo",
     "--no-kv-offload", "-kvo", "--kv-offload"): "a model lies on one device as a whole: --device auto, cpu, cuda or cuda:N",
    ("-fa", "--flash-attn", "--jinja", "--stream", "-cb", "--cont-batching", "--enable-prefix-caching",
     "--metrics", "--props", "--embedding", "--embeddings", "--webui", "--ui", "--no-context-shift",
     "--no-escape", "--check-tensors", "--no-display-prompt", "--simple-io", "--no-perf", "--mmap",
     "--enable-auto-tool-choice", "--enable-chunked-prefill", "--enable-reasoning", "--enable-log-requests"):
        _ALWAYS,
    ("-e", "--escape"): r"a prompt is taken as it stands; in most shells $'one\ntwo' has a new line in it",
    ("-co", "--color", "--colors"): "colour follows the terminal; NO_COLOR and FORCE_COLOR decide otherwise",
    ("-sysf", "--system-prompt-file"): 'here it is -sys "$(cat FILE)"',
    ("-hft", "--hf-token"): _TOKEN,
    ("--list-devices",): "nanovllm plan MODEL says what it would be computed on",
    ("--context-shift", "--keep"): "nothing is left out in silence; chat --context-overflow shift drops the oldest turns aloud",
    ("--prompt-cache", "--prompt-cache-all", "--prompt-cache-ro"): "nanovllm chat --save-kv keeps what was read",
    ("--numa",): "-tp N divides a model among processes, each beside a memory of its own",
    ("--prio", "--prio-batch", "--poll", "--poll-batch", "--cpu-mask", "-C", "--cpu-range", "-Cr", "--cpu-strict",
     "-Cb", "--cpu-mask-batch", "-Crb", "--cpu-range-batch", "--cpu-strict-batch"):
        "which processors are used is said in front: taskset, numactl, nice; -t says how many",
    ("--include-weights", "--exclude-weights"):
        "an importance matrix is asked about every weight that can use it: leave it out",
    ("--repack", "--no-repack", "-nr", "--op-offload", "--no-op-offload", "-nopo", "--no-host", "--kv-unified", "-kvu",
     "--swa-full", "--fit", "-fit", "-fitt", "--fit-target", "-fitc", "--fit-ctx", "-dt", "--defrag-thold", "-ctxcp",
     "--ctx-checkpoints", "--swa-checkpoints", "-cms", "--checkpoint-min-step", "-no-kvu", "--no-kv-unified", "-no-fa", "-nocb",
     "--no-cont-batching", "-bs", "--backend-sampling", "--cache-idle-slots", "--no-cache-idle-slots", "--use-temp-file",
     "--no-lazy", "--block-size", "--num-gpu-blocks-override", "--guided-decoding-backend"):
        "that is decided here by itself: leave it out",
    ("-sp", "--special"): "control tokens are no part of an answer; --json --logprobs 0 lists all that were drawn",
    ("--verbose-prompt",): "nanovllm tokenize MODEL --chat TEXT shows what the model sees of a message",
    ("--kl-divergence", "--kl-divergence-base", "--save-all-logits"):
        "nanovllm perplexity MODEL OTHER compares both at once, and keeps no file of logits",
    ("--ppl-stride", "--stride"): "windows do not overlap: each begins where the one before ended",
    ("--ppl-output-type",): "nanovllm perplexity MODEL --json has all that was measured",
    ("--hellaswag", "--hellaswag-tasks", "--winogrande", "--winogrande-tasks", "--multiple-choice", "--multiple-choice-tasks"):
        "tasks are not scored here",
    ("--stdin",): "standard input is read without being asked for, and - asks for it",
    ("-ptc", "--print-token-count"): "tokens are counted in the line at the end, and in --json and --jsonl",
    ("--log-colors", "--log-prefix", "--log-timestamps", "--no-log-prefix", "--no-log-timestamps"):
        "--log-file FILE keeps what is said, with times; --log-json as JSON",
    ("--slot-save-path",): "nanovllm chat --save-kv keeps what was read; a server keeps it in memory alone",
    ("--models-dir", "--models-preset"): "each model is named: nanovllm serve MODEL MODEL",
    ("--leave-output-tensor",): "the head is left as it is, but for GGUF, where --head keep says so",
    ("--pure",): "--tensor-type '.=FORMAT' gives every weight that format",
    ("--disable-log-requests", "--disable-uvicorn-access-log"):
        "serve writes a line for each request; --no-access-log leaves it out",
    ("--log-disable",): "-q leaves out all but errors; serve --no-access-log the line for each request",
    ("--slots", "--no-slots"): "what runs is told at /slots, /status and /metrics",
    ("--no-webui", "--no-ui"): "the pages at / and /status hold nothing secret and are always there: leave it out",
    ("--pooling",): "a model pools, or ranks, as its files say; nanovllm embed --pooling and pooling in a request say otherwise",
    ("--rerank", "--reranking"): "a reranker ranks without it: nanovllm embed --query TEXT does, and a server at /v1/rerank",
    ("--embd-normalize",): "vectors have length 1: nanovllm embed --no-normalize, and embd_normalize in a request, say otherwise",
    ("--embd-output-format",): "nanovllm embed writes JSON lines; --json is OpenAI's form, --raw is numbers alone",
    ("--embd-separator",): "each argument and each line is a text of its own: nanovllm embed --whole takes a file as one",
    ("--root-path", "--api-prefix", "--middleware", "--path"): "that is for a proxy in front",
    ("--threads-http", "--api-server-count"): "one process answers over HTTP: leave it out",
    ("--swap-space", "--cpu-offload-gb", "--cache-ram", "-cram"): "there is one cache, in memory: --kv-cache SIZE",
    ("--tokenizer", "--tokenizer-mode", "--load-format", "--task", "--runner", "--model-impl",
     "--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx", "--yarn-ext-factor",
     "--yarn-attn-factor", "--yarn-beta-slow", "--yarn-beta-fast", "--override-kv", "-gan", "--grp-attn-n", "-gaw",
     "--grp-attn-w"):
        "that follows from the model's own files: leave it out",
    ("--no-enable-prefix-caching", "--cache-prompt", "--no-cache-prompt", "--cache-reuse", "-sps", "--slot-prompt-similarity"):
        "the prefix cache changes no answer and is always on: leave it out",
    ("-no-cnv", "--no-conversation", "-st", "--single-turn"): "run answers once and never asks back: leave it out",
    ("-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first", "-mli", "--multiline-input",
     "--in-prefix", "--in-prefix-bos", "--in-suffix"): "nanovllm chat MODEL is the conversation",
    ("-hf", "-hfr", "--hf-repo", "-dr", "--docker-repo", "-hff", "--hf-file", "-mu", "--model-url",
     "--remote"):
        "a hub's model is named like any other: org/repo, org/repo:Q4_K_M, org/repo/file.gguf",
    ("--warmup", "--no-warmup"): "nothing is run beforehand: leave it out",
    ("-mmp", "--no-mmap", "--mlock", "-lm", "--load-mode", "-dio", "--direct-io", "-ndio", "--no-direct-io"):
        "weights are mapped while they load, and then lie in memory of their own: leave it out",
    ("--trust-remote-code", "--code-revision"): "no code that comes with a model is ever run: leave it out",
    ("-pp", "--pipeline-parallel-size", "-dp", "--data-parallel-size", "-ts", "--tensor-split", "-sm", "--split-mode"):
        "a model runs on one GPU, or on a CPU's processors; -tp N divides it among processes there",
    ("--enable-lora", "--max-loras", "--max-lora-rank", "--lora-base"): "--lora NAME is all that an adapter needs: leave it out",
    ("--lora-init-without-apply",): "here it is --lora-modules NAME=PATH, which requests choose by their field lora",
    ("--control-vector", "--control-vector-scaled", "--control-vector-layer-range"): "control vectors are not supported",
    ("-mmu", "--mmproj-url"): "a hub's file is named like any other: --mmproj org/repo, or org/repo/mmproj-F16.gguf",
    ("--no-mmproj-auto",): "here it is --no-mmproj",
    ("--mmproj-offload", "--no-mmproj-offload", "-mmdev", "--mmproj-device"):
        "what sees is on the model's device, once the first image comes: leave it out",
    ("--image-min-tokens",): "an image is no smaller than the model has it: leave it out",
    ("--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path", "--allowed-media-domains",
     "--media-path", "--language-model-only"):
        "requests bring images as data URLs, and nothing is opened for them; what sees is loaded with the first: leave it out",
    ("--audio", "--video"): "sound and video are not supported",
    ("--speculative-config",): "here it is --draft-model NAME or --mtp, and --speculate N for how many tokens",
    ("-ngld", "--n-gpu-layers-draft", "--gpu-layers-draft", "-devd", "--device-draft", "-cd", "--ctx-size-draft", "-ctkd",
     "-ctvd", "-td", "--threads-draft", "-tbd", "--threads-batch-draft", "--cache-type-k-draft", "--cache-type-v-draft",
     "--spec-draft-ngl", "--spec-draft-device", "--spec-draft-threads", "--spec-draft-type-k", "--spec-draft-type-v"):
        "the draft model runs where the other one does, with as much context: leave it out",
    ("--spec-type", "--draft-min", "--spec-ngram-size-n", "--spec-ngram-size-m", "--spec-ngram-simple-size-n",
     "--spec-ngram-simple-size-m", "--spec-default", "--spec-draft-n-min", "--draft-n-min", "--draft-p-split",
     "--spec-draft-p-split", "-lcs", "--lookup-cache-static", "-lcd", "--lookup-cache-dynamic"):
        "--speculate 8 guesses up to eight tokens a step by what the text repeats, --draft-model by a smaller model, --mtp by a "
        "layer of the model's own",
    ("--mirostat", "--mirostat-lr", "--mirostat-ent", "--samplers", "--sampler-seq", "--sampling-seq", "--tfs-z",
     "--adaptive-target", "--adaptive-decay", "--dynatemp-range", "--dynatemp-exp", "--tfs"):
        "that sampler is not supported; --help lists those that are",
    ("-cl", "--cache-list"): "nanovllm models list shows what is in the cache",
    ("--completion-bash",): "nanovllm completion bash prints it",
    ("-rpc", "--rpc"): "a model is computed on one machine: leave it out",
    ("--display-prompt",): "a prompt is not repeated before its answer: leave it out",
    ("--no-stream",): "an answer is written as it comes; --json and -o FILE have it as a whole",
    ("--no-jinja",): "a chat template is always Jinja; --raw leaves it out",
    ("--reasoning-effort",): """--chat-template-kwargs '{"reasoning_effort": "high"}' of run and chat; or in a request""",
    ("--no-show-timings",): "here it is --no-stats",
    ("--hidethinking",): "--reasoning hide leaves it out",
    ("--nowordwrap",): "run wraps no line, nor does chat --markdown never",
    ("--keepalive",): "nothing stays in memory behind a command; a server keeps its models, or as --sleep-idle says",
    ("--tools", "--agent", "-ag"): "tools are run by the client that offers them: leave it out",
    ("--generation-config", "--override-generation-config"):
        "sampling options such as --temp count where a request says nothing, before the model's own",
    ("--config",): "settings stand in nanovllm.toml and in ~/.config/nanovllm/config.toml; nanovllm config shows them",
    ("--download-dir",): "HF_HUB_CACHE says where downloads are kept",
    ("--print-supported-models",): "nanovllm plan MODEL says whether it is supported",
    ("--keep-split",): "the output is one file; nanovllm convert --split-max-size makes parts of it",
}  # fmt: skip
_SENTENCES = {name: sentence for names, sentence in _EXPLAINED.items() for name in names}

_COMMANDS = {
    "list": "models list", "ls": "models list", "pull": "models pull", "download": "models pull", "get": "models pull",
    "rm": "models rm", "remove": "models rm", "show": "models show", "info": "models show", "cli": "run", "generate": "run",
    "complete": "run", "simple": "run", "server": "serve", "start": "serve", "inspect": "models show", "gguf": "models show",
    "gguf-dump": "models show", "delete": "models rm", "simple-chat": "chat", "convert-hf-to-gguf": "convert",
    "ppl": "perplexity", "encode": "tokenize", "tokenise": "tokenize", "embedding": "embed", "embeddings": "embed",
}  # fmt: skip

_VALUES = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32",
    "float": "float32", "true": "on", "false": "off",
}  # fmt: skip

_SPLIT = "nanovllm convert FILE --to gguf --split-max-size 2G splits, and without a size merges"
_ALIAS = "a model gets a name of yours by nanovllm config set aliases.NAME MODEL"
_NO_COMMANDS = {
    "ps": "nothing stays in memory behind a command; a server says what it holds at /api/ps",
    "help": "nanovllm --help lists the commands, nanovllm run --help what one of them takes",
    "version": "here it is nanovllm --version",
    "stop": "nothing stays in memory behind a command; Ctrl-C or SIGTERM ends a server",
    "create": _ALIAS,
    "cp": _ALIAS,
    "detokenize": "here it is nanovllm tokenize MODEL --decode IDS",
    "kl-divergence": "here it is nanovllm perplexity MODEL OTHER",
    "login": _TOKEN,
    "signin": _TOKEN,
    "search": "huggingface.co has a search; nanovllm models list --short-names lists what has a short name here",
    "lookup": "here it is nanovllm run MODEL --speculate 8",
    "speculative": "here it is nanovllm run MODEL --draft-model SMALLER",
    "export-lora": "here it is nanovllm convert MODEL --lora ADAPTER",
    "convert-lora-to-gguf": "an adapter is taken as it is: nanovllm run MODEL --lora FOLDER",
    "mtmd-cli": "here it is nanovllm run MODEL --mmproj FILE --image FILE",
    "imatrix": "nanovllm quantize --algorithm imatrix measures by itself, --imatrix FILE goes by one that is there",
    "rerank": "nanovllm embed MODEL -f FILE --query TEXT ranks lines, by a reranker or by vectors; a server does at /v1/rerank",
    "infill": "a server does so: nanovllm serve MODEL, then POST /infill",
    "batched-bench": "here it is nanovllm bench MODEL -npl 1,2,4",
    "gguf-split": _SPLIT,
    "split": _SPLIT,
}

_EXTRA_WORDS = {
    "quantize": "nanovllm quantize MODEL --to q4_k_m -o OUTPUT",
    "convert": "nanovllm convert MODEL -o OUTPUT",
    "perplexity": "nanovllm perplexity MODEL OTHER -f FILE",
    "serve": "nanovllm serve MODEL; each further one by --model",
}


def renamed(flag: str, known: Collection[str]) -> str | None:
    """Ours, of those in `known`, for a peer's flag."""
    ours = _RENAMED.get(flag)
    return ours if ours in known else None


def option_hint(flag: str, known: Collection[str]) -> str | None:
    """What to type instead of a peer's flag, in a command whose flags are `known`; None where nothing is to be said."""
    flag = flag.replace("_", "-")
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


def near_values(value: str, choices: Collection[str]) -> list[str]:
    """Those of an option's words that `value` may stand for: a peer's name, or a slip."""
    ours = _VALUES.get(value.lower(), "")
    return [ours] if ours in choices else difflib.get_close_matches(value.lower(), choices, n=1)


def near_flags(flag: str, known: Collection[str]) -> list[str]:
    """At most three of `known` that a flag which is none of them may be a slip of; its dashes do not count."""
    word = flag.replace("_", "-").lstrip("-")
    names = {each.lstrip("-"): each for each in sorted(known) if len(each.lstrip("-")) > 2}
    if word in names:
        return [names[word]]
    begun = [each for name, each in names.items() if len(word) > 2 and (word.startswith(name) or name.startswith(word))]
    close = [names[name] for name in difflib.get_close_matches(word, names, n=3, cutoff=0.75)]
    return list(dict.fromkeys([*close, *begun]))[:3]


def is_habit(flag: str) -> bool:
    return flag in _RENAMED or flag in _SENTENCES
