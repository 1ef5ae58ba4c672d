#!/usr/bin/env bash
# PLANS seeded faults, a job of four ranks each: every rank is right or the job ends with an error, within 10 seconds of the
# start of the faulty run, and no process is left. Delays and another order must not matter.   faults.sh MPIRUN PROGRAM PLANS
set -euo pipefail
. "$(dirname "$0")/job.sh"
mpirun=$1 program=$2 plans=$3
fail() { printf 'faults.sh: plan %s: %s\n' "$plan" "$1" >&2; cat "$log" >&2; exit 1; }
log=$(mktemp) began=$(mktemp); trap 'rm -f "$log" "$began"' EXIT
longest=0 right=0 errors=0
for plan in $(seq 0 $((plans - 1))); do
  marker="weft-faults-$$-$plan"
  rm -f "$began"
  run_job "$log" "$marker" "$mpirun" -np 4 "$program" "$plan" "$marker" "$began"
  [ -e "$began" ] || fail "the faulty run did not begin, status $status"
  took=$(((now - $(date -r "$began" +%s%N)) / 1000000))
  [ "$took" -lt 10000 ] || fail "took $took ms"
  if grep -q WRONG "$log"; then fail "a wrong answer"; fi
  if pgrep -f -- "$marker" > /dev/null; then sleep 1; fi  # killed, but not gone yet
  if pgrep -f -- "$marker" >> "$log"; then fail "processes are left"; fi
  if [ "$status" -eq 0 ]; then
    [ "$(grep -c ': right$' "$log")" -eq 4 ] || fail "ended with status 0, but not all ranks are right"
    right=$((right + 1))
  else
    grep -q '^rank [0-3]: ..*;' "$log" || fail "status $status without an error of a rank"
    if grep -Eq ', (delay|reorder) on rank' "$log"; then fail "a harmless fault ended in an error"; fi
    errors=$((errors + 1))
  fi
  if [ "$took" -gt "$longest" ]; then longest=$took; fi
done
few_killed "$plans" || fail "mpirun was killed $killed times"
[ "$errors" -gt 0 ] || { echo "faults.sh: no fault was noticed" >&2; exit 1; }
echo "$plans plans: $right right on all ranks, $errors ended in an error, none wrong; the slowest took $longest ms; mpirun was killed $killed times"
