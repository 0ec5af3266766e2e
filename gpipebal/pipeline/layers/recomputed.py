"""Runs of layers that are recomputed on their own, inside a partition that keeps other graphs.

The first layer of a run does the work of all: it takes its input through all of the run's layers,
under `torch.utils.checkpoint`, and the others pass on what they are given::

    embed   block0          block1          head
    embed   block0+block1   ─ as it is ─▶   head        run: block0, block1

So the chain has as many layers as before, with their names, parameters and buffers, and every
balance that keeps a run in one partition can be used. Such a recompute behaves as one of the
pipeline's own: it draws the same random numbers, starts from the same buffers and leaves no trace
in them, and `is_recomputing` is true in its layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipebal.errors import ModelError
from gpipebal.pipeline.layers.attributes import unregistered_in
from gpipebal.pipeline.layers.buffers import BuffersOfRun
from gpipebal.pipeline.layers.modules import Modules
from gpipebal.pipeline.layers.proxy import Proxy
from gpipebal.pipeline.process.engine_state import current_backward
from gpipebal.pipeline.process.phase import is_checkpointing, is_recomputing, phase
from gpipebal.pipeline.randomness.randomness import OwnRandomness, States, current_randomness
from gpipebal.pipeline.values.places import find_overlaps
from gpipebal.pipeline.values.tensors import copy_of, version_of

__all__ = ["Recomputed"]

#: So many forms of a run's inputs are remembered with what the run writes to.
_MOST_FORMS = 64


class Recomputed(Proxy):
    """A layer's place in a chain: the first one of a run runs all of it, the others run nothing.

    Args:
        layer: The layer whose names, parameters and buffers it has.
        run: Names and layers that the forward goes through; none: it returns its input.
    """

    _run: tuple[tuple[str, nn.Module], ...]
    _of_run: BuffersOfRun | None
    _written: dict[Hashable, frozenset[int]]
    _foreign: Set[int]

    def __init__(self, layer: nn.Module, run: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__(layer)
        # Not registered: they would appear in names.
        self.__dict__.update(_run=tuple(run), _of_run=None, _written={}, _foreign=())

    @property
    def is_inside(self) -> bool:
        """Whether an earlier layer begins its run."""
        return not self._run

    @property
    def run(self) -> tuple[nn.Module, ...]:
        """The layers of the run that it begins."""
        return tuple(layer for _, layer in self._run)

    def keep_off(self, others: Set[int]) -> None:
        """Leave buffers, and unregistered modules, of other workers alone, given by ``id``."""
        self.__dict__.update(_of_run=None, _foreign=others)

    def give_back(self) -> None:
        """Give the layers of the run their own buffers back, if a recompute that hangs has them."""
        buffers, self.__dict__["_of_run"] = self._of_run, None
        if buffers is not None:
            buffers.give_back()

    def extra_repr(self) -> str:
        """Say which layer it is, and which are recomputed with it."""
        kind = type(self.stands_for).__name__
        names = ", ".join(name for name, _ in self._run)
        return f"{kind}, recomputes {names}" if names else f"{kind}, recomputed by an earlier layer"

    def forward(self, *values: Any, **keywords: Any) -> Any:
        """Take a value through the run, and keep nothing of it but the value."""
        if not self._run:
            return values[0]
        outer = current_randomness()
        first = None if outer is None else outer.layer
        if not torch.is_grad_enabled() or is_checkpointing() or is_recomputing():
            return self._through(first, *values, **keywords)
        buffers = self._of_run
        if buffers is None or not buffers.modules.are_as_made():
            inside = [one for one in unregistered_in(self.run) if id(one) not in self._foreign]
            buffers = BuffersOfRun(Modules(self.run), self._foreign, inside)
            self._of_run, self._written = buffers, {}
        again = _Again(buffers, outer)
        before = buffers.begin()
        contexts = again.drawing(), again
        once = _Once(self, first, buffers.mode(), values, keywords)
        result = checkpoint(
            once,
            *once.kept,
            use_reentrant=False,
            # In a pipeline no worker may touch the process's default generator.
            preserve_rng_state=outer is None,
            context_fn=lambda: contexts,
            # torch saves the noise of RReLU before it draws it: there a recompute must not stop.
            early_stop=not any(isinstance(one, nn.RReLU) for one in buffers.modules),
        )
        once.kept = []  # the checkpoint holds it, for as long as it is needed
        again.kept = buffers.end_forward(again.kept, before)
        again.follow(result)
        return result

    def _through(self, first: int | str | None, *values: Any, **keywords: Any) -> Any:
        """Run the layers, with the random numbers that they would have without the run.

        Args:
            first: Place of the first layer in the chain of the pipeline; None: no pipeline.
            values: Its input.
            keywords: Its keyword arguments.
        """
        randomness = current_randomness()
        value: Any = None
        for k, (name, layer) in enumerate(self._run):
            if randomness is not None and first is not None:
                randomness.enter_layer(first + k if isinstance(first, int) else f"{first} + {k}")
            try:
                value = layer(value) if k else layer(*values, **keywords)
            except BaseException as error:
                with suppress(Exception):  # the error's own class may refuse a note
                    error.add_note(f"in layer {name!r}, which is recomputed by itself")
                raise
        return value

    def __getstate__(self) -> dict[str, Any]:
        # A copy finds out again what is known about the buffers and the input.
        return {**super().__getstate__(), "_of_run": None, "_written": {}}


class _Once:
    """The function that a checkpoint calls: first on the run's input, later on the kept one.

    A run may write to its input, as its layers would without it, and others that have the same
    tensor see that. A recompute needs the input as it was, so a copy of such a tensor is kept.

    Args:
        place: The first layer of the run.
        first: Its place in the chain of the pipeline; None: no pipeline.
        mode: Modes of the layers: a dropout in place writes in training only.
        values: Its input.
        keywords: Its keyword arguments.

    Attributes:
        kept: Leaves of the input, for a recompute.
    """

    def __init__(
        self,
        place: Recomputed,
        first: int | str | None,
        mode: Hashable,
        values: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        self._place, self._first = place, first
        leaves, self._structure = pytree.tree_flatten((values, keywords))
        # In an input of another form a leaf has another place.
        self._kind = mode, str(self._structure)
        known = place._written.get(self._kind)
        # At first everything is copied, to see what is written to.
        self._copied = frozenset(range(len(leaves))) if known is None else known
        # One tensor may be in several places, and a write to it is seen in all of them.
        places = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves)))}
        self._first_place = [places[id(leaf)] for leaf in leaves]
        self.kept = self._copies(
            leaves, lambda leaf: copy_of(leaf.detach()).requires_grad_(leaf.requires_grad)
        )
        self._given: list[Any] | None = leaves

    def __call__(self, *kept: Any) -> Any:
        given, self._given = self._given, None
        if given is None:
            # Copies of the copies: a graph that is retained runs its backward again.
            return self._go(self._copies(kept, copy_of))
        versions = [*map(version_of, given)]
        result = self._go(given)
        written = {i for i, leaf in enumerate(given) if version_of(leaf) != versions[i]}
        if written:
            self._check_alone(given, written)
        self._note(written)
        return result

    def _copies(self, leaves: Sequence[Any], copy: Callable[[Tensor], Tensor]) -> list[Any]:
        """Return leaves with copies of those that are written to, one copy of each tensor."""
        made: list[Any] = []
        for i, (leaf, first) in enumerate(zip(leaves, self._first_place, strict=True)):
            if first < i:
                made.append(made[first])
            elif isinstance(leaf, Tensor) and i in self._copied:
                made.append(copy(leaf))
            else:
                # What a layer sets on it, such as a gradient, must stay in one pass.
                alike = isinstance(leaf, Tensor) and not leaf.requires_grad
                made.append(leaf.detach() if alike else leaf)
        return made

    def _check_alone(self, leaves: Sequence[Any], written: set[int]) -> None:
        """Refuse writes to memory that another leaf shares: its copy would not see them.

        Raises:
            ModelError: there is one.
        """
        once = list(dict.fromkeys(self._first_place))
        overlaps = find_overlaps([leaves[i] for i in once])
        if any(once[k] in written for k in overlaps):
            raise ModelError(
                "a run of layers writes to an input whose memory is also that of another of its "
                f"inputs: {[name for name, _ in self._place._run]} (expected it in one of them, or "
                "no writes).\n"
                "Fix: leave its first layer out of the run, or let it work on a clone()."
            )

    def _go(self, leaves: list[Any]) -> Any:
        values, keywords = pytree.tree_unflatten(leaves, self._structure)
        return self._place._through(self._first, *values, **keywords)

    def _note(self, written: set[int]) -> None:
        place = self._place
        if not written <= self._copied:
            place._written.pop(self._kind, None)
            raise ModelError(
                "a run of layers writes to its own input, which its recompute needs, and did not "
                f"before: {[name for name, _ in place._run]}.\n"
                "Fix: let its first layers write to their input always or never."
            )
        if len(place._written) >= _MOST_FORMS:
            place._written.clear()  # inputs that never have the same form twice are always copied
        place._written.setdefault(self._kind, frozenset(written))


class _Again(AbstractContextManager[None]):
    """The context of a recompute, which may be entered several times.

    Args:
        buffers: The buffers of the run.
        randomness: Random numbers of the micro-batch; None: torch restores its generators.

    Attributes:
        kept: What the recompute has to know of the layers of the run.
    """

    def __init__(self, buffers: BuffersOfRun, randomness: OwnRandomness | None) -> None:
        self._buffers = buffers
        self._states: States = []
        # One that never draws: the cell's own would keep its generators as long as the graph.
        self._randomness = None if randomness is None else randomness.from_start(self._states)
        self.kept = buffers.keep(alone=True)
        self._entered: list[ExitStack] = []
        self._checked_in: int | None = None

    def drawing(self, *, again: bool = False) -> AbstractContextManager[Any]:
        """Return a context in which the run draws its random numbers."""
        if self._randomness is None:
            return nullcontext()
        return self._randomness.from_start(self._states, again=again).watching()

    def follow(self, result: Any) -> None:
        """Let the parameters be looked at when a backward comes to the result of the forward.

        When the recompute begins, the run's last layers may have given their parameters their whole
        gradients, and an optimizer may have stepped in a hook: the recompute needs those no more.
        """
        # Graphs keep it as long as they can run; whoever keeps the result must not.
        itself = weakref.ref(self)

        def check(_: Any) -> None:
            again = itself()
            if again is not None:
                again._check_parameters()

        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for node in dict.fromkeys(leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None):
            node.register_prehook(check)

    def _check_parameters(self) -> None:
        """Look at the parameters, once in a backward."""
        backward = current_backward()
        if backward is None or backward != self._checked_in:
            self.kept.writes.check()
        self._checked_in = backward

    def __enter__(self) -> None:
        self._buffers.check(self.kept)
        self._check_parameters()
        with ExitStack() as stack:
            stack.enter_context(phase(recomputing=True))
            # Copies of the copies: a graph that is retained runs its backward again.
            stack.enter_context(self._buffers.replaced(self.kept.again()))
            stack.enter_context(self.drawing(again=True))
            self._entered.append(stack.pop_all())

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)
        # A checkpoint stops its recompute, by an error of its own, once it has what it needs.
        if (kind := exception[0]) is None or kind.__module__ == checkpoint.__module__:
            self.kept.writes.check(recomputed=True)
            self._buffers.check_own()
