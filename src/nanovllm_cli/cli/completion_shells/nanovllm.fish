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
# [the commands]
