"""Which implementation each op gets, and weights in the order of GPU kernels. Devices and kernels are fakes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax
from deepinfer_jax.checkpoint import save_checkpoint
from deepinfer_jax.engine import implementations, repack
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.implementations import GPU_ROW_BLOCK, NO_KERNEL, choose_kernels
from deepinfer_jax.engine.runtime_config import RuntimeConfig
from deepinfer_jax.kernels import dispatch
from deepinfer_jax.kernels.dispatch import OPS, ROW_TILE, Kernels
from deepinfer_jax.kernels.expert_mlp import xla as portable_expert_mlp
from deepinfer_jax.kernels.expert_mlp.repack import repack as repack_experts
from deepinfer_jax.kernels.mosaic import interpret
from deepinfer_jax.kernels.mosaic.target import Architecture
from deepinfer_jax.kernels.profile import F32_NOQ, REFERENCE
from deepinfer_jax.kernels.quantization import QuantTensor, dequantize
from deepinfer_jax.kernels.row_dot import xla as portable_row_dot
from deepinfer_jax.kernels.top_k import xla as portable_top_k
from deepinfer_jax.model.params import Params, abstract_params

CONFIG = deepinfer_jax.ModelConfig.micro()
PARAMS = abstract_params(CONFIG)


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What the choice reads of a device."""

    compute_capability: str
    device_kind: str = "NVIDIA Fake"


def kernel_module(portable: ModuleType, refuse: Callable[..., str | None]) -> ModuleType:
    """A GPU implementation that computes as the portable one; `refuse` gives a reason not to, or None."""
    module = ModuleType("mosaic_gpu")

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if (reason := refuse(*args)) is not None:
                raise NotImplementedError(reason)
            return function(*args)

        return call

    for name, value in vars(portable).items():
        if callable(value) and getattr(value, "__module__", None) == portable.__name__:
            setattr(module, name, wrapped(value))
    return module


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No op has GPU kernels but those of a test, and nothing that was traced with them is kept."""
    caches = (
        dispatch._traced_once, implementations._choice, implementations._print_once, repack._one_repacked,
        repack.repack_function,
    )  # fmt: skip
    monkeypatch.setattr(dispatch, "_AVAILABLE", dict.fromkeys(OPS, ("xla",)))
    monkeypatch.setattr(repack, "repack_function", lambda op: None)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """install(op, portable module, refuse): give an op a GPU implementation."""

    def install(op: str, portable: ModuleType, refuse: Callable[..., str | None] = lambda *_: None) -> None:
        monkeypatch.setitem(dispatch._AVAILABLE, op, ("xla", "mosaic_gpu"))
        name = f"deepinfer_jax.kernels.{op}.mosaic_gpu"
        monkeypatch.setitem(sys.modules, name, kernel_module(portable, refuse))

    return install


# ---- the choice -----------------------------------------------------------------------------------


def test_cpu_is_portable_and_silent(capfd: pytest.CaptureFixture[str], install: Callable[..., None]) -> None:
    """Guards against a CPU run that speaks of kernels, or spends seconds on asking for them."""
    install("row_dot", portable_row_dot)
    assert choose_kernels(PARAMS, REFERENCE) == Kernels()
    assert capfd.readouterr().err == ""
    with pytest.raises(NotImplementedError, match="on cpu: cpu has compute capability None"):
        choose_kernels(PARAMS, REFERENCE, "mosaic_gpu")


def test_ops_that_can_and_ops_that_cannot(capfd: pytest.CaptureFixture[str], install: Callable[..., None]) -> None:
    """Guards the default on a GPU: kernels where an op has one for this model, the reason where it has not,
    printed once; and that asking for kernels by name never ends in portable code."""
    install("row_dot", portable_row_dot)
    install("top_k", portable_top_k, lambda *_: "selections of 16 are too few")
    with interpret("sm90"):
        chosen = choose_kernels(PARAMS, REFERENCE)
        assert chosen == Kernels(ROW_TILE, (("row_dot", "mosaic_gpu"),), GPU_ROW_BLOCK)
        line = capfd.readouterr().err
        assert choose_kernels(PARAMS, REFERENCE) == chosen
        assert capfd.readouterr().err == ""
        with pytest.raises(NotImplementedError, match="top_k: selections of 16 are too few") as refusal:
            choose_kernels(PARAMS, REFERENCE, "mosaic_gpu")
        assert choose_kernels(PARAMS, REFERENCE, "xla") == Kernels()
    assert line.startswith("deepinfer_jax: on cpu: row_dot mosaic_gpu; portable: ")
    assert line.count("\n") == 1
    assert "top_k (selections of 16 are too few)" in line
    for op in set(OPS) - {"row_dot", "top_k"}:
        assert op in line
        assert f"{op}: {NO_KERNEL}" in str(refusal.value)


def test_one_refused_call_makes_the_whole_op_portable(install: Callable[..., None]) -> None:
    """Guards against an op that is chosen for most of its calls: the last one would fail in the user's hands."""
    size = CONFIG.vocab_size
    install("row_dot", portable_row_dot, lambda _, w, *__: "too wide" if w.shape[0] == size else None)
    with interpret("sm90"):
        assert choose_kernels(PARAMS, REFERENCE) == Kernels()


