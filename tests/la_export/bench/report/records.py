"""Results of `la-export bench` made by hand."""

from __future__ import annotations

from typing import Any

from la_export.bench.speed.record import (
    OVERALL,
    AnswerFigures,
    BundleRun,
    CacheShare,
    DecodeRun,
    GrowthPoint,
    Interval,
    MachineRates,
    MemoryFigures,
    OutsideShare,
    PeerMode,
    PeerRun,
    PositionAcceptance,
    PrefillTime,
    ReservedPoint,
    Section,
    Selection,
    Settings,
    SpeedFigures,
    SpeedRecord,
    StepPoint,
    Timing,
    TransientShare,
)
from la_runtime.layout import Layout

__all__ = [
    "make_answers",
    "make_bundle",
    "make_empty_record",
    "make_interval",
    "make_peer",
    "make_record",
    "make_run",
    "make_step",
    "make_timing",
]


def make_timing(median_ms: float, spread: float = 0.02) -> Timing:
    """A time whose quartiles are this far from it."""
    return Timing(
        median_ms=median_ms,
        low_ms=median_ms * (1 - spread),
        high_ms=median_ms * (1 + spread),
        samples=9,
    )


def make_interval(value: float, spread: float = 0.05) -> Interval:
    """A ratio and its interval."""
    return Interval(value=value, low=value * (1 - spread), high=value * (1 + spread), samples=8)


def make_step(rows: int, milliseconds: float, **changes: Any) -> StepPoint:
    """L(T) with all rows scored."""
    fields: dict[str, Any] = {
        "rows": rows,
        "scored_rows": rows,
        "past": 256,
        "time": make_timing(milliseconds),
        "weights_ms": 7.25,
        "operations_ms": 0.5 * rows,
    }
    return StepPoint(**(fields | changes))


def make_answers(category: str = OVERALL, **changes: Any) -> AnswerFigures:
    """Figures of a category."""
    fields: dict[str, Any] = {
        "category": category,
        "samples": 8,
        "tokens": 1000,
        "decode_tokens_per_s": 81.25,
        "end_to_end_tokens_per_s": 77.5,
        "ttft_s": 0.125,
        "tokens_per_pass": 1.75,
        "rows_per_pass": 8.5,
        "accepted": (
            PositionAcceptance(position=1, drafted=400, accepted=200),
            PositionAcceptance(position=2, drafted=400, accepted=50),
        ),
        "speedup": make_interval(1.5),
        "yielded": 1.625,
        "ceiling_tokens_per_s": 123.5,
        "equal": 7,
        "looping": 1,
    }
    return AnswerFigures(**(fields | changes))


def make_run(k: int = 2, **changes: Any) -> DecodeRun:
    """One way of decoding; plain for k = 0."""
    answers = (
        make_answers("writing", speedup=make_interval(1.25)),
        make_answers("math <&>", speedup=make_interval(1.75)),
        make_answers(),
    )
    fields: dict[str, Any] = {
        "k": k,
        "layout": Layout.ROOT_ONLY,
        "selection": Selection.EXACT,
        "lossless": True,
        "answers": answers,
        "without_loops": (make_answers(decode_tokens_per_s=79.75, looping=0),),
    }
    if k == 0:
        plain = [
            figures.model_copy(
                update={"speedup": None, "decode_tokens_per_s": 54.125, "tokens_per_pass": 1.0}
            )
            for figures in answers
        ]
        fields |= {"layout": None, "selection": Selection.PLAIN, "answers": tuple(plain)}
    return DecodeRun(**(fields | changes))


