"""Profile: what every layer of a chain costs, for one micro-batch, and how that was found out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

from gpipebal.argument_kinds import check_list, check_whole, keep_as_tuples
from gpipebal.errors import KindError
from gpipebal.files import read_noun, write_record
from gpipebal.html import profile_html
from gpipebal.profile.checks import STORAGE_FIELDS, check_profile
from gpipebal.profile.given import parts_of_costs
from gpipebal.profile.gradients import GradientFlow, find_flow
from gpipebal.profile.layer import MOMENTS, LayerProfile, SkipProfile, StepTerms, TieProfile
from gpipebal.profile.match import ProfileMatch, match_profile
from gpipebal.profile.record import FORMAT, VERSION, parts_of, record_of
from gpipebal.profile.sizes import at_rows
from gpipebal.text import one_line, short_repr
from gpipebal.units import count, format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LayerTimes", "Profile"]


class LayerTimes(TypedDict):
    """Seconds of every layer, by kind."""

    forward: list[float]
    backward: list[float]
    recompute: list[float]


@dataclass(frozen=True)
class Profile:
    """Costs of a chain of layers for one micro-batch, with provenance.

    Attributes:
        layers: One `LayerProfile` per layer, in the order of the chain.
        storages: Bytes of every storage that `LayerProfile.saved` and `.outputs` name.
        inputs: Storages of the chain's own input.
        common_inputs: Those of the inputs that all micro-batches have in common: tensors without
            rows.
        without_gradient: Storages between layers that no gradient goes back through: integers,
            constants, and what comes before the first layer that is trained.
        rows: Rows of the micro-batch that was measured.
        mini_batch_rows: Rows of the sample, which is a mini-batch.
        chunks: Micro-batches that the sample was divided into.
        step: Costs of a step besides the layers.
        skips: Skip connections between layers.
        ties: Parameters that several layers share.
        other_sizes: The same chain measured at other numbers of rows, in ascending order; these
            profiles have no other sizes themselves.
        provenance: How it was measured: ``method``, ``device``, ``threads``, ``rounds``,
            ``torch``, ``gpipebal``, ``date`` and more; JSON values.

    Raises:
        ProfileError: an invalid cost, or a storage that does not exist.

    Example:
        >>> profile = Profile.from_costs([3.0, 1.0], names=["a", "b"], saved_bytes=[64, 0])
        >>> profile.names, profile.layers[0].backward_time
        (('a', 'b'), 6.0)
        >>> profile.bytes_of(profile.layers[0].saved)
        64
    """

    layers: tuple[LayerProfile, ...]
    storages: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    common_inputs: tuple[int, ...] = ()
    without_gradient: tuple[int, ...] = ()
    rows: int = 1
    mini_batch_rows: int = 1
    chunks: int = 1
    step: StepTerms = field(default_factory=StepTerms)
    skips: tuple[SkipProfile, ...] = ()
    ties: tuple[TieProfile, ...] = ()
    other_sizes: tuple[Profile, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keep_as_tuples(self)
        check_list("other_sizes", self.other_sizes, Profile)
        check_profile(self)

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
            parameter_bytes: Bytes of each layer's parameters; None: 0. Gradients take the same, and
                count from the end of the layer's first backward on.
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
        columns = {
            "forward": forward,
            "backward": backward,
            "recompute": recompute,
            "names": names,
            "parameter_bytes": parameter_bytes,
            "saved_bytes": saved_bytes,
            "output_bytes": output_bytes,
        }
        return cls(**parts_of_costs(rows, chunks, columns))

    @property
    def shares_memory(self) -> bool:
        """Whether partitions live in one memory, as those of a CPU do."""
        return self.provenance.get("device_type") == "cpu"

    @property
    def layer_times(self) -> LayerTimes:
        """Seconds of every layer by kind, as a `Problem` or a `Device` takes them.

        Example:
            >>> Profile.from_costs([1.0, 2.0]).layer_times["backward"]
            [2.0, 4.0]
        """
        return LayerTimes(
            forward=[layer.forward_time for layer in self.layers],
            backward=[layer.backward_time for layer in self.layers],
            recompute=[layer.recompute_time for layer in self.layers],
        )

    def bytes_of(self, storages: Iterable[int]) -> int:
        """Add up the bytes of storages, each counted once."""
        try:
            return sum(self.storages[index] for index in set(storages))
        except (TypeError, IndexError) as error:
            raise KindError(
                f"storages are not the profile's: storages={storages!r:.60} (expected indices, "
                f"0..{len(self.storages) - 1}).\nFix: storages=layer.saved, say."
            ) from error

    def input_bytes(self, chunks: int) -> int:
        """Add up the inputs of all micro-batches of a mini-batch."""
        common, chunks = self.bytes_of(self.common_inputs), check_whole("chunks", chunks)
        return chunks * (self.bytes_of(self.inputs) - common) + common

    def gradient_bytes_of(self, storages: Iterable[int]) -> int:
        """Add up the bytes of the gradients of storages, which are as large as the storages."""
        return self.bytes_of(self.with_gradient(storages))

    def gradients_into(self, layer: int) -> int:
        """Add up the bytes of the gradients that a layer's backward is given for its outputs."""
        costs = self.layers[layer]
        known = costs.output_gradient_bytes
        return self.gradient_bytes_of(costs.outputs) if known is None else known

    def further_gradients(self, layer: int) -> int:
        """Return how much more `gradients_into` is than the outputs' storages; may be negative."""
        return self.gradients_into(layer) - self.gradient_bytes_of(self.layers[layer].outputs)

    def with_gradient(self, storages: Iterable[int]) -> frozenset[int]:
        """Return those of some storages that a gradient goes back through."""
        return frozenset(storages) - self._without_gradient

    @cached_property
    def gradient_flow(self) -> GradientFlow:
        """Memory of all gradients on their way back."""
        return find_flow(self)

    @cached_property
    def n_frozen(self) -> int:
        """How many layers at the beginning hand on nothing that needs a gradient.

        A partition that ends among them does no backward and recomputes nothing. The last layer
        never counts: what comes after the chain is not known.
        """
        for k, layer in enumerate(self.layers[:-1]):
            handed = [frozenset(layer.outputs)]
            handed += [frozenset(skip.storages) for skip in self.skips if skip.source == k]
            if not all(storages and not self.with_gradient(storages) for storages in handed):
                return k
        return self.n_layers - 1

    @cached_property
    def keepers(self) -> Mapping[int, int]:
        """Which layers keep the storages that are `kept_outputs`, by storage."""
        return {s: k for k, layer in enumerate(self.layers) for s in layer.kept_outputs}

    @cached_property
    def _without_gradient(self) -> frozenset[int]:
        return frozenset(self.without_gradient)

    def at_rows(self, rows: int, *, mini_batch_rows: int | None = None) -> Profile:
        """Say what the chain costs for micro-batches of another number of rows.

        A measured size is returned as it was measured. Otherwise every time is an overhead plus a
        time per row, fitted to all measured sizes, or interpolated where that fits badly; bytes
        are exact where they are a line in the rows, else interpolated and rounded up. See
        `gpipebal.profile.sizes` for which fits are bad, and for rows beyond the measured sizes.

        Args:
            rows: Rows of a micro-batch, 1 or more.
            mini_batch_rows: Rows of the mini-batch; None: those of this profile.

        Returns:
            A `Profile` without other sizes, or this one if these are its own rows. Its chunks are
            as many as the mini-batch then has.
            How it was made is recorded in ``provenance['at_rows']``: from which rows, whether
            beyond them (``'extrapolated'``), and which layers were interpolated.

        Raises:
            ProfileError: an invalid number of rows.

        Complexity:
            O(n s) for n layers and storages, and s measured sizes.

        Example:
            >>> from dataclasses import replace
            >>> small = Profile.from_costs([3.0], output_bytes=[80], rows=2)
            >>> large = Profile.from_costs([5.0], output_bytes=[160], rows=4)
            >>> between = replace(small, other_sizes=(large,)).at_rows(3)
            >>> between.layers[0].forward_time, between.layers[0].output_bytes
            (4.0, 120)
        """
        return at_rows(self, rows, mini_batch_rows)

    def matches(self, module: Any) -> ProfileMatch:
        """Say whether the profile still fits a model; see `match_profile`."""
        return match_profile(self, module)

    def to_frame(self, *, all_sizes: bool = False) -> pd.DataFrame:
        """Return one row per layer, in seconds and bytes; `LayerProfile` explains the columns.

        ``saved_bytes`` counts what each layer saves by itself: the column does not add up to the
        memory of a partition, because neighbours share storages.

        Args:
            all_sizes: Return every layer at every measured size, in ascending order of ``rows``.
        """
        import pandas as pd

        sizes = [self]
        if all_sizes:
            sizes = sorted((self, *self.other_sizes), key=lambda size: size.rows)
        lines = []
        for size in sizes:
            for index, layer in enumerate(size.layers):
                line: dict[str, Any] = {"layer": index}
                for item in fields(layer):
                    if item.name not in (*STORAGE_FIELDS, *MOMENTS.values()):
                        line[item.name] = getattr(layer, item.name)
                line["saved_bytes"] = size.bytes_of(layer.saved)
                line["rows"] = size.rows
                lines.append(line)
        return pd.DataFrame(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as JSON values."""
        return record_of(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Profile:
        """Read what `to_dict` returned.

        Raises:
            FileFormatError: a field is missing or unknown, or has a value it cannot have.
        """
        return parts_of(record, cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a JSON file, whole or not at all."""
        write_record(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a file that `save` wrote.

        Raises:
            FileFormatError: the file cannot be read, is damaged, or is of another version.
            MissingFileError: the file does not exist (a FileFormatError).
        """
        return read_noun(path, FORMAT, VERSION, cls.from_dict)

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        return profile_html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def __str__(self) -> str:
        forward = sum(layer.forward_time for layer in self.layers)
        backward = sum(layer.backward_time for layer in self.layers)
        parameters = sum(layer.parameter_bytes for layer in self.layers)
        method = self.provenance.get("method", "costs")
        kind = "Estimated profile" if method == "estimate" else "Profile"
        device = self.provenance.get("device")
        where = f"on {one_line(str(device))}" if device else "of given costs"
        return (
            f"{kind} of {count(self.n_layers, 'layer')} {where}, "
            f"micro-batch of {count(self.rows, 'row')}: forward {format_seconds(forward)}, "
            f"backward {format_seconds(backward)}, parameters {format_bytes(parameters)}"
        )
