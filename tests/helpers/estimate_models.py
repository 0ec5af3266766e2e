"""Small models for the tests of estimates: every kind of operation that is said to be exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipebal.skip import pop, skippable, stash


class Apply(nn.Module):
    """A layer without state, made of a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


class Attention(nn.Module):
    """Self-attention by matrix products, or by torch's function for it."""

    def __init__(self, width: int, heads: int, how: str) -> None:
        super().__init__()
        self.heads, self.how = heads, how
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = self.mask[:length, :length]
        if self.how == "by hand":
            weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, -1e9)
            y = weights.softmax(-1) @ v
        elif self.how == "causal":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "mask":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        return self.out(y.transpose(1, 2).reshape(rows, length, width)) + x


class Tables(nn.Module):
    """Constants in attributes that are no buffers, one that is made anew, one that is frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = torch.randn(width)
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table * self.scale + torch.arange(x.shape[-1], dtype=x.dtype)


@skippable(stash=["image"])
class Keep(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        yield stash("image", y)
        return torch.tanh(y)


@skippable(pop=["image"])
class Join(nn.Module):
    def forward(self, x: Tensor) -> Any:
        image = yield pop("image")
        return x * image + image


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def _vectors() -> Tensor:
    return torch.randn(6, 16)


def _images() -> Tensor:
    return torch.randn(6, 4, 8, 8)


def _sequences() -> Tensor:
    return torch.randn(6, 8, 16)


def _tokens() -> Tensor:
    return torch.randint(11, (6, 8))


def _activations() -> nn.Sequential:
    return nn.Sequential(
        *[nn.ReLU(), nn.LeakyReLU(), nn.ELU(), nn.SELU(), nn.CELU(), nn.GELU(), nn.SiLU()],
        *[nn.GELU("tanh"), nn.Mish(), nn.Hardswish(), nn.Hardsigmoid(), nn.Hardtanh()],
        *[nn.ReLU6(), nn.Softplus(), nn.Softshrink(), nn.Hardshrink(), nn.Tanhshrink()],
        *[nn.LogSigmoid(), nn.Sigmoid(), nn.Tanh(), nn.Softsign(), nn.PReLU(), nn.RReLU()],
        *[nn.Threshold(0.1, 0.2), nn.GLU()],
    )


def _pooling() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.MaxPool2d(2, stride=1),
        nn.AvgPool2d(2, stride=1),
        nn.AdaptiveMaxPool2d(5),
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.ReflectionPad2d(1),
        nn.ConvTranspose2d(4, 4, 3, stride=2),
        nn.AdaptiveAvgPool2d(4),
        nn.PixelShuffle(2),
        nn.Flatten(2),
        nn.MaxPool1d(2),
        nn.Conv1d(1, 3, 3),
        nn.AdaptiveAvgPool1d(1),
    )


def _tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    return model


def _frozen() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model


def _trees() -> nn.Sequential:
    return nn.Sequential(
        Apply(lambda x: {"a": x, "b": (x * 2, x[:, :3], 5, None)}),
        nn.Sequential(Apply(lambda t: (t["a"] + t["b"][0], t["b"][1], t["a"].argmax(1)))),
        Apply(lambda t: t[0].sum(1, keepdim=True) * t[1] + t[2][:, None]),
        nn.Linear(3, 2),
    )


#: Model and sample by name.
MODELS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], Any]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3, bias=False)),
        _vectors,
    ),
    "three dimensions": (
        lambda: nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8, bias=False)),
        _sequences,
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 8, 3, stride=2, bias=False),
            nn.GroupNorm(2, 8),
            nn.InstanceNorm2d(8),
            nn.Flatten(),
            nn.Linear(32, 3),
        ),
        _images,
    ),
    "channels last": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, groups=6, bias=False),
            nn.ConvTranspose2d(6, 4, 2, stride=2),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        ).to(memory_format=torch.channels_last),
        lambda: _images().to(memory_format=torch.channels_last),
    ),
    "weights in channels last": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.SiLU(), nn.Conv2d(6, 3, 3), nn.Flatten()).to(
            memory_format=torch.channels_last
        ),
        _images,
    ),
    "pooling": (_pooling, _images),
    "activations": (_activations, _vectors),
    "norms": (
        lambda: nn.Sequential(
            nn.LayerNorm(16), nn.RMSNorm(16), nn.LayerNorm(16, bias=False), nn.Softmax(-1)
        ),
        _sequences,
    ),
    "norm turned around": (
        lambda: nn.Sequential(
            nn.Linear(16, 16),
            nn.Sequential(nn.LayerNorm(16), Apply(lambda x: x.transpose(1, 2).contiguous())),
        ),
        _sequences,
    ),
    "batchnorm": (
        lambda: nn.Sequential(nn.Linear(16, 5), nn.BatchNorm1d(5), nn.LogSoftmax(1)),
        _vectors,
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Dropout(0.2, inplace=True)),
        _vectors,
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(11, 16), nn.LayerNorm(16), nn.Linear(16, 11)),
        _tokens,
    ),
    "attention by hand": (
        lambda: nn.Sequential(nn.Embedding(11, 16), Attention(16, 4, "by hand"), nn.Linear(16, 3)),
        _tokens,
    ),
    "causal attention": (lambda: nn.Sequential(Attention(16, 2, "causal")), _sequences),
    "masked attention": (lambda: nn.Sequential(Attention(16, 2, "mask")), _sequences),
    "attention with dropout": (lambda: nn.Sequential(Attention(16, 2, "dropout")), _sequences),
    "transformer": (
        lambda: nn.Sequential(
            nn.Embedding(11, 16),
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True),
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True, norm_first=True),
            nn.Linear(16, 11),
        ),
        _tokens,
    ),
    "skips": (
        lambda: nn.Sequential(Keep(16), nn.Linear(16, 16), nn.ReLU(), Join(), nn.Linear(16, 2)),
        _vectors,
    ),
    "residual": (
        lambda: nn.Sequential(
            Residual(nn.Linear(16, 16), nn.ReLU(inplace=True)), Residual(nn.Linear(16, 16))
        ),
        _vectors,
    ),
    "trees": (_trees, _vectors),
    "views": (
        lambda: nn.Sequential(
            Apply(lambda x: x.t().t()), nn.Identity(), Apply(lambda x: x[:, ::2]), nn.Linear(8, 8)
        ),
        _vectors,
    ),
    "in place": (
        lambda: nn.Sequential(nn.Linear(16, 16), Apply(lambda x: x.mul_(2)), nn.ReLU(inplace=True)),
        _vectors,
    ),
    "frozen": (_frozen, _vectors),
    "tied": (_tied, _vectors),
    "no graph": (
        lambda: nn.Sequential(nn.Linear(16, 16), Apply(Tensor.detach), nn.Linear(16, 3)),
        _vectors,
    ),
    "constants": (lambda: nn.Sequential(nn.Linear(16, 16), Tables(16), nn.Tanh()), _vectors),
    "half precision": (
        lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Softmax(1)).bfloat16(),
        lambda: _vectors().bfloat16(),
    ),
    "double precision": (
        lambda: nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 3)).double(),
        lambda: _vectors().double(),
    ),
}
