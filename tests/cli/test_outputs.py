"""Files that the command writes: checked before the work, replaced as a whole, never lost."""

import itertools
import json
import os
import resource
import subprocess
import threading
import time

import pytest

EXPLAIN = ["explain", "--docs", "8,5,11", "--ranks", "2"]
SIMULATE = ["simulate", "--docs", "64,32", "--ranks", "2", "--schedule", "ring"]
# Command, then the flag of its file.
OUTPUTS = [
    (EXPLAIN, "--html"),
    (EXPLAIN, "--svg"),
    (EXPLAIN, "--json"),
    (["explain", "--support"], "--json"),
    (["explain", "--docs", "16", "--micro", "2", "--ranks", "2"], "--json"),
    (SIMULATE, "--html"),
    (SIMULATE, "--json"),
    (["verify", "--docs", "8,5"], "--json"),
    (["verify", "--random", "3"], "--json"),
    (["bench", "--docs", "16", "--heads", "1", "--dim", "8", "--repeat", "1"], "--json"),
    (["bench", "--docs", "16", "--heads", "1", "--dim", "8", "--repeat", "1", "--schedule", "ring", "--ranks", "2"], "--json"),
]
NAMES = [f"{command[0]} {command[1]} {flag}" for command, flag in OUTPUTS]


def files(folder):
    return sorted(path.name for path in folder.iterdir())


WRONG = ["explain --layout nope", "explain --ranks 0", "explain --docs-k x"]


@pytest.mark.parametrize("command, flag", [*itertools.product(WRONG, ["--html", "--svg", "--json"]), ("simulate --ranks 8,0", "--html")])
def test_bad_arguments_leave_the_old_file(weft, tmp_path, command, flag):
    (tmp_path / "old").write_text("old")
    for name in ("old", "new"):
        assert weft(*command.split(), "--docs", "8,5", flag, name).code == 2
        assert (tmp_path / "old").read_text() == "old" and files(tmp_path) == ["old"]


@pytest.mark.parametrize("command, flag", OUTPUTS, ids=NAMES)
def test_a_file_is_replaced_as_a_whole(weft, tmp_path, command, flag):
    (tmp_path / "file").write_text("x" * 1_000_000)
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    assert weft(*command, flag, "link").code == 0
    text = (tmp_path / "file").read_text()
    assert 0 < len(text) < 1_000_000 and "xxxxxx" not in text
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    (tmp_path / "later").symlink_to("made")
    assert weft(*command, flag, "later").code == 0 and files(tmp_path) == ["file", "later", "link", "made"]


@pytest.mark.parametrize("command, flag", OUTPUTS, ids=NAMES)
def test_a_full_disk_leaves_the_old_file(weft, tmp_path, command, flag):
    """A limit on the size of files, which fails in the middle of the text as a full disk does."""
    (tmp_path / "file").write_text("old")
    few = 10

    def limited():
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (few, few))

    done = subprocess.run([weft.command, *command, flag, "file"], capture_output=True, text=True, cwd=tmp_path,
                          preexec_fn=limited, timeout=120)
    assert done.returncode != 0 and flag in done.stderr and "cannot write 'file'" in done.stderr, done.stderr
    assert (tmp_path / "file").read_text() == "old" and files(tmp_path) == ["file"]


def test_a_kill_leaves_the_old_file_or_the_new_one(weft, tmp_path):
    """At any moment, from before the work until after it: no half page is ever under the name."""
    page = [weft.command, "explain", "--docs", "lognormal:count=200,median=300", "--ranks", "4", "--html", "file"]
    begin = time.monotonic()
    subprocess.run(page, cwd=tmp_path, capture_output=True, check=True)
    whole, seconds = (tmp_path / "file").read_bytes(), time.monotonic() - begin
    ends = set()
    for n in range(16):
        (tmp_path / "file").write_bytes(b"old")
        child = subprocess.Popen(page, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds * n / 12)
        child.kill()
        child.wait()
        ends.add((tmp_path / "file").read_bytes())
    assert ends <= {b"old", whole} and b"old" in ends


@pytest.mark.parametrize("command, flag", OUTPUTS, ids=NAMES)
@pytest.mark.parametrize("path", ["nowhere/file", ".", "file/below"])
def test_what_cannot_be_written_is_refused_before_the_work(weft, tmp_path, command, flag, path):
    (tmp_path / "file").write_text("old")
    weft.refused(*command, flag, path, says=[flag, path])
    assert files(tmp_path) == ["file"]


def test_calibration_is_refused_before_it_measures(weft, tmp_path):
    weft.refused("bench", "--calibrate", "nowhere/here.json", says=["nowhere/here.json"])


