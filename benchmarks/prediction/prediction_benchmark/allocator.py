"""On CUDA, what the allocator says of a step, next to what was predicted and what was counted.

A profile on CUDA has in its peaks what libraries take for the time of an operation, such as the
workspaces of convolutions. The count of live tensors does not see that, the allocator does; but the
allocator cannot tell partitions on one device apart. So here the whole model is one partition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.pipeline import GPipe, measure_memory
from gpipebal.profile import Profile
from prediction_benchmark.measure import predict
from prediction_benchmark.models import Model
from prediction_benchmark.settings import CHUNKS, SETTINGS, Setting
from prediction_benchmark.steps import run_step


def measure_allocator(model: Model) -> list[dict[str, Any]]:
    """Run a model as one partition on the first CUDA device, in every setting.

    Returns:
        For each setting the bytes that were predicted, the allocator's peak over a step, and the
        peak of the counted tensors. What the libraries keep between steps is in none of them.
        ``keeps_output`` says that the caller kept what the pipeline returned through the backward,
        as a prediction counts it.
    """
    device = torch.device("cuda", 0)
    layers = model.make().to(device)
    inputs, target = (tensor.to(device) for tensor in model.make_batch())
    profiles = {chunks: _profile(model, layers, (inputs, target), chunks) for chunks in CHUNKS}
    found = []
    for setting in SETTINGS:
        plan = predict(profiles[setting.chunks], [len(layers)], setting)
        found.append(
            {
                "model": model.name,
                "way": setting.way,
                "chunks": setting.chunks,
                "checkpoint": setting.checkpoint,
                "keeps_output": True,
                "predicted": plan.partitions[0].memory.total,
                **_peaks(model, layers, inputs, target, setting),
            }
        )
    return found


def _profile(
    model: Model, layers: nn.Sequential, batch: tuple[Tensor, Tensor], chunks: int
) -> Profile:
    inputs, target = batch
    return gb.profile_model(
        layers,
        inputs,
        device=inputs.device,
        chunks=chunks,
        rows=(),
        loss_fn=model.loss_fn,
        target=target,
        optimizer=model.optimizer,
        timeout=0.0,
        progress=False,
    )


def _peaks(
    model: Model, layers: nn.Sequential, inputs: Tensor, target: Tensor, setting: Setting
) -> dict[str, int]:
    device = inputs.device
    pipe = GPipe(
        layers,
        [len(layers)],
        devices=[device],
        chunks=setting.chunks,
        checkpoint=setting.checkpoint,
    )
    optimizer = model.optimizer(list(pipe.parameters()))

    def step() -> None:
        run_step(pipe, model, optimizer, (inputs, target), setting)

    try:
        for _ in range(2):
            step()  # libraries take what they keep, and the optimizer has its state
        optimizer.zero_grad()
        torch.cuda.synchronize(device)
        states = [value for state in optimizer.state.values() for value in state.values()]
        ours = [*pipe.parameters(), *pipe.buffers(), *states, inputs, target]
        kept = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in ours
            if isinstance(tensor, Tensor) and tensor.is_cuda
        }
        others = torch.cuda.memory_allocated(device) - sum(kept.values())
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        allocated = torch.cuda.max_memory_allocated(device) - others
        optimizer.zero_grad()
        with measure_memory(pipe, optimizer) as meter:
            meter.ledger.hold([target], 0)
            step()
    finally:
        pipe.close()
        optimizer.zero_grad()
    return {"allocated": allocated, "counted": meter.peak_bytes[0]}
