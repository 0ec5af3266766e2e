"""`profile_model`: measure the layers of a chain at the size of one micro-batch."""

from __future__ import annotations

import datetime
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gpipebal
from gpipebal.errors import ModelError, ProfileError
from gpipebal.pipeline.caller import CallerState
from gpipebal.pipeline.devices import check_threads, parse_device, share_of_cores, visible_cores
from gpipebal.pipeline.fingerprint import fingerprint
from gpipebal.pipeline.lane import Lane
from gpipebal.pipeline.microbatch import flatten, unflatten
from gpipebal.pipeline.parting import chunk_sizes, count_rows, scatter
from gpipebal.pipeline.worker import WorkerPool
from gpipebal.profile import LayerProfile, Profile, StepTerms
from gpipebal.profiler.progress import progress_bar
from gpipebal.profiler.replica import layer_of_tensors, own_bytes, replicate
from gpipebal.profiler.rounds import Chain, Rounds, RoundStoppedError
from gpipebal.profiler.settle import settle
from gpipebal.profiler.step import OptimizerFactory, measure_step, optimizer_state_bytes
from gpipebal.profiler.storages import LayerMemory, measure_memory_of_layers
from gpipebal.schedule import check_count

__all__ = ["profile_model"]

#: Rounds of each kind: at least these, whatever the timeout; at most those.
LEAST_ROUNDS = 1
MOST_ROUNDS = 20
#: Default of `timeout`, in seconds.
DEFAULT_TIMEOUT = 15.0


