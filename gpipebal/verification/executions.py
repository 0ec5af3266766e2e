"""The runs that are compared: the plain model over the pipeline's micro-batches, and the pipeline.

Each run has its own copy of the layers, so the caller's stay as they are, and each starts from the
same seed. The plain model draws its random numbers from the same source as the pipeline: generators
seeded by mini-batch, layer and micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.pipeline.gpipe import GPipe
from gpipebal.pipeline.layers.batchnorm import DeferredBatchNorm, Statistics, gathering
from gpipebal.pipeline.layers.chain import layers_of
from gpipebal.pipeline.layers.deferral import convert_deferred_batch_norm
from gpipebal.pipeline.layers.devices import move_layer
from gpipebal.pipeline.layers.recomputed import Recomputed
from gpipebal.pipeline.minibatch.inputs import Inputs, part_inputs
from gpipebal.pipeline.randomness.random_ops import prepare
from gpipebal.pipeline.randomness.randomness import OwnRandomness
from gpipebal.pipeline.randomness.seeds import draw_seed
from gpipebal.pipeline.values.microbatch import Call, flatten, unflatten
from gpipebal.pipeline.values.parting import gather, scatter_leaves
from gpipebal.pipeline.values.tensors import copy_of
from gpipebal.profiler.chain.clock import synchronize
from gpipebal.profiler.setting import threads_set
from gpipebal.skip.tracker import Skips, using
from gpipebal.verification.task import Outcome, Task, copied, label_of, layers_alone, outcome_of

__all__ = [
    "Watch",
    "name_of_run",
    "plain_copy",
    "run_pipe",
    "run_plain",
    "shapes_at_once",
]

#: Called with the index of every layer that has run, and its result.
Watch = Callable[[int, Any], None]


def plain_copy(module: nn.Module, pipe: GPipe) -> nn.Module:
    """Copy a module to one device, in the modes of the pipeline's layers.

    Batch normalisation that the pipeline defers is deferred in the copy too.

    Raises:
        ModelError: the module is not a chain, or cannot be copied.
        DeviceError: its parameters hold no values.
    """
    layers_of(module)
    plain: nn.Module = copied("the model", module, {})
    if pipe.devices:
        for name, layer in layers_of(plain).items():
            move_layer(name, layer, pipe.devices[0])
    modules = dict(plain.named_modules(remove_duplicate=False))
    memo: dict[nn.Module, nn.Module] = {}
    for name, theirs in layers_alone(pipe).named_modules(remove_duplicate=False):
        mine = modules.get(name)
        if mine is None:
            continue  # `verify` will say so, if it matters
        if isinstance(theirs, DeferredBatchNorm) and not isinstance(mine, DeferredBatchNorm):
            mine = convert_deferred_batch_norm(mine, memo)
            plain.set_submodule(name, mine)
        mine.training = theirs.training
    return plain


def run_plain(plain: nn.Module, pipe: GPipe, task: Task, watch: Watch | None = None) -> Outcome:
    """Run the plain model over the micro-batches that the pipeline would make of a task.

    Args:
        plain: A copy of the plain model, for this run alone.
        pipe: The pipeline.
        task: What it runs on.
        watch: Sees every layer's result.

    Raises:
        BaseException: whatever a layer raised.
    """
    task = task.fresh()
    leaves, inputs = _parted(pipe, task)
    torch.default_generator.manual_seed(task.seed)
    with _noting("in the plain model, which verify ran first"), threads_set(_threads_of(pipe)):
        if len(pipe):
            outputs = _run_micro_batches(plain, pipe.devices[0], leaves, inputs, watch)
            # What a layer copies to pinned memory may still be on its way, and is joined here.
            synchronize(pipe.devices[0])
            output = _moved(gather(outputs, pipe.out_dims), pipe.devices[-1])
            del outputs
        else:
            output = task.sample
        return outcome_of(output, task).with_state(plain, _input_leaves(leaves, inputs))


def shapes_at_once(plain: nn.Module, pipe: GPipe, task: Task) -> list[Any]:
    """Return the shape of each leaf of the output over the whole mini-batch in one piece.

    Args:
        plain: A copy of the plain model, for this run alone.
        pipe: The pipeline.
        task: What it runs on.

    Returns:
        One shape per leaf, None for a leaf that is not a tensor; an empty list if the model fails
        on so many rows.
    """
    task = task.fresh()
    leaves, inputs = part_inputs(task.sample, task.keywords, pipe.in_dims, pipe.keyword_dims, 1)
    try:
        with torch.no_grad():
            (output,) = _run_micro_batches(plain, pipe.devices[0], leaves, inputs, None)
    except Exception:  # it may need more memory than there is, or take only a fixed number of rows
        return []
    return [leaf.shape if isinstance(leaf, Tensor) else None for leaf in flatten(output)[0]]


def run_pipe(
    pipe: GPipe, task: Task, schedule: str | None, *, trains: bool, watch: Watch | None = None
) -> Outcome:
    """Run a copy of a pipeline.

    Args:
        pipe: The pipeline.
        task: What it runs on.
        schedule: Schedule of a `step`, which computes the loss; None: the pipeline is called.
        trains: Whether a step has a backward.
        watch: Sees every layer's result, in the thread of its worker.

    Raises:
        BaseException: whatever a layer raised.
    """
    task = task.fresh()
    memo: dict[int, Any] = {}
    for name, layer in pipe._modules.items():
        copied(f"layer {name!r} of the pipeline", layer, memo)
    mine: GPipe = copied("the pipeline", pipe, memo)
    mine._planned = None  # no training: nothing is to be changed about its calls
    leaves, inputs = _parted(mine, task)
    if watch is not None:
        for k, (name, layer) in enumerate(list(mine._modules.items())):
            # Runs are seen layer by layer, and so not recomputed.
            alone = layer.stands_for if isinstance(layer, Recomputed) else layer
            assert alone is not None
            mine._modules[name] = watched = _Watched(alone, k, watch)
            for partition in mine.partitions:  # a compat pipeline runs the modules there
                if name in partition._modules:
                    partition._modules[name] = watched
    torch.default_generator.manual_seed(task.seed)
    try:
        with _noting(f"in {name_of_run(schedule)}; the plain model ran through"):
            if schedule is None:
                outcome = outcome_of(mine(task.sample, **task.keywords), task)
            else:
                with nullcontext() if trains else torch.no_grad():
                    outcome = Outcome(None, [], [], _step(mine, task, schedule), trains)
        return outcome.with_state(layers_alone(mine), _input_leaves(leaves, inputs))
    finally:
        mine.close()


def name_of_run(schedule: str | None) -> str:
    """Return the words for a call of a pipeline, or for its step under a schedule."""
    return "pipe(sample)" if schedule is None else f"pipe.step(sample, schedule={schedule!r})"


def _step(pipe: GPipe, task: Task, schedule: str) -> Tensor:
    assert task.loss_fn is not None
    return pipe.step(
        task.sample,
        target=task.target,
        loss_fn=task.loss_fn,
        reduction=task.reduction,
        target_dims=task.target_dims,
        schedule=schedule,
        keywords=task.keywords,
    )


def _threads_of(pipe: GPipe) -> int | None:
    """Return the threads of a CPU partition, because kernels split their sums over threads."""
    on_cpu = bool(pipe.devices) and pipe.devices[0].type == "cpu"
    return pipe.threads_per_partition if on_cpu else None


@contextmanager
def _noting(where: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with suppress(Exception):  # the error's own class may refuse a note
            error.add_note(where)
        raise


def _parted(pipe: GPipe, task: Task) -> tuple[list[Any], Inputs]:
    return part_inputs(task.sample, task.keywords, pipe.in_dims, pipe.keyword_dims, pipe.chunks)


def _input_leaves(leaves: list[Any], inputs: Inputs) -> dict[str, Tensor]:
    """Name the leaves of the input that can get a gradient."""
    return {
        label_of("input", inputs.structure, k): leaf
        for k, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }


def _moved(value: Any, device: torch.device) -> Any:
    leaves, structure = flatten(value)
    return unflatten(
        [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
    )


def _run_micro_batches(
    plain: nn.Module,
    device: torch.device,
    leaves: list[Any],
    inputs: Inputs,
    watch: Watch | None,
) -> list[Any]:
    """Return the plain model's output for each micro-batch, in one graph with the inputs."""
    prepare()
    seed = draw_seed()
    statistics = Statistics()
    outputs = []
    with _in_places(plain, watch) as now, gathering(statistics):
        for i, part in enumerate(scatter_leaves(leaves, inputs.rows, inputs.dims)):
            # Clones, because torch refuses layers that write to a part of a split tensor.
            own = [copy_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in part]
            value = _moved(unflatten(own, inputs.structure), device)
            now.randomness = OwnRandomness(seed, i)
            now.keywords = value.keywords if isinstance(value, Call) else {}
            with now.randomness.watching(), using(Skips()):
                outputs.append(plain(value.input if isinstance(value, Call) else value))
    statistics.commit()
    return outputs


