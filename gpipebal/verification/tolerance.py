"""How far two tensors are apart, and how far they may be.

Two runs that add the same numbers in another order differ by rounding, and how much depends on the
size of the numbers, not on the size of their sum. So a tensor is judged as a whole: its largest
difference may be a small fraction of its largest value, plus a fraction of the largest value around
it: that of all outputs, of the buffers of its layer, or of the gradients of its layer and of the
layers after it, which a backward passes first. A tensor that is zero except for rounding, such as
the gradient of a bias before batch normalisation, then passes; and multiplying a loss by a constant
changes no verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipebal.argument_kinds import plain_number
from gpipebal.errors import BalanceError

__all__ = ["Distance", "Tolerance", "alike", "distance", "has_fractions", "is_plain", "largest"]

#: Relative and absolute tolerance by dtype: the values that `torch.testing` documents. But in half
#: precision its absolute ones are far below one rounding of the values around, which a sum of them
#: is off by as soon as anything adds in another order: there it is that rounding.
_DEFAULTS = {
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 8e-3),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-3),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}

#: Types without fractions for which torch finds the smallest and the largest value.
_WITH_EXTREMES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


@dataclass(frozen=True)
class Tolerance:
    """How large a difference may be.

    Attributes:
        rtol: Fraction of the tensor's largest value; None: by dtype.
        atol: In addition; None: by dtype, as a fraction of the largest value around it.
        autocast: Types that numbers may have been rounded to on the way.

    Raises:
        BalanceError: one of them is not a number of 0 or more.
    """

    rtol: float | None = None
    atol: float | None = None
    autocast: tuple[torch.dtype, ...] = ()

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if value is not None and not 0 <= plain_number(value) < math.inf:
                raise BalanceError(
                    f"{name} is not a tolerance: {name}={value!r:.60} (expected a number of 0 or "
                    f"more, or None).\nFix: {name}=None, the default of each dtype."
                )

    def allowed(self, plain: Tensor, around: float) -> float:
        """Return the largest difference that a tensor may have; 0 for integers.

        Args:
            plain: The plain model's tensor.
            around: The largest value around it.
        """
        if not has_fractions(plain):
            return 0.0
        dtypes = (plain.dtype, *self.autocast)
        defaults = [_DEFAULTS.get(dtype, (torch.finfo(dtype).eps, 1e-5)) for dtype in dtypes]
        relative = max(rtol for rtol, _ in defaults) if self.rtol is None else self.rtol
        rest = max(atol for _, atol in defaults) * around if self.atol is None else self.atol
        return relative * largest(plain) + rest


class Distance(NamedTuple):
    """How far two tensors are apart.

    Attributes:
        absolute: The largest difference of two values.
        relative: The same as a fraction of the plain tensor's largest value.
        place: Where the largest difference is.
        plain: The plain value there.
        found: The other value there.
    """

    absolute: float
    relative: float
    place: tuple[int, ...]
    plain: Any
    found: Any


def distance(plain: Tensor, found: Tensor) -> Distance:
    """Measure how far two tensors of one shape and dtype are apart.

    NaN is equal to NaN, and infinitely far from any number.

    Example:
        >>> distance(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))[:3]
        (1.0, 0.25, (1,))
    """
    plain, found = _values(plain), _values(found.to(plain.device))
    if torch.equal(plain, found):
        return Distance(0.0, 0.0, (), None, None)
    apart = (_wide(plain) - _wide(found)).abs()
    if not has_fractions(plain):
        # Large integers that differ may become the same float.
        apart = apart.clamp(min=1.0)
    # Infinity minus infinity is NaN.
    same = (plain == found) | (plain.isnan() & found.isnan())
    apart = apart.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
    place = int(apart.argmax())
    absolute, size = float(apart.flatten()[place]), largest(plain)
    return Distance(
        absolute,
        absolute / size if size else (math.inf if absolute else 0.0),
        tuple(int(k) for k in torch.unravel_index(torch.tensor(place), apart.shape)),
        plain.flatten()[place].item(),
        found.flatten()[place].item(),
    )


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor that is finite; 0 if there is none."""
    values = _values(tensor)
    if not values.numel():
        return 0.0
    if not has_fractions(values) and values.dtype not in _WITH_EXTREMES:
        values = _wide(values)
    if not values.is_complex():
        low, high = torch.aminmax(values)
        size = max(-float(low), float(high))
        if math.isfinite(size):
            return size
    size_of = _wide(values).abs()
    return float(size_of.masked_fill(~size_of.isfinite(), 0.0).max())


def is_plain(value: Any) -> bool:
    """Tell whether a leaf that is not a tensor can be compared by its value."""
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def alike(plain: Any, found: Any) -> bool:
    """Tell whether two leaves that are not tensors are alike: objects are if their types agree."""
    if type(plain) is not type(found):
        return False
    # NaN is like NaN here too.
    return not is_plain(plain) or plain == found or (plain != plain and found != found)


def has_fractions(tensor: Tensor) -> bool:
    """Tell whether a tensor has values that are rounded."""
    return tensor.is_floating_point() or tensor.is_complex()


def _values(tensor: Tensor) -> Tensor:
    """Return a dense tensor of these values, in a dtype that torch can compare."""
    tensor = tensor.detach()
    if type(tensor).dequantize is not Tensor.dequantize:
        tensor = tensor.dequantize()  # of a class of its own, which may know no comparison
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return _wide(tensor) if has_fractions(tensor) and tensor.itemsize < 4 else tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
