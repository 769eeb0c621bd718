"""Fixtures of the operator tests, and readable assertion messages in the modules of the shared test classes."""

import pytest

_SHARED = ("base", "cases")
pytest.register_assert_rewrite(*(f"tests.kernels.{name}" for name in _SHARED))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the row tests of an operator's class once per case that the class lists, case by case."""
    if "row_case" in metafunc.fixturenames and metafunc.cls is not None:
        metafunc.parametrize("row_case", metafunc.cls.row_cases, ids=str, scope="class")
