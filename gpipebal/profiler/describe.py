"""Put what was measured together: layers, step, and where it all comes from."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

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
from gpipebal.profiler.memory.layer_memory import LayerMemory
from gpipebal.profiler.memory.sparse_gradients import join_kinds
from gpipebal.profiler.replicas.owned import bytes_of_loss, own_bytes
from gpipebal.profiler.step.optimizer import Maker
from gpipebal.profiler.step.state import CALLS_MODEL, OptimizerNeeds, optimizer_needs
from gpipebal.profiler.survey import Survey
from gpipebal.profiler.times.rounds import Times
from gpipebal.profiler.times.settle import Settled, settle_launches, settle_rounds, whole_again
from gpipebal.profiler.training import Training
from gpipebal.units import count

__all__ = [
    "OptimizerCosts",
    "describe_layers",
    "describe_machine",
    "describe_profile",
    "describe_times",
    "known_columns",
    "main_dtype",
    "optimizer_costs",
    "software",
]

#: Fewer rounds than this are too few to trust a median.
FEW_ROUNDS = 3
#: A spread wider than this share of the median is flagged.
WIDE_SPREAD = 0.1
#: If threads had no core for more than this share of the rounds, it is flagged.
BUSY_SHARE = 0.1


def describe_layers(
    names: Sequence[str],
    modules: Sequence[nn.Module],
    times: Times,
    found: Survey,
    optimizer: OptimizerCosts,
    device_type: str,
) -> tuple[tuple[LayerProfile, ...], dict[str, Settled]]:
    """Describe every layer, and how its times were reconciled with the whole chain's."""
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
    columns = known_columns(names, modules, found, optimizer, device_type)
    layers = tuple(
        LayerProfile(
            forward_time=float(settled["forward"].times[k]),
            backward_time=float(settled["backward"].times[k]),
            recompute_time=float(settled["recompute"].times[k]),
            forward_spread=float(settled["forward"].spread[k]),
            backward_spread=float(settled["backward"].spread[k]),
            no_grad_forward_time=float(settled["no_grad_forward"].times[k]),
            forward_host_time=None if host_forward is None else float(host_forward[k]),
            backward_host_time=None if host_backward is None else float(host_backward[k]),
            **columns[k],
        )
        for k in range(len(modules))
    )
    return layers, settled


