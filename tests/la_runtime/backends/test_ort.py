"""ONNX Runtime keeps the seam's promises, and its own about copies and capacity."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from la_export.verify.epsilon import measure_epsilon
from la_runtime.backends import open_backend
from la_runtime.backends.base import CacheSizing, Outputs, PassLimits
from la_runtime.backends.ort import OrtBackend
from la_runtime.backends.ort_cache import ConcatCache, HostCache
from la_runtime.backends.places import grown_capacity
from la_runtime.batch import BlockPolicy
from la_runtime.bundle import Bundle, open_bundle
from la_runtime.contract import CacheForm, Dtype, KvOrder, Name, RowPlaces
from la_runtime.errors import BundleError, ExitCode, HostError, UsageError
from tests.la_runtime.backends.conformance import ALL, CONTEXT, BackendConformance, run

# Float sums run in another order for other widths and other numbers of keys. Observed on logits of
# a range of 7: 2e-6 in fp32; in fp16 1.5e-3, where a last place of such a logit is 4e-3.
LOGIT_TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2}
FORMS = [(precision, form) for precision in LOGIT_TOLERANCES for form in CacheForm]
SCATTER_FORMS = [form for form in FORMS if form[1] is CacheForm.SCATTER]
# What runs here in fp32: the lean variant, which writes in place, too, and has no fixed capacity.
LEAN = ("fp32", KvOrder.SEQUENCE_MAJOR)
ALL_FORMS = [*FORMS, LEAN]
IN_PLACE_FORMS = [*SCATTER_FORMS, LEAN]


def name_form(form: tuple[str, str]) -> str:
    return "-".join(form)


def portable_only(bundle: Bundle) -> Bundle:
    """The bundle without its variants, so that its portable graph runs."""
    return Bundle(bundle.root, bundle.manifest.model_copy(update={"variants": ()}))


@pytest.fixture
def bundle_of(tiny_bundle_of):
    def find(precision: str, kind: str) -> Bundle:
        if (precision, kind) == LEAN:
            return open_bundle(tiny_bundle_of(precision, CacheForm.CONCAT))
        return portable_only(open_bundle(tiny_bundle_of(precision, kind)))

    return find


class TestOrt(BackendConformance):
    @pytest.fixture(params=ALL_FORMS, ids=name_form)
    def backend(self, request, bundle_of):
        precision, _ = request.param
        self.tolerance = LOGIT_TOLERANCES[precision]
        backend = open_backend("ort-cpu", bundle_of(*request.param), threads=1)
        yield backend
        backend.close()

    def test_commit_keeps_the_accepted_rows_and_touches_nothing_before_them(self, backend, tokens):
        state = backend.allocate(2, CacheSizing.STEPPED)
        run(backend, state, [tokens[12:15], tokens[15:17]])
        backend.commit(state, [range(3), range(2)])
        before = state.places.copy()
        run(backend, state, [tokens[:6], tokens[6:12]])
        block = written_rows(state)
        backend.commit(state, [(0, 2, 3), (1,)])

        assert np.array_equal(state.places[:, 0, :, :3], before[:, 0, :, :3])
        assert np.array_equal(state.places[:, 1, :, :2], before[:, 1, :, :2])
        assert np.array_equal(state.places[:, 0, :, 3:6], block[0][:, :, [0, 2, 3]])
        assert np.array_equal(state.places[:, 1, :, 2:3], block[1][:, :, [1]])

    def test_buffers_are_reused_between_passes_of_the_same_shape(self, backend, tokens):
        state = backend.allocate(1, CacheSizing.STEPPED)
        addresses = set()
        for position in range(8):
            scores = run(backend, state, [tokens[position : position + 1]])
            backend.commit(state, [(0,)])
            arrays = (state.places, *scores.top(), scores.logits())
            addresses.add(tuple(array.ctypes.data for array in arrays))

        assert len(addresses) == 1

    def test_scores_that_are_not_asked_for_are_not_there(self, backend, tokens):
        state = backend.allocate(1, CacheSizing.STEPPED)

        scores = run(backend, state, [tokens[:3]], outputs=Outputs.TOP)

        for read in (scores.logits, scores.logsumexp):
            with pytest.raises(KeyError):
                read()


class TestTiedOrt(BackendConformance):
    tolerance = LOGIT_TOLERANCES["fp32"]

    @pytest.fixture
    def backend(self, tied_bundle):
        backend = open_backend("ort-cpu", open_bundle(tied_bundle), threads=1)
        yield backend
        backend.close()


def written_rows(state: HostCache) -> list[np.ndarray]:
    """Per sequence, [2 * layers, kv_heads, block, head_dim] K/V that the last pass made."""
    if isinstance(state, ConcatCache):
        return [state.block[:, sequence].copy() for sequence in range(len(state.lengths))]
    return [
        state.places[:, sequence, :, length:].copy()
        for sequence, length in enumerate(state.lengths)
    ]


def open_session(bundle: Bundle, **options: Any) -> OrtBackend:
    """As `OrtBackend.open`, with options for ONNX Runtime; lookahead vectors of zeros."""
    manifest = bundle.manifest
    variant = manifest.variant_for("ort-cpu")
    contract = manifest.contract if variant is None else variant.contract_of(manifest.contract)
    wanted = ort.SessionOptions()
    for name, value in options.items():
        setattr(wanted, name, value)
    session = ort.InferenceSession(
        str(bundle.path(manifest.graph if variant is None else variant.path)),
        wanted,
        providers=["CPUExecutionProvider"],
    )
    vectors = np.zeros((contract.k_max, contract.hidden_size))
    return OrtBackend(session, contract, vectors, omits=() if variant is None else variant.omits)


@pytest.mark.parametrize("form", IN_PLACE_FORMS, ids=name_form)
def test_a_pass_writes_its_rows_into_the_cache_itself_and_copies_nothing(bundle_of, form, capfd):
    """Against the slow way: a second buffer, of which ONNX Runtime then says that it copies."""
    backend = open_session(bundle_of(*form), log_severity_level=2)
    capfd.readouterr()

    def second_pass(present: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, str]:
        state = backend.allocate(2, CacheSizing.STEPPED)
        run(backend, state, [[1, 2, 3], [4, 5]])
        backend.commit(state, [range(3), range(2)])
        capfd.readouterr()
        if present is not None:
            bind_past = state.binding.bind_past

            def bind_apart(past: np.ndarray) -> None:
                bind_past(past)
                state.memory.view = present  # what is bound as present

            state.binding.bind_past = bind_apart
        logits = run(backend, state, [[6, 7, 8], [9]]).logits().copy()
        return logits, state.places.copy(), capfd.readouterr().err

    logits, cache, said = second_pass(None)
    truth, present, said_apart = second_pass(np.empty_like(cache))

    assert np.array_equal(logits, truth)
    assert np.array_equal(cache, present)
    if backend.contract.row_places is RowPlaces.BEHIND:  # `ScatterND` copies without a word
        assert "in-place optimization not activated" in said_apart
    assert "TensorScatter" not in said


@pytest.mark.parametrize("form", IN_PLACE_FORMS, ids=name_form)
def test_a_pass_writes_no_place_but_those_of_its_block(bundle_of, form):
    backend = open_backend("ort-cpu", bundle_of(*form), threads=1)
    state = backend.allocate(2, CacheSizing.STEPPED)
    run(backend, state, [[1, 2, 3], [4]])
    backend.commit(state, [range(3), range(1)])
    state.spoil_unused(1)
    before = state.places.copy()

    run(backend, state, [[5, 6], [7, 8]])

    changed = (state.places != before).any(axis=(0, 2, 4))  # [batch, places]
    assert [np.flatnonzero(row).tolist() for row in changed] == [[3, 4], [1, 2]]


@pytest.mark.parametrize("form", ALL_FORMS, ids=name_form)
def test_only_a_cache_of_fixed_capacity_limits_passes(bundle_of, form):
    bundle = bundle_of(*form)
    contract, context = bundle.manifest.contract, bundle.manifest.model.context
    backend = OrtBackend.open(bundle, threads=1)

    if form[1] is not CacheForm.SCATTER:
        assert backend.limits == PassLimits()
    else:
        assert backend.limits == PassLimits(block=contract.capacity - context, places=context)


@pytest.mark.parametrize("field", ["compute_dtype", "kv_dtype"])
def test_bf16_is_refused_by_name_before_the_graph_is_read(tiny_bundle, field):
    bundle = open_bundle(tiny_bundle)
    contract = replace(bundle.manifest.contract, **{field: Dtype.BFLOAT16})
    manifest = bundle.manifest.model_copy(
        update={"contract": contract, "graph": "onnx/none.onnx", "variants": ()}
    )

    with pytest.raises(
        HostError, match="this bundle is bf16, and ONNX Runtime has no bf16"
    ) as found:
        OrtBackend.open(Bundle(bundle.root, manifest), threads=1)

    assert found.value.exit_code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize("outputs", [Outputs.NONE, Outputs.TOP, Outputs.TOP | Outputs.LOGITS])
def test_scores_that_are_not_asked_for_are_not_computed(bundle_of, tmp_path, outputs):
    """ONNX Runtime's own profile of the pass: which operators ran, and over how many rows."""
    backend = open_session(
        bundle_of(*LEAN),
        enable_profiling=True,
        profile_file_prefix=str(tmp_path / "profile"),
    )

    run(backend, backend.allocate(1, CacheSizing.STEPPED), [[1, 2, 3]], outputs=outputs)

    events = json.loads(Path(backend.session.end_profiling()).read_text())
    sizes = {
        event["args"]["op_name"]: int(event["args"]["output_size"])
        for event in events
        if "output_size" in event.get("args", {})
    }
    assert sizes["Attention"] > 0
    assert "ReduceLogSumExp" not in sizes
    assert (sizes["TopK"] > 0) == bool(outputs), "without scores the head sees no row"


