"""Rates: how fast devices are at best, to estimate times without the device.

The table holds what the makers publish: operations per second of *dense* matrices (advertisements
often give twice as much, for sparse ones), bytes per second from memory, and bytes of memory. A
real program reaches a part of these rates, large matrices about two thirds, small operations far
less: `DeviceRates.scaled` makes rates of a device that reaches given shares of its peaks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from gpipebal.argument_kinds import is_word, plain_number
from gpipebal.errors import DeviceError

__all__ = ["RATES", "DeviceRates", "find_rates"]

#: Kinds of devices whose operations are told apart (an attention kernel, a mask of dropout).
DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True)
class DeviceRates:
    """Peak rates of a device.

    Attributes:
        name: Name of the device.
        flops: Floating-point operations per second by dtype, dense: ``"float32"``,
            ``"bfloat16"`` and so on, and ``"tensorfloat32"`` for float32 on tensor cores. A
            multiply-add is two. A dtype that is missing has the rate of ``"float32"``.
        bandwidth: Bytes per second to and from memory.
        memory_bytes: Bytes of memory that the maker states; None: as much as the machine has.
        device_type: ``"cuda"`` or ``"cpu"``: decides which kernels run.
        launch_time: Seconds that the device needs for an operation, however small.
        host_time: Seconds that the host needs to launch an operation; None: the device is the
            host, and `launch_time` has it all.
        source: Where the figures come from.
        has_flash: Whether a CUDA device runs flash attention in half precision (Ampere or later);
            None: yes if `flops` has a rate for ``"bfloat16"``, which older devices lack. Decided
            once, when the object is made.

    Raises:
        DeviceError: a rate is not a positive number.

    Example:
        >>> rates = DeviceRates("mine", {"float32": 20e12, "bfloat16": 80e12}, bandwidth=1e12)
        >>> rates.flops_of("bfloat16"), rates.flops_of("float64")
        (80000000000000.0, 20000000000000.0)
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory_bytes: int | None = None
    device_type: str = "cuda"
    launch_time: float = 2e-6
    host_time: float | None = 6e-6
    source: str = field(default="", repr=False)
    has_flash: bool | None = None

    def __post_init__(self) -> None:
        if not is_word(self.device_type, *DEVICE_TYPES):
            raise DeviceError(
                f"rates of {self.name!r} are for an unknown kind of device: "
                f"device_type={self.device_type!r} (expected 'cuda' or 'cpu').\n"
                "Fix: device_type='cuda' for a GPU."
            )
        if not isinstance(self.flops, Mapping):
            raise DeviceError(
                f"rates of {self.name!r} are not a mapping: flops={self.flops!r:.60} (expected "
                "rates by dtype).\nFix: DeviceRates(name, {'float32': 1e12}, bandwidth=1e11)."
            )
        for name in self.flops:
            if not isinstance(name, str):
                raise DeviceError(
                    f"rates of {self.name!r} are not by names: a key of flops is {name!r} "
                    "(expected a text such as 'bfloat16').\n"
                    f"Fix: {str(name).removeprefix('torch.')!r} in place of {name!r}."
                )
        if "float32" not in self.flops:
            raise DeviceError(
                f"rates of {self.name!r} lack what every other dtype falls back to: "
                f"flops={dict(self.flops)} (expected at least 'float32').\n"
                "Fix: DeviceRates(name, {'float32': 1e12}, bandwidth=1e11)."
            )
        if not isinstance(self.has_flash, bool | None):
            raise DeviceError(
                f"rates of {self.name!r} do not say whether: has_flash={self.has_flash!r} "
                "(expected True, False or None).\nFix: has_flash=True for Ampere or later."
            )
        # numpy's numbers as Python's, so that they equal those read from a file.
        own: dict[str, Any] = {
            "flops": {
                name: float(self._number(f"flops[{name!r}]", rate))
                for name, rate in self.flops.items()
            },
            "bandwidth": float(self._number("bandwidth", self.bandwidth)),
            "launch_time": float(self._number("launch_time", self.launch_time, is_time=True)),
            "has_flash": "bfloat16" in self.flops if self.has_flash is None else self.has_flash,
        }
        if self.memory_bytes is not None:
            own["memory_bytes"] = int(self._number("memory_bytes", self.memory_bytes))
        if self.host_time is not None:
            own["host_time"] = float(self._number("host_time", self.host_time, is_time=True))
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def _number(self, name: str, value: object, *, is_time: bool = False) -> float:
        """Return a rate, which is above 0, or a time, which may be 0."""
        number = plain_number(value)
        if not 0 <= number <= sys.float_info.max or not (number or is_time):
            rule = "0 or more, in seconds" if is_time else "above 0"
            raise DeviceError(
                f"rates of {self.name!r} are impossible: {name}={value!r:.60} (expected a finite "
                f"number {rule}).\nFix: give operations and bytes per second, such as 1e12."
            )
        return number

    def flops_of(self, dtype: str) -> float:
        """Return the operations a second of a dtype, by its name without ``torch.``."""
        return self.flops.get(dtype, self.flops["float32"])

    def scaled(self, *, flops: float = 1.0, bandwidth: float = 1.0) -> DeviceRates:
        """Return the rates of a device that reaches these shares of its peaks.

        Example:
            >>> find_rates("A100").scaled(flops=0.5).flops_of("bfloat16") / 1e12
            156.0
        """
        return replace(
            self,
            name=f"{self.name} at {flops:g} of its operations and {bandwidth:g} of its bandwidth",
            flops={name: rate * flops for name, rate in self.flops.items()},
            bandwidth=self.bandwidth * bandwidth,
        )


