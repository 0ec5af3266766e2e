"""How long the step of an optimizer takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gpipebal.errors import ProfileError
from gpipebal.pipeline.values.tensors import bytes_of
from gpipebal.profiler.chain.clock import synchronize
from gpipebal.profiler.chain.failures import said
from gpipebal.profiler.memory.sparse_gradients import gradient_like
from gpipebal.profiler.step.alike import global_hooks_left_out
from gpipebal.profiler.step.optimizer import Maker

__all__ = ["BEYOND_CACHES", "LARGEST_STEPPED", "measure_optimizer", "median_time"]

#: Repeats of each term; the median counts.
REPEATS = 5
#: At most this many bytes of parameters are stepped; for more, the time is scaled up.
LARGEST_STEPPED = 2**28
#: Bytes that no cache holds: writing this many leaves nothing else in it.
BEYOND_CACHES = 2**26


def measure_optimizer(
    maker: Maker,
    device: torch.device,
    *,
    one_of: Sequence[Sequence[nn.Parameter]] | None = None,
) -> float:
    """Return the seconds of an optimizer's step, on copies of the parameters.

    Where only some parameters are stepped, the time of all is scaled up from them: by the bytes
    that a step works on, and by itself for each way in which parameters are stepped.

    Args:
        maker: Makes the optimizer. The model's parameters are not changed.
        device: Where they will be.
        one_of: The parameters of each layer: step only those of the layer with most to step, and
            use no more memory than they need. None: all, or enough of them to tell.

    Raises:
        ProfileError: the optimizer failed.
    """
    places = [place for place, is_stepped in enumerate(maker.stepped) if is_stepped]
    shares: dict[Any, list[int]] = {}
    is_whole = one_of is None and _bytes_in(maker, places) <= LARGEST_STEPPED
    for place in places:
        shares.setdefault(None if is_whole else maker.way_of(place), []).append(place)
    return sum((_time_of_share(maker, share, device, one_of) for share in shares.values()), 0.0)


def _time_of_share(
    maker: Maker,
    places: Sequence[int],
    device: torch.device,
    one_of: Sequence[Sequence[nn.Parameter]] | None,
) -> float:
    """Return the seconds of a step on the parameters in these places; see `measure_optimizer`."""
    chosen: list[int] = []
    left = LARGEST_STEPPED
    for place in places if one_of is None else ():
        n_bytes = bytes_of(maker.parameters[place])
        if not chosen or n_bytes <= left:
            chosen.append(place)
            left -= n_bytes
    for layer in one_of or ():
        own = set(map(id, layer))
        those = [place for place in places if id(maker.parameters[place]) in own]
        chosen = max(chosen, those, key=lambda some: _bytes_in(maker, some))
    n_bytes = _bytes_in(maker, chosen)
    try:
        copies = (maker.parameters[place].detach().to(device, copy=True) for place in chosen)
        stepped = [nn.Parameter(copied) for copied in copies]
        stepper, kinds = maker.make(chosen, stepped), [maker.sparse.get(k) for k in chosen]

        def prepare() -> None:
            for kind, parameter in zip(kinds, stepped, strict=True):
                parameter.grad = gradient_like(kind, parameter)
            # Before a step there is a backward of the whole model: nothing is left in the caches.
            elsewhere.fill_(0.0)

        def run_step() -> None:
            stepper.step()
            stepper.zero_grad()

        beyond = BEYOND_CACHES if one_of is None else min(BEYOND_CACHES, n_bytes)
        elsewhere = torch.empty(beyond // 4, dtype=torch.float32, device=device)
        with global_hooks_left_out():
            seconds = median_time(run_step, device, prepare)
    except Exception as error:
        raise ProfileError(
            f"the optimizer failed: {said(error)}\n"
            "Fix: give a callable that makes an optimizer of a list of parameters, such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        ) from error
    done = _worked_on(maker, chosen)
    return seconds * _worked_on(maker, places) / done if done else seconds


def _bytes_in(maker: Maker, places: Sequence[int]) -> int:
    return sum(bytes_of(maker.parameters[place]) for place in places)


def _worked_on(maker: Maker, places: Sequence[int]) -> int:
    """Return the bytes of parameters; of those with sparse gradients only the entries' bytes."""
    found = 0
    for place in places:
        parameter, kind = maker.parameters[place], maker.sparse.get(place)
        found += bytes_of(parameter) if kind is None else kind.bytes_for(parameter)
    return found


def median_time(
    work: Callable[[], Any], device: torch.device, prepare: Callable[[], None] = lambda: None
) -> float:
    """Clock some work; `prepare` runs before each repeat, and is not clocked."""
    prepare()
    work()
    times = []
    for _ in range(REPEATS):
        prepare()
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
