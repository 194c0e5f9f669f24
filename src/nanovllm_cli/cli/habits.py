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
    "--ctx-size": ("--max-model-len", "--num-ctx", "--n-ctx", "--max-context", "--max-kv-size", "--kv-unified-per-slot"),
    "--batch-size": ("--ubatch-size", "-ub", "--max-num-batched-tokens"),
    "--max-num-seqs": ("--n-parallel",),
    "--threads": ("--threads-batch", "-tb", "--num-threads"),
    "--repeat-penalty": ("--repetition-penalty",),
    "--stop": ("--reverse-prompt", "-r", "--extra-eos-token"),
    "--typical": ("--typical-p",),
    "--top-nsigma": ("--top-n-sigma",),
    "--eager": ("--enforce-eager",),
    "--quant": ("--quantization",),
    "--device": ("--main-gpu", "-mg", "-dev"),
    "--system-prompt": ("--system", "--sys-prompt"),
    "--output": ("--output-file", "--out", "--outfile", "--save-path", "--mlx-path"),
    "--file": ("--binary-file", "-bf", "--fragment"),
    "--image": ("-a", "--attachment"),
    "--raw": ("--ignore-chat-template",),
    "--no-save": ("--no-log",),
    "--api-key": ("--key",),
    "--extract": ("--extract-last", "--xl"),
    "--json-schema": ("--schema",),
    "--kv-cache": ("--kv-cache-memory-bytes",),
    "--kv-cache-dtype": ("--kv-bits", "--kv-group-size", "--quantized-kv-start"),
    "--activations": ("--quantize-activations",),
    "--think": ("--enable-thinking", "--reasoning-format", "-rea"),
    "--chat-template-kwargs": ("--default-chat-template-kwargs", "--chat-template-config"),
    "--stats": ("--show-timings", "--perf"),
    "--url": ("--server-base", "--base-url"),
    "--json-object": ("--format",),
    "--chat-template": ("--chat-template-file",),
    "--model": ("--hf-path", "--model-path"),
    "--to": ("--type", "--ftype"),
    "--allowed-host": ("--allowed-hosts", "--trusted-host"),
    "--ssl-cert-file": ("--ssl-certfile",),
    "--ssl-key-file": ("--ssl-keyfile",),
    "--cors-origin": ("--allowed-origins", "--cors-origins"),
    "--unix-socket": ("--uds",),
    "--max-models": ("--models-max",),
    "--lora": ("--adapter-path", "--adapter", "--lora-path"),
    "--draft-model": ("--model-draft", "-md", "--hf-repo-draft", "-hfd", "-hfrd", "--spec-draft-hf", "--spec-draft-model"),
    "--draft-min-p": ("--draft-p-min", "--spec-draft-p-min"),
    "--speculate": ("--draft", "--draft-n", "--draft-max", "--spec-draft-n-max", "--num-draft-tokens",
                    "--num-speculative-tokens"),
    "--head": ("--output-tensor-type",),
    "--embedding": ("--token-embedding-type",),
    "--otlp-endpoint": ("--otlp-traces-endpoint",),
    "--verbose": ("--log-verbosity", "-lv", "--verbosity", "--log-verbose", "--uvicorn-log-level"),
    "--log-json": ("--log-jsonl",),
    "--count": ("--show-count",),
    "--timeout": ("-to",),
    "--help": ("--usage",),
    "--version": ("-V",),
    "--ping-interval": ("--sse-ping-interval",),
    "--n-prompt": ("-npp",),
    "--n-gen": ("-ntg",),
    "--repetitions": ("--num-iters",),
    "--warmup": ("--num-iters-warmup", "--num-warmups"),
    "--sleep-idle": ("--sleep-idle-seconds", "--keep-alive", "--ttl", "--enable-sleep-mode"),
    "--tensor-type": ("--tensor-type-file",),
    "--target-bpw": ("--target-size",),
    "--dataset": ("--dataset-name",),
    "--input-len": ("--random-input-len", "--sonnet-input-len", "--prefix-repetition-suffix-len"),
    "--output-len": ("--random-output-len", "--sonnet-output-len", "--sharegpt-output-len", "--custom-output-len",
                     "--hf-output-len", "--prefix-repetition-output-len"),
    "--prefix-len": ("--random-prefix-len", "--sonnet-prefix-len", "--prefix-repetition-prefix-len"),
    "--num-prefixes": ("--prefix-repetition-num-prefixes",),
    "--range-ratio": ("--random-range-ratio",),
    "--percentiles": ("--metric-percentiles",),
    "--save": ("--save-result", "--save-detailed", "--result-filename", "--result-dir", "--output-json"),
    "--ramp-up": ("--ramp-up-strategy", "--ramp-up-start-rps", "--ramp-up-end-rps"),
    "--report": ("--plot-timeline",),
    "--quiet": ("--disable-tqdm",),
}  # fmt: skip
_RENAMED = {theirs: ours for ours, names in _OPTIONS.items() for theirs in names}

