"""Hugging Face's Trainer on ranks with weft.trainer, and on one rank without (test_trainer.py).

python trainer_worker.py FOLDER RANKS [CASE...]
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

import processes

LENGTHS = [13, 5, 24, 2, 9, 17, 3, 11, 8, 30, 6, 14, 21]  # of the documents, two a batch
LOGGED = ("loss", "grad_norm", "eval_loss", "step", "num_input_tokens_seen")


@dataclass
class Case:
    """One training, on `ranks` of which `size` share a batch, and on one rank that takes the same batches one by one."""

    collator: str = "flattened"
    changes: dict = field(default_factory=dict)  # of the arguments
    options: dict = field(default_factory=dict)  # of weft
    ranks: int = 2
    size: int = 2
    fsdp: bool = False
    streamed: bool = False
    model: str = "llama"


# With a state, without which torch does not load an optimizer of FSDP2; a large epsilon, so that it does not magnify rounding.
ADAM = dict(optim="adamw_torch", adam_epsilon=0.1)
CASES = {
    "flattened": Case(), "flattened, ring": Case(options=dict(schedule="ring", layout="zigzag", checked=True)),
    "padded": Case("padded"), "padded left, positions": Case("left"),
    "each device's own count": Case(changes=dict(average_tokens_across_devices=False)),
    "no accumulation": Case(changes=dict(gradient_accumulation_steps=1)),
    "fsdp2": Case(changes=ADAM, fsdp=True),
    "two batches at a time": Case(ranks=4), "two batches at a time, fsdp2": Case("padded", ADAM, ranks=4, fsdp=True),
    "data parallel alone": Case(size=1),
    "router": Case(model="qwen3_moe"),
    "streamed": Case(changes=dict(accelerator_config={"dispatch_batches": False}), streamed=True),
}


def data(count):
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": (ids := torch.randint(3, 61, (n,), generator=generator)).tolist(), "labels": ids.tolist()}
            for n in LENGTHS[:count]]


class Stream(torch.utils.data.IterableDataset):
    """The same without a length, one after another."""

    def __iter__(self):
        return iter(data(12))


def padded(rows, left=False):
    """A batch with padding after its documents; or before them, and with positions that say so."""
    most = max(len(row["input_ids"]) for row in rows)

    def full(name, fill):
        rest = [[fill] * (most - len(row[name])) for row in rows]
        return torch.tensor([pad + row[name] if left else row[name] + pad for row, pad in zip(rows, rest)])

    for row in rows:
        row.update(attention_mask=[1] * len(row["input_ids"]), position_ids=list(range(len(row["input_ids"]))))
    batch = dict(input_ids=full("input_ids", 0), labels=full("labels", -100), attention_mask=full("attention_mask", 0))
    if left:
        batch["position_ids"] = full("position_ids", 1)
        batch["labels"][batch["position_ids"] == 0] = -100  # which one rank would have padding predict
    return batch


def fsdp_on_cpus():
    """accelerate leaves FSDP out where processes have CPUs, in silence; from now on it does not."""
    from accelerate import state

    plain = state.AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, state.DistributedType.FSDP
            state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = init


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def train(folder, case, alone):
    """(the log, the mean loss, all parameters), after four steps, of which the last two are done anew from a checkpoint."""
    import transformers
    import weft.trainer

    from small_models import config_of

    kinds = (transformers.Trainer,) if alone else (weft.trainer.ContextParallelMixin, transformers.Trainer)
    size = None if case.size == case.ranks else case.size
    kind = type("OurTrainer", kinds, {"context_parallel_options": case.options, "context_parallel_size": size})
    times = case.ranks // case.size if alone else 1
    collator = {"flattened": transformers.DataCollatorWithFlattening(), "padded": padded, "left": lambda rows: padded(rows, True)}
    found = []
    for resume in (False, True):
        os.environ.pop("ACCELERATE_USE_FSDP", None)  # of the case before, from accelerate
        torch.manual_seed(1)
        config = config_of(case.model)
        if case.model != "llama":
            config.output_router_logits, config.router_aux_loss_coef = True, 0.5
        # Padded rows are each a document for any attention; flattened ones need one that sees where positions begin anew.
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager" if alone and case.collator != "flattened" else "weft")
        given = dict(output_dir=folder, use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=4,
                     gradient_accumulation_steps=2, max_grad_norm=0.5, learning_rate=0.1, optim="sgd", logging_steps=1,
                     logging_strategy="steps", eval_strategy="steps", eval_steps=2, save_steps=2, report_to=[],
                     disable_tqdm=True, seed=5, prediction_loss_only=True, dataloader_pin_memory=False,
                     include_num_input_tokens_seen="all")
        given.update(case.changes)
        given["gradient_accumulation_steps"] *= times
        if case.fsdp and not alone:
            given.update(fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]})
        trainer = kind(model=model, args=transformers.TrainingArguments(**given),
                       train_dataset=Stream() if case.streamed else data(12),
                       eval_dataset=data(13)[4 + (case.ranks // case.size > 1):], data_collator=collator[case.collator])
        result = trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2") if resume else None)
        if case.fsdp and not alone:
            parts = [type(x).__name__ for x in trainer.model.modules() if type(x).__name__.startswith("FSDP")]
            assert parts.count("FSDPLlamaDecoderLayer") == 2, parts
        found.append(([{name: x for name, x in line.items() if name in LOGGED}
                       for line in trainer.state.log_history if "train_loss" not in line], result.training_loss,
                      {name: whole(p) for name, p in trainer.model.named_parameters()}))
    return found


def other_batches(folder, rank):
    """What is said to a rank whose collator draws other tokens than that of the other rank."""
    import transformers
    import weft.trainer

    from small_models import SMALL

    def collate(rows):
        return padded([{name: [1 + rank, *x[1:]] for name, x in row.items()} for row in rows])

    kind = type("OurTrainer", (weft.trainer.ContextParallelMixin, transformers.Trainer), {})
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL), attn_implementation="weft")
    args = transformers.TrainingArguments(output_dir=folder, use_cpu=True, report_to=[], max_steps=1, save_strategy="no",
                                          dataloader_pin_memory=False)
    try:
        kind(model=model, args=args, train_dataset=data(12), data_collator=collate).train()
    except weft.Error as e:
        return str(e)
    return "nothing"


def rank(folder, rank, ranks):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")  # the group is there already
    fsdp_on_cpus()
    found = {name: train(f"{folder}/{number}", case, alone=ranks == 1) for number, (name, case) in enumerate(CASES.items())
             if ranks in (1, case.ranks) and name in (sys.argv[3:] or CASES)}
    if ranks == 2:
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        found["other batches"] = other_batches(folder, rank)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")


if __name__ == "__main__":
    folder, ranks = sys.argv[1], int(sys.argv[2])
    ended = processes.fork(ranks, lambda r: rank(folder, r, ranks), folder, seconds=240)
    sys.exit(any(status for status, _ in ended))