def test_logsumexp_is_the_same_from_the_graph_and_from_the_logits(tiny_bundle_of):
    """In fp16, where the variant is the portable graph without it."""
    bundle = open_bundle(tiny_bundle_of("fp16", CacheForm.CONCAT))
    found = []
    for opened in (portable_only(bundle), bundle):
        backend = OrtBackend.open(opened, threads=1)
        state = backend.allocate(1, CacheSizing.STEPPED)
        scores = run(backend, state, [[1, 2, 3]], outputs=Outputs.TOP | Outputs.LOGSUMEXP)
        found.append((scores.logsumexp().copy(), scores.top()[1].copy()))

    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    assert np.array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 1}, "inputs, the contract"),
        ({"num_layers": 3}, "inputs, the contract"),
        ({"head_dim": 8}, r"input past_key_values.0.key is tensor\(float\)"),
        ({"num_kv_heads": 1}, "input past_key_values.0.key"),
        ({"vocab_size": 310}, "output logits"),
        ({"top_c": 4}, "output top_ids"),
        ({"k_max": 2}, "input lookahead_embeddings"),
        (
            {"compute_dtype": Dtype.FLOAT16},
            r"input attention_mask is tensor\(float\) .* the contract says tensor\(float16\)",
        ),
        ({"kv_dtype": Dtype.FLOAT16}, r"input past_key_values.0.key is tensor\(float\)"),
        ({"cache_form": CacheForm.SCATTER, "capacity": 300}, "inputs, the contract"),
    ],
)
def test_a_graph_that_is_not_the_contracts_is_refused_on_opening(tiny_bundle, change, message):
    bundle = portable_only(open_bundle(tiny_bundle))
    contract = replace(bundle.manifest.contract, **change)
    manifest = bundle.manifest.model_copy(update={"contract": contract})

    with pytest.raises(BundleError, match=message):
        OrtBackend.open(Bundle(bundle.root, manifest), threads=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_order": None}, "input past_key_values.0.key"),
        ({"cache_form": None, "row_places": None}, "inputs, the contract"),
        ({"row_places": None}, "input write_index"),
        ({"omits": ()}, "outputs, the contract"),
    ],
)
def test_a_variant_that_is_not_what_the_manifest_says_is_refused(tiny_bundle, change, message):
    bundle = open_bundle(tiny_bundle)
    (variant,) = bundle.manifest.variants
    manifest = bundle.manifest.model_copy(update={"variants": (variant.model_copy(update=change),)})

    with pytest.raises(BundleError, match=message):
        OrtBackend.open(Bundle(bundle.root, manifest), threads=1)


