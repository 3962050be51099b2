"""Compares what a written graph computes with transformers' own model, on random input.

The truth is always float32 over the weights that the graph holds, so that what is measured is
the graph's arithmetic and not the rounding of its weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_export.graph.sample import Sample, make_sample
from la_export.graph.session import GraphSession
from la_export.graph.twin import float32_twin
from la_export.reference import TorchReference
from la_runtime.bundle import CheckResult
from la_runtime.contract import CacheForm, Contract, Dtype, Name
from la_runtime.errors import CheckError
from la_runtime.storage import from_stored, to_stored

__all__ = ["PARITY_BOUNDS", "check_parity"]

# Largest difference allowed, as a share of the range of the true values. Float32 kernels that sum
# in another order differ by up to 6e-6 of it. In float16 every operator rounds by up to 1/2,048 of
# a number: 9e-4 of the range over two layers, 5e-3 over the thirty of SmolLM2-135M.
PARITY_BOUNDS: Final = {Dtype.FLOAT32: 1e-4, Dtype.FLOAT16: 1e-2}
_TWIN_PREFIX: Final = "float32_twin."
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
) -> tuple[CheckResult, ...]:
    """Run the graph on random input and compare every output with PyTorch.

    A half-precision graph is also run as its float32 twin, where faults of structure cannot hide
    behind rounding; a bfloat16 graph as its twin only.

    Args:
        path: the written graph.
        contract: its contract.
        reference: transformers' own model in float32, with weights as the graph stores them.
        context: positions the bundle serves; the sequences stay within.
        threads: threads for ONNX Runtime.

    Raises:
        CheckError: an output differs by more than its bound.
    """
    dtype = contract.compute_dtype
    sample = make_sample(contract, reference, context=context)
    results: list[CheckResult] = []
    if dtype in PARITY_BOUNDS:
        results += _check_graph(GraphSession(path, threads), sample)
    if dtype is not Dtype.FLOAT32:
        results += _check_twin(path, sample, threads)
    for result in results:
        if not result.value <= result.bound:
            raise CheckError(
                f"the graph differs from PyTorch in {result.name}: {result.value:.3g}, "
                f"allowed {result.bound:.3g}; no bundle was written"
            )
    return tuple(results)


def _check_twin(path: Path, sample: Sample, threads: int) -> list[CheckResult]:
    widened = replace(sample.contract, compute_dtype=Dtype.FLOAT32, kv_dtype=Dtype.FLOAT32)
    with float32_twin(path) as twin:
        results = _check_graph(GraphSession(twin, threads), replace(sample, contract=widened))
    detail = _TWIN_DETAILS[sample.contract.compute_dtype]
    return [
        result.model_copy(update={"name": _TWIN_PREFIX + result.name, "detail": detail})
        for result in results
    ]


def _check_graph(session: GraphSession, sample: Sample) -> list[CheckResult]:
    feeds = sample.make_feeds()
    outputs = session.run(feeds)
    results = [
        _compare_logits(outputs, np.asarray(feeds[Name.LOGITS_ROWS], np.int64), sample),
        _compare_written(outputs, sample),
        _check_top(outputs, sample.contract),
        _check_logsumexp(outputs),
        _check_prompt(session, sample),
    ]
    if sample.contract.cache_form is CacheForm.SCATTER:
        results += _check_places(session, sample, feeds, outputs)
    return results


def _compare_logits(outputs: Arrays, wanted: NDArray[np.int64], sample: Sample) -> CheckResult:
    counts = [len(truth.logits) for truth in sample.truths]
    found = [outputs[Name.LOGITS][index, :count] for index, count in enumerate(counts)]
    expected = [
        truth.logits[wanted[index, :count]]
        for index, (truth, count) in enumerate(zip(sample.truths, counts, strict=True))
    ]
    return _difference("logits", np.concatenate(found), np.concatenate(expected), sample.contract)


def _compare_written(outputs: Arrays, sample: Sample) -> CheckResult:
    """The K/V of every row, where the cache form has them."""
    contract = sample.contract
    is_scatter = contract.cache_form is CacheForm.SCATTER
    names = contract.present_names if is_scatter else contract.block_names
    stored = np.stack([outputs[name] for name in names])
    written = from_stored(stored, contract.kv_dtype)  # [2 * layers, batch, kv_heads, places, dim]
    found = []
    for index, truth in enumerate(sample.truths):
        first = int(sample.lengths[index]) if is_scatter else 0
        rows = written[:, index, :, first : first + len(truth.key_values)]
        found.append(np.moveaxis(rows, 2, 0))  # [rows, 2 * layers, kv_heads, head_dim]
    expected = [truth.key_values for truth in sample.truths]
    return _difference("block_kv", np.concatenate(found), np.concatenate(expected), contract)


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
        bound=PARITY_BOUNDS[Dtype.FLOAT32],
        detail="of the logits' range",
    )


def _check_prompt(session: GraphSession, sample: Sample) -> CheckResult:
    """A prompt with an empty cache, every row asked for."""
    logits = session.run(sample.make_prompt_feeds())[Name.LOGITS]
    return _difference(
        "prefill_logits", logits[0, ::-1], sample.truths[0].past_logits, sample.contract
    )


def _check_places(
    session: GraphSession, sample: Sample, feeds: Arrays, outputs: Arrays
) -> list[CheckResult]:
    """Whatever unused places hold, no output may show it, and no place but the block's changes."""
    contract, lengths = sample.contract, sample.lengths
    assert contract.capacity is not None, "cache form scatter has a capacity"
    block = feeds[Name.INPUT_IDS].shape[1]
    places = np.arange(contract.capacity)
    is_unused = places >= lengths[:, np.newaxis]  # [batch, capacity]
    is_block = is_unused & (places < lengths[:, np.newaxis] + block)
    rng = np.random.default_rng(_STALE_SEED)
    soiled = dict(feeds)
    for name in contract.past_names:
        soiled[name] = _fill(feeds[name], is_unused, contract.kv_dtype, rng)
    again = session.run(soiled)
    touched, shown = [], []
    for past, present in zip(contract.past_names, contract.present_names, strict=True):
        before, after, clean = (
            np.moveaxis(array, 2, 1) for array in (soiled[past], again[present], outputs[present])
        )  # each [batch, capacity, kv_heads, head_dim]
        touched.append(np.count_nonzero(after[~is_block] != before[~is_block]))
        shown.append(np.count_nonzero(after[is_block] != clean[is_block]))
    for name in (Name.LOGITS, Name.TOP_IDS, Name.TOP_LOGITS, Name.LOGSUMEXP):
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
    dtype: Dtype,
    rng: np.random.Generator,
) -> NDArray[np.generic]:
    """A cache [batch, kv_heads, capacity, head_dim] with other numbers in its unused places."""
    largest = float(np.abs(from_stored(stored, dtype)).max())
    noise = to_stored(rng.uniform(-largest, largest, stored.shape) * _STALE_FACTOR, dtype)
    return np.where(is_unused[:, np.newaxis, :, np.newaxis], noise, stored)


def _difference(
    name: str, found: NDArray[np.generic], truth: NDArray[np.float32], contract: Contract
) -> CheckResult:
    share = float(np.abs(found.astype(np.float32) - truth).max()) / _range(name, truth)
    bound = PARITY_BOUNDS[contract.compute_dtype]
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
