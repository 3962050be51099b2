"""ONNX Runtime's session options, measured: the body of `scripts/ort_options`.

Each option is compared with what a session of ours is opened with, in turn with it and in one
process; memory and the time to open are those of a process of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import click
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from la_export.bench.results import Cell, Column, write_result
from la_export.bench.speed.processes import pss_bytes
from la_export.bench.speed.steps import Scored, allocate_filled, make_step, make_step_part
from la_runtime.backends.base import Outputs
from la_runtime.backends.lookahead_vectors import load_lookahead_vectors
from la_runtime.backends.ort import OrtBackend
from la_runtime.backends.ort_options import make_session_options
from la_runtime.block import make_step_inputs
from la_runtime.bundle import Bundle, open_bundle

__all__ = ["COMPARISONS", "Comparison", "Settings", "compare_option"]

_RESULT: Final = Path("docs/results/ort_options.json")
_CPU: Final = "CPUExecutionProvider"
_PAST: Final = 256
_ROWS: Final = (1, 9, 17, 25)
_REPEATS: Final = 3
# Changing an entry that is already there would be warned of.
_ERRORS_ONLY: Final = 3
_COLUMNS: Final = (
    Column(key="bundle", title="Bundle"),
    Column(key="option", title="Changed"),
    *(Column(key=f"rows_{rows}", title=f"L({rows})") for rows in _ROWS),
    Column(key="logits", title="Logits differ by", digits=6),
    Column(key="open_s", title="Open, s"),
    Column(key="pss_mb", title="PSS, MB", digits=0),
)

Settings = Callable[[ort.SessionOptions], None]
"""Changes options in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One option against ours.

    Args:
        option: what is changed, for the table.
        change: makes the change.
        threads: of both sessions; None takes those of the run.
        disabled: optimizers that the changed session leaves out.
    """

    option: str
    change: Settings
    threads: int | None = None
    disabled: tuple[str, ...] = ()


def _entry(key: str, value: str) -> Settings:
    return lambda options: options.add_session_config_entry(key, value)


def _field(name: str, value: object) -> Settings:
    return lambda options: setattr(options, name, value)


def _nothing(_: ort.SessionOptions) -> None:
    pass


COMPARISONS: Final = (
    Comparison(option="nothing", change=_nothing),
    Comparison(option="2 threads", change=_field("intra_op_num_threads", 2)),
    Comparison(
        option="2 threads, no spinning",
        change=_entry("session.intra_op.allow_spinning", "0"),
        threads=2,
    ),
    Comparison(
        option="2 threads, spinning for 50 us",
        change=_entry("session.intra_op.spin_duration_us", "50"),
        threads=2,
    ),
    Comparison(
        option="2 threads, dynamic block base 4",
        change=_entry("session.dynamic_block_base", "4"),
        threads=2,
    ),
    Comparison(option="no arena", change=_field("enable_cpu_mem_arena", False)),
    Comparison(option="no memory pattern", change=_field("enable_mem_pattern", False)),
    Comparison(
        option="initializers outside the arena",
        change=_entry("session.use_device_allocator_for_initializers", "1"),
    ),
    Comparison(option="denormals as zero", change=_entry("session.set_denormal_as_zero", "1")),
    Comparison(
        option="optimization level extended",
        change=_field("graph_optimization_level", ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED),
    ),
    Comparison(
        option="optimization level basic",
        change=_field("graph_optimization_level", ort.GraphOptimizationLevel.ORT_ENABLE_BASIC),
    ),
    Comparison(option="no prepacking", change=_entry("session.disable_prepacking", "1")),
    Comparison(
        option="int4 products at accuracy level 4",
        change=_entry("session.qdq_matmulnbits_accuracy_level", "4"),
    ),
    Comparison(
        option="int4 weights dequantized apart",
        change=_entry("session.disable_quant_qdq", "1"),
        disabled=("ConstantFolding",),
    ),
)


@contextmanager
def _open(
    bundle: Bundle, options: ort.SessionOptions, disabled: Sequence[str] = ()
) -> Iterator[OrtBackend]:
    """The bundle's graph for the CPU in a session of these options."""
    manifest = bundle.manifest
    variant = manifest.variant_for("ort-cpu")
    contract = manifest.contract if variant is None else variant.contract_of(manifest.contract)
    session = ort.InferenceSession(
        str(bundle.path(manifest.graph if variant is None else variant.path)),
        options,
        providers=[_CPU],
        disabled_optimizers=list(disabled),
    )
    vectors = load_lookahead_vectors(bundle)
    omits = () if variant is None else variant.omits
    with closing(OrtBackend(session, contract, vectors, omits=omits)) as backend:
        yield backend


