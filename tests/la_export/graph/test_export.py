from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from la_export.checkpoint import find_model, load_checkpoint
from la_export.graph.passes.names import SCALES_SUFFIX
from la_export.options import Precision
from la_export.pipeline import BuildOptions, BuildReport, build
from la_export.quantize.rotation import ROTATION_PRODUCTS
from la_export.reference import TorchReference
from la_runtime.bundle import GRAPH_PATH, open_bundle
from la_runtime.contract import CacheForm, Contract, Name
from tests.la_export.conftest import VARIANTS, Form, Variant

WEIGHTS_PATH = GRAPH_PATH + ".data"
PLAIN: Form = (Precision.FP32, CacheForm.CONCAT)
FORMS: tuple[Form, ...] = tuple(product(Precision, CacheForm))
# Every form of one model, and of the others that in which most is different.
CASES: tuple[tuple[Variant, Form], ...] = (
    *((variant, PLAIN) for variant in VARIANTS),
    *((VARIANTS[0], form) for form in FORMS if form != PLAIN),
    *((variant, (Precision.FP16, CacheForm.SCATTER)) for variant in VARIANTS[2:]),
)
OTHER_CASES = [case for case in product(VARIANTS[2:], FORMS) if case not in CASES]
DTYPES = {
    Precision.FP32: ir.DataType.FLOAT,
    Precision.FP16: ir.DataType.FLOAT16,
    Precision.BF16: ir.DataType.BFLOAT16,
    Precision.INT8: ir.DataType.FLOAT,
    Precision.INT4: ir.DataType.FLOAT,
}
INTEGERS = {ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4}
HALVES = {Precision.FP16, Precision.BF16}
IN_INTEGERS = {Precision.INT8, Precision.INT4}
CHECKS = {"logits", "block_kv", "top", "logsumexp", "prefill_logits"}
SCATTER_CHECKS = CHECKS | {"stale_places", "other_places"}
LEAN_CHECKS = SCATTER_CHECKS - {"logsumexp"}


def _name(case: object) -> str:
    (family, tied), (precision, cache_form) = case  # type: ignore[misc]
    return f"{family}-{'tied' if tied else 'untied'}-{precision}-{cache_form}"


@pytest.fixture(
    params=[*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHER_CASES)],
    ids=[_name(case) for case in (*CASES, *OTHER_CASES)],
)
def case(request: pytest.FixtureRequest) -> tuple[Variant, Form]:
    found: tuple[Variant, Form] = request.param
    return found


@pytest.fixture
def variant(case: tuple[Variant, Form]) -> Variant:
    return case[0]


@pytest.fixture
def form(case: tuple[Variant, Form]) -> Form:
    return case[1]


@pytest.fixture
def report(variant: Variant, form: Form, report_of: Callable[..., BuildReport]) -> BuildReport:
    return report_of(variant, form)


def test_bundle_opens_and_every_check_is_within_its_bound(form: Form, report: BuildReport) -> None:
    manifest = open_bundle(report.bundle).manifest
    assert manifest == report.manifest
    precision, cache_form = form
    computed = SCATTER_CHECKS if cache_form is CacheForm.SCATTER else CHECKS
    expected = {"contract", "weights"}
    if precision is not Precision.BF16:
        expected |= computed
    if precision is Precision.FP16:
        expected |= {"ort_cpu_variant"}
    if precision in HALVES:
        expected |= {f"float32_twin.{name}" for name in computed}
    else:
        expected |= {"lean_contract", *(f"ort-cpu.{name}" for name in LEAN_CHECKS)}
    if precision in IN_INTEGERS:
        expected |= {"integer_products", "ort-cpu.integer_products"}
        expected |= {f"float_activations.{name}" for name in computed}
        expected |= {f"ort-cpu.float_activations.{name}" for name in LEAN_CHECKS}
    assert {check.name for check in manifest.checks} == expected
    for check in manifest.checks:
        assert check.value <= check.bound, check


