"""Loading and saving: stacked leaves hold the right tensors, and a saved checkpoint is the same checkpoint."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

from deepinfer_jax.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    load_config,
    save_checkpoint,
    shard_layout,
    writer,
)
from deepinfer_jax.checkpoint import load as load_limits
from deepinfer_jax.checkpoint.unpack import unpack_weight
from deepinfer_jax.kernels.quantization import QuantTensor, dequantize
from deepinfer_jax.model.config import ModelConfig, VisionConfig
from deepinfer_jax.model.params import CheckpointTensor, Parameter, Params, abstract_params, build_params
from deepinfer_jax.model.plan import layer_plan

from .checkpoint_files import DATA, file_bytes, header_of, random_tensors, token_map, write_folder

pytestmark = pytest.mark.fast

MICRO = ModelConfig.micro()
SEEING = dataclasses.replace(
    MICRO,
    vision=VisionConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=48),
)
TEXT_ONLY = dataclasses.replace(
    MICRO, engram_layer_ids=(), engram_num_embeddings=(), num_nextn_predict_layers=0,
    compress_ratios=MICRO.compress_ratios[:-1],
)  # fmt: skip
CONFIGS = {"micro": MICRO, "vision": SEEING, "text only": TEXT_ONLY}


def on_host(array: np.ndarray) -> np.ndarray:
    """A `device_put` that leaves arrays where they are, for tests that need no device."""
    return array


def same_bits(first: Params, second: Params) -> bool:
    """Whether two parameter trees have the same structure, dtypes, shapes and bytes."""
    if jax.tree.structure(first) != jax.tree.structure(second):
        return False
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(
        (a.dtype, a.shape) == (b.dtype, b.shape) and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in pairs
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete micro checkpoint."""
    write_folder(tmp_path / "micro", MICRO, random_tensors(MICRO))
    return tmp_path / "micro"


# ---- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_structure_is_the_abstract_one(tmp_path: Path, name: str) -> None:
    """Guards against loaded arrays that a program compiled from `abstract_params` would not take."""
    write_folder(tmp_path / "x", CONFIGS[name], random_tensors(CONFIGS[name]))
    config, params = load_checkpoint(tmp_path / "x")
    assert config == CONFIGS[name]
    expected = abstract_params(config)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for leaf, abstract in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert isinstance(leaf, jax.Array)
        assert (leaf.shape, leaf.dtype) == (abstract.shape, abstract.dtype)


def test_every_tensor_is_in_its_place(folder: Path) -> None:
    """Guards against layers, experts, weights or scales exchanged while stacking."""
    stored = {tensor.name: data for tensor, data in random_tensors(MICRO).items()}
    _, params = load_checkpoint(folder, device_put=on_host)

    def check(leaf: Any, key: str, prefix: str, experts: bool) -> None:
        for expert in range(len(leaf.data) if experts else 1):
            one = leaf[expert] if experts else leaf
            name = prefix + key.format(expert)
            if isinstance(one, QuantTensor):
                assert stored.pop(f"{name}.scale") == one.scale.tobytes()
                assert stored.pop(f"{name}.weight") == one.data.tobytes()
            else:
                assert stored.pop(f"{name}.weight" if f"{name}.weight" in stored else name) == one.tobytes()

    for segment, runs in zip(layer_plan(MICRO), params.segments, strict=True):
        for index, run in enumerate(runs):
            for repeat, ids in enumerate(segment.layer_ids(index)):
                for position, layer in enumerate(ids):
                    for key, leaf in run.items():
                        check(leaf[repeat, position], key, f"layers.{layer}.", "{}" in key)
    for stage, leaves in enumerate(params.draft):
        for key, leaf in leaves.items():
            check(leaf, key, f"mtp.{stage}.", "{}" in key)
    for key in ("embed", "norm", "head"):
        check(getattr(params, key), key, "", False)
    assert not stored


def test_token_map_is_loaded(folder: Path) -> None:
    """Guards against hashing raw token ids."""
    _, params = load_checkpoint(folder)
    assert params.engram_token_map is not None
    assert params.engram_token_map.dtype == jnp.int32
    assert np.array_equal(params.engram_token_map, token_map(MICRO))


def test_layouts_load_alike(tmp_path: Path, folder: Path) -> None:
    """Guards against results that depend on how the files are cut."""
    write_folder(tmp_path / "sharded", MICRO, random_tensors(MICRO), shards=5)
    assert same_bits(load_checkpoint(folder)[1], load_checkpoint(tmp_path / "sharded")[1])


