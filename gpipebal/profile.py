"""Profile: what every layer of a chain costs, for one micro-batch, and how that was found out.

A profile is all that the planner knows of a model. It holds times in seconds and sizes in bytes,
and keeps what a layer saves for its backward as a *set of storages*: two neighbours that save the
same tensor (the output of one is the input of the other) hold it once, so the memory of a
partition is the union of the sets of its layers and never their sum.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from gpipebal.errors import FileFormatError, ProfileError
from gpipebal.files import read_record, write_record
from gpipebal.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LayerProfile", "Profile", "StepTerms"]

FORMAT = "gpipebal-profile"
VERSION = 1


@dataclass(frozen=True)
class LayerProfile:
    """Costs of one layer, for one micro-batch of `Profile.rows` rows.

    Attributes:
        name: Name of the layer in its container.
        kind: Name of its class.
        forward_time: Median seconds of a forward that records the graph.
        backward_time: Median seconds of a backward, without recompute.
        recompute_time: Median seconds of a forward run again during the backward.
        forward_spread: Interquartile range of the measured forwards, in seconds.
        backward_spread: Interquartile range of the measured backwards, in seconds.
        parameter_bytes: Bytes of parameters that no earlier layer holds.
        gradient_bytes: Bytes of gradients that those parameters will have.
        buffer_bytes: Bytes of buffers that no earlier layer holds.
        optimizer_bytes: Bytes of optimizer state of its parameters; None if it is not known.
        outputs: Storages (indices into `Profile.storages`) that the layer hands on.
        saved: Storages that it keeps from its forward until its backward, without parameters
            and buffers.
        output_bytes: Bytes of the storages in `outputs`.
        forward_peak_bytes: Largest memory during its forward beyond what was there at its
            start, so with its outputs and what it saves.
        backward_peak_bytes: Largest memory during its backward beyond what was there at its
            start, so with the gradients that it makes.
        fingerprint: Short hash of its class, options, and parameter shapes.
    """

    name: str
    kind: str
    forward_time: float
    backward_time: float
    recompute_time: float
    forward_spread: float = 0.0
    backward_spread: float = 0.0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    buffer_bytes: int = 0
    optimizer_bytes: int | None = None
    outputs: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    output_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    fingerprint: str = ""

    @property
    def time(self) -> float:
        """Forward plus backward, in seconds."""
        return self.forward_time + self.backward_time


@dataclass(frozen=True)
class StepTerms:
    """What a training step costs beside the layers, once per mini-batch; None: not measured.

    Attributes:
        gather_time: Seconds to join the micro-batches' outputs.
        loss_time: Seconds of the loss, forward and backward, over the whole mini-batch.
        loss_bytes: Largest memory of gathered outputs, loss and their gradients.
        optimizer_time: Seconds of the optimizer's step and of clearing the gradients.
    """

    gather_time: float | None = None
    loss_time: float | None = None
    loss_bytes: int | None = None
    optimizer_time: float | None = None


@dataclass(frozen=True)
class Profile:
    """Costs of a chain of layers for one micro-batch, with provenance.

    Attributes:
        layers: One `LayerProfile` per layer, in the order of the chain.
        storages: Bytes of every storage that `LayerProfile.saved` and `.outputs` name.
        inputs: Storages of the chain's own input.
        rows: Rows of the micro-batch that was measured.
        mini_batch_rows: Rows of the sample, that is of the mini-batch.
        chunks: Micro-batches that the sample was parted into.
        step: Costs of a step beside the layers.
        provenance: How it was measured: ``method``, ``device``, ``threads``, ``rounds``,
            ``torch``, ``gpipebal``, ``date`` and more; JSON values.
    """

    layers: tuple[LayerProfile, ...]
    storages: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    rows: int = 1
    mini_batch_rows: int = 1
    chunks: int = 1
    step: StepTerms = field(default_factory=StepTerms)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check()

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers, in order."""
        return tuple(layer.name for layer in self.layers)

    @property
    def threads(self) -> int | None:
        """Intra-operation threads that the measurement had; None if it is not known."""
        threads = self.provenance.get("threads")
        return threads if isinstance(threads, int) else None

    @classmethod
    def from_costs(
        cls,
        forward: Sequence[float],
        backward: Sequence[float] | None = None,
        *,
        recompute: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        parameter_bytes: Sequence[int] | None = None,
        saved_bytes: Sequence[int] | None = None,
        output_bytes: Sequence[int] | None = None,
        rows: int = 1,
        chunks: int = 1,
    ) -> Profile:
        """Make a profile from given costs, for planning without a model.

        Args:
            forward: Seconds of each layer's forward, for one micro-batch.
            backward: Seconds of each backward; None: twice the forward.
            recompute: Seconds of each recompute; None: the same as the forward.
            names: Names of the layers; None: their indices.
            parameter_bytes: Bytes of each layer's parameters; None: 0. Gradients take as much.
            saved_bytes: Bytes that each layer saves on its own; None: 0.
            output_bytes: Bytes of each layer's output; None: 0.
            rows: Rows of one micro-batch.
            chunks: Micro-batches of a mini-batch.

        Raises:
            ProfileError: lengths that differ, or a cost that is negative or not finite.

        Example:
            >>> Profile.from_costs([1.0, 2.0]).layers[1].backward_time
            4.0
        """
        backward = [2 * time for time in forward] if backward is None else backward
        recompute = forward if recompute is None else recompute
        names = [str(index) for index in range(len(forward))] if names is None else names
        nothing = [0] * len(forward)
        parameter_bytes = nothing if parameter_bytes is None else parameter_bytes
        saved_bytes = nothing if saved_bytes is None else saved_bytes
        output_bytes = nothing if output_bytes is None else output_bytes
        columns = {
            "backward": backward,
            "recompute": recompute,
            "names": names,
            "parameter_bytes": parameter_bytes,
            "saved_bytes": saved_bytes,
            "output_bytes": output_bytes,
        }
        for name, column in columns.items():
            if len(column) != len(forward):
                raise ProfileError(
                    f"costs have different lengths: len({name})={len(column)} "
                    f"(expected {len(forward)}, as many as forward).\n"
                    "Fix: give one value per layer."
                )
        layers = []
        storages: list[int] = []
        for index, name in enumerate(names):
            storages += [saved_bytes[index], output_bytes[index]]
            layers.append(
                LayerProfile(
                    name=name,
                    kind="Layer",
                    forward_time=forward[index],
                    backward_time=backward[index],
                    recompute_time=recompute[index],
                    parameter_bytes=parameter_bytes[index],
                    gradient_bytes=parameter_bytes[index],
                    saved=(2 * index,),
                    outputs=(2 * index + 1,),
                    output_bytes=output_bytes[index],
                    forward_peak_bytes=saved_bytes[index] + output_bytes[index],
                    backward_peak_bytes=output_bytes[index - 1] if index else 0,
                )
            )
        return cls(
            layers=tuple(layers),
            storages=tuple(storages),
            rows=rows,
            mini_batch_rows=rows * chunks,
            chunks=chunks,
            provenance={"method": "costs"},
        )

    def check(self) -> None:
        """Verify the invariants of a profile.

        Raises:
            ProfileError: no layers, a count below 1, a time or size that is negative or not
                finite, or a storage that does not exist.
        """
        if not self.layers:
            raise ProfileError(
                "profile has no layers: len(layers)=0 (expected 1 or more).\n"
                "Fix: profile a module with at least one layer."
            )
        for name in ("rows", "mini_batch_rows", "chunks"):
            least = 0 if name != "chunks" else 1
            value = getattr(self, name)
            if not _is_quantity(value, whole=True) or value < least:
                raise _bad_value("profile", name, value)
        threads = self.provenance.get("threads")
        if threads is not None and (type(threads) is not int or threads < 1):
            raise _bad_value("provenance", "threads", threads)
        for index, n_bytes in enumerate(self.storages):
            if not _is_quantity(n_bytes, whole=True):
                raise _bad_value("storage", str(index), n_bytes)
        for layer in self.layers:
            for name, value in _quantities(layer):
                if not _is_quantity(value, whole=name.endswith("_bytes")):
                    raise _bad_value(f"layer {layer.name!r}", name, value)
            for storage in (*layer.saved, *layer.outputs):
                _check_storage(storage, len(self.storages), f"layer {layer.name!r}")
        for storage in self.inputs:
            _check_storage(storage, len(self.storages), "inputs")
        for name, value in asdict(self.step).items():
            if value is not None and not _is_quantity(value, whole=name.endswith("_bytes")):
                raise _bad_value("step", name, value)

    def bytes_of(self, storages: Iterable[int]) -> int:
        """Add up the bytes of storages, each counted once."""
        return sum(self.storages[index] for index in set(storages))

    def to_frame(self) -> pd.DataFrame:
        """Return one row per layer: times in seconds, sizes in bytes, one column each.

        ``saved_bytes`` counts what the layer saves, on its own: the column does not add up to
        the memory of a partition, because neighbours share storages.
        """
        import pandas as pd

        rows = []
        for index, layer in enumerate(self.layers):
            row: dict[str, Any] = {"layer": index}
            for item in fields(layer):
                if item.name not in ("saved", "outputs"):
                    row[item.name] = getattr(layer, item.name)
            row["saved_bytes"] = self.bytes_of(layer.saved)
            row["rows"] = self.rows
            rows.append(row)
        return pd.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as JSON values."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "rows": self.rows,
            "mini_batch_rows": self.mini_batch_rows,
            "chunks": self.chunks,
            "provenance": dict(self.provenance),
            "step": asdict(self.step),
            "inputs": list(self.inputs),
            "storages": list(self.storages),
            "layers": [asdict(layer) for layer in self.layers],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Profile:
        """Read what `to_dict` returned.

        Raises:
            FileFormatError: a field is missing or unknown, or has a value it cannot have.
        """
        try:
            layers = tuple(
                LayerProfile(
                    **{
                        **layer,
                        "saved": tuple(layer["saved"]),
                        "outputs": tuple(layer["outputs"]),
                    }
                )
                for layer in record["layers"]
            )
            for layer in layers:
                if not all(isinstance(getattr(layer, n), str) for n in _TEXT_FIELDS):
                    raise TypeError("name, kind and fingerprint of a layer are text")
            return cls(
                layers=layers,
                storages=tuple(record["storages"]),
                inputs=tuple(record["inputs"]),
                rows=record["rows"],
                mini_batch_rows=record["mini_batch_rows"],
                chunks=record["chunks"],
                step=StepTerms(**record["step"]),
                provenance=dict(record["provenance"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
            raise FileFormatError(
                f"profile is damaged: {reason.splitlines()[0]}\nFix: profile the model again."
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a JSON file, whole or not at all."""
        write_record(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a file that `save` wrote.

        Raises:
            FileFormatError: the file cannot be read, is damaged, or is from a newer gpipebal.
        """
        return cls.from_dict(read_record(path, FORMAT, VERSION))

    def with_step(self, step: StepTerms) -> Profile:
        """Return the same profile with other step terms."""
        return replace(self, step=step)

    def __str__(self) -> str:
        forward = sum(layer.forward_time for layer in self.layers)
        backward = sum(layer.backward_time for layer in self.layers)
        parameters = sum(layer.parameter_bytes for layer in self.layers)
        where = self.provenance.get("device", self.provenance.get("method", "given costs"))
        return (
            f"Profile of {self.n_layers} layers on {where}, micro-batch of {self.rows} rows: "
            f"forward {format_seconds(forward)}, backward {format_seconds(backward)}, "
            f"parameters {format_bytes(parameters)}"
        )


_TEXT_FIELDS = ("name", "kind", "fingerprint")


def _quantities(layer: LayerProfile) -> list[tuple[str, Any]]:
    skipped = (*_TEXT_FIELDS, "saved", "outputs")
    values = [(f.name, getattr(layer, f.name)) for f in fields(layer) if f.name not in skipped]
    return [(n, v) for n, v in values if not (n == "optimizer_bytes" and v is None)]


def _is_quantity(value: Any, *, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int,) if whole else (int, float)):
        return False
    # An int beyond 63 bits is no number of bytes or seconds, and may be beyond a float too.
    return 0 <= value < 2**63 and math.isfinite(value)


def _check_storage(storage: Any, n_storages: int, where: str) -> None:
    if type(storage) is not int or not 0 <= storage < n_storages:
        raise ProfileError(
            f"{where} names a storage that does not exist: storage={storage!r} "
            f"(expected 0..{n_storages - 1}).\nFix: profile the model again."
        )


def _bad_value(where: str, name: str, value: Any) -> ProfileError:
    kind = "a whole number of bytes" if name.endswith("_bytes") else "a finite number"
    return ProfileError(
        f"{where} has an impossible value: {name}={value!r} (expected {kind}, 0 or more).\n"
        "Fix: correct the value, or profile the model again."
    )