def test_manifest_states_the_form(form: Form, report: BuildReport) -> None:
    precision, cache_form = form
    manifest = report.manifest
    contract = manifest.contract
    assert manifest.precision == precision.value
    assert contract.compute_dtype is contract.kv_dtype is precision.dtype
    assert contract.cache_form is cache_form
    # 256 positions, a chunk of no more than those and a group of 4 behind it; a multiple of 8.
    assert contract.capacity == (256 + 256 + 4 + 4 if cache_form is CacheForm.SCATTER else None)
    assert manifest.recipe["cache-form"] == cache_form.value
    assert manifest.built_with["opset"] == ("24" if cache_form is CacheForm.SCATTER else "23")


def test_graph_has_the_standard_operators_and_no_other(
    variant: Variant, form: Form, report: BuildReport
) -> None:
    model = ir.load(report.bundle / GRAPH_PATH)
    counts = Counter(node.op_type for node in model.graph)
    layers = report.manifest.contract.num_layers
    is_scatter = form[1] is CacheForm.SCATTER
    norms_per_layer = 4 if variant[0] == "qwen3" else 2
    assert counts["Attention"] == layers
    assert counts["RMSNormalization"] == norms_per_layer * layers + 1
    assert counts["RotaryEmbedding"] == 2 * layers
    assert counts["Cos"] == counts["Sin"] == 1
    is_integer = form[0] in IN_INTEGERS
    assert counts["Gather"] == (3 if is_integer else 2)  # and the scales of the table
    assert counts["TensorScatter"] == (2 * layers if is_scatter else 0)
    # The positions; in half precision cosine, sine and the logits too; what integers become.
    products = {Precision.INT8: 4 * layers + 1, Precision.INT4: 1}.get(form[0], 0)
    assert counts["Cast"] == (4 if form[0] in HALVES else 1 + products + is_integer)
    assert counts["MatMulInteger"] == counts["QuantizeLinear"] == products
    for taken_apart in ("Pow", "ReduceMean", "Neg", "Slice", "Softmax", "Constant", "Identity"):
        assert counts[taken_apart] == 0
    assert set(model.opset_imports) == {""}
    assert model.opset_imports[""] == (24 if is_scatter else 23)


def test_every_number_is_held_in_the_precision_but_rotary_frequencies_and_scores(
    form: Form, report: BuildReport
) -> None:
    model = onnx.shape_inference.infer_shapes(
        onnx.load(report.bundle / GRAPH_PATH, load_external_data=False)
    )
    graph = ir.serde.deserialize_model(model).graph
    dtype = DTYPES[form[0]]
    for name, value in graph.initializers.items():
        if value.dtype != ir.DataType.INT64 and value.dtype not in INTEGERS:
            is_frequencies = name.endswith("inv_freq")
            assert value.dtype == (ir.DataType.FLOAT if is_frequencies else dtype), name
    for node in graph:
        if node.op_type in ("Cos", "Sin", "TopK", "ReduceLogSumExp"):
            assert node.outputs[0].dtype == ir.DataType.FLOAT
        if node.op_type in ("Attention", "MatMul", "Gemm", "Add", "RotaryEmbedding", "Split"):
            assert node.outputs[0].dtype == dtype
        if node.op_type == "RMSNormalization":
            assert node.outputs[0].dtype == dtype
            assert node.attributes["stash_type"].as_int() == ir.DataType.FLOAT
        if node.op_type == "Attention":
            assert (len(node.inputs), len(node.outputs)) == (4, 1)


def test_no_weight_is_transposed_or_joined_in_the_graph(report: BuildReport) -> None:
    model = ir.load(report.bundle / GRAPH_PATH)
    for node in model.graph:
        if node.op_type in ("Transpose", "Concat"):
            big = [
                value.name
                for value in node.inputs
                if value is not None
                and value.const_value is not None
                and value.const_value.size > 8
            ]
            assert not big, (node.name, big)


