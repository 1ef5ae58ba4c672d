"""Micro-sequences one at a time: each goes through all layers of a model before the next one does (docs/prepare.md)."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Union

import torch
from torch import Tensor

from .. import _arrays, _core
from .._arrays import error
from .._core import Mask
from ..trees import Tree
from .group import by_name, rank_and_ranks
from .packed import AnyPacking, packing_of
from .runs import statistics, usable
from .trees import TreeMasks, predicted_tokens

if TYPE_CHECKING:
    from .micro import MicroSequenceAttention

Outputs = Union[None, Tensor, Sequence[Tensor]]


def _in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a layer that is called then is recomputed by a checkpoint."""
    return torch._C._current_graph_task_id() != -1


def _alone(x: Tensor) -> Tensor:
    """A tensor that keeps nothing alive but itself: not the projection that it is a part of."""
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()


def _listed(x: Outputs) -> List[Tensor]:
    return [] if x is None else [x] if isinstance(x, Tensor) else list(x)


class LayerState:
    """What one layer keeps of one micro-batch: the K/V buffer, and how far the micro-sequences have come."""

    def __init__(self, owner: MicroSequences, layer: MicroSequenceAttention, k: Tensor, v: Tensor) -> None:
        self.owner, self.layer = weakref.ref(owner), layer  # weak: a graph that is given up leaves nothing behind
        self.cut, self.prefix = owner.cut, owner._name()
        mask = owner._mask(layer.mask)
        rows = owner.cut.key_rows(mask, layer.drop)
        self.taken: Any = layer._take(rows, k, v)  # None once it has ended
        self.shapes = k.shape[1:], v.shape[1:]
        self.attended, self.back = 0, owner.micros  # forward(attended) and backward(back - 1) are next
        self.again = owner.micros  # the last one that the model was run again for
        self.nodes = 0  # regions that autograd knows
        self.own: Dict[int, Tuple[Tensor, ...]] = {}  # with drop: this rank's keys, which the backward brings again
        self.drops = layer.drop and rows < owner.cut.key_rows(mask)
        self.taken[2].begin(owner.cut, mask)

    def end(self) -> None:
        """Gives the buffer back to the layer."""
        if self.taken is not None:
            owner = self.owner()
            if owner is not None:
                owner.buffer_bytes += self.taken[2].bytes_held
            self.layer._give_back(self.taken)
            self.taken = None
            self.own.clear()

    def name(self, micro: int) -> str:
        return f"{self.prefix}layer {self.layer.number}, micro-sequence {micro}"

    def _check_forward(self, step: MicroStep, recomputed: bool) -> None:
        m, what = step.micro, self.name(step.micro)
        if self.taken is None:
            raise error(f"{what}: its micro-batch has ended", "go through forward_steps() anew, or make a new MicroSequences")
        if m > self.attended:
            raise error(f"{what} comes before micro-sequence {self.attended}",
                        "go through the micro-sequences in the order of forward_steps()")
        if m == self.attended and not (recomputed or step.again):
            return
        if m == self.attended:
            raise error(f"{what} is run again and was not in the forward", "use in the backward the layers of the forward")
        if not (recomputed or step.again):
            raise error(f"{what} has been attended already",
                        "a layer that a model uses twice needs two MicroSequenceAttention; a step is used once")
        if m != self.back - 1:
            raise error(f"{what} is run again, and the backward of micro-sequence {self.back - 1} is next",
                        "go through the micro-sequences in the order of backward_steps()")
        if not recomputed:
            if self.again == m:
                raise error(f"{what} is run again a second time", "a layer that a model uses twice needs two "
                            "MicroSequenceAttention")
            self.again = m

    def forward(self, step: MicroStep, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor],
                recomputed: bool) -> Tuple[Tensor, Tensor]:
        """(out, lse). The keys go to the buffer the first time; after that they are there."""
        self._check_forward(step, recomputed)
        m, layer, buffer = step.micro, self.layer, self.taken[2]
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(q.shape[:-1], dtype=statistics(q.dtype))
        settings, stream = layer._settings(sink), _arrays.stream_of(q)
        first = m == self.attended
        with layer._together():
            if not first:
                self._bring_again(m, stream)
            keys = [_arrays.array(x, name=name) for x, name in ((k, "k"), (v, "v"))] if first else [None, None]
            buffer.forward(m, _arrays.array(q, name="q"), *keys, settings, *(_arrays.array(x, True) for x in (out, lse)), stream)
        if first:
            self.attended += 1
            if self.drops:
                self.own[m] = tuple(_alone(x.detach()) for x in (k, v))
        return out, lse

    def _bring_again(self, micro: int, stream: int) -> None:
        """The keys that micro's queries see and that the buffer has dropped."""
        while self.layer.drop and (missing := self.taken[2].missing(micro)) is not None:
            self.taken[2].gather_again(missing, *(_arrays.array(x) for x in self.own[missing]), stream)

    def check_backward(self, micro: int, by_its_step: bool) -> None:
        what = self.name(micro)
        if self.taken is None or micro >= self.back:
            raise error(f"{what}: a second backward", "the gradients of its keys have been given out: run the forward again")
        if not by_its_step:
            raise error(f"{what}: its backward is not that of its own step",
                        "call step.backward(loss) of the step that the loss is from, or step.loss(loss).backward()")
        if self.attended < self.cut.micros:
            raise error(f"{what}: backward, and the forward has come to micro-sequence {self.attended} of {self.cut.micros}",
                        "go through forward_steps() to the end")
        if micro != self.back - 1:
            raise error(f"{what}: its backward comes before that of micro-sequence {self.back - 1}, which adds to the gradients "
                        "of its keys", "go through backward_steps(), which is in reverse, and call step.backward(loss) in each")

    def backward(self, micro: int, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor,
                 sink: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        """dq, and the gradients of this micro-sequence's own keys: all later ones have added theirs. dsink."""
        layer, buffer, stream = self.layer, self.taken[2], _arrays.stream_of(q)
        dq, dk, dv = q.new_empty(q.shape), *(q.new_empty((q.shape[0], *shape)) for shape in self.shapes)
        dsink = None if sink is None else sink.new_empty(sink.shape, dtype=statistics(q.dtype))
        with layer._together():
            self._bring_again(micro, stream)
            buffer.backward(micro, *(_arrays.array(x) for x in (q, out, lse, usable(dout))), layer._settings(sink),
                            *(_arrays.array(x, True) for x in (dq, dk, dv)),
                            None if dsink is None else _arrays.array(dsink, True), stream, layer.deterministic)
        self.back = micro
        self.own.pop(micro, None)
        if micro == 0:
            self.end()
        if sink is None or dsink is None:
            return dq, dk, dv, None
        # dsink is summed over the ranks already; divided by them, the sum over the group is right.
        return dq, dk, dv, (dsink / self.cut.ranks).to(sink.dtype)


class StepRegion(torch.autograd.Function):
    """One layer, one micro-sequence. Beside out it gives an empty tensor, which step.backward starts from too: so a layer
    whose output no loss sees still passes on the gradients of its keys, and a backward that is not the step's is noticed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], state: LayerState,
                step: MicroStep) -> Tuple[Tensor, Tensor]:
        ctx.recomputed = _in_backward()
        out, lse = state.forward(step, q, k, v, sink, ctx.recomputed)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, out, lse, sink)
        ctx.state, ctx.micro = state, step.micro
        return out, q.new_empty(0)

    @staticmethod
    def backward(ctx: Any, dout: Optional[Tensor], tie: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        state: LayerState = ctx.state
        state.check_backward(ctx.micro, tie is not None or ctx.recomputed)
        q, out, lse, sink = ctx.saved_tensors
        return (*state.backward(ctx.micro, torch.zeros_like(out) if dout is None else dout, q, out, lse, sink), None, None)


class _Tied(torch.autograd.Function):
    """A loss as it is, whose backward starts from a step's ties too."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *ties: Tensor) -> Tensor:
        ctx.count = len(ties)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, ...]:
        return (gradient, *(gradient.new_empty(0) for _ in range(ctx.count)))


