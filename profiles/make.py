"""Make the stored profiles anew: of the built-in models, and of the prediction benchmark's.

    python profiles/make.py                       the estimates: no device, no clock
    python profiles/make.py --measure             those of this machine's CPU: needs a quiet machine
    python profiles/make.py --measure cuda --folder D    those of an H100, on such a device
    python profiles/make.py --only NAME           one of them, by the name of its file
    python profiles/make.py --shrink FILE         a file that `gpipebal profile` wrote

Files are made small: what a reader would fill in anyhow is left out, and times have four digits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gpipebal.files import atomic_path
from gpipebal.memory.layer_peaks import chained_peak
from gpipebal.models.entries import MODELS
from gpipebal.profile import LayerProfile, Profile
from gpipebal.profile.layer import MOMENTS
from gpipebal.profiler import profile_model

HERE = Path(__file__).parent
#: Where the models of the prediction benchmark are.
BENCHMARK = HERE.parent / "benchmarks" / "prediction"

#: Micro-batches of a mini-batch.
CHUNKS = 8
#: Digits of a time that are kept: far more than any measurement has.
DIGITS = 4
#: Fields that another one stands in for where they are not known, and so where they are equal.
_STAND_INS = {
    "no_grad_forward_time": "forward_time",
    "no_grad_forward_peak_bytes": "forward_peak_bytes",
    "accumulating_peak_bytes": "backward_peak_bytes",
}
_BACKWARD = ("backward_peak_bytes", "accumulating_peak_bytes")
#: Fields that those of `_BACKWARD`, without copies, stand in for together.
_CHAINED = ("chained_peak_bytes", "chained_accumulating_peak_bytes")


@dataclass(frozen=True)
class Stored:
    """One file.

    Attributes:
        about: How its name begins: the model's name, or ``prediction-`` and that of one of the
            prediction benchmark's, and what tells it from others.
        device: How its name ends: ``cpu`` (one thread of two), ``h100``, or a device and
            ``-estimate``.
        rows: Rows of the micro-batch; a mini-batch has eight of them.
        other_rows: Other rows.
        image_size: Pixels of the side of an image.
        values: Arguments of the model.
    """

    about: str
    device: str
    rows: int
    other_rows: tuple[int, ...]
    image_size: int | None = None
    values: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name, without ``.json``."""
        return f"{self.about}-rows{self.rows}-{self.device}"

    @property
    def of_benchmark(self) -> bool:
        """Whether the model is one of the prediction benchmark's."""
        return self.about.startswith("prediction-")

    @property
    def model(self) -> str:
        """Name of the built-in model, or of the prediction benchmark's."""
        if self.of_benchmark:
            return self.about.removeprefix("prediction-")
        return self.about.partition("-")[0]

    @property
    def estimate(self) -> str | None:
        """Device to estimate for; None: it is measured."""
        name = self.device.removesuffix("-estimate")
        return name.upper() if name != self.device else None

    @property
    def kind(self) -> str:
        """How it is made: ``'estimate'``, ``'cpu'`` or ``'cuda'``."""
        return "estimate" if self.estimate else "cpu" if self.device == "cpu" else "cuda"


_AMOEBANET, _SMALL_AMOEBANET = {"L": 18, "D": 256}, {"L": 18, "D": 64}
_UNET, _SMALL_UNET = {"B": 5, "C": 64}, {"B": 5, "C": 8}
_GPT = {"layers": 24, "width": 2048, "heads": 16, "context": 1024}
_SMALL_GPT = {"layers": 6, "width": 256, "heads": 4, "vocabulary": 8192, "context": 64}

