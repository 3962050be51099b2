"""Make docs/results/tuning.json: what `la-export tune` said of the lookaheads that are shipped.

.venv/bin/python scripts/tuned.py
"""

from __future__ import annotations

import json
from pathlib import Path

from la_export.bench.results import Column, write_result
from la_export.lookahead_choice import SHIPPED_FOLDER

COLUMNS = [
    Column(key="slot", title="Slot"),
    Column(key="untuned", title="Untuned", digits=3),
    Column(key="tuned", title="Tuned", digits=3),
]


def main() -> None:
    """One model is shipped."""
    (path,) = SHIPPED_FOLDER.glob("*.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    held_out = record["held_out"]
    both = zip(held_out["untuned_by_slot"], held_out["tuned_by_slot"], strict=True)
    write_result(
        Path("docs/results/tuning.json"),
        command=record["command"],
        columns=COLUMNS,
        rows=[
            {"slot": slot, "untuned": before, "tuned": after}
            for slot, (before, after) in enumerate(both, 1)
        ],
        facts={
            "held_out_prefixes": held_out["anchors"],
            "chain_tokens_per_pass": held_out["chain_tokens_per_pass"],
            "extra_weights": record["extra_weights"],
            "texts": record["texts"],
            "writing_s": record["writing_s"],
            "training_s": record["training_s"],
            "steps": record["steps"],
        },
    )


if __name__ == "__main__":
    main()
