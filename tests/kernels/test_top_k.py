"""The portable `top_k`."""

from .base_top_k import TopKTests


class TestTopKXla(TopKTests):
    implementation = "xla"
