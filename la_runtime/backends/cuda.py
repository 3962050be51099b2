"""A CUDA device, through NVIDIA's Python bindings of the CUDA runtime."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.device import ALIGNMENT, DeviceGraph, DeviceMemory, Extent, Rows
from la_runtime.backends.gpu import Gpu, read_gpu
from la_runtime.errors import HostError

try:
    from cuda.bindings import driver as cuda_driver
    from cuda.bindings import runtime as cuda_runtime
except ImportError as error:
    raise HostError(
        f"running plans needs cuda-bindings, which cannot be imported ({error}): "
        "pip install 'cuda-bindings>=13,<14'"
    ) from error

__all__ = ["CudaDevice"]

logger = logging.getLogger(__name__)

_GIB: Final = 1 << 30
_NEEDED_DRIVER: Final = 580  # the first that runs CUDA 13
# Freed memory that waiting leaves with the process, so that the next cache need not ask for it.
_KEPT_BYTES: Final = 1 << 30


class _CudaGraph:
    """A captured and instantiated CUDA graph."""

    def __init__(self, device: CudaDevice, executable: Any) -> None:
        self.executable = executable
        self._device = device

    def close(self) -> None:
        if self.executable is not None:
            self._device.release("cudaGraphExecDestroy", self.executable)
            self.executable = None


class CudaDevice:
    """The first visible GPU, with a stream of its own.

    Args:
        runtime: the module `cuda.bindings.runtime`.
        find_gpu: asks the driver about the GPU, for messages.

    Raises:
        HostError: CUDA does not start.
    """

    def __init__(
        self, runtime: ModuleType = cuda_runtime, *, find_gpu: Callable[[], Gpu] = read_gpu
    ) -> None:
        self._runtime = runtime
        self._find_gpu = find_gpu
        self._success = runtime.cudaError_t.cudaSuccess
        self._has_failed_release = False
        code, self._stream = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
        if code == runtime.cudaError_t.cudaErrorInsufficientDriver:
            gpu = find_gpu()
            raise HostError(
                f"the NVIDIA driver is too old: driver {gpu.driver} runs CUDA up to {gpu.cuda}, "
                f"and cuda-bindings needs CUDA 13: update the driver to {_NEEDED_DRIVER} or newer"
            )
        self._check("cudaStreamCreateWithFlags", code)
        self._keep_freed_memory()
        self._live: dict[int, int] = {}  # bytes by address
        # Filled by finalizers, which run anywhere, also while work is captured.
        self._returned: deque[int] = deque()
        self._returned_host: deque[int] = deque()
        self._is_closed = False

    def _keep_freed_memory(self) -> None:
        """Whoever cannot do that has no memory pools, and the first allocation says so."""
        code, pool = self._runtime.cudaDeviceGetDefaultMemPool(0)
        if code == self._success:
            attribute = self._runtime.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
            kept = cuda_driver.cuuint64_t(_KEPT_BYTES)
            self.call("cudaMemPoolSetAttribute", pool, attribute, kept)

    @property
    def stream(self) -> int:
        """See `Device.stream`."""
        return int(self._stream)

    def allocate(self, size_bytes: int, purpose: str) -> DeviceMemory:
        """See `Device.allocate`."""
        self._free_returned()
        size = max(size_bytes, ALIGNMENT)
        code, address = self._runtime.cudaMallocAsync(size, self._stream)
        if code == self._runtime.cudaError_t.cudaErrorMemoryAllocation:
            raise HostError(
                f"the GPU has not enough memory: {purpose} needs {size / _GIB:.2f} GiB, and "
                f"{self.describe_memory()}; use fewer sequences at a time, a shorter context or a "
                "smaller model, or end what else runs on the GPU"
            )
        if code == self._runtime.cudaError_t.cudaErrorNotSupported:
            gpu = self._find_gpu()
            raise HostError(
                f"{gpu.name} has no memory pools under driver {gpu.driver}, CUDA {gpu.cuda}, and "
                "this backend allocates from one: use a bare GPU instead of a virtual one, or "
                "another backend"
            )
        self._check("cudaMallocAsync", code)
        memory = DeviceMemory(int(address), size, self._returned.append)
        assert memory.address % ALIGNMENT == 0, "CUDA aligns what it allocates"
        self._live[memory.address] = size
        self.call("cudaMemsetAsync", memory.address, 0, size, self._stream)
        return memory

    def allocate_host(self, size_bytes: int) -> NDArray[np.uint8]:
        """See `Device.allocate_host`."""
        code, address = self._runtime.cudaHostAlloc(max(size_bytes, 1), 0)
        if code == self._runtime.cudaError_t.cudaErrorMemoryAllocation:
            raise HostError(
                f"the host cannot lock {size_bytes / _GIB:.2f} GiB of memory for copies to and "
                "from the GPU; free memory or raise the limit 'ulimit -l'"
            )
        self._check("cudaHostAlloc", code)
        buffer = (ctypes.c_uint8 * size_bytes).from_address(int(address))
        # Views of the array keep the buffer, so nobody reads memory that was given back.
        weakref.finalize(buffer, self._return_host, int(address))
        return np.ctypeslib.as_array(buffer)

    def zero(self, rows: Rows, extent: Extent) -> None:
        """See `Device.zero`."""
        if extent:
            self.call(
                "cudaMemset3DAsync",
                self._pitched(rows, extent),
                0,
                self._extent(extent),
                self._stream,
            )

    def copy(self, destination: Rows, source: Rows, extent: Extent) -> None:
        """See `Device.copy`."""
        if not extent:
            return
        parameters = self._runtime.cudaMemcpy3DParms()
        parameters.dstPtr = self._pitched(destination, extent)
        parameters.srcPtr = self._pitched(source, extent)
        parameters.extent = self._extent(extent)
        parameters.kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self.call("cudaMemcpy3DAsync", parameters, self._stream)

    def upload(self, address: int, source: NDArray[np.generic]) -> None:
        """See `Device.upload`."""
        assert source.flags.c_contiguous, "one copy moves it"
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.call("cudaMemcpyAsync", address, source.ctypes.data, source.nbytes, kind, self._stream)

    def download(self, destination: NDArray[np.generic], address: int) -> None:
        """See `Device.download`."""
        assert destination.flags.c_contiguous, "one copy moves it"
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.call(
            "cudaMemcpyAsync",
            destination.ctypes.data,
            address,
            destination.nbytes,
            kind,
            self._stream,
        )

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        self._free_returned()
        self.call("cudaStreamSynchronize", self._stream)
        while self._returned_host:
            self.call("cudaFreeHost", self._returned_host.popleft())

    def capture(self, work: Callable[[], None]) -> DeviceGraph:
        """See `Device.capture`."""
        # Thread-local: other threads of the process may allocate meanwhile.
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call("cudaStreamBeginCapture", self._stream, mode)
        code, graph = None, None
        try:
            try:
                work()
            finally:
                code, graph = self._runtime.cudaStreamEndCapture(self._stream)
            self._check("cudaStreamEndCapture", code)
            return _CudaGraph(self, self.call("cudaGraphInstantiate", graph, 0))
        finally:
            if code == self._success:
                self.release("cudaGraphDestroy", graph)

    def launch(self, graph: DeviceGraph) -> None:
        """See `Device.launch`."""
        assert isinstance(graph, _CudaGraph), "captured on this device"
        self.call("cudaGraphLaunch", graph.executable, self._stream)

    def describe_memory(self) -> str:
        """See `Device.describe_memory`."""
        code, free, total = self._runtime.cudaMemGetInfo()
        if code != self._success:
            return "what is free cannot be read"
        return f"{free / _GIB:.2f} of {total / _GIB:.2f} GiB are free"

    def close(self) -> None:
        """See `Device.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        self.release("cudaStreamSynchronize", self._stream)
        for address in self._live:
            self.release("cudaFreeAsync", address, self._stream)
        self._live.clear()
        self.release("cudaStreamSynchronize", self._stream)
        while self._returned_host:
            self.release("cudaFreeHost", self._returned_host.popleft())
        self.release("cudaStreamDestroy", self._stream)

    def call(self, function: str, *arguments: object) -> Any:
        """Call a function of the CUDA runtime; its result, if it has one.

        Raises:
            HostError: it does not succeed.
        """
        code, *results = getattr(self._runtime, function)(*arguments)
        self._check(function, code)
        return results[0] if results else None

    def release(self, function: str, *arguments: object) -> None:
        """Call a function that gives something back.

        After an error of the GPU all of them fail, so the first failure is logged, and none raises.
        """
        code, *_ = getattr(self._runtime, function)(*arguments)
        if code != self._success and not self._has_failed_release:
            self._has_failed_release = True
            logger.warning("CUDA failed while memory went back: %s says %s", function, code.name)

    def _check(self, function: str, code: Any) -> None:
        if code != self._success:
            _, meaning = self._runtime.cudaGetErrorString(code)
            raise HostError(
                f"CUDA failed: {function} says {code.name} ({meaning.decode()}); after such an "
                "error start the process again; if it comes back, check 'nvidia-smi' and the driver"
            )

    def _return_host(self, address: int) -> None:
        if self._is_closed:
            self._runtime.cudaFreeHost(address)
        else:
            self._returned_host.append(address)

    def _free_returned(self) -> None:
        while self._returned:
            self._free(self._returned.popleft())

    def _free(self, address: int) -> None:
        """Once the work that is on the stream is done; memory returned after `close` is gone."""
        if self._live.pop(address, None) is not None:
            self.call("cudaFreeAsync", address, self._stream)

    def _pitched(self, rows: Rows, extent: Extent) -> Any:
        return self._runtime.make_cudaPitchedPtr(
            rows.address, rows.pitch_bytes, extent.width_bytes, rows.plane_rows
        )

    def _extent(self, extent: Extent) -> Any:
        return self._runtime.make_cudaExtent(extent.width_bytes, extent.rows, extent.planes)
