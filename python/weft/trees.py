"""Prefix trees: sequences that share prefixes, each shared token once (docs/trees.md)."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Dict, List, Literal, Optional, Sequence, Tuple, Union

import numpy as np

from . import _core
from ._arrays import error
from ._core import Mask, Packing, Problem
from .types import Numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.nn import Linear

    from .torch.context import ContextParallel
    from .torch.micro_steps import MicroStep

    Int64s = NDArray[np.int64]

_Window = Tuple[int, int]


def _ids(sequence: Any, name: str) -> Int64s:
    """One sequence of token ids, from a list, an array, or a tensor on any device."""
    on_device = hasattr(sequence, "detach") and getattr(sequence, "is_cuda", False)
    ids = np.asarray(sequence.detach().cpu() if on_device else sequence)
    if ids.ndim != 1:
        raise error(f"{name} has shape {list(ids.shape)}", "give token ids as [tokens]")
    if len(ids) and ids.dtype.kind not in "iu":
        raise error(f"{name} has type {ids.dtype}", "give token ids, which are whole numbers")
    return ids.astype(np.int64, copy=False)


class Tree:
    """Sequences that share prefixes, packed so that each shared token is one row: a forest, of one tree or of several.

    Rows are in depth-first order: those of a node are contiguous, and so are those of its subtree. A row sees what it would
    see in its sequence under a causal mask. Plain documents are trees of one node. `sequences` are those that were given, in
    that order; of from_nodes without sequence_end, the paths from a root to a leaf, in depth-first order.

        >>> import weft
        >>> tree = weft.prepare.Tree.from_sequences([[5, 6, 7, 8], [5, 6, 9], [5, 6, 7]])
        >>> tree
        Tree(4 nodes, 5 rows for 10 tokens of 3 sequences)
        >>> tree.tokens.tolist(), tree.positions.tolist(), tree.weights.tolist()
        ([5, 6, 7, 8, 9], [0, 1, 2, 3, 2], [3, 3, 2, 1, 1])
        >>> tree.rows_of_tokens.tolist(), tree.cu_seqlens.tolist()
        ([0, 1, 2, 3, 0, 1, 4, 0, 1, 2], [0, 4, 7, 10])
        >>> list(zip(tree.edge_rows.tolist(), tree.edge_labels.tolist()))
        [(0, 6), (1, 7), (2, 8), (1, 9)]
        >>> tree.packing, tree.mask()
        (Packing([5] in 5 tokens), Mask(slices=3))

    Arrays are int64 and are kept with the tree: do not write to them.
    """

    def __init__(self, core: _core.Tree) -> None:
        self._core = core

    @classmethod
    def from_nodes(cls, parents: Numbers, lengths: Numbers, *, tokens: Optional[Numbers] = None,
                   sequence_end: Optional[Numbers] = None) -> Tree:
        """A forest of given nodes, in any order: the parent of each, -1 for a root, and its length; siblings keep their order.

        tokens: ids, of node after node in the order given. sequence_end: the last node of each sequence, -1 for an empty one;
        every leaf if left out.
        """
        return cls(_core.Tree.from_nodes(parents, lengths, tokens, sequence_end))

    @classmethod
    def from_sequences(cls, sequences: Sequence[Numbers]) -> Tree:
        """The tree of token ids: longest common prefixes are nodes. Sequences may be empty, equal, or prefixes of others."""
        ids = [_ids(sequence, f"sequence {i}") for i, sequence in enumerate(sequences)]
        lengths = np.array([0, *(len(one) for one in ids)], np.int64)
        flat = np.concatenate(ids) if ids else np.empty(0, np.int64)
        return cls(_core.Tree.from_sequences(flat, np.cumsum(lengths)))

    @classmethod
    def joined(cls, trees: Sequence[Tree]) -> Tree:
        """Several trees as one, one after another without padding, and so their nodes and sequences."""
        return cls(_core.Tree.joined([tree._core for tree in trees]))

    def padded_to(self, multiple: int, rows: Optional[int] = None) -> Tree:
        """The same tree with each root padded to a multiple of rows, and as many rows in all, if they are given.

        Padding rows have position, token id and weight 0 and node -1, and see nothing.
        """
        return Tree(self._core.padded_to(multiple, rows))

    def subset(self, sequences: Numbers) -> Tree:
        """The tree of some of its sequences, in this order, without padding; nodes are counted anew."""
        return Tree(self._core.subset(sequences))

    @property
    def rows(self) -> int:
        """Rows of the packed stream, padding included."""
        return self._core.rows

    @property
    def used_rows(self) -> int:
        """Rows that hold a token."""
        return self._core.used_rows

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self._core.nodes

    @property
    def sequences(self) -> int:
        """How many sequences there are, empty ones included."""
        return self._core.sequences

    @property
    def separate_tokens(self) -> int:
        """Tokens of all sequences one by one: the length of rows_of_tokens."""
        return self._core.separate_tokens

    @property
    def separate_pairs(self) -> float:
        """Visible pairs of all sequences one by one under a causal mask."""
        return self._core.separate_pairs

    @cached_property
    def positions(self) -> Int64s:
        """[rows]: the position of each row in its sequences."""
        return self._core.positions

    @cached_property
    def tokens(self) -> Optional[Int64s]:
        """[rows]: token ids, if the tree has any."""
        return self._core.tokens if self._core.has_tokens else None

    @cached_property
    def node_of_row(self) -> Int64s:
        """[rows]: the node of each row; -1 in padding. from_sequences counts nodes in the order of rows."""
        return self._core.node_of_row

    @cached_property
    def weights(self) -> Int64s:
        """[rows]: how many sequences pass each row."""
        return self._core.weights

    @cached_property
    def parents(self) -> Int64s:
        """[nodes]: the parent of each node, -1 for a root."""
        return self._core.parents

    @cached_property
    def lengths(self) -> Int64s:
        """[nodes]: tokens of each node."""
        return self._core.lengths

    @cached_property
    def node_begins(self) -> Int64s:
        """[nodes]: the first row of each node."""
        return self._core.node_begins

    @cached_property
    def sequence_end(self) -> Int64s:
        """[sequences]: the last node of each sequence, -1 for an empty one."""
        return self._core.sequence_end

    @cached_property
    def cu_seqlens(self) -> Int64s:
        """[sequences + 1]: prefix sums of the sequences' lengths, by which rows_of_tokens is cut."""
        return self._core.cu_seqlens

    @cached_property
    def rows_of_tokens(self) -> Int64s:
        """[separate_tokens]: the row of each token of each sequence."""
        return self._core.rows_of_tokens

    @cached_property
    def edge_rows(self) -> Int64s:
        """[edges]: the row that predicts. An edge is a row and a token that comes after it in at least one sequence."""
        return self._core.edge_rows

    @cached_property
    def edge_next_rows(self) -> Int64s:
        """[edges]: the row of the token that is predicted; these rise."""
        return self._core.edge_next_rows

    @cached_property
    def edge_labels(self) -> Int64s:
        """[edges]: the token id that is predicted; where the tree has no ids, its row."""
        return self.edge_next_rows if self.tokens is None else self.tokens[self.edge_next_rows]

    @cached_property
    def edge_weights(self) -> Int64s:
        """[edges]: how many sequences have the edge."""
        return self._core.edge_weights

    @cached_property
    def edge_of_token(self) -> Int64s:
        """[separate_tokens]: the edge that predicts each token of each sequence, -1 for the first of a sequence."""
        return self._core.edge_of_token

    @cached_property
    def packing(self) -> Packing:
        """The packing of the rows, a sequence for each root; it goes with mask()."""
        return self._core.packing

    def mask(self, window: _Window = (-1, -1), chunk_size: Optional[int] = None) -> Mask:
        """What each sequence would see by itself under a causal mask with this window and these chunks, as slices of rows."""
        return self._core.mask(Mask(causal=True, window=window, chunk_size=chunk_size))

    def slices(self, window: _Window = (-1, -1), chunk_size: Optional[int] = None) -> Int64s:
        """The slices of mask(): [n, 6] of q_begin, q_end, k_begin, k_end, lo, hi."""
        return self._core.slices(Mask(causal=True, window=window, chunk_size=chunk_size))

    def problem(self, window: _Window = (-1, -1), chunk_size: Optional[int] = None) -> Problem:
        """The packing and the mask as one."""
        return self._core.problem(Mask(causal=True, window=window, chunk_size=chunk_size))

    def log_probs(self, x: Tensor, lm_head: Union[None, Tensor, Linear] = None, *, cp: Optional[ContextParallel] = None,
                  mask: Any = None, tokens: Any = None, temperature: float = 1.0, step: Optional[MicroStep] = None) -> Tensor:
        """Log-probability of each token of the sequences, [separate_tokens] in their own order, f32 at least, with a gradient.

        x: logits [rows, vocabulary], or [1, rows, vocabulary]; or hidden states [rows, dim], with lm_head the vocabulary's weight
        [vocabulary, dim] or its torch.nn.Linear: then logits are made by chunks of rows, and again in the backward pass. A row
        that sequences share is computed once. The first token of a sequence, which nothing predicts, has 0. temperature: logits
        are divided by it. tokens: ids of all rows, if the tree has none.

        mask: one a token of the sequences, or one a sequence; where it is False the result is 0, and rows of which no token is
        asked (those of prompts, say) take no time.

        cp: the ContextParallel of this tree, if x is one rank's rows. The result is that of all tokens on every rank. Every rank
        computes the same loss of it, and gradients of parameters are then each rank's part, as cp's reduction wants them.

        step: of weft.torch.MicroSequences of this tree, if x is this rank's rows of one micro-sequence. Tokens that other rows
        predict have 0: step.predicts() says which are here.

            >>> import torch, weft
            >>> tree = weft.prepare.Tree.from_sequences([[1, 2, 3], [1, 2, 0, 3]])
            >>> tree.log_probs(torch.zeros(tree.rows, 4)).exp()
            tensor([1.0000, 0.2500, 0.2500, 1.0000, 0.2500, 0.2500, 0.2500])
        """
        from .torch import trees

        return trees.log_probs(self, x, lm_head, cp=cp, mask=mask, tokens=tokens, temperature=temperature, step=step)

    def cross_entropy(self, x: Tensor, lm_head: Union[None, Tensor, Linear] = None, *, weights: Any = None, mask: Any = None,
                      reduction: Literal["mean", "sum"] = "mean", targets: Union[None, int, Tensor] = None,
                      cp: Optional[ContextParallel] = None, tokens: Any = None, temperature: float = 1.0,
                      step: Optional[MicroStep] = None) -> Tensor:
        """The loss of all tokens of the sequences but their first ones: what the same sequences have, each by itself.

        x, lm_head, tokens and temperature as of log_probs. weights: one a token of the sequences, or one a sequence, by which its
        loss is multiplied. mask: which tokens count. reduction: "sum", or "mean", the sum over the number of tokens that count,
        whatever their weights are; targets: another number in its place.

        cp: the ContextParallel of this tree, if x is one rank's rows. The result is then this rank's part, as of cp.loss: call
        backward on it, and print cp.reduce of it.

        step: of weft.torch.MicroSequences of this tree, if x is this rank's rows of one micro-sequence. The result is then their
        part of the loss, of which the parts of all steps and ranks are the sum.

            >>> import torch, weft
            >>> tree = weft.prepare.Tree.from_sequences([[1, 2, 3], [1, 2, 0, 3]])
            >>> tree.cross_entropy(torch.zeros(tree.rows, 8), torch.ones(4, 8)).exp()        # each of four tokens is as likely
            tensor(4.)
        """
        from .torch import trees

        return trees.cross_entropy(self, x, lm_head, weights=weights, mask=mask, reduction=reduction, targets=targets, cp=cp,
                                   tokens=tokens, temperature=temperature, step=step)

    def gather(self, x: Tensor, *, cp: Optional[ContextParallel] = None, step: Optional[MicroStep] = None) -> Tensor:
        """Gives what x [rows, ...] has at each token of the sequences, in their own order, with a gradient.

        The result is [separate_tokens, ...]: values of a critic, say. cp: as of log_probs. step: the same, and 0 at tokens whose
        rows are not here.

            >>> import torch, weft
            >>> tree = weft.prepare.Tree.from_sequences([[5, 6, 7], [5, 6, 8]])
            >>> tree.gather(torch.arange(tree.rows)).tolist()
            [0, 1, 2, 0, 1, 3]
        """
        from .torch import trees

        return trees.gather(self, x, cp=cp, step=step)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and bool(self._core == other._core)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Tuple[Any, ...]:
        return _again, (self.parents, self.lengths, self._ids_by_node(), self.sequence_end, self._core.multiple, self.rows)

    def _ids_by_node(self) -> Optional[Int64s]:
        """The ids as from_nodes takes them."""
        if self.tokens is None:
            return None
        order = np.repeat(self.node_begins - np.append(0, np.cumsum(self.lengths)[:-1]), self.lengths)
        return self.tokens[order + np.arange(len(order))]

    def __repr__(self) -> str:
        return f"Tree({self.nodes} nodes, {self.rows} rows for {self.separate_tokens} tokens of {self.sequences} sequences)"


