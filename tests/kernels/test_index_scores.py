"""The portable `index_scores`."""

from .base_index_scores import IndexScoresTests


class TestIndexScoresXla(IndexScoresTests):
    implementation = "xla"
