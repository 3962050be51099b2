"""Compares what a written graph computes with transformers' own model, on random input.

The truth is always float32 over the weights that the graph holds, so that what is measured is
the graph's arithmetic and not the rounding of its weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_export.graph.integer_parity import check_integer_products
from la_export.graph.sample import Sample, from_kv_order, make_sample
from la_export.graph.sliced_session import Session, open_session
from la_export.graph.twin import float32_twin, float_activations_twin
from la_export.options import Precision
from la_export.reference import TorchReference
from la_runtime.bundle import CheckResult
from la_runtime.contract import CacheForm, Contract, Dtype, KvOrder, Name
from la_runtime.errors import CheckError
from la_runtime.storage import from_stored, to_stored

__all__ = ["PARITY_BOUNDS", "check_parity"]

# Largest difference allowed, as a share of the range of the true values. Float32 kernels that sum
# in another order differ by up to 6e-6 of it. In float16 every operator rounds by up to 1/2,048 of
# a number: 9e-4 of the range over two layers, 5e-3 over the thirty of SmolLM2-135M.
# In int8 a sum in another order may round an activation to the next integer, which is a step of
# 1/127 of its row's largest number: up to 1e-1 over the thirty layers of SmolLM2-135M, on tokens at
# random. So of the whole it is only asked that no row is mistaken for another. That each product is
# right, and what is between them, is shown by the products one by one and by the twin.
PARITY_BOUNDS: Final = {
    Precision.FP32: 1e-4,
    Precision.FP16: 1e-2,
    Precision.INT8: 2.5e-1,
    Precision.INT4: 5e-2,
}
_HALVES: Final = frozenset({Precision.FP16, Precision.BF16})
_TWIN_DETAILS: Final = {
    Dtype.FLOAT16: "its graph and rounded weights computed in float32",
    Dtype.BFLOAT16: "its graph and rounded weights computed in float32; no CPU kernels compute in "
    "bfloat16, whose own arithmetic is not tried here",
}
# Twice what the cache holds: stale places hold what a model once wrote, and products of much
# larger numbers would leave the range of float16.
_STALE_FACTOR: Final = 2.0
_STALE_SEED: Final = 977

Arrays = dict[str, NDArray[np.generic]]


def check_parity(
    path: Path,
    contract: Contract,
    reference: TorchReference,
    *,
    context: int,
    threads: int,
    omits: Collection[str] = (),
    prefix: str = "",
) -> tuple[CheckResult, ...]:
    """Run the graph on random input and compare every output with PyTorch.

    A half-precision graph is also run as its float32 twin, where faults of structure cannot hide
    behind rounding; a bfloat16 graph as its twin only. Of an integer graph each product is
    recomputed by itself, and its twin takes activations as they are.

    Args:
        path: the written graph.
        contract: its contract.
        reference: transformers' own model in the graph's precision.
        context: positions the bundle serves; the sequences stay within.
        threads: threads for ONNX Runtime.
        omits: outputs of the contract that the graph does not have.
        prefix: of the results' names.

    Raises:
        CheckError: an output differs by more than its bound.
    """
    precision = reference.precision
    sample = make_sample(contract, reference, context=context)
    results: list[CheckResult] = []
    if precision in PARITY_BOUNDS:
        session = open_session(path, threads)
        results += _check_graph(session, sample, PARITY_BOUNDS[precision], omits)
    if precision in _HALVES:
        results += _check_half_twin(path, sample, threads)
    if precision.is_integer:
        results.append(check_integer_products(path, sample, threads))
        with reference.float_activations():
            exact = make_sample(contract, reference, context=context)
        results += _check_integer_twin(path, exact, threads, omits)
    named = tuple(r.model_copy(update={"name": prefix + r.name}) for r in results)
    for result in named:
        if not result.value <= result.bound:
            raise CheckError(
                f"the graph differs from PyTorch in {result.name}: {result.value:.3g}, "
                f"allowed {result.bound:.3g}; no bundle was written"
            )
    return named


def _check_half_twin(path: Path, sample: Sample, threads: int) -> list[CheckResult]:
    widened = replace(sample.contract, compute_dtype=Dtype.FLOAT32, kv_dtype=Dtype.FLOAT32)
    exact = PARITY_BOUNDS[Precision.FP32]
    with float32_twin(path) as twin:
        session = open_session(twin, threads, widened=2)
        results = _check_graph(session, replace(sample, contract=widened), exact, ())
    return _name_twin(results, "float32_twin.", _TWIN_DETAILS[sample.contract.compute_dtype])


def _check_integer_twin(
    path: Path, sample: Sample, threads: int, omits: Collection[str]
) -> list[CheckResult]:
    with float_activations_twin(path) as twin:
        session = open_session(twin, threads, widened=4)
        results = _check_graph(session, sample, PARITY_BOUNDS[Precision.FP32], omits)
    return _name_twin(results, "float_activations.", "its integer weights times float activations")


def _name_twin(results: list[CheckResult], prefix: str, detail: str) -> list[CheckResult]:
    return [
        result.model_copy(update={"name": prefix + result.name, "detail": detail})
        for result in results
    ]


def _check_graph(
    session: Session, sample: Sample, bound: float, omits: Collection[str]
) -> list[CheckResult]:
    feeds = sample.make_feeds()
    if sample.contract.capacity is None:
        outputs, of_prompt = session.run_many([feeds, sample.make_prompt_feeds()])
    else:  # caches of gigabytes, one at a time
        outputs, of_prompt = session.run(feeds), session.run(sample.make_prompt_feeds())
    _check_outputs(outputs, sample.contract, omits)
    prompt = of_prompt[Name.LOGITS][0, ::-1]
    del of_prompt
    results = [
        _compare_logits(outputs, np.asarray(feeds[Name.LOGITS_ROWS], np.int64), sample, bound),
        _compare_written(outputs, sample, bound),
        _check_top(outputs, sample.contract),
        # A prompt with an empty cache, every row asked for.
        _difference("prefill_logits", prompt, sample.truths[0].past_logits, bound),
    ]
    if Name.LOGSUMEXP in outputs:
        results.append(_check_logsumexp(outputs))
    if sample.contract.cache_form is CacheForm.SCATTER:
        soiled = _soil(feeds, sample)
        results += _check_places(sample, soiled, outputs, session.run(soiled))
    return results


def _check_outputs(outputs: Arrays, contract: Contract, omits: Collection[str]) -> None:
    wanted = [str(spec.name) for spec in contract.outputs if spec.name not in omits]
    if list(outputs) != wanted:
        raise CheckError(f"the graph has outputs {list(outputs)}, expected {wanted}")


def _compare_logits(
    outputs: Arrays, wanted: NDArray[np.int64], sample: Sample, bound: float
) -> CheckResult:
    counts = [len(truth.logits) for truth in sample.truths]
    found = [outputs[Name.LOGITS][index, :count] for index, count in enumerate(counts)]
    expected = [
        truth.logits[wanted[index, :count]]
        for index, (truth, count) in enumerate(zip(sample.truths, counts, strict=True))
    ]
    return _difference("logits", np.concatenate(found), np.concatenate(expected), bound)


def _compare_written(outputs: Arrays, sample: Sample, bound: float) -> CheckResult:
    """The K/V of every row, where the cache form has them."""
    contract = sample.contract
    is_scatter = contract.cache_form is CacheForm.SCATTER
    names = contract.present_names if is_scatter else contract.block_names
    stored = np.stack([outputs[name] for name in names])
    held = from_stored(stored, contract.kv_dtype)
    written = from_kv_order(held, contract)  # [2 * layers, batch, kv_heads, places, head_dim]
    found = []
    for index, truth in enumerate(sample.truths):
        first = int(sample.lengths[index]) if is_scatter else 0
        rows = written[:, index, :, first : first + len(truth.key_values)]
        found.append(np.moveaxis(rows, 2, 0))  # [rows, 2 * layers, kv_heads, head_dim]
    expected = [truth.key_values for truth in sample.truths]
    return _difference("block_kv", np.concatenate(found), np.concatenate(expected), bound)


def _check_top(outputs: Arrays, contract: Contract) -> CheckResult:
    """The best tokens must be those of the graph's own logits, ties to the lowest id."""
    logits = np.asarray(outputs[Name.LOGITS], np.float32)
    order = np.argsort(-logits, axis=-1, kind="stable")[..., : contract.top_c]
    best = np.take_along_axis(logits, order, axis=-1)
    wrong = np.count_nonzero(outputs[Name.TOP_IDS] != order)
    wrong += np.count_nonzero(outputs[Name.TOP_LOGITS] != best)
    return CheckResult(name="top", value=float(wrong), bound=0.0, detail="entries that differ")


