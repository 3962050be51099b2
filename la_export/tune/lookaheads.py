"""What is trained: the lookahead vectors, and a low-rank adapter of the rows they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from la_export.adapter import Adapter, AdapterPair

__all__ = ["Lookaheads", "Site", "find_sites"]

# The first layers that have no adapter: one in so many.
_LAYERS_WITHOUT: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Linear layers that read one activation.

    Args:
        layers: their names.
        sizes: output features of each.
        width: input features.
    """

    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    width: int


@torch.no_grad()
def find_sites(model: PreTrainedModel, *, everywhere: bool = False) -> tuple[Site, ...]:
    """Where an adapter adds: what reads a norm, in all but the first quarter of the layers.

    Each site costs a pass several operators, whatever its rank, so the places that bring least are
    left out: the output projections of attention and MLP, and the first layers.

    A model whose linear layers read no norm has a site wherever one of them reads.

    Args:
        model: found out by running it on a token.
        everywhere: wherever a linear layer of a decoder layer reads.
    """
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    first = 0 if everywhere else len(decoder.layers) // _LAYERS_WITHOUT
    names = {
        module: f"{prefix}.layers.{name}"
        for name, module in decoder.layers.named_modules()
        if isinstance(module, nn.Linear) and int(name.split(".")[0]) >= first
    }
    norms = [module for module in decoder.layers.modules() if "Norm" in type(module).__name__]
    # Activations are kept until the end, so that no two have one identity.
    readers: dict[int, tuple[torch.Tensor, list[nn.Linear]]] = {}
    normed: dict[int, torch.Tensor] = {}

    def record(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear), "only linear layers are watched"
        readers.setdefault(id(inputs[0]), (inputs[0], []))[1].append(layer)

    def record_norm(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        del inputs
        normed[id(output)] = output

    handles = [layer.register_forward_pre_hook(record) for layer in names]
    handles += [norm.register_forward_hook(record_norm) for norm in norms]
    try:
        decoder(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False
        )
    finally:
        for handle in handles:
            handle.remove()
    all_layers = [layers for _, layers in readers.values()]
    behind_norms = [layers for place, (_, layers) in readers.items() if place in normed]
    return tuple(
        Site(
            layers=tuple(names[layer] for layer in layers),
            sizes=tuple(layer.out_features for layer in layers),
            width=layers[0].in_features,
        )
        for layers in (all_layers if everywhere else behind_norms or all_layers)
    )


class Lookaheads(nn.Module):
    """Trained in float32, used in the model's own dtype.

    Args:
        vectors: [k, hidden] to begin with.
        sites: where the adapter adds; none without one.
        rank: of each site.
    """

    def __init__(self, vectors: torch.Tensor, sites: Sequence[Site], rank: int) -> None:
        super().__init__()
        self._sites = tuple(sites)
        self.vectors = nn.Parameter(vectors.detach().float().clone())
        generator = torch.Generator().manual_seed(0)
        self.reduce = nn.ParameterList(
            torch.randn(rank, site.width, generator=generator) / site.width**0.5 for site in sites
        )
        self.expand = nn.ParameterList(torch.zeros(sum(site.sizes), rank) for site in sites)

    @classmethod
    def of_weights(cls, vectors: NDArray[np.float32], adapter: Adapter) -> Lookaheads:
        """Those of a file."""
        sites = tuple(
            Site(layers=pair.layers, sizes=pair.sizes, width=pair.reduce.shape[1])
            for pair in adapter.pairs
        )
        rank = adapter.pairs[0].rank if adapter.pairs else 0
        made = cls(torch.from_numpy(vectors), sites, rank)
        with torch.no_grad():
            for index, pair in enumerate(adapter.pairs):
                made.reduce[index].copy_(torch.from_numpy(pair.reduce))
                made.expand[index].copy_(torch.from_numpy(pair.expand))
        return made

    @contextmanager
    def attached(self, model: PreTrainedModel) -> Iterator[None]:
        """Within it every row of the model is a lookahead's."""
        handles = []
        for site, reduce, expand in zip(self._sites, self.reduce, self.expand, strict=True):
            parts = expand.to(model.dtype).split(site.sizes)
            reduce = reduce.to(model.dtype)
            for name, part in zip(site.layers, parts, strict=True):
                hook = _Addition(reduce, part)
                handles.append(model.get_submodule(name).register_forward_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def round_adapter(self) -> None:
        """To the numbers of float16, which is what a file holds."""
        for part in (*self.reduce, *self.expand):
            part.copy_(part.half().float())

    def adapter(self) -> Adapter:
        """The adapter as it is now."""
        return Adapter(
            pairs=tuple(
                AdapterPair(
                    layers=site.layers,
                    sizes=site.sizes,
                    reduce=reduce.detach().cpu().numpy().copy(),
                    expand=expand.detach().cpu().numpy().copy(),
                )
                for site, reduce, expand in zip(self._sites, self.reduce, self.expand, strict=True)
            )
        )


class _Addition:
    """Adds to what a linear layer gave."""

    def __init__(self, reduce: torch.Tensor, expand: torch.Tensor) -> None:
        self._reduce = reduce.T
        self._expand = expand.T

    def __call__(
        self, _: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        middle = inputs[0].flatten(0, -2) @ self._reduce
        return torch.addmm(output.flatten(0, -2), middle, self._expand).view_as(output)
