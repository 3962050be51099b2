"""ONNX Runtime on an NVIDIA GPU, over memory of ours.

The cache, the block's K/V and the scores lie on the device, and passes and commits work on one
stream. Per pass the inputs go there in one copy, and the scores that were asked for come back in
one. Nothing but arithmetic on shapes may run on the CPU.

The same code runs over host memory with ONNX Runtime's CPU provider, which is how it is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.array_scores import DeviceScores, score_names
from la_runtime.backends.availability import explain_import_error
from la_runtime.backends.base import CacheSizing, CacheState, Outputs, PassLimits, StepInputs
from la_runtime.backends.cuda import CudaDevice
from la_runtime.backends.device import Device
from la_runtime.backends.device_cache import DeviceCache, Room
from la_runtime.backends.gpu import read_gpu
from la_runtime.backends.lookahead_vectors import (
    load_lookahead_vectors,
    store_lookahead_vectors,
)
from la_runtime.backends.ort_cuda_session import (
    CUDA_PROVIDER,
    check_cuda_provider,
    open_cuda_session,
)
from la_runtime.backends.ort_device import DevicePass
from la_runtime.backends.ort_graph import check_signature, graph_limits
from la_runtime.backends.ort_placement import check_placement, read_placements
from la_runtime.bundle import Bundle
from la_runtime.contract import Axis, CacheForm, Contract, Name
from la_runtime.errors import HostError, UsageError
from la_runtime.storage import storage_dtype

try:
    import onnxruntime as ort
except ImportError as error:
    raise explain_import_error(error, backend="ort-cuda") from error

__all__ = ["OrtCudaBackend", "probe_placement"]

_NAME = "ort-cuda"
_DEVICE_TYPE = "cuda"
_OUT_OF_MEMORY = ("out of memory", "failed to allocate memory")
_ANY_SIZE = PassLimits()


class OrtCudaBackend:
    """A graph in ONNX Runtime over the memory of a device.

    Args:
        session: the session over the graph; its passes run on the device's stream.
        contract: the graph's contract.
        lookahead_embeddings: [k_max, hidden_size]; rounded to the compute dtype.
        device: where everything lies; closed with the backend.
        device_type: ONNX Runtime's name of that device.
        context: number of positions the model has.
        omits: outputs of the contract that this graph does not have.
        limits: the largest pass.

    Raises:
        BundleError: the graph's inputs and outputs are not the contract's, or the vectors have
            another shape.
        HostError: the device's memory does not suffice.
    """

    widths: tuple[int, ...] = ()

    def __init__(
        self,
        session: ort.InferenceSession,
        contract: Contract,
        lookahead_embeddings: NDArray[np.floating],
        *,
        device: Device,
        device_type: str,
        context: int,
        omits: Sequence[str] = (),
        limits: PassLimits = _ANY_SIZE,
    ) -> None:
        check_signature(session, contract, omits)
        self.contract = contract
        self.limits = limits
        self.session = session
        self._device = device
        self._device_type = device_type
        self._room = Room(least=0, most=context)
        self._omits = tuple(omits)
        self._passes: WeakKeyDictionary[DeviceCache, DevicePass] = WeakKeyDictionary()
        self._is_closed = False
        vectors = store_lookahead_vectors(lookahead_embeddings, contract)
        self._vectors = device.allocate(vectors.nbytes, "the lookahead vectors")
        self._upload_vectors(vectors)

    @classmethod
    def open(cls, bundle: Bundle, *, threads: int) -> OrtCudaBackend:
        """Open a bundle's graph on the first GPU.

        Args:
            bundle: an opened bundle.
            threads: for the arithmetic on shapes, which stays on the CPU.

        Raises:
            HostError: there is no GPU, ONNX Runtime does not reach it, or it would run part of
                the graph on the CPU.
            BundleError: ONNX Runtime cannot load the graph, or it is not what the manifest says.
        """
        read_gpu()
        check_cuda_provider(ort)
        manifest = bundle.manifest
        variant = next((v for v in manifest.variants if v.backend == _NAME), None)
        graph = bundle.path(manifest.graph if variant is None else variant.path)
        vectors = load_lookahead_vectors(bundle)
        with ExitStack() as failing, TemporaryDirectory(prefix="placement-") as folder:
            device = CudaDevice()
            failing.callback(device.close)
            backend = cls(
                open_cuda_session(
                    ort,
                    graph,
                    threads=threads,
                    stream=device.stream,
                    profile_prefix=Path(folder) / "pass",
                ),
                manifest.contract,
                vectors,
                device=device,
                device_type=_DEVICE_TYPE,
                context=manifest.model.context,
                omits=() if variant is None else variant.omits,
                limits=graph_limits(manifest.contract, context=manifest.model.context),
            )
            failing.callback(backend.close)
            probe_placement(backend, provider=CUDA_PROVIDER)
            failing.pop_all()
        return backend

    def allocate(self, batch: int, sizing: CacheSizing) -> CacheState:
        """See `Backend.allocate`."""
        self._check_open()
        return DeviceCache(self.contract, self._device, batch=batch, sizing=sizing, room=self._room)

    def forward(self, state: CacheState, inputs: StepInputs) -> DeviceScores:
        """See `Backend.forward`.

        Raises:
            HostError: the device's memory does not suffice, or the pass fails there.
        """
        assert isinstance(state, DeviceCache)
        self._check_open()
        if state not in self._passes:
            self._passes[state] = DevicePass(
                self.session.io_binding(), self.contract, self._device, self._device_type
            )
        bound = self._passes[state]
        names = score_names(inputs.outputs, self._omits)
        bound.bind(state, inputs, self._vectors.address, names)
        try:
            self.session.run_with_iobinding(bound.io_binding, None)
        except Exception as error:
            raise self._explain_failure(error, inputs) from error
        return DeviceScores(bound.fetch())

    def _explain_failure(self, error: Exception, inputs: StepInputs) -> HostError:
        batch, block = inputs.input_ids.shape
        if any(sign in str(error).lower() for sign in _OUT_OF_MEMORY):
            return HostError(
                f"the GPU has not enough memory for a pass of {batch} x {block} rows, and "
                f"{self._device.describe_memory()}; use fewer sequences at a time, a shorter "
                "context or a smaller model, or end what else runs on the GPU"
            )
        return HostError(
            f"ONNX Runtime failed in a pass of {batch} x {block} rows: {error}; after an error of "
            "the GPU start the process again"
        )

    def commit(self, state: CacheState, rows: Sequence[Sequence[int]]) -> None:
        """See `Backend.commit`."""
        assert isinstance(state, DeviceCache)
        if self.contract.cache_form is CacheForm.SCATTER:
            state.settle(rows)
        else:
            state.append(rows, self._passes[state].block)

    def set_lookahead_embeddings(self, embeddings: NDArray[np.floating]) -> None:
        """See `Backend.set_lookahead_embeddings`.

        Raises:
            BundleError: they have another shape, or a component is not finite.
        """
        self._check_open()
        self._upload_vectors(store_lookahead_vectors(embeddings, self.contract))

    def _upload_vectors(self, vectors: NDArray[np.generic]) -> None:
        self._device.upload(self._vectors.address, vectors)
        self._device.synchronize()

    def close(self) -> None:
        """See `Backend.close`."""
        if not self._is_closed:
            self._is_closed = True
            self._passes.clear()
            self.session = None
            self._device.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the engine is closed; open the bundle again")


def probe_placement(backend: OrtCudaBackend, *, provider: str) -> None:
    """Run a pass of one row and refuse the graph if any of it computes elsewhere.

    Args:
        backend: whose session is profiled; it no longer is afterwards.
        provider: where the graph has to run.

    Raises:
        HostError: some of it runs on another provider.
    """
    contract = backend.contract
    state = backend.allocate(1, CacheSizing.STEPPED)
    sizes = {Axis.BATCH: 1, Axis.BLOCK: 1, Axis.ROWS: 1, Axis.KEYS: state.past_len + 1}
    zeros = {
        spec.name: np.zeros(
            [axis if isinstance(axis, int) else sizes[axis] for axis in spec.axes],
            dtype=storage_dtype(spec.dtype),
        )
        for spec in contract.inputs
        if spec.name not in contract.past_names
    }
    backend.forward(
        state,
        StepInputs(
            input_ids=zeros[Name.INPUT_IDS],
            position_ids=zeros[Name.POSITION_IDS],
            attention_mask=zeros[Name.ATTENTION_MASK],
            sliding_attention_mask=zeros.get(Name.SLIDING_ATTENTION_MASK),
            logits_rows=zeros[Name.LOGITS_ROWS],
            outputs=Outputs.TOP | Outputs.LOGSUMEXP | Outputs.LOGITS,
            columns=np.broadcast_to(np.arange(sizes[Axis.BLOCK]), zeros[Name.INPUT_IDS].shape),
        ),
    )
    state.close()
    check_placement(read_placements(Path(backend.session.end_profiling())), provider=provider)
