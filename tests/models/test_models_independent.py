"""Built-in models against another library's, with the same weights; skipped without that library.

Run them with ``pip install transformers``; no weights are loaded from anywhere.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipebal.models import gpt, resnet101


@pytest.fixture
def transformers() -> Any:
    """Return the other library, or skip the test."""
    with warnings.catch_warnings():
        # Its import may warn of what it does not like about other packages.
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers", reason="compares with the package transformers")


def test_resnet101_gives_the_logits_of_another_implementation(transformers: Any) -> None:
    """ResNet-101 has the other library's logits with the same weights and running statistics."""
    config = transformers.ResNetConfig(
        layer_type="bottleneck", depths=[3, 4, 23, 3], num_labels=1000
    )
    other = transformers.ResNetForImageClassification(config).double().eval()
    _draw_statistics(other)
    model = resnet101().double().eval()
    model.load_state_dict({_flat_key(key): value for key, value in other.state_dict().items()})
    images = torch.randn(2, 3, 65, 65, dtype=torch.float64)
    with torch.no_grad():
        found, expected = model(images), other(images).logits
    assert expected.std() > 1e-3 * expected.abs().max() > 0
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * expected.abs().max().item())


def test_gpt_gives_the_logits_of_another_implementation(transformers: Any) -> None:
    """A tied GPT has the logits of the other library's GPT-2 with the same weights."""
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(
        n_layer=3, n_embd=24, n_head=4, vocab_size=31, n_positions=12, **special
    )
    other = transformers.GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_(std=0.2)
    model = gpt(3, 24, 4, 31, 12, tie=True).double()
    parts = {"wte": "embedding.tokens", "wpe": "embedding.positions", "ln_f": "norm"}
    block = {"ln_1": "attention.norm", "ln_2": "feedforward.norm"}
    block |= {"attn.c_attn": "attention.project", "attn.c_proj": "attention.output"}
    block |= {"mlp.c_fc": "feedforward.up", "mlp.c_proj": "feedforward.down"}
    for index in range(3):
        parts |= {f"h.{index}.{key}": f"block_{index}_{value}" for key, value in block.items()}
    state = {}
    for key, value in other.transformer.state_dict().items():
        part, _, kind = key.rpartition(".")
        # Its linear layers keep their weights the other way round.
        turn = ".c_" in key and kind == "weight"
        state[f"{parts[part]}.{kind}"] = value.T if turn else value
    state["head.weight"] = other.lm_head.weight
    model.load_state_dict(state)
    tokens = torch.randint(31, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), other(tokens).logits, rtol=1e-9, atol=1e-10)


def _draw_statistics(model: nn.Module) -> None:
    """Give every normalisation weights and statistics of its own, so that none is like another."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.3, 0.8)
            nn.init.normal_(module.bias, std=0.2)
            statistics: dict[str, Tensor] = dict(module.named_buffers())
            statistics["running_mean"].normal_(std=0.2)
            statistics["running_var"].uniform_(0.5, 2.0)


def _flat_key(key: str) -> str:
    """Translate a state-dict key of the other library into that of the flat chain."""
    if key.startswith("classifier.1."):
        return "fc." + key.rpartition(".")[2]
    *path, part, kind = key.split(".")
    if "embedder" in path:
        return {"convolution": "conv1", "normalization": "bn1"}[part] + "." + kind
    # resnet.encoder.stages.<group>.layers.<block>.shortcut, or .layer.<number>
    prefix = f"layer{int(path[3]) + 1}_{path[5]}_"
    if path[6] == "shortcut":
        return f"{prefix}residual.downsample.{int(part == 'normalization')}.{kind}"
    name = {"convolution": "conv", "normalization": "bn"}[part]
    return f"{prefix}{name}{int(path[7]) + 1}.{kind}"
