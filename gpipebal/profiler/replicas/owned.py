"""Bytes that layers, and a loss, have all the time: parameters, gradients, buffers, attributes.

Memory is counted by storages, shared out among the layers whose tensors lie in them
(`gpipebal.pipeline.observers.shares`). A partition on another device gets copies of the tensors
alone, each in memory of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from gpipebal.pipeline.observers.shares import share_out
from gpipebal.pipeline.values.tensors import bytes_of, has_storage, plain_parts
from gpipebal.profiler.replicas.replica import kept_by

__all__ = ["bytes_of_loss", "own_bytes"]


class _Owner(NamedTuple):
    """Who has a tensor: a layer, by its index, or the loss, after the last of them."""

    layer: int
    column: Literal["parameter_bytes", "buffer_bytes"]


def own_bytes(layers: Sequence[nn.Module], device_type: str) -> list[dict[str, int]]:
    """Count the bytes of what each layer keeps and no earlier one has, and of all gradients.

    A tensor belongs to the first layer that registers it as a parameter, if any does. Each use of a
    parameter makes a gradient of its own; see `find_ties` for which are added up.

    Args:
        layers: The caller's layers.
        device_type: Type of the devices that they will be on.
    """
    found = _bytes_by_owner(_owned(layers), device_type)
    return [
        {
            "parameter_bytes": found[_Owner(k, "parameter_bytes")],
            "gradient_bytes": sum(bytes_of(p) for p in layer.parameters() if p.requires_grad),
            "buffer_bytes": found[_Owner(k, "buffer_bytes")],
        }
        for k, layer in enumerate(layers)
    ]


def bytes_of_loss(loss_fn: object, layers: Sequence[nn.Module], device_type: str) -> dict[str, Any]:
    """Count the bytes of what a loss that is a module keeps and no layer has, and of its gradients.

    Its buffers count as parameters: the buffers of a loss are its target.
    """
    if not isinstance(loss_fn, nn.Module):
        return {}
    owner = _Owner(len(layers), "parameter_bytes")
    owned = [*_owned(layers), *((owner, x) for x in (*loss_fn.parameters(), *loss_fn.buffers()))]
    known = {id(tensor) for layer in layers for tensor in (*layer.parameters(), *layer.buffers())}
    return {
        "parameter_bytes": _bytes_by_owner(owned, device_type)[owner],
        "gradient_bytes": sum(
            bytes_of(p) for p in loss_fn.parameters() if p.requires_grad and id(p) not in known
        ),
    }


def _owned(layers: Sequence[nn.Module]) -> Iterator[tuple[_Owner, Tensor]]:
    """Yield what layers keep: all parameters first, as a layer may keep one of another's."""
    for k, layer in enumerate(layers):
        yield from ((_Owner(k, "parameter_bytes"), parameter) for parameter in layer.parameters())
    for k, layer in enumerate(layers):
        yield from ((_Owner(k, "buffer_bytes"), tensor) for tensor in kept_by(layer))


def _bytes_by_owner(owned: Iterable[tuple[_Owner, Tensor]], device_type: str) -> Counter[_Owner]:
    """Count what owners have of these tensors, each of which belongs to the first one."""
    found = Counter[_Owner]()
    stay: list[tuple[_Owner, Tensor]] = []
    seen: set[int] = set()
    for owner, tensor in owned:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if _stays(tensor, device_type):
            stay.append((owner, tensor))
        else:
            found[owner] += bytes_of(tensor)
    for shared in share_out(stay).values():
        found.update(shared.by_owner)
    return found


def _stays(tensor: Tensor, device_type: str) -> bool:
    """Tell whether a pipeline leaves a tensor where it is, with all of its storage.

    What has no values yet is taken to be made on the host.
    """
    there = "cpu" if tensor.is_meta else tensor.device.type
    return there == device_type and all(map(has_storage, plain_parts(tensor)))
