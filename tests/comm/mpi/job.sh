# run_job LOG MARKER COMMAND...: a job of at most 60 s, the marker among its arguments. Sets `status`, and `now`, when its
# ranks had ended. mpirun is not waited for any longer: where a rank ends the job, Open MPI's hangs now and then when all
# is done (PMIx_server_finalize waits for a lock that nobody gives back), and is killed; `killed` counts that.
killed=0
run_job() {
  local log=$1 marker=$2 job begun=0 left hangs=0
  shift 2
  timeout -k 5 60 "$@" > "$log" 2>&1 &
  job=$! status=0
  while kill -0 "$job" 2> /dev/null; do
    if [ -n "$(ranks_of "$marker")" ]; then
      begun=1 left=
    elif [ "$begun" -eq 1 ]; then
      [ -n "${left:-}" ] || left=$(date +%s%N)
      if [ $((($(date +%s%N) - left) / 1000000)) -gt 2000 ]; then
        hangs=1
        pkill -KILL -f -- "$marker" || true
      fi
    fi
    sleep 0.05
  done
  wait "$job" || status=$?
  now=${left:-$(date +%s%N)} killed=$((killed + hangs))
}
# few_killed JOBS: its status is then not mpirun's own, so that may not be the rule.
few_killed() { [ $((4 * killed)) -le "$1" ]; }
# Processes with the marker, without mpirun and what started it.
ranks_of() {
  local p
  for p in $(pgrep -f -- "$1"); do
    case $(cat "/proc/$p/comm" 2> /dev/null) in '' | mpirun | timeout | *.sh | bash) ;; *) echo "$p" ;; esac
  done
}
