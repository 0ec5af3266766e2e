"""The loss inside the pipeline: computed by the last partition, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gpipebal.argument_kinds import is_word
from gpipebal.errors import BalanceError, ModelError, PipelineError
from gpipebal.pipeline.layers.buffers import BufferSlot, BuffersOfRun, Kept
from gpipebal.pipeline.layers.cached_weights import forget_cached_weights
from gpipebal.pipeline.layers.container import Container
from gpipebal.pipeline.layers.modules import Modules
from gpipebal.pipeline.minibatch.target import Target
from gpipebal.pipeline.process.phase import is_checkpointing
from gpipebal.pipeline.values.lane import Events, Lane
from gpipebal.pipeline.values.microbatch import Packet, flatten
from gpipebal.pipeline.workers.passes import Tail
from gpipebal.pipeline.workers.tied import leaves_behind

__all__ = ["MicroBatchLoss", "Reduction", "call_loss", "check_loss"]

#: How `loss_fn` treats the rows it is given: takes their mean, or their sum.
Reduction = Literal["mean", "sum"]


class MicroBatchLoss:
    """A loss over the mini-batch as a weighted sum of losses over its micro-batches.

    Args:
        loss_fn: Called as ``loss_fn(output, target)``, or ``loss_fn(output)`` without a target;
            returns a tensor with one element.
        target: A tensor or a pytree of tensors over the whole mini-batch; None: there is none.
        target_dims: Dimension along which each of them has its rows, as a prefix of the pytree.
        rows: Rows of each micro-batch.
        reduction: Whether `loss_fn` gives the mean over the rows or their sum.
        pipe: The pipeline, whose partitions look after the modules and parameters of its layers.

    Attributes:
        target: The target, divided; of None, None for each micro-batch.
        modules: The modules that `loss_fn` has besides them, if it is one itself.
        weights: What the loss of each micro-batch is multiplied by.

    Raises:
        BalanceError: an unknown reduction, or a target of other rows than the input.
        ModelError: `loss_fn` is not a function, or the tensors of the target have different rows.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Tensor] | None,
        target: Any,
        target_dims: Any,
        rows: Sequence[int],
        reduction: Reduction,
        pipe: Container,
    ) -> None:
        if not is_word(reduction, "mean", "sum"):
            raise BalanceError(
                f"reduction does not exist: reduction={reduction!r:.60} (expected 'mean' or 'sum')."
                "\n"
                "Fix: reduction='mean' if loss_fn takes the mean over its rows, 'sum' if it adds "
                "them up."
            )
        self._loss_fn = check_loss(loss_fn)
        self.target = Target(target, None if target is None else target_dims, rows)
        self._needs_gradient = False
        own = [loss_fn] if isinstance(loss_fn, nn.Module) else []
        of_layers, elsewhere = set[int](), set[int]()
        if any(True for module in own for _ in chain(module.parameters(), module.buffers())):
            # Other losses have nothing that layers could have too.
            of_layers = {*map(id, pipe.modules()), *map(id, pipe.parameters())}
            elsewhere = {id(buffer) for part in pipe.partitions[:-1] for buffer in part.buffers()}
        self.modules = Modules(own, of_layers)
        self._buffers = _BuffersOfLoss(self.modules)
        self._foreign = BuffersOfRun(self.modules, elsewhere)
        self._before = self._foreign.copies(alone=True)
        self._kind = _name_of(loss_fn), self.modules.mode()
        total = sum(rows)
        self.weights = [
            1.0 if reduction == "sum" or not total else n_rows / total for n_rows in rows
        ]

    def of(
        self, i: int, lane: Lane, ready: Events, meet: Callable[[Sequence[Tensor]], None]
    ) -> Tail:
        """Return the loss of micro-batch `i` as a function of its output; called by the worker.

        Args:
            i: The micro-batch.
            lane: Device and streams of the last partition.
            ready: What to wait for before reading the target.
            meet: Called whenever a graph of the loss is recorded, with the parameters or other
                leaves of autograd that the loss uses by itself, not through the output.
        """
        loss_fn, target = self._loss_fn, self.target
        leaves = target.receive(i, lane, ready)
        repeatable = _Repeatable(self._buffers)

        def run(output: Any) -> Tensor:
            given = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
            forget_cached_weights(self.modules)
            before = {leaf.grad_fn for leaf in given}  # a loss may write to its output
            with repeatable.entered(), target.lent(i, leaves) as of_micro_batch:
                loss = call_loss(loss_fn, output, of_micro_batch)
            if torch.is_grad_enabled():
                meet(leaves_behind(loss, before, [*given, *target.leaves_of(i)]))
            return loss

        return Tail(self._kind, run, self.modules.ask_for_a_graph())

    def give_back(self) -> None:
        """Give a module its own buffers back, if a recompute that hangs has them."""
        self._buffers.give_back()

    def take(self, output: Packet) -> Tensor:
        """Return the loss that a cell returned."""
        self._needs_gradient = self._needs_gradient or output.needs_gradient[0]
        loss: Tensor = output.leaves[0]
        # Kept until all are added up. A mean may share the storage of all its terms. In pinned
        # memory it may not be there yet; to ask where there is no CUDA yet would begin it.
        is_part = loss.untyped_storage().nbytes() > loss.nbytes
        is_pinned = is_part and torch.cuda.is_initialized() and loss.is_pinned()
        return loss.clone() if is_part and not is_pinned else loss

    def check(self, *, grad: bool) -> None:
        """Look at what a step has done.

        Args:
            grad: Whether it is to have found gradients.

        Raises:
            ModelError: the loss, or a layer of another partition, wrote to a buffer that both have,
                in no fixed order.
            PipelineError: the loss of no micro-batch needed a gradient.
        """
        self._foreign.note_changed(self._before)
        if grad and not self._needs_gradient:
            raise PipelineError(
                "the loss needs no gradient: no parameter and no input that it depends on does.\n"
                "Fix: let a parameter require a gradient, or call step under torch.no_grad()."
            )

    def gradient(self, i: int, loss: Tensor | None) -> Tensor:
        """Return the gradient of the mini-batch's loss by the loss of micro-batch `i`."""
        assert loss is not None
        return torch.full_like(loss, self.weights[i])

    def total(self, losses: Sequence[Tensor | None]) -> Tensor:
        """Add up the losses of the micro-batches, in their order, to that of the mini-batch."""
        terms = [
            loss if weight == 1.0 else loss * weight
            for loss, weight in zip(losses, self.weights, strict=True)
            if loss is not None
        ]
        return sum(terms[1:], terms[0])


