"""TRL's SFTTrainer on two ranks with weft.trainer, and on one rank without (test_trl.py).

python trl_worker.py FOLDER RANKS [CASE...]
"""

import os
import sys
from pathlib import Path

import torch

import processes
import trainer_worker

WORDS = 61
CASES = {  # (changes of the arguments, options of weft)
    "packing": (dict(packing=True, max_length=32), {}),
    "packing, ring": (dict(packing=True, max_length=32), dict(schedule="ring", layout="zigzag")),
    "packing, cut anywhere": (dict(packing=True, packing_strategy="wrapped", max_length=16), {}),
    "padding free": (dict(padding_free=True, max_length=None), {}),
    "padded": (dict(max_length=None, gradient_checkpointing=False), {}),
    "dft": (dict(packing=True, max_length=32, loss_type="dft"), {}),
}


def data(count):
    """Documents of which the first two tokens, a prompt, are not to be learned."""
    import datasets

    rows = [row for row in trainer_worker.data(count) if len(row["labels"]) > 2]
    return datasets.Dataset.from_list([{**row, "labels": [-100] * 2 + row["labels"][2:]} for row in rows])


def tokenizer():
    import tokenizers
    import transformers

    names = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, WORDS)}}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="<unk>")), eos_token="</s>",
        pad_token="<unk>")


def train(folder, changes, options, alone):
    """(the log, all parameters), after four steps, of which the last two are done anew from a checkpoint."""
    import transformers
    import trl
    import weft.trainer

    from small_models import SMALL

    kinds = (trl.SFTTrainer,) if alone else (weft.trainer.ContextParallelMixin, trl.SFTTrainer)
    kind = type("OurTrainer", kinds, {"context_parallel_options": options})
    found = []
    for resume in (False, True):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**SMALL), attn_implementation="eager" if alone else "weft")
        given = dict(output_dir=folder, use_cpu=True, bf16=False, per_device_train_batch_size=2, per_device_eval_batch_size=2,
                     max_steps=4, gradient_accumulation_steps=2, max_grad_norm=0.3, learning_rate=0.1, optim="sgd",
                     logging_steps=1, logging_strategy="steps", eval_strategy="steps", eval_steps=2, save_steps=2, report_to=[],
                     disable_tqdm=True, seed=5, dataloader_pin_memory=False)
        trainer = kind(model=model, args=trl.SFTConfig(**{**given, **changes}), train_dataset=data(12), eval_dataset=data(13),
                       processing_class=tokenizer())
        trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2") if resume else None)
        kept = ("loss", "grad_norm", "eval_loss", "step", "mean_token_accuracy", "entropy", "eval_entropy")
        found.append(([{name: x for name, x in line.items() if name in kept} for line in trainer.state.log_history
                       if "train_loss" not in line], {name: p.detach().clone() for name, p in model.named_parameters()}))
    return found


def rank(folder, rank, ranks):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")  # the group is there already
    found = {name: train(f"{folder}/{number}", *case, alone=ranks == 1) for number, (name, case) in enumerate(CASES.items())
             if name in (sys.argv[3:] or CASES)}
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")


if __name__ == "__main__":
    folder, ranks = sys.argv[1], int(sys.argv[2])
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", HF_DATASETS_CACHE=f"{folder}/datasets")
    ended = processes.fork(ranks, lambda r: rank(folder, r, ranks), folder, seconds=240)
    sys.exit(any(status for status, _ in ended))
