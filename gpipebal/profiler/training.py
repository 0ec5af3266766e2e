"""What is profiled: the layers of a chain, a mini-batch, the loss, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.errors import ProfileError
from gpipebal.pipeline.layers.chain import check_keyword_dims, check_keywords
from gpipebal.pipeline.minibatch.loss import check_loss
from gpipebal.profiler.chain.batch import Batch
from gpipebal.profiler.chain.chain import Chain
from gpipebal.profiler.chain.data import Data
from gpipebal.profiler.chain.failures import memory_for
from gpipebal.profiler.chain.numbers import Arrived
from gpipebal.profiler.chain.value import SkipEnds, Value
from gpipebal.profiler.replicas.identity import kind_of
from gpipebal.profiler.setting import layers_of
from gpipebal.profiler.step.optimizer import Maker, OptimizerLike
from gpipebal.schedule import check_count
from gpipebal.skip.layout import find_skips

__all__ = ["Training"]


@dataclass(frozen=True)
class Training:
    """A chain that is trained.

    Attributes:
        layers: The caller's layers by name.
        routes: Their skips.
        data: A mini-batch, how it is divided, and its target.
        loss_fn: The loss; None: not known.
        optimizer: The optimizer, or a callable that makes one; None: not known.
        keep_modes: Whether parts of layers stay in training or evaluation mode; else all are
            trained.
    """

    layers: Mapping[str, nn.Module]
    routes: SkipEnds
    data: Data
    loss_fn: Callable[..., Tensor] | None
    optimizer: OptimizerLike | None
    keep_modes: bool

    @classmethod
    def of(
        cls,
        module: nn.Module,
        sample: Any,
        *,
        chunks: int,
        loss_fn: Callable[..., Tensor] | None,
        target: Any,
        optimizer: OptimizerLike | None,
        keywords: Mapping[str, Any] | None,
        in_dims: Any,
        keyword_dims: Mapping[str, Any] | None,
        out_dims: Any,
        target_dims: Any,
    ) -> Training:
        """Make one from the arguments of `profile_model`, and check them.

        Raises:
            ModelError: `module` is not a chain, its skips do not pair up, the sample cannot be
                divided, or the loss is not a function.
            BalanceError: a dimension or a keyword argument does not fit, or `chunks` is no count.
            ProfileError: the chain has no layers, the sample has no rows, or there is a target
                without a loss.
        """
        if loss_fn is not None:
            check_loss(loss_fn)
        elif target is not None:
            raise ProfileError(
                "a target is given without a loss: loss_fn=None (expected a function of output and "
                "target).\nFix: give loss_fn, or leave out target."
            )
        layers = layers_of(module)
        first = next(iter(layers.values()))
        dims_of_keywords = check_keyword_dims(keyword_dims, first)
        check_keywords(keywords, first)
        batch = Batch.sample(sample, keywords, in_dims, dims_of_keywords)
        sizes = batch.parted(check_count("chunks", chunks))
        return cls(
            layers,
            find_skips(layers),
            Data(batch, sizes, Batch.target(target, target_dims), out_dims),
            loss_fn,
            optimizer,
            module.training,
        )

    @property
    def names(self) -> list[str]:
        """Names of the layers."""
        return list(self.layers)

    @property
    def modules(self) -> list[nn.Module]:
        """The layers."""
        return list(self.layers.values())

    def out_dims_of(self, k: int) -> Any:
        """Return the dimension along which outputs of layer k are joined; None: they are not."""
        return self.data.joined_dims if k == len(self.layers) - 1 else None

    def kind_of_input(self, k: int, arrived: Arrived) -> Hashable | None:
        """Return a key of what goes into layer k, by which, with the layer, its costs are decided.

        Args:
            k: Index of the layer.
            arrived: What goes into it.

        Returns:
            The key; None for a layer that stashes or pops: skips have names, so there is no other.
        """
        if any(i != j and k in (i, j) for i, j in self.routes.values()):
            return None
        value, places = arrived.value, dict[int | None, int]()
        leaves = tuple(
            (
                kind_of(leaf),
                None if number is None else leaf.storage_offset(),
                places.setdefault(number, i),
            )
            for i, (leaf, number) in enumerate(zip(value.leaves, arrived.numbers, strict=True))
        )
        # The first layer's input never needs a gradient, and only the last one's output is joined.
        return k == 0, str(self.out_dims_of(k)), leaves, str(value.structure), value.views

    def chain_of(self, k: int, layer: nn.Module, device: torch.device, start: Value) -> Chain:
        """Make a chain of a single layer, in its place in the whole chain.

        Args:
            k: Index of the layer.
            layer: What runs instead of it.
            device: Where that is.
            start: Its input.
        """
        return Chain(
            [self.names[k]],
            [layer],
            device,
            start,
            routes=self.routes,
            first=k,
            out_dims=self.out_dims_of(k),
        )

    def maker(self) -> Maker | None:
        """Return a maker of optimizers like the caller's; None: there is no optimizer.

        Raises:
            ProfileError: it cannot be made.
        """
        if self.optimizer is None:
            return None
        parameters = dict.fromkeys(p for module in self.modules for p in module.parameters())
        return Maker(self.optimizer, list(parameters))

    def with_target_on(self, device: torch.device) -> Training:
        """Return the same training with its target copied to a device: a loss may write to it."""
        target = self.data.target
        if target is None:
            return self
        with memory_for("the target"):
            return replace(self, data=replace(self.data, target=target.copied_to(device)))
