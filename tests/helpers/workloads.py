"""Models that the tests name on the command line, as ``workloads:function``."""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from brief_profiles import make_brief
from torch import Tensor, nn

# In processes of their own, too.
make_brief()

ROWS = 8


def tiny() -> tuple[nn.Sequential, Tensor]:
    """Return a chain of five layers and a sample of eight rows."""
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3)
    )
    return model, torch.randn(ROWS, 6)


def tiny_in_evaluation_mode() -> tuple[nn.Sequential, Tensor]:
    """Return the same as a model comes that was loaded to be used."""
    model, sample = tiny()
    return model.eval(), sample


def without_values() -> tuple[nn.Sequential, Tensor]:
    """Return the same on the meta device."""
    model, sample = tiny()
    return model.to("meta"), sample.to("meta")


def tiny_under_autocast() -> tuple[nn.Sequential, Tensor]:
    """Turn autocast on for all that follows, and return the same."""
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.set_autocast_enabled("cpu", True)
    return tiny()


class _Outgrown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise MemoryError


def too_large() -> tuple[nn.Sequential, Tensor]:
    """Return a chain for which there is not enough memory."""
    return nn.Sequential(_Outgrown()), torch.ones(4, 2)


def printing() -> tuple[nn.Sequential, Tensor]:
    """Print on standard output, as Python does and as a library in C does, and return a chain."""
    print("from Python")
    os.write(1, b"from C\n")
    return tiny()


def tiny_with_everything() -> dict[str, Any]:
    """Return the same with a target, a loss and an optimizer of its own."""
    model, sample = tiny()
    return {
        "model": model,
        "sample": sample,
        "target": torch.randn(ROWS, 3),
        "loss_fn": nn.L1Loss(),
        "optimizer": torch.optim.Adam,
    }


def tiny_classifier() -> dict[str, Any]:
    """Return the same with classes to learn, and no loss."""
    model, sample = tiny()
    return {"model": model, "sample": sample, "target": torch.randint(3, (ROWS,))}


def odd_target() -> dict[str, Any]:
    """Return the same with a target that all rows have in common."""
    model, sample = tiny()
    return {
        "model": model,
        "sample": sample,
        "target": torch.randn(3),
        "loss_fn": lambda output, target: (output.mean(0) - target).square().mean(),
    }


def number_for_target() -> dict[str, Any]:
    """Return the same with a target without rows, which every micro-batch gets."""
    model, sample = tiny()
    return {
        "model": model,
        "sample": sample,
        "target": 0.5,
        "loss_fn": lambda output, target: (output - target).square().mean(),
    }


class Scaled(nn.Module):
    """A linear layer whose output is scaled by what has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 16)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """Scale each feature."""
        return self.linear(x) * scale


def tiny_with_dimensions() -> dict[str, Any]:
    """Return a chain of data (places, rows, features), with a keyword argument without rows."""
    return {
        "model": nn.Sequential(Scaled(), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3)),
        "sample": torch.randn(5, ROWS, 6),
        "target": torch.randn(5, ROWS, 3),
        "loss_fn": nn.MSELoss(),
        "keywords": {"scale": torch.rand(16)},
        "in_dims": 1,
        "keyword_dims": {"scale": None},
        "out_dims": 1,
        "target_dims": 1,
    }


def reading_the_command_line() -> tuple[nn.Sequential, Tensor]:
    """Return a chain of as wide layers as the script's own command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=5)
    return needing_arguments(parser.parse_args().width)


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("the user's own fault")


def with_broken_layer() -> tuple[nn.Sequential, Tensor]:
    """Return a chain whose second layer fails."""
    return nn.Sequential(nn.Linear(2, 2), Broken()), torch.randn(4, 2)


class Choosing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.where(x[:, 0] > 0)[0]
        return x.index_add(0, chosen, x[chosen])


def with_choosing_layer() -> tuple[nn.Sequential, Tensor]:
    """Return a chain whose second layer has shapes that depend on values."""
    return nn.Sequential(nn.Linear(2, 2), Choosing()), torch.randn(4, 2)


