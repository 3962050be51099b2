"""The genuine Python bindings of TensorRT, without TensorRT.

They import over libraries that define the few symbols they link to and nothing else; so every
class, method and docstring is there, and nothing can be made of them. `scripts/environment.sh`
fetches the bindings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from la_export.plan import api as plan_api
from la_runtime.backends import trt_api

__all__ = ["BINDINGS", "SIGNATURES", "Bindings", "used_classes"]

SIGNATURES: Final = Path(__file__).with_name("signatures")
_ENVIRONMENT: Final = Path(sys.prefix)
_LIBRARIES: Final = ("nvinfer", "nvinfer_plugin", "nvonnxparser", "nvinfer_lean")
_SYMBOLS: Final = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """Bindings of one module in one version.

    Args:
        name: of the file with its signatures.
        module: to import.
        folder: where it is installed; None where the tests run.
        version: of the package, where it has a folder.
    """

    name: str
    module: str
    folder: Path | None = None
    version: str = ""

    def read(self, classes: Iterable[str]) -> dict[str, Any]:
        """What `introspect` says of these classes, read in a process of its own."""
        environment = dict(os.environ)
        if self.folder is not None:
            if not self.folder.is_dir():
                raise FileNotFoundError(
                    f"{self.folder} is missing: scripts/environment.sh fetches the TensorRT "
                    "bindings there"
                )
            stubs = _compile_stubs(self.version.split(".")[0])
            environment |= {"PYTHONPATH": str(self.folder), "LD_LIBRARY_PATH": stubs.name}
        program = Path(__file__).with_name("introspect.py")
        done = subprocess.run(
            [sys.executable, str(program), self.module, *sorted(classes)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{self.module} {self.version}: {done.stderr}"
        described: dict[str, Any] = json.loads(done.stdout)
        return described


@cache
def _compile_stubs(major: str) -> TemporaryDirectory[str]:
    """Libraries that define what the bindings link to; each function returns nothing."""
    made = TemporaryDirectory(prefix="tensorrt-stubs-")
    folder = Path(made.name)
    source = folder / "stubs.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in _SYMBOLS))
    for library in _LIBRARIES:
        file = f"lib{library}.so.{major}"
        subprocess.run(
            ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{file}", "-o", folder / file, source],
            check=True,
        )
    return made


def _in_environment(module: str, version: str) -> Bindings:
    return Bindings(
        name=f"{module.removesuffix('_bindings')}-{version}",
        module=module,
        folder=_ENVIRONMENT / f"tensorrt-{version}",
        version=version,
    )


VERSIONS: Final = ("10.16.1.11", "11.4.0.106")
BINDINGS: Final = {
    bindings.name: bindings
    for bindings in (
        *(
            _in_environment(f"{module}_bindings", version)
            for version in VERSIONS
            for module in ("tensorrt", "tensorrt_lean")
        ),
        Bindings(name="tensorrt_rtx", module="tensorrt_rtx"),
    )
}


def used_classes() -> set[str]:
    """Names of the classes whose members the two packages use."""
    protocols = (
        trt_api.COMMON,
        trt_api.FULL_ONLY,
        trt_api.RTX_ONLY,
        plan_api.COMMON,
        plan_api.RTX_ONLY,
    )
    return {name for names in protocols for name in names}


def main() -> None:
    """Write the signatures anew; for a change of what is used, or of the versions."""
    for name, bindings in BINDINGS.items():
        text = json.dumps(bindings.read(used_classes()), indent=1, sort_keys=True)
        (SIGNATURES / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
