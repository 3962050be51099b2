"""Faults of every kind, planted in a tiny bundle or in the runtime, and the rung that catches each.

Faults of the graph change a file and seal the bundle again, so that every digest is right.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from la_export.pipeline import BuildOptions, build
from la_export.verify.findings import Status
from la_export.verify.ladder import QUICK
from la_export.verify.source_model import open_source
from la_export.verify.verification import VerifyOptions, verify
from la_runtime import batch, block, choosing, layout
from la_runtime.backends.base import Outputs, StepInputs
from la_runtime.backends.ort import OrtBackend
from la_runtime.batch import Batch
from la_runtime.bundle import read_manifest, seal_bundle
from la_runtime.choosing import Chooser
from la_runtime.generation import Engine
from la_runtime.layout import StepRows
from la_runtime.masks import make_attention_mask
from la_runtime.sequence import TokenSequence
from la_runtime.stopping import Ending, FinishReason
from la_runtime.tokenizer import IncrementalDecoder
from tests.tiny_models import make_tiny_checkpoint

UNREAD = 200  # a token of no prompt, and of no text that decoding gives
SETTINGS = replace(QUICK, new_tokens=8, seeds=8, epsilon_positions=40)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of a family, holding `bundle` and `checkpoint`."""
    folders: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in folders:
            folder = tmp_path_factory.mktemp(family)
            checkpoint = make_tiny_checkpoint(folder / "checkpoint", family)
            if family == "qwen2":  # transformers normalizes text for this family, whatever the file
                _normalize(checkpoint / "tokenizer.json")
            options = BuildOptions(
                model=str(checkpoint), lookahead_lengths=(2, 4), out=folder / "bundle"
            )
            build(options)
            folders[family] = folder
        return folders[family]

    return find


def _normalize(path: Path) -> None:
    tokenizer = json.loads(path.read_text("utf-8")) | {"normalizer": {"type": "NFC"}}
    path.write_text(json.dumps(tokenizer), "utf-8")


@pytest.fixture
def sound(built):
    return built("llama")


def find_failures(bundle: Path, checkpoint: Path) -> dict[int, str]:
    """Number and explanation of every rung that failed; all others passed."""
    report, _ = verify(
        VerifyOptions(bundle=bundle, settings=SETTINGS, threads=1),
        open_source=lambda bundle: open_source(bundle, str(checkpoint), threads=1),
    )
    assert {result.status for result in report.results} <= {Status.PASSED, Status.FAILED}
    return {r.number: r.detail for r in report.results if r.status is Status.FAILED}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_sound_bundle_passes_every_rung(built, family):
    folder = built(family)

    assert find_failures(folder / "bundle", folder / "checkpoint") == {}


def plant_in_rows(monkeypatch, change: Callable[[StepRows, np.ndarray, np.ndarray], None]) -> None:
    """Change positions and visibility of every layout; `change` writes to its copies."""
    make = layout._make_rows

    def make_faulty(*args):
        rows = make(*args)
        offsets, visible = rows.offsets.copy(), rows.visible.copy()
        change(rows, offsets, visible)
        return replace(rows, offsets=offsets, visible=visible)

    monkeypatch.setattr(layout, "_make_cached_rows", make_faulty)
    monkeypatch.setattr(layout, "_make_rows", make_faulty)


def drafts_are_seen_by_the_root(rows, offsets, visible):
    if rows.num_drafts:
        visible[rows.num_known - 1, rows.num_known] = True


def drafts_do_not_see_the_root(rows, offsets, visible):
    visible[rows.num_known : rows.num_verified, rows.num_known - 1] = False


def drafts_stand_one_too_far(rows, offsets, visible):
    offsets[rows.num_known : rows.num_verified] += 1


def slots_stand_one_too_far(rows, offsets, visible):
    offsets[rows.num_verified :] += 1


