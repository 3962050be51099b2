from __future__ import annotations

import pytest

from la_export.bench.speed.transient import transient_shares
from la_runtime.contract import Contract, Dtype
from la_runtime.layout import Layout

CONTRACT = Contract(
    num_layers=3,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=16,
    vocab_size=40,
    k_max=4,
    top_c=8,
    kv_dtype=Dtype.FLOAT16,
)


def test_all_rows_but_the_root_are_thrown_away_at_most() -> None:
    root_only, full = transient_shares(CONTRACT, lengths=[0, 4], layouts=list(Layout))

    # k = 4: a root, 4 drafts, and 4 slots behind one prefix or behind each of 5.
    assert (root_only.rows, root_only.lookahead_rows) == (8, 4)
    assert (full.rows, full.lookahead_rows) == (24, 20)
    assert root_only.num_bytes == 8 * 2 * 3 * 2 * 8 * 2
    assert [share.share for share in full.shares] == pytest.approx([24 / 256, 24 / 1024, 24 / 4096])


def test_the_share_is_under_two_percent_from_the_length_named_on() -> None:
    for found in transient_shares(CONTRACT, lengths=[1, 2, 3, 4], layouts=list(Layout)):
        assert found.rows / found.small_from < 0.02
        assert found.rows / (found.small_from - 1) >= 0.02
