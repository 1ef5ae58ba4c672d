#!/usr/bin/env bash
# All that needs a GPU, on a machine that has one: builds, tests, checks memory and races, times. Goes on after a failure
# and ends with a table and a verdict.
# Usage: bench/gpu.sh BUILD_DIR OUT_DIR [PART...]
#   test      the GPU tests, a process a suite                        sanitize  compute-sanitizer's four tools on some of them
#   trace     no call waits, exchange under compute (CUPTI, torch)    soak      10,000 fresh random problems, by executor and kernel
#   matrix    weft verify --matrix full on ranks 2,4,8                bench     timings of the kernels
#   nccl      2, 4 and 8 processes over NCCL: collectives, failures, weft verify
#   all of these if none is named
# WEFT_BUILT=1: BUILD_DIR holds the programs already, and BUILD_DIR/race those for racecheck.
# WEFT_KERNEL: kernel of the executor's soak and of the timings (cuda.sm90).
# WEFT_PYTHON: a Python with torch, the peer of the timings (python3).
# WEFT_SEED: first seed of the soak (the time). WEFT_PROBLEMS: problems of the soak (10000).
set -u
build=${1:?usage: bench/gpu.sh BUILD_DIR OUT_DIR [PART...]} out=${2:?}
shift 2
parts=${*:-test trace matrix nccl soak sanitize bench}
source=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
test=$build/tests/cuda_test faults=$build/tests/cuda_faults_test weft=$build/weft trace=$build/bench/cupti/trace

# step NAME SECONDS COMMAND...: its output goes to OUT_DIR/NAME.log, its line of the table to OUT_DIR/NAME.row.
step() {
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  local result=$? words=ok
  [ $result -eq 0 ] || words="FAILED ($result)"
  [ $result -eq 124 ] && words="FAILED (not done in $limit s)"
  printf '%-28s %-12s %4d s  %s\n' "$name" "$words" $((SECONDS - begin)) "$(summary "$out/$name.log")" >"$out/$name.row"
  cat "$out/$name.row"
  [ $result -eq 0 ] || grep -E 'Failure|FAILED|allowed|got |Which|what\(\)|========= (Inv|Unin|Err|Rac|Bar)' "$out/$name.log" |
    head -n "${WEFT_LINES:-12}"
  return $result
}
# The line that says how much was done.
summary() { grep -hE '^\[  PASSED  \]|^[0-9,]+ (runs|cases)|ERROR SUMMARY|RACECHECK SUMMARY|under compute: ' "$1" | tail -n 2 | tr '\n' ' '; }
has() { case " $parts " in *" $1 "*) return 0 ;; *) return 1 ;; esac }
need() { [ -x "$1" ] || { printf '%-28s left out: there is no %s\n' "$2" "$1" | tee "$out/$2.row"; return 1; }; }

rm -f "$out"/*.row
# made DIR [OPTION...]: builds in DIR, with options of cmake --build.
made() {
  local at=$1
  shift
  cmake -S "$source" -B "$at" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CUDA_ARCHITECTURES=90a -DWEFT_CUDA=ON \
    -DWEFT_BENCH=ON -DWEFT_TESTS=OFF -DWEFT_TOOLS=ON -DWEFT_EXAMPLES=OFF -DWEFT_MPI=OFF && cmake --build "$at" "$@"
}
export -f made
export source
if [ "${WEFT_BUILT:-0}" != 1 ]; then
  step build 900 bash -c 'made "$0"' "$build" || exit 1
  # racecheck needs kernels of its own (docs/trust.md).
  if has sanitize; then
    CUDAFLAGS="${CUDAFLAGS:-} -DWEFT_EACH_LANE_ARRIVES" step build.race 900 bash -c 'made "$@"' - "$build/race" --target cuda_test
  fi
fi

if has test; then
  # A process each: one that breaks the GPU's state takes no other with it.
  pids= named='Ahead*'
  for suite in KernelForward KernelBackward KernelBits GpuQuerySteps GpuTiles GpuKeySplits GpuGraph GpuAgain GpuDqOrder \
    DevicePlan DeviceWork DeviceRows DeviceSteps \
    DeviceCommunicator DeviceExecutor DeviceChecked DeviceKvBuffer Nccl; do
    step "test.$suite" 300 "$test" --gtest_filter="*$suite*-*/cpu_*:*/reference_*" &
    pids="$pids $!" named="$named:*$suite*"
  done
  step test.others 300 "$test" --gtest_filter="-$named" &
  wait $pids $!
  step test.Ahead 120 "$test" --gtest_filter='Ahead*'  # alone: it holds streams
  if need "$faults" test.faults; then step test.faults 300 "$faults"; fi
