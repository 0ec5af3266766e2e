"""torchgpipe's interface: the module, its names, and its state dictionaries, both ways."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_chains import chain, inputs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gpipebal as gb
from gpipebal.compat.torchgpipe import GPipe
from gpipebal.errors import PipelineError

# --- The module and its names


def test_names_are_those_of_partitions() -> None:
    """Modules, parameters and state dictionary are named by partition, in torchgpipe's order."""
    pipe = GPipe(chain(), [1, 2])
    names = [name for name, _ in pipe.named_modules()]
    assert names == ["", "partitions"] + [
        f"partitions.{name}" for name in ("0", "0.first", "1", "1.norm", "1.last")
    ]
    keys = [
        "partitions.0.first.weight",
        "partitions.0.first.bias",
        "partitions.1.norm.weight",
        "partitions.1.norm.bias",
        "partitions.1.norm.running_mean",
        "partitions.1.norm.running_var",
        "partitions.1.norm.num_batches_tracked",
        "partitions.1.last.weight",
        "partitions.1.last.bias",
    ]
    assert list(pipe.state_dict()) == keys
    named = {**dict(pipe.named_parameters()), **dict(pipe.named_buffers())}
    assert named.keys() == set(keys)
    assert [name for name, _ in pipe.named_children()] == ["partitions"]
    assert pipe.get_submodule("partitions.1.norm") is pipe[1]
    assert len(pipe) == 3 and pipe[-1] is pipe[2] and [pipe[0], pipe[1], pipe[2]] == list(pipe)
    assert isinstance(pipe.partitions, nn.ModuleList)
    assert all(isinstance(partition, nn.Sequential) for partition in pipe.partitions)


def test_a_pipeline_inside_a_module_keeps_its_names() -> None:
    """As a part of a larger module the keys get its prefix, and load again."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2).double()
            self.pipe = GPipe(chain(), [2, 1])

    outer, other = Outer(), Outer()
    keys = list(outer.state_dict())
    assert keys[0] == "head.weight" and keys[2] == "pipe.partitions.0.first.weight"
    assert [name for name, _ in outer.named_parameters()][2] == "pipe.partitions.0.first.weight"
    assert str(other.load_state_dict(outer.state_dict())) == "<All keys matched successfully>"
    torch.testing.assert_close(other.state_dict(), outer.state_dict())


def test_modules_that_stand_twice_are_named_once_or_twice() -> None:
    """`named_modules` leaves repetitions out, or gives them, as it is asked to."""
    norm = nn.BatchNorm1d(3)
    pipe = GPipe(nn.Sequential(norm, nn.ReLU(), norm), [1, 2])
    outer = nn.ModuleList([pipe, pipe])
    once = ["", "0", "0.partitions"]
    once += [f"0.partitions.{name}" for name in ("0", "0.0", "1", "1.1")]
    assert [name for name, _ in outer.named_modules()] == once
    every = [name for name, _ in outer.named_modules(remove_duplicate=False)]
    inner = [*once[1:], "0.partitions.1.2"]
    assert every == ["", *inner, *[f"1{name[1:]}" for name in inner]]


def test_casting_and_modes_reach_every_layer() -> None:
    """Casts, train and eval go through the partitions to the layers."""
    pipe = GPipe(chain(), [1, 2])
    pipe.float().eval()
    assert all(p.dtype == torch.float for p in pipe.parameters())
    assert not any(module.training for module in pipe.modules())


def test_layers_are_no_attributes() -> None:
    """A layer's name is not an attribute of the pipeline, neither to read nor to set."""
    pipe = GPipe(chain(), [1, 2])
    with pytest.raises(AttributeError, match=r"pipe.partitions\[j\]"):
        _ = pipe.first
    with pytest.raises(AttributeError, match=r"pipe.partitions\[j\]"):
        pipe.first = nn.Linear(3, 4)
    assert not hasattr(pipe, "nothing")


