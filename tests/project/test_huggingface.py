"""The guide's page on transformers: its chains do what the models do; skipped without them.

Run it with ``pip install transformers``; no weights are loaded from anywhere.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import gpipebal as gb

ROOT = Path(gb.__file__).parent.parent
PAGE = (ROOT / "docs" / "guide" / "huggingface.md").read_text(encoding="utf-8")
#: The page's sections: what stands above the first heading, then one for each heading.
COMMON, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
MODELS = {text.partition("\n")[0]: text for text in SECTIONS}
TRAIN = MODELS.pop("Train")


def code_of(text: str) -> str:
    """Return the code of a part of the page."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


def run(*parts: str) -> dict[str, Any]:
    """Run the code of parts of the page, one after the other, and return what it names."""
    names: dict[str, Any] = {}
    for part in parts:
        exec(compile(code_of(part), "huggingface.md", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def transformers() -> None:
    """Skip a test if the library is not installed."""
    with warnings.catch_warnings():
        # Its import may warn of what it does not like about other packages.
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers", reason="runs chains of the package transformers")


@pytest.mark.parametrize("model", MODELS)
def test_chain_does_what_the_model_does(model: str) -> None:
    """The page's own check passes: chain against model, and pipeline against chain."""
    names = run(COMMON, MODELS[model])
    trained = {id(parameter) for parameter in names["pipe"].parameters()}
    assert trained == {id(parameter) for parameter in names["net"].parameters()}


@pytest.mark.parametrize("model", [name for name, text in MODELS.items() if "mask" in text])
def test_chain_is_estimated_without_the_padding_mask(model: str) -> None:
    """An estimate sees no values, so the page says to leave the padding mask out."""
    names = run(COMMON, MODELS[model])
    batch = dict(names.get("pair", names["batch"]))
    del batch["attention_mask"]
    profile = gb.profile_model(names["chain"], batch, chunks=2, rows=(), method="estimate")
    assert profile.n_layers == len(names["chain"])


def test_chain_is_trained_from_a_plan() -> None:
    """The last section profiles, plans and trains the chain of a language model."""
    faster = TRAIN.replace("target=tokens)\nplan", "target=tokens, timeout=0)\nplan")
    assert faster != TRAIN
    names = run(COMMON, MODELS["GPT-2"], faster)
    assert names["loss"] > 0
    assert all(parameter.grad is not None for parameter in names["net"].parameters())
