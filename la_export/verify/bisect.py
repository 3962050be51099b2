"""Names the first part of a graph whose hidden state departs from PyTorch's.

Reads one text through the portable graph with its residual stream marked as output, and compares
every sum of the stream with transformers' own. The weights are read where they lie; nothing is
written. Polygraphy compares; which tensors are the stream is found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.comparator import Comparator, RunResults, SimpleCompareFunc
from polygraphy.logger import G_LOGGER

from la_export.reference import TorchReference
from la_export.verify.tolerance import tolerance_of
from la_runtime.backends.ort_options import make_session_options
from la_runtime.bundle import Bundle
from la_runtime.contract import CacheForm, Contract, Name
from la_runtime.errors import BundleError, UsageError
from la_runtime.layout import make_rows
from la_runtime.masks import make_attention_mask, make_sliding_mask, place_keys
from la_runtime.storage import storage_dtype, stored_masked_value

__all__ = ["Departure", "PointDifference", "find_departure"]

_TINY: Final = float(np.finfo(np.float32).tiny)
_EXTERNAL_FOLDER: Final = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True, slots=True, kw_only=True)
class PointDifference:
    """How far one point of the graph is from PyTorch.

    Args:
        point: "embedding", "layer 3 attention", "layer 3 mlp", "final norm" or "head"; a layer's
            points are the sums behind its attention and its MLP.
        difference: the largest of any element, as a share of the element or of the point's
            typical size, whichever is larger; NaN when an element is.
        departs: whether Polygraphy finds it beyond the bound.
    """

    point: str
    difference: float
    departs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Where a graph departs from PyTorch.

    Args:
        layer: the first point that departs; None when none does.
        difference: of that point; the largest of all points when none departs.
        bound: differences up to here are rounding.
        points: every point, in the order of computation.
    """

    layer: str | None
    difference: float
    bound: float
    points: tuple[PointDifference, ...]


def find_departure(
    bundle: Bundle,
    reference: TorchReference,
    token_ids: Sequence[int],
    *,
    position_ids: Sequence[int] = (),
    threads: int = 1,
    bound: float | None = None,
) -> Departure:
    """Read a text through the graph and through PyTorch, and compare point by point.

    Args:
        bundle: the bundle; its portable graph is read.
        reference: transformers' own model with the weights that the bundle should have.
        token_ids: [tokens] of the vocabulary, at most the bundle's context.
        position_ids: [tokens] where they stand; 0, 1, 2, ... when empty.
        threads: threads for ONNX Runtime.
        bound: see `Departure`; None takes that of the bundle's precision.

    Returns:
        The first point that departs, and the difference of each.

    Raises:
        UsageError: the reference or the token ids do not fit the bundle.
        BundleError: the graph cannot be loaded, or has no residual stream of two sums a layer.
    """
    manifest = bundle.manifest
    _check_same_model(reference, manifest.contract)
    _check_token_ids(token_ids, manifest.contract, manifest.model.context)
    positions = tuple(position_ids) or tuple(range(len(token_ids)))
    truth = _read_reference(reference, token_ids, positions)
    graph_path = bundle.path(manifest.graph)
    model = _load_graph(graph_path)
    stream = _find_stream(model.graph, manifest.contract)
    if bound is None:
        bound = tolerance_of(manifest.precision).departure
    named = dict(zip(truth, [*stream, Name.LOGITS.value], strict=True))
    session = _open_session(model, graph_path.parent, stream, threads)
    found = _run_graph(session, _make_feeds(manifest.contract, token_ids, positions))
    return _compare({point: found[tensor] for point, tensor in named.items()}, truth, bound)


def _check_same_model(reference: TorchReference, contract: Contract) -> None:
    expected = (contract.num_layers, contract.hidden_size, contract.vocab_size)
    sizes = (reference.num_layers, reference.hidden_size, reference.vocab_size)
    if sizes != expected:
        raise UsageError(
            f"the reference is not the bundle's model: it has {sizes} layers, width and "
            f"vocabulary, the bundle {expected}; give the checkpoint the bundle was built from"
        )


def _check_token_ids(token_ids: Sequence[int], contract: Contract, context: int) -> None:
    if not 1 <= len(token_ids) <= context:
        raise UsageError(
            f"a text of {len(token_ids)} tokens cannot be read; give 1 to {context} tokens"
        )
    for token_id in token_ids:
        if not 0 <= token_id < contract.vocab_size:
            raise UsageError(
                f"token id {token_id} is outside the vocabulary; ids go from 0 to "
                f"{contract.vocab_size - 1}"
            )


def _read_reference(
    reference: TorchReference, token_ids: Sequence[int], position_ids: Sequence[int]
) -> dict[str, NDArray[np.float32]]:
    """Point to [tokens, hidden or vocab_size], in the order of computation."""
    states = reference.hidden_states(token_ids, position_ids=position_ids)
    layers = range(reference.num_layers)
    points = [
        "embedding",
        *(f"layer {layer} {part}" for layer in layers for part in ("attention", "mlp")),
        "final norm",
    ]
    return dict(zip(points, states, strict=True)) | {
        "head": reference.scores(token_ids, position_ids=position_ids)
    }


