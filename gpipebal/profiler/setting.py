"""The setting of a measurement: its arguments, and the state that it keeps as it was."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipebal.argument_kinds import plain_number, whole_number
from gpipebal.errors import ProfileError
from gpipebal.pipeline.layers.chain import layers_of as chain_layers_of
from gpipebal.pipeline.layers.devices import parse_device
from gpipebal.pipeline.values.microbatch import flatten

__all__ = [
    "available_memory",
    "check_not_lazy",
    "check_timeout",
    "check_values",
    "choose_rows",
    "current_device",
    "device_for",
    "layers_of",
    "parameters_cast_at_each_use",
    "random_numbers_kept",
    "threads_set",
]


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a chain by name.

    Raises:
        ModelError: it is not a chain.
        ProfileError: it has no layers.
    """
    layers = chain_layers_of(module)
    if not layers:
        raise ProfileError(
            "module has no layers: len(module)=0 (expected 1 or more).\n"
            "Fix: profile a module with at least one layer."
        )
    return layers


def check_not_lazy(name: str, layer: nn.Module) -> None:
    """Refuse a layer whose parameters or buffers get their shapes at the first forward.

    Raises:
        ProfileError: it has not run yet.
    """
    if any(map(is_lazy, (*layer.parameters(), *layer.buffers()))):
        raise ProfileError(
            f"layer {name!r} has no shapes yet (expected some: lazy layers have them from their "
            "first forward on).\nFix: run model(sample) once."
        )


def check_values(layers: Mapping[str, nn.Module], *data: Any) -> None:
    """Refuse layers and data that have no values: on the meta device, or before a first forward.

    Raises:
        ProfileError: a parameter, a buffer or a tensor has only a shape, or not even that.
    """
    for name, layer in layers.items():
        check_not_lazy(name, layer)
    of_layers = {
        f"layer {name!r}": [*layer.parameters(), *layer.buffers()] for name, layer in layers.items()
    }
    for what, tensors in (of_layers | {"sample or target": flatten(data)[0]}).items():
        if any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tensors):
            raise ProfileError(
                f"{what} has no values to measure with: it is on the meta device (expected a "
                "device with memory).\n"
                "Fix: profile_model(model, sample, method='estimate') needs shapes only."
            )


def choose_rows(wanted: Any, micro_batch_rows: int, rows: int) -> list[int]:
    """Choose the sizes that are measured in addition to the micro-batch's own.

    Args:
        wanted: A number of rows, or several; None: double and half of the micro-batch's rows where
            the sample has them, else the nearest multiples and fractions: two, if there are two.
        micro_batch_rows: Rows of the largest micro-batch.
        rows: Rows of the sample.

    Raises:
        ProfileError: a size that is not a number of rows, or larger than the sample.

    Example:
        >>> choose_rows(None, 4, 16), choose_rows(None, 16, 16), choose_rows(None, 1, 8)
        ([2, 8], [4, 8], [2, 3])
        >>> choose_rows((1, 2, 4), 4, 16)
        [1, 2]
    """
    m = micro_batch_rows
    if wanted is None:
        candidates = [2 * m, m // 2, m // 4, 3 * m, 4 * m, m - m // 4, m - 1, m + 1]
        possible = [size for size in candidates if 1 <= size <= rows and size != m]
        return sorted(list(dict.fromkeys(possible))[:2])
    is_one = not isinstance(wanted, Iterable) or getattr(wanted, "ndim", None) == 0
    given = [wanted] if is_one else list(wanted)
    # Of numpy, too.
    sizes = [x if (size := whole_number(x)) is None else size for x in given]
    for size in sizes:
        if type(size) is not int or not 1 <= size <= rows:
            raise ProfileError(
                f"rows cannot be measured: rows={size!r} (expected 1..{rows}, the rows of the "
                "sample).\nFix: rows within these, a larger sample, or leave rows out."
            )
    return sorted({size for size in sizes if size != m})


def check_timeout(timeout: float) -> float:
    """Return a timeout in seconds.

    Raises:
        ProfileError: it is not a duration.
    """
    if not plain_number(timeout) >= 0:
        raise ProfileError(
            f"timeout is not a duration: timeout={timeout!r:.60} (expected seconds, 0 or more).\n"
            "Fix: timeout=1.0, or leave it out."
        )
    return float(timeout)


def device_for(device: torch.device | str | int | None) -> torch.device:
    """Return the device to measure on; None: the first CUDA device, or the CPU."""
    if device is None:
        return parse_device("cuda:0" if torch.cuda.is_available() else "cpu")
    return parse_device(device)


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Make a CUDA device the current one for a block."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def threads_set(n_threads: int | None) -> Iterator[None]:
    """Set the intra-operation threads for a block; None: leave them."""
    before = torch.get_num_threads()
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def parameters_cast_at_each_use() -> Iterator[None]:
    """Let autocast cast a parameter each time it is used in a block, as it does in workers."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def random_numbers_kept(*devices: torch.device) -> Iterator[None]:
    """Restore the random states of torch (on devices too), numpy and Python after a block."""
    numbers = {device.index for device in devices if device.type == "cuda"}
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=sorted(numbers), device_type="cuda"):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def available_memory() -> int:
    """Return the bytes of memory that are available; if the system does not tell, very many.

    A container may have less than the machine: what is left of its own limit counts too.
    """
    return min(_free_on_machine(), *starmap(_free_in_container, _CONTAINER_FILES))


#: Files with a container's limit and its use of memory, in either version of control groups.
_CONTAINER_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
_VERY_MUCH = 2**62


def _free_on_machine() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return _VERY_MUCH


def _free_in_container(limit: str, used: str) -> int:
    try:
        most, now = (int(Path(path).read_text(encoding="ascii")) for path in (limit, used))
    except (OSError, ValueError):  # there is no such file, or it says 'max'
        return _VERY_MUCH
    return max(0, most - now)
