"""Drafts that sources propose, and the tree of the likeliest of them. Pure functions of values."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, TypeAlias

from la_runtime.layout import NO_DRAFTS, DraftTree
from la_runtime.source_names import SourceName

__all__ = [
    "NO_RANKING",
    "Bigram",
    "Candidates",
    "RankedTree",
    "grow",
    "merge",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What one source proposes to stand behind the root.

    Args:
        token_ids: one token per candidate.
        parents: per candidate its parent: 0 is the root, i the i-th candidate (from 1). A parent
            comes before its children.
        chances: per candidate the estimated probability that the model chooses the whole path
            down to it; never above its parent's.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()

    @property
    def is_chain(self) -> bool:
        """Whether each stands behind the one before it."""
        return self.parents == tuple(range(len(self.parents)))


Bigram: TypeAlias = tuple[int, int]
"""Two tokens in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTree:
    """Drafts in the order of their chances: the first n of them are a tree for every n.

    Args:
        drafts: the drafts.
        chances: per draft, descending.
        sources: per draft, who proposed it.
    """

    drafts: DraftTree = NO_DRAFTS
    chances: tuple[float, ...] = ()
    sources: tuple[frozenset[SourceName], ...] = ()

    def first(self, num_drafts: int) -> RankedTree:
        """The likeliest of them."""
        if num_drafts >= len(self.chances):
            return self
        return RankedTree(
            drafts=DraftTree(
                token_ids=self.drafts.token_ids[:num_drafts],
                parents=self.drafts.parents[:num_drafts],
            ),
            chances=self.chances[:num_drafts],
            sources=self.sources[:num_drafts],
        )

    def likeliest_path(self) -> RankedTree:
        """From the root to the likeliest child, and so on: a chain."""
        path: list[int] = []
        node = 0
        for draft, parent in enumerate(self.drafts.parents, 1):
            if parent == node:  # the first child that comes is the likeliest
                path.append(draft)
                node = draft
        if len(path) == len(self.chances):
            return self
        return RankedTree(
            drafts=self.drafts.keep(path),
            chances=tuple([self.chances[draft - 1] for draft in path]),
            sources=tuple([self.sources[draft - 1] for draft in path]),
        )


NO_RANKING: Final = RankedTree()


def grow(
    children: Callable[[int, Bigram], Iterable[tuple[int, float]]],
    *,
    root: Bigram,
    most: int,
    least_chance: float,
) -> Candidates:
    """The likeliest paths behind a root, the likeliest first.

    Args:
        children: given the depth of a node's children (from 1) and the tokens of the node's parent
            and its own, the tokens that may follow, each with the probability that it does.
        root: the last two tokens.
        most: most candidates.
        least_chance: paths less likely than this are left out.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    order = count()
    heap: list[tuple[float, int, int, int, Bigram]] = []  # -chance, order, parent, depth, tokens

    def push_children(node: int, depth: int, tokens: Bigram, chance: float) -> None:
        for child, share in children(depth, tokens):
            if chance * share >= least_chance:
                entry = (-chance * share, next(order), node, depth, (tokens[1], child))
                heapq.heappush(heap, entry)

    push_children(0, 1, root, 1.0)
    while heap and len(token_ids) < most:
        negative, _, parent, depth, tokens = heapq.heappop(heap)
        token_ids.append(tokens[1])
        parents.append(parent)
        chances.append(-negative)
        push_children(len(token_ids), depth + 1, tokens, -negative)
    return Candidates(token_ids=tuple(token_ids), parents=tuple(parents), chances=tuple(chances))


def merge(
    proposals: Sequence[tuple[SourceName, Candidates]], *, most: int, max_depth: int
) -> RankedTree:
    """The likeliest of all candidates, equal paths as one.

    A path that several sources propose has the best of their chances: what one knows the others
    mostly know as well. Only one of several drafts for the same place can come true, so a less
    likely one has at most what the likelier ones leave of their parent's chance.

    Args:
        proposals: what each source proposes.
        most: most drafts.
        max_depth: of a draft; deeper ones are left out.
    """
    if len(proposals) == 1 and proposals[0][1].is_chain:
        return _cut_chain(*proposals[0], length=min(most, max_depth))
    token_ids: list[int] = []
    parents: list[int] = []
    depths = [0]
    chances: list[float] = []
    sources: list[set[SourceName]] = []
    known: dict[tuple[int, int], int] = {}
    for source, candidates in proposals:
        merged = [0]
        for token_id, parent, chance in zip(
            candidates.token_ids, candidates.parents, candidates.chances, strict=True
        ):
            edge = (merged[parent], token_id)
            node = known.get(edge)
            if node is None:
                token_ids.append(token_id)
                parents.append(edge[0])
                depths.append(depths[edge[0]] + 1)
                chances.append(0.0)
                sources.append(set())
                node = known[edge] = len(token_ids)
            chances[node - 1] = max(chances[node - 1], chance)
            sources[node - 1].add(source)
            merged.append(node)
    _share_out(parents, chances)
    likeliest = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)
    chosen = [node for node in likeliest if depths[node + 1] <= max_depth][:most]
    renamed = {0: 0} | {node + 1: place for place, node in enumerate(chosen, 1)}
    return RankedTree(
        drafts=DraftTree(
            token_ids=tuple([token_ids[node] for node in chosen]),
            parents=tuple([renamed[parents[node]] for node in chosen]),
        ),
        chances=tuple([chances[node] for node in chosen]),
        sources=tuple([frozenset(sources[node]) for node in chosen]),
    )


def _cut_chain(source: SourceName, chain: Candidates, *, length: int) -> RankedTree:
    """What `merge` makes of one chain alone, as the paper's drafts are in every pass."""
    token_ids = chain.token_ids[:length]
    return RankedTree(
        drafts=DraftTree.chain(token_ids),
        chances=chain.chances[:length],
        sources=(frozenset((source,)),) * len(token_ids),
    )


def _share_out(parents: Sequence[int], chances: list[float]) -> None:
    """Let the children of a node have no more than its chance together, the likeliest first.

    Args:
        parents: per candidate its parent, from 1; a parent comes before its children.
        chances: per candidate; changed in place. What stands behind one shrinks as it does.
    """
    children: dict[int, list[int]] = {}
    for candidate, parent in enumerate(parents):
        children.setdefault(parent, []).append(candidate)
    original = chances.copy()
    for parent, rivals in children.items():  # parents in their order
        left, before = (chances[parent - 1], original[parent - 1]) if parent else (1.0, 1.0)
        shrunk = left / before if before else 0.0
        for candidate in sorted(rivals, key=original.__getitem__, reverse=True):
            chances[candidate] = min(original[candidate] * shrunk, left)
            left -= chances[candidate]
