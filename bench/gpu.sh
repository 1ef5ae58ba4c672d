#!/usr/bin/env bash
# All that needs a GPU, on a machine that has one: builds, tests, checks memory and races, times. Goes on after a failure
# and ends with a table and a verdict.
# Usage: bench/gpu.sh BUILD_DIR OUT_DIR [PART...]   parts: test soak sanitize bench; all if none is named
# WEFT_CUDA_PROBLEMS: random problems of the soak, a dtype (2000)
set -u
build=${1:?usage: bench/gpu.sh BUILD_DIR OUT_DIR [PART...]} out=${2:?}
shift 2
parts=${*:-test soak sanitize bench}
source=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
failed=

# step NAME SECONDS COMMAND...: its output goes to OUT_DIR/NAME.log.
step() {
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  local result=$?
  if [ $result -ne 0 ]; then
    failed="$failed $name"
    tail -n 15 "$out/$name.log"
  fi
  printf '== %-24s %s (%d s)\n' "$name" "$([ $result -eq 0 ] && echo ok || echo "FAILED: $result")" $((SECONDS - begin))
  return $result
}
has() { case " $parts " in *" $1 "*) return 0 ;; *) return 1 ;; esac }

configure() {
  cmake -S "$source" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CUDA_ARCHITECTURES=90a -DWEFT_CUDA=ON \
    -DWEFT_BENCH=ON -DWEFT_TESTS=OFF -DWEFT_TOOLS=OFF -DWEFT_EXAMPLES=OFF -DWEFT_MPI=OFF &&
    cmake --build "$build"
}
export -f configure
export source build
step build 500 bash -c configure || exit 1
test=$build/tests/cuda_test
bench=$build/bench/cuda/attention

if has test; then
  # A process each: one that breaks the GPU's state takes no other with it.
  pids=
  suites="GpuForward GpuBackward GpuBits GpuGraph DevicePlan DeviceWork DeviceRows DeviceSteps"
  for suite in $suites; do
    (timeout 400 "$test" --gtest_filter="*$suite*" >"$out/test.$suite.log" 2>&1; echo $? >"$out/test.$suite.rc") &
    pids="$pids $!"
  done
  wait $pids
  for suite in $suites; do
    if [ "$(cat "$out/test.$suite.rc")" != 0 ]; then
      failed="$failed test.$suite"
      grep -E "Failure|FAILED|allowed|got |Which|what\(\)" "$out/test.$suite.log" | head -n "${WEFT_LINES:-25}"
    fi
    printf '== %-24s %s\n' "test.$suite" "$(grep -E '^\[  (PASSED|FAILED)  \] [0-9]+ test' "$out/test.$suite.log" | tr '\n' ' ')"
  done
fi
if has soak; then
  step soak 400 env WEFT_CUDA_PROBLEMS="${WEFT_CUDA_PROBLEMS:-2000}" "$test" --gtest_filter='*RandomProblems*'
fi
if has sanitize; then
  some='*RandomProblems*:*PartialStepsLeave*:*AddingLeaves*:*OneKeyGives*:*GpuGraph.ReplaysOn*:*GpuGraph.WrongOffsets*'
  for tool in memcheck racecheck synccheck initcheck; do
    step "sanitize.$tool" 240 env WEFT_CUDA_PROBLEMS="${WEFT_SANITIZED:-12}" WEFT_DEVICE_PROBLEMS=2 \
      compute-sanitizer --tool $tool --error-exitcode 1 "$test" --gtest_filter="$some"
  done
fi
if has bench; then
  printf '%-16s %9s %8s %9s %8s %9s %8s\n' case 'fwd ms' TFLOP/s 'bwd ms' TFLOP/s 'same bits' TFLOP/s >"$out/bench.txt"
  for case in $("$bench" --list); do
    if step "bench.$case" 120 "$bench" "$case"; then cat "$out/bench.$case.log" >>"$out/bench.txt"; fi
  done
  for case in packed rank-of-8 short-rank-of-8; do
    if step "graph.$case" 120 "$bench" --graph "$case"; then sed 's/^/graph: /' "$out/graph.$case.log" >>"$out/bench.txt"; fi
  done
  cat "$out/bench.txt"
fi
tar -C "$out" -czf "$out/logs.tgz" --exclude=logs.tgz . 2>/dev/null
if [ -n "$failed" ]; then
  echo "FAILED:$failed"
  exit 1
fi
echo "all well"
