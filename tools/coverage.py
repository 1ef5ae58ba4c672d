#!/usr/bin/env python3
"""Branch coverage of some rooms by their tests: builds them with gcov's counters, all else as always, and prints a table.

    tools/coverage.py                      build/coverage; src/run, src/prepare and python/binding by their tests
    tools/coverage.py --missed src/run     also each line of a room with a branch that was never taken
    tools/coverage.py --report             what the counters of an earlier run say, without a run

What an exception leaves a call by is no branch here: g++ has two edges for every call that may throw. A condition in a
template counts once, however often it is instantiated.
"""
import argparse
import collections
import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = ["src/run", "src/prepare", "python/binding"]
UNIT = ["unit_run", "unit_prepare", "out_of_memory_test", "leaks_test"]
PYTEST = ["python/tests/core", "python/tests/pytorch"]


def compile_one(command):
    """As a launcher of the compiler: with counters, and without optimisation, where the source is of one of the rooms."""
    source = command[command.index("-c") + 1] if "-c" in command else ""
    own = any(f"{ROOT}/{room}/" in source or f"unity_{room.replace('/', '_')}_" in source for room in ROOMS)
    own = own or "weft_python.dir/Unity" in source
    cached = ["ccache"] if shutil.which("ccache") and not own else []
    command = [*cached, *command, *(["--coverage", "-O0", "-Wno-error"] if own else [])]
    os.execvp(command[0], command)


def run(*command, **options):
    print("$", *command, flush=True)
    return subprocess.run([str(word) for word in command], cwd=ROOT, check=False, **options).returncode


def build(folder, jobs):
    launcher = f"{sys.executable};{__file__};--compile"
    flags = [f"-DCMAKE_{kind}_LINKER_FLAGS=--coverage" for kind in ("EXE", "SHARED", "MODULE")]
    wrong = run("cmake", "--preset", "release", "-B", folder, f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}", *flags)
    return wrong or run("cmake", "--build", folder, "-j", jobs, "--target", *UNIT, "weft_python", "weft_command")


def test(folder):
    for file in folder.rglob("*.gcda"):
        file.unlink()
    failed = sum(run(folder / "tests" / program, "--gtest_brief=1") != 0 for program in UNIT)
    weft = folder / "weft"
    failed += run(weft, "verify", "--random", 200, "--schedule", "all", "--trees", stdout=subprocess.DEVNULL) != 0
    failed += run(weft, "verify", "--random", 100, "--micro", 3, stdout=subprocess.DEVNULL) != 0
    environment = {**os.environ, "PYTHONPATH": str(folder / "python")}
    for tests in PYTEST:
        words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", tests]
        failed += run(sys.executable, *words, env=environment) != 0
    return failed


def decisions(branches):
    """Counts of branches, without the pairs of edges of calls that may throw."""
    counts, at = [], 0
    while at < len(branches):
        if at + 1 < len(branches) and branches[at + 1]["throw"]:
            at += 2
            continue
        if not branches[at]["throw"]:
            counts.append(branches[at]["count"])
        at += 1
    return counts


def measure(folder):
    """{file: {line: counts of its branches}}, and {file: {line: how often it ran}}."""
    branches, lines = collections.defaultdict(dict), collections.defaultdict(dict)
    for file in sorted(folder.rglob("*.gcda")):
        words = ["gcov", "--json-format", "--branch-probabilities", "--stdout", file]
        said = subprocess.run(words, capture_output=True, text=True, check=True, cwd=file.parent).stdout
        for text in filter(None, said.splitlines()):
            for source in json.loads(text)["files"]:
                name = os.path.relpath(os.path.join(json.loads(text)["current_working_directory"], source["file"]), ROOT)
                if not name.startswith(tuple(f"{room}/" for room in ROOMS)):
                    continue
                for line in source["lines"]:
                    number, counts = line["line_number"], decisions(line["branches"])
                    lines[name][number] = lines[name].get(number, 0) + line["count"]
                    before = branches[name].get(number, [])
                    longer = max(len(before), len(counts))
                    branches[name][number] = [sum(x) for x in zip(before + [0] * (longer - len(before)),
                                                                  counts + [0] * (longer - len(counts)))]
    return branches, lines


def report(branches, lines, missed):
    print(f"{'room':16} {'lines':>7} {'run':>7} {'branches':>9} {'taken':>7}")
    for room in ROOMS:
        counts = [n for name in branches if name.startswith(f"{room}/") for of_line in branches[name].values() for n in of_line]
        ran = [n for name in lines if name.startswith(f"{room}/") for n in lines[name].values()]
        share = [100 * sum(map(bool, some)) / max(len(some), 1) for some in (ran, counts)]
        print(f"{room:16} {len(ran):7,} {share[0]:6.1f}% {len(counts):9,} {share[1]:6.1f}%")
    for name in sorted(branches):
        if not any(name.startswith(room) for room in missed):
            continue
        text = (ROOT / name).read_text().splitlines()
        for number, counts in sorted(branches[name].items()):
            if not all(counts) and counts:
                print(f"{name}:{number}: {sum(map(bool, counts))} of {len(counts)}: {text[number - 1].strip()}")
            elif not lines[name][number]:
                print(f"{name}:{number}: never: {text[number - 1].strip()}")


def main():
    if sys.argv[1:2] == ["--compile"]:
        compile_one(sys.argv[2:])
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--build", type=pathlib.Path, default=ROOT / "build/coverage")
    args.add_argument("--jobs", type=int, default=os.cpu_count())
    args.add_argument("--report", action="store_true")
    args.add_argument("--missed", action="append", default=[], metavar="ROOM")
    args = args.parse_args()
    folder = args.build.resolve()
    failed = 0
    if not args.report:
        if build(folder, args.jobs):
            return 1
        failed = test(folder)
    report(*measure(folder), args.missed)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
