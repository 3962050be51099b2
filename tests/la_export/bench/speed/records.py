"""A record made by hand."""

from __future__ import annotations

from la_export.bench.speed.figures import StepCurve, make_decode_run
from la_export.bench.speed.record import (
    BundleRun,
    GrowthPoint,
    MemoryFigures,
    Section,
    Selection,
    Settings,
    SpeedRecord,
    StepPoint,
    Timing,
)
from la_export.bench.speed.ways import PLAINLY, Way
from la_runtime.layout import Layout
from tests.la_export.bench.speed.answers import make_answer

__all__ = ["make_record"]

TOKENS = tuple(range(11))


def _timing(median_ms: float) -> Timing:
    return Timing(median_ms=median_ms, low_ms=0.9 * median_ms, high_ms=1.2 * median_ms, samples=5)


def make_record() -> SpeedRecord:
    """One bundle, with step times, a growth curve that ends early, decoding and memory."""
    plain = {"a": make_answer("a", TOKENS, decode_s=2.0)}
    ahead = {"a": make_answer("a", TOKENS, decode_s=1.0, k=2, passes=5, accepted=(3, 2))}
    steps = tuple(
        StepPoint(rows=rows, scored_rows=scored, past=256, time=_timing(ms))
        for rows, scored, ms in ((1, 1, 10.0), (5, 5, 15.0), (5, 3, 14.0))
    )
    curve = StepCurve.of(steps)
    ways = (PLAINLY, Way(selection=Selection.EXACT, k=2, layout=Layout.ROOT_ONLY))
    return SpeedRecord(
        complete=True,
        utc="2026-01-01T00:00:00Z",
        seconds=1.0,
        processor="a processor",
        cores=2,
        versions={},
        settings=Settings(
            threads=2,
            sections=tuple(Section),
            lookahead_lengths=(),
            layouts=(Layout.ROOT_ONLY,),
            selections=(Selection.EXACT,),
            tau=None,
            prompts="mine.txt",
            prompts_sha256=None,
            per_category=None,
            new_tokens=11,
            minutes=None,
        ),
        bundles=(
            BundleRun(
                name="tiny",
                model="tiny",
                precision="fp32",
                cache_form="concat",
                kv_order="head-major",
                graph="onnx/model.onnx",
                graph_sha256="0" * 64,
                vectors="untuned",
                backend="ort-cpu",
                backend_version="1.2.3",
                weight_bytes=1000,
                plain_bundle="tiny",
                step_times=steps,
                growth=(
                    GrowthPoint(rows=1, past=0, batch=1, time=_timing(9.0)),
                    GrowthPoint(rows=1, past=512, batch=1, time=None, absent="the context is 256"),
                ),
                decoding=tuple(
                    make_decode_run(
                        way, answers=answers, plain=plain, base=plain, curve=curve, ceiling=None
                    )
                    for way, answers in zip(ways, (plain, ahead), strict=True)
                ),
                memory=MemoryFigures(
                    open_s=0.5,
                    pss_bytes=5_000_000,
                    peak_rss_bytes=7_000_000,
                    shared_pss_bytes=(3_000_000, 4_000_000),
                ),
            ),
        ),
    )
