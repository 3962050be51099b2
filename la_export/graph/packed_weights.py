"""Puts weights as ONNX Runtime's kernels read them into the file, so that processes share them.

ONNX Runtime packs weights when it opens a graph, into memory of the process. Where a weight names
a packed form that lies in the file, it still packs, looks for the name that its own result has, a
hash, compares the bytes, drops its own and maps the file's. Another processor or another version
packs otherwise, finds no such name and keeps what it has packed: a graph runs the same with and
without these forms, and nothing has to be known of the machine.

The names are further entries of a weight's external data, which other readers pass over.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import onnx
import onnxruntime as ort

from la_runtime.backends.ort_options import make_session_options

__all__ = ["add_packed_weights"]

_KEY: Final = re.compile(r"prepacked_\d+")
_LOCATION: Final = "location"
_ALIGNMENT_BYTES: Final = 4096
_SMALLEST_BYTES: Final = "1024"
_GRAPH_FILE: Final = "packed.onnx"
_WEIGHTS_FILE: Final = "packed.onnx.data"

# Of every weight, whenever such a graph is read by anything but ONNX Runtime.
warnings.filterwarnings("ignore", message=r"Ignoring unknown external data key\(s\) \['prepacked")


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedForm:
    """One packed form of a weight, as an entry of its external data says it.

    Args:
        key: of the entry.
        name: operator and hash.
        places: offset, length and the rest of each buffer.
    """

    key: str
    name: str
    places: tuple[tuple[int, int, str], ...]

    @classmethod
    def parse(cls, key: str, value: str) -> _PackedForm:
        """From an entry that ONNX Runtime has written."""
        name, *places = value.split("|")
        fields = [place.split(";") for place in places]
        return cls(
            key=key,
            name=name,
            places=tuple((int(offset), int(length), rest) for offset, length, rest in fields),
        )

    def __str__(self) -> str:
        return "|".join([self.name, *(";".join(map(str, place)) for place in self.places)])


def add_packed_weights(path: Path) -> int:
    """Append every packed form to the weights' file of a graph, and name it in the graph.

    Args:
        path: a graph with all its weights in one file; changed in place.

    Returns:
        Bytes that were appended.
    """
    model = onnx.load(path, load_external_data=False)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        packed = _pack(path, Path(folder))
        (location,) = {
            entry.value
            for tensor in tensors.values()
            for entry in tensor.external_data
            if entry.key == _LOCATION
        }
        data = path.with_name(location)
        size = data.stat().st_size
        with (Path(folder) / _WEIGHTS_FILE).open("rb") as source, data.open("ab") as target:
            for tensor_name, form in packed:
                # An optimizer may have made the weight: it is none of the graph in the file.
                if tensor_name in tensors:
                    moved = _move(form, source, target)
                    tensors[tensor_name].external_data.add(key=moved.key, value=str(moved))
    partial = path.with_suffix(".partial")
    onnx.save(model, partial)
    os.replace(partial, path)
    return data.stat().st_size - size


def _pack(path: Path, folder: Path) -> list[tuple[str, _PackedForm]]:
    """What ONNX Runtime packs of which weight; it writes both to `folder`."""
    options = make_session_options(1)
    options.optimized_model_filepath = str(folder / _GRAPH_FILE)
    prefix = "session.optimized_model_external_initializers_"
    options.add_session_config_entry(f"{prefix}file_name", _WEIGHTS_FILE)
    options.add_session_config_entry(f"{prefix}min_size_in_bytes", _SMALLEST_BYTES)
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return list(_read_forms(folder / _GRAPH_FILE))


def _read_forms(path: Path) -> Iterator[tuple[str, _PackedForm]]:
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        for entry in tensor.external_data:
            if _KEY.fullmatch(entry.key):
                yield tensor.name, _PackedForm.parse(entry.key, entry.value)


def _move(form: _PackedForm, source: BinaryIO, target: BinaryIO) -> _PackedForm:
    """Copy its buffers to the end of the target, each at the start of a page."""
    places = []
    for offset, length, rest in form.places:
        target.write(bytes(-target.tell() % _ALIGNMENT_BYTES))
        places.append((target.tell(), length, rest))
        source.seek(offset)
        target.write(source.read(length))
    return _PackedForm(key=form.key, name=form.name, places=tuple(places))
