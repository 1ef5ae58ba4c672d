"""Hugging Face's Trainer, and those of TRL, with the tokens of a batch spread over ranks.

    class Trainer(weft.trainer.ContextParallelMixin, transformers.Trainer): ...

The model is made with attn_implementation="weft". Loss, gradient norm, accumulation, clipping, evaluation and checkpoints come
out as on one rank. Written for and tested with transformers 5.22 and TRL 1.16; docs/transformers.md says what is refused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from typing import Any, Callable, ClassVar, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import torch as _torch
from . import transformers as _transformers
from ._arrays import error
from ._core import Packing
from .torch.transport import backend_of

__all__ = ["ContextParallelMixin", "documents"]

# What DataCollatorWithFlattening adds besides, which the packing says too, and what the Trainer itself puts in.
_DERIVED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "use_cache", "num_items_in_batch")


def documents(batch: Dict[str, Any]) -> Tuple[Packing, Tensor, Optional[Tensor]]:
    """(packing, input_ids [tokens], labels [tokens] or None) of a batch, from its positions and its padding.

    Each row of the batch [batch, length] is a document, or several if position_ids begin anew with each of them, as
    DataCollatorWithFlattening makes them; what attention_mask hides is left out.

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
    for name, x in (("position_ids", positions), ("labels", labels)):
        if x is not None and x.shape != ids.shape:
            raise error(f"input_ids has shape {list(ids.shape)} and {name} {list(x.shape)}", "give both [batch, length]")
    begins = torch.zeros_like(seen)  # of documents
    begins.scatter_(1, seen.int().argmax(1, keepdim=True), seen.any(1, keepdim=True))
    if positions is not None:
        begins |= seen & (positions == 0)
    else:
        edges = torch.diff(seen.int(), dim=1, prepend=torch.zeros_like(seen[:, :1], dtype=torch.int32)).clamp(min=0).sum(1)
        if bool((edges > 1).any()):
            raise error("attention_mask hides tokens inside a sequence",
                        "padding is before or after one; give position_ids if these are several")
    at = torch.nonzero(begins[seen].cpu()).flatten()
    cu = [*at.tolist(), int(seen.sum())]
    if positions is not None:
        counted = torch.arange(cu[-1]) - torch.repeat_interleave(at, torch.diff(torch.tensor(cu)))
        if not torch.equal(positions[seen].cpu().long(), counted):
            raise error("position_ids do not count 0, 1, 2, … in each document",
                        "leave them out, or use DataCollatorWithFlattening")
    return Packing(cu), ids[seen], None if labels is None else labels[seen]


def _targets(batches: List[Any]) -> Optional[int]:
    """How many tokens of these batches are to be predicted; None if they have no labels."""
    if not batches or batches[0].get("labels") is None:
        return None
    count = 0
    for batch in batches:
        packing, _, labels = documents(batch)
        assert labels is not None
        count += int((_torch.next_token_labels(labels, packing) != -100).sum())
    return count


def _refuse(trainer: Any) -> None:
    """What would be computed from one rank's rows as if they were all, or was never tried with Weft."""
    args, fsdp = trainer.args, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    for wrong, problem, remedy in (
        (not trainer.model_accepts_loss_kwargs,
         "the model's loss takes no num_items_in_batch: it would be a mean over each rank's rows",
         "use a causal language model of transformers whose forward takes loss keywords"),
        (trainer.compute_loss_func is not None, "compute_loss_func is given: it would be called with one rank's rows",
         "leave the loss to the model"),
        (trainer.compute_metrics is not None, "compute_metrics is given: it would be called with the logits of one rank's rows",
         "leave it out; eval_loss is that of all rows"),
        (bool(trainer.label_smoother),
         "label_smoothing_factor is not 0: the Trainer shifts labels by rows, which are one rank's", "set it to 0"),
        (getattr(trainer, "aux_loss_enabled", False), "TRL adds the loss of a router, which it takes of each rank's rows",
         "set router_aux_loss_coef=0.0"),
        (args.use_liger_kernel, "use_liger_kernel puts another loss into the model, which was not tested with Weft",
         "leave it out"),
        (args.n_gpu > 1, f"one process has {args.n_gpu} GPUs", "start a process for each: torchrun"),
        (trainer.is_deepspeed_enabled, "DeepSpeed was not tested with weft.trainer", "use DDP, or FSDP2: fsdp=True"),
        (getattr(fsdp, "fsdp_version", 2) != 2, "FSDP1 was not tested with weft.trainer", "use FSDP2: fsdp_config version 2"),
        (getattr(trainer.accelerator, "parallelism_config", None) is not None, "accelerate has a ParallelismConfig of its own",
         "leave it out: context_parallel_size of the class says which ranks share a batch"),
        (getattr(args, "train_sampling_strategy", "") == "batch_rebalance",
         'train_sampling_strategy="batch_rebalance" gives every rank its own batches', "use random or sequential"),
    ):
        if wrong:
            raise error(problem, remedy)


