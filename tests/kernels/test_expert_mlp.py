"""The portable `expert_mlp`."""

from .base_expert_mlp import ExpertMlpTests


class TestExpertMlpXla(ExpertMlpTests):
    implementation = "xla"
