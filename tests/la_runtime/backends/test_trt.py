"""TensorRT keeps the seam's promises on a fake of it, over memory that only waiting makes true."""

from __future__ import annotations

import pytest

from la_runtime.backends.trt import TrtBackend
from la_runtime.bundle import open_bundle
from la_runtime.contract import CacheForm
from tests.la_runtime.backends.conformance import BackendConformance
from tests.la_runtime.backends.numpy_device import NumpyDevice
from tests.la_runtime.backends.plans import with_plans
from tests.tensorrt_api.engine import make_tensorrt

# Float sums run in another order for other widths; observed 2e-6 in fp32 and 6e-3 in fp16.
LOGIT_TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2}
FORMS = [(precision, form) for precision in LOGIT_TOLERANCES for form in CacheForm]


class TestTrt(BackendConformance):
    @pytest.fixture(params=FORMS, ids=lambda form: "-".join(form))
    def backend(self, request, tiny_bundle_of, tmp_path):
        self.tolerance = LOGIT_TOLERANCES[request.param[0]]
        device = NumpyDevice()
        folder = tiny_bundle_of(*request.param)
        bundle = with_plans(folder, tmp_path / "bundle", {"graph_widths": (1, 25)})
        (plan,) = bundle.manifest.plans
        backend = TrtBackend(bundle, plan, make_tensorrt(device).module, device)
        yield backend
        backend.close()
