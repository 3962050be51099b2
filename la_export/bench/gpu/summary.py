"""What a check comes to: rows with the ceiling beside each figure, and an exit code. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from la_export.bench.gpu.ceiling import find_listed_bandwidth, least_step_ms
from la_export.bench.gpu.steps import Progress, Status
from la_export.doctor.diagnosis import Section
from la_runtime.errors import ExitCode

__all__ = ["Bandwidth", "exit_code", "find_bandwidth", "list_decoding", "list_steps"]

Bandwidth = tuple[float, str]
"""Bytes a second, and where that is from."""

_TIME: Final = "time "
_TORCH: Final = "torch steps "


def find_bandwidth(progress: Progress) -> Bandwidth | None:
    """The memory's bandwidth: measured, else as listed for the GPU; None when neither is known."""
    measured = progress.found("bandwidth").get("bytes_per_s")
    if measured:
        return float(measured), f"measured by copies ({progress.found('bandwidth')['through']})"
    findings = progress.found("doctor").get("findings", ())
    gpu = next((f["name"] for f in findings if f["section"] == Section.GPU), "")
    listed = find_listed_bandwidth(gpu)
    return None if listed is None else (listed, "listed by NVIDIA")


def list_decoding(progress: Progress) -> list[dict[str, Any]]:
    """A row for each model, precision, backend and k that was decoded with.

    `speedup` is over plain decoding on the same backend; `ceiling_tokens_per_s` is what reading the
    weights once a pass, and keys and values of the texts decoded by half (`past`), allows at the
    tokens per pass that were seen.
    """
    return list(_decoding_rows(progress))


def _decoding_rows(progress: Progress) -> Iterator[dict[str, Any]]:
    bandwidth = find_bandwidth(progress)
    for name, outcome in progress.outcomes.items():
        if not name.startswith(_TIME) or outcome.status is not Status.DONE:
            continue
        entries = outcome.found["decoding"]
        (plain,) = (entry for entry in entries if entry["k"] == 0)
        for entry in entries:
            least = _least_ms(entry, bandwidth)
            yield {
                "what": name.removeprefix(_TIME),
                "k": entry["k"],
                "past": entry["past"],
                "tokens_per_s": entry["tokens_per_s"],
                "speedup": entry["tokens_per_s"] / plain["tokens_per_s"],
                "tokens_per_pass": entry["tokens_per_pass"],
                "ms_per_pass": entry["ms_per_pass"],
                "ceiling_ms_per_pass": least,
                "ceiling_tokens_per_s": None
                if least is None
                else 1000 * entry["tokens_per_pass"] / least,
                "same_tokens_as_plain": entry["same_tokens_as_plain"],
            }


def list_steps(progress: Progress) -> list[dict[str, Any]]:
    """A row for each kind of step that was timed.

    `break_even` is how many tokens a pass has to give for decoding to be no slower than plainly:
    the step's time over that of a step of one row.
    """
    return list(_step_rows(progress))


def _step_rows(progress: Progress) -> Iterator[dict[str, Any]]:
    bandwidth = find_bandwidth(progress)
    for name, outcome in progress.outcomes.items():
        if not name.startswith((_TIME, _TORCH)) or outcome.status is not Status.DONE:
            continue
        least = _least_ms(outcome.found, bandwidth)
        steps = outcome.found["steps"]
        for entry in steps:
            launch = entry.get("launch", "")
            plain = next(
                other["best_ms"]
                for other in steps
                if other["rows"] == 1 and other.get("launch", "") == launch
            )
            yield {
                "what": name.removeprefix(_TIME),
                "k": entry["k"],
                "layout": entry["layout"],
                "launch": launch,
                "rows": entry["rows"],
                "best_ms": entry["best_ms"],
                "median_ms": entry["median_ms"],
                "break_even": entry["best_ms"] / plain,
                "ceiling_ms": least,
                "share_of_ceiling": None if least is None else least / entry["best_ms"],
            }


def _least_ms(found: Mapping[str, Any], bandwidth: Bandwidth | None) -> float | None:
    return None if bandwidth is None else least_step_ms(found["read_bytes"], bandwidth[0])


def exit_code(progress: Progress, *, needs_gpu: bool) -> ExitCode:
    """Failed if a step did; else environment without a GPU where one is needed; else whether
    anything was timed.

    Args:
        progress: how each step ended.
        needs_gpu: whether a GPU was to be checked.
    """
    outcomes = progress.outcomes.values()
    if any(outcome.status is Status.FAILED for outcome in outcomes):
        return ExitCode.FAILED
    findings = progress.found("doctor").get("findings", ())
    has_gpu = any(f["section"] == Section.GPU and f["verdict"] in ("ok", "warn") for f in findings)
    if needs_gpu and not has_gpu:
        return ExitCode.ENVIRONMENT
    is_timed = any(o.name.startswith((_TIME, _TORCH)) and o.status is Status.DONE for o in outcomes)
    return ExitCode.DONE if is_timed else ExitCode.COULD_NOT_RUN
