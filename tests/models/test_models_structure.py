"""AmoebaNet-D, U-Net and GPT against published counts, and against a second way to write them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipebal.errors import UsageError
from gpipebal.models import amoebanetd, gpt, unet
from gpipebal.models.amoebanet import AmoebaCell


def _on_meta(build: object, *arguments: int, **keywords: bool) -> nn.Sequential:
    with torch.device("meta"):
        return build(*arguments, **keywords)  # type: ignore[operator,no-any-return]


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("size", "n_layers", "n_parameters"),
    [
        ((18, 208), 24, 81_505_540),
        ((18, 416), 24, 319_024_120),
        ((18, 544), 24, 542_734_840),
        ((36, 544), 42, 1_055_832_376),
        ((72, 512), 78, 1_844_858_344),
        ((18, 256), 24, 122_470_120),
    ],
)
def test_amoebanetd_has_published_parameter_count(
    size: tuple[int, int], n_layers: int, n_parameters: int
) -> None:
    """AmoebaNet-D (L, D) has L + 6 layers and the published number of parameters, to the unit."""
    model = _on_meta(amoebanetd, *size)
    assert (len(model), _count(model)) == (n_layers, n_parameters)


@pytest.mark.parametrize(
    ("size", "n_layers", "n_parameters"),
    [
        ((6, 72), 285, 362_157_516),
        ((11, 128), 505, 2_213_834_176),
        ((24, 128), 1077, 4_993_859_008),
        ((24, 160), 1077, 7_802_903_600),
        ((48, 160), 2133, 15_822_206_000),
        ((5, 64), 241, 232_687_328),
    ],
)
def test_unet_has_published_parameter_count(
    size: tuple[int, int], n_layers: int, n_parameters: int
) -> None:
    """U-Net (B, C) has 44 B + 21 layers and the published number of parameters, to the unit."""
    model = _on_meta(unet, *size)
    assert (len(model), _count(model)) == (n_layers, n_parameters)


@pytest.mark.parametrize(
    ("layers", "width", "heads", "n_parameters"),
    [
        (12, 768, 12, 124_439_808),
        (24, 1024, 16, 354_823_168),
        (36, 1280, 20, 774_030_080),
        (48, 1600, 25, 1_557_611_200),
    ],
)
def test_tied_gpt_has_the_parameters_of_gpt2(
    layers: int, width: int, heads: int, n_parameters: int
) -> None:
    """With a tied head the four sizes of GPT-2 have the released models' parameters."""
    model = _on_meta(gpt, layers, width, heads, 50257, 1024, tie=True)
    assert (len(model), _count(model)) == (2 * layers + 3, n_parameters)
    # The head has no bias, so a head of its own adds one embedding.
    assert _count(_on_meta(gpt, layers, width, heads, 50257, 1024)) == n_parameters + 50257 * width


@pytest.mark.timeout(120)
def test_huge_gpt_is_built_on_meta() -> None:
    """175 billion parameters on the meta device take no memory, and the watchdog has no work."""
    model = _on_meta(gpt, 96, 12288, 96, 50257, 2048)
    assert 174e9 < _count(model) < 176e9
    assert all(parameter.is_meta for parameter in model.parameters())


def test_amoebanetd_activations_have_published_sizes() -> None:
    """At 224 pixels D = 256 gives 64 channels of 112 pixels first, and 4096 of 7 pixels last."""
    model = _on_meta(amoebanetd, 18, 256)
    x: object = torch.empty(1, 3, 224, 224, device="meta")
    seen = []
    for name, layer in list(model.named_children())[:-1]:
        x = layer(x)
        newest = x[0] if isinstance(x, tuple) else x
        seen.append((newest.shape[1], newest.shape[2]))
        if isinstance(x, tuple):
            assert len(x) == 2, name
    expected = [(64, 112), (384, 56), (768, 28), *[(1024, 28)] * 6, (1536, 14)]
    expected += [*[(2048, 14)] * 6, (3072, 7), *[(4096, 7)] * 6]
    assert seen == expected
    assert model.classify(x).shape == (1, 1000)


def test_amoebanetd_cells_are_named_by_group_kind_and_number() -> None:
    """The names are the stem's, then the cells' in three groups, then the classifier's."""
    names = [name for name, _ in _on_meta(amoebanetd, 6, 16).named_children()]
    groups = [
        ["cell1_normal1", "cell1_normal2"],
        ["cell2_reduction", "cell3_normal1", "cell3_normal2"],
        ["cell4_reduction", "cell5_normal1", "cell5_normal2"],
    ]
    assert names == ["stem1", "stem2", "stem3", *groups[0], *groups[1], *groups[2], "classify"]


