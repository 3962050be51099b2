import numpy as np, pytest
from la_runtime.generation import Engine
from la_runtime.contract import CacheForm
from la_export.plan.options import PlanOptions
from la_export.plan.profiles import *
from la_runtime.backends import trt as T
from tests.la_runtime.backends.plans import with_plans
from tests.tensorrt_api.host import make_host
from tests.conftest import *


@pytest.mark.parametrize("form", [CacheForm.SCATTER, CacheForm.CONCAT])
def test_x(tiny_bundle_of, tmp_path, monkeypatch, form):
    host = make_host(monkeypatch)
    folder = tiny_bundle_of("fp32", form)
    from la_runtime.bundle import open_bundle

    m = open_bundle(folder).manifest
    sizes = resolve_sizes(PlanOptions(), m.contract, context=m.model.context, largest_k=4)
    profs = (
        make_prefill_profile(m.contract, sizes, k=4),
        make_step_profile(m.contract, sizes, k=4),
    )
    b = with_plans(
        folder, tmp_path / "b", {"profiles": profs, "graph_widths": make_graph_widths([4])}
    )
    passes = []
    orig = T.TrtBackend.forward

    def fwd(self, state, inputs):
        passes.append((inputs.input_ids.shape, inputs.logits_rows.shape[1], state.past_len))
        from dataclasses import replace

        n = inputs.logits_rows.shape[1]
        w = inputs.input_ids.shape[1]
        if w in self._captured and inputs.outputs and n < w:
            lr = np.zeros((inputs.logits_rows.shape[0], w), np.int64)
            lr[:, :n] = inputs.logits_rows
            inputs = replace(inputs, logits_rows=lr)
        return orig(self, state, inputs)

    monkeypatch.setattr(T.TrtBackend, "forward", fwd)
    with Engine.open(tmp_path / "b", backend="trt", k=4) as e:
        passes.clear()
        c0 = host.device.num_captures
        l0 = host.device.num_launches
        r = []
        for p in ("hello there", "the cat sat on the mat the cat sat on"):
            for s in [x for x in [e.generate(p, max_new_tokens=96)]]:
                pass
        print(
            form,
            "passes",
            len(passes),
            "captures",
            host.device.num_captures - c0,
            "launches",
            host.device.num_launches - l0,
        )
        from collections import Counter

        print(Counter((s[0][1], s[1]) for s in passes))
        print([(p[0][1], p[1], p[2]) for p in passes][:40])