def test_every_parameter_is_stored_exactly_once(form: Form, report: BuildReport) -> None:
    """A second copy of anything, of a tied table above all, would show in the bytes."""
    model = ir.load(report.bundle / GRAPH_PATH)
    head_dim = report.manifest.contract.head_dim
    external = [
        value.const_value
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    ]
    inline_norms = sum(
        value.const_value.size
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, ir.Tensor | ir.TensorProtocol)
        and not isinstance(value.const_value, ir.ExternalTensor)
        and value.dtype in (ir.DataType.FLOAT, DTYPES[form[0]])
    )
    stored = sum(tensor.size for tensor in external) + inline_norms
    stored -= sum(
        value.const_value.size
        for name, value in model.graph.initializers.items()
        if name.endswith(SCALES_SUFFIX)
        or name.startswith("scalar.float32")
        or name in ROTATION_PRODUCTS
    )
    assert stored == report.manifest.model.num_parameters + head_dim // 2
    assert (report.bundle / WEIGHTS_PATH).stat().st_size == sum(t.nbytes for t in external)


def test_tied_head_reads_the_embedding_table(
    variant: Variant, form: Form, report: BuildReport
) -> None:
    model = ir.load(report.bundle / GRAPH_PATH)
    contract = report.manifest.contract
    table_shape = {contract.vocab_size, contract.hidden_size}
    tables = [
        value
        for value in model.graph.initializers.values()
        if set(value.shape or ()) == table_shape
    ]
    users = [sorted(node.op_type for node in value.consumers()) for value in tables]
    if form[0] in IN_INTEGERS:
        tied, head = ["Gather", "MatMulInteger"], ["MatMulInteger"]
    else:
        tied, head = ["Gather", "Gemm"], ["MatMul"]
    assert sorted(users) == ([tied] if variant[1] else [["Gather"], head])


def test_files_hold_no_path_of_this_machine(report: BuildReport) -> None:
    for name in (GRAPH_PATH, "manifest.json"):
        content = (report.bundle / name).read_bytes()
        for trace in (b"/root", b"/home", b"/tmp", b"site-packages", b".py", b"stack_trace"):
            assert trace not in content, (name, trace)


def test_initializers_and_edges_are_named_in_the_file(report: BuildReport) -> None:
    graph = onnx.load(report.bundle / GRAPH_PATH, load_external_data=False).graph
    contract = report.manifest.contract
    assert [value.name for value in graph.input] == [spec.name for spec in contract.inputs]
    assert [value.name for value in graph.output] == [spec.name for spec in contract.outputs]
    names = [node.name for node in graph.node]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("variant", "cache_form"),
    [*((variant, CacheForm.CONCAT) for variant in VARIANTS), (VARIANTS[0], CacheForm.SCATTER)],
)
def test_step_by_step_decoding_equals_transformers_greedy(
    variant: Variant,
    cache_form: CacheForm,
    report_of: Callable[..., BuildReport],
    checkpoint_of: Callable[[Variant], Path],
) -> None:
    report = report_of(variant, (Precision.FP32, cache_form))
    reference = TorchReference.load(str(checkpoint_of(variant)))
    decode = {CacheForm.CONCAT: _decode, CacheForm.SCATTER: _decode_in_place}[cache_form]
    path, contract = report.bundle / GRAPH_PATH, report.manifest.contract
    produced = set[int]()
    for prompt in ([4, 100, 33, 7, 260, 19], [301], [17, 17, 90], list(range(50, 70))):
        expected = reference.generate_greedy(prompt, 12, ())
        assert decode(path, contract, prompt, 12) == expected
        produced.update(expected)
    assert len(produced) > 3, "texts of one repeated token would prove little"


