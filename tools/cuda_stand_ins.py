#!/usr/bin/env python3
"""Stand-ins for the large CUDA libraries that torch's build for x86_64 is linked with, for machines without a GPU.

PyPI has no build of torch for x86_64 without CUDA, and to fetch its libraries takes longer than all tests in Python. Without a
GPU torch calls nothing of them. So tools/setup.sh leaves them out, and this makes libraries of the same names, in which every
function that torch is linked with ends the program and says so.

    .venv/bin/python tools/cuda_stand_ins.py        in the site-packages of that Python
"""

import subprocess
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

# Library: its folder in the package nvidia, and how names of its functions begin; the longer beginnings first.
LIBRARIES = {
    "libcublasLt.so.12": ("cublas", "cublasLt"),
    "libcublas.so.12": ("cublas", "cublas"),
    "libcudnn.so.9": ("cudnn", "cudnn"),
    "libcufft.so.11": ("cufft", "cufft"),
    "libcurand.so.10": ("curand", "curand"),
    "libcusparseLt.so.0": ("cusparselt", "cusparseLt"),
    "libcusparse.so.12": ("cusparse", "cusparse"),
    "libnccl.so.2": ("nccl", "nccl"),
}
HEAD = """#include <stdio.h>
#include <stdlib.h>
static void left_out(const char* name) {
  fprintf(stderr, "%s: this Python was set up without a GPU and so without CUDA; remove .venv and set it up anew\\n", name);
  abort();
}
"""


def linked_functions(torch):
    """{library: {version: functions}} that torch's libraries do not define themselves."""
    found = {library: defaultdict(set) for library in LIBRARIES}
    for file in ("libtorch_cuda.so", "libtorch_python.so"):
        symbols = subprocess.run(["nm", "-D", "--undefined-only", torch / file], capture_output=True, text=True, check=True)
        for line in symbols.stdout.splitlines():
            name, _, version = line.split()[-1].partition("@")
            library = next((one for one, (_, begin) in LIBRARIES.items() if name.startswith(begin)), None)
            if library:
                found[library][version].add(name)
    return found


def build(path, versions):
    """A library of these functions, under the versions that torch asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = sorted(name for some in versions.values() for name in some)
    scripts = [f"{version} {{ global: {'; '.join(sorted(some))}; }};" for version, some in sorted(versions.items()) if version]
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stand_ins.c"), Path(folder, "versions")
        source.write_text(HEAD + "".join(f'void {name}(void) {{ left_out("{name}"); }}\n' for name in names))
        script.write_text("\n".join(scripts) or "{ global: *; };")
        subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", path, source, f"-Wl,-soname,{path.name}",
                        f"-Wl,--version-script={script}"], check=True)


def main():
    site = Path(sysconfig.get_paths()["platlib"])
    for library, versions in linked_functions(site / "torch" / "lib").items():
        build(site / "nvidia" / LIBRARIES[library][0] / "lib" / library, versions)


if __name__ == "__main__":
    main()
