#!/usr/bin/env bash
# Files over 500 lines and functions over 80 lines (universal-ctags):   tools/long_code.sh
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -t files < <(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' '*.py')
wc -l "${files[@]}" | awk '$1 > 500 && $2 != "total" { print "file " $1, $2 }'
ctags -f - --fields=+ne --c++-kinds=f --cuda-kinds=f --python-kinds=fm "${files[@]}" 2> /dev/null | awk -F '\t' '
  { line = end = 0
    for (i = 4; i <= NF; ++i) { if ($i ~ /^line:/) line = substr($i, 6); if ($i ~ /^end:/) end = substr($i, 5) }
    if (end - line + 1 > 80) print "function " end - line + 1, $2 ":" line, $1 }'
