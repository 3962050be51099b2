"""How many threads PyTorch computes with, for as long as something is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["torch_threads"]


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Set them within; None leaves PyTorch's own choice."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
