"""What to train: a built-in model with random data, or what the user's own function returns."""

from __future__ import annotations

import difflib
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from gpipebal.errors import UsageError
from gpipebal.models import MODELS, ModelEntry
from gpipebal.pipeline.layers.chain import check_keyword_dims
from gpipebal.pipeline.minibatch.loss import call_loss
from gpipebal.pipeline.values.parting import chunk_sizes
from gpipebal.profiler.chain.batch import Batch
from gpipebal.profiler.step.optimizer import OptimizerFactory
from gpipebal.run.function import call_function, named_by_path
from gpipebal.schedule import check_count
from gpipebal.units import count

__all__ = ["Workload", "default_optimizer", "load_workload"]

#: Rows of the mini-batch of a built-in model, by default.
DEFAULT_ROWS = 32

#: Where the rows of a user's data are, and what goes with the sample, as `profile_model` takes it.
_PARTING = ("keywords", "in_dims", "keyword_dims", "out_dims", "target_dims")

_KEYS = ("model", "sample", "loss_fn", "target", "optimizer", *_PARTING)


@dataclass
class Workload:
    """A model and everything that a training step of it needs.

    Attributes:
        name: The name by which the user asked for it.
        model: The chain, on the CPU.
        sample: The mini-batch: a tensor, or a pytree of tensors with the same rows.
        target: What the loss compares the output with; None: the loss takes the output only.
        loss_fn: Takes output and target, or the output only; gives a scalar tensor.
        make_optimizer: Takes a list of the parameters; makes an optimizer of them, or several.
        loss_name: Name of the loss in a report.
        image_size: Height and width of images in pixels; None: no images, or not a built-in model.
        parting: Those of ``keywords``, ``in_dims``, ``keyword_dims``, ``out_dims`` and
            ``target_dims`` that differ from the defaults, as `profile_model` takes them.
    """

    name: str
    model: nn.Sequential
    sample: Any
    target: Any
    loss_fn: Callable[..., Tensor]
    make_optimizer: OptimizerFactory
    loss_name: str
    image_size: int | None = None
    parting: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dims(self) -> dict[str, Any]:
        """Those of `parting` that a `GPipe` takes."""
        names = ("in_dims", "keyword_dims", "out_dims")
        return {name: self.parting[name] for name in names if name in self.parting}

    def batch(self) -> Batch:
        """Return the sample and the keyword arguments.

        Raises:
            BalanceError: a dimension does not fit.
        """
        names = ("keywords", "in_dims", "keyword_dims")
        given = {name: self.parting[name] for name in names if name in self.parting}
        first = next(iter(self.model.children()), None)
        check_keyword_dims(given.get("keyword_dims"), first)
        return Batch.sample(self.sample, **given)

    def target_batch(self) -> Batch | None:
        """Return the target; None: there is none."""
        return Batch.target(self.target, self.parting.get("target_dims", 0))

    def target_on(self, device: torch.device) -> Any:
        """Return the target on a device; None: there is none."""
        target = self.target_batch()
        return None if target is None else target.to(device).value

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss of an output, with the target if there is one."""
        return call_loss(self.loss_fn, output, target)


def load_workload(
    name: str,
    *,
    rows: int | None = None,
    image_size: int | None = None,
    seed: int = 0,
    chunks: int = 1,
    arguments: Mapping[str, Any] | None = None,
    with_values: bool = True,
) -> Workload:
    """Find a built-in model, or call the user's function, and complete it with defaults.

    Args:
        name: Name of a built-in model, or ``package.module:function``, found from the current
            directory too.
        rows: Rows of the mini-batch; only for built-in models.
        image_size: Height and width of the images; only for built-in models.
        seed: Seed of parameters and data.
        chunks: Micro-batches that the mini-batch will be divided into.
        arguments: What a built-in model is built from, by name (see `gpipebal.models.CATALOGUE`),
            or keyword arguments of the user's function. The default for any that is left out.
        with_values: Whether a built-in model's parameters and data get memory and values;
            otherwise they are on the meta device, which is enough for an estimate, of any size.

    Raises:
        BalanceError: rows or an image size below 1.
        UsageError: a seed out of range; no such model, module, function or argument, or the
            function returned something other than ``(model, sample)`` or a mapping with them; or a
            built-in model cannot be trained on so little data. An error of the user's own code
            is raised as it is.

    Example:
        >>> workload = load_workload("resnet101", rows=2, with_values=False)
        >>> len(workload.model), workload.sample.shape
        (370, torch.Size([2, 3, 64, 64]))
    """
    for what, number in (("rows", rows), ("image_size", image_size)):
        if number is not None:
            check_count(what, number)
    # Built-in models take the seed after this one for their targets.
    if not 0 <= seed < 2**63 - 1:
        raise UsageError(
            f"seed is out of range: seed={seed} (expected 0 <= seed < 2**63 - 1).\nFix: seed=0."
        )
    torch.manual_seed(seed)
    if ":" in name:
        _refuse_sizes(name, rows=rows, image_size=image_size)
        return _users_own(name, call_function(name, arguments or {}))
    if name not in MODELS:
        raise _unknown(name)
    entry = MODELS[name].configure(**(arguments or {}))
    n_rows = DEFAULT_ROWS if rows is None else rows
    size = _image_size(entry, image_size, n_rows, chunks)
    try:
        with nullcontext() if with_values else torch.device("meta"):
            model = entry.build()
        of_data = seed if with_values else None
        sample = entry.make_sample(n_rows, size, of_data)
        target = entry.make_target(n_rows, size, of_data)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise _too_large(
            name, error, rows=rows, image_size=image_size, **arguments or {}
        ) from error
    return Workload(
        name=name,
        model=model,
        sample=sample,
        target=target,
        loss_fn=entry.loss_fn,
        make_optimizer=default_optimizer,
        loss_name=_name_of(entry.loss_fn) + " (default)",
        image_size=size,
    )


def default_optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return plain stochastic gradient descent with a learning rate of 0.01."""
    return torch.optim.SGD(parameters, lr=0.01)