def test_loaded_arrays_are_independent_of_the_file(folder: Path) -> None:
    """Guards against parameters that change when the file is rewritten in place."""
    _, params = load_checkpoint(folder)
    before = [np.array(leaf, copy=True) for leaf in jax.tree.leaves(params)]
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))
    after = jax.tree.leaves(params)
    assert all(a.tobytes() == np.asarray(b).tobytes() for a, b in zip(before, after, strict=True))


def test_host_memory_is_one_leaf(tmp_path: Path) -> None:
    """Guards against holding the model twice: what is not given to a device is at most a leaf (and tables)."""
    config = dataclasses.replace(MICRO, hidden_size=256, moe_intermediate_size=256, n_routed_experts=32)
    write_folder(tmp_path / "x", config, random_tensors(config))
    total = (tmp_path / "x" / "model.safetensors").stat().st_size
    sizes: list[int] = []

    def drop(array: np.ndarray) -> np.ndarray:
        sizes.append(array.nbytes)
        return np.empty(0)  # as if it had moved to a device

    load_checkpoint(tmp_path / "x", device_put=drop)  # imports and caches
    tracemalloc.start()
    load_checkpoint(tmp_path / "x", device_put=drop)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tables = 6 << 20  # headers and the tensor table of about 2,400 tensors
    assert total > 3 * (max(sizes) + tables)
    assert peak < max(sizes) + tables


def test_place_hook_takes_single_leaves(folder: Path) -> None:
    """Guards the way to keep a large table on the host, mapped and not copied."""
    seen: list[str] = []

    def place(checkpoint: Checkpoint, parameter: Parameter, lead: tuple[int, ...], prefixes: tuple[str, ...]) -> Any:
        seen.append(parameter.key)
        if parameter.storage != "fp8_row":
            return None
        assert lead == (1, 1)
        data, scale = (checkpoint.read(f"{prefixes[0]}{parameter.key}.{part}") for part in ("weight", "scale"))
        return QuantTensor(data.view(np.uint8)[None, None], scale[None, None], "fp8_row")  # type: ignore[arg-type]

    _, params = load_checkpoint(folder, place=place)
    assert same_bits(params, load_checkpoint(folder)[1])
    kept = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, np.ndarray)]
    assert len(kept) == 4
    assert not any(leaf.flags.writeable or leaf.flags.owndata for leaf in kept)
    assert {"embed", "engram.embed", "attn.wq_a"} <= set(seen)


def test_nothing_is_placed_before_everything_is_checked(folder: Path) -> None:
    """Guards against filling a device and then refusing the last shard."""
    tensors = list(random_tensors(MICRO).items())
    kept = tensors[:-1]
    (folder / "model.safetensors").write_bytes(
        file_bytes(header_of([tensor for tensor, _ in kept]), b"".join(data for _, data in kept))
    )

    def fail(array: np.ndarray) -> np.ndarray:
        pytest.fail("an array was placed")

    with pytest.raises(CheckpointError, match="confidence_head"):
        load_checkpoint(folder, device_put=fail)


def test_nan_scale_names_file_and_tensor(folder: Path) -> None:
    """Guards against NaN weights in the model."""
    entry = Checkpoint(folder).entries["mtp.0.ffn.experts.2.w3.scale"]
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(entry.end - 1)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'mtp\.0\.ffn\.experts\.2\.w3\.scale'"):
        load_checkpoint(folder)


# ---- config.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "text_config is missing"),
        ('{"text_config": {}}', "text_config.vocab_size is missing"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ('{"a": Infinity}', "Infinity is not JSON"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + "[" * 40 + "]" * 40 + "}", "nested deeper than 32"),
        ('{"a": "' + "x" * (1 << 20) + '"}', "at most 1048576 are allowed"),
        ('{"text_config": {"vocab_size": "' + "x" * 100_000 + '"}}', "vocab_size"),
        ('{"text_config": {"vocab_size": ' + "9" * 4000 + "}}", "vocab_size"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_config_file(tmp_path: Path, text: str, message: str) -> None:
    """Guards the file before its values: bounded, strict, and named in the error."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert len(str(caught.value)) < 2000


def test_missing_config_file(tmp_path: Path) -> None:
    """Guards the message for a folder that is no checkpoint."""
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be opened"):
        load_config(tmp_path)


def test_number_of_described_tensors_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against enumerating the tensors of a configuration with billions of experts."""
    document = dataclasses.replace(MICRO, n_routed_experts=(1 << 31) - 1).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"describes \d+ tensors"):
        load_config(tmp_path)
    monkeypatch.setattr(load_limits, "MAX_TENSORS", 96_085)
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig.released().to_dict()))
    assert load_config(tmp_path) == ModelConfig.released()


