# Hugging Face's Trainer on packed documents of uneven length, each batch spread over all ranks; losses and norms of gradients
# are those of one rank. Three lines are Weft's.
#   torchrun --nproc-per-node 2 examples/hf_trainer.py          or with 1, or 4
import random
import tempfile

import torch
import transformers
import weft.trainer


class OurTrainer(weft.trainer.ContextParallelMixin, transformers.Trainer):  # type: ignore
    def log(self, logs, start_time=None):  # type: ignore
        if "grad_norm" in logs and self.is_world_process_zero():
            print(f"step {self.state.global_step:2}: loss {logs['loss']:.3f}, norm of gradients {logs['grad_norm']:.3f} "
                  f"on {self.args.world_size} ranks")


# Documents that count upward from a random word.
numbers = random.Random(0)
documents = []
for _ in range(64):
    first, length = numbers.randrange(64), numbers.randrange(4, 120)
    words = [(first + i) % 64 for i in range(length)]
    documents.append({"input_ids": words, "labels": words})

config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="weft")
arguments = transformers.TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6, learning_rate=1e-2,
    logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available())
trainer = OurTrainer(model, arguments, train_dataset=documents, data_collator=transformers.DataCollatorWithFlattening())
trainer.train()
