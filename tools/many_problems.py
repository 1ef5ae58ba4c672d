#!/usr/bin/env python3
"""Random problems by the million: `weft verify --random` in processes of one thread each, on all cores.

    tools/many_problems.py 1000000 --weft build/release/weft --first-seed 1 --log problems.log

Shares of them go by all schedules, are trees, go through K/V buffers, are checked, or have 1,000 to 100,000 tokens. The log keeps
each command, which gives its problems again, and what it said last. Prints a line of a table for docs/trust.md for each share and
for all; exit status 1 if a problem failed or a command did.
"""

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import time

# What is said of it, its part of all problems, how many a process does, and flags.
SHARES = [
    ("law and one rank", 0.60, 2500, []),
    ("all schedules", 0.20, 400, ["--schedule", "all"]),
    ("all schedules, checked", 0.05, 250, ["--schedule", "all", "--checked"]),
    ("trees, all schedules", 0.08, 400, ["--trees", "--schedule", "all"]),
    ("3 micro-sequences", 0.04, 400, ["--micro", "3"]),
    ("2 micro-sequences, checked", 0.02, 400, ["--micro", "2", "--checked"]),
    ("trees in 2 micro-sequences", 0.008, 400, ["--trees", "--micro", "2"]),
    ("1,000 to 20,000 tokens, all schedules", 0.0019, 10, ["--large", "1", "--tokens-from", "1000", "--tokens-up-to", "20000",
                                                          "--schedule", "all"]),
    ("20,000 to 100,000 tokens, ring and exact", 0.0001, 2, ["--large", "1", "--tokens-from", "20000", "--tokens-up-to", "100000",
                                                            "--schedule", "ring,exact"]),
]


def number(pattern, said):
    found = re.search(pattern, said, re.M)
    return int(found[1].replace(",", "")) if found else 0


def run(command):
    """(exit status, problems, runs, refused, failed, last lines) of a command."""
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    problems, failed = number(r"^([\d,]+) cases, ", said), number(r" on other ranks: ([\d,]+) failed", said)
    runs = number(r"by schedules: ([\d,]+) compared", said) or problems
    refused = number(r" compared, ([\d,]+) refused", said) + number(r"^skipped ([\d,]+) times", said)
    return done.returncode, problems, runs, refused, failed, said.strip().splitlines()[-30 if done.returncode else -1:]


def jobs(count, first_seed, weft):
    """(share, command), the longest first, so that no core waits long for another at the end; seeds follow each other."""
    made, seed = [], first_seed
    for what, part, at_once, flags in SHARES:
        left = max(1, round(part * count))
        while left:
            n = min(left, at_once)
            made.append((what, [weft, "verify", "--random", str(n), *flags, "--threads", "1", "--seed", str(seed)]))
            seed, left = seed + n, left - n
    return made[::-1], seed


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("count", type=int)
    p.add_argument("--jobs", type=int, default=os.cpu_count())
    p.add_argument("--first-seed", type=int, default=0)
    p.add_argument("--weft", default="build/release/weft")
    p.add_argument("--log", default="build/many_problems.log")
    args = p.parse_args()
    todo, end = jobs(args.count, args.first_seed, args.weft)
    sums, broken, begin = {what: [0, 0, 0, 0] for what, *_ in SHARES}, 0, time.monotonic()
    with open(args.log, "w") as log, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        under_way = {pool.submit(run, command): (what, command) for what, command in todo}
        for done in concurrent.futures.as_completed(under_way):
            what, command = under_way[done]
            status, *counts, said = done.result()
            sums[what] = [a + b for a, b in zip(sums[what], counts)]
            text = f"{' '.join(command)}\n" + "".join(f"    {line}\n" for line in said)
            print(text, file=log, end="", flush=True)
            if status:
                broken += 1
                print(f"exit status {status}: {text}", flush=True)
    seconds, total = time.monotonic() - begin, [sum(x) for x in zip(*sums.values())]
    print(f"| what | problems | runs compared | refused | failed |\n|---|{'---:|' * 4}")
    for what, counts in sums.items():
        print(f"| {what} | {' | '.join(f'{x:,}' for x in counts)} |")
    print(f"| all, seeds {args.first_seed} to {end - 1}, {args.jobs} processes, {seconds:,.0f} s "
          f"| {' | '.join(f'{x:,}' for x in total)} |")
    if broken:
        print(f"{broken} commands failed; all are in {args.log}")
    return 1 if broken or total[3] else 0


if __name__ == "__main__":
    sys.exit(main())
