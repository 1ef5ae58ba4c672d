"""Prefix trees against the sequences that they are made of, one by one."""

import pickle

import numpy as np
import pytest
import weft
from hypothesis import given
from hypothesis import strategies as st
from weft.prepare import Tree, pack_trees

from dense import Dense
from problems import examples

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=8)


def paths_of(tree):
    return [tree.rows_of_tokens[a:b] for a, b in zip(tree.cu_seqlens[:-1], tree.cu_seqlens[1:])]


def visible(tree, window, chunk):
    """[rows, rows] of bool, from what the sequences by themselves see."""
    see = np.zeros((tree.rows, tree.rows), bool)
    for path in paths_of(tree):
        for i, row in enumerate(path):
            for j in range(i + 1):
                if (window[0] < 0 or i - j <= window[0]) and (chunk is None or i // chunk == j // chunk):
                    see[row, path[j]] = True
    return see


@examples(60)
@given(SEQUENCES)
def test_sequences_come_back(sequences):
    tree = Tree.from_sequences(sequences)
    assert tree.sequences == len(sequences) and tree.separate_tokens == sum(map(len, sequences))
    assert tree.rows == len({tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)})
    ids = tree.tokens if tree.rows else np.empty(0, np.int64)
    for sequence, path in zip(sequences, paths_of(tree)):
        assert ids[path].tolist() == sequence
        assert tree.positions[path].tolist() == list(range(len(sequence)))
    assert tree.weights.tolist() == np.bincount(tree.rows_of_tokens, minlength=tree.rows).tolist()
    edges = list(zip(tree.edge_rows.tolist(), tree.edge_labels.tolist()))
    assert len(set(edges)) == len(edges)
    predicted = [e for e in tree.edge_of_token.tolist() if e >= 0]
    assert tree.edge_weights.tolist() == np.bincount(predicted, minlength=len(edges)).tolist()
    begins = set(tree.cu_seqlens[:-1][np.diff(tree.cu_seqlens) > 0].tolist())
    for token, edge in enumerate(tree.edge_of_token.tolist()):
        assert (edge < 0) == (token in begins)
        if edge >= 0:
            assert tree.edge_rows[edge] == tree.rows_of_tokens[token - 1]
            assert tree.edge_next_rows[edge] == tree.rows_of_tokens[token]


@examples(60)
@given(SEQUENCES, st.integers(-1, 9), st.one_of(st.none(), st.integers(1, 7)), st.integers(1, 4))
def test_slices_are_what_sequences_see(sequences, left, chunk, multiple):
    tree = Tree.from_sequences(sequences).padded_to(multiple)
    times = np.zeros((tree.rows, tree.rows), int)
    for a, b, c, d, lo, hi in tree.slices((left, 0), chunk):
        k, q = np.arange(c, d)[None, :], np.arange(a, b)[:, None]
        times[a:b, c:d] += (lo <= k - q) & (k - q <= hi)
    assert (times == visible(tree, (left, 0), chunk)).all()
    problem = tree.problem((left, 0), chunk)
    assert problem.visible_pairs == times.sum() and problem.packing == tree.packing
    assert tree.mask((left, 0), chunk).slices.tolist() == tree.slices((left, 0), chunk).tolist()


@pytest.mark.parametrize("ranks, schedule, layout", [(2, "all_gather", "balanced"), (3, "ring", "zigzag"), (3, "ring", "striped"),
                                                     (4, "exact", "contiguous"), (2, "all_to_all", "dual_chunk")])
def test_attention_on_ranks(ranks, schedule, layout):
    rng = np.random.default_rng(ranks)
    prompt = rng.integers(0, 9, 20)
    answers = [np.append(prompt, rng.integers(0, 9, n)) for n in (11, 5, 0, 14)]
    tree = Tree.from_sequences([*answers, rng.integers(0, 9, 13)]).padded_to(2 * ranks)
    for window, chunk in (((-1, -1), None), ((6, 0), None), ((-1, -1), 8)):
        mask = tree.mask(window, chunk)
        q, k, v, dout = (rng.standard_normal((tree.rows, h, 8)).astype(np.float32) for h in (4, 2, 2, 4))
        whole = Dense(*(x.astype(np.float64) for x in (q, k, v)), visible(tree, window, chunk))
        wanted = {"out": whole.out, **{name: x for name, (x, _) in whole.backward(dout.astype(np.float64)).items()}}
        said = dict(packing=tree.packing, layout=layout)

        def rank(comm, q=q, k=k, v=v, dout=dout, mask=mask, said=said):
            mine = [weft.shard(x, comm, mask=mask, **said) for x in (q, k, v, dout)]
            done = weft.attention(*mine[:3], mask=mask, layout_mask=mask, comm=comm, schedule=schedule, **said)
            return done.out, *done.backward(mine[3])[:3]

        parts = zip(*weft.spawn(ranks, rank))
        for name, part in zip(("out", "dq", "dk", "dv"), parts):
            got = weft.unshard(list(part), mask=mask, **said)
            assert np.abs(got - wanted[name]).max() < 2e-5, (name, window, chunk)


