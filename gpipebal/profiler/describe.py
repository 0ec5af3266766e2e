"""Put what was measured together: layers, step, and where it all comes from."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

import gpipebal
from gpipebal.pipeline.layers.devices import visible_cores
from gpipebal.pipeline.values.tensors import bytes_of
from gpipebal.profile import LayerProfile, Profile, StepTerms
from gpipebal.profile.fingerprint import fingerprint
from gpipebal.profile.layer import MOMENTS
from gpipebal.profile.ties import find_ties
from gpipebal.profiler.replicas.owned import bytes_of_loss, own_bytes
from gpipebal.profiler.step.by_layer import OptimizerCosts
from gpipebal.profiler.survey import Survey
from gpipebal.profiler.times.rounds import Times
from gpipebal.profiler.times.settle import Settled, settle_launches, settle_rounds, whole_again
from gpipebal.profiler.training import Training
from gpipebal.units import count

__all__ = [
    "describe_machine",
    "describe_profile",
    "describe_times",
    "main_dtype",
    "software",
    "times_of_layers",
]

#: Fewer rounds than this are too few to trust a median.
FEW_ROUNDS = 3
#: A spread wider than this share of the median is flagged.
WIDE_SPREAD = 0.1
#: If threads had no core for more than this share of the rounds, it is flagged.
BUSY_SHARE = 0.1


def times_of_layers(times: Times) -> tuple[list[dict[str, Any]], dict[str, Settled]]:
    """Return what was clocked as columns for each layer, and how it was reconciled with the whole.

    Args:
        times: What was clocked, of the layers and of the whole chain.
    """
    settled = {
        "forward": settle_rounds(times.forward, times.whole_forward),
        "backward": settle_rounds(times.backward, times.whole_backward),
        "recompute": settle_rounds(
            times.recompute, whole_again(times.recompute, times.forward, times.whole_forward)
        ),
        "no_grad_forward": settle_rounds(times.without_graph, times.whole_without_graph),
    }
    host_forward = settle_launches(times.host_forward, times.host_whole_forward)
    host_backward = settle_launches(times.host_backward, times.host_whole_backward)
    columns = [
        {
            "forward_time": float(settled["forward"].times[k]),
            "backward_time": float(settled["backward"].times[k]),
            "recompute_time": float(settled["recompute"].times[k]),
            "forward_spread": float(settled["forward"].spread[k]),
            "backward_spread": float(settled["backward"].spread[k]),
            "no_grad_forward_time": float(settled["no_grad_forward"].times[k]),
            "forward_host_time": None if host_forward is None else float(host_forward[k]),
            "backward_host_time": None if host_backward is None else float(host_backward[k]),
        }
        for k in range(len(times.forward[0]))
    ]
    return columns, settled


def _known_columns(
    training: Training, found: Survey, optimizer: OptimizerCosts, device_type: str
) -> list[dict[str, Any]]:
    """Return the columns of each layer's profile that do not say how long it takes."""
    own = own_bytes(training.modules, device_type)
    columns: list[dict[str, Any]] = [
        {
            "name": name,
            "kind": type(module).__name__,
            "flops": found.flops[k],
            **optimizer.columns(k),
            "fingerprint": fingerprint(module),
            **found.memory[k].columns(own[k], name, module, found.gradients.layers[k]),
        }
        for k, (name, module) in enumerate(training.layers.items())
    ]
    # There are as many moments as operations: layers that are alike have the same ones.
    known: dict[Any, Any] = {}
    for of_layer in columns:
        for name in MOMENTS.values():
            of_layer[name] = known.setdefault(of_layer[name], of_layer[name])
    return columns


