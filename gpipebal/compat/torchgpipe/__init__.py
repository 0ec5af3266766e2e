"""torchgpipe's interface: ``from gpipebal.compat.torchgpipe import GPipe``.

Everything that torchgpipe 0.0.7 documents is here under its own name: `GPipe`,
`is_checkpointing`, `is_recomputing`, and the modules `balance`, `skip` and `batchnorm`. State
dictionaries have its keys, ``partitions.<j>.<name>``. The few deliberate differences are listed in
docs/migration.md.
"""

from __future__ import annotations

from gpipebal.compat.torchgpipe import balance as balance
from gpipebal.compat.torchgpipe import batchnorm as batchnorm
from gpipebal.compat.torchgpipe import skip as skip
from gpipebal.compat.torchgpipe.gpipe import GPipe
from gpipebal.pipeline import is_checkpointing, is_recomputing

# A star import imports the same names as torchgpipe's; the modules are attributes.
__all__ = ["GPipe", "is_checkpointing", "is_recomputing"]

#: The version of torchgpipe whose interface this is.
__version__ = "0.0.7"