def test_errors_of_an_op_are_not_refusals(install: Callable[..., None]) -> None:
    """Guards against a bug in a kernel that passes for a refusal and leaves the op slow for ever."""

    def fail(*_: Any) -> str:
        raise TypeError("a bug")

    install("row_dot", portable_row_dot, fail)
    with interpret("sm90"), pytest.raises(TypeError, match="a bug"):
        choose_kernels(PARAMS, REFERENCE)


def test_other_profiles_are_portable(capfd: pytest.CaptureFixture[str], install: Callable[..., None]) -> None:
    """Guards against kernels with the reference's roundings in a profile without them."""
    install("row_dot", portable_row_dot)
    with interpret("sm90"):
        assert choose_kernels(PARAMS, F32_NOQ) == Kernels()
        assert "the kernels round as profile 'reference' does, not 'f32_noq'" in capfd.readouterr().err
        with pytest.raises(NotImplementedError, match="not 'f32_noq'"):
            choose_kernels(PARAMS, F32_NOQ, "mosaic_gpu")


def test_other_gpus_are_portable(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards against a GPU without kernels that runs slowly in silence."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [FakeDevice("8.0")])
    assert choose_kernels(PARAMS, REFERENCE) == Kernels()
    expected = "on NVIDIA Fake: portable (NVIDIA Fake has compute capability 8.0; there are kernels for 9.0"
    assert expected in capfd.readouterr().err


@pytest.mark.parametrize(("name", "error"), [("cann", NotImplementedError), ("cuda", ValueError)])
def test_unknown_names(name: Any, error: type[Exception]) -> None:
    """Guards against a misspelt name that means the default."""
    with pytest.raises(error, match=name):
        choose_kernels(PARAMS, REFERENCE, name)


def test_names_reach_engine_and_functions() -> None:
    """Guards against an argument that is accepted and dropped on the way to the programs."""
    params = deepinfer_jax.init_params(CONFIG, jax.random.key(0))
    message = "on cpu: cpu has compute capability None"
    with pytest.raises(NotImplementedError, match=message):
        Engine(params, RuntimeConfig(implementation="mosaic_gpu"))
    with pytest.raises(NotImplementedError, match=message):
        deepinfer_jax.generate(params, [[1, 2]], implementation="mosaic_gpu", max_tokens=1)
    with pytest.raises(NotImplementedError, match=message):
        next(iter(deepinfer_jax.stream(params, [[1, 2]], implementation="mosaic_gpu", max_tokens=1)))
    with pytest.raises(NotImplementedError, match=message):
        deepinfer_jax.score(params, [[1, 2]], implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=message):
        deepinfer_jax.logits(params, [1, 2], implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="kernels or implementation, not both"):
        RuntimeConfig(implementation="xla", kernels=Kernels())


# ---- weights in the order of kernels --------------------------------------------------------------


def reversed_bytes(weight: QuantTensor) -> QuantTensor:
    """A layout for FP4 weights: columns from right to left, as words; scales up to 2."""
    if weight.format != "fp4":
        raise ValueError("no layout")
    if int(jnp.max(weight.scale, initial=0)) > 128:
        raise ValueError("a scale above 2")
    data = weight.data[..., ::-1]
    words = data.reshape(*data.shape[:-1], -1, 4)
    return QuantTensor(jax.lax.bitcast_convert_type(words, jnp.uint32), weight.scale[..., ::-1], "fp4_sm90")


@pytest.fixture
def reversing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack, "repack_function", lambda op: reversed_bytes if op == "expert_mlp" else None)


