"""ONNX Runtime keeps the seam's promises, and its own about copies and capacity."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from la_runtime.backends import open_backend
from la_runtime.backends.base import CacheSizing, Outputs
from la_runtime.backends.ort import OrtBackend, grown_capacity
from la_runtime.bundle import Bundle, open_bundle
from la_runtime.errors import BundleError, UsageError
from tests.la_runtime.backends.conformance import BackendConformance, run

# Float sums run in another order for other widths; observed 2e-6 on logits of a range of 4.
LOGIT_TOLERANCE = 1e-4


class TestOrt(BackendConformance):
    tolerance = LOGIT_TOLERANCE

    @pytest.fixture(params=["tiny_bundle", "tied_bundle"])
    def backend(self, request):
        bundle = open_bundle(request.getfixturevalue(request.param))
        backend = open_backend("ort-cpu", bundle, threads=1)
        yield backend
        backend.close()

    def test_commit_copies_the_accepted_rows_and_nothing_else(self, backend, tokens):
        state = backend.allocate(2, CacheSizing.STEPPED)
        run(backend, state, [tokens[:6], tokens[6:12]])
        block = state.block.copy()
        backend.commit(state, [(0, 2, 3), (1,)])

        assert np.array_equal(state.places[:, 0, :, :3], block[:, 0][:, :, [0, 2, 3]])
        assert np.array_equal(state.places[:, 1, :, :1], block[:, 1][:, :, [1]])
        assert not state.places[:, 0, :, 3:].any()
        assert not state.places[:, 1, :, 1:].any()

    def test_buffers_are_reused_between_passes_of_the_same_shape(self, backend, tokens):
        state = backend.allocate(1, CacheSizing.STEPPED)
        addresses = set()
        for position in range(8):
            scores = run(backend, state, [tokens[position : position + 1]])
            backend.commit(state, [(0,)])
            arrays = (state.places, state.block, *scores.top(), scores.logits())
            addresses.add(tuple(array.ctypes.data for array in arrays))

        assert len(addresses) == 1

    def test_scores_that_are_not_asked_for_are_not_there(self, backend, tokens):
        state = backend.allocate(1, CacheSizing.STEPPED)

        scores = run(backend, state, [tokens[:3]], outputs=Outputs.TOP)

        for read in (scores.logits, scores.logsumexp):
            with pytest.raises(KeyError):
                read()


@pytest.mark.parametrize("outputs", [Outputs.NONE, Outputs.TOP, Outputs.TOP | Outputs.LOGITS])
def test_scores_that_are_not_asked_for_are_not_computed(tiny_bundle, tmp_path, outputs):
    """ONNX Runtime's own profile of the pass: which operators ran, and over how many rows."""
    bundle = open_bundle(tiny_bundle)
    (variant,) = bundle.manifest.variants
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = ort.InferenceSession(
        str(bundle.path(variant.path)), options, providers=["CPUExecutionProvider"]
    )
    contract = bundle.manifest.contract
    vectors = np.zeros((contract.k_max, contract.hidden_size), dtype=np.float32)
    backend = OrtBackend(session, contract, vectors, omits=variant.omits)

    run(backend, backend.allocate(1, CacheSizing.STEPPED), [[1, 2, 3]], outputs=outputs)

    events = json.loads(Path(session.end_profiling()).read_text())
    sizes = {
        event["args"]["op_name"]: int(event["args"]["output_size"])
        for event in events
        if "output_size" in event.get("args", {})
    }
    assert sizes["Attention"] > 0
    assert "ReduceLogSumExp" not in sizes
    assert (sizes["TopK"] > 0) == bool(outputs), "without scores the head sees no row"


def test_logsumexp_is_the_same_from_the_graph_and_from_the_logits(tiny_bundle):
    bundle = open_bundle(tiny_bundle)
    manifest = bundle.manifest
    full = ort.InferenceSession(
        str(bundle.path(manifest.graph)), providers=["CPUExecutionProvider"]
    )
    lean = OrtBackend.open(bundle, threads=1)
    portable = OrtBackend(full, manifest.contract, lean.lookahead_embeddings)
    found = []
    for backend in (portable, lean):
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
    ],
)
def test_a_graph_that_is_not_the_contracts_is_refused_on_opening(tiny_bundle, change, message):
    bundle = open_bundle(tiny_bundle)
    contract = replace(bundle.manifest.contract, **change)
    manifest = bundle.manifest.model_copy(update={"contract": contract})

    with pytest.raises(BundleError, match=message):
        OrtBackend.open(Bundle(bundle.root, manifest), threads=1)


def test_lookahead_vectors_are_copied_and_must_be_finite(tiny_bundle):
    backend = OrtBackend.open(open_bundle(tiny_bundle), threads=1)
    vectors = backend.lookahead_embeddings + 1
    backend.set_lookahead_embeddings(vectors)
    vectors[:] = np.nan

    assert np.isfinite(backend.lookahead_embeddings).all()
    with pytest.raises(BundleError, match="hold NaN or infinity"):
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
    with pytest.raises(UsageError, match="unknown backend 'cuda'; expected one of: ort-cpu"):
        open_backend("cuda", open_bundle(tiny_bundle), threads=1)
