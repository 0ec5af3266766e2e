"""Built-in models against their published structure, and against a second way to write them."""

from __future__ import annotations

import copy
import functools
import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from small_models import SIZES, small
from torch import Tensor, nn

import gpipebal.models
from gpipebal.errors import UsageError
from gpipebal.models import CATALOGUE, MODELS, entries, resnet, resnet101
from gpipebal.models.catalogue import check_arguments, read_word
from gpipebal.run import load_workload

BLOCK_PARTS = ("identity", "conv1", "bn1", "relu1", "conv2", "bn2", "relu2", "conv3", "bn3")
BLOCK_PARTS += ("residual", "relu3")


class Bottleneck(nn.Module):
    """A residual block as textbooks write it, to compare the flat one with."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, 4 * inner, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * inner)
        self.downsample = nn.Identity()
        if stride > 1 or channels != 4 * inner:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, 4 * inner, 1, stride, bias=False), nn.BatchNorm2d(4 * inner)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class PlainResNet(nn.Module):
    """The same network as a tree of modules."""

    def __init__(self, blocks: tuple[int, ...], num_classes: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels = width
        for group, n_blocks in enumerate(blocks):
            row = []
            for index in range(n_blocks):
                inner = width << group
                row.append(Bottleneck(channels, inner, 2 if group and not index else 1))
                channels = 4 * inner
            self.add_module(f"layer{group + 1}", nn.Sequential(*row))
        self.n_groups = len(blocks)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for group in range(self.n_groups):
            x = self.get_submodule(f"layer{group + 1}")(x)
        return self.fc(x.mean(dim=(2, 3)))


def _flat_key(key: str) -> str:
    """Translate a state-dict key of the tree into the key of the flat chain."""
    if not key.startswith("layer"):
        return key
    group, index, rest = key.split(".", 2)
    return f"{group}_{index}_" + rest.replace("downsample", "residual.downsample")


def _check_same(blocks: tuple[int, ...], num_classes: int, width: int, size: int) -> None:
    """Compare output, every gradient and every buffer of the flat chain with the tree's."""
    plain = PlainResNet(blocks, num_classes, width).double()
    flat = resnet(blocks, num_classes, width).double()
    flat.load_state_dict({_flat_key(key): copy.copy(v) for key, v in plain.state_dict().items()})
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    target = torch.randint(num_classes, (2,))
    for model in (plain, flat):
        F.cross_entropy(model(x), target).backward()
    # Another order of summation in the last pooling is the only difference that may show.
    torch.testing.assert_close(flat(x), plain(x), rtol=1e-9, atol=1e-12)
    flat_parameters, flat_state = dict(flat.named_parameters()), flat.state_dict()
    for key, parameter in plain.named_parameters():
        found = flat_parameters[_flat_key(key)].grad
        torch.testing.assert_close(found, parameter.grad, rtol=1e-7, atol=1e-10)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(flat_state[_flat_key(key)], value, rtol=1e-9, atol=1e-12)


def test_resnet101_has_published_parameter_count() -> None:
    """ResNet-101 has 370 flat layers and, at 1000 classes, 44,549,160 parameters."""
    with torch.device("meta"):
        model = resnet101()
    assert len(model) == 370
    assert sum(parameter.numel() for parameter in model.parameters()) == 44_549_160


def test_resnet101_layers_are_named_by_group_block_and_part() -> None:
    """The names of the flat layers are the stem's, `layerG_B_part`, and the end's, in order."""
    with torch.device("meta"):
        names = [name for name, _ in resnet101().named_children()]
    blocks = [
        f"layer{group}_{index}_{part}"
        for group, n_blocks in enumerate((3, 4, 23, 3), start=1)
        for index in range(n_blocks)
        for part in BLOCK_PARTS
    ]
    assert names == ["conv1", "bn1", "relu", "maxpool", *blocks, "avgpool", "flat", "fc"]


def test_resnet_state_dict_keys_have_no_extra_nesting() -> None:
    """A parameter is called by its flat layer, and a projection by the layer that adds it."""
    parents = {key.rpartition(".")[0] for key in resnet((1, 1), 10, 4).state_dict()}
    assert {"layer1_0_conv1", "layer2_0_bn3", "layer2_0_residual.downsample.0"} <= parents
    nested = {parent for parent in parents if "." in parent}
    assert all(".downsample." in parent for parent in nested)


