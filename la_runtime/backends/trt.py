"""TensorRT, or TensorRT for RTX, over the plans of a bundle. Free of torch.

All memory a pass needs is allocated when the plan is opened; a pass copies each input to the device
once and brings back the scores that were asked for. The cache never leaves the device.

Each block width of the plan's `graph_widths` has an execution context of its own, whose pass is
captured as a CUDA graph when it repeats; all other passes share one more. How many rows are scored
changes from pass to pass, and a graph would not outlive that: those passes score as many as there
are. Passes run one after the other, so the contexts share the memory of their activations. They
belong to one backend: whoever works at the same time opens another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.array_scores import DeviceScores, score_names
from la_runtime.backends.base import CacheSizing, CacheState, Outputs, PassLimits, StepInputs
from la_runtime.backends.cuda import CudaDevice
from la_runtime.backends.device import Device
from la_runtime.backends.device_cache import DeviceCache
from la_runtime.backends.gpu import read_gpu
from la_runtime.backends.lookahead_vectors import load_lookahead_vectors, store_lookahead_vectors
from la_runtime.backends.trt_api import TensorRT
from la_runtime.backends.trt_context import BoundContext, BoundTensor, PassKey
from la_runtime.backends.trt_engine import PlanEngine, load_tensorrt
from la_runtime.backends.trt_memory import PassResults, StagedInput
from la_runtime.backends.trt_plan import (
    check_host,
    choose_plan,
    choose_profile,
    largest_bytes,
    plan_limits,
    plan_room,
)
from la_runtime.bundle import Bundle
from la_runtime.contract import Axis, CacheForm, Contract, Name
from la_runtime.errors import UsageError
from la_runtime.plans import PlanFacts, PlanTarget

__all__ = ["TrtBackend"]

_KEPT_CHOICES = 256


class TrtBackend:
    """A plan of a bundle on a GPU.

    Args:
        bundle: an opened bundle.
        plan: one of its plans, which runs on this machine.
        tensorrt: the module that runs it.
        device: where it runs; closed with the backend.

    Raises:
        BundleError: TensorRT cannot load the plan, or it is not what the manifest says.
        HostError: the GPU's memory does not suffice.
    """

    def __init__(self, bundle: Bundle, plan: PlanFacts, tensorrt: TensorRT, device: Device) -> None:
        manifest = bundle.manifest
        self.contract: Contract = manifest.contract
        self.widths = tuple(sorted(plan.graph_widths))
        self.limits: PassLimits = plan_limits(plan, self.contract, context=manifest.model.context)
        assert self.limits.rows is not None, "every profile bounds it"
        self._most_rows = self.limits.rows
        self._plan = plan
        self._device = device
        self._engine: PlanEngine | None = PlanEngine(
            tensorrt,
            device,
            plan=plan,
            contract=self.contract,
            path=bundle.path(plan.path),
            graph=bundle.path(manifest.graph),
        )
        self._is_scatter = self.contract.cache_form is CacheForm.SCATTER
        self._room = plan_room(plan, self.contract)
        self._find_profile = lru_cache(_KEPT_CHOICES)(self._choose_profile)
        self._specs = {spec.name: spec for spec in (*self.contract.inputs, *self.contract.outputs)}
        self._allocate_tensors()
        self._make_contexts(self._engine)
        self._results: WeakKeyDictionary[DeviceCache, PassResults] = WeakKeyDictionary()
        self.set_lookahead_embeddings(load_lookahead_vectors(bundle))

    @classmethod
    def open(cls, bundle: Bundle, *, target: PlanTarget, k: int | None) -> TrtBackend:
        """Open the plan for a lookahead length.

        Args:
            bundle: an opened bundle.
            target: which TensorRT.
            k: lookahead length to serve; the largest built when None.

        Raises:
            BundleError: there is no such plan, or it is not what the manifest says.
            UsageError: none takes blocks of so long a lookahead.
            HostError: the plan was built for another machine, or this one lacks something.
        """
        plan = choose_plan(bundle.manifest, target, k)
        gpu = read_gpu()
        tensorrt = load_tensorrt(plan)
        check_host(plan, tensorrt.__version__, gpu)
        device = CudaDevice()
        try:
            return cls(bundle, plan, tensorrt, device)
        except BaseException:
            device.close()
            raise

    def _allocate_tensors(self) -> None:
        contract, device = self.contract, self._device
        self._inputs = {
            spec.name: StagedInput(device, largest_bytes(self._plan, spec), spec.name)
            for spec in contract.inputs
            if spec.name not in contract.past_names
        }
        self._scores = {
            spec.name: device.allocate(largest_bytes(self._plan, spec), f"output {spec.name}")
            for spec in contract.outputs
            if spec.name not in (*contract.block_names, *contract.present_names)
        }

    def _make_contexts(self, engine: PlanEngine) -> None:
        """One per captured width, and one for all other passes."""
        if self._plan.target is PlanTarget.TRT_RTX and self.widths:
            context = engine.make_capturing_context()
            self._others = BoundContext(context, self._device, engine.check, captures=False)
            self._captured: dict[int, BoundContext] = {}
            return
        size = engine.activation_bytes
        self._activations = self._device.allocate(size, "activations")

        def make(*, captures: bool) -> BoundContext:
            context = engine.make_context()
            context.set_device_memory(self._activations.address, self._activations.size_bytes)
            return BoundContext(context, self._device, engine.check, captures=captures)

        self._others = make(captures=False)
        self._captured = {width: make(captures=True) for width in self.widths}

    def allocate(self, batch: int, sizing: CacheSizing) -> CacheState:
        """See `Backend.allocate`.

        Raises:
            HostError: the GPU's memory does not suffice.
        """
        self._check_open()
        return DeviceCache(self.contract, self._device, batch=batch, sizing=sizing, room=self._room)

    def forward(self, state: CacheState, inputs: StepInputs) -> DeviceScores:
        """See `Backend.forward`.

        Raises:
            UsageError: the pass is larger than the plan takes.
            HostError: TensorRT or the GPU failed.
        """
        assert isinstance(state, DeviceCache), "a cache of this backend"
        self._check_open()
        batch, block = inputs.input_ids.shape
        logits_rows = self._pad_rows(inputs)
        results = self._results_of(state)
        if not self._is_scatter:
            results.lay_out_block(batch, block)
        key = PassKey(
            batch=batch,
            block=block,
            rows=logits_rows.shape[1],
            columns=state.past_len,
            past=state.address,
            written=state.address if self._is_scatter else results.block.address,
        )
        context = self._captured.get(block, self._others)
        if not context.is_bound(key):
            profile = self._find_profile(batch, block, key.rows, key.columns)
            context.bind(key, profile, self._bound_tensors(key, state, results))
        self._put_inputs(state, inputs, logits_rows)
        context.run()
        scores = self._fetch(results, inputs, key.rows)
        self._device.synchronize()
        return scores

    def _pad_rows(self, inputs: StepInputs) -> NDArray[np.int64]:
        """The rows to score: those that are wanted, and behind them row 0 as often as it takes.

        TensorRT has no empty axis of rows, so it is one at least. In a captured width it is as many
        as the block has, but where whole rows of logits would be computed and brought back.
        """
        wanted = inputs.logits_rows if inputs.outputs else inputs.logits_rows[:, :0]
        batch, block = inputs.input_ids.shape
        num_rows = max(wanted.shape[1], 1)
        if block in self.widths and Outputs.LOGITS not in inputs.outputs:
            num_rows = max(num_rows, min(block, self._most_rows))
        padded = np.zeros((batch, num_rows), dtype=np.int64)
        padded[:, : wanted.shape[1]] = wanted
        return padded

    def _results_of(self, state: DeviceCache) -> PassResults:
        results = self._results.get(state)
        if results is None:
            results = self._results[state] = PassResults(self._device, self.contract)
        return results

    def _choose_profile(self, batch: int, block: int, rows: int, columns: int) -> int:
        sizes = {Axis.BATCH: batch, Axis.BLOCK: block, Axis.ROWS: rows}
        if not self._is_scatter:
            sizes |= {Axis.PAST: columns, Axis.KEYS: columns + block}
        return choose_profile(self._plan, sizes)

    def _bound_tensors(
        self, key: PassKey, state: DeviceCache, results: PassResults
    ) -> Iterator[BoundTensor]:
        """Every input and output of a pass, where it is."""
        contract = self.contract
        sizes = {
            Axis.BATCH: key.batch,
            Axis.BLOCK: key.block,
            Axis.ROWS: key.rows,
            Axis.PAST: key.columns,
            Axis.KEYS: key.columns + key.block,
        }
        for name, staged in self._inputs.items():
            axes = self._specs[name].axes
            shape = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in axes)
            yield BoundTensor(name, staged.address, shape)
        places = state.planes.addresses(state.address)
        shape = (key.batch, contract.num_kv_heads, key.columns, contract.head_dim)
        for name, address in zip(contract.past_names, places, strict=True):
            yield BoundTensor(name, address, shape)
        for name, memory in self._scores.items():
            yield BoundTensor(name, memory.address, None)
        if self._is_scatter:
            names, written = contract.present_names, places  # over the past
        else:
            names, written = contract.block_names, results.block_addresses
        for name, address in zip(names, written, strict=True):
            yield BoundTensor(name, address, None)

    def _put_inputs(
        self, state: DeviceCache, inputs: StepInputs, logits_rows: NDArray[np.int64]
    ) -> None:
        keys = state.num_keys(inputs.input_ids.shape[1])
        assert inputs.attention_mask.shape[-1] == keys, "the mask is for the columns there are"
        self._inputs[Name.INPUT_IDS].put(inputs.input_ids)
        self._inputs[Name.POSITION_IDS].put(inputs.position_ids)
        self._inputs[Name.ATTENTION_MASK].put(inputs.attention_mask)
        if inputs.sliding_attention_mask is not None:
            self._inputs[Name.SLIDING_ATTENTION_MASK].put(inputs.sliding_attention_mask)
        self._inputs[Name.LOGITS_ROWS].put(logits_rows)
        if self._is_scatter:
            last = int(state.lengths.max()) + inputs.input_ids.shape[1]
            assert last <= state.past_len, "the block fits behind every sequence"
            self._inputs[Name.WRITE_INDEX].put(state.lengths)

    def _fetch(self, results: PassResults, inputs: StepInputs, num_rows: int) -> DeviceScores:
        """Ask for the scores that will be read, and no others."""
        batch, wanted = inputs.logits_rows.shape
        scores: dict[str, NDArray[np.generic]] = {}
        for name in score_names(inputs.outputs, omits=()):
            computed = results.scores(self._specs[name], (batch, num_rows))
            self._device.download(computed, self._scores[name].address)
            scores[name] = computed[:, :wanted]
        return DeviceScores(scores)

    def commit(self, state: CacheState, rows: Sequence[Sequence[int]]) -> None:
        """See `Backend.commit`."""
        assert isinstance(state, DeviceCache), "a cache of this backend"
        if self._is_scatter:
            state.settle(rows)
        else:
            state.append(rows, self._results_of(state).block)

    def set_lookahead_embeddings(self, embeddings: NDArray[np.floating]) -> None:
        """See `Backend.set_lookahead_embeddings`.

        Raises:
            BundleError: they have another shape, or a component is not finite.
        """
        self._inputs[Name.LOOKAHEAD_EMBEDDINGS].put(
            store_lookahead_vectors(embeddings, self.contract)
        )
        self._device.synchronize()

    def close(self) -> None:
        """See `Backend.close`."""
        if self._engine is None:
            return
        for context in (self._others, *self._captured.values()):
            context.close()
        # Contexts before their engine, and both before the memory they use.
        del self._others, self._captured
        self._engine = None
        self._device.close()

    def _check_open(self) -> None:
        if self._engine is None:
            raise UsageError("the engine is closed; open the bundle again")