def test_a_graph_of_another_capacity_is_refused_on_opening(tiny_bundle_of):
    bundle = portable_only(open_bundle(tiny_bundle_of("fp32", CacheForm.SCATTER)))
    contract = replace(bundle.manifest.contract, capacity=300)
    manifest = bundle.manifest.model_copy(update={"contract": contract})

    with pytest.raises(BundleError, match=r"input attention_mask .* '300'"):
        OrtBackend.open(Bundle(bundle.root, manifest), threads=1)


def test_lookahead_vectors_are_rounded_to_the_compute_dtype(tiny_bundle_of):
    backend = OrtBackend.open(open_bundle(tiny_bundle_of("fp16", CacheForm.CONCAT)), threads=1)
    vectors = np.full(backend.lookahead_embeddings.shape, 1 / 3)

    backend.set_lookahead_embeddings(vectors)

    assert backend.lookahead_embeddings.dtype == np.float16
    assert (backend.lookahead_embeddings == np.float16(1 / 3)).all()


def test_lookahead_vectors_are_copied_and_must_be_finite(tiny_bundle):
    backend = OrtBackend.open(open_bundle(tiny_bundle), threads=1)
    vectors = backend.lookahead_embeddings + 1
    backend.set_lookahead_embeddings(vectors)
    vectors[:] = np.nan

    assert np.isfinite(backend.lookahead_embeddings).all()
    with pytest.raises(BundleError, match="hold NaN, infinity or numbers too large for float32"):
        backend.set_lookahead_embeddings(vectors)
    with pytest.raises(BundleError, match=r"have shape \(1, .*expected"):
        backend.set_lookahead_embeddings(vectors[:1])


