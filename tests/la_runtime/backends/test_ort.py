"""ONNX Runtime keeps the seam's promises, and its own about copies and capacity."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from la_runtime.backends import open_backend
from la_runtime.backends.base import CacheSizing, Outputs
from la_runtime.backends.ort import OrtBackend, grown_capacity
from la_runtime.bundle import GRAPH_PATH, open_bundle
from la_runtime.errors import UsageError
from tests.la_runtime.backends.conformance import BackendConformance, run

# Float sums run in another order for other widths; observed 2e-6 on logits of a range of 4.
LOGIT_TOLERANCE = 1e-4


class TestOrt(BackendConformance):
    tolerance = LOGIT_TOLERANCE

    @pytest.fixture
    def backend(self, tiny_bundle):
        backend = open_backend("ort-cpu", open_bundle(tiny_bundle), threads=1)
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

        with pytest.raises(KeyError):
            scores.logits()
        with pytest.raises(KeyError):
            scores.logsumexp()


@pytest.mark.parametrize(
    ("outputs", "computed"),
    [
        (Outputs.NONE, set()),
        (Outputs.TOP, {"TopK"}),
        (Outputs.TOP | Outputs.LOGSUMEXP, {"TopK", "ReduceLogSumExp"}),
    ],
)
def test_scores_that_are_not_asked_for_are_not_computed(tiny_bundle, tmp_path, outputs, computed):
    """ONNX Runtime's own profile of the pass names the operators that ran."""
    bundle = open_bundle(tiny_bundle)
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = ort.InferenceSession(
        str(bundle.path(GRAPH_PATH)), options, providers=["CPUExecutionProvider"]
    )
    contract = bundle.manifest.contract
    vectors = np.zeros((contract.k_max, contract.hidden_size), dtype=np.float32)
    backend = OrtBackend(session, contract, vectors)

    run(backend, backend.allocate(1, CacheSizing.STEPPED), [[1, 2, 3]], outputs=outputs)

    events = json.loads(Path(session.end_profiling()).read_text())
    operators = {event.get("args", {}).get("op_name") for event in events}
    assert "Attention" in operators
    assert operators & {"TopK", "ReduceLogSumExp"} == computed
    assert ("GatherElements" in operators) == bool(outputs), "the head runs only for scores"


@pytest.mark.parametrize("needed", [1, 127, 128, 129, 1000, 1067, 5000, 100_000])
def test_capacity_grows_by_at_most_128_places_or_12_percent(needed):
    capacity = grown_capacity(needed)

    assert needed <= capacity <= needed + max(128, 0.12 * needed)


def test_an_unknown_backend_is_refused(tiny_bundle):
    with pytest.raises(UsageError, match="unknown backend 'cuda'; expected one of: ort-cpu"):
        open_backend("cuda", open_bundle(tiny_bundle), threads=1)