class _Steps:
    """Steps of each number of rows over one cache of random tokens."""

    def __init__(self, backend: OrtBackend, context: int, past: int) -> None:
        self._backend, self._context = backend, context
        places = past + max(_ROWS)
        self._state = allocate_filled(backend, past=past, reserved=places, context=context)
        self._steps = {
            rows: make_step(backend, self._state, num_rows=rows, scored=Scored.ALL, context=context)
            for rows in _ROWS
        }

    def seconds(self, rows: int) -> float:
        """Of one step."""
        return self._steps[rows]()

    def best_logits(self) -> NDArray[np.float32]:
        """[rows, c] of the widest step."""
        contract = self._backend.contract
        part = make_step_part(max(_ROWS), vocab_size=contract.vocab_size, k_max=contract.k_max)
        inputs = make_step_inputs(
            [part],
            self._state,
            contract,
            context=self._context,
            widths=self._backend.widths,
            outputs=Outputs.TOP,
        )
        found: NDArray[np.float32] = self._backend.forward(self._state, inputs).top()[1][0].copy()
        return found


def compare_option(
    bundle: Bundle, comparison: Comparison, *, threads: int, rounds: int, past: int = _PAST
) -> dict[str, Cell]:
    """Time an option in turn with ours.

    Args:
        bundle: whose graph to run.
        comparison: the option.
        threads: for one pass, where the comparison does not say.
        rounds: how often.
        past: tokens in the cache.

    Returns:
        Of each number of rows, the median of the rounds' ratios; how far the logits are apart.
    """
    context = bundle.manifest.model.context
    ours, changed = (make_session_options(comparison.threads or threads) for _ in range(2))
    comparison.change(changed)
    with (
        _open(bundle, ours) as first,
        _open(bundle, changed, comparison.disabled) as second,
    ):
        sides = (_Steps(first, context, past), _Steps(second, context, past))
        difference = float(np.abs(sides[0].best_logits() - sides[1].best_logits()).max())
        ratios: dict[int, list[float]] = {rows: [] for rows in _ROWS}
        for rows in _ROWS * rounds:
            seconds = [min(side.seconds(rows) for _ in range(_REPEATS)) for side in sides]
            ratios[rows].append(seconds[1] / seconds[0])
    cells: dict[str, Cell] = {
        f"rows_{rows}": statistics.median(found) for rows, found in ratios.items()
    }
    return cells | {"logits": difference}


def _measure_process(folder: Path, comparison: Comparison, threads: int) -> dict[str, Cell]:
    """Time to open and proportional set size, of a process that has then run a step."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(folder, comparison.option, threads, theirs))
    process.start()
    theirs.close()
    try:
        open_s = ours.recv()
        pss = pss_bytes(process.pid or 0)
    finally:
        ours.close()
        process.join()
    return {"open_s": open_s, "pss_mb": pss / 1e6}


def _hold(folder: Path, option: str, threads: int, pipe: Connection) -> None:
    """Open, step, say how long opening took, and wait until the other side has looked."""
    ort.set_default_logger_severity(_ERRORS_ONLY)
    comparison = next(entry for entry in COMPARISONS if entry.option == option)
    options = make_session_options(comparison.threads or threads)
    comparison.change(options)
    bundle = open_bundle(folder)
    start = time.perf_counter()
    with _open(bundle, options, comparison.disabled) as backend:
        open_s = time.perf_counter() - start
        _Steps(backend, bundle.manifest.model.context, _PAST).seconds(max(_ROWS))
        pipe.send(open_s)
        with suppress(EOFError):
            pipe.recv()


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True)
def _main(bundles: tuple[Path, ...], *, threads: int, rounds: int) -> None:
    """Measure the session options on BUNDLES; run from the repository's root."""
    ort.set_default_logger_severity(_ERRORS_ONLY)
    rows = []
    for folder in bundles:
        bundle = open_bundle(folder)
        for comparison in COMPARISONS:
            row: dict[str, Cell] = {
                "bundle": folder.resolve().name,
                "option": comparison.option,
                **compare_option(bundle, comparison, threads=threads, rounds=rounds),
                **_measure_process(folder, comparison, threads),
            }
            click.echo(" ".join(_show(cell) for cell in row.values()), err=True)
            rows.append(row)
    write_result(
        _RESULT,
        command=f"scripts/ort_options {' '.join(str(folder) for folder in bundles)}",
        columns=_COLUMNS,
        rows=rows,
        facts={
            "past": _PAST,
            "threads": threads,
            "rounds": rounds,
            "statistic": "median of the ratios to a session of ours in the same round; of each "
            f"the best of {_REPEATS} steps",
        },
    )


def _show(cell: Cell) -> str:
    return f"{cell:8.3f}" if isinstance(cell, float) else f"{cell!s:36}"


if __name__ == "__main__":
    _main()
