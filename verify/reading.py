"""Divides a chunk among the prompts that are being read: the one with the fewest tokens left goes first, and none starves.

Promises that the oldest prompt gets its share of every chunk, so that every prompt is read in time, however many shorter ones
come. Knows nothing about streams, forwards and time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

# The oldest prompt gets at least one in this many tokens.
OLDEST_SHARE = 4


def divide(tokens: int, prompts: Sequence[Collection[int]]) -> list[int]:
    """How many of a chunk's `tokens` each prompt gets, in order of arrival.

    A prompt is given by the numbers of tokens after which a request can go on: the number that it has left, and smaller ones
    if other requests wait for its beginning. All tokens are given away if the prompts have as many.
    """
    given = [0] * len(prompts)
    if prompts:
        given[0] = min(max(prompts[0]), -(-tokens // OLDEST_SHARE))
    left = tokens - sum(given)
    for goal, number in sorted((goal, number) for number, goals in enumerate(prompts) for goal in goals):
        more = min(left, max(0, goal - given[number]))
        given[number] += more
        left -= more
    return given
