"""`la-export build`: compile a model into a bundle."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import click

from la_export.cli.plan import MakePlanOptions, plan_options
from la_export.cli.recipe import recipe_option
from la_export.options import (
    DEFAULT_PREFILL_CHUNK,
    BuildOptions,
    Precision,
)
from la_runtime.contract import CacheForm

__all__ = ["build_command"]


@click.command("build")
@recipe_option
@click.option(
    "--model",
    required=True,
    metavar="MODEL",
    help="Folder, .gguf file, hub id (owner/name) or known name such as smollm2-135m.",
)
@click.option(
    "--k",
    "lookahead_lengths",
    type=int,
    multiple=True,
    default=(4,),
    show_default=True,
    metavar="K",
    help="Lookahead tokens per step; repeat for several. 0 decodes plainly.",
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
    "--smoothing/--no-smoothing",
    default=True,
    show_default=True,
    help="int8: turn and scale activations by what the weights undo, so that none stands out.",
)
@click.option(
    "--lookahead",
    metavar="FILE|untuned|shipped",
    help="Tuned lookaheads, as la-export tune writes them.  [default: those shipped for this "
    "model, else untuned]",
)
@click.option(
    "--lora",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="PEFT adapter to merge into the weights: a folder with adapter_model.safetensors.",
)
@click.option(
    "--packed/--not-packed",
    default=False,
    show_default=True,
    help="Store weights also as this processor's kernels read them: processes then share them.",
)
@click.option(
    "--prefill-chunk",
    type=int,
    default=DEFAULT_PREFILL_CHUNK,
    show_default=True,
    metavar="N",
    help="Prompt tokens that a pass of a plan, or of cache form scatter, has room for.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The bundle's folder.  [default: engines/<name>]",
)
@click.option(
    "--context",
    type=int,
    metavar="N",
    help="Positions to serve.  [default: the model's own limit]",
)
@click.option("--revision", metavar="REV", help="Hub revision: branch, tag or commit.")
@click.option("--threads", type=int, metavar="N", help="CPU threads for the checks.")
@plan_options("auto", "onnx", "trt", "trt-rtx")
@click.option("--allow-bin", is_flag=True, help="Read pickle-based .bin weights, weights-only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no table.")
@click.option("-v", "--verbose", is_flag=True, help="Also show what the libraries log.")
def build_command(
    model: str,
    lookahead_lengths: tuple[int, ...],
    precision: str,
    cache_form: str,
    lookahead: str | None,
    lora: Path | None,
    prefill_chunk: int,
    out: Path | None,
    context: int | None,
    revision: str | None,
    threads: int | None,
    plans: MakePlanOptions,
    *,
    smoothing: bool,
    packed: bool,
    allow_bin: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Compile MODEL into a bundle and check it against PyTorch.

    The bundle always serves ONNX Runtime; --target says which TensorRT has plans in it as well.

    Prints the bundle's path to stdout; progress and a table of what was made go to stderr.
    """
    began = time.perf_counter()
    options = BuildOptions(
        model=model,
        lookahead_lengths=lookahead_lengths,
        precision=Precision(precision),
        cache_form=CacheForm(cache_form),
        smoothing=smoothing,
        lookahead=lookahead,
        lora=lora,
        packed=packed,
        prefill_chunk=prefill_chunk,
        out=out,
        context=context,
        revision=revision,
        threads=threads,
        allow_bin=allow_bin,
    )
    asked_plans = plans(options.sorted_lengths, prefill_chunk)
    from la_export.cli.console import StageLines, make_console, quiet_libraries

    console = make_console(quiet=quiet)
    with StageLines(console) as progress:
        quiet_libraries(verbose=verbose)
        from la_export.cli.report import print_report, report_record
        from la_export.pipeline import build

        report = build(options, progress, plans=asked_plans)
    # What the user waited for, loading the libraries included.
    report = replace(report, seconds=time.perf_counter() - began)
    print_report(report, console)
    if as_json:
        click.echo(json.dumps(report_record(report), indent=2))
    else:
        click.echo(str(report.bundle))
