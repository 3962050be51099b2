from __future__ import annotations

from pathlib import Path

import pytest

from la_export.bench.peers.environments import Environment
from la_export.bench.peers.programs import PeerWeights
from la_export.bench.peers.weights import ensure_weights
from la_export.checkpoint import ModelSource, WeightFormat
from la_runtime.errors import HostError, NotRunError

ENVIRONMENT = Environment(name="peer", requirements=("peer==1",))


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"weights")
    return ModelSource(
        name="model",
        origin="model.gguf",
        revision="1",
        folder=tmp_path,
        weight_format=WeightFormat.GGUF,
        weight_files=(weights,),
    )


def ensure(weights: PeerWeights, source: ModelSource, tmp_path: Path) -> Path:
    return ensure_weights(
        weights,
        ENVIRONMENT,
        source=source,
        float32=Path("plain"),
        cache=tmp_path / "cache",
        report=lambda _: None,
    )


def shell(script: str) -> PeerWeights:
    return PeerWeights(precision="int8", command=("/bin/sh", "-c", script), file="result")


def test_a_converter_is_given_its_places_and_run_once(tmp_path: Path, source: ModelSource) -> None:
    weights = shell("cat {gguf} >{out}/result && echo {source} >>{out}/result")

    first = ensure(weights, source, tmp_path)
    source.weight_files[0].chmod(0)
    second = ensure(weights, source, tmp_path)

    assert first == second
    assert first.read_text() == "weightsplain\n"


def test_a_converter_that_fails_leaves_nothing(tmp_path: Path, source: ModelSource) -> None:
    weights = shell("touch {out}/result; echo out of memory; exit 3")

    with pytest.raises(HostError, match="sh failed: out of memory; see "):
        ensure(weights, source, tmp_path)

    assert not list((tmp_path / "cache").rglob("result"))


def test_another_command_makes_other_weights(tmp_path: Path, source: ModelSource) -> None:
    one = ensure(shell("echo 1 >{out}/result"), source, tmp_path)
    two = ensure(shell("echo 2 >{out}/result"), source, tmp_path)

    assert (one.read_text(), two.read_text()) == ("1\n", "2\n")


def test_without_a_converter_the_float32_folder_is_used(
    tmp_path: Path, source: ModelSource
) -> None:
    assert ensure(PeerWeights(precision="fp32"), source, tmp_path) == Path("plain")


def test_a_peer_that_wants_gguf_refuses_other_sources(tmp_path: Path, source: ModelSource) -> None:
    other = ModelSource(
        name="model",
        origin="hub:some/model",
        revision="1",
        folder=tmp_path,
        weight_format=WeightFormat.SAFETENSORS,
        weight_files=source.weight_files,
    )
    weights = PeerWeights(precision="Q4_0", command=("convert", "{gguf}", "{out}"))

    with pytest.raises(NotRunError, match="wants a source that is a GGUF file, got hub:some/model"):
        ensure(weights, other, tmp_path)
