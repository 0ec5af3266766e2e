"""The devices that a question is about, as `solve` is given them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gpipebal.argument_kinds import is_list, plain_number
from gpipebal.errors import BalanceError
from gpipebal.planner.quantiles import at_quantile
from gpipebal.problem import Device
from gpipebal.problem.chunking import other_names
from gpipebal.profile import Profile
from gpipebal.schedule import KNOWN_SCHEDULES
from gpipebal.units import count

__all__ = ["DeviceCosts", "check_shared_devices", "devices_asked"]

#: A device: a `Device`, its speed relative to the profile's device, or its own profile.
DeviceCosts = Device | float | Profile


def devices_asked(
    devices: Sequence[DeviceCosts] | None,
    profile: Profile,
    n_partitions: int,
    quantile: float | None,
) -> tuple[DeviceCosts, ...] | None:
    """Return the devices that were given to `solve`, with speeds as `Device`s.

    Raises:
        BalanceError: one of them is invalid, or they are not as many as partitions.
    """
    if devices is None:
        return None
    if not is_list(devices, in_order=True):
        raise BalanceError(
            f"devices are not a list: devices={devices!r:.60} (expected one for each of "
            f"{count(n_partitions, 'partition')}: a Device, a Profile, or its speed).\n"
            f"Fix: devices=[1] * {n_partitions}, all as fast as the profile's; or devices=None."
        )
    devices = tuple(devices)  # alive as long as their identities count
    found: list[DeviceCosts] = []
    made: dict[int, Profile] = {}  # mostly one profile is given for many devices
    for j, device in enumerate(devices):
        if isinstance(device, Profile):
            if what := other_names(device.names, profile.names):
                raise BalanceError(
                    f"profile of a device is of another chain: devices[{j}]: {what}.\n"
                    "Fix: profile the same model on each type of device."
                )
            if id(device) not in made:
                made[id(device)] = device if quantile is None else at_quantile(device, quantile)
            found.append(made[id(device)])
        elif isinstance(device, Device):
            found.append(device)
        # Its inverse is a finite float too.
        elif 1 / sys.float_info.max <= (speed := plain_number(device)) <= sys.float_info.max:
            found.append(Device(slowness=1 if speed == 1 else 1 / float(speed)))
        else:
            raise BalanceError(
                f"device is not usable: devices[{j}]={device!r:.60} (expected "
                "a Device, a Profile, or its speed as a number above 0).\n"
                "Fix: 1 for one as fast as the profile's."
            )
    if len(found) != n_partitions:
        raise BalanceError(
            f"devices and partitions differ in number: len(devices)={len(found)} "
            f"(expected partitions={n_partitions}).\n"
            "Fix: one device per partition, or devices=None."
        )
    return tuple(found)


def check_shared_devices(schedule: str, devices: Sequence[DeviceCosts], *, any_order: bool) -> None:
    """Refuse partitions that one device runs, but that are given different devices.

    Args:
        schedule: Name of the schedule, which says how many partitions every device has.
        devices: The device of each partition.
        any_order: Whether they may change places.

    Raises:
        BalanceError: partitions of one device have different ones, or devices may change places.
    """
    each = KNOWN_SCHEDULES[schedule].partitions_per_device
    if any_order:
        raise BalanceError(
            f"devices cannot change places where each runs {each} partitions: any_order=True with "
            f"schedule={schedule!r} (expected False).\n"
            "Fix: any_order=False, with devices in the order in which they are connected."
        )
    n_devices, rest = divmod(len(devices), each)
    if rest:
        return  # refused with the number of partitions
    for k in range(n_devices, len(devices)):
        j = k % n_devices
        if devices[j] is not devices[k] and devices[j] != devices[k]:
            raise BalanceError(
                f"one device is two: devices[{j}] and devices[{k}] differ (expected one device "
                f"{each} times: with schedule={schedule!r} partitions {j} and {k} run on it).\n"
                f"Fix: in devices=, the {n_devices} devices in order, {each} times."
            )