def test_resnet_projects_only_where_a_block_changes_shape() -> None:
    """The first block of a group has a projection, no other block has one."""
    model = resnet((2, 3), 10, 4)
    projected = {n for n, m in model.named_children() if getattr(m, "downsample", None) is not None}
    assert projected == {"layer1_0_residual", "layer2_0_residual"}


def test_resnet_starts_as_published() -> None:
    """Convolutions start Kaiming normal by fan out, normalisations at weight 1 and bias 0."""
    model = resnet((1, 1), 10, 32)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            # The spread of n normal numbers is known to about 1 / sqrt(2 n).
            tolerance = 5 / (2 * module.weight.numel()) ** 0.5
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=tolerance)
            assert module.bias is None
        elif isinstance(module, nn.BatchNorm2d):
            assert torch.all(module.weight == 1) and torch.all(module.bias == 0)


def test_tiny_resnet_equals_plain_resnet() -> None:
    """Output, gradients and buffers of the flat chain equal those of a tree of blocks."""
    _check_same((2, 1, 2), num_classes=7, width=4, size=33)


@pytest.mark.slow
def test_resnet101_equals_plain_resnet() -> None:
    """The whole ResNet-101 equals the tree of blocks in output, gradients and buffers."""
    _check_same((3, 4, 23, 3), num_classes=1000, width=64, size=64)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_builtin_data_fits_and_repeats(name: str) -> None:
    """Sample and target of a built-in have the rows asked for, and depend only on the seed."""
    arguments, size = SIZES[name]
    entry = MODELS[name].configure(**arguments)
    sample, target = entry.make_sample(3, size, 5), entry.make_target(3, size, 5)
    assert sample.shape[0] == target.shape[0] == 3
    for make, data in ((entry.make_sample, sample), (entry.make_target, target)):
        assert torch.equal(data, make(3, size, 5))
        assert not torch.equal(data, make(3, size, 6))
    output = small(name, rows=3).model.float()(sample)
    assert torch.isfinite(entry.loss_fn(output, target))


def test_text_targets_are_the_tokens_that_follow() -> None:
    """The target of a language model is its sample, one token later."""
    entry = MODELS["gpt"].configure(vocabulary=1000, context=7)
    sample, target = entry.make_sample(2, None, 1), entry.make_target(2, None, 1)
    assert sample.dtype == torch.int64 and sample.shape == (2, 7)
    assert torch.equal(sample[:, 1:], target[:, :-1])


def test_token_cross_entropy_is_the_mean_over_tokens() -> None:
    """The loss of a language model is the mean of the cross entropies of its tokens."""
    logits, target = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    each = [F.cross_entropy(logits[i, t], target[i, t]) for i in range(2) for t in range(3)]
    loss = MODELS["gpt"].loss_fn(logits, target)
    torch.testing.assert_close(loss, torch.stack(each).mean())


@pytest.mark.parametrize("name", sorted(MODELS))
def test_catalogue_is_true(name: str) -> None:
    """Names and defaults of arguments are those that an entry builds from."""
    described = CATALOGUE[name].arguments
    function = MODELS[name].build
    while isinstance(function, functools.partial):
        function = function.func
    signature = inspect.signature(function).parameters
    assert list(signature) == list(described) == list(MODELS[name].values)
    assert {key: value.default for key, value in signature.items()} == dict(MODELS[name].values)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_smallest_image_is_the_smallest(name: str) -> None:
    """A micro-batch of one row trains at the size that the entry says, and not one pixel below."""
    arguments, _ = SIZES[name]
    entry = MODELS[name].configure(**arguments)
    if entry.image_size is None:
        assert entry.make_sample(1, None, 0).shape == (1, 6)
        return
    # ResNet's groups all have to be there for its size to matter, but not their blocks.
    model = resnet((1, 1, 1, 1), 5, 4) if name == "resnet101" else entry.build()
    size = entry.image_size_of_one_row
    model(entry.make_sample(1, size, 0)).sum().backward()
    with pytest.raises(ValueError, match="Expected more than 1"):
        model(entry.make_sample(1, size - 1, 0))