def test_a_layer_replaced_in_its_partition_runs() -> None:
    """The partitions are the module's, so what is put there is run, saved and trained."""
    pipe = GPipe(chain(), [1, 2])
    pipe(inputs())
    pipe.partitions[1].last = nn.Linear(4, 5).double()
    pipe(inputs()).sum().backward()
    assert pipe(inputs()).shape == (6, 5) and pipe[2].weight.grad is not None
    assert pipe.state_dict()["partitions.1.last.weight"].shape == (5, 4)
    pipe.partitions[0][0] = first = nn.Linear(3, 4).double()
    pipe.load_state_dict({**pipe.state_dict(), "partitions.0.first.bias": torch.ones(4)})
    assert pipe[0] is first and first.bias.tolist() == [1.0] * 4
    pipe.partitions[0][0] = first = nn.Linear(3, 4).double()
    saved = pipe.state_dict()["partitions.0.first.bias"]
    assert saved.data_ptr() == first.bias.data_ptr()
    pipe.partitions[0][0] = first = nn.Linear(3, 4).double()
    pipe.load_state_dict({"partitions.0.first.bias": torch.ones(4)}, strict=False)
    assert first.bias.tolist() == [1.0] * 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_run_on_their_own(copied: Callable[[GPipe], GPipe]) -> None:
    """A copy made after a forward runs, and shares nothing with the original."""
    pipe = GPipe(chain(), [1, 2])
    pipe(inputs())
    twin = copied(pipe)
    assert twin.partitions[0][0] is twin[0] is not pipe[0]
    twin(inputs()).sum().backward()
    assert twin[0].weight.grad is not None and pipe[0].weight.grad is None


def test_hooks_on_partitions_see_what_goes_in_and_out() -> None:
    """Forward hooks on a partition run once per micro-batch, until they are removed."""
    pipe = GPipe(chain().eval(), [1, 2], chunks=2)
    partition = pipe.partitions[1]
    seen: list[tuple[Any, ...]] = []
    before = partition.register_forward_pre_hook(lambda *found: seen.append(found))
    after = partition.register_forward_hook(lambda *found: seen.append(found))
    with torch.no_grad():
        output = pipe(x := inputs(4))
    hidden = pipe[0](x)
    for i, (rows, result) in enumerate(zip(hidden.split(2), output.split(2), strict=True)):
        module, (value,) = seen[2 * i]
        assert module is partition
        torch.testing.assert_close(value, rows)
        module, (value,), out = seen[2 * i + 1]
        assert module is partition and out.grad_fn is None
        torch.testing.assert_close(value, rows)
        torch.testing.assert_close(out, result)
    before.remove()
    after.remove()
    pipe(x)
    assert len(seen) == 4
    doubled = partition.register_forward_hook(lambda _, __, out: 2 * out)
    torch.testing.assert_close(pipe(x), 2 * output)
    doubled.remove()
    assert not pipe[1]._forward_pre_hooks and not pipe[2]._forward_hooks
    with pytest.raises(TypeError, match="cannot have backward hooks"):
        partition.register_full_backward_hook(lambda *_: None)


# --- State dictionaries, both ways


#: A balance of four layers: the differences of where it is cut.
BALANCES = st.sets(st.integers(1, 3)).map(
    lambda cuts: [end - start for start, end in itertools.pairwise([0, *sorted(cuts), 4])]
)


@given(first=BALANCES, second=BALANCES)
def test_state_dicts_load_across_balances(first: list[int], second: list[int]) -> None:
    """What one balance saved, every other balance loads; below the partition keys are plain."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    state = GPipe(copy.deepcopy(model), first).state_dict()
    below = [re.sub(r"^partitions\.\d+\.", "", key) for key in state]
    assert below == list(model.state_dict())
    other = GPipe(nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]), second)
    other.load_state_dict(state)
    loaded = list(other.state_dict().values())
    torch.testing.assert_close(loaded, list(model.state_dict().values()))


def test_files_go_across(tmp_path: Path) -> None:
    """A checkpoint file of the compat pipeline reaches plain model and gpipebal, and back."""
    pipe = GPipe(chain(), [1, 2])
    torch.save(pipe.state_dict(), tmp_path / "old.pt")
    again = GPipe(model := chain(), [2, 1])
    again.load_state_dict(torch.load(tmp_path / "old.pt"))
    # The pipeline runs the model's own layers: they have been loaded with it.
    torch.save(model.state_dict(), tmp_path / "new.pt")
    new = gb.GPipe(chain(), [1, 2])
    new.load_state_dict(torch.load(tmp_path / "new.pt"))
    back = GPipe(chain(), [1, 2])
    back.load_state_dict(new.state_dict())
    torch.testing.assert_close(back.state_dict(), pipe.state_dict())
    torch.testing.assert_close(back.eval()(x := inputs()), pipe.eval()(x))


class Turned(nn.Linear):
    """A layer whose checkpoints of version 1 had the weight transposed."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, about: Any, *args: Any) -> None:
        if about.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].T
        super()._load_from_state_dict(state_dict, prefix, about, *args)


