"""The body of `scripts/demo`: whether an old bundle will do, and two generations side by side."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

__all__ = ["can_reuse", "describe_build", "describe_generations", "describe_reuse", "is_identical"]

K: Final = 4
_DISTRIBUTION: Final = "lookahead-attention"
_ROWS: Final = (
    ("prompt_tokens", "prompt tokens"),
    ("new_tokens", "new tokens"),
    ("passes", "passes"),
    ("prefill_passes", "  of them prefill"),
    ("tokens_per_pass", "tokens per pass"),
    ("tokens_per_s", "tokens/s"),
    ("ttft_s", "first token after (s)"),
)


def can_reuse(manifest: Mapping[str, Any], version: str) -> bool:
    """Whether a bundle serves the demo: it has lookahead length `K` and was built by `version`.

    Args:
        manifest: of the bundle, as parsed; any JSON object.
        version: of this package.
    """
    lengths, tools = manifest.get("lookahead_lengths"), manifest.get("built_with")
    return (
        isinstance(lengths, list)
        and K in lengths
        and isinstance(tools, dict)
        and tools.get(_DISTRIBUTION) == version
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


def describe_reuse(report: Mapping[str, Any] | None, manifest: Mapping[str, Any]) -> str:
    """One line: that an earlier bundle is used, and what its build took if its report is known.

    Args:
        report: what the last `la-export build --json` of the demo printed, if there was one.
        manifest: of the bundle; a report of another build says nothing about it.
    """
    built = f"reused the bundle of {manifest['created_utc']}; --rebuild builds it again"
    if report is None or report["manifest"] != manifest:
        return f"{built} (no report of its build)"
    return f"{built}; at that time: {describe_build(report)}"


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


@click.group()
def _main() -> None:
    """The steps of scripts/demo."""


@_main.command("check")
@click.argument("bundle", type=click.Path(path_type=Path))
def _check(bundle: Path) -> None:
    """Exit 0 if BUNDLE serves the demo as it is, 1 if it must be built."""
    manifest = _read(bundle / "manifest.json")
    if manifest is None or not can_reuse(manifest, importlib.metadata.version(_DISTRIBUTION)):
        raise SystemExit(1)


@_main.command("show")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--reused", is_flag=True, help="The bundle is of an earlier run.")
def _show_all(folder: Path, bundle: Path, *, reused: bool) -> None:
    """Show k0.json and k4.json of FOLDER, and what the build of BUNDLE took."""
    plain, lookahead = (
        json.loads((folder / f"k{k}.json").read_text(encoding="utf-8")) for k in (0, K)
    )
    click.echo(f"{lookahead['text']}\n")
    report = _read(bundle.with_name(f"{bundle.name}.build.json"))
    if reused:
        manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
        click.echo(describe_reuse(report, manifest))
    elif report is not None:
        click.echo(describe_build(report))
    click.echo(describe_generations(plain, lookahead))
    if not is_identical(plain, lookahead):
        raise click.ClickException("lookahead decoding changed the text, which it never may")


def _read(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; nothing when there is none or it is damaged."""
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return fields if isinstance(fields, dict) else None


if __name__ == "__main__":
    _main()