class _Now:
    """Values for the micro-batch that is running."""

    randomness: OwnRandomness
    keywords: Mapping[str, Any]


class _Watched(nn.Module):
    """A place in a chain, whose results are watched."""

    def __init__(self, layer: nn.Module, index: int, watch: Watch | None) -> None:
        super().__init__()
        self.layer = layer
        self.index = index
        self.watch = watch

    def forward(self, value: Any, **keywords: Any) -> Any:
        value = self.layer(value, **keywords)
        if self.watch is not None:
            self.watch(self.index, value)
        return value


class _Place(_Watched):
    """A place in the plain chain: says which layer runs, and gives keywords to the first."""

    def __init__(self, layer: nn.Module, index: int, watch: Watch | None, now: _Now) -> None:
        super().__init__(layer, index, watch)
        self.now = now

    def forward(self, value: Any, **keywords: Any) -> Any:
        self.now.randomness.enter_layer(self.index)
        if self.index == 0:
            keywords = {**self.now.keywords, **keywords}
        return super().forward(value, **keywords)


@contextmanager
def _in_places(plain: nn.Module, watch: Watch | None) -> Iterator[_Now]:
    """Put every layer of a chain into a place of its own, for this block."""
    layers = layers_of(plain)
    now = _Now()
    for k, (name, layer) in enumerate(layers.items()):
        plain._modules[name] = _Place(layer, k, watch, now)
    try:
        yield now
    finally:
        plain._modules.update(layers)