def mean_of_squares(output: Any) -> Tensor:
    """Return the mean of the squares of all floating-point tensors of an output."""
    tensors = [
        leaf
        for leaf in pytree.tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    if not tensors:
        raise UsageError(
            "model gives no floating-point output, so it has no default loss "
            f"(its output is {type(output).__name__}).\n"
            "Fix: let the function return a mapping with 'loss_fn'."
        )
    n_values = sum(tensor.numel() for tensor in tensors)
    # A sum of squares may be too large for half precision.
    wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    return torch.stack([tensor.square().sum().float() for tensor in wide]).sum() / n_values


def _unknown(name: str) -> UsageError:
    """Say what models there are, and which of them may be meant."""
    if name.endswith(".py") or os.sep in name:
        return named_by_path(name, "make_model")
    nearest = difflib.get_close_matches(name.lower(), MODELS, n=1)
    module, _, made_by = name.strip(".").rpartition(".")
    named, made_by = (module, made_by) if module else (made_by or "package.module", "make_model")
    own = f"{named}:{made_by}, where {made_by}() returns (model, sample)"
    return UsageError(
        f"model is not known: model={name!r} (expected {', '.join(sorted(MODELS))}, or "
        f"package.module:function).\n"
        f"Fix: {nearest[0] if nearest else own}."
    )


def _image_size(entry: ModelEntry, image_size: int | None, n_rows: int, chunks: int) -> int | None:
    """Return the pixels of the side of a built-in model's images; None: it takes no images.

    Raises:
        UsageError: it takes none, or cannot be trained on so little data.
    """
    if entry.image_size is None:
        if image_size is None:
            return None
        raise UsageError(
            f"model takes no images: image_size={image_size} with model={entry.name!r} (expected "
            "no --image-size).\nFix: leave --image-size out."
        )
    size = image_size or entry.image_size
    if size < entry.smallest_image:
        raise UsageError(
            f"images are too small for the model: image_size={size} with model={entry.name!r} "
            f"(expected at least {entry.smallest_image}).\n"
            f"Fix: --image-size {entry.smallest_image}."
        )
    one_row = entry.image_size_of_one_row
    if size < one_row and min(chunk_sizes(n_rows, chunks)) < 2:
        raise UsageError(
            f"micro-batch is too small to normalise: rows={n_rows} in "
            f"{count(chunks, 'micro-batch')} of "
            f"images of {size} pixels (expected 2 rows in each, or {one_row} "
            f"pixels).\nFix: --image-size {one_row}, or --rows {2 * chunks}."
        )
    return size


def _too_large(name: str, error: Exception, **given: Any) -> UsageError:
    """Say which numbers torch could not make a built-in model or its data with."""
    numbers = [f"{option}={value}" for option, value in given.items() if value is not None]
    reason = (str(error).splitlines() or [""])[0].strip()
    return UsageError(
        f"{name} cannot be built so large: {', '.join(numbers) or 'with its defaults'} "
        f"({type(error).__name__}: {textwrap.shorten(reason, 150, placeholder='…')}).\n"
        "Fix: give smaller numbers, or a machine with more memory."
    )


def _refuse_sizes(name: str, **sizes: int | None) -> None:
    for option, value in sizes.items():
        if value is not None:
            flag = "--" + option.replace("_", "-")
            raise UsageError(
                f"{flag} is for built-in models: {option}={value} with model={name!r} "
                f"(expected no {flag}).\nFix: leave {flag} out; the sample that the function "
                "returns decides."
            )


def _users_own(name: str, found: Any) -> Workload:
    if isinstance(found, tuple) and len(found) == 2:
        found = {"model": found[0], "sample": found[1]}
    if not isinstance(found, Mapping) or not {"model", "sample"} <= set(found):
        what = type(found).__name__
        if isinstance(found, tuple):
            what += f" of {len(found)}"
        elif isinstance(found, Mapping):
            what += f" with {_listed(found)}"
        raise _wrong_result(name, what, "(model, sample), or a mapping with both")
    if set(found) - set(_KEYS):
        raise _wrong_result(name, f"a mapping with {_listed(found)}", f"only {_listed(_KEYS)}")
    model, target = found["model"], found.get("target")
    if not isinstance(model, nn.Sequential):
        has_layers = isinstance(model, (nn.Module, list, tuple))
        raise _wrong_result(
            name,
            f"a model of type {type(model).__name__}",
            "nn.Sequential",
            _CHAIN if has_layers else _RESULT,
        )
    given = found.get("optimizer")
    if isinstance(given, (torch.optim.Optimizer, list, tuple)):
        kind = type(given).__name__
        raise UsageError(
            f"function returned an optimizer: {name} returned a {kind} as 'optimizer' (expected "
            "what makes one of a list of parameters: the plain model gets one, and the pipeline "
            f"another).\nFix: 'optimizer': lambda parameters: "
            + (f"{kind}(parameters)." if isinstance(given, torch.optim.Optimizer) else "[...].")
        )
    for key in ("loss_fn", "optimizer"):
        if found.get(key) is not None and not callable(found[key]):
            raise _wrong_result(name, f"{key}={found[key]!r}", f"{key} to be callable")
    loss_fn = found.get("loss_fn") or _default_loss(target)
    workload = Workload(
        name=name,
        model=model,
        sample=found["sample"],
        target=target,
        loss_fn=loss_fn,
        make_optimizer=found.get("optimizer") or default_optimizer,
        loss_name=_name_of(loss_fn) + ("" if found.get("loss_fn") else " (default)"),
        parting={key: found[key] for key in _PARTING if key in found},
    )
    workload.batch().count_rows()  # refuses a sample without tensors or with unequal rows
    return workload


def _default_loss(target: Any) -> Callable[..., Tensor]:
    """Choose a loss by the target: classes, values, or none."""
    if target is None:
        return mean_of_squares
    if isinstance(target, Tensor):
        return F.mse_loss if target.is_floating_point() else F.cross_entropy
    raise UsageError(
        f"target has no default loss: type(target)={type(target).__name__} (expected a tensor).\n"
        "Fix: let the function return a mapping with 'loss_fn' too."
    )


def _listed(keys: Iterable[Any]) -> str:
    return ", ".join(repr(key) for key in keys)


#: What to return, for errors.
_RESULT = (
    "(model, sample), or a mapping with 'model', 'sample' and if wanted 'loss_fn', 'target', "
    f"'optimizer', and what `profile_model` is to know of the rows: {_listed(_PARTING)}; the model "
    "is an nn.Sequential of its layers"
)
_CHAIN = "nn.Sequential(*layers), where each layer takes what the one before it returns"


def _wrong_result(name: str, found: str, expected: str, fix: str = _RESULT) -> UsageError:
    return UsageError(
        f"function returned the wrong thing: {name} returned {found} (expected {expected}).\n"
        f"Fix: return {fix}."
    )


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
