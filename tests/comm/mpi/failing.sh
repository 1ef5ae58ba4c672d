#!/usr/bin/env bash
# One rank of four ends in mid-exchange, TIMES times each way: the job must end non-zero within 10 seconds of that, leave
# no process behind, and show what the rank said, if it could.   failing.sh MPIRUN PROGRAM TIMES
set -euo pipefail
. "$(dirname "$0")/job.sh"
mpirun=$1 program=$2 times=$3
longest=0
fail() { printf 'failing.sh: %s, time %s: %s\n' "$how" "$time" "$1" >&2; cat "$log" >&2; exit 1; }
log=$(mktemp) ended=$(mktemp); trap 'rm -f "$log" "$ended"' EXIT
for how in throw abort kill exit; do
  for time in $(seq "$times"); do
    marker="weft-failing-$$-$how-$time" rank=$((time % 4))
    rm -f "$ended"
    run_job "$log" "$marker" "$mpirun" -np 4 "$program" "$how" "$rank" "$marker" "$ended"
    [ -e "$ended" ] || fail "no rank ended as it should"
    took=$(((now - $(date -r "$ended" +%s%N)) / 1000000))
    [ "$status" -ne 0 ] || fail "ended with status 0"
    [ "$took" -lt 10000 ] || fail "took $took ms"
    if pgrep -f -- "$marker" > /dev/null; then sleep 1; fi  # killed, but not gone yet
    if pgrep -f -- "$marker" >> "$log"; then fail "processes are left"; fi
    if [ "$how" = throw ]; then
      grep -q "rank $rank: this rank has had enough; leave it alone" "$log" || fail "the rank's words are lost"
    fi
    if [ "$took" -gt "$longest" ]; then longest=$took; fi
  done
done
few_killed $((4 * times)) || fail "mpirun was killed $killed times"
echo "$((4 * times)) jobs ended, the slowest in $longest ms; mpirun was killed $killed times"
