"""State dictionaries of torchgpipe: in their keys a layer's partition comes before its name."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["strip_partitions", "with_stripped_versions"]

_PARTITION = re.compile(r"^partitions\.\d+\.")


def _stripped(name: str, layers: Collection[str]) -> str:
    """Return the layers' name for torchgpipe's `name`; any other name stays as it is."""
    below = _PARTITION.sub("", name, count=1)
    return below if below.partition(".")[0] in layers else name


def strip_partitions(
    state_dict: dict[str, Any], prefix: str, layers: Collection[str], errors: list[str]
) -> dict[str, str]:
    """Give torchgpipe's keys in a state dictionary the names of the layers.

    Where a layer is called ``partitions`` itself, a dictionary is torchgpipe's if all of its keys
    look like it.

    Args:
        state_dict: The dictionary, which is changed.
        prefix: Prefix of all keys of the pipeline.
        layers: Names of the layers.
        errors: Receives what cannot be loaded.

    Returns:
        The former key of each key that was renamed, by its present name.
    """
    own = [key for key in state_dict if key.startswith(prefix)]
    old = [key for key in own if _stripped(key[len(prefix) :], layers) != key[len(prefix) :]]
    if "partitions" in layers and len(old) < len(own):
        return {}
    before = {}
    for key in old:
        name = prefix + _stripped(key[len(prefix) :], layers)
        value = state_dict.pop(key)
        if name in state_dict:
            errors.append(
                f"two keys are for {name!r}, one of them {key!r}: the layers of each partition "
                "seem to be numbered from 0, as torch.distributed.pipeline.sync did; "
                "docs/migration.md says how to load those."
            )
        state_dict[name] = value
        before[name] = key
    return before


def with_stripped_versions(
    state_dict: Mapping[str, Any], layers: Collection[str]
) -> Mapping[str, Any]:
    """Return a state dictionary that has its versions under the names of the layers."""
    if not isinstance(state_dict, Mapping):
        return state_dict  # torch says what is wrong with it
    state = OrderedDict(state_dict)
    versions = getattr(state_dict, "_metadata", None)
    if versions is not None and "partitions" not in layers:
        renamed = {_stripped(name, layers): version for name, version in versions.items()}
        state._metadata = renamed  # type: ignore[attr-defined]
    return state
