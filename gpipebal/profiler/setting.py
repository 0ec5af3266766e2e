"""The setting of a measurement: its arguments, and what it leaves as it was."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gpipebal.errors import ModelError, ProfileError
from gpipebal.pipeline.chain import layers_of as chain_layers_of
from gpipebal.pipeline.devices import parse_device
from gpipebal.pipeline.microbatch import flatten, unflatten
from gpipebal.pipeline.parting import chunk_sizes, count_rows, scatter_leaves
from gpipebal.profile import Profile

__all__ = [
    "available_memory",
    "check_timeout",
    "check_values",
    "choose_rows",
    "chunks_that_fit",
    "current_device",
    "device_for",
    "first_rows",
    "layers_of",
    "parted_rows",
    "random_numbers_kept",
    "repeated_rows",
    "threads_set",
    "to_device",
]


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a chain by name.

    Raises:
        ModelError: it is no chain.
        ProfileError: it has no layers.
    """
    layers = chain_layers_of(module)
    if not layers:
        raise ProfileError(
            "module has no layers: len(module)=0 (expected 1 or more).\n"
            "Fix: profile a module with at least one layer."
        )
    return layers


def check_values(layers: Mapping[str, nn.Module], *data: Any) -> None:
    """Refuse layers and data that cannot run, because they are on the meta device.

    Raises:
        ProfileError: a parameter, a buffer or a tensor has a shape only.
    """
    of_layers = {
        f"layer {name!r}": [*layer.parameters(), *layer.buffers()] for name, layer in layers.items()
    }
    for what, tensors in (of_layers | {"sample or target": flatten(data)[0]}).items():
        if any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tensors):
            raise ProfileError(
                f"{what} has no values to measure with: device='meta' (expected a device with "
                "memory).\nFix: profile_model(model, sample, method='estimate') needs shapes only."
            )


def parted_rows(sample: Any, chunks: int) -> list[int]:
    """Part the rows of a sample into micro-batches.

    Raises:
        ModelError: it cannot be parted.
        ProfileError: it has no rows.
    """
    try:
        rows = count_rows(flatten(sample)[0], what="sample")
    except ModelError as error:
        what = str(error).partition("\nFix: ")[0]
        raise ModelError(
            f"{what}\nFix: a profile needs tensors with the same rows along dim 0, whatever "
            "in_dims the pipeline has: let the first layer make what has no rows."
        ) from error
    if not rows:
        raise ProfileError(
            "sample has no rows, so there is nothing to measure (expected 1 or more).\n"
            "Fix: give a mini-batch of the size that training has."
        )
    return chunk_sizes(rows, chunks)


def choose_rows(wanted: Any, micro_batch_rows: int, rows: int) -> list[int]:
    """Choose the sizes that are measured beside the micro-batch's own.

    Args:
        wanted: A number of rows, or several; None: double and half of the micro-batch's rows where
            the sample has them, else the nearest multiples and fractions, two if there are two.
        micro_batch_rows: Rows of the largest micro-batch.
        rows: Rows of the sample.

    Raises:
        ProfileError: a size that is no number of rows, or larger than the sample.

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
    sizes = list(wanted) if isinstance(wanted, Iterable) else [wanted]
    for size in sizes:
        if type(size) is not int or not 1 <= size <= rows:
            raise ProfileError(
                f"rows cannot be measured: rows={size!r} (expected 1..{rows}, the rows of the "
                "sample).\nFix: give a larger sample, or leave rows out."
            )
    return sorted({size for size in sizes if size != m})


def first_rows(sample: Any, rows: int, of_rows: int) -> Any:
    """Return the first rows of a sample, as views."""
    leaves, structure = flatten(sample)
    if rows == of_rows:
        return sample
    parts = scatter_leaves(leaves, [rows, of_rows - rows], [0] * len(leaves))
    return unflatten(parts[0], structure)


def repeated_rows(value: Any, rows: int, have: int) -> Any:
    """Return so many rows of a value, from the first on, and from the first again."""
    leaves, structure = flatten(value)
    if rows == have:
        return value
    repeated = [
        leaf[torch.arange(rows, device=leaf.device) % have]
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == have
        else leaf
        for leaf in leaves
    ]
    return unflatten(repeated, structure)


def check_timeout(timeout: float) -> float:
    """Return a timeout in seconds.

    Raises:
        ProfileError: it is no duration.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ProfileError(
            f"timeout is not a duration: timeout={timeout!r} (expected seconds, 0 or more).\n"
            "Fix: timeout=1.0, or leave it out."
        )
    return float(timeout)


def device_for(device: torch.device | str | int | None) -> torch.device:
    """Return the device to measure on; None: the first CUDA device, or the CPU."""
    if device is None:
        return parse_device("cuda:0" if torch.cuda.is_available() else "cpu")
    return parse_device(device)


def to_device(value: Any, device: torch.device, *, copy: bool = False) -> Any:
    """Bring the tensors of a value to a device, cut off from autograd."""
    leaves, structure = flatten(value)
    moved = [
        leaf.detach().to(device, copy=copy or leaf.is_inference())
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]
    return unflatten(moved, structure)


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
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Put the random states of torch, numpy and Python back after a block."""
    devices = [device.index] if device.type == "cuda" else []
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def chunks_that_fit(profile: Profile, chunks: int) -> int:
    """Return how many micro-batches in flight the free memory surely holds, `chunks` at most."""
    saved = {storage for layer in profile.layers for storage in layer.saved}
    of_one = max(1, profile.bytes_of(saved))
    fixed = sum(layer.gradient_bytes for layer in profile.layers)
    return max(0, min(chunks, (available_memory() // 2 - fixed) // of_one))


def available_memory() -> int:
    """Return the bytes of memory that can be had; where the system does not say, very many."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return 2**62
