"""Dequantizes a GGUF file and quantizes it anew with llama.cpp's own function.

python -P gguf_weights.py SOURCE.gguf FOLDER TYPE, into FOLDER/model.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize

__all__ = ["main"]

_FILE_TYPES: Final = {
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}
_FILE_TYPE_KEY: Final = "general.file_type"
_ARCHITECTURE_KEY: Final = "general.architecture"


def _dequantize_file(source: Path, target: Path) -> None:
    """The same file with every tensor in float32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, arch=reader.fields[_ARCHITECTURE_KEY].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in {_ARCHITECTURE_KEY, _FILE_TYPE_KEY}:
            continue
        is_array = field.types[0] == GGUFValueType.ARRAY
        inner = field.types[-1] if is_array else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(source: Path, folder: Path, kind: str) -> None:
    """Write FOLDER/model.gguf."""
    plain = folder / "float32.gguf"
    _dequantize_file(source, plain)
    wish = llama_cpp.llama_model_quantize_default_params()
    wish.ftype = int(_FILE_TYPES[kind])
    target = folder / "model.gguf"
    failed = llama_cpp.llama_model_quantize(str(plain).encode(), str(target).encode(), wish)
    plain.unlink()
    if failed:
        sys.exit(f"llama.cpp could not quantize {source.name} to {kind}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
