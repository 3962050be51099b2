"""The part of TensorRT's Python interface that running plans uses, as types.

Each protocol has the name of a class or enumeration of the modules ``tensorrt``,
``tensorrt_lean`` and ``tensorrt_rtx``, and holds the members that are used and no others: mypy
lets no code reach past them, and tests compare them with the genuine modules. What is in `COMMON`
is in all of them, in TensorRT 10.16 and 11.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol, overload

__all__ = [
    "COMMON",
    "FULL_ONLY",
    "RTX_ONLY",
    "DataType",
    "ExecutionContextAllocationStrategy",
    "ICudaEngine",
    "IExecutionContext",
    "ILogger",
    "IRuntimeConfig",
    "OnnxParserRefitter",
    "Refitter",
    "RtxTensorRT",
    "Runtime",
    "Severity",
    "TensorIOMode",
    "TensorLocation",
    "TensorRT",
]


class Severity(Protocol):
    """A severity of a message."""


class ILogger(Protocol):
    """Base of what receives messages."""

    INTERNAL_ERROR: Severity
    ERROR: Severity
    WARNING: Severity
    INFO: Severity
    VERBOSE: Severity

    def log(self, severity: Severity, msg: str) -> None: ...


class DataType(Protocol):
    """Element types."""

    INT64: object
    FLOAT: object
    HALF: object
    BF16: object


class TensorIOMode(Protocol):
    """Whether a tensor goes in or comes out."""

    INPUT: object
    OUTPUT: object


class TensorLocation(Protocol):
    """Where a tensor's memory is."""

    DEVICE: object


class ExecutionContextAllocationStrategy(Protocol):
    """Who gives a context the memory of its activations."""

    USER_MANAGED: object


class IRuntimeConfig(Protocol):
    """How TensorRT for RTX runs a plan."""

    cuda_graph_strategy: object


class CudaGraphStrategy(Protocol):
    """Whether TensorRT for RTX captures CUDA graphs by itself."""

    WHOLE_GRAPH_CAPTURE: object


class IExecutionContext(Protocol):
    """One execution of an engine at a time: its profile, shapes and addresses."""

    def set_device_memory(self, memory: int, size: int) -> None: ...

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def set_tensor_address(self, name: str, memory: int) -> bool: ...

    def execute_async_v3(self, stream_handle: int) -> bool: ...


class ICudaEngine(Protocol):
    """A plan that was loaded; dimensions that are dynamic are -1."""

    num_io_tensors: int
    num_optimization_profiles: int
    device_memory_size_v2: int

    def get_tensor_name(self, index: int) -> str: ...

    def get_tensor_mode(self, name: str) -> object: ...

    def get_tensor_dtype(self, name: str) -> object: ...

    def get_tensor_shape(self, name: str) -> Iterable[int]: ...

    def get_tensor_location(self, name: str) -> object: ...

    def get_tensor_profile_shape(
        self, name: str, profile_index: int
    ) -> Iterable[Iterable[int]]: ...

    def get_aliased_input_tensor(self, name: str) -> str | None: ...

    def create_runtime_config(self) -> IRuntimeConfig: ...

    @overload
    def create_execution_context(self, strategy: object) -> IExecutionContext | None: ...

    @overload
    def create_execution_context(
        self, *, runtime_config: IRuntimeConfig
    ) -> IExecutionContext | None: ...


class Runtime(Protocol):
    """Loads plans; must live as long as they do."""

    engine_host_code_allowed: bool

    def deserialize_cuda_engine(self, serialized_engine: memoryview) -> ICudaEngine | None: ...


class Refitter(Protocol):
    """Puts weights into an engine that was built without."""

    def get_missing_weights(self) -> list[str]: ...

    def refit_cuda_engine(self) -> bool: ...


class OnnxParserRefitter(Protocol):
    """Reads the weights for a refitter from a graph."""

    def refit_from_file(self, model: str) -> bool: ...


class _MakeRuntime(Protocol):
    def __call__(self, logger: ILogger) -> Runtime: ...


class _MakeRefitter(Protocol):
    def __call__(self, engine: ICudaEngine, logger: ILogger) -> Refitter: ...


class _MakeOnnxParserRefitter(Protocol):
    def __call__(self, refitter: Refitter, logger: ILogger) -> OnnxParserRefitter: ...


class TensorRT(Protocol):
    """The module."""

    __version__: str
    ILogger: type[ILogger]
    DataType: DataType
    TensorIOMode: TensorIOMode
    TensorLocation: TensorLocation
    ExecutionContextAllocationStrategy: ExecutionContextAllocationStrategy

    @property
    def Runtime(self) -> _MakeRuntime: ...  # noqa: N802 (TensorRT's name)


class FullTensorRT(TensorRT, Protocol):
    """The module ``tensorrt``, and no smaller one."""

    @property
    def Refitter(self) -> _MakeRefitter: ...  # noqa: N802

    @property
    def OnnxParserRefitter(self) -> _MakeOnnxParserRefitter: ...  # noqa: N802


class RtxTensorRT(TensorRT, Protocol):
    """The module ``tensorrt_rtx``."""

    CudaGraphStrategy: CudaGraphStrategy


COMMON: Final[Mapping[str, type]] = {
    protocol.__name__: protocol
    for protocol in (
        DataType,
        ExecutionContextAllocationStrategy,
        ICudaEngine,
        IExecutionContext,
        ILogger,
        Runtime,
        TensorIOMode,
        TensorLocation,
    )
}
FULL_ONLY: Final[Mapping[str, type]] = {
    "OnnxParserRefitter": OnnxParserRefitter,
    "Refitter": Refitter,
}
RTX_ONLY: Final[Mapping[str, type]] = {
    "CudaGraphStrategy": CudaGraphStrategy,
    "IRuntimeConfig": IRuntimeConfig,
}
