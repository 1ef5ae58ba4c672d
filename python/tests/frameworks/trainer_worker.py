"""Hugging Face's Trainer on ranks with weft.trainer, and on one rank without (test_trainer.py).

python trainer_worker.py FOLDER RANKS
"""

import os
import sys
from pathlib import Path

import torch

import processes

LENGTHS = [13, 5, 24, 2, 9, 17, 3, 11, 8, 30, 6, 14, 21]  # of the documents, two a batch
CASES = {  # (flattened or padded, changes of the arguments, options of weft)
    "flattened": (True, {}, {}), "flattened, ring": (True, {}, dict(schedule="ring", layout="zigzag", checked=True)),
    "padded": (False, {}, {}), "each device's own count": (True, dict(average_tokens_across_devices=False), {}),
    "no accumulation": (True, dict(gradient_accumulation_steps=1), {}),
}


def data(count):
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": (ids := torch.randint(3, 61, (n,), generator=generator)).tolist(), "labels": ids.tolist()}
            for n in LENGTHS[:count]]


def padded(rows):
    most = max(len(row["input_ids"]) for row in rows)
    full = lambda name, fill: torch.tensor([row[name] + [fill] * (most - len(row[name])) for row in rows])
    seen = [[1] * len(row["input_ids"]) + [0] * (most - len(row["input_ids"])) for row in rows]
    return dict(input_ids=full("input_ids", 0), labels=full("labels", -100), attention_mask=torch.tensor(seen))


def train(folder, flattened, changes, options, mixin):
    """(the log, all parameters), after four steps, of which the last two are done anew from a checkpoint."""
    import transformers
    import weft.trainer

    from small_models import SMALL

    kinds = (weft.trainer.ContextParallelMixin, transformers.Trainer) if mixin else (transformers.Trainer,)
    kind = type("OurTrainer", kinds, {"context_parallel_options": options})
    found = []
    for resume in (False, True):
        torch.manual_seed(1)
        # Padded rows are each a document for any attention; flattened ones need one that sees where positions begin anew.
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**SMALL), attn_implementation="weft" if mixin or flattened else "eager")
        given = dict(output_dir=folder, use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=4,
                     gradient_accumulation_steps=2, max_grad_norm=0.5, learning_rate=0.1, optim="sgd", logging_steps=1,
                     logging_strategy="steps", eval_strategy="steps", eval_steps=2, save_steps=2, report_to=[],
                     disable_tqdm=True, seed=5, prediction_loss_only=True, dataloader_pin_memory=False)
        trainer = kind(model=model, args=transformers.TrainingArguments(**{**given, **changes}), train_dataset=data(12),
                       eval_dataset=data(13)[4:],
                       data_collator=transformers.DataCollatorWithFlattening() if flattened else padded)
        result = trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2") if resume else None)
        found.append(([{name: x for name, x in line.items() if name in ("loss", "grad_norm", "eval_loss", "step")}
                       for line in trainer.state.log_history if "train_loss" not in line], result.training_loss,
                      {name: p.detach().clone() for name, p in model.named_parameters()}))
    return found


def rank(folder, rank, ranks):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")  # the group is there already
    found = {name: train(f"{folder}/{number}", *case, mixin=ranks > 1) for number, (name, case) in enumerate(CASES.items())}
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")


if __name__ == "__main__":
    folder, ranks = sys.argv[1], int(sys.argv[2])
    ended = processes.fork(ranks, lambda r: rank(folder, r, ranks), folder, seconds=240)
    sys.exit(any(status for status, _ in ended))
