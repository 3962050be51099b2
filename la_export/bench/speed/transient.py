"""K/V that steps write and throw away, beside the cache that stays. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Final

from la_export.bench.speed.record import CacheShare, TransientShare
from la_runtime.contract import Contract
from la_runtime.layout import Layout
from la_runtime.storage import storage_dtype

__all__ = ["CACHE_TOKENS", "transient_shares"]

CACHE_TOKENS: Final = (256, 1024, 4096)
_SMALL_PERCENT: Final = 2


def transient_shares(
    contract: Contract, *, lengths: Sequence[int], layouts: Sequence[Layout]
) -> tuple[TransientShare, ...]:
    """What the widest step of each k and layout throws away if no draft stands.

    Args:
        contract: of the graph.
        lengths: values of k; 0 throws nothing away and is left out.
        layouts: where groups stand.
    """
    return tuple(_share(contract, k, layout) for k, layout in product(lengths, layouts) if k > 0)


def _share(contract: Contract, k: int, layout: Layout) -> TransientShare:
    discarded = layout.max_rows(k) - 1
    row_bytes = (
        2
        * contract.num_layers
        * contract.num_kv_heads
        * contract.head_dim
        * storage_dtype(contract.kv_dtype).itemsize
    )
    return TransientShare(
        k=k,
        layout=layout,
        rows=discarded,
        lookahead_rows=discarded - k,
        num_bytes=discarded * row_bytes,
        shares=tuple(CacheShare(tokens=n, share=discarded / n) for n in CACHE_TOKENS),
        small_from=discarded * 100 // _SMALL_PERCENT + 1,
    )
