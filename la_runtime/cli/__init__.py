"""The `la-runtime` command."""

from __future__ import annotations

import click

from la_runtime.cli.errors import ErrorReportingGroup
from la_runtime.cli.generate import generate

__all__ = ["main"]


@click.group(cls=ErrorReportingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lookahead-attention", prog_name="la-runtime")
def main() -> None:
    """Run compiled bundles with Lookahead Attention."""


main.add_command(generate)
