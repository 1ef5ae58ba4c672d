#!/usr/bin/env python3
"""Builds the documentation as a site:   tools/docs/site.py [--build build/release] [--out build/docs]

README.md is the front page, and its table "Read on" the order of the others. To these come docs/notes/, the changelog, and
a reference of every public name of include/weft/*.h and of the Python package in the build folder. Pages are written to
OUT/pages, with links between files of the repository turned into links of the site: headers lead to the reference, other
files to a page with their text. Sphinx makes OUT/html of them. Exit status 1: a warning of Sphinx, a public name without a
doc comment of a full sentence, or one that the site does not have.
"""
import argparse
import html
import os
import pathlib
import re
import shutil
import subprocess
import sys

import cpp_reference
import python_reference
from prose import prose

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE.parent.parent
LANGUAGES = {".h": "cpp", ".cpp": "cpp", ".cu": "cpp", ".cuh": "cpp", ".py": "python", ".sh": "bash", ".json": "json"}
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Pages:
    """The pages of the site, as Markdown in a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.files = {}  # file of the repository -> page
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def write(self, page, text):
        path = self.folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def page_of(self, file):
        """The page that shows a file of the repository; it is made if there is none."""
        if file not in self.files:
            self.files[file] = page = f"source/{file}.md"
            path = SOURCE / file
            if path.is_dir():
                text = "\n".join(f"- `{p.name}`" for p in sorted(path.iterdir()))
            else:
                text = f"````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}\n````"
            self.write(page, f"---\norphan: true\nnosearch: true\n---\n\n# {file}\n\n{text}\n")
        return self.files[file]

    def add(self, file, tail=""):
        """A page of the repository, its links made to fit."""
        page = pathlib.PurePosixPath(self.files[file])

        def moved(match):
            target, _, anchor = match.group(1).partition("#")
            if not target or re.match(r"[a-z]+:", target):
                return match.group(0)
            to = os.path.normpath(os.path.join(os.path.dirname(file), target))
            if not (SOURCE / to).exists():
                raise SystemExit(f"{file}: the link {target} leads nowhere")
            if to.endswith(".svg"):
                new = to.removeprefix("docs/")
                (self.folder / new).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(SOURCE / to, self.folder / new)
            else:
                new = self.page_of(to)
            return f"]({os.path.relpath(new, page.parent)}{'#' + anchor if anchor else ''})"

        text, out, last = (SOURCE / file).read_text(encoding="utf-8"), "", 0
        for code in CODE.finditer(text):
            # A link's own text may hold code: only what lies between pieces of code is looked at.
            out += LINK.sub(moved, text[last:code.start()]) + code.group(0)
            last = code.end()
        self.write(page, out + LINK.sub(moved, text[last:]) + tail)


def contents(readme):
    """Sections of the README's table "Read on": [(title, [(page title, file)])], each file where it comes first."""
    sections, seen = [], set()
    for title, cell in re.findall(r"^\| \*\*(.+?)\*\* \| (.*) \|$", readme, flags=re.MULTILINE):
        links = [(text, file) for text, file in re.findall(r"\[([^\]]+)\]\(([^)#]+\.md)\)", cell)]
        sections.append((title, [(t, f) for t, f in links if not (f in seen or seen.add(f))]))
    return sections


