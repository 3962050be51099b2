"""What a machine can do at most: how fast it reads memory and multiplies matrices.

A step cannot be faster than reading its weights once, nor than its operations at the rate of the
best GEMM; both are measured with as many threads as the passes have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import onnxruntime as ort
from numpy.typing import DTypeLike, NDArray
from onnx import TensorProto, helper, numpy_helper

from la_export.bench.speed.record import MachineRates
from la_export.bench.speed.timing import seconds_of
from la_runtime.backends.ort_options import make_session_options
from la_runtime.bundle import Manifest

__all__ = ["StepCost", "measure_rates", "step_cost"]

_Reader: TypeAlias = Callable[[NDArray[np.float32]], object]

_READ_BYTES: Final = 1 << 28
_READERS: Final[tuple[_Reader, ...]] = (np.sum, np.max)
_GEMM_ROWS: Final = 32
_GEMM_SIZE: Final = 1024
_SAMPLES: Final = 9
_OPSET: Final = 23
_IR_VERSION: Final = 11
_INTEGER_PRECISIONS: Final = frozenset({"int8"})


def measure_rates(threads: int) -> MachineRates:
    """Measure this machine, with so many threads."""
    return MachineRates(
        bandwidth_bytes_per_s=_read_rate(threads),
        gemm_rows=_GEMM_ROWS,
        float_operations_per_s=_gemm_rate(
            "MatMul", threads, inputs=np.float32, weights=np.float32, result=TensorProto.FLOAT
        ),
        integer_operations_per_s=_gemm_rate(
            "MatMulInteger", threads, inputs=np.uint8, weights=np.int8, result=TensorProto.INT32
        ),
        samples=_SAMPLES,
    )


def _read_rate(threads: int) -> float:
    """Bytes a second of reading an array, each thread its part of it."""
    parts = np.array_split(np.ones(_READ_BYTES // 4, dtype=np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        calls = [seconds_of(partial(_read, pool, reader, parts)) for reader in _READERS]
        fastest = min(call() for call in calls for _ in range(_SAMPLES))
    return _READ_BYTES / fastest


def _read(pool: ThreadPoolExecutor, reader: _Reader, parts: list[NDArray[np.float32]]) -> None:
    for _ in pool.map(reader, parts):
        pass


def _gemm_rate(
    operator: str, threads: int, *, inputs: DTypeLike, weights: DTypeLike, result: int
) -> float:
    """Operations a second of one operator of ONNX Runtime."""
    left = np.ones((_GEMM_ROWS, _GEMM_SIZE), dtype=inputs)
    session = _gemm_session(
        operator, np.ones((_GEMM_SIZE, _GEMM_SIZE), dtype=weights), left, result, threads
    )
    feeds: Mapping[str, NDArray[np.generic]] = {"left": left}
    fastest = min(seconds_of(lambda: session.run(None, feeds))() for _ in range(_SAMPLES + 1))
    return 2 * _GEMM_ROWS * _GEMM_SIZE * _GEMM_SIZE / fastest


def _gemm_session(
    operator: str,
    weights: NDArray[np.generic],
    left: NDArray[np.generic],
    result: int,
    threads: int,
) -> ort.InferenceSession:
    rows, columns = left.shape[0], weights.shape[1]
    graph = helper.make_graph(
        [helper.make_node(operator, ["left", "weights"], ["product"])],
        "gemm",
        [
            helper.make_tensor_value_info(
                "left", helper.np_dtype_to_tensor_dtype(left.dtype), left.shape
            )
        ],
        [helper.make_tensor_value_info("product", result, (rows, columns))],
        [numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION
    )
    return ort.InferenceSession(
        model.SerializeToString(),
        make_session_options(threads),
        providers=["CPUExecutionProvider"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The least a step can take, in seconds.

    Args:
        weights_s: reading the weights once.
        operations_s: its multiplications and additions.
    """

    weights_s: float
    operations_s: float

    @property
    def ceiling_s(self) -> float:
        """The longer of the two."""
        return max(self.weights_s, self.operations_s)


def step_cost(
    manifest: Manifest,
    rates: MachineRates,
    *,
    weight_bytes: int,
    rows: float,
    scored_rows: float,
    past: float,
) -> StepCost:
    """The ceilings of one step at batch 1.

    Args:
        manifest: of the bundle.
        rates: of the machine.
        weight_bytes: what the step reads.
        rows: of the block.
        scored_rows: rows that the head works on.
        past: tokens in the cache.
    """
    contract, model = manifest.contract, manifest.model
    head = contract.vocab_size * contract.hidden_size
    inner = model.num_parameters - (head if model.tied_embeddings else 2 * head)
    attended = contract.num_layers * model.num_attention_heads * contract.head_dim
    products = rows * inner + scored_rows * head + 2 * rows * (past + rows) * attended
    is_integer = manifest.precision in _INTEGER_PRECISIONS
    rate = rates.integer_operations_per_s if is_integer else rates.float_operations_per_s
    return StepCost(
        weights_s=weight_bytes / rates.bandwidth_bytes_per_s, operations_s=2 * products / rate
    )
