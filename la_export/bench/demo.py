"""The body of `scripts/demo`: shows two generations side by side and says whether they agree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

__all__ = ["describe_build", "describe_generations", "is_identical"]

_ROWS: Final = (
    ("prompt_tokens", "prompt tokens"),
    ("new_tokens", "new tokens"),
    ("passes", "passes"),
    ("prefill_passes", "  of them prefill"),
    ("tokens_per_pass", "tokens per pass"),
    ("tokens_per_s", "tokens/s"),
    ("ttft_s", "first token after (s)"),
)


def is_identical(plain: Mapping[str, Any], lookahead: Mapping[str, Any]) -> bool:
    """Whether both generations have the same tokens, text and end."""
    return all(plain[field] == lookahead[field] for field in ("token_ids", "text", "finish_reason"))


def describe_generations(plain: Mapping[str, Any], lookahead: Mapping[str, Any]) -> str:
    """Both statistics as a table, then `identical: yes` or the first difference.

    Args:
        plain: what `la-runtime generate --k 0 --json` printed.
        lookahead: the same with lookahead tokens.
    """
    lines = [f"{'':<24}{'plain':>10}{'lookahead':>12}"]
    for field, title in _ROWS:
        cells = [_show(generation["stats"][field]) for generation in (plain, lookahead)]
        lines.append(f"{title:<24}{cells[0]:>10}{cells[1]:>12}")
    verdict = "yes" if is_identical(plain, lookahead) else f"no, {_difference(plain, lookahead)}"
    return "\n".join([*lines, "", f"identical: {verdict}"])


def describe_build(report: Mapping[str, Any]) -> str:
    """One line: what `la-export build --json` says the build took."""
    return (
        f"built {report['bundle']} in {report['seconds']:.1f} s, "
        f"peak memory {report['peak_rss_bytes'] / 1e9:.2f} GB"
    )


def _show(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _difference(plain: Mapping[str, Any], lookahead: Mapping[str, Any]) -> str:
    pairs = zip(plain["token_ids"], lookahead["token_ids"], strict=False)
    for place, (one, other) in enumerate(pairs):
        if one != other:
            return f"new token {place} is {one} plainly and {other} with lookahead"
    return "one is longer than the other or ended differently"


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def _main(folder: Path) -> None:
    """Read k0.json, k4.json and, if there was a build, build.json from FOLDER."""
    plain, lookahead = (
        json.loads((folder / f"k{k}.json").read_text(encoding="utf-8")) for k in (0, 4)
    )
    click.echo(f"{lookahead['text']}\n")
    build = folder / "build.json"
    if build.is_file():
        click.echo(describe_build(json.loads(build.read_text(encoding="utf-8"))))
    click.echo(describe_generations(plain, lookahead))
    if not is_identical(plain, lookahead):
        raise click.ClickException("lookahead decoding changed the text, which it never may")


if __name__ == "__main__":
    _main()
