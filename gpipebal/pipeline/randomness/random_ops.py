"""Where torch's random operations are caught: the only use of its dispatcher's private parts.

torch dispatches every operation along a list of keys, and a key that a thread includes goes first.
One of them exists for modes and has no meaning of its own. Here every random operation gets a
kernel for that key, and all other operations skip it in C++: a thread that includes the key pays
for its random operations only, and a thread that does not pays nothing. A dispatch mode in Python
does the same work (`_CatchAll` is one, for a torch that no longer has the key), but stops at every
operation: a small transformer layer takes three times its time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch._guards import TracingContext

from gpipebal.errors import PipelineError
from gpipebal.pipeline.process.engine_state import is_fake, is_recorded
from gpipebal.pipeline.process.forks import open_in_child
from gpipebal.pipeline.process.modes import ThreadedDispatchMode

__all__ = ["Draw", "catch_random_operations", "current_draw", "prepare"]

#: Runs a random operation: given the operation, its arguments and its keyword arguments.
Draw = Callable[[Any, Any, dict[str, Any]], Any]

_KEY = "TESTING_ONLY_GenericMode"

#: Those that draw nothing, whatever their tag says: the question which kernel is to run, the kernel
#: that refuses dropout, backwards, which are given the forward's numbers, and the like.
NEVER_DRAW = frozenset(
    {
        "aten::_nested_tensor_softmax_with_shape",
        "rngprims::philox_rand",
        "aten::_fused_sdp_choice",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention_backward",
        "aten::_scaled_dot_product_cudnn_attention_backward",
        "aten::_cudnn_attention_backward",
    }
)

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")

_installing = open_in_child(threading.Lock())
_current = threading.local()


def _is_random(operation: Any) -> bool:
    """Tell whether an operation draws random numbers when it is called."""
    return torch.Tag.nondeterministic_seeded in operation.tags


def catch_random_operations(draw: Draw) -> AbstractContextManager[Any]:
    """Return a context in which this thread's random operations are given to `draw`.

    Operations that a compiler traces are left alone: they draw when the compiled code runs.
    """
    if not _catchers:
        prepare()
    catcher = _catchers[0]
    return _Catch(draw, catcher) if catcher is not None else _CatchAll(draw)


def current_draw() -> Draw | None:
    """Return what this thread's random operations are given to; None: nothing."""
    draw: Draw | None = getattr(_current, "draw", None)
    return draw


class _Catch:
    """The context of a thread that includes the key.

    No generator, which takes twice as long: every pass through a partition enters one of these.
    """

    def __init__(self, draw: Draw, catcher: _Catcher) -> None:
        self._draw = draw
        self._catcher = catcher

    def __enter__(self) -> None:
        self._before = current_draw()
        _current.draw = self._draw
        self._guard = torch._C._IncludeDispatchKeyGuard(self._catcher.key)
        self._guard.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._guard.__exit__(*exception)
        _current.draw = self._before


class _CatchAll(ThreadedDispatchMode):
    """The same as a dispatch mode."""

    supports_higher_order_operators = True

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self._draw = draw

    def __enter__(self) -> Any:
        self._before = current_draw()
        _current.draw = self._draw
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _current.draw = self._before
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_one = isinstance(func, torch._ops.OpOverload)  # not an operation that runs functions
        if not is_one or not _is_random(func) or func.name() in NEVER_DRAW or _is_traced():
            return func(*args, **(kwargs or {}))
        return self._draw(func, args, kwargs or {})


