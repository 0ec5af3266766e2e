"""Devices that published experiments were run on."""

from gpipebal.rates import DeviceRates

__all__ = ["P40"]

#: torchgpipe's device. Launching an operation costs the host 6 us, the device 2 us at the least.
P40 = DeviceRates(
    "Tesla P40",
    {"float32": 12e12},
    bandwidth=346e9,
    memory_bytes=24 * 10**9,
    source="NVIDIA Tesla P40 datasheet",
)
