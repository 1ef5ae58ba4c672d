"""Attention of prefix trees, forward and backward: Weft on the tree, Weft on the same sequences one by one, and FlexAttention on
the tree, in turns in one run.

    PYTHONPATH=build/release/python python bench/prefix_tree.py --device cuda
    PYTHONPATH=build/release/python python bench/prefix_tree.py --device cpu --small

TFLOP/s count visible pairs alone, 14 * heads * dim floating-point operations each, 4 forward and 10 backward: of sequences one
by one those that they have, else those of the tree. A tree is to take at most the separate time times its share of the separate
pairs, divided by 0.85.
"""

import argparse
import statistics
import time

import torch
import weft
import weft.torch

SHARE = 0.85
BLOCK = 128  # of FlexAttention's block masks


def star(prompt, answers, length):
    """Answers of one length on one prompt."""
    return [-1, *[0] * answers], [prompt, *[length] * answers]


def binary(depth, length):
    """A full binary tree of nodes of one length."""
    return [-1, *((i - 1) // 2 for i in range(1, 2**depth - 1))], [length] * (2**depth - 1)


def shared(ratio, answers=16, length=8192):
    """Sequences of one length, of which a part is one prompt."""
    prompt = round(ratio * length / BLOCK) * BLOCK
    return star(prompt, answers, length - prompt)


CASES = {
    "16 answers of 1,024 on 8,192": lambda: star(8192, 16, 1024),
    "32 answers of 2,048 on 16,384": lambda: star(16384, 32, 2048),
    "binary tree, depth 10, nodes of 256": lambda: binary(10, 256),
    "16 x 8,192, 0.5 shared": lambda: shared(0.5),
    "16 x 8,192, 0.75 shared": lambda: shared(0.75),
    "16 x 8,192, 0.9 shared": lambda: shared(0.9),
    "16 x 8,192, 0.95 shared": lambda: shared(0.95),
}
SMALL = {
    "4 answers of 64 on 256": lambda: star(256, 4, 64),
    "binary tree, depth 4, nodes of 32": lambda: binary(4, 32),
    "4 x 256, 0.5 shared": lambda: shared(0.5, 4, 256),
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--heads", default="32:8")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", default=[""], help="only those whose name contains one of these")
    parser.add_argument("--no-flex", action="store_true", help="without FlexAttention, whose compilation takes seconds a case")
    parser.add_argument("--seconds", type=float, default=1e9, help="no case begins after so many")
    parser.add_argument("--small", action="store_true", help="small trees, to see that it works; nothing is judged")
    return parser.parse_args()


def flex_of(tree):
    """FlexAttention with the tree's mask: a row sees an earlier one if it is below that one's node."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    ends = torch.from_numpy(tree.node_begins + tree.lengths)
    for node in range(tree.nodes - 1, -1, -1):  # children come after their parent here
        if tree.parents[node] >= 0:
            ends[tree.parents[node]] = max(ends[tree.parents[node]], ends[node])
    ends = ends[torch.from_numpy(tree.node_of_row)].cuda()

    def visible(batch, head, q, k):
        return (k <= q) & (q < ends[k])

    blocks = ends.view(-1, BLOCK)
    at = torch.arange(len(blocks), device="cuda")
    last, first = blocks.max(1).values, blocks.min(1).values
    earlier = at[:, None] > at
    full = earlier & (first >= (at[:, None] + 1) * BLOCK)
    partial = ((at[:, None] == at) | (earlier & (last > at[:, None] * BLOCK))) & ~full

    def listed(which):
        order = torch.argsort(which.int(), dim=1, descending=True, stable=True).int()
        return which.sum(1).int()[None, None], order[None, None]

    mask = BlockMask.from_kv_blocks(*listed(partial), *listed(full), BLOCK_SIZE=BLOCK, mask_mod=visible)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def weft_of(packing):
    return lambda q, k, v: weft.torch.context_parallel_attention(
        q, k, v, packing, one_rank=True, causal=isinstance(packing, weft.Packing))


class Way:
    """One of those that are compared: its tensors, and seconds of forward and backward."""

    def __init__(self, attend, q, k, v, dout):
        self.attend, self.leaves, self.dout = attend, [x.detach().requires_grad_() for x in (q, k, v)], dout
        self.seconds = []

    def run(self):
        wait = torch.cuda.synchronize if self.dout.is_cuda else lambda: None
        for x in self.leaves:
            x.grad = None
        wait()
        begin = time.perf_counter()
        out = self.attend(*self.leaves)
        out.backward(self.dout)
        wait()
        self.seconds.append(time.perf_counter() - begin)
        return out.detach()

    @property
    def median(self):
        return statistics.median(self.seconds)


def largest_difference(a, b, at):
    """Of the rows a and rows `at` of b."""
    return max(float((x.float() - b[rows].float()).abs().max()) for x, rows in zip(a.split(1 << 16), at.split(1 << 16)))


def measured(name, nodes, asked):
    """A line of the table; whether the tree is fast enough."""
    heads, kv_heads = (int(n) for n in asked.heads.split(":"))
    dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
    tree = weft.prepare.Tree.from_nodes(*nodes)
    generator = torch.Generator(asked.device).manual_seed(1)
    made = [torch.randn(tree.rows, h, asked.dim, device=asked.device, dtype=dtype, generator=generator)
            for h in (heads, kv_heads, kv_heads, heads)]
    at = torch.from_numpy(tree.rows_of_tokens).to(asked.device)
    packing = weft.Packing(tree.cu_seqlens)
    ways = {"tree": Way(weft_of(weft.torch.pack(tree.packing, tree.slices())), *made),
            "separate": Way(weft_of(packing), *(x[at] for x in made))}
    if asked.device == "cuda" and not asked.no_flex:
        ways["flex"] = Way(flex_of(tree), *(x.transpose(0, 1)[None] for x in made))
    outs = {each: way.run() for each, way in ways.items()}  # plans and kernels are there afterwards
    apart = {"separate": largest_difference(outs["separate"], outs["tree"], at)}
    if "flex" in outs:
        every = torch.arange(tree.rows, device=at.device)
        apart["flex"] = largest_difference(outs["flex"][0].transpose(0, 1), outs["tree"], every)
    del outs
    wrong = {each: x for each, x in apart.items() if not x < (2e-2 if dtype == torch.bfloat16 else 1e-5)}
    if wrong:
        raise SystemExit(f"{name}: outputs differ from the tree's: {wrong}")
    for way in ways.values():
        way.run()
        way.seconds.clear()
    for _ in range(asked.rounds):
        for way in ways.values():
            way.run()
    pairs, separate = tree.problem().visible_pairs, tree.separate_pairs
    bound = ways["separate"].median * pairs / separate / SHARE
    speed = {each: 14 * heads * asked.dim * (separate if each == "separate" else pairs) / way.median / 1e12
             for each, way in ways.items()}
    fits = ways["tree"].median <= bound
    flex = f"{1e3 * ways['flex'].median:>9.2f}{speed['flex']:>7.0f}" if "flex" in ways else f"{'-':>9}{'-':>7}"
    print(f"{name:<37}{tree.rows:>9,}{len(at):>11,}{pairs / separate:>7.3f}{1e3 * ways['separate'].median:>10.2f}"
          f"{speed['separate']:>7.0f}{flex}{1e3 * ways['tree'].median:>9.2f}{speed['tree']:>7.0f}{1e3 * bound:>9.2f}  "
          f"{'-' if asked.small else 'pass' if fits else 'FAIL'}", flush=True)
    return fits


def main():
    asked = arguments()
    begin = time.perf_counter()
    if asked.small:
        asked.heads, asked.dim = "4:2", 32
    cases = SMALL if asked.small else CASES
    chosen = [name for name in cases if any(part in name for part in asked.cases)]
    where = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    print(f"{where}, heads {asked.heads} of {asked.dim}, {'bf16' if asked.device == 'cuda' else 'f32'}, torch "
          f"{torch.__version__}, forward + backward in ms and TFLOP/s, medians of {asked.rounds} rounds in turns")
    print(f"{'':<37}{'rows':>9}{'separate':>11}{'pairs':>7}{'separate':>10}{'':>7}{'flex':>9}{'':>7}{'tree':>9}{'':>7}{'bound':>9}")
    failed = 0
    for name in chosen:
        if time.perf_counter() - begin > asked.seconds:
            print(f"{name:<37}left out: {asked.seconds:.0f} seconds are over")
            continue
        failed += not measured(name, cases[name](), asked)
        weft.torch.clear_cache()
        if asked.device == "cuda":
            torch.cuda.empty_cache()
    if failed and not asked.small:
        raise SystemExit(f"{failed} of {len(chosen)} cases take longer than the bound")


if __name__ == "__main__":
    main()
