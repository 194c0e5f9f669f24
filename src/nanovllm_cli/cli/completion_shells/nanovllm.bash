# Completion of nanovllm for bash 4.4 and newer. Written by `nanovllm completion bash`; needs no bash-completion.

# The words up to the cursor, with what bash took apart at : and = put together again (qwen3:0.6b, --dtype=auto).
_nanovllm_split() {
    local rest=${COMP_LINE:0:COMP_POINT} word i
    words=()
    for ((i = 0; i <= COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if ((i == 0)) || [[ $rest == [[:space:]]* ]]; then
            words+=("$word")
        else
            words[${#words[@]} - 1]+=$word
        fi
        rest=${rest#"${rest%%[![:space:]]*}"}
        rest=${rest#"$word"}
    done
}

_nanovllm_offer() {
    local word
    for word; do
        [[ $word != "$current"* ]] || COMPREPLY+=("$word")
    done
}

_nanovllm_ask() {
    local word meaning
    while IFS=$'\t' read -r word meaning; do
        _nanovllm_offer "$word"
    done < <("${words[0]}" __complete "$1" 2>/dev/null)
}

# Files, and the words that it is given.
_nanovllm_files() {
    _nanovllm_offer "$@"
    compopt -o filenames
    local name
    while IFS= read -r name; do
        COMPREPLY+=("$name")
    done < <(compgen -f -- "$current")
}

_nanovllm_folders() {
    compopt -o filenames
    local name
    while IFS= read -r name; do
        COMPREPLY+=("$name")
    done < <(compgen -d -- "$current")
}

# Names, folders and GGUF files. Not as -o filenames: that would put a backslash before the colon of a name.
_nanovllm_models() {
    _nanovllm_ask models
    local name
    while IFS= read -r name; do
        if [[ -d $name ]]; then
            printf -v name '%q/' "$name"
            compopt -o nospace
        elif [[ $name == *.gguf ]]; then
            printf -v name '%q' "$name"
        else
            continue
        fi
        COMPREPLY+=("$name")
    done < <(compgen -f -- "$current")
}

# [the commands]

_nanovllm() {
    local words typed current before flag='' path=nanovllm commands='' options='' action='' breaks='' head='' i number=0
    COMPREPLY=()
    _nanovllm_split
    typed=${words[${#words[@]} - 1]}
    current=$typed
    before=${words[${#words[@]} - 2]}
    for ((i = 1; i < ${#words[@]} - 1; i++)); do
        commands=''
        _nanovllm_commands "$path"
        [[ " $commands " == *" ${words[i]} "* ]] || break
        path+=" ${words[i]}"
    done
    for (( ; i < ${#words[@]} - 1; i++)); do
        if [[ ${words[i]} != -* ]]; then
            ((number++))
        elif [[ ${words[i]} != *=* ]] && _nanovllm_value "$path" "${words[i]}"; then
            ((i++))
        fi
    done
    action=''
    if [[ $typed == --*=* ]]; then
        flag=${typed%%=*}=
        current=${typed#*=}
        _nanovllm_value "$path" "${typed%%=*}"
    elif ! _nanovllm_value "$path" "$before"; then
        if [[ $current == -* ]]; then
            _nanovllm_options "$path"
            action="_nanovllm_offer $options"
        else
            commands=''
            ((number > 0)) || _nanovllm_commands "$path"
            _nanovllm_offer $commands
            _nanovllm_argument "$path" "$number"
        fi
    fi
    $action
    # bash puts an answer in the place of what stands behind the last : or =, and not of the whole word.
    [[ $COMP_WORDBREAKS == *:* ]] && breaks+=:
    [[ $COMP_WORDBREAKS == *=* ]] && breaks+='='
    [[ -z $breaks ]] || head=${typed%"${typed##*["$breaks"]}"}
    for i in "${!COMPREPLY[@]}"; do
        COMPREPLY[i]=$flag${COMPREPLY[i]}
        COMPREPLY[i]=${COMPREPLY[i]#"$head"}
    done
}

complete -F _nanovllm nanovllm
