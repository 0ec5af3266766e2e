"""The devices that the published runs are simulated on."""

from __future__ import annotations

from dataclasses import dataclass

from gpipebal.rates import DeviceRates, find_rates

__all__ = ["FAST", "FAST_LINK", "LINK", "MEMORY_LIMIT", "P40", "Link"]


@dataclass(frozen=True)
class Link:
    """What it takes to bring a tensor from one device to another.

    Attributes:
        name: What it is.
        bandwidth: Bytes a second, each way.
        latency: Seconds of every transfer, on top.
    """

    name: str
    bandwidth: float
    latency: float


#: torchgpipe's device. Launching an operation costs the host 6 us, the device 2 us at the least.
P40 = DeviceRates(
    "Tesla P40",
    {"float32": 12e12},
    bandwidth=346e9,
    memory_bytes=24 * 10**9,
    source="NVIDIA Tesla P40 datasheet",
)

#: What a partition may need: the device's memory, less 1.5 GB for context and fragmentation.
MEMORY_LIMIT = 22_500_000_000

#: Three quarters of what a PCI Express 3.0 slot of 16 lanes carries at best.
LINK = Link("PCI Express 3.0 x16, at three quarters of its peak", 12e9, 10e-6)

#: A device so fast that the host may not keep up.
FAST = find_rates("H100 SXM")

#: Three quarters of the 450 GB/s that such a device sends at best.
FAST_LINK = Link("NVLink 4, at three quarters of its peak", 337.5e9, 5e-6)