def packed(*lead: int, seed: int = 0, largest: int = 128) -> QuantTensor:
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (*lead, 8, 32), dtype=np.uint8)
    scale = rng.integers(100, largest + 1, (*lead, 8, 2), dtype=np.uint8)
    return QuantTensor(data, scale, "fp4")  # type: ignore[arg-type]


@pytest.mark.usefixtures("reversing")
@pytest.mark.parametrize("lead", [(), (5,), (2, 1, 6)])
@pytest.mark.parametrize("host", [True, False])
def test_pieces_make_the_whole(monkeypatch: pytest.MonkeyPatch, lead: tuple[int, ...], host: bool) -> None:
    """Guards the streaming: experts repacked a few at a time stand where repacking all at once puts them."""
    monkeypatch.setattr(repack, "PIECE_BYTES", 3 * 8 * 32)
    weight = packed(*lead)
    device = jax.tree.map(jnp.asarray, weight)
    expected = reversed_bytes(device)
    result = repack.repack_weight("ffn.experts.{}.w1", weight if host else device)
    assert result.format == "fp4_sm90"
    np.testing.assert_array_equal(result.data, expected.data)
    np.testing.assert_array_equal(result.scale, expected.scale)
    form = repack.repacked_form("ffn.experts.{}.w1", weight)
    assert form is not None
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (form.data, form.scale)) == (
        (result.data.shape, result.data.dtype),
        (result.scale.shape, result.scale.dtype),
    )


@pytest.mark.usefixtures("reversing")
def test_weights_without_layout_stay() -> None:
    """Guards weights of other ops and formats, tables, and values that a layout cannot hold (with a warning)."""
    weight = packed(4)
    assert repack.repack_weight("attn.wq_a", weight) is weight
    eight = dataclasses.replace(weight, format="fp8")
    assert repack.repack_weight("ffn.shared_experts.w1", eight) is eight
    table = dataclasses.replace(weight, format="fp8_row")
    assert repack.op_of_weight("engram.embed", table) is None
    large = packed(4, largest=140)
    with pytest.warns(UserWarning, match=r"ffn\.experts\.\{\}\.w1: stays in the checkpoint's order: a scale above 2"):
        assert repack.repack_weight("ffn.experts.{}.w1", large) is large


def experts(params: Params) -> list[QuantTensor]:
    groups = [run for segment in params.segments for run in segment] + list(params.draft)
    return [leaf for run in groups for key, leaf in run.items() if key.startswith("ffn.experts.")]


@pytest.mark.usefixtures("reversing")
@pytest.mark.parametrize("consume", [False, True])
def test_groups_are_repacked_leaf_by_leaf(consume: bool) -> None:
    """Guards the walk over the weights: all experts of the wanted op, nothing else, and what is freed."""
    params = deepinfer_jax.init_params(CONFIG, jax.random.key(0))
    before = [np.asarray(leaf.data) for leaf in experts(params)]
    result = repack.repack_params(params, {"expert_mlp"}, consume=consume)
    assert [leaf.format for leaf in experts(result)] == ["fp4_sm90"] * len(before)
    for leaf, bits in zip(experts(result), before, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf.data).view(np.uint8).reshape(bits.shape), bits[..., ::-1])
    assert all(leaf.data.is_deleted() == consume for leaf in experts(params))
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(result))


