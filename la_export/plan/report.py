"""What was built, for whoever shows it or writes it down."""

from __future__ import annotations

from dataclasses import dataclass

from la_export.plan.layers import LayerCounts
from la_runtime.plans import PlanFacts

__all__ = ["Compiled", "PlanReport", "PlansReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One plan as it was compiled.

    Args:
        bytes: of the file.
        seconds: wall time.
        num_attentions: of the network.
        layers: what the builder says of the layers; None if it says nothing.
    """

    bytes: int
    seconds: float
    num_attentions: int
    layers: LayerCounts | None

    @property
    def fused_attentions(self) -> int | None:
        """Attentions that one kernel computes, in the profile that has fewest; None if unknown."""
        if self.layers is None or self.layers.fused_attentions is None:
            return None
        return min(self.layers.fused_attentions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """One plan as it was built.

    Args:
        facts: what the manifest says of it.
        compiled: size, time and layers.
    """

    facts: PlanFacts
    compiled: Compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class PlansReport:
    """The plans that were built.

    Args:
        plans: in the order of their lookahead lengths.
        skipped: a line for each TensorRT that could not be used, with what to do.
    """

    plans: tuple[PlanReport, ...]
    skipped: tuple[str, ...]

    @property
    def facts(self) -> tuple[PlanFacts, ...]:
        """What the manifest is to say of them."""
        return tuple(plan.facts for plan in self.plans)