def find_rates(rates: str | DeviceRates) -> DeviceRates:
    """Return the rates of a device in the table; `DeviceRates` are returned as they are.

    Args:
        rates: Name of a device, or a part of it that fits only one; case, spaces and hyphens do
            not matter.

    Raises:
        DeviceError: no device or several have this name.

    Example:
        >>> find_rates("h200").memory_bytes
        141000000000
    """
    if isinstance(rates, DeviceRates):
        return rates
    if not isinstance(rates, str):
        raise DeviceError(
            f"rates name no device: rates={rates!r} (expected a name or DeviceRates).\n"
            f"Fix: rates={next(iter(RATES))!r}, or DeviceRates(...) with your own figures."
        )
    wanted = _plain(rates)
    exact = [known for name, known in RATES.items() if _plain(name) == wanted]
    found = exact or [known for name, known in RATES.items() if wanted and wanted in _plain(name)]
    if len(found) != 1:
        names = ", ".join(repr(name) for name in RATES)
        many = "several devices" if found else "no device"
        raise DeviceError(
            f"rates name {many}: rates={rates!r} (expected one of {names}).\n"
            "Fix: one of these names, or DeviceRates(name, {'float32': 1e13}, bandwidth=1e12) with "
            "your own figures."
        )
    return found[0]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


_TERA = 1e12
_GIGA = 10**9


def _hopper(name: str, memory: int, bandwidth: float, source: str) -> DeviceRates:
    return DeviceRates(
        name,
        {
            "float64": 67 * _TERA,
            "float32": 67 * _TERA,
            "tensorfloat32": 494.7 * _TERA,
            "float16": 989.4 * _TERA,
            "bfloat16": 989.4 * _TERA,
            "float8_e4m3fn": 1978.9 * _TERA,
            "float8_e5m2": 1978.9 * _TERA,
        },
        bandwidth,
        memory,
        source=source,
    )


_ALL = (
    # NVIDIA H100 and H200 Tensor Core GPU datasheets, SXM; half of the figures with sparsity.
    # float64 is that of the tensor cores, which matrix products use.
    _hopper("H100 SXM", 80 * _GIGA, 3.35e12, "NVIDIA H100 Tensor Core GPU datasheet"),
    _hopper("H200", 141 * _GIGA, 4.8e12, "NVIDIA H200 Tensor Core GPU datasheet"),
    # NVIDIA A100 Tensor Core GPU datasheet, 80GB SXM.
    DeviceRates(
        "A100 80GB SXM",
        {
            "float64": 19.5 * _TERA,
            "float32": 19.5 * _TERA,
            "tensorfloat32": 156 * _TERA,
            "float16": 312 * _TERA,
            "bfloat16": 312 * _TERA,
        },
        2.039e12,
        80 * _GIGA,
        source="NVIDIA A100 Tensor Core GPU datasheet",
    ),
    # NVIDIA L40S datasheet; float64 runs at 1/64 of float32 on this architecture.
    DeviceRates(
        "L40S",
        {
            "float64": 1.43 * _TERA,
            "float32": 91.6 * _TERA,
            "tensorfloat32": 183 * _TERA,
            "float16": 362.05 * _TERA,
            "bfloat16": 362.05 * _TERA,
            "float8_e4m3fn": 733 * _TERA,
            "float8_e5m2": 733 * _TERA,
        },
        0.864e12,
        48 * _GIGA,
        source="NVIDIA L40S datasheet",
    ),
    # NVIDIA V100 datasheet, SXM2 with 32 GB; it has no bfloat16 units and no tensorfloat32.
    DeviceRates(
        "V100 SXM2",
        {"float64": 7.8 * _TERA, "float32": 15.7 * _TERA, "float16": 125 * _TERA},
        0.9e12,
        32 * _GIGA,
        source="NVIDIA V100 Tensor Core GPU datasheet",
    ),
    # NVIDIA Ada GPU architecture whitepaper, appendix A; half precision adding up in float32.
    DeviceRates(
        "RTX 4090",
        {
            "float64": 1.29 * _TERA,
            "float32": 82.6 * _TERA,
            "tensorfloat32": 82.6 * _TERA,
            "float16": 165.2 * _TERA,
            "bfloat16": 165.2 * _TERA,
            "float8_e4m3fn": 330.3 * _TERA,
            "float8_e5m2": 330.3 * _TERA,
        },
        1.008e12,
        24 * _GIGA,
        source="NVIDIA Ada GPU Architecture whitepaper",
    ),
    # One core with 256-bit vectors: two units x 8 float32 x multiply and add (Intel 64 and IA-32
    # Architectures Optimization Reference Manual) at 3 GHz; half of a DDR4-3200 channel of
    # 25.6 GB/s (JEDEC JESD79-4). No arithmetic in half precision: float32's rate.
    DeviceRates(
        "CPU core",
        {"float64": 0.048 * _TERA, "float32": 0.096 * _TERA},
        12.8e9,
        device_type="cpu",
        launch_time=3e-6,
        host_time=None,
        source="vector width times clock; JEDEC JESD79-4",
    ),
)

#: Peak rates of known devices, by name.
RATES: Mapping[str, DeviceRates] = MappingProxyType({rates.name: rates for rates in _ALL})