def make_bundle(name: str = "tiny-int8", **changes: Any) -> BundleRun:
    """A bundle of which everything was measured."""
    fields: dict[str, Any] = {
        "name": name,
        "model": "tiny",
        "precision": "int8",
        "cache_form": "concat",
        "kv_order": "head-major",
        "graph": "onnx/model.onnx",
        "graph_sha256": "ab" * 32,
        "vectors": "untuned",
        "backend": "ort",
        "backend_version": "1.2.3",
        "weight_bytes": 135_500_000,
        "perplexity": 17.123,
        "plain_bundle": name,
        "step_times": (
            *(make_step(rows, 10 + rows / 4) for rows in (1, 9, 17)),
            make_step(9, 11.5, scored_rows=5),
        ),
        "growth": (
            GrowthPoint(rows=1, past=0, batch=1, time=make_timing(9.75)),
            GrowthPoint(rows=1, past=512, batch=1, time=make_timing(11.25)),
            GrowthPoint(rows=1, past=512, batch=16, time=None, absent="no memory is free"),
        ),
        "reserved": (ReservedPoint(past=256, reserved=4096, time=make_timing(10.375)),),
        "prefill": (PrefillTime(prompt_tokens=64, time=make_timing(40.5), tokens_per_s=1580.0),),
        "outside": (OutsideShare(k=4, share=0.0215, run_ms=12.5, samples=500),),
        "decoding": (make_run(0), make_run(2), make_run(4, layout=Layout.FULL)),
        "memory": MemoryFigures(
            open_s=0.625,
            pss_bytes=301_500_000,
            peak_rss_bytes=402_500_000,
            shared_pss_bytes=(201_500_000, 202_500_000),
        ),
        "transient": (
            TransientShare(
                k=2,
                layout=Layout.ROOT_ONLY,
                rows=4,
                lookahead_rows=2,
                num_bytes=92_160,
                shares=(CacheShare(tokens=256, share=0.015625),),
                small_from=201,
            ),
        ),
    }
    return BundleRun(**(fields | changes))


def make_peer(**changes: Any) -> PeerRun:
    """Another program."""
    fields: dict[str, Any] = {
        "name": "other",
        "version": "4.5.6",
        "build_flags": "-O3",
        "mode": PeerMode.PLAIN,
        "mode_name": "greedy",
        "precision": "Q4_0",
        "threads": 2,
        "figures": (
            SpeedFigures(
                category=OVERALL,
                samples=8,
                tokens=1000,
                decode_tokens_per_s=41.75,
                end_to_end_tokens_per_s=39.25,
                ttft_s=0.375,
            ),
        ),
        "pss_bytes": 105_500_000,
    }
    return PeerRun(**(fields | changes))


def make_record(*bundles: BundleRun, **changes: Any) -> SpeedRecord:
    """A whole run, of one bundle and two peers unless others are given."""
    fields: dict[str, Any] = {
        "complete": True,
        "utc": "2026-01-02T03:04:05+00:00",
        "seconds": 61.0,
        "processor": "A Processor",
        "cores": 2,
        "versions": {"python": "3.11.0"},
        "settings": Settings(
            threads=2,
            sections=tuple(Section),
            lookahead_lengths=(2, 4),
            layouts=tuple(Layout),
            selections=(Selection.EXACT,),
            tau=None,
            prompts="spec-bench",
            prompts_sha256="cd" * 32,
            per_category=4,
            new_tokens=128,
            minutes=None,
        ),
        "rates": MachineRates(
            bandwidth_bytes_per_s=2.05e10,
            gemm_rows=32,
            float_operations_per_s=1.01e11,
            integer_operations_per_s=4.04e11,
            samples=9,
        ),
        "bundles": bundles or (make_bundle(),),
        "peers": (
            make_peer(),
            make_peer(name="gone", version=None, figures=(), absent="it is not installed"),
        ),
    }
    return SpeedRecord(**(fields | changes))


def make_empty_record() -> SpeedRecord:
    """A run that ended before it had measured anything."""
    bare = {name: () for name, field in BundleRun.model_fields.items() if field.default == ()}
    bundle = make_bundle(memory=None, **bare)
    return make_record(bundle, complete=False, rates=None, peers=())
