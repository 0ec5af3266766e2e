"""torch.distributed.pipelining's own schedules, made without processes, as oracles."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import pytest


@cache
def _stage() -> Any:
    stages = pytest.importorskip("torch.distributed.pipelining.stage")
    return mock.create_autospec(stages.PipelineStage, instance=True)


def torch_schedule(class_name: str, n_devices: int, chunks: int, each: int = 1) -> Any:
    """Make one of torch's schedules, on devices with some stages each, without process group.

    torch wants stages; before the first step it only asks them for their numbers.
    """
    module: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
    stage = _stage()
    stage.group_rank, stage.group_size, stage.submod = 0, n_devices, None
    stage.num_stages = n_devices * each
    kind: Any = getattr(module, class_name)
    single = issubclass(kind, module.PipelineScheduleSingle)
    try:
        return kind(stage if single else [stage] * each, chunks)
    except (AttributeError, TypeError) as error:
        pytest.skip(f"this torch makes its schedules differently: {error}")


def torch_rows(class_name: str, n_devices: int, chunks: int, each: int = 1) -> list[list[str]]:
    """Write what each device computes under one of torch's schedules."""
    made = torch_schedule(class_name, n_devices, chunks, each)
    order = getattr(made, "pipeline_order", None) or made._get_pipeline_order()
    texts = [[str(action) for action in order[rank] if action] for rank in range(n_devices)]
    return [[text for text in row if not text.endswith("REDUCE_GRAD")] for row in texts]