def tokens_see_slots(rows, offsets, visible):
    visible[: rows.num_verified, rows.num_verified :] = True


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        (drafts_are_seen_by_the_root, {5, 6, 8}),
        (drafts_do_not_see_the_root, {5, 6, 7, 8}),
        (drafts_stand_one_too_far, {5, 6, 7, 8}),
        (slots_stand_one_too_far, {10}),
        (tokens_see_slots, {9, 16}),
    ],
)
def test_a_wrong_mask_or_position_is_caught(monkeypatch, sound, fault, caught_by):
    plant_in_rows(monkeypatch, fault)

    assert caught_by <= find_failures(sound / "bundle", sound / "checkpoint").keys()


def test_a_slot_off_by_one_is_caught_by_its_logits_and_by_no_token(monkeypatch, sound):
    """Wrong proposals cost speed and never a token."""
    plant_in_rows(monkeypatch, slots_stand_one_too_far)

    failures = find_failures(sound / "bundle", sound / "checkpoint")

    assert not failures.keys() & {2, 4, 5, 7, 8}
    assert "slot (0, 1) with the bundle's vectors, prompt" in failures[10]


def test_a_position_that_counts_the_cache_wrongly_is_caught(monkeypatch, sound):
    """Every row behind a cache stands one place too far, in plain decoding, too."""
    write = block.BlockWriter.write

    def write_faulty(self, parts, state, outputs):
        inputs = write(self, parts, state, outputs)
        behind = (state.lengths > 0).astype(np.int64)[:, None]
        limit = self._context - 1
        return replace(inputs, position_ids=np.minimum(inputs.position_ids + behind, limit))

    monkeypatch.setattr(block.BlockWriter, "write", write_faulty)

    assert {2, 7} <= find_failures(sound / "bundle", sound / "checkpoint").keys()


def test_a_stale_cache_place_that_is_seen_is_caught_by_the_cache_audit(monkeypatch, sound):
    """The first row of a block sees the last column, behind every place that holds something."""

    def make_faulty(*arguments, **options):
        mask = make_attention_mask(*arguments, **options)
        mask[:, 0, 0, -1] = 0
        return mask

    monkeypatch.setattr(block, "make_attention_mask", make_faulty)

    failures = find_failures(sound / "bundle", sound / "checkpoint")

    assert 11 in failures
    assert "logits at position" in failures[11]


def test_a_rejected_row_that_is_committed_is_caught(monkeypatch, sound):
    """The last accepted draft's place gets the K/V of the row behind it."""
    forward, commit = OrtBackend.forward, OrtBackend.commit
    widths = []

    def forward_and_note(self, state, inputs):
        widths.append(inputs.input_ids.shape[1])
        return forward(self, state, inputs)

    def commit_faulty(self, state, rows):
        last = widths[-1] - 1
        moved = [
            [*accepted[:-1], min(accepted[-1] + 1, last)] if len(accepted) > 1 else accepted
            for accepted in rows
        ]
        commit(self, state, moved)

    monkeypatch.setattr(OrtBackend, "forward", forward_and_note)
    monkeypatch.setattr(OrtBackend, "commit", commit_faulty)

    assert {5, 6, 7} <= find_failures(sound / "bundle", sound / "checkpoint").keys()


def reseal(folder: Path) -> None:
    seal_bundle(folder, read_manifest(folder))


def copy_bundle(source: Path, folder: Path) -> Path:
    target = folder / "bundle"
    shutil.copytree(source / "bundle", target)
    return target


