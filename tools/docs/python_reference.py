"""The public names of the package weft with their signatures and doc strings, and a page of Markdown for each module.

griffe reads the package as it was built, with the stub of the compiled module: nothing that a module imports has to be
installed. Public are the names in __all__ of weft and of its modules; of classes also members without an underscore.
"""
import dataclasses
import inspect
import sys

import griffe
from prose import prose


@dataclasses.dataclass
class Name:
    """A name of a module, or Class.member: the code that introduces it and its doc string."""
    name: str
    kind: str  # class, function, attribute or module
    code: str
    doc: str


def load(folder):
    """The package below a folder, such as build/release/python."""
    loader = griffe.GriffeLoader(search_paths=[str(folder)], allow_inspection=False,
                                 extensions=griffe.load_extensions("unpack_typeddict"))
    package = loader.load("weft")
    loader.resolve_aliases(implicit=False, external=False)
    return package


def modules(package):
    """Modules that say what is public, by name: weft first."""
    inner = {f"weft.{name}": m for name, m in package.modules.items() if m.exports is not None and not name.startswith("_")}
    return {"weft": package, **dict(sorted(inner.items()))}


def target(module, name):
    """What a name of a module means: a function may share the name of the module that it is defined in."""
    found = module[name].final_target if module[name].is_alias else module[name]
    return found.members[name] if found.is_module and name in found.members else found


def signature(function, name):
    text = function.signature(return_type=True, name=name)
    if len(text) <= 110:
        return f"def {text}"
    head, _, rest = text.partition("(")
    inside, _, tail = rest.rpartition(")")
    depth, parts, part = 0, [], ""
    for c in inside:  # at the commas between parameters
        depth += (c in "([{") - (c in ")]}")
        part += c
        if c == "," and depth == 0:
            parts.append(part.strip())
            part = ""
    parts.append(part.strip() + ",")
    return f"def {head}(\n" + "".join(f"    {p}\n" for p in parts) + f"){tail}"


def text_of(thing):
    return inspect.cleandoc(thing.docstring.value) if thing.docstring else ""


def described(name, thing):
    if thing.is_class:
        bases = ", ".join(str(b) for b in thing.bases)
        code = f"class {name}({bases})" if bases else f"class {name}"
        init = thing.members.get("__init__")
        if init is not None and init.is_function:
            code += "\n\n" + signature(init, "__init__")
        return Name(name, "class", code, text_of(thing))
    if thing.is_function:
        return Name(name, "function", signature(thing, name), text_of(thing))
    if thing.is_module:
        return Name(name, "module", f"import {thing.path}", text_of(thing))
    annotation = f": {thing.annotation}" if thing.annotation is not None else ""
    return Name(name, "attribute", f"{name}{annotation}", text_of(thing))


def names(module):
    """Every public name of a module, each class followed by its members."""
    found = []
    for export in module.exports:
        name = str(export)
        try:
            thing = target(module, name)
        except griffe.AliasResolutionError:  # the stub leaves out exceptions of the compiled module
            actual = getattr(sys.modules[module.path], name)
            bases = ", ".join(b.__name__ for b in actual.__bases__)
            found.append(Name(name, "class", f"class {name}({bases})", inspect.getdoc(actual) or ""))
            continue
        found.append(described(name, thing))
        if thing.is_class:
            members = ((m, x.final_target if x.is_alias else x) for m, x in thing.members.items() if not m.startswith("_"))
            of_class = [described(f"{name}.{m}", x) for m, x in members]
            found += sorted(of_class, key=lambda m: m.kind != "attribute")  # stable: attributes first
    return found


def page(title, module, found):
    """A page: the module's doc string, then a section for each name; attributes of a class are a list."""
    out = [f"# {title}", "", markdown(text_of(module)), ""]
    for name in found:
        if name.kind == "attribute" and "." in name.name:
            out += [f"- `{name.code.partition('.')[2]}`" + (f": {markdown(name.doc)}" if name.doc else "")]
            continue
        level = "###" if "." in name.name else "##"
        out += ["", f"{level} `{name.name}`", ""]
        if name.kind == "module":
            out += [f"The module [weft.{name.name}](weft.{name.name}.md): {markdown(name.doc)}"]
        else:
            out += ["```python", name.code, "```", "", markdown(name.doc), ""]
    return "\n".join(out) + "\n"


def markdown(doc):
    """A doc string as Markdown: sessions of Python are code, whether they are indented or not."""
    out = []
    for paragraph in doc.split("\n\n"):
        lines = paragraph.splitlines()
        out.append("\n".join(["```pycon", *lines, "```"]) if paragraph.startswith(">>>") else prose(paragraph))
    return "\n\n".join(out)
