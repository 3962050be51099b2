"""Bundles with an adapter: lookahead rows are adapted, and not a bit of a token's row is."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

from la_export.bench.overhead import time_steps
from la_export.graph.session import GraphSession
from la_export.lookahead import read_lookaheads, write_lookaheads
from la_export.lookahead_choice import SHIPPED_FOLDER, find_shipped
from la_export.options import BuildOptions, Precision
from la_export.pipeline import build
from la_export.verify.findings import Status
from la_export.verify.ladder import QUICK
from la_export.verify.source_model import open_source
from la_export.verify.verification import VerifyOptions, verify
from la_runtime.backends.lookahead_vectors import load_lookahead_vectors
from la_runtime.bundle import LOOKAHEAD_PATH, Bundle, open_bundle
from la_runtime.contract import CacheForm, Name
from la_runtime.errors import BundleError, DigestError, UsageError
from la_runtime.generation import Engine
from la_runtime.layout import GroupMask, Layout
from la_runtime.sampling import SamplingParams
from tests.la_export.adapters import write_random_lookaheads
from tests.tiny_models import make_tiny_checkpoint

K = 3
FORMS = [
    (Precision.FP32, CacheForm.CONCAT),
    (Precision.FP32, CacheForm.SCATTER),
    (Precision.FP16, CacheForm.CONCAT),
    (Precision.INT8, CacheForm.CONCAT),
    (Precision.INT4, CacheForm.CONCAT),
]
PROMPTS = [[5, 9, 3, 30, 31, 5, 9], [7, 7, 7, 1], list(range(40, 70))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("adapted") / "checkpoint", seed=4)


@pytest.fixture(scope="module")
def lookaheads(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("lookaheads") / "random.safetensors"
    return write_random_lookaheads(checkpoint, path, k=K)


@pytest.fixture(scope="module")
def bundle_of(checkpoint, lookaheads, tmp_path_factory):
    built = {}

    def find(precision, form, *, is_adapted):
        key = (precision, form, is_adapted)
        if key not in built:
            options = BuildOptions(
                model=str(checkpoint),
                lookahead_lengths=(K,),
                precision=precision,
                cache_form=form,
                lookahead=str(lookaheads) if is_adapted else "untuned",
                prefill_chunk=32,
                out=tmp_path_factory.mktemp("bundles") / "bundle",
            )
            built[key] = build(options).bundle
        return built[key]

    return find


@pytest.fixture(scope="module")
def packed(checkpoint, lookaheads, tmp_path_factory):
    options = BuildOptions(
        model=str(checkpoint),
        lookahead_lengths=(K,),
        precision=Precision.INT8,
        lookahead=str(lookaheads),
        packed=True,
        out=tmp_path_factory.mktemp("packed") / "bundle",
    )
    return build(options).bundle


def graphs(bundle):
    manifest = open_bundle(bundle).manifest
    return [
        (manifest.contract, bundle / manifest.graph),
        *((v.contract_of(manifest.contract), bundle / v.path) for v in manifest.variants),
    ]


def make_feeds(contract, *, with_lookaheads, seed=0):
    """A block of which every fourth row may be a lookahead, all seeing what is before them."""
    rng = np.random.default_rng(seed)
    batch, block, past, capacity = 2, 9, 4, contract.capacity or 32
    is_scatter = contract.cache_form is CacheForm.SCATTER
    keys = capacity if is_scatter else past + block
    ids = rng.integers(0, contract.vocab_size, (batch, block))
    if with_lookaheads:
        ids[:, 3::4] = contract.vocab_size + rng.integers(0, contract.k_max, ids[:, 3::4].shape)
    sees = np.arange(keys) <= past + np.arange(block)[:, np.newaxis]
    if with_lookaheads:  # nobody but itself sees a lookahead
        for column in range(3, block, 4):
            sees[column + 1 :, past + column] = False
    else:
        for column in range(3, block, 4):
            sees[np.arange(block) != column, past + column] = False
    dtype = np.float16 if "16" in contract.compute_dtype.value else np.float32
    masked = -1e4 if dtype is np.float16 else -1e9
    mask = np.where(sees, 0, masked).astype(dtype)
    feeds = {
        Name.INPUT_IDS: ids,
        Name.POSITION_IDS: np.broadcast_to(past + np.arange(block), (batch, block)).copy(),
        Name.ATTENTION_MASK: np.broadcast_to(mask, (batch, 1, block, keys)).copy(),
        Name.LOOKAHEAD_EMBEDDINGS: rng.normal(size=(contract.k_max, contract.hidden_size)).astype(
            dtype
        ),
        Name.LOGITS_ROWS: np.broadcast_to(np.arange(block), (batch, block)).copy(),
    }
    cache = np.random.default_rng(9)
    for spec in contract.inputs:
        if spec.name in feeds:
            continue
        if spec.name == Name.WRITE_INDEX:
            places = past + np.arange(block)
            shape = [batch] if len(spec.axes) == 1 else [batch, block]
            feeds[spec.name] = np.broadcast_to(
                places[0] if len(shape) == 1 else places, shape
            ).copy()
            continue
        sizes = {"batch": batch, "past": past, "keys": keys}
        axes = [axis if isinstance(axis, int) else sizes[axis.value] for axis in spec.axes]
        feeds[spec.name] = cache.normal(size=axes).astype(dtype)
    return feeds


def token_rows():
    return [row for row in range(9) if row % 4 != 3]


@pytest.mark.parametrize(("precision", "form"), FORMS)
@pytest.mark.parametrize("with_lookaheads", [True, False])
def test_rows_of_tokens_have_the_bits_that_they_have_without_an_adapter(
    bundle_of, precision, form, with_lookaheads
):
    plain = graphs(bundle_of(precision, form, is_adapted=False))
    adapted = graphs(bundle_of(precision, form, is_adapted=True))
    assert len(plain) == len(adapted) == 2
    for (contract, path), (_, other) in zip(plain, adapted, strict=True):
        feeds = make_feeds(contract, with_lookaheads=with_lookaheads)
        expected, found = (GraphSession(p, 1).run(feeds) for p in (path, other))
        rows = token_rows() if with_lookaheads else list(range(9))
        logits, truth = found[Name.LOGITS], expected[Name.LOGITS]
        assert np.array_equal(logits[:, rows], truth[:, rows])
        if with_lookaheads:
            slots = [row for row in range(9) if row % 4 == 3]
            assert np.abs(logits[:, slots].astype(np.float32) - truth[:, slots]).max() > 1e-2


def test_the_portable_graph_chooses_by_row_and_the_lean_one_gathers(bundle_of):
    bundle = bundle_of(Precision.FP32, CacheForm.CONCAT, is_adapted=True)
    portable, lean = (ir.load(path).graph for _, path in graphs(bundle))

    assert sum(node.op_type == "GatherND" for node in portable) == 0
    num_products = 2 * 7
    assert sum(node.op_type == "Where" for node in portable) >= num_products
    added = [n for n in lean if n.op_type == "ScatterND" and "reduction" in n.attributes]
    assert len(added) == num_products
    assert sum(node.op_type == "GatherND" for node in lean) == 2 * 4


@pytest.mark.parametrize(("precision", "form"), FORMS)
def test_an_adapted_bundle_generates_what_a_plain_one_does(bundle_of, precision, form):
    results = {}
    for is_adapted in (False, True):
        bundle = bundle_of(precision, form, is_adapted=is_adapted)
        for k in (0, K):
            with Engine.open(bundle, threads=1) as engine:
                params = SamplingParams(max_new_tokens=24, k=k, seed=3)
                texts = [r.token_ids for r in engine.generate(PROMPTS, [params] * len(PROMPTS))]
                results[is_adapted, k] = texts
    # Half precision and int4 leave near ties to the width of a pass; plain passes have one.
    assert results[False, 0] == results[True, 0]
    if precision in (Precision.FP32, Precision.INT8):
        assert results[True, K] == results[True, 0]


@pytest.mark.parametrize(("precision", "form"), FORMS)
def test_an_adapted_bundle_is_verified(bundle_of, checkpoint, precision, form):
    bundle = bundle_of(precision, form, is_adapted=True)

    report, _ = verify(
        VerifyOptions(bundle=bundle, settings=QUICK, threads=1),
        open_source=lambda opened: open_source(opened, str(checkpoint), threads=1),
    )

    assert [result for result in report.results if result.status is not Status.PASSED] == []


def test_the_manifest_says_what_the_lookaheads_are(bundle_of, lookaheads):
    manifest = open_bundle(bundle_of(Precision.FP32, CacheForm.CONCAT, is_adapted=True)).manifest

    assert manifest.lookahead.origin == "at random"
    assert manifest.lookahead.num_adapter_weights == read_lookaheads(lookaheads).adapter.num_weights
    assert "lookahead" not in manifest.recipe
    plain = open_bundle(bundle_of(Precision.FP32, CacheForm.CONCAT, is_adapted=False)).manifest
    assert plain.recipe["lookahead"] == "untuned"
    assert plain.lookahead.num_adapter_weights is None


def try_build(checkpoint, tmp_path, lookahead, *, k=K):
    return build(
        BuildOptions(
            model=str(checkpoint),
            lookahead_lengths=(k,),
            lookahead=str(lookahead),
            out=tmp_path / "bundle",
        )
    )


def test_lookaheads_of_another_model_are_refused(checkpoint, lookaheads, tmp_path):
    other = make_tiny_checkpoint(tmp_path / "other", seed=5)

    with pytest.raises(UsageError, match=r"were tuned for weights [0-9a-f]{12}, this model has"):
        try_build(other, tmp_path, lookaheads)
    assert not (tmp_path / "bundle").exists()


def test_lookaheads_for_a_smaller_k_are_refused(checkpoint, lookaheads, tmp_path):
    with pytest.raises(UsageError, match=r"were tuned for k up to 3, --k 4 needs more"):
        try_build(checkpoint, tmp_path, lookaheads, k=4)


def test_lookaheads_of_another_shape_are_refused(checkpoint, lookaheads, tmp_path):
    weights = read_lookaheads(lookaheads)
    narrow = dataclasses.replace(weights, vectors=weights.vectors[:, :8])
    path = tmp_path / "narrow.safetensors"
    write_lookaheads(path, narrow)

    with pytest.raises(UsageError, match=r"have 8 components, expected 64"):
        try_build(checkpoint, tmp_path, path)


def test_an_adapter_of_other_layers_is_refused(checkpoint, lookaheads, tmp_path):
    weights = read_lookaheads(lookaheads)
    pairs = list(weights.adapter.pairs)
    pairs[0] = dataclasses.replace(pairs[0], layers=("no", "such", "layers"))
    path = tmp_path / "other.safetensors"
    write_lookaheads(
        path,
        dataclasses.replace(
            weights, adapter=dataclasses.replace(weights.adapter, pairs=tuple(pairs))
        ),
    )

    with pytest.raises(UsageError, match=r"adapt the layer no, which this model does not have"):
        try_build(checkpoint, tmp_path, path)


def test_nothing_is_shipped_for_a_model_that_nobody_knows(checkpoint, tmp_path):
    assert find_shipped("0" * 64) is None
    with pytest.raises(UsageError, match="no tuned lookaheads are shipped for this model"):
        try_build(checkpoint, tmp_path, "shipped")


def test_shipped_lookaheads_are_named_after_their_model():
    for path in SHIPPED_FOLDER.glob("*.safetensors"):
        weights = read_lookaheads(path)
        assert find_shipped(weights.model_digest) == path
        assert path.stat().st_size <= 10_000_000


def test_a_bundle_whose_lookaheads_were_exchanged_is_refused(
    checkpoint, bundle_of, lookaheads, tmp_path
):
    bundle = build(
        BuildOptions(
            model=str(checkpoint),
            lookahead_lengths=(K,),
            lookahead=str(lookaheads),
            out=tmp_path / "bundle",
        )
    ).bundle
    other = write_random_lookaheads(checkpoint, tmp_path / "o.safetensors", k=K, seed=1)
    (bundle / LOOKAHEAD_PATH).write_bytes(other.read_bytes())

    with pytest.raises((BundleError, DigestError)):
        Engine.open(bundle)


def test_a_packed_bundle_has_a_graph_for_passes_without_lookaheads(packed):
    manifest = open_bundle(packed).manifest
    adapted = manifest.variant_for("ort-cpu")
    tokens = manifest.tokens_only_variant("ort-cpu")

    assert [adapted, tokens] == list(manifest.variants)
    graph = ir.load(packed / tokens.path).graph
    assert not [n for n in graph if n.op_type == "GatherND"]
    assert not [name for name in graph.initializers if "adapter" in name]
    assert (packed / tokens.path).stat().st_size < (packed / adapted.path).stat().st_size
    names = [check.name for check in manifest.checks]
    assert "ort_cpu_tokens_only" in names


def test_passes_run_in_the_graph_that_they_need(packed):
    with Engine.open(packed, threads=1) as engine:
        backend = engine.backend
        runs = {"all": 0, "tokens": 0}
        for name, attribute in (("all", "session"), ("tokens", "tokens_only")):
            setattr(backend, attribute, Counting(getattr(backend, attribute), runs, name))
        plain = [r.token_ids for r in engine.generate(PROMPTS, k=0, max_new_tokens=12)]
        assert runs["all"] == 0
        assert runs["tokens"] > 12
        before = runs["tokens"]
        looking = [r.token_ids for r in engine.generate(PROMPTS, k=K, max_new_tokens=12)]
        assert runs["all"] > 3
        assert runs["tokens"] <= before + len(PROMPTS)  # chunks of prompts, if any
        planned = [r.token_ids for r in engine.generate(PROMPTS, max_new_tokens=12)]

    assert plain == looking == planned


class Counting:
    """A session that counts its runs."""

    def __init__(self, session, runs, name):
        self._session, self._runs, self._name = session, runs, name

    def run_with_iobinding(self, *args):
        self._runs[self._name] += 1
        return self._session.run_with_iobinding(*args)

    def __getattr__(self, name):
        return getattr(self._session, name)


def test_a_packed_adapted_bundle_is_verified(packed, checkpoint):
    report, _ = verify(
        VerifyOptions(bundle=packed, settings=QUICK, threads=1),
        open_source=lambda opened: open_source(opened, str(checkpoint), threads=1),
    )

    assert [result for result in report.results if result.status is not Status.PASSED] == []


def test_vectors_of_another_group_mask_or_model_are_refused(packed):
    bundle = open_bundle(packed)
    manifest = bundle.manifest
    causal = manifest.lookahead.model_copy(update={"group_mask": GroupMask.CAUSAL})
    foreign = manifest.model.model_copy(update={"source_digest": "0" * 64})

    for changes, what in (({"lookahead": causal}, "group_mask"), ({"model": foreign}, "model_di")):
        other = Bundle(packed, manifest.model_copy(update=changes))
        with pytest.raises(BundleError, match=f"was made for the {what}.*, the bundle has"):
            load_lookahead_vectors(other)
    assert load_lookahead_vectors(bundle).shape == (K, 64)


@pytest.mark.parametrize("k", [0, K])
def test_steps_are_timed_in_whichever_graph_they_run(packed, k):
    with Engine.open(packed, threads=1) as engine:
        sessions = engine.backend.session, engine.backend.tokens_only
        found = time_steps(engine, [PROMPTS[0]], k=k, layout=Layout.ROOT_ONLY, num_tokens=6)

        assert 0 < found.pass_s <= found.step_s
        assert (engine.backend.session, engine.backend.tokens_only) == sessions
