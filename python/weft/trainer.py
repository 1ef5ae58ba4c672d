"""Hugging Face's Trainer with the tokens of a batch spread over all ranks.

    class Trainer(weft.trainer.ContextParallelMixin, transformers.Trainer): ...

The model is made with attn_implementation="weft". Loss, gradient norm, accumulation, clipping and evaluation come out as on one
rank. Written for and tested with transformers 5.22; docs/transformers.md says what is refused.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, ClassVar, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import torch as _torch
from . import transformers as _transformers
from ._arrays import error
from ._core import Packing

__all__ = ["ContextParallelMixin", "documents"]

# What DataCollatorWithFlattening adds besides, which the packing says too, and what the Trainer itself puts in.
_DERIVED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "use_cache", "num_items_in_batch")


def documents(batch: Dict[str, Any]) -> Tuple[Packing, Tensor, Optional[Tensor]]:
    """(packing, input_ids [tokens], labels [tokens] or None) of a batch, from its positions or from its padding.

    position_ids [1, tokens] begin anew with each document, as DataCollatorWithFlattening makes them; without them each row
    of the batch is a document, with what attention_mask hides left out.

        >>> import torch, weft.trainer
        >>> batch = dict(input_ids=torch.tensor([[5, 6, 7, 8, 9]]), position_ids=torch.tensor([[0, 1, 2, 0, 1]]))
        >>> packing, ids, labels = weft.trainer.documents(batch)
        >>> packing.cu_seqlens_q.tolist()
        [0, 3, 5]
    """
    for name, value in batch.items():
        if name not in ("input_ids", "labels", "position_ids", "attention_mask", *_DERIVED) and value is not None:
            raise error(f"the batch has {name}, of which it is not known how its rows belong to tokens",
                        "leave it out of the batch, or train on one rank")
    ids, labels, positions = batch["input_ids"], batch.get("labels"), batch.get("position_ids")
    seen = batch.get("attention_mask")
    seen = torch.ones_like(ids, dtype=torch.bool) if seen is None else seen.bool()
    if ids.dim() != 2 or seen.shape != ids.shape:
        raise error(f"input_ids has shape {list(ids.shape)} and attention_mask {list(seen.shape)}", "give both [batch, length]")
    if positions is not None:
        if ids.shape[0] != 1 or not bool(seen.all()):
            raise error(f"position_ids with {ids.shape[0]} rows, or with padding",
                        "give one row of documents (DataCollatorWithFlattening), or padded rows without position_ids")
        at = positions[0].cpu()
        begins = torch.nonzero(at == 0).flatten()
        ends = torch.cat([begins[1:], torch.tensor([len(at)])])
        if not len(begins) or not torch.equal(at, torch.arange(len(at)) - torch.repeat_interleave(begins, ends - begins)):
            raise error("position_ids do not count 0, 1, 2, … in each document",
                        "leave them out, or use DataCollatorWithFlattening")
        cu = [*begins.tolist(), len(at)]
    else:
        lengths = seen.sum(1)
        edges = torch.diff(seen.int(), dim=1, prepend=torch.zeros_like(seen[:, :1], dtype=torch.int32)).clamp(min=0).sum(1)
        if bool((edges > 1).any()):
            raise error("attention_mask hides tokens inside a sequence", "padding is before or after one")
        cu = [0, *lengths.cumsum(0).tolist()]
    return Packing(cu), ids[seen], None if labels is None else labels[seen]


def _mean(loss: Tensor) -> Tensor:
    """Over all ranks."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(loss)
        loss = loss / dist.get_world_size()
    return loss


