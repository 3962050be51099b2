"""The shapes a plan is built for, made from the contract. Pure.

A plan has a profile for passes that read a prompt and one for the steps of a lookahead length.
Both allow every width from one row on: they differ in the widest pass, for which memory is set
aside, and in the likely one, for which kernels are chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from la_export.plan.options import PlanOptions
from la_runtime.contract import Axis, Contract
from la_runtime.errors import UsageError
from la_runtime.layout import Layout
from la_runtime.plans import AxisRange, PlanProfile

__all__ = [
    "PREFILL",
    "STEP",
    "Sizes",
    "check_profile",
    "make_graph_widths",
    "make_prefill_profile",
    "make_step_profile",
    "resolve_sizes",
]

PREFILL: Final = "prefill"
STEP: Final = "step"
# Beside the widest step: whoever verifies a plan scores every row of passes this much wider.
_MORE_SCORED_ROWS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that profiles are made of.

    Args:
        context: positions of the model.
        max_batch: most sequences of a pass.
        prefill_chunk: most prompt tokens of a pass.
    """

    context: int
    max_batch: int
    prefill_chunk: int


def resolve_sizes(
    options: PlanOptions, contract: Contract, *, context: int, largest_k: int
) -> Sizes:
    """Settle the sizes: no chunk is longer than the context and the cache have room for.

    Args:
        options: what is asked of the plans.
        contract: of the graph.
        context: positions of the model.
        largest_k: of the lookahead lengths to build for.
    """
    room = context
    if contract.capacity is not None:
        room = min(room, contract.capacity - context - largest_k)
    return Sizes(
        context=context,
        max_batch=options.max_batch,
        prefill_chunk=min(options.prefill_chunk, room),
    )


def make_prefill_profile(contract: Contract, sizes: Sizes, *, k: int) -> PlanProfile:
    """The profile of passes that read a prompt, up to a whole chunk and a group behind it."""
    widest = sizes.prefill_chunk + k
    most_scored = min(Layout.FULL.max_rows(k) + _MORE_SCORED_ROWS, widest)
    return PlanProfile(
        name=PREFILL,
        k=k,
        axes=_make_axes(
            contract,
            sizes,
            block=AxisRange(least=1, likely=widest, most=widest),
            rows=AxisRange(least=1, likely=min(1 + k, most_scored), most=most_scored),
            likely_past=max(min(sizes.prefill_chunk, sizes.context - sizes.prefill_chunk), 1),
        ),
    )


def make_step_profile(contract: Contract, sizes: Sizes, *, k: int) -> PlanProfile:
    """The profile of steps of a lookahead length, up to its widest layout.

    Likely are the rows of the default layout, all of them scored.
    """
    rows = AxisRange(least=1, likely=Layout.ROOT_ONLY.max_rows(k), most=Layout.FULL.max_rows(k))
    return PlanProfile(
        name=STEP,
        k=k,
        axes=_make_axes(
            contract, sizes, block=rows, rows=rows, likely_past=max(sizes.context // 2, 1)
        ),
    )


def _make_axes(
    contract: Contract, sizes: Sizes, *, block: AxisRange, rows: AxisRange, likely_past: int
) -> dict[Axis, AxisRange]:
    # Never empty, for which not every kernel is made: a fresh cache shows one column, hidden.
    past = AxisRange(least=1, likely=likely_past, most=sizes.context)
    ranges = {
        Axis.BATCH: AxisRange(least=1, likely=1, most=sizes.max_batch),
        Axis.BLOCK: block,
        Axis.ROWS: rows,
        Axis.PAST: past,
        Axis.KEYS: AxisRange(
            least=past.least + block.least,
            likely=past.likely + block.likely,
            most=past.most + block.most,
        ),
    }
    return {axis: ranges[axis] for axis in _dynamic_axes(contract)}


def _dynamic_axes(contract: Contract) -> tuple[Axis, ...]:
    """Of the inputs, each once."""
    axes = (axis for spec in contract.inputs for axis in spec.axes)
    return tuple(dict.fromkeys(axis for axis in axes if isinstance(axis, Axis)))


def make_graph_widths(lengths: Iterable[int]) -> tuple[int, ...]:
    """Block widths to capture CUDA graphs for: of a plain step, and of each k's usual ones.

    Usual are a step without drafts, one with all drafts in the default layout, and the widest.
    """
    widths = {1}
    for k in lengths:
        widths |= {1 + k, Layout.ROOT_ONLY.max_rows(k), Layout.FULL.max_rows(k)}
    return tuple(sorted(widths))


def check_profile(profile: PlanProfile, contract: Contract, *, context: int) -> None:
    """Refuse a profile that contradicts itself or the contract, before TensorRT sees it.

    Args:
        profile: to check.
        contract: of the graph it is for.
        context: positions of the model.

    Raises:
        UsageError: the first contradiction, with the axis it is about.
    """
    for problem in _problems(profile, contract, context):
        raise UsageError(
            f"profile {profile.name!r} for k = {profile.k} contradicts itself: {problem}; build "
            "with other sizes"
        )


def _problems(profile: PlanProfile, contract: Contract, context: int) -> Iterator[str]:
    axes = profile.axes
    wanted = set(_dynamic_axes(contract))
    if set(axes) != wanted:
        yield f"it ranges over {', '.join(sorted(axes))}, expected {', '.join(sorted(wanted))}"
        return
    for axis, span in axes.items():
        sizes = (span.least, span.likely, span.most)
        if not span.least <= span.likely <= span.most:
            yield f"{axis} goes from {span.least} over {span.likely} to {span.most}"
        if span.least < 1:
            yield f"{axis} begins at {span.least}, expected at least 1"
        if axis is Axis.KEYS:
            past, block = axes[Axis.PAST], axes[Axis.BLOCK]
            sums = (
                past.least + block.least,
                past.likely + block.likely,
                past.most + block.most,
            )
            if sizes != sums:
                yield f"keys are {sizes}, past and block together {sums}"
    if axes[Axis.ROWS].most > axes[Axis.BLOCK].most:
        yield f"{axes[Axis.ROWS].most} rows of a block of {axes[Axis.BLOCK].most} are scored"
    if contract.capacity is not None and axes[Axis.BLOCK].most > contract.capacity - context:
        yield (
            f"a block of {axes[Axis.BLOCK].most} rows does not fit behind {context} places of a "
            f"capacity of {contract.capacity}"
        )
