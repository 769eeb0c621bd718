"""Checks of `row_dot`: products against float64, column pieces, formats, contract."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels.quantization import QuantTensor, WeightFormat
from deepinfer_jax.kernels.row_dot import row_dot, row_dot_grouped

from . import reference
from .base import Example, OpTests
from .cases import (
    BF16,
    DEMO,
    FLOAT32_SUM,
    MICRO,
    RELEASED,
    RowCase,
    assert_same_bits,
    assert_within,
    bad_rows,
    bf16_normal,
    bf16_ulp,
    check_gradients,
    fp4_weight,
    fp8_weight,
    generator,
    load_unit,
    normal,
    plain_weight,
    values,
    weight_values,
)
from .reference_formats import bf16, qdq8


@dataclasses.dataclass(frozen=True)
class Product:
    """One linear layer: rows x columns of the weight, its storage and the rounding of the call."""

    name: str
    outputs: int
    inputs: int
    weight: str
    dtype: Any = BF16
    quantize: bool = False
    out_dtype: Any = None
    column_tile: int | None = None

    def __str__(self) -> str:
        return self.name

    def make_weight(self, rng: np.random.Generator) -> Any:
        """Random weight in the case's storage."""
        if self.weight == "fp8":
            return fp8_weight(rng, self.outputs, self.inputs)
        if self.weight == "fp4":
            return fp4_weight(rng, self.outputs, self.inputs)
        return plain_weight(rng, self.outputs, self.inputs).astype(self.dtype)


PRODUCTS = (
    Product("micro L32", MICRO.o_lora, MICRO.hidden, "plain", np.float32),
    Product("micro f32 L8", MICRO.q_lora, MICRO.hidden, "fp8", np.float32, quantize=True),
    Product("demo wq_a", DEMO.q_lora, DEMO.hidden, "fp8", quantize=True),
    Product("demo weights_proj", DEMO.index_heads, DEMO.hidden, "plain"),
    Product("demo head", 3072, DEMO.hidden, "plain", np.float32, column_tile=384),
    Product("demo expert w1", DEMO.expert_width, DEMO.hidden, "fp4", quantize=True),
    Product("released wkv", RELEASED.head_dim, RELEASED.hidden, "fp8", quantize=True),
    Product("released gate", RELEASED.experts, RELEASED.hidden, "plain", out_dtype=np.float32),
    Product("released compressor", RELEASED.head_dim, RELEASED.hidden, "plain", np.float32),
    Product("released expert w2", 1024, RELEASED.expert_width, "fp4", quantize=True),
)

CASES = (
    RowCase(
        "float32 at the released width",
        lambda rng, t: (normal(rng, t, RELEASED.hidden),),
        lambda rng: (normal(rng, 24, RELEASED.hidden),),
        lambda k, r, c: k(row_dot, r[0], c[0]),
        bad_rows(0),
    ),
    RowCase(
        "fp8 quantised",
        lambda rng, t: (bf16_normal(rng, t, DEMO.hidden, spread=6),),
        lambda rng: (fp8_weight(rng, DEMO.q_lora, DEMO.hidden),),
        lambda k, r, c: k(row_dot, r[0], c[0], quantize_input=True),
        bad_rows(0),
    ),
    RowCase(
        "column pieces",
        lambda rng, t: (normal(rng, t, 64),),
        lambda rng: (plain_weight(rng, 96, 64),),
        lambda k, r, c: k(row_dot, r[0], c[0], column_tile=32),
        bad_rows(0),
    ),
    RowCase(
        "grouped",
        lambda rng, t: (normal(rng, t, 2, 256),),
        lambda rng: (plain_weight(rng, 2 * 64, 256),),
        lambda k, r, c: k(row_dot_grouped, r[0], c[0]),
        bad_rows(0),
    ),
)