def edit_weight(bundle: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change a weight of every graph, in the graph or in the file beside it."""
    changed = set()
    for path in sorted((bundle / "onnx").glob("*.onnx")):
        model = onnx.load(path, load_external_data=False)
        (tensor,) = (t for t in model.graph.initializer if t.name == name)
        fields = {entry.key: entry.value for entry in tensor.external_data}
        if fields:
            data = path.parent / fields["location"]
            if data not in changed:
                changed.add(data)
                values = numpy_helper.to_array(tensor, base_dir=str(path.parent))
                with data.open("r+b") as stream:
                    stream.seek(int(fields["offset"]))
                    stream.write(np.ascontiguousarray(change(values)).tobytes())
        else:
            values = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(change(values), name))
            onnx.save(model, path)
    reseal(bundle)


WEIGHT_FAULTS = {
    "wrong rope theta": (
        "llama",
        "model.rotary_emb.inv_freq",
        lambda values: values * np.linspace(1.0, 0.9, len(values), dtype=np.float32),
    ),
    "dropped bias": ("qwen2", "model.layers.1.self_attn.q_proj.bias", np.zeros_like),
    "transposed layer": (
        "llama",
        "model.layers.1.self_attn.o_proj.weight.transposed",
        np.transpose,
    ),
}


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_a_wrong_weight_is_caught_by_the_logits(tmp_path, built, fault):
    family, name, change = WEIGHT_FAULTS[fault]
    bundle = copy_bundle(built(family), tmp_path)
    edit_weight(bundle, name, change)

    failures = find_failures(bundle, built(family) / "checkpoint")

    assert {2, 7, 10, 14} <= failures.keys()
    assert "prompt english: logits at position" in failures[2]


def test_a_swapped_end_token_is_caught_by_the_endings(tmp_path, sound):
    bundle = copy_bundle(sound, tmp_path)
    manifest = read_manifest(bundle)
    model = manifest.model.model_copy(update={"eos_token_ids": (1,)})
    seal_bundle(bundle, manifest.model_copy(update={"model": model}))

    failures = find_failures(bundle, sound / "checkpoint")

    assert failures.keys() == {12}
    assert failures[12].startswith("the manifest's end tokens are [1], the checkpoint's")


def test_a_weight_that_is_not_finite_is_caught(tmp_path, sound):
    bundle = copy_bundle(sound, tmp_path)

    def break_one(values):
        values = values.copy()
        values[7, 3] = np.nan
        return values

    edit_weight(bundle, "model.embed_tokens.weight", break_one)

    failures = find_failures(bundle, sound / "checkpoint")

    assert "weight model.embed_tokens.weight holds NaN or infinity" in failures[15]


def test_another_tokenizer_is_caught(tmp_path, sound):
    bundle = copy_bundle(sound, tmp_path)
    path = bundle / "tokenizer.json"
    path.write_text(
        path.read_text("utf-8").replace('"add_prefix_space": false', '"add_prefix_space": true')
    )
    reseal(bundle)

    failures = find_failures(bundle, sound / "checkpoint")

    assert failures.keys() == {13}
    assert "expected" in failures[13]


def test_another_template_is_caught(tmp_path, sound):
    bundle = copy_bundle(sound, tmp_path)
    path = bundle / "chat_template.jinja"
    path.write_text(path.read_text("utf-8").replace("assistant", "model"))
    reseal(bundle)

    failures = find_failures(bundle, sound / "checkpoint")

    assert failures.keys() == {13}
    assert failures[13].startswith("the template's text is not the checkpoint's: from character ")
    assert "; chat 0 gives" in failures[13]


def test_a_template_that_is_wrong_in_long_chats_is_caught(tmp_path, sound):
    bundle = copy_bundle(sound, tmp_path)
    path = bundle / "chat_template.jinja"
    path.write_text(path.read_text("utf-8") + "{% if messages|length > 3 %}no{% endif %}")
    reseal(bundle)

    failures = find_failures(bundle, sound / "checkpoint")

    assert failures.keys() == {13}
    assert "; chat 3 gives" in failures[13]


def test_two_tokens_that_change_places_are_caught(tmp_path, sound):
    """They stand in no text of the ladder's."""
    bundle = copy_bundle(sound, tmp_path)
    path = bundle / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    one, other = sorted(vocabulary, key=vocabulary.get)[40:42]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(tokenizer), "utf-8")
    reseal(bundle)

    failures = find_failures(bundle, sound / "checkpoint")

    assert 13 in failures
    assert f"token {min(one, other)!r} is " in failures[13]


