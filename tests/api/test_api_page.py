"""`docs/api.md` must name every field, with the default it has."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from deepinfer_jax import Completion, RequestOutput, SamplingParams, TokenEvent, api
from deepinfer_jax.outputs import FinishReason, Logprobs, Usage

pytestmark = pytest.mark.fast

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """Text below one heading."""
    found = re.search(rf"^## [^\n]*{title}[^\n]*\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def test_sampling_parameters() -> None:
    """Guards the table: all fields in their order, with their defaults."""
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section("SamplingParams"), re.MULTILINE)
    expected = [(field.name, repr(field.default).replace("'", '"')) for field in dataclasses.fields(SamplingParams)]
    assert rows == expected


@pytest.mark.parametrize("kind", [RequestOutput, Completion, TokenEvent, Usage, Logprobs])
def test_results(kind: type) -> None:
    """Guards against a field that the page does not explain."""
    named = set(re.findall(r"`(\w+)`", section("Results")))
    assert {field.name for field in dataclasses.fields(kind)} - named == set()


def test_finish_reasons() -> None:
    """Guards the list of reasons."""
    (row,) = re.findall(r"^\| `finish_reason` \| (.*) \|$", PAGE, re.MULTILINE)
    assert set(re.findall(r'"(\w+)"', row)) == set(FinishReason.__args__)


def test_arguments() -> None:
    """Guards the table of `generate`'s arguments."""
    code = api.generate.__code__
    names = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - {"params", "prompts"}
    assert names - set(re.findall(r"`(\w+)`", section("generate"))) == set()
