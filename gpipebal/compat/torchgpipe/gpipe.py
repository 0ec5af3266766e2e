"""torchgpipe's `GPipe`: gpipebal's, presented as a module that holds its partitions.

gpipebal registers layers under their own names, so that a state dictionary is the plain model's for
every balance. torchgpipe registers partitions, and the names of everything below begin with
``partitions.<j>.``. Here the pipeline is the former, and presents itself as the latter::

    gpipebal      pipe ── first, act, second            first.weight
    torchgpipe    pipe ── partitions ─┬─ 0 ── first     partitions.0.first.weight
                                      └─ 1 ── act, second
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import gpipebal.pipeline
from gpipebal.compat.torchgpipe.batchnorm import DeferredBatchNorm
from gpipebal.compat.torchgpipe.partitions import PartitionLayers
from gpipebal.errors import BalanceError, ModelError, PipelineError
from gpipebal.pipeline.layers.chain import NO_INPUT, check_balance, check_one_input, layers_of
from gpipebal.pipeline.layers.devices import DeviceLike
from gpipebal.pipeline.layers.old_keys import strip_partitions
from gpipebal.pipeline.layers.own import warn_of_lazy_norms
from gpipebal.pipeline.process.caller import whole_call
from gpipebal.pipeline.workers.runtime import Runtime
from gpipebal.schedule import CHECKPOINT_MODES, Checkpoint

__all__ = ["GPipe"]

#: How torch's messages about one key begin; the prefix of all keys goes in, the key follows it.
_MESSAGE = '(size mismatch for |While copying the parameter named "){}([^:"]+)'


class GPipe(gpipebal.pipeline.GPipe):
    """Run an `nn.Sequential` as a pipeline: torchgpipe's arguments, errors and state-dict keys.

    Args:
        module: The chain. Its direct children are the layers.
        balance: Number of layers in each partition.
        devices: One device per partition; more are ignored. None: the CUDA devices in order; on a
            machine with none, the CPU for every partition, where torchgpipe has no device at all.
        chunks: Micro-batches per mini-batch; any value that ``int`` turns into 1 or more.
        checkpoint: ``'always'``, ``'except_last'`` or ``'never'``.
        deferred_batch_norm: Update the running statistics of batch normalisation once per
            mini-batch.
        **settings: Further arguments of `gpipebal.GPipe`.

    Raises:
        ModelError: `module` is not an `nn.Sequential` (a TypeError).
        DuplicateLayerError: partitions on different devices share a parameter or buffer (a
            ValueError).
        BalanceError: `balance`, `chunks` or `checkpoint` cannot be used (a ValueError).
        DeviceError: a device does not exist, or there are fewer devices than partitions (an
            IndexError).

    Source:
        Interface of torchgpipe 0.0.7 (Kim et al., 2020). Differs: docs/migration.md lists how.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pipe = GPipe(model, [1, 2], chunks=2)
        >>> pipe(torch.ones(6, 4)).shape, list(pipe.state_dict())[-1]
        (torch.Size([6, 2]), 'partitions.1.2.bias')
    """

    # torchgpipe's class has these values too; each pipeline has its own.
    balance: list[int] = []  # noqa: RUF012
    devices: list[torch.device] = []  # noqa: RUF012
    chunks: int = 1
    checkpoint: Checkpoint = "except_last"

    def __init__(
        self,
        module: nn.Module,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[DeviceLike] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        **settings: Any,
    ) -> None:
        chunks = int(chunks)
        if not isinstance(checkpoint, (list, tuple)):
            checkpoint = str(checkpoint)
            if checkpoint not in CHECKPOINT_MODES:
                raise BalanceError(
                    "checkpoint is not one of 'always', 'except_last', or 'never': "
                    f"checkpoint={checkpoint!r}.\nFix: checkpoint='except_last'."
                )
        balance = _check_balance(module, balance)
        if deferred_batch_norm:
            warn_of_lazy_norms(layers_of(module).values())
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, chunks)
        super().__init__(
            module,
            balance,
            devices=devices,
            chunks=chunks,
            checkpoint=checkpoint,
            **settings,
        )
        # Kept apart from the registered layers, not among them.
        self.__dict__["_partitions"] = nn.ModuleList(
            PartitionLayers(OrderedDict(partition._modules)) for partition in super().partitions
        )
        self.__dict__["_names"] = [tuple(partition._modules) for partition in self.partitions]
        self.register_load_state_dict_post_hook(_tell_of_partitions)

    @property
    def partitions(self) -> nn.ModuleList:  # type: ignore[override]
        """The partitions: an `nn.ModuleList` of `nn.Sequential`s, whose layers may be replaced."""
        partitions: nn.ModuleList = self.__dict__["_partitions"]
        return partitions

    @whole_call
    def forward(self, input: Any = NO_INPUT, /, *others: Any, **keywords: Any) -> Any:
        """Run a mini-batch through the pipeline.

        Args:
            input: A tensor, or a tuple of tensors, with the same rows along dim 0.
            others: Not accepted: give several inputs as one tuple.
            keywords: As for `gpipebal.GPipe`.

        Returns:
            The output of the last layer, joined over the micro-batches, on the last device.

        Raises:
            ModelError: input or output has something other than tensors, or there are several
                inputs (a TypeError).
            BaseException: whatever a layer raised.
        """
        input = check_one_input(input, others, keywords)
        _check_tensors("input", input)
        if not len(self):
            return input
        output = super().forward(input, **keywords)
        _check_tensors("output", output)
        return output

    def _started(self) -> Runtime:
        self._take_over_layers()
        return super()._started()

    def layers_in_place(self) -> dict[str, nn.Module]:
        """Return the layers by name, those that are in the partitions now."""
        self._take_over_layers()
        return super().layers_in_place()

    def _take_over_layers(self) -> None:
        """Let the pipeline use the layers that are in the partitions now.

        Raises:
            PipelineError: the names of the layers have changed; a layer can only be replaced.
        """
        names: list[tuple[str, ...]] = self.__dict__["_names"]
        found = [tuple(partition._modules) for partition in self.partitions]
        if found != names:
            raise PipelineError(
                "layers were added to or taken from partitions: the names of the layers are "
                f"{found} (expected {names}, as when the pipeline was made).\n"
                "Fix: change the nn.Sequential, and make another pipeline of it; or replace a "
                "layer, pipe.partitions[j][k] = layer."
            )
        for partition in self.partitions:
            self._modules.update(partition._modules)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dictionary; its keys begin with ``partitions.<j>.``."""
        self._take_over_layers()
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        # In their order; the dictionary may also have the keys of other modules.
        for key in [key for key in state if key.startswith(prefix)]:
            state[prefix + self._in_partition(key[len(prefix) :])] = state.pop(key)
        versions = getattr(state, "_metadata", {})
        for key in [key for key in versions if key.startswith(prefix)]:
            # Under both names: a module around the pipeline looks for its layers under their own.
            versions[prefix + self._in_partition(key[len(prefix) :])] = versions[key]
        return state

    def __getstate__(self) -> dict[str, Any]:
        # Left over from a load that ended with an error of a layer.
        return {k: value for k, value in super().__getstate__().items() if k != "_loading"}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self._take_over_layers()
        before = strip_partitions(state_dict, prefix, self._modules, args[-1])
        # For `_tell_of_partitions`, which torch calls when the layers have loaded their entries.
        self.__dict__["_loading"] = prefix, before, args[-1]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _in_partition(self, name: str) -> str:
        """Return torchgpipe's name for what gpipebal registers as `name`."""
        layer, dot, rest = name.partition(".")
        for j, partition in enumerate(self.partitions):
            if layer in partition._modules:
                return f"partitions.{j}.{layer}{dot}{rest}"
        return name

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the one child, ``partitions``."""
        yield "partitions", self.partitions

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module, ``partitions``, each partition, and everything in them."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            below = f"{prefix}.partitions" if prefix else "partitions"
            yield from self.partitions.named_modules(memo, below, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        self._check_no_layer(name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._check_no_layer(name)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Replace the layer of this name, in its partition; refuse to add one."""
        if module is self.partitions:
            return  # what converts all modules sets each child again, after what is in it
        super().add_module(name, module)
        for partition in self.partitions:
            if name in partition._modules:
                partition._modules[name] = module

    def _check_no_layer(self, name: str) -> None:
        # Layers are not attributes: one may be called "chunks".
        if name in self.__dict__.get("_modules", ()):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}.\n"
                "Fix: look for this layer, or set it, in pipe.partitions[j]."
            )