class _BuffersOfLoss(BuffersOfRun):
    """The buffers of a loss: which of them it writes to is known to the next steps, too."""

    #: Names of large buffers that have been seen to change, by module.
    _known: ClassVar[WeakKeyDictionary[nn.Module, set[str]]] = WeakKeyDictionary()
    #: The modes in which writes have been looked for, by the module that is the loss.
    _modes_seen: ClassVar[WeakKeyDictionary[nn.Module, set[Hashable]]] = WeakKeyDictionary()

    def __init__(self, modules: Modules) -> None:
        super().__init__(modules)
        for module in modules:
            self._written.update((module, name) for name in self._known.get(module, ()))
        first = next(iter(modules), None)
        if first is not None:
            self._seen = self._modes_seen.setdefault(first, set())

    def mode(self) -> Hashable:
        """Return the modes of all modules, and which they are."""
        return super().mode(), tuple(map(id, self.modules))

    def note_written(self, place: BufferSlot) -> None:
        """Remember that a large buffer changes, in the next steps too."""
        super().note_written(place)
        module, name = place
        self._known.setdefault(module, set()).add(name)


class _Repeatable:
    """What a module has of its own, as its first call for a micro-batch found it.

    Layers are looked after by their partition, in the same way.

    Args:
        buffers: The buffers of the module.
    """

    def __init__(self, buffers: BuffersOfRun) -> None:
        self._buffers = buffers
        self._known: Kept | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Call the module in this block: the first time, or in a recompute."""
        if self._known is not None:
            kept = self._known
            self._buffers.check(kept)
            kept.writes.check()
            with self._buffers.replaced(kept):
                yield
            self._buffers.check_own()
            kept.writes.check(recomputed=True)
        elif is_checkpointing():
            kept = self._buffers.keep()
            before = self._buffers.copies()
            yield
            self._known = self._buffers.end_forward(kept, before)
        else:
            yield


def check_loss(loss_fn: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
    """Return the function that computes the loss.

    Raises:
        ModelError: it cannot.
    """
    if isinstance(loss_fn, type):
        raise ModelError(
            f"loss_fn is a class: loss_fn={loss_fn.__name__} (expected a function of the output, "
            f"or of output and target).\nFix: loss_fn={loss_fn.__name__}()."
        )
    if not callable(loss_fn):
        got = "loss_fn=None" if loss_fn is None else f"type(loss_fn)={type(loss_fn).__name__}"
        raise ModelError(
            f"loss_fn is not a function: {got} (expected a function of the output or of output and "
            "target).\n"
            "Fix: loss_fn=torch.nn.functional.mse_loss, say, and target=y."
        )
    return loss_fn


def _name_of(loss_fn: Any) -> Hashable:
    """Name a loss: one that is made anew for each step, at one place, has one name."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    if isinstance(loss_fn, nn.Module):
        return tuple([type(module) for module in loss_fn.modules()])
    code: Hashable = getattr(getattr(loss_fn, "__func__", loss_fn), "__code__", None)
    return type(loss_fn).__qualname__ if code is None else code


def call_loss(loss_fn: Callable[..., Tensor], output: Any, target: Any) -> Tensor:
    """Return the loss of an output: `loss_fn` takes a target only if there is one.

    Raises:
        ModelError: the loss is not a tensor with one real number.
    """
    loss: Any = loss_fn(output) if target is None else loss_fn(output, target)
    if not isinstance(loss, Tensor):
        raise ModelError(
            f"loss_fn returned no loss: got {type(loss).__name__} (expected a tensor with one "
            "element).\n"
            "Fix: let loss_fn return the tensor alone: no .item(), and nothing beside it."
        )
    if loss.numel() != 1:
        raise ModelError(
            f"loss_fn returned no loss: got shape {tuple(loss.shape)} (expected a tensor with one "
            "element).\n"
            "Fix: let loss_fn take the mean or the sum over the rows."
        )
    if loss.is_complex():
        raise ModelError(
            f"loss_fn returned no real number: got dtype {loss.dtype} (expected a real one).\n"
            "Fix: let loss_fn return its absolute value or its real part."
        )
    return loss