STORED = (
    Stored("resnet101-224px", "v100-estimate", 16, (32,), 224),
    Stored("amoebanetd-L18-D256-224px", "v100-estimate", 16, (4, 8, 32), 224, _AMOEBANET),
    Stored("unet-B5-C64-192px", "v100-estimate", 4, (2, 8), 192, _UNET),
    Stored("gpt-24x2048-1024tokens", "a100-estimate", 2, (1, 4, 8), None, _GPT),
    Stored("resnet101-64px", "cpu", 4, (8,), 64),
    Stored("amoebanetd-L18-D64-64px", "cpu", 4, (2, 8), 64, _SMALL_AMOEBANET),
    Stored("unet-B5-C8-64px", "cpu", 4, (2, 8), 64, _SMALL_UNET),
    Stored("gpt-6x256-64tokens", "cpu", 4, (2, 8), None, _SMALL_GPT),
    Stored("resnet101-224px", "h100", 16, (32,), 224),
    Stored("amoebanetd-L18-D256-224px", "h100", 16, (8, 32), 224, _AMOEBANET),
    Stored("unet-B5-C64-192px", "h100", 8, (4, 16), 192, _UNET),
    Stored("gpt-24x2048-1024tokens", "h100", 2, (1, 4), None, _GPT),
    # Micro-batches of 8, 4 and 1 chunks, which the benchmark runs.
    Stored("prediction-mlp", "cpu", 64, (128, 512)),
    Stored("prediction-uneven", "cpu", 48, (96, 384)),
    Stored("prediction-convolutions", "cpu", 6, (12, 48)),
    Stored("prediction-residual", "cpu", 4, (8, 32)),
    Stored("prediction-u-net", "cpu", 4, (8, 32)),
    Stored("prediction-resnet", "cpu", 4, (8, 32)),
    Stored("prediction-transformer", "cpu", 2, (4, 16)),
    Stored("prediction-recurrent", "cpu", 8, (16, 64)),
    Stored("prediction-dropout", "cpu", 3, (6, 24)),
)


def main() -> None:
    """Make the files that are asked for."""
    arguments = parse()
    if arguments.shrink is not None:
        save(Profile.load(arguments.shrink), arguments.shrink)
        return
    names = [stored.name for stored in STORED]
    if arguments.only and arguments.only.removesuffix(".json") not in names:
        sys.exit(f"--only {arguments.only!r} is not known.\nFix: one of {', '.join(names)}.")
    for stored in STORED:
        if arguments.only and stored.name != arguments.only.removesuffix(".json"):
            continue
        if not arguments.only and stored.kind != (arguments.measure or "estimate"):
            continue
        path = arguments.folder / f"{stored.name}.json"
        save(make(stored, timeout=arguments.timeout), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB", file=sys.stderr)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--measure",
        nargs="?",
        const="cpu",
        choices=("cpu", "cuda"),
        help="those of this machine's CPU, or of its CUDA device",
    )
    parser.add_argument(
        "--folder", type=Path, default=HERE, help="where to write them (%(default)s)"
    )
    parser.add_argument("--only", metavar="NAME", help="one file, by its name")
    parser.add_argument("--timeout", type=float, help="seconds for the repeats of a measurement")
    parser.add_argument("--shrink", type=Path, metavar="FILE", help="make a profile's file small")
    return parser.parse_args(words)


class Subject(NamedTuple):
    """What a profile is taken of.

    Attributes:
        build: Makes the layers, on the default device.
        sample: A mini-batch of eight micro-batches.
        target: Its target.
        loss_fn: The loss over both.
        optimizer: Makes the optimizer of parameters.
    """

    build: Callable[[], nn.Sequential]
    sample: Any
    target: Any
    loss_fn: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]


def make(stored: Stored, timeout: float | None = None) -> Profile:
    """Measure or estimate a profile."""
    subject = subject_of(stored)
    terms: dict[str, Any] = {
        "chunks": CHUNKS,
        "rows": stored.other_rows,
        "loss_fn": subject.loss_fn,
        "target": subject.target,
        "optimizer": subject.optimizer,
    }
    if stored.estimate is not None:
        terms |= {"method": "estimate", "rates": stored.estimate}
    elif stored.kind == "cuda":
        if not torch.cuda.is_available():
            sys.exit(f"{stored.name} is measured on CUDA.\nFix: run this where torch has CUDA.")
        found = torch.cuda.get_device_name()
        if stored.device.upper() not in found:
            sys.exit(f"{stored.name} is not of this {found}.\nFix: an entry of its own.")
        terms |= {"device": "cuda", "timeout": timeout}
    else:
        terms |= {"device": "cpu", "partitions": 2, "timeout": timeout}
    # On a CUDA device all of the model: neighbours warm its caches.
    with torch.device({"estimate": "meta"}.get(stored.kind, stored.kind)):
        model = subject.build()
    return profile_model(model, subject.sample, **terms)


