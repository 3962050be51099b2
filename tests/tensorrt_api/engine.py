"""What the fake TensorRT does: plans whose engine is a graph in ONNX Runtime.

A pass reads its inputs from the device's memory at the addresses and with the shapes that were set,
and writes its outputs there. What TensorRT refuses, or leaves undefined, is refused here: shapes
outside of the profile, tensors without a shape or an address, a capture right after a change, and a
CUDA graph that is launched after its context was changed.

ONNX Runtime computes no bfloat16 on a CPU: the graph of such a plan is its float32 twin, and its
tensors are rounded where they leave it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from la_runtime.backends.device import ALIGNMENT
from la_runtime.contract import CacheForm, Contract, Dtype
from la_runtime.plans import PlanFacts
from la_runtime.storage import from_stored, to_stored
from tests.la_runtime.backends.numpy_device import NumpyDevice
from tests.tensorrt_api.genuine import SIGNATURES
from tests.tensorrt_api.module import make_module

__all__ = ["ACTIVATION_BYTES", "FakeTensorRT", "make_plan_bytes", "make_tensorrt"]

ACTIVATION_BYTES = 4096
_TYPES = {
    "tensor(int64)": ("INT64", np.int64),
    "tensor(float)": ("FLOAT", np.float32),
    "tensor(float16)": ("HALF", np.float16),
}


def make_plan_bytes(plan: PlanFacts, contract: Contract, graph: Path) -> bytes:
    """A plan for the fake: all that the genuine one would hold.

    Args:
        plan: what the manifest says of it.
        contract: of the graph.
        graph: what its passes compute; for bfloat16 the float32 twin.
    """
    aliases = {}
    if contract.cache_form is CacheForm.SCATTER:
        aliases = dict(zip(contract.present_names, contract.past_names, strict=True))
    profiles = [
        {spec.name: profile.shape_of(spec.axes) for spec in contract.inputs}
        for profile in plan.profiles
    ]
    record = {
        "version": plan.version,
        "graph": str(graph),
        "profiles": profiles,
        "aliases": aliases,
        "bfloat16": [
            spec.name
            for spec in (*contract.inputs, *contract.outputs)
            if spec.dtype is Dtype.BFLOAT16
        ],
        "is_stripped": plan.is_stripped,
        "has_code": plan.is_version_compatible,
    }
    return json.dumps(record).encode()


@dataclass
class FakeTensorRT:
    """The module and what happens to it.

    Args:
        module: to be given to whoever wants TensorRT.
        calls: method and arguments of what contexts were told, in order.
        refused: methods that fail next, with what TensorRT logs then.
        alter: changes the outputs of passes, by name, before they are there.
    """

    module: ModuleType = field(init=False)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    alter: Callable[[dict[str, NDArray[Any]]], None] = lambda _: None

    def names(self) -> list[str]:
        """Methods that were called, in order."""
        return [call[0] for call in self.calls]


def make_tensorrt(device: NumpyDevice, signatures: str = "tensorrt-11.4.0.106") -> FakeTensorRT:
    """A fake of one version, over a device.

    Args:
        device: where its passes run.
        signatures: name of a file of `signatures`.
    """
    fake = FakeTensorRT()

    def refuses(method: str, logger: Any) -> bool:
        message = fake.refused.pop(method, None)
        if message is not None:
            logger.log(fake.module.ILogger.ERROR, message)
        return message is not None

    class Logger:
        pass

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self._logger = logger
            self._engine_host_code_allowed = False

        def deserialize_cuda_engine(self, serialized_engine: bytes) -> Any:
            if refuses("deserialize_cuda_engine", self._logger):
                return None
            record = json.loads(bytes(serialized_engine))
            allowed = self._engine_host_code_allowed or not record["has_code"]
            if record["version"] != fake.module.__version__ and not record["has_code"]:
                self._logger.log(fake.module.ILogger.ERROR, "Version tag does not match")
                return None
            if not allowed:
                self._logger.log(fake.module.ILogger.ERROR, "host code is not allowed")
                return None
            return fake.module.ICudaEngine.make(self._logger, record)

    class ICudaEngine:
        def __init__(self, logger: Any, record: dict[str, Any]) -> None:
            self._logger = logger
            self._record = record
            self._has_weights = not record["is_stripped"]
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            options.log_severity_level = 3
            self._session = ort.InferenceSession(
                record["graph"], options, providers=["CPUExecutionProvider"]
            )
            self._inputs = {tensor.name: tensor for tensor in self._session.get_inputs()}
            self._outputs = {tensor.name: tensor for tensor in self._session.get_outputs()}
            self._tensors = self._inputs | self._outputs
            self._num_io_tensors = len(self._tensors)
            self._num_optimization_profiles = len(record["profiles"])
            self._device_memory_size_v2 = ACTIVATION_BYTES

        def get_tensor_name(self, index: int) -> str:
            return list(self._tensors)[index]

        def get_tensor_mode(self, name: str) -> Any:
            modes = fake.module.TensorIOMode
            return modes.INPUT if name in self._inputs else modes.OUTPUT

        def get_tensor_dtype(self, name: str) -> Any:
            if name in self._record["bfloat16"]:
                return fake.module.DataType.BF16
            return fake.module.DataType[_TYPES[self._tensors[name].type][0]]

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            return tuple(d if isinstance(d, int) else -1 for d in self._tensors[name].shape)

        def get_tensor_location(self, name: str) -> Any:
            assert name in self._tensors
            return fake.module.TensorLocation.DEVICE

        def get_tensor_profile_shape(self, name: str, profile_index: int) -> Any:
            shapes = self._record["profiles"][profile_index][name]
            return [tuple(shape) for shape in shapes]

        def get_aliased_input_tensor(self, name: str) -> str | None:
            return self._record["aliases"].get(name)

        def create_runtime_config(self) -> Any:
            return fake.module.IRuntimeConfig.make()

        def create_execution_context(self, strategy: Any = 0, runtime_config: Any = None) -> Any:
            fake.calls.append(("create_execution_context", strategy, runtime_config))
            if refuses("create_execution_context", self._logger):
                return None
            return fake.module.IExecutionContext.make(self, strategy)

    class IRuntimeConfig:
        pass

    class IExecutionContext:
        def __init__(self, engine: Any, strategy: int) -> None:
            self._owner = engine
            self._has_memory = (
                strategy != fake.module.ExecutionContextAllocationStrategy.USER_MANAGED
            )
            self._profile: int | None = None
            self._shapes: dict[str, tuple[int, ...]] = {}
            self._addresses: dict[str, int] = {}
            self._num_changes = 0
            self._ran_after = -1  # number of changes at the last uncaptured run

        def _say(self, method: str, *arguments: Any) -> bool:
            """Record a call; whether it may be done."""
            fake.calls.append((method, *arguments))
            self._num_changes += method != "execute_async_v3"
            return not refuses(method, self._owner._logger)

        def _refuse(self, why: str) -> bool:
            self._owner._logger.log(fake.module.ILogger.ERROR, why)
            return False

        def set_device_memory(self, memory: int, size: int) -> None:
            assert memory % ALIGNMENT == 0
            assert size >= ACTIVATION_BYTES
            device.bytes_at(memory, size)
            self._has_memory = True
            self._say("set_device_memory", memory, size)

        def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
            assert stream_handle == device.stream
            if not self._say("set_optimization_profile_async", profile_index):
                return False
            if profile_index >= len(self._owner._record["profiles"]):
                return self._refuse(f"profile {profile_index} does not exist")
            self._profile, self._shapes = profile_index, {}
            return True

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            if not self._say("set_input_shape", name, shape):
                return False
            if self._profile is None:
                return self._refuse("no profile was set")
            least, _, most = self._owner._record["profiles"][self._profile][name]
            fits = len(shape) == len(least) and all(
                low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
            )
            if not fits:
                return self._refuse(f"{name} {shape} is outside of {least} to {most}")
            self._shapes[name] = shape
            return True

        def set_tensor_address(self, name: str, memory: int) -> bool:
            if not self._say("set_tensor_address", name, memory):
                return False
            if name not in self._owner._tensors or memory % ALIGNMENT or not memory:
                return self._refuse(f"{name} cannot be at {memory:#x}")
            self._addresses[name] = memory
            return True

        def execute_async_v3(self, stream_handle: int) -> bool:
            assert stream_handle == device.stream
            if not self._say("execute_async_v3"):
                return False
            engine = self._owner
            for what, wanted, given in (
                ("shape", engine._inputs, self._shapes),
                ("address", engine._tensors, self._addresses),
            ):
                if missing := set(wanted) - set(given):
                    return self._refuse(f"{what} of {sorted(missing)[0]} was not set")
            if not self._has_memory or not engine._has_weights:
                return self._refuse("no memory for activations, or no weights")
            for output, past in engine._record["aliases"].items():
                if self._addresses[output] != self._addresses[past]:
                    return self._refuse(f"{output} is not where {past} is")
            if device.is_capturing and self._ran_after != self._num_changes:
                return self._refuse("operation not permitted when stream is capturing")
            if not device.is_capturing:
                self._ran_after = self._num_changes
            captured_at = self._num_changes
            shapes, addresses = dict(self._shapes), dict(self._addresses)
            was_captured = device.is_capturing

            def work() -> None:
                assert not was_captured or captured_at == self._num_changes, (
                    "a CUDA graph was launched after its context changed"
                )
                run_graph(engine, shapes, addresses)

            device.put(work)
            return True

    def run_graph(engine: Any, shapes: dict[str, Any], addresses: dict[str, int]) -> None:
        feeds, names = {}, list(engine._outputs)
        halves = engine._record["bfloat16"]
        for name, tensor in engine._inputs.items():
            is_half = name in halves
            dtype = np.dtype(np.uint16 if is_half else _TYPES[tensor.type][1])
            size = math.prod(shapes[name]) * dtype.itemsize
            stored = device.bytes_at(addresses[name], size).view(dtype).reshape(shapes[name])
            feeds[name] = from_stored(stored, Dtype.BFLOAT16) if is_half else stored.copy()
        outputs = dict(zip(names, engine._session.run(names, feeds), strict=True))
        for name in halves:
            if name in outputs:
                outputs[name] = to_stored(outputs[name], Dtype.BFLOAT16)
        fake.alter(outputs)
        for name, array in outputs.items():
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            device.bytes_at(addresses[name], raw.size)[:] = raw

    class Refitter:
        def __init__(self, engine: Any, logger: Any) -> None:
            self._engine, self._logger = engine, logger
            self._missing = ["weight"]

        def get_missing_weights(self) -> list[str]:
            return self._missing

        def refit_cuda_engine(self) -> bool:
            if refuses("refit_cuda_engine", self._logger):
                return False
            self._engine._has_weights = not self._missing
            return self._engine._has_weights

    class OnnxParserRefitter:
        def __init__(self, refitter: Any, logger: Any) -> None:
            self._refitter, self._logger = refitter, logger

        def refit_from_file(self, model: str) -> bool:
            if refuses("refit_from_file", self._logger):
                return False
            if model == self._refitter._engine._record["graph"]:
                self._refitter._missing = []
            return True

    behaviours: dict[str, type] = {
        "ICudaEngine": ICudaEngine,
        "IExecutionContext": IExecutionContext,
        "ILogger": Logger,
        "IRuntimeConfig": IRuntimeConfig,
        "OnnxParserRefitter": OnnxParserRefitter,
        "Refitter": Refitter,
        "Runtime": Runtime,
    }
    record = json.loads((SIGNATURES / f"{signatures}.json").read_text(encoding="utf-8"))
    known = {name for name, members in record["classes"].items() if members is not None}
    fake.module = make_module(
        SIGNATURES / f"{signatures}.json",
        {name: kind for name, kind in behaviours.items() if name in known},
    )
    return fake