def profile_model(
    module: nn.Module,
    sample: Any,
    *,
    device: torch.device | str | int | None = None,
    chunks: int = 1,
    threads: int | None = None,
    partitions: int = 2,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    optimizer: OptimizerFactory | None = None,
    timeout: float | None = None,
    progress: bool | None = None,
) -> Profile:
    """Measure forward time, backward time and memory of every layer, for one micro-batch.

    The layers are measured in training mode, in replicas that share only the parameters' memory
    with the model: parameters, gradients, buffers, training flags, hooks, devices and random
    numbers of the model are afterwards as before.

    Args:
        module: An `nn.Sequential`; its children are the layers.
        sample: A mini-batch: a tensor, or a tuple or other pytree of tensors, with the same rows
            along dim 0. A tuple is one input.
        device: Where to measure; None: the first CUDA device, or the CPU where there is none.
        chunks: Micro-batches that a mini-batch will be parted into. The layers are measured at
            the size of the largest, ``ceil(rows / chunks)`` rows.
        threads: Intra-operation threads that a CPU partition will have; None: its share of the
            cores. Ignored on CUDA.
        partitions: How many partitions will work side by side on the CPU. As many threads
            measure side by side, as far as the cores suffice. Ignored on CUDA.
        loss_fn: The loss, called as ``loss_fn(output, target)``; measured as a term of the step.
        target: Target of the whole mini-batch; None: ``loss_fn(output)``.
        optimizer: Makes the optimizer from a list of parameters (a class, or a lambda with its
            options); its time and its state are measured.
        timeout: Seconds for the repeats, about; None: 15. Each layer is measured at least once.
        progress: Show a progress bar; None: only on a terminal.

    Returns:
        A `Profile`: times in seconds as medians over the repeats with their interquartile
        range, sizes in bytes.

    Raises:
        ModelError: `module` is not an `nn.Sequential`, or `sample` cannot be parted.
        ProfileError: a layer, the loss or the optimizer failed; the error names it.
        DeviceError: `device` does not exist.

    Complexity:
        Each round costs two forwards and backwards of one micro-batch. Memory, once per
        measuring thread: gradients and buffers of the model, and what one micro-batch saves.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> profile = profile_model(model, torch.ones(6, 8), chunks=3, timeout=0.1)
        >>> profile.rows, profile.layers[0].parameter_bytes, profile.layers[2].output_bytes
        (2, 288, 16)
    """
    layers = _layers_of(module)
    names = list(layers)
    n_chunks = check_count("chunks", chunks)
    where = _device_for(device)
    n_side_by_side = check_count("partitions", partitions)
    n_threads = (
        share_of_cores(n_side_by_side) if threads is None else check_threads("threads", threads)
    )
    limit = DEFAULT_TIMEOUT if timeout is None else _check_timeout(timeout)
    rows = count_rows(flatten(sample)[0])
    sizes = chunk_sizes(rows, n_chunks)
    modules = list(layers.values())
    side_by_side = 1
    if where.type == "cpu":
        side_by_side = max(1, min(n_side_by_side, visible_cores() // n_threads))
    state = CallerState.capture((where.type,))
    with (
        _random_numbers_kept(where),
        _current_device(where),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        # A copy, because a view would count with the storage of the whole mini-batch.
        micro_batch = _to_device(scatter(sample, n_chunks)[0], where, copy=True)
        with _threads(n_threads if where.type == "cpu" else None):
            scout = Chain(names, (), micro_batch, where)
            writers = scout.find_written(
                lambda k: replicate([names[k]], [modules[k]], where, private=(0,))[0]
            )
            chains = [
                Chain(names, replicate(names, modules, where, private=writers), micro_batch, where)
                for _ in range(side_by_side)
            ]
            for chain in chains:
                chain.written = scout.written
            memory, storages, inputs = measure_memory_of_layers(chains[0])
        rounds = _measure(chains, n_threads, limit, progress, state)
        chains[0].stop.clear()
        step = _measure_step(
            chains[0], sizes, loss_fn, _to_device(target, where), optimizer, modules, where
        )
    state_bytes = _state_bytes(optimizer, modules)
    return Profile(
        layers=_layer_profiles(names, modules, rounds, memory, storages, state_bytes),
        storages=storages,
        inputs=inputs,
        rows=sizes[0],
        mini_batch_rows=rows,
        chunks=len(sizes),
        step=step,
        provenance={
            "method": "measure",
            "device": _device_name(where),
            "device_type": where.type,
            "threads": n_threads if where.type == "cpu" else None,
            "side_by_side": side_by_side,
            "rounds": len(rounds.forward),
            "whole_forward_time": float(np.median(rounds.whole_forward)),
            "whole_backward_time": float(np.median(rounds.whole_backward)),
            "layered_forward_time": float(np.median(np.sum(rounds.forward, axis=1))),
            "layered_backward_time": float(np.median(np.sum(rounds.backward, axis=1))),
            "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "gpipebal": gpipebal.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        },
    )


def _measure(
    chains: Sequence[Chain],
    n_threads: int,
    limit: float,
    progress: bool | None,
    state: CallerState,
) -> Rounds:
    """Run rounds of every chain side by side, each in a thread with its share of the cores."""
    results = [Rounds() for _ in chains]
    failures: list[BaseException] = []
    finished = [threading.Event() for _ in chains]
    on_cpu = chains[0].device.type == "cpu"

    def stop_all() -> None:
        for chain in chains:
            chain.stop.set()

    with progress_bar("profiling", MOST_ROUNDS * len(chains), progress) as told:
        deadline = time.perf_counter() + limit

        def task_of(k: int) -> Callable[[], None]:
            def task() -> None:
                try:
                    with replace(state, inference_mode=False).entered(grad=True):
                        chains[k].layered()  # warm-up: gradients exist, libraries are ready
                        results[k].run(
                            chains[k],
                            deadline=deadline,
                            least=LEAST_ROUNDS,
                            most=MOST_ROUNDS,
                            told=told,
                        )
                except RoundStoppedError:
                    pass  # another thread failed, or the caller was interrupted
                except BaseException as error:
                    failures.append(error)
                    stop_all()
                finally:
                    finished[k].set()

            return task

        lanes = [_MeasuringLane(chain.device) for chain in chains]
        pool = WorkerPool(lanes, [n_threads if on_cpu else None] * len(chains))
        try:
            pool.submit([task_of(k) for k in range(len(chains))], [0])
            for event in finished:
                event.wait()
        finally:
            # Also when interrupted: the layers in progress end, then the threads do.
            stop_all()
            pool.close()
    if failures:
        raise failures[0]
    for other in results[1:]:
        results[0].add(other)
    return results[0]


class _MeasuringLane(Lane):
    """A lane whose thread works on its device's default stream, like the caller's."""

    def enter_thread(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)


def _layer_profiles(
    names: Sequence[str],
    modules: Sequence[nn.Module],
    rounds: Rounds,
    memory: Sequence[LayerMemory],
    storages: Sequence[int],
    state_bytes: Sequence[int] | None,
) -> tuple[LayerProfile, ...]:
    forward = np.asarray(rounds.forward)
    backward = np.asarray(rounds.backward)
    forward_times = settle(np.median(forward, axis=0), float(np.median(rounds.whole_forward)))
    backward_times = settle(np.median(backward, axis=0), float(np.median(rounds.whole_backward)))
    forward_spread = np.subtract(*np.percentile(forward, [75, 25], axis=0))
    backward_spread = np.subtract(*np.percentile(backward, [75, 25], axis=0))
    owner = layer_of_tensors(modules)
    return tuple(
        LayerProfile(
            name=names[k],
            kind=type(module).__name__,
            forward_time=float(forward_times[k]),
            backward_time=float(backward_times[k]),
            recompute_time=float(forward_times[k]),
            forward_spread=float(forward_spread[k]),
            backward_spread=float(backward_spread[k]),
            optimizer_bytes=None if state_bytes is None else state_bytes[k],
            outputs=memory[k].outputs,
            saved=memory[k].saved,
            output_bytes=sum(storages[index] for index in memory[k].outputs),
            forward_peak_bytes=memory[k].forward_peak_bytes,
            backward_peak_bytes=memory[k].backward_peak_bytes,
            fingerprint=fingerprint(module),
            **own_bytes(modules, k, owner),
        )
        for k, module in enumerate(modules)
    )


def _measure_step(
    chain: Chain,
    sizes: Sequence[int],
    loss_fn: Callable[..., Tensor] | None,
    target: Any,
    optimizer: OptimizerFactory | None,
    modules: Sequence[nn.Module],
    device: torch.device,
) -> StepTerms:
    tape = chain.record()
    outputs = [
        leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in tape.outputs[-1]
    ]
    structure = chain.output_structure
    del tape
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    return measure_step(
        outputs,
        structure,
        sizes,
        loss_fn=loss_fn,
        target=target,
        optimizer=optimizer,
        parameters=parameters,
        device=device,
    )


def _state_bytes(
    optimizer: OptimizerFactory | None, modules: Sequence[nn.Module]
) -> list[int] | None:
    """Find the bytes of optimizer state of every layer, each parameter at its first layer."""
    owner = layer_of_tensors(modules)
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    known = None if optimizer is None else optimizer_state_bytes(optimizer, parameters)
    if known is None:
        return None
    by_layer = [0] * len(modules)
    for parameter, n_bytes in zip(parameters, known, strict=True):
        by_layer[owner[id(parameter)]] += n_bytes
    return by_layer


def _layers_of(module: nn.Module) -> dict[str, nn.Module]:
    if not isinstance(module, nn.Sequential):
        raise ModelError(
            f"module is not a chain of layers: type(module)={type(module).__name__} (expected "
            "nn.Sequential).\nFix: write the model as nn.Sequential of its layers."
        )
    layers = {name: layer for name, layer in module._modules.items() if layer is not None}
    if not layers:
        raise ProfileError(
            "module has no layers: len(module)=0 (expected 1 or more).\n"
            "Fix: profile a module with at least one layer."
        )
    return layers


def _check_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ProfileError(
            f"timeout is not a duration: timeout={timeout!r} (expected seconds, 0 or more).\n"
            "Fix: timeout=1.0, or leave it out."
        )
    return float(timeout)


def _device_for(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        return parse_device("cuda:0" if torch.cuda.is_available() else "cpu")
    return parse_device(device)


def _to_device(value: Any, device: torch.device, *, copy: bool = False) -> Any:
    leaves, structure = flatten(value)
    moved = [
        leaf.detach().to(device, copy=copy) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ]
    return unflatten(moved, structure)


def _current_device(device: torch.device) -> AbstractContextManager[None]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _threads(n_threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _random_numbers_kept(device: torch.device) -> Any:
    devices = [device.index] if device.type == "cuda" else []
    return torch.random.fork_rng(devices=devices)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next((x.split(":", 1)[1].strip() for x in lines if x[:10] == "model name"), name)
    return f"{name}, {visible_cores()} cores"
