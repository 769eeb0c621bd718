"""Fixtures of the operator tests, and readable assertion messages in the modules of the shared test classes."""

import pytest

_SHARED = ("base", "cases")
pytest.register_assert_rewrite(*(f"tests.kernels.{name}" for name in _SHARED))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the row tests of an operator's class for each case that it lists; the first is in the fast tier."""
    if "row_case" in metafunc.fixturenames and metafunc.cls is not None:
        first, *others = metafunc.cls.row_cases
        metafunc.parametrize("row_case", [pytest.param(first, marks=pytest.mark.fast), *others], ids=str, scope="class")
