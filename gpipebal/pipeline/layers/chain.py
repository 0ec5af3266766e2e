"""The chain: which modules a pipeline takes, and whether a balance fits them."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import nn

from gpipebal.argument_kinds import check_options, is_list
from gpipebal.errors import BalanceError, KindError, ModelError, PipelineError
from gpipebal.pipeline.layers.container import Container
from gpipebal.pipeline.layers.own import own_forward
from gpipebal.plan import Plan
from gpipebal.schedule import check_count

__all__ = [
    "NO_INPUT",
    "NO_TRACE",
    "check_balance",
    "check_keyword_dims",
    "check_keywords",
    "check_number",
    "check_one_input",
    "check_settings",
    "check_step_input",
    "first_difference",
    "layers_of",
]


#: The output would be a constant of the trace, or the trace would stop at it.
NO_TRACE = (
    "a pipeline cannot be traced: its workers would not be in the trace.\n"
    "Fix: trace, script or export the plain model, whose parameters are the same."
)


class _NoInput:
    """Stands for an input that was not given."""

    def __repr__(self) -> str:
        return "NO_INPUT"

    def __fx_create_arg__(self, tracer: object) -> Any:
        raise PipelineError(NO_TRACE)  # `torch.fx` makes the arguments before it calls a module


NO_INPUT: Any = _NoInput()


def _chain_inside(module: object) -> str:
    """Return the name of an `nn.Sequential` that has all parameters of a module; empty: none."""
    if not isinstance(module, nn.Module):
        return ""
    own = {id(parameter) for parameter in module.parameters()}
    for name, inner in module.named_modules():
        is_chain = isinstance(inner, nn.Sequential) and len(inner) and own_forward(inner) is None
        if is_chain and own == {id(parameter) for parameter in inner.parameters()}:
            return name
    return ""


def layers_of(module: nn.Module) -> OrderedDict[str, nn.Module]:
    """Return the layers of a chain by name.

    Raises:
        ModelError: `module` is not an `nn.Sequential`, or does something other than run its
            layers one after the other.
    """
    if isinstance(module, Container):
        raise ModelError(
            f"module is a pipeline already: type(module)={type(module).__name__} (expected the "
            "plain nn.Sequential).\nFix: give the model that the pipeline was made of."
        )
    if not isinstance(module, nn.Sequential):
        kind = type(module)
        # Other libraries have a class of this name too.
        called = f"{kind.__module__}.Sequential" if kind.__name__ == "Sequential" else kind.__name__
        inside = _chain_inside(module)
        path = inside if inside.replace(".", "").isidentifier() else ""
        where = f"module.{path}" if path else f"module.get_submodule({inside!r})"
        hint = f"; or give the chain in it, {where}, if it does nothing else"
        raise ModelError(
            f"module must be nn.Sequential to be partitioned: type(module)={called}.\n"
            "Fix: write the model as nn.Sequential of its layers (docs/guide/models.md)"
            f"{hint if inside else ''}."
        )
    own = own_forward(module)
    if own is not None:
        raise ModelError(
            f"module has a {own} of its own: {type(module).__name__}.{own} (expected that of "
            "nn.Sequential: one layer after the other).\n"
            "Fix: put what it does besides running its layers into a layer."
        )
    return OrderedDict(
        (name, layer) for name, layer in module._modules.items() if layer is not None
    )


def check_balance(balance: Iterable[int] | None, n_layers: int) -> list[int]:
    """Return a balance as a list of ints that add up to the number of layers.

    Raises:
        BalanceError: it is missing, has an entry below 1, or has another sum.
    """
    advice = (
        "Fix: let gpipebal find it:\n"
        "    from gpipebal import balance_by_time\n"
        "    balance = balance_by_time(model, sample, partitions=2)"
    )
    if balance is None:
        raise BalanceError(f"balance is required: balance=None (expected a list).\n{advice}")
    if isinstance(balance, Plan) or not is_list(balance, in_order=True):
        way = "Fix: GPipe.from_plan(model, plan)." if isinstance(balance, Plan) else advice
        raise BalanceError(
            f"balance is not a list of numbers of layers: type(balance)={type(balance).__name__} "
            f"(expected a list).\n{way}"
        )
    given = list(balance)
    try:
        sizes = [check_count("balance", size) for size in given]
    except BalanceError:
        raise BalanceError(
            f"balance has an impossible entry: balance={given} (expected whole numbers of 1 or "
            f"more).\n{advice}"
        ) from None
    if not n_layers and sizes:
        raise BalanceError(
            f"module has no layers: balance={sizes} (expected []).\nFix: give it layers."
        )
    if sum(sizes) != n_layers:
        raise BalanceError(
            f"balance does not fit the module: sum({sizes})={sum(sizes)} (expected {n_layers}, "
            f"the number of layers).\n{advice}"
        )
    return sizes


def check_number(n_layers: int, balance: list[int]) -> None:
    """Make sure that a pipeline still has the layers of its balance.

    Raises:
        PipelineError: it has more, or fewer.
    """
    if n_layers != sum(balance):
        raise PipelineError(
            f"layers were added to or taken from a pipeline: it has {n_layers} (expected "
            f"{sum(balance)}, the sum of its balance).\n"
            "Fix: change the nn.Sequential, and make another pipeline of it."
        )


def check_settings(others: Mapping[str, object], known: Mapping[str, object]) -> None:
    """Refuse settings that a pipeline does not have.

    Args:
        others: What was given besides those that it has.
        known: Those that it has, by name.

    Raises:
        KindError: there is one.
    """
    if "schedule" in others:
        schedule = f"schedule={others['schedule']!r:.60}"
        raise KindError(
            f"GPipe takes no schedule: {schedule} (expected it in a step, which has the loss "
            "inside; a call runs all forwards before the caller's loss).\n"
            f"Fix: pipe.step(x, target=y, loss_fn=loss_fn, {schedule})."
        )
    check_options(others, known, "GPipe")


def check_one_input(input: Any, others: Sequence[object], keywords: dict[str, Any]) -> Any:
    """Return the input of a call; one that was given by name is taken out of the keywords.

    Args:
        input: What was given first; `NO_INPUT`: nothing was.
        others: What was given after it, without a name.
        keywords: What was given with a name, which the first layer gets.

    Raises:
        ModelError: there is none, or there are several.
    """
    if input is NO_INPUT:
        if "input" in keywords:
            return keywords.pop("input")
        named = f", but {', '.join(keywords)} by name" if keywords else ""
        raise ModelError(
            f"a pipeline takes one input: none was given{named} (expected one without a name; "
            "those with a name are keyword arguments of the first layer).\n"
            "Fix: pipe(x), or pipe(x, mask=mask); pipe({'x': x, 'mask': mask}) if the first layer "
            "takes a dict."
        )
    if others:
        raise ModelError(
            f"a pipeline takes one input: {1 + len(others)} were given one after the other "
            "(expected one, as nn.Sequential).\n"
            "Fix: pipe((x, y)) if the first layer takes a tuple; pipe(x, name=y) if y is its "
            "keyword argument `name`."
        )
    return input


def check_step_input(others: Sequence[object]) -> None:
    """Refuse arguments of `GPipe.step` other than the input that are given without a name.

    Raises:
        ModelError: there is one.
    """
    if others:
        raise ModelError(
            f"step takes target and loss by name: {1 + len(others)} arguments were given without "
            "(expected one, the input).\n"
            "Fix: pipe.step(x, target=y, loss_fn=loss_fn); several inputs are one tuple, "
            "pipe.step((x, z), ...)."
        )


def check_keyword_dims(keyword_dims: object, first: nn.Module | None) -> dict[str, Any]:
    """Return the dimensions of keyword arguments by name.

    Args:
        keyword_dims: What the user gave.
        first: The first layer, which gets the keyword arguments; None: there is none.

    Raises:
        BalanceError: they are not a mapping, or name a keyword that the first layer does not take.
    """
    if keyword_dims is not None and not isinstance(keyword_dims, Mapping):
        raise BalanceError(
            f"keyword_dims is not a dict: keyword_dims={keyword_dims!r:.200} (expected names and "
            "dimensions).\nFix: keyword_dims={'mask': None}, say."
        )
    dims = dict(keyword_dims or {})
    wrong = _wrong_name(dims, first)
    if wrong:
        raise BalanceError(
            f"keyword_dims {wrong}\nFix: name the keywords as they are passed to the pipeline."
        )
    return dims


def check_keywords(keywords: Mapping[str, Any] | None, first: nn.Module) -> None:
    """Refuse keyword arguments that the first layer does not take.

    Raises:
        ModelError: there is one.
    """
    wrong = _wrong_name(keywords, first) if isinstance(keywords, Mapping) else ""
    if wrong:
        raise ModelError(f"keywords {wrong}\nFix: give the first layer what it takes.")


def _wrong_name(names: Iterable[str], first: nn.Module | None) -> str:
    """Say which names are not keywords of the first layer; empty if none, or if not known."""
    known = None if first is None else _keywords_of(first)
    unknown = [name for name in names if known is not None and name not in known]
    if not unknown:
        return ""
    return (
        f"has a name that the first layer does not take: {unknown[0]!r} "
        f"(expected one of {', '.join(map(repr, known or [])) or 'none'}, the keywords of "
        f"{type(first).__name__}.forward)."
    )


def _keywords_of(layer: nn.Module) -> list[str] | None:
    """Return the names that a layer takes besides its input; None: that cannot be told."""
    if layer._forward_pre_hooks_with_kwargs:
        return None  # a hook may take them away
    try:
        parameters = list(inspect.signature(layer.forward).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return None
    return [p.name for p in parameters[1:] if p.kind != p.POSITIONAL_ONLY]


def first_difference(names: Iterable[str], others: Iterable[str]) -> tuple[int, str, str] | None:
    """Return the first place where names of layers differ, and both there in words; None: nowhere.

    Example:
        >>> first_difference(["first", "act"], ["first"])
        (1, "'act'", 'missing')
    """
    for k, (name, other) in enumerate(zip_longest(names, others)):
        if name != other:
            first, second = ("missing" if one is None else repr(one) for one in (name, other))
            return k, first, second
    return None
