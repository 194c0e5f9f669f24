# Completion of nanovllm for fish. Written by `nanovllm completion fish`.

# Whether the words before the cursor begin with this command, such as "run" or "bench serve", and no longer one.
function __nanovllm_at -a wanted
    set -l words (commandline -opc)[2..-1]
    set -l path
    while set -q words[1]
        set -l next (string join ' ' -- $path $words[1])
        contains -- $next $__nanovllm_commands; or break
        set path $next
        set -e words[1]
    end
    test "$path" = "$wanted"
end

# Whether argument NUMBER of that command is being typed, or with "more" one after it.
function __nanovllm_argument -a wanted number more
    __nanovllm_at $wanted; or return 1
    set -l words (commandline -opc)[2..-1]
    set -l depth (count (string split -n ' ' -- $wanted))
    test $depth -gt 0; and set -e words[1..$depth]
    set -l seen 0
    while set -q words[1]
        if contains -- $words[1] $__nanovllm_taking
            set -e words[1]
        else if not string match -q -- '-*' $words[1]
            set seen (math $seen + 1)
        end
        set -e words[1]
    end
    test $seen -eq $number; or test -n "$more" -a $seen -ge $number
end

function __nanovllm_ask
    set -l program (commandline -opc)[1]
    $program __complete $argv[1] 2>/dev/null
end

complete -c nanovllm -f
set -g __nanovllm_commands 'run' 'convert' 'quantize' 'verify' 'completion'
set -g __nanovllm_taking -m --model --revision --chat-template --dtype --device --quant -p --prompt -f --file -sys --system-prompt --think --chat-template-kwargs --batch -n --predict --n-predict --temp --top-k --top-p --min-p --typical -s --seed --repeat-penalty --presence-penalty --frequency-penalty --repeat-last-n --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --xtc-probability --xtc-threshold -l --logit-bias --stop --bad-word --min-tokens -N --num-answers --logprobs -c --ctx-size -b --batch-size --kv-cache --kv-cache-dtype -ctk --cache-type-k -ctv --cache-type-v --gpu-memory-utilization -t --threads -o --output --reasoning --log-file --to --outtype --outfile --split-max-size --algorithm --calibration --num-samples --tensor-type --target-bpw --head --embedding --verify-text --verify-tokens --against --dtype-b --text --tokens --tolerance

