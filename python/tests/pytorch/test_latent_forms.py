"""Latent attention by absorbed queries, which is that of expand=, and what auto counts where K and V are kept."""

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch

from test_expand import DIM, DIM_V, ROPE, WIDTH, Up, attend, error


@pytest.mark.parametrize("ranks", [1, 3])
def test_absorbed_queries(ranks):
    """Queries that have absorbed the projection of K, on one K/V head whose values are its first columns."""
    heads, latent, packing, scale = 4, WIDTH - ROPE, weft.Packing([0, 37, 42, 60]), DIM**-0.5
    generator = torch.Generator().manual_seed(1)
    q, source, w_k, w_v, dout = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in (
        (60, heads, DIM), (60, WIDTH), (heads, DIM - ROPE, latent), (heads, DIM_V, latent), (60, heads, DIM_V)))

    def up(rows, w_k, w_v):
        k, v = (torch.einsum("tc,hdc->thd", rows[:, :latent], w) for w in (w_k, w_v))
        return torch.cat((k, rows[:, None, latent:].expand(-1, heads, -1)), -1), v

    def expanded(q, rows, w_k, w_v, comm):
        return attend(q, rows, packing, causal=True, scale=scale, group=comm, expand=lambda rows: up(rows, w_k, w_v))

    def absorbed(q, rows, w_k, w_v, comm):
        absorbing = torch.cat((torch.einsum("thd,hdc->thc", q[..., :DIM - ROPE], w_k), q[..., DIM - ROPE:]), -1)
        out = attend(absorbing, rows[:, None], rows[:, None, :latent], packing, causal=True, scale=scale, group=comm)
        return torch.einsum("thc,hdc->thd", out, w_v)

    def of_rank(comm):
        results = []
        for form in (expanded, absorbed):
            own = [weft.torch.shard(x, packing, comm) for x in (q, source)]
            inputs = [x.detach().clone().requires_grad_() for x in (*own, w_k, w_v)]
            out = form(*inputs, comm)
            results.append([out.detach(), *torch.autograd.grad(out, inputs, weft.torch.shard(dout, packing, comm))])
        # Parameters of expand get the share of the rows that a rank attends, those of the others of its own rows.
        sums = [[torch.stack(weft.torch.group.all_gather(x, comm)).sum(0) for x in result[3:]] for result in results]
        return error(*(result[:3] + summed for result, summed in zip(results, sums)))

    assert max(weft.spawn(ranks, of_rank)) < 1e-12


def test_auto_counts_what_is_kept(monkeypatch):
    from weft.torch import expand

    asked, choose = [], weft._core.choose_schedule
    monkeypatch.setattr(weft._core, "choose_schedule", lambda *a, **given: asked.append(given) or choose(*a, **given))
    monkeypatch.setattr(expand, "_hows", {})
    up, packing = Up(2), weft.Packing([0, 7, 24])
    q, source = (torch.randn(24, *shape, dtype=torch.float64, requires_grad=True) for shape in ((4, DIM), (WIDTH,)))
    for recompute in (True, False, True):
        attend(q, source, packing, causal=True, schedule="auto", expand=up, recompute=recompute)
    assert asked == [{"source": WIDTH, "keeps_expanded": False}, {"source": WIDTH, "keeps_expanded": True}]