class MicroStep:
    """One micro-sequence on its way through the model, as forward_steps() and backward_steps() of MicroSequences give it."""

    def __init__(self, owner: MicroSequences, micro: int, again: bool) -> None:
        self.owner, self.micro = owner, micro
        self.again = again  # of backward_steps(): layers that are called with it have been called with it before
        begin, end = owner.cut.rows(owner.rank, micro)
        self.rows = slice(begin, end)  # this rank's tokens of the pack; those past its end are padding

    @property
    def window(self) -> _core.Window:
        """What this rank attends: documents, lengths, cu_seqlens, as of weft.prepare."""
        return self.owner.cut.window(self.owner.rank, self.micro)

    def position_ids(self, device: Any = None) -> Tensor:
        """Position of each row in its document, which may have begun in an earlier micro-sequence; of a tree in its sequences."""
        if self.owner.tree is not None:
            return self.take(torch.as_tensor(self.owner.tree.positions)).to(device)
        return torch.from_numpy(self.window.position_ids).to(device)

    def predicts(self, device: Any = None) -> Tensor:
        """Of a tree: which tokens of its sequences this rank's rows of the step predict; the others are in other steps."""
        if self.owner.tree is None:
            raise error("predicts() of micro-sequences that are not a tree's",
                        "each row predicts the next one: take labels as rows")
        return predicted_tokens(self.owner.tree, self).to(device)

    def take(self, x: Tensor, dim: int = 0, fill: Any = 0) -> Tensor:
        """This rank's rows of a tensor of the whole pack; padding is `fill`."""
        tokens = self.owner.tokens
        if x.shape[dim] != tokens:
            raise error(f"a tensor of shape {list(x.shape)} in dimension {dim}", f"give all {tokens} tokens of the pack")
        begin, end = (min(at, tokens) for at in (self.rows.start, self.rows.stop))
        part = x.narrow(dim, begin, end - begin)
        missing = self.rows.stop - self.rows.start - (end - begin)
        if not missing:
            return part
        shape = list(x.shape)
        shape[dim] = missing
        return torch.cat((part, x.new_full(shape, fill)), dim)

    def loss(self, loss: Tensor) -> Tensor:
        """The same loss, whose backward(), wherever it is called, is that of this step."""
        return _Tied.apply(loss, *self.owner._ties_of(self.micro))

    def backward(self, outputs: Outputs = None, gradients: Outputs = None) -> None:
        """The backward of this micro-sequence from its loss, or from what a stage of a pipeline gave on and its gradients.

        Without any: nothing of this micro-sequence is in the loss, and its keys pass on what later ones have given them.
        """
        roots: List[Tensor] = _listed(outputs)
        given: List[Optional[Tensor]] = [*_listed(gradients)] or [None] * len(roots)
        if len(given) != len(roots):
            raise error(f"{len(given)} gradients of {len(roots)} outputs", "give one for each, or none")
        needed = [(x, gradient) for x, gradient in zip(roots, given) if x.requires_grad]
        ties = self.owner._ties_of(self.micro)
        if not ties and not needed:
            raise error(f"{self.owner._name()}micro-sequence {self.micro}: nothing here needs a gradient",
                        "run the model with this step and with gradients enabled, or leave its backward out for all steps")
        torch.autograd.backward([*(x for x, _ in needed), *ties],
                                [*(gradient for _, gradient in needed), *(tie.new_empty(0) for tie in ties)])


