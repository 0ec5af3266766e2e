"""A GPT: a language model of alternating attention and feed-forward layers.

Each layer adds to its input, so a chain can be cut between any two layers and nothing but the
hidden states crosses the cut.
"""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from gpipebal.errors import UsageError
from gpipebal.models.catalogue import check_arguments

__all__ = ["Attention", "Embedding", "FeedForward", "gpt"]

#: Standard deviation of all weights at the start.
SPREAD = 0.02


class Embedding(nn.Module):
    """Look up the embeddings of tokens, and add those of their positions.

    Args:
        vocabulary: Number of different tokens.
        context: Most tokens in a row.
        width: Size of a hidden state.
    """

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return hidden states of shape ``(rows, length, width)``."""
        length, context = tokens.shape[1], self.positions.num_embeddings
        if length > context:
            raise UsageError(
                f"rows are longer than the context: length={length} (expected 1..{context}).\n"
                f"Fix: cut the rows, tokens[:, :{context}], or build the model with "
                f"context={length}."
            )
        embedded: Tensor = self.tokens(tokens) + self.positions.weight[:length]
        return embedded


class Attention(nn.Module):
    """Add to each token what its attention finds in the tokens up to it.

    Args:
        width: Size of a hidden state.
        heads: Independent attention heads, on ``width / heads`` values each.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x + attention(norm(x))``."""
        # (rows, length, 3 width) -> three of (rows, heads, length, width / heads)
        parted = self.project(self.norm(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = parted.permute(2, 0, 3, 1, 4).unbind(0)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        added: Tensor = x + self.output(found.transpose(1, 2).flatten(2))
        return added


class FeedForward(nn.Module):
    """Add to each token the output of a network with a hidden layer of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x + network(norm(x))``."""
        added: Tensor = x + self.down(self.gelu(self.up(self.norm(x))))
        return added


def gpt(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50257,
    context: int = 128,
    tie: bool = False,
) -> nn.Sequential:
    """Build a GPT as a chain of ``2 layers + 3`` layers.

    Args:
        layers: Number of blocks: an attention and a feed-forward layer each.
        width: Size of a hidden state, a multiple of `heads`.
        heads: Heads of each attention layer.
        vocabulary: Number of different tokens.
        context: The most tokens in a row; each position has its own embedding. The other defaults
            are those of the smallest GPT-2, whose context is 1024.
        tie: Whether the head's weights are the embedding's. The first and the last partition
            then share a parameter, which `GPipe` accepts only where both are on one device.

    Returns:
        A Sequential that takes integer tokens of shape ``(rows, length)`` and gives logits of
        the next token, of shape ``(rows, length, vocabulary)``.

    Raises:
        UsageError: a number is out of range, or `width` is not a multiple of `heads` (a
            ValueError).

    Source:
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3:
        the normalisation comes before each part and after the last one, and the terms that are
        added start smaller the more of them there are. The head has no bias; by default it is not
        tied.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = gpt(12, 768, 12, 50257, 1024, tie=True)
        >>> len(model), sum(p.numel() for p in model.parameters())
        (27, 124439808)
        >>> [name for name, _ in model.named_children()][:3]
        ['embedding', 'block_0_attention', 'block_0_feedforward']
    """
    given = {"layers": layers, "width": width, "heads": heads}
    given |= {"vocabulary": vocabulary, "context": context, "tie": tie}
    check_arguments("gpt", given)
    if width % heads:
        raise UsageError(
            f"width does not divide into heads: width={width}, heads={heads} (expected a "
            f"multiple of heads).\nFix: width={-(-width // heads) * heads}, or fewer heads."
        )
    chain: OrderedDict[str, nn.Module] = OrderedDict()
    chain["embedding"] = embedding = Embedding(vocabulary, context, width)
    for block in range(layers):
        chain[f"block_{block}_attention"] = Attention(width, heads)
        chain[f"block_{block}_feedforward"] = FeedForward(width)
    chain["norm"] = nn.LayerNorm(width)
    chain["head"] = head = nn.Linear(width, vocabulary, bias=False)
    _start(chain, layers)
    if tie:
        head.weight = embedding.tokens.weight
    return nn.Sequential(chain)


def _start(chain: OrderedDict[str, nn.Module], layers: int) -> None:
    """Draw all weights; those that end a sum of ``2 layers`` terms are drawn smaller."""
    for layer in chain.values():
        for name, module in layer.named_modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                ends = name in ("output", "down")
                spread = SPREAD / (2 * layers) ** 0.5 if ends else SPREAD
                nn.init.normal_(module.weight, std=spread)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
