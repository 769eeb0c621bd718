"""Reproducible offline inference of DeepSeek-V4.1-Flash in JAX."""

__version__ = "0.1.0"
