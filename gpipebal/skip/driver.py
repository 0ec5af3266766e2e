"""The driver: runs the forward of a skippable layer, which is a generator, and answers it.

::

    forward                            drive
       ├── yield stash(name, value) ───▶ save in current()
       │◀──────────────────────── None ──┤
       ├── yield pop(name) ────────────▶ load from current()
       │◀─────────────────────── value ──┤
       └── return output ──────────────▶ all that was declared is done: return output
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from gpipebal.errors import ModelError, PipelineError
from gpipebal.skip.namespace import Namespace
from gpipebal.skip.tracker import current

__all__ = ["Declared", "drive", "pop", "stash"]


class stash:  # noqa: N801 - reads as a verb: `yield stash("image", x)`
    """Yielded by the forward of a skippable layer: keep a value for the layer that pops it.

    Args:
        name: A name that the layer has declared.
        value: Anything: a tensor, None, a number, a tuple of tensors.
    """

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name = _checked(name)
        self.value = value

    def __repr__(self) -> str:
        return f"stash({self.name!r}, <{type(self.value).__name__}>)"


class pop:  # noqa: N801 - reads as a verb: `x = yield pop("image")`
    """Yielded by the forward of a skippable layer: give me the value that was stashed.

    The value is no longer kept after that, so its memory is free after the last use. It is held at
    least until this forward yields again or returns.

    Args:
        name: A name that the layer has declared.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = _checked(name)

    def __repr__(self) -> str:
        return f"pop({self.name!r})"


def _checked(name: Any) -> str:
    if not isinstance(name, str):
        raise ModelError(
            f"name of a skip is not a string: name={name!r} (expected a str).\n"
            "Fix: yield stash('name', value), or value = yield pop('name')."
        )
    return name


class Declared(NamedTuple):
    """Names that a class of layers has declared."""

    stash: frozenset[str]
    pop: frozenset[str]


def drive(
    layer: str,
    declared: Declared,
    namespaces: Mapping[str, Namespace | None],
    result: Any,
) -> Any:
    """Run a forward to its end and return its output.

    Args:
        layer: How errors name the layer.
        declared: What the forward may stash and pop, and has to.
        namespaces: Namespace of each name that is not in the default one.
        result: What calling forward returned: a generator, or the output if it never yields.

    Raises:
        PipelineError: the forward did other things than were declared, or popped what had not
            been stashed.
        ModelError: it yielded something that is neither stash nor pop.
    """
    forward = _Forward(layer, declared, namespaces)
    output = _run(forward, result) if isinstance(result, Generator) else result
    forward.finish()
    return output


def _run(forward: _Forward, generator: Generator[Any, Any, Any]) -> Any:
    # No variable here outlives its use: a tensor that is passed on may be the largest there is.
    reply: Any = None
    error: Exception | None = None
    try:
        while True:
            # An error goes to the line that asked for the impossible, so that the traceback shows
            # that line and the layer can clean up.
            request = generator.send(reply) if error is None else generator.throw(error)
            reply = error = None
            try:
                reply = forward.answer(request)
            except Exception as refusal:
                error = refusal
            del request
    except StopIteration as stop:
        return stop.value
    finally:
        # Its traceback refers to this frame: a reference cycle, if the frame referred to it.
        error = None
        # It has not ended if something interrupted us between two steps.
        generator.close()


class _Forward:
    """One forward of one layer: what it has stashed and popped so far."""

    def __init__(
        self, layer: str, declared: Declared, namespaces: Mapping[str, Namespace | None]
    ) -> None:
        self._layer = layer
        self._declared = declared
        self._namespaces = namespaces
        self._stashed: set[str] = set()
        self._popped: set[str] = set()

    def answer(self, request: Any) -> Any:
        """Do what the forward asked for, and return the answer."""
        if isinstance(request, stash):
            self._check("stash", request.name, self._declared.stash, self._stashed)
            current().save((self._namespaces.get(request.name), request.name), request.value)
            self._stashed.add(request.name)
            return None
        if isinstance(request, pop):
            self._check("pop", request.name, self._declared.pop, self._popped)
            value = current().load((self._namespaces.get(request.name), request.name))
            self._popped.add(request.name)
            return value
        raise ModelError(
            f"forward of {self._layer} yielded something that is not a skip: "
            f"type={type(request).__name__} (expected stash(name, value) or pop(name)).\n"
            "Fix: yield nothing but stash(...) and pop(...), and return the output."
        )

    def finish(self) -> None:
        """Make sure that nothing is missing.

        Raises:
            PipelineError: a declared name was not stashed, or not popped.
        """
        stash = sorted(self._declared.stash - self._stashed)
        pop = sorted(self._declared.pop - self._popped)
        if not stash and not pop:
            return
        missing = [f"not stashed={stash}"] if stash else []
        missing += [f"not popped={pop}"] if pop else []
        fixes = [f"yield stash({name!r}, value)" for name in stash]
        fixes += [f"value = yield pop({name!r})" for name in pop]
        raise PipelineError(
            f"forward of {self._layer} returned without all skips that it declares: "
            f"{', '.join(missing)} (expected every name once in each forward).\n"
            f"Fix: {'; '.join(fixes)} (None is a value too); or take the name out of @skippable."
        )

    def _check(self, verb: str, name: str, declared: frozenset[str], done: set[str]) -> None:
        if name not in declared:
            raise PipelineError(
                f"forward of {self._layer} cannot {verb} a skip that it does not declare: "
                f"name={name!r} (expected one of {sorted(declared)}).\n"
                f"Fix: declare it, @skippable({verb}={sorted({*declared, name})})."
            )
        if name in done:
            advice = (
                "keep the value of the first pop in a variable."
                if verb == "pop"
                else "stash one value, or a tuple of them, or declare one more name."
            )
            raise PipelineError(
                f"forward of {self._layer} cannot {verb} a skip twice: name={name!r} (expected "
                f"once in each forward).\nFix: {advice}"
            )
