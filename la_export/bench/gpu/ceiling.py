"""The least time that a decode step can take: the bytes it reads over the memory's bandwidth."""

from __future__ import annotations

from typing import Final

__all__ = ["LISTED_BANDWIDTHS", "find_listed_bandwidth", "least_step_ms"]

# Bytes a second, as NVIDIA's data sheets list them, by the names that the driver gives. A name that
# only resembles one is of another GPU: an L40 is no L4, and a laptop's RTX 4090 no RTX 4090.
LISTED_BANDWIDTHS: Final = {
    "NVIDIA H200": 4.8e12,
    "NVIDIA H200 NVL": 4.8e12,
    "NVIDIA H100 NVL": 3.9e12,
    "NVIDIA H100 PCIe": 2.0e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA A100 80GB PCIe": 1.935e12,
    "NVIDIA A100-SXM4-40GB": 1.555e12,
    "NVIDIA A100-PCIE-40GB": 1.555e12,
    "NVIDIA L40S": 0.864e12,
    "NVIDIA L40": 0.864e12,
    "NVIDIA L4": 0.3e12,
    "Tesla T4": 0.32e12,
    "NVIDIA GeForce RTX 5090": 1.792e12,
    "NVIDIA GeForce RTX 4090": 1.008e12,
    "NVIDIA GeForce RTX 3090": 0.936e12,
}


def find_listed_bandwidth(gpu_name: str) -> float | None:
    """Bytes a second of a GPU that is in the list, None for another."""
    return LISTED_BANDWIDTHS.get(gpu_name)


def least_step_ms(read_bytes: int, bandwidth: float) -> float:
    """Milliseconds to read so many bytes once.

    A step at small batch reads every weight and the cache once, whatever its rows; so this bounds
    plain decoding and a step with lookaheads alike.

    Args:
        read_bytes: weights and cache.
        bandwidth: bytes a second.
    """
    return 1000.0 * read_bytes / bandwidth
