"""One pass of an engine's backend, for tests that look at its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from la_runtime.backends.base import CacheState, Outputs
from la_runtime.block import Part, make_step_inputs
from la_runtime.generation import Engine
from la_runtime.layout import StepRows


def score_rows(
    engine: Engine, state: CacheState, token_ids: Sequence[int], rows: StepRows
) -> np.ndarray:
    """[rows, vocab_size] logits of one pass; a view, valid until the state's next one."""
    backend = engine.backend
    inputs = make_step_inputs(
        [Part(rows=rows, token_ids=tuple(token_ids), scored_from=0)],
        state,
        backend.contract,
        context=engine.bundle.manifest.model.context,
        widths=(),
        outputs=Outputs.LOGITS,
    )
    return backend.forward(state, inputs).logits()[0]
