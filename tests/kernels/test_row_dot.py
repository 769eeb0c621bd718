"""The portable `row_dot`."""

from .base_row_dot import RowDotTests


class TestRowDotXla(RowDotTests):
    implementation = "xla"
