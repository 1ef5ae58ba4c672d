#!/usr/bin/env python3
"""Tables of a run:  tools/mutate/report.py BUILD/mutants.json"""
import collections
import json
import pathlib
import sys


def listed(equivalent):
    """(file, was, is) -> why that changes nothing."""
    entries = json.loads(equivalent.read_text()) if equivalent.exists() else []
    return {(e["file"], e["was"], e["is"]): e["why"] for e in entries}


def judged(results, equivalent):
    """Killed and survived mutants; survivors that are listed as equivalent are called so."""
    known = listed(equivalent)
    for r in results.values():
        if r["room"] == "control" or r["verdict"] not in ("killed", "survived", "same code"):
            continue
        why = known.get((r["file"], r["was"], r["is"])) if r["verdict"] == "survived" else None
        yield r | ({"verdict": "equivalent", "reason": why} if why else {})


def table(rows, key):
    counts = collections.defaultdict(collections.Counter)
    for r in rows:
        counts[r[key]][r["verdict"]] += 1
        counts["all"][r["verdict"]] += 1
    names = sorted(counts, key=lambda n: (n == "all", n))
    lines = [f"| {key} | planted | killed | equivalent | survived | killed of the rest |", "|---|---:|---:|---:|---:|---:|"]
    for name in names:
        c = counts[name]
        rest = c["killed"] + c["survived"]
        share = f"{100 * c['killed'] / rest:.1f} %" if rest else ""
        lines.append(f"| {name} | {rest + c['equivalent']} | {c['killed']} | {c['equivalent']} | {c['survived']} | {share} |")
    return "\n".join(lines)


def summary(results, equivalent):
    rows = list(judged(results, equivalent))
    planted = [r for r in rows if r["verdict"] != "same code"]
    controls = [r["verdict"] for r in results.values() if r["room"] == "control"]
    verdicts = collections.Counter(r["verdict"] for r in results.values())
    lines = [table(planted, "room"), "", table(planted, "operator"), "",
             f"{len(rows) - len(planted)} more leave the object code the same; {verdicts['uncompiled']} did not compile and "
             f"{verdicts['not here']} are in no code of this build or in a header that too much depends on.",
             f"Without a mutant: {controls.count('killed')} of {len(controls)} runs failed.", ""]
    for r in planted:
        if r["verdict"] != "killed":
            lines += [f"{r['verdict']}: {r['file']}:{r['line']} [{r['operator']}]", f"  - {r['was']}", f"  + {r['is']}"]
            lines += [f"  {r['reason']}"] if r.get("reason") else []
    return "\n".join(lines)


if __name__ == "__main__":
    print(summary(json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(__file__).with_name("equivalent.json")))
