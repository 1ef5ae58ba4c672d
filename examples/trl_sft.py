# TRL's SFTTrainer with packing, each batch of packed documents spread over all ranks; losses and norms of gradients are those of
# one rank. Three lines are Weft's.
#   torchrun --nproc-per-node 2 examples/trl_sft.py          or with 1, or 4
import random
import tempfile

import datasets  # pyright: ignore[reportMissingImports]
import tokenizers
import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
import weft.trainer


class OurTrainer(weft.trainer.ContextParallelMixin, trl.SFTTrainer):  # type: ignore
    def log(self, logs, start_time=None):  # type: ignore
        if "grad_norm" in logs and self.is_world_process_zero():
            print(f"step {self.state.global_step:2}: loss {logs['loss']:.3f}, norm of gradients {logs['grad_norm']:.3f} "
                  f"on {self.args.world_size} ranks")


# Documents that count upward from a random word.
numbers = random.Random(0)
documents = []
for _ in range(64):
    first, length = numbers.randrange(60), numbers.randrange(4, 120)
    documents.append({"input_ids": [4 + (first + i) % 60 for i in range(length)]})

config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="weft")
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 2, **{f"w{i}": i for i in range(3, 64)}}, unk_token="</s>"))
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
arguments = trl.SFTConfig(  # pyright: ignore[reportPrivateImportUsage]
    tempfile.mkdtemp(), packing=True, max_length=256, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6,
    learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, bf16=torch.cuda.is_available(),
    use_cpu=not torch.cuda.is_available())
trainer = OurTrainer(model, arguments, train_dataset=datasets.Dataset.from_list(documents), processing_class=tokenizer)
trainer.train()
