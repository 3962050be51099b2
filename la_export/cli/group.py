"""The command group: turns errors into one line and an exit code."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Final

import click

from la_export.cli.bench import bench_command
from la_export.cli.build import build_command
from la_export.cli.doctor import doctor_command
from la_export.cli.estimate import estimate_command
from la_export.cli.inspect import inspect_command
from la_export.cli.perplexity import perplexity_command
from la_export.cli.plan import plan_command
from la_export.cli.tune import tune_command
from la_export.cli.verify import verify_command
from la_runtime.errors import ExitCode, LookaheadError

__all__ = ["main"]

_OWN_PACKAGES: Final = ("la_export", "la_runtime")


def _version() -> str:
    try:
        return importlib.metadata.version("lookahead-attention")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _missing_package(error: BaseException) -> str:
    """The package behind a failed import; transformers wraps such errors in nameless ones."""
    name = ""
    cause: BaseException | None = error
    while cause is not None:
        name = (isinstance(cause, ImportError) and cause.name) or name
        cause = cause.__cause__
    return name.partition(".")[0] or str(error)


class _Commands(click.Group):
    """Ends every command with the exit code of what happened."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LookaheadError as error:
            click.echo(f"error: {' '.join(str(error).split())}", err=True)
            ctx.exit(int(error.exit_code))
        except ModuleNotFoundError as error:
            package = _missing_package(error)
            if package in _OWN_PACKAGES:
                raise
            click.echo(
                f"error: the package {package} is not installed; run: "
                "pip install 'lookahead-attention[export,cpu]'",
                err=True,
            )
            ctx.exit(int(ExitCode.ENVIRONMENT))
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(int(ExitCode.INTERRUPTED))


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(_version(), message="la-export %(version)s")
def main() -> None:
    """Compile a Hugging Face decoder into a bundle that la-runtime decodes with lookahead."""


main.add_command(bench_command)
main.add_command(build_command)
main.add_command(doctor_command)
main.add_command(estimate_command)
main.add_command(inspect_command)
main.add_command(perplexity_command)
main.add_command(plan_command)
main.add_command(tune_command)
main.add_command(verify_command)
