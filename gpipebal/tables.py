"""Tables: what a noun holds, in more detail than its own text, for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from gpipebal.argument_kinds import check_kind, check_whole
from gpipebal.profile import LayerProfile, Profile
from gpipebal.text import aligned, one_line
from gpipebal.units import count, format_bytes, format_percent, format_seconds, not_shown, slowest

__all__ = ["profile_table"]

#: How a flag ends that sends the reader to the provenance, which a table does not show.
_ELSEWHERE = ", see 'approximate'"

_COLUMNS = (
    *("layer", "name", "kind", "forward", "backward", "share"),
    *("parameters", "output", "saved"),
)


def profile_table(profile: Profile, n_layers: int = 30) -> str:
    """Write a profile as a table: one line per layer, then the other costs of a step.

    Args:
        profile: What to show.
        n_layers: The most layers to show: those with the largest times, in the order of the chain.

    Returns:
        Lines without a newline at the end. ``share`` is the layer's part of all forward and
        backward time; ``saved`` is what it keeps for its backward on its own, so the column does
        not add up where neighbours keep the same tensors.

    Example:
        >>> print(profile_table(Profile.from_costs([1.0, 3.0], names=["a", "b"])))
        Profile of 2 layers of given costs, micro-batch of 1 row: forward 4.00 s, backward 8.00 s, \
parameters 0 B
        layer  name  kind   forward  backward   share  parameters  output  saved
            0  a     Layer   1.00 s    2.00 s  25.0 %         0 B     0 B    0 B
            1  b     Layer   3.00 s    6.00 s  75.0 %         0 B     0 B    0 B
    """
    check_kind("profile", profile, Profile)
    n_layers = check_whole("n_layers", n_layers)
    times = [layer.time for layer in profile.layers]
    total, shown = sum(times), slowest(times, n_layers)
    rows = [_COLUMNS, *(_row(profile, k, profile.layers[k], total) for k in shown)]
    lines = [str(profile), *aligned(rows, left=(1, 2))]
    if len(shown) < profile.n_layers:
        lines.append(f"{not_shown('layer', times, len(shown), with_share=True)}.")
    lines += _step_lines(profile)
    for flag in _texts(profile.provenance.get("flags")):
        reasons = _reasons(profile) if flag.endswith(_ELSEWHERE) else []
        lines.append(f"Note: {flag.removesuffix(_ELSEWHERE) + ':' if reasons else flag}")
        lines += reasons
    return "\n".join(lines)


def _row(profile: Profile, k: int, layer: LayerProfile, total: float) -> tuple[str, ...]:
    return (
        str(k),
        layer.name,
        layer.kind,
        format_seconds(layer.forward_time),
        format_seconds(layer.backward_time),
        format_percent(layer.time / total if total else 0.0),
        format_bytes(layer.parameter_bytes),
        format_bytes(layer.output_bytes),
        format_bytes(profile.bytes_of(layer.saved)),
    )


def _step_lines(profile: Profile) -> list[str]:
    step = profile.step
    terms = {
        "gather": step.gather_time,
        "loss": step.loss_time,
        "optimizer": step.optimizer_time,
    }
    known = [f"{name} {format_seconds(time)}" for name, time in terms.items() if time is not None]
    lines = [f"Once per step: {', '.join(known)}."] if known else []
    if step.loss is not None:
        loss = format_seconds(step.loss.time)
        lines.append(f"With the loss inside, for each micro-batch: loss {loss}.")
    if profile.skips:
        names = profile.names
        skips = [
            f"{one_line(skip.name)} ({one_line(names[skip.source])} to "
            f"{one_line(names[skip.destination])}, "
            f"{format_bytes(profile.bytes_of(skip.storages))})"
            for skip in profile.skips
        ]
        lines.append(f"Skip connections: {', '.join(skips)}.")
    if profile.other_sizes:
        sizes = ", ".join(str(other.rows) for other in profile.other_sizes)
        lines.append(f"Also known for micro-batches of {sizes} rows.")
    return lines


def _reasons(profile: Profile) -> list[str]:
    """Say why the memory of layers is approximate, and of how many for each reason."""
    found = profile.provenance.get("approximate")
    each = found.values() if isinstance(found, Mapping) else ()
    counted = Counter(reason for reasons in each for reason in dict.fromkeys(_texts(reasons)))
    return [f"  {count(n, 'layer')}: {reason}" for reason, n in counted.most_common()]


def _texts(value: object) -> list[str]:
    return [one_line(str(item)) for item in value] if isinstance(value, (list, tuple)) else []
