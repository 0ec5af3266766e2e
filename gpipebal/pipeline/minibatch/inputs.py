"""The input of a mini-batch, divided into micro-batches and cut off from the caller's graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gpipebal.errors import ModelError, PipelineError
from gpipebal.pipeline.layers.chain import NO_TRACE
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.process.engine_state import is_fake, is_recorded, is_transformed
from gpipebal.pipeline.values.dims import Dim, spread_dims
from gpipebal.pipeline.values.lane import Events, current_events
from gpipebal.pipeline.values.microbatch import (
    Call,
    Packet,
    check_nothing_hidden,
    detached,
    flatten,
    which_need_gradient,
)
from gpipebal.pipeline.values.parting import chunk_sizes, count_rows, scatter_leaves
from gpipebal.pipeline.values.places import find_overlaps

__all__ = ["Inputs", "charge_inputs", "check_no_transform", "leaves_of_call", "part_inputs"]


@dataclass
class Inputs:
    """The input of a mini-batch, divided.

    Attributes:
        micro_batches: Leaves of each micro-batch, cut off from autograd.
        structure: Their pytree.
        dims: Dimension along which each leaf has its rows; None: all micro-batches get all of it.
        rows: Rows of each micro-batch.
        needs_gradient: Which leaves need a gradient.
    """

    micro_batches: list[list[Any]]
    structure: Any
    dims: list[Dim]
    rows: list[int]
    needs_gradient: list[bool]

    def take(self, ready: Events) -> list[Packet]:
        """Return the micro-batches, and keep nothing of them: that would keep their memory.

        Args:
            ready: What the first partition waits for before it reads them.
        """
        parts, self.micro_batches = self.micro_batches, []
        events = [*ready, *current_events(parts[0])]
        return [
            Packet(leaves, self.structure, self.needs_gradient, events, find_overlaps(leaves))
            for leaves in parts
        ]


def part_inputs(
    input: Any,
    keywords: Mapping[str, Any],
    in_dims: Any,
    keyword_dims: Mapping[str, Any],
    chunks: int,
) -> tuple[list[Any], Inputs]:
    """Divide the arguments of a pipeline's call into micro-batches.

    Args:
        input: A tensor or a pytree of tensors.
        keywords: Keyword arguments for the first layer.
        in_dims: Dimension of each tensor of the input, as a prefix of its pytree.
        keyword_dims: The same for each keyword; 0 for those that are not named.
        chunks: Micro-batches wanted.

    Returns:
        The leaves of all of it as the caller gave them, and the parts.

    Raises:
        ModelError: no tensor has rows, or two have different ones.
        BalanceError: a dimension does not fit.
    """
    leaves, structure, dims = leaves_of_call(input, keywords, in_dims, keyword_dims)
    check_nothing_hidden(leaves, "the input")
    argument = "in_dims, or in keyword_dims for a keyword argument" if keywords else "in_dims"
    n_rows = count_rows(leaves, structure, dims, argument=argument, chunks=chunks)
    rows = chunk_sizes(n_rows, chunks)
    grad = torch.is_grad_enabled()
    needs = [grad and need for need in which_need_gradient(leaves)]
    parts = scatter_leaves(detached(leaves), rows, dims)
    return leaves, Inputs(parts, structure, dims, rows, needs)


def leaves_of_call(
    input: Any, keywords: Mapping[str, Any], in_dims: Any, keyword_dims: Mapping[str, Any]
) -> tuple[list[Any], Any, list[Dim]]:
    """Take the arguments of a pipeline's call apart; see `part_inputs`.

    Returns:
        Leaves, their pytree, and the dimension along which each has its rows. With keyword
        arguments the pytree is that of a `Call`.

    Raises:
        BalanceError: a dimension does not fit.
        ModelError: the keyword arguments have no names.
    """
    if not isinstance(keywords, Mapping):
        raise ModelError(
            f"keywords is not a dict: keywords={keywords!r:.60} (expected names and values).\n"
            "Fix: keywords={'mask': mask}, say."
        )
    leaves, structure = flatten(input)
    dims = spread_dims(in_dims, structure, "in_dims")
    for name, value in keywords.items():
        found, of_keyword = flatten(value)
        leaves += found
        dims += spread_dims(keyword_dims.get(name, 0), of_keyword, f"keyword_dims[{name!r}]")
    if keywords:
        _, structure = flatten(Call(input, dict(keywords)))
    return leaves, structure, dims


def charge_inputs(ledger: Ledger | None, inputs: Any, devices: Sequence[torch.device]) -> None:
    """Charge the first partition with the mini-batch, however far it is passed on unchanged.

    Args:
        ledger: Where live memory is counted; None when memory is not metered.
        inputs: All that the pipeline was called with.
        devices: Device of each partition. Inputs that are not on the first one are copied, and the
            copies are charged.
    """
    if ledger is not None and devices:
        leaves = [leaf for leaf in flatten(inputs)[0] if isinstance(leaf, Tensor)]
        ledger.keep((0, leaf) for leaf in leaves if leaf.device == devices[0])


def check_no_transform(inputs: Any, parameters: Iterable[Any]) -> None:
    """Refuse traces, transforms of `torch.func` and tensors with a tangent: workers see none of it.

    Raises:
        PipelineError: there is one.
    """
    is_exported = torch.jit.is_tracing() or torch.compiler.is_exporting()  # type: ignore[attr-defined]
    if is_exported or is_recorded():
        raise PipelineError(NO_TRACE)
    if is_fake():
        raise PipelineError(
            "a pipeline cannot be called under a FakeTensorMode: its workers are not in it.\n"
            "Fix: call the plain model under it, whose parameters are the same; or "
            "profile_model(..., method='estimate')."
        )
    if is_transformed():
        raise PipelineError(
            "a pipeline cannot be called inside of a transform of torch.func: its workers would "
            "not see grad, vjp, vmap, jvp and the like.\n"
            "Fix: use backward() or torch.autograd.grad() after the call, or the plain model."
        )
    if forward_ad._current_level < 0:
        return  # as nearly always: forward-mode differentiation is off
    for value in (*flatten(inputs)[0], *parameters):
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise PipelineError(
                "a pipeline cannot be differentiated in forward mode: an input, a target or a "
                "parameter has a tangent.\n"
                "Fix: use backward() or torch.autograd.grad(), or the plain model for tangents."
            )