@contextlib.contextmanager
def _whole_last_batch(state: Any) -> Iterator[None]:
    """Meanwhile accelerate leaves nothing out of what it gathers: it takes the numbers of all ranks for a batch's samples."""
    loader = state.active_dataloader
    if loader is None:
        yield
        return
    before, loader.remainder = loader.remainder, -1
    try:
        yield
    finally:
        loader.remainder = before


_COMPARED = 4  # of the first batches; collators that draw random numbers of their own differ in each


def _compare(group: Any, device: Any, *parts: Optional[Tensor]) -> None:
    """Refuses a batch that is not the same on all ranks that share it."""
    digest = hashlib.blake2b(b"".join(x.cpu().numpy().tobytes() for x in parts if x is not None), digest_size=7).digest()
    own = int.from_bytes(digest, "little")
    most = torch.tensor([own, -own], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    if int(most[0]) != -int(most[1]):
        raise error("ranks that share a batch have been given different ones",
                    "a dataset or collator that draws random numbers must draw the same ones on each of these ranks")


class ContextParallelMixin:
    """Before transformers.Trainer, or trl.SFTTrainer, among the bases of a class: each batch is spread over ranks.

    All ranks share every batch; or, if the class has context_parallel_size, so many consecutive ranks share one, and the others
    are data-parallel. Ranks that share a batch are all given it, packed by DataCollatorWithFlattening or padded, and each takes
    its rows. Options of weft.transformers.packed (schedule, layout, mask, deterministic, kernel, checked) stand in
    `context_parallel_options` of the class.
    """

    context_parallel_size: ClassVar[Optional[int]] = None
    context_parallel_options: ClassVar[Dict[str, Any]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        me: Any = self
        _refuse(me)
        ranks = int(me.args.world_size)
        size = ranks if self.context_parallel_size is None else self.context_parallel_size
        if size < 1 or ranks % size != 0:
            raise error(f"context_parallel_size is {size}, and there are {ranks} ranks", "give a number that divides them")
        self._batches = ranks // size  # at a time
        self._compared = 0
        self._group: Any = None if size == ranks else ""  # of the ranks that share a batch
        if 1 < size < ranks:
            self._group, _ = dist.new_subgroups_by_enumeration([list(range(r, r + size)) for r in range(0, ranks, size)])

    def get_cp_size(self) -> int:
        """How many ranks share a batch: by it the Trainer counts examples."""
        me: Any = self
        return int(me.args.world_size) // self._batches

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The same batches on every rank that shares them, which accelerate would deal out among all."""
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
            part.num_processes, part.process_index = self._batches, me.args.process_index // self.get_cp_size()
            if self._batches == 1:
                part.even_batches = False  # a short last batch stays short
        return loader

    @property
    def gather_function(self) -> Callable[[Tensor], Tensor]:
        """What evaluation collects results of all ranks with: those that share a batch have the same, so that one is enough."""
        me: Any = self
        state = me.accelerator.gradient_state

        def gather(x: Tensor) -> Tensor:
            if self._batches > 1:
                x = me.accelerator.gather(x).unflatten(0, (self._batches, self.get_cp_size(), -1))[:, 0].flatten(0, 1)
            return x[:state.remainder] if state.end_of_dataloader and state.remainder > 0 else x  # as accelerate does

        return gather

    @gather_function.setter
    def gather_function(self, _: Any) -> None:  # the Trainer sets its own
        pass

    def _get_num_items_in_batch(self, batch_samples: List[Any], device: Any) -> Optional[Tensor]:
        """Targets of the batches of one optimizer step, over all ranks unless each device is to go by its own."""
        me: Any = self
        count = _targets(batch_samples)
        if count is None:
            return None
        items = torch.tensor(count, device=device)
        if self._batches > 1 and me.args.average_tokens_across_devices:
            dist.all_reduce(items)
            items = items // self.get_cp_size()
        return items

    def _track_num_input_tokens(self, inputs: Dict[str, Any]) -> None:
        """The Trainer adds up the tokens of all ranks' batches, of which several are the same one."""
        me: Any = self
        before = me.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        me.state.num_input_tokens_seen = before + (me.state.num_input_tokens_seen - before) // self.get_cp_size()

    def floating_point_ops(self, inputs: Dict[str, Any]) -> float:
        """A rank's part, because the Trainer adds up those of all ranks."""
        return float(super().floating_point_ops(inputs)) / self.get_cp_size()  # type: ignore[misc]

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Dict[str, Any]) -> Tuple[Callable[[], Any], Dict[str, Any]]:
        """This rank's rows of the batch, and the context in which the model knows them."""
        packing, ids, labels = documents(inputs)
        if labels is None:
            raise error("the batch has no labels, so its loss would be made of one rank's rows by other means",
                        "give labels [batch, length]: input_ids, with -100 at tokens that are not to be learned")
        options = dict(self.context_parallel_options)
        me: Any = self
        if self.get_cp_size() > 1 and (self._compared < _COMPARED or options.get("checked")):
            _compare(self._group, me.args.device, torch.from_numpy(packing.cu_seqlens_q), ids, labels)
            self._compared += 1
        place = {name: options[name] for name in ("layout", "mask") if name in options}
        rows = _transformers.inputs(ids, packing, self._group, labels=labels, **place)
        rows.pop("num_items_in_batch", None)  # the Trainer counts those of all accumulated batches
        batch: Dict[str, Any] = {**rows, "use_cache": False}
        return functools.partial(_transformers.packed, packing, self._group, **options), batch

    def _times(self) -> int:
        """What compute_loss multiplies a rank's share of the loss by, because wrappers take the mean of all ranks' gradients."""
        me: Any = self
        return int(me.args.world_size) if me.args.average_tokens_across_devices else self.get_cp_size()

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of the whole batch, which is reported."""
        me: Any = self
        if me.is_fsdp_enabled and backend_of(dist.group.WORLD, me.args.device.type) == "gloo":
            # FSDP2 asks for the average, which gloo takes for a sum; so it is to ask for the sum, and divide by itself.
            for part in model.modules():
                if hasattr(part, "set_force_sum_reduction_for_comms"):
                    part.set_force_sum_reduction_for_comms(True)
        loss: Tensor = super().training_step(model, *args, **kwargs)  # type: ignore[misc]
        if me.args.world_size > 1:
            dist.all_reduce(loss)
            loss = loss / me.args.world_size
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """The norm over all ranks' parts of the gradients: with FSDP2 the Trainer would report that of rank 0's part."""
        norm: Any = super()._get_grad_norm(*args, **kwargs)  # type: ignore[misc]
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def compute_loss(self, model: Any, inputs: Dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Any = None) -> Any:
        """This rank's share of the loss times the number of ranks: data-parallel wrappers take the mean of gradients."""
        me: Any = self
        with _whole_last_batch(me.accelerator.gradient_state):
            found = super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if num_items_in_batch is None or me.args.average_tokens_across_devices:
            return found  # the Trainer has multiplied already
        loss = (found[0] if return_outputs else found) * self._times()
        return (loss, found[1]) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """The loss of the whole batch, the same on every rank that shares it."""
        if not prediction_loss_only:
            raise error("logits of an evaluation are asked for, and each rank has those of its rows",
                        "set prediction_loss_only=True and leave compute_metrics out")
        me: Any = self
        count = _targets([inputs])
        if count is None:
            return None, None, None
        context, rows = self._prepare_context_parallel_inputs(model, me._prepare_inputs(inputs))
        with torch.no_grad(), context(), me.compute_loss_context_manager():
            loss = self.compute_loss(model, rows, num_items_in_batch=torch.tensor(count, device=me.args.device)).detach()
        if self.get_cp_size() > 1:
            dist.all_reduce(loss, group=self._group)
        return loss / self._times(), None, None