def test_layers_find_the_version_of_their_state_wherever_the_pipeline_stands() -> None:
    """Alone, inside of another module, and where the state goes to the plain model."""
    model = nn.Sequential(Turned(3, 3), nn.ReLU(), Turned(3, 3))
    pipe = GPipe(model, [2, 1])
    outer = nn.ModuleDict({"pipe": pipe})
    expected = [parameter.clone() for parameter in model.parameters()]
    pipe.load_state_dict(copy.deepcopy(pipe.state_dict()))
    outer.load_state_dict(copy.deepcopy(outer.state_dict()))
    gb.GPipe(model, [1, 2]).load_state_dict(model.state_dict())
    assert list(outer.state_dict()) == [f"pipe.{key}" for key in pipe.state_dict()]
    for found, before in zip(model.parameters(), expected, strict=True):
        assert torch.equal(found, before)


def test_a_replaced_layer_is_seen_at_once() -> None:
    """By index, by iteration and by `verify`, without a forward in between."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), [2, 1])
    layer = pipe.partitions[1][0] = nn.Linear(3, 5)
    assert pipe[2] is layer and list(pipe)[2] is layer
    model = nn.Sequential(*pipe)
    later = pipe.partitions[1][0] = nn.Linear(3, 4)
    model[2] = later
    assert gb.verify(model, pipe, torch.ones(2, 3)).outputs.count == 1


def test_loading_leaves_the_dictionary_alone() -> None:
    """The dictionary that is loaded keeps its keys and its versions."""
    pipe = GPipe(chain(), [1, 2])
    state = pipe.state_dict()
    keys, versions = list(state), copy.deepcopy(state._metadata)  # type: ignore[attr-defined]
    GPipe(chain(), [2, 1]).load_state_dict(state)
    assert list(state) == keys and state._metadata == versions  # type: ignore[attr-defined]


def test_layers_get_the_versions_of_their_files() -> None:
    """A layer that upgrades old files sees the version that its file was written with."""

    class Old(nn.Linear):
        _version = 3
        seen: Any = None

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            Old.seen = metadata.get("version")
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    pipe = GPipe(nn.Sequential(nn.ReLU(), Old(2, 2)), [1, 1])
    assert pipe.state_dict()._metadata["partitions.1.1"] == {"version": 3}  # type: ignore[attr-defined]
    pipe.load_state_dict(pipe.state_dict())
    assert Old.seen == 3


def test_keys_that_do_not_fit_are_named() -> None:
    """Missing and unexpected keys are torchgpipe's, and fail a strict load."""
    pipe = GPipe(chain(), [1, 2])
    state = pipe.state_dict()
    del state["partitions.1.last.bias"]
    state["partitions.1.gone.bias"] = torch.zeros(2)
    found = pipe.load_state_dict(state, strict=False)
    assert found.missing_keys == ["partitions.1.last.bias"]
    assert found.unexpected_keys == ["partitions.1.gone.bias"]
    with pytest.raises(RuntimeError, match=r"partitions\.1\.gone\.bias"):
        pipe.load_state_dict(state)


