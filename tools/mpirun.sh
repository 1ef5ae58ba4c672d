#!/usr/bin/env bash
# mpirun as a small machine needs it:   tools/mpirun.sh -np 4 PROGRAM ...
# Also as root (containers), with more ranks than cores, and quiet without a network: ranks on this machine talk through
# shared memory. Ranks that wait give way, because another one may need the core.
set -euo pipefail
# MPI's hwloc looks for GPUs on X displays 0 to 9 of "localhost", and where no /etc/hosts knows that name it asks the
# network: 10 s a job on a bare machine.
export HWLOC_COMPONENTS=${HWLOC_COMPONENTS:--gl}
command -v mpirun > /dev/null || { echo "mpirun.sh: no mpirun (tools/setup.sh mpi)" >&2; exit 1; }
exec mpirun --allow-run-as-root --oversubscribe --bind-to none --quiet \
  --mca pml ob1 --mca btl self,vader --mca mpi_yield_when_idle 1 "$@"
