"""Where a sequence ends, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from la_runtime.stopping import Ending, FinishReason


class Hearing:
    """A listener that ends a sequence with its nth token."""

    def __init__(self, last):
        self.last = last
        self.heard = []

    def push(self, token_id):
        self.heard.append(token_id)
        return len(self.heard) == self.last


def slow_end(token_ids, eos, stops, last, max_new_tokens, context_room):
    """The definition: the first token that ends it, and why."""
    for count, token_id in enumerate(token_ids, 1):
        if token_id in eos:
            return count, FinishReason.EOS
        if token_id in stops or count == last:
            return count, FinishReason.STOP
        if count == max_new_tokens:
            return count, FinishReason.LENGTH
        if count == context_room:
            return count, FinishReason.CONTEXT
    return len(token_ids), None


@given(
    token_ids=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    eos=st.sets(st.integers(0, 6), max_size=2),
    stops=st.sets(st.integers(0, 6), max_size=2),
    last=st.integers(1, 12),
    max_new_tokens=st.integers(1, 10),
    context_room=st.integers(1, 10),
)
def test_a_sequence_ends_with_the_first_token_that_ends_it(
    token_ids, eos, stops, last, max_new_tokens, context_room
):
    listener = Hearing(last)
    ending = Ending(
        eos_token_ids=eos,
        stop_token_ids=stops,
        max_new_tokens=max_new_tokens,
        context_room=context_room,
        listener=listener,
    )
    count, reason = 0, None
    for token_id in token_ids:
        assert ending.room == min(max_new_tokens, context_room) - count > 0
        reason = ending.hear(token_id)
        count += 1
        if reason is not None:
            break

    assert (count, reason) == slow_end(token_ids, eos, stops, last, max_new_tokens, context_room)
    heard = token_ids[:count]
    if heard[-1] in eos | stops:
        heard.pop()  # it is no part of the text
    assert listener.heard == heard


@pytest.mark.parametrize(
    ("max_new_tokens", "context_room", "reason"),
    [
        (2, 3, FinishReason.LENGTH),
        (3, 2, FinishReason.CONTEXT),
        (2, 2, FinishReason.LENGTH),
    ],
)
def test_the_nearer_limit_ends_it_and_the_requests_own_goes_first(
    max_new_tokens, context_room, reason
):
    ending = Ending(
        eos_token_ids=(),
        stop_token_ids=(),
        max_new_tokens=max_new_tokens,
        context_room=context_room,
    )

    assert [ending.hear(5), ending.hear(5)] == [None, reason]
