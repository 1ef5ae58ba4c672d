#!/usr/bin/env python3
"""Everything at once, for hours: all fronts, sizes, threads and faults, most of it with checks on.

    PYTHONPATH=build/release/python python/tests/soak/soak.py --seconds 14400 --resume build/release/soak.json

One process runs small jobs (jobs.py), three at a time. Job N is drawn from the seed N alone: `--only N` runs it again. After each
round of jobs what the process holds is written down; a soak that was interrupted goes on with its next round. Exit status 1 if a
job failed, or if memory, threads, open files or children grow.
"""

import argparse
import concurrent.futures
import faulthandler
import json
import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("soak", "", "core", "pytorch", "distributed")]

import watch

LONGEST = 400  # seconds that a job may take: those that start programs end these sooner


def planted(name):
    """A job that does wrong on purpose, to see that it is found (test_soak.py)."""
    kept = []

    def wrong(draw, setting):
        if name == "failure" and draw.random() < 0.5:
            raise AssertionError("a planted failure")
        if name == "memory":
            kept.append(bytearray(os.urandom(8 << 20)))
        if name == "file":
            kept.append(os.open(os.devnull, os.O_RDONLY))
        if name == "thread":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        if name == "child":
            kept.append(os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60"))

    return wrong


class Soak:
    def __init__(self, args):
        import jobs

        if args.device == "cuda":
            jobs.disagreement_worker.DEVICE[0] = "cuda"
        self.args, self.setting = args, jobs.Setting(args.build, args.device)
        kinds = {name: job for name, job in jobs.JOBS.items() if (args.device == "cpu" or job[2]) and name not in args.without}
        if args.kinds:
            kinds = {name: kinds[name] for name in args.kinds}
        if args.plant:
            kinds["planted"] = planted(args.plant), 5, True
        self.functions = {name: job[0] for name, job in kinds.items()}
        # The jobs of a round, each kind evenly spread: job N is of kind N modulo their number.
        self.slots = [name for _, name in sorted(((i + 0.5) / weight, name) for name, (_, weight, _) in kinds.items()
                                                 for i in range(weight))]
        self.state = dict(seed=args.seed, next=args.seed, seconds=0.0, done={}, busy={}, failures=[], compared=0, rounds=[])
        self.part = 0  # of a soak that was resumed: figures of another process are not compared with this one's
        self.lock, self.running = threading.Lock(), {}
        if args.resume and args.only is None and Path(args.resume).exists():
            self.go_on(json.loads(Path(args.resume).read_text()))

    def go_on(self, state):
        """From what an earlier process has written. After the end of a soak the next one begins, with the seeds that follow."""
        died = Path(f"{self.args.resume}.running")
        if died.exists() and died.read_text():
            print(f"the last process ended in the midst of jobs {died.read_text()}", flush=True)
        if state["seconds"] >= self.args.seconds:
            self.state["seed"] = self.state["next"] = state["next"]
            return
        print(f"goes on at seed {state['next']}, after {state['seconds']:,.0f} s", flush=True)
        self.state, self.setting.compared = state, state["compared"]
        self.part = 1 + max((r["part"] for r in state["rounds"]), default=-1)

    def command(self, seed):
        words = [f"--only {seed}", f"--build {self.args.build}"]
        words += [f"--device {self.args.device}"] if self.args.device != "cpu" else []
        for option in ("kinds", "without", "plant"):
            given = getattr(self.args, option)
            words += [f"--{option} {given if isinstance(given, str) else ','.join(given)}"] if given else []
        return f"python {os.path.relpath(__file__)} {' '.join(words)}"

    def job(self, seed):
        """Runs job `seed`; what was wrong, or None."""
        kind, begin = self.slots[seed % len(self.slots)], time.monotonic()
        with self.lock:
            self.running[seed] = begin
            self.note_running()
        wrong = None
        try:
            self.functions[kind](random.Random(seed), self.setting)
        except BaseException:  # KeyboardInterrupt of a rank too: no job may end the soak
            wrong = traceback.format_exc()
        with self.lock:
            del self.running[seed]
            state = self.state
            state["done"][kind] = state["done"].get(kind, 0) + 1
            state["busy"][kind] = state["busy"].get(kind, 0.0) + time.monotonic() - begin
            if wrong:
                state["failures"].append(dict(seed=seed, kind=kind, wrong=wrong[-4000:]))
                print(f"--- job {seed}, {kind}, failed:\n{wrong}again: {self.command(seed)}", flush=True)
        return wrong

    def note_running(self):
        """So that whoever finds this process dead knows in which jobs it died."""
        if self.args.resume:
            Path(f"{self.args.resume}.running").write_text(" ".join(map(str, sorted(self.running))))

    def save(self):
        if self.args.resume:
            path = Path(f"{self.args.resume}.new")
            with path.open("w") as f:
                json.dump(self.state, f)
                f.flush()
                os.fsync(f.fileno())
            path.replace(self.args.resume)

    def end_if_stuck(self):
        with self.lock:
            late = [seed for seed, begin in self.running.items() if time.monotonic() - begin > LONGEST]
        for seed in late:
            print(f"--- job {seed} has taken {LONGEST} s; where all threads are:", flush=True)
            faulthandler.dump_traceback(all_threads=True)
            print(f"again: {self.command(seed)}", flush=True)
        if late:
            os._exit(1)  # a thread cannot be ended

    def round(self, ends):
        """Jobs of a whole round, or until the time is over; True if all of them were begun."""
        seeds, under_way = iter(range(self.state["next"], self.state["next"] + len(self.slots))), set()
        with concurrent.futures.ThreadPoolExecutor(self.args.jobs) as pool:
            seed = next(seeds)
            while seed is not None or under_way:
                while seed is not None and len(under_way) < self.args.jobs:
                    if time.monotonic() > ends:
                        seeds = None
                        break
                    under_way.add(pool.submit(self.job, seed))
                    seed = next(seeds, None)
                if seeds is None:
                    break
                _, under_way = concurrent.futures.wait(under_way, 5, concurrent.futures.FIRST_COMPLETED)
                self.end_if_stuck()
            while under_way:
                _, under_way = concurrent.futures.wait(under_way, 5)
                self.end_if_stuck()
        return seeds is not None

    def run(self):
        state, args = self.state, self.args
        begin, before = time.monotonic(), state["seconds"]
        ends = begin + args.seconds - before
        while time.monotonic() < ends and not (args.rounds and len(state["rounds"]) >= args.rounds):
            whole = self.round(ends)
            state["seconds"] = before + time.monotonic() - begin
            state["compared"] = self.setting.compared
            if whole:
                state["next"] += len(self.slots)
                state["rounds"].append(dict(part=self.part, seconds=state["seconds"], held=watch.now(args.device)))
            self.save()
            if whole and args.verbose:
                print(f"{state['seconds']:.0f} s, {sum(state['done'].values())} jobs, {len(state['failures'])} failed, "
                      f"{figures(state['rounds'][-1]['held'])}", flush=True)

    def report(self):
        """Prints what was done and held; whether it was right."""
        state = self.state
        print(f"\n{'kind':24} {'jobs':>7} {'failed':>7} {'s each':>7}")
        for kind in sorted(state["done"], key=lambda k: -state["done"][k]):
            failed = sum(f["kind"] == kind for f in state["failures"])
            print(f"{kind:24} {state['done'][kind]:7,} {failed:7} {state['busy'][kind] / state['done'][kind]:7.2f}")
        print(f"{'all':24} {sum(state['done'].values()):7,} {len(state['failures']):7}   in {state['seconds']:,.0f} s from seed "
              f"{state['seed']}; programs compared {state['compared']:,} random problems more")
        parts, grown = {}, {}
        for r in state["rounds"]:
            parts.setdefault(r["part"], []).append(r)
        for part, rounds in parts.items():
            print(f"\nheld after a round{f', process {part + 1}' if len(parts) > 1 else ''}, {len(rounds)} rounds")
            for share in (0.1, 0.5, 1.0):
                r = rounds[max(0, round(share * len(rounds)) - 1)]
                print(f"  {share:4.0%} {r['seconds']:8,.0f} s  {figures(r['held'])}")
            grown.update(watch.growth([r["held"] for r in rounds]))
        for name, (first, last) in grown.items():
            print(f"GROWS: {name} from at most {first:,} to at least {last:,} (allowed: {watch.BOUNDS.get(name, 0):,} more)")
        if parts and max(map(len, parts.values())) < watch.LEAST_ROUNDS:
            print(f"growth is judged from {watch.LEAST_ROUNDS} rounds on")
        for f in state["failures"]:
            print(f"FAILED: {f['kind']}: {f['wrong'].splitlines()[-1][:200]}; again: {self.command(f['seed'])}")
        return not grown and not state["failures"] and bool(state["done"])


def figures(held):
    resident, heap, threads, files, children, device, anonymous = held
    sizes = [("resident", resident), ("of it no file's", anonymous), ("heap", heap), ("GPU", device)]
    memory = [f"{name} {size / 2**20:,.1f} MiB" for name, size in sizes if size]
    return f"{', '.join(memory)}, {threads} threads, {files} files, {children} children"


def arguments(words):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seconds", type=float, help="of all processes of a soak together; 14400 if not given, on a GPU 1200")
    p.add_argument("--rounds", type=int, help="at most so many rounds")
    p.add_argument("--seed", type=int, default=0, help="of the first job")
    p.add_argument("--only", type=int, metavar="SEED", help="this job alone")
    p.add_argument("--jobs", type=int, default=3, help="at a time")
    p.add_argument("--resume", metavar="FILE", help="what was done, written after each round; read first if it is there")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--build", default="build/release", help="the folder with weft and tests/unit_run")
    p.add_argument("--kinds", type=lambda x: x.split(","), default=[], help="of jobs; all if not given")
    p.add_argument("--without", type=lambda x: x.split(","), default=[], help="kinds to leave out")
    p.add_argument("--plant", choices=["failure", "memory", "file", "thread", "child"], help="what has to be found")
    p.add_argument("--verbose", action="store_true", help="a line after each round")
    args = p.parse_args(words)
    args.seconds = args.seconds or (14400 if args.device == "cpu" else 1200)
    return args


def main(words=None):
    args = arguments(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    watch.use_one_arena()
    import torch
    import weft

    torch.set_num_threads(1)
    weft.set_cpu_threads(1)  # the jobs are what runs at once
    soak = Soak(args)
    if args.only is not None:
        wrong = soak.job(args.only)
        print("failed" if wrong else f"job {args.only}, {soak.slots[args.only % len(soak.slots)]}: right")
        return 1 if wrong else 0
    try:
        soak.run()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    return 0 if soak.report() else 1


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
