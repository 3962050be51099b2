"""The toy backend keeps the seam's promises exactly."""

from __future__ import annotations

import pytest

from la_runtime.backends.fake import FakeBackend
from tests.la_runtime.backends.conformance import CONTEXT, BackendConformance

CAPACITY = CONTEXT + 64


class TestFake(BackendConformance):
    tolerance = 0.0

    @pytest.fixture(params=[None, CAPACITY], ids=["concat", "scatter"])
    def backend(self, request):
        return FakeBackend(vocab_size=19, k_max=4, capacity=request.param)