def test_weights_are_repacked_where_the_op_then_uses_its_kernel(
    monkeypatch: pytest.MonkeyPatch, install: Callable[..., None], tmp_path: Path
) -> None:
    """Guards `load_params` on a GPU: the choice is made for the repacked weights, and refusals leave them alone."""
    monkeypatch.setattr(repack, "repack_function", lambda op: repack_experts if op == "expert_mlp" else None)

    def refuse(*args: Any) -> str | None:
        formats = {arg.format for arg in args if isinstance(arg, QuantTensor)}
        return "weights in the checkpoint's order" if "fp4" in formats else None

    install("expert_mlp", portable_expert_mlp, refuse)
    params = deepinfer_jax.init_params(CONFIG, jax.random.key(0))
    assert repack.prepare_params(params, REFERENCE) is params  # a CPU has no kernels
    with interpret("sm90"):
        assert choose_kernels(params, REFERENCE) == Kernels()
        assert repack.prepare_params(params, REFERENCE, "xla") is params
        ready = repack.prepare_params(params, REFERENCE)
        assert choose_kernels(ready, REFERENCE) == Kernels(ROW_TILE, (("expert_mlp", "mosaic_gpu"),), GPU_ROW_BLOCK)
        assert repack.prepare_params(ready, REFERENCE) is ready
        save_checkpoint(tmp_path / "model", params)
        read = deepinfer_jax.load_params(tmp_path / "model", unpack=False)
        plain = deepinfer_jax.load_params(tmp_path / "model", unpack=False, implementation="xla")
    assert jax.tree.structure(read) == jax.tree.structure(ready)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), read, ready))
    assert jax.tree.structure(plain) == jax.tree.structure(params)
    with pytest.raises(ValueError, match="not a QuantTensor of format 'fp4'"):
        save_checkpoint(tmp_path / "other", ready)
    for new, old in zip(experts(ready), experts(params), strict=True):
        assert new.format == "fp4_sm90"
        np.testing.assert_array_equal(dequantize(new), dequantize(old))

    install("expert_mlp", portable_expert_mlp, lambda *_: "never")
    implementations._choice.cache_clear()
    dispatch._traced_once.cache_clear()
    with interpret("sm90"):
        assert repack.prepare_params(params, REFERENCE) is params


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_kernels_together_give_the_portable_logits(target: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the way from loading to logits with every kernel that exists, interpreted: three layers, one of each
    kind. Single ops are compared more closely in their own tests; here a wrong order of weights or arguments shows.
    """
    monkeypatch.undo()
    micro = CONFIG
    config = dataclasses.replace(
        micro,
        num_hidden_layers=3, compress_ratios=(0, 2, 1), kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2),
        candidate_source_layer_id=2, engram_layer_ids=(0,), engram_num_embeddings=micro.engram_num_embeddings[:1],
        num_nextn_predict_layers=0, dspark_target_layer_ids=(),
    )  # fmt: skip
    params = deepinfer_jax.init_params(config, jax.random.key(0))
    expected = deepinfer_jax.logits(params, [5, 6, 7, 8])
    with interpret(target):
        ready = repack.prepare_params(params, REFERENCE)
        chosen = dict(choose_kernels(ready, REFERENCE).choices)
        assert {"row_dot", "expert_mlp", "rms_norm_quant", "mhc_mix"} <= set(chosen)
        logits = deepinfer_jax.logits(ready, [5, 6, 7, 8])
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    print(f"{target}: relative error {error:.2g}, {100 * np.mean(logits == expected):.0f} % of the logits equal")
    assert error <= 1e-3
