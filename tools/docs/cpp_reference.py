"""The public names of include/weft/*.h with their comments, and a page of Markdown for each header.

libclang finds the declarations of namespace weft; code and comments are the header's own text. The comment of a name is
the lines above its declaration. Functions, aliases and constants that follow one another without an empty line share the
comment of the first, unless they have their own. Private members and bodies of functions are left out.
"""
import dataclasses
import pathlib
import re
import subprocess

import clang.cindex
from clang.cindex import AccessSpecifier, CursorKind
from prose import prose

TYPES = {CursorKind.STRUCT_DECL, CursorKind.CLASS_DECL, CursorKind.CLASS_TEMPLATE}
FUNCTIONS = {CursorKind.FUNCTION_DECL, CursorKind.FUNCTION_TEMPLATE}
OTHERS = {CursorKind.ENUM_DECL, CursorKind.TYPE_ALIAS_DECL, CursorKind.TYPE_ALIAS_TEMPLATE_DECL, CursorKind.VAR_DECL,
          CursorKind.CLASS_TEMPLATE_PARTIAL_SPECIALIZATION,
          CursorKind.UNEXPOSED_DECL}  # templates of variables
LINE_COMMENT = re.compile(r"^\s*// ?(.*)$")


@dataclasses.dataclass
class Name:
    """A declaration of namespace weft: where it is, what it looks like and what its comment says."""
    name: str
    path: str
    header: str
    first: int
    last: int
    is_type: bool
    code: str
    comment: str


def parse(source, include_dirs):
    """The translation unit of every public header."""
    headers = sorted((source / "include/weft").glob("*.h"))
    text = "".join(f'#include "weft/{h.name}"\n' for h in headers)
    builtin = subprocess.run(["c++", "-print-file-name=include"], capture_output=True, text=True, check=True).stdout.strip()
    args = ["-x", "c++", "-std=c++20", "-isystem", builtin, *(f"-I{d}" for d in include_dirs)]
    unit = clang.cindex.Index.create().parse("all.cpp", args=args, unsaved_files=[("all.cpp", text)])
    errors = [str(d) for d in unit.diagnostics if d.severity >= clang.cindex.Diagnostic.Error]
    if errors:
        raise SystemExit("the headers do not parse:\n" + "\n".join(errors))
    return unit


def comment_above(lines, line):
    """The comment that ends right above a line (counted from 1)."""
    above = []
    for text in reversed(lines[:line - 1]):
        match = LINE_COMMENT.match(text)
        if not match:
            break
        above.insert(0, match.group(1))
    return "\n".join(above)


def first_line(cursor, lines):
    """Where the declaration begins; libclang leaves out `template <...>` before variables."""
    line = cursor.extent.start.line
    return line - 1 if cursor.kind == CursorKind.UNEXPOSED_DECL and lines[line - 2].startswith("template") else line


def body_of(cursor):
    """Where the body of a function begins, as (line, column); None without one."""
    for child in cursor.get_children():
        if child.kind == CursorKind.COMPOUND_STMT:
            return child.extent.start.line, child.extent.start.column
    return None


def without_bodies(cursor, lines):
    """The declaration's text without private members and without bodies of functions of more than a line."""
    first, last = first_line(cursor, lines), cursor.extent.end.line
    text = list(lines[first - 1:last])
    drop = set()
    members = [cursor] if cursor.kind in FUNCTIONS else list(cursor.get_children())
    for member in members:
        body = body_of(member)
        if body and member.extent.end.line > member.extent.start.line:
            line, column = body[0] - first, body[1] - 1
            text[line] = text[line][:column].rstrip() + ";"
            drop |= set(range(line + 1, member.extent.end.line - first + 1))
    hidden_from = None
    for member in members:
        if member.kind == CursorKind.CXX_ACCESS_SPEC_DECL:
            line = member.extent.start.line - first
            if hidden_from is not None:
                drop |= set(range(hidden_from, line))
            hidden_from = line if member.access_specifier == AccessSpecifier.PRIVATE else None
    if hidden_from is not None:
        drop |= set(range(hidden_from, last - first))
    kept = [line for i, line in enumerate(text) if i not in drop]
    code = "\n".join(kept).replace("WEFT_API ", "").replace("WEFT_HD ", "")
    return re.sub(r"\n\s*\n(\s*};)$", r"\n\1", code)


def names(source, include_dirs):
    """Every public name, in the order of the headers."""
    found, texts = [], {}

    def visit(scope):
        for cursor in scope.get_children():
            if cursor.kind == CursorKind.NAMESPACE and cursor.spelling == "weft":
                visit(cursor)
            elif is_public(cursor, scope):
                path = pathlib.Path(cursor.location.file.name)
                lines = texts.setdefault(path, path.read_text(encoding="utf-8").splitlines())
                first, last = first_line(cursor, lines), cursor.extent.end.line
                comment = comment_above(lines, first)
                before = found[-1] if found else None
                if any((n.header, n.first) == (path.name, first) for n in found):
                    continue  # an instance of a template
                if not comment and before and (before.header, before.last + 1) == (path.name, first) and not before.is_type:
                    comment = before.comment
                found.append(Name(cursor.spelling, str(path), path.name, first, last, cursor.kind in TYPES,
                                  without_bodies(cursor, lines), comment))

    visit(parse(source, include_dirs).cursor)
    return found


def is_public(cursor, scope):
    """Is it a name that namespace weft gives to users? Types that are only declared are not."""
    if scope.spelling != "weft" or cursor.kind not in TYPES | FUNCTIONS | OTHERS or not cursor.spelling:
        return False
    in_weft = pathlib.Path(cursor.location.file.name).parent.name == "weft"
    return in_weft and (cursor.kind not in TYPES or cursor.is_definition())


def about(text):
    """The comment at the top of a header."""
    lines = []
    for line in text.splitlines():
        match = LINE_COMMENT.match(line)
        if not match:
            break
        lines.append(match.group(1))
    return "\n".join(lines)


def page(header, text, of_header):
    """A page: the comment at the top of the header, then a section for each name; overloads share one."""
    out = [f"# weft/{header}", "", "```cpp", f"#include <weft/{header}>", "```", "", markdown(about(text)), ""]
    sections = {}
    for name in of_header:
        sections.setdefault(name.name, []).append(name)
    for title, parts in sections.items():
        out += [f"## `{title}`", ""]
        for part in parts:
            out += [markdown(part.comment), "", "```cpp", part.code, "```", ""]
    return "\n".join(out)


def markdown(comment):
    """A comment as Markdown: lines that are indented, and go on no list, are code."""
    out, in_list, in_code = [], False, False
    for line in comment.splitlines():
        indented = line.startswith("  ") and not in_list
        if indented != in_code:
            out += ["", "```text"] if indented else ["```", ""]
            in_code = indented
        if not line.startswith("  "):
            in_list = line.startswith("- ")
        out.append(line if indented else prose(line))
    return "\n".join(out + ["```"] * in_code)
