"""The peers: what each is installed from, how its weights are made, and the ways it decodes.

Data only. `environments` installs it, `weights` converts, `race` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from la_export.bench.peers.environments import Environment, find_cpu_flags, llama_cmake_flags
from la_export.bench.speed.record import PeerMode

__all__ = ["DRIVERS", "Option", "PeerWeights", "Program", "Way", "make_programs"]

Option: TypeAlias = str | int | float | bool

_HERE: Final = Path(__file__).parent
DRIVERS: Final = _HERE / "drivers"
_GGUF_CONVERTER: Final = _HERE / "converters" / "gguf_weights.py"

_NUMPY: Final = "numpy==2.4.6"
# Without a local version, so that a CPU build lying on disk satisfies it.
_TORCH: Final = "torch==2.13.0"
_TRANSFORMERS: Final = "transformers==5.23.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerWeights:
    """Weights of one precision, made from the source's float32.

    Args:
        precision: what the peer calls it.
        command: makes them, in the peer's environment. ``{bin}`` is that environment's folder of
            commands, ``{source}`` the float32 model's folder, ``{gguf}`` the source's own GGUF
            file, ``{scratch}`` an empty folder and ``{out}`` where the weights go. Without a
            command the float32 folder itself is used.
        file: inside ``{out}``, for peers that open a file.
    """

    precision: str
    command: tuple[str, ...] = ()
    file: str = ""

    @property
    def needs_gguf(self) -> bool:
        """Whether only a source that is a GGUF file will do."""
        return "{gguf}" in self.command


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to decode: plain, or the peer's best.

    Args:
        mode: which of them.
        name: what the peer calls it.
        options: for its driver.
    """

    mode: PeerMode
    name: str
    options: Mapping[str, Option] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One peer.

    Args:
        name: of the program.
        environment: what it is installed from.
        driver: file of `DRIVERS` that speaks to it.
        weights: of each precision.
        ways: in which it decodes with any of them.
    """

    name: str
    environment: Environment
    driver: str
    weights: tuple[PeerWeights, ...]
    ways: tuple[Way, ...]


_PLAIN: Final = Way(mode=PeerMode.PLAIN, name="plain")


def _genai_weights(precision: str, *extra: str) -> PeerWeights:
    builder = ("{bin}/python", "-m", "onnxruntime_genai.models.builder")
    arguments = ("-i", "{source}", "-o", "{out}", "-p", precision, "-e", "cpu", "-c", "{scratch}")
    return PeerWeights(precision=precision, command=(*builder, *arguments, *extra))


def _gguf_weights(kind: str) -> PeerWeights:
    return PeerWeights(
        precision=kind,
        command=("{bin}/python", "-P", str(_GGUF_CONVERTER), "{gguf}", "{out}", kind),
        file="model.gguf",
    )


def _openvino_weights(precision: str, *extra: str) -> PeerWeights:
    export = ("{bin}/optimum-cli", "export", "openvino", "--model", "{source}")
    task = ("--task", "text-generation-with-past", "--weight-format", precision)
    return PeerWeights(precision=precision, command=(*export, *task, *extra, "{out}"))


def make_programs(cpu_flags: frozenset[str] | None = None) -> tuple[Program, ...]:
    """All peers, for a processor of these flags; None for this one."""
    flags = find_cpu_flags() if cpu_flags is None else cpu_flags
    return (
        Program(
            name="onnxruntime-genai",
            environment=Environment(
                name="onnxruntime-genai",
                requirements=(
                    "onnxruntime-genai==0.18.0",
                    "onnxruntime==1.32.0",
                    "onnx==1.23.2",
                    "onnx-ir==1.1.0",
                    _TRANSFORMERS,
                    _TORCH,
                    _NUMPY,
                ),
            ),
            driver="onnxruntime_genai_driver.py",
            weights=(
                _genai_weights("int4", "--extra_options", "accuracy_level=4"),
                _genai_weights("fp32"),
            ),
            ways=(
                _PLAIN,
                Way(mode=PeerMode.BEST, name="n-gram lookup", options={"ngram_size": 3}),
            ),
        ),
        Program(
            name="llama.cpp",
            environment=Environment(
                name="llama.cpp",
                requirements=("llama-cpp-python==0.3.36", "gguf==0.19.0", _NUMPY),
                compiled=("llama-cpp-python",),
                variables={"CMAKE_ARGS": llama_cmake_flags(flags)},
            ),
            driver="llama_cpp_driver.py",
            weights=(_gguf_weights("Q4_0"), _gguf_weights("Q8_0")),
            ways=(
                _PLAIN,
                # As its documentation advises for CPUs.
                Way(mode=PeerMode.BEST, name="prompt lookup", options={"num_pred_tokens": 2}),
            ),
        ),
        Program(
            name="openvino-genai",
            environment=Environment(
                name="openvino-genai",
                requirements=(
                    "openvino-genai==2026.4.1.0",
                    "openvino==2026.4.1",
                    "openvino-tokenizers==2026.4.1.0",
                    "nncf==3.4.0",
                    "optimum-intel==2.2.0",
                    _TORCH,
                    _NUMPY,
                ),
                # A build for GPUs, which a CPU build of torch cannot load.
                removed=("torchvision",),
            ),
            driver="openvino_genai_driver.py",
            weights=(
                _openvino_weights("int8"),
                _openvino_weights("int4", "--group-size", "32", "--ratio", "1.0"),
            ),
            ways=(
                _PLAIN,
                Way(
                    mode=PeerMode.BEST,
                    name="prompt lookup",
                    options={"num_assistant_tokens": 5, "max_ngram_size": 3},
                ),
            ),
        ),
        Program(
            name="transformers",
            environment=Environment(
                name="transformers", requirements=(_TRANSFORMERS, _TORCH, _NUMPY)
            ),
            driver="transformers_driver.py",
            weights=(PeerWeights(precision="fp32"),),
            ways=(
                _PLAIN,
                Way(
                    mode=PeerMode.BEST,
                    name="prompt lookup",
                    options={"prompt_lookup_num_tokens": 10},
                ),
            ),
        ),
    )
