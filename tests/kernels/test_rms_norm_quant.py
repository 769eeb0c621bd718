"""The portable `rms_norm_quant`."""

from .base_rms_norm_quant import RmsNormQuantTests


class TestRmsNormQuantXla(RmsNormQuantTests):
    implementation = "xla"