class _Catcher:
    """Kernels for the random operations, registered for the life of the process."""

    def __init__(self) -> None:
        key = torch._C._parse_dispatch_key(_KEY)
        if key is None:
            raise RuntimeError("this torch has no such key")
        self.key = key
        self._keys = torch._C.DispatchKeySet(self.key)
        self._libraries = [torch.library.Library("_", "IMPL", _KEY)]
        self._libraries[0].fallback(torch.library.fallthrough_kernel)
        with suppress(AttributeError):  # a torch that has them elsewhere needs the key all the same
            self._skip_higher_order_operations()
        self._known: set[str] = set()

    def _skip_higher_order_operations(self) -> None:
        """Let those that run functions (`torch.cond`, flex attention) skip the key as well.

        They are written in Python, where no fallback is looked for. What their functions draw is
        caught when those run.
        """
        # Read by those that are made from now on, perhaps by another thread.
        torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(self.key)
        for operation in list(torch._ops._higher_order_ops.values()):
            operation.fallthrough(self.key)

    def add_new_operations(self) -> None:
        """Register a kernel for every random operation that exists by now."""
        new = [name for name in torch._C._dispatch_get_all_op_names() if name not in self._known]
        self._known.update(new)
        libraries: dict[str, torch.library.Library] = {}
        for name in new:
            operation = _operation(name)
            if operation is None or not _is_random(operation) or name in NEVER_DRAW:
                continue
            namespace, _, rest = name.partition("::")
            recurrent = namespace == "aten" and rest.partition(".")[0] in _RECURRENT
            # Operations that are composed of others are caught where those draw.
            if _is_composite(name) and not recurrent:
                continue
            if namespace not in libraries:
                libraries[namespace] = torch.library.Library(namespace, "IMPL", _KEY)
                self._libraries.append(libraries[namespace])
            kernel = self._recurrent_kernel if recurrent else self._kernel
            libraries[namespace].impl(
                operation, functools.partial(kernel, operation), with_keyset=recurrent
            )

    def _kernel(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        draw = current_draw()
        with torch._C._ExcludeDispatchKeyGuard(self._keys):
            if draw is None or _is_traced():
                return operation(*args, **kwargs)
            return draw(operation, args, kwargs)

    def _recurrent_kernel(self, operation: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _draws_out_of_sight(args) and current_draw() is not None and not _is_traced():
            return self._kernel(operation, *args, **kwargs)
        # The operations that it is composed of are caught.
        keys = keys & torch._C._dispatch_keyset_full_after(self.key)
        return operation.redispatch(keys, *args, **kwargs)


def _hide_from_compiler() -> None:
    """Let torch's compiler skip the kernels and all that they call.

    A layer that it runs as written (a recurrent one, or one more than its limit) enters them from
    a frame in which it compiles whatever is called. It would compile the drawing of numbers again
    for every state of a generator, up to its limit, and log all of the states' bytes.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)  # the frame, and those in it
        for kernel in (_Catcher._kernel, _Catcher._recurrent_kernel):
            eval_frame.set_code_exec_strategy(kernel.__code__, strategy)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return  # another torch: it draws the same numbers, and compiles more


def _draws_out_of_sight(args: Sequence[Any]) -> bool:
    """Tell whether a recurrent operation draws where no operation that it is made of shows it.

    cuDNN keeps the state of dropout for the whole process, and takes a new one from the default
    generator if that has been set: so the operation has to run as a whole, with our state set.
    """
    return any(isinstance(argument, torch.Tensor) and argument.is_cuda for argument in args)


def _is_traced() -> bool:
    """Tell whether operations of this thread are recorded, or only pretend to run.

    A compiler does so in a context of its own; its backend, which traces the patterns that it will
    look for when it compiles for the first time, does so without one.
    """
    return TracingContext.try_get() is not None or is_recorded() or is_fake()


def _make_catcher() -> _Catcher | None:
    try:
        catcher = _Catcher()
        catcher.add_new_operations()
        _hide_from_compiler()
        caught: list[Any] = []

        def draw(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            caught.append(operation)
            return operation(*args, **kwargs)

        with _Catch(draw, catcher):
            # On the host, whatever the program's default device is.
            generator = torch.Generator("cpu")
            torch.empty(1, device="cpu").bernoulli_(0.5, generator=generator)
        return catcher if caught else None
    except PipelineError:  # of a signal handler that has called a pipeline meanwhile
        raise
    except (AttributeError, RuntimeError, TypeError):
        return None  # another torch: it lacks the key, or these functions


_catchers: list[_Catcher | None] = []


def prepare() -> None:
    """Find the random operations that exist by now; needed once before any are caught."""
    with _installing:
        if not _catchers:
            _catchers.append(_make_catcher())
        elif _catchers[0] is not None:
            _catchers[0].add_new_operations()


def _operation(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except (AttributeError, RuntimeError):
        return None  # listed, but not callable from Python


def _is_composite(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
