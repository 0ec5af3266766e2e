"""What both models are given, and the results that a run of one leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipebal.copies import deep_copy
from gpipebal.errors import ModelError
from gpipebal.pipeline.gpipe import GPipe
from gpipebal.pipeline.minibatch.loss import Reduction, call_loss
from gpipebal.pipeline.process.caller import without_autocast
from gpipebal.pipeline.values.microbatch import (
    detached,
    flatten,
    name_of_leaf,
    which_need_gradient,
)

__all__ = ["Outcome", "Slot", "Task", "copied", "label_of", "layers_alone", "outcome_of"]


@dataclass(frozen=True)
class Task:
    """A mini-batch, and the loss that is computed from its output.

    Attributes:
        sample: The input.
        keywords: Keyword arguments for the first layer.
        loss_fn: The loss; None: a random projection of the outputs.
        target: What `loss_fn` compares the output with.
        target_dims: Dimension along which each tensor of the target has its rows.
        reduction: Whether `loss_fn` gives the mean over rows or their sum.
        seed: Seed of all random numbers.
    """

    sample: Any
    keywords: Mapping[str, Any]
    loss_fn: Callable[..., Tensor] | None
    target: Any
    target_dims: Any
    reduction: Reduction
    seed: int

    def fresh(self) -> Task:
        """Return a copy whose values are shared with nothing, with leaves of autograd as inputs."""
        given = (self.sample, dict(self.keywords), self.target)
        memo: dict[int, Any] = {}
        # Copies are made by hand, because they need a gradient where the originals do.
        for leaf in flatten(given)[0]:
            if isinstance(leaf, Tensor) and id(leaf) not in memo:
                memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        sample, keywords, target = copied("the input or target", given, memo)
        loss_fn = copied("loss_fn", self.loss_fn, {})
        return replace(self, sample=sample, keywords=keywords, target=target, loss_fn=loss_fn)

    def loss_of(self, output: Any) -> Tensor | None:
        """Return the loss of an output; None if there is no `loss_fn`.

        Raises:
            ModelError: `loss_fn` returned something else.
        """
        if self.loss_fn is None:
            return None
        torch.default_generator.manual_seed(self.seed)
        for leaf in flatten((output, self.target))[0]:
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                torch.cuda.default_generators[leaf.device.index].manual_seed(self.seed)
        return call_loss(self.loss_fn, output, self.target)

    def projections(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return random numbers in the shapes of these leaves: the same in every call."""
        generator = torch.Generator("cpu").manual_seed(self.seed)
        weights = []
        for leaf in leaves:
            dtype = torch.complex128 if leaf.is_complex() else torch.float64
            weight = torch.randn(leaf.shape, generator=generator, dtype=dtype, device="cpu")
            weights.append(weight.to(leaf))
        return weights


class Slot(NamedTuple):
    """A place where a run leaves a tensor.

    Attributes:
        label: Its name in an error.
        layer: Name of the layer that has it; empty for the input.
    """

    label: str
    layer: str


@dataclass(frozen=True)
class Outcome:
    """The results that a run of a model leaves.

    Attributes:
        structure: Pytree of the output; None: a step, which returns none.
        outputs: Its leaves.
        needs_gradient: Which of them need a gradient.
        loss: The loss, if there is a `loss_fn`.
        trains: Whether a backward has run.
        gradients: Gradients in the order in which a backward finds them: of the parameters, last
            layer first, then of the input.
        buffers: Buffers as they are now.
    """

    structure: Any
    outputs: list[Any]
    needs_gradient: list[bool]
    loss: Tensor | None
    trains: bool
    gradients: Mapping[Slot, Tensor | None] = field(default_factory=dict)
    buffers: Mapping[Slot, Tensor] = field(default_factory=dict)

    def with_state(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Outcome:
        """Add the gradients and buffers that a run has left in a model and in its inputs."""
        slots = {
            Slot(f"gradient of parameter {name!r}", _layer_of(name)): parameter.grad
            for name, parameter in model.named_parameters()
        }
        layers = list(dict.fromkeys(slot.layer for slot in slots))
        # Sorting is stable: inside a layer parameters stay as they are.
        gradients = dict(sorted(slots.items(), key=lambda item: -layers.index(item[0].layer)))
        gradients |= {Slot(f"gradient of {name}", ""): leaf.grad for name, leaf in inputs.items()}
        buffers = {
            Slot(f"buffer {name!r}", _layer_of(name)): buffer.detach()
            for name, buffer in model.named_buffers()
        }
        return replace(self, gradients=gradients, buffers=buffers)


def _layer_of(name: str) -> str:
    return name.partition(".")[0]


def outcome_of(output: Any, task: Task) -> Outcome:
    """Compute the loss of an output, and run the backward if anything needs a gradient."""
    leaves, structure = flatten(output)
    needs = which_need_gradient(leaves)
    loss = task.loss_of(output)
    trains = torch.is_grad_enabled() and (any(needs) if loss is None else loss.requires_grad)
    if trains and loss is None:
        roots = [leaf for leaf, flag in zip(leaves, needs, strict=True) if flag]
        _go_back(roots, task.projections(roots))
    elif trains and loss is not None:
        _go_back([loss])
    return Outcome(
        structure,
        detached(leaves),
        needs,
        None if loss is None else loss.detach(),
        trains,
    )


def _go_back(roots: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> None:
    """Run a backward without autocast, as torch advises and as workers do."""
    with ExitStack() as stack:
        for kind in {root.device.type for root in roots}:
            stack.enter_context(without_autocast(kind))
        torch.autograd.backward(roots, gradients)


def label_of(value: str, structure: Any, k: int) -> str:
    """Return the words for a leaf of an input or an output.

    Example:
        >>> label_of("output", flatten(0)[1], 0), label_of("output", flatten((0, 1))[1], 1)
        ('the output', 'output leaf [1]')
    """
    name = name_of_leaf(structure, k)
    return f"the {value}" if name == "the tensor" else f"{value} {name}"


def layers_alone(pipe: GPipe) -> nn.Module:
    """Return a module that has the layers of a pipeline, under their own names, and nothing else.

    A class of pipelines may show its layers under other names than the plain model's.
    """
    alone = nn.Module()
    alone._modules.update(pipe.layers_in_place())
    alone.training = pipe.training
    return alone


def copied(what: str, value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy.

    Raises:
        ModelError: it cannot be made.
    """
    try:
        return deep_copy(value, memo)
    except Exception as error:
        raise ModelError(
            f"{what} cannot be copied, and verify works on copies alone: "
            f"{type(error).__name__}: {error}\n"
            "Fix: make it work with copy.deepcopy."
        ) from error