def _again(parents: Int64s, lengths: Int64s, tokens: Optional[Int64s], ends: Int64s, multiple: int, rows: int) -> Tree:
    """A tree from a pickle."""
    return Tree.from_nodes(parents, lengths, tokens=tokens, sequence_end=ends).padded_to(multiple, rows)


class TreePacks:
    """Trees and documents dealt out to packs of one size."""

    def __init__(self, core: _core.TreePacks) -> None:
        self._core = core

    def __len__(self) -> int:
        return len(self._core)

    def tree(self, pack: int) -> Tree:
        """The pack as one tree, of as many rows as the budget."""
        return Tree(self._core.tree(pack))

    def sequences(self, pack: int) -> Int64s:
        """[n, 2]: of each sequence of tree(pack) the tree that it was given in, and its number there."""
        return self._core.sequences(pack)

    @property
    def report(self) -> Dict[str, Any]:
        """How well trees were packed: rows and pairs, with and without sharing, padding, empty rows, waste."""
        return self._core.report


def pack_trees(trees: Sequence[Union[Tree, int, Numbers]], budget: int, *, multiple: int = 1, keep_order: bool = False,
               split: bool = False) -> TreePacks:
    """Packs trees into packs of `budget` rows: best fit, the largest first.

    A plain document is its length, or its token ids. Every root is padded to a multiple. A tree that is too large is refused
    or, with split, cut into parts of as many sequences as fit a pack, which repeat the path that they share.

        >>> import weft
        >>> tree = weft.prepare.Tree.from_nodes([-1, 0, 0, 0], [600, 100, 100, 100])
        >>> packs = weft.prepare.pack_trees([tree, 300, 100], budget=1000, split=True)
        >>> len(packs), packs.tree(0), packs.sequences(0).tolist()
        (2, Tree(5 nodes, 1000 rows for 2200 tokens of 4 sequences), [[0, 0], [0, 1], [0, 2], [2, 0]])
        >>> packs.report["rows"], packs.report["separate_tokens"]
        (1300, 2500)
    """
    cores: List[_core.Tree] = []
    for i, item in enumerate(trees):
        if isinstance(item, Tree):
            cores.append(item._core)
        elif isinstance(item, (int, np.integer)):
            cores.append(_core.Tree.from_nodes([-1], [int(item)]))
        else:
            cores.append(Tree.from_sequences([_ids(item, f"document {i}")])._core)
    return TreePacks(_core.pack_trees(cores, budget, multiple, keep_order, split))
