#!/bin/sh
# What `make demo` shows: packed documents on four ranks, who holds which tokens, the load imbalance, and that the answer
# is right. Usage: tools/demo.sh path/to/weft
set -eu
weft=${1:?usage: tools/demo.sh path/to/weft}
pack=lognormal:count=64,median=2400,sigma=1,min=16,max=16384

bold='' plain=''
if [ -t 1 ]; then bold=$(printf '\033[1m') plain=$(printf '\033[0m'); fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
show() {
  printf '$ weft %s\n\n' "$*"
  "$weft" "$@"
}

say '1. Three documents packed into one stream, on four ranks: the stream is folded, each rank holds two pieces of it.'
show explain --docs 8,5,11 --mask causal --layout zigzag --ranks 4

say '2. A pack as training sees it: 64 documents of very different lengths. The load imbalance of each layout:'
for layout in contiguous zigzag dual_chunk striped balanced; do
  padding=1
  if [ "$layout" = dual_chunk ]; then padding=8; fi # it cuts each document into 2 * ranks equal pieces
  table=$("$weft" explain --docs "$pack" --padded-to $padding --mask causal --ranks 4 --layout "$layout")
  printf '  %-11s imbalance%s\n' "$layout" "${table##*imbalance}"
done
printf '\n'
show explain --docs "$pack" --mask causal --ranks 4 --layout balanced

say '3. Is it right? Slices by brute force, attention of the four ranks, forward and backward, against a dense softmax.'
show verify --docs 80,50,110 --mask causal --layout balanced --ranks 4 --heads 4:2 --dim 16 --dtype bf16 --sink learnable

say '4. And on 1,000 problems nobody chose: any packing, mask, layout and feature of attention.'
show verify --random 1000
