"""The part of TensorRT's Python interface that building plans uses, as types.

Each protocol has the name of a class of the modules ``tensorrt`` and ``tensorrt_rtx``, and holds
the members that are used and no others: mypy lets no code reach past them, and tests compare them
with the genuine modules. `COMMON` is to be in TensorRT 10.16, in 11.4 and in TensorRT for RTX,
`RTX_ONLY` in the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

__all__ = [
    "COMMON",
    "RTX_ONLY",
    "Builder",
    "BuilderFlag",
    "ComputeCapability",
    "DataType",
    "HardwareCompatibilityLevel",
    "IAttention",
    "IAttentionOutputLayer",
    "IBuilderConfig",
    "IHostMemory",
    "ILayer",
    "ILogger",
    "INetworkDefinition",
    "IOptimizationProfile",
    "IProgressMonitor",
    "ITensor",
    "ITimingCache",
    "LayerType",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "ParserError",
    "ProfilingVerbosity",
    "RtxBuilderConfig",
    "Severity",
    "list_members",
]


class Severity(Protocol):
    """Of a message; ``ILogger.Severity``."""

    name: str


class ILogger(Protocol):
    """Base of what receives messages."""

    INTERNAL_ERROR: Severity
    ERROR: Severity
    VERBOSE: Severity

    def log(self, severity: Severity, msg: str) -> None: ...


class IProgressMonitor(Protocol):
    """Base of what is told of a build's phases."""

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None: ...

    def step_complete(self, phase_name: str, step: int) -> bool: ...

    def phase_finish(self, phase_name: str) -> None: ...


class DataType(Protocol):
    """Element types."""

    INT64: object
    FLOAT: object
    HALF: object
    BF16: object


class ITensor(Protocol):
    """A tensor of a network; dimensions that are dynamic are -1."""

    name: str
    dtype: object
    shape: Sequence[int]

    def get_dimension_name(self, index: int) -> str | None: ...


class IAttention(Protocol):
    """An attention between its input and its output layer."""

    decomposable: bool


class LayerType(Protocol):
    """Kinds of layers."""

    ATTENTION_OUTPUT: object


class ILayer(Protocol):
    """A layer of a network."""

    type: object


class IAttentionOutputLayer(Protocol):
    """The layer where an attention ends."""

    attention: IAttention


class INetworkDefinition(Protocol):
    """What a parser fills and a builder compiles."""

    num_inputs: int
    num_outputs: int
    num_layers: int

    def get_input(self, index: int) -> ITensor: ...

    def get_output(self, index: int) -> ITensor: ...

    def get_layer(self, index: int) -> ILayer: ...


class NetworkDefinitionCreationFlag(Protocol):
    """How a network is made."""

    STRONGLY_TYPED: int


class ParserError(Protocol):
    """One thing that a parser could not import."""

    def node(self) -> int: ...

    def node_name(self) -> str: ...

    def node_operator(self) -> str: ...

    def desc(self) -> str: ...


class OnnxParser(Protocol):
    """Reads a graph into the network that it was made for; keeps no reference to that."""

    num_errors: int

    def parse_from_file(self, model: str) -> bool: ...

    def get_error(self, index: int) -> ParserError: ...


class IOptimizationProfile(Protocol):
    """Ranges of the shapes of inputs."""

    def set_shape(
        self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]
    ) -> None: ...


class IHostMemory(Protocol):
    """Bytes that TensorRT owns."""

    nbytes: int

    def __buffer__(self, flags: int, /) -> memoryview: ...


class ITimingCache(Protocol):
    """Timings of kernels."""

    def serialize(self) -> IHostMemory: ...


class BuilderFlag(Protocol):
    """Switches of a build."""

    REFIT_IDENTICAL: object
    STRIP_PLAN: object
    TF32: object
    VERSION_COMPATIBLE: object


class HardwareCompatibilityLevel(Protocol):
    """On which other GPUs a plan loads."""

    NONE: object
    AMPERE_PLUS: object
    SAME_COMPUTE_CAPABILITY: object


class MemoryPoolType(Protocol):
    """Kinds of memory whose use can be limited."""

    WORKSPACE: object


class ProfilingVerbosity(Protocol):
    """How much of its layers a plan says."""

    DETAILED: object


class IBuilderConfig(Protocol):
    """How a network is compiled."""

    builder_optimization_level: int
    hardware_compatibility_level: object
    profiling_verbosity: object
    progress_monitor: IProgressMonitor | None

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int: ...

    def set_flag(self, flag: object) -> None: ...

    def clear_flag(self, flag: object) -> None: ...

    def set_memory_pool_limit(self, pool: object, pool_size: int) -> None: ...

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache | None: ...

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool: ...

    def get_timing_cache(self) -> ITimingCache | None: ...


class Builder(Protocol):
    """Compiles networks."""

    def create_network(self, flags: int) -> INetworkDefinition: ...

    def create_builder_config(self) -> IBuilderConfig: ...

    def create_optimization_profile(self) -> IOptimizationProfile: ...

    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig
    ) -> IHostMemory | None: ...


class ComputeCapability(Protocol):
    """GPUs that TensorRT for RTX builds for, by name."""

    __members__: Mapping[str, object]


class RtxBuilderConfig(IBuilderConfig, Protocol):
    """What `IBuilderConfig` is in TensorRT for RTX."""

    num_compute_capabilities: int

    def set_compute_capability(self, compute_capability: object, index: int) -> bool: ...


COMMON: Final[Mapping[str, type]] = {
    protocol.__name__: protocol
    for protocol in (
        Builder,
        BuilderFlag,
        DataType,
        HardwareCompatibilityLevel,
        IAttention,
        IAttentionOutputLayer,
        IBuilderConfig,
        IHostMemory,
        ILayer,
        ILogger,
        INetworkDefinition,
        IOptimizationProfile,
        IProgressMonitor,
        ITensor,
        ITimingCache,
        LayerType,
        MemoryPoolType,
        NetworkDefinitionCreationFlag,
        OnnxParser,
        ParserError,
        ProfilingVerbosity,
    )
}
RTX_ONLY: Final[Mapping[str, type]] = {
    "ComputeCapability": ComputeCapability,
    "IBuilderConfig": RtxBuilderConfig,
}


def list_members(protocol: type) -> tuple[str, ...]:
    """Names that a class of TensorRT must have to be used as this protocol, but for Python's own.

    Those that it inherits from another protocol are not repeated.
    """
    names = {*vars(protocol), *vars(protocol).get("__annotations__", ())}
    return tuple(sorted(name for name in names if not name.startswith("_")))
