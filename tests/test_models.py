"""Built-in models against their published structure, and against a second way to write them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipebal.models import MODELS, resnet, resnet101

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
    entry = MODELS[name]
    sample, target = entry.make_sample(3, 40, 5), entry.make_target(3, 5)
    assert sample.shape == (3, 3, 40, 40) and target.shape == (3,)
    assert torch.equal(sample, entry.make_sample(3, 40, 5))
    assert torch.equal(target, entry.make_target(3, 5))
    assert not torch.equal(sample, entry.make_sample(3, 40, 6))
    assert torch.isfinite(entry.loss_fn(torch.zeros(3, 1000), target))


def test_models_can_be_looked_up_but_not_changed() -> None:
    """The registry is read-only: a user's model is named by its function, not registered."""
    with pytest.raises(TypeError, match="does not support item assignment"):
        MODELS["mine"] = MODELS["resnet101"]  # type: ignore[index]
