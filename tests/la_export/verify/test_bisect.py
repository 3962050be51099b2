"""Planted faults are named at the layer they were planted in."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from la_export.reference import TorchReference
from la_export.verify.bisect import find_departure
from la_runtime.bundle import Bundle, open_bundle
from la_runtime.errors import BundleError, UsageError
from tests.tiny_models import FAMILIES, build_tiny_bundle, make_tiny_config, make_tiny_model

NUM_LAYERS = 4
LAYERS = (0, 2, 3)
TOKENS = [5, 17, 300, 42, 9, 9, 211, 64, 100, 7, 31]
POINTS = [
    "embedding",
    *(f"layer {layer} {part}" for layer in range(NUM_LAYERS) for part in ("attention", "mlp")),
    "final norm",
    "head",
]

Plant = Callable[[Path], None]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoint and bundle of four layers, built on first use."""
    folders: dict[tuple[str, bool], Path] = {}

    def find(family: str, *, tied: bool = False) -> Path:
        if (family, tied) not in folders:
            folder = tmp_path_factory.mktemp(family)
            build_tiny_bundle(
                folder, family, num_hidden_layers=NUM_LAYERS, tie_word_embeddings=tied
            )
            folders[family, tied] = folder
        return folders[family, tied]

    return find


@pytest.fixture(scope="module")
def reference_of(folder_of: Callable[..., Path]) -> Callable[..., TorchReference]:
    references: dict[tuple[str, bool], TorchReference] = {}

    def find(family: str, *, tied: bool = False) -> TorchReference:
        if (family, tied) not in references:
            checkpoint = folder_of(family, tied=tied) / "checkpoint"
            references[family, tied] = TorchReference.load(str(checkpoint))
        return references[family, tied]

    return find


@pytest.fixture
def faulty(folder_of: Callable[..., Path], tmp_path: Path) -> Callable[..., Bundle]:
    """A copy of a family's bundle, changed behind its digests' back."""

    def make(family: str, plant: Plant, *, tied: bool = False) -> Bundle:
        root = tmp_path / "bundle"
        shutil.copytree(folder_of(family, tied=tied) / "bundle", root)
        bundle = open_bundle(root)
        plant(bundle.path(bundle.manifest.graph))
        return bundle

    return make


def edit_weight(name: str, edit: Callable[[np.ndarray], np.ndarray]) -> Plant:
    """Rewrite one float32 weight in place, in the graph or in its data file."""

    def plant(graph: Path) -> None:
        model = onnx.load(graph, load_external_data=False)
        (tensor,) = (
            t for t in model.graph.initializer if t.name.removesuffix(".transposed") == name
        )
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            changed = edit(onnx.numpy_helper.to_array(tensor)).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(changed, tensor.name))
            onnx.save(model, graph)
            return
        where = {entry.key: entry.value for entry in tensor.external_data}
        weights = np.memmap(
            graph.parent / where["location"],
            dtype=np.float32,
            mode="r+",
            offset=int(where["offset"]),
            shape=tuple(tensor.dims),
        )
        weights[:] = edit(np.array(weights))
        weights.flush()

    return plant


def set_epsilon(norm: str, epsilon: float) -> Plant:
    def plant(graph: Path) -> None:
        model = onnx.load(graph, load_external_data=False)
        (node,) = (n for n in model.graph.node if norm in n.input)
        (attribute,) = (a for a in node.attribute if a.name == "epsilon")
        attribute.f = epsilon
        onnx.save(model, graph)

    return plant


def in_layer(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_good_bundle_departs_nowhere(family, folder_of, reference_of) -> None:
    found = find_departure(open_bundle(folder_of(family) / "bundle"), reference_of(family), TOKENS)

    assert found.layer is None
    assert [point.point for point in found.points] == POINTS
    assert found.difference == max(point.difference for point in found.points)
    assert 0 < found.difference < found.bound / 20
    assert not any(point.departs for point in found.points)


def test_a_tied_head_is_found_too(folder_of, reference_of) -> None:
    bundle = open_bundle(folder_of("llama", tied=True) / "bundle")

    assert find_departure(bundle, reference_of("llama", tied=True), TOKENS).layer is None


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("weight", "edit", "part"),
    [
        ("self_attn.q_proj.weight", np.transpose, "attention"),
        ("self_attn.v_proj.weight", lambda weight: 1.05 * weight, "attention"),
        ("mlp.down_proj.weight", np.zeros_like, "mlp"),
        ("post_attention_layernorm.weight", lambda weight: 1.05 * weight, "mlp"),
    ],
    ids=["transposed", "scaled", "zeroed", "norm"],
)
def test_a_wrong_weight_is_named(family, layer, weight, edit, part, faulty, reference_of) -> None:
    bundle = faulty(family, edit_weight(in_layer(layer, weight), edit))

    found = find_departure(bundle, reference_of(family), TOKENS)

    assert found.layer == f"layer {layer} {part}"
    first = POINTS.index(found.layer)
    assert found.difference == found.points[first].difference > found.bound
    assert [point.departs for point in found.points[: first + 1]] == [False] * first + [True]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("norm", "part"), [("input_layernorm", "attention"), ("post_attention_layernorm", "mlp")]
)
def test_a_wrong_epsilon_is_named(layer, norm, part, faulty, reference_of) -> None:
    """The same norm with epsilon 1e-2 in the place of 1e-6."""
    bundle = faulty("llama", set_epsilon(in_layer(layer, f"{norm}.weight"), 1e-2))

    found = find_departure(bundle, reference_of("llama"), TOKENS)

    assert found.layer == f"layer {layer} {part}"


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("bias", ["q_proj.bias", "v_proj.bias"])
def test_a_dropped_bias_is_named(layer, bias, faulty, reference_of) -> None:
    bundle = faulty("qwen2", edit_weight(in_layer(layer, f"self_attn.{bias}"), np.zeros_like))

    assert find_departure(bundle, reference_of("qwen2"), TOKENS).layer == f"layer {layer} attention"


