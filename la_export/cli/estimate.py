"""`la-export estimate`: what a bundle will take, without building it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from la_export.options import DEFAULT_PREFILL_CHUNK, BuildOptions, Precision
from la_runtime.contract import CacheForm
from la_runtime.errors import HostError

if TYPE_CHECKING:
    from la_export.estimate import Limits

__all__ = ["estimate_command"]

# Gigabytes as memory and disks are sold.
_GB = 10**9


@click.command("estimate")
@click.option(
    "--model",
    required=True,
    metavar="MODEL",
    help="Folder, .gguf file, hub id (owner/name) or known name; only its configuration is read.",
)
@click.option(
    "--k",
    "lookahead_lengths",
    type=int,
    multiple=True,
    default=(4,),
    show_default=True,
    metavar="K",
    help="Lookahead tokens per step; repeat for several.",
)
@click.option(
    "--precision",
    type=click.Choice([precision.value for precision in Precision]),
    default=Precision.FP32.value,
    show_default=True,
    help="Numbers that weights, activations and cache are held in.",
)
@click.option(
    "--cache-form",
    type=click.Choice([form.value for form in CacheForm]),
    default=CacheForm.CONCAT.value,
    show_default=True,
    help="concat: the cache grows. scatter: its capacity is fixed, written in place.",
)
@click.option(
    "--context",
    type=int,
    metavar="N",
    help="Positions to serve.  [default: the model's own limit]",
)
@click.option(
    "--max-batch",
    type=int,
    metavar="N",
    help="Most sequences at a time.  [default: that of plans]",
)
@click.option(
    "--prefill-chunk",
    type=int,
    default=DEFAULT_PREFILL_CHUNK,
    show_default=True,
    metavar="N",
    help="Most prompt tokens of a pass.",
)
@click.option(
    "--device-memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    help="Memory of the GPU it is for.  [default: that of the GPU here]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("engines"),
    metavar="DIR",
    help="Where it would be built; the disk that is looked at.  [default: engines]",
)
@click.option("--revision", metavar="REV", help="Hub revision: branch, tag or commit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def estimate_command(
    model: str,
    lookahead_lengths: tuple[int, ...],
    precision: str,
    cache_form: str,
    context: int | None,
    max_batch: int | None,
    prefill_chunk: int,
    device_memory: float | None,
    out: Path,
    revision: str | None,
    *,
    as_json: bool,
) -> None:
    """Say what a bundle of MODEL will take: files, memory of host and GPU, rows per step.

    Nothing is built and no weight is read. Warns on stderr of what will not fit into this machine's
    free disk and memory, or into the GPU's. The figures leave out what a library sets aside for
    itself.
    """
    build = BuildOptions(
        model=model,
        lookahead_lengths=lookahead_lengths,
        precision=Precision(precision),
        cache_form=CacheForm(cache_form),
        prefill_chunk=prefill_chunk,
        context=context,
        revision=revision,
    )
    from la_export.cli.console import make_output_console, quiet_libraries

    quiet_libraries(verbose=False)
    from la_export.cli.estimate_tables import print_estimate
    from la_export.estimate import EstimateOptions, estimate, list_warnings, read_shape

    options = EstimateOptions(build=build)
    if max_batch is not None:
        options = EstimateOptions(build=build, max_batch=max_batch)
    found = estimate(read_shape(model, revision=revision, context=context), options)
    warnings = list_warnings(found, _read_limits(device_memory, out))
    if as_json:
        click.echo(json.dumps({**found.record(), "warnings": list(warnings)}, indent=2))
    else:
        print_estimate(found, make_output_console())
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


def _read_limits(device_memory: float | None, out: Path) -> Limits:
    """What this machine has; what it does not say warns of nothing."""
    from la_export.estimate import Limits
    from la_export.host import available_memory_bytes, free_disk_bytes
    from la_runtime.backends.gpu import read_gpu

    given = None if device_memory is None else int(device_memory * _GB)
    return Limits(
        disk=_if_known(lambda: free_disk_bytes(out)),
        memory=_if_known(available_memory_bytes),
        device=given or _if_known(lambda: read_gpu().total_memory_bytes),
    )


def _if_known(read: Callable[[], int]) -> int | None:
    try:
        return read()
    except HostError:
        return None