def test_nodes_in_any_order():
    tree = Tree.from_nodes([3, -1, 3, -1, 0], [2, 1, 1, 3, 0])
    assert tree.node_of_row.tolist() == [1, 3, 3, 3, 0, 0, 2] and tree.tokens is None
    assert tree.parents.tolist() == [3, -1, 3, -1, 0] and tree.lengths.tolist() == [2, 1, 1, 3, 0]
    assert tree.sequence_end.tolist() == [1, 4, 2] and tree.node_begins.tolist() == [4, 0, 6, 1, 6]
    assert tree.edge_labels.tolist() == tree.edge_next_rows.tolist() == [2, 3, 4, 5, 6]
    ids = Tree.from_nodes([1, -1], [1, 2], tokens=[7, 8, 9], sequence_end=[0, 1, -1])
    assert ids.tokens.tolist() == [8, 9, 7] and ids.cu_seqlens.tolist() == [0, 3, 5, 5]


def test_kinds_of_token_ids():
    torch = pytest.importorskip("torch")
    lists = [[1, 2, 3], [1, 2], [1, 4]]
    tree = Tree.from_sequences(lists)
    assert Tree.from_sequences([np.array(s, np.int32) for s in lists]) == tree
    assert Tree.from_sequences([torch.tensor(s) for s in lists]) == tree
    assert Tree.joined([tree, tree]).subset([1, 4]).tokens.tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize("tree", [Tree.from_sequences([[1, 2, 3], [1, 2, 4], [], [5]]).padded_to(4, 20),
                                  Tree.from_nodes([2, 2, -1], [1, 4, 3]), Tree.from_sequences([])])
def test_pickle(tree):
    again = pickle.loads(pickle.dumps(tree))
    assert again == tree and again.rows_of_tokens.tolist() == tree.rows_of_tokens.tolist()


@examples(40)
@given(st.lists(SEQUENCES, max_size=4), st.integers(1, 3), st.booleans())
def test_packs_hold_every_sequence(given_trees, multiple, keep_order):
    trees = [Tree.from_sequences(s) for s in given_trees]
    packs = pack_trees([*trees, [8, 8, 8]], 24, multiple=multiple, keep_order=keep_order, split=True)
    given_trees = [*given_trees, [[8, 8, 8]]]
    found, rows = [], 0
    for p in range(len(packs)):
        tree, numbers = packs.tree(p), packs.sequences(p).tolist()
        assert tree.rows == 24 and len(numbers) == tree.sequences
        rows += tree.used_rows
        for (t, s), path in zip(numbers, paths_of(tree)):
            assert (tree.tokens[path].tolist() if len(path) else []) == given_trees[t][s]
            found.append((t, s))
    assert sorted(found) == [(t, s) for t, sequences in enumerate(given_trees) for s in range(len(sequences))]
    report = packs.report
    assert report["rows"] == rows and report["rows"] + report["padding"] + report["empty"] == 24 * len(packs)
    assert report["separate_tokens"] == sum(len(s) for sequences in given_trees for s in sequences)


def test_refusals(refused):
    tree = Tree.from_nodes([-1, 0, 0], [3, 2, 2])
    for parents, lengths, said in (([1, 0], [1, 1], "circle"), ([-1, 4], [1, 1], "parent 4"), ([-1], [-2], "length -2")):
        with refused(said):
            Tree.from_nodes(parents, lengths)
    with refused("sequence 1", "float64"):
        Tree.from_sequences([[1], [0.5]])
    with refused("sequence 0", "[2, 2]"):
        Tree.from_sequences([[[1, 2], [3, 4]]])
    with refused("window", "-3"):
        tree.mask((-3, 0))
    with refused("tree 0", "7 rows", "split=True"):
        pack_trees([tree], 6)
    with refused("no pack 1 of 1"):
        pack_trees([tree], 8).tree(1)
    x = np.ones((7, 1, 4), np.float32)
    with refused("Tree(3 nodes", "tree.mask()"):
        weft.attention(x, x, x, tree, causal=True)
