"""What the root's conftest.py promises: tests of the CPU see no CUDA device, wherever they run."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import gpipebal as gb


@pytest.fixture(scope="module")
def seen_by_a_fixture() -> int:
    """Count the devices, where a fixture of a module is made."""
    return torch.cuda.device_count()


def test_what_is_not_marked_sees_no_cuda_device(seen_by_a_fixture: int) -> None:
    """No device is there for a test, its fixtures, and the processes that it starts."""
    assert not torch.cuda.is_available() and torch.cuda.device_count() == seen_by_a_fixture == 0
    assert torch.accelerator.current_accelerator() is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    pipe = gb.GPipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), [1, 1])
    assert [device.type for device in pipe.devices] == ["cpu", "cpu"]


@pytest.mark.cuda
def test_what_is_marked_sees_the_devices() -> None:
    """A test for CUDA runs on it."""
    pipe = gb.GPipe(nn.Sequential(nn.Linear(2, 2)), [1])
    assert pipe.devices[0] == torch.device("cuda", 0)
    assert pipe(torch.ones(2, 2)).is_cuda
