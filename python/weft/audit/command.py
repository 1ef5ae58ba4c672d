"""python -m weft audit: weft.audit from a shell. Exit codes as of the command: 0 right, 1 something is wrong, 2 bad input."""

import argparse
import importlib
import importlib.util
import json
import os
import sys
from typing import Any, Callable, Dict, List, NoReturn, Tuple

import numpy as np

from .._arrays import error
from .._core import Error
from .._files import replace_file
from . import Audit, audit


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as the other verbs have it."""
        self.exit(2, f"weft: {message}; see weft audit --help\n")


def _named(text: str) -> Any:
    """The object that module:name or file.py:name means; name may have dots."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise error(f"{text!r} names no function", "give module:function, or path/to/file.py:function")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(os.path.basename(place)[:-3], place)
            if spec is None or spec.loader is None:
                raise ImportError("it is no file of Python")
            found: Any = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = found  # dataclasses look there
            spec.loader.exec_module(found)
        else:
            found = importlib.import_module(place)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as e:  # whatever a module does while it is imported
        said = " ".join(f"{type(e).__name__}: {e}".split())
        raise error(f"cannot import {text!r} ({said})", "give module:function of a module that Python finds from here") from e
    return found


def _function(text: str) -> Callable[..., Any]:
    found = _named(text)
    if not callable(found):
        raise error(f"{text!r} is of type {type(found).__name__}", "give a function of (q, k, v, case)")
    return found


def _sharder(text: str) -> Any:
    """Something with shard and unshard, or what gives such a thing when it is called."""
    found = _named(text)
    if isinstance(found, type) or (callable(found) and not hasattr(found, "shard")):
        try:
            found = found()
        except TypeError as e:
            raise error(f"{text!r} gives no sharder: {e}", "give an object, or a class or function without arguments") from e
    if not (hasattr(found, "shard") and hasattr(found, "unshard")):
        raise error(f"{text!r} has no shard and unshard", "give an object that has both, or a function that returns one")
    return found


def _heads(text: str) -> Tuple[int, int]:
    parts = text.split(":")
    if len(parts) > 2 or not all(x.isdigit() and int(x) > 0 for x in parts):
        raise error(f"--heads {text}", "give HQ:HK, as many query heads as K/V heads or a multiple: 4:2")
    return int(parts[0]), int(parts[-1])


def _check_file(path: str) -> None:
    """Before anything is computed."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise error(f"cannot write {path!r}", "give a file in a folder that is there")


def _write(path: str, content: Dict[str, Any]) -> None:
    replace_file(path, (json.dumps(content, indent=1) + "\n").encode())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="weft audit", description="Is an attention right? Calls a Python function on small cases and compares "
                     "it with the definition in f64: a verdict a property, and the first wrong (query, key) pair.",
                     epilog="Exit: 0 right, 1 something is wrong, 2 bad input.")
    parser.add_argument("function", help="module:function or file.py:function; called with (q, k, v, case), see weft.audit")
    parser.add_argument("--sharder", help="module:object with shard and unshard; Weft's own layout balanced unless given")
    parser.add_argument("--ranks", type=int, default=1, help="as many threads, each with its rows (1)")
    parser.add_argument("--mask", choices=("causal", "full"), help="only the cases with this mask (both)")
    parser.add_argument("--heads", default="4:2", help="HQ:HK query and K/V heads (4:2)")
    parser.add_argument("--dim", type=int, default=8, help="width of a head (8)")
    parser.add_argument("--dtype", choices=("f64", "f32", "f16"), default="f32", help="of the arrays (f32)")
    parser.add_argument("--tolerance", type=float, help="of the worst element, against the largest (1e-4, f16: 1e-2)")
    parser.add_argument("--seed", type=int, default=0, help="of the arrays (0)")
    parser.add_argument("--json", help="a file for the verdicts")
    return parser


def _audit(given: argparse.Namespace) -> Audit:
    for name, least in (("ranks", 1), ("dim", 1), ("seed", 0)):
        if getattr(given, name) < least:
            raise error(f"--{name} {getattr(given, name)}", f"give {least} or more")
    tolerance = given.tolerance if given.tolerance is not None else 1e-2 if given.dtype == "f16" else 1e-4
    if not 0 < tolerance < 1:
        raise error(f"--tolerance {tolerance}", "give a number between 0 and 1")
    dtype = {"f64": np.float64, "f32": np.float32, "f16": np.float16}[given.dtype]
    if given.json is not None:
        _check_file(given.json)
    return audit(_function(given.function), None if given.sharder is None else _sharder(given.sharder), given.ranks,
                 mask=given.mask, heads=_heads(given.heads), dim=given.dim, dtype=dtype, tolerance=tolerance, seed=given.seed)


def command(arguments: List[str]) -> int:
    """What python -m weft audit does with these arguments: its exit code."""
    given = _parser().parse_args(arguments)
    if os.getcwd() not in sys.path:  # the installed program has another folder there
        sys.path.insert(0, os.getcwd())
    try:
        report = _audit(given)
        if given.json is not None:
            _write(given.json, {"function": given.function, "sharder": given.sharder, "ranks": given.ranks, "right": report.right,
                                "verdicts": [v._asdict() for v in report]})
    except Error as e:
        print(f"weft: {e}", file=sys.stderr)
        return 2
    print(f"{report}\n\n{given.function}: {report.summary()}", flush=True)
    return 0 if report.right else 1
