#compdef nanovllm
# Completion of nanovllm for zsh. Written by `nanovllm completion zsh`.

# _arguments puts options of compadd before the words.
_nanovllm_offer() {
    compadd "$@"
}

_nanovllm_ask() {
    local -a names shown
    local word meaning
    while IFS=$'\t' read -r word meaning; do
        names+=("$word")
        shown+=("$word  ($meaning)")
    done < <("$program" __complete "${@[-1]}" 2>/dev/null)
    compadd -l -d shown -a names
}

_nanovllm_models() {
    _nanovllm_ask models
    _files -g '*.gguf'
}

# [the commands]

_nanovllm() {
    local program=$words[1] at=_nanovllm-
    while ((CURRENT > 2)) && (($+functions[${at%-}-$words[2]])); do
        at=${at%-}-$words[2]
        shift words
        ((CURRENT--))
    done
    $at
}

if [[ $funcstack[1] == _nanovllm ]]; then
    _nanovllm "$@"
else
    compdef _nanovllm nanovllm
fi
