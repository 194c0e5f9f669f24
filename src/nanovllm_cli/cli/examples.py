"""Examples for help and manual pages, by the command's name in settings files: each line, and what it does. They run as they
stand; a test does so."""

EXAMPLES: dict[str, dict[str, str]] = {
    "": {
        'nanovllm run tiny "Once upon a time"': "The model that comes with the package; nothing is downloaded.",
        'nanovllm run qwen3:0.6b "Explain a mutex"': "A model from the hub, into the Hugging Face cache.",
    },
    "run": {
        'nanovllm run tiny "Once upon a time"': "The model that comes with the package.",
        'nanovllm run tiny -n 32 --temp 0 "Once upon a time"': "At most 32 tokens, always the likeliest one.",
        'git diff | nanovllm run qwen3:4b "Write a commit message"': "Standard input goes before the words.",
        'nanovllm run tiny -q --json "Hello" </dev/null >answer.json': "In a script: nothing is read or asked.",
        "nanovllm run tiny --batch prompts.jsonl -o results.jsonl": "A file of prompts at once; resumable.",
        'nanovllm run tiny --continue "And then?"': "The next turn of the last run.",
        "nanovllm run tiny --mcp servers.json --allow 'read_*' \"What is in notes.txt?\"":
            "With tools of MCP servers; what no --allow covers is not run.",
        'nanovllm run --url http://127.0.0.1:8080 "Once upon a time"':
            "Asks a server: nanovllm serve, or any that is compatible with OpenAI's.",
        'nanovllm run tiny --lora adapter "Once upon a time"': "With an adapter: a folder of PEFT's, or a .gguf file.",
        'nanovllm run tiny --control-vector-scaled happy.gguf:1.5 "Hello"': "Led into a direction, by llama.cpp's file for it.",
        'nanovllm run tiny --choice yes --choice no "Is it raining?"': "One of these, and nothing else.",
        'nanovllm run tiny --json-object "Describe a cat in JSON"': "JSON; --json-schema says which.",
    },
    "run-batch": {
        "nanovllm run-batch tiny requests.jsonl -o answers.jsonl": "All at once; given again, it goes on where it was.",
        "nanovllm run-batch tiny requests.jsonl --temp 0 | jq -r .response.body.usage.total_tokens":
            "For requests that say no temperature.",
        "nanovllm run-batch --url http://127.0.0.1:8080 requests.jsonl": "Answered by a server.",
    },
    "chat": {
        "nanovllm chat tiny": "A conversation; /help lists the commands, Ctrl-D leaves.",
        'nanovllm chat tiny -sys "Answer in one sentence." "Who are you?"': "With a first message.",
        "printf 'hi\\nbye\\n' | nanovllm chat tiny -q": "From a script: a line is a message.",
        "nanovllm chat --continue --save-kv": "The last conversation, with its model; the next time it goes on at once.",
        'nanovllm chat --url http://127.0.0.1:8080 "Who are you?"': "With a server's model.",
        "nanovllm chat --list-sessions": "All conversations that were kept.",
    },
    "control-vector": {
        "nanovllm control-vector tiny --positive happy.txt --negative sad.txt -o happier.gguf":
            "From pairs of texts, one a line.",
    },
    "embed": {
        'nanovllm embed tiny "Once upon a time" "The end"': "A line of JSON for each text.",
        "nanovllm embed tiny -f notes.txt -o vectors.jsonl": "A text a line; the output appears whole or not at all.",
        "printf 'a cat\\na tree\\n' | nanovllm embed tiny --query 'a kitten' --top 1": "The line that is nearest to it.",
        "nanovllm embed tiny --whole -f notes.txt -f more.txt --raw": "Each file is one text; numbers alone.",
    },
    "classify": {
        'nanovllm classify distilbert-sst2 "What a day!"': "A score, a label and the text.",
        "nanovllm classify distilbert-sst2 -f notes.txt --label NEGATIVE --min-score 0.9": "Lines that it surely is so of.",
        "nanovllm classify distilbert-sst2 -f notes.txt --json | jq -r .label": "The likeliest label of each line.",
    },
    "redact": {
        "nanovllm redact privacy-filter -f notes.txt -o clean.txt": "What is private becomes [its label].",
        "cat notes.txt | nanovllm redact privacy-filter --lines --with '<{label} {n}>'":
            "As lines come in; the same words have the same number.",
        "nanovllm redact privacy-filter --json -f notes.txt | jq .spans": "What it found, and where.",
    },
    "serve": {
        "nanovllm serve tiny": "At http://127.0.0.1:8080, for OpenAI's, Anthropic's, Ollama's clients; a page at /.",
        "nanovllm serve tiny --port 8000 -np 16 -c 2K": "Another port, sixteen answers at once, each of 2,048 tokens.",
        "nanovllm serve tiny --port 11434": "Where Ollama's clients look for a server.",
        "nanovllm serve qwen3:0.6b qwen3:4b --max-models 1 --sleep-idle 600":
            "Two models behind one address, in memory one at a time.",
        "nanovllm serve tiny --lora-modules sql=adapter": "Requests to the model sql have the adapter, others don't.",
        "nanovllm serve tiny --host 0.0.0.0 --api-key-file keys.txt": "For the network, with keys, one a line.",
    },
    "bench": {
        "nanovllm bench tiny": "llama-bench's tests pp512 and tg128.",
        "nanovllm bench tiny -p 0 -n 32 -npl 1-16*4 -r 3": "Decoding of 1, 4 and 16 sequences at once.",
        "nanovllm bench tiny -p 64 -n 16 -d 0,256 -o json >bench.json": "At two depths, as JSON.",
        "nanovllm bench --random-weights smollm2-135m --quant none,int8 -p 32 -n 8": "Made-up weights, two formats.",
    },
    "bench.throughput": {
        "nanovllm bench throughput tiny --num-prompts 32": "Requests and tokens a second, all at once.",
        "nanovllm bench throughput tiny --dataset prefix --num-prompts 16 --save prefix.json":
            "What the prefix cache brings, kept for bench compare.",
    },
    "bench.latency": {
        "nanovllm bench latency tiny": "How long a batch of 8 requests takes.",
        "nanovllm bench latency tiny -npl 1 --input-len 200 --output-len 8 -r 5": "One longer request.",
    },
    "bench.serve": {
        "nanovllm bench serve --url http://127.0.0.1:8080": "100 made-up prompts, all at once.",
        "nanovllm bench serve --num-prompts 20 --request-rate 10,20 --goodput ttft:500,tpot:100 --report serve.html":
            "At two rates, with the requests a second that met both goals.",
        "nanovllm bench serve --dataset prefix --max-concurrency 8 --save serve.json":
            "What a prefix cache is good for; kept for bench compare.",
    },
    "bench.compare": {
        "nanovllm bench compare before.json after.json": "How much faster each test became.",
        "nanovllm bench compare before.json after.json --fail-under 0.95": "For a script: 7 where a test lost 5 %.",
        "nanovllm bench compare llama.json ours.json --report versus.html": "llama-bench -o json against us.",
    },
    "models": {
        "nanovllm models list": "What is here, what it needs, and why it does not run where it does not.",
        "nanovllm models pull qwen3:0.6b": "Into the Hugging Face cache, without running it.",
    },
    "models.list": {
        "nanovllm models list": "Everything in the Hugging Face cache.",
        "nanovllm models list --short-names": "Names such as qwen3:4b, and what they stand for.",
    },
    "models.show": {
        "nanovllm models show tiny": "Shape, tensors, context, vocabulary, licence.",
        "nanovllm models show tiny --template": "The chat template, whole.",
    },
    "models.pull": {
        "nanovllm models pull qwen3:0.6b": "Goes on where an earlier download stopped.",
        "nanovllm models pull Qwen/Qwen3-4B-GGUF:Q8_0": "One quantization of several.",
    },
    "models.rm": {
        "nanovllm models rm -y qwen3:0.6b": "All of its revisions, without asking.",
    },
    "plan": {
        "nanovllm plan qwen3:8b": "From its settings and headers; the weights stay where they are.",
        "nanovllm plan tiny --check": "Loads it and puts what was planned beside what happened.",
    },
    "tokenize": {
        'nanovllm tokenize tiny "Once upon a time"': "A token a line.",
        "nanovllm tokenize tiny --count -f notes.txt": "How many tokens a file has.",
        'nanovllm tokenize tiny --chat -sys "Be brief." "Hello"': "What the model sees of a message.",
        "nanovllm tokenize tiny --ids Hello | nanovllm tokenize tiny --decode": "There and back.",
    },
    "convert": {
        "nanovllm convert tiny": "Hugging Face to a GGUF file for llama.cpp, bit by bit.",
        "nanovllm convert tiny --outtype q8_0 -o q8.gguf": "The same in 8 bits.",
        "nanovllm convert model.gguf --dry-run": "What a folder made of a GGUF file would hold.",
    },
    "quantize": {
        "nanovllm quantize tiny --to int8": "A folder that vLLM, transformers and this program load.",
        "nanovllm quantize tiny --to q4_k_m -o small.gguf": "A GGUF file in llama.cpp's mix of types.",
        "nanovllm quantize tiny --to int4:group=32 --algorithm gptq --dry-run": "What would become of each weight.",
    },
    "perplexity": {
        "nanovllm perplexity tiny --chunks 4": "In windows of 512 tokens, as llama-perplexity has them.",
        "nanovllm perplexity tiny -c 128 --chunks 8 --all": "Every token of each window but its first.",
        "nanovllm perplexity tiny ./tiny-int8 --chunks 2 --fail-above 0.1": "What int8 lost; 7 where that is too much.",
    },
    "verify": {
        "nanovllm verify tiny": "As it runs here, against the same in float32.",
        "nanovllm verify tiny ./tiny-int8 --tolerance 0.2": "Two forms of a model, layer by layer.",
    },
    "completion": {
        "source <(nanovllm completion bash)": "bash, in this shell or in every one by ~/.bashrc.",
        "source <(nanovllm completion zsh)": "zsh.",
        "nanovllm completion fish >~/.config/fish/completions/nanovllm.fish": "fish, from now on.",
    },
    "config": {
        "nanovllm config": "Everything that is set, and where.",
        "nanovllm config run --all": "What run would get, defaults too.",
        "nanovllm config run -m qwen3:8b --json": "The same for a model, for programs.",
    },
    "config.get": {
        "nanovllm config get run.temp || echo no": "The temperature that run takes, wherever it comes from.",
    },
    "config.set": {
        "nanovllm config set temp 0.7": "For every command that has it.",
        "nanovllm config set run.ctx-size 32K": "For one command.",
        "nanovllm config set models.qwen3:8b.top-k 20": "For one model.",
        "nanovllm config set aliases.mine someone/something-GGUF:Q4_K_M": "A short name of your own.",
        "nanovllm config set --project stop '###' 'The end'": "In the project's file; several values.",
    },
    "config.unset": {
        "nanovllm config set temp 0.7 && nanovllm config unset temp": "Set, and taken back.",
    },
    "config.path": {
        'cat "$(nanovllm config path)"': "The user's file as it is.",
    },
    "config.edit": {
        "EDITOR=true nanovllm config edit": "Here with an editor that does nothing.",
    },
}
