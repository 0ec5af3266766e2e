"""What every test gets: the same seed, and a reason where a device is missing."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from brief_profiles import make_brief
from hypothesis import settings

from gpipebal.skip.tracker import current

# No test asserts a time, and so examples have no deadline: the watchdog of each test is enough.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
# Where a change is judged, the same code gets the same examples; elsewhere each run tries others.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

make_brief()


def pytest_report_header() -> str:
    """Say on which torch and how many devices the tests ran."""
    return (
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{torch.cuda.device_count()} CUDA devices"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    reason = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(reason)


def pytest_collection_finish() -> None:
    """Spare the garbage collector thousands of tests and all modules: they stay to the end.

    Nor need it look through all that they make as often as it would by itself.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 20, 50)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from seed 0."""
    # For devices that it does not find, `torch.manual_seed` keeps the stack of its caller: most of
    # what a short test would take.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture(autouse=True)
def _nothing_stashed() -> object:
    """Let no test see what another one, which ran a part of a model, has stashed in this thread."""
    yield
    current().take_all()


@pytest.fixture(autouse=True)
def _interrupts() -> object:
    """Let SIGINT raise KeyboardInterrupt, also where the tests were started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _threads() -> object:
    """Run every test's own thread on one core, and give back the number that it found.

    Small operations gain nothing from a second core, and lose much where it is busy.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_notes_of_modes() -> Iterator[None]:
    """Take off what torch notes for the process of dispatch modes, after each test.

    Modes of threads that overlap may leave such a note: of a worker that was given up, for example,
    or of a thread of the test's own.
    """
    yield
    modes = sys.modules.get("gpipebal.pipeline.process.modes")
    if modes is not None:
        modes.take_off_notes([False] * len(modes.notes()))
