"""Pages of the command under test ($WEFT), opened in Chromium ($CHROMIUM)."""

import os
import pathlib
import subprocess

import pytest
from playwright.sync_api import sync_playwright

LOCAL = ("file:", "data:", "about:")


@pytest.fixture(scope="session")
def chromium():
    with sync_playwright() as p:
        # As root, in a container, without a GPU: files and pipes are all it needs.
        browser = p.chromium.launch(executable_path=os.environ["CHROMIUM"], args=[
            "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-zygote"])
        yield browser
        browser.close()


@pytest.fixture
def weft(tmp_path):
    """Runs the command in an empty folder, layout zigzag if none is named: an error is an error here too."""
    command = pathlib.Path(os.environ["WEFT"]).resolve()

    def run(*args):
        if args[0] == "explain" and "--layout" not in args:
            args = (*args, "--layout", "zigzag")  # which the model of these tests knows
        done = subprocess.run([command, *(a if isinstance(a, bytes) else str(a) for a in args)], cwd=tmp_path,
                              capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    run.folder, run.command = tmp_path, command
    return run


@pytest.fixture
def show(chromium, weft):
    """Opens a file. Whatever the console says, and whatever is asked of a network, fails the test at its end."""
    opened, faults = [], []

    def open_file(path, **context):
        at = chromium.new_context(**{"viewport": {"width": 1300, "height": 900}, **context})
        opened.append(at)
        page = at.new_page()
        page.on("console", lambda m: faults.append(f"console: {m.text}"))
        page.on("pageerror", lambda e: faults.append(f"error: {e}"))
        page.on("request", lambda r: r.url.startswith(LOCAL) or faults.append(f"asked for {r.url}"))
        page.goto(pathlib.Path(path).resolve().as_uri())
        page.wait_for_function("window.weft !== undefined || !document.querySelector('#data')")
        return page

    def page_of(*args, context=None):
        weft("explain", *args, "--html", "page.html")
        return open_file(weft.folder / "page.html", **(context or {}))

    def everything_has_a_name(page):
        """All that takes the focus is called something."""
        unnamed = page.evaluate("""() => [...document.querySelectorAll('button, input, [tabindex], [role=img]')].filter((e) =>
            !(e.getAttribute('aria-label') || e.innerText || e.closest('label')?.innerText)).map((e) => e.outerHTML)""")
        assert unnamed == []

    def texts_are_apart(boxes, frame, slack=0):
        """Boxes are [left, top, right, bottom, ..]: inside the frame, and none over another."""
        for i, a in enumerate(boxes):
            assert a[0] >= frame[0] and a[1] >= frame[1] - slack and a[2] <= frame[2] and a[3] <= frame[3] + slack, (a, frame)
            for b in boxes[:i]:
                assert a[0] >= b[2] - 1 or b[0] >= a[2] - 1 or a[1] >= b[3] - 4 or b[1] >= a[3] - 4, (a, b)

    page_of.file = open_file
    page_of.everything_has_a_name, page_of.texts_are_apart = everything_has_a_name, texts_are_apart
    page_of.faults = faults
    yield page_of
    for at in opened:
        at.close()
    assert not faults
