"""The self-test: its options, its order, and what it prints."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .. import __version__, _core
from .._arrays import error
from .._core import Error
from .._files import replace_file
from ..types import DTypeName, ScheduleName
from . import checks, measure, world
from .world import Launch, World


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m weft.selftest",
        description="Checks Weft on these ranks: answers by every schedule, bytes, links, the time of one step. Start it by "
        "itself (ranks are threads), or by torchrun, mpirun or srun. docs/deployment.md explains the output.")
    parser.add_argument("--quick", action="store_true", help="fewer masks, layouts and rounds, and a smaller step")
    parser.add_argument("--json", metavar="FILE", help="write the measured machine, which weft simulate --machine FILE reads")
    parser.add_argument("--tokens", type=int, help="of the step that is timed, over all ranks")
    parser.add_argument("--heads", default="", metavar="Q,KV", help="of the step that is timed")
    parser.add_argument("--dtype", default="", metavar="A,B", help="dtypes to check; the step has the first (f32, bf16, f16)")
    parser.add_argument("--schedule", default="all", metavar="A,B", help="schedules to check and to time")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--backend", default="auto", choices=["auto", "gloo", "nccl"],
                        help="what torch moves bytes by; auto: nccl if each rank has a GPU of its own")
    parser.add_argument("--ranks-per-node", "--node", dest="node", type=int, default=0, metavar="N",
                        help="ranks of a node, if the launcher does not say (torchrun takes --node for its own)")
    parser.add_argument("--ranks", type=int, default=4, help="so many threads, where nobody has started several processes")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds that a rank waits for another")
    return parser


@dataclasses.dataclass(frozen=True)
class _Asked:
    quick: bool
    json: Optional[str]
    schedules: List[ScheduleName]
    dtypes: List[DTypeName]
    tokens: Optional[int]
    heads: Optional[Tuple[int, int]]


def _several(option: str, said: str, known: Sequence[str]) -> List[Any]:
    names = said.split(",")
    for name in names:
        if name not in known:
            raise error(f"{option} {said}: there is no {name!r}", f"use {', '.join(known)}")
    return names


def _asked(args: argparse.Namespace, ranks: int) -> _Asked:
    every = _core.schedules()
    schedules: List[Any] = every if args.schedule == "all" else _several("--schedule", args.schedule, every)
    if ranks % 2 or ranks < 2:
        schedules = [name for name in schedules if name != "hybrid"]  # it swaps heads in pairs of ranks, or more
    known = world.dtypes()
    usual = [name for name in known if not args.quick or name != "f16"]
    dtypes: List[Any] = _several("--dtype", args.dtype, known) if args.dtype else usual
    if args.node and ranks % args.node:
        raise error(f"--node {args.node} with {ranks} ranks", "give a number that divides them")
    if args.tokens is not None and args.tokens < 4 * ranks:
        raise error(f"--tokens {args.tokens} on {ranks} ranks", f"give {4 * ranks} or more")
    return _Asked(args.quick, args.json, schedules, dtypes, args.tokens, _heads(args.heads) if args.heads else None)


def _heads(said: str) -> Tuple[int, int]:
    both = said.split(",")
    if not all(x.isdigit() and int(x) > 0 for x in both) or len(both) > 2 or int(both[0]) % int(both[-1]):
        raise error(f"--heads {said}", "give query heads and K/V heads that divide them: 32,8")
    return int(both[0]), int(both[-1])


def _size(asked: _Asked, ranks: int, gpu: bool) -> measure.Size:
    heads = asked.heads or ((32, 8) if gpu else (8, 2))
    each = (1024 if asked.quick else 8192) if gpu else (64 if asked.quick else 512)
    dtype: DTypeName = "bf16" if gpu and "bf16" in asked.dtypes else asked.dtypes[0]
    return measure.Size(asked.tokens or each * ranks, heads, dtype)


class _Report:
    """What rank 0 prints, and how often something was wrong on any rank."""

    def __init__(self, here: World) -> None:
        self.here, self.checked, self.wrong = here, 0, 0

    def line(self, text: str) -> None:
        if self.here.rank == 0:
            print(text, flush=True)

    def faults(self, mine: Sequence[str]) -> int:
        """Prints a line for each thing that is wrong on any rank, each of a rank once."""
        found = [text for said in self.here.gathered(list(mine)) for text in said]
        for text in found:
            self.line(f"WRONG  {text}")
        self.wrong += len(found)
        return len(found)


def _greeting(here: World, report: _Report) -> None:
    facts: Dict[str, Any] = dict(host=world.host(), version=__version__, kernels=checks.kernel_names(), device=here.device)
    said = here.gathered(facts)
    hosts = list(dict.fromkeys(fact["host"] for fact in said))
    kind = here.device.partition(":")[0]
    report.line(f"weft {__version__}: {here.ranks} ranks ({here.transport}), nodes of {here.node}, {kind}, "
                f"built with {measure.kernel_library()}")
    report.line(f"hosts      {len(hosts)}: {', '.join(hosts[:4])}{', ..' if len(hosts) > 4 else ''}")
    report.line(f"kernels    {', '.join(facts['kernels'])}")
    report.faults([f"rank {here.rank} on {facts['host']} has {name} {facts[name]}, and rank 0 {said[0][name]}"
                   for name in ("version", "kernels") if facts[name] != said[0][name]])


def _answers(here: World, asked: _Asked, report: _Report) -> None:
    report.line("")
    report.line(f"{'answers':<12}{'dtype':<6}{'runs':>5}{'refused':>9}{'forward':>10}{'backward':>10}{'MB sent':>9}  bytes")
    for row in checks.answers(here, asked.quick, asked.schedules, asked.dtypes):
        every = here.gathered(row)
        sent = sum(r.bytes for r in every)
        bytes_off = sum("traffic()" in text for r in every for text in r.wrong)
        report.line(f"{row.schedule:<12}{row.dtype:<6}{row.runs:>5}{row.refused:>9}{max(r.forward for r in every):>10.1e}"
                    f"{max(r.backward for r in every):>10.1e}{sent / 1e6:>9.2f}  "
                    f"{'as traffic() says' if not bytes_off else f'{bytes_off} NOT as traffic() says'}")
        if row.refused:
            report.line(f"refused    {row.why}")
        if row.runs == 0:
            report.faults([f"{row.schedule} {row.dtype}: no case could be run"] if here.rank == 0 else [])
        report.checked += row.runs
        report.faults(row.wrong)


def _more(here: World, asked: _Asked, report: _Report) -> None:
    runs, wrong = checks.bits(here, asked.dtypes)
    report.checked += runs
    if not report.faults(wrong):
        report.line("bits       all_gather has those of one rank, deterministic gradients the same three times "
                    f"({runs} comparisons)")
    if not world.has_torch():
        report.line("autograd   left out: there is no torch")
        return
    runs, wrong = checks.autograd(here)
    report.checked += runs
    if not report.faults(wrong):
        report.line(f"autograd   weft.torch: right ({runs} runs)")


def _times(here: World, asked: _Asked, report: _Report) -> None:
    found = measure.links(here, asked.quick)
    if found:
        report.line("")
        report.line(f"{'links':<16}{'latency us':>12}{'message us':>12}{'GB/s a rank':>13}")
    for link in found:
        report.line(f"{link.name:<16}{1e6 * link.latency:>12.1f}{1e6 * link.message_seconds:>12.1f}{link.bandwidth / 1e9:>13.3g}")
    size = _size(asked, here.ranks, here.device != "cpu")
    on = measure.machine(here, found, size, asked.quick)
    report.line("")
    report.line(f"{'step':<12}{'forward ms':>12}{'predicted':>11}{'backward ms':>13}{'predicted':>11}    "
                f"{size.tokens} tokens, causal, heads {size.heads[0]}:{size.heads[1]}, width {measure.DIM}, {size.dtype}")
    for name in asked.schedules:
        s = measure.step(here, name, on, size, asked.quick)
        report.line(f"{name:<12}{1e3 * s.forward:>12.2f}{1e3 * s.predicted_forward:>11.2f}{1e3 * s.backward:>13.2f}"
                    f"{1e3 * s.predicted_backward:>11.2f}")
    if asked.json and here.rank == 0:
        replace_file(asked.json, on.to_json().encode())
        report.line(f"machine    {asked.json}: weft simulate --machine {asked.json}")


def _body(here: World, asked: _Asked) -> int:
    begin, report = time.monotonic(), _Report(here)
    _greeting(here, report)
    _answers(here, asked, report)
    _more(here, asked, report)
    _times(here, asked, report)
    report.line("")
    verdict = "all right" if report.wrong == 0 else f"{report.wrong} WRONG"
    report.line(f"weft.selftest: {report.checked} checks on each of {here.ranks} ranks, {verdict}, "
                f"{time.monotonic() - begin:.1f} s")
    return int(report.wrong > 0)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the self-test; 0 only if all is right."""
    args = _parser().parse_args(arguments)
    launch: Optional[Launch] = world.launch_of(os.environ)
    try:
        if args.ranks < 1:
            raise error(f"--ranks {args.ranks}", "give 1 or more")
        asked = _asked(args, args.ranks if launch is None else launch.ranks)
        return world.run(launch, args.ranks, args.node, args.device, args.backend, args.time_limit, lambda w: _body(w, asked))
    except (Error, OSError, RuntimeError) as e:
        who = f"rank {launch.rank} on {world.host()}: " if launch else ""
        print(f"weft.selftest: {who}{e}", file=sys.stderr, flush=True)
        return 1
