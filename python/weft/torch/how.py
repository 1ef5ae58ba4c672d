"""Settings of attention as one string of JSON, so that torch.compile sees a constant."""

import functools
import json
from typing import Any, Dict

from .. import _arrays, _core, _options
from .._arrays import error
from ..cost import machine_number
from ..schedule import Schedule, schedule_of, unexpected

_DEFAULTS: Dict[str, Any] = dict(
    format="thd", causal=False, bottom_right=False, window=(-1, -1), chunk_size=None, scale=None, softcap=0.0, off_by_one=False,
    head_map=None, deterministic=False, kernel="", max_logit=False, group="", schedule="auto", layout=None,
    layout_mask=None, checked=False, layer=None, machine=0)
_MASK = ("causal", "bottom_right", "window", "chunk_size")
_INSIDE = ("off_by_one", "max_logit", "group", "machine")  # what callers say otherwise
OPTIONS = tuple(name for name in _DEFAULTS if name not in _INSIDE)


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's own."""
    if not hasattr(value, "tolist"):
        raise error(f"an option is of type {type(value).__name__}", "give numbers, names and lists; a layout by its name")
    return value.tolist()


def how_of(**options: Any) -> str:
    """The settings that differ from their defaults, as JSON."""
    for name in options:
        if name not in OPTIONS and name not in _INSIDE:
            unexpected("context_parallel_attention", name, OPTIONS)
    if not isinstance(options.get("layout", ""), (str, type(None))):
        raise error(f"layout is a {type(options['layout']).__name__}", "give its name: it is made anew for every packing")
    layer = _arrays.layer_number(options.pop("layer", None))
    said: Dict[str, Any] = {"layer": layer} if layer >= 0 and options.get("checked") else {}  # only checked ranks compare it
    # One rank has nothing to choose, and its settings can be remembered for any machine.
    schedule = options.pop("schedule", _DEFAULTS["schedule"] if options.get("group") else "all_gather")
    # From inside torch.compile: [name, options].
    schedule = Schedule(schedule[0], **dict(schedule[1])) if isinstance(schedule, list) else schedule_of(schedule)
    said["schedule"] = [schedule.name, schedule.options]
    # The backward must choose as its forward did, also after another set_machine.
    if "auto" in (options.get("layout"), schedule.name):
        said["machine"] = machine_number()
    mask = _core.Mask(*(options.get(name, _DEFAULTS[name]) for name in _MASK))  # refuses wrong types, and makes plain numbers
    for name, value in options.items():
        if name in _MASK:
            value = getattr(mask, name)
        elif value is not _DEFAULTS[name]:
            value = _options.option(name, _plain(value) if hasattr(value, "tolist") else value)
        if name == "kernel" and value is None:
            value = ""
        if value != _DEFAULTS[name]:
            said[name] = value
    return json.dumps(said, sort_keys=True, default=_plain)


@functools.lru_cache(1024)
def read(how: str) -> Dict[str, Any]:
    return {**_DEFAULTS, **json.loads(how)}


@functools.lru_cache(1024)
def for_all_layers(how: str) -> str:
    """The settings without the layer's number: what is made of them is for all layers."""
    return json.dumps({name: value for name, value in json.loads(how).items() if name != "layer"}, sort_keys=True)
