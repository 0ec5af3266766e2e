"""Models whose rows are not along dim 0, and keyword arguments: profiled as the pipeline runs."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.pipeline import GPipe, measure_memory, scatter
from gpipebal.profiler.chain.batch import Batch

pytestmark = pytest.mark.timeout(120)

WORDS, WIDTH, LENGTH, ROWS = 50, 16, 12, 8
#: Where the rows of the language model are: words stand along dim 0.
IN = {"keywords": {"mask": torch.ones(LENGTH, LENGTH).tril().log()}, "keyword_dims": {"mask": None}}
IN["in_dims"] = 1
DIMS = {**IN, "out_dims": 1, "target_dims": 1}

WAYS = [
    {"timeout": 0},
    {"timeout": 0, "one_at_a_time": True},
    {"timeout": 0, "share_identical": True},
    {"method": "estimate", "rates": "CPU core"},
]
NAMES = ["measured", "alone", "shared", "estimated"]


class Embed(nn.Module):
    """Takes words, and a mask by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)

    def forward(self, words: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Hand the mask on."""
        return self.embedding(words), mask


class Block(nn.Module):
    """A transformer block with the words along dim 0, as torch has them by default."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Hand the mask on."""
        value, mask = pair
        return self.block(value, src_mask=mask), mask


class Head(nn.Module):
    """Gives the logits, (words, rows, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WORDS)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        """Drop the mask."""
        return self.linear(pair[0])


def language_model(n_blocks: int = 2) -> nn.Sequential:
    """Return a small one."""
    torch.manual_seed(0)
    return nn.Sequential(Embed(), *(Block() for _ in range(n_blocks)), Head())


def words() -> tuple[Tensor, Tensor]:
    """Return words and the words behind them, (words, rows)."""
    text = torch.randint(0, WORDS, (LENGTH + 1, ROWS), generator=torch.Generator().manual_seed(1))
    return text[:-1].clone(), text[1:].clone()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Take the mean over all words."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def profiled(model: nn.Sequential, chunks: int = 4, **options: Any) -> gb.Profile:
    """Profile it with its loss."""
    sample, target = words()
    given = {"loss_fn": loss_of, "target": target, "progress": False, **DIMS, **options}
    return gb.profile_model(model, sample, chunks=chunks, **given)


@pytest.fixture(scope="module", params=WAYS, ids=NAMES)
def by_way(request: pytest.FixtureRequest) -> gb.Profile:
    """Profile the language model in each way once."""
    return profiled(language_model(), **request.param)


@pytest.mark.parametrize("inside", [False, True])
def test_the_plan_counts_what_lives(by_way: gb.Profile, inside: bool) -> None:
    """In one partition plan and count differ by numbers of the loss, whatever micro-batches.

    Micro-batches are views with gaps into the mini-batch, and so are the gradients of outputs.
    """
    sample, target = words()
    for mode in ("never", "except_last", "always"):
        model = language_model()
        pipe = GPipe(
            model,
            [4],
            chunks=4,
            checkpoint=mode,
            in_dims=1,
            out_dims=1,
            keyword_dims={"mask": None},
        )
        for _ in range(2):
            model.zero_grad()
            with measure_memory(pipe) as meter:
                if inside:
                    pipe.step(
                        sample,
                        target=target,
                        loss_fn=loss_of,
                        target_dims=1,
                        keywords=IN["keywords"],
                    )
                else:
                    output = pipe(sample, **IN["keywords"])
                    loss_of(output, target).backward()
                    del output
        plan = gb.evaluate(by_way, [4], checkpoint=mode, loss_inside=inside)
        planned, counted = plan.partitions[0].memory.total, meter.peak_bytes[0]
        pipe.close()
        # Inside, the gradient of an output has no gaps, and what is planned for them is too much.
        most = 1.05 if inside else 1.001
        assert 0.999 * counted <= planned <= most * counted, (mode, planned, counted)


def test_what_has_no_rows_is_there_once(by_way: gb.Profile) -> None:
    """The mask is a common input, as large at all rows, however many micro-batches there are."""
    (mask,) = by_way.common_inputs
    assert by_way.bytes_of([mask]) == 4 * LENGTH * LENGTH
    assert by_way.input_bytes(4) == 8 * LENGTH * ROWS + 4 * LENGTH * LENGTH
    for rows in (1, 3, 4, 5):
        other = by_way.at_rows(rows)
        assert other.bytes_of(other.common_inputs) == 4 * LENGTH * LENGTH
        assert other.bytes_of(other.inputs) == 8 * LENGTH * rows + 4 * LENGTH * LENGTH
    assert (by_way.rows, by_way.mini_batch_rows) == (2, ROWS)


def test_what_has_no_rows_is_as_large_at_all_rows() -> None:
    """Also where one size alone is known."""
    profile = profiled(language_model(), method="estimate", rates="CPU core", rows=())
    other = profile.at_rows(5)
    assert not other.other_sizes and not profile.other_sizes
    assert other.bytes_of(other.common_inputs) == 4 * LENGTH * LENGTH
    assert other.bytes_of(other.inputs) == 8 * LENGTH * 5 + 4 * LENGTH * LENGTH


@pytest.mark.parametrize("way", WAYS[2:], ids=NAMES[2:])
def test_the_last_layer_is_like_no_other(way: dict[str, Any]) -> None:
    """It gets a gradient with gaps, which no layer before it does, though all are alike."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    given: dict[str, Any] = {
        "chunks": 4,
        "in_dims": 1,
        "out_dims": 1,
        "progress": False,
        "rows": (),
    }
    profile = gb.profile_model(model, torch.randn(6, 8, 16), **given, **way)
    second, third, last = profile.layers[1:]
    assert second.backward_peak_bytes == third.backward_peak_bytes
    assert last.backward_peak_bytes - third.backward_peak_bytes == 4 * 6 * 2 * 16


