#!/usr/bin/env bash
# mpirun as a small machine needs it:   tools/mpirun.sh -np 4 PROGRAM ...
# Also as root (containers), with more ranks than cores, and quiet without a network: ranks on this machine talk through
# shared memory. Ranks that wait give way, because another one may need the core.
set -euo pipefail
command -v mpirun > /dev/null || { echo "mpirun.sh: no mpirun (tools/setup.sh build)" >&2; exit 1; }
exec mpirun --allow-run-as-root --oversubscribe --bind-to none --quiet \
  --mca pml ob1 --mca btl self,vader --mca mpi_yield_when_idle 1 "$@"
