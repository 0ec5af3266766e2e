"""Other tools' interfaces on gpipebal's engine: change one import, and keep the rest.

`torchgpipe` has the names, argument orders, error types and state-dict keys of that package;
docs/migration.md says how to move, and what differs on purpose.
"""

from __future__ import annotations

from gpipebal.compat import torchgpipe

__all__ = ["torchgpipe"]
