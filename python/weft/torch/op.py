"""The operators weft::attention and weft::attention_backward, for torch.compile, for modes and for direct calls; and the same as
an autograd.Function, which eager calls use because it takes less time than an operator with a formula in Python.

They take tensors, the packing as a tensor (packed.py), and everything else as one string of JSON (how.py).
"""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .how import OPTIONS, how_of
from .runs import _LIBRARY, Call, _runs, backward, call_of, clear_cache, forward, statistics

__all__ = ["OPTIONS", "EagerAttention", "_runs", "attend", "clear_cache", "how_of"]


def _max_logit_asked(how: str) -> bool:
    return '"max_logit": true' in how


# A call copies its plan to the GPU, so torch.compile must not capture it in a CUDA graph.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, name))
_LIBRARY.define("attention(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor packing, str how) -> (Tensor, Tensor, Tensor)",
                tags=_TAGS)
_LIBRARY.define("attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor out, Tensor lse, "
                "Tensor packing, str how) -> (Tensor, Tensor, Tensor, Tensor)", tags=_TAGS)


def _attention(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], packing: Tensor, how: str) -> Tuple[Tensor, ...]:
    out, lse, largest = forward(q, k, v, sink, packing, call_of(how))
    return out, lse, largest if _max_logit_asked(how) else lse.new_empty(0)


def _attention_shapes(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], packing: Tensor, how: str) -> Tuple[Tensor, ...]:
    return (q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=statistics(q.dtype)),
            q.new_empty((q.shape[-2] if _max_logit_asked(how) else 0,), dtype=statistics(q.dtype)))


def _attention_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], out: Tensor, lse: Tensor,
                        packing: Tensor, how: str) -> Tuple[Tensor, ...]:
    dq, dk, dv, dsink = backward(dout, q, k, v, sink, out, lse, packing, call_of(how))
    return dq, dk, dv, lse.new_empty(0) if sink is None else dsink


def _attention_backward_shapes(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], out: Tensor, lse: Tensor,
                               packing: Tensor, how: str) -> Tuple[Tensor, ...]:
    return (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape),
            q.new_empty((0,) if sink is None else sink.shape, dtype=statistics(q.dtype)))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, sink, packing, how = inputs
    out, lse, _ = output
    ctx.save_for_backward(q, k, v, sink, out, lse, packing)
    ctx.how = how


def _operator_backward(ctx: Any, dout: Tensor, dlse: Any, dmax_logit: Any) -> Tuple[Optional[Tensor], ...]:
    q, k, v, sink, out, lse, packing = ctx.saved_tensors
    dq, dk, dv, dsink = torch.ops.weft.attention_backward(dout, q, k, v, sink, out, lse, packing, ctx.how)
    return dq, dk, dv, None if sink is None else dsink.to(sink.dtype), None, None


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError("weft::attention_backward has no derivative: attention can be differentiated once; compute the "
                              "second derivative with a dense formula (torch.nn.functional.scaled_dot_product_attention)")


for _name, _body, _shapes in (("attention", _attention, _attention_shapes),
                              ("attention_backward", _attention_backward, _attention_backward_shapes)):
    _LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{_name}", _shapes, lib=_LIBRARY)
torch.library.register_autograd("weft::attention", _operator_backward, setup_context=_setup_context, lib=_LIBRARY)
torch.library.register_autograd("weft::attention_backward", _no_second_derivative, lib=_LIBRARY)


class EagerAttention(torch.autograd.Function):
    """Attention of tensors that no mode or transform of torch watches; `statistics`: lse and max_logit are returned too."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], packing: Tensor, call: Call,
                statistics: bool) -> Any:
        out, lse, largest = forward(q, k, v, sink, packing, call)
        ctx.save_for_backward(q, k, v, sink, out, lse, packing)
        ctx.call = call
        if not statistics:
            return out
        ctx.set_materialize_grads(False)  # of the others, which have none
        largest = largest if call.max_logit else lse.new_empty(0)
        ctx.mark_non_differentiable(lse, largest)
        return out, lse, largest

    @staticmethod
    def backward(ctx: Any, dout: Optional[Tensor], *others: Any) -> Tuple[Optional[Tensor], ...]:
        if dout is None:
            return (None,) * 7
        q, k, v, sink, out, lse, packing = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the operator refuses a second derivative, if there will be one
            dq, dk, dv, dsink = torch.ops.weft.attention_backward(dout, q, k, v, sink, out, lse, packing, ctx.call.how)
        else:
            dq, dk, dv, dsink = backward(dout, q, k, v, sink, out, lse, packing, ctx.call)
        if sink is None:
            return dq, dk, dv, None, None, None, None
        return dq, dk, dv, dsink if dsink.dtype is sink.dtype else dsink.to(sink.dtype), None, None, None


# What Function.apply does beyond this is for transforms of torch.func, under which the operator is called.
attend = super(torch.autograd.Function, EagerAttention).apply
