"""How both commands turn exceptions into one line and an exit code."""

from __future__ import annotations

import sys
from typing import Any

import click

from la_runtime.errors import ExitCode, LookaheadError

__all__ = ["ErrorReportingGroup"]


class ErrorReportingGroup(click.Group):
    """A click group whose user errors end in one line on stderr and their exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run; a `LookaheadError` or Ctrl-C becomes a message and an exit code."""
        standalone = kwargs.pop("standalone_mode", True)
        kwargs["standalone_mode"] = False
        try:
            result = super().main(*args, **kwargs)
        except click.ClickException as error:
            if not standalone:
                raise
            error.show()
            sys.exit(error.exit_code)
        except LookaheadError as error:
            if not standalone:
                raise
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            sys.exit(ExitCode.INTERRUPTED)
        except BrokenPipeError:
            # The reader of our output went away; nothing is left to say and nobody to say it to.
            sys.stderr.close()
            sys.exit(ExitCode.FAILED)
        if standalone:
            sys.exit(result if isinstance(result, int) else ExitCode.DONE)
        return result
