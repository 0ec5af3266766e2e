"""Known models as flat chains, each with data to train it on.

`CATALOGUE` describes the models in words, without loading torch; the command line builds them from
`MODELS`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gpipebal.models.catalogue import CATALOGUE

if TYPE_CHECKING:
    from gpipebal.models.amoebanet import amoebanetd
    from gpipebal.models.entries import MODELS, ModelEntry
    from gpipebal.models.gpt import gpt
    from gpipebal.models.resnet import resnet, resnet101
    from gpipebal.models.unet import unet

__all__ = [
    "CATALOGUE",
    "MODELS",
    "ModelEntry",
    "amoebanetd",
    "gpt",
    "resnet",
    "resnet101",
    "unet",
]

_HOMES = {
    "MODELS": "entries",
    "ModelEntry": "entries",
    "amoebanetd": "amoebanet",
    "gpt": "gpt",
    "resnet": "resnet",
    "resnet101": "resnet",
    "unet": "unet",
}


class _Package(ModuleType):
    """This package: its modules do not hide the functions of the same names.

    When Python has loaded a file it puts the module into the package, under the file's name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gpipebal.models' has no attribute {name!r}")
    value = getattr(import_module(f"gpipebal.models.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
