"""Comparison: the first difference between a pipeline and the plain model, in words."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipebal.pipeline.gpipe import GPipe
from gpipebal.pipeline.layers.chain import first_difference, layers_of
from gpipebal.pipeline.values.dims import Dim
from gpipebal.verification.task import Outcome, Slot, label_of, layers_alone
from gpipebal.verification.tolerance import (
    Tolerance,
    alike,
    distance,
    has_fractions,
    is_plain,
    largest,
)

__all__ = ["Comparison", "DifferenceError"]

_SAME_LAYERS = "make the pipeline of this module, GPipe(module, balance)."
_SAME_STATE = (
    "pipe.load_state_dict(module.state_dict()), or make the pipeline of this module, "
    "GPipe(module, balance)."
)
_SAME_FREEZE = "let the same parameters require a gradient in both."
_SAME_RESULT = (
    "let every layer compute the same in any thread and at any time: without state outside of its "
    "buffers, and without random numbers other than torch's; and let the layers of the pipeline "
    "be the module's."
)
_SAME_LOSS = (
    "let loss_fn be a mean over rows (reduction='mean') or a sum over rows (reduction='sum'), "
    "without random numbers: a step takes it of one micro-batch at a time. A mean over something "
    "else, such as tokens that are not padding, is a sum divided by their number in the mini-batch."
)
_SAME_RECOMPUTE = (
    "let every layer do the same in the recompute as in the forward, whatever is_recomputing() "
    "says, and in any thread; pipe.checkpoint = 'never' tells whether it is the recompute."
)
_SAME_ROWS = (
    "let the last layer's output have the rows along dim 0, or name their dimension in out_dims "
    "(None: stack the micro-batches' tensors); what is taken over all rows belongs into the loss."
)
_SAME_BUFFERS = (
    "let every layer write to its buffers in the forward, whatever the thread, and not only where "
    "is_recomputing() is True."
)


class DifferenceError(Exception):
    """The first difference, in parts, from which `verify` makes the error that its caller gets.

    Attributes:
        what: What differs from what.
        evidence: Where, with the values.
        advice: What would help.
    """

    def __init__(self, what: str, evidence: str, advice: str) -> None:
        super().__init__(what)
        self.what = what
        self.evidence = evidence
        self.advice = advice


@dataclass(frozen=True)
class _At:
    """Which comparison is being made, and what would help if it fails."""

    where: str
    advice: str

    def differ(self, what: str, expected: object, evidence: str = "") -> NoReturn:
        raise DifferenceError(f"{what} (expected {expected})", self.where + evidence, self.advice)


@dataclass
class Comparison:
    """Compare runs of a pipeline with one of the plain model.

    Attributes:
        tolerance: How large a difference may be.
        found: By kind, the largest relative difference of everything compared, by name.
    """

    tolerance: Tolerance
    found: dict[str, dict[str, float]] = field(default_factory=dict)

    def check_models(self, plain: nn.Module, pipe: GPipe) -> None:
        """Make sure that both have the same layers, by name, in the same state.

        Raises:
            DifferenceError: a name or a value differs.
        """
        where = "Before any run."
        difference = first_difference(layers_of(plain), pipe._modules)
        if difference is not None:
            k, mine, theirs = difference
            at = _At(where, _SAME_LAYERS)
            at.differ(f"layer {k} of the pipeline is {theirs}", f"{mine}, as in the module")
        layers = layers_alone(pipe)
        for kind, own, other in (
            ("parameter", dict(plain.named_parameters()), dict(layers.named_parameters())),
            ("buffer", dict(plain.named_buffers()), dict(layers.named_buffers())),
        ):
            for name in dict.fromkeys([*own, *other]):
                self._check_state(where, f"{kind} {name!r}", own.get(name), other.get(name))

    def _check_state(self, where: str, label: str, plain: Any, found: Any) -> None:
        at = _At(where, _SAME_STATE)
        if plain is None or found is None:
            place = "pipeline" if plain is None else "plain model"
            # A tensor that two layers share counts only for the first.
            at.differ(f"{label} is in the {place} only, or shared there less", "it in both")
        if plain.requires_grad != found.requires_grad:
            at = _At(where, _SAME_FREEZE)
            at.differ(f"{label} has requires_grad={found.requires_grad}", plain.requires_grad)
        # Lazy ones have no values yet.
        if not (is_lazy(plain) and is_lazy(found)):
            self._check_tensor(at, "state", label, plain, found, 0.0)

    def check_shapes(self, expected: Outcome, at_once: list[Any], dims: list[Dim]) -> None:
        """Make sure that the micro-batches' outputs, joined, look like those of the mini-batch.

        Args:
            expected: What the plain model leaves, micro-batch by micro-batch.
            at_once: Shapes of its output over the whole mini-batch in one piece; empty: not known.
            dims: Dimension along which each leaf has its rows; None: it has none.

        Raises:
            DifferenceError: a shape differs.
        """
        if len(at_once) != len(expected.outputs):
            return
        for k, (leaf, whole, dim) in enumerate(zip(expected.outputs, at_once, dims, strict=True)):
            if isinstance(leaf, Tensor) and whole is not None and dim is not None:
                label = label_of("output", expected.structure, k)
                if leaf.shape != whole:
                    at = _At("In the plain model.", _SAME_ROWS)
                    at.differ(
                        f"{label}, joined over the micro-batches, has shape {_show(leaf.shape)}",
                        f"{_show(whole)}, as of the mini-batch in one piece",
                    )

    def check(self, expected: Outcome, found: Outcome, where: str) -> None:
        """Compare what two runs leave, in the order in which a difference would arise.

        Args:
            expected: What the plain model leaves.
            found: What the pipeline leaves.
            where: Which run of the pipeline it is.

        Raises:
            DifferenceError: something differs.
        """
        where = f"In {where}."
        is_step = found.structure is None
        if not is_step:
            self._check_outputs(_At(where, _SAME_RESULT), expected, found)
        if expected.loss is not None and found.loss is not None:
            plain, other = expected.loss.reshape(()), found.loss.reshape(())
            # It may be zero except for rounding; as a rule its magnitude is about 1.
            allowed = self.tolerance.allowed(plain, max(1.0, largest(plain)))
            self._check_tensor(_At(where, _SAME_LOSS), "losses", "the loss", plain, other, allowed)
        advice = _SAME_LOSS if is_step else _SAME_RECOMPUTE
        self._check_slots(_At(where, advice), "gradients", expected.gradients, found.gradients)
        self._check_slots(_At(where, _SAME_BUFFERS), "buffers", expected.buffers, found.buffers)

    def _check_outputs(self, at: _At, expected: Outcome, found: Outcome) -> None:
        if expected.structure != found.structure:
            at.differ(f"the structure of the output is {found.structure}", expected.structure)
        tensors = [leaf for leaf in expected.outputs if isinstance(leaf, Tensor)]
        around = max(map(largest, tensors), default=0.0)
        for k, (plain, other) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
            label = label_of("output", expected.structure, k)
            if not (isinstance(plain, Tensor) and isinstance(other, Tensor)):
                if not alike(plain, other):
                    at.differ(f"{label} is {_named(other)}", _named(plain))
                continue
            allowed = self.tolerance.allowed(plain, around)
            self._check_tensor(at, "outputs", label, plain, other, allowed)
            needed, needs = expected.needs_gradient[k], found.needs_gradient[k]
            if needs != needed:
                at.differ(f"{label} has requires_grad={needs}", needed)

    def _check_slots(
        self,
        at: _At,
        kind: str,
        expected: Mapping[Slot, Tensor | None],
        found: Mapping[Slot, Tensor | None],
    ) -> None:
        around = _sizes_around(expected, accumulate=kind == "gradients")
        for slot in dict.fromkeys([*expected, *found]):
            plain, other = expected.get(slot), found.get(slot)
            if plain is not None and other is not None:
                allowed = self.tolerance.allowed(plain, around.get(slot.layer, 0.0))
                self._check_tensor(at, kind, slot.label, plain, other, allowed)
            elif plain is not None or other is not None:
                at.differ(f"{slot.label} is {_named(other)}", _named(plain))

    def _check_tensor(
        self, at: _At, kind: str, label: str, plain: Tensor, found: Tensor, allowed: float
    ) -> None:
        for what in ("shape", "dtype"):
            mine, theirs = getattr(plain, what), getattr(found, what)
            if mine != theirs:
                at.differ(f"{label} has {what} {_show(theirs)}", _show(mine))
        apart = distance(plain, found)
        of_kind = self.found.setdefault(kind, {})
        of_kind[label] = max(apart.relative, of_kind.get(label, 0.0))
        if apart.absolute > allowed:
            place = f"At {list(apart.place)} it" if plain.dim() else "It"
            at.differ(
                f"{label} is off by {apart.absolute:.3g}, {apart.relative:.3g} of its largest "
                "value",
                f"at most {allowed:.3g}",
                f" {place} is {apart.found!r} in the pipeline and {apart.plain!r} in the plain "
                f"model ({plain.dtype}, shape {tuple(plain.shape)}).",
            )


def _sizes_around(slots: Mapping[Slot, Tensor | None], *, accumulate: bool) -> dict[str, float]:
    """Return, for every layer, the largest value in it; or in it and the layers before it here."""
    sizes: dict[str, float] = {}
    for slot, tensor in slots.items():
        if tensor is not None and has_fractions(tensor):
            sizes[slot.layer] = max(sizes.get(slot.layer, 0.0), largest(tensor))
    if accumulate:
        return dict(zip(sizes, itertools.accumulate(sizes.values(), max), strict=True))
    return sizes


def _show(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, tuple) else str(value)


def _named(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {_show(value.shape)}"
    return repr(value) if is_plain(value) else f"a {type(value).__name__}"
