from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from la_export.plan.flavors import FLAVORS, check_options
from la_export.plan.options import PlanOptions
from la_runtime.errors import UsageError
from la_runtime.plans import HardwareCompatibility, PlanTarget

REFUSED: list[tuple[PlanTarget, str, dict[str, Any]]] = [
    (PlanTarget.TRT, "--compute-capability", {"compute_capabilities": ("SM89",)}),
    (
        PlanTarget.TRT_RTX,
        "--hardware-compatibility",
        {"hardware_compatibility": HardwareCompatibility.AMPERE_PLUS},
    ),
    (PlanTarget.TRT_RTX, "--version-compatible", {"is_version_compatible": True}),
    (PlanTarget.TRT_RTX, "--strip", {"is_stripped": True}),
    (PlanTarget.TRT_RTX, "--timing-cache", {"timing_cache": Path("timings")}),
]


@pytest.mark.parametrize(("target", "option", "given"), REFUSED)
def test_option_that_a_tensorrt_cannot_do_is_refused_by_name(
    target: PlanTarget, option: str, given: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=f"{option} cannot be used for target {target}: "):
        check_options(PlanOptions(**given), FLAVORS[target])


@pytest.mark.parametrize(("target", "option", "given"), REFUSED)
def test_what_one_refuses_the_other_can_do(
    target: PlanTarget, option: str, given: dict[str, Any]
) -> None:
    other = PlanTarget.TRT if target is PlanTarget.TRT_RTX else PlanTarget.TRT_RTX

    check_options(PlanOptions(**given), FLAVORS[other])


def test_every_refusal_of_the_table_is_met() -> None:
    met = {(target, option) for target, option, _ in REFUSED}

    assert met == {
        (target, option) for target, flavor in FLAVORS.items() for option in flavor.refuses
    }
