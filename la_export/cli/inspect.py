"""`la-export inspect`: show what a bundle is, after checking every digest."""

from __future__ import annotations

import json
from pathlib import Path

import click

__all__ = ["inspect_command"]


@click.command("inspect")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Only check: print nothing when all is well.")
def inspect_command(bundle: Path, *, as_json: bool, quiet: bool) -> None:
    """Check BUNDLE and print its facts, tensors, checks and files."""
    from la_runtime.bundle import open_bundle

    opened = open_bundle(bundle)
    if as_json:
        click.echo(json.dumps(opened.manifest.model_dump(mode="json"), indent=2))
        return
    if quiet:
        return
    from la_export.cli.console import make_output_console
    from la_export.cli.facts import print_manifest

    print_manifest(opened.manifest, make_output_console())