@pytest.mark.parametrize(
    ("weight", "point"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.rotary_emb.inv_freq", "layer 0 attention"),
        ("model.norm.weight", "final norm"),
        ("lm_head.weight", "head"),
    ],
)
def test_a_fault_outside_the_layers_is_named(weight, point, faulty, reference_of) -> None:
    bundle = faulty("llama", edit_weight(weight, lambda values: 1.05 * values))

    assert find_departure(bundle, reference_of("llama"), TOKENS).layer == point


def test_a_shared_table_shows_where_it_is_read_first(faulty, reference_of) -> None:
    bundle = faulty("llama", edit_weight("lm_head.weight", lambda table: 1.05 * table), tied=True)

    assert find_departure(bundle, reference_of("llama", tied=True), TOKENS).layer == "embedding"


def test_one_wrong_row_of_the_table_shows_when_it_is_read(faulty, reference_of) -> None:
    def double_row(table: np.ndarray) -> np.ndarray:
        table[211] *= 2
        return table

    bundle = faulty("llama", edit_weight("model.embed_tokens.weight", double_row))
    reference = reference_of("llama")

    assert find_departure(bundle, reference, TOKENS).layer == "embedding"
    without = [token for token in TOKENS if token != 211]
    assert find_departure(bundle, reference, without).layer is None


def test_a_fault_of_far_positions_shows_where_it_stands(faulty, reference_of) -> None:
    """The slowest rotation is stopped, which moves a text at the first positions by a hair."""

    def stop_slowest(frequencies: np.ndarray) -> np.ndarray:
        return np.append(frequencies[:-1], np.float32(0.0))

    bundle = faulty("llama", edit_weight("model.rotary_emb.inv_freq", stop_slowest))
    split = [*range(len(TOKENS) - 1), bundle.manifest.model.context - 1]
    reference = reference_of("llama")

    near = find_departure(bundle, reference, TOKENS)
    far = find_departure(bundle, reference, TOKENS, position_ids=split)

    assert far.layer == "layer 0 attention"
    assert far.difference > 2 * near.difference


def test_what_is_no_number_departs(faulty, reference_of) -> None:
    plant = edit_weight(in_layer(1, "mlp.up_proj.weight"), lambda weight: weight * np.nan)

    found = find_departure(faulty("llama", plant), reference_of("llama"), TOKENS)

    assert found.layer == "layer 1 mlp"
    assert math.isnan(found.difference)


def test_the_bound_decides(folder_of, reference_of) -> None:
    bundle = open_bundle(folder_of("llama") / "bundle")

    found = find_departure(bundle, reference_of("llama"), TOKENS, bound=1e-9)

    assert found.layer == "layer 0 attention", "the embedding is looked up, not computed"
    assert found.bound == 1e-9


def test_nothing_is_written_and_nothing_is_printed(folder_of, reference_of, capfd) -> None:
    root = folder_of("llama") / "bundle"
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}

    find_departure(open_bundle(root), reference_of("llama"), TOKENS)

    after = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}
    assert after == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "a text of 0 tokens cannot be read; give 1 to 256 tokens"),
        ([1] * 257, "a text of 257 tokens cannot be read; give 1 to 256 tokens"),
        ([3, 320], "token id 320 is outside the vocabulary; ids go from 0 to 319"),
        ([-1], "token id -1 is outside the vocabulary"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(token_ids, message, folder_of, reference_of) -> None:
    bundle = open_bundle(folder_of("llama") / "bundle")

    with pytest.raises(UsageError, match=message):
        find_departure(bundle, reference_of("llama"), token_ids)


def test_another_model_is_refused(folder_of) -> None:
    bundle = open_bundle(folder_of("llama") / "bundle")
    other = TorchReference(make_tiny_model(make_tiny_config()))

    with pytest.raises(UsageError, match=r"it has \(2, 64, 320\) layers, .* \(4, 64, 320\)"):
        find_departure(bundle, other, TOKENS)


def rewire_last_sum(graph: Path) -> None:
    """The last MLP's sum becomes a product, and the stream ends there."""
    model = onnx.load(graph, load_external_data=False)
    [node for node in model.graph.node if node.op_type == "Add"][-1].op_type = "Mul"
    onnx.save(model, graph)


def replace_norms(graph: Path) -> None:
    model = onnx.load(graph, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "RMSNormalization":
            node.op_type = "LayerNormalization"
    onnx.save(model, graph)


def cut_short(graph: Path) -> None:
    graph.write_bytes(graph.read_bytes()[:-100])


def break_operator(graph: Path) -> None:
    model = onnx.load(graph, load_external_data=False)
    next(node for node in model.graph.node if node.op_type == "Sigmoid").op_type = "Sigmoids"
    onnx.save(model, graph)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (rewire_last_sum, "residual stream has 0 sums, expected 8, two a layer"),
        (replace_norms, "no residual stream behind its logits that ends in a norm"),
        (cut_short, r"model\.onnx cannot be read .*; rebuild the bundle"),
        (break_operator, "cannot load the graph of .*Sigmoids"),
    ],
)
def test_graphs_that_cannot_be_searched_are_refused(plant, message, faulty, reference_of) -> None:
    with pytest.raises(BundleError, match=message):
        find_departure(faulty("llama", plant), reference_of("llama"), TOKENS)
