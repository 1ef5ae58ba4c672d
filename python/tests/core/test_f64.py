"""f64 on many ranks: what they sum is f64 too, so that gradients can be checked by finite differences."""

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch

PACKING = weft.Packing([0, 2, 7])
SCHEDULES = ["all_gather", "ring", "all_to_all", "hybrid", "exact", "mesh", "auto"]


def spread(comm, schedule):
    """Attention of whole tensors, computed by all ranks: each has all of the result and of its gradients."""

    class Spread(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *whole):
            with torch.enable_grad():
                ctx.own = [weft.torch.shard(x.detach(), PACKING, comm).requires_grad_() for x in whole]
                ctx.out = weft.torch.context_parallel_attention(*ctx.own, PACKING, causal=True, schedule=schedule, group=comm)
            return weft.torch.unshard(ctx.out.detach(), PACKING, comm)

        @staticmethod
        def backward(ctx, dout):
            own = torch.autograd.grad(ctx.out, ctx.own, weft.torch.shard(dout.contiguous(), PACKING, comm), retain_graph=True)
            return tuple(weft.torch.unshard(x, PACKING, comm) for x in own)

    return Spread.apply


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradcheck_over_ranks(schedule):
    """Every rank perturbs the same elements in the same order, so their calls meet."""
    shapes = (7, 2, 3), (7, 1, 3), (7, 1, 2)

    def rank(comm):
        generator = torch.Generator().manual_seed(3)
        inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
        return torch.autograd.gradcheck(
            spread(comm, schedule), inputs, eps=1e-6, atol=1e-9, rtol=1e-7, check_undefined_grad=False
        )

    assert weft.spawn(2, rank) == [True, True]