def test_entries_are_configured_by_name() -> None:
    """Arguments given replace the defaults of model and data, and leave the registry alone."""
    entry = MODELS["unet"].configure(B=1, C=2).configure(depth=1, in_channels=4)
    assert dict(entry.values) == {"B": 1, "C": 2, "depth": 1, "in_channels": 4, "out_channels": 1}
    assert entry.smallest_image == 4 and MODELS["unet"].smallest_image == 64
    assert entry.build()(entry.make_sample(2, 8, 0)).shape == entry.make_target(2, 8, 0).shape
    assert MODELS["unet"].values["B"] == 5


def test_unknown_arguments_are_refused() -> None:
    """A name that the model does not have is refused with those that it has."""
    with pytest.raises(
        UsageError, match=r"L=3 \(expected B, C, depth, .*\).\nFix: B=5, or leave L"
    ):
        MODELS["unet"].configure(L=3)
    with pytest.raises(UsageError, match=r"no such argument: self=1 \(expected B, C, depth"):
        MODELS["unet"].configure(**{"self": 1})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"layers": "two"}, r"layers='two' \(expected an integer >= 1: .*\).\nFix: layers=12"),
        ({"layers": "-1"}, r"layers=-1 .*\nFix: layers=1\."),
        ({"tie": "1"}, r"tie=1 \(expected True or False"),
        ({"tie": "maybe"}, r"tie='maybe' \(expected True or False"),
        ({"size": "1"}, r"no such argument: size=1 "),
    ],
)
def test_words_that_are_no_arguments_are_refused(words: dict[str, str], message: str) -> None:
    """A word that cannot be read is refused as the argument that it was meant to be."""
    with pytest.raises(UsageError, match=message):
        check_arguments("gpt", {name: read_word(word) for name, word in words.items()})


def test_catalogue_loads_no_torch() -> None:
    """A help text can list all models and arguments without waiting for torch."""
    code = "import sys, gpipebal.models as m; print(len(m.CATALOGUE), 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(len(MODELS)), "False"]


def test_files_do_not_hide_functions() -> None:
    """`gpt` of the package is the function, also when its file of that name was loaded first."""
    code = "import gpipebal.models.gpt; from gpipebal.models import gpt, resnet, unet; "
    code += "import gpipebal.models.resnet; from gpipebal.models import resnet as again; "
    code += "from gpipebal.models.resnet import resnet as inner; "
    code += "print(again is resnet is inner, callable(gpt), callable(unet))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "True", "True"]


def test_unknown_model_is_an_attribute_error() -> None:
    """A model that does not exist is refused as Python does it; completion offers the others."""
    with pytest.raises(AttributeError, match="no attribute 'vgg'"):
        _ = gpipebal.models.vgg
    assert set(gpipebal.models.__all__) <= set(dir(gpipebal.models))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("gpt", {"image_size": 64}, "takes no images"),
        ("unet", {"image_size": 63}, "Fix: --image-size 64"),
        ("workloads:tiny", {"arguments": {"L": 3}}, "unexpected keyword argument 'L'"),
        ("unet", {"arguments": {"B": 0}}, "Fix: B=1"),
    ],
)
def test_workload_refuses_what_a_model_cannot_take(
    name: str, wrong: dict[str, object], message: str
) -> None:
    """Data and arguments that do not go with a model are refused before anything is built."""
    with pytest.raises(UsageError, match=message):
        load_workload(name, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["amoebanetd", "unet", "gpt"])
def test_workload_builds_from_arguments(name: str) -> None:
    """Model, sample, target and loss of a workload are of the arguments given, and go together."""
    arguments, _ = SIZES[name]
    size = MODELS[name].image_size
    workload = load_workload(name, rows=2, image_size=size, arguments=arguments)
    loss = workload.loss(workload.model(workload.sample), workload.target)
    assert torch.isfinite(loss) and workload.image_size == size


def test_models_can_be_looked_up_but_not_changed() -> None:
    """The registry is read-only: a user's model is named by its function, not registered."""
    with pytest.raises(TypeError, match="does not support item assignment"):
        MODELS["mine"] = MODELS["resnet101"]  # type: ignore[index]


def test_samples_are_on_the_host_whatever_the_default_device_is() -> None:
    """They are brought to where they are needed; a generator of the host draws them."""
    with torch.device("meta"):
        drawn = [
            entries.random_images(2, 8, 0),
            entries.random_classes(2, 8, 0),
            entries.random_masks(2, 8, 0),
            entries.random_tokens(2, None, 0, vocabulary=5, context=3),
        ]
    assert {tensor.device.type for tensor in drawn} == {"cpu"}
