"""verify: does the pipeline do what the plain model does?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.argument_kinds import check_mapping, whole_number
from gpipebal.errors import BalanceError, KindError, ModelError, VerificationError
from gpipebal.pipeline.gpipe import GPipe
from gpipebal.pipeline.minibatch.inputs import part_inputs
from gpipebal.pipeline.minibatch.loss import Reduction
from gpipebal.pipeline.values.dims import spread_dims
from gpipebal.profiler.setting import random_numbers_kept
from gpipebal.schedule import SCHEDULES
from gpipebal.verification.compare import Comparison, DifferenceError
from gpipebal.verification.executions import (
    name_of_run,
    plain_copy,
    run_pipe,
    run_plain,
    shapes_at_once,
)
from gpipebal.verification.report import Agreement, VerifyReport
from gpipebal.verification.search import find_layer
from gpipebal.verification.task import Task
from gpipebal.verification.tolerance import Tolerance

__all__ = ["verify"]


def verify(
    module: nn.Module,
    pipe: GPipe,
    sample: Any,
    *,
    keywords: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    target_dims: Any = 0,
    reduction: Reduction = "mean",
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> VerifyReport:
    """Compare a pipeline with the plain model, and name the first difference.

    Runs one mini-batch through the plain model, micro-batch by micro-batch on one device, and
    through the pipeline, with the same random numbers; then compares outputs, gradients and
    buffers. The plain model also runs on the mini-batch in one piece, if it can: of that run only
    the shapes are compared, which tell whether micro-batches can be joined. With a `loss_fn`,
    `GPipe.step` is compared too, under each schedule. All run with the settings that hold at the
    call: gradients or none, autocast, training or eval mode (the pipeline's, layer by layer).

    Everything runs on copies (except a parameter that `loss_fn` uses by itself: its gradient is not
    compared): parameters, gradients, buffers, inputs and random states stay as they are, and the
    pipeline's own workers are not used. Only what a copy still shares, such as a global variable
    that a layer writes to, can change. Hooks on parameters are not copied. One copy of the layers
    at a time is in memory, in addition to the gradients and buffers of two. If there is a
    difference, both run once more to find the first layer with another result, which takes the
    memory of all layers' results.

    Args:
        module: The chain that the pipeline was made of.
        pipe: The pipeline.
        sample: A mini-batch; a tuple is one input.
        keywords: Keyword arguments for the first layer.
        loss_fn: Called as ``loss_fn(output, target)``, or ``loss_fn(output)`` without a target.
            None: a random projection of all outputs that need a gradient.
        target: A tensor or a pytree of tensors, for `loss_fn`.
        target_dims: As for `GPipe.step`.
        reduction: As for `GPipe.step`.
        rtol: How large a difference may be, as a fraction of the tensor's largest value. None:
            that of `torch.testing` for the dtype (1.3e-6 for float32), under autocast for the
            dtype it casts to.
        atol: How large a difference may be in addition. None: that of `torch.testing` for the
            dtype (1e-5 for float32, 1e-7 for float64; in half precision one rounding, 8e-3 for
            bfloat16) times the largest value of all outputs, of the layer's buffers, or of the
            gradients of this and later layers; so values that are zero except for rounding agree.
        seed: Seed of the random numbers.

    Returns:
        What was compared, and how well it agrees.

    Raises:
        VerificationError: something differs (an AssertionError); the text names the first
            difference, in the order state, outputs, loss, gradients from the last layer to the
            first, buffers.
        ModelError: `module` is not an `nn.Sequential`, `pipe` is not a `GPipe`, there is a target
            but no `loss_fn`, or the layers cannot be copied.
        BalanceError: a tolerance is not a number of 0 or more, or torch does not take the seed.
        KindError: `loss_fn` cannot be called.
        BaseException: whatever a layer raised, noted with the run it happened in.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
        >>> pipe = GPipe(model, [1, 2], chunks=2)
        >>> report = verify(model, pipe, torch.ones(6, 4))
        >>> report.outputs.count, report.gradients.count, report.without_gradients
        (1, 4, '')
    """
    _check_models(module, pipe)
    if keywords is not None:
        check_mapping("keywords", keywords, "keywords={'mask': mask}, say")
    _check_loss(loss_fn, target)
    seed = _check_seed(seed)
    task = Task(sample, keywords or {}, loss_fn, target, target_dims, reduction, seed)
    comparison = Comparison(Tolerance(rtol, atol, _autocast_dtypes(pipe)))
    parts = part_inputs(sample, task.keywords, pipe.in_dims, pipe.keyword_dims, pipe.chunks)[1]
    # The call, and if there is a loss a step under each schedule.
    schedules = [None, *(SCHEDULES if loss_fn is not None and len(pipe) else ())]
    # Layers that draw from Python or numpy are wrong in a pipeline: detected, and undone here.
    with random_numbers_kept(*pipe.devices), _gradients_kept(module, pipe):
        plain = plain_copy(module, pipe)
        with _told():
            comparison.check_models(plain, pipe)
        expected = run_plain(plain, pipe, task)
        # Its memory is free for the next copy.
        del plain
        for schedule in schedules:
            found = run_pipe(pipe, task, schedule, trains=expected.trains)
            search = partial(find_layer, module, pipe, task, schedule, comparison.tolerance)
            with _told(partial(search, trains=expected.trains)):
                comparison.check(expected, found, name_of_run(schedule))
        if len(pipe) and len(parts.rows) > 1:
            at_once = shapes_at_once(plain_copy(module, pipe), pipe, task)
            dims = spread_dims(pipe.out_dims, expected.structure, "out_dims")
            with _told():
                comparison.check_shapes(expected, at_once, dims)
    agreements = {
        kind: Agreement.of(comparison.found.get(kind, {}))
        for kind in ("outputs", "losses", "gradients", "buffers")
    }
    reason = "" if expected.trains else "nothing needs one"
    return VerifyReport(
        runs=tuple(map(name_of_run, schedules)),
        micro_batches=len(parts.rows),
        balance=list(pipe.balance),
        **agreements,
        without_gradients=reason if torch.is_grad_enabled() else "they are switched off",
    )


@contextmanager
def _told(search: Callable[[], str] = str) -> Iterator[None]:
    """Tell the caller of a difference that this block finds, and what a search then says of it."""
    try:
        yield
    except DifferenceError as difference:
        layer = search()
        evidence = f"{difference.evidence}\n{layer}" if layer else difference.evidence
        raise VerificationError(
            f"the pipeline differs from the plain model: {difference.what}.\n"
            f"{evidence}\n"
            f"Fix: {difference.advice}"
        ) from None


def _check_models(module: object, pipe: object) -> None:
    if not isinstance(pipe, GPipe):
        raise ModelError(
            f"pipe is not a pipeline: type(pipe)={type(pipe).__name__} (expected GPipe).\n"
            "Fix: verify(module, GPipe(module, balance), sample)."
        )
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"module is not a model: type(module)={type(module).__name__} "
            "(expected nn.Sequential).\nFix: give the chain that the pipeline was made of."
        )


def _check_loss(loss_fn: object, target: object) -> None:
    if loss_fn is not None and not callable(loss_fn):
        raise KindError(
            f"loss_fn is not a function: type(loss_fn)={type(loss_fn).__name__} (expected one of "
            "output and target).\nFix: loss_fn=nn.MSELoss(), say."
        )
    if target is not None and loss_fn is None:
        raise ModelError(
            "a target is given without a loss: loss_fn=None (expected a function of output and "
            "target).\nFix: give loss_fn, or leave out target."
        )


def _autocast_dtypes(pipe: GPipe) -> tuple[torch.dtype, ...]:
    # The plain model casts a weight once, and sums its gradient up in the small dtype; a pipeline
    # casts it once for every micro-batch and partition.
    kinds = {device.type for device in pipe.devices}
    return tuple(
        torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)
    )


def _check_seed(seed: object) -> int:
    """Return a seed that torch takes."""
    number = whole_number(seed)
    if number is None or not -(2**63) <= number < 2**64:
        raise BalanceError(
            f"seed is not one that torch takes: seed={seed!r:.60} (expected an int, -2**63 <= "
            "seed < 2**64).\nFix: seed=0."
        )
    return number


@contextmanager
def _gradients_kept(module: nn.Module, pipe: GPipe) -> Iterator[None]:
    """Put gradients back: a loss may use the models' own parameters, not those of copies."""
    kept = [(p, p.grad) for p in {*module.parameters(), *pipe.parameters()}]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
