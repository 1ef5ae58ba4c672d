#!/usr/bin/env bash
# Draws the pictures of the docs: of problems by the command, charts from bench/results/.   tools/pictures.sh [COMMAND [FOLDER]]
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
weft=${1:-$here/build/release/weft} to=${2:-$here/docs/pictures}
draw() { "$weft" explain "${@:2}" --svg "$to/$1.svg" > /dev/null; }

draw layouts --title "Three packed documents on four ranks" --docs 7,3,6 --mask causal --ranks 4 \
  --layout contiguous,zigzag,striped --schedule ring
draw schedules --title "Three schedules of the same batch, 8 ranks" --mask causal --ranks 8 --heads 32:8 --layout zigzag \
  --docs 3000,9000,500,6000,1500,12000,700,3300 --schedule ring,all_gather,exact
draw window --title "A window of 1,024 keys, coloured by step" --docs 9000,5000,10576 --mask causal --window 1024,0 --ranks 4 \
  --layout contiguous,zigzag --schedule exact --colour step
python3 "$here/tools/charts.py" "$to"
