"""Memory of the layers: the storages that each saves and outputs, and its peaks.

A layer runs alone under a ledger of live storages: without a graph, then with one and its backward,
first where no gradients exist and then where they do. Its saved set is what hooks on saved tensors
see, what custom autograd functions keep as attributes of their context, and what it made and keeps
alive in any other way, without parameters and buffers. What it keeps as an attribute, or in a
buffer's place, exists once, not once for every micro-batch. From layer to layer the numbers of
storages go along with the values, so that what two layers share has one number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gpipebal.pipeline.values.tensors import bytes_of, plain_parts, storage_key, storage_keys
from gpipebal.profiler.chain.chain import Chain
from gpipebal.profiler.chain.failures import memory_for
from gpipebal.profiler.chain.gradients import needs_gradient
from gpipebal.profiler.chain.numbers import Arrived, Numbers, distinct_numbers
from gpipebal.profiler.chain.value import Value, roots_of
from gpipebal.profiler.memory.backward_peaks import BackwardPeaks, find_peaks
from gpipebal.profiler.memory.buffers import copies_of_large, kept_buffers
from gpipebal.profiler.memory.device_ledger import DeviceLedger
from gpipebal.profiler.memory.layer_memory import LayerMemory
from gpipebal.profiler.memory.layer_run import (
    BackwardRun,
    ForwardRun,
    backward_in,
    forward_and_backward,
    forward_without_graph,
    own_tensors,
)
from gpipebal.profiler.memory.sparse_gradients import GradientKind
from gpipebal.profiler.replicas.harmless import tensors_reached

__all__ = ["measure_layer_memory"]


def measure_layer_memory(
    chain: Chain,
    k: int,
    arrived: Arrived,
    numbers: Numbers,
    constants: Sequence[Tensor] = (),
    at_other_rows: BackwardPeaks | None = None,
) -> tuple[LayerMemory, Arrived]:
    """Run one layer under a ledger.

    Args:
        chain: A chain with the layer.
        k: Index of the layer in it.
        arrived: What goes into the layer.
        numbers: Numbers of all storages so far; new ones are added.
        constants: Tensors that exist all the time, besides its parameters and buffers.
        at_other_rows: Its backward with another number of rows; None: not known.

    Returns:
        Its memory, and its output.
    """
    layer, value = chain.layers[k], arrived.value
    if chain.device.type == "cuda":
        _warm_up(chain, k, value)
    own = own_tensors(layer)
    keys_of_own = storage_keys(own)
    there = (*own, *tensors_reached(layer), *constants)
    constants = [part for one in there for part in plain_parts(one)]
    ledger = DeviceLedger(chain.device)
    ledger.hold([*chain.inputs(k, value), *constants], 0)
    for parameter in layer.parameters():
        parameter.grad = None
    with memory_for("copies of large buffers"):
        large = copies_of_large(layer)
    without_graph, copies = forward_without_graph(chain, k, value, ledger)
    # Each tensor is copied by itself, of several in one storage too.
    kept = Counter[int]()
    for buffer in {id(each): each for each in kept_buffers(layer, large)}.values():
        kept[storage_key(buffer)] += buffer.nbytes
    del large

    forward, held = forward_and_backward(chain, k, value, ledger, constants)
    of_parameters = tuple(
        # A copy of what torch.jit made has parameters that are no leaves: none has a gradient.
        GradientKind.of(one.grad if one.is_leaf else None)
        for one in layer.parameters()
    )
    columns, hands_on = _described(chain, k, arrived, forward, held, keys_of_own, numbers)
    saved_buffers = sum(kept[key] for key in forward.constant & kept.keys())
    # The keys of storages are used up: they may be given to new ones from now on.
    del forward
    hands_on.value = hands_on.value.without_graph()
    memory = LayerMemory(
        **columns,
        no_grad_forward_peak_bytes=max(without_graph),
        no_grad_forward_moments=tuple(without_graph),
        written_input_bytes=copies,
        peaks=find_peaks(
            partial(backward_in, chain, k, value, ledger),
            held,
            layer.parameters(),
            finds_inside=not chain.only_inputs,
            at_other_rows=at_other_rows,
        ),
        kept_buffer_bytes=sum(kept.values()),
        saved_buffer_bytes=saved_buffers,
        parameter_gradients=of_parameters,
    )
    return memory, hands_on


def _described(
    chain: Chain,
    k: int,
    arrived: Arrived,
    forward: ForwardRun,
    backward: BackwardRun,
    own: Sequence[int],
    numbers: Numbers,
) -> tuple[dict[str, Any], Arrived]:
    """Describe what a layer's first run with a graph tells, and number its storages.

    Args:
        chain: A chain with the layer.
        k: Index of the layer in it.
        arrived: What went into the layer.
        forward: The forward of that run.
        backward: Its backward.
        own: Keys of the storages that the layer had before.
        numbers: Numbers of all storages so far; new ones are added.

    Returns:
        Fields of its `LayerMemory`, and its output.
    """
    known, n_before = arrived.known(chain.pops[k]), len(numbers.bytes)
    hands_on = Arrived.of(forward.called.passed, known, numbers, arrived.skips)
    of_own = [known.get(key, -1) for key in own]
    for key, n_bytes in forward.saved.items():
        if key not in known:
            known[key] = numbers.new(n_bytes)
    given = arrived.of_inputs(chain.pops[k])
    outputs = forward.called.outputs
    gradients = filter(needs_gradient, forward.called.passed.leaves)
    columns = {
        "outputs": hands_on.storages,
        "saved": distinct_numbers(known[key] for key in forward.saved),
        "handed_through": distinct_numbers(known[key] for key, _ in backward.through.values()),
        "kept_outputs": distinct_numbers(number for number in of_own if number >= n_before),
        "written": distinct_numbers(given[place] for place in sorted(chain.written[k])),
        "output_bytes": sum(numbers.bytes[number] for number in hands_on.storages),
        "output_gradient_bytes": sum(map(bytes_of, gradients)),
        "forward_peak_bytes": max(forward.moments),
        "forward_moments": tuple(forward.moments),
        "kept_bytes": forward.kept_bytes,
        "n_inputs": len(given),
        "n_outputs": len(outputs),
        "popped": tuple(len(arrived.skips[key]) for key in chain.pops[k]),
        "stashed": tuple(len(hands_on.skips[key]) for key in chain.stashes[k]),
    }
    return columns, hands_on


def _warm_up(chain: Chain, k: int, value: Value) -> None:
    """Run a layer once, so that libraries have the memory that they keep from their first call on.

    That memory belongs to the device, and to no layer: cuBLAS has a workspace of some MiB for each
    stream. Memory that is needed in every call is still measured.
    """
    inputs, given = chain.prepare(k, value, wants=True)
    passed = chain.call(k, given, value)
    roots = roots_of(chain.outputs(k, passed), chain.gradients(k, passed))
    chain.run_backward(roots, inputs, chain.names[k])
