"""An interrupt at any moment of a profile leaves torch as it was."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import gpipebal as gb
from gpipebal.pipeline.process import eager
from gpipebal.pipeline.process.blocks import SharedBlocks, all_shared_blocks
from gpipebal.profiler.estimate import backends
from gpipebal.profiler.replicas.torch_state import torch_state_kept

pytestmark = pytest.mark.timeout(100)

METHODS: dict[str, dict[str, Any]] = {
    "measure": {"timeout": 0.0, "as_pipeline": False, "progress": False},
    "one at a time": {"timeout": 0.0, "one_at_a_time": True, "progress": False},
    "estimate": {"method": "estimate", "progress": False},
}


class Dispatch(TorchDispatchMode):
    """Does nothing of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    """Does nothing of its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _state() -> dict[str, Any]:
    dynamo = sys.modules.get("torch._dynamo")
    return {
        "dispatch": _get_current_dispatch_mode_stack(),
        "function": _get_current_function_mode_stack(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "fast": torch.backends.mha.get_fastpath_enabled(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "stance": None if dynamo is None else str(dynamo.eval_frame._stance),
        "blocks": [one.here() for one in all_shared_blocks()],
        "installed": list(backends._installed),
        "autocast class": torch.autocast.__init__,
        "in mode": _python_dispatch.is_in_torch_dispatch_mode(),
    }


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def test_what_was_entered_and_not_left_is_left() -> None:
    """Whatever is on a stack above what was there comes off, and what is missing comes back."""
    outer, fast = Function(), torch.backends.mha.get_fastpath_enabled()
    with Dispatch(), outer:
        before = _state()
        with pytest.raises(KeyboardInterrupt), torch_state_kept():
            Dispatch().__enter__()
            Function().__enter__()
            torch._C._autograd._push_saved_tensors_default_hooks(_identity, _identity)
            eager._blocks.enter()
            backends._blocks.enter()
            torch.backends.mha.set_fastpath_enabled(not fast)
            torch.set_grad_enabled(False)
            torch.set_autocast_cache_enabled(False)
            torch.set_autocast_enabled("cpu", True)
            raise KeyboardInterrupt
        assert _state() == before
        with (
            torch.autograd.graph.saved_tensors_hooks(_identity, _identity),
            pytest.raises(ValueError, match="of its own"),
        ):
            hooked = _state()
            with torch_state_kept():
                outer.__exit__(None, None, None)
                torch._C._autograd._pop_saved_tensors_default_hooks()
                torch.set_grad_enabled(False)
                raise ValueError("of its own")
        assert hooked["hooks"] is not None
        assert _state() == before


def test_an_interrupt_before_a_mode_is_on_the_stack_leaves_no_note_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Entering a mode notes first that one is on."""
    before = _state()

    def interrupt(_: Any) -> None:
        assert _state() != before
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), torch_state_kept():
        patched.setattr(_python_dispatch, "_push_mode", interrupt)
        Dispatch().__enter__()
    assert _state() == before


def test_what_another_thread_notes_of_its_mode_is_not_put_back() -> None:
    """It may have left the mode since."""
    before = _state()
    mode = Dispatch()
    with pytest.raises(ValueError, match="of its own"), ThreadPoolExecutor(1) as other:
        other.submit(mode.__enter__).result()
        with torch_state_kept():
            other.submit(mode.__exit__, None, None, None).result()
            raise ValueError("of its own")
    assert _state() == before


def test_what_cannot_be_installed_yet_is_installed_by_a_later_block() -> None:
    """A compiler that is loaded inside of a block is told to wait when the next one begins."""
    done: list[str] = []
    is_loaded = False

    def install() -> bool:
        if is_loaded:
            done.append("installed")
        return is_loaded

    blocks = SharedBlocks(install, lambda: done.append("removed"))
    blocks.enter()
    blocks.enter()
    assert not done
    is_loaded = True
    for _ in range(2):
        blocks.enter()
    assert done == ["installed"] and blocks.here() == 4
    for _ in range(4):
        assert done == ["installed"]
        blocks.leave()
    assert done == ["installed", "removed"] and not blocks.here()


def test_an_interrupt_stays_one() -> None:
    """An error that came up while modes were left is not what the caller sees."""
    with pytest.raises(KeyboardInterrupt), torch_state_kept():
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("trying to pop from empty mode stack")


def test_an_error_while_an_interrupt_is_handled_stays_one() -> None:
    """The caller may profile in the handler of an interrupt that is over."""
    with pytest.raises(ValueError, match="of its own"):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            with torch_state_kept():
                raise ValueError("of its own") from None


def test_profiles_of_two_threads_leave_the_compiler_alone() -> None:
    """What one finds of the other is not what it puts back."""
    import torch._dynamo

    before, model = str(torch._dynamo.eval_frame._stance), nn.Sequential(nn.Linear(4, 4))

    def estimate() -> None:
        for _ in range(5):
            gb.profile_model(model, torch.ones(4, 4), **METHODS["estimate"])

    threads = [threading.Thread(target=estimate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert str(torch._dynamo.eval_frame._stance) == before


class Alarm:
    """Interrupts this thread once, and only while it is set."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self, seconds: float) -> None:
        """Interrupt after so many seconds."""
        self.is_set = True
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def __call__(self, *_: Any) -> None:
        """Interrupt now."""
        is_set, self.is_set = self.is_set, False
        if is_set:
            raise KeyboardInterrupt


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    """Let an alarm interrupt this thread."""
    made = Alarm()
    before = signal.signal(signal.SIGALRM, made)
    yield made
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


# One that strikes where Python runs no handler of an exception, as in the callback of a weak
# reference, is printed and lost.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timers")
@pytest.mark.parametrize("method", METHODS)
def test_an_interrupt_at_any_moment_leaves_nothing_behind(method: str, alarm: Alarm) -> None:
    """Modes, hooks, switches and parameters are as before, and the next profile is the same."""
    model = nn.Sequential(
        nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), nn.Linear(8, 2)
    )
    sample, moments = torch.randn(4, 3, 8), random.Random(0)
    options: dict[str, Any] = {"chunks": 2, "rows": (), **METHODS[method]}
    expected = gb.profile_model(model, sample, **options)
    begun = time.perf_counter()  # torch has now imported what it needs
    gb.profile_model(model, sample, **options)
    longest = time.perf_counter() - begun
    before, values = _state(), [p.clone() for p in model.parameters()]
    n_interrupted = 0
    for _ in range(12):
        begun = time.perf_counter()
        try:
            alarm.set(moments.uniform(0.0005, longest))
            gb.profile_model(model, sample, **options)
            alarm.is_set = False
            # The one that was clocked may have been held up, and alarms would come too late.
            longest = min(longest, time.perf_counter() - begun)
        except KeyboardInterrupt:
            n_interrupted += 1
        assert _state() == before
    assert n_interrupted
    assert all(map(torch.equal, values, model.parameters()))
    again = gb.profile_model(model, sample, **options)
    for one, other in zip(again.layers, expected.layers, strict=True):
        for name in ("saved", "forward_peak_bytes", "backward_peak_bytes", "output_bytes"):
            assert getattr(one, name) == getattr(other, name)