def subject_of(stored: Stored) -> Subject:
    """Return the model of a stored profile, with a mini-batch and what trains it."""
    if stored.of_benchmark:
        # The folder of the benchmark, and the one of the tools that all benchmarks share.
        sys.path[:0] = [str(BENCHMARK), str(BENCHMARK.parent)]
        try:
            from prediction_benchmark.models import MODELS as BENCHMARK_MODELS
        finally:
            del sys.path[:2]
        model = next(model for model in BENCHMARK_MODELS if model.name == stored.model)
        return Subject(model.make, *model.make_batch(), model.loss_fn, model.optimizer)
    entry = MODELS[stored.model].configure(**stored.values)
    sample, target = (
        make_one(CHUNKS * stored.rows, stored.image_size, seed=0)
        for make_one in (entry.make_sample, entry.make_target)
    )
    return Subject(entry.build, sample, target, entry.loss_fn, _sgd)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def save(profile: Profile, path: Path) -> None:
    """Write a profile as a small file."""
    text = json.dumps(shrink(profile), separators=(",", ":"), allow_nan=False)
    with atomic_path(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def shrink(profile: Profile) -> dict[str, Any]:
    """Return a profile as JSON values, without what a reader fills in anyhow."""
    sizes = (profile, *profile.other_sizes)
    # A field is left out at all sizes or at none, so that they tell the same.
    left_out = [
        {
            name
            for name, stand_in in _STAND_INS.items()
            if all(_equal(size.layers[k], name, stand_in) for size in sizes)
        }
        for k in range(profile.n_layers)
    ]
    for k, names in enumerate(left_out):
        if all(_tells_nothing(size, k, ["output_gradient_bytes"]) for size in sizes):
            names.add("output_gradient_bytes")
        if all(_is_line(size.layers[k]) and _tells_nothing(size, k, _CHAINED) for size in sizes):
            names.update(_CHAINED)
        names.update([MOMENTS[name] for name in names if name in MOMENTS])
    record = _shrunk(replace(profile, other_sizes=()), left_out)
    record["other_sizes"] = [_shrunk(other, left_out) for other in profile.other_sizes]
    for other in record["other_sizes"]:
        # A list of layers that is the same at all sizes.
        other["provenance"].pop("approximate", None)
    return record


def _tells_nothing(profile: Profile, k: int, names: Iterable[str]) -> bool:
    """Tell whether a profile without these fields of a layer says the same of it."""
    layer = replace(profile.layers[k], **dict.fromkeys(names))
    layers = (*profile.layers[:k], layer, *profile.layers[k + 1 :])
    without = replace(profile, layers=layers, other_sizes=())
    return without.gradients_into(k) == profile.gradients_into(k) and all(
        chained_peak(layer, exist, inside=inside)
        == chained_peak(profile.layers[k], exist, inside=inside)
        for exist in (False, True)
        for inside in (False, True)
    )


def _equal(layer: LayerProfile, name: str, stand_in: str) -> bool:
    """Tell whether a field is as what stands in for it, at any number of rows."""
    value = getattr(layer, name)
    if value is not None and name in MOMENTS:
        value = value, getattr(layer, MOMENTS[name])
        return bool(value == (getattr(layer, stand_in), getattr(layer, MOMENTS[stand_in])))
    return value is None or value == getattr(layer, stand_in)


def _is_line(layer: LayerProfile) -> bool:
    """Tell whether no peak of a layer's backward is now one moment's, and now another's."""
    return all(len(getattr(layer, MOMENTS[name])) < 2 for name in (*_BACKWARD, *_CHAINED))


def _shrunk(profile: Profile, left_out: list[set[str]]) -> dict[str, Any]:
    defaults = {f.name: f.default for f in fields(LayerProfile) if f.default is not MISSING}
    record: dict[str, Any] = _rounded(profile.to_dict())
    record["layers"] = [
        {
            name: value
            for name, value in layer.items()
            if name not in without and not _is_default(name, value, defaults)
        }
        for layer, without in zip(record["layers"], left_out, strict=True)
    ]
    return record


def _is_default(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    # A reader wants these two, also where there are none.
    if name in ("outputs", "saved") or name not in defaults:
        return False
    default = defaults[name]
    return value == (list(default) if isinstance(default, tuple) else default)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return value


if __name__ == "__main__":
    main()
