"""Tied parameters: one parameter that several partitions use, or a buffer that is trained.

Each worker's backward would add to the same ``.grad``, in an order that depends on timing, and
floating point sums depend on their order. So while a worker runs, the gradients of tied parameters
are caught on their way and summed up for its partition alone; when all workers have ended, the
caller's thread adds the partitions' sums to ``.grad``, first partition first: the same bits in
every run.

Most are tied by layers. A loss inside the pipeline belongs to the last partition too, and may use a
parameter of another partition, as a language model's loss does that projects onto the embedding:
that is found in the graph of the loss, before anything is added.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from gpipebal.pipeline.process.engine_state import nodes_behind
from gpipebal.pipeline.values.lane import Events, Lane, current_events
from gpipebal.pipeline.values.tensors import has_storage
from gpipebal.pipeline.workers.partition import Partition

__all__ = ["TiedParameters", "drop_gradients", "leaves_behind"]

#: The gradients of a partition's tied parameters, and what must be waited for to read each.
_Sums = dict[Tensor, tuple[Tensor, Events]]

#: Marks the nodes that have the hook.
_CAUGHT = "gpipebal catches its gradients"

_current = threading.local()


class TiedParameters:
    """The parameters that several of these partitions use.

    Args:
        partitions: The partitions.
        lanes: Their devices and streams.
    """

    def __init__(self, partitions: Sequence[Partition], lanes: Sequence[Lane]) -> None:
        # By id, so that a parameter that is replaced is not kept: its partitions, in their order.
        self._owners: dict[int, list[int]] = {}
        self._lanes = lanes
        self._tied: dict[Tensor, None] = {}
        for partition in partitions:
            for parameter in dict.fromkeys(partition.modules.leaves()):
                owners = self._owners.setdefault(id(parameter), [])
                owners.append(partition.index)
                if len(owners) > 1:
                    self._tied[parameter] = None
        # Mini-batches of two threads may end at the same time.
        self._adding = threading.Lock()
        # torch keeps the node that adds to `.grad` only while a graph does; the hook is on it.
        self._users: dict[Tensor, Any] = {}

    def sums(self, *, grad: bool) -> list[_Sums]:
        """Return an empty sum for each partition; with `grad`, prepare to catch gradients."""
        # In inference mode nothing has a graph, whatever the grad mode.
        if grad and not torch.is_inference_mode_enabled():
            for parameter in list(self._tied):
                self._catch(parameter)
        return [{} for _ in self._lanes]

    def tie(self, j: int, parameters: Iterable[Tensor]) -> None:
        """Add parameters that partition `j` uses besides those of its layers.

        Called by its worker, before the backward that finds their gradients.
        """
        for parameter in parameters:
            if self._owners.get(id(parameter), [j]) != [j]:
                with self._adding:
                    self._tied[parameter] = None
                    self._catch(parameter)

    def _catch(self, parameter: Tensor) -> None:
        # A value that torch.func.functional_call put in place belongs to the caller's graph.
        if not (parameter.requires_grad and parameter.is_leaf):
            return
        with self._lanes[self._owners[id(parameter)][-1]].computing():
            user = _user(parameter)
        # There is another node after the parameter has changed its dtype or device. One hook does
        # for all pipelines: it asks the thread that runs it what is tied.
        node = _adder(user)
        if _CAUGHT not in node.metadata:
            # First the hook: an interrupt may come between. A second hook finds nothing to catch.
            node.register_prehook(_catcher(parameter))
            node.metadata[_CAUGHT] = True
        self._users[parameter] = user

    @contextmanager
    def collecting(self, sums: _Sums) -> Iterator[None]:
        """Catch the gradients that backwards of this thread and block find."""
        _current.sums, _current.tied = sums, self._tied
        try:
            yield
        finally:
            _current.sums = _current.tied = None

    def add_up(self, sums: Sequence[_Sums]) -> None:
        """Add the sums of the partitions to ``.grad``; called in the caller's thread."""
        with self._adding, torch.no_grad():
            for parameter in self._tied:
                found = False
                for j, of_partition in enumerate(sums):
                    gradient, ready = of_partition.pop(parameter, (None, ()))
                    if gradient is not None:
                        found = True
                        self._lanes[j].give_to_caller([gradient], ready)
                        parameter.grad = _added(parameter.grad, gradient)
                if found:
                    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                        hook(parameter)