@pytest.mark.parametrize("first, second", [("x", "x"), ("x", "./x"), ("x", "sub/../x"), ("x", "link"), ("old", "hard"),
                                           ("old", "to_old")])
def test_two_outputs_are_two_files(weft, tmp_path, first, second):
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("x")
    (tmp_path / "old").write_text("old")
    (tmp_path / "to_old").symlink_to(tmp_path / "old")
    os.link(tmp_path / "old", tmp_path / "hard")
    before = files(tmp_path)
    for args in (EXPLAIN + ["--html", first, "--svg", second], SIMULATE + ["--json", first, "--html", second],
                 ["bench", "--calibrate", first, "--json", second]):
        weft.refused(*args, says=["one file", first, second])
    assert files(tmp_path) == before and (tmp_path / "old").read_text() == "old"


def test_special_files(weft, tmp_path):
    assert weft(*EXPLAIN, "--html", "/dev/null", "--svg", "/dev/null").code == 0
    out = weft("explain", "--docs", "8", "--view", "table", "--json", "/dev/stdout").out
    assert json.loads(out[out.index("{"):])["docs"] == [8]
    with open(tmp_path / "both", "w") as both:  # stdout is a file, which may not be replaced under it
        subprocess.run([weft.command, "explain", "--docs", "8", "--json", "/dev/stdout"], stdout=both, check=True)
    text = (tmp_path / "both").read_text()
    assert text.startswith("1 document") and json.loads(text[text.index("\n{"):])["docs"] == [8]
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    assert weft(*EXPLAIN, "--svg", "pipe").code == 0
    reader.join()
    assert "<svg" in read[0]
    full = weft(*EXPLAIN, "--json", "/dev/full")
    assert full.code != 0 and "/dev/full" in full.err


LITTLE = {resource.RLIMIT_AS: 3 << 30}


def test_too_many_chunks_are_refused_in_the_same_words(weft, tmp_path):
    said = set()
    for verb, *more in (["explain"], ["explain", "--html", "x"], ["explain", "--svg", "x"], ["simulate"], ["verify"],
                        ["verify", "--schedule", "ring"]):
        result = weft.refused(verb, "--docs", "2147483647", "--chunk", "1", "--ranks", "8", *more, says=[], limits=LITTLE)
        said.add(result.err)
    assert said == {"weft: 2147483647 tokens in chunks of 1 are too many slices to go through; use a larger chunk, or fewer "
                    "tokens: up to 16777216 chunks\n"}
    assert files(tmp_path) == []


@pytest.mark.parametrize("args", [["bench"], ["bench", "--pass", "forward"], ["bench", "--schedule", "ring", "--ranks", "2"],
                                  ["verify", "--schedule", "ring"]])
def test_what_does_not_fit_the_memory_is_refused_with_its_bytes(weft, args):
    result = weft.refused(*args, "--docs", "2147483647", "--heads", "8:2", "--dim", "128", limits=LITTLE,
                          says=[" TiB of memory, and there are 3.00 GiB; use fewer tokens"])
    assert "bad_alloc" not in result.err


def test_memory_that_runs_out_is_said_plainly(weft):
    result = weft("bench", "--docs", "19000", "--heads", "8", "--dim", "128", "--pass", "forward", "--window", "0,0",
                  limits={resource.RLIMIT_AS: 300 << 20})  # 297 of them are the tensors'
    assert result.code in (1, 2) and "out of memory" in result.err
    assert "internal" not in result.err and "bad_alloc" not in result.err


def test_escapes_in_json_files(weft, tmp_path):
    machine = {"levels": [{"bandwidth": 1e11}], "kernels": [{"flops": 1e14}]}
    (tmp_path / "m.json").write_text(json.dumps({**machine, "name": "Zürich 😀"}))
    assert "\\u" in (tmp_path / "m.json").read_text()
    result = weft.ok("simulate", "--docs", "64", "--machine", "m.json", "--schedule", "ring")
    assert result.out.startswith("Zürich 😀: "), result.err
    (tmp_path / "s.json").write_text('[{"\\u0071":[0,4],"k":[0,4]}]')
    assert weft("explain", "--docs", "4", "--slices", "s.json").code == 0
    for wrong in ("\\ud83d", "\\ud83dx", "\\ud83d\\u0041", "\\ude00", "\\u12", "\\u12g4", "\\u+123"):
        (tmp_path / "m.json").write_text('{"base": "h100-400g",\n"name": "' + wrong + '"}')
        weft.refused("simulate", "--docs", "64", "--machine", "m.json", says=["m.json: line 2: "])
