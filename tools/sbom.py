#!/usr/bin/env python3
"""What the wheels in a folder are made of, as a CycloneDX file beside them.

    tools/sbom.py dist [--cuda]       by the Python that has built them: tools/wheels.py does

Versions are read where the compiler and the Python at hand have them. The same wheels give the same bytes.
"""
import argparse
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import uuid

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDES = [pathlib.Path(folder) for folder in ("/usr/include", "/usr/local/include")]

# What is compiled into the module, header by header: name, licence, file, how its version is written there.
HEADERS = [
    ("CLI11", "BSD-3-Clause", "CLI/Version.hpp", r'CLI11_VERSION "([0-9.]+)"'),
    ("fmt", "MIT", "fmt/core.h", r"FMT_VERSION (\d+)"),
    ("nlohmann-json", "MIT", "nlohmann/detail/abi_macros.hpp", r"NLOHMANN_JSON_VERSION_MAJOR (\d+).*?MINOR (\d+).*?PATCH (\d+)"),
]


def version_in(header, pattern):
    for folder in INCLUDES:
        if (folder / header).exists():
            found = re.search(pattern, (folder / header).read_text(errors="replace"), re.DOTALL)
            if found and len(found.groups()) == 1 and found[1].isdigit():  # fmt's 90100 is 9.1.0
                return ".".join(str(int(found[1]) // 10 ** power % 100) for power in (4, 2, 0))
            if found:
                return ".".join(found.groups())
    return None


def component(name, version, licence, purl):
    made = {"type": "library", "bom-ref": purl, "name": name, "licenses": [{"license": {"id": licence}}], "purl": purl}
    return {**made, "version": version} if version else made


def components(cuda):
    found = []
    for name, licence, header, pattern in HEADERS:
        version = version_in(header, pattern)
        found.append(component(name, version, licence, f"pkg:generic/{name.lower()}" + (f"@{version}" if version else "")))
    try:
        version = importlib.metadata.version("nanobind")
    except importlib.metadata.PackageNotFoundError:
        version = None
    found.append(component("nanobind", version, "BSD-3-Clause", "pkg:pypi/nanobind" + (f"@{version}" if version else "")))
    if cuda:
        toolkit = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "version.json"
        version = json.loads(toolkit.read_text())["cuda_cudart"]["version"] if toolkit.exists() else None
        made = component("cudart", version, "Apache-2.0", "pkg:generic/cudart" + (f"@{version}" if version else ""))
        found.append({**made, "licenses": [{"license": {"name": "NVIDIA CUDA Toolkit EULA"}}]})
    return found


def bom(folder, cuda):
    version = re.search(r"project\(weft VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
    parts = components(cuda)
    files = [{"type": "file", "bom-ref": f"file:{path.name}", "name": path.name,
              "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}]}
             for path in sorted(folder.iterdir()) if path.name.endswith((".whl", ".tar.gz"))]
    numpy = {"type": "library", "bom-ref": "pkg:pypi/numpy", "name": "numpy", "purl": "pkg:pypi/numpy", "scope": "required",
             "description": "not in the wheel: installed beside it, 1.22 or later"}
    own = f"pkg:pypi/weft-attention@{version}"
    made = {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {"component": {"type": "library", "bom-ref": own, "name": "weft-attention", "version": version, "purl": own,
                                   "licenses": [{"license": {"id": "Apache-2.0"}}]}},
        "components": [*parts, numpy, *files],
        "dependencies": [{"ref": own, "dependsOn": [part["bom-ref"] for part in (*parts, numpy)]}],
    }
    if "SOURCE_DATE_EPOCH" in os.environ:
        date = datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.timezone.utc)
        made["metadata"]["timestamp"] = date.strftime("%Y-%m-%dT%H:%M:%SZ")
    made["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(made, sort_keys=True))}"
    return version, made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--cuda", action="store_true", help="with CUDA's runtime, which those wheels hold")
    args = parser.parse_args()
    version, made = bom(args.folder, args.cuda)
    file = args.folder / f"weft_attention-{version}{'+cu13' if args.cuda else ''}.cdx.json"
    file.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
