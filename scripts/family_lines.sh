#!/usr/bin/env bash
# Lines that families of models added, as the tables of docs/models.md: files of single families, and the work that all of them share, by folder,
# in the commits that read the first of a kind. Needs the repository's history.
#   scripts/family_lines.sh
set -euo pipefail
cd "$(dirname "$0")/.."

echo '| family | file | lines |'
echo '|---|---|---|'
row() { echo "| $1 | \`$2\` | $(wc -l < "$2") |"; }
families=(gemma3 'Gemma 3' gpt_oss gpt-oss glm 'GLM-4 of 2024' glm4 'GLM-4 of 2025' glm4_moe 'GLM-4.5' phi3 'Phi-3, Phi-4'
    ministral Ministral mistral 'Mistral, Mistral Small 3' qwen2 'Qwen2')
for ((i = 0; i < ${#families[@]}; i += 2)); do
    row "${families[i + 1]}" "src/model/families/${families[i]}.rs"
done
row 'gpt-oss, tool calls' src/data/tool_calls/harmony.rs
row 'GLM-4.5, tool calls' src/data/tool_calls/glm.rs

commits=(531c8f33 e9d398cc 795f1c8e)
echo
echo '| folder | Gemma 3, GLM-4, Phi, Mistral | GLM-4.5 | gpt-oss |'
echo '|---|---|---|---|'
for commit in "${commits[@]}"; do
    git show --numstat --format= "$commit" -- src tests scripts ':!tests/golden' | sed "s/^/$commit\t/"
done | awk -F'\t' -v order="${commits[*]}" '
    { n = split($4, part, "/"); folder = part[1] (n > 2 ? "/" part[2] : "") (n > 3 && part[2] == "model" ? "/" part[3] : "")
      folders[folder]; added[folder, $1] += $2; removed[folder, $1] += $3; files[folder, $1]++
      added["", $1] += $2; removed["", $1] += $3; files["", $1]++ }
    function line(folder, name,    row, i) {
        row = "| " name " |"
        for (i = 1; i <= count; i++)
            row = row (files[folder, commit[i]] ? " +" added[folder, commit[i]] " -" removed[folder, commit[i]] ", " files[folder, commit[i]] " files |" : " |")
        return row
    }
    END {
        count = split(order, commit, " ")
        for (folder in folders) print line(folder, "`" folder "`") | "LC_ALL=C sort"
        close("LC_ALL=C sort")
        print line("", "all")
    }'
