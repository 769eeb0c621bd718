"""The command line: reports, exit statuses, and errors that a person can act on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax import __version__
from deepinfer_jax.checkpoint import CheckpointError
from deepinfer_jax.cli import main
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import checkpoint_table

from .checkpoint_files import random_tensors, token_map, write_folder

pytestmark = pytest.mark.fast

MICRO = ModelConfig.micro()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete micro checkpoint in three shards."""
    write_folder(tmp_path / "checkpoint", MICRO, random_tensors(MICRO), shards=3)
    return tmp_path / "checkpoint"


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Standard output of a command that succeeds without a word on standard error."""
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on standard error of a command that fails with status 1."""
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err


# ---- inspect --------------------------------------------------------------------------------------


def test_released_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the numbers that people compare with the published ones."""
    text = output(capsys, "inspect", "released")
    rows = [" ".join(line.split()) for line in text.splitlines()]
    for expected in (
        "routed experts 92,160 288,777,830,400 56.59%",
        "Engram tables 4 202,758,032,400 39.73%",
        "draft other 97 713,428,872 0.14%",
        "F8_E8M0 47,589 23,563,015,184 4.62%",
        "total 96,085 510,286,023,000 475.2 GiB",
        "Engram tables 196.614 B",
        "draft 14.225 B",
        "total 763.205 B",
        "layers 2-13 2 x [1 full + 5 reuse], ratio 2, encoder",
        "layers 24-39 4 x [1 reindex + 3 reuse], ratio 1, decoder",
    ):
        assert expected in rows
    assert "configuration only: what follows is what a checkpoint must hold" in text
    assert max(len(line) for line in text.splitlines()) <= 100


@pytest.mark.parametrize("name", ["released", "demo", "micro"])
def test_built_in_names(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Guards every built-in name, and that its JSON configuration is the configuration."""
    report = json.loads(output(capsys, "inspect", name, "--json"))
    config = ModelConfig.from_dict(report["config"])
    assert config == getattr(ModelConfig, name)()
    assert report["checked_files"] == 0
    assert "tensors" not in report
    assert report["total"]["tensors"] == sum(row["tensors"] for row in report["categories"].values())
    assert report["total"]["bytes"] == sum(row["bytes"] for row in report["dtypes"].values())


def test_checked_folder(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Guards the statement about what was checked."""
    text = output(capsys, "inspect", str(folder))
    assert text.splitlines()[0] == str(folder)
    count = len(list(checkpoint_table(MICRO)))
    assert f"checked: the headers of 3 files hold exactly the {count} tensors" in text
    assert "configuration only" not in text
    assert json.loads(output(capsys, "inspect", str(folder), "--json"))["checked_files"] == 3


def test_folder_with_only_a_config(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Guards against claiming that a checkpoint is good when none was there."""
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    text = output(capsys, "inspect", str(folder))
    assert "checked" not in text
    assert "no tensor file was looked at" in text


def test_tensor_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a list that leaves tensors out."""
    lines = output(capsys, "inspect", "micro", "--tensors").splitlines()
    listed = [line.split(maxsplit=2) for line in lines[lines.index("tensors") + 1 :]]
    table = list(checkpoint_table(MICRO))
    assert listed == [[tensor.name, tensor.dtype, str(list(tensor.shape))] for tensor in table]
    report = json.loads(output(capsys, "inspect", "micro", "--tensors", "--json"))
    assert [(t["name"], t["dtype"], tuple(t["shape"]), t["bytes"]) for t in report["tensors"]] == [
        (tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in table
    ]


def test_damaged_folder(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Guards the status and the message for a truncated shard, and for a token map that does not fit."""
    path = folder / "part-1.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert "part-1.safetensors: tensor '" in failure(capsys, "inspect", str(folder))
    path.write_bytes(content)
    np.save(folder / "engram_token_map.npy", token_map(MICRO)[:-1])
    assert "engram_token_map.npy: has 95 entries" in failure(capsys, "inspect", str(folder))


def test_wrong_path(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Guards the hint for a mistyped name, and for a folder that is no checkpoint."""
    text = failure(capsys, "inspect", "relased")
    assert text.startswith("deepinfer-jax inspect: error: relased: is not a folder")
    assert "released, demo, micro" in text
    assert "config.json: cannot be opened" in failure(capsys, "inspect", str(tmp_path))


def test_debug_raises(tmp_path: Path) -> None:
    """Guards the way to see where an error comes from."""
    with pytest.raises(CheckpointError):
        main(["inspect", str(tmp_path), "--debug"])


# ---- the command itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "Once", "--seed", "3"], "deepinfer_jax.generate(params, 'Once', max_tokens=200, seed=3)"),
        (["score", "Once", "--top", "2", "--numerics", "f32_noq"], "load_params('demo', numerics='f32_noq')"),
        (["chat", "--max-tokens", "5"], "deepinfer_jax.stream(params, messages, max_tokens=5)"),
    ],
)
def test_show_code(capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    """Guards the printed Python against options that get lost; it must at least be Python."""
    assert main([*arguments, "--show-code"]) == 0
    code = capsys.readouterr().out
    assert expected in code
    compile(code, "shown", "exec")


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["inspect", "micro", "--colour"], ["frobnicate"]])
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """Guards argparse's status for usage errors."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: deepinfer-jax" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], "deepinfer-jax inspect released"),
        (["inspect", "--help"], "built-in configuration"),
        (["generate", "--help"], "--max-tokens 50"),
        (["--version"], f"deepinfer-jax {__version__}\n"),
    ],
)
def test_help_and_version(capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    """Guards help that teaches: every page has its examples or its reason."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    assert expected in capsys.readouterr().out


def test_start_does_not_import_jax() -> None:
    """Guards against help and errors that take seconds to appear."""
    code = (
        "import sys\n"
        "from deepinfer_jax.cli import main\n"
        "assert main(['generate', 'Once', '--show-code']) == 0\n"
        "heavy = {'jax', 'numpy', 'tokenizers', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_module_runs_as_a_command() -> None:
    """Guards `python -m deepinfer_jax`, and its exit status."""
    command = [sys.executable, "-m", "deepinfer_jax"]
    version = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True, timeout=120)
    assert version.stdout == f"deepinfer-jax {__version__}\n"
    assert subprocess.run([*command, "generate"], capture_output=True, timeout=120).returncode == 2


def test_closed_pipe_is_no_error() -> None:
    """Guards `inspect --tensors | head`: no traceback when the reader stops."""
    command = [sys.executable, "-m", "deepinfer_jax", "inspect", "released", "--tensors"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 0