def toctree(title, entries):
    lines = "\n".join(f"{text} <{page.removesuffix('.md')}>" for text, page in entries)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{lines}\n```\n"


def write_pages(pages, cpp, python):
    """Writes all pages for Sphinx."""
    sections = contents((SOURCE / "README.md").read_text(encoding="utf-8"))
    files = sorted((SOURCE / "docs/notes").glob("*.md"))
    notes = [(p.stem.replace("-", " ").capitalize(), f"docs/notes/{p.name}") for p in files]
    sections.append(("Notes", [*notes, ("Changelog", "CHANGELOG.md")]))
    pages.files = {file: file.removeprefix("docs/") for _, entries in sections for _, file in entries}
    pages.files |= {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
    headers = {}
    for name in cpp:
        headers.setdefault(name.header, []).append(name)
    pages.files |= {f"include/weft/{h}": f"reference/cpp/{h.removesuffix('.h')}.md" for h in headers}

    tables = {"Python": [], "C++": []}  # (title, page, what it is about)
    for name, (module, found) in python.items():
        page = f"reference/python/{name}.md"
        pages.write(page, python_reference.page(name, module, found))
        tables["Python"].append((name, page, python_reference.text_of(module)))
    for header, found in sorted(headers.items()):
        page, text = pages.files[f"include/weft/{header}"], pathlib.Path(found[0].path).read_text(encoding="utf-8")
        pages.write(page, cpp_reference.page(header, text, found))
        tables["C++"].append((f"weft/{header}", page, cpp_reference.about(text)))
    indexes = []
    for title, entries in tables.items():
        folder = entries[0][1].rpartition("/")[0]
        indexes.append((title, f"{folder}/index.md"))
        inner = [(text, page.rpartition("/")[2]) for text, page, _ in entries]
        sentences = [prose(first_sentence(about)) for _, _, about in entries]
        listed = "\n".join(f"- [{text}]({page}): {sentence}" for (text, page), sentence in zip(inner, sentences))
        pages.write(indexes[-1][1], f"# {title} reference\n\nEvery public name.\n\n{listed}\n{toctree(title, inner)}")

    trees = [toctree(title, [(text, pages.files[file]) for text, file in entries]) for title, entries in sections]
    trees.insert(-1, toctree("Reference", indexes))
    pages.add("README.md", tail="".join(trees))
    for _, entries in sections:
        for _, file in entries:
            pages.add(file)


def first_sentence(text):
    return re.split(r"(?<=\.)\s", text.strip())[0].replace("\n", " ")


def is_sentence(doc):
    """Does the first paragraph begin like a sentence and end like one?"""
    first = doc.strip().split("\n\n")[0].rstrip()
    return bool(re.match(r"[A-Z0-9`\"\[(±]", first)) and first.endswith((".", ":", ".)"))


def faults_of(cpp, python, site):
    """Public names without a sentence, and names that are nowhere on the site."""
    for name in cpp:
        if not is_sentence(name.comment):
            yield f"include/weft/{name.header}:{name.first}: {name.name} needs a comment of a full sentence above it"
        page = (site / f"reference/cpp/{name.header.removesuffix('.h')}.html").read_text(encoding="utf-8")
        if f'<span class="pre">{html.escape(name.name)}</span>' not in page:
            yield f"the page of weft/{name.header} does not have {name.name}"
    for module, (_, found) in python.items():
        page = (site / f"reference/python/{module}.html").read_text(encoding="utf-8")
        for name in found:
            if not is_sentence(name.doc) and (name.kind != "attribute" or "." not in name.name):
                yield f"{module}.{name.name} needs a doc string of a full sentence"
            if re.sub(r"^.*\.", "", name.name) not in page:
                yield f"the page of {module} does not have {name.name}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=SOURCE / "build/release")
    parser.add_argument("--out", type=pathlib.Path, default=SOURCE / "build/docs")
    args = parser.parse_args()
    if not (args.build / "python/weft/_core.pyi").exists():
        sys.exit(f"no Python package in {args.build}/python; make docs builds it")

    sys.path.insert(0, str(args.build / "python"))
    __import__("weft")
    package = python_reference.load(args.build / "python")
    python = {name: (module, python_reference.names(module)) for name, module in python_reference.modules(package).items()}
    cpp = cpp_reference.names(SOURCE, [SOURCE / "include", args.build / "include"])
    write_pages(Pages(args.out / "pages"), cpp, python)

    site = args.out / "html"
    shutil.rmtree(site, ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", HERE, "-b", "html",
                           "-d", args.out / "doctrees", args.out / "pages", site])
    faults = list(faults_of(cpp, python, site))
    print("\n".join(faults))
    names = len(cpp) + sum(len(found) for _, found in python.values())
    print(f"{site}/index.html: {names} public names, {len(faults)} faults")
    return 1 if made.returncode or faults else 0


if __name__ == "__main__":
    sys.exit(main())
