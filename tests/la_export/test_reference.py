from __future__ import annotations

import numpy as np
import pytest
import torch

from la_export.options import Precision
from la_export.reference import TorchReference
from la_runtime.storage import from_stored, to_stored
from tests.tiny_models import FAMILIES, VOCAB_SIZE, make_tiny_config, make_tiny_model

TOKENS = [5, 17, 300, 42, 9]
# Two passes of equal numbers through differently shaped float32 kernels.
CLOSE = 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_the_model_called_on_ids(family: str) -> None:
    model = make_tiny_model(make_tiny_config(family))
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(
        TorchReference(model).scores(TOKENS), expected, rtol=CLOSE, atol=CLOSE
    )


def test_lookahead_ids_read_the_lookahead_vectors() -> None:
    """A vector equal to a token's embedding must score as that token."""
    model = make_tiny_model(make_tiny_config())
    reference = TorchReference(model)
    vectors = reference.embedding_rows(VOCAB_SIZE)[[300, 42]]
    ids = [5, 17, VOCAB_SIZE, VOCAB_SIZE + 1, 9]
    np.testing.assert_array_equal(reference.scores(ids, vectors), reference.scores(TOKENS))


def test_positions_are_used_and_only_their_distances_matter() -> None:
    reference = TorchReference(make_tiny_model(make_tiny_config()))
    plain = reference.scores(TOKENS)
    moved = reference.scores(TOKENS, position_ids=range(10, 15))
    spread = reference.scores(TOKENS, position_ids=[0, 3, 4, 9, 11])
    np.testing.assert_allclose(moved, plain, rtol=1e-4, atol=1e-4)
    assert np.abs(spread - plain).max() > 1e-2


def test_key_values_are_those_of_the_cache_in_layer_order() -> None:
    model = make_tiny_model(make_tiny_config())
    with torch.no_grad():
        cache = model(torch.tensor([TOKENS]), use_cache=True).past_key_values
    found = TorchReference(model).key_values(TOKENS)
    assert found.shape == (4, 2, len(TOKENS), 16)
    for layer in range(2):
        np.testing.assert_allclose(
            found[2 * layer], cache.layers[layer].keys[0], rtol=CLOSE, atol=CLOSE
        )
        np.testing.assert_allclose(
            found[2 * layer + 1], cache.layers[layer].values[0], rtol=CLOSE, atol=CLOSE
        )


def test_greedy_generation_is_the_argmax_of_full_passes() -> None:
    reference = TorchReference(make_tiny_model(make_tiny_config(), seed=3))
    ids = list(TOKENS)
    for _ in range(10):
        ids.append(int(reference.scores(ids)[-1].argmax()))
    assert reference.generate_greedy(TOKENS, 10, ()) == ids[len(TOKENS) :]


def test_greedy_generation_ends_with_the_end_token_that_was_named() -> None:
    reference = TorchReference(make_tiny_model(make_tiny_config(), seed=3))
    free = reference.generate_greedy(TOKENS, 10, ())
    end = free[2]
    assert reference.generate_greedy(TOKENS, 10, (end,)) == free[: free.index(end) + 1]


def test_greedy_generation_goes_past_the_models_own_end_token_when_none_is_named() -> None:
    model = make_tiny_model(make_tiny_config(), seed=3)
    free = TorchReference(model).generate_greedy(TOKENS, 10, ())
    assert model.generation_config is not None
    model.generation_config.eos_token_id = free[2]
    assert TorchReference(model).generate_greedy(TOKENS, 10, ()) == free


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_transformers_reports_and_the_sums_between(family: str) -> None:
    model = make_tiny_model(make_tiny_config(family))
    with torch.no_grad():
        reported = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
        found = TorchReference(model).hidden_states(TOKENS)
        assert found.shape == (6, len(TOKENS), 64)
        for layer, block in enumerate(model.get_decoder().layers):
            middle = torch.from_numpy(found[2 * layer + 1])
            behind_mlp = middle + block.mlp(block.post_attention_layernorm(middle))
            np.testing.assert_allclose(found[2 * layer + 2], behind_mlp, rtol=CLOSE, atol=CLOSE)
    np.testing.assert_allclose(
        found[0::2][:-1], np.stack([state[0] for state in reported[:-1]]), rtol=CLOSE, atol=CLOSE
    )
    np.testing.assert_allclose(found[-1], reported[-1][0], rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_rounded_weights_are_those_a_graph_stores_and_still_compute_in_float32(
    precision: Precision,
) -> None:
    dtype = precision.dtype
    config = make_tiny_config("qwen2", tie_word_embeddings=True)
    plain = {names: read() for names, read in TorchReference(make_tiny_model(config)).weights()}
    model = make_tiny_model(config)
    reference = TorchReference(model, precision=precision)
    for names, read in reference.weights():
        np.testing.assert_array_equal(read(), from_stored(to_stored(plain[names], dtype), dtype))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    scores = reference.scores(TOKENS)
    assert scores.dtype == np.float32
    assert len(np.unique(from_stored(to_stored(scores, dtype), dtype) - scores)) > 1


def test_buffers_are_not_rounded() -> None:
    buffers = dict(TorchReference(make_tiny_model(make_tiny_config())).buffers())
    rounded = TorchReference(make_tiny_model(make_tiny_config()), precision=Precision.FP16)
    assert any(name.endswith("rotary_emb.inv_freq") for name in buffers)
    for name, buffer in rounded.buffers():
        np.testing.assert_array_equal(buffer, buffers[name])


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
@pytest.mark.parametrize("is_tied", [True, False])
def test_every_parameter_is_either_of_floats_or_in_integers(
    precision: Precision, is_tied: bool
) -> None:
    model = make_tiny_model(make_tiny_config("qwen2", tie_word_embeddings=is_tied))
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    reference = TorchReference(model, precision=precision)

    floats = {name for found, _ in reference.weights() for name in found}
    integers = {name for found, _ in reference.quantized_weights() for name in found}
    assert floats | integers == names
    assert not floats & integers
    assert all("norm" in name or name.endswith("bias") for name in floats)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_integer_precisions_generate_and_read_lookahead_vectors_as_others_do(
    precision: Precision,
) -> None:
    model = make_tiny_model(make_tiny_config(tie_word_embeddings=True), seed=3)
    reference = TorchReference(model, precision=precision)
    vectors = reference.embedding_rows(VOCAB_SIZE)[[300, 42]]
    ids = [5, 17, VOCAB_SIZE, VOCAB_SIZE + 1, 9]

    np.testing.assert_array_equal(reference.scores(ids, vectors), reference.scores(TOKENS))
    assert len(reference.generate_greedy(TOKENS, 10, ())) == 10