_ALWAYS = "that is always so: leave it out"
_SPLIT = "nanovllm convert FILE --to gguf --split-max-size 2G splits, and without a size merges"
_TOKEN = "the token is read from HF_TOKEN, or from where hf auth login keeps it"
_EXPLAINED = {
    ("-ngl", "--n-gpu-layers", "--gpu-layers", "-ot", "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-nkvo",
     "--no-kv-offload", "-kvo", "--kv-offload", "-ncffn", "--n-cpu-ffn", "--moe-cache", "--moe-cache-mib"):
        "a model lies on one device as a whole: --device auto, cpu, cuda or cuda:N",
    ("-fa", "--flash-attn", "--jinja", "--stream", "-cb", "--cont-batching", "--enable-prefix-caching",
     "--metrics", "--props", "--embedding", "--embeddings", "--webui", "--ui", "--no-context-shift",
     "--no-escape", "--check-tensors", "--no-display-prompt", "--simple-io", "--no-perf", "--mmap",
     "--enable-auto-tool-choice", "--enable-chunked-prefill", "--enable-reasoning", "--enable-log-requests", "--no-log-jsonl",
     "--enable-ssl-refresh", "--enable-prompt-tokens-details", "--enable-request-id-headers",
     "--disable-fastapi-docs", "--exclude-tools-when-tool-choice-none"):
        _ALWAYS,
    ("-e", "--escape"): r"a prompt is taken as it stands; in most shells $'one\ntwo' has a new line in it",
    ("-co", "--color", "--colors"): "colour follows the terminal; NO_COLOR and FORCE_COLOR decide otherwise",
    ("-sysf", "--system-prompt-file", "--sf", "--system-fragment"): 'here it is -sys "$(cat FILE)"',
    ("-hft", "--hf-token"): _TOKEN,
    ("--list-devices",): "nanovllm plan MODEL says what it would be computed on",
    ("--context-shift", "--keep"): "nothing is left out in silence; chat --context-overflow shift drops the oldest turns aloud",
    ("--prompt-cache", "--prompt-cache-all", "--prompt-cache-ro", "--prompt-cache-file"):
        "nanovllm chat --save-kv keeps what was read",
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
     "--no-lazy", "--block-size", "--num-gpu-blocks-override", "--guided-decoding-backend", "--structured-outputs-config",
     "--mtmd-batch-max-tokens", "--spec-draft-sampling", "--spec-draft-backend-sampling", "--no-spec-draft-backend-sampling",
     "--no-importance", "--keep-bpw-state", "--bpw-state", "--no-tensor-first-split", "--no-enable-chunked-prefill",
     "--max-num-partial-prefills", "--long-prefill-token-threshold", "--num-lookahead-slots", "--scheduler-cls",
     "--async-scheduling", "--cuda-graph-sizes", "--compilation-config", "-O", "-cc", "--optimization-level",
     "--performance-mode", "--attention-backend", "--disable-cascade-attn", "--disable-sliding-window", "--calculate-kv-scales",
     "--prefix-caching-hash-algo", "--mm-processor-cache-gb", "--skip-mm-profiling", "--additional-config"):
        "that is decided here by itself: leave it out",
    ("-sp", "--special"): "control tokens are no part of an answer; --json --logprobs 0 lists all that were drawn",
    ("--verbose-prompt",): "nanovllm tokenize MODEL --chat TEXT shows what the model sees of a message",
    ("--kl-divergence", "--kl-divergence-base", "--save-all-logits", "--all-logits"):
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
    ("--models-autoload", "--no-models-autoload"): "with --max-models N a model is loaded when it is asked for",
    ("--leave-output-tensor",): "the head is left as it is, but for GGUF, where --head keep says so",
    ("--pure",): "--tensor-type '.=FORMAT' gives every weight that format",
    ("--disable-log-requests", "--disable-uvicorn-access-log", "--no-enable-log-requests"):
        "serve writes a line for each request; --no-access-log leaves it out",
    ("--log-disable",): "-q leaves out all but errors; serve --no-access-log the line for each request",
    ("--log-prompts-dir", "--enable-log-outputs", "--max-log-len"): "what is asked and answered is never logged: leave it out",
    ("--log-config-file",): "-v, --log-file FILE and --log-json say what is logged, and where",
    ("--slots", "--no-slots"): "what runs is told at /slots, /status and /metrics",
    ("--disable-log-stats", "--enable-server-load-tracking", "--show-hidden-metrics-for-version"):
        "figures are told at /status and /metrics, and not logged: leave it out",
    ("--no-webui", "--no-ui"): "the pages at / and /status hold nothing secret and are always there: leave it out",
    ("--pooling",): "a model pools, or ranks, as its files say; nanovllm embed --pooling and pooling in a request say otherwise",
    ("--rerank", "--reranking"): "a reranker ranks without it: nanovllm embed --query TEXT does, and a server at /v1/rerank",
    ("--embd-normalize",): "vectors have length 1: nanovllm embed --no-normalize, and embd_normalize in a request, say otherwise",
    ("--embd-output-format",): "nanovllm embed writes JSON lines; --json is OpenAI's form, --raw is numbers alone",
    ("--embd-separator",): "each argument and each line is a text of its own: nanovllm embed --whole takes a file as one",
    ("--root-path", "--api-prefix", "--middleware", "--path", "--reuse-port", "--ssl-ca-certs", "--ssl-cert-reqs",
     "--ssl-ciphers"): "that is for a proxy in front",
    ("--threads-http", "--api-server-count", "--headless", "--disable-frontend-multiprocessing"):
        "one process answers over HTTP: leave it out",
    ("--cors-methods", "--cors-headers", "--cors-credentials", "--no-cors-credentials", "--allowed-methods", "--allowed-headers",
     "--allow-credentials"): "--cors-origin says which pages may use the server; the rest follows: leave it out",
    ("--ui-config", "--webui-config", "--ui-config-file", "--webui-config-file"):
        "the page at / is set in the browser: leave it out",
    ("--enable-force-include-usage",): "a request asks for it by stream_options",
    ("--return-tokens-as-token-ids",): "a request asks for token ids by return_token_ids",
    ("--max-logprobs", "--logprobs-mode"): "a request says how many it wants: leave it out",
    ("--tool-parser-plugin", "--reasoning-parser-plugin"):
        "no code is loaded for it: --tool-call-parser and --reasoning-parser name what is known here",
    ("--option",): "sampling options have flags of their own, such as --temp 0.7",
    ("--vocab-only",): "a model is converted as a whole: leave it out",
    ("--tags",): "models have no tags: leave it out",
    ("--swap-space", "--cpu-offload-gb", "--cache-ram", "-cram"): "there is one cache, in memory: --kv-cache SIZE",
    ("--tokenizer", "--tokenizer-mode", "--load-format", "--task", "--runner", "--model-impl",
     "--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx", "--yarn-ext-factor",
     "--yarn-attn-factor", "--yarn-beta-slow", "--yarn-beta-fast", "--override-kv", "-gan", "--grp-attn-n", "-gaw",
     "--grp-attn-w", "--attention", "--cls-separator", "--spm-infill", "--reasoning-preserve", "--no-reasoning-preserve",
     "--convert", "--hf-config-path", "--config-format", "--hf-overrides", "--tokenizer-revision", "--skip-tokenizer-init",
     "--pooler-config",
     "--chat-template-content-format", "--use-default-chat-template", "--metadata", "--model-name", "--mistral-format",
     "--disable-mistral-community-chat-template", "--sentence-transformers-dense-modules"):
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
    ("-lzm", "--lazy-mode", "--safetensors-load-strategy", "-mmp", "--no-mmap", "--mlock", "-lm", "--load-mode", "-dio",
     "--direct-io", "-ndio", "--no-direct-io"):
        "weights are mapped while they load, and then lie in memory of their own: leave it out",
    ("--trust-remote-code", "--code-revision"): "no code that comes with a model is ever run: leave it out",
    ("-pp", "--pipeline-parallel-size", "-dp", "--data-parallel-size", "-ts", "--tensor-split", "-sm", "--split-mode",
     "--enable-expert-parallel", "--distributed-executor-backend"):
        "a model runs on one GPU, or on a CPU's processors; -tp N divides it among processes there",
    ("--enable-lora", "--max-loras", "--max-lora-rank", "--lora-base", "--lora-dtype", "--max-cpu-loras",
     "--fully-sharded-loras"):
        "--lora NAME is all that an adapter needs: leave it out",
    ("--lora-init-without-apply",): "here it is --lora-modules NAME=PATH, which requests choose by their field lora",
    ("--control-vector", "--control-vector-scaled", "--control-vector-layer-range"): "control vectors are not supported",
    ("-mmu", "--mmproj-url"): "a hub's file is named like any other: --mmproj org/repo, or org/repo/mmproj-F16.gguf",
    ("--no-mmproj-auto",): "here it is --no-mmproj",
    ("--mmproj-offload", "--no-mmproj-offload", "-mmdev", "--mmproj-device"):
        "what sees is on the model's device, once the first image comes: leave it out",
    ("--image-min-tokens",): "an image is no smaller than the model has it: leave it out",
    ("--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path", "--allowed-media-domains",
     "--media-path", "--language-model-only"):
        "requests bring images and sounds along, and nothing is opened for them; a tower is loaded with the first: leave it out",
    ("--video", "--video-fps", "--video-timestamp-interval", "--video-ffmpeg-dir"):
        "video is not supported",
    ("--speculative-config",): "here it is --draft-model NAME or --mtp, and --speculate N for how many tokens",
    ("-ngld", "--n-gpu-layers-draft", "--gpu-layers-draft", "-devd", "--device-draft", "-cd", "--ctx-size-draft", "-ctkd",
     "-ctvd", "-td", "--threads-draft", "-tbd", "--threads-batch-draft", "--cache-type-k-draft", "--cache-type-v-draft",
     "--spec-draft-ngl", "--spec-draft-device", "--spec-draft-threads", "--spec-draft-type-k", "--spec-draft-type-v",
     "--spec-draft-threads-batch", "--spec-draft-cpu-mask", "-Cd", "--cpu-mask-draft", "--spec-draft-cpu-range", "-Crd",
     "--cpu-range-draft", "--spec-draft-cpu-strict", "--cpu-strict-draft", "--spec-draft-prio", "--prio-draft",
     "--spec-draft-poll", "--poll-draft", "-Cbd", "--cpu-mask-batch-draft", "--spec-draft-override-tensor",
     "-otd", "--override-tensor-draft", "--spec-draft-cpu-moe", "-cmoed", "--cpu-moe-draft",
     "--spec-draft-n-cpu-moe", "--spec-draft-ncmoe", "-ncmoed", "--n-cpu-moe-draft"):
        "the draft model runs where the other one does, with as much context: leave it out",
    ("--spec-type", "--draft-min", "--spec-ngram-size-n", "--spec-ngram-size-m", "--spec-ngram-simple-size-n",
     "--spec-ngram-simple-size-m", "--spec-default", "--spec-draft-n-min", "--draft-n-min", "--draft-p-split",
     "--spec-draft-p-split", "-lcs", "--lookup-cache-static", "-lcd", "--lookup-cache-dynamic", "--spec-ngram-mod-n-min",
     "--spec-ngram-mod-n-max", "--spec-ngram-mod-n-match", "--spec-ngram-min-hits", "--spec-ngram-simple-min-hits",
     "--spec-ngram-map-k-size-n", "--spec-ngram-map-k-size-m", "--spec-ngram-map-k-min-hits", "--spec-ngram-map-k4v-size-n",
     "--spec-ngram-map-k4v-size-m", "--spec-ngram-map-k4v-min-hits"):
        "--speculate 8 guesses up to eight tokens a step by what the text repeats, --draft-model by a smaller model, --mtp by a "
        "layer of the model's own",
    ("--mirostat", "--mirostat-lr", "--mirostat-ent", "--samplers", "--sampler-seq", "--sampling-seq", "--tfs-z",
     "--adaptive-target", "--adaptive-decay", "--dynatemp-range", "--dynatemp-exp", "--tfs", "--min-tokens-to-keep",
     "--use-beam-search"):
        "that sampler is not supported; --help lists those that are",
    ("-cl", "--cache-list"): "nanovllm models list shows what is in the cache",
    ("--completion-bash",): "nanovllm completion bash prints it",
    ("-rpc", "--rpc"): "a model is computed on one machine: leave it out",
    ("--display-prompt",): "a prompt is not repeated before its answer: leave it out",
    ("--no-stream",): "an answer is written as it comes; --json and -o FILE have it as a whole",
    ("--no-jinja",): "a chat template is always Jinja; --raw leaves it out",
    ("--reasoning-effort",): """--chat-template-kwargs '{"reasoning_effort": "high"}' of run, chat and serve; or in a request""",
    ("--no-show-timings",): "here it is --no-stats",
    ("--hidethinking",): "--reasoning hide leaves it out",
    ("--nowordwrap",): "run wraps no line, nor does chat --markdown never",
    ("--keepalive",): "nothing stays in memory behind a command; a server keeps its models, or as --sleep-idle says",
    ("--tools", "--agent", "-ag", "--no-agent", "-no-ag", "--tools-runtime", "--mcp-servers-config", "--mcp-servers-json",
     "--ui-mcp-proxy", "--no-ui-mcp-proxy", "--webui-mcp-proxy", "--no-webui-mcp-proxy", "--tool-server", "-T", "--tool",
     "--functions"): "tools are run by the client that offers them: leave it out",
    ("--generation-config", "--override-generation-config"):
        "sampling options such as --temp count where a request says nothing, before the model's own",
    ("--config",): "settings stand in nanovllm.toml and in ~/.config/nanovllm/config.toml; nanovllm config shows them",
    ("--download-dir",): "HF_HUB_CACHE says where downloads are kept",
    ("--print-supported-models",): "nanovllm plan MODEL says whether it is supported",
    ("--keep-split",): "the output is one file; nanovllm convert --split-max-size makes parts of it",
    ("--split-max-tensors",): "parts are made by their size: --split-max-size 2G",
    ("--merge", "--split"): _SPLIT,
    ("--q-bits", "--q-group-size", "--q-mode", "--quantize"):
        "nanovllm quantize MODEL --to int4:group=64 makes a model of fewer bits",
    ("--dequantize",): "nanovllm convert MODEL --outtype bf16 --allow-requantize takes quantized weights apart",
    ("--prune-layers",): "layers are not taken out",
    ("--bigendian",): "what is written is little-endian, as every machine it runs on is",
    ("--upload-repo",): "nothing is uploaded here; hf upload does that",
    ("--n-gen-warmup",): "one repetition beforehand does not count: leave it out",
    ("--percentile-metrics",): "all of them are shown: leave it out",
    ("--hf-subset", "--hf-split"): "requests come from a file: --dataset-path FILE",
    ("--license", "--parameters", "--modelfile"): "nanovllm models show MODEL has what is known of a model",
    ("--insecure",): "certificates are always checked; SSL_CERT_FILE names another authority",
    ("--embd-gemma-default", "--fim-qwen-1.5b-default", "--fim-qwen-3b-default", "--fim-qwen-7b-default", "--fim-qwen-7b-spec",
     "--fim-qwen-14b-spec", "--fim-qwen-30b-default", "--gpt-oss-20b-default", "--gpt-oss-120b-default",
     "--vision-gemma-4b-default", "--vision-gemma-12b-default"):
        "a model is named; nanovllm models list --short-names lists short names",
    ("--skip-chat-parsing", "--prefill-assistant", "--no-prefill-assistant", "--prefill-response"):
        "a request to /v1/chat/completions says how its answer begins; nanovllm run --raw leaves the template out",
    ("--reasoning-budget-message",): "nothing is said where a budget ends: leave it out",
}  # fmt: skip
_SENTENCES = {name: sentence for names, sentence in _EXPLAINED.items() for name in names}

