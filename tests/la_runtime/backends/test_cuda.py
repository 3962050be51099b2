"""What is asked of CUDA moves the bytes that it should, as CUDA's own documentation has it.

The runtime here has the genuine structures, enumerations and functions; the functions work on host
memory instead of a device's.
"""

# ruff: noqa: N802 (CUDA's functions have their own names)

from __future__ import annotations

import ctypes
import gc
import inspect
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda.bindings import runtime as genuine

from la_runtime.backends.cuda import CudaDevice
from la_runtime.backends.device import ALIGNMENT, Extent, Rows
from la_runtime.errors import HostError
from tests.la_runtime.backends.numpy_device import NumpyDevice
from tests.tensorrt_api.host import H200

SUCCESS = genuine.cudaError_t.cudaSuccess
NUM_RESULTS = {
    "cudaDeviceGetDefaultMemPool": 1,
    "cudaGraphInstantiate": 1,
    "cudaHostAlloc": 1,
    "cudaMallocAsync": 1,
    "cudaStreamCreateWithFlags": 1,
    "cudaStreamEndCapture": 1,
}
NO_MEMORY = genuine.cudaError_t.cudaErrorMemoryAllocation


class Runtime:
    """`cuda.bindings.runtime` over host memory; work is done at once.

    A function of the genuine module that is not here has no fake: asking for it fails.
    """

    def __init__(self, free_bytes: int = 1 << 20) -> None:
        self.free_bytes = free_bytes
        self.failing: dict[str, object] = {}
        self.calls: list[str] = []
        self.memory: dict[int, np.ndarray] = {}
        self.host: dict[int, np.ndarray] = {}
        self.captured: list[str] | None = None
        self.graphs = 0  # that are not yet destroyed
        self.kept_bytes: int | None = None

    def __getattr__(self, name: str):
        if name.startswith("cuda") and inspect.isroutine(getattr(genuine, name)):
            return self.function(name)
        return getattr(genuine, name)  # structures and enumerations

    def function(self, name: str):
        behaviour = getattr(self, f"_{name}")
        arity = len(re.search(r"\((.*)\)", getattr(genuine, name).__doc__)[1].split(","))

        def call(*arguments):
            assert len(arguments) == arity or not arguments, f"{name} takes {arity} arguments"
            self.calls.append(name)
            if name in self.failing:
                return self.failing[name], *[None] * NUM_RESULTS.get(name, 0)
            result = behaviour(*arguments)
            return SUCCESS, *(() if result is None else result)

        return call

    def _allocated(self, size: int, where: dict[int, np.ndarray]) -> tuple[int]:
        padded = np.full(size + ALIGNMENT, 0xA5, dtype=np.uint8)
        memory = padded[-padded.ctypes.data % ALIGNMENT :][:size]
        where[memory.ctypes.data] = memory
        return (memory.ctypes.data,)

    def _cudaStreamCreateWithFlags(self, flags):
        assert flags == genuine.cudaStreamNonBlocking
        return (77,)

    def _cudaDeviceGetDefaultMemPool(self, device):
        assert device == 0
        return ("pool",)

    def _cudaMemPoolSetAttribute(self, pool, attribute, value):
        assert pool == "pool"
        assert attribute == genuine.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
        self.kept_bytes = int(value)

    def _cudaMallocAsync(self, size, stream):
        assert stream == 77
        assert self.captured is None, "CUDA captures an allocation"
        return self._allocated(size, self.memory)

    def _cudaFreeAsync(self, address, stream):
        assert self.captured is None, "CUDA captures a release"
        self.memory.pop(address)

    def _cudaHostAlloc(self, size, flags):
        return self._allocated(size, self.host)

    def _cudaFreeHost(self, address):
        assert self.captured is None, "not to be called while capturing"
        self.host.pop(address)

    def _cudaMemGetInfo(self):
        return self.free_bytes, 1 << 30

    def _cudaMemsetAsync(self, address, value, size, stream):
        ctypes.memset(address, value, size)

    def _cudaMemcpyAsync(self, destination, source, size, kind, stream):
        device_side = {
            genuine.cudaMemcpyKind.cudaMemcpyHostToDevice: destination,
            genuine.cudaMemcpyKind.cudaMemcpyDeviceToHost: source,
        }[kind]
        assert any(0 <= device_side - a < m.size for a, m in self.memory.items())
        ctypes.memmove(destination, source, size)

    def _cudaMemset3DAsync(self, pitched, value, extent, stream):
        for row in self.rows(pitched, extent):
            ctypes.memset(row, value, extent.width)

    def _cudaMemcpy3DAsync(self, parameters, stream):
        assert parameters.kind == genuine.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        rows = (self.rows(p, parameters.extent) for p in (parameters.dstPtr, parameters.srcPtr))
        for destination, source in zip(*rows, strict=True):
            ctypes.memmove(destination, source, parameters.extent.width)

    def rows(self, pitched, extent):
        """CUDA: a slice is `ysize` rows of `pitch` bytes; of each, `width` bytes are meant."""
        assert extent.width <= pitched.xsize
        for plane in range(extent.depth):
            for row in range(extent.height):
                yield int(pitched.ptr) + (plane * pitched.ysize + row) * pitched.pitch

    def _cudaStreamSynchronize(self, stream):
        assert self.captured is None, "CUDA ends the capture"

    def _cudaStreamDestroy(self, stream):
        assert stream == 77

    def _cudaStreamBeginCapture(self, stream, mode):
        assert mode == genuine.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.captured = []

    def _cudaStreamEndCapture(self, stream):
        assert self.captured is not None
        self.captured = None
        self.graphs += 1
        return ("graph",)

    def _cudaGraphInstantiate(self, graph, flags):
        assert (graph, flags) == ("graph", 0)
        return ("executable",)

    def _cudaGraphDestroy(self, graph):
        assert graph == "graph"
        self.graphs -= 1

    def _cudaGraphLaunch(self, executable, stream):
        assert (executable, stream) == ("executable", 77)

    def _cudaGraphExecDestroy(self, executable):
        assert executable == "executable"

    def _cudaGetErrorString(self, code):
        return genuine.cudaGetErrorString(code)[1:]