def leaves_behind(tensor: Tensor, before: set[Any], given: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the leaves of autograd, such as parameters, from which a tensor was computed.

    Args:
        tensor: The tensor.
        before: Nodes of its graph at which the search stops.
        given: Leaves that it was also computed from, and that do not count.
    """
    known = {id(leaf) for leaf in given}
    # Only a node that adds to a `.grad` has a variable, and it leads to no further node.
    ends = [node for node in nodes_behind([tensor.grad_fn], before) if not node.next_functions]
    found = [getattr(node, "variable", None) for node in ends]
    return [leaf for leaf in found if leaf is not None and id(leaf) not in known]


def drop_gradients(parameters: Iterable[Tensor], threads: Sequence[threading.Thread]) -> None:
    """Keep these threads from adding to any ``.grad`` from now on.

    A worker that was given up may still be inside a backward, whose gradients would otherwise come
    out of nowhere, in the middle of a later step.
    """

    def drop(_gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
        return (None,) if threading.current_thread() in threads else None

    # The caller may be in inference mode, and the backward that of another thread's mini-batch.
    with torch.inference_mode(False):
        for parameter in parameters:
            if not (parameter.requires_grad and parameter.is_leaf):
                continue
            if not (is_lazy(parameter) or parameter.is_inference()):  # no graph has those
                # All graphs share the node that adds, and those of these threads keep it alive.
                user = _user(parameter)
                _adder(user).register_prehook(drop)


def _user(parameter: Tensor) -> Any:
    """Return a node that leads to the one that adds to a parameter's ``.grad``.

    This node may be kept, but not the one that adds. A node that only Python holds can be used by
    others only with Python's lock, which torch then waits for while it has locked the parameter;
    and a thread that holds Python's lock may wait for the parameter, as in ``parameter.T``.
    """
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn


def _adder(user: Any) -> Any:
    return user.next_functions[0][0]


def _added(known: Tensor | None, gradient: Tensor) -> Tensor:
    """Add a gradient, in place where torch can: a sparse one to a dense one, not the reverse."""
    if known is None:
        return gradient
    if known.is_sparse and not gradient.is_sparse:
        return gradient.add_(known)
    return known.add_(gradient)


def _copy_for(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Copy a gradient so that it lies in memory as its parameter does, like any that torch adds.

    A fused optimizer goes through both in the order of their memory, and asks for no strides.
    """
    if type(parameter) not in (Tensor, Parameter) or not has_storage(gradient):
        return gradient.detach().clone()
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _catcher(
    parameter: Tensor,
) -> Callable[[tuple[Tensor | None, ...]], tuple[None] | None]:
    def catch(gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
        sums: _Sums | None = getattr(_current, "sums", None)
        gradient = gradients[0]
        # A backward outside a pipeline, or of another pipeline, where only one partition uses it.
        if sums is None or gradient is None or parameter not in _current.tied:
            return None
        if not parameter.requires_grad:
            return None  # frozen since the forward: the node adds nothing either
        with torch.no_grad():
            known, _ = sums.get(parameter, (None, ()))
            if known is None or (known.is_sparse and not gradient.is_sparse):
                # A copy: the same tensor may be on its way to other parameters too.
                gradient = _copy_for(parameter, gradient)
            # The engine runs this on the node's stream, which need not be the worker's.
            sums[parameter] = _added(known, gradient), current_events([gradient])
        return (None,)  # nothing is added to `.grad`

    return catch
