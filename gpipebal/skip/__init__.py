"""Skip connections of a chain: values that go past layers, straight to where they are used.

A layer `stash`es a value and a later one `pop`s it, both made `skippable`; see
`skippable` for an example. They work in any `nn.Sequential`, in a pipeline and without one.
"""

from __future__ import annotations

from gpipebal.skip.driver import pop, stash
from gpipebal.skip.layout import verify_skippables
from gpipebal.skip.namespace import Namespace
from gpipebal.skip.skippable import skippable

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
