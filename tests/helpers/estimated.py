"""The estimate of a model, in one word."""

from __future__ import annotations

from typing import Any

from torch import nn

from gpipebal import Profile, profile_model

__all__ = ["estimate_profile"]


def estimate_profile(model: nn.Module, sample: Any, **settings: Any) -> Profile:
    """Profile a model from shapes alone."""
    return profile_model(model, sample, method="estimate", **settings)
