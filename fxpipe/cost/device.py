"""Nominal speeds of devices."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
    """How fast a device is. Balance needs the ratio of the two numbers more than either."""

    flops_per_s: float
    bytes_per_s: float

    def seconds(self, flops: int, moved_bytes: int) -> float:
        """The larger of both times: arithmetic and memory work side by side."""
        return max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s)


A100 = Device(flops_per_s=312e12, bytes_per_s=2.039e12)
"""bf16 on tensor cores, dense; 80 GB SXM. Source: NVIDIA A100 data sheet."""

H100 = Device(flops_per_s=989e12, bytes_per_s=3.35e12)
"""bf16 on tensor cores, dense; SXM. Source: NVIDIA H100 data sheet, halved where it says sparse."""

CPU = Device(flops_per_s=1e12, bytes_per_s=1e11)
"""float32 on one server socket: 16 cores x 2 GHz x 32 FLOPs a cycle (two multiply-adds of 8 lanes,
AVX2), and 4 channels of DDR4-3200; both rounded to one digit."""
