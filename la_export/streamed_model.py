"""Runs a model whose weights memory does not hold: each part has them only while it runs.

Parts are the embedding, every decoder layer, what stands behind them, and the head. A pass reads
every weight once, so it pays to put many sequences into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from la_export.options import Precision
from la_export.quantize.emulation import IntegerLinear
from la_export.quantize.integers import (
    QuantizedBlocks,
    QuantizedRows,
    quantize_blocks,
    quantize_rows,
)
from la_export.quantize.smoothing import Smoothing
from la_runtime.storage import round_to

__all__ = ["HeldWeights", "stream_weights"]

_HALVES: Final = frozenset({Precision.FP16, Precision.BF16})


@dataclass(slots=True, kw_only=True)
class HeldWeights:
    """A model's parameters as a graph of some precision holds them, read one at a time.

    Args:
        read: gives a parameter of the source model, float32.
        smoothing: of the parameters.
        precision: of the graph.
        names: of every parameter, each with all its names; tied ones have several.
        by_row: names of parameters that int8 holds as rows of integers.
        in_blocks: names of parameters that int4 holds as blocks of integers.
        stored: gives the integers of those that are to be had without making them.
    """

    read: Callable[[str], NDArray[np.float32]]
    smoothing: Smoothing
    precision: Precision
    names: tuple[tuple[str, ...], ...]
    by_row: frozenset[str]
    in_blocks: frozenset[str]
    stored: Callable[[str], QuantizedRows | QuantizedBlocks | None] | None = None

    @classmethod
    def of_model(
        cls,
        model: PreTrainedModel,
        read: Callable[[str], NDArray[np.float32]],
        *,
        smoothing: Smoothing,
        precision: Precision,
    ) -> HeldWeights:
        """Of a model as it is before anything is replaced in it."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        linears = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        ends = {
            name
            for module in (model.get_input_embeddings(), model.get_output_embeddings())
            for name in names[module.weight]  # type: ignore[index]
        }
        return cls(
            read=read,
            smoothing=smoothing,
            precision=precision,
            names=tuple(map(tuple, names.values())),
            by_row=frozenset(
                (linears | ends if precision is Precision.INT8 else ends)
                if precision.is_integer
                else ()
            ),
            in_blocks=frozenset(linears - ends if precision is Precision.INT4 else ()),
        )

    def integers(self, name: str) -> QuantizedRows | QuantizedBlocks | None:
        """A parameter that is held in integers; None for one that is not."""
        if self.stored is not None:
            for alias in next((names for names in self.names if name in names), ()):
                if (found := self.stored(alias)) is not None:
                    return found
        if name in self.by_row:
            return quantize_rows(self._smoothed(name))
        if name in self.in_blocks:
            return quantize_blocks(self._smoothed(name))
        return None

    def require_integers(self, name: str) -> QuantizedRows | QuantizedBlocks:
        """A parameter that is held in integers."""
        found = self.integers(name)
        assert found is not None, f"{name} is held in integers"
        return found

    def floats(self, name: str) -> NDArray[np.float32]:
        """A parameter as float32, integers times their scales."""
        if (integers := self.integers(name)) is not None:
            return integers.to_float()
        array = self._smoothed(name)
        return round_to(array, self.precision.dtype) if self.precision in _HALVES else array

    def _smoothed(self, name: str) -> NDArray[np.float32]:
        return self.smoothing.apply(name, self.read(name))


def stream_weights(model: PreTrainedModel, held: HeldWeights) -> None:
    """Let every part of a model fetch its weights when it runs, and let go of them behind it.

    Args:
        model: its parameters on the meta device, its buffers in memory; changed in place.
        held: what the weights are. What int8 multiplies in integers is replaced as in
            `quantize.emulation`.
    """
    names = {module: str(name) for name, module in model.named_modules()}
    _replace_linears(model, held)
    for part, name in list(_parts(model, names)):
        part.register_forward_pre_hook(partial(_fill, prefix=name, held=held))
        part.register_forward_hook(_empty, always_call=True)


def _parts(
    model: PreTrainedModel, names: Mapping[nn.Module, str]
) -> Iterator[tuple[nn.Module, str]]:
    """Modules that together hold every weight once, and their names."""
    decoder = model.get_decoder()
    found = {module: names[module] for module in decoder.layers}
    for name, module in model.named_modules():
        is_inside = any(name == n or name.startswith(n + ".") for n in found.values())
        if not is_inside and (
            next(module.parameters(recurse=False), None) is not None
            or isinstance(module, IntegerLinear)
        ):
            found[module] = str(name)
    yield from found.items()


def _replace_linears(model: PreTrainedModel, held: HeldWeights) -> None:
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or f"{name}.weight" not in held.by_row:
            continue
        if held.precision is Precision.INT8 or module is head:
            model.set_submodule(name, IntegerLinear.without_weight(module.bias))


@torch.no_grad()
def _fill(part: nn.Module, _: object, *, prefix: str, held: HeldWeights) -> None:
    for name, module in part.named_modules():
        place = ".".join(filter(None, (prefix, name)))
        for leaf in list(module._parameters):
            if module._parameters[leaf] is not None:
                array = np.ascontiguousarray(held.floats(f"{place}.{leaf}"))
                module._parameters[leaf] = nn.Parameter(
                    torch.from_numpy(array), requires_grad=False
                )
        if isinstance(module, IntegerLinear):
            weight = held.require_integers(f"{place}.weight")
            assert isinstance(weight, QuantizedRows), "a product of integers has rows of them"
            module.hold(weight)


def _empty(part: nn.Module, *_: object) -> None:
    for module in part.modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[leaf] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        if isinstance(module, IntegerLinear):
            module.let_go()