_A_FORM = "a request says what form its answer has: response_format, or json_schema, grammar, structured_outputs"
_THERE: dict[str, dict[tuple[str, ...], str]] = {
    "serve": {
        ("--grammar", "--grammar-file", "-j", "--json-schema", "-jf", "--json-schema-file", "--json-object", "--regex"): _A_FORM,
        ("-sys", "--system-prompt", "--response-role"): "a request brings its messages, the system prompt among them",
        ("--json", "--jsonl"): "a request says how it is answered",
        ("--reasoning",): "here it is --think on or --think off",
    },
    "bench.serve": {
        ("--host", "--port"): "here it is --url http://HOST:PORT",
        ("--served-model-name", "--lora-modules"): "here it is -m NAME",
        ("--skip-chat-template",): "--endpoint completions sends prompts as they are: leave it out",
        ("--backend",): "here it is --endpoint chat or --endpoint completions",
        ("--header", "--profile", "--label", "--request-id-prefix", "--ready-check-timeout-sec", "--append-result"):
            "that is not supported; --save FILE keeps results, by a name of their own",
        ("--top-p", "--top-k", "--min-p", "--temp", "--temperature", "--frequency-penalty", "--presence-penalty",
         "--repeat-penalty", "--repetition-penalty", "--logprobs", "-n"):
            """--extra-body '{"temperature": 0.7, "top_k": 20}' adds fields to requests""",
    },
    "chat": {
        ("--show-timings", "--perf", "--stats", "--no-stats"): "/stats in the chat says how fast the last answer was",
    },
    "bench": {("--save", "--output-file"): "-o json >FILE keeps results, for bench compare"},
    "embed": {("-p", "--prompt", "-e", "--escape"): "each argument behind the model is a text"},
    "convert": {
        ("-mm", "--mmproj"): "what a model sees by is written beside it, as a file of its own: leave it out",
    },
}  # fmt: skip
"""The same of what one command is asked for, whatever others have."""
_SENTENCES_THERE = {
    command: {name: sentence for names, sentence in found.items() for name in names} for command, found in _THERE.items()
}

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

_ALIAS = "a model gets a name of yours by nanovllm config set aliases.NAME MODEL"
_NO_COMMANDS = {
    "ps": "nothing stays in memory behind a command; a server says what it holds at /api/ps",
    "help": "nanovllm --help lists the commands, nanovllm COMMAND --help what one of them takes",
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
