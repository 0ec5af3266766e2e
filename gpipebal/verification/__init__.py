"""Verify that a pipeline does what the plain model does.

Read in this order: `task` (what both models are given, and what a run leaves), `executions` (the
plain model and the pipeline, each as a copy), `compare` (the first difference), `tolerance`
(what counts as a difference), `search` (which layer made it), `report` (what was compared),
`checks` (`verify` itself).
"""

from gpipebal.verification.checks import verify
from gpipebal.verification.report import Agreement, VerifyReport

__all__ = ["Agreement", "VerifyReport", "verify"]