def test_embeddings_that_no_prompt_reads_are_compared(tmp_path, sound):
    """Read once each, and compared with the checkpoint's, number by number."""
    bundle = copy_bundle(sound, tmp_path)

    def clear_one(values):
        values = values.copy()
        values[UNREAD] = 0.0
        return values

    edit_weight(bundle, "model.embed_tokens.weight", clear_one)

    failures = find_failures(bundle, sound / "checkpoint")

    assert {1, 2} <= failures.keys() <= {1, 2, 15}
    assert "tokens of no prompt: logits at position" in failures[2]
    assert (
        "weight model.embed_tokens.weight differs from the checkpoint's in 64 of 20480 numbers, "
        f"the first at [{UNREAD}, 0]"
    ) in failures[1]


def edit_output(bundle: Path, name: str, node: str, constant: float) -> None:
    """Put a node with a constant behind an output of every graph that has it."""
    for path in sorted((bundle / "onnx").glob("*.onnx")):
        model = onnx.load(path, load_external_data=False)
        for producer in model.graph.node:
            if name in producer.output:
                producer.output[list(producer.output).index(name)] = f"true_{name}"
                number = numpy_helper.from_array(np.float32(constant), "a_constant")
                model.graph.initializer.append(number)
                changed = onnx.helper.make_node(node, [f"true_{name}", "a_constant"], [name])
                model.graph.node.append(changed)
                break
        onnx.save(model, path)
    reseal(bundle)


def test_best_logits_that_are_not_the_logits_are_caught(tmp_path, sound):
    """Every margin would be 0, and every difference a near-tie."""
    bundle = copy_bundle(sound, tmp_path)
    edit_output(bundle, "top_logits", "Mul", 0.0)

    failures = find_failures(bundle, sound / "checkpoint")

    assert "prompt english: the best tokens' logits at position 0 are not those" in failures[2]
    assert "the graph differs from PyTorch in ort-cpu.top" in failures[1]


def test_a_wrong_sum_of_exponentials_is_caught(tmp_path, sound):
    """The graph that runs leaves it to the backend; the portable one has it."""
    bundle = copy_bundle(sound, tmp_path)
    edit_output(bundle, "logsumexp", "Sub", 1.5)

    failures = find_failures(bundle, sound / "checkpoint")

    assert failures.keys() == {1}
    assert "onnx/model.onnx: the sums of exponentials at position 0 are not" in failures[1]


def test_characters_that_are_lost_when_their_bytes_come_one_by_one_are_caught(monkeypatch, sound):
    push = IncrementalDecoder.push

    def push_faulty(self, token_ids):
        text = push(self, token_ids)
        is_wide = bool(text) and len(text[0].encode()) > 1
        return text[1:] if len(token_ids) == 1 and is_wide else text

    monkeypatch.setattr(IncrementalDecoder, "push", push_faulty)

    failures = find_failures(sound / "bundle", sound / "checkpoint")

    assert 13 in failures
    assert "decoded token by token give" in failures[13]


def plant_in_passes(monkeypatch, change: Callable[[StepInputs, np.ndarray], None]) -> None:
    """Change every pass's logits in place; the best tokens follow."""
    forward = OrtBackend.forward

    def forward_faulty(self, state, inputs):
        outputs = inputs.outputs and inputs.outputs | Outputs.LOGITS
        scores = forward(self, state, replace(inputs, outputs=outputs))
        if outputs:
            change(inputs, scores.logits())
            if Outputs.TOP in outputs:
                ids, top = scores.top()
                ids[:] = np.argsort(-scores.logits(), axis=-1, kind="stable")[..., : ids.shape[-1]]
                top[:] = np.take_along_axis(scores.logits(), ids, axis=-1)
        return scores

    monkeypatch.setattr(OrtBackend, "forward", forward_faulty)


