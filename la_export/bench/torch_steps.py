"""The time L(T) of a decode step of T rows in plain PyTorch, on a CPU or a GPU.

    python -m la_export.bench.torch_steps --shape llama-7b --device cuda --precision bf16

For machines on which no other backend is installed: it needs PyTorch and NumPy alone. The step is
the product's own, its rows laid out and masked by `la_runtime`; the decoder is written out here,
with random weights, because its time does not depend on their values. A test compares it with
transformers' own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Any, Final

import click
import numpy as np
import torch
from torch.nn import functional

from la_export.bench.gpu.shapes import SHAPES, DecoderShape
from la_runtime.errors import ExitCode
from la_runtime.layout import Layout, StepRows, make_rows
from la_runtime.masks import make_attention_mask

__all__ = ["Launch", "StepModel", "StepTime", "make_step_rows", "time_steps"]

_DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_MASKED: Final = np.float32(-1e4)
_NORM_EPSILON: Final = 1e-5
_SPREAD: Final = 0.02
_WARM_UPS: Final = 3


class Launch(StrEnum):
    """How a pass is started.

    ``eager``: kernel by kernel. ``graph``: as one CUDA graph, captured before.
    """

    EAGER = "eager"
    GRAPH = "graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of one kind of step.

    Args:
        k: lookahead length.
        layout: where its groups stand.
        rows: of the step.
        launch: how it was started.
        best_ms: the fastest pass.
        median_ms: the middle one.
    """

    k: int
    layout: Layout
    rows: int
    launch: Launch
    best_ms: float
    median_ms: float