def _load_graph(path: Path) -> onnx.ModelProto:
    """The graph without its weights."""
    try:
        return onnx.load(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise BundleError(f"{path} cannot be read ({error}); rebuild the bundle") from error


def _find_stream(graph: onnx.GraphProto, contract: Contract) -> list[str]:
    """Names of the embedding, every sum of the residual stream, and the final norm's output.

    Walks up from the logits: to the last norm, then from sum to sum. Of a sum's two operands the
    branch is computed from the stream, so the stream is the one made earlier.
    """
    producers = {name: place for place, node in enumerate(graph.node) for name in node.output}

    def node_of(name: str) -> onnx.NodeProto:
        if name not in producers:
            raise BundleError(
                "the graph has no residual stream behind its logits that ends in a norm; only "
                "graphs of pre-norm decoders can be searched"
            )
        node: onnx.NodeProto = graph.node[producers[name]]
        return node

    norm = Name.LOGITS.value
    while node_of(norm).op_type != "RMSNormalization":
        norm = node_of(norm).input[0]
    stream = [norm]
    state = node_of(norm).input[0]
    while node_of(state).op_type == "Add":
        stream.append(state)
        state = min(node_of(state).input, key=lambda name: producers.get(name, -1))
    stream.append(state)
    sums = len(stream) - 2
    if sums != 2 * contract.num_layers:
        raise BundleError(
            f"the graph's residual stream has {sums} sums, expected {2 * contract.num_layers}, "
            "two a layer; only graphs of pre-norm decoders can be searched"
        )
    return stream[::-1]


def _open_session(
    model: onnx.ModelProto, folder: Path, marked: Sequence[str], threads: int
) -> ort.InferenceSession:
    """The graph in memory with these tensors as further outputs, its weights in `folder`."""
    for name in marked:
        output = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        model.graph.output.append(output)
    options = make_session_options(threads)
    options.add_session_config_entry(_EXTERNAL_FOLDER, str(folder))
    try:
        return ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise BundleError(
            f"ONNX Runtime {ort.__version__} cannot load the graph of {folder}: {error}"
        ) from error


def _make_feeds(
    contract: Contract, token_ids: Sequence[int], position_ids: Sequence[int]
) -> dict[str, NDArray[np.generic]]:
    """One sequence with an empty cache, every row asked for."""
    count = len(token_ids)
    places = contract.capacity or 0
    empty = np.zeros(
        (1, contract.num_kv_heads, places, contract.head_dim), storage_dtype(contract.kv_dtype)
    )
    vectors = np.zeros(
        (contract.k_max, contract.hidden_size), storage_dtype(contract.compute_dtype)
    )
    mask = make_attention_mask(
        [make_rows(count, (), ())],
        np.zeros(1, np.int64),
        block_columns=np.zeros(1, np.int64),
        num_keys=contract.capacity or count,
        block_len=count,
        masked=stored_masked_value(contract.compute_dtype),
    )
    feeds: dict[str, NDArray[np.generic]] = {
        Name.INPUT_IDS: np.asarray([token_ids], np.int64),
        Name.POSITION_IDS: np.asarray([position_ids], np.int64),
        Name.ATTENTION_MASK: mask,
        Name.LOOKAHEAD_EMBEDDINGS: vectors,
        Name.LOGITS_ROWS: np.arange(count)[None],
    }
    if contract.window is not None:
        positions = np.asarray([position_ids], np.int64)
        feeds[Name.SLIDING_ATTENTION_MASK] = make_sliding_mask(
            mask,
            positions,
            place_keys(
                positions,
                np.arange(count)[None],
                block_columns=np.zeros(1, np.int64),
                num_keys=mask.shape[3],
            ),
            window=contract.window,
            masked=stored_masked_value(contract.compute_dtype),
        )
    if contract.cache_form is CacheForm.SCATTER:
        feeds[Name.WRITE_INDEX] = np.zeros(1, np.int64)
    feeds.update(dict.fromkeys(contract.past_names, empty))
    return {str(name): array for name, array in feeds.items()}


def _run_graph(
    session: ort.InferenceSession, feeds: dict[str, NDArray[np.generic]]
) -> dict[str, NDArray[np.float32]]:
    """Every output as float32, without its batch axis."""
    with G_LOGGER.verbosity(), OnnxrtRunner(session) as runner:
        outputs = runner.infer(feeds)
    return {name: array[0].astype(np.float32) for name, array in outputs.items()}


def _compare(
    found: dict[str, NDArray[np.float32]], truth: dict[str, NDArray[np.float32]], bound: float
) -> Departure:
    """An element departs when it is off by more than `bound` of itself and of the typical size.

    A few elements of a real model are a thousand times larger than the rest; a bound that is a
    share of the largest would be blind to everything else.
    """
    typical = {point: float(np.median(np.abs(values))) for point, values in truth.items()}
    runs = RunResults()
    runs.add([found], runner_name="graph")
    runs.add([truth], runner_name="PyTorch")
    compare = SimpleCompareFunc(
        check_error_stat="elemwise",
        rtol=bound,
        atol={point: bound * size for point, size in typical.items()},
    )
    with G_LOGGER.verbosity():
        (accuracy,) = Comparator.compare_accuracy(runs, compare_func=compare)
    ((verdicts,),) = accuracy.values()
    points = tuple(
        PointDifference(
            point=point,
            difference=_largest_share(found[point], values, typical[point]),
            departs=not verdicts[point],
        )
        for point, values in truth.items()
    )
    first = next((point for point in points if point.departs), None)
    return Departure(
        layer=None if first is None else first.point,
        difference=max(p.difference for p in points) if first is None else first.difference,
        bound=bound,
        points=points,
    )


def _largest_share(found: NDArray[np.float32], truth: NDArray[np.float32], typical: float) -> float:
    sizes = np.maximum(np.abs(truth), max(typical, _TINY))
    return float((np.abs(found - truth) / sizes).max())