class MicroSequences:
    """A pack cut into micro-sequences, each of which goes through all layers before the next one does.

    Of a layer's activations only those of one micro-sequence need to be there at a time; keys and values of all stay in one
    buffer a layer (MicroSequenceAttention), where later micro-sequences read them and add gradients. A model is given each
    step and hands it to its attention:

        >>> import torch, weft, weft.torch
        >>> layer = weft.torch.MicroSequenceAttention()
        >>> x = torch.randn(12, 2, 8, requires_grad=True)
        >>> micros = weft.torch.MicroSequences(weft.Packing([0, 5, 12]), 3)
        >>> losses = [layer(*3 * [step.take(x)], step).sum() for step in micros.forward_steps()]
        >>> for step in micros.backward_steps():
        ...     step.backward(losses[step.micro])
        >>> x.grad.shape
        torch.Size([12, 2, 8])

    forward_backward does all of it, and by default runs each micro-sequence's forward again before its backward, so that
    nothing but inputs and buffers is kept meanwhile. Each object is one micro-batch; several may be under way, each with
    buffers of its own. All ranks of the group make the same calls in the same order.

    pad: tokens that do not divide by micros and ranks are padded at the end, or refused. even_work: cut by visible pairs
    under this mask instead of by tokens. batch: the number of the micro-batch in errors. first_document_begin: as in
    weft.prepare.MicroSequences.

    A tree takes the place of the packing: its rows are in depth-first order, so that a layer that drops keys
    (MicroSequenceAttention(drop=True)) holds those of about one path. Masks are those of the sequences, as in ContextParallel.
    """

    def __init__(self, packing: Union[AnyPacking, Tree], micros: int, group: Any = None, *, pad: bool = True,
                 even_work: Optional[Mask] = None, first_document_begin: Optional[int] = None,
                 batch: Optional[int] = None) -> None:
        self.group, self.batch = by_name(group), batch
        self.rank, ranks = rank_and_ranks(self.group)
        self.tree = packing if isinstance(packing, Tree) else None
        self._masks = None if self.tree is None else TreeMasks(self.tree)
        whole = self.tree.packing if self.tree is not None else packing_of(packing)
        even_work = None if even_work is None else self._mask(even_work)
        self.cut = _core.MicroSequences(whole, ranks=ranks, micros=micros, pad=pad, first_document_begin=first_document_begin,
                                        even_work=even_work)
        self.micros, self.tokens = micros, whole.tokens_q
        self.buffer_bytes = 0  # of the K/V and gradient buffers of all layers whose pass has ended
        self._states: Dict[int, LayerState] = {}
        self._seen: Set[int] = set()  # layers that have attended the step at hand
        self._ties: Dict[int, List[Tensor]] = {}

    def _mask(self, rule: Mask) -> Mask:
        """The mask of a layer, of a tree as slices."""
        return rule if self._masks is None else self._masks.mask(rule)

    def _name(self) -> str:
        return "" if self.batch is None else f"micro-batch {self.batch}, "

    def _ties_of(self, micro: int) -> List[Tensor]:
        return self._ties.pop(micro, [])

    def attend(self, layer: MicroSequenceAttention, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor],
               step: MicroStep) -> Tensor:
        """What MicroSequenceAttention calls."""
        if rank_and_ranks(layer.group) != (self.rank, self.cut.ranks):
            rank, ranks = rank_and_ranks(layer.group)
            raise error(f"{self._name()}layer {layer.number} is rank {rank} of {ranks}, and its micro-sequences are for rank "
                        f"{self.rank} of {self.cut.ranks}", "give both the same group")
        rows = step.rows.stop - step.rows.start
        for x, name in ((q, "q"), (k, "k"), (v, "v")):
            if x.dim() != 3 or x.shape[0] != rows:
                raise error(f"{self._name()}micro-sequence {step.micro}: {name} has shape {list(x.shape)}",
                            f"give this rank's rows of the step: [{rows}, heads, dim]")
        state = self._states.get(id(layer))
        if state is None:
            if step.micro > 0 or step.again or _in_backward():
                raise error(f"{self._name()}layer {layer.number} has not attended micro-sequence 0, and is given {step.micro}",
                            "give every layer the steps of one forward_steps(), from the first one on")
            state = self._states[id(layer)] = LayerState(self, layer, k, v)
        self._seen.add(id(layer))
        out, tie = StepRegion.apply(q, k, v, sink, state, step)
        state.nodes += tie.requires_grad
        if tie.requires_grad and not _in_backward():
            self._ties.setdefault(step.micro, []).append(tie)
        return out

    def forward_steps(self) -> Iterator[MicroStep]:
        """The micro-sequences in order; each goes through the whole model before the next is asked for.

        Without gradients (torch.no_grad) the buffers are given back at the end.
        """
        for state in self._states.values():
            if state.nodes and state.back > 0:
                raise error(f"{state.name(state.back - 1)}: its backward is missing, and a new forward begins",
                            "go through backward_steps() to the end, or give it up with reset()")
        self.reset()
        evaluating = not torch.is_grad_enabled()
        for m in range(self.micros):
            self._seen = set()
            yield MicroStep(self, m, False)
            self._check_layers(m)
        if evaluating:
            self.reset()

    def _check_layers(self, micro: int) -> None:
        if not self._states:
            raise error(f"{self._name()}no layer has attended micro-sequence {micro}",
                        "hand the step of this loop to every MicroSequenceAttention of the model")
        for key, state in self._states.items():
            if key not in self._seen:
                raise error(f"{state.name(micro)} was left out, and micro-sequence 0 was not",
                            "run the whole model with each step before asking for the next one")

    def backward_steps(self) -> Iterator[MicroStep]:
        """The micro-sequences in reverse order; each needs its step.backward before the next is asked for."""
        for state in self._states.values():
            if state.attended < self.micros:
                raise error(f"{state.name(state.attended)} has not been attended, and the backward begins",
                            "go through forward_steps() to the end")
        if not any(state.taken for state in self._states.values()):
            raise error(f"{self._name()}backward_steps() without a forward", "go through forward_steps() with gradients enabled")
        for m in reversed(range(self.micros)):
            yield MicroStep(self, m, True)
            late = [state for state in self._states.values() if state.nodes and state.back > m]
            if late or not any(state.nodes for state in self._states.values()):
                who = (late or list(self._states.values()))[0]
                raise error(f"{who.name(m)}: its backward is missing, and the next step is asked for",
                            "call step.backward(loss) of each step; without a loss step.backward()")
        self.reset()

    def reset(self) -> None:
        """Gives up what is under way; the layers get their buffers back. All ranks do it at the same place."""
        for state in self._states.values():
            state.end()
        self._states, self._ties = {}, {}

    def forward_backward(self, loss_of: Callable[[MicroStep], Optional[Tensor]], *, recompute: bool = True) -> Tensor:
        """Forward and backward of all micro-sequences: the sum of what loss_of(step) returned, without a graph.

        recompute: activations of one micro-sequence at a time; loss_of is called a second time for all but the last, before
        its backward, with the random numbers of the first. It must do the same again. None: nothing of this step is in the loss.
        """
        if not torch.is_grad_enabled():
            raise error("forward_backward without gradients", "call it with gradients enabled; to evaluate, use forward_steps()")
        total, random = torch.zeros(()), []
        kept: List[Optional[Tensor]] = []
        for step in self.forward_steps():
            random.append(_random_state())
            with torch.set_grad_enabled(not recompute or step.micro == self.micros - 1):
                loss = _fresh(loss_of, step)
            if loss is not None:
                total = total.to(loss.device) + loss.detach()
            kept.append(None if loss is None or not loss.requires_grad else loss)
            del loss
        for step in self.backward_steps():
            again = recompute and step.micro < self.micros - 1
            with _random_of(random[step.micro]) if again else contextlib.nullcontext():
                loss = _fresh(loss_of, step) if again else kept[step.micro]
                kept[step.micro] = None
            step.backward(loss)
            del loss
        return total


def _fresh(loss_of: Callable[[MicroStep], Optional[Tensor]], step: MicroStep) -> Optional[Tensor]:
    # Under autocast, weights that were cast without gradients must not be used again with them.
    torch.clear_autocast_cache()
    return loss_of(step)


def _random_state() -> Tuple[Tensor, Optional[Tensor]]:
    gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.get_rng_state(), torch.cuda.get_rng_state() if gpu else None


@contextlib.contextmanager
def _random_of(state: Tuple[Tensor, Optional[Tensor]]) -> Iterator[None]:
    """The random numbers of another time, and afterwards those of now."""
    host, gpu = state
    with torch.random.fork_rng(devices=[] if gpu is None else [torch.cuda.current_device()]):
        torch.set_rng_state(host)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)
        yield
