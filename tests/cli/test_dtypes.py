"""Dtypes that have a name and no arithmetic are refused by every verb, before anything is computed or written."""

import pytest

WAYS = [
    "verify --docs 40,5",
    "verify --docs 40,5 --schedule all",
    "verify --docs 40,5 --schedule ring --ranks 2",
    "verify --docs 40,5 --kernel cpu",
    "verify --matrix quick",
    "verify --set te-grid",
    "verify --accuracy quick",
    "bench --docs 64",
    "bench --docs 64 --schedule ring --ranks 2",
    "bench --cases dense64",
    "bench --calibrate here.json",
    "bench --kernel cuda",
    "explain --docs 64",
    "explain --docs 64 --html page.html",
    "simulate --docs 64",
]


@pytest.mark.parametrize("dtype", ["f8_e4m3", "f8_e5m2"])
@pytest.mark.parametrize("way", WAYS)
def test_dtypes_of_eight_bits_are_refused(weft, tmp_path, way, dtype):
    result = weft.refused(*way.split(), "--dtype", dtype, says=[])
    assert result.err == f"weft: dtype {dtype} needs a scale for every block, which no kernel here keeps; use bf16\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
def test_the_others_are_taken(weft, dtype):
    weft.ok("verify", "--docs", "40,5", "--dtype", dtype)
