"""The two passes of tuning against plain passes of transformers, slot by slot."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from la_export.question_frame import QuestionFrame
from la_export.reference import TorchReference
from la_export.tune.attention import use_tuning_attention
from la_export.tune.groups import every_anchor, pack_groups
from la_export.tune.library import TextLibrary
from la_export.tune.lookaheads import Lookaheads, find_sites
from la_export.tune.passes import run_groups
from la_export.tune.texts import OwnText
from la_export.tune.writer import TextWriter
from la_runtime.layout import GroupMask
from tests.tiny_models import FAMILIES, make_tiny_config, make_tiny_model

NUM_SLOTS = 3
# Float32 sums in another order, over two layers.
CLOSE = 2e-4


def make_texts(vocab_size, lengths=(14, 9), seed=0):
    rng = np.random.default_rng(seed)
    return [
        OwnText(token_ids=tuple(rng.integers(0, vocab_size, length).tolist()), answered_from=4)
        for length in lengths
    ]


def make_lookaheads(model, *, rank=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(NUM_SLOTS, model.config.hidden_size, generator=generator)
    lookaheads = Lookaheads(vectors, find_sites(model) if rank else (), rank)
    with torch.no_grad():
        for expand in lookaheads.expand:
            expand.copy_(torch.randn(expand.shape, generator=generator) * 0.2)
    return lookaheads


def prepare(model):
    prepared = copy.deepcopy(model).requires_grad_(False)
    use_tuning_attention(prepared)
    return prepared


@pytest.mark.parametrize("memory_bytes", [0, 2**30])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_slots_say_what_the_reference_says_of_them(family, rank, memory_bytes):
    model = make_tiny_model(make_tiny_config(family))
    tuned = prepare(model)
    lookaheads = make_lookaheads(tuned, rank=rank)
    texts = make_texts(model.config.vocab_size)
    anchors = [every_anchor(text, NUM_SLOTS) for text in texts]
    library = TextLibrary(tuned, texts, memory_bytes=memory_bytes)
    block = pack_groups(texts, anchors)
    for _ in range(2):  # computed, and then kept
        with torch.no_grad():
            hidden = run_groups(tuned, lookaheads, library.states([0, 1]), block, GroupMask.STRICT)
            logits = tuned.get_output_embeddings()(hidden).numpy()

    reference = TorchReference(model, adapter=lookaheads.adapter())
    vectors = lookaheads.vectors.detach().numpy()
    for index, (text, groups) in enumerate(zip(texts, anchors, strict=True)):
        for place, (anchor, _) in enumerate(groups):
            for slot in range(NUM_SLOTS):
                ids = [*text.token_ids[: anchor + 1], reference.vocab_size + slot]
                positions = [*range(anchor + 1), anchor + 1 + slot]
                expected = reference.scores(ids, vectors, position_ids=positions)[-1]
                found = logits[index, place * NUM_SLOTS + slot]
                np.testing.assert_allclose(found, expected, atol=CLOSE)


def test_slots_of_a_causal_group_see_those_before_them():
    model = make_tiny_model(make_tiny_config())
    tuned = prepare(model)
    lookaheads = make_lookaheads(tuned)
    (text,) = texts = make_texts(model.config.vocab_size, lengths=(12,))
    block = pack_groups(texts, [[(5, NUM_SLOTS)]])
    library = TextLibrary(tuned, texts, memory_bytes=0)
    with torch.no_grad():
        hidden = run_groups(tuned, lookaheads, library.states([0]), block, GroupMask.CAUSAL)
        logits = tuned.get_output_embeddings()(hidden)[0].numpy()

    reference = TorchReference(model, adapter=lookaheads.adapter())
    ids = [*text.token_ids[:6], *(reference.vocab_size + slot for slot in range(NUM_SLOTS))]
    expected = reference.scores(ids, lookaheads.vectors.detach().numpy())[-NUM_SLOTS:]
    np.testing.assert_allclose(logits, expected, atol=CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_sites_are_the_layers_that_read_one_activation(family):
    model = make_tiny_model(make_tiny_config(family))

    def ends(sites):
        return [tuple(name.rpartition(".")[2] for name in site.layers) for site in sites]

    behind_norms = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
    of_a_layer = [behind_norms[0], ("o_proj",), behind_norms[1], ("down_proj",)]
    assert ends(find_sites(model)) == behind_norms * 2
    assert ends(find_sites(model, everywhere=True)) == of_a_layer * 2


def test_training_leaves_the_model_alone_and_gives_every_part_a_gradient():
    model = prepare(make_tiny_model(make_tiny_config()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lookaheads = make_lookaheads(model)
    texts = make_texts(model.config.vocab_size)
    block = pack_groups(texts, [every_anchor(text, NUM_SLOTS) for text in texts])
    states = TextLibrary(model, texts, memory_bytes=0).states([0, 1])

    run_groups(model, lookaheads, states, block, GroupMask.STRICT).square().sum().backward()

    # Keys and values of the last layer reach nothing but the slot itself; all else must learn.
    assert all(
        part.grad is not None and part.grad.abs().sum() > 0 for part in lookaheads.parameters()
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_written_answers_are_greedy_and_end_where_the_model_ends():
    model = make_tiny_model(make_tiny_config(), seed=5)
    frame = QuestionFrame(before=(1, 7), behind=(4, 9, 3))
    ends = (2, 40, 41)
    writer = TextWriter(prepare(model), frame, ends=ends, length=40)

    texts = writer.write(0, 12)

    reference = TorchReference(model)
    assert len(texts) > 3
    for text in texts:
        prompt, answer = text.token_ids[: text.answered_from], text.token_ids[text.answered_from :]
        assert prompt[:2] == frame.before
        assert prompt[-3:] == frame.behind
        assert not set(answer) & set(ends)
        expected = reference.generate_greedy(prompt, 40 - len(prompt), ends)
        assert [token for token in expected if token not in ends] == list(answer)
    assert writer.write(0, 12) == texts
    assert writer.write(1, 12) != texts