class RowDotTests(OpTests):
    """Every implementation of `row_dot`."""

    op: ClassVar[str] = "row_dot"
    row_cases: ClassVar[tuple[RowCase, ...]] = CASES

    def examples(self) -> list[Example]:
        rng = generator("row_dot examples")
        return [
            (row_dot, (bf16_normal(rng, 3, 64), fp8_weight(rng, 32, 64)), {"quantize_input": True}),
            (row_dot, (normal(rng, 3, 64), normal(rng, 32, 64)), {"column_tile": 8}),
            (row_dot_grouped, (bf16_normal(rng, 3, 2, 64), plain_weight(rng, 32, 64)), {}),
        ]

    @pytest.mark.parametrize("product", PRODUCTS, ids=str)
    def test_against_float64(self, product: Product) -> None:
        """Guards against a wrong decode, group, accumulator width or rounding at real layer shapes."""
        rng = generator("row_dot", product.name)
        rows = 5 if product.inputs >= 1024 else 19
        x = normal(rng, rows, product.inputs).astype(product.dtype)
        w = product.make_weight(rng)
        y = self.run(
            row_dot,
            x,
            w,
            quantize_input=product.quantize,
            out_dtype=product.out_dtype,
            column_tile=product.column_tile,
        )
        weight = weight_values(w)
        operand = qdq8(values(x)) if product.quantize else values(x)
        expected = reference.linear(values(x), weight, quantize=product.quantize)
        bound = FLOAT32_SUM * (np.abs(operand) @ np.abs(weight).T)
        assert y.dtype == (product.out_dtype or product.dtype)
        if y.dtype == BF16:  # half a step of the one rounding, and the sum's own error
            bound = bound + 0.5 * bf16_ulp(expected)
        assert_within(y, expected, bound, product.name)

    @pytest.mark.parametrize(
        ("groups", "outputs", "inputs"), [(2, 32, 128), (2, 64, 256), (8, 64, 4096)], ids=["micro", "demo", "released"]
    )
    def test_grouped_against_float64(self, groups: int, outputs: int, inputs: int) -> None:
        """Guards against weight rows that belong to another group, and against an input quantiser here."""
        rng = generator("grouped", groups, outputs, inputs)
        x = bf16_normal(rng, 3, groups, inputs)
        w = plain_weight(rng, groups * outputs, inputs)
        y = self.run(row_dot_grouped, x, w)
        expected = reference.linear_grouped(values(x), values(w))
        magnitude = reference.linear_grouped(np.abs(values(x)), np.abs(values(w)))
        assert_within(y, expected, FLOAT32_SUM * magnitude + 0.5 * bf16_ulp(expected))

    def test_grouped_sees_its_own_heads_only(self) -> None:
        """Guards the grouping of wo_a: heads of the first group may reach the first output group only."""
        rng = generator("group isolation")
        x = bf16_normal(rng, 4, 8, 64)
        x[:, 1:] = 0
        y = self.run(row_dot_grouped, x, plain_weight(rng, 8 * 16, 64))
        assert np.all(values(y)[:, 0] != 0)
        assert not values(y)[:, 1:].any()

    @pytest.mark.fast
    @pytest.mark.parametrize("fmt", ["fp8", "fp4"])
    def test_golden_products(self, fmt: WeightFormat) -> None:
        """Guards the packed formats against the recorded products of three implementations."""
        unit = load_unit("gemm")
        codes = unit[f"{fmt}.weight"]
        w = QuantTensor(jnp.asarray(codes), jnp.asarray(unit[f"{fmt}.scale"]), fmt)
        assert (weight_values(w) == unit[f"{fmt}.w_dequant"]).all()
        quantised = self.run(row_dot, unit["x"], w, quantize_input=True)
        assert_same_bits(quantised, unit[f"{fmt}.y_bf16"], "product of quantised rows")
        magnitude = np.abs(values(unit["x"])) @ np.abs(weight_values(w)).T
        for quantize, key in ((True, "y_f64_as_f32"), (False, "y_noactquant_f32")):
            y = self.run(row_dot, unit["x"], w, quantize_input=quantize, out_dtype=jnp.float32)
            assert_within(y, values(unit[f"{fmt}.{key}"]), 2 * FLOAT32_SUM * magnitude, key)

    def test_column_pieces_equal_shards(self) -> None:
        """Guards the head: a weight split over devices along N must give the bits of the whole weight."""
        rng = generator("column pieces")
        x, w = normal(rng, 18, 96), normal(rng, 8 * 24, 96)
        whole = self.run(row_dot, x, w, column_tile=24)
        for shards in (2, 4, 8):
            parts = [self.run(row_dot, x, part, column_tile=24) for part in np.split(w, shards)]
            assert_same_bits(np.concatenate(parts, axis=1), whole, f"{shards} shards")

    def test_packed_weight_equals_its_values(self) -> None:
        """Guards against a packed product that is not the product with the exact dequantised values."""
        rng = generator("packed")
        x = bf16_normal(rng, 7, 64)
        for w in (fp8_weight(rng, 32, 64), fp4_weight(rng, 32, 64)):
            plain = weight_values(w).astype(BF16)
            for quantize in (False, True):
                packed = self.run(row_dot, x, w, quantize_input=quantize)
                assert_same_bits(packed, self.run(row_dot, x, plain, quantize_input=quantize), w.format)

    @pytest.mark.fast
    def test_single_precision_products_are_exact_float32(self) -> None:
        """Guards against TF32 or bfloat16 operands: these factors need all 24 bits of a float32."""
        x = np.full((2, 32), 1 + 2.0**-20, np.float32)
        w = np.zeros((3, 32), np.float32)
        w[:, 0], w[:, 1] = 1, -1
        w[1, 0], w[2, 0] = 1 + 2.0**-20, 0
        y = self.run(row_dot, x, w)
        expected = [0.0, (1 + 2.0**-20) * 2.0**-20, -(1 + 2.0**-20)]
        np.testing.assert_allclose(values(y), [expected] * 2, rtol=0, atol=2.0**-23)

    def test_gradients(self) -> None:
        """Guards the training mode: whole-array products must differentiate correctly."""
        rng = generator("row_dot gradients")
        x, w = normal(rng, 3, 12, spread=0), normal(rng, 4, 12, spread=0)
        kernels = self.kernels(None)
        check_gradients(lambda a, b: kernels(row_dot, a, b), x, w)
        g = normal(rng, 3, 2, 6, spread=0)
        check_gradients(lambda a, b: kernels(row_dot_grouped, a, b), g, w[:, :6])

    @pytest.mark.fast
    def test_contract(self) -> None:
        """Guards against operands that would be broadcast, cast or cut without a word."""
        x, w = np.zeros((2, 32), np.float32), np.zeros((8, 32), np.float32)
        self.refuses(row_dot, x.astype(np.float16), w, match="row_dot: rows are float16")
        self.refuses(row_dot, x, w[:, :16], match=r"weight \(8, 16\) does not take rows of 32")
        self.refuses(row_dot, x, w[0], match="weight")
        self.refuses(row_dot, x[0], w, match=r"expected \[T, K\]")
        self.refuses(row_dot, x, w, column_tile=3, match="column_tile 3 does not divide 8")
        self.refuses(row_dot, x[:, :20], w[:, :20], quantize_input=True, match="20 elements in groups of 32")
        self.refuses(row_dot_grouped, x, w, match="groups")
        self.refuses(row_dot_grouped, np.zeros((2, 3, 32), np.float32), w, match="do not split into the groups")
        self.refuses(row_dot_grouped, np.zeros((2, 2, 16), np.float32), w, match="does not take rows of 16")

    def test_rounding_of_the_result_is_the_only_one(self) -> None:
        """Guards against a bfloat16 accumulator: 256 + 1 + 1 needs more than 8 bits on the way."""
        x = np.ones((1, 32), BF16)
        w = np.zeros((1, 32), BF16)
        w[0, :3] = 256, 1, 1
        assert values(self.run(row_dot, x, w)).item() == 258
        assert bf16(np.array(258.0)) == 258
