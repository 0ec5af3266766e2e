"""The modules of a partition: their identity, their modes, and writes to their parameters."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["Modules", "WriteCounts", "are_same", "own_state", "shallow_copy"]

#: Layers that compute otherwise in evaluation mode where no graph is recorded.
_ATTENTION = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def shallow_copy(module: nn.Module, children: Mapping[str, nn.Module | None]) -> Any:
    """Return a module that shares everything with another one but its children.

    What the class does when it is pickled is not asked: it may refuse, or leave attributes out.

    Args:
        module: The module.
        children: The children of the copy.

    Example:
        >>> model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
        >>> other = shallow_copy(model, {**model._modules, "0": nn.Tanh()})
        >>> type(other[0]).__name__, type(model[0]).__name__, other[1] is model[1]
        ('Tanh', 'ReLU', True)
    """
    kind = type(module)
    found = kind.__new__(kind)
    found.__dict__.update(own_state(module), _modules=dict(children))
    return found


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Tell whether two lists have the same objects, whatever these say of being equal."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def own_state(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, without its compiled call, which would run it."""
    return {name: one for name, one in vars(module).items() if name != "_compiled_call_impl"}


class WriteCounts(NamedTuple):
    """How often parameters were written to.

    Attributes:
        parameters: The parameters, except for those that count no writes.
        counts: How often each was written to; and where it has its elements, if it is not trained:
            an exchanged ``.data`` counts no write. Offloaders exchange those of others: 0.
    """

    parameters: list[nn.Parameter]
    counts: list[tuple[int, int]]

    def since(self, before: WriteCounts) -> set[int]:
        """Return the parameters, by ``id``, that were written to since an earlier count."""
        if before.counts == self.counts:
            return set()
        if len(before.parameters) == len(self.parameters):
            # By places: a layer may have put another parameter into one.
            places = zip(before.counts, self.counts, self.parameters, strict=True)
            return {id(parameter) for then, now, parameter in places if _differ(then, now)}
        then = dict(zip(map(id, before.parameters), before.counts, strict=True))
        found = zip(map(id, self.parameters), self.counts, strict=True)
        return {key for key, now in found if _differ(then.get(key, now), now)}


class Modules:
    """All modules in some layers, each once.

    Attributes:
        copies: Copies of parameters that a forward has written to, by ``id``, while any cell has
            them.

    Args:
        layers: The layers.
        others: Modules, and parameters whose writes do not count, that others look after, by
            ``id``; layers may have them too.
    """

    def __init__(self, layers: Sequence[nn.Module], others: Set[int] = frozenset()) -> None:
        self.copies = WeakValueDictionary[int, Tensor]()
        self._others = others
        # Two that are equal are not one: a class may say what equal means.
        found = {id(module): module for layer in layers for module in layer.modules()}
        self._modules = [module for key, module in found.items() if key not in others]
        # Views of the modules' dictionaries, which show later changes: every step reads them.
        self._child_views = [module._modules.values() for module in self._modules]
        self._parameter_views = [module._parameters.values() for module in self._modules]
        self._buffer_views = [module._buffers.values() for module in self._modules]
        # An embedding may limit the norm of its rows in place: doing so again changes nothing.
        self._counted_views = [
            module._parameters.values()
            for module in self._modules
            if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None
        ]
        self._attention = [one for one in self._modules if isinstance(one, _ATTENTION)]
        self._children = self._nested()

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules)

    def mode(self) -> Hashable:
        """Name the state of the layers: anything that may change the facts changes the mode."""
        return (
            tuple([module.training for module in self._modules]),
            tuple([parameter.requires_grad for parameter in self.parameters()]),
        )

    def ask_for_a_graph(self) -> bool:
        """Tell whether layers may compute otherwise if no graph is recorded.

        Attention layers of torch have a fast path in evaluation mode, which puts zeros where a mask
        leaves positions out. They take it if nothing that they use can get a gradient: without a
        graph, as checkpointed forwards run, or where all of it is frozen.

        Example:
            >>> found = Modules([nn.TransformerEncoderLayer(4, 1, 4, batch_first=True).eval()])
            >>> found.ask_for_a_graph()
            True
        """
        return (
            bool(self._attention)
            and not all([one.training for one in self._attention])
            and torch.backends.mha.get_fastpath_enabled()
        )

    def parameters(self) -> list[nn.Parameter]:
        """List the parameters; a shared one as often as it occurs."""
        return [p for p in chain.from_iterable(self._parameter_views) if p is not None]

    def leaves(self) -> list[Tensor]:
        """List what takes gradients: the parameters, and buffers that require a gradient.

        A frozen parameter is among them; a shared one as often as it occurs.

        Example:
            >>> layer = nn.Linear(2, 2, bias=False)
            >>> layer.register_buffer("shift", torch.zeros(2, requires_grad=True))
            >>> layer.register_buffer("table", torch.zeros(3))
            >>> [tuple(leaf.shape) for leaf in Modules([layer]).leaves()]
            [(2, 2), (2,)]
        """
        buffers = chain.from_iterable(self._buffer_views)
        return [*self.parameters(), *(b for b in buffers if b is not None and b.requires_grad)]

    def are_as_made(self) -> bool:
        """Tell whether all modules inside the layers are the ones that were there at first."""
        return are_same(self._nested(), self._children)

    def condition(self) -> Hashable:
        """Name the state that a recompute needs unchanged.

        It consists of the mode, the identity of modules and parameters, and how often each
        parameter has been written to.
        """
        found = [p for p in self.parameters() if not is_lazy(p) and not p.is_inference()]
        return (
            self.mode(),
            tuple(map(id, self._nested())),
            tuple([(id(one), _address_of(one)) for one in found]),
            tuple(self.write_counts().counts),
        )

    def counted(self) -> list[nn.Parameter]:
        """List the parameters whose writes count, which are all that no embedding limits."""
        found = chain.from_iterable(self._counted_views)
        return [one for one in found if one is not None and id(one) not in self._others]

    def write_counts(self) -> WriteCounts:
        """Count how often each parameter was written to."""
        found = self.counted()
        try:
            return _counts_of(found)
        except (RuntimeError, ValueError):  # lazy ones and those of inference mode
            return _counts_of([one for one in found if not (is_lazy(one) or one.is_inference())])

    def written_to(
        self, before: WriteCounts, now: WriteCounts
    ) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """List the parameters whose counts differ, each with a module that has it and its name."""
        changed = now.since(before)
        return [
            (module, name, parameter)
            for module in (self._modules if changed else ())
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in changed
        ]

    def _nested(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(self._child_views))


def _counts_of(parameters: list[nn.Parameter]) -> WriteCounts:
    return WriteCounts(
        parameters,
        [(one._version, 0 if one.requires_grad else _address_of(one)) for one in parameters],
    )


def _differ(then: tuple[int, int], now: tuple[int, int]) -> bool:
    """Tell whether a parameter was written to between two counts of it.

    One that was frozen or thawed in between has a place in one of them only.
    """
    return then[0] != now[0] or (then[1] != now[1] and 0 not in (then[1], now[1]))


def _address_of(parameter: nn.Parameter) -> int:
    """Return where the elements of a parameter are: an exchanged ``.data`` counts no write."""
    return parameter.data_ptr() if parameter.layout is torch.strided else 0
