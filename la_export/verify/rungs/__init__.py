"""The rungs of the ladder, in order. Each is a function of the ladder and can fail."""

from __future__ import annotations

from typing import Final

from la_export.verify.findings import Finding
from la_export.verify.ladder import Rung
from la_export.verify.rungs.batches import check_padding
from la_export.verify.rungs.ending import check_endings
from la_export.verify.rungs.equality import (
    check_greedy_equality,
    check_sampled_equality,
    check_teacher_forced,
)
from la_export.verify.rungs.files import check_files
from la_export.verify.rungs.finite import check_finite
from la_export.verify.rungs.isolation import check_no_leak, check_unused_places
from la_export.verify.rungs.logits import check_logits, check_slot_logits
from la_export.verify.rungs.perplexity import check_perplexity
from la_export.verify.rungs.positions import check_last_positions
from la_export.verify.rungs.text import check_text
from la_export.verify.rungs.widths import check_epsilon, check_fixed_width

__all__ = ["RUNGS", "skip_tensors"]

RUNGS: Final = (
    Rung(number=1, name="contract and digests", check=check_files),
    Rung(number=2, name="logits", check=check_logits),
    Rung(number=3, name="epsilon", check=check_epsilon),
    Rung(number=4, name="padding and ragged batches", check=check_padding),
    Rung(number=5, name="greedy equality", check=check_greedy_equality),
    Rung(number=6, name="fixed width", check=check_fixed_width),
    Rung(number=7, name="teacher-forced audit", check=check_teacher_forced),
    Rung(number=8, name="sampled equality", check=check_sampled_equality),
    Rung(number=9, name="no leak", check=check_no_leak),
    Rung(number=10, name="slot logits", check=check_slot_logits),
    Rung(number=11, name="cache audit", check=check_unused_places),
    Rung(number=12, name="endings", check=check_endings),
    Rung(number=13, name="tokenizer and template", check=check_text),
    Rung(number=14, name="last positions", check=check_last_positions),
    Rung(number=15, name="finite numbers", check=check_finite),
    Rung(number=16, name="perplexity", check=check_perplexity),
)


def skip_tensors(reason: str) -> Rung:
    """What stands in the place of rung 17, `tensors`, where its packages are not installed."""
    finding = Finding(
        skipped=f"it compares with ONNX Runtime through Polygraphy, and cannot here ({reason}); "
        "run: pip install 'lookahead-attention[export,cpu]'"
    )
    return Rung(number=len(RUNGS) + 1, name="tensors", check=lambda _: finding)