def test_a_target_need_not_have_rows() -> None:
    """Every micro-batch gets all of it, in a profile as in a step; and so it does a number."""
    sample, target = torch.randn(8, 4), torch.zeros(4)
    for method in ("measure", "estimate"):
        for one, dims in ((target, None), (2.0, 0)):
            profile = gb.profile_model(
                nn.Sequential(nn.Linear(4, 4)), sample, chunks=2, target=one, target_dims=dims,
                loss_fn=lambda output, given: (output - given).square().mean(), method=method,
                progress=False,
            )  # fmt: skip
            assert profile.step.loss is not None and profile.step.whole_loss is not None


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_values_of_all_kinds_are_parted() -> None:
    """A class that looks at what is in it, and quantized tensors, go through as they are."""

    class Strict(NamedTuple):
        x: Tensor

    class Checked(Strict):
        def __new__(cls, x: Any) -> Checked:
            assert isinstance(x, Tensor)
            return super().__new__(cls, x)

    class Take(nn.Module):
        def forward(self, value: Strict) -> Tensor:
            return value.x * 2

    torch.utils._pytree.register_pytree_node(
        Checked, lambda value: ([value.x], None), lambda leaves, _: Checked(*leaves)
    )
    profile = gb.profile_model(
        nn.Sequential(Take(), nn.Linear(4, 4)), Checked(torch.randn(8, 4)), chunks=2, timeout=0,
        progress=False,
    )  # fmt: skip
    assert not [flag for flag in profile.provenance["flags"] if "not tried" in flag]

    class Dequantize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.dequantize()

    quantized = torch.quantize_per_tensor(torch.randn(8, 4), 0.1, 0, torch.qint8)
    profile = gb.profile_model(
        nn.Sequential(Dequantize(), nn.Linear(4, 4)), quantized, chunks=2, timeout=0,
        progress=False,
    )  # fmt: skip
    assert profile.rows == 4


def test_an_estimate_has_the_bytes_of_a_measurement() -> None:
    """Layouts, gaps and common inputs are those that a run has."""
    measured = profiled(language_model(), timeout=0, rows=(1, 4))
    estimated = profiled(language_model(), method="estimate", rates="CPU core", rows=(1, 4))
    assert estimated.common_inputs == measured.common_inputs
    for one, two in zip(
        (measured, *measured.other_sizes), (estimated, *estimated.other_sizes), strict=True
    ):
        for layer, other in zip(one.layers, two.layers, strict=True):
            assert one.bytes_of(layer.saved) == two.bytes_of(other.saved)
            for name in ("saved", "outputs", "forward_peak_bytes", "backward_peak_bytes"):
                assert getattr(layer, name) == getattr(other, name), (layer.name, name)


