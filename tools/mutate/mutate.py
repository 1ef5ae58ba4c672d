#!/usr/bin/env python3
"""Plants small faults in Weft's sources, one at a time, and reports which of them the tests notice.

    tools/mutate/mutate.py --build build/mutants --count 300 --seed 1 --jobs 2     make mutants
    tools/mutate/mutate.py --list --count 16                                       what would be planted
    tools/mutate/mutate.py --build build/mutants --again survived                  once more those that survived

Positions and operators are drawn by the seed: a room (in turn), an operator that has a place there, a place. Only what
the mutated file goes into is compiled again. A mutant that does not compile, or whose code is not compiled here, is drawn
again; one that leaves the object code the same is equivalent. Results are kept in BUILD/mutants.json as they come, and a
run goes on where one stopped. docs/trust.md has the result.
"""
import argparse
import collections
import concurrent.futures
import json
import pathlib
import random
import shutil
import threading

import build
import checks
import cpp
import operators
import report

LEAST = 30           # mutants of a room
SLOW = {"cpu", "include"}  # mostly headers, of which each mutant compiles many files: these get no more than that
ROOMS = {
    "plan": ["src/plan", "src/rows"], "schedule": ["src/schedule"], "kernel": ["src/kernel", "src/kernel/reference"],
    "cpu": ["src/kernel/cpu", "src/kernel/cpu/arm", "src/kernel/cpu/x86"], "run": ["src/run"], "comm": ["src/comm"],
    "prepare": ["src/prepare"], "include": ["include/weft"],
}
MOST_OBJECTS = 8   # a header that more of them use is drawn again
MOST_TESTS = 6
ROOT = pathlib.Path(__file__).resolve().parents[2]


class Mutant:
    def __init__(self, room, file, source, operator, begin, end, text):
        self.room, self.file, self.operator = room, file, operator
        self.source, self.begin, self.end, self.replacement = source, begin, end, text
        self.line = source.line_of(begin)
        column = begin - source.text.rfind("\n", 0, begin)
        self.name = f"{file}:{self.line}:{column} {operator} {' '.join(text.split())[:40]}"

    def text(self):
        return self.source.text[:self.begin] + self.replacement + self.source.text[self.end:]

    def change(self):
        """The lines as they were and as they are, on one line each."""
        whole = self.source.text
        first, last = whole.rfind("\n", 0, self.begin) + 1, whole.find("\n", self.end)
        is_ = whole[first:self.begin] + self.replacement + whole[self.end:last]
        return " ".join(whole[first:last].split()), " ".join(is_.split())


def draws(room, seed):
    """All mutants of a room in drawn order: each time an operator first, so that rare ones come up too."""
    by_operator = collections.defaultdict(list)
    for folder in ROOMS[room]:
        for path in sorted((ROOT / folder).iterdir()):
            if path.suffix in (".h", ".cpp"):
                source = cpp.parse(path.read_text())
                for operator, begin, end, text in operators.edits(source):
                    by_operator[operator].append((str(path.relative_to(ROOT)), source, operator, begin, end, text))
    choose = random.Random(f"{seed} {room}")
    for name in sorted(by_operator):
        choose.shuffle(by_operator[name])
    while by_operator:
        name = choose.choice(sorted(by_operator))
        yield Mutant(room, *by_operator[name].pop())
        if not by_operator[name]:
            del by_operator[name]


