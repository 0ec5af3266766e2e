"""Which layer of a chain stashes what another one pops, and whether all skips pair up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from gpipebal.errors import ModelError
from gpipebal.skip.skippable import Skippable
from gpipebal.skip.tracker import Key, describe

__all__ = ["find_skips", "verify_skippables"]


@dataclass(frozen=True)
class _End:
    """One module that stashes, or one that pops.

    Attributes:
        order: Its place among all skippable modules of the chain.
        layer: Index of the layer that it is, or that contains it.
        label: How an error names it.
    """

    order: int
    layer: int
    label: str


@dataclass
class _Ends:
    """All modules that stash one skip, and all that pop it, in the order of the chain."""

    stashes: list[_End] = field(default_factory=list)
    pops: list[_End] = field(default_factory=list)


def find_skips(layers: Mapping[str, nn.Module]) -> dict[Key, tuple[int, int]]:
    """Find the layers between which skips travel.

    Skippable modules anywhere inside a layer count for that layer, in the order in which
    ``modules()`` gives them.

    Args:
        layers: The layers of the chain, by name.

    Returns:
        For each skip the index of the layer that stashes it and of the one that pops it, in the
        order of the chain. Both are the same where a layer holds both ends inside.

    Raises:
        ModelError: the skips do not pair up, as in `verify_skippables`.
    """
    skips: dict[Key, _Ends] = {}
    problems: list[tuple[int, str]] = []
    for end, module in _skippables(layers):
        both = module.stashes() & module.pops()
        problems += [
            (end.order, f"{end.label} both stashes and pops {describe(key)}")
            for key in sorted(both)
        ]
        for key in sorted(module.stashes() - both):
            skips.setdefault(key, _Ends()).stashes.append(end)
        for key in sorted(module.pops() - both):
            skips.setdefault(key, _Ends()).pops.append(end)
    for key, ends in skips.items():
        problems += _problems(describe(key), ends)
    if problems:
        # A stable sort: problems of one module stay together.
        texts = [text for _, text in sorted(problems, key=lambda problem: problem[0])]
        raise ModelError(
            f"skips do not pair up: problems={len(texts)} (expected one layer to stash each skip, "
            "and one later layer to pop it).\n"
            + "".join(f"* {text}\n" for text in texts)
            + "Fix: let each skip be stashed once and popped once, later in the chain; to use a "
            "name for several pairs, call layer.isolate(namespace) on both layers of a pair."
        )
    return {key: (ends.stashes[0].layer, ends.pops[0].layer) for key, ends in skips.items()}


def verify_skippables(module: nn.Sequential) -> None:
    """Make sure that every skip of a chain is stashed once, and popped once by a later layer.

    A name may serve several pairs only in different namespaces (see `isolate` in `skippable`),
    even where one pair ends before the next begins. Skippable modules inside a layer count for
    that layer, in the order in which they are registered.

    Args:
        module: The chain; its direct children are the layers.

    Raises:
        ModelError: something does not pair up; the error lists all that does not (a TypeError).

    Example:
        >>> from gpipebal.skip import pop, skippable, stash
        >>> @skippable(pop=["image"])
        ... class Join(nn.Module):
        ...     def forward(self, x):
        ...         return x + (yield pop("image"))
        >>> verify_skippables(nn.Sequential(nn.ReLU(), Join()))
        Traceback (most recent call last):
        gpipebal.errors.ModelError: skips do not pair up: problems=1 (expected one layer to stash \
each skip, and one later layer to pop it).
        * layer '1' pops 'image', which no layer stashes
        Fix: let each skip be stashed once and popped once, later in the chain; to use a name for \
several pairs, call layer.isolate(namespace) on both layers of a pair.
    """
    if not isinstance(module, nn.Sequential):
        raise ModelError(
            f"module must be nn.Sequential: type(module)={type(module).__name__}.\n"
            "Fix: verify_skippables(nn.Sequential(...)) with the layers of the model."
        )
    # Not named_children: a layer that occurs twice counts twice.
    find_skips({name: layer for name, layer in module._modules.items() if layer is not None})


def _skippables(layers: Mapping[str, nn.Module]) -> Iterator[tuple[_End, Skippable]]:
    order = 0
    for index, (name, layer) in enumerate(layers.items()):
        for path, module in layer.named_modules():
            if isinstance(module, Skippable):
                label = f"layer {name!r}" + (f" (its {path!r})" if path else "")
                yield _End(order, index, label), module
                order += 1


def _problems(skip: str, ends: _Ends) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with one skip, and the place in the chain where it is."""
    stashes, pops = ends.stashes, ends.pops
    for end in stashes[1:]:
        yield end.order, f"{end.label} stashes {skip} again, after {stashes[0].label}"
    if stashes and not pops:
        yield stashes[0].order, f"{stashes[0].label} stashes {skip}, which no layer pops"
    late = [end for end in pops if stashes and end.order > stashes[0].order]
    for end in late[1:]:
        yield end.order, f"{end.label} pops {skip} again, after {late[0].label}"
    for end in pops:
        if end not in late:
            whence = f"{stashes[0].label} stashes only later" if stashes else "no layer stashes"
            yield end.order, f"{end.label} pops {skip}, which {whence}"
