"""`estimate_profile`: what layers would cost on a device, without that device."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.errors import GpipebalError, ProfileError
from gpipebal.pipeline.process.eager import run_eagerly
from gpipebal.profile import LayerProfile, Profile, StepTerms
from gpipebal.profile.ties import find_ties
from gpipebal.profiler.chain.numbers import Arrived, Numbers
from gpipebal.profiler.chain.value import Value
from gpipebal.profiler.describe import known_columns, main_dtype, optimizer_memory, software
from gpipebal.profiler.estimate.stand_ins import META
from gpipebal.profiler.estimate.terms import estimate_gather, estimate_loss, estimate_optimizer
from gpipebal.profiler.estimate.walk import Estimate, Walk
from gpipebal.profiler.memory.layer_memory import (
    ChainGradients,
    number_gradients,
)
from gpipebal.profiler.replicas.harmless import left_alone
from gpipebal.profiler.replicas.owned import bytes_of_loss
from gpipebal.profiler.replicas.replica import check_not_lazy
from gpipebal.profiler.replicas.torch_state import torch_state_kept
from gpipebal.profiler.setting import choose_rows, random_numbers_kept
from gpipebal.profiler.step.optimizer import OptimizerLike
from gpipebal.profiler.survey import describe_skips
from gpipebal.profiler.times.progress import progress_bar
from gpipebal.profiler.training import Training
from gpipebal.rates import DeviceRates, find_rates
from gpipebal.schedule import check_count
from gpipebal.units import count

__all__ = ["DEFAULT_RATES", "estimate_profile", "estimate_training"]

#: The device whose rates are taken unless others are named.
DEFAULT_RATES = "H100 SXM"


def estimate_profile(
    module: nn.Module,
    sample: Any,
    *,
    chunks: int = 1,
    rows: int | Iterable[int] | None = None,
    rates: str | DeviceRates = DEFAULT_RATES,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    optimizer: OptimizerLike | None = None,
    partitions: int = 2,
    progress: bool | None = None,
    keywords: Mapping[str, Any] | None = None,
    in_dims: Any = 0,
    keyword_dims: Mapping[str, Any] | None = None,
    out_dims: Any = 0,
    target_dims: Any = 0,
) -> Profile:
    """Estimate time and memory of every layer from shapes, without a device and without memory.

    The layers run on meta tensors, identical layers only once. Bytes are counted as a measurement
    counts them, and with ``rates="CPU core"`` equal those of a measurement on a CPU, to the byte.
    The exceptions, above all layers that run a recurrent network, and on CUDA those with
    convolutions, batch normalisation or attention, are named with the reason in
    ``provenance["approximate"]``; `gpipebal.profiler.estimate.approximate` has all reasons. Times
    are a lower bound, from the device's peak rates: they tell how layers compare, not how long
    they take.

    Args:
        module: An `nn.Sequential`; its children are the layers. It is not changed: its parameters
            may be on any device, also the meta device.
        sample: A mini-batch: a tensor, or a tuple or other pytree of tensors, with the same rows.
            A tuple is one input. It is not changed, and may be on the meta device.
        chunks: Micro-batches that a mini-batch will be divided into. The layers are estimated at
            the size of the largest, ``ceil(rows / chunks)`` rows.
        rows: Other rows of a micro-batch to estimate, in `Profile.other_sizes`; None: two sizes
            near the micro-batch's own, as `profile_model` chooses them; ``()``: none. If a layer
            fails at a size that was chosen so, the size is left out, and named in
            ``provenance["left_out"]``.
        rates: Name of a device in `gpipebal.rates.RATES`, or your own `DeviceRates`.
        loss_fn: The loss, called as ``loss_fn(output, target)``; estimated as a term of the step.
        target: Target of the whole mini-batch, for `loss_fn`; None: ``loss_fn(output)``.
        optimizer: As for `profile_model`; its time and state are estimated.
        partitions: As for `profile_model`; every partition has a device of its own here, so it
            changes nothing.
        progress: Show a progress bar; None: only on a terminal.
        keywords: As for `profile_model`, like all that follow.
        in_dims: Dimensions of the sample.
        keyword_dims: Dimensions of keyword arguments.
        out_dims: Dimensions of the output.
        target_dims: Dimensions of the target.

    Returns:
        A `Profile` with ``provenance["method"] == "estimate"``: times in seconds, sizes in bytes.

    Raises:
        ModelError: `module` is not an `nn.Sequential`, `sample` cannot be divided, or `loss_fn` is
            not a function.
        BalanceError: a dimension does not fit.
        ProfileError: a layer failed, or needs values that do not exist (for example, it calls
            ``item()`` or ``nonzero()``); the error names it. Or there is a target without a loss.
        DeviceError: `rates` is not the name of a known device.

    Complexity:
        Eleven forwards and eight backwards of every different layer and size, without arithmetic;
        one more of both where a layer hands a value through.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(2**14, 2**16), nn.ReLU(), nn.Linear(2**16, 2**14))
        ...     sample = torch.empty(4096, 2**14)
        >>> profile = estimate_profile(model, sample, chunks=4, rates="A100")
        >>> profile.layers[0].parameter_bytes, profile.layers[0].flops
        (4295229440, 2199023255552)
        >>> f"{profile.layers[0].forward_time:.3f} s"
        '0.113 s'
    """
    training = Training.of(
        module,
        sample,
        chunks=chunks,
        loss_fn=loss_fn,
        target=target,
        optimizer=optimizer,
        keywords=keywords,
        in_dims=in_dims,
        keyword_dims=keyword_dims,
        out_dims=out_dims,
        target_dims=target_dims,
    )
    check_count("partitions", partitions)
    return estimate_training(training, rows=rows, rates=rates, progress=progress)


def estimate_training(
    training: Training,
    *,
    rows: int | Iterable[int] | None,
    rates: str | DeviceRates = DEFAULT_RATES,
    progress: bool | None,
) -> Profile:
    """Estimate a chain that is trained.

    Args:
        training: The chain.
        rows: Other rows; this and the next arguments are as for `estimate_profile`.
        rates: Rates of the device.
        progress: Show a progress bar; None: only on a terminal.

    Returns:
        The profile; raises what `estimate_profile` raises.
    """
    for name, layer in training.layers.items():
        check_not_lazy(name, layer)
    device = find_rates(rates)
    data = training.data
    sizes = data.sizes
    wanted = choose_rows(rows, sizes[0], sum(sizes))
    _check_autocast(device)
    left_out: dict[str, str] = {}
    reasons: dict[str, tuple[str, ...]] = {}
    others: list[Profile] = []
    n_walks = len(training.layers) * (1 + len(wanted))

    def walk() -> tuple[_Work, Profile]:
        with _undisturbed(), progress_bar("estimating", n_walks, progress) as told:
            work = _Work(training, device, told)
            main = work.at(sizes, reasons)
            for size in wanted:
                try:
                    others.append(work.at([size] * len(sizes), reasons))
                except GpipebalError as error:
                    if rows is not None:
                        raise
                    left_out[str(size)] = str(error).splitlines()[0]
        return work, main

    with left_alone([*training.modules, training.loss_fn]), torch_state_kept():
        # Context variables that layers set do not reach the caller's context.
        work, main = contextvars.copy_context().run(walk)
    provenance = {
        "method": "estimate",
        "device": device.name,
        "device_type": device.device_type,
        "rates": {
            "flops": dict(device.flops),
            "bandwidth": device.bandwidth,
            "memory_bytes": device.memory_bytes,
            "launch_time": device.launch_time,
            "host_time": device.host_time,
            "has_flash": device.has_flash,
            "source": device.source or "given by the user",
        },
        "approximate": {name: list(why) for name, why in sorted(reasons.items())},
        "left_out": left_out,
        "flags": [*_flags(reasons, left_out), *work.doubts],
        "layers_run": work.walk.n_run,
        "threads": None,
        "dtype": main_dtype(training.modules),
        "autocast": None,
        **software(),
        **data.sample.described(),
    }
    return replace(
        main,
        other_sizes=tuple(
            replace(other, provenance={**provenance, "rows": other.rows}) for other in others
        ),
        provenance={**provenance, "rows": main.rows},
    )


def _flags(reasons: Mapping[str, Sequence[str]], left_out: Mapping[str, str]) -> list[str]:
    """Say what is doubtful."""
    flags = ["estimated: times are lower bounds from peak rates, nothing was measured"]
    if reasons:
        flags.append(
            f"approximate: the memory of {count(len(reasons), 'layer')}, see 'approximate'"
        )
    flags += [f"left out: {rows} rows, {why}" for rows, why in left_out.items()]
    return flags


class _Work:
    """The part of an estimate that is the same for all sizes.

    Args:
        training: The chain, and how it is trained.
        rates: Rates of the device.
        told: Called after each layer.
    """

    def __init__(self, training: Training, rates: DeviceRates, told: Callable[[], None]) -> None:
        self.names, self.modules = training.names, training.modules
        self.data, self.loss_fn, self.rates = training.data, training.loss_fn, rates
        self.walk = Walk(
            self.names,
            self.modules,
            training.routes,
            rates,
            told,
            keep_modes=training.keep_modes,
            out_dims=self.data.joined_dims,
        )
        maker = training.maker()
        self._memory = optimizer_memory(maker, self.modules, self.rates.device_type)
        self._optimizer_time = None if maker is None else estimate_optimizer(maker, self.rates)
        self.doubts = list(self._memory.doubts)
        if maker is not None and self._optimizer_time is None and not self.doubts:
            self.doubts.append(
                f"the optimizer's time is not known: {maker.name} cannot step without values"
            )

        self._undivided: str | None = None
        if self.loss_fn is not None and self.data.target is not None:
            try:
                self.data.target.first_of(self.data.sizes)
            except GpipebalError as error:
                self._undivided = str(error).splitlines()[0]

    def at(self, sizes: Sequence[int], reasons: dict[str, tuple[str, ...]]) -> Profile:
        """Estimate a mini-batch of micro-batches of these rows, by the first of them.

        Args:
            sizes: Rows of each micro-batch.
            reasons: Receives, by layer, the reasons why its memory is approximate.

        Returns:
            A profile without provenance.
        """
        numbers = Numbers()
        start = Value.of(self.data.sample.without_memory(sizes[0], self.data.rows).value)
        estimates, inputs, outputs, skips = self.walk.along(start, numbers)
        memory = [found.memory for found in estimates]
        gradients = number_gradients(memory, self.walk.routes, numbers)
        described = describe_skips(self.walk.routes, skips, gradients)
        for name, found in zip(self.names, estimates, strict=True):
            if found.costs.approximate:
                reasons[name] = found.costs.approximate
        loss = None
        if self._undivided is None:
            loss = self._loss(sizes[:1], outputs, numbers, reasons)
        else:
            rows = count(sizes[0], "row")
            self.doubts.append(f"the loss is not measured at {rows}: {self._undivided}")
        gather_time, value = estimate_gather(self.data.outputs(outputs, sizes), self.rates)
        layers = self._layers(estimates, gradients)
        gathered: tuple[int, ...] = ()
        whole_loss = None
        if self.loss_fn is not None:
            joined = Arrived.behind(outputs, value, numbers)
            gathered = joined.storages
            whole_loss = self._loss(sizes, joined, numbers, reasons)
        return Profile(
            layers=layers,
            storages=tuple(numbers.bytes),
            inputs=inputs,
            common_inputs=self.data.sample.constants(inputs),
            without_gradient=numbers.without_gradient,
            rows=sizes[0],
            mini_batch_rows=sum(sizes),
            chunks=len(sizes),
            step=StepTerms(
                gather_time=gather_time,
                loss=loss,
                whole_loss=whole_loss,
                gathered=gathered,
                optimizer_time=self._optimizer_time,
                optimizer_together=self._memory.together,
            ),
            skips=described,
            ties=find_ties(self.modules),
        )

    def _loss(
        self,
        sizes: Sequence[int],
        outputs: Arrived,
        numbers: Numbers,
        reasons: dict[str, tuple[str, ...]],
    ) -> LayerProfile | None:
        if self.loss_fn is None:
            return None
        target = None
        if self.data.target is not None:
            target = self.data.target.without_memory(sum(sizes), self.data.rows).value
        loss, why = estimate_loss(self.loss_fn, target, outputs, numbers, self.rates)
        if why:
            reasons["loss"] = why
        return replace(loss, **bytes_of_loss(self.loss_fn, self.modules, self.rates.device_type))

    def _layers(
        self, estimates: Sequence[Estimate], gradients: ChainGradients
    ) -> tuple[LayerProfile, ...]:
        columns = known_columns(
            self.names,
            self.modules,
            [found.memory for found in estimates],
            gradients,
            self._memory,
            [found.costs.flops for found in estimates],
            self.rates.device_type,
        )
        return tuple(
            LayerProfile(
                forward_time=found.costs.forward_time,
                backward_time=found.costs.backward_time,
                recompute_time=found.costs.forward_time,
                no_grad_forward_time=found.costs.no_grad_forward_time,
                forward_host_time=found.costs.forward_host_time,
                backward_host_time=found.costs.backward_host_time,
                **known,
            )
            for known, found in zip(columns, estimates, strict=True)
        )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Run a block under torch's plain settings, and leave all random numbers as they were."""
    with (
        random_numbers_kept(META),
        torch.inference_mode(False),
        torch.enable_grad(),
        # Hooks of the caller would work with values.
        torch.autograd.graph.saved_tensors_hooks(_same, _same),
        # So does the search for gradients that are no numbers. The switch is the process's: where
        # it is off it is not touched, as another thread may turn it on in the meantime.
        torch.autograd.set_detect_anomaly(True, check_nan=False)
        if torch.is_anomaly_enabled()
        else nullcontext(),
        # With meta tensors a compiler would make another program.
        run_eagerly(),
    ):
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _check_autocast(rates: DeviceRates) -> None:
    kind = rates.device_type
    if torch.is_autocast_enabled(kind):
        raise ProfileError(
            f"autocast cannot be estimated: autocast({kind!r}) is on (expected off, because "
            "tensors without values are never cast).\n"
            "Fix: estimate model.to(torch.bfloat16), or profile_model(..., method='measure')."
        )
