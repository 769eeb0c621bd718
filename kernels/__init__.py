"""Operators: one folder per op with its contract (`api.py`) and its implementations.

Every op takes `implementation=None | "xla" | "mosaic_gpu" | "cann"`. What an implementation cannot
do for the given shapes raises NotImplementedError with the reason.
"""
