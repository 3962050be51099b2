"""What a run of `la-export bench` found: the shape of its JSON.

Values only. Whoever measures fills it, whoever shows it reads it; nothing here knows how a figure
was measured. Times of steps are in milliseconds, everything else in seconds, bytes and tokens.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from la_runtime.errors import UsageError
from la_runtime.layout import Layout
from la_runtime.source_names import SourceName

__all__ = [
    "OVERALL",
    "RECORD_VERSION",
    "AnswerFigures",
    "BundleRun",
    "CacheShare",
    "DecodeRun",
    "GrowthPoint",
    "Interval",
    "MachineRates",
    "MemoryFigures",
    "OutsideShare",
    "PeerMode",
    "PeerRun",
    "PositionAcceptance",
    "PrefillTime",
    "ReservedPoint",
    "Section",
    "Selection",
    "Settings",
    "SpeedFigures",
    "SpeedRecord",
    "StepPoint",
    "Timing",
    "TransientShare",
    "read_record",
]

RECORD_VERSION: Final = "1.0"
OVERALL: Final = "overall"


class Section(StrEnum):
    """Parts of a run; each can be measured alone."""

    STEP_TIMES = "step-times"
    GROWTH = "growth"
    PREFILL = "prefill"
    DECODING = "decoding"
    MEMORY = "memory"


class Selection(StrEnum):
    """How a decoding came to its tokens.

    ``plain``: one a pass, k = 0. ``exact``: verified, the proposals of k slots as drafts.
    ``planned``: verified, drafts of named sources, as many in a pass as pay. ``threshold``:
    proposals of k slots, unverified.
    """

    PLAIN = "plain"
    EXACT = "exact"
    PLANNED = "planned"
    THRESHOLD = "threshold"


class PeerMode(StrEnum):
    """``plain``: one token a pass. ``best``: the fastest way to decode that the peer has."""

    PLAIN = "plain"
    BEST = "best"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Timing(_Record):
    """Times of the same work.

    Args:
        median_ms: the middle one.
        low_ms: the first quartile.
        high_ms: the third quartile.
        samples: how many times it was timed.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    samples: int = Field(ge=1)


class Interval(_Record):
    """A ratio with its 95 % interval, found by drawing prompts again with replacement."""

    value: float
    low: float
    high: float
    samples: int = Field(ge=1)


class StepPoint(_Record):
    """L(T): one exact step of T rows, its best tokens read and its root committed, at batch 1.

    Args:
        rows: T.
        scored_rows: rows that the head was asked for: all of them, which are the verified rows and
            every slot; or the verified ones only, T // 2 + 1.
        past: tokens in the cache.
        time: measured.
        weights_ms: reading the weights once, at the measured bandwidth; None if not measured.
        operations_ms: the step's multiplications and additions, at the measured rate of GEMMs;
            None if not measured. The larger of the two is the ceiling.
    """

    rows: int = Field(ge=1)
    scored_rows: int = Field(ge=1)
    past: int = Field(ge=0)
    time: Timing
    weights_ms: float | None = None
    operations_ms: float | None = None


class GrowthPoint(_Record):
    """L(T) for so many sequences behind so many tokens each; all rows scored.

    `absent` says why it was not measured; then there is no time.
    """

    rows: int = Field(ge=1)
    past: int = Field(ge=0)
    batch: int = Field(ge=1)
    time: Timing | None
    absent: str | None = None


class ReservedPoint(_Record):
    """L(1) at batch 1 with the cache reserved for so many places, of which `past` are used."""

    past: int = Field(ge=0)
    reserved: int = Field(ge=1)
    time: Timing


class PrefillTime(_Record):
    """Reading a prompt of random tokens, up to and including the pass that gives a token."""

    prompt_tokens: int = Field(ge=1)
    time: Timing
    tokens_per_s: float


class SpeedFigures(_Record):
    """Speed over the prompts of one category, or over all of them.

    Args:
        category: its name, or `OVERALL`.
        samples: prompts that were decoded.
        tokens: new tokens, of all of them together.
        decode_tokens_per_s: tokens after the first ones, over the time after the first ones; None
            if every answer ended with its first.
        end_to_end_tokens_per_s: new tokens over the whole time, the prompts' reading included.
        ttft_s: median seconds to the first token.
    """

    category: str
    samples: int = Field(ge=0)
    tokens: int = Field(ge=0)
    decode_tokens_per_s: float | None
    end_to_end_tokens_per_s: float | None
    ttft_s: float | None


