"""Which streams wait for what when a CUDA lane receives tensors, seen without a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipebal.pipeline.values.lane import CudaLane, record_stream

HOME = torch.device("meta")


class Stream:
    """A stream that keeps what it waits for; an event of it is its own name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def record_event(self) -> object:
        return self


class Far(Tensor):
    """A tensor that says of itself that it is on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl


class Pair(Tensor):
    """A tensor that is made of two others, and knows no operation."""

    @staticmethod
    def __new__(cls, one: Tensor, other: Tensor) -> Pair:
        """Make it without memory of its own."""
        return Tensor._make_wrapper_subclass(cls, one.shape)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, one: Tensor, other: Tensor) -> None:
        self.one, self.other = one, other

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name the tensors that it is made of."""
        return ["one", "other"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse everything."""
        raise NotImplementedError(func)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[list[Stream]]:
    """Return, for each copy, the streams that are current: the innermost last."""
    current: list[Stream] = []
    found: list[list[Stream]] = []

    @contextmanager
    def stream(of: Stream) -> Iterator[None]:
        current.append(of)
        yield
        current.pop()

    move = Tensor.to

    def to(tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        found.append(list(current))
        assert non_blocking == tensor.is_cuda
        return move(tensor, device)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    return found


def test_a_copy_from_the_host_waits_for_nothing(entered: list[list[Stream]]) -> None:
    """It blocks the host, so no stream that it stands on may wait for a device's work."""
    lane = CudaLane(HOME)
    at_home = torch.ones(2, device=HOME)
    received = lane.receive([torch.ones(2), 3, at_home], ["ready"])
    assert [getattr(leaf, "device", leaf) for leaf in received] == [HOME, 3, HOME]
    assert entered == [[lane.upload]]
    assert (lane.upload.waited, lane.copy.waited) == ([], [])
    assert lane.compute.waited == ["ready", lane.upload]


def test_tensors_at_home_are_waited_for_where_they_are_used(entered: list[list[Stream]]) -> None:
    """Nothing is copied, and no copy stream is involved."""
    lane = CudaLane(HOME)
    lane.receive([torch.ones(2, device=HOME)], ["ready"])
    assert entered == []
    assert (lane.upload.waited, lane.copy.waited, lane.compute.waited) == ([], [], ["ready"])


def test_a_copy_between_devices_runs_on_streams_of_its_own(entered: list[list[Stream]]) -> None:
    """On the source's side too: its default stream is the caller's."""
    lane = CudaLane(HOME)
    for _ in range(2):
        lane.receive([torch.ones(2).as_subclass(Far), torch.ones(2)], ["ready"])
    (source,) = lane._sources.values()
    assert source.device == torch.device("cpu")
    # A tensor with gaps is put into one piece on the source's stream, before any wait of torch's.
    assert source.waited == ["ready"] * 2
    assert entered == [[source, lane.copy], [lane.upload]] * 2
    assert (lane.copy.waited, lane.upload.waited) == (["ready"] * 2, [])
    assert lane.compute.waited == [lane.copy, lane.upload] * 2


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested")
def test_memory_is_kept_of_all_that_a_tensor_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps that of dense tensors only, so a sparse one is taken apart."""
    recorded: list[Tensor] = []
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor))
    stream = Stream(HOME)
    dense = torch.ones(3)
    record_stream(dense, stream)  # type: ignore[arg-type]
    assert recorded == [dense]
    for layout, n_parts in ((torch.sparse_coo, 2), (torch.sparse_csr, 3), (torch.sparse_csc, 3)):
        recorded.clear()
        record_stream(torch.eye(3).to_sparse(layout=layout), stream)  # type: ignore[arg-type]
        assert [part.layout for part in recorded] == [torch.strided] * n_parts
    recorded.clear()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    record_stream(nested, stream)  # type: ignore[arg-type]
    assert [part.numel() for part in recorded] == [5]


def test_memory_is_kept_of_what_a_class_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class need not know how, and what it has on the host is kept anyway."""
    recorded: list[Tensor] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor))
    far, near = torch.ones(2).as_subclass(Far), torch.ones(2)
    record_stream(Pair(far, near), Stream(HOME))  # type: ignore[arg-type]
    assert len(recorded) == 1 and recorded[0] is far


def test_what_comes_to_the_host_in_parts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a sparse tensor fills the pinned memory of its parts, as of a dense one its own."""

    class Event(Stream):
        def synchronize(self) -> None:
            self.waited.append("host")

    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    sparse = torch.eye(3).to_sparse()
    pinned: set[int] = set()

    def is_pinned(tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.data_ptr() in pinned

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(Tensor, "is_pinned", is_pinned)
    lane = CudaLane(HOME)
    for tensor, part in ((sparse, sparse._values()), (jagged, jagged.values())):
        for where, expected in ((set[int](), []), ({part.data_ptr()}, ["host"])):
            pinned.clear()
            pinned.update(where)
            ready = Event(HOME)
            lane.give_to_caller([tensor], [ready])
            assert ready.waited == expected


def test_a_caller_waits_for_a_tensor_on_the_device_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A parameter of another partition's device is read on that device's stream."""
    streams = {name: Stream(torch.device(name)) for name in ("meta", "cpu")}
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device.type])
    recorded: list[object] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: recorded.append(stream))
    CudaLane(HOME).give_to_caller([torch.ones(2).as_subclass(Far)], ["ready"])
    assert [stream.waited for stream in streams.values()] == [["ready"], ["ready"]]
    assert recorded == [streams["cpu"]]


def test_a_caller_waits_where_its_input_was_copied_from(
    entered: list[list[Stream]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write to an input on a device that no partition has, once the pipeline is through."""
    streams = {name: Stream(torch.device(name)) for name in ("meta", "cpu")}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device.type])
    lane = CudaLane(HOME)
    lane.receive([torch.ones(2).as_subclass(Far)], ["ready"])
    lane.give_to_caller((), ["end"])
    # What comes from another partition is none of the caller's.
    assert [stream.waited for stream in streams.values()] == [["end"], []]
    lane.receive([torch.ones(2).as_subclass(Far)], ["ready"], of_caller=True)
    lane.give_to_caller((), ["later"])
    assert [stream.waited for stream in streams.values()] == [["end", "later"], ["later"]]
