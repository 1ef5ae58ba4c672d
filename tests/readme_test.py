"""Checks that README.md and docs/*.md say what is so.

    python tests/readme_test.py --source .             check
    python tests/readme_test.py --source . --update    write what the command prints today into the pages

- The Python blocks of the README run, in builds that have the Python module.
- A ```console block that begins with `$ weft`, or with a program of examples/, is run, all of its commands in one folder;
  what they print must be what the block shows. A last line `...` ends a shortened output: what stands before it must be its
  beginning. Roundings that examples print (1.3e-07) may differ. Programs that this build has not are left out.
- docs/support.md is what tools/support.py makes of the command's table.
- Relative links and their #anchors lead somewhere, and every page of docs/ can be reached from the README.
- The README's first screen has two pictures, the two commands and the example, in this order.

The command is $WEFT, or build/release/weft of the source folder. Python's standard library alone.
"""
import argparse
import difflib
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = re.compile(r"\$ (weft |(python|tools/mpirun.sh -np \d) .*examples/|build/release/examples/)")
ROUNDING = re.compile(r"\d(\.\d+)?e-\d+")


def blocks(text, language):
    return [m for m in FENCE.finditer(text) if m.group(1) == language]


def is_built(weft, block):
    """Are the examples that it names in this build?"""
    names = re.findall(r"^\$ .*build/release/examples/(\w+)", block, flags=re.MULTILINE)
    python = any(weft.parent.glob("python/weft/_core*.so"))
    return (python or "$ python " not in block) and all((weft.parent / "examples" / name).exists() for name in names)


def run_commands(weft, commands):
    """What each command prints, in a folder that has the examples of source and build: stdout and stderr together, but
    of programs that go well and are not weft itself stdout alone, since libraries complain there of what a machine lacks."""
    printed = []
    with tempfile.TemporaryDirectory() as folder:
        tools, work = pathlib.Path(folder, "bin"), pathlib.Path(folder, "work")
        tools.mkdir()
        (work / "build").mkdir(parents=True)
        (tools / "weft").symlink_to(weft)
        (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (tools / "python").chmod(0o755)
        (work / "build/release").symlink_to(weft.parent)
        for name in ("examples", "tools"):
            (work / name).symlink_to(pathlib.Path(__file__).resolve().parent.parent / name)
        env = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(weft.parent / "python")}
        for command in commands:
            together = command.startswith("weft ")
            result = subprocess.run(command, shell=True, cwd=work, env=env, timeout=120, text=True, encoding="utf-8",
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT if together else subprocess.PIPE)
            printed.append(result.stdout + ("" if together or result.returncode == 0 else result.stderr))
    return printed


def as_shown(weft, block):
    """The block as it should read, shortened where it is shortened now."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]  # command, output, command, output, ...
    commands, shown = parts[::2], parts[1::2]
    out = ""
    for command, now, new in zip(commands, shown, run_commands(weft, commands)):
        lines, wanted = new.splitlines(), now.splitlines()
        if wanted[-1:] == ["..."] and len(lines) >= len(wanted):
            lines = lines[:len(wanted) - 1] + ["..."]
        if not command.startswith("weft "):
            lines = [old if ROUNDING.sub("", old) == ROUNDING.sub("", line) else line
                     for line, old in itertools.zip_longest(lines, wanted[:len(lines)], fillvalue="")]
        out += "".join(line + "\n" for line in [f"$ {command}", *lines])
    return out


def check_console(path, text, weft, report):
    """Returns the text with every block as the command prints it today, and how many blocks were run."""
    count, out, last = 0, "", 0
    for match in blocks(text, "console"):
        block = match.group(2)
        if not RUN.match(block) or not is_built(weft, block):
            continue
        count += 1
        new = as_shown(weft, block)
        if new != block:
            line = text.count("\n", 0, match.start(2)) + 1
            diff = difflib.unified_diff(block.splitlines(), new.splitlines(), f"{path}:{line}", "what it prints",
                                        lineterm="")
            report("\n".join(diff))
        out += text[last:match.start(2)] + new
        last = match.end(2)
    return out + text[last:], count


def anchors(text):
    """Headings as GitHub names them."""
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", FENCE.sub("", text), flags=re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        found.add(words.replace(" ", "-"))
    return found


def links(text):
    plain = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    return [t for t in re.findall(r"\]\(([^)\s]+)\)", plain) if not re.match(r"[a-z]+:", t)]


def check_links(path, text, report):
    """Returns the files that the page leads to."""
    reached = set()
    for target in links(text):
        name, _, anchor = target.partition("#")
        to = (path.parent / name).resolve() if name else path.resolve()
        if not to.exists():
            report(f"{path}: the link {target} leads nowhere")
        elif anchor and anchor not in anchors(to.read_text(encoding="utf-8")):
            report(f"{path}: {target}: there is no such heading")
        reached.add(to)
    return reached


def check_python(text, weft, report):
    """Runs the Python blocks, if the module is built."""
    if not is_built(weft, "$ python "):
        return
    for match in blocks(text, "python"):
        result = subprocess.run([sys.executable, "-c", match.group(2)], text=True, timeout=120, stderr=subprocess.PIPE,
                                env={**os.environ, "PYTHONPATH": str(weft.parent / "python")})
        if result.returncode:
            report(f"README.md: this block of Python fails:\n{match.group(2)}{result.stderr}")


def check_support(source, weft, update, report):
    result = subprocess.run([sys.executable, source / "tools/support.py", weft], text=True, encoding="utf-8", timeout=120,
                            stdout=subprocess.PIPE, check=True)
    path = source / "docs/support.md"
    if update:
        path.write_text(result.stdout, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != result.stdout:
        report(f"{path} is not what tools/support.py prints; make pictures writes it anew")


def check_first_screen(text, report):
    screen = "\n".join(text.splitlines()[:30])
    wanted = ("](docs/pictures/layouts.svg)", "](docs/pictures/speed.svg)", "make demo ", "make test ", "```python")
    found = [screen.find(words) for words in wanted]
    if -1 in found or found != sorted(found):
        report(f"README.md: the first 30 lines should have, in this order: {', '.join(wanted)}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", required=True, type=pathlib.Path)
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()
    weft = pathlib.Path(os.environ.get("WEFT", args.source / "build/release/weft")).resolve()
    if not weft.exists():
        sys.exit(f"no command at {weft}; make build, or set WEFT")

    faults, run, reached = [], 0, set()
    readme = args.source / "README.md"
    pages = sorted((args.source / "docs").glob("*.md"))
    for path in [readme, *pages]:
        text = path.read_text(encoding="utf-8")
        new, count = check_console(path, text, weft, (lambda fault: None) if args.update else faults.append)
        run += count
        if args.update and new != text:
            path.write_text(new, encoding="utf-8")
            print(f"{path}: written anew")
        reached |= check_links(path, text, faults.append)
    for path in [args.source / "CONTRIBUTING.md", args.source / "CHANGELOG.md", *(args.source / "docs/notes").glob("*.md")]:
        check_links(path, path.read_text(encoding="utf-8"), faults.append)
    text = readme.read_text(encoding="utf-8")
    check_python(text, weft, faults.append)
    check_support(args.source, weft, args.update, faults.append)
    check_first_screen(text, faults.append)
    faults += [f"{p}: no page links to it" for p in pages if p.resolve() not in reached]
    if run == 0:
        faults.append("no console block was run")

    for fault in faults:
        print(fault, end="\n\n")
    print(f"{len(pages) + 1} pages, {run} console blocks run: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
