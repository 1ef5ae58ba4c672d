#!/usr/bin/env bash
# Style and static checks:   tools/lint.sh [--all | --tidy]
#   clang-format, ruff and mypy look at every file. clang-tidy takes seconds a file, so it looks at what changed since the
#   branch left main (on main: since the commit before), or with --all at everything. --tidy: clang-tidy alone.
set -euo pipefail
cd "$(dirname "$0")/.."
tidied=changed
[ "${1:-}" != --all ] || tidied=all

if [ "${1:-}" != --tidy ]; then
  mapfile -t sources < <(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
  clang-format-19 --dry-run -Werror "${sources[@]}"
  echo "lint: clang-format: ${#sources[@]} files"
  .venv/bin/ruff check python examples bench tools tests
  .venv/bin/mypy -p weft
fi

cmake --preset lint > /dev/null
databases=(build/lint)
if [ -n "${CUDACXX:-}" ]; then
  cmake --preset cuda -DWEFT_UNITY=OFF -B build/lint-cuda > /dev/null
  databases+=(build/lint-cuda)
fi
base=$(git merge-base HEAD origin/main 2> /dev/null || git rev-parse HEAD)
if [ "$base" = "$(git rev-parse HEAD)" ]; then base=$(git rev-parse --verify --quiet HEAD~1 || echo HEAD); fi
# A header is looked at through one file that includes it.
python3 - "$tidied" "$base" "${databases[@]}" << 'PYTHON' |
import json, pathlib, subprocess, sys

scope, base, *databases = sys.argv[1:]
root = pathlib.Path.cwd()
known = {}  # source -> the first database that compiles it
for database in databases:
    for entry in json.loads((root / database / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["file"])
        if path.suffix == ".cpp" and root in path.parents and "build" not in path.relative_to(root).parts:
            known.setdefault(str(path.relative_to(root)), database)
if scope == "all":
    wanted = set(known)
else:
    names = subprocess.run(["git", "diff", "--name-only", "--diff-filter=d", base], check=True, capture_output=True, text=True)
    changed = names.stdout.split()
    wanted = {name for name in changed if name in known}
    covered = "".join(pathlib.Path(name).read_text() for name in wanted)
    for header in (name for name in changed if name.endswith(".h")):
        spelled = header.split("/", 1)[1].removeprefix("weft/") if header.startswith("tools/") else header.split("/", 1)[1]
        if f'"{spelled}"' in covered:
            continue
        user = next((name for name in known if f'"{spelled}"' in pathlib.Path(name).read_text()), None)
        if user:
            wanted.add(user)
print("\n".join(f"{known[name]} {name}" for name in sorted(wanted)))
PYTHON
  xargs -r -P "$(nproc)" -n 2 clang-tidy-19 --quiet \
    --extra-arg=-Wno-ignored-optimization-argument --extra-arg=-Wno-unknown-warning-option \
    --extra-arg=-Wno-deprecated-declarations --extra-arg=-Wno-sign-conversion -p
echo "lint: clang-tidy: $tidied files"
