"""Fingerprints of layers; they live with the profile, which must not need torch."""

from __future__ import annotations

from gpipebal.profile.fingerprint import fingerprint

__all__ = ["fingerprint"]
