"""Puts measured step times into the manifest of their bundle."""

from __future__ import annotations

from typing import Final

from la_export.bench.speed.record import BundleRun, SpeedRecord
from la_runtime.bundle import Bundle, Manifest
from la_runtime.certificate import change_manifest
from la_runtime.step_times import StepTime, StepTimes

__all__ = ["make_step_times", "store_step_times"]

# Of the fastest step, that slots may seem to take: more is noise.
_LARGEST_SHARE: Final = 0.9


def make_step_times(record: SpeedRecord, run: BundleRun) -> StepTimes | None:
    """What a manifest holds of a bundle's L(T); None if it was not measured.

    Args:
        record: of the whole run.
        run: the bundle's part of it.
    """
    points = [point for point in run.step_times if point.scored_rows == point.rows]
    if not points:
        return None
    fastest = min(point.time.median_ms for point in points)
    return StepTimes(
        utc=record.utc,
        backend=run.backend,
        backend_version=run.backend_version,
        processor=record.processor,
        threads=record.settings.threads,
        past=points[0].past,
        slots_ms=min(run.slots_ms or 0.0, _LARGEST_SHARE * fastest),
        times=tuple(
            StepTime(
                rows=point.rows,
                median_ms=point.time.median_ms,
                low_ms=point.time.low_ms,
                high_ms=point.time.high_ms,
                samples=point.time.samples,
            )
            for point in points
        ),
    )


def store_step_times(bundle: Bundle, times: StepTimes) -> None:
    """Put step times into a bundle, in place of those of the same place.

    Raises:
        BundleError: the bundle was rebuilt in the meantime.
        HostError: the folder is not writable.
    """

    def change(manifest: Manifest) -> Manifest:
        others = (found for found in manifest.step_times if found.place != times.place)
        return manifest.model_copy(update={"step_times": (*others, times)})

    change_manifest(bundle, change, what="step times")