def test_logits_that_depend_on_the_width_are_caught_by_epsilon(monkeypatch, sound):
    def change(inputs, logits):
        logits[..., 5] += 1e-3 * (inputs.input_ids.shape[1] == 1)

    plant_in_passes(monkeypatch, change)

    failures = find_failures(sound / "bundle", sound / "checkpoint")

    assert failures[3].startswith("epsilon 0.004 (at most 0.001) is out of bounds")


def test_neighbours_in_a_batch_that_disturb_each_other_are_caught(monkeypatch, sound):
    def change(inputs, logits):
        if len(logits) > 1:
            logits[0] += 0.1 * logits[1]

    plant_in_passes(monkeypatch, change)

    failures = find_failures(sound / "bundle", sound / "checkpoint")

    assert failures.keys() == {4}
    assert "of their range in a batch of 4" in failures[4]


def test_logits_that_follow_the_lookaheads_are_caught_by_the_perplexity(monkeypatch, sound):
    """The paper's +0.3 % would be seen."""

    def change(inputs, logits):
        if (inputs.input_ids >= logits.shape[-1]).any():
            logits *= 0.99

    plant_in_passes(monkeypatch, change)

    failures = find_failures(sound / "bundle", sound / "checkpoint")

    assert "relative change" in failures[16]
    assert "change at equal widths" in failures[16]


def test_a_tail_behind_an_end_is_caught_by_the_endings(monkeypatch, sound):
    ends_with = TokenSequence.ends_with

    def go_on(self, token_id):
        """Know the end, and keep what the block still holds."""
        before = self.finish_reason
        ends_with(self, token_id)
        self.finish_reason = before or self.finish_reason
        return self._ending.room == 0

    monkeypatch.setattr(TokenSequence, "ends_with", go_on)

    failures = find_failures(sound / "bundle", sound / "checkpoint")

    assert failures.keys() == {12}
    assert "or one text goes on" in failures[12]


def test_a_context_that_ends_with_another_reason_is_caught(monkeypatch, sound):
    hear = Ending.hear

    def call_it_length(self, token_id):
        reason = hear(self, token_id)
        return FinishReason.LENGTH if reason is FinishReason.CONTEXT else reason

    monkeypatch.setattr(Ending, "hear", call_it_length)

    failures = find_failures(sound / "bundle", sound / "checkpoint")

    assert failures.keys() == {14}
    assert "ends with 'length' after 10 tokens, expected 'context' after 10" in failures[14]


def test_a_long_accepted_block_in_a_batch_that_says_a_token_twice_is_caught(monkeypatch, sound):
    step, select = Batch.step, batch.select_exact
    sizes = []

    def step_noted(self):
        sizes.append(len(self.sequences))
        return step(self)

    def select_faulty(*arguments, **options):
        selected = select(*arguments, **options)
        if sizes[-1] == 1 or len(selected.path) < 2:
            return selected
        first, _, *others = selected.choices
        return replace(selected, choices=(first, first, *others))

    monkeypatch.setattr(Batch, "step", step_noted)
    monkeypatch.setattr(batch, "select_exact", select_faulty)

    failures = find_failures(sound / "bundle", sound / "checkpoint")

    assert failures.keys() == {4}
    assert "with given proposals" in failures[4]


def test_noise_that_depends_on_the_place_in_a_batch_is_caught(monkeypatch, sound):
    init = Chooser.__init__

    def init_faulty(self, params, *, request, **options):
        init(self, replace(params, seed=params.seed + request), request=request, **options)

    monkeypatch.setattr(Chooser, "__init__", init_faulty)

    failures = find_failures(sound / "bundle", sound / "checkpoint")

    assert failures.keys() == {4}
    assert ", seed " in failures[4]


