"""The portable `engram_rows`."""

from .base_engram_rows import EngramRowsTests


class TestEngramRowsXla(EngramRowsTests):
    implementation = "xla"