def describe_profile(
    training: Training,
    found: Survey,
    sizes: Sequence[int],
    times: Sequence[Mapping[str, Any]],
    step: StepTerms,
    optimizer: OptimizerCosts,
    device_type: str,
) -> Profile:
    """Put together what is known of one size of micro-batch, but for where it comes from.

    Args:
        training: The chain.
        found: The costs of its layers.
        sizes: Rows of the micro-batches.
        times: For each layer, the columns that say how long it takes.
        step: What a step costs besides them and the optimizer; a loss without what it has all the
            time.
        optimizer: What the optimizer costs.
        device_type: Type of the devices that they will be on.
    """
    of_loss = bytes_of_loss(training.loss_fn, training.modules, device_type)
    loss, whole_loss = (
        None if each is None else replace(each, **of_loss) for each in (step.loss, step.whole_loss)
    )
    columns = zip(times, _known_columns(training, found, optimizer, device_type), strict=True)
    return Profile(
        layers=tuple(LayerProfile(**of_time, **known) for of_time, known in columns),
        storages=tuple(found.numbers.bytes),
        inputs=found.inputs,
        common_inputs=training.data.sample.constants(found.inputs),
        without_gradient=found.numbers.without_gradient,
        rows=sizes[0],
        mini_batch_rows=sum(sizes),
        chunks=len(sizes),
        step=replace(
            step,
            loss=loss,
            whole_loss=whole_loss,
            optimizer_time=optimizer.seconds,
            optimizer_together=optimizer.together,
            optimizer_groups=optimizer.groups,
        ),
        skips=found.skips,
        ties=find_ties(training.modules),
    )


def describe_times(
    rows: int, settled: dict[str, Settled], waited: Sequence[Sequence[float]] = ()
) -> dict[str, Any]:
    """Say how the times of one size came about, and what is doubtful about them.

    Args:
        rows: Rows of its micro-batches.
        settled: The times.
        waited: For each round, shares of it in which threads had no core.
    """
    flags = []
    rounds = settled["forward"].rounds
    waits = np.nanmean(waited) if len(waited) else 0.0
    if waits > BUSY_SHARE:
        flags.append(
            f"busy: at {count(rows, 'row')} threads had no core for {waits:.0%} of the time, which "
            "other threads or programs used; measure again when the machine is quiet"
        )
    if rounds < FEW_ROUNDS:
        flags.append(f"sparse: {count(rounds, 'round')} at {count(rows, 'row')}; give more timeout")
    for name in ("forward", "backward"):
        result = settled[name]
        if result.whole > 0 and result.whole_spread > WIDE_SPREAD * result.whole:
            share = result.whole_spread / result.whole
            flags.append(
                f"wide: the {name}s at {count(rows, 'row')} spread over {share:.0%} of the median"
            )
        if result.misses:
            flags.append(
                f"settled: the {name}s of the layers at {count(rows, 'row')} add up to "
                f"{result.measured / max(result.whole, 1e-12):.2f} of the whole chain's"
            )
    return {
        "rounds": rounds,
        "whole_forward_time": settled["forward"].whole,
        "whole_backward_time": settled["backward"].whole,
        "layered_forward_time": settled["forward"].measured,
        "layered_backward_time": settled["backward"].measured,
        "correction": {name: result.to_record() for name, result in settled.items()},
        "flags": flags,
    }


def describe_machine(
    device: torch.device, n_threads: int, modules: Sequence[nn.Module]
) -> dict[str, Any]:
    """Say where, with what and when something is measured."""
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return {
        "device": _device_name(device),
        "device_type": kind,
        "threads": n_threads if kind == "cpu" else None,
        "dtype": main_dtype(modules),
        "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
        **software(),
        "cuda": torch.version.cuda,
    }


def software() -> dict[str, str]:
    """Return what a profile is made with, and when."""
    return {
        "gpipebal": gpipebal.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def main_dtype(modules: Sequence[nn.Module]) -> str:
    """Name the dtype of most bytes of parameters."""
    by_dtype: dict[torch.dtype, int] = {}
    for module in modules:
        for parameter in module.parameters():
            by_dtype[parameter.dtype] = by_dtype.get(parameter.dtype, 0) + bytes_of(parameter)
    found = max(by_dtype, key=lambda dtype: by_dtype[dtype], default=torch.get_default_dtype())
    return str(found).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next((x.split(":", 1)[1].strip() for x in lines if x[:10] == "model name"), name)
    return f"{name}, {visible_cores()} cores"
