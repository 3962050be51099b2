"""Bundles around the decoders of `graphs`: complete for whoever builds plans, and made at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from la_export.options import Precision
from la_runtime.bundle import (
    GRAPH_PATH,
    LOOKAHEAD_PATH,
    SCHEMA_VERSION,
    LookaheadFacts,
    Manifest,
    ModelFacts,
    RopeFacts,
    seal_bundle,
    write_bundle,
)
from la_runtime.contract import Contract
from la_runtime.layout import GroupMask
from tests.la_export.plan.graphs import CONTEXT, NUM_HEADS, make_model, save_model

__all__ = ["write_decoder_bundle"]

_PRECISIONS = {p.dtype: p.value for p in (Precision.FP32, Precision.FP16, Precision.BF16)}


def write_decoder_bundle(
    folder: Path,
    contract: Contract,
    *,
    lookahead_lengths: Sequence[int] = (2, 4),
    model: onnx.ModelProto | None = None,
) -> Path:
    """Write a bundle whose graph is a decoder of this contract.

    Args:
        folder: where to.
        contract: of its graph.
        lookahead_lengths: that it serves.
        model: the graph, if not the contract's own decoder.

    Returns:
        `folder`.
    """
    with write_bundle(folder) as work:
        save_model((work / GRAPH_PATH).parent, model or make_model(contract))
        (work / LOOKAHEAD_PATH).write_bytes(b"vectors")
        seal_bundle(work, _make_manifest(contract, tuple(lookahead_lengths)))
    return folder


def _make_manifest(contract: Contract, lookahead_lengths: tuple[int, ...]) -> Manifest:
    return Manifest(
        schema_version=SCHEMA_VERSION,
        contract=contract,
        model=ModelFacts(
            name="decoder",
            family="llama",
            source="decoder",
            revision="none",
            source_quantization="none",
            source_digest="0" * 64,
            num_parameters=1,
            num_attention_heads=NUM_HEADS,
            context=CONTEXT,
            rope=RopeFacts(kind="default", theta=10_000.0),
            sliding_window=None,
            tied_embeddings=False,
            bos_token_id=None,
            eos_token_ids=(2,),
        ),
        precision=_PRECISIONS[contract.compute_dtype],
        lookahead_lengths=lookahead_lengths,
        graph=GRAPH_PATH,
        lookahead=LookaheadFacts(
            path=LOOKAHEAD_PATH, origin="untuned", group_mask=GroupMask.STRICT
        ),
        recipe={},
        built_with={},
        created_utc="2026-01-01T00:00:00Z",
        checks=(),
        files={},
    )
