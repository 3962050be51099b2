"""Compares what a written graph computes with transformers' own model, on random input.

One ragged batch of two sequences with a past, drafts, lookahead slots, padding and hidden
cache places; the truth for every row is a plain causal pass over just what that row may see.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from la_export.reference import ReferencePass, TorchReference
from la_runtime.bundle import CheckResult
from la_runtime.contract import Contract, Name, masked_value
from la_runtime.errors import CheckError

__all__ = ["LOGITS_BOUND", "check_parity"]

# Largest difference allowed, as a share of the range of the true values; float32 kernels that
# sum in another order differ by about 1e-6 of it.
LOGITS_BOUND: Final = 1e-4
_SEED: Final = 20231


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One row of the block: what it is and which rows of its block it sees besides itself."""

    token_id: int
    position: int
    sees: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """One sequence: its past and its rows, from which inputs and truth are both made."""

    past_ids: tuple[int, ...]
    first_position: int
    rows: tuple[_Row, ...]

    @property
    def past_positions(self) -> range:
        return range(self.first_position, self.first_position + len(self.past_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Truth:
    """What PyTorch gives for a sequence.

    Args:
        past_logits: [past, vocab_size].
        past_key_values: [2 * layers, kv_heads, past, head_dim].
        logits: [rows, vocab_size].
        key_values: [rows, 2 * layers, kv_heads, head_dim].
    """

    past_logits: NDArray[np.float32]
    past_key_values: NDArray[np.float32]
    logits: NDArray[np.float32]
    key_values: NDArray[np.float32]


def check_parity(
    path: Path,
    contract: Contract,
    reference: TorchReference,
    *,
    context: int,
    threads: int,
) -> tuple[CheckResult, ...]:
    """Run the graph on random input and compare every output with PyTorch.

    Args:
        path: the written graph.
        contract: its contract.
        reference: transformers' own model with the same weights.
        context: positions the bundle serves; the sequences stay within.
        threads: threads for ONNX Runtime.

    Raises:
        CheckError: an output differs by more than its bound.
    """
    rng = np.random.default_rng(_SEED)
    vectors = _random_vectors(rng, contract, reference)
    long_past = min(11, max(2, context // 3))
    sequences = (
        _make_sequence(rng, contract, past_len=long_past, first_position=0, num_drafts=2),
        _make_sequence(rng, contract, past_len=long_past // 2, first_position=3, num_drafts=1),
    )
    session = _open_session(path, threads)
    truth = [_run_reference(reference, sequence, vectors) for sequence in sequences]
    feeds = _make_feeds(contract, sequences, [entry.past_key_values for entry in truth], vectors)
    outputs = dict(
        zip(
            [output.name for output in session.get_outputs()],
            session.run(None, feeds),
            strict=True,
        )
    )
    results = (
        _compare_logits(outputs, np.asarray(feeds[Name.LOGITS_ROWS], np.int64), truth),
        _compare_block(outputs, contract, truth),
        _check_top(outputs, contract),
        _check_logsumexp(outputs),
        _check_prefill(session, contract, sequences[0], truth[0], vectors),
    )
    for result in results:
        if not result.value <= result.bound:
            raise CheckError(
                f"the graph differs from PyTorch in {result.name}: {result.value:.3g}, "
                f"allowed {result.bound:.3g}; no bundle was written"
            )
    return results


def _random_vectors(
    rng: np.random.Generator, contract: Contract, reference: TorchReference
) -> NDArray[np.float32]:
    spread = float(reference.embedding_rows(min(contract.vocab_size, 256)).std())
    vectors = rng.normal(0.0, spread, (contract.k_max, contract.hidden_size))
    return vectors.astype(np.float32)


def _make_sequence(
    rng: np.random.Generator,
    contract: Contract,
    *,
    past_len: int,
    first_position: int,
    num_drafts: int,
) -> _Sequence:
    """Root, drafts, and behind each of them a group of its first and its last slot."""
    root_position = first_position + past_len
    ids = rng.integers(0, contract.vocab_size, past_len + 1 + num_drafts).tolist()
    rows = [
        _Row(token_id=token_id, position=root_position + place, sees=tuple(range(place)))
        for place, token_id in enumerate(ids[past_len:])
    ]
    for prefix in range(1 + num_drafts):
        for slot in sorted({1, contract.k_max}):
            rows.append(
                _Row(
                    token_id=contract.vocab_size + slot - 1,
                    position=root_position + prefix + slot,
                    sees=tuple(range(prefix + 1)),
                )
            )
    return _Sequence(
        past_ids=tuple(ids[:past_len]), first_position=first_position, rows=tuple(rows)
    )


def _run_reference(
    reference: TorchReference, sequence: _Sequence, vectors: NDArray[np.float32]
) -> _Truth:
    """Tokens from one causal pass over them all; each slot from a pass of its own behind it."""
    past_len = len(sequence.past_ids)
    tokens = [place for place, row in enumerate(sequence.rows) if not _is_slot(row, reference)]
    causal = _run_visible(reference, sequence, tokens, vectors)
    logits = list(causal.logits[past_len:])
    key_values = list(np.moveaxis(causal.key_values[:, :, past_len:], 2, 0))
    for place in range(len(tokens), len(sequence.rows)):
        visible = [*sequence.rows[place].sees, place]
        alone = _run_visible(reference, sequence, visible, vectors)
        logits.append(alone.logits[-1])
        key_values.append(alone.key_values[:, :, -1])
    return _Truth(
        past_logits=causal.logits[:past_len],
        past_key_values=causal.key_values[:, :, :past_len],
        logits=np.stack(logits),
        key_values=np.stack(key_values),
    )


def _is_slot(row: _Row, reference: TorchReference) -> bool:
    return row.token_id >= reference.vocab_size


def _run_visible(
    reference: TorchReference,
    sequence: _Sequence,
    places: list[int],
    vectors: NDArray[np.float32],
) -> ReferencePass:
    """A plain causal pass over the past and the rows at these places of the block."""
    rows = [sequence.rows[place] for place in places]
    return reference.run(
        [*sequence.past_ids, *(row.token_id for row in rows)],
        vectors,
        position_ids=[*sequence.past_positions, *(row.position for row in rows)],
    )


def _make_feeds(
    contract: Contract,
    sequences: tuple[_Sequence, ...],
    pasts: list[NDArray[np.float32]],
    vectors: NDArray[np.float32],
) -> dict[str, NDArray[np.generic]]:
    """The contract's inputs: short sequences padded, wanted rows in reverse order."""
    batch = len(sequences)
    block = max(len(sequence.rows) for sequence in sequences)
    past = max(len(sequence.past_ids) for sequence in sequences)
    ids = np.zeros((batch, block), np.int64)
    positions = np.zeros((batch, block), np.int64)
    wanted = np.zeros((batch, block), np.int64)
    mask = np.full(
        (batch, 1, block, past + block), masked_value(contract.compute_dtype), np.float32
    )
    mask[:, 0, np.arange(block), past + np.arange(block)] = 0.0
    cache = np.zeros(
        (2 * contract.num_layers, batch, contract.num_kv_heads, past, contract.head_dim),
        np.float32,
    )
    for index, (sequence, key_values) in enumerate(zip(sequences, pasts, strict=True)):
        count = len(sequence.rows)
        positions[index] = sequence.rows[0].position
        wanted[index, :count] = np.arange(count)[::-1]
        cache[:, index, :, : len(sequence.past_ids)] = key_values
        for place, row in enumerate(sequence.rows):
            ids[index, place] = row.token_id
            positions[index, place] = row.position
            mask[index, 0, place, : len(sequence.past_ids)] = 0.0
            mask[index, 0, place, [past + seen for seen in row.sees]] = 0.0
    feeds: dict[str, NDArray[np.generic]] = {
        Name.INPUT_IDS: ids,
        Name.POSITION_IDS: positions,
        Name.ATTENTION_MASK: mask,
        Name.LOOKAHEAD_EMBEDDINGS: vectors,
        Name.LOGITS_ROWS: wanted,
    }
    feeds.update(zip(contract.past_names, cache, strict=True))
    return {str(name): array for name, array in feeds.items()}


def _open_session(path: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _compare_logits(
    outputs: dict[str, NDArray[np.float32]],
    wanted: NDArray[np.int64],
    truth: list[_Truth],
) -> CheckResult:
    found = [outputs[Name.LOGITS][index, : len(entry.logits)] for index, entry in enumerate(truth)]
    expected = [
        entry.logits[wanted[index, : len(entry.logits)]] for index, entry in enumerate(truth)
    ]
    return _difference("logits", np.concatenate(found), np.concatenate(expected))


def _compare_block(
    outputs: dict[str, NDArray[np.float32]],
    contract: Contract,
    truth: list[_Truth],
) -> CheckResult:
    block = np.stack([outputs[name] for name in contract.block_names])
    by_row = np.moveaxis(block, 3, 1)  # [2 * layers, block, batch, kv_heads, head_dim]
    found = [
        np.moveaxis(by_row[:, : len(entry.key_values), index], 1, 0)
        for index, entry in enumerate(truth)
    ]
    expected = [entry.key_values for entry in truth]
    return _difference("block_kv", np.concatenate(found), np.concatenate(expected))


def _check_top(outputs: dict[str, NDArray[np.float32]], contract: Contract) -> CheckResult:
    """The best tokens must be those of the graph's own logits, ties to the lowest id."""
    logits = outputs[Name.LOGITS]
    order = np.argsort(-logits, axis=-1, kind="stable")[..., : contract.top_c]
    best = np.take_along_axis(logits, order, axis=-1)
    wrong = np.count_nonzero(outputs[Name.TOP_IDS] != order)
    wrong += np.count_nonzero(outputs[Name.TOP_LOGITS] != best)
    return CheckResult(name="top", value=float(wrong), bound=0.0, detail="entries that differ")


def _check_logsumexp(outputs: dict[str, NDArray[np.float32]]) -> CheckResult:
    logits = outputs[Name.LOGITS].astype(np.float64)
    largest = logits.max(axis=-1)
    truth = largest + np.log(np.exp(logits - largest[..., np.newaxis]).sum(axis=-1))
    # A graph whose logits are all the same differs from PyTorch in them, and is refused for that.
    spread = float(np.ptp(logits)) or 1.0
    share = np.abs(outputs[Name.LOGSUMEXP] - truth).max() / spread
    return CheckResult(
        name="logsumexp", value=float(share), bound=LOGITS_BOUND, detail="of the logits' range"
    )


def _check_prefill(
    session: ort.InferenceSession,
    contract: Contract,
    sequence: _Sequence,
    truth: _Truth,
    vectors: NDArray[np.float32],
) -> CheckResult:
    """A prompt with an empty cache, every row asked for."""
    rows = tuple(
        _Row(token_id=token_id, position=place, sees=tuple(range(place)))
        for place, token_id in enumerate(sequence.past_ids)
    )
    prompt = _Sequence(past_ids=(), first_position=0, rows=rows)
    empty = np.zeros(
        (2 * contract.num_layers, contract.num_kv_heads, 0, contract.head_dim), np.float32
    )
    feeds = _make_feeds(contract, (prompt,), [empty], vectors)
    (logits,) = session.run([Name.LOGITS.value], feeds)
    return _difference("prefill_logits", logits[0, ::-1], truth.past_logits)


def _difference(name: str, found: NDArray[np.float32], truth: NDArray[np.float32]) -> CheckResult:
    share = float(np.abs(found - truth).max()) / _range(name, truth)
    return CheckResult(name=name, value=share, bound=LOGITS_BOUND, detail="of the true range")


def _range(name: str, values: NDArray[np.generic]) -> float:
    """Largest less smallest value; nothing can be compared with a model that says one thing."""
    spread = float(np.ptp(values))
    if spread == 0.0:
        raise CheckError(
            f"every value of {name} is {values.flat[0]:g}, as of a model whose weights are zero; "
            "no bundle was written: copy the weights again"
        )
    return spread