def _mean_pool(x: Tensor, stride: int) -> Tensor:
    """Average 3 x 3 windows over the pixels that exist."""
    ones = torch.ones_like(x)
    kernel = torch.ones(x.shape[1], 1, 3, 3, dtype=x.dtype)
    arguments = {"stride": stride, "padding": 1, "groups": x.shape[1]}
    return F.conv2d(x, kernel, **arguments) / F.conv2d(ones, kernel, **arguments)


def test_normal_cell_adds_up_as_in_the_benchmark() -> None:
    """A normal cell is the published sums, with means for 3x3 maxima, written out one by one."""
    cell = AmoebaCell(12, 20, 8, is_reduction=False, after_reduction=False).double()
    newest = torch.randn(3, 20, 6, 6, dtype=torch.float64)
    before = torch.randn(3, 12, 6, 6, dtype=torch.float64)
    op = list(cell.operations)
    s0, s1 = cell.prepare0(newest), cell.prepare1(before)
    s2 = op[0](s1) + _mean_pool(s1, 1)
    s3 = s1 + op[3](s0)
    s4 = op[4](s0) + op[5](s0)
    s5 = _mean_pool(s2, 1) + s2
    s6 = _mean_pool(s1, 1) + op[9](s5)
    assert [len(op[i]) for i in (0, 3, 4, 5, 9)] == [3, 12, 3, 12, 3]
    output, handed_on = cell((newest, before))
    torch.testing.assert_close(output, torch.cat([s0, s3, s4, s6], 1), rtol=1e-9, atol=1e-12)
    assert handed_on is newest


def test_reduction_cell_adds_up_as_in_the_benchmark() -> None:
    """A reduction cell likewise; only operations on its inputs have stride 2."""
    cell = AmoebaCell(12, 20, 8, is_reduction=True, after_reduction=True).double()
    newest = torch.randn(3, 20, 6, 6, dtype=torch.float64)
    before = torch.randn(3, 12, 12, 12, dtype=torch.float64)
    op = list(cell.operations)
    s0, s1 = cell.prepare0(newest), cell.prepare1(before)
    s2 = F.max_pool2d(s0, 2) + _mean_pool(s0, 2)
    s3 = s2 + op[3](s1)
    s4 = op[4](s2) + _mean_pool(s2, 1)
    s5 = s3 + F.max_pool2d(s1, 2)
    s6 = _mean_pool(s2, 1) + op[9](s3)
    assert [len(op[i]) for i in (3, 4, 9)] == [9, 12, 3]
    output, handed_on = cell((newest, before))
    torch.testing.assert_close(output, torch.cat([s4, s5, s6], 1), rtol=1e-9, atol=1e-12)
    assert handed_on is newest and output.shape == (3, 24, 3, 3)


def test_halving_reads_even_and_odd_pixels() -> None:
    """The older input is halved from its even pixels, and from its odd ones."""
    halve = AmoebaCell(4, 4, 8, is_reduction=False, after_reduction=True).prepare1.double()
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    even = F.conv2d(x.relu()[:, :, ::2, ::2], halve.even.weight)
    odd = F.conv2d(x.relu()[:, :, 1::2, 1::2], halve.odd.weight)
    expected = F.batch_norm(torch.cat([even, odd], 1), None, None, training=True)
    torch.testing.assert_close(halve(x), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [33, 40, 47])
def test_amoebanetd_takes_images_of_any_size(size: int) -> None:
    """Images whose size is not a multiple of 32 go through, also a single one."""
    assert amoebanetd(3, 8, 5)(torch.randn(1, 3, size, size)).shape == (1, 5)


def test_unet_equals_the_same_layers_called_by_hand() -> None:
    """The flat chain is down, bottom and up, with what was kept joined behind what came up."""
    model = unet(2, 4, depth=2).double().eval()
    x = torch.randn(2, 3, 13, 10, dtype=torch.float64)

    def convolutions(prefix: str, x: Tensor) -> Tensor:
        for index in range(2):
            x = F.conv2d(x, model.get_parameter(f"{prefix}_{index}_conv.weight"), padding=1)
            x = x - x.mean((2, 3), keepdim=True)
            x = x / (x.square().mean((2, 3), keepdim=True) + 1e-5).sqrt()
            x = torch.where(x > 0, x, 0.01 * x)
        return x

    def up(x: Tensor, skip: Tensor) -> Tensor:
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        padded = torch.zeros(*x.shape[:2], *skip.shape[2:], dtype=x.dtype)
        padded[:, :, : x.shape[2], : x.shape[3]] = x
        return torch.cat([padded, skip], 1)

    first = convolutions("encoder_0_encode", x)
    second = convolutions("encoder_1_encode", F.max_pool2d(first, 2))
    bottom = convolutions("bottleneck", F.max_pool2d(second, 2))
    third = convolutions("decoder_0_decode", up(bottom, second))
    fourth = convolutions("decoder_1_decode", up(third, first))
    expected = F.conv2d(fourth, model.segment.weight)
    assert expected.shape == (2, 1, 13, 10)
    torch.testing.assert_close(model(x), expected, rtol=1e-8, atol=1e-10)