def _tell_of_partitions(pipe: GPipe, incompatible: Any) -> None:
    """Name what could not be loaded as torchgpipe does; called when the layers have loaded."""
    prefix, before, errors = pipe.__dict__.pop("_loading")

    def renamed(match: re.Match[str]) -> str:
        return f"{match[1]}{prefix}{pipe._in_partition(match[2])}"

    missing, unexpected = incompatible
    for k, key in enumerate(missing):
        if key.startswith(prefix):
            missing[k] = prefix + pipe._in_partition(key[len(prefix) :])
    unexpected[:] = [before.get(key, key) for key in unexpected]
    message = re.compile(_MESSAGE.format(re.escape(prefix)))
    errors[:] = [message.sub(renamed, error, count=1) for error in errors]


def _check_balance(module: nn.Module, balance: Iterable[int] | None) -> Iterable[int] | None:
    if not isinstance(module, nn.Sequential):
        return balance  # refused by the pipeline
    try:
        return check_balance(balance, len(layers_of(module)))
    except BalanceError as error:
        what, _, _ = str(error).partition("\nFix: ")
        raise BalanceError(
            f"{what}\nFix: let it be found:\n"
            "    from gpipebal.compat.torchgpipe.balance import balance_by_time\n"
            "    balance = balance_by_time(2, model, sample)"
        ) from None


def _check_tensors(what: str, value: Any) -> None:
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, Tensor):
            raise ModelError(
                f"expected Tensor, but got {type(leaf).__name__}: {what} must be a tensor or a "
                "tuple of tensors.\n"
                "Fix: gpipebal.GPipe also takes values that are not tensors."
            )
