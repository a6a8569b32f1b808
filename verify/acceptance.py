"""The acceptance walk: descend from the root while the token that the target chose at a node is one of its children."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafters.draft import DraftTree, Ints


def walk(tree: DraftTree, chosen: Sequence[int]) -> tuple[Ints, Ints]:
    """`chosen` [N+1] is the target's token at the root and at each node; returns accepted rows [A] and tokens [A+1].

    The tokens are exactly those of plain decoding: each was chosen by the target with only accepted tokens before it.
    """
    children = {(int(p), int(t)): row for row, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    rows: list[int] = []
    tokens = [chosen[0]]
    node = children.get((-1, chosen[0]))
    while node is not None:
        rows.append(node)
        tokens.append(chosen[node + 1])
        node = children.get((node, chosen[node + 1]))
    return np.array(rows, np.int32), np.array(tokens, np.int32)
