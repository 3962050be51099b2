from __future__ import annotations

import os
from pathlib import Path

import pytest

from la_export.bench.speed.processes import hold_bundle, measure_memory, pss_bytes
from la_runtime.bundle import MANIFEST_NAME
from la_runtime.errors import NotRunError


def test_memory_is_that_of_processes_with_the_bundle_open(tiny: Path) -> None:
    found = measure_memory(tiny, threads=1)

    weights = (tiny / "onnx" / "model.onnx.data").stat().st_size
    assert weights < found.pss_bytes <= found.peak_rss_bytes
    assert len(found.shared_pss_bytes) == 2
    # Libraries are shared by two that run them at the same time.
    assert max(found.shared_pss_bytes) < found.pss_bytes
    assert found.open_s > 0


def test_a_holder_is_gone_after_its_block(tiny: Path) -> None:
    with hold_bundle(tiny, threads=1) as holder:
        assert pss_bytes(holder.process_id) > 0

    with pytest.raises(ProcessLookupError):
        os.kill(holder.process_id, 0)


def test_a_process_that_cannot_open_the_bundle_says_why(bundle: Path) -> None:
    (bundle / MANIFEST_NAME).unlink()

    with (
        pytest.raises(NotRunError, match=r"that was to hold .*bundle open ended: .*manifest"),
        hold_bundle(bundle, threads=1),
    ):
        raise AssertionError("it was not opened")
