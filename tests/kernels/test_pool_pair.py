"""The portable `pool_pair`."""

from .base_pool_pair import PoolPairTests


class TestPoolPairXla(PoolPairTests):
    implementation = "xla"