complete -c nanovllm -n '__nanovllm_argument '\'''\'' 0' -a run -d 'Answer one prompt, or a file of prompts'
complete -c nanovllm -n '__nanovllm_argument '\'''\'' 0' -a convert -d 'Write a model in another format: Hugging Face to GGUF and back, other types, parts and shards into one'
complete -c nanovllm -n '__nanovllm_argument '\'''\'' 0' -a quantize -d 'Write a model in fewer bits, and say what that costs'
complete -c nanovllm -n '__nanovllm_argument '\'''\'' 0' -a verify -d 'Find the first layer and the first token where two forms of a model part'
complete -c nanovllm -n '__nanovllm_argument '\'''\'' 0' -a completion -d 'Print the completion script for a shell'
complete -c nanovllm -n '__nanovllm_at '\'''\''' -l version -d 'The version, and nothing else'
complete -c nanovllm -n '__nanovllm_at '\'''\''' -s h -l help -d 'This text'
complete -c nanovllm -n '__nanovllm_argument '\''run'\'' 0' -a '(__nanovllm_ask models; __fish_complete_suffix .gguf)'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s m -l model -x -a '(__nanovllm_ask models; __fish_complete_suffix .gguf)' -d 'A path, org/repo[:quant][@revision], or a short name, in place of the first argument'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l revision -x -d 'Branch, tag or commit on the hub'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l offline -d 'Use only what is on this machine'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l chat-template -r -F -a 'alpaca chatml gemma llama2 llama3 mistral phi3 plain vicuna zephyr' -d 'A built-in template'\''s name, or a Jinja file, instead of the model'\''s own'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l dtype -x -a 'auto float32 bfloat16 float16' -d 'What it computes in'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l device -x -a 'auto cpu cuda cuda:0' -d 'auto, cpu, cuda, cuda:N'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l quant -x -a 'int8 int8-weight-only fp8 fp8:block=128 fp8-weight-only int4 int4:group=32 int4-weight-only int3 int2 nf4 q8_0 q4_0 q4_1 q5_0 q5_1 q2_k q3_k q4_k q5_k q6_k' -d 'Round plain weights while loading: int8, fp8, int4[:group=N], nf4, q4_k, …'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s p -l prompt -x -d 'The prompt, as the arguments after MODEL'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s f -l file -r -F -d 'Text from a file, before the arguments'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -o sys -l system-prompt -x -d 'What the model is told first'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l continue -d 'Go on from the last run: with a new prompt as its next turn, without one with its answer'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l raw -d 'The prompt as it is, without the chat template'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l think -x -a 'on off' -d 'Whether the model reasons first, where its template has a switch'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l chat-template-kwargs -x -d 'More variables for the chat template'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l batch -r -F -d 'A file of JSON lines, {"prompt": …} or {"messages"'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s n -l predict -l n-predict -x -d 'Most tokens of an answer'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l temp -x -d 'Temperature'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l top-k -x -d 'Only the k likeliest tokens'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l top-p -x -d 'Only the likeliest tokens that make up p'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l min-p -x -d 'Only tokens of at least this share of the likeliest one'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l typical -x -d 'Locally typical sampling'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s s -l seed -x -d 'The same seed gives the same answer'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l repeat-penalty -x -d 'Divides the logits of tokens that occurred'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l presence-penalty -x -d 'Subtracted once a token has occurred'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l frequency-penalty -x -d 'Subtracted for each time it occurred'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l repeat-last-n -x -d 'How far back penalties look'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l dry-multiplier -x -d 'DRY: strength'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l dry-base -x -d 'DRY: growth with the repeated length'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l dry-allowed-length -x -d 'DRY: repeats up to this length are free'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l dry-penalty-last-n -x -d 'DRY: how far back'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l dry-sequence-breaker -x -d 'DRY: ends a repeat'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l xtc-probability -x -d 'XTC: how often'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l xtc-threshold -x -d 'XTC: what counts as likely'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s l -l logit-bias -x -d 'Adds to a token'\''s logit: 15043+1, 15043-1.5'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l ignore-eos -d 'Go on past the model'\''s own end'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l stop -x -d 'Ends the answer before this text'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l bad-word -x -d 'Never said'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l min-tokens -x -d 'No end before this many tokens'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s N -l num-answers -x -d 'How many answers'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l logprobs -x -d 'Log-probabilities of the likeliest k at each token'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s c -l ctx-size -x -d 'Longest prompt plus answer in tokens, such as 25.6k or 32K'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s b -l batch-size -x -d 'Most tokens in one step of the engine'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l kv-cache -x -d 'Memory for the KV cache, such as 512M or 1.5G'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l kv-cache-dtype -x -a 'auto float32 bfloat16 float16 fp8 int8' -d 'What the KV cache is kept as: auto (what it computes in), int8 (on a CPU) or fp8'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -o ctk -l cache-type-k -x -a 'auto float32 bfloat16 float16 fp8 int8' -d 'The same for keys alone'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -o ctv -l cache-type-v -x -a 'auto float32 bfloat16 float16 fp8 int8' -d 'The same for values alone'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l gpu-memory-utilization -x -d 'Share of a GPU'\''s memory for weights, KV cache and one step'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l eager -d 'On a GPU: launch every kernel, record no step as a graph'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l programmatic-launch -d 'On a GPU from 9.0 up: start kernels before the one ahead ends'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s t -l threads -x -d 'CPU threads'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l deterministic -d 'An answer never depends on what else is computed with it'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s o -l output -r -F -d 'Write the answer to a file, whole or not at all'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l overwrite -d 'Let --batch replace results of other prompts or settings in -o'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l json -d 'One JSON object instead of text'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l jsonl -d 'A JSON line for each step, then one with statistics'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s x -l extract -d 'Only the first code block of the answer'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l reasoning -x -a 'show hide auto' -d 'A model'\''s reasoning on stderr'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l stats -l no-stats -d 'A line of statistics on stderr'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l no-save -d 'Keep nothing for --continue'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s q -l quiet -d 'Only errors on stderr'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s v -l verbose -d 'More on stderr'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l log-file -r -F -d 'Appends the log to this file'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l log-json -d 'One JSON object a line in the log'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l debug -d 'Tracebacks with errors'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -l version -d 'The version, and nothing else'
complete -c nanovllm -n '__nanovllm_at '\''run'\''' -s h -l help -d 'This text'
complete -c nanovllm -n '__nanovllm_argument '\''convert'\'' 0' -a '(__nanovllm_ask models; __fish_complete_suffix .gguf)'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -s m -l model -x -a '(__nanovllm_ask models; __fish_complete_suffix .gguf)' -d 'A path, org/repo[:quant][@revision], or a short name, in place of the first argument'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -l revision -x -d 'Branch, tag or commit on the hub'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -l offline -d 'Use only what is on this machine'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -l to -x -a 'gguf hf safetensors' -d 'gguf: a file for llama.cpp and this program'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -l outtype -l dtype -x -a 'auto f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 q2_k q3_k q4_k q5_k q6_k' -d 'auto (as it is), f32, f16, bf16'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -s o -l output -l outfile -r -F -d 'The file, or folder, that is written, whole or not at all'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -l split-max-size -x -d 'Most bytes of a file, such as 2G'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -l force -d 'Replace the output where it exists'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -l dry-run -d 'Say what would be written, and write nothing'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -l json -d 'What was done as one JSON object'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -s q -l quiet -d 'Only errors on stderr'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -s v -l verbose -d 'More on stderr'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -l log-file -r -F -d 'Appends the log to this file'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -l log-json -d 'One JSON object a line in the log'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -l debug -d 'Tracebacks with errors'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -l version -d 'The version, and nothing else'
complete -c nanovllm -n '__nanovllm_at '\''convert'\''' -s h -l help -d 'This text'
complete -c nanovllm -n '__nanovllm_argument '\''quantize'\'' 0' -a '(__nanovllm_ask models; __fish_complete_suffix .gguf)'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -s m -l model -x -a '(__nanovllm_ask models; __fish_complete_suffix .gguf)' -d 'A path, org/repo[:quant][@revision], or a short name, in place of the first argument'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l revision -x -d 'Branch, tag or commit on the hub'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l offline -d 'Use only what is on this machine'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l to -x -a 'int8 int8-weight-only fp8 fp8:block=128 fp8-weight-only int4 int4:group=32 int4-weight-only int3 int2 nf4 q8_0 q4_0 q4_1 q5_0 q5_1 q2_k q3_k q4_k q5_k q6_k q2_k_m q3_k_s q3_k_m q3_k_l q4_k_s q4_k_m q5_k_s q5_k_m' -d 'int8, int8-weight-only, fp8[:block=128], int4[:group=N][:zeros] make a folder for vLLM, transformers and this program'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l algorithm -x -a 'rtn gptq awq' -d 'rtn rounds to nearest'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l calibration -r -F -d 'What gptq, awq and --target-bpw let the model read: a text, or .jsonl with text, prompt or messages'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l num-samples -x -d 'Most pieces of 512 tokens to calibrate with'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l tensor-type -x -d 'Another format, or '\''keep'\'', for weights whose name the regular expression is found in'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l target-bpw -x -d 'Bits a weight on average, over all matrices: formats of the layers are chosen by what they cost'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l head -x -a 'keep int8 int8-weight-only fp8 fp8:block=128 fp8-weight-only int4 int4:group=32 int4-weight-only int3 int2 nf4 q8_0 q4_0 q4_1 q5_0 q5_1 q2_k q3_k q4_k q5_k q6_k' -d 'Format of the head, or keep'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l embedding -x -a 'keep int8 int8-weight-only fp8 fp8:block=128 fp8-weight-only int4 int4:group=32 int4-weight-only int3 int2 nf4 q8_0 q4_0 q4_1 q5_0 q5_1 q2_k q3_k q4_k q5_k q6_k' -d 'Format of the embedding, or keep'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l allow-requantize -d 'Take a model that is quantized already'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -s o -l output -r -F -d 'The folder, or GGUF file, that is written, whole or not at all'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l force -d 'Replace the output where it exists'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l dry-run -d 'Say what every weight would become, and write nothing'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l no-verify -d 'Leave out the quality card, which takes two passes over a text'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l verify-text -r -F -d 'The text of the quality card'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l verify-tokens -x -d 'Most tokens of it'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l json -d 'What was done as one JSON object'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -s q -l quiet -d 'Only errors on stderr'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -s v -l verbose -d 'More on stderr'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l log-file -r -F -d 'Appends the log to this file'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l log-json -d 'One JSON object a line in the log'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l debug -d 'Tracebacks with errors'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -l version -d 'The version, and nothing else'
complete -c nanovllm -n '__nanovllm_at '\''quantize'\''' -s h -l help -d 'This text'
complete -c nanovllm -n '__nanovllm_argument '\''verify'\'' 0' -a '(__nanovllm_ask models; __fish_complete_suffix .gguf)'
complete -c nanovllm -n '__nanovllm_argument '\''verify'\'' 1' -a '(__nanovllm_ask models; __fish_complete_suffix .gguf)'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -s m -l model -x -a '(__nanovllm_ask models; __fish_complete_suffix .gguf)' -d 'A path, org/repo[:quant][@revision], or a short name, in place of the first argument'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -l revision -x -d 'Branch, tag or commit on the hub'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -l offline -d 'Use only what is on this machine'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -l against -x -a 'model float32 transformers' -d 'The other side: model is the second argument'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -l dtype -x -a 'auto float32 bfloat16 float16' -d 'What MODEL computes in'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -l dtype-b -x -a 'auto float32 bfloat16 float16' -d 'What OTHER computes in'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -l text -r -F -d 'What both read'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -l tokens -x -d 'How much of it'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -l tolerance -x -d 'Relative error of a token at a layer that still counts as equal'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -l json -d 'The result as one JSON object'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -s q -l quiet -d 'Only errors on stderr'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -s v -l verbose -d 'More on stderr'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -l log-file -r -F -d 'Appends the log to this file'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -l log-json -d 'One JSON object a line in the log'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -l debug -d 'Tracebacks with errors'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -l version -d 'The version, and nothing else'
complete -c nanovllm -n '__nanovllm_at '\''verify'\''' -s h -l help -d 'This text'
complete -c nanovllm -n '__nanovllm_argument '\''completion'\'' 0' -x
complete -c nanovllm -n '__nanovllm_argument '\''completion'\'' 0' -a 'bash zsh fish'
complete -c nanovllm -n '__nanovllm_at '\''completion'\''' -s q -l quiet -d 'Only errors on stderr'
complete -c nanovllm -n '__nanovllm_at '\''completion'\''' -s v -l verbose -d 'More on stderr'
complete -c nanovllm -n '__nanovllm_at '\''completion'\''' -l log-file -r -F -d 'Appends the log to this file'
complete -c nanovllm -n '__nanovllm_at '\''completion'\''' -l log-json -d 'One JSON object a line in the log'
complete -c nanovllm -n '__nanovllm_at '\''completion'\''' -l debug -d 'Tracebacks with errors'
complete -c nanovllm -n '__nanovllm_at '\''completion'\''' -l version -d 'The version, and nothing else'
complete -c nanovllm -n '__nanovllm_at '\''completion'\''' -s h -l help -d 'This text'