# ---- saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", ["single", "released"])
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(tmp_path: Path, name: str, shards: Any) -> None:
    """Guards against a bit that changes on the way to disk and back, in every storage and layout."""
    write_folder(tmp_path / "a", CONFIGS[name], random_tensors(CONFIGS[name]))
    config, params = load_checkpoint(tmp_path / "a")
    save_checkpoint(tmp_path / "b", params, shards=shards)
    again, loaded = load_checkpoint(tmp_path / "b")
    assert again == config
    assert same_bits(params, loaded)
    first, second = Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "b")
    assert all(first.read_bytes(n).tobytes() == second.read_bytes(n).tobytes() for n in first.entries)


def test_golden_configuration_round_trip(tmp_path: Path) -> None:
    """Guards config.json and token map of an independently written checkpoint, vision section without layers."""
    shutil.copyfile(DATA / "golden_config.json", tmp_path / "config.json")
    shutil.copyfile(DATA / "golden_engram_token_map.npy", tmp_path / "engram_token_map.npy")
    tensors = random_tensors(load_config(tmp_path))
    content = file_bytes(header_of(list(tensors)), b"".join(tensors.values()))
    (tmp_path / "model.safetensors").write_bytes(content)
    config, params = load_checkpoint(tmp_path, device_put=on_host)
    save_checkpoint(tmp_path / "copy", params, shards="released")
    again, loaded = load_checkpoint(tmp_path / "copy", device_put=on_host)
    assert again == config
    assert same_bits(params, loaded)
    saved = (tmp_path / "copy" / "engram_token_map.npy").read_bytes()
    assert saved == (DATA / "golden_engram_token_map.npy").read_bytes()


def test_saved_bytes_are_deterministic(tmp_path: Path, folder: Path) -> None:
    """Guards against time stamps, hash order or padding in the files."""
    _, params = load_checkpoint(folder)
    for name in ("a", "b"):
        save_checkpoint(tmp_path / name, params, shards="released")
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in files)
    _, loaded = load_checkpoint(tmp_path / "a")
    save_checkpoint(tmp_path / "c", loaded, shards="released")
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "c" / n).read_bytes() for n in files)


@pytest.mark.parametrize("shards", ["single", "released"])
def test_library_reads_saved_headers(tmp_path: Path, folder: Path, shards: Any) -> None:
    """Guards against files that only this package can read; their data are aligned."""
    _, params = load_checkpoint(folder, device_put=on_host)
    save_checkpoint(tmp_path / "x", params, shards=shards)
    ours = Checkpoint(tmp_path / "x")
    seen = set()
    for path in (tmp_path / "x").glob("*.safetensors"):
        with safetensors.safe_open(path, "np") as library:
            assert library.metadata() == {"format": "pt"}
            for name in library.keys():  # noqa: SIM118  (the handle is no mapping)
                view = library.get_slice(name)
                entry = ours.entries[name]
                assert (view.get_dtype(), tuple(view.get_shape())) == (entry.dtype, entry.shape)
                assert entry.begin % {"F32": 4, "BF16": 2}.get(entry.dtype, 1) == 0
                seen.add(name)
                if entry.dtype in ("F32", "BF16"):
                    assert library.get_tensor(name).tobytes() == ours.read_bytes(name).tobytes()
    assert seen == set(ours.entries)


def test_released_layout() -> None:
    """Guards the released cut into 48 files, the size of the Engram files, and their headers."""
    layout = shard_layout(ModelConfig.released(), "released")
    files = list(layout)
    assert (len(files), files[0], files[-1]) == (
        48,
        "model-00001-of-00048.safetensors",
        "model-00048-of-00048.safetensors",
    )
    roles = [sorted({tensor.name.split(".")[0] for tensor in tensors}) for tensors in layout.values()]
    assert roles[0] == ["aligner", "image_end", "image_newline", "image_start", "vision"]
    assert roles[1] == ["embed"]
    assert roles[42] == ["head", "norm"]
    layers = [{int(t.name.split(".")[1]) for t in tensors} for tensors in list(layout.values())[2:42]]
    assert layers == [{layer} for layer in range(40)]
    assert [len(tensors) for tensors in list(layout.values())[43:]] == [801, 798, 802, 6, 6]
    sizes = [
        len(writer.header_bytes(tensors)) + sum(t.nbytes for t in tensors) for tensors in list(layout.values())[46:]
    ]
    assert sizes == [101_535_150_936, 101_537_926_640]  # as published


