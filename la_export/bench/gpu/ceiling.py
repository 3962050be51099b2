"""The least time that a decode step can take: the bytes it reads over the memory's bandwidth."""

from __future__ import annotations

from typing import Final

__all__ = ["LISTED_BANDWIDTHS", "find_listed_bandwidth", "least_step_ms"]

# Bytes a second, as NVIDIA's data sheets list them; the first name that a GPU's name holds counts.
LISTED_BANDWIDTHS: Final = {
    "H200": 4.8e12,
    "H100 NVL": 3.9e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "A100-SXM4-80GB": 2.039e12,
    "A100": 1.555e12,
    "L40S": 0.864e12,
    "L4": 0.3e12,
    "T4": 0.32e12,
    "RTX 5090": 1.792e12,
    "RTX 4090": 1.008e12,
    "RTX 3090": 0.936e12,
}


def find_listed_bandwidth(gpu_name: str) -> float | None:
    """Bytes a second of a GPU that is in the list, None for another."""
    listed = (bandwidth for name, bandwidth in LISTED_BANDWIDTHS.items() if name in gpu_name)
    return next(listed, None)


def least_step_ms(read_bytes: int, bandwidth: float) -> float:
    """Milliseconds to read so many bytes once.

    A step at small batch reads every weight and the cache once, whatever its rows; so this bounds
    plain decoding and a step with lookaheads alike.

    Args:
        read_bytes: weights and cache.
        bandwidth: bytes a second.
    """
    return 1000.0 * read_bytes / bandwidth