def test_a_closed_backend_says_so_and_may_be_closed_again(tiny_bundle):
    backend = OrtBackend.open(open_bundle(tiny_bundle), threads=1)
    state = backend.allocate(1, CacheSizing.STEPPED)
    backend.close()
    backend.close()

    with pytest.raises(UsageError, match="the engine is closed"):
        backend.allocate(1, CacheSizing.STEPPED)
    with pytest.raises(UsageError, match="the engine is closed"):
        run(backend, state, [[1]])


@pytest.mark.parametrize("needed", [1, 127, 128, 129, 1000, 1067, 5000, 100_000])
def test_capacity_grows_by_at_most_128_places_or_12_percent(needed):
    capacity = grown_capacity(needed)

    assert needed <= capacity <= needed + max(128, 0.12 * needed)


def test_an_unknown_backend_is_refused(tiny_bundle):
    with pytest.raises(UsageError, match="unknown backend 'cuda'; expected one of: ort-cpu, "):
        open_backend("cuda", open_bundle(tiny_bundle), threads=1)


@pytest.mark.parametrize("cache_form", CacheForm)
@pytest.mark.parametrize("outputs", [Outputs.TOP, ALL])
def test_no_float16_row_is_multiplied_alone(tiny_bundle_of, cache_form, outputs):
    """Blocks are padded to two rows, and a row that is scored alone is scored twice."""
    bundle = open_bundle(tiny_bundle_of("fp16", cache_form))
    backend = open_backend("ort-cpu", bundle, threads=1)
    assert BlockPolicy.within(backend.limits, k_max=4, widths=backend.widths).widths == (2,)
    state = backend.allocate(2, CacheSizing.STEPPED)

    one = run(backend, state, [[5], [6]], width=2, outputs=outputs)

    bound = state.binding.scores[Name.TOP_IDS]
    assert bound.shape[:2] == (2, 2)
    assert np.array_equal(bound[:, 0], bound[:, 1])
    assert [array.shape[1] for array in one.top()] == [1, 1]
    assert outputs is Outputs.TOP or one.logits().shape[:2] == (2, 1)
    assert backend.widths == (2,)
    backend.close()


def test_float16_in_scatter_is_equal_bit_for_bit_at_every_width(bundle_of):
    """Every key's column is its position, and no kernel is chosen by the number of rows."""
    backend = open_backend("ort-cpu", bundle_of("fp16", CacheForm.SCATTER), threads=1)
    text = np.random.default_rng(9).integers(0, backend.contract.vocab_size, 60).tolist()

    epsilon = measure_epsilon(backend, text, widths=(2, 3, 9, 25), context=CONTEXT)

    assert epsilon == 0.0
    backend.close()
