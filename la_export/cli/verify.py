"""`la-export verify`: prove that a bundle says what its model says, and certify it."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from la_runtime.errors import ExitCode, HostError, LookaheadError, NotRunError, UsageError

if TYPE_CHECKING:
    from la_export.cli.output import Output
    from la_export.verify.findings import Suspect
    from la_export.verify.ladder import Rung
    from la_export.verify.reference import SourceModel
    from la_export.verify.report import LadderReport
    from la_export.verify.verification import Bisect, OpenSource
    from la_runtime.bundle import Bundle

__all__ = ["verify_command"]


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--reference",
    type=click.Choice(["torch", "self"]),
    default="torch",
    show_default=True,
    help="torch: the checkpoint in PyTorch. self: the bundle's own plain decoding, torch-free.",
)
@click.option(
    "--model",
    metavar="MODEL",
    help="Where the checkpoint is now.  [default: where the bundle was made from]",
)
@click.option(
    "--lora",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The PEFT adapter that was merged into the bundle's weights, if one was.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Texts to compare on: one a line, or .jsonl with 'prompt' or 'turns'.",
)
@click.option(
    "--k",
    "lookahead_lengths",
    type=int,
    multiple=True,
    metavar="K",
    help="Lookahead length to compare; repeat for several.  [default: those built]",
)
@click.option("--backend", default="ort-cpu", show_default=True, help="What runs the graph.")
@click.option(
    "--quick",
    is_flag=True,
    help="Few prompts and tokens: a minute or two for a small model, and no certificate.",
)
@click.option(
    "--threads",
    type=click.IntRange(0, 1024),
    default=0,
    metavar="N",
    help="CPU threads of a pass.  [default: the library's choice]",
)
@click.option("--bisect", is_flag=True, help="Name the layer where logits depart from PyTorch's.")
@click.option(
    "--no-certificate",
    is_flag=True,
    help="Leave the manifest as it is: certify nothing, take no certificate away.",
)
@click.option(
    "--junit", type=click.Path(path_type=Path), metavar="FILE", help="Also write JUnit's XML."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no table.")
def verify_command(
    bundle: Path,
    reference: str,
    model: str | None,
    lora: Path | None,
    prompts: Path | None,
    lookahead_lengths: tuple[int, ...],
    backend: str,
    threads: int,
    junit: Path | None,
    *,
    quick: bool,
    bisect: bool,
    no_certificate: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Climb the ladder of 16 proofs for BUNDLE; of 17 on another backend than ort-cpu.

    Writes reports/verify-<time>.json into the bundle and, after a full run of every k and of the
    prompts that ship with it in which nothing failed, a certificate into its manifest. A run that
    fails takes the certificates for its backend away. Ends with 0 if it is verified, 1 if a rung
    failed, 3 if one could not be run.
    """
    _check_options(bundle, reference, model, junit, bisect=bisect)
    from la_export.verify.ladder import FULL, QUICK
    from la_export.verify.prompts import read_prompts
    from la_export.verify.report import check_writable, printable, write_junit
    from la_export.verify.verification import VerifyOptions, departs, verify

    options = VerifyOptions(
        bundle=bundle,
        backend=backend,
        lookahead_lengths=tuple(sorted(set(lookahead_lengths))),
        prompts=() if prompts is None else read_prompts(prompts),
        settings=QUICK if quick else FULL,
        threads=threads,
    )
    if bundle.is_dir():
        check_writable(bundle)
    open_source: OpenSource | None = None
    if reference == "torch":
        _load_torch(bisect=bisect)
        open_source = _source_opener(model, lora, threads)
    output = _make_output(quiet=quiet)
    with output.lines() as progress:
        report, opened = verify(
            options,
            open_source=open_source,
            bisect=_make_bisect(threads) if bisect else None,
            further_rungs=_further_rungs(backend),
            progress=progress,
        )
    # What was found comes first: whatever happens to the bundle's disk, it is not lost.
    output.ladder(report)
    if open_source is not None and not bisect and departs(report.results):
        output.line("note: --bisect names the layer where the logits depart from PyTorch's")
    click.echo(json.dumps(report.record(), indent=2) if as_json else report.verdict)
    if opened is None:
        click.echo(f"error: {printable(report.results[0].detail)}", err=True)
    if junit is not None:
        write_junit(report, junit)
    if opened is not None:
        _publish(report, opened, output, certify=not no_certificate)
    click.get_current_context().exit(int(report.exit_code))


