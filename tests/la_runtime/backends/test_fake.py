"""The toy backend keeps the seam's promises exactly."""

from __future__ import annotations

import pytest

from la_runtime.backends.fake import FakeBackend
from la_runtime.contract import CacheForm
from tests.la_runtime.backends.conformance import CONTEXT, BackendConformance

FORMS = {
    "concat": (CacheForm.CONCAT, None),
    "scatter": (CacheForm.SCATTER, CONTEXT + 64),
    "growing-scatter": (CacheForm.SCATTER, None),
}


class TestFake(BackendConformance):
    tolerance = 0.0

    @pytest.fixture(params=FORMS, ids=FORMS)
    def backend(self, request):
        cache_form, capacity = FORMS[request.param]
        return FakeBackend(vocab_size=19, k_max=4, cache_form=cache_form, capacity=capacity)
