"""The portable `mhc_mix`."""

from .base_mhc_mix import MhcMixTests


class TestMhcMixXla(MhcMixTests):
    implementation = "xla"
