"""Approximate: where the bytes of an estimate are not certain, and why.

All reasons there are, as docs/profiling.md lists them; a profile names the layers that one is true
of, under ``provenance["approximate"]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

__all__ = ["BY_OPERATION", "REASONS", "Reason", "note_fast_paths"]


class Reason(NamedTuple):
    """Why the memory of some layers is approximate.

    Attributes:
        device_types: The kinds of devices that it is true of.
        layers: What such a layer does.
        why: What the device does otherwise.
    """

    device_types: tuple[str, ...]
    layers: str
    why: str

    def __str__(self) -> str:
        return f"{self.layers}: {self.why}"


_CPU, _CUDA, _BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")

#: Why memory may be approximate, by a short name.
REASONS: Mapping[str, Reason] = MappingProxyType(
    {
        "recurrent": Reason(
            _BOTH,
            "recurrent layers",
            "devices run all steps in one kernel, with its own workspaces",
        ),
        "autocast": Reason(
            _BOTH, "autocast inside of the layer", "tensors without values are never cast"
        ),
        "fast_path": Reason(
            _BOTH, "fast path of evaluation mode", "attention without a graph keeps less"
        ),
        "normalised_in_order": Reason(
            _BOTH,
            "group or instance normalisation in channels-last",
            "devices make other copies",
        ),
        "in_space": Reason(
            _BOTH,
            "convolution, group normalisation or padding in channels-last of three dimensions",
            "devices make other copies",
        ),
        "half_statistics": Reason(
            _CPU,
            "normalisation in half precision",
            "a CPU keeps the statistics in half precision too",
        ),
        "bags": Reason(_CPU, "bags of embeddings", "a CPU keeps other indices of them, by mode"),
        "folds": Reason(_CPU, "folds (col2im)", "a CPU folds several images in one piece"),
        "single_pixels": Reason(
            _CPU,
            "convolution of single pixels, weight frozen",
            "the kernel depends on the number of threads",
        ),
        "grouped_heads": Reason(
            _CPU,
            "attention with grouped heads, before torch 2.13",
            "torch chooses between kernels",
        ),
        "sparse_sums": Reason(
            _CPU,
            "tables with sparse gradients, looked up more than once",
            "a CPU keeps rows that are the same once, by the values",
        ),
        "padding": Reason(
            _BOTH,
            "tables with sparse gradients and padding",
            "rows that are padding are left out, by the values",
        ),
        "convolution": Reason(_CUDA, "convolution", "cuDNN chooses a workspace"),
        "batch_norm": Reason(_CUDA, "batch normalisation", "cuDNN may keep a reserve"),
        "attention": Reason(
            _CUDA, "attention", "which kernel runs, and what it keeps, is the device's choice"
        ),
        "rms_norm": Reason(_CUDA, "RMSNorm", "CUDA has one kernel for it, which keeps less"),
        "moved_in_order": Reason(
            _CUDA,
            "images in channels-last, shuffled or rolled",
            "devices make other copies",
        ),
    }
)

_HALF_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "native_group_norm")

#: The reasons that follow from an operation alone, by kind of device and name of the operation.
BY_OPERATION: Mapping[str, Mapping[str, Reason]] = MappingProxyType(
    {
        "cpu": {
            **{
                f"aten::{name} in half precision": REASONS["half_statistics"]
                for name in (*_HALF_NORMS, "native_layer_norm")
            },
            "aten::_embedding_bag": REASONS["bags"],
            "aten::col2im": REASONS["folds"],
        },
        "cuda": {
            "aten::convolution": REASONS["convolution"],
            "aten::native_batch_norm": REASONS["batch_norm"],
            "aten::_native_batch_norm_legit": REASONS["batch_norm"],
        },
    }
)

#: Layers of torch's that have a fast path in evaluation mode.
_FAST = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


def note_fast_paths(layer: nn.Module, notes: set[str]) -> None:
    """Note layers of torch's that run as one operation in evaluation mode, without a graph."""
    if torch.backends.mha.get_fastpath_enabled() and any(
        isinstance(part, _FAST) and not part.training for part in layer.modules()
    ):
        notes.add(str(REASONS["fast_path"]))
