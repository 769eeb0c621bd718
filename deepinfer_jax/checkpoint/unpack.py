"""Packed weights to bfloat16 in NumPy: the same values as `kernels.quantization.dequantize`, without a program."""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import numpy as np

from deepinfer_jax.kernels.quantization import GROUP

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
_E2M1_PAIR = _E2M1[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1)]
"""Byte -> its two values, low nibble (even column) first."""


def unpack_weight(data: np.ndarray, scale: np.ndarray, fmt: Literal["fp8", "fp4"]) -> np.ndarray:
    """bfloat16 [..., out, in] of a packed weight (shapes: `QuantTensor`). Exact: every product is one."""
    if fmt == "fp4":
        values = _E2M1_PAIR[data].reshape(*data.shape[:-1], -1)
    else:
        values = _E4M3[data]
        scale = np.repeat(scale, GROUP, axis=-2)[..., : data.shape[-2], :]
    rows, columns = values.shape[-2:]
    if columns % GROUP:
        factors = np.repeat(_E8M0[scale], GROUP, axis=-1)[..., :columns]
        return (values * factors).astype(ml_dtypes.bfloat16)
    grouped = values.reshape(*values.shape[:-1], columns // GROUP, GROUP)
    grouped = grouped * _E8M0[scale][..., None]
    return grouped.reshape(*values.shape[:-2], rows, columns).astype(ml_dtypes.bfloat16)
