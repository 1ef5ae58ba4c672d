#!/usr/bin/env python3
"""Branch coverage of some rooms by their tests: compiles them again with gcov's counters, puts them into the programs of a build
in place of its own, runs these, and prints a table.

    tools/coverage.py                      src/run, src/prepare and python/binding, by the programs of build/release
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
sys.path.insert(0, str(ROOT / "tools/mutate"))
import build as mutate

ROOMS = ["src/run", "src/prepare", "python/binding"]
UNIT = ["unit_run", "unit_prepare", "out_of_memory_test", "leaks_test"]
PYTEST = ["python/tests/core", "python/tests/pytorch"]


def run(*command, **options):
    print("$", *command, flush=True)
    return subprocess.run([str(word) for word in command], cwd=ROOT, check=False, **options).returncode


def link(build, program, counted, out):
    """A program with the objects that count in place of its own, or before the library that has them too."""
    argv = [str(counted.get(word, word)) for word in program.link]
    argv[argv.index("-o") + 1] = str(out)
    first = next(i for i, word in enumerate(argv) if word.endswith(".o"))
    argv[first:first] = [str(made) for obj, made in counted.items() if obj in build.objects and obj not in program.own]
    subprocess.run([*argv, "--coverage"], cwd=build.folder, check=True)


def make(folder, out):
    """The programs, in `out`; the package with its module in out/python."""
    build, counted = mutate.Build(ROOT, folder), {}
    for obj, source in build.sources.items():
        if obj not in build.objects and "weft_python.dir" not in obj:
            continue
        units = (folder / obj.removesuffix(".o")).read_text() if "/Unity/" in source else source
        if any(f"{room}/" in units for room in ROOMS):
            counted[obj] = out / f"{len(counted)}.o"
            if not build.compile(obj, out / "none", counted[obj], flags=["-O0", "--coverage"]):
                sys.exit(f"{source} does not compile with --coverage")
    (module,) = (folder / "python/weft").glob("_core*.so")
    shutil.rmtree(out / "python", ignore_errors=True)
    shutil.copytree(folder / "python", out / "python")
    programs = {f"tests/{name}": out / name for name in UNIT} | {"weft": out / "weft"}
    programs[str(module.relative_to(folder))] = out / module.relative_to(folder)
    for target, program in programs.items():
        link(build, mutate.Program(build, target), counted, program)


def test(out, quick):
    for file in out.rglob("*.gcda"):
        file.unlink()
    failed = sum(run(out / program, "--gtest_brief=1") != 0 for program in UNIT)
    for words in (["--schedule", "all", "--trees"], ["--micro", 3]):
        failed += run(out / "weft", "verify", "--random", 100, *words, stdout=subprocess.DEVNULL) != 0
    environment = {**os.environ, "PYTHONPATH": str(out / "python")}
    for tests in PYTEST[:1 if quick else None]:
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
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    args.add_argument("--report", action="store_true")
    args.add_argument("--quick", action="store_true", help="without torch's operators")
    args.add_argument("--missed", action="append", default=[], metavar="ROOM")
    args = args.parse_args()
    folder, out = args.build.resolve(), ROOT / "build/coverage"
    failed = 0
    if not args.report:
        out.mkdir(parents=True, exist_ok=True)
        make(folder, out)
        failed = test(out, args.quick)
    report(*measure(out), args.missed)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