def raising() -> None:
    """Fail as a user's function may."""
    raise ZeroDivisionError("the user's own fault")


def interrupted() -> None:
    """Be interrupted while a string is executed, as happens inside an import."""
    exec("raise KeyboardInterrupt")


class Blocking(nn.Module):
    """A layer that never ends when a worker runs it, and says so before."""

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            print("blocked", flush=True)
            time.sleep(3600)
        return x


def with_blocking_layer() -> tuple[nn.Sequential, Tensor]:
    """Return a chain that a worker never gets through."""
    return nn.Sequential(nn.Linear(2, 2), Blocking()), torch.randn(4, 2)


def needing_arguments(width: int) -> tuple[nn.Sequential, Tensor]:
    """Return a chain of as wide layers as it is told."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU()), torch.randn(ROWS, width)


def model_only() -> nn.Sequential:
    """Return a model without a sample."""
    return tiny()[0]


def three_things() -> tuple[Any, ...]:
    """Return a tuple of the wrong length."""
    return (*tiny(), None)


def mapping_without_sample() -> dict[str, Any]:
    """Return a mapping that lacks the sample."""
    return {"model": tiny()[0]}


def mapping_with_surprise() -> dict[str, Any]:
    """Return a mapping with a key that means nothing."""
    return {**tiny_classifier(), "losses": None}


def no_chain() -> tuple[nn.Module, Tensor]:
    """Return a model that is not an nn.Sequential."""
    return nn.Linear(2, 2), torch.randn(4, 2)


def layers_only() -> tuple[list[nn.Module], Tensor]:
    """Return a list of layers."""
    model, sample = tiny()
    return list(model), sample


class Classes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(dim=1)


def without_a_loss() -> tuple[nn.Sequential, Tensor]:
    """Return a chain whose output, classes, has no default loss."""
    model, sample = tiny()
    return model.append(Classes()), sample


def made_optimizer() -> dict[str, Any]:
    """Return an optimizer instead of what makes one."""
    model, sample = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "sample": sample, "optimizer": optimizer}


def no_tensors() -> tuple[nn.Sequential, list[int]]:
    """Return a sample without tensors."""
    return tiny()[0], [1, 2]


def no_layers() -> tuple[nn.Sequential, Tensor]:
    """Return a chain of nothing."""
    return nn.Sequential(), torch.ones(4, 2)


def lazy() -> tuple[nn.Sequential, Tensor]:
    """Return a chain without shapes before its first forward."""
    return nn.Sequential(nn.LazyLinear(3), nn.ReLU()), torch.randn(ROWS, 6)


def two_optimizers() -> dict[str, Any]:
    """Return what makes two optimizers, for matrices and for the rest."""
    model, sample = tiny()

    def shared_out(parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
        matrices = [parameter for parameter in parameters if parameter.dim() == 2]
        rest = [parameter for parameter in parameters if parameter.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.Adam(rest)]

    return {"model": model, "sample": sample, "optimizer": shared_out}


class Wrapper:
    """What steps an optimizer, shows all that it has, and is none by its class."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.inner = torch.optim.Adam(parameters)

    def __getattr__(self, name: str) -> Any:
        """Return what the optimizer has by this name."""
        return getattr(self.__dict__["inner"], name)


def wrapped_optimizer() -> dict[str, Any]:
    """Return a wrapper of an optimizer in place of one."""
    model, sample = tiny()
    return {"model": model, "sample": sample, "optimizer": Wrapper}


def made_optimizers() -> dict[str, Any]:
    """Return two optimizers in place of what makes them."""
    found = two_optimizers()
    return {**found, "optimizer": found["optimizer"](list(found["model"].parameters()))}


def with_closure() -> dict[str, Any]:
    """Return an optimizer whose step calls the model."""
    model, sample = tiny()
    return {"model": model, "sample": sample, "optimizer": torch.optim.LBFGS}


def on_meta() -> tuple[nn.Sequential, Tensor]:
    """Return a chain that has only shapes."""
    return nn.Sequential(nn.Linear(6, 3, device="meta")), torch.randn(ROWS, 6)


NOT_A_FUNCTION = 3
