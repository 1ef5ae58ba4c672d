"""weft.explain(..).save: a file is replaced as a whole, or stays as it was."""

import os
import resource
import signal

import pytest
import weft


@pytest.fixture
def small_files():
    """A limit on the size of files, which fails in the middle of a text as a full disk does."""
    old, kept = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, kept)


def explained():
    return weft.explain(weft.Packing([0, 8, 13, 24]), weft.Mask(causal=True), ranks=2)


@pytest.mark.parametrize("name", ["page.html", "picture.svg", "text.txt"])
def test_a_full_disk_leaves_the_old_file(tmp_path, name, small_files):
    (tmp_path / name).write_bytes(b"old")
    with pytest.raises(OSError):
        explained().save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"old" and os.listdir(tmp_path) == [name]


def test_the_file_behind_a_link_is_replaced(tmp_path):
    (tmp_path / "page.html").write_text("x" * 1_000_000)
    (tmp_path / "page.html").chmod(0o640)
    (tmp_path / "link.html").symlink_to("page.html")
    explained().save(str(tmp_path / "link.html"))
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link.html", "page.html"]
