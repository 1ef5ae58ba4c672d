#!/bin/sh
# run.sh PROGRAM: one fuzzer for WEFT_FUZZ_SECONDS (30). It starts from the seeds of the repository and what it found in
# earlier runs, and leaves a finding as PROGRAM-crash-... It prints findings alone, so that a log ends with them.
set -eu
program=$1
name=$(basename "$program")
here=$(dirname "$0")
found=$(dirname "$program")/corpus/$name
mkdir -p "$found"
set -- -max_total_time="${WEFT_FUZZ_SECONDS:-30}" -timeout=20 -rss_limit_mb=3000 -print_final_stats=1 -verbosity=0 \
  -artifact_prefix="$program-"
case $name in
  fuzz_cli) set -- "$@" -max_len=1200 -close_fd_mask=3 ;;  # it talks
  fuzz_json) set -- "$@" -max_len=4000 ;;
  *) set -- "$@" -max_len=400 -len_control=0 ;;  # bytes are choices, all of them count
esac
[ -f "$here/$name.dict" ] && set -- "$@" -dict="$here/$name.dict"
[ -d "$here/corpus/$name" ] && exec "$program" "$@" "$found" "$here/corpus/$name"
exec "$program" "$@" "$found"
