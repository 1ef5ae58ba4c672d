#!/usr/bin/env bash
# compute-sanitizer on one rank of two that talk over NCCL, on one GPU.
# Usage: bench/nccl_sanitize.sh BUILD_DIR TOOL [KERNEL]
# A report fails, and so does a rank that ends badly. Reports of initcheck in kernels of NCCL are counted alone: it does not
# see what arrives in NCCL's own buffers by sockets.
set -u
rank=${1:?usage: bench/nccl_sanitize.sh BUILD_DIR TOOL [KERNEL]}/tests/nccl_rank tool=${2:?} kernel=${3:-cuda.portable}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Each says that it is a host of its own, because NCCL refuses two ranks of one host on one GPU.
export NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo WEFT_PLAIN_MEMORY=1
NCCL_HOSTID=a "$rank" 0 "$work/socket" "$kernel" >"$work/0.log" 2>&1 &
other=$!
NCCL_HOSTID=b timeout "${WEFT_SECONDS:-60}" compute-sanitizer --tool "$tool" --report-api-errors no --print-limit 10000 \
  "$rank" 1 "$work/socket" "$kernel" >"$work/1.log" 2>&1
ended=$?
[ $ended -eq 0 ] || kill $other 2>/dev/null  # it would wait for the time limit
wait $other
first=$?
grep -h '^rank' "$work/0.log" "$work/1.log"
# The line after the head of a report names the kernel: "=========     at void weft::cuda::...".
awk -v tool="$tool" '
  /^========= (Invalid|Uninitialized|Misaligned|Out-of-range|Unused)/ { head = $0; next }
  head != "" { if ($0 ~ /weft/) ours++; else if (++others > 3) head = ""; if (head != "") { print head; print $0 }; head = "" }
  END { printf "ERROR SUMMARY: %s: %d reports in kernels of Weft, %d in those of NCCL and others\n", tool, ours, others
        exit ours > 0 || (others > 0 && tool != "initcheck") }' "$work/1.log"
clean=$?
if ! grep -q '^========= ERROR SUMMARY' "$work/1.log"; then
  echo "FAILED: $tool did not come to its end (rank 1 ended with $ended, rank 0 with $first)"
  tail -n 20 "$work/1.log" "$work/0.log"
  exit 1
fi
[ $first -eq 0 ] && [ $ended -eq 0 ] && [ $clean -eq 0 ]
