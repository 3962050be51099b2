"""TensorRT for RTX, something that passes for TensorRT, and decoders to build plans of."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from la_export.plan import plans as plans_module
from la_export.plan.namespace import Installation, open_tensorrt
from la_runtime.contract import CacheForm, Dtype
from la_runtime.plans import PlanTarget
from tests.la_export.plan.bundles import write_decoder_bundle
from tests.la_export.plan.graphs import make_contract, make_model, save_model
from tests.la_export.plan.instant import InstantBuilder


@pytest.fixture(scope="session")
def installation() -> Installation:
    """TensorRT for RTX; without it the tests fail, so that they are never passed over unseen."""
    return open_tensorrt(PlanTarget.TRT_RTX)


@pytest.fixture(scope="session")
def graph_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[CacheForm, Dtype], Path]:
    """The file of a decoder in a cache form and precision, written on first use."""

    @cache
    def find(cache_form: CacheForm, dtype: Dtype) -> Path:
        folder = tmp_path_factory.mktemp(f"decoder-{cache_form}-{dtype}")
        return save_model(folder, make_model(make_contract(cache_form, dtype)))

    return find


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle for k of 2 and 4 around a decoder in float16, cache form `concat`."""
    return write_decoder_bundle(tmp_path / "bundle", make_contract(CacheForm.CONCAT))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module `tensorrt` with what TensorRT for RTX has: the lines for it run on genuine calls."""
    module = ModuleType("tensorrt")
    vars(module).update(vars(importlib.import_module("tensorrt_rtx")))
    vars(module)["__version__"] = "11.4.0.106"
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    return module


@pytest.fixture
def instantly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are there at once."""
    monkeypatch.setattr(plans_module, "PlanBuilder", InstantBuilder)
