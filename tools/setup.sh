#!/usr/bin/env bash
# Installs what is missing, and nothing when nothing is.
#   tools/setup.sh build            what `make demo` needs
#   tools/setup.sh build mpi        ... `make build`
#   tools/setup.sh build test       ... to build the tests (also makes .venv)
#   tools/setup.sh build test run   ... `make test`
#   tools/setup.sh build mpi test run full ... `make test-all`
#   tools/setup.sh build wheels     ... `make wheels`
#   tools/setup.sh build mpi bench peer ... `make bench` (also makes .venv)
#   tools/setup.sh build avx2       ... `make test-avx2` on a machine that is not x86_64
#   tools/setup.sh build test run lint ... `make lint`
#   tools/setup.sh build test run docs ... `make docs`
#   groups: build mpi test run full wheels bench peer avx2 lint docs   (tools/packages.txt says which package is in which)
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- build
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

wanted=""
for group in "$@"; do
  case $group in
    build | mpi | test | run | full | wheels | bench | peer | avx2 | lint | docs) ;;
    *) die "unknown group '$group'; groups: build mpi test run full wheels bench peer avx2 lint docs" ;;
  esac
  while read -r package in _; do
    if [ "$in" = "$group" ]; then wanted="$wanted $package"; fi
  done < tools/packages.txt
done
groups=" $* "
asked() { case "$groups" in *" $1 "*) return 0 ;; *) return 1 ;; esac; }

if command -v apt-get > /dev/null && command -v dpkg-query > /dev/null; then
  # One question for all packages; those it does not know are missing.
  # shellcheck disable=SC2086  # a list of words
  installed=" $(dpkg-query -W -f '${db:Status-Status}:${Package} ' $wanted 2> /dev/null || true)"
  missing=""
  for package in $wanted; do
    case "$installed$missing " in *" installed:$package "* | *" $package "*) ;; *) missing="$missing $package" ;; esac
  done
  if [ -n "$missing" ]; then
    as_root=""
    if [ "$(id -u)" -ne 0 ]; then
      command -v sudo > /dev/null || die "not root and no sudo; ask for these Debian packages:$missing"
      as_root="sudo"
    fi
    echo "setup: installing$missing"
    # Wait for another apt-get instead of failing.
    apt="$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0"
    log=$(mktemp)
    # shellcheck disable=SC2086
    { $apt update && $apt install -y --no-install-recommends $missing; } > "$log" 2>&1 || {
      tail -20 "$log" >&2
      die "apt-get failed (whole log: $log); these Debian packages are needed:$missing"
    }
    rm -f "$log"
  fi
else
  tools="c++ cmake ninja"
  if asked test; then tools="$tools python3"; fi
  if asked full; then tools="$tools clang++-19"; fi
  if asked peer; then tools="$tools python3"; fi
  if asked avx2; then tools="$tools x86_64-linux-gnu-g++ qemu-x86_64"; fi
  if asked lint; then tools="$tools git clang-format-19 clang-tidy-19"; fi
  absent=""
  for tool in $tools; do command -v "$tool" > /dev/null || absent="$absent $tool"; done
  echo "setup: no apt-get here; needed, by their Debian names:$wanted"
  [ -z "$absent" ] || die "not found:$absent"
fi

# pip_install STAMP FILE [OPTION]: the Python packages of FILE into .venv, unless the stamp says that they are there. The
# stamp is written last, so what was cut short is done again.
pip_install() {
  want=$(sha256sum "$2")
  if [ "$(cat ".venv/$1" 2> /dev/null)" = "$want" ]; then return; fi
  echo "setup: installing $2 into .venv"
  # uv takes less than half of pip's time, but knows nothing of pip's settings (a mirror, certificates): then pip does it, as
  # it installs uv itself. Nothing is compiled before it is imported: of torch and its like tests use a small part.
  if ! [ -x .venv/bin/uv ] ||
    ! .venv/bin/uv pip install --quiet --cache-dir .venv/cache --python .venv/bin/python "${@:3}" --requirement "$2" 2> /dev/null; then
    if [ -x .venv/bin/uv ]; then echo "setup: uv could not install $2, so pip does it"; fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "${@:3}" --requirement "$2"
  fi
  rm -rf .venv/cache
  printf '%s\n' "$want" > ".venv/$1"
}

# One at a time: make test starts this in the background, where an interrupt does not reach it.
if command -v flock > /dev/null; then
  mkdir -p build
  exec 9> build/setup.lock
  flock 9
fi

# .venv: what the Python module is built with and, in group `run`, everything that it is tested and compared with. torch is
# the large one: PyPI's build for aarch64 is for CPUs alone (100 MB to fetch), the one for x86_64 (900 MB) is linked with gigabytes
# of CUDA's libraries, which tools/cuda_stand_ins.py replaces on a machine without a GPU.
if asked test || asked run || asked peer; then
  if ! [ -x .venv/bin/python ] ||
    [ "$(cat .venv/requirements.sha256 2> /dev/null)" != "$(sha256sum tools/requirements.txt)" ]; then
    python3 -m venv --clear .venv
  fi
  pip_install requirements.sha256 tools/requirements.txt
fi
if asked full || asked lint || asked docs; then
  [ -x .venv/bin/python ] || die "groups full, lint and docs need .venv: add the group test"
fi
if asked run || asked peer; then
  if [ "$(uname -m)" = x86_64 ] && ! nvidia-smi -L > /dev/null 2>&1; then
    # All that torch asks for is in the lists, but for CUDA.
    pip_install requirements-python.sha256 tools/requirements-python.txt --no-deps
    pip_install requirements-cuda.sha256 tools/requirements-cuda.txt --no-deps
    want=$(cat tools/requirements-python.txt tools/cuda_stand_ins.py | sha256sum)
    if [ "$(cat .venv/cuda-stand-ins.sha256 2> /dev/null)" != "$want" ]; then
      .venv/bin/python tools/cuda_stand_ins.py
      printf '%s\n' "$want" > .venv/cuda-stand-ins.sha256
    fi
  else
    pip_install requirements-python.sha256 tools/requirements-python.txt
  fi
fi
if asked full; then pip_install requirements-trl.sha256 tools/requirements-trl.txt --no-deps; fi
if asked lint; then pip_install requirements-lint.sha256 tools/requirements-lint.txt; fi
if asked docs; then pip_install requirements-docs.sha256 tools/requirements-docs.txt; fi
