# A small GPT of Megatron-Core trains on packed documents whose tokens are spread over ranks; the loss of every step is that of
# one rank. Three lines are Weft's: its import, the spec, the batch.
#   torchrun --nproc-per-node 2 examples/megatron_gpt.py          or with 1, or 4
import itertools
import os

import torch
import torch.distributed as dist
import weft.megatron
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

if not torch.cuda.is_available():  # Megatron asks for the GPU where a CPU would do
    torch.cuda.current_device = lambda: "cpu"  # type: ignore

LENGTHS = [61, 5, 130, 1, 40, 17]  # of the documents of a pack
dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
ranks = dist.get_world_size()
parallel_state.initialize_model_parallel(context_parallel_size=ranks)
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))

config = TransformerConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, context_parallel_size=ranks, cp_comm_type="p2p",
    window_size=(32, 0), window_attn_skip_freq=2, softmax_type="learnable", attention_dropout=0.0, hidden_dropout=0.0,
    use_cpu_initialization=True, normalization="RMSNorm", add_bias_linear=False)
spec = weft.megatron.with_weft(get_gpt_layer_local_spec(normalization="RMSNorm"))
torch.manual_seed(0)
model = GPTModel(config, spec, vocab_size=128, max_sequence_length=512, position_embedding_type="rope")
device = "cpu" if not torch.cuda.is_available() else "cuda"
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

# Documents count upward from a random word; each is padded to a multiple of 2·cp, as Megatron's RoPE wants it.
padded = [-(-n // (2 * ranks)) * 2 * ranks for n in LENGTHS]
cu_seqlens, cu_seqlens_padded = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (LENGTHS, padded))
generator = torch.Generator().manual_seed(1)
for step in range(20):
    pack = {name: torch.zeros(1, sum(padded), dtype=torch.int64) for name in ("tokens", "labels", "loss_mask", "position_ids")}
    for n, begin in zip(LENGTHS, cu_seqlens_padded.tolist()):
        words = (torch.randint(0, 128, (1,), generator=generator) + torch.arange(n + 1)) % 128
        pack["tokens"][0, begin:begin + n], pack["labels"][0, begin:begin + n] = words[:-1], words[1:]
        pack["loss_mask"][0, begin:begin + n] = 1
        pack["position_ids"][0, begin:begin + n] = torch.arange(n)
    targets = pack["loss_mask"].sum()

    batch, packed = weft.megatron.get_batch_on_this_cp_rank(pack, cu_seqlens, cu_seqlens_padded)
    batch = {name: x.to(device) for name, x in batch.items()}
    losses = model(input_ids=batch["tokens"], position_ids=batch["position_ids"], attention_mask=None, labels=batch["labels"],
                   packed_seq_params=packed)
    loss = (losses * batch["loss_mask"]).sum() / targets  # this rank's share of the mean over all targets
    optimizer.zero_grad()
    loss.backward()
    for x in (loss.detach(), *(p.grad for p in model.parameters())):  # Megatron's DistributedDataParallel does this too
        dist.all_reduce(x, group=parallel_state.get_context_parallel_group())
    optimizer.step()
    if dist.get_rank() == 0 and step % 5 in (0, 4):
        print(f"step {step:2}: loss {loss.item():.4f} on {ranks} ranks")
dist.destroy_process_group()