def _check_logsumexp(outputs: Arrays) -> CheckResult:
    logits = outputs[Name.LOGITS].astype(np.float64)
    largest = logits.max(axis=-1)
    truth = largest + np.log(np.exp(logits - largest[..., np.newaxis]).sum(axis=-1))
    # A graph whose logits are all the same differs from PyTorch in them, and is refused for that.
    spread = float(np.ptp(logits)) or 1.0
    share = np.abs(np.asarray(outputs[Name.LOGSUMEXP], np.float32) - truth).max() / spread
    return CheckResult(
        name="logsumexp",
        value=float(share),
        bound=PARITY_BOUNDS[Precision.FP32],
        detail="of the logits' range",
    )


def _unused_places(feeds: Arrays, sample: Sample) -> NDArray[np.bool_]:
    """[batch, capacity] of cache places that hold nothing."""
    places = np.arange(feeds[Name.ATTENTION_MASK].shape[-1])
    return places >= sample.lengths[:, np.newaxis]


def _soil(feeds: Arrays, sample: Sample) -> Arrays:
    """The same inputs with unused cache places filled at random."""
    contract, is_unused = sample.contract, _unused_places(feeds, sample)
    rng = np.random.default_rng(_STALE_SEED)
    soiled = dict(feeds)
    for name in contract.past_names:
        soiled[name] = _fill(feeds[name], is_unused, contract, rng)
    return soiled


