"""What to run first on a new cluster: right answers by every schedule, bytes, links, and the time of one step.

    python -m weft.selftest                                   # ranks that are threads of this process
    torchrun --nproc-per-node 4 -m weft.selftest --quick
    mpirun -n 4 python -m weft.selftest --json machine.json   # then: weft simulate --machine machine.json

docs/deployment.md explains every line of the output.
"""

from .run import main

__all__ = ["main"]
