# Completion of hftune in fish. In ~/.config/fish/config.fish: hftune completion fish | source
set -g __hftune_table (string split \n -- @TABLE@)

function __hftune_words
    set -l words (commandline -opc) (commandline -ct)
    set -l word $words[-1]
    set -l task any
    set -l recipe (string replace -f recipe= '' -- $words)[-1]
    if test -f "$recipe"
        set recipe (string match -rg '(?:^|[\s{])(?:type|base):\s+([A-Za-z0-9_.]+)' -- (cat $recipe | string collect))[1]
    end

    set -l wanted $words[2]
    if test (count $words) -eq 2
        set wanted commands
    else if string match -q -- '-*' $word
        set wanted "$words[2] -"
    else if string match -q -- '*=*' $word
        set wanted (string replace -r '=.*' '=' -- $word)
    else if string match -q -- '*.*' $word
        set wanted (string replace -r '\..*' '.' -- $word)
    end
    set -l option "$words[2] $words[-2]"

    if test "$wanted" = recipe=
        for file in (string replace recipe= '' -- $word)*.{yaml,yml}
            printf 'recipe=%s\n' $file
        end
    end
    for line in $__hftune_table
        set -l parts (string split -m 2 '|' -- $line)
        test "$parts[1]" = "task of $recipe"; and set task $parts[2]
        test "$parts[1]" = "$option"; and set wanted $option
        if contains -- "$parts[1]" $wanted "$wanted $task"; and test -n "$parts[2]"
            string match -q -- (string escape --style=var -- $word)'*' (string escape --style=var -- $parts[2])
            and printf '%s\t%s\n' $parts[2] $parts[3]
        end
    end
end
complete -c hftune -n 'count (__hftune_words) >/dev/null' -f -a '(__hftune_words)'
