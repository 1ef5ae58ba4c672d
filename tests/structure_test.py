"""Checks the structure of the tree: which rooms of src/ include which, how many files a folder has, how long files are.

    python tests/structure_test.py --source .
"""
import argparse
import collections
import pathlib
import re
import sys

# What each room may include besides itself, the files directly under src/ and public headers of no room. A room names
# only rooms above it, so there is no cycle.
ROOMS = {
    "cuda": [],
    "plan": ["cuda"],
    "rows": ["plan", "cuda"],
    "comm": ["cuda"],
    "device": ["comm", "cuda"],
    "schedule": ["plan"],
    "kernel": ["plan", "device", "cuda"],
    "cost": ["plan", "schedule"],
    "run": ["plan", "rows", "comm", "device", "schedule", "kernel", "cuda"],
    "prepare": ["plan", "rows", "comm", "device", "kernel", "run", "cuda"],
    "draw": ["plan", "schedule", "cost"],
    "check": ["plan", "rows", "comm", "device", "schedule", "kernel", "cost", "run", "prepare", "cuda"],
}
# The room of a public header; the others (types that all rooms share) belong to none.
HEADERS = {
    "plan": ["packing", "mask", "layout", "plan", "device_plan"],
    "rows": ["rows", "device_rows"],
    "comm": ["communicator", "mpi"],
    "schedule": ["schedule"],
    "kernel": ["kernel"],
    "cost": ["cost", "simulate", "choose"],
    "run": ["executor"],
    "prepare": ["prepare", "kv_cache", "tree"],
}
ROOM_OF_HEADER = {f"weft/{header}.h": room for room, headers in HEADERS.items() for header in headers}

FOLDERS = ["src", "tools", "tests", "python"]
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".py", ".js"}
MOST_FILES, MOST_LINES = 25, 500
DATA = {"corpus", "__pycache__"}


def room_of(include):
    if include in ROOM_OF_HEADER:
        return ROOM_OF_HEADER[include]
    first = include.split("/")[0]
    return first if first in ROOMS else None


def wrong_includes(source):
    for room, allowed in ROOMS.items():
        for file in sorted((source / "src" / room).rglob("*")):
            if file.suffix not in SUFFIXES:
                continue
            for include in re.findall(r'^\s*#\s*include "([^"]+)"', file.read_text(), re.M):
                to = room_of(include)
                if to not in (None, room, *allowed):
                    yield f"{file.relative_to(source)} includes {include}: {room}/ may not include {to}/"


def too_large(source):
    counts = collections.Counter()
    for folder in FOLDERS:
        for file in sorted((source / folder).rglob("*")):
            if not file.is_file() or DATA & set(file.parts):
                continue
            counts[file.parent] += 1
            if file.suffix in SUFFIXES and (lines := len(file.read_text().splitlines())) > MOST_LINES:
                yield f"{file.relative_to(source)} has {lines} lines, more than {MOST_LINES}: cut it"
    for folder, count in counts.items():
        if count > MOST_FILES:
            yield f"{folder.relative_to(source)} has {count} files, more than {MOST_FILES}: make folders of it"


def unmerged(source):
    """Marks that a merge leaves where two changes meet."""
    pages = [*source.glob("*.md"), *(source / "docs").rglob("*.md")]
    code = [file for folder in FOLDERS for file in (source / folder).rglob("*") if file.suffix in SUFFIXES]
    for file in sorted({*pages, *code}):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if line.startswith(("<" * 7 + " ", ">" * 7 + " ")):
                yield f"{file.relative_to(source)}:{number} is a mark of a merge: choose between the two"


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--source", required=True, type=pathlib.Path)
    source = args.parse_args().source.resolve()
    rooms = list(ROOMS)
    cycles = [f"the table lets {room}/ include {to}/, which comes after it" for n, room in enumerate(rooms)
              for to in ROOMS[room] if rooms.index(to) >= n]
    faults = [*cycles, *wrong_includes(source), *too_large(source), *unmerged(source)]
    print("\n".join(faults) or "includes point one way; folders and files are small")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