def test_it_is_tried_as_a_pipeline() -> None:
    """The trial calls the pipeline as its user will."""
    profile = profiled(language_model(), timeout=0.1)
    flags = profile.provenance["flags"]
    assert not [flag for flag in flags if "not tried" in flag or "not measured" in flag], flags
    assert profile.provenance["trial"]["balance"] and profile.step.loss is not None


def test_one_micro_batch_is_not_joined() -> None:
    """Its gradient is the mini-batch's own, and has no gaps."""
    dense = profiled(language_model(), chunks=1, timeout=0).layers[-1]
    parted = profiled(language_model(), chunks=4, timeout=0, rows=ROWS).other_sizes[0].layers[-1]
    assert parted.backward_peak_bytes - dense.backward_peak_bytes == 4 * LENGTH * ROWS * WORDS


def test_the_front_door_takes_dimensions() -> None:
    """`balance_by_time` and `balance_by_size` as well."""
    model, (sample, _) = language_model(), words()
    for balance in (
        gb.balance_by_time(model, sample, 2, timeout=0.0, chunks=2, **IN),
        gb.balance_by_size(model, sample, 2, chunks=2, **IN),
    ):
        assert sum(balance) == 4 and len(balance) == 2
        pipe = GPipe(model, balance, chunks=2, in_dims=1, out_dims=1, keyword_dims={"mask": None})
        assert pipe(sample, **IN["keywords"]).shape == (LENGTH, ROWS, WORDS)
        pipe.close()


