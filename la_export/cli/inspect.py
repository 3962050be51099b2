"""`la-export inspect`: show what a bundle is, after checking every digest."""

from __future__ import annotations

import json
from pathlib import Path

import click

__all__ = ["inspect_command"]


@click.command("inspect")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--recipe", is_flag=True, help="Print the recipe that builds it, as TOML.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Only check: print nothing when all is well.")
def inspect_command(bundle: Path, *, recipe: bool, as_json: bool, quiet: bool) -> None:
    """Check BUNDLE and print its facts, tensors, checks and files.

    `la-export build --recipe` takes what --recipe prints; a model that was a local path is to be
    named beside it.
    """
    from la_runtime.bundle import open_bundle

    manifest = open_bundle(bundle).manifest
    if as_json:
        shown = manifest.model_dump(mode="json")
        click.echo(json.dumps(shown["recipe"] if recipe else shown, indent=2))
        return
    if quiet:
        return
    if recipe:
        from la_export.recipe import format_recipe

        click.echo(format_recipe(manifest.recipe, source=manifest.model.source), nl=False)
        return
    from la_export.cli.console import make_output_console
    from la_export.cli.facts import print_manifest

    print_manifest(manifest, make_output_console())