class PositionAcceptance(_Record):
    """Drafts at one position behind the bonus token (1 is the first): put to the test, accepted."""

    position: int = Field(ge=1)
    drafted: int = Field(ge=0)
    accepted: int = Field(ge=0)

    @property
    def share(self) -> float:
        """Accepted drafts of those tested; 0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0


class AnswerFigures(SpeedFigures):
    """`SpeedFigures` of a decoding of ours, and what made them.

    Args:
        tokens_per_pass: tokens after prefill's, per pass after prefill.
        rows_per_pass: block rows of such a pass, on average.
        accepted: per position.
        speedup: decode tokens a second over those of the fastest plain decoding, on the same
            prompts; None for that decoding itself.
        yielded: tokens per pass x L(1)/L(rows per pass): what speedup the step times promise; None
            if they were not measured so far.
        ceiling_tokens_per_s: tokens per pass over the time that reading the weights, or the
            operations, would take at the machine's measured rates, whichever is longer.
        equal: answers that are token by token those of the bundle's own plain decoding.
        looping: answers in which four tokens in a row come up four times or more.
    """

    tokens_per_pass: float | None
    rows_per_pass: float | None
    accepted: tuple[PositionAcceptance, ...]
    speedup: Interval | None
    yielded: float | None
    ceiling_tokens_per_s: float | None
    equal: int = Field(ge=0)
    looping: int = Field(ge=0)


class DecodeRun(_Record):
    """One way of decoding the prompts.

    Args:
        k: lookahead length, the largest where passes are planned; 0 is plain decoding.
        layout: where groups stand; None for the others than `exact`, which have no choice.
        selection: how proposals became output.
        sources: of planned drafts.
        tau: the threshold; None for the others.
        lossless: whether the tokens have to be those of plain decoding.
        answers: figures per category, and `OVERALL` last.
        without_loops: the same of the prompts whose answer loops neither here nor in plain
            decoding.
    """

    k: int = Field(ge=0)
    layout: Layout | None
    selection: Selection
    sources: tuple[SourceName, ...] = ()
    tau: float | None = None
    lossless: bool
    answers: tuple[AnswerFigures, ...]
    without_loops: tuple[AnswerFigures, ...]

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.selection is Selection.PLAIN:
            return "plain"
        if self.selection is Selection.PLANNED:
            has_all = len(self.sources) == len(SourceName)
            return f"planned, {'all sources' if has_all else ' + '.join(self.sources)}"
        if self.selection is Selection.THRESHOLD:
            return f"k={self.k} threshold {self.tau:g}"
        return f"k={self.k} {self.layout}"

    @property
    def overall(self) -> AnswerFigures:
        """The figures over all prompts."""
        return next(figures for figures in self.answers if figures.category == OVERALL)


class MemoryFigures(_Record):
    """Processes with the bundle open that have decoded a few tokens.

    Args:
        open_s: seconds to open the bundle, digests included, files in the page cache.
        pss_bytes: a process alone; pages shared with others count by their share.
        peak_rss_bytes: the most that it held at any time.
        shared_pss_bytes: of two at the same time, each.
    """

    open_s: float
    pss_bytes: int
    peak_rss_bytes: int
    shared_pss_bytes: tuple[int, ...]


class CacheShare(_Record):
    """Transient K/V over the K/V of a sequence of so many tokens."""

    tokens: int = Field(ge=1)
    share: float


class TransientShare(_Record):
    """K/V that a step writes and throws away, at most: that of all its rows but the root.

    Computed from the layout and the contract.

    Args:
        k: lookahead length.
        layout: where groups stand.
        rows: rows of the widest step, less the root.
        lookahead_rows: how many of them are slots; the others are drafts.
        num_bytes: their K/V.
        shares: of the cache.
        small_from: tokens from which on the share is under 2 %.
    """

    k: int = Field(ge=1)
    layout: Layout
    rows: int
    lookahead_rows: int
    num_bytes: int
    shares: tuple[CacheShare, ...]
    small_from: int


class OutsideShare(_Record):
    """Time of a step outside the backend's run, relative to that run; batch 1, root-only layout.

    `run_ms` is the median of the runs, `samples` the number of steps.
    """

    k: int = Field(ge=0)
    share: float
    run_ms: float
    samples: int = Field(ge=1)


class BundleRun(_Record):
    """Everything that was measured of one bundle.

    Args:
        name: the bundle's folder.
        model: name of the model.
        precision: as the manifest calls it.
        cache_form: of the contract.
        kv_order: of the contract.
        graph: path of the graph that ran.
        graph_sha256: of that file.
        vectors: how the lookahead vectors were made.
        backend: what ran the graph.
        backend_version: of its library.
        weight_bytes: what a step has to read.
        perplexity: recorded in the manifest; None if there is none.
        slots_ms: what a step takes longer for having slots, beside as many rows of tokens; None if
            not measured.
        plain_bundle: the bundle whose plain decoding speedups are over: the fastest of this
            precision in the run; None before decoding was measured.
    """

    name: str
    model: str
    precision: str
    cache_form: str
    kv_order: str
    graph: str
    graph_sha256: str
    vectors: str
    backend: str
    backend_version: str
    weight_bytes: int
    perplexity: float | None = None
    plain_bundle: str | None = None
    slots_ms: float | None = None
    step_times: tuple[StepPoint, ...] = ()
    growth: tuple[GrowthPoint, ...] = ()
    reserved: tuple[ReservedPoint, ...] = ()
    prefill: tuple[PrefillTime, ...] = ()
    outside: tuple[OutsideShare, ...] = ()
    decoding: tuple[DecodeRun, ...] = ()
    memory: MemoryFigures | None = None
    transient: tuple[TransientShare, ...] = ()


class PeerRun(_Record):
    """Another program that decoded the same prompts, in a process of its own.

    Args:
        name: of the program.
        version: of it; None if it is absent.
        build_flags: how it was compiled, as far as it says.
        mode: plain, or its best.
        mode_name: what the peer calls that mode, such as ``prompt lookup``.
        precision: what the peer calls the weights, such as ``Q4_0`` or ``int4``.
        threads: for one pass.
        figures: per category, and `OVERALL` last; empty if it is absent.
        pss_bytes: of its process.
        perplexity: of its weights; None if not measured.
        absent: why nothing was measured; None if it was.
    """

    name: str
    version: str | None
    build_flags: str = ""
    mode: PeerMode
    mode_name: str
    precision: str
    threads: int = Field(ge=0)
    figures: tuple[SpeedFigures, ...] = ()
    pss_bytes: int | None = None
    perplexity: float | None = None
    absent: str | None = None


class MachineRates(_Record):
    """What the machine can do at most, with as many threads as the passes had.

    Args:
        bandwidth_bytes_per_s: reading an array much larger than the caches.
        gemm_rows: rows of the multiplications below.
        float_operations_per_s: a float32 MatMul of ONNX Runtime; a multiplication and an addition
            count as two.
        integer_operations_per_s: MatMulInteger, u8 times s8.
        samples: how many times each was timed; the best counts.
    """

    bandwidth_bytes_per_s: float
    gemm_rows: int
    float_operations_per_s: float
    integer_operations_per_s: float
    samples: int


class Settings(_Record):
    """What was asked for.

    Args:
        threads: for one pass.
        sections: what was to be measured.
        lookahead_lengths: values of k; empty for those that each bundle was built for.
        layouts: of exact decoding.
        selections: other than plain.
        sources: sets of sources to decode with where passes are planned.
        tau: threshold, if that selection was asked for.
        prompts: file of the prompts, or the name of those that ship with the package.
        prompts_sha256: of the texts that were decoded.
        per_category: prompts of each category; None for all of a file.
        new_tokens: most of each answer.
        minutes: about how long the run was to take; None if that was left open.
    """

    threads: int
    sections: tuple[Section, ...]
    lookahead_lengths: tuple[int, ...]
    layouts: tuple[Layout, ...]
    selections: tuple[Selection, ...]
    sources: tuple[tuple[SourceName, ...], ...] = ()
    tau: float | None
    prompts: str
    prompts_sha256: str | None
    per_category: int | None
    new_tokens: int
    minutes: float | None


class SpeedRecord(_Record):
    """A whole run.

    Args:
        version: of this shape.
        complete: False if the run ended early; what is there was measured all the same.
        utc: when it began.
        seconds: how long it took.
        processor: what the machine calls its processor.
        cores: that the run could use.
        versions: of Python and of the packages that matter.
        settings: what was asked for.
        rates: what the machine can do at most; None before they were measured.
        bundles: in the order they were given.
        peers: other programs on the same prompts.
    """

    version: str = RECORD_VERSION
    complete: bool
    utc: str
    seconds: float
    processor: str
    cores: int
    versions: dict[str, str]
    settings: Settings
    rates: MachineRates | None = None
    bundles: tuple[BundleRun, ...]
    peers: tuple[PeerRun, ...] = ()


def read_record(path: Path) -> SpeedRecord:
    """Read what a run wrote.

    Raises:
        UsageError: it cannot be read, or is no such record.
    """
    try:
        return SpeedRecord.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UsageError(
            f"{path} is no result of 'la-export bench': {error}; give the file of its --out"
        ) from error
