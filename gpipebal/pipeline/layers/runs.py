"""Runs of layers that are recomputed together: chosen for a chain, and checked in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from torch import nn

from gpipebal.argument_kinds import check_list, whole_number
from gpipebal.errors import BalanceError, ModelError
from gpipebal.pipeline.layers.modules import shallow_copy
from gpipebal.pipeline.layers.recomputed import Recomputed
from gpipebal.skip.skippable import Skippable

__all__ = ["check_runs", "with_recompute"]


def with_recompute(module: nn.Sequential, runs: Iterable[Sequence[int | str]]) -> nn.Sequential:
    """Return the same chain of layers with some runs of them recomputed in the backward.

    The layers are the module's own; the module itself is not changed: replace layers there, and
    call this again. Whenever a graph is recorded, only the input of a run is kept for the backward:
    also without a pipeline, where `torch.utils.checkpoint` restores the random numbers for the
    recompute. A micro-batch that the pipeline recomputes anyway is recomputed once, as a whole.

    Args:
        module: The layers.
        runs: Layers that are recomputed together: consecutive ones, by places or names. In a
            pipeline all of a run must be in one partition. `gpipebal.planner.recompute_layers`
            chooses them.

    Returns:
        An `nn.Sequential` with the names, parameters and state dict of `module`.

    Raises:
        BalanceError: layers that do not exist, are not consecutive, or are in two runs.
        KindError: `runs` is not a list of lists.
        ModelError: `module` is not an `nn.Sequential`, or a layer stashes or pops a skip.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
        >>> again = with_recompute(model, [range(1, 3)])
        >>> list(again.state_dict()) == list(model.state_dict()), again[0] is model[0]
        (True, True)
        >>> x = torch.ones(2, 4)
        >>> torch.equal(model(x), again(x))
        True
    """
    if not isinstance(module, nn.Sequential):
        raise ModelError(
            f"module is not a chain: type(module)={type(module).__name__} (expected nn.Sequential)."
            "\nFix: give the layers of the pipeline as an nn.Sequential."
        )
    layers = [(name, layer) for name, layer in module._modules.items() if layer is not None]
    changed = dict(layers)
    taken: set[int] = set()
    fix = "runs=[[0, 1]], a list of layers for each run"
    for i, run in enumerate(check_list("runs", runs, fix=fix)):
        places = _places(check_list(f"runs[{i}]", run, fix=fix), [*changed], taken)
        taken.update(places)
        inside = [layers[k] for k in places]
        for k, (name, layer) in enumerate(inside):
            _check_no_skips(name, layer)
            changed[name] = Recomputed(layer, () if k else inside)
    # With the module's own hooks, if it has any.
    found: nn.Sequential = shallow_copy(module, changed)
    return found


def _places(run: Sequence[int | str], names: Sequence[str], taken: set[int]) -> list[int]:
    places = []
    for key in run:
        named = isinstance(key, str) and key in names
        place = names.index(key) if named else whole_number(key)
        if place is None or not 0 <= place < len(names):
            raise BalanceError(
                f"a run has a layer that does not exist: {key!r} (expected a place from 0 to "
                f"{len(names) - 1}, or the name of a layer).\n"
                "Fix: give the model that the runs were chosen for."
            )
        places.append(place)
    if not places or places != list(range(places[0], places[0] + len(places))):
        raise BalanceError(
            f"layers of a run are not consecutive: {list(run)} (expected one layer or more, each "
            "after the one before).\nFix: give every part by itself: runs=[...], [...]."
        )
    both = taken.intersection(places)
    if both:
        raise BalanceError(
            f"a layer is in two runs: {names[min(both)]!r} (expected one at most).\n"
            "Fix: recompute both runs as one, or take the layer out of one of them."
        )
    return places


def _check_no_skips(name: str, layer: nn.Module) -> None:
    if any(isinstance(inside, Skippable) for inside in layer.modules()):
        raise ModelError(
            f"a layer with skip connections cannot be recomputed by itself: {name!r} would stash "
            "or pop twice.\n"
            "Fix: leave it out of the runs, or checkpoint='always' for its partition."
        )


def check_runs(layers: Mapping[str, nn.Module], balance: Sequence[int]) -> None:
    """Refuse a balance that cuts a run of layers that are recomputed together.

    Raises:
        BalanceError: a partition begins inside of one, or one is inside of a layer.
        ModelError: one of its layers was replaced or taken away.
    """
    names = list(layers)
    for name, layer in layers.items():
        inside = layer.stands_for if isinstance(layer, Recomputed) else layer
        if any(isinstance(part, Recomputed) for part in _walk(inside)):
            raise BalanceError(
                f"a run of layers that are recomputed together is inside of layer {name!r}, where "
                "it would draw the random numbers of other layers (expected runs of the layers of "
                "the pipeline).\n"
                "Fix: open that layer first, with_recompute(gpipebal.flatten(model), runs)."
            )
    _check_whole(layers)
    for j, begin in enumerate(accumulate(balance[:-1], initial=0)):
        first = layers[names[begin]] if names else None
        if isinstance(first, Recomputed) and first.is_inside:
            raise BalanceError(
                f"balance cuts a run of layers that are recomputed together: partition {j} begins "
                f"with layer {names[begin]!r} (expected the first layer of the run, or one of "
                "none).\n"
                "Fix: choose the runs for this balance, with_recompute(model, runs)."
            )


def _check_whole(layers: Mapping[str, nn.Module]) -> None:
    """Refuse a chain that has other layers in the places of a run than those that the run takes."""
    rest: Sequence[nn.Module] = ()
    for name, layer in (*layers.items(), ("", None)):
        inside = layer.stands_for if isinstance(layer, Recomputed) and layer.is_inside else None
        if inside is not (rest[0] if rest else None):
            raise ModelError(
                "a run of layers that are recomputed together is not whole: "
                f"{f'layer {name!r}' if name else 'the end of the chain'} is not what comes next "
                "in it, so a layer would run twice or not at all.\n"
                "Fix: replace layers in the model without runs, and then with_recompute(model, "
                "runs)."
            )
        rest = rest[1:]
        if isinstance(layer, Recomputed) and not layer.is_inside:
            rest = layer.run[1:]


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all in it, also one in a layer's place, which `modules` hides."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child)
