"""The devices that the published runs are simulated on."""

from __future__ import annotations

from gpipebal.problem import Link
from gpipebal.rates import find_rates

#: What a partition may need: the memory of torchgpipe's device, less 1.5 GB for context and
#: fragmentation.
MEMORY_LIMIT = 22_500_000_000

#: Three quarters of what a PCI Express 3.0 slot of 16 lanes carries at best.
LINK = Link(12e9, 10e-6)
LINK_NAME = "PCI Express 3.0 x16, at three quarters of its peak"

#: A device so fast that the host may not keep up.
FAST = find_rates("H100 SXM")

#: Three quarters of the 450 GB/s that such a device sends at best.
FAST_LINK = Link(337.5e9, 5e-6)
FAST_LINK_NAME = "NVLink 4, at three quarters of its peak"
