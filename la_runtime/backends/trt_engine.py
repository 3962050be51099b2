"""A plan, loaded: TensorRT's module, the engine, and what it says when something goes wrong.

The caller has made sure that there is a working driver: without one TensorRT ends the process.
"""

from __future__ import annotations

import importlib
import logging
import mmap
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn, cast

from la_runtime.backends.device import Device
from la_runtime.backends.trt_api import (
    FullTensorRT,
    IExecutionContext,
    ILogger,
    RtxTensorRT,
    Runtime,
    Severity,
    TensorRT,
)
from la_runtime.contract import Axis, CacheForm, Contract, Dtype, TensorSpec
from la_runtime.errors import BundleError, HostError
from la_runtime.plans import PlanFacts, PlanTarget

__all__ = ["PlanEngine", "load_tensorrt"]

logger = logging.getLogger(__name__)

_MODULES: Final = {PlanTarget.TRT: "tensorrt", PlanTarget.TRT_RTX: "tensorrt_rtx"}
_LEAN_MODULE: Final = "tensorrt_lean"
_KEPT_ERRORS: Final = 4
_OUT_OF_MEMORY: Final = ("out of memory", "outofmemory", "cudaerrormemoryallocation")


def load_tensorrt(plan: PlanFacts) -> TensorRT:
    """The module that runs a plan.

    The lean runtime is enough for one that loads in other versions too.

    Raises:
        HostError: it cannot be imported.
    """
    name = _MODULES[plan.target]
    names = [name, _LEAN_MODULE] if _runs_lean(plan) else [name]
    problem: ImportError | None = None
    for candidate in names:
        try:
            return cast(TensorRT, importlib.import_module(candidate))
        except ImportError as error:
            problem = problem or error
    raise HostError(
        f"{plan.path} needs the module {' or '.join(names)}, which cannot be imported "
        f"({problem}): pip install 'lookahead-attention[{plan.target}]'"
    ) from problem


def _map(path: Path) -> memoryview:
    """A file's bytes, read as they are looked at: a plan holds all weights."""
    with path.open("rb") as stream:
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


def _runs_lean(plan: PlanFacts) -> bool:
    return plan.target is PlanTarget.TRT and plan.is_version_compatible and not plan.is_stripped


class Messages:
    """What TensorRT logs, passed on to `logging`; the last errors are kept."""

    def __init__(self, tensorrt: TensorRT) -> None:
        self._errors: deque[str] = deque(maxlen=_KEPT_ERRORS)
        base = tensorrt.ILogger
        # Lower ones are many, and would be asked for in the middle of a pass.
        levels = {
            base.INTERNAL_ERROR: logging.ERROR,
            base.ERROR: logging.ERROR,
            base.WARNING: logging.WARNING,
        }

        def log(_: ILogger, severity: Severity, msg: str) -> None:
            level = levels.get(severity)
            if level is not None:
                logger.log(level, "TensorRT: %s", msg)
            if level == logging.ERROR:
                self._errors.append(msg)

        self.logger: ILogger = type("PlanLogger", (base,), {"log": log})()

    def take(self) -> str:
        """The errors since they were last taken, in a line."""
        text = "; ".join(" ".join(message.split()) for message in self._errors)
        self._errors.clear()
        return text or "it does not say why"