def _publish(report: LadderReport, bundle: Bundle, output: Output, *, certify: bool) -> None:
    """Write into the bundle, and say what; an error hides no failure that was found."""
    from la_export.verify.report import printable
    from la_export.verify.verification import publish

    try:
        published = publish(report, bundle, certify=certify)
    except LookaheadError as error:
        if report.exit_code is ExitCode.DONE:
            raise
        click.echo(f"error: {error}", err=True)
        return
    output.line(f"report {printable(str(published.report))}")
    if published.num_withdrawn:
        output.line(
            f"note: {published.num_withdrawn} certificate(s) for {report.backend} taken away, "
            "because the verification failed"
        )
    elif not certify and report.exit_code is ExitCode.FAILED and bundle.manifest.certificates:
        output.line("note: --no-certificate leaves the bundle's certificates as they are")
    for line in report.left_out:
        output.line(f"note: no certificate without {line}")


def _check_options(
    bundle: Path, reference: str, model: str | None, junit: Path | None, *, bisect: bool
) -> None:
    """Refuse what cannot be right before the long work."""
    if junit is not None and junit.resolve().is_relative_to(bundle.resolve()):
        raise UsageError(
            f"--junit {junit} lies inside the bundle, which holds its own files only; choose "
            "another place"
        )
    if reference == "self" and model is not None:
        raise UsageError("--model is for --reference torch; leave one of the two out")
    if reference == "self" and bisect:
        raise UsageError("--bisect compares with PyTorch; use it with --reference torch")
    if junit is not None and not (
        junit.absolute().parent.is_dir()
        and os.access(junit.absolute().parent, os.W_OK)
        and not junit.is_dir()
    ):
        raise UsageError(f"--junit {junit} cannot be written; give a file in a writable folder")


def _make_output(*, quiet: bool) -> Output:
    """Tables where there is rich, which only the extra `export` installs; else plain lines."""
    if importlib.util.find_spec("rich") is None:
        from la_export.cli.plain_ladder import PlainOutput

        return PlainOutput(quiet=quiet)
    from la_export.cli.ladder import RichOutput

    return RichOutput(quiet=quiet)


def _load_torch(*, bisect: bool) -> None:
    """Load PyTorch, what reads checkpoints and, if wanted, what looks for a layer, quietly.

    Raises:
        NotRunError: a package is missing; a verification against PyTorch was then not run.
    """
    try:
        from la_export.cli.console import quiet_libraries

        quiet_libraries(verbose=False)
        import la_export.verify.source_model

        if bisect:
            import la_export.verify.bisect  # noqa: F401
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).partition(".")[0]
        if package in ("la_export", "la_runtime"):
            raise
        what = "--bisect" if package == "polygraphy" else "--reference torch"
        raise NotRunError(
            f"{what} needs the package {package}, which is not installed; run: "
            "pip install 'lookahead-attention[export,cpu]', or use --reference self"
        ) from error


def _further_rungs(backend: str) -> tuple[Rung, ...]:
    """Other backends than ONNX Runtime on the CPU are compared with it, where that can be."""
    if backend == "ort-cpu":
        return ()
    try:
        from la_export.verify.rungs.tensors import TENSORS
    except (ModuleNotFoundError, HostError) as error:
        from la_export.verify.rungs import skip_tensors

        return (skip_tensors(str(error)),)
    return (TENSORS,)


def _source_opener(model: str | None, lora: Path | None, threads: int) -> OpenSource:
    from la_export.verify.source_model import open_source

    def open_it(bundle: Bundle) -> SourceModel:
        return open_source(bundle, model, threads=threads, lora=lora)

    return open_it


def _make_bisect(threads: int) -> Bisect:
    from la_export.reference import TorchReference
    from la_export.verify.bisect import find_departure

    def bisect(bundle: Bundle, source: SourceModel, suspect: Suspect) -> str:
        assert isinstance(source.reference, TorchReference), "checked by the options"
        found = find_departure(
            bundle,
            source.reference,
            suspect.token_ids,
            position_ids=suspect.position_ids,
            threads=threads,
        )
        if found.layer is None:
            return (
                f"bisect: no hidden state of the portable graph departs from PyTorch's; the "
                f"largest difference is {found.difference:.2g} of its size"
            )
        return (
            f"bisect: {found.layer} is the first to depart from PyTorch, by "
            f"{found.difference:.2g} of its size (at most {found.bound:.0e})"
        )

    return bisect
