"""tools/sbom.py: what wheels are made of, the same bytes for the same wheels."""

import hashlib
import json
import os
import pathlib
import subprocess
import sys

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools/sbom.py"


def made(folder, *flags):
    subprocess.run([sys.executable, TOOL, folder, *flags], check=True, env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"})
    (file,) = folder.glob("*.cdx.json")
    return file.read_bytes()


def test_wheels_and_what_is_in_them_are_listed(tmp_path):
    (tmp_path / "weft_attention-0.1.0-cp311.whl").write_bytes(b"a wheel")
    (tmp_path / "note.txt").write_text("no part of it")
    first = made(tmp_path)
    assert made(tmp_path) == first
    bom = json.loads(first)
    assert bom["bomFormat"] == "CycloneDX" and bom["serialNumber"].startswith("urn:uuid:")
    assert bom["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    parts = {part["name"]: part for part in bom["components"]}
    assert {"CLI11", "fmt", "nlohmann-json", "nanobind", "numpy"} < set(parts) and "note.txt" not in parts
    wheel = parts["weft_attention-0.1.0-cp311.whl"]
    assert wheel["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"a wheel").hexdigest()}]
    refs = [part["bom-ref"] for part in bom["components"]]
    assert len(set(refs)) == len(refs) and set(bom["dependencies"][0]["dependsOn"]) <= set(refs)
    for name in ("CLI11", "fmt", "nlohmann-json"):  # the command is built with them here
        assert parts[name]["version"].count(".") == 2, parts[name]
    (tmp_path / "weft_attention-0.1.0-cp311.whl").write_bytes(b"another")
    assert json.loads(made(tmp_path))["serialNumber"] != bom["serialNumber"]