def test_layers_numbered_anew_are_not_mixed_up() -> None:
    """Keys that number the layers of each partition from 0 are refused, not loaded twice."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1])
    state = {
        f"partitions.{j}.0.{name}": torch.zeros(2, 2) if name == "weight" else torch.zeros(2)
        for j in (0, 1)
        for name in ("weight", "bias")
    }
    with pytest.raises(RuntimeError, match=r"two keys are for '0\.weight'"):
        pipe.load_state_dict(state, strict=False)


@pytest.mark.parametrize("change", ["replace", "delete", "rename"])
def test_other_layers_in_a_partition_are_refused(change: str) -> None:
    """A layer can be replaced; what adds or takes one away would run something else."""
    pipe = GPipe(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), [1, 2], chunks=2)
    pipe(torch.ones(4, 2))
    if change == "replace":
        pipe.partitions[1] = nn.Sequential(nn.Tanh(), nn.Linear(2, 2))
    elif change == "delete":
        del pipe.partitions[1][1]
    else:
        pipe.partitions[0].add_module("z", nn.Tanh())
    for use in (lambda: pipe(torch.ones(4, 2)), pipe.state_dict):
        with pytest.raises(RuntimeError, match="added to or taken from partitions"):
            use()


def test_a_layer_replaced_in_the_pipeline_is_in_its_partition() -> None:
    """By its index or name; a layer is neither added to nor taken from the pipeline."""
    pipe = GPipe(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), [1, 2], chunks=2)
    changes: list[Callable[[nn.Module], object]] = [
        lambda layer: pipe.__setitem__(1, layer),
        lambda layer: pipe.add_module("1", layer),
    ]
    for change in changes:
        layer = nn.Linear(2, 2)
        change(layer)
        assert pipe[1] is layer is pipe.partitions[1][0]
        assert list(pipe.state_dict())[2] == "partitions.1.1.weight"
        assert torch.equal(pipe(torch.ones(2, 2)), nn.Sequential(*pipe)(torch.ones(2, 2)))
    before = [layer for partition in pipe.partitions for layer in partition]
    wrong: list[Callable[[], object]] = [
        lambda: delattr(pipe, "0"),
        lambda: pipe.add_module("more", nn.ReLU()),
        lambda: setattr(pipe, "0", nn.Parameter(torch.ones(2))),
    ]
    for refused in wrong:
        with pytest.raises((RuntimeError, TypeError), match=r"(?s)a pipeline.*\nFix: "):
            refused()
    assert list(pipe) == before and list(pipe._modules) == ["0", "1", "2"]


def test_functions_that_convert_modules_take_a_pipeline() -> None:
    """They replace the children of each module by what they have made of them, by name."""
    norm, other = nn.BatchNorm1d(2), nn.ReLU()
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), norm, other), [1, 2], chunks=2)
    assert nn.SyncBatchNorm.convert_sync_batchnorm(pipe) is pipe
    assert type(pipe.partitions[1][0]) is type(pipe[1]) is nn.SyncBatchNorm
    for name, child in pipe.named_children():
        setattr(pipe, name, child)
    pipe.partitions[1].add_module("1", norm)
    assert pipe(torch.ones(4, 2)).shape == (4, 2) and list(pipe)[1:] == [norm, other]
    with pytest.raises(RuntimeError, match="no modules besides its layers: partitions=ModuleList"):
        pipe.add_module("partitions", nn.ModuleList())


def test_a_layer_that_is_added_does_not_take_the_place_of_another() -> None:
    """What is appended gets a number counted from 0, whatever the names of the layers are."""
    layers = [nn.Linear(2, 2) for _ in range(3)]
    pipe = GPipe(nn.Sequential(*layers), [1, 2], chunks=2)
    adds: list[Callable[[nn.Sequential], object]] = [
        lambda partition: partition.append(nn.Tanh()),
        lambda partition: partition.extend([nn.Tanh()]),
        lambda partition: partition.insert(1, nn.Tanh()),
        lambda partition: partition.__iadd__(nn.Sequential(nn.Tanh())),
        lambda partition: partition.__imul__(2),
    ]
    for add in adds:
        for partition in pipe.partitions:
            with pytest.raises(RuntimeError, match=r"cannot be added to a partition.*\nFix: "):
                add(partition)
    assert [layer for partition in pipe.partitions for layer in partition] == layers
    assert pipe(torch.ones(4, 2)).shape == (4, 2)


def test_hooks_on_partitions_take_what_torchs_take() -> None:
    """Keyword arguments come along where they are asked for; what cannot be is refused."""
    pipe = GPipe(chain(), [1, 2], chunks=2)
    seen: list[int] = []
    partition = pipe.partitions[1]

    def see(*given: Any) -> None:
        seen.append(len(given))

    handles = [
        partition.register_forward_pre_hook(see, with_kwargs=True),
        partition.register_forward_hook(see, with_kwargs=True),
        partition.register_forward_hook(see, always_call=True),
    ]
    with torch.no_grad():
        pipe(inputs())
    assert sorted(seen) == [3, 3, 3, 3, 4, 4]
    for handle in handles:
        handle.remove()
    for register in (
        partition.register_backward_hook,
        partition.register_state_dict_pre_hook,
        partition.register_load_state_dict_post_hook,
    ):
        with pytest.raises(TypeError, match="cannot have"):
            register(lambda *_: None)


def test_devices_that_are_not_used_need_not_exist() -> None:
    """As in torchgpipe, more devices than partitions are ignored."""
    pipe = GPipe(chain(), [1, 2], devices=["cpu", "cpu", "cuda:77"])
    assert pipe.devices == [torch.device("cpu")] * 2


def test_gpipebals_own_pipeline_loads_torchgpipes_files() -> None:
    """Of any balance, inside of another module too; what it writes are the model's keys."""
    model = chain()
    old = GPipe(model, [1, 2], deferred_batch_norm=True).state_dict()
    old["partitions.1.norm.sum"] = torch.zeros(4)
    found = gb.GPipe(chain(), [2, 1], deferred_batch_norm=True)
    assert str(found.load_state_dict(old)) == "<All keys matched successfully>"
    assert list(found.state_dict()) == list(model.state_dict())
    assert torch.equal(found[0].weight, model[0].weight)  # type: ignore[arg-type]
    outer = nn.ModuleDict({"pipe": gb.GPipe(chain(), [3], deferred_batch_norm=True)})
    outer.load_state_dict({f"pipe.{key}": value for key, value in old.items()})
    assert torch.equal(outer["pipe"][0].weight, model[0].weight)


