"""Files that somebody else wrote: an error in seconds and in bounded memory, whatever they hold. docs/trust.md, Files."""

import json
import resource

import pytest

MIB = 1 << 20
LIMIT = 64 * MIB  # of slices and runs; a machine file: 1 MiB
SLICE = '{"q":[0,4],"k":[0,4]}'


def run(call, *args, memory=2 << 30, seconds=15, **says):
    """Seconds of the processor: what else the machine does is no matter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = call(*args, limits={resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: 60}, **says)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < seconds
    assert len(result.err) < 6000


def keys(count):
    return ",".join(f'"{i:x}":0' for i in range(count))


# What the file holds, and what the error says.
LISTS = {
    "too long": (" " * (LIMIT + MIB), "longer than 64 MiB"),
    "deep": ("[" * (8 * MIB), "too deep"),
    "deep objects": ('[{"q":' * MIB, "too deep"),
    "a number of digits alone": ("[" + "9" * (8 * MIB) + "]", "number overflow"),
    "a fraction without end": ("[0." + "1" * (8 * MIB) + "]", "not an object"),
    "many empty lists": ("[" + "[]," * (3 * MIB) + "[]]", "not an object"),
    "many empty objects": ("[" + "{}," * (3 * MIB) + "{}]", "is missing"),
    "many keys": ("[{" + keys(500_000) + "}]", "more than 16 keys"),
    "a long string": ('["' + "a" * (8 * MIB) + '"]', "not an object"),
    "keys that come twice": ('[{"q":[0,4],"k":[0,4],"q":[0,2]}]', 'key "q" comes twice'),
    "NaN": ('[{"q":[NaN,4],"k":[0,4]}]', "parse error"),
    "infinity": ('[{"q":[0,1e999],"k":[0,4]}]', "number overflow"),
    "past 64 bits": ('[{"q":[0,18446744073709551616],"k":[0,4]}]', "not a whole number"),
    "the edge of 64 bits": ('[{"q":[-9223372036854775808,4],"k":[0,4]}]', "not a whole number"),
    "a string for a number": ('[{"q":["0",4],"k":[0,4]}]', "not a whole number"),
    "cut off": (f"[{SLICE},", "unexpected end of input"),
    "no UTF-8": ('[{"\ud8ff":0}]', "parse error"),
    "zeros": ("\0" * 100, "parse error"),
    "nothing": ("", "parse error"),
}


# What runs say otherwise; None: it is about keys that runs do not have.
OF_RUNS = {
    "a fraction without end": "not a list of runs",
    "many empty lists": "lists for 2 ranks",
    "many empty objects": "not a list of runs",
    "a long string": "not a list of runs",
    "past 64 bits": None,
    "the edge of 64 bits": None,
    "a string for a number": None,
}


def refused(weft, folder, text, says, *flags):
    (folder / "f.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    run(weft.refused, "explain", "--docs", "8", *flags, says=[says])


@pytest.mark.parametrize("what", LISTS)
def test_slices(weft, tmp_path, what):
    refused(weft, tmp_path, *LISTS[what], "--slices", "f.json")


@pytest.mark.parametrize("what", [what for what in LISTS if OF_RUNS.get(what, "") is not None])
def test_runs(weft, tmp_path, what):
    text, says = LISTS[what]
    refused(weft, tmp_path, text, OF_RUNS.get(what, says), "--layout", "explicit", "--runs", "f.json", "--ranks", "2")


@pytest.mark.long
def test_a_million_slices_are_read(weft, tmp_path):
    rows = range(1_000_000)
    (tmp_path / "f.json").write_text("[" + ",".join(f'{{"q":[{i},{i + 1}],"k":[{i},{i + 1}]}}' for i in rows) + "]")
    run(weft.ok, "explain", "--docs", "1000000", "--slices", "f.json")


MACHINES = {
    "too long": (" " * (2 * MIB), "longer than 1 MiB"),
    "deep": ("[" * MIB, "deeper than 8"),
    "many members": ("{" + keys(60_000) + "}", "more than 64 members"),
    "many entries": ('{"kernels":[' + "{}," * 300_000 + "{}]}", "entries"),
    "digits": ('{"memory_bytes":' + "9" * 900_000 + "}", "is no value"),
    "NaN": ('{"memory_bytes":NaN}', "is no value"),
    "infinity": ('{"memory_bytes":Infinity}', "is no value"),
    "twice": ('{"name":"a","name":"b"}', "comes twice"),
    "a long name": ('{"name":"' + "a" * 100_000 + '"}', "be brief"),
    "for ever": ('{"levels":[{}],"kernels":[{"flops":1e-300}]}', "flops is 1e-300"),
    "at once": ('{"levels":[{"bandwidth":1e300}],"kernels":[{"flops":1}]}', "bandwidth is 1e+300"),
    "nothing": ("", "ends too early"),
}


@pytest.mark.parametrize("what", MACHINES)
def test_machines(weft, tmp_path, what):
    text, says = MACHINES[what]
    (tmp_path / "f.json").write_text(text)
    run(weft.refused, "simulate", "--docs", "64", "--ranks", "2", "--machine", "./f.json", memory=1 << 30, says=[says])


def check_page(path):
    page = path.read_text()
    data = page.split('id="data">')[1].split("</script>")[0]
    assert "\u2028" not in data and "<b>" not in data and page.count("</script>") == 2
    json.loads(data, parse_constant=lambda x: pytest.fail(f"{x} is no JSON"))


def test_a_machine_at_its_edges_makes_a_page(weft, tmp_path):
    """The slowest machine that is taken: its numbers are finite, and the page's data is JSON."""
    slow = {"name": "</script>\u2028'\"", "about": "<b>", "levels": [{"bandwidth": 1e-12, "latency": 1e12, "interference": 0.999}],
            "kernels": [{"pass": p, "flops": 1e-12, "tile_seconds": 1e12} for p in ("forward", "backward")]}
    (tmp_path / "f.json").write_text(json.dumps(slow, ensure_ascii=False))
    flags = ["--docs", "64", "--ranks", "2", "--machine", "./f.json", "--html", "page.html"]
    run(weft.ok, "explain", *flags, "--schedule", "ring", "--svg", "picture.svg")
    check_page(tmp_path / "page.html")
    picture = (tmp_path / "picture.svg").read_text()
    assert "<b>" not in picture and "</script>" not in picture
    run(weft.ok, "simulate", *flags, "--json", "out.json")
    check_page(tmp_path / "page.html")
    json.loads((tmp_path / "out.json").read_text(), parse_constant=lambda x: pytest.fail(f"{x} is no JSON"))
