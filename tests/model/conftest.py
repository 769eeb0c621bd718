"""Fixtures of the model tests: every golden model is compiled once per mode and session."""

from collections.abc import Callable

import pytest

pytest.register_assert_rewrite("tests.model.golden", "tests.model.rounding_flip")

from .golden import Model  # noqa: E402 - after the registration


@pytest.fixture(scope="session")
def golden_model() -> Callable[[str, str], Model]:
    """(model, mode) -> its forward pass; programs and finished prompts are kept for all test files."""
    made: dict[tuple[str, str], Model] = {}

    def get(name: str, mode: str) -> Model:
        if (name, mode) not in made:
            made[name, mode] = Model(name, mode)
        return made[name, mode]

    return get