@pytest.mark.parametrize("method", ["measure", "estimate"])
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"in_dims": 2}, gb.errors.ModelError, r"sample tensor cannot be divided: .* along dim 2"),
        ({"in_dims": (1, None)}, gb.errors.BalanceError, r"in_dims does not fit"),
        ({"in_dims": None}, gb.errors.ModelError, r"with rows: every dimension is None"),
        ({"keyword_dims": {"mask": 0}}, gb.errors.ModelError, r"different rows: leaf .*'mask'"),
        ({"keyword_dims": {"musk": 0}}, gb.errors.BalanceError, r"first layer does not take"),
        ({"keywords": {}}, gb.errors.ProfileError, r"layer '0'.* failed"),
        ({"keywords": ["mask"]}, gb.errors.ModelError, r"keywords is not a dict"),
        ({"keywords": {"musk": 1}}, gb.errors.ModelError, r"keywords has a name .*'musk'"),
        ({"out_dims": 3}, gb.errors.ModelError, r"output tensor cannot be joined: .* along dim 3"),
        ({"out_dims": (0, 1)}, gb.errors.BalanceError, r"out_dims does not fit"),
        ({"target_dims": "1"}, gb.errors.BalanceError, r"target_dims does not fit"),
    ],
)
def test_dimensions_that_do_not_fit_are_named(
    method: Any, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    """One clear error, from a measurement as from an estimate."""
    with pytest.raises(error, match=match):
        profiled(language_model(), method=method, **options)


def test_a_plan_knows_where_rows_were() -> None:
    """A pipeline that parts the mini-batch along another dimension says so."""
    model = language_model()
    plan = gb.solve(profiled(model, method="estimate", rates="CPU core"), 2)
    assert plan.provenance["in_dims"] == [1]
    assert plan.provenance["keyword_dims"] == {"mask": [None]}
    with pytest.warns(UserWarning, match=r"divided along dim 0, but .* in_dims of \[1\]"):
        gb.GPipe.from_plan(model, plan, keyword_dims={"mask": None}).close()
    with pytest.warns(UserWarning, match=r"'mask' is divided along dim 0, but .* of \[None\]"):
        gb.GPipe.from_plan(model, plan, in_dims=1).close()
    given = {"in_dims": 1, "out_dims": 1, "keyword_dims": {"mask": None}}
    gb.GPipe.from_plan(model, plan, threads_per_partition=1, **given).close()
    plain = nn.Sequential(nn.Linear(4, 4))
    profile = gb.profile_model(plain, torch.ones(4, 4), in_dims=-2, method="estimate")
    assert "in_dims" not in profile.provenance


class Scaled(nn.Module):
    """Scale its input by what has no rows."""

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        """Scale it."""
        return x * scale


def test_a_keyword_without_rows_says_nothing_about_the_sample() -> None:
    """A pipeline whose sample has its rows along dim 0 is not told of other dimensions."""
    model, given = nn.Sequential(Scaled(), nn.Linear(4, 4)), {"keyword_dims": {"scale": None}}
    keywords = {"scale": torch.rand(1)}
    profile = gb.profile_model(
        model, torch.ones(4, 4), keywords=keywords, method="estimate", **given
    )
    assert "in_dims" not in profile.provenance
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gb.GPipe.from_plan(model, gb.solve(profile, 2), **given).close()


class Recurrent(nn.Module):
    """Gives its hidden states beside its output; a loss leaves them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.lstm(x)


def test_a_loss_may_leave_outputs_alone() -> None:
    """The layers are tried as a pipeline all the same."""
    profile = gb.profile_model(
        nn.Sequential(nn.Linear(6, 6), Recurrent()),
        torch.randn(5, 8, 6),
        chunks=2,
        loss_fn=lambda output: output[0].square().mean(),
        in_dims=1,
        out_dims=1,
        timeout=0,
        progress=False,
    )
    flags = profile.provenance["flags"]
    assert not [flag for flag in flags if "not tried" in flag], flags


def test_a_layer_that_writes_to_gaps_harms_nobody() -> None:
    """The sample is afterwards as it was, and the copies are in the plan."""

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2.0)

    model = nn.Sequential(Doubles(), nn.Linear(6, 6))
    sample = torch.randn(3, 8, 6)
    before = sample.clone()
    profile = gb.profile_model(model, sample, chunks=4, in_dims=1, out_dims=1, timeout=0)
    assert torch.equal(sample, before)
    assert profile.input_bytes(4) == sample.nbytes


def test_an_expanded_tensor_keeps_its_memory() -> None:
    """What has its elements once in memory is copied once."""
    batch = Batch.sample((torch.randn(6, 4), torch.randn(1, 4).expand(6, 4)))
    dense, expanded = batch.first(3).copied_to(torch.device("cpu")).value
    assert expanded.stride() == (0, 1) and expanded.untyped_storage().nbytes() == 16
    assert torch.equal(expanded, batch.leaves[1][:3]) and dense.untyped_storage().nbytes() == 48
    windows = torch.arange(8.0).unfold(0, 3, 1)
    (copied,) = Batch.sample((windows,)).copied_to(torch.device("cpu")).value
    assert torch.equal(copied, windows)


@given(
    rows=st.integers(1, 6),
    chunks=st.integers(1, 7),
    dims=st.tuples(st.integers(-3, 2), st.sampled_from([None, 0, 1])),
    transposed=st.booleans(),
    by_name=st.booleans(),
)
def test_a_batch_is_parted_as_a_pipeline_does_it(
    rows: int, chunks: int, dims: tuple[int, int | None], transposed: bool, by_name: bool
) -> None:
    """Values, strides and rows are those of the executor's micro-batches; repeats go round."""
    one, two = dims
    shape = [2, 3, 4]
    shape[one] = rows
    first = torch.randn(shape)
    if transposed:
        first = first.mT.contiguous().mT
    second = torch.randn([rows if two == k else 5 for k in range(2)])
    if by_name:
        batch = Batch.sample(first, {"mask": second}, one, {"mask": two})
        value, keywords = batch.call()
        assert value is first and keywords["mask"] is second
    else:
        batch = Batch.sample({"x": first, "y": second}, None, {"x": one, "y": two})
        assert batch.call() == (batch.value, {})
    sizes = batch.parted(chunks)
    expected = scatter((first, second), chunks, (one, two))
    parts = batch.parts(sizes)
    assert len(parts) == len(expected)
    for part, (x, y) in zip(parts, expected, strict=True):
        assert torch.equal(part.leaves[0], x) and torch.equal(part.leaves[1], y)
    x, y = expected[0]
    copied = batch.first(sizes[0]).copied_to(torch.device("cpu"))
    empty = batch.without_memory(sizes[0], rows)
    for leaf, copy, bare in zip((x, y), copied.leaves, empty.leaves, strict=True):
        assert torch.equal(copy, leaf) and copy.stride() == bare.stride() == leaf.stride()
        assert bare.is_meta and bare.dtype == leaf.dtype
        assert copy.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr()
    twice = batch.repeated(2 * rows + 1, rows)
    again = torch.cat([first, first, first.narrow(one, 0, 1)], one)
    assert torch.equal(twice.leaves[0], again) and twice.count_rows() == 2 * rows + 1
