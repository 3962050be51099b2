"""What docs/contract.md says of tensors and fields, read from `la_runtime.contract`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, cast

from la_export.pages.blocks import make_table, read_meanings
from la_runtime import contract
from la_runtime.contract import (
    CONTRACT_VERSION,
    Axis,
    CacheForm,
    Contract,
    Dtype,
    KvOrder,
    RowPlaces,
    TensorSpec,
    masked_value,
)

__all__ = ["CONTRACT_BLOCKS"]

# One layer, and sizes that stand for the names of their fields: no two are equal, none is 1.
_EXAMPLE: Final = Contract(
    num_layers=1,
    num_kv_heads=1009,
    head_dim=1013,
    hidden_size=1019,
    vocab_size=1021,
    k_max=1031,
    top_c=997,
    # A graph has its own dtypes of these two; on the page their fields' names stand for them.
    compute_dtype=cast("Dtype", "compute_dtype"),
    kv_dtype=cast("Dtype", "kv_dtype"),
)
_SCATTER: Final = dataclasses.replace(_EXAMPLE, cache_form=CacheForm.SCATTER, capacity=1033)
_GROWING: Final = dataclasses.replace(
    _SCATTER,
    capacity=None,
    kv_order=KvOrder.SEQUENCE_MAJOR,
    row_places=RowPlaces.CHOSEN,
)
_WIDTH: Final = _EXAMPLE.num_kv_heads * _EXAMPLE.head_dim
_ENUMS: Final[tuple[type[StrEnum], ...]] = (Dtype, CacheForm, KvOrder, RowPlaces)


def _render_tensors() -> str:
    """Cache form `concat` in full, then what is otherwise in `scatter`, and there in a variant."""
    in_variant = "`scatter` without a capacity, `sequence-major`, `chosen`"
    tables = (
        ("Inputs", _EXAMPLE.inputs),
        ("Outputs", _EXAMPLE.outputs),
        ("Inputs that are new or different in `scatter`", _new(_SCATTER, _EXAMPLE, "inputs")),
        ("Outputs that are new or different in `scatter`", _new(_SCATTER, _EXAMPLE, "outputs")),
        (f"Inputs that are different in {in_variant}", _new(_GROWING, _SCATTER, "inputs")),
        (f"Outputs that are different in {in_variant}", _new(_GROWING, _SCATTER, "outputs")),
    )
    header = ("Tensor", "Axes", "Dtype", "Meaning")
    return "\n\n".join(
        f"**{title}**\n\n{make_table(header, [_tensor_row(spec) for spec in specs])}"
        for title, specs in tables
    )


def _new(contract: Contract, known: Contract, side: str) -> list[TensorSpec]:
    """Inputs or outputs that another contract does not have like this."""
    return [spec for spec in getattr(contract, side) if spec not in getattr(known, side)]


def _tensor_row(spec: TensorSpec) -> tuple[str, ...]:
    axes = ", ".join(_axis_name(axis) for axis in spec.axes)
    return f"`{spec.name.replace('.0.', '.{i}.')}`", f"[{axes}]", str(spec.dtype), spec.meaning


def _axis_name(axis: Axis | int) -> str:
    if isinstance(axis, Axis) or axis == 1:
        return str(axis)
    if axis == _WIDTH:
        return "num_kv_heads * head_dim"
    return next(f.name for f in dataclasses.fields(Contract) if getattr(_SCATTER, f.name) == axis)


def _render_axes() -> str:
    meanings = read_meanings(inspect.getdoc(Axis))
    return make_table(
        ("Axis", "Meaning"), [(f"`{axis.value}`", meanings[axis.value]) for axis in Axis]
    )


def _render_enums() -> str:
    """Each enum as a list of its values."""
    parts = []
    for kind in _ENUMS:
        documentation = inspect.getdoc(kind) or ""
        meanings = read_meanings(documentation)
        summary = documentation.split("\n\n")[0].replace("``", "`")
        values = [
            ": ".join(filter(None, (f"- `{member.value}`", meanings.get(member.value))))
            for member in kind
        ]
        parts.append(f"**{kind.__name__}**. {' '.join(summary.split())}\n\n" + "\n".join(values))
    return "\n\n".join(parts)


def _render_fields() -> str:
    """The fields of `Contract`, as a manifest holds them."""
    meanings = read_meanings(inspect.getdoc(Contract))
    rows = []
    for field in dataclasses.fields(Contract):
        is_required = field.default is dataclasses.MISSING
        default = "" if is_required else f"`{field.default}`"
        rows.append((f"`{field.name}`", str(field.type), default, meanings[field.name]))
    return make_table(("Field", "Type", "Default", "Meaning"), rows)


def _render_version() -> str:
    """The version, and the module's last paragraph, which says what versions mean."""
    rule = (inspect.getdoc(contract) or "").split("\n\n")[-1]
    return f"This page describes version **{CONTRACT_VERSION}**.\n\n{rule}"


def _render_masked_values() -> str:
    floats = (dtype for dtype in Dtype if dtype is not Dtype.INT64)
    return make_table(
        ("Compute dtype", "Masked value"),
        [(f"`{dtype.value}`", f"{masked_value(dtype):g}") for dtype in floats],
    )


CONTRACT_BLOCKS: Final[Mapping[str, Callable[[], str]]] = {
    "contract-version": _render_version,
    "contract-tensors": _render_tensors,
    "contract-axes": _render_axes,
    "contract-enums": _render_enums,
    "contract-fields": _render_fields,
    "contract-masked": _render_masked_values,
}
