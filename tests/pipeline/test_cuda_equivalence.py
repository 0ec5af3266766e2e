"""On CUDA too, any chain, cut and run in any way, gives what the plain model gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pipeline.test_equivalence import QUICK, check
from random_chains import RANDOM, Case, cases

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]
CUDA = "cuda:0"


@pytest.fixture(autouse=True, scope="module")
def _all_bits() -> Iterator[None]:
    """Let convolutions have all bits of their format, as matrix products have by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@settings(QUICK, max_examples=100)
@given(cases())
def test_any_chain_with_a_stream_for_each_partition(case: Case) -> None:
    """Outputs, gradients and buffers in double precision, all partitions on one device."""
    check(case, [CUDA] * len(case.balance))


@settings(QUICK, max_examples=20)
@given(cases(torch.float32))
def test_any_chain_in_single_precision(case: Case) -> None:
    """The same in float32."""
    check(case, [CUDA] * len(case.balance))


@settings(QUICK, max_examples=20)
@given(cases(torch.bfloat16))
def test_any_chain_in_half_the_bits(case: Case) -> None:
    """The same in bfloat16."""
    check(case, [CUDA] * len(case.balance))


@settings(QUICK, max_examples=60)
@given(cases(), st.data())
def test_any_chain_with_partitions_on_the_host(case: Case, data: st.DataObject) -> None:
    """Some partitions on the host, some on the device: what the plain model gives on the host.

    Its random numbers would be others, and a parameter is on one device.
    """
    assume(RANDOM.isdisjoint(case.layers) and {"shared", "tied"}.isdisjoint(case.layers))
    place = st.sampled_from(["cpu", CUDA])
    n_partitions = len(case.balance)
    check(case, data.draw(st.lists(place, min_size=n_partitions, max_size=n_partitions)))