def _check_places(
    sample: Sample, soiled: Arrays, outputs: Arrays, again: Arrays
) -> list[CheckResult]:
    """Whatever unused places hold, no output may show it, and no place but the block's changes.

    Args:
        sample: the batch.
        soiled: its inputs, unused places filled.
        outputs: of its inputs with empty places.
        again: of `soiled`.
    """
    contract = sample.contract
    block, num_places = soiled[Name.ATTENTION_MASK].shape[-2:]
    ends = sample.lengths[:, np.newaxis] + block
    is_block = _unused_places(soiled, sample) & (np.arange(num_places) < ends)
    touched, shown = [], []
    for past, present in zip(contract.past_names, contract.present_names, strict=True):
        before, after, clean = (
            _by_place(array, contract) for array in (soiled[past], again[present], outputs[present])
        )  # each [batch, places, ...]
        touched.append(np.count_nonzero(after[~is_block] != before[~is_block]))
        shown.append(np.count_nonzero(after[is_block] != clean[is_block]))
    for name in outputs.keys() - set(contract.present_names):
        shown.append(np.count_nonzero(again[name] != outputs[name]))
    return [
        CheckResult(
            name="stale_places",
            value=float(sum(shown)),
            bound=0.0,
            detail="numbers that differ when unused places are filled at random",
        ),
        CheckResult(
            name="other_places",
            value=float(sum(touched)),
            bound=0.0,
            detail="numbers of the cache that changed outside the block's places",
        ),
    ]


def _fill(
    stored: NDArray[np.generic],
    is_unused: NDArray[np.bool_],
    contract: Contract,
    rng: np.random.Generator,
) -> NDArray[np.generic]:
    """A layer's cache with other numbers in its unused places."""
    dtype = contract.kv_dtype
    largest = float(np.abs(from_stored(stored, dtype)).max())
    noise = to_stored(rng.uniform(-largest, largest, stored.shape) * _STALE_FACTOR, dtype)
    filled = stored.copy()
    _by_place(filled, contract)[is_unused] = _by_place(noise, contract)[is_unused]
    return filled


def _by_place(stored: NDArray[np.generic], contract: Contract) -> NDArray[np.generic]:
    """A view of a layer's cache, [batch, places, ...]."""
    return stored if contract.kv_order is KvOrder.SEQUENCE_MAJOR else np.moveaxis(stored, 2, 1)


def _difference(
    name: str, found: NDArray[np.generic], truth: NDArray[np.float32], bound: float
) -> CheckResult:
    share = float(np.abs(found.astype(np.float32) - truth).max()) / _range(name, truth)
    return CheckResult(name=name, value=share, bound=bound, detail="of the true range")


def _range(name: str, values: NDArray[np.generic]) -> float:
    """Largest less smallest value; nothing can be compared with a model that says one thing."""
    spread = float(np.ptp(values))
    if spread == 0.0:
        raise CheckError(
            f"every value of {name} is {values.flat[0]:g}, as of a model whose weights are zero; "
            "no bundle was written: copy the weights again"
        )
    return spread
