"""`profile_model`: measure the layers of a chain at the sizes that micro-batches have."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpipebal.errors import ProfileError
from gpipebal.pipeline.layers.devices import check_threads, share_of_cores, visible_cores
from gpipebal.pipeline.process.caller import CallerState
from gpipebal.pipeline.process.modes import no_notes_left
from gpipebal.problem.checks import check_flag
from gpipebal.profile import Profile
from gpipebal.profiler.chain.failures import alone_already, is_out_of_memory
from gpipebal.profiler.conduct import Conduct
from gpipebal.profiler.describe import describe_machine
from gpipebal.profiler.replicas.compiled import compiled_apart
from gpipebal.profiler.replicas.harmless import left_alone
from gpipebal.profiler.replicas.torch_state import torch_state_kept
from gpipebal.profiler.setting import (
    check_timeout,
    check_values,
    choose_rows,
    current_device,
    device_for,
    parameters_cast_at_each_use,
    random_numbers_kept,
    threads_set,
)
from gpipebal.profiler.step.optimizer import OptimizerLike
from gpipebal.profiler.study import Study
from gpipebal.profiler.times.progress import progress_bar
from gpipebal.profiler.times.rounds import Pace
from gpipebal.profiler.training import Training
from gpipebal.schedule import check_count

__all__ = ["profile_model"]

#: Least number of rounds, whatever the timeout; and the most.
LEAST_ROUNDS = 1
MOST_ROUNDS = 40


def profile_model(
    module: nn.Module,
    sample: Any,
    *,
    device: torch.device | str | int | None = None,
    chunks: int = 1,
    rows: int | Sequence[int] | None = None,
    threads: int | None = None,
    partitions: int = 2,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    optimizer: OptimizerLike | None = None,
    keywords: Mapping[str, Any] | None = None,
    in_dims: Any = 0,
    keyword_dims: Mapping[str, Any] | None = None,
    out_dims: Any = 0,
    target_dims: Any = 0,
    method: Literal["measure", "estimate"] = "measure",
    rates: Any = None,
    one_at_a_time: bool | None = None,
    share_identical: bool = False,
    as_pipeline: bool = True,
    timeout: float | None = None,
    progress: bool | None = None,
) -> Profile:
    """Measure times and memory of every layer, for one micro-batch.

    The layers are measured as they are trained, in replicas that share only the parameters' memory
    with the model. Parameters, gradients, buffers, training flags, hooks, devices and random
    numbers of the model are the same afterwards as before. Caches that layers keep outside of
    themselves are restored; those of `functools.lru_cache` that have grown are emptied. Hooks of
    layers run in the replicas, too, but not hooks on parameters. One profile is taken at a time in
    a process: a call in another thread waits for its end.

    Autocast is that of the caller. A model in training mode may have parts in evaluation mode (a
    frozen batch normalisation), and is measured in these modes; one that is in evaluation mode
    itself is measured as if all of it were trained.

    Layers that `torch.compile` made, and functions that they call, are timed compiled; their memory
    and operations are those of the code as written. If torch compiled something meanwhile, it
    compiles everything that it has compiled in the process again at the next call.

    Args:
        module: An `nn.Sequential`; its children are the layers.
        sample: A mini-batch: a tensor, or a tuple or other pytree of tensors, with the same rows.
            A tuple is one input.
        device: Where to measure; None: the first CUDA device, or the CPU where there is none. On
            CUDA the layers run on the caller's current stream of that device.
        chunks: Micro-batches that a mini-batch will be divided into. The layers are measured at
            the size of the largest, ``ceil(rows / chunks)`` rows.
        rows: Further sizes of micro-batches to measure (see `Profile.other_sizes`), at most as
            large as the sample; None: double and half of the micro-batch's rows, or, where the
            sample is too small for that, the next fractions; ``()``: none. Sizes that are asked for
            must fit the device; a size chosen by default that does not fit is left out, with a
            flag.
        threads: Intra-operation threads that a CPU partition will have; None: its share of the
            cores. Ignored on CUDA.
        partitions: How many partitions will work side by side on the CPU. The same number of
            threads measure side by side, as far as there are cores. Ignored on CUDA.
        loss_fn: The loss, called as ``loss_fn(output, target)``; measured over a micro-batch, as
            `GPipe.step` computes it, and over the gathered output of the mini-batch.
        target: Target of the whole mini-batch, for `loss_fn`; None: ``loss_fn(output)``.
        optimizer: An optimizer of the model's parameters, a list of several that share them out, or
            a callable that makes one or several from a list of parameters (a class, or a lambda
            with its options); their time and state are measured, on copies.
        keywords: Keyword arguments that the first layer gets in addition to its input.
        in_dims: Dimension along which each tensor of the sample has its rows, as `GPipe` takes it;
            None: every micro-batch gets all of it.
        keyword_dims: The same for keyword arguments, by name; 0 for those that are not named. Names
            of keywords that are not given change nothing.
        out_dims: The same for the output; None: the micro-batches' tensors are stacked.
        target_dims: The same for the target, as `GPipe.step` takes it; without one it is not used.
        method: ``'measure'``; or ``'estimate'``, which needs no device and no memory: the layers
            may be on the meta device, and nothing runs. See `gpipebal.profiler.estimate`. Arguments
            that only tell how to measure are then refused, except `timeout`: nothing is repeated.
        rates: For ``method='estimate'``: the device to estimate for, by name or by its rates;
            None: an H100 SXM.
        one_at_a_time: Whether to have only one layer on the device at a time, with its gradients
            and activations, for models that do not fit; None: on CUDA, if parameters are
            elsewhere. The times then do not include the effects of neighbours on each other.
        share_identical: Whether to measure layers of the same class, shapes and input only once, if
            what they read of their options is the same. Each layer is then measured alone, as with
            `one_at_a_time`.
        as_pipeline: Whether to run a few steps as a pipeline on the CPU after the repeats, and to
            correct the times by the result: a partition is not the sum of its layers. Within one
            kind of work, such as forwards, this does not change how layers compare. Ignored on
            CUDA, and where each layer is measured alone.
        timeout: Approximate seconds for the repeats; the steps as a pipeline take half of it. None:
            the whole profile costs about as much as ten training steps, or some seconds where these
            are short. The repeats then have six of them (ten where nothing runs as a pipeline), at
            least 2 seconds and at most 60, less the time that was used before them, but half of it
            at least; and the steps as a pipeline have four, at most 30 seconds, or up to fifty in
            3 to 10 seconds. Each layer is measured at least once.
        progress: Show a progress bar; None: only on a terminal.

    Returns:
        A `Profile`: times in seconds as medians over the repeats with their interquartile
        range, sizes in bytes. ``provenance['flags']`` says what is doubtful: too few rounds, a
        wide spread, a busy machine, layers that do not add up to the whole chain.

    Raises:
        ModelError: `module` is not an `nn.Sequential`, `sample` cannot be divided, or `loss_fn` is
            not a function.
        BalanceError: a dimension does not fit.
        ProfileError: a layer, the loss or the optimizer failed, or has no values to measure with;
            the error names it. Or `sample` has no rows; or arguments exclude each other, such as a
            target without a loss.
        DeviceError: `device` does not exist.

    Complexity:
        Each round costs five forwards and three backwards of one micro-batch (on CUDA, each of the
        first three rounds costs one more of both), and every third round the same for the other
        sizes. Before the rounds come one of each size to warm up, and up to ten forwards and eight
        backwards to find out all that needs no repeats (on CUDA one more of both); at other sizes
        up to six of these backwards are left out, with their forwards, where they made no
        difference to memory.
        After them, on the CPU, come training steps as a pipeline for as long as `timeout` says,
        but at least twelve, of fewer micro-batches where time is short: two for each partition.
        Memory, once per measuring thread: gradients and buffers of the model, and what one
        micro-batch saves.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> profile = profile_model(model, torch.ones(6, 8), chunks=3, timeout=0.1)
        >>> profile.rows, profile.layers[0].parameter_bytes, profile.layers[2].output_bytes
        (2, 288, 16)
        >>> [other.rows for other in profile.other_sizes]
        [1, 4]
    """
    if method not in ("measure", "estimate"):
        raise ProfileError(
            f"method does not exist: method={method!r:.60} (expected 'measure' or 'estimate').\n"
            "Fix: method='measure' to run the layers, 'estimate' to look at their shapes."
        )
    share_identical = check_flag("share_identical", share_identical)
    as_pipeline = check_flag("as_pipeline", as_pipeline)
    if one_at_a_time is not None:
        one_at_a_time = check_flag("one_at_a_time", one_at_a_time)
        if share_identical and not one_at_a_time:
            raise ProfileError(
                "layers that share a measurement are measured one at a time: one_at_a_time=False "
                "with share_identical=True (expected one of them).\n"
                "Fix: leave one_at_a_time out, or share_identical."
            )
    if progress is not None:
        progress = check_flag("progress", progress)
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
    n_partitions = check_count("partitions", partitions)
    if method == "estimate":
        from gpipebal.profiler.estimate import estimate_training

        _refuse(
            "method='estimate'",
            "rates= names the device to estimate for",
            {
                "device": device,
                "threads": threads,
                "one_at_a_time": one_at_a_time,
                "share_identical": share_identical or None,
                "as_pipeline": None if as_pipeline else False,
            },
        )
        if timeout is not None:
            check_timeout(timeout)  # nothing is repeated, so that any is kept
        return estimate_training(training, rows=rows, rates=rates, progress=progress)
    _refuse("method='measure'", "method='estimate' takes rates", {"rates": rates})
    check_values(training.layers, sample, keywords, target)
    if isinstance(loss_fn, nn.Module):
        check_values({"loss": loss_fn})
    where = device_for(device)
    n_threads = (
        share_of_cores(n_partitions) if threads is None else check_threads("threads", threads)
    )
    alone = share_identical or _is_alone(one_at_a_time, training.modules, where)
    side_by_side = 1
    if where.type == "cpu" and not alone:
        side_by_side = max(1, min(n_partitions, visible_cores() // n_threads))
    conduct = Conduct(
        where,
        rows=rows,
        n_partitions=n_partitions,
        side_by_side=side_by_side,
        n_threads=n_threads,
        alone=alone,
        share=share_identical,
        as_pipeline=as_pipeline,
        limit=None if timeout is None else check_timeout(timeout),
        progress=progress,
    )
    with (
        left_alone([module, loss_fn]),  # first: it waits for the end of another thread's profile
        torch_state_kept(),
        no_notes_left(),
        compiled_apart(),
    ):
        state = CallerState.capture((where.type,))
        with (
            random_numbers_kept(where),
            current_device(where),
            parameters_cast_at_each_use(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            # Context variables that layers set do not reach the caller's context.
            return contextvars.copy_context().run(_measure, training, conduct, state)


def _measure(training: Training, conduct: Conduct, state: CallerState) -> Profile:
    """Measure a chain that is trained.

    Args:
        training: The chain.
        conduct: How to measure.
        state: Settings of the caller.
    """
    started = time.perf_counter()
    where, alone = conduct.where, conduct.alone
    n_threads = conduct.n_threads if conduct.on_cpu else None
    study = Study(training, where, all_sizes=conduct.rows is not None, alone=alone)
    sizes = training.data.sizes
    others = choose_rows(conduct.rows, sizes[0], sum(sizes))
    parts, side_by_side = len(training.layers) if alone else 1, conduct.side_by_side
    total = parts if alone else MOST_ROUNDS * conduct.side_by_side
    with threads_set(n_threads), progress_bar("profiling", total, conduct.progress) as told:
        pace = Pace(
            lambda seconds: conduct.seconds_left(started, seconds * len(sizes), parts),
            LEAST_ROUNDS,
            MOST_ROUNDS,
            told,
        )
        if alone:
            try:
                study.measure_alone(others, pace, share=conduct.share)
            except ProfileError as error:
                if is_out_of_memory(error):
                    raise alone_already(error) from error.__cause__
                raise
        else:
            study.survey_sizes(others)
            side_by_side = study.measure(side_by_side, n_threads, pace, state)
    profile = study.profile(
        {
            "method": "measure",
            **describe_machine(where, conduct.n_threads, training.modules),
            "side_by_side": side_by_side,
            "partitions": conduct.n_partitions,
            "one_at_a_time": alone,
            "share_identical": conduct.share,
            **training.data.sample.described(),
        }
    )
    if not conduct.tries:
        return profile
    seconds = conduct.seconds_to_try(sum(layer.time for layer in profile.layers) * len(sizes))
    return study.try_out(profile, conduct.side_by_side, conduct.n_threads, seconds)


def _refuse(where: str, instead: str, given: Mapping[str, Any]) -> None:
    """Refuse arguments that have no meaning.

    Raises:
        ProfileError: one is given.
    """
    for name, value in given.items():
        if value is not None:
            raise ProfileError(
                f"{name} has no meaning with {where}: {name}={value!r:.60} (expected nothing).\n"
                f"Fix: leave {name} out; {instead}."
            )


def _is_alone(
    one_at_a_time: bool | None, layers: Sequence[nn.Module], device: torch.device
) -> bool:
    """Decide whether layers come to the device one at a time."""
    if one_at_a_time is not None:
        return one_at_a_time
    return device.type == "cuda" and any(
        parameter.device != device for layer in layers for parameter in layer.parameters()
    )