fi
python=${WEFT_PYTHON:-python3}
if has trace; then
  # Two ranks over torch's NCCL, by torch.profiler; needs the Python package.
  if PYTHONPATH="$build/python" "$python" -c 'import torch, weft.torch; assert torch.cuda.is_available()' 2>"$out/torch.log"; then
    PYTHONPATH="$build/python" step trace.nccl 120 "$python" "$source/bench/torch_overlap.py" --trace "$out/trace"
  else
    printf '%-28s left out: torch with a GPU and weft (WEFT_PACKAGE=ON) are not there\n' trace.nccl | tee "$out/trace.nccl.row"
  fi
fi
if has trace && need "$trace" trace; then
  for schedule in ring all_gather exact; do step "trace.$schedule" 60 "$trace" $schedule; done
  step trace.ring.large 60 "$trace" ring 32:8
fi
if has matrix && need "$weft" matrix; then
  for kernel in cuda.portable cuda.sm90; do
    step matrix.$kernel 600 "$weft" verify --kernel $kernel --comm threads --matrix full --ranks 2,4,8
  done
fi
if has nccl; then
  export NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo  # processes that share a GPU talk over sockets
  if need "$build/tests/nccl_test" nccl.test; then
    for ranks in 2 4 8; do
      WEFT_FAILURES=${WEFT_FAILURES:-6} step "nccl.test.$ranks" 300 "$build/tests/nccl_test" \
        --gtest_filter="*/$(case $ranks in 2) echo 0 ;; 4) echo 1 ;; 8) echo 2 ;; esac)"
    done
  fi
  if need "$weft" nccl.verify; then
    for ranks in 2 4 8; do
      for dtype in bf16 f16; do
        step "nccl.$dtype.$ranks" 300 "$weft" verify --comm processes --ranks $ranks --kernel cuda.sm90 --dtype $dtype --matrix quick
      done
      step "nccl.f32.$ranks" 300 "$weft" verify --comm processes --ranks $ranks --kernel cuda.portable --dtype f32 --matrix quick
      step "nccl.checked.$ranks" 300 "$weft" verify --comm processes --ranks $ranks --kernel cuda.portable --checked --matrix quick --pairwise
    done
  fi
fi
if has soak; then
  problems=${WEFT_PROBLEMS:-10000} seed=${WEFT_SEED:-$(date +%s)}
  if need "$weft" soak.executor; then
    kernel=${WEFT_KERNEL:-cuda.sm90}
    for schedule in all_gather ring all_to_all hybrid exact; do
      step "soak.$schedule" 300 "$weft" verify --kernel "$kernel" --schedule $schedule --random $((problems / 5)) \
        --seed "$seed"
      seed=$((seed + problems))
    done
  fi
  pids=
  processes=3  # for each kernel; most of the time goes into the answers, on the CPU
  for kernel in cuda_portable_f32 cuda_portable_bf16 cuda_portable_f16 cuda_sm90_bf16 cuda_sm90_f16; do
    for process in $(seq $processes); do
      many=$(((problems + 5 * processes - 1) / (5 * processes)))
      step "soak.$kernel.$process" 600 env WEFT_KERNEL_PROBLEMS=$many WEFT_KERNEL_SEED=$((seed % 1000000000 + many * process)) \
        "$test" --gtest_filter="*KernelBackward.RandomProblems/$kernel" &
      pids="$pids $!"
    done
  done
  wait $pids
