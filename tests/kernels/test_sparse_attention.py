"""The portable `sparse_attention`."""

from .base_sparse_attention import SparseAttentionTests


class TestSparseAttentionXla(SparseAttentionTests):
    implementation = "xla"
