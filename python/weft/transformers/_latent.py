"""Multi-head latent attention: the latent moves, where a layer makes keys and values of it by a method of its own (expand_kv)."""

import functools
import sys
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

_METHOD, _MARK = "expand_kv", "_weft_latent"  # of a layer: (latent, rotated key that heads share) -> (keys, values)


class Latent(NamedTuple):
    """What is to move, and what makes keys and values of its rows."""

    rows: Tensor  # [rows, width]
    expand: Callable[[Tensor], Tuple[Tensor, Tensor]]
    heads: Callable[[], Tuple[Tensor, Tensor]]  # the layer's own keys and values, [batch, heads, rows, dim]


def _put_off(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def expand_kv(self: Any, latent: Tensor, rotated: Tensor, *args: Any, **options: Any) -> Any:
        # Whether the latent moves, the pack says, which a layer that is computed again in the backward knows when it attends.
        if self.config._attn_implementation != "weft" or args or options or len(latent) != 1:
            return original(self, latent, rotated, *args, **options)
        width = latent.shape[-1]

        def expand(rows: Tensor) -> Tuple[Tensor, Tensor]:
            k, v = original(self, rows[None, None, :, :width], rows[None, None, :, width:])
            return k[0].transpose(0, 1), v[0].transpose(0, 1)

        with torch.no_grad():  # the shapes of keys and values, and no memory
            k, v = (x[:, :, :1].expand(-1, -1, latent.shape[2], -1) for x in original(self, latent[:, :, :1], rotated[:, :, :1]))
        setattr(k, _MARK, Latent(torch.cat((latent, rotated), -1)[0, 0], expand, lambda: original(self, latent, rotated)))
        return k, v

    setattr(expand_kv, _MARK, True)
    return expand_kv


def take_over() -> List[type]:
    """Layers of the models that are imported: from now on attention makes their keys and values, of what moves if packed() says
    so."""
    found = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformers.models.") or ".modeling_" not in name:
            continue
        for kind in vars(module).values():
            method = vars(kind).get(_METHOD) if isinstance(kind, type) and kind.__module__ == name else None
            if method is None:
                continue
            found.append(kind)
            if not hasattr(method, _MARK):
                setattr(kind, _METHOD, _put_off(method))
    return found


def latent_of(key: Tensor) -> Optional[Latent]:
    """What moves in the place of a layer's keys and values; None: they do."""
    return getattr(key, _MARK, None)