class ContextParallelMixin:
    """Before transformers.Trainer, or a subclass of it, among the bases of a class: each batch is spread over all ranks.

    Every rank is given the same batch, packed by DataCollatorWithFlattening or padded, and takes its rows of it. Options of
    weft.transformers.packed (schedule, layout, mask, deterministic, kernel, checked) stand in `context_parallel_options` of
    the class.
    """

    context_parallel_options: ClassVar[Dict[str, Any]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        me: Any = self
        for wrong, problem, remedy in (
            (not me.model_accepts_loss_kwargs,
             "the model's loss takes no num_items_in_batch: it would be a mean over each rank's rows",
             "use a causal language model of transformers whose forward takes loss keywords"),
            (me.compute_loss_func is not None, "compute_loss_func is given: it would be called with one rank's rows",
             "leave the loss to the model"),
            (bool(me.label_smoother), "label_smoothing_factor is not 0: the Trainer shifts labels by rows, which are one rank's",
             "set it to 0"),
            (me.args.n_gpu > 1, f"one process has {me.args.n_gpu} GPUs", "start a process for each: torchrun"),
            (getattr(me.accelerator, "parallelism_config", None) is not None, "accelerate has a ParallelismConfig of its own",
             "leave it out: all ranks are context-parallel here"),
        ):
            if wrong:
                raise error(problem, remedy)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The same batches on every rank, which accelerate would deal out among them."""
        loader: Any = super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        me: Any = self
        if me.args.world_size == 1:
            return loader
        parts: List[Any] = [getattr(loader, name, None) for name in ("batch_sampler", "dataset")]
        dealt = [x for x in parts if hasattr(x, "num_processes")]
        if not dealt:
            raise error(f"batches come from a {type(loader).__name__} that deals them out in a way not known here",
                        "set accelerator_config dispatch_batches=False")
        for part in dealt:
            part.num_processes, part.process_index, part.even_batches = 1, 0, False  # a short last batch stays short
        return loader

    @property
    def gather_function(self) -> Callable[[Tensor], Tensor]:
        """What evaluation collects results of all ranks with: here they have the same, so that one rank's are enough."""
        me: Any = self
        state = me.accelerator.gradient_state

        def own(x: Tensor) -> Tensor:
            return x[:state.remainder] if state.end_of_dataloader and state.remainder > 0 else x  # as accelerate on one rank

        return own

    @gather_function.setter
    def gather_function(self, _: Any) -> None:  # the Trainer sets its own
        pass

    def _get_num_items_in_batch(self, batch_samples: List[Any], device: Any) -> Optional[Tensor]:
        """Targets of the batches of one optimizer step: each rank sees them all, so nothing is gathered."""
        if not batch_samples or batch_samples[0].get("labels") is None:
            return None
        count = 0
        for batch in batch_samples:
            packing, _, labels = documents(batch)
            assert labels is not None
            count += int((_torch.next_token_labels(labels, packing) != -100).sum())
        return torch.tensor(count, device=device)

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Dict[str, Any]) -> Tuple[Callable[[], Any], Dict[str, Any]]:
        """This rank's rows of the batch, and the context in which the model knows them."""
        packing, ids, labels = documents(inputs)
        options = dict(self.context_parallel_options)
        place = {name: options[name] for name in ("layout", "mask") if name in options}
        rows = _transformers.inputs(ids, packing, labels=False if labels is None else labels, **place)
        rows.pop("num_items_in_batch", None)  # the Trainer counts those of all accumulated batches
        batch: Dict[str, Any] = {**rows, "use_cache": False}
        return functools.partial(_transformers.packed, packing, **options), batch

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of the whole batch, which is reported."""
        return _mean(super().training_step(*args, **kwargs))  # type: ignore[misc]

    def compute_loss(self, model: Any, inputs: Dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Any = None) -> Any:
        """This rank's share of the loss times the number of ranks: data-parallel wrappers take the mean of gradients."""
        me: Any = self
        found = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if num_items_in_batch is None or me.args.average_tokens_across_devices:
            return found  # the Trainer has multiplied already
        loss = (found[0] if return_outputs else found) * me.accelerator.num_processes
        return (loss, found[1]) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """The loss of the whole batch, the same on every rank."""
        if not prediction_loss_only:
            raise error("logits of an evaluation are asked for, and each rank has those of its rows",
                        "set prediction_loss_only=True and leave compute_metrics out")
        loss, logits, labels = super().prediction_step(model, inputs, True, ignore_keys)  # type: ignore[misc]
        return None if loss is None else _mean(loss), logits, labels
