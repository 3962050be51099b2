"""ONNX Runtime on the CPU, driven through IO binding.

Inputs and outputs live in buffers of ours. A pass binds what changed since the last one, and a
commit copies only the accepted rows, or those of them that a graph has not written in their places.

ONNX Runtime computes all outputs of a graph, fetched or not (`only_execute_path_to_fetches` has no
effect in its inference builds). So a pass without scores asks for no row, and the bundle holds a
variant of the graph without `logsumexp`, which is made from the logits where it is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.array_scores import ArrayScores, score_names
from la_runtime.backends.availability import check_precision, explain_import_error
from la_runtime.backends.base import CacheSizing, CacheState, Outputs, PassLimits, StepInputs
from la_runtime.backends.lookahead_vectors import (
    load_lookahead_vectors,
    store_lookahead_vectors,
)
from la_runtime.backends.ort_binding import PassBinding
from la_runtime.backends.ort_cache import HostCache, make_host_cache
from la_runtime.backends.ort_graph import check_signature, graph_limits
from la_runtime.backends.ort_options import make_session_options
from la_runtime.bundle import Bundle
from la_runtime.contract import Contract, Dtype
from la_runtime.errors import BundleError, UsageError

try:
    import onnxruntime as ort
except ImportError as error:
    raise explain_import_error(error, backend="ort-cpu") from error

__all__ = ["OrtBackend"]

_CPU = "CPUExecutionProvider"
_NAME = "ort-cpu"
_ANY_SIZE = PassLimits()
_NONE = Outputs.NONE  # every step reads it, and an enumeration calls a function to find a member
# ONNX Runtime multiplies a single float16 row by other kernels, which round differently: logits of
# SmolLM2-135M by up to 0.05. From two rows on, a row's result does not depend on how many there
# are, and a pass of two takes no longer than a pass of one.
_LEAST_FLOAT16_ROWS = 2


class OrtBackend:
    """A graph in ONNX Runtime's CPU provider.

    Args:
        session: the session over the graph.
        contract: the graph's contract.
        lookahead_embeddings: [k_max, hidden_size]; rounded to the compute dtype.
        omits: outputs of the contract that this graph does not have.
        limits: the largest pass.
        tokens_only: a session over the graph without its adapter, for passes without lookaheads;
            the same session when not given.

    Raises:
        BundleError: the graph's inputs and outputs are not the contract's, or the vectors have
            another shape.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        contract: Contract,
        lookahead_embeddings: NDArray[np.floating],
        *,
        omits: Sequence[str] = (),
        limits: PassLimits = _ANY_SIZE,
        tokens_only: ort.InferenceSession | None = None,
    ) -> None:
        check_signature(session, contract, omits)
        if tokens_only is not None:
            check_signature(tokens_only, contract, omits)
        self.contract = contract
        self.session = session
        self.tokens_only = tokens_only
        self.limits = limits
        self._least_rows = _LEAST_FLOAT16_ROWS if contract.compute_dtype is Dtype.FLOAT16 else 1
        self.widths: tuple[int, ...] = (self._least_rows,) if self._least_rows > 1 else ()
        self._omits = tuple(omits)
        self._is_closed = False
        self.set_lookahead_embeddings(lookahead_embeddings)

    @classmethod
    def open(cls, bundle: Bundle, *, threads: int) -> OrtBackend:
        """Open a bundle's graph, in the variant made for this backend if there is one.

        Raises:
            HostError: the graph computes in numbers that this backend does not have.
            BundleError: ONNX Runtime cannot load the graph, or it is not what the manifest says.
        """
        manifest = bundle.manifest
        variant = manifest.variant_for(_NAME)
        contract = manifest.contract if variant is None else variant.contract_of(manifest.contract)
        check_precision(_NAME, contract)
        graph = bundle.path(manifest.graph if variant is None else variant.path)
        without = manifest.tokens_only_variant(_NAME)
        options = make_session_options(threads, takes_turns=without is not None)
        return cls(
            _open_session(graph, options),
            contract,
            load_lookahead_vectors(bundle),
            tokens_only=None
            if without is None
            else _open_session(bundle.path(without.path), options),
            omits=() if variant is None else variant.omits,
            limits=graph_limits(contract, context=manifest.model.context),
        )

    def allocate(self, batch: int, sizing: CacheSizing) -> CacheState:
        """See `Backend.allocate`."""
        self._check_open()
        return make_host_cache(self.contract, self._make_binding, batch=batch, sizing=sizing)

    def _make_binding(self) -> PassBinding:
        return PassBinding(self.session, self.contract)

    def forward(self, state: CacheState, inputs: StepInputs) -> ArrayScores:
        """See `Backend.forward`."""
        assert isinstance(state, HostCache)
        self._check_open()
        if inputs.outputs is _NONE:
            inputs = replace(inputs, logits_rows=inputs.logits_rows[:, :0])
        num_wanted = inputs.logits_rows.shape[1]
        is_padded = 0 < num_wanted < self._least_rows
        if is_padded:
            rows = np.repeat(inputs.logits_rows, self._least_rows, axis=1)
            inputs = replace(inputs, logits_rows=rows)
        session = self._choose_session(inputs)
        if state.binding.session is not session:
            state.bind_for(session, lambda: PassBinding(session, self.contract))
        state.binding.bind_inputs(inputs, self.lookahead_embeddings)
        state.bind(inputs, score_names(inputs.outputs, self._omits))
        session.run_with_iobinding(state.binding.io_binding, None)
        if not is_padded:
            return state.binding.read_scores
        scores = state.binding.scores
        return ArrayScores({name: found[:, :num_wanted] for name, found in scores.items()})

    def _choose_session(self, inputs: StepInputs) -> ort.InferenceSession:
        """The graph without its adapter wherever nothing would go through that."""
        if self.tokens_only is None or inputs.input_ids.max() >= self.contract.vocab_size:
            return self.session
        return self.tokens_only

    def commit(self, state: CacheState, rows: Sequence[Sequence[int]]) -> None:
        """See `Backend.commit`."""
        assert isinstance(state, HostCache)
        state.commit(rows)

    def set_lookahead_embeddings(self, embeddings: NDArray[np.floating]) -> None:
        """See `Backend.set_lookahead_embeddings`.

        Raises:
            BundleError: they have another shape, or a component is not finite.
        """
        self.lookahead_embeddings = store_lookahead_vectors(embeddings, self.contract)

    def close(self) -> None:
        """See `Backend.close`."""
        self._is_closed = True
        self.session = self.tokens_only = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the engine is closed; open the bundle again")


def _open_session(graph: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(str(graph), options, providers=[_CPU])
    except Exception as error:
        raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {graph}: {error}") from error