@pytest.fixture
def runtime():
    return Runtime()


@pytest.fixture
def device(runtime):
    return CudaDevice(runtime)


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_zeroed_and_copied_as_on_the_numpy_device(device, seed):
    """Random regions of two pieces of memory, in random layouts."""
    rng = np.random.default_rng(seed)
    content = rng.integers(0, 255, (2, 4096)).astype(np.uint8)
    held = []
    for one in (device, NumpyDevice()):
        rng = np.random.default_rng(seed)
        pieces = [one.allocate(4096, "a test") for _ in range(2)]
        for piece, values in zip(pieces, content, strict=True):
            one.upload(piece.address, values)
        for _ in range(20):
            extent = Extent(
                width_bytes=int(rng.integers(0, 20)),
                rows=int(rng.integers(0, 5)),
                planes=int(rng.integers(1, 4)),
            )
            regions = [
                Rows(
                    address=piece.address + int(rng.integers(0, 1000)),
                    pitch_bytes=int(rng.integers(20, 60)),
                    plane_rows=int(rng.integers(5, 9)),
                )
                for piece in pieces
            ]
            if rng.random() < 0.2:
                one.zero(regions[0], extent)
            else:
                one.copy(*regions[:: rng.choice([1, -1])], extent)
        found = np.empty((2, 4096), np.uint8)
        for piece, values in zip(pieces, found, strict=True):
            one.download(values, piece.address)
        one.synchronize()
        held.append(found)

    assert np.array_equal(held[0], held[1])
    assert not np.array_equal(held[0], content)


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_allocated_memory_is_zeroed_and_aligned(device, runtime, size):
    memory = device.allocate(size, "a test")

    assert memory.address % ALIGNMENT == 0
    assert memory.size_bytes >= size
    assert not runtime.memory[memory.address].any()


