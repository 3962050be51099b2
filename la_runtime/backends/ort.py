"""ONNX Runtime on the CPU, driven through IO binding.

Inputs and outputs live in buffers of ours. A pass binds what changed since the last one, and a
commit copies only the accepted rows.

ONNX Runtime computes all outputs of a graph, fetched or not (`only_execute_path_to_fetches` has no
effect in its inference builds). So a pass without scores asks for no row, and the bundle holds a
variant of the graph without `logsumexp`, which is made from the logits where it is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from la_runtime.backends.availability import explain_import_error
from la_runtime.backends.base import CacheSizing, CacheState, Outputs, StepInputs
from la_runtime.bundle import Bundle
from la_runtime.contract import Contract, Dtype, Name, TensorSpec
from la_runtime.errors import BundleError, UsageError

try:
    import onnxruntime as ort
except ImportError as error:
    raise explain_import_error(error) from error

__all__ = ["OrtBackend", "grown_capacity"]

_CPU = "CPUExecutionProvider"
_CAPACITY_STEP = 128
_CAPACITY_SHARE = 0.12
_SPOILED_SCALE = 10.0
_KEPT_BYTES = 8 << 20
_KEPT_TIMES = 4
_NAME = "ort-cpu"
_ONNX_TYPES = {Dtype.INT64: "tensor(int64)", Dtype.FLOAT32: "tensor(float)"}


def grown_capacity(needed: int) -> int:
    """Cache places to hold `needed`: the next step of 128 places, or of 12 % when that is more."""
    step = max(_CAPACITY_STEP, math.floor(_CAPACITY_SHARE * needed))
    return -(-needed // step) * step


class _Buffer:
    """Memory that is reused for every shape it can hold, and given back when far too large.

    So a long prompt's block is not kept while its answer is decoded row by row.
    """

    def __init__(self, dtype: np.dtype[np.generic]) -> None:
        self._flat = np.empty(0, dtype=dtype)

    def shaped(self, shape: tuple[int, ...]) -> NDArray[np.generic]:
        size = math.prod(shape)
        is_wasteful = self._flat.nbytes > _KEPT_BYTES and self._flat.size > _KEPT_TIMES * size
        if size > self._flat.size or is_wasteful:
            self._flat = np.empty(size, dtype=self._flat.dtype)
        return self._flat[:size].reshape(shape)


class _OrtCache:
    """Cache places [2 * layers, batch, kv_heads, capacity, head_dim], and the last block's K/V.

    The places lie in memory reserved for as many as the sequences may need. They grow inside it
    by moving apart, so that a long prompt never has its cache in memory twice, while passes
    present few columns more than there are tokens. Reserved memory that was never written costs
    nothing.
    """

    def __init__(
        self,
        contract: Contract,
        make_binding: Callable[[], ort.IOBinding],
        *,
        batch: int,
        sizing: CacheSizing,
    ) -> None:
        self.binding = make_binding()
        self._make_binding = make_binding
        self.sizing = sizing
        self.lengths = np.zeros(batch, dtype=np.int64)
        self._contract = contract
        self._lay_out(batch, capacity=0, reserved=0)
        self.past: NDArray[np.generic] | None = None  # what is bound as the past
        self.inputs: StepInputs | None = None
        self.scores: dict[str, NDArray[np.generic]] = {}
        self.block = self.places
        self.bound_outputs: tuple[object, ...] = ()
        self._block_buffer = _Buffer(np.dtype(contract.kv_dtype))
        self._score_buffers = {
            spec.name: _Buffer(np.dtype(spec.dtype)) for spec in contract.outputs
        }

    def _lay_out(self, batch: int, *, capacity: int, reserved: int) -> None:
        """Fresh zeroed places, in memory for up to `reserved` of them per sequence."""
        contract = self._contract
        self._reserved = max(reserved, capacity)
        size = batch * contract.num_kv_heads * self._reserved * contract.head_dim
        self._memory = np.zeros((2 * contract.num_layers, size), dtype=np.dtype(contract.kv_dtype))
        self.places = self._view(batch, capacity)

    def _view(self, batch: int, capacity: int) -> NDArray[np.generic]:
        """The reserved memory as places; each layer's are contiguous."""
        contract = self._contract
        shape = (batch, contract.num_kv_heads, capacity, contract.head_dim)
        return self._memory[:, : math.prod(shape)].reshape(2 * contract.num_layers, *shape)

    @property
    def past_len(self) -> int:
        if self.sizing is CacheSizing.EXACT:
            return int(self.lengths.max(initial=0))
        return int(self.places.shape[3])

    def reserve(self, places: int) -> None:
        if places > self._reserved:
            self._replace(range(len(self.lengths)), self.places.shape[3], places)

    def grow(self, needed: int) -> None:
        """Make room for `needed` places per sequence."""
        before = self.places
        if needed <= before.shape[3]:
            return
        capacity = grown_capacity(needed)
        if needed > self._reserved:
            self._replace(range(len(self.lengths)), capacity, capacity)
            return
        self.places = self._view(before.shape[1], min(capacity, self._reserved))
        # From the last row to the first: each moves away from where it and those after it were.
        for sequence, head in reversed(list(np.ndindex(before.shape[1:3]))):
            length = int(self.lengths[sequence])
            for old, new in zip(before, self.places, strict=True):
                new[sequence, head, :length] = old[sequence, head, :length]
                new[sequence, head, length:] = 0

    def _replace(self, kept: Sequence[int], capacity: int, reserved: int) -> None:
        """Move these sequences' places to memory of their own."""
        before = self.places
        copied = min(capacity, before.shape[3])
        self._lay_out(len(kept), capacity=capacity, reserved=reserved)
        for new, old in enumerate(kept):
            self.places[:, new, :, :copied] = before[:, old, :, :copied]

    def append(self, sequence: int, rows: Sequence[int]) -> None:
        """Copy these rows of the last block behind the sequence's committed places."""
        start = int(self.lengths[sequence])
        stop = start + len(rows)
        block = self.block[:, sequence]  # [2 * layers, kv_heads, block, head_dim]
        first = rows[0]
        if rows[-1] - first + 1 == len(rows):
            accepted = block[:, :, first : first + len(rows)]
        else:
            accepted = np.take(block, rows, axis=2)
        self.places[:, sequence, :, start:stop] = accepted
        self.lengths[sequence] = stop

    def keep(self, indices: Sequence[int]) -> None:
        kept = list(indices)
        self.lengths = self.lengths[kept]
        # A long sequence that left does not make the others' passes wide for ever.
        capacity = min(self.places.shape[3], grown_capacity(int(self.lengths.max(initial=0))))
        self._replace(kept, capacity, self._reserved)

    def take(self, indices: Sequence[int]) -> _OrtCache:
        taken = _OrtCache(self._contract, self._make_binding, batch=0, sizing=self.sizing)
        taken.lengths, taken.places = self.lengths, self.places
        taken.keep(indices)
        return taken

    def absorb(self, other: CacheState) -> None:
        assert isinstance(other, _OrtCache), "caches of one backend"
        batch = len(self.lengths)
        if batch == 0:
            self._memory, self.places = other._memory, other.places
            self._reserved = other._reserved
        else:
            parts = (self.places, other.places)
            self._lay_out(
                batch + len(other.lengths),
                capacity=max(part.shape[3] for part in parts),
                reserved=max(self._reserved, other._reserved),
            )
            first = 0
            for part in parts:
                self.places[:, first : first + part.shape[1], :, : part.shape[3]] = part
                first += part.shape[1]
        self.lengths = np.concatenate([self.lengths, other.lengths])
        other.close()

    def truncate(self, lengths: Sequence[int]) -> None:
        for sequence, length in enumerate(lengths):
            assert 0 <= length <= self.lengths[sequence], "truncation never grows a cache"
            self.places[:, sequence, :, length : self.lengths[sequence]] = 0
            self.lengths[sequence] = length

    def spoil_unused(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for sequence, length in enumerate(self.lengths):
            used = self.places[:, sequence, :, :length]
            unused = self.places[:, sequence, :, length:]
            norm = float(np.sqrt(np.mean(np.square(used)))) if used.size else 1.0
            unused[:] = _SPOILED_SCALE * norm * rng.standard_normal(unused.shape, np.float32)

    def close(self) -> None:
        self.binding.clear_binding_inputs()
        self.binding.clear_binding_outputs()
        self._lay_out(0, capacity=0, reserved=0)
        self.lengths = np.zeros(0, dtype=np.int64)
        self.past = None

    def bind_past(self) -> None:
        """Bind the cache as the graph's past, unless it is bound already."""
        past = self.places
        if self.sizing is CacheSizing.EXACT:
            past = np.ascontiguousarray(past[:, :, :, : self.past_len])
        if past is self.past:
            return
        self.past = past
        for name, places in zip(self._contract.past_names, past, strict=True):
            self.binding.bind_cpu_input(name, places)

    def bind_outputs(self, block_len: int, num_rows: int, names: Sequence[Name]) -> None:
        """Bind buffers for the block's K/V and these scores."""
        batch = len(self.lengths)
        wanted = (batch, block_len, num_rows, *names)
        if wanted == self.bound_outputs:
            return
        self.binding.clear_binding_outputs()
        contract = self._contract
        shape = (
            2 * contract.num_layers,
            batch,
            contract.num_kv_heads,
            block_len,
            contract.head_dim,
        )
        self.block = self._block_buffer.shaped(shape)
        for name, block in zip(contract.block_names, self.block, strict=True):
            self._bind_output(name, block)
        row_axes = {
            Name.TOP_IDS: (contract.top_c,),
            Name.TOP_LOGITS: (contract.top_c,),
            Name.LOGITS: (contract.vocab_size,),
        }
        self.scores = {}
        for name in names:
            self.scores[name] = self._score_buffers[name].shaped(
                (batch, num_rows, *row_axes.get(name, ()))
            )
            self._bind_output(name, self.scores[name])
        self.bound_outputs = wanted

    def _bind_output(self, name: str, array: NDArray[np.generic]) -> None:
        self.binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


class _OrtScores:
    def __init__(self, scores: dict[str, NDArray[np.generic]]) -> None:
        self._scores = scores

    def top(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return self._scores[Name.TOP_IDS], self._scores[Name.TOP_LOGITS]  # type: ignore[return-value]

    def logsumexp(self) -> NDArray[np.float32]:
        if Name.LOGSUMEXP in self._scores:
            return self._scores[Name.LOGSUMEXP]  # type: ignore[return-value]
        logits = self.logits()
        peak = logits.max(axis=-1, keepdims=True)  # [batch, rows, 1]
        summed = np.exp(logits - peak).sum(axis=-1, dtype=np.float64)
        return np.asarray(np.log(summed) + peak[..., 0], dtype=np.float32)

    def logits(self) -> NDArray[np.float32]:
        return self._scores[Name.LOGITS]  # type: ignore[return-value]


class OrtBackend:
    """A graph in ONNX Runtime's CPU provider.

    Args:
        session: the session over the graph.
        contract: the graph's contract.
        lookahead_embeddings: [k_max, hidden_size] in the compute dtype.
        omits: outputs of the contract that this graph does not have.

    Raises:
        BundleError: the graph's inputs and outputs are not the contract's, or the vectors have
            another shape.
    """

    widths: tuple[int, ...] = ()

    def __init__(
        self,
        session: ort.InferenceSession,
        contract: Contract,
        lookahead_embeddings: NDArray[np.floating],
        *,
        omits: Sequence[str] = (),
    ) -> None:
        _check_signature(session, contract, omits)
        self.contract = contract
        self.session = session
        self._is_closed = False
        logsumexp_from = Name.LOGITS if Name.LOGSUMEXP in omits else Name.LOGSUMEXP
        self._names_of = {
            Outputs.TOP: (Name.TOP_IDS, Name.TOP_LOGITS),
            Outputs.LOGSUMEXP: (logsumexp_from,),
            Outputs.LOGITS: (Name.LOGITS,),
        }
        self.set_lookahead_embeddings(lookahead_embeddings)

    @classmethod
    def open(cls, bundle: Bundle, *, threads: int) -> OrtBackend:
        """Open a bundle's graph, in the variant made for this backend if there is one.

        Raises:
            BundleError: ONNX Runtime cannot load the graph, or it is not what the manifest says.
        """
        manifest = bundle.manifest
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        variant = next((v for v in manifest.variants if v.backend == _NAME), None)
        graph = bundle.path(manifest.graph if variant is None else variant.path)
        vectors = _load_lookahead_embeddings(
            bundle.path(manifest.lookahead.path), manifest.contract
        )
        try:
            session = ort.InferenceSession(str(graph), options, providers=[_CPU])
        except Exception as error:
            raise BundleError(
                f"ONNX Runtime {ort.__version__} cannot load {graph}: {error}"
            ) from error
        return cls(
            session,
            manifest.contract,
            vectors,
            omits=() if variant is None else variant.omits,
        )

    def allocate(self, batch: int, sizing: CacheSizing) -> CacheState:
        """See `Backend.allocate`."""
        self._check_open()
        return _OrtCache(self.contract, self.session.io_binding, batch=batch, sizing=sizing)

    def forward(self, state: CacheState, inputs: StepInputs) -> _OrtScores:
        """See `Backend.forward`."""
        assert isinstance(state, _OrtCache)
        self._check_open()
        binding = state.binding
        if not inputs.outputs:
            inputs = replace(inputs, logits_rows=inputs.logits_rows[:, :0])
        names = dict.fromkeys(
            name for flag in inputs.outputs for name in self._names_of[flag]
        )  # each once, in order
        state.inputs = inputs  # the binding borrows their memory
        binding.bind_cpu_input(Name.INPUT_IDS, inputs.input_ids)
        binding.bind_cpu_input(Name.POSITION_IDS, inputs.position_ids)
        binding.bind_cpu_input(Name.ATTENTION_MASK, inputs.attention_mask)
        binding.bind_cpu_input(Name.LOGITS_ROWS, inputs.logits_rows)
        binding.bind_cpu_input(Name.LOOKAHEAD_EMBEDDINGS, self.lookahead_embeddings)
        state.bind_past()
        state.bind_outputs(inputs.input_ids.shape[1], inputs.logits_rows.shape[1], tuple(names))
        self.session.run_with_iobinding(binding, None)
        return _OrtScores(state.scores)

    def commit(self, state: CacheState, rows: Sequence[Sequence[int]]) -> None:
        """See `Backend.commit`."""
        assert isinstance(state, _OrtCache)
        state.grow(max(int(n) + len(r) for n, r in zip(state.lengths, rows, strict=True)))
        for sequence, accepted in enumerate(rows):
            if accepted:
                state.append(sequence, accepted)

    def set_lookahead_embeddings(self, embeddings: NDArray[np.floating]) -> None:
        """See `Backend.set_lookahead_embeddings`.

        Raises:
            BundleError: they have another shape, or a component is not finite.
        """
        expected = (self.contract.k_max, self.contract.hidden_size)
        if embeddings.shape != expected:
            raise BundleError(
                f"lookahead vectors have shape {embeddings.shape}, expected {expected}"
            )
        if not np.isfinite(embeddings).all():
            raise BundleError("lookahead vectors hold NaN or infinity; tune or build them again")
        self.lookahead_embeddings = np.array(
            embeddings, dtype=np.dtype(self.contract.compute_dtype), order="C"
        )

    def close(self) -> None:
        """See `Backend.close`."""
        self._is_closed = True
        self.session = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the engine is closed; open the bundle again")


def _check_signature(
    session: ort.InferenceSession, contract: Contract, omits: Sequence[str]
) -> None:
    """Compare the graph's inputs and outputs with the contract's."""
    outputs = [spec for spec in contract.outputs if spec.name not in omits]
    for what, found, specs in (
        ("input", session.get_inputs(), contract.inputs),
        ("output", session.get_outputs(), outputs),
    ):
        names = [tensor.name for tensor in found]
        if names != [spec.name for spec in specs]:
            raise BundleError(
                f"the graph is not the manifest's: it has {len(names)} {what}s, the contract "
                f"{len(specs)}, or their names differ; rebuild the bundle"
            )
        for tensor, spec in zip(found, specs, strict=True):
            if not _fits(tensor, spec):
                raise BundleError(
                    f"the graph is not the manifest's: {what} {spec.name} is {tensor.type} "
                    f"{tensor.shape}, the contract says {_ONNX_TYPES[spec.dtype]} "
                    f"{[str(axis) for axis in spec.axes]}; rebuild the bundle"
                )


def _fits(tensor: ort.NodeArg, spec: TensorSpec) -> bool:
    expected = [axis if isinstance(axis, int) else str(axis) for axis in spec.axes]
    return bool(tensor.type == _ONNX_TYPES[spec.dtype] and tensor.shape == expected)


def _load_lookahead_embeddings(path: Path, contract: Contract) -> NDArray[np.floating]:
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise BundleError(f"{path} is no safetensors file ({error}); rebuild the bundle") from error
    if Name.LOOKAHEAD_EMBEDDINGS not in tensors:
        raise BundleError(f"{path} has no tensor '{Name.LOOKAHEAD_EMBEDDINGS}'; rebuild the bundle")
    return tensors[Name.LOOKAHEAD_EMBEDDINGS]
