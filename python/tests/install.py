"""Builds the wheel as pip does, installs it into a fresh virtual environment, and runs the README's example there.

    python python/tests/install.py --source . --folder build/python-install [--isolated]

--isolated: pip fetches what it builds with, as for anybody; otherwise it takes what is installed beside this Python.
"""
import argparse
import pathlib
import shutil
import subprocess
import sys
import venv


def run(*command, **options):
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=pathlib.Path, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--isolated", action="store_true")
    args = parser.parse_args()
    source, folder = args.source.resolve(), args.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    quiet = ["--quiet", "--disable-pip-version-check"]
    build = [] if args.isolated else ["--no-build-isolation"]
    run(sys.executable, "-m", "pip", "wheel", *quiet, *build, "--no-deps", "--wheel-dir", folder, source)
    wheels = list(folder.glob("weft-*.whl"))
    if len(wheels) != 1:
        sys.exit(f"not one wheel but {wheels}")

    venv.create(folder / "venv", with_pip=True, clear=True)
    python = folder / "venv/bin/python"
    run(python, "-m", "pip", "install", *quiet, wheels[0])
    # From a folder of its own, so that what runs is what was installed.
    run(
        python, "-c", "import weft, sys; print(weft.__version__, weft.__file__); sys.exit('venv' not in weft.__file__)",
        cwd=folder,
    )
    run(python, source / "examples/03_ranks.py", cwd=folder)
    run(python, "-c", "import pathlib, weft; here = pathlib.Path(weft.__file__).parent; "
        "assert (here / 'py.typed').exists() and (here / '_core.pyi').exists()", cwd=folder)


if __name__ == "__main__":
    main()