def known_columns(
    names: Sequence[str],
    modules: Sequence[nn.Module],
    found: Survey,
    optimizer: OptimizerCosts,
    device_type: str,
) -> list[dict[str, Any]]:
    """Return the columns of each layer's profile that do not say how long it takes."""
    own = own_bytes(modules, device_type)
    columns: list[dict[str, Any]] = [
        {
            "name": names[k],
            "kind": type(module).__name__,
            "flops": found.flops[k],
            **optimizer.columns(k),
            "fingerprint": fingerprint(module),
            **found.memory[k].columns(own[k], names[k], module, found.gradients.layers[k]),
        }
        for k, module in enumerate(modules)
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
    layers: tuple[LayerProfile, ...],
    step: StepTerms,
    optimizer: OptimizerCosts,
    device_type: str,
) -> Profile:
    """Put together what is known of one size of micro-batch, but for where it comes from.

    Args:
        training: The chain.
        found: The costs of its layers.
        sizes: Rows of the micro-batches.
        layers: The layers, described.
        step: What a step costs besides them and the optimizer; a loss without what it has all the
            time.
        optimizer: What the optimizer costs.
        device_type: Type of the devices that they will be on.
    """
    of_loss = bytes_of_loss(training.loss_fn, training.modules, device_type)
    loss, whole_loss = (
        None if each is None else replace(each, **of_loss) for each in (step.loss, step.whole_loss)
    )
    return Profile(
        layers=layers,
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


class OptimizerCosts(NamedTuple):
    """What an optimizer needs for every layer, each parameter at its first layer; and its time.

    None: it is not known, for all layers or for one.

    Attributes:
        seconds: Of its step.
        state: Bytes that it keeps.
        peaks: Bytes that its step needs temporarily.
        carried: Further bytes where the step of the layer before has left something.
        together: Whether the peaks of all layers add up.
        groups: Where they do not: for each group that is stepped at once and has parameters of
            several layers, what its step needs temporarily for each layer.
        doubts: Flags about these numbers.
    """

    seconds: float | None = None
    state: list[int | None] | None = None
    peaks: list[int | None] | None = None
    carried: list[int] | None = None
    together: bool = False
    groups: tuple[tuple[int, ...], ...] = ()
    doubts: tuple[str, ...] = ()

    def columns(self, k: int) -> dict[str, int | None]:
        """Return the columns of a layer profile."""
        return {
            "optimizer_bytes": None if self.state is None else self.state[k],
            "optimizer_peak_bytes": None if self.peaks is None else self.peaks[k],
            "optimizer_carried_bytes": 0 if self.carried is None else self.carried[k],
        }


def optimizer_costs(
    maker: Maker | None,
    modules: Sequence[nn.Module],
    device_type: str,
    memory: Sequence[LayerMemory],
    chunks: int,
) -> OptimizerCosts:
    """Find out what memory an optimizer needs for every layer, on a type of device.

    Args:
        maker: Makes the optimizer; it takes note of gradients that are sparse. None: there is none.
        modules: The layers.
        device_type: The type of device.
        memory: Memory of each layer, with one micro-batch.
        chunks: How many micro-batches there are.
    """
    if maker is None:
        return OptimizerCosts()
    of_layers = [found.parameter_gradients for found in memory]
    maker.note_gradients(join_kinds(modules, of_layers, chunks))
    owner: dict[int, int] = {}
    for k, module in enumerate(modules):
        for parameter in module.parameters():
            owner.setdefault(id(parameter), k)
    places = [owner[id(parameter)] for parameter in maker.parameters]
    by_layer = partial(_by_layer, places, len(modules))
    needs = optimizer_needs(maker, device_type)
    found = OptimizerCosts(peaks=by_layer(needs.peaks), together=True)
    if not needs.together:
        found = _in_turn(needs, places, len(modules))
    return found._replace(state=by_layer(needs.state), doubts=_doubts(needs.why))


def _doubts(why: Mapping[str, str]) -> tuple[str, ...]:
    """Say which optimizers could not step stand-ins, and so of which too little is known."""
    return tuple(
        f"the optimizer's time and state are not known: a step of {name} calls the model"
        if reason == CALLS_MODEL
        else "the optimizer's state and temporary memory are not known: "
        f"{name} cannot step stand-ins ({reason})"
        for name, reason in why.items()
    )


def _by_layer(
    places: Sequence[int], n_layers: int, known: Sequence[int | None]
) -> list[int | None]:
    """Add up what is known of parameters, which belong to the layers in these places.

    Where one of a layer's is not known, neither is the sum.
    """
    found: list[int | None] = [0] * n_layers
    for k, n_bytes in zip(places, known, strict=True):
        so_far = found[k]
        found[k] = None if n_bytes is None or so_far is None else so_far + n_bytes
    return found


def _in_turn(needs: OptimizerNeeds, places: Sequence[int], n_layers: int) -> OptimizerCosts:
    """Describe an optimizer that steps one parameter, or one group, after the other."""
    # With what the parameter before has left: wherever that is, and of the same layer only.
    whole, inside = [0] * n_layers, [0] * n_layers
    groups: dict[Any, list[int]] = {}
    own = (needs.peaks, needs.left, needs.before, needs.at_once)
    unknown = {k for k, n_bytes in zip(places, needs.peaks, strict=True) if n_bytes is None}
    for k, n_bytes, left, before, group in zip(places, *own, strict=True):
        if k in unknown or n_bytes is None:
            continue
        if group is not None:  # what is stepped at once leaves nothing
            groups.setdefault(group, [0] * n_layers)[k] += n_bytes
            continue
        whole[k] = max(whole[k], n_bytes + left)
        is_inside = before is not None and places[before] == k
        inside[k] = max(inside[k], n_bytes + left if is_inside else n_bytes)
    for sums in groups.values():
        whole, inside = (list(map(max, most, sums)) for most in (whole, inside))
    return OptimizerCosts(
        peaks=[None if k in unknown else n_bytes for k, n_bytes in enumerate(inside)],
        carried=[more - n_bytes for more, n_bytes in zip(whole, inside, strict=True)],
        # Of one layer alone the peak says it all.
        groups=tuple(tuple(sums) for sums in groups.values() if sum(map(bool, sums)) > 1),
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next((x.split(":", 1)[1].strip() for x in lines if x[:10] == "model name"), name)
    return f"{name}, {visible_cores()} cores"
