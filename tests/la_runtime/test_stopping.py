"""Ends inside an accepted block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from la_runtime.stopping import FinishReason, cut_at_end


@given(
    token_ids=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    eos=st.sets(st.integers(0, 4), max_size=2),
    room=st.integers(1, 9),
)
def test_cutting_a_block_equals_stopping_token_by_token(token_ids, eos, room):
    kept, reason = [], None
    for token_id in token_ids:
        kept.append(token_id)
        if token_id in eos:
            reason = FinishReason.EOS
        elif len(kept) == room:
            reason = FinishReason.LENGTH
        if reason:
            break

    asked = []

    def ends_with(token_id):
        asked.append(token_id)
        return FinishReason.EOS if token_id in eos else None

    found = cut_at_end(token_ids, ends_with=ends_with, room=room, at_room=FinishReason.LENGTH)
    assert found == (tuple(kept), reason)
    assert asked == kept, "no token after the end is heard"
