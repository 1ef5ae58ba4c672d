"""Builds the wheels (tools/wheels.py) and runs them where there is no compiler, with Python and numpy alone.

    python python/tests/wheel.py --source . --folder build/wheel-test [--built]

As root, with mmdebstrap, on a bare Debian for each wheel; otherwise in a virtual environment, with only its own programs
on the PATH. --built: takes the wheels that are in dist/.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

# Debian's releases by the minor version of their Python.
RELEASES = {11: "bookworm", 13: "trixie"}
COMMANDS = [
    ["python", "-c", "import pathlib, weft; here = pathlib.Path(weft.__file__).parent; print(weft.__version__, here); "
     "assert (here / 'py.typed').exists() and (here / '_core.pyi').exists()"],
    ["python", "03_ranks.py"],  # the README's example
    ["weft", "verify", "--random", "200"],
    ["python", "-m", "weft", "explain", "--docs", "7,3,6", "--ranks", "4"],
]


def run(*command, **options):
    print("$", *command, flush=True)
    return subprocess.run([str(part) for part in command], check=True, text=True, **options)


def minor_of(wheel):
    """The Python to test a wheel with: its own, or for the stable ABI a later one than it was built for."""
    return 13 if "-abi3-" in wheel.name else int(re.search(r"-cp3(\d+)-", wheel.name)[1])


def fetch_numpy(tools, folder, minor):
    platforms = [f"--platform=manylinux_2_{glibc}_{os.uname().machine}" for glibc in (17, 27, 28)]
    run(tools / "python", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:",
        f"--python-version=3.{minor}", *platforms, "--dest", folder, "numpy")


def in_root(folder, minor):
    """A bare Debian, and how a command is run in its folder /test."""
    root = folder / f"root-3.{minor}"
    run("mmdebstrap", "--quiet", "--variant=minbase", "--include=python3-venv", RELEASES[minor], root)
    for name in ("cc", "c++", "gcc", "g++", "clang", "cmake"):
        if shutil.which(name, path=f"{root}/usr/bin"):
            sys.exit(f"{name} is in what should be a bare root")
    return root / "test", [shutil.which("chroot"), root], "/test"


def in_environment(folder, minor):
    here = folder / f"environment-3.{minor}"
    return here, [], here


def check_exports(wheel, folder):
    """The entry alone: what the module exported of a static C++ library would be shared with the one that torch brings."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.search(r"/_core\.[^/]*so$", name))
        module = archive.extract(name, folder)
    said = run("nm", "-D", "--defined-only", module, stdout=subprocess.PIPE).stdout
    exported = [line.split()[-1] for line in said.splitlines()]
    if exported != ["PyInit__core"]:
        sys.exit(f"{name} exports {len(exported)} names: {', '.join(exported[:9])}")


def check(wheel, place, examples, tools):
    minor = minor_of(wheel)
    here, prefix, seen = place(minor)
    here.mkdir(parents=True)
    shutil.copy(wheel, here)
    shutil.copy(examples / "03_ranks.py", here)
    fetch_numpy(tools, here, minor)
    python = "/usr/bin/python3" if prefix else shutil.which(f"python3.{minor}")
    run(*prefix, python, "-m", "venv", f"{seen}/venv")
    environment = {"PATH": f"{seen}/venv/bin", "HOME": str(seen), "LANG": "C.UTF-8"}
    run(*prefix, f"{seen}/venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index",
        f"--find-links={seen}", "weft-attention", env=environment)
    for program, *words in COMMANDS:
        # A path of its own for the file, so that what runs is what was installed.
        words = [f"{seen}/{word}" if word.endswith(".py") else word for word in words]
        run(*prefix, f"{seen}/venv/bin/{program}", *words, env=environment)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=pathlib.Path, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--built", action="store_true")
    args = parser.parse_args()
    source, folder = args.source.resolve(), args.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if not args.built:
        shutil.rmtree(source / "dist", ignore_errors=True)
        run(sys.executable, source / "tools/wheels.py")

    tools = source / "build/wheels/tools/bin"
    wheels = sorted((source / "dist").glob("weft_attention-*.whl"))
    if not wheels:
        sys.exit("no wheel in dist/")
    bare = os.geteuid() == 0 and shutil.which("mmdebstrap")
    for wheel in wheels:
        shown = run(tools / "auditwheel", "show", wheel, stdout=subprocess.PIPE).stdout
        tag = re.search(r'platform tag:\s+"manylinux_2_(\d+)_', shown)
        if not tag or int(tag[1]) > 28:
            sys.exit(f"not manylinux_2_28 or older: {shown}")
        check_exports(wheel, folder)
        make = in_root if bare and minor_of(wheel) in RELEASES else in_environment
        check(wheel, lambda minor, make=make: make(folder, minor), source / "examples", tools)


if __name__ == "__main__":
    main()
