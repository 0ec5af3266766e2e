"""The built-in models in words: names, arguments, defaults. Loads no torch, for ``--help``.

Arguments are checked the same way wherever they come from, and read from words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gpipebal.errors import UsageError

__all__ = ["CATALOGUE", "Argument", "Description", "check_arguments", "read_word"]

_WORDS = {"yes": True, "true": True, "no": False, "false": False}


@dataclass(frozen=True)
class Argument:
    """A number, or a yes or no, that a model is built from.

    Attributes:
        default: Its default; a bool means that it is a yes or no.
        meaning: Its meaning, in a few words.
        smallest: The smallest number allowed.
        multiple_of: What the number has to be a multiple of.
    """

    default: int | bool
    meaning: str
    smallest: int = 1
    multiple_of: int = 1


@dataclass(frozen=True)
class Description:
    """What a model is and takes.

    Attributes:
        about: The model in one line.
        arguments: What it is built from, by name, in the order of the function that builds it.
        image_size: Pixels of the side of its images by default; None: it takes no images.
        smallest_image: Takes the values of its arguments, and returns the smallest image that it
            can be trained on.
        image_size_of_one_row: The smallest image that it can be trained on in a micro-batch of
            one row: a batch normalisation needs more than one value per channel.
    """

    about: str
    arguments: Mapping[str, Argument]
    image_size: int | None = None
    smallest_image: Callable[[Mapping[str, int]], int] = lambda values: 1
    image_size_of_one_row: int = 1


_CLASSES = Argument(1000, "classes to tell apart")

#: All built-in models by the name that the command line takes.
CATALOGUE: Mapping[str, Description] = MappingProxyType(
    {
        "resnet101": Description(
            "ResNet-101: image classification, 370 layers",
            MappingProxyType({"num_classes": _CLASSES}),
            image_size=64,
            image_size_of_one_row=33,
        ),
        "amoebanetd": Description(
            "AmoebaNet-D (L, D): image classification, L + 6 layers",
            MappingProxyType(
                {
                    "L": Argument(18, "normal cells, a multiple of 3", 3, 3),
                    "D": Argument(208, "channels in the first cells, a multiple of 4", 8, 4),
                    "num_classes": _CLASSES,
                }
            ),
            image_size=64,
            image_size_of_one_row=33,
        ),
        "unet": Description(
            "U-Net (B, C): image segmentation, 44 B + 21 layers at depth 5, long skips",
            MappingProxyType(
                {
                    "B": Argument(5, "convolutions at each level, down and up"),
                    "C": Argument(64, "channels of the first level, a multiple of 2", 2, 2),
                    "depth": Argument(5, "levels, each of half the image size"),
                    "in_channels": Argument(3, "channels of the image"),
                    "out_channels": Argument(1, "channels of the output"),
                }
            ),
            image_size=64,
            # Below two pixels at the bottom there is nothing to normalise.
            smallest_image=lambda values: 2 ** (values["depth"] + 1),
        ),
        "gpt": Description(
            "GPT: language model, two layers a block, and 3 more",
            MappingProxyType(
                {
                    "layers": Argument(12, "blocks of attention and feed-forward"),
                    "width": Argument(768, "size of a hidden state, a multiple of heads"),
                    "heads": Argument(12, "heads of each attention"),
                    "vocabulary": Argument(50257, "different tokens"),
                    "context": Argument(128, "most tokens in a row, and tokens of the sample"),
                    "tie": Argument(False, "whether the head's weights are the embedding's"),
                }
            ),
        ),
    }
)


def _check_argument(model: str, name: str, value: object, argument: Argument) -> None:
    """Refuse a value that the model cannot be built from.

    Raises:
        UsageError: the value has the wrong type or is out of range.
    """
    if isinstance(argument.default, bool):
        if isinstance(value, bool):
            return
        expected, fix = "True or False", str(argument.default)
    else:
        smallest, step = argument.smallest, argument.multiple_of
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and value >= smallest and value % step == 0:  # type: ignore[operator]
            return
        expected = f"an integer >= {smallest}" + (f", a multiple of {step}" if step > 1 else "")
        fix = str(argument.default)
        if is_number:
            fix = str(max(smallest, -(-value // step) * step))  # type: ignore[operator]
    raise UsageError(
        f"{model} cannot be built from this: {name}={value!r} (expected {expected}: "
        f"{argument.meaning}).\nFix: {name}={fix}."
    )


def check_arguments(model: str, values: Mapping[str, object]) -> None:
    """Refuse names that the model does not have, and values that it cannot be built from.

    Raises:
        UsageError: a name is not known, or a value has the wrong type or is out of range.
    """
    known = CATALOGUE[model].arguments
    for name, value in values.items():
        if name not in known:
            first, argument = next(iter(known.items()))
            raise UsageError(
                f"{model} has no such argument: {name}={value!r} (expected {', '.join(known)}).\n"
                f"Fix: {first}={argument.default}, or leave {name} out."
            )
        _check_argument(model, name, value, known[name])


def read_word(word: str) -> bool | int | float | str:
    """Read a word as what it looks like: yes or no, a finite number, or else a text.

    Example:
        >>> read_word("2"), read_word("0.5"), read_word("yes"), read_word("2024_01")
        (2, 0.5, True, '2024_01')
    """
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    # Python would also read underscores within numbers, and inf and nan.
    if re.fullmatch(r"\s*[+-]?[0-9]+\s*", word):
        return int(word)
    if re.fullmatch(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?\s*", word, re.IGNORECASE):
        number = float(word)
        return number if math.isfinite(number) else word
    return word
