"""`la-export plan`: build TensorRT plans for a finished bundle, on the machine that is to run them.

Needs neither PyTorch nor rich: it runs where only the runtime and a TensorRT are installed.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click

from la_export.options import DEFAULT_PREFILL_CHUNK

if TYPE_CHECKING:
    from la_export.plan import PlanOptions

__all__ = ["MakePlanOptions", "plan_command", "plan_options"]

MakePlanOptions: TypeAlias = "Callable[[tuple[int, ...], int], PlanOptions]"
"""Makes the options of plans for these lookahead lengths and most prompt tokens of a pass."""

_CAPABILITY: Final = re.compile(r"(?:sm)?(\d+)\.?(\d)", re.IGNORECASE)


def _read_capability(_: click.Context, __: click.Parameter, values: Sequence[str]) -> list[str]:
    """Take 8.9, 89, sm89 and SM89 for the same; what is none of them is refused later."""
    found = [(_CAPABILITY.fullmatch(value), value) for value in values]
    return [f"SM{match[1]}{match[2]}" if match else value for match, value in found]


_OPTIONS: Final = (
    click.option(
        "--plans",
        "sharing",
        type=click.Choice(["per-k", "shared"]),
        default="per-k",
        show_default=True,
        help="A plan for each k, or one for all, which holds the weights once.",
    ),
    click.option(
        "--max-batch",
        type=int,
        metavar="N",
        default=4,
        show_default=True,
        help="Most sequences of a pass in a plan.",
    ),
    click.option(
        "--workspace",
        "workspace_mib",
        type=int,
        metavar="MIB",
        help="Device memory a layer may use while it runs.  [default: TensorRT's own limit]",
    ),
    click.option(
        "--opt-level",
        "optimization_level",
        type=int,
        metavar="N",
        help="0 (quickly built) to 5 (quickly run).  [default: TensorRT's own]",
    ),
    click.option(
        "--hardware-compatibility",
        type=click.Choice(["none", "ampere-plus", "same-compute-capability"]),
        default="none",
        show_default=True,
        help="Other GPUs on which a plan loads (trt).",
    ),
    click.option(
        "--version-compatible",
        "is_version_compatible",
        is_flag=True,
        help="Let plans load in later versions of TensorRT (trt).",
    ),
    click.option(
        "--strip",
        "is_stripped",
        is_flag=True,
        help="Leave the weights out of plans; they are refitted when opened (trt).",
    ),
    click.option(
        "--compute-capability",
        "compute_capabilities",
        multiple=True,
        callback=_read_capability,
        metavar="CC",
        help="GPU that plans are for, such as 8.9; repeat for several (trt-rtx).  "
        "[default: 8.0 and later, see docs]",
    ),
    click.option(
        "--timing-cache",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help="Where kernel timings are kept (trt).  [default: in the user's cache folder]",
    ),
)


def plan_options(*targets: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of plans; they arrive as one argument, `plans`.

    That is a `MakePlanOptions`: nothing of plans is loaded before it is called.

    Args:
        targets: what ``--target`` may be; the first is the default.
    """
    target = click.option(
        "--target",
        type=click.Choice(targets),
        default=targets[0],
        show_default=True,
        help="TensorRT to build plans for. auto: one that can be used here.",
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            values = {name: given.pop(name) for name in _option_names()}
            command(plans=functools.partial(_make_options, **values), **given)

        decorated: Callable[..., None] = run
        for option in reversed((target, *_OPTIONS)):
            decorated = option(decorated)
        return decorated

    return decorate


def _option_names() -> list[str]:
    parameters = inspect.signature(_make_options).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def _make_options(
    lookahead_lengths: tuple[int, ...],
    prefill_chunk: int,
    *,
    target: str,
    sharing: str,
    max_batch: int,
    workspace_mib: int | None,
    optimization_level: int | None,
    hardware_compatibility: str,
    is_version_compatible: bool,
    is_stripped: bool,
    compute_capabilities: Sequence[str],
    timing_cache: Path | None,
) -> PlanOptions:
    from la_export.plan import PlanOptions, PlanSharing, Target
    from la_export.plan.options import BYTES_PER_MIB
    from la_runtime.plans import HardwareCompatibility

    return PlanOptions(
        target=Target(target),
        lookahead_lengths=lookahead_lengths,
        sharing=PlanSharing(sharing),
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
        workspace_bytes=None if workspace_mib is None else workspace_mib * BYTES_PER_MIB,
        optimization_level=optimization_level,
        hardware_compatibility=HardwareCompatibility(hardware_compatibility),
        is_version_compatible=is_version_compatible,
        is_stripped=is_stripped,
        compute_capabilities=tuple(compute_capabilities),
        timing_cache=timing_cache,
    )


@click.command("plan")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--k",
    "lookahead_lengths",
    type=int,
    multiple=True,
    metavar="K",
    help="Lookahead length to build for; repeat for several.  [default: those of the bundle]",
)
@click.option(
    "--prefill-chunk",
    type=int,
    default=DEFAULT_PREFILL_CHUNK,
    show_default=True,
    metavar="N",
    help="Most prompt tokens of a pass, where context and cache have room for so many.",
)
@plan_options("auto", "trt", "trt-rtx")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no table.")
@click.option("-v", "--verbose", is_flag=True, help="Also show what TensorRT logs.")
def plan_command(
    bundle: Path,
    lookahead_lengths: tuple[int, ...],
    prefill_chunk: int,
    plans: MakePlanOptions,
    *,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Build TensorRT plans for BUNDLE, on the machine that is to run them.

    They take the place of those it has for the same target; the bundle stays whole throughout.
    Prints the bundle's path to stdout; progress and a table of what was made go to stderr.
    """
    if verbose:
        logging.basicConfig(level=logging.INFO)
    options = plans(lookahead_lengths, prefill_chunk)
    from la_export.cli.plan_lines import PlanLines, plans_record, print_plans
    from la_export.plan import add_plans

    with PlanLines(quiet=quiet) as progress:
        added = add_plans(bundle, options, progress=progress)
    if not quiet:
        print_plans(added.report)
    if as_json:
        record = {"bundle": str(added.bundle), **plans_record(added.report)}
        click.echo(json.dumps(record, indent=2))
    else:
        click.echo(str(added.bundle))
