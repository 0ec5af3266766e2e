"""For all tests, those of the documentation strings too: no CUDA device but where it is asked for.

Most tests mean the CPU and let the default choose: the CUDA devices, where there are any. So what
is not marked `cuda` runs as on a machine with none, and so do the processes that it starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Threads of one operation that wait for each other sleep, also in processes that a test starts. By
# default they spin, and take the cores from tests that run at the same time. The library looks at
# this once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

# CUDA looks at the environment once, when it is first asked for its devices: which is now.
torch.cuda.is_available()


def _is_available() -> bool:
    return False


def _device_count() -> int:
    return 0


def _current_accelerator(check_available: bool = False) -> None:
    return None


@contextmanager
def _cuda_hidden() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", _is_available)
        patch.setattr(torch.cuda, "device_count", _device_count)
        patch.setattr(torch.accelerator, "current_accelerator", _current_accelerator)
        # For processes that the test starts.
        patch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Hide the CUDA devices from a test, and from what is set up for it, unless it is for them."""
    if item.get_closest_marker("cuda"):
        return (yield)
    with _cuda_hidden():
        return (yield)