def test_refuses_to_overwrite(tmp_path: Path, folder: Path) -> None:
    """Guards against destroying a checkpoint by a second run."""
    _, params = load_checkpoint(folder, device_put=on_host)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError, match=r"config\.json: exists already; .*overwrite=True"):
        save_checkpoint(folder, params)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model-00002-of-00003.safetensors").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        save_checkpoint(tmp_path / "other", params)


def test_overwriting_leaves_one_checkpoint(tmp_path: Path, folder: Path) -> None:
    """Guards against an old index or old shards that stay beside the new file; other files stay."""
    _, params = load_checkpoint(folder, device_put=on_host)
    target = tmp_path / "x"
    save_checkpoint(target, params, shards="released")
    (target / "tokenizer.json").write_text("{}")
    changed = dataclasses.replace(params, norm=np.zeros_like(params.norm))
    save_checkpoint(target, changed, overwrite=True)
    expected = {"config.json", "engram_token_map.npy", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in target.iterdir()} == expected
    assert same_bits(load_checkpoint(target, device_put=on_host)[1], changed)
    save_checkpoint(target, params, shards="released", overwrite=True)
    assert not (target / "model.safetensors").exists()
    assert same_bits(load_checkpoint(target, device_put=on_host)[1], params)


def test_failed_write_leaves_nothing_half_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the old file, and against temporary files left behind, when the disk is full."""
    _, params = load_checkpoint(folder, device_put=on_host)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(folder, params, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_unfit_parameters_are_refused(tmp_path: Path, folder: Path) -> None:
    """Guards against writing a checkpoint that cannot be loaded; nothing is written."""
    _, params = load_checkpoint(folder, device_put=on_host)
    draft = params.draft[0]

    def with_draft(key: str, leaf: Any) -> Params:
        return dataclasses.replace(params, draft=({**draft, key: leaf},))

    packed = draft["ffn.experts.{}.w1"]
    nan: Any = np.array(packed.scale)
    nan[0, 0, 0] = 255
    cases = {
        "norm.weight: the parameter is float32": dataclasses.replace(params, norm=np.zeros(64, np.float32)),
        r"embed.weight: the parameter is bfloat16 \[64, 96\]": dataclasses.replace(params, embed=params.embed.T),
        r"mtp.0.ffn.experts.0.w1.scale: holds a NaN scale": with_draft(
            "ffn.experts.{}.w1", QuantTensor(packed.data, nan, "fp4")
        ),
        "mtp.0.ffn.experts.0.w1.weight: the parameter is not a QuantTensor": with_draft(
            "ffn.experts.{}.w1", packed.data
        ),
        "engram_token_map: is None": dataclasses.replace(params, engram_token_map=None),
        "engram_token_map: has classes": dataclasses.replace(params, engram_token_map=np.full(96, 80, np.int32)),
    }
    for message, bad in cases.items():
        with pytest.raises(ValueError, match=message):
            save_checkpoint(tmp_path / "x", bad)
    assert not (tmp_path / "x").exists()


def test_tensor_sizes_are_python_integers() -> None:
    """Guards against sizes that overflow: an Engram table has more than 2^31 bytes."""
    assert CheckpointTensor("x", "F32", (1 << 40, 1 << 40)).nbytes == 4 << 80
    abstract = build_params(ModelConfig.released(), lambda parameter, lead, _: parameter.abstract(lead))
    tables = [run["engram.embed"] for segment in abstract.segments for run in segment if "engram.embed" in run]
    assert [table.shape for table in tables] == [(1, 1, 384_006_168, 256), (1, 1, 384_016_682, 256)]


@pytest.mark.fast
@pytest.mark.parametrize(("fmt", "rows", "columns"), [("fp8", 64, 256), ("fp4", 16, 256)])
def test_unpacked_weights_are_the_dequantized_ones(fmt: str, rows: int, columns: int) -> None:
    """Guards NumPy's unpacking at load: every byte under many scales has the value that products use."""
    rng = np.random.default_rng(3)
    width = columns if fmt == "fp8" else columns // 2
    data = np.resize(np.arange(256, dtype=np.uint8), (2, rows, width))
    scale = rng.integers(60, 190, (2, rows // 32 if fmt == "fp8" else rows, columns // 32)).astype(np.uint8)
    weight = QuantTensor(jnp.asarray(data), jnp.asarray(scale), fmt)  # type: ignore[arg-type]
    want = np.asarray(dequantize(weight))
    got = unpack_weight(data, scale, fmt)  # type: ignore[arg-type]
    assert got.dtype == want.dtype
    numbers = ~np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(got.view(np.uint16)[numbers], want.view(np.uint16)[numbers])
    assert np.isnan(got.astype(np.float32)[~numbers]).all()