class StepModel:
    """A decoder of the Llama family over a cache of fixed capacity.

    Args:
        shape: its sizes.
        device: where it runs.
        dtype: of weights, activations and cache.
        past: tokens that the cache holds.
        most_rows: rows of the widest block.
        weights: by transformers' names; random when not given.
    """

    def __init__(
        self,
        shape: DecoderShape,
        *,
        device: str,
        dtype: torch.dtype,
        past: int,
        most_rows: int,
        weights: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.shape = shape
        self.past = past
        self.device = device
        self.dtype = dtype
        self._weights = weights or _draw_weights(shape, device=device, dtype=dtype)
        capacity = past + most_rows
        self._cache = torch.zeros(
            (shape.num_layers, 2, shape.num_kv_heads, capacity, shape.head_dim),
            device=device,
            dtype=dtype,
        )
        frequencies = shape.rope_theta ** (
            -torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
        )
        angles = torch.arange(capacity, device=device)[:, None] * frequencies  # [capacity, half]
        self._cos = torch.cat([angles.cos()] * 2, dim=-1).to(dtype)
        self._sin = torch.cat([angles.sin()] * 2, dim=-1).to(dtype)

    @torch.no_grad()
    def forward(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """One block behind the past.

        Args:
            token_ids: [rows].
            position_ids: [rows].
            mask: [rows, past + rows] additive, in the model's dtype.

        Returns:
            [rows, vocab_size] logits.
        """
        hidden = functional.embedding(token_ids, self._weights["model.embed_tokens.weight"])
        cos, sin = self._cos[position_ids], self._sin[position_ids]  # [rows, head_dim]
        for layer in range(self.shape.num_layers):
            prefix = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{prefix}.input_layernorm")
            hidden = hidden + self._attend(normed, layer, cos, sin, mask)
            normed = self._norm(hidden, f"{prefix}.post_attention_layernorm")
            gate = functional.silu(self._project(normed, f"{prefix}.mlp.gate_proj"))
            inner = gate * self._project(normed, f"{prefix}.mlp.up_proj")
            hidden = hidden + self._project(inner, f"{prefix}.mlp.down_proj")
        head = "model.embed_tokens" if self.shape.is_tied else "lm_head"
        return self._project(self._norm(hidden, "model.norm"), head)

    def _attend(
        self,
        normed: torch.Tensor,
        layer: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        prefix = f"model.layers.{layer}.self_attn"
        rows, head_dim = normed.shape[0], self.shape.head_dim
        query, key, value = (
            self._project(normed, f"{prefix}.{part}_proj").view(rows, -1, head_dim).transpose(0, 1)
            for part in "qkv"
        )  # [heads, rows, head_dim]
        stop = self.past + rows
        self._cache[layer, 0, :, self.past : stop] = _rotate(key, cos, sin)
        self._cache[layer, 1, :, self.past : stop] = value
        attended = functional.scaled_dot_product_attention(
            _rotate(query, cos, sin)[None],
            self._cache[layer, 0, :, :stop][None],
            self._cache[layer, 1, :, :stop][None],
            attn_mask=mask,
            enable_gqa=self.shape.num_heads != self.shape.num_kv_heads,
        )[0]
        return self._project(attended.transpose(0, 1).reshape(rows, -1), f"{prefix}.o_proj")

    def _project(self, values: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(values, self._weights[f"{name}.weight"])

    def _norm(self, values: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(
            values, (self.shape.hidden_size,), self._weights[f"{name}.weight"], _NORM_EPSILON
        )


def _rotate(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [heads, rows, head_dim], halves as transformers pairs them."""
    first, second = values.chunk(2, dim=-1)
    return values * cos + torch.cat([-second, first], dim=-1) * sin


def _draw_weights(
    shape: DecoderShape, *, device: str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    def draw(*size: int) -> torch.Tensor:
        return torch.empty(size, device=device, dtype=dtype).normal_(0.0, _SPREAD)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries = shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    weights = {"model.embed_tokens.weight": draw(shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = torch.ones(hidden, device=device, dtype=dtype)
        for name, size in {"q": queries, "k": keys, "v": keys}.items():
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = draw(size, hidden)
        weights[f"{prefix}.self_attn.o_proj.weight"] = draw(hidden, queries)
        for name in ("gate", "up"):
            weights[f"{prefix}.mlp.{name}_proj.weight"] = draw(inner, hidden)
        weights[f"{prefix}.mlp.down_proj.weight"] = draw(hidden, inner)
    weights["model.norm.weight"] = torch.ones(hidden, device=device, dtype=dtype)
    if not shape.is_tied:
        weights["lm_head.weight"] = draw(shape.vocab_size, hidden)
    return weights


def make_step_rows(k: int, layout: Layout) -> StepRows:
    """The rows of the widest step: the root, k drafts in a chain, and the layout's groups."""
    return make_rows(1, tuple(range(k)), layout.groups(k, k))


def time_steps(
    model: StepModel,
    steps: Sequence[tuple[int, Layout]],
    *,
    launches: Sequence[Launch],
    rounds: int,
) -> list[StepTime]:
    """Time each kind of step; the kinds take turns, so that a drifting machine slows all of them.

    Args:
        model: what runs them.
        steps: lookahead length and layout of each kind.
        launches: how passes are started.
        rounds: passes of each kind.
    """
    kinds = [(k, layout, launch) for k, layout in steps for launch in launches]
    calls = [_prepare(model, make_step_rows(k, layout), launch) for k, layout, launch in kinds]
    seconds: list[list[float]] = [[] for _ in kinds]
    for call in calls:
        for _ in range(_WARM_UPS):
            _time(call, model.device)
    for _ in range(rounds):
        for call, times in zip(calls, seconds, strict=True):
            times.append(_time(call, model.device))
    return [
        StepTime(
            k=k,
            layout=layout,
            rows=layout.max_rows(k),
            launch=launch,
            best_ms=1000 * min(times),
            median_ms=1000 * median(times),
        )
        for (k, layout, launch), times in zip(kinds, seconds, strict=True)
    ]


def _prepare(model: StepModel, rows: StepRows, launch: Launch) -> Callable[[], object]:
    """A pass over inputs that lie on the device, greedy choice included."""
    mask = make_attention_mask(
        [rows],
        np.array([model.past]),
        block_columns=np.array([model.past]),
        num_keys=model.past + rows.num_rows,
        block_len=rows.num_rows,
        masked=_MASKED,
    )[0, 0]
    token_ids = torch.arange(rows.num_rows, device=model.device)
    position_ids = torch.tensor(rows.offsets + model.past, device=model.device)
    additive = torch.tensor(mask, device=model.device, dtype=model.dtype)

    def run() -> torch.Tensor:
        return model.forward(token_ids, position_ids, additive).argmax(dim=-1)

    if launch is Launch.EAGER:
        return run
    # Libraries set themselves up in their first passes, which must not be captured.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _time(call: Callable[[], object], device: str) -> float:
    if device == "cpu":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1000


@click.command()
@click.option("--shape", "name", type=click.Choice(sorted(SHAPES)), default="smollm2-135m")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True)
@click.option("--precision", type=click.Choice(sorted(_DTYPES)), default="bf16", show_default=True)
@click.option("--k", "lengths", type=int, multiple=True, default=(0, 2, 4, 8), show_default=True)
@click.option("--past", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--layers", type=click.IntRange(min=1), help="Fewer layers, for a quick look.")
def _main(
    name: str,
    device: str,
    precision: str,
    lengths: tuple[int, ...],
    past: int,
    rounds: int,
    layers: int | None,
) -> None:
    """Time steps of every lookahead length in both layouts; prints one JSON object.

    Ends with 4 where PyTorch has no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        click.echo(
            f"error: PyTorch {torch.__version__} finds no GPU; install a build for CUDA, or give "
            "--device cpu",
            err=True,
        )
        sys.exit(ExitCode.ENVIRONMENT)
    shape = SHAPES[name] if layers is None else replace(SHAPES[name], num_layers=layers)
    steps = [(k, layout) for k in lengths for layout in (Layout if k else [Layout.ROOT_ONLY])]
    model = StepModel(
        shape,
        device=device,
        dtype=_DTYPES[precision],
        past=past,
        most_rows=max(layout.max_rows(k) for k, layout in steps),
    )
    launches = list(Launch) if device == "cuda" else [Launch.EAGER]
    times = time_steps(model, steps, launches=launches, rounds=rounds)
    click.echo(json.dumps(_record(model, times, precision), indent=1))


def _record(model: StepModel, times: Sequence[StepTime], precision: str) -> dict[str, Any]:
    width = torch.empty(0, dtype=model.dtype).element_size()
    shape = model.shape
    return {
        "library": f"torch {torch.__version__}",
        "shape": shape.name,
        "layers": shape.num_layers,
        "precision": precision,
        "device": model.device,
        "past": model.past,
        "read_bytes": width * (shape.num_read + model.past * shape.kv_per_token),
        "steps": [
            {
                "k": entry.k,
                "layout": entry.layout.value,
                "rows": entry.rows,
                "launch": entry.launch.value,
                "best_ms": entry.best_ms,
                "median_ms": entry.median_ms,
            }
            for entry in times
        ],
    }


if __name__ == "__main__":
    _main()