@pytest.mark.parametrize("kind", [gb.GPipe, GPipe])
@pytest.mark.parametrize("inside", [nn.Linear(2, 2), nn.Sequential(nn.Sequential(nn.Linear(2, 2)))])
def test_a_layer_may_be_called_partitions(kind: Any, inside: nn.Module) -> None:
    """Its keys look like torchgpipe's, and are its own."""
    layers = {"partitions": inside, "0": nn.Linear(2, 2)}
    pipe = kind(nn.Sequential(OrderedDict(layers)), [1, 1], devices=["cpu"] * 2)
    state = {key: value + 1 for key, value in pipe.state_dict().items()}
    pipe.load_state_dict(state)
    assert all(torch.equal(value, state[key]) for key, value in pipe.state_dict().items())


def test_keys_that_do_not_fit_are_named_by_a_module_around_the_pipeline_too() -> None:
    """They are those of its own state dictionary, in what is returned and in what is raised."""
    outer = nn.ModuleDict({"pipe": GPipe(chain(), [1, 2])})
    state = outer.state_dict()
    del state["pipe.partitions.1.last.bias"]
    state["pipe.partitions.1.norm.sum"] = torch.zeros(4)
    found = outer.load_state_dict(state, strict=False)
    assert found.missing_keys == ["pipe.partitions.1.last.bias"]
    assert found.unexpected_keys == ["pipe.partitions.1.norm.sum"]
    state["pipe.partitions.0.first.bias"] = torch.zeros(1)
    with pytest.raises(
        RuntimeError, match=r"mismatch for pipe\.partitions\.0\.first\.bias:"
    ) as told:
        outer.load_state_dict(state)
    assert '"pipe.partitions.1.norm.sum"' in str(told.value)
    copy.deepcopy(outer).load_state_dict(outer.state_dict())


def test_the_class_has_torchgpipes_defaults() -> None:
    """A pipeline has values of its own, whatever its layers are called."""
    model = nn.Sequential(OrderedDict(chunks=nn.Linear(2, 2), balance=nn.ReLU()))
    pipe = GPipe(model, [1, 1], chunks=3, checkpoint="never")
    assert (GPipe.balance, GPipe.devices) == ([], [])
    assert (GPipe.chunks, GPipe.checkpoint) == (1, "except_last")
    for one in (pipe, copy.deepcopy(pipe)):
        assert (one.balance, one.chunks, one.checkpoint) == ([1, 1], 3, "never")
        assert len(one.devices) == 2
    with pytest.raises(PipelineError, match="balance of a pipeline cannot be changed"):
        pipe.balance = [2]


def test_keys_that_are_too_many_are_named_as_the_file_does() -> None:
    """Whatever the balance is now: they can be taken out of it."""
    pipe = GPipe(chain(), [1, 2])
    other = GPipe(chain(), [2, 1]).state_dict()
    other["partitions.0.norm.sum"] = torch.zeros(4)
    for file, key in ((other, "partitions.0.norm.sum"), ({"norm.sum": torch.zeros(4)}, "norm.sum")):
        assert pipe.load_state_dict(file, strict=False).unexpected_keys == [key]
    with pytest.raises(TypeError, match="dict-like"):
        pipe.load_state_dict([1])  # type: ignore[arg-type]