def test_memory_goes_back_when_nothing_refers_to_it_and_not_while_work_is_captured(device, runtime):
    held = [device.allocate(1000, "a test") for _ in range(2)]
    addresses = [memory.address for memory in held]
    locked = [device.allocate_host(64)]

    def drop() -> None:
        locked.clear()
        held.pop()
        gc.collect()

    device.capture(drop)
    assert set(runtime.memory) == set(addresses)
    assert len(runtime.host) == 1
    device.synchronize()

    assert set(runtime.memory) == {addresses[0]}
    assert runtime.host == {}


def test_memory_that_went_back_is_free_for_the_next_allocation(device, runtime):
    memory = device.allocate(1000, "a test")
    del memory
    runtime.calls.clear()

    device.allocate(1000, "another test")

    assert runtime.calls[:2] == ["cudaFreeAsync", "cudaMallocAsync"]


def test_host_memory_lives_as_long_as_a_view_of_it(device, runtime):
    view = device.allocate_host(64)[8:16].view(np.int64)
    gc.collect()
    assert len(runtime.host) == 1
    view[:] = 5

    del view
    gc.collect()
    device.synchronize()  # no copy is under way any more

    assert runtime.host == {}


def test_host_memory_outlives_its_device(device, runtime):
    view = device.allocate_host(64)
    device.close()
    assert len(runtime.host) == 1

    del view
    gc.collect()

    assert runtime.host == {}


def test_closing_gives_back_all_and_is_done_once(device, runtime):
    memory = device.allocate(1000, "a test")
    device.close()
    device.close()
    del memory

    assert runtime.memory == {}
    assert runtime.calls.count("cudaStreamDestroy") == 1


def test_captured_work_is_instantiated_launched_and_released(device, runtime):
    runtime.calls.clear()
    done = []
    graph = device.capture(lambda: done.append(1))
    device.launch(graph)
    device.launch(graph)
    graph.close()
    graph.close()

    assert done == [1]
    assert runtime.calls == [
        "cudaStreamBeginCapture",
        "cudaStreamEndCapture",
        "cudaGraphInstantiate",
        "cudaGraphDestroy",
        "cudaGraphLaunch",
        "cudaGraphLaunch",
        "cudaGraphExecDestroy",
    ]


def test_work_that_fails_ends_the_capture(device, runtime):
    def fail() -> None:
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        device.capture(fail)

    device.synchronize()
    assert runtime.captured is None
    assert runtime.graphs == 0


@pytest.mark.parametrize("function", ["cudaStreamEndCapture", "cudaGraphInstantiate"])
def test_a_capture_that_fails_leaves_no_graph(device, runtime, function):
    runtime.failing[function] = genuine.cudaError_t.cudaErrorStreamCaptureInvalidated

    with pytest.raises(HostError, match=f"{function} says cudaErrorStreamCaptureInvalidated"):
        device.capture(lambda: None)

    assert runtime.graphs == 0


def test_what_waiting_leaves_with_the_process_is_bounded(device, runtime):
    assert runtime.kept_bytes == 1 << 30


def test_closing_after_an_error_of_the_gpu_lets_go_of_all_and_logs_it_once(device, runtime, caplog):
    memory = device.allocate(1000, "a test")
    locked = device.allocate_host(64)
    graph = device.capture(lambda: None)
    for function in (
        "cudaFreeAsync",
        "cudaFreeHost",
        "cudaGraphExecDestroy",
        "cudaStreamDestroy",
        "cudaStreamSynchronize",
    ):
        runtime.failing[function] = genuine.cudaError_t.cudaErrorIllegalAddress
    del locked
    gc.collect()
    graph.close()
    device.close()
    num_calls = len(runtime.calls)

    graph.close()
    device.close()
    del memory

    assert len(runtime.calls) == num_calls
    assert runtime.calls[-2:] == ["cudaFreeHost", "cudaStreamDestroy"]
    assert [record.message for record in caplog.records] == [
        "CUDA failed while memory went back: cudaGraphExecDestroy says cudaErrorIllegalAddress"
    ]


