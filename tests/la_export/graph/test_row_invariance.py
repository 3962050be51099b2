"""The lean graph gives a row the same bits at any width: with lookaheads or without, the same."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from la_export.options import Precision
from la_export.verify.epsilon import measure_epsilon
from la_runtime.backends.ort import OrtBackend
from la_runtime.bundle import open_bundle
from tests.tiny_models import build_tiny_bundle

# Kernels work on 12 rows at a time, softmax on 16 or 64 keys.
WIDTHS = (2, 3, 7, 12, 13, 17, 25, 64, 100)
HEADS = {
    "groups": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "no groups": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "one key head": {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_logits_are_equal_bit_for_bit_at_any_width(tmp_path, precision, heads):
    bundle = open_bundle(build_tiny_bundle(tmp_path, precision=precision, **HEADS[heads]))
    context = bundle.manifest.model.context
    rng = np.random.default_rng(8)

    for threads in (1, 2):
        with closing(OrtBackend.open(bundle, threads=threads)) as backend:
            text = rng.integers(backend.contract.vocab_size, size=min(130, context)).tolist()
            assert measure_epsilon(backend, text, widths=WIDTHS, context=context) == 0
