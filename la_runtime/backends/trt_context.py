"""An execution context that is told only what changed, and the CUDA graph of its last pass.

A CUDA graph holds the shapes and addresses it was captured with, and TensorRT leaves undefined what
it does once its context has others. So a context has one graph at most, dropped at any change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from la_runtime.backends.device import Device, DeviceGraph
from la_runtime.backends.trt_api import IExecutionContext
from la_runtime.errors import HostError

__all__ = ["BoundContext", "BoundTensor", "PassKey"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """Where a tensor of a pass is.

    Args:
        name: the tensor's.
        address: on the device.
        shape: of an input; an output's follows from them.
    """

    name: str
    address: int
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class PassKey:
    """All that decides the shapes and addresses of a pass.

    Args:
        batch: sequences.
        block: rows of each.
        rows: scored rows of each.
        columns: of the past.
        past: where the cache is.
        written: where the pass writes K/V.
    """

    batch: int
    block: int
    rows: int
    columns: int
    past: int
    written: int


class BoundContext:
    """A context and what it was told.

    Args:
        context: a fresh one.
        device: whose stream it runs on.
        check: raises when a call returned False; takes what was to be done.
        captures: whether passes that repeat are captured as a CUDA graph, as long as they can be.
    """

    def __init__(
        self,
        context: IExecutionContext,
        device: Device,
        check: Callable[[bool, str], None],
        *,
        captures: bool,
    ) -> None:
        self._context = context
        self._device = device
        self._check = check
        self._captures = captures
        self._profile: int | None = None
        self._key: PassKey | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._graph: DeviceGraph | None = None
        self._has_run = False  # as it is bound now

    def is_bound(self, key: PassKey) -> bool:
        """Whether it was bound for such a pass last."""
        return key == self._key

    def bind(self, key: PassKey, profile: int, tensors: Iterable[BoundTensor]) -> None:
        """Tell the context what a pass changes.

        Args:
            key: of the pass.
            profile: index of the profile to run it under.
            tensors: all inputs and outputs.

        Raises:
            HostError: TensorRT does not accept it.
        """
        self._forget_pass()
        if profile != self._profile:
            self._shapes, self._addresses = {}, {}  # TensorRT forgets the shapes
            self._check(
                self._context.set_optimization_profile_async(profile, self._device.stream),
                f"take profile {profile}",
            )
            self._profile = profile
        for tensor in tensors:
            name, shape = tensor.name, tensor.shape
            if shape is not None and self._shapes.get(name) != shape:
                done = self._context.set_input_shape(name, shape)
                self._check(done, f"take shape {shape} for {name}")
                self._shapes[name] = shape
            if self._addresses.get(name) != tensor.address:
                done = self._context.set_tensor_address(name, tensor.address)
                self._check(done, f"take an address for {name}")
                self._addresses[name] = tensor.address
        self._key = key

    def run(self) -> None:
        """Put the pass on the device's stream.

        The first one after a change is never captured: TensorRT does work then that cannot be.

        Raises:
            HostError: TensorRT refuses it.
        """
        if self._captures and self._has_run and self._graph is None:
            self._graph = self._capture()
        if self._graph is None:
            self._enqueue()
            self._has_run = True
        else:
            self._device.launch(self._graph)

    def _capture(self) -> DeviceGraph | None:
        """The pass as a CUDA graph; what cannot be captured once is never tried again."""
        try:
            return self._device.capture(self._enqueue)
        except HostError as error:
            self._captures = False
            width = None if self._key is None else self._key.block
            logger.warning(
                "passes of %s rows run without a CUDA graph, which is slower: %s", width, error
            )
            return None

    def _enqueue(self) -> None:
        self._check(self._context.execute_async_v3(self._device.stream), "run a pass")

    def _forget_pass(self) -> None:
        """Also when binding fails half way, so that the next pass binds anew."""
        self._key = None
        self._has_run = False
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def close(self) -> None:
        """Release the graph; the context goes when nothing refers to it."""
        self._forget_pass()
