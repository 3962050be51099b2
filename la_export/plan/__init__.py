"""TensorRT plans: built from a bundle's portable graph, for each lookahead length or for all."""

from __future__ import annotations

from la_export.plan.addition import AddedPlans, add_plans
from la_export.plan.options import PlanOptions, PlanSharing, Target
from la_export.plan.plans import PlanSource, build_plans, check_plan_options
from la_export.plan.progress import PlanProgress, SilentPlanProgress
from la_export.plan.report import PlanReport, PlansReport

__all__ = [
    "AddedPlans",
    "PlanOptions",
    "PlanProgress",
    "PlanReport",
    "PlanSharing",
    "PlanSource",
    "PlansReport",
    "SilentPlanProgress",
    "Target",
    "add_plans",
    "build_plans",
    "check_plan_options",
]