def shares(rooms, count):
    """How many of each room: LEAST where that is slow, and the rest in equal parts."""
    if len(rooms) == 1:
        return {rooms[0]: count}
    slow = {room: min(LEAST, -(-count // len(rooms))) for room in rooms if room in SLOW}
    others = [room for room in rooms if room not in SLOW]
    rest = count - sum(slow.values())
    return slow | {room: -(-rest // len(others)) for room in others}


class Trial:
    """One mutant in a folder of its own: what must be compiled, linked and run."""
    def __init__(self, b, suite, order, mutant, folder, number):
        self.b, self.suite, self.order, self.mutant, self.folder, self.number = b, suite, order, mutant, folder, number
        self.objects = {}  # of the build -> mutated

    def places(self):
        """Objects of the library and of tests that hold the mutated code; None if there is none, or too many."""
        m, b = self.mutant, self.b
        span = m.source.function_lines(m.begin)
        tests = []
        if m.file.endswith(".cpp"):
            library = [o for o in b.objects if b.sources[o] == m.file]
        elif span is None:
            library = [o for o in b.objects if o in b.users[m.file]]
        else:
            library = b.objects_of(m.file, span, b.objects)
            tests = [c.program.own[0] for c in self.suite if len(c.program.own) == 1]
            tests = b.objects_of(m.file, span, dict.fromkeys(tests))
        if not library + tests or len(library) > MOST_OBJECTS or not b.live(m.file, (library + tests)[0], m.line):
            return None
        return library, tests[:MOST_TESTS]

    def compile(self, objects):
        """Compiles; what comes out the same is left as it was."""
        for n, obj in enumerate(objects):
            out = self.folder / f"{n}-{pathlib.Path(obj).name}"
            if not self.b.compile(obj, self.folder, out, self.mutant.operator == "rounded"):
                return False
            if not self.b.same(obj, out):
                self.objects[obj] = out
        return True

    def first_failure(self, suite):
        program = self.folder / "program"
        linked = None
        for check in suite:
            if self.mutant and not check.program.holds(self.objects):
                continue
            if linked != check.program.target:
                self.b.link(check.program, self.objects, program)
                linked = check.program.target
            for limit in (10 + 6 * check.seconds, 10 + 8 * check.seconds):  # a busy machine may have been the cause
                why = build.run(program, check.arguments, check.environment, limit, self.folder, self.number)
                if why != build.TIME_LIMIT:
                    break
            if why:
                return {"verdict": "killed", "by": check.name, "why": why}
        return None

    def result(self):
        if self.mutant is None:
            return self.first_failure(self.suite) or {"verdict": "survived"}
        found = self.places()
        if found is None:
            return {"verdict": "not here"}
        target = self.folder / self.mutant.file
        target.parent.mkdir(parents=True)
        target.write_text(self.mutant.text())
        library, tests = found
        if not self.compile(library):
            return {"verdict": "uncompiled"}
        failure = self.first_failure(self.order(self.mutant)) if self.objects else None
        if failure:
            return failure
        if tests:  # code of a header that tests hold themselves
            if not self.compile(tests):
                return {"verdict": "uncompiled"}
            changed = [c for c in self.suite if c.program.own[0] in self.objects]
            failure = self.first_failure(changed)
        return failure or {"verdict": "survived" if self.objects else "same code"}


class Run:
    def __init__(self, args):
        self.args = args
        self.b = build.Build(ROOT, args.build.resolve())
        self.suite = checks.all_checks(self.b)
        self.b.read_lines([c.program for c in self.suite])
        self.scratch = self.b.folder / "mutants"
        checks.measure(self.b, self.suite, self.scratch / "seconds.json")
        self.report = args.report or self.b.folder / "mutants.json"
        self.results = json.loads(self.report.read_text()) if self.report.exists() else {}
        self.kills = collections.Counter((r["room"], r["by"]) for r in self.results.values() if r["verdict"] == "killed")
        self.lock = threading.Lock()
        self.listed = report.listed(ROOT / "tools/mutate/equivalent.json")

    def again(self, mutant, known):
        """Whether it is asked for once more; what is known to be equivalent is not."""
        return known["verdict"] == self.args.again and (mutant.file, *mutant.change()) not in self.listed

    def order(self, mutant):
        """Quick checks first, and those that killed others of the room."""
        return sorted(self.suite, key=lambda c: (c.seconds + 0.3) / (1 + 3 * self.kills[mutant.room, c.name]))

    def try_one(self, number, mutant):
        folder = self.scratch / f"{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        trial = Trial(self.b, self.suite, self.order, mutant, folder, number)
        try:
            result, seconds = build.timed(trial.result)
        except build.LinkError:
            if mutant is None:
                raise
            result, seconds = {"verdict": "uncompiled"}, 0
        shutil.rmtree(folder)
        if mutant:
            was, is_ = mutant.change()
            result |= {"room": mutant.room, "operator": mutant.operator, "file": mutant.file, "line": mutant.line,
                       "was": was, "is": is_}
        result["seconds"] = round(seconds, 1)
        with self.lock:
            self.results[mutant.name if mutant else f"control {number}"] = {"room": "control"} | result
            self.kills[result.get("room"), result.get("by")] += 1
            self.report.with_suffix(".tmp").write_text(json.dumps(self.results, indent=1))
            self.report.with_suffix(".tmp").rename(self.report)
            if result["verdict"] in ("killed", "survived"):
                print(f"{result['verdict']:9} {mutant.name if mutant else 'control'}  {result.get('by', '')} "
                      f"{result.get('why', '')} {seconds:.1f} s", flush=True)
        return result["verdict"]

    def wanted(self):
        """Mutants until each room has its share of those that change code. Rooms take turns."""
        rooms = [self.args.only] if self.args.only else list(ROOMS)
        share = shares(rooms, self.args.count)
        left = {room: draws(room, self.args.seed) for room in rooms}
        under_way = collections.Counter()
        count = collections.Counter()

        def settle(room, verdict):
            with self.lock:
                under_way[room] -= 1
                count[room] += verdict in ("killed", "survived")
        while left:
            for room in list(left):
                mutant = None
                with self.lock:
                    full = count[room] >= share[room]
                    wait = count[room] + under_way[room] >= share[room]
                if full or (not wait and (mutant := next(left[room], None)) is None):
                    del left[room]
                elif not wait:
                    with self.lock:
                        under_way[room] += 1
                        known = self.results.get(mutant.name)
                    if known and not self.again(mutant, known):
                        settle(room, known["verdict"])
                    else:
                        yield mutant, lambda verdict, room=room: settle(room, verdict)
            if left and all(count[r] + under_way[r] >= share[r] for r in left):
                yield None, None

    def all(self):
        jobs = self.args.jobs
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            running, free = {}, list(range(jobs))
            queue = [(None, lambda verdict: None)] * self.args.controls
            queue = (item for source in (queue, self.wanted()) for item in source)
            controls = self.args.controls
            for mutant, settle in queue:
                if settle is None or not free:
                    self.reap(running, free)
                if settle is None:
                    continue
                number = free.pop()
                running[pool.submit(self.try_one, number if mutant else 1000 + (controls := controls - 1), mutant)] = (
                    number, settle)
            while running:
                self.reap(running, free)

    @staticmethod
    def reap(running, free):
        for done in concurrent.futures.wait(running, return_when="FIRST_COMPLETED").done:
            number, settle = running.pop(done)
            free.append(number)
            settle(done.result())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/mutants")
    parser.add_argument("--report", type=pathlib.Path, help="where results are kept; BUILD/mutants.json if not given")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=ROOMS)
    parser.add_argument("--list", action="store_true", help="print what would be planted, and stop")
    parser.add_argument("--again", help="run those with this verdict once more")
    parser.add_argument("--controls", type=int, default=0, help="also run the checks this often without a mutant")
    args = parser.parse_args()
    if args.list:
        rooms = [args.only] if args.only else list(ROOMS)
        for room in rooms:
            for _, mutant in zip(range(shares(rooms, args.count)[room]), draws(room, args.seed)):
                was, is_ = mutant.change()
                print(f"{mutant.file}:{mutant.line} [{mutant.operator}]\n  - {was}\n  + {is_}")
        return
    run = Run(args)
    run.all()
    print(report.summary(run.results, ROOT / "tools/mutate/equivalent.json"))


if __name__ == "__main__":
    main()
