#!/usr/bin/env python3
"""Prints docs/support.md, made from the capability table and the table of options:   tools/support.py [COMMAND] > docs/support.md

The tables are in src/schedule/support.cpp and src/schedule/options.cpp, and `weft explain --support --json` writes them.
tests/readme_test.py compares the page with it, and writes it anew with --update.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

HEAD = """\
# Support

What works with what, forward and backward, each thing with everything else that works. `tools/support.py` makes this page from
the table that every entry point asks ([`support.h`](../include/weft/support.h)), and a test compares the two. What is refused is
refused with the reason, never ignored. `weft explain --support` prints the table and the kernels of your machine; in Python it is
`weft.support()`.
"""
TAIL = """\
Kernels, and what each takes: [kernels](kernels.md). Communicators: [communicators](communicators.md). What
was run on which machine: [deployment](deployment.md#what-was-run), [trust](trust.md).
"""


def table_of(weft):
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "support.json")
        subprocess.run([weft, "explain", "--support", "--json", file], check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text(encoding="utf-8"))


def quoted(names):
    return ", ".join(f"`{name}`" for name in names)


def page(weft):
    table, reasons, lines = table_of(weft), [], []

    def cell(refused):
        if refused is None:
            return "yes"
        words = f"{refused['problem']}; {refused['remedy']}"
        if words not in reasons:
            reasons.append(words)
        return f"no ({reasons.index(words) + 1})"

    everywhere, exceptions = {}, []
    for row in table["rows"]:
        cells = [cell(row["refused"][column]) for column in table["columns"]]
        if set(cells) == {"yes"}:
            everywhere.setdefault(row["group"], []).append(row["name"])
        else:
            exceptions.append(f"| {row['group']}: {row['name']} | {' | '.join(cells)} |")
    lines += ["", "Works on one rank and by every schedule:", "", "| | |", "|---|---|"]
    lines += [f"| {group} | {'; '.join(names)} |" for group, names in everywhere.items()]
    lines += ["", "Does not work everywhere; the numbers are the reasons [below](#why-not):", "",
              f"| | {' | '.join(table['columns'])} |", "|---" * (len(table["columns"]) + 1) + "|", *exceptions]
    lines += ["", "## Schedules", "", "| schedule | also called | |", "|---|---|---|"]
    lines += [f"| `{s['name']}` | {quoted(s['other_names'])} | {s['help']} |" for s in table["schedules"]]
    lines += ["", "## Options of schedules", "", "| option | of | values | default | |", "|---|---|---|---|---|"]
    for o in table["options"]:
        values = quoted(o["values"]) or f"from {o['least']} on"
        lines.append(f"| `{o['name']}` | {quoted(o['schedules'])} | {values} | `{o['default']}` | {o['help']} |")
    lines += ["", "Flags of the command are these names with dashes (`--head-groups`).", "", "## Why not", "",
              *(f"{i + 1}. {words}" for i, words in enumerate(reasons)), "", ""]
    return HEAD + "\n".join(lines) + TAIL


if __name__ == "__main__":
    here = pathlib.Path(__file__).resolve().parent.parent
    print(page(sys.argv[1] if len(sys.argv) > 1 else here / "build/release/weft"), end="")
