"""What a mutant has to get past: unit tests, the law on random problems, and `weft verify`."""
import json
import re
import subprocess
from dataclasses import dataclass, field

import build

LEFT_OUT = {"unit_draw"}  # pictures are made of none of the rooms that are mutated


@dataclass
class Check:
    name: str
    program: build.Program
    arguments: tuple = ()
    environment: dict = field(default_factory=dict)
    seconds: float = 1.0


def all_checks(b):
    checks = []
    targets = subprocess.run(["ninja", "-t", "targets", "all"], cwd=b.folder, capture_output=True, text=True, check=True)
    for name in sorted(set(re.findall(r"^tests/(unit_\w+|\w+_test): CXX_EXECUTABLE", targets.stdout, re.MULTILINE))):
        if name not in LEFT_OUT:
            checks.append(Check(name, build.Program(b, f"tests/{name}"), ("--gtest_brief=1", "--gtest_fail_fast")))
            checks[-1].environment = {"WEFT_FAULT_PLANS": "200"}
    checks.append(Check("law_soak", build.Program(b, "tests/law_soak"), ("3000",)))
    weft = build.Program(b, "weft")
    every = ("--schedule", "all", "--key-order", "auto,rank", "--outer", "ring,all_gather", "--head-groups", "2")
    checks.append(Check("verify.random", weft, ("verify", "--random", "300", *every)))
    checks.append(Check("verify.matrix", weft, ("verify", "--matrix", "quick", "--ranks", "2,3")))
    return checks


def measure(b, checks, report):
    """Runs every check once without a mutant: each must pass, and its time sets the order and the time limit."""
    known = json.loads(report.read_text()) if report.exists() else {}
    scratch = report.parent / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    for check in checks:
        if check.name not in known:
            program = b.folder / check.program.target
            failed, seconds = build.timed(lambda: build.run(program, check.arguments, check.environment, 600, scratch))
            if failed:
                raise SystemExit(f"{check.name} fails without a mutant: {failed}; see {scratch}/log")
            known[check.name] = round(seconds, 2)
            print(f"  {check.name}: {seconds:.1f} s", flush=True)
        check.seconds = known[check.name]
    report.write_text(json.dumps(known, indent=1))
