from __future__ import annotations

from la_export.bench.speed.record import Selection
from la_export.bench.speed.run import pick_lengths
from la_export.bench.speed.ways import PLAINLY, Way, make_ways
from la_runtime.layout import Layout
from la_runtime.sampling import SamplingParams, Select


def test_every_k_comes_in_every_layout_and_once_by_threshold() -> None:
    ways = make_ways(
        [0, 2, 4],
        layouts=list(Layout),
        selections=[Selection.EXACT, Selection.THRESHOLD],
        tau=0.3,
    )

    assert ways[0] == PLAINLY
    assert len(ways) == 1 + 2 * (2 + 1)
    assert Way(selection=Selection.EXACT, k=4, layout=Layout.FULL) in ways
    assert Way(selection=Selection.THRESHOLD, k=2, tau=0.3) in ways


def test_a_way_is_decoded_greedily_by_its_own_rule() -> None:
    exact = Way(selection=Selection.EXACT, k=4, layout=Layout.FULL)
    threshold = Way(selection=Selection.THRESHOLD, k=2, tau=0.3)

    assert exact.params(7) == SamplingParams(max_new_tokens=7, k=4, layout=Layout.FULL)
    assert threshold.params(7) == SamplingParams(
        max_new_tokens=7, k=2, select=Select.THRESHOLD, tau=0.3
    )
    assert (exact.lossless, threshold.lossless) == (True, False)


def test_without_a_wish_the_usual_lengths_of_those_built_are_taken() -> None:
    assert pick_lengths([0, 2, 3, 4, 16], []) == (2, 4, 16)
    assert pick_lengths([0, 2, 3, 4, 16], [0, 3, 8]) == (3,)