fi
if has sanitize; then
  kernels='*RandomProblems/cuda*:*PartialStepsLeave*/cuda*:*AddingLeaves*/cuda*:*OneKeyGives*/cuda*:*GrowingLogits/cuda*:*GpuKeySplits.TheSame*:*GpuKeySplits.From*:*GpuGraph.ReplaysOn*:*GpuGraph.WrongOffsets*'
  ranks='*DeviceKvBuffer.Equals*/bf16:*DeviceCommunicator*' executor='DeviceExecutor.Equals*:DeviceExecutor.Transports*'
  many='*GpuKeySplits.OneAfter*'
  for tool in memcheck racecheck synccheck initcheck; do  # one after another: they share a GPU badly
    some=$kernels:$ranks:$executor:$many tested=$test
    if [ $tool = racecheck ]; then
      # It loses track of kernels that many threads launch at once, and counts that as a hazard; and is slow.
      some=$kernels:$ranks tested=$build/race/tests/cuda_test
      need "$tested" sanitize.racecheck || continue
    fi
    if [ $tool = memcheck ] || [ $tool = initcheck ]; then
      # One rank of two over NCCL.
      if need "$build/tests/nccl_rank" sanitize.nccl; then
        step "sanitize.nccl.$tool" 90 "$source/bench/nccl_sanitize.sh" "$build" $tool "${WEFT_KERNEL:-cuda.sm90}"
      fi
    fi
    # Initcheck does not know what another stream has written into memory of a pool.
    step "sanitize.$tool" 400 env WEFT_PLAIN_MEMORY=1 WEFT_KERNEL_PROBLEMS="${WEFT_SANITIZED:-6}" \
      WEFT_GPU_PROBLEMS="${WEFT_SANITIZED:-6}" WEFT_DEVICE_PROBLEMS=2 \
      compute-sanitizer --tool $tool --error-exitcode 1 "$tested" --gtest_filter="$some"
  done
fi
if has bench && need "$weft" bench; then
  kernel=${WEFT_KERNEL:-cuda.sm90} peer=()
  if "$python" -c 'import torch; assert torch.cuda.is_available()' 2>"$out/torch.log"; then
    peer=(--peer "$python $source/bench/torch_peer.py")
  fi
  : >"$out/bench.txt"
  # timed NAME FLAG...: a process of its own, whose table goes to bench.txt.
  timed() {
    local name=$1
    shift
    if step "bench.$name" 120 "$weft" bench "$@"; then
      printf '%s\n' "$name" >>"$out/bench.txt"
      cat "$out/bench.$name.log" >>"$out/bench.txt"
    fi
  }
  for case in $("$weft" bench --kernel "$kernel" --list | cut -d ' ' -f 1 | grep -v '^mla-absorbed'); do
    timed "$case" --kernel "$kernel" --cases "$case" "${peer[@]}"
    timed "$case.deterministic" --kernel "$kernel" --cases "$case" --pass backward --deterministic
  done
  for case in packed rank-of-8 short-rank-of-8; do timed "graph.$case" --kernel "$kernel" --cases "$case" --graph; done
  timed mla-absorbed --kernel cuda.portable --cases mla-absorbed,mla-absorbed-128 --repeat 5
  timed mla-absorbed.forward --kernel "$kernel" --cases mla-absorbed,mla-absorbed-128 --pass forward --repeat 5
  timed f32 --kernel cuda.portable --cases width-128 --dtype f32
  cat "$out/bench.txt"
fi
printf '\n'
cat "$out"/*.row
tar -C "$out" -czf "$out/logs.tgz" --exclude=logs.tgz . 2>/dev/null
if grep -q FAILED "$out"/*.row; then
  echo "FAILED: $(grep -l FAILED "$out"/*.row | xargs -n 1 basename -s .row | tr '\n' ' ')"
  exit 1
fi
echo "all well"
