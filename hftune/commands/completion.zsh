# Completion of hftune in zsh. In ~/.zshrc, below compinit: eval "$(hftune completion zsh)"
_hftune_table=@TABLE@

_hftune() {
    local word=${(Q)PREFIX} wanted task=any recipe text line
    local -a parts complete_words open_words
    for text in $words; do
        [[ $text == recipe=* ]] && recipe=${(Q)text#recipe=}
    done
    if [[ -f $recipe && "$(<$recipe)" =~ '(^|[[:space:]{])(type|base):[[:space:]]+([A-Za-z0-9_.]+)' ]]; then
        recipe=$match[3]
    fi

    if ((CURRENT == 2)); then
        wanted=commands
    elif [[ $word == -* ]]; then
        wanted="$words[2] -"
    elif [[ $word == *=* ]]; then
        wanted=${word%%=*}=
    elif [[ $word == *.* ]]; then
        wanted=${word%%.*}.
    else
        wanted=$words[2]
    fi
    local option="$words[2] $words[CURRENT-1]"

    for line in ${(f)_hftune_table}; do
        parts=("${(@s:|:)line}")
        [[ $parts[1] == "task of $recipe" ]] && task=$parts[2]
        [[ $parts[1] == $option ]] && wanted=$option
        if [[ ($parts[1] == $wanted || $parts[1] == "$wanted $task") && -n $parts[2] && $parts[2] == $word* ]]; then
            if [[ $parts[2] == *[=.] ]]; then
                open_words+=("$parts[2]${parts[3]:+:$parts[3]}")
            else
                complete_words+=("$parts[2]${parts[3]:+:$parts[3]}")
            fi
        fi
    done
    local found=1
    (($#complete_words)) && _describe -t words word complete_words && found=0
    (($#open_words)) && _describe -t keys key open_words -S '' && found=0
    if ((found)) || [[ $wanted == recipe= ]]; then
        compset -P '*='
        [[ $wanted == recipe= ]] && _files -g '*.y(a|)ml' || _files
    fi
}
compdef _hftune hftune