def test_a_newcomer_to_a_running_batch_that_loses_its_root_is_caught(monkeypatch, sound):
    absorb = Batch.absorb

    def absorb_faulty(self, other):
        absorb(self, other)
        self.sequences[-1].token_ids[-1] = 7

    monkeypatch.setattr(Batch, "absorb", absorb_faulty)

    failures = find_failures(sound / "bundle", sound / "checkpoint")

    assert failures.keys() == {4}
    assert " of an engine, sample " in failures[4]


def test_samples_that_share_their_noise_are_caught(monkeypatch, sound):
    make = Engine._make_sequences

    def make_faulty(self, prompt, wish, request):
        texts = {}
        for _ in range(wish.n):
            texts |= make(self, prompt, replace(wish, n=1), request)
        return texts

    monkeypatch.setattr(Engine, "_make_sequences", make_faulty)

    failures = find_failures(sound / "bundle", sound / "checkpoint")

    assert failures.keys() == {4}
    assert "of an engine, sample 1" in failures[4]


def adjust_twice(monkeypatch):
    adjust = Chooser._adjust

    def adjust_faulty(self, scores, token_ids):
        adjust(self, scores, token_ids)
        adjust(self, scores, token_ids)

    monkeypatch.setattr(Chooser, "_adjust", adjust_faulty)


def ignore(monkeypatch, name, nothing):
    filter_scores = choosing.filter_scores

    def filter_faulty(scores, **options):
        return filter_scores(scores, **(options | {name: nothing}))

    monkeypatch.setattr(choosing, "filter_scores", filter_faulty)


def ignore_the_temperature(monkeypatch):
    sample = Chooser._sample

    def sample_faulty(self, scores, position):
        return sample(self, scores * np.float32(self._params.temperature), position)

    monkeypatch.setattr(Chooser, "_sample", sample_faulty)


def double_the_noise(monkeypatch):
    noise = choosing.gumbel_noise
    monkeypatch.setattr(choosing, "gumbel_noise", lambda *arguments: 2 * noise(*arguments))


def forget_the_bias(monkeypatch):
    init = Chooser.__init__

    def init_faulty(self, params, **options):
        init(self, replace(params, logit_bias={}), **options)

    monkeypatch.setattr(Chooser, "__init__", init_faulty)


@pytest.mark.parametrize(
    "plant",
    [
        adjust_twice,
        partial(ignore, name="top_k", nothing=0),
        partial(ignore, name="top_p", nothing=1.0),
        partial(ignore, name="min_p", nothing=0.0),
        ignore_the_temperature,
        double_the_noise,
        forget_the_bias,
    ],
)
def test_sampling_that_chooses_by_another_rule_is_caught(monkeypatch, sound, plant):
    """With and without lookaheads alike, so that the two agree."""
    plant(monkeypatch)

    failures = find_failures(sound / "bundle", sound / "checkpoint")

    assert failures.keys() == {8}
    assert "its parameters choose" in failures[8]


def shift_what_is_cached(monkeypatch):
    read = Batch.read_chunk

    def read_faulty(self):
        before = self.cache.lengths.copy()
        found = read(self)
        for sequence, first in enumerate(before):
            if self.cache.lengths[sequence] > first + 1:
                places = self.cache.places[:, sequence]
                places[:, :, first] = places[:, :, first + 1]
        return found

    monkeypatch.setattr(Batch, "read_chunk", read_faulty)


def read_another_text(monkeypatch):
    plan = TokenSequence.plan_reading

    def plan_faulty(self, num_tokens):
        part = plan(self, num_tokens)
        return replace(part, token_ids=(7,) * len(part.token_ids))

    monkeypatch.setattr(TokenSequence, "plan_reading", plan_faulty)


@pytest.mark.parametrize("plant", [shift_what_is_cached, read_another_text])
def test_a_prompt_that_is_read_wrongly_in_chunks_is_caught(monkeypatch, sound, plant):
    plant(monkeypatch)

    failures = find_failures(sound / "bundle", sound / "checkpoint")

    assert {4, 5} <= failures.keys()
    assert "read 16 tokens at a time, plain" in failures[5]
