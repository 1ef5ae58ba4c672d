# A thin door to CMake's presets; each target first installs what is missing (tools/setup.sh).
#   make build   the library, the command build/release/weft, examples
#   make demo    packed documents on four ranks, drawn and checked
#   make test    shows that Weft is right on this machine: unit, law, schedules, command, Python, pages
#   make test-all   make test, make docs and the rest: long forms, installs, planted faults, MPI, sanitizers, fuzzers, and CUDA
#                where there is a compiler (without a GPU as far as PTX)
#   make fuzz    each fuzzer for SECONDS=1800, one after another
#   make soak    four hours of everything at once, and the long forms of some tests: faults and failing ranks by the hundred
#   make mutants   small faults in the sources, one at a time: which of them the tests notice (docs/trust.md)
#   make wheels  what pip installs, into dist/ (tools/wheels.py); CUDA=1: with kernels for GPUs
#   make bench   timings, beside torch; also in build/release/bench.json
#   make pictures   the pictures of the docs and docs/support.md, made anew
#   make docs    the documentation as a site, in build/docs/html
#   make format  clang-format, and what ruff can mend
#   make lint    style and static checks (tools/lint.sh); make lint-all: clang-tidy on every file
#   make test-release, test-asan (and fuzzers), test-tsan, test-cuda: all tests of one build
#   make test-avx2   the AVX2 kernels by emulation, on a machine that is not x86_64; not part of make test-all
.NOTPARALLEL:
.PHONY: build demo pictures docs test test-all test-long test-release test-asan test-tsan test-cuda test-avx2 fuzz soak mutants wheels bench format lint lint-all clean

JOBS := $(shell nproc 2>/dev/null || echo 2)
NVCC := $(or $(shell command -v nvcc 2>/dev/null),$(wildcard $(CUDA_HOME)/bin/nvcc))
export CUDACXX ?= $(NVCC)
GPU := $(if $(NVCC),$(shell nvidia-smi -L 2>/dev/null | head -n 1))
CTEST := ctest -j$(JOBS) --output-on-failure --no-tests=error --no-label-summary
SOURCES = $(shell git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
# $(call built,preset)
built = cmake --preset $(1) && cmake --build build/$(1)

build:
	tools/setup.sh build mpi
	$(call built,release)

# A build of its own without optimisation: half the time of the other, and the demo computes for a second.
demo:
	tools/setup.sh build
	$(call built,demo) --target weft_command
	tools/demo.sh build/demo/weft

pictures:
	tools/setup.sh build
	$(call built,release) --target weft_command
	tools/pictures.sh build/release/weft
	tools/support.py build/release/weft > build/support.md && mv build/support.md docs/support.md

docs:
	tools/setup.sh build test run docs
	$(call built,release) --target weft_python weft_stub
	.venv/bin/python tools/docs/site.py

# What only runs (torch, a browser) is installed while the compiler is at work.
test:
	tools/setup.sh build test
	tools/setup.sh run & setup=$$!; ($(call built,release)); built=$$?; wait $$setup && exit $$built
	cmake --preset release > build/configured.log || { cat build/configured.log; exit 1; }
	$(CTEST) --test-dir build/release -LE 'long|soak'

# What make test leaves out. All builds first, then one ctest over all of them: long tests of one build run beside those
# of another, and there is one verdict at the end.
test-all: test docs test-long

# SKIP: tests that are left out, a regular expression.
test-long:
	tools/setup.sh build mpi test run full
	$(call built,release)
	$(call built,asan)
	$(call built,tsan)
ifneq ($(GPU),)
	$(call built,cuda)
else ifneq ($(NVCC),)
	cmake --preset cuda -B build/cuda-ptx -DCMAKE_CUDA_ARCHITECTURES=90a-virtual && cmake --build build/cuda-ptx
endif
	parts="release asan tsan $(if $(GPU),cuda)"; \
	echo "subdirs($$parts)" > build/CTestTestfile.cmake
	$(CTEST) --test-dir build -L long -LE soak $(if $(SKIP),-E '$(SKIP)')

test-release test-asan test-tsan test-cuda: test-%:
	tools/setup.sh build mpi test run full
	$(call built,$*)
	$(CTEST) --test-dir build/$* -LE soak

fuzz:
	tools/setup.sh build test run full
	$(call built,asan)
	set -e; for f in build/asan/tests/fuzz_*; do if [ -x "$$f" ] && [ -f "$$f" ]; then \
	  WEFT_FUZZ_SECONDS=$(or $(SECONDS),1800) tests/fuzz/run.sh "$$f"; fi; done

soak:
	tools/setup.sh build mpi test run
	$(call built,release)
	$(CTEST) --test-dir build/release -L soak

mutants:
	tools/setup.sh build test run
	cmake --preset mutants && cmake --build --preset mutants
	python3 tools/mutate/mutate.py --jobs $(JOBS)

test-avx2:
ifeq ($(shell uname -m),x86_64)
	@echo "This machine is x86_64: make test runs the AVX2 kernels as they are."
else
	tools/setup.sh build avx2
	$(call built,avx2)
	$(CTEST) --test-dir build/avx2
endif

wheels:
	tools/setup.sh build wheels
	tools/wheels.py $(if $(CUDA),--cuda)

bench:
	tools/setup.sh build mpi bench peer
	$(call built,release) --target weft_command bench_programs
	build/release/weft bench --peer ".venv/bin/python bench/torch_peer.py" --json build/release/bench.json
	set -e; for b in build/release/bench/*; do if [ -f "$$b" ] && [ -x "$$b" ]; then echo "== $$b"; "$$b"; fi; done
	set -e; for b in build/release/bench/mpi/*; do if [ -x "$$b" ]; then echo "== $$b"; tools/mpirun.sh -np 2 "$$b"; fi; done

format:
	tools/setup.sh build test run lint
	clang-format-19 -i $(SOURCES)
	.venv/bin/ruff check --fix python examples bench tools tests

lint:
	tools/setup.sh build mpi test run bench lint
	tools/lint.sh

lint-all:
	tools/setup.sh build mpi test run bench lint
	tools/lint.sh --all

clean:
	rm -rf build