def test_unet_layers_are_named_by_level_and_part() -> None:
    """Names say way, level, number and part, for both ends of a skip too."""
    names = [name for name, _ in unet(1, 2, depth=1).named_children()]
    parts = ("conv", "dropout", "norm", "relu")
    expected = [f"encoder_0_encode_0_{part}" for part in parts]
    expected += ["encoder_0_skip", "encoder_0_down"]
    expected += [f"bottleneck_0_{part}" for part in parts]
    expected += ["decoder_0_up", "decoder_0_skip"]
    expected += [f"decoder_0_decode_0_{part}" for part in parts]
    assert names == [*expected, "segment"]


def test_gpt_equals_attention_written_out() -> None:
    """Logits are those of a GPT whose attention is an explicit masked softmax."""
    width, heads, length = 12, 3, 5
    model = gpt(2, width, heads, 17, 8).double()
    tokens = torch.randint(17, (2, length))
    x = model.embedding.tokens.weight[tokens] + model.embedding.positions.weight[:length]
    future = torch.ones(length, length).triu(1).bool()
    for block in range(2):
        layer = model.get_submodule(f"block_{block}_attention")
        query, key, value = layer.project(layer.norm(x)).chunk(3, dim=2)
        found = []
        for part in torch.arange(width).chunk(heads):
            scores = query[..., part] @ key[..., part].mT / (width / heads) ** 0.5
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            found.append(weights @ value[..., part])
        x = x + layer.output(torch.cat(found, 2))
        layer = model.get_submodule(f"block_{block}_feedforward")
        x = x + layer.down(F.gelu(layer.up(layer.norm(x)), approximate="tanh"))
    expected = F.layer_norm(x, (width,)) @ model.head.weight.T
    torch.testing.assert_close(model(tokens), expected, rtol=1e-9, atol=1e-12)


def test_gpt_does_not_look_ahead() -> None:
    """A later token changes no earlier logits, and does change its own."""
    model, tokens = gpt(2, 12, 3, 17, 8).double(), torch.randint(17, (1, 6))
    other = tokens.clone()
    other[0, 4] = (other[0, 4] + 1) % 17
    difference = (model(tokens) - model(other)).abs().sum(dim=(0, 2))
    assert torch.all(difference[:4] == 0) and torch.all(difference[4:] > 0)


def test_gpt_starts_small_in_the_depth() -> None:
    """Weights start with a spread of 0.02, those added in the depth with less, biases at 0."""
    model = gpt(2, 64, 2, 100, 8)
    layer = model.block_1_feedforward
    assert layer.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.down.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert model.embedding.tokens.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not layer.down.bias.any()


def test_gpt_refuses_rows_longer_than_its_context() -> None:
    """Tokens without a position are refused, and the fix works."""
    model, tokens = gpt(1, 4, 1, 5, 3), torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(UsageError, match=r"length=4 \(expected 1..3\).\nFix: .*tokens\[:, :3\]"):
        model(tokens)
    assert model(tokens[:, :3]).shape == (2, 3, 5)


@pytest.mark.parametrize(
    ("build", "wrong", "fixed"),
    [
        (amoebanetd, {"L": 4}, {"L": 6}),
        (amoebanetd, {"D": 6}, {"D": 8}),
        (amoebanetd, {"D": 0}, {"D": 8}),
        (unet, {"C": 3}, {"C": 4}),
        (unet, {"depth": 0}, {"depth": 1}),
        (gpt, {"width": 8, "heads": 3}, {"width": 9, "heads": 3}),
        (gpt, {"layers": 2.0}, {"layers": 12}),
        (gpt, {"tie": 1}, {"tie": False}),
    ],
)
def test_wrong_arguments_are_refused_with_a_fix(
    build: object, wrong: dict[str, int], fixed: dict[str, int]
) -> None:
    """A size that the model cannot have is refused before anything is built; the fix works."""
    name, value = next((n, v) for n, v in fixed.items() if wrong[n] != v or wrong[n] is not v)
    with pytest.raises(UsageError, match=rf"{name}=.*\nFix: {name}={value}"):
        build(**wrong)  # type: ignore[operator]
    with torch.device("meta"):
        build(**fixed)  # type: ignore[operator]
