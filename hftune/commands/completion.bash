# Completion of hftune in bash. In ~/.bashrc: eval "$(hftune completion bash)"
_hftune_table=@TABLE@

_hftune() {
    local line=${COMP_LINE:0:COMP_POINT} wanted task=any recipe text context candidate rest word
    local -a words
    read -ra words <<<"$line"
    word=${line##*[[:space:]]} # all of it, although bash splits words at = and :
    [[ $word ]] || words+=("")
    for text in "${words[@]}"; do
        [[ $text == recipe=* ]] && recipe=${text#recipe=}
    done
    if [[ -f $recipe && $(<"$recipe") =~ (^|[[:space:]{])(type|base):[[:space:]]+([A-Za-z0-9_.]+) ]]; then
        recipe=${BASH_REMATCH[3]}
    fi

    if ((${#words[@]} == 2)); then
        wanted=commands
    elif [[ $word == -* ]]; then
        wanted="${words[1]} -"
    elif [[ $word == *=* ]]; then
        wanted=${word%%=*}=
    elif [[ $word == *.* ]]; then
        wanted=${word%%.*}.
    else
        wanted=${words[1]}
    fi
    local option="${words[1]} ${words[${#words[@]} - 2]}"

    COMPREPLY=()
    while IFS='|' read -r context candidate rest; do
        [[ $context == "task of $recipe" ]] && task=$candidate
        [[ $context == "$option" ]] && wanted=$option
        [[ ($context == "$wanted" || $context == "$wanted $task") && $candidate && $candidate == "$word"* ]] && COMPREPLY+=("$candidate")
    done <<<"$_hftune_table"
    if [[ $wanted == recipe= ]]; then
        while IFS= read -r candidate; do
            COMPREPLY+=("recipe=$candidate")
        done < <(compgen -f -X '!*.y*ml' -- "${word#recipe=}")
    fi

    [[ ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace 2>/dev/null
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then # bash replaces only what follows the last =
        COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}")
    fi
}
complete -o default -F _hftune hftune