class PlanEngine:
    """The engine of a plan, whose inputs and outputs are the contract's.

    Args:
        tensorrt: the module.
        device: for messages about its memory.
        plan: what the manifest says of the plan.
        contract: of its graph.
        path: the plan's file.
        graph: the graph's file, for the weights of a stripped plan.

    Raises:
        BundleError: TensorRT cannot load it, or it is not what the manifest says.
        HostError: the GPU's memory does not suffice, or the module cannot refit a stripped plan.
    """

    def __init__(
        self,
        tensorrt: TensorRT,
        device: Device,
        *,
        plan: PlanFacts,
        contract: Contract,
        path: Path,
        graph: Path,
    ) -> None:
        self.messages = Messages(tensorrt)
        self._tensorrt = tensorrt
        self._device = device
        self._plan = plan
        self._runtime: Runtime = tensorrt.Runtime(self.messages.logger)
        if plan.is_version_compatible:
            # Such a plan carries code of its own; the bundle's digests vouch for it.
            self._runtime.engine_host_code_allowed = True
        engine = self._runtime.deserialize_cuda_engine(_map(path))
        if engine is None:
            self._refuse("load the engine")
        self.engine = engine
        if plan.is_stripped:
            self._refit(graph)
        self._check_tensors(contract)

    def _refit(self, graph: Path) -> None:
        if not hasattr(self._tensorrt, "OnnxParserRefitter"):
            raise HostError(
                f"{self._plan.path} is stripped of its weights, and only the module tensorrt can "
                "put them back: pip install 'lookahead-attention[trt]'"
            )
        full = cast(FullTensorRT, self._tensorrt)
        refitter = full.Refitter(self.engine, self.messages.logger)
        parser = full.OnnxParserRefitter(refitter, self.messages.logger)
        if not parser.refit_from_file(str(graph)):
            self._refuse("read the weights")
        if missing := refitter.get_missing_weights():
            self._refuse(f"find {len(missing)} weights")
        if not refitter.refit_cuda_engine():
            self._refuse("put back the weights")

    def _check_tensors(self, contract: Contract) -> None:
        engine, modes = self.engine, self._tensorrt.TensorIOMode
        specs = {spec.name: spec for spec in (*contract.inputs, *contract.outputs)}
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        if sorted(names) != sorted(specs):
            raise self._other_plan(
                f"it has {len(names)} inputs and outputs, the contract {len(specs)}, or their "
                "names differ"
            )
        for specs_of, mode in ((contract.inputs, modes.INPUT), (contract.outputs, modes.OUTPUT)):
            for spec in specs_of:
                shape = [self._sizes_of(axis, mode == modes.OUTPUT) for axis in spec.axes]
                if engine.get_tensor_mode(spec.name) != mode or not self._fits(spec, shape):
                    raise self._other_plan(f"its {spec.name} is not the contract's")
        if engine.num_optimization_profiles != len(self._plan.profiles):
            raise self._other_plan(
                f"it has {engine.num_optimization_profiles} profiles, the manifest "
                f"{len(self._plan.profiles)}"
            )
        for index, profile in enumerate(self._plan.profiles):
            for spec in contract.inputs:
                if all(isinstance(axis, int) for axis in spec.axes):
                    continue
                found = engine.get_tensor_profile_shape(spec.name, index)
                if tuple(tuple(shape) for shape in found) != profile.shape_of(spec.axes):
                    raise self._other_plan(f"its profile {index} has other shapes of {spec.name}")
        if contract.cache_form is CacheForm.SCATTER:
            for present, past in zip(contract.present_names, contract.past_names, strict=True):
                if engine.get_aliased_input_tensor(present) != past:
                    raise self._other_plan(f"it does not write {present} over {past}")

    def _sizes_of(self, axis: Axis | int, is_output: bool) -> set[int]:
        """What the engine may say of an axis: its size, or -1 where that is dynamic.

        TensorRT works out the shapes of outputs, and one that no profile leaves open is a size.
        """
        if isinstance(axis, int):
            return {axis}
        ranges = [profile.axes[axis] for profile in self._plan.profiles]
        sizes = {size for entry in ranges for size in (entry.least, entry.most)}
        return {-1} | (sizes if is_output and len(sizes) == 1 else set())

    def _fits(self, spec: TensorSpec, shape: Sequence[set[int]]) -> bool:
        types = self._tensorrt.DataType
        wanted = {
            Dtype.INT64: types.INT64,
            Dtype.FLOAT32: types.FLOAT,
            Dtype.FLOAT16: types.HALF,
            Dtype.BFLOAT16: types.BF16,
        }[spec.dtype]
        engine = self.engine
        found = list(engine.get_tensor_shape(spec.name))
        return (
            engine.get_tensor_dtype(spec.name) == wanted
            and len(found) == len(shape)
            and all(size in sizes for size, sizes in zip(found, shape, strict=True))
            and engine.get_tensor_location(spec.name) == self._tensorrt.TensorLocation.DEVICE
        )

    @property
    def activation_bytes(self) -> int:
        """Device memory that a context of `make_context` needs."""
        return self.engine.device_memory_size_v2

    def make_context(self) -> IExecutionContext:
        """A context without memory for its activations.

        Raises:
            HostError: the GPU's memory does not suffice.
        """
        strategy = self._tensorrt.ExecutionContextAllocationStrategy.USER_MANAGED
        return self._made(self.engine.create_execution_context(strategy))

    def make_capturing_context(self) -> IExecutionContext:
        """A context of TensorRT for RTX, which captures CUDA graphs by itself.

        Raises:
            HostError: the GPU's memory does not suffice.
        """
        rtx = cast(RtxTensorRT, self._tensorrt)
        config = self.engine.create_runtime_config()
        config.cuda_graph_strategy = rtx.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return self._made(self.engine.create_execution_context(runtime_config=config))

    def _made(self, context: IExecutionContext | None) -> IExecutionContext:
        if context is None:
            self._refuse("make an execution context")
        return context

    def check(self, done: bool, what: str) -> None:
        """Raise when a call for a pass was not accepted.

        Args:
            done: what the call returned.
            what: it was to do.

        Raises:
            HostError: it did not.
        """
        if not done:
            reason = self._reason()
            raise HostError(
                f"TensorRT could not {what} of {self._plan.path}: {reason}; open the bundle in a "
                "new process, and if it comes back, rebuild with 'la-export plan BUNDLE --target "
                f"{self._plan.target}'"
            )

    def _refuse(self, what: str) -> NoReturn:
        reason = self._reason()
        raise BundleError(
            f"TensorRT {self._tensorrt.__version__} cannot {what} of {self._plan.path}: {reason}; "
            f"rebuild with 'la-export plan BUNDLE --target {self._plan.target}'"
        )

    def _reason(self) -> str:
        """Why TensorRT did not do something.

        Raises:
            HostError: it lacked memory.
        """
        reason = self.messages.take()
        if any(sign in reason.lower() for sign in _OUT_OF_MEMORY):
            raise HostError(
                f"the GPU has not enough memory for {self._plan.path}: {reason}; "
                f"{self._device.describe_memory()}; use fewer sequences at a time or a smaller "
                "model, or end what else runs on the GPU"
            )
        return reason

    def _other_plan(self, difference: str) -> BundleError:
        return BundleError(
            f"{self._plan.path} is not the plan that the manifest describes: {difference}; rebuild "
            f"with 'la-export plan BUNDLE --target {self._plan.target}'"
        )
