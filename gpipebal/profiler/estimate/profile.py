"""What layers would cost on a device, without that device."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from gpipebal.errors import GpipebalError, ProfileError
from gpipebal.pipeline.process.eager import run_eagerly
from gpipebal.profile import LayerProfile, Profile, StepTerms
from gpipebal.profile.moments import keep_largest
from gpipebal.profiler.chain.failures import first_line_of
from gpipebal.profiler.chain.numbers import Arrived, Numbers
from gpipebal.profiler.chain.value import Value
from gpipebal.profiler.describe import describe_profile, main_dtype, software
from gpipebal.profiler.estimate.stand_ins import META
from gpipebal.profiler.estimate.terms import estimate_gather, estimate_loss, estimate_optimizer
from gpipebal.profiler.estimate.walk import Walk
from gpipebal.profiler.replicas.harmless import left_alone
from gpipebal.profiler.replicas.torch_state import torch_state_kept
from gpipebal.profiler.setting import check_not_lazy, choose_rows, random_numbers_kept
from gpipebal.profiler.step.by_layer import OptimizerCosts, optimizer_costs
from gpipebal.profiler.survey import Survey
from gpipebal.profiler.times.progress import progress_bar
from gpipebal.profiler.training import Training
from gpipebal.rates import DeviceRates, find_rates
from gpipebal.units import count

__all__ = ["estimate_training"]

#: The device whose rates are taken unless others are named.
_DEFAULT_RATES = "H100 SXM"


def estimate_training(
    training: Training,
    *,
    rows: int | Iterable[int] | None,
    rates: str | DeviceRates | None,
    progress: bool | None,
) -> Profile:
    """Estimate time and memory of every layer of a chain that is trained.

    Args:
        training: The chain. Its layers are not changed, and may be on the meta device.
        rows: Other rows of a micro-batch to estimate, as for `gpipebal.profile_model`.
        rates: Name of a device in `gpipebal.rates.RATES`, or its rates; None: those of an H100.
        progress: Show a progress bar; None: only on a terminal.

    Raises:
        ProfileError: a layer failed, or needs values that do not exist (for example, it calls
            ``item()`` or ``nonzero()``); the error names it.
        DeviceError: `rates` is not the name of a known device.

    Complexity:
        Eleven forwards and eight backwards of every different layer and size, without arithmetic;
        one more of both where a layer hands a value through.
    """
    for name, layer in training.layers.items():
        check_not_lazy(name, layer)
    if isinstance(training.loss_fn, nn.Module):
        check_not_lazy("loss", training.loss_fn)
    device = find_rates(_DEFAULT_RATES if rates is None else rates)
    data = training.data
    sizes = data.sizes
    wanted = choose_rows(rows, sizes[0], sum(sizes))
    _check_autocast(device)
    left_out: dict[str, str] = {}
    others: list[Profile] = []
    n_walks = len(training.layers) * (1 + len(wanted))

    def walk() -> tuple[_Work, Profile]:
        with _undisturbed(), progress_bar("estimating", n_walks, progress) as told:
            work = _Work(training, device, told)
            main = work.at(sizes)
            for size in wanted:
                try:
                    others.append(work.at([size] * len(sizes)))
                except GpipebalError as error:
                    if rows is not None:
                        raise
                    left_out[str(size)] = first_line_of(error)
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
        "approximate": {name: list(why) for name, why in sorted(work.reasons.items())},
        "left_out": left_out,
        "flags": [*_flags(work.reasons, left_out), *work.doubts],
        "layers_run": work.walk.n_run,
        "threads": None,
        "dtype": main_dtype(training.modules),
        "autocast": None,
        **software(),
        **data.sample.described(),
    }
    told = [replace(other, provenance={**provenance, "rows": other.rows}) for other in others]
    provenance["rows"] = main.rows
    return keep_largest(replace(main, other_sizes=tuple(told), provenance=provenance))


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

    Attributes:
        walk: Walks along the chain.
        reasons: Why the memory of layers is approximate, by their names.
        doubts: Flags about the optimizer and the loss.
    """

    def __init__(self, training: Training, rates: DeviceRates, told: Callable[[], None]) -> None:
        self.training, self.names, self.modules = training, training.names, training.modules
        self.data, self.loss_fn, self.rates = training.data, training.loss_fn, rates
        self.walk = Walk(training, rates, told)
        self.reasons: dict[str, tuple[str, ...]] = {}
        self.doubts: list[str] = []
        self._maker = training.maker()
        self._optimizer: OptimizerCosts | None = None
        self._undivided: str | None = None
        if self.loss_fn is not None and self.data.target is not None:
            try:
                self.data.target.first_of(self.data.sizes)
            except GpipebalError as error:
                self._undivided = first_line_of(error)

    def _estimate_optimizer(self, found: Survey, chunks: int) -> OptimizerCosts:
        """Find out what the optimizer costs, by the first walk along the layers."""
        maker = self._maker
        costs = optimizer_costs(maker, self.modules, self.rates.device_type, found.memory, chunks)
        self.doubts += costs.doubts
        if maker is None:
            return costs
        seconds = estimate_optimizer(maker, self.rates)
        if seconds is None and not costs.doubts:
            self.doubts.append(
                f"the optimizer's time is not known: {maker.name} cannot step without values"
            )
        return costs._replace(seconds=seconds)

    def at(self, sizes: Sequence[int]) -> Profile:
        """Estimate a mini-batch of micro-batches of these rows, by the first of them.

        Args:
            sizes: Rows of each micro-batch.

        Returns:
            A profile without provenance.
        """
        start = Value.of(self.data.sample.without_memory(sizes[0], self.data.rows).value)
        found, costs = self.walk.along(start)
        if self._optimizer is None:
            self._optimizer = self._estimate_optimizer(found, len(sizes))
        outputs, numbers = found.outputs, found.numbers
        for name, of_layer in zip(self.names, costs, strict=True):
            if of_layer.approximate:
                self.reasons[name] = of_layer.approximate
        loss = None
        if self._undivided is None:
            loss = self._loss(sizes[:1], outputs, numbers)
        else:
            rows = count(sizes[0], "row")
            self.doubts.append(f"the loss is not measured at {rows}: {self._undivided}")
        gather_time, value = estimate_gather(self.data.outputs(outputs, sizes), self.rates)
        gathered: tuple[int, ...] = ()
        whole_loss = None
        if self.loss_fn is not None:
            joined = Arrived.of(value, outputs.known(), numbers, {})
            gathered = joined.storages
            whole_loss = self._loss(sizes, joined, numbers)
        step = StepTerms(gather_time, loss, whole_loss, gathered)
        times = [of_layer.times for of_layer in costs]
        given = (self._optimizer, self.rates.device_type)
        return describe_profile(self.training, found, sizes, times, step, *given)

    def _loss(
        self, sizes: Sequence[int], outputs: Arrived, numbers: Numbers
    ) -> LayerProfile | None:
        if self.loss_fn is None:
            return None
        target = None
        if self.data.target is not None:
            target = self.data.target.without_memory(sum(sizes), self.data.rows).value
        loss, why = estimate_loss(self.loss_fn, target, outputs, numbers, self.rates)
        if why:
            self.reasons["loss"] = why
        return loss


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