def _decode(path: Path, contract: Contract, prompt: list[int], count: int) -> list[int]:
    """Plain greedy decoding over the graph, written without any of our runtime."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    cache = [
        np.zeros((1, contract.num_kv_heads, 0, contract.head_dim), np.float32)
        for _ in contract.past_names
    ]
    block, produced = prompt, list[int]()
    while len(produced) < count:
        past, rows = cache[0].shape[2], len(block)
        feeds = {
            **_make_row_feeds(contract, block, past),
            "attention_mask": np.triu(np.full((rows, past + rows), -1e9, np.float32), past + 1)[
                np.newaxis, np.newaxis
            ],
            **dict(zip(contract.past_names, cache, strict=True)),
        }
        top, *new = session.run([Name.TOP_IDS.value, *contract.block_names], feeds)
        cache = [np.concatenate(pair, axis=2) for pair in zip(cache, new, strict=True)]
        produced.append(int(top[0, 0, 0]))
        block = [produced[-1]]
    return produced


def _decode_in_place(path: Path, contract: Contract, prompt: list[int], count: int) -> list[int]:
    """The same over a cache of fixed capacity, each step with a rejected draft behind its root."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert contract.capacity is not None
    cache = [
        np.zeros((1, contract.num_kv_heads, contract.capacity, contract.head_dim), np.float32)
        for _ in contract.past_names
    ]
    block, past, produced = prompt, 0, list[int]()
    while len(produced) < count:
        rows = [*block, 5]
        feeds = {
            **_make_row_feeds(contract, rows, past),
            "attention_mask": np.triu(
                np.full((len(rows), contract.capacity), -1e9, np.float32), past + 1
            )[np.newaxis, np.newaxis],
            "logits_rows": np.array([[len(block) - 1]], np.int64),
            "write_index": np.array([past], np.int64),
            **dict(zip(contract.past_names, cache, strict=True)),
        }
        top, *cache = session.run([Name.TOP_IDS.value, *contract.present_names], feeds)
        past += len(block)
        produced.append(int(top[0, 0, 0]))
        block = [produced[-1]]
    return produced


def _make_row_feeds(contract: Contract, rows: list[int], past: int) -> dict[str, np.ndarray]:
    return {
        "input_ids": np.array([rows], np.int64),
        "position_ids": np.arange(past, past + len(rows), dtype=np.int64)[np.newaxis],
        "lookahead_embeddings": np.zeros((contract.k_max, contract.hidden_size), np.float32),
        "logits_rows": np.array([[len(rows) - 1]], np.int64),
    }


@pytest.mark.parametrize(
    "form",
    [PLAIN, (Precision.BF16, CacheForm.SCATTER), (Precision.INT8, CacheForm.CONCAT)],
)
def test_equal_models_build_to_equal_bytes(
    form: Form,
    report_of: Callable[..., BuildReport],
    checkpoint_of: Callable[[Variant], Path],
    tmp_path: Path,
) -> None:
    variant = ("llama", True)
    precision, cache_form = form
    again = build(
        BuildOptions(
            model=str(checkpoint_of(variant)),
            lookahead_lengths=(2, 4),
            precision=precision,
            cache_form=cache_form,
            out=tmp_path / "again",
        )
    )
    assert again.manifest.files == report_of(variant, form).manifest.files


@pytest.mark.parametrize("cache_form", CacheForm)
def test_float_precisions_have_the_same_nodes_but_casts(
    cache_form: CacheForm, report_of: Callable[..., BuildReport]
) -> None:
    graphs = {
        precision: ir.load(
            report_of(VARIANTS[0], (precision, cache_form)).bundle / GRAPH_PATH
        ).graph
        for precision in (Precision.FP32, Precision.FP16, Precision.BF16)
    }
    operators = {
        precision: [node.op_type for node in graph if node.op_type != "Cast"]
        for precision, graph in graphs.items()
    }
    assert operators[Precision.FP16] == operators[Precision.BF16] == operators[Precision.FP32]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_kinds_agree_with_pytorch(
    make_checkpoint: Callable[..., Path], tmp_path: Path, rope: dict[str, object]
) -> None:
    folder = make_checkpoint(num_hidden_layers=1, rope_parameters=rope)
    report = build(BuildOptions(model=str(folder), lookahead_lengths=(2,), out=tmp_path / "out"))
    assert report.manifest.model.rope.kind == rope["rope_type"]
    assert report.manifest.model.rope.parameters["factor"] == rope["factor"]
    logits = next(check for check in report.manifest.checks if check.name == "logits")
    assert logits.value < 1e-5


def test_inactive_window_exports_as_full_attention(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_checkpoint("mistral", num_hidden_layers=1, sliding_window=64)
    report = build(
        BuildOptions(model=str(folder), lookahead_lengths=(1,), out=tmp_path / "out", context=64)
    )
    assert report.manifest.model.context == 64
    assert report.manifest.model.sliding_window is None
    assert (
        load_checkpoint(
            find_model(str(folder), revision=None, allow_bin=False), context=64
        ).config.sliding_window
        == 64
    )
