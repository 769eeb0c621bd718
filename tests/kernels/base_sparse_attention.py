"""Checks of `sparse_attention`: joint softmax, sink, masks, formats."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from deepinfer_jax.kernels.rms_norm_quant import rotary
from deepinfer_jax.kernels.sparse_attention import sparse_attention

from . import reference
from .base import Example, OpTests
from .cases import (
    BF16,
    DEMO,
    MICRO,
    RELEASED,
    RowCase,
    Size,
    assert_same_bits,
    assert_within,
    bad_rows,
    bf16_normal,
    bf16_ulp,
    check_gradients,
    generator,
    load_unit,
    normal,
    values,
)
from .reference_formats import bf16, cache_record, decode_record

FLOAT32: dict[str, Any] = {"window_format": "float32", "compressed_format": "float32"}
PACKED: dict[str, Any] = {"window_format": "fp8", "compressed_format": "fp4_e4m3"}


def slots(rng: np.random.Generator, rows: int, count: int, records: int, masked: float = 0.3) -> np.ndarray:
    """Record numbers [rows, count], some of them -1."""
    chosen = rng.integers(0, records, size=(rows, count))
    return np.where(rng.random((rows, count)) < masked, -1, chosen).astype(np.int32)


def records(rng: np.random.Generator, count: int, size: int, fmt: str) -> np.ndarray:
    """Random stored records."""
    return cache_record(values(bf16_normal(rng, count, size)), fmt)


def constants(rng: np.random.Generator, size: Size, formats: dict[str, Any]) -> tuple[Any, ...]:
    """(window records, compressed records, sink)."""
    window = records(rng, 90, size.head_dim, formats["window_format"])
    compressed = records(rng, 70, size.head_dim, formats["compressed_format"])
    return window, compressed, normal(rng, size.heads, spread=0)


CASES = (
    RowCase(
        "window only, float32",
        lambda rng, t: (normal(rng, t, 4, 64), slots(rng, t, 8, 90)),
        lambda rng: constants(rng, MICRO, FLOAT32),
        lambda k, r, c: k(sparse_attention, r[0], c[0], r[1], None, None, c[2], **FLOAT32, scale=0.125),
        bad_rows(0),
    ),
    RowCase(
        "demo, packed",
        lambda rng, t: (bf16_normal(rng, t, 8, 64), slots(rng, t, 64, 90), slots(rng, t, 64, 70)),
        lambda rng: constants(rng, DEMO, PACKED),
        lambda k, r, c: k(sparse_attention, r[0], c[0], r[1], c[1], r[2], c[2], **PACKED, scale=0.125),
        bad_rows(0),
    ),
    RowCase(
        "micro, float32",
        lambda rng, t: (normal(rng, t, 4, 64), slots(rng, t, 8, 90), slots(rng, t, 4, 70)),
        lambda rng: constants(rng, MICRO, FLOAT32),
        lambda k, r, c: k(sparse_attention, r[0], c[0], r[1], c[1], r[2], c[2], **FLOAT32, scale=0.125),
        bad_rows(0),
    ),
)


class SparseAttentionTests(OpTests):
    """Every implementation of `sparse_attention`."""

    op: ClassVar[str] = "sparse_attention"
    row_cases: ClassVar[tuple[RowCase, ...]] = CASES

    def examples(self) -> list[Example]:
        rng = generator("attention examples")
        window, compressed, sink = constants(rng, MICRO, PACKED)
        q, near, far = bf16_normal(rng, 5, 4, 64), slots(rng, 5, 8, 90), slots(rng, 5, 4, 70)
        settings: dict[str, Any] = PACKED | {"scale": 0.125}
        return [
            (sparse_attention, (q, window, near, compressed, far, sink), settings),
            (sparse_attention, (q, window, near, None, None, sink), settings),
        ]

    @pytest.mark.parametrize("packed", [False, True], ids=["float32", "packed"])
    @pytest.mark.parametrize("size", [MICRO, DEMO, RELEASED], ids=lambda size: size.name)
    def test_against_float64(self, size: Size, packed: bool) -> None:
        """Guards the joint softmax, the sink's place and the rounding of probabilities at every model's widths.

        float32: 2^-19 of the largest key element (exponents carry the rounding of logits of size 10). bfloat16:
        against a reference that rounds at the same points, one step at the head's largest output, and most
        elements equal; probabilities next to a rounding border may fall to either side.
        """
        rng = generator("attention", size.name, packed)
        formats = PACKED if packed else FLOAT32
        rows = 2 if size is RELEASED else 18
        dtype = BF16 if packed else np.float32
        window, compressed, sink = constants(rng, size, formats)
        q = (2 * normal(rng, rows, size.heads, size.head_dim)).astype(dtype)
        near, far = slots(rng, rows, size.window, len(window)), slots(rng, rows, size.topk, len(compressed))
        scale = size.head_dim**-0.5
        y = self.run(sparse_attention, q, window, near, compressed, far, sink, **formats, scale=scale)
        keys = np.concatenate(
            [
                decode_record(window, formats["window_format"], size.head_dim)[near],
                decode_record(compressed, formats["compressed_format"], size.head_dim)[far],
            ],
            axis=1,
        )
        valid = np.concatenate([near, far], axis=1) >= 0
        expected = reference.attention(values(q), keys, valid, sink, scale, bf16 if packed else reference.exact)
        assert y.dtype == dtype
        if packed:
            assert_within(y, expected, bf16_ulp(np.abs(expected).max(axis=2, keepdims=True)))
            assert (values(y) == expected).mean() > 0.95
        else:
            assert_within(y, expected, 2.0**-19 * np.abs(keys).max())

    @pytest.mark.fast
    def test_golden_released_size(self) -> None:
        """Guards 64 heads x 512 dims x 640 slots with interior holes against recorded numbers.

        The recorded bfloat16 result rounds probabilities against a running maximum, this one against the
        final maximum; both stay within 0.004 of the exact value (two roundings of values below 1.5).
        """
        unit = load_unit("sparse_attn_real")
        near, far = unit["idx"][:, :128], unit["idx"][:, 128:]
        settings: dict[str, Any] = FLOAT32 | {"scale": 512**-0.5}
        kv = unit["kv"].astype(np.float32)
        q32 = unit["q"].astype(np.float32)
        exact = self.run(sparse_attention, q32, kv, near, kv, far, unit["sink"], **settings)
        assert_within(exact[:, ::4], values(unit["out_f64_as_f32"]), 2e-6)
        rounded = self.run(sparse_attention, unit["q"], kv, near, kv, far, unit["sink"], **settings)
        assert_within(rounded[:, ::4], values(unit["out_f64_as_f32"]), 0.004)
        assert_within(rounded, values(unit["out_bf16"]), 0.008)

    def test_packed_records_equal_their_values(self) -> None:
        """Guards against attention to anything but the exact values of the packed cache."""
        rng = generator("packed records")
        window, compressed, sink = constants(rng, MICRO, PACKED)
        q, near, far = bf16_normal(rng, 18, 4, 64), slots(rng, 18, 8, 90), slots(rng, 18, 4, 70)
        packed = self.run(sparse_attention, q, window, near, compressed, far, sink, **PACKED, scale=0.125)
        plain = [
            decode_record(part, fmt, 64).astype(np.float32)
            for part, fmt in ((window, PACKED["window_format"]), (compressed, PACKED["compressed_format"]))
        ]
        y = self.run(sparse_attention, q, plain[0], near, plain[1], far, sink, **FLOAT32, scale=0.125)
        assert_same_bits(packed, y, "packed against float32 records")

    def test_place_of_records_does_not_matter(self) -> None:
        """Guards page placement: moving records, and their numbers with them, must not change a bit."""
        rng = generator("placement")
        window, compressed, sink = constants(rng, MICRO, PACKED)
        q, near, far = bf16_normal(rng, 18, 4, 64), slots(rng, 18, 8, 90), slots(rng, 18, 4, 70)
        settings: dict[str, Any] = PACKED | {"scale": 0.125}
        first = self.run(sparse_attention, q, window, near, compressed, far, sink, **settings)
        moved = []
        for part, rows in ((window, near), (compressed, far)):
            order = rng.permutation(len(part) + 30)[: len(part)]
            bigger = rng.integers(0, 256, size=(len(part) + 30, part.shape[1])).astype(np.uint8)
            bigger[order] = part
            moved += [bigger, np.where(rows < 0, -1, order[rows]).astype(np.int32)]
        assert_same_bits(self.run(sparse_attention, q, *moved, sink, **settings), first, "moved records")

    def test_masked_slots_may_hold_anything(self) -> None:
        """Guards against stale records: NaN or infinity behind a masked slot must not reach a result."""
        rng = generator("garbage")
        window, compressed, sink = constants(rng, MICRO, FLOAT32)
        q, near, far = normal(rng, 18, 4, 64), slots(rng, 18, 8, 90), slots(rng, 18, 4, 70)
        near, far = np.where(near == 0, 1, near), np.where(far == 0, 1, far)
        settings: dict[str, Any] = FLOAT32 | {"scale": 0.125}
        clean = self.run(sparse_attention, q, window, near, compressed, far, sink, **settings)
        for fill in (np.nan, np.inf):
            window[0] = compressed[0] = fill  # masked slots read record 0
            dirty = self.run(sparse_attention, q, window, near, compressed, far, sink, **settings)
            assert_same_bits(dirty, clean, f"record 0 full of {fill}")

    def test_row_without_entries_is_zero(self) -> None:
        """Guards padding rows: nothing to attend to gives zeros, not NaN."""
        rng = generator("empty rows")
        window, compressed, sink = constants(rng, MICRO, FLOAT32)
        q, near, far = normal(rng, 18, 4, 64), slots(rng, 18, 8, 90), slots(rng, 18, 4, 70)
        near[3] = far[3] = -1
        y = self.run(sparse_attention, q, window, near, compressed, far, sink, **FLOAT32, scale=0.125)
        assert not y[3].any()
        assert np.isfinite(y).all()
        assert np.abs(y).max(axis=(1, 2))[np.arange(18) != 3].min() > 0

    @pytest.mark.fast
    def test_sink(self) -> None:
        """Guards the sink: absent at minus infinity, everything at plus infinity, half beside an equal logit."""
        rng = generator("sink")
        window = normal(rng, 4, 64)
        q = normal(rng, 2, 4, 64, spread=0)
        settings: dict[str, Any] = FLOAT32 | {"scale": 0.125}
        near = np.array([[0, 1, 2, -1], [3, -1, -1, -1]], np.int32)
        keys, valid = values(window)[near], near >= 0

        def attend(sink: np.ndarray) -> np.ndarray:
            return values(self.run(sparse_attention, q, window, near, None, None, sink, **settings))

        minus = np.full(4, -np.inf, np.float32)
        np.testing.assert_allclose(attend(minus), reference.attention(q, keys, valid, minus, 0.125), atol=1e-6)
        assert np.abs(attend(np.full(4, 60, np.float32))).max() < 1e-20
        np.testing.assert_array_equal(attend(np.full(4, np.float32(3e38))), 0)
        own = (values(q)[1] @ values(window)[3] * 0.125).astype(np.float32)
        np.testing.assert_allclose(attend(own)[1], np.tile(0.5 * values(window)[3], (4, 1)), atol=1e-6)

    def test_inverse_rotation_gives_the_unrotated_key(self) -> None:
        """Guards rotary against its inverse through attention: a lone own key comes back as it was."""
        rng = generator("inverse rotation")
        frequencies = reference.inverse_frequencies(16, 10000.0, None).astype(np.float32)
        plain, q = normal(rng, 5, 64, spread=0), normal(rng, 5, 4, 64)
        positions = np.array([0, 1, 17, 1000, 65535], np.int32)
        keys = self.run_rotary(plain[:, None], positions, frequencies)[:, 0]
        near = np.arange(5, dtype=np.int32)[:, None]
        sink = np.full(4, -np.inf, np.float32)
        y = self.run(sparse_attention, q, keys, near, None, None, sink, **FLOAT32, scale=0.125)
        back = self.run_rotary(y, positions, frequencies, inverse=True)
        np.testing.assert_allclose(back, np.tile(plain[:, None], (1, 4, 1)), atol=2e-6)

    @staticmethod
    def run_rotary(x: Any, *operands: Any, inverse: bool = False) -> np.ndarray:
        """The portable rotary embedding."""
        return np.asarray(rotary(x, *operands, inverse=inverse))

    def test_gradients(self) -> None:
        """Guards the training mode: gradients of queries, both kinds of entries and the sink."""
        rng = generator("attention gradients")
        q, window, compressed = (normal(rng, n, *s, spread=0) for n, s in ((3, (2, 8)), (5, (8,)), (4, (8,))))
        near, far = slots(rng, 3, 4, 5), slots(rng, 3, 3, 4)
        kernels = self.kernels(None)

        def attend(queries: Any, recent: Any, older: Any, sink: Any) -> Any:
            return kernels(sparse_attention, queries, recent, near, older, far, sink, **FLOAT32, scale=0.35)

        operands = (q, window, compressed, np.array([0.3, -0.2]))
        check_gradients(attend, *operands)

    @pytest.mark.fast
    def test_contract(self) -> None:
        """Guards against operands that would be broadcast or ignored without a word."""
        q, w, rows = np.zeros((2, 4, 64), np.float32), np.zeros((5, 64), np.float32), np.zeros((2, 3), np.int32)
        sink, settings = np.zeros(4, np.float32), FLOAT32 | {"scale": 0.125}
        self.refuses(sparse_attention, q, w, rows, w, None, sink, match="go together", **settings)
        self.refuses(sparse_attention, q, w, rows, None, rows, sink, match="go together", **settings)
        self.refuses(sparse_attention, q, w, rows[:1], None, None, sink, match="do not fit", **settings)
        self.refuses(sparse_attention, q, w, rows, w, rows[:1], sink, match="do not fit", **settings)
        self.refuses(sparse_attention, q, w, rows, None, None, sink[:2], match="do not fit", **settings)
        self.refuses(sparse_attention, q[0], w, rows, None, None, sink, match="do not fit", **settings)
        self.refuses(sparse_attention, q, w[:, :32], rows, None, None, sink, match="records", **settings)
        self.refuses(sparse_attention, q, w, rows, w[:, :32], rows, sink, match="records", **settings)
