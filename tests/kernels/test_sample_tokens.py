"""The portable `sample_tokens`."""

from .base_sample_tokens import SampleTokensTests


class TestSampleTokensXla(SampleTokensTests):
    implementation = "xla"