def test_a_driver_that_is_too_old_is_named_with_what_is_needed(runtime):
    runtime.failing["cudaStreamCreateWithFlags"] = genuine.cudaError_t.cudaErrorInsufficientDriver
    gpu = replace(H200, driver="550.54.15", cuda="12.4")

    with pytest.raises(
        HostError,
        match=r"the NVIDIA driver is too old: driver 550\.54\.15 runs CUDA up to 12\.4, and "
        r"cuda-bindings needs CUDA 13: update the driver to 580 or newer",
    ):
        CudaDevice(runtime, find_gpu=lambda: gpu)


def test_a_gpu_without_memory_pools_is_named(runtime):
    for function in ("cudaDeviceGetDefaultMemPool", "cudaMallocAsync"):
        runtime.failing[function] = genuine.cudaError_t.cudaErrorNotSupported
    device = CudaDevice(runtime, find_gpu=lambda: H200)

    with pytest.raises(
        HostError, match=r"NVIDIA H200 has no memory pools under driver 580\.65\.06, CUDA 13\.0"
    ):
        device.allocate(10, "a test")


def test_a_full_gpu_is_reported_with_what_is_needed_and_what_is_free(device, runtime):
    runtime.failing["cudaMallocAsync"] = NO_MEMORY
    runtime.free_bytes = 1 << 29

    with pytest.raises(
        HostError,
        match=r"the GPU has not enough memory: the cache needs 3\.00 GiB, and 0\.50 of 1\.00 GiB "
        r"are free; use fewer sequences",
    ):
        device.allocate(3 << 30, "the cache")


def test_memory_that_the_host_cannot_lock_is_reported(device, runtime):
    runtime.failing["cudaHostAlloc"] = NO_MEMORY

    with pytest.raises(HostError, match=r"the host cannot lock 2\.00 GiB of memory"):
        device.allocate_host(2 << 30)


@pytest.mark.parametrize(
    ("function", "action"),
    [
        ("cudaStreamSynchronize", lambda device: device.synchronize()),
        ("cudaMemsetAsync", lambda device: device.allocate(1, "a test")),
        ("cudaMallocAsync", lambda device: device.allocate(1, "a test")),
        ("cudaHostAlloc", lambda device: device.allocate_host(1)),
        ("cudaStreamBeginCapture", lambda device: device.capture(lambda: None)),
        ("cudaGraphInstantiate", lambda device: device.capture(lambda: None)),
        ("cudaMemcpyAsync", lambda device: device.upload(0, np.zeros(1))),
    ],
)
def test_an_error_of_cuda_is_named_with_its_meaning(device, runtime, function, action):
    runtime.failing[function] = genuine.cudaError_t.cudaErrorIllegalAddress

    with pytest.raises(
        HostError,
        match=rf"CUDA failed: {function} says cudaErrorIllegalAddress \(an illegal memory access "
        r"was encountered\); after such an error start the process again",
    ):
        action(device)


def test_a_machine_without_a_driver_is_told_so():
    """The genuine runtime, where there is none; on a machine with a GPU it opens."""
    program = (
        "from la_runtime.backends.cuda import CudaDevice\n"
        "from la_runtime.errors import HostError\n"
        "try:\n"
        "    CudaDevice().close()\n"
        "except HostError as error:\n"
        "    print(error)\n"
        "else:\n"
        "    print('opened')\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )

    assert re.match(
        r"opened$|no NVIDIA driver: |the NVIDIA driver is too old: |"
        r"CUDA failed: cudaStreamCreateWithFlags says cudaErrorNoDevice",
        found.stdout,
    )


def test_a_missing_package_is_named_with_what_installs_it():
    program = (
        "import sys\n"
        "sys.modules['cuda.bindings'] = None\n"
        "from la_runtime.errors import HostError\n"
        "try:\n"
        "    import la_runtime.backends.cuda\n"
        "except HostError as error:\n"
        "    print(error)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )

    assert found.stdout.startswith("running plans needs cuda-bindings, which cannot be imported (")
    assert "pip install 'cuda-bindings>=13,<14'" in found.stdout
