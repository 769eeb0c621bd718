"""The installed package must be the folders: nothing missing, nothing stale, nothing huge."""

from __future__ import annotations

import fnmatch
import os
import pkgutil
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import deepinfer_jax

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]
MAPPED = ("kernels", "model", "sharding")
"""Top-level folders that install as subpackages of deepinfer_jax."""

MAX_TRACKED_BYTES = 40 * 2**20
LOCK_FILES = ("*.lock", "*.lockb", "package-lock.json", "pnpm-lock.yaml", "pylock*.toml")


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def python_folders(root: Path) -> dict[str, Path]:
    """Import name -> folder of every folder under the package tops that holds Python files; links not followed."""
    found: dict[str, Path] = {}
    for top in ("deepinfer_jax", *MAPPED):
        for current, folders, files in os.walk(root / top, followlinks=False):
            folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
            if any(name.endswith(".py") for name in files):
                parts = Path(current).relative_to(root).parts
                found[".".join(parts if top == "deepinfer_jax" else ("deepinfer_jax", *parts))] = Path(current)
    return found


def list_errors(listed: list[str], found: list[str]) -> list[str]:
    """What to change in `[tool.setuptools] packages` so that it names exactly the folders, sorted."""
    errors = [f'add the line   "{name}",' for name in sorted(set(found) - set(listed))]
    errors += [f'remove the line   "{name}",' for name in sorted(set(listed) - set(found))]
    errors += [f'"{name}" stands twice' for name in sorted({n for n in listed if listed.count(n) > 1})]
    return errors or ([] if listed == sorted(listed) else [f"sort the list: {sorted(listed)}"])


def data_errors(packages: dict[str, Path], patterns: dict[str, list[str]]) -> list[str]:
    """Patterns of package-data that match no file, and data files that no pattern brings into the wheel."""
    errors = []
    for package, globs in patterns.items():
        if package not in packages:
            errors.append(f'package-data names "{package}", which is not a package')
            continue
        errors += [f'"{package}" = ["{g}"] matches no file' for g in globs if not any(packages[package].glob(g))]
    for package, folder in packages.items():
        shipped = {path for g in patterns.get(package, []) for path in folder.glob(g)}
        for path in sorted(folder.iterdir()):
            if path.is_symlink() or not path.is_file() or path.suffix in (".py", ".pyc") or path.name.startswith("."):
                continue
            if path not in shipped:
                errors.append(f'add a pattern for {path.name} to   "{package}" = [...]')
    return errors


def git_index() -> list[tuple[str, str]]:
    """(mode, path) of every tracked file; skips the test where there is no git checkout."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout (sdist or plain copy)")
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "--stage", "-z"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    entries = [entry.split("\t", 1) for entry in listing.split("\0") if entry]
    return [(head.split()[0], path) for head, path in entries]


def test_package_list_equals_folders() -> None:
    """Guards against a new folder that imports from a checkout but is missing from the wheel."""
    errors = list_errors(pyproject()["tool"]["setuptools"]["packages"], list(python_folders(ROOT)))
    assert not errors, "pyproject.toml, [tool.setuptools] packages:\n  " + "\n  ".join(errors)


def test_list_errors_names_the_line() -> None:
    """Guards the check itself: missing, stale, doubled and unsorted entries are each reported."""
    assert list_errors(["a", "a.b"], ["a", "a.b"]) == []
    assert list_errors(["a"], ["a", "a.b"]) == ['add the line   "a.b",']
    assert list_errors(["a", "a.b"], ["a"]) == ['remove the line   "a.b",']
    assert list_errors(["a", "a"], ["a"]) == ['"a" stands twice']
    assert list_errors(["b", "a"], ["a", "b"]) == ["sort the list: ['a', 'b']"]


def test_every_package_has_an_init() -> None:
    """Guards against a folder that Python takes as a namespace package and tools then miss."""
    assert [name for name, folder in python_folders(ROOT).items() if not (folder / "__init__.py").is_file()] == []


def test_package_dir_maps_the_top_level_folders() -> None:
    """Guards against a wheel whose deepinfer_jax.model is built from anywhere but model/."""
    mapping = pyproject()["tool"]["setuptools"]["package-dir"]
    expected = {"deepinfer_jax": "deepinfer_jax"} | {f"deepinfer_jax.{top}": top for top in MAPPED}
    assert mapping == expected


@pytest.mark.parametrize("top", MAPPED)
def test_links_point_at_the_top_level_folders(top: str) -> None:
    """Guards against a link replaced by a copy, whose edits would never reach the wheel."""
    link = ROOT / "deepinfer_jax" / top
    if not link.is_symlink() and link.is_file():
        assert link.read_text(encoding="utf-8") == f"../{top}"
        pytest.skip("this checkout was made without symbolic links")
    assert os.readlink(link) == f"../{top}"
    assert link.resolve() == (ROOT / top).resolve()


def test_links_are_committed_as_links() -> None:
    """Guards against a commit in which git stores a link as a folder or a text file."""
    modes = {path: mode for mode, path in git_index()}
    assert {top: modes.get(f"deepinfer_jax/{top}") for top in MAPPED} == dict.fromkeys(MAPPED, "120000")


def test_package_data_is_complete() -> None:
    """Guards against data files that a checkout has and the wheel lacks, and against stale patterns."""
    errors = data_errors(python_folders(ROOT), pyproject()["tool"]["setuptools"]["package-data"])
    assert not errors, "pyproject.toml, [tool.setuptools.package-data]:\n  " + "\n  ".join(errors)


def test_data_errors_finds_both_directions(tmp_path: Path) -> None:
    """Guards the check itself: an unlisted file, an empty pattern and an unknown package are reported."""
    for name in ("a.py", "listed.json", "stray.bin"):
        (tmp_path / name).touch()
    errors = data_errors({"p": tmp_path}, {"p": ["*.json", "*.txt"], "q": ["*"]})
    assert errors == [
        '"p" = ["*.txt"] matches no file',
        'package-data names "q", which is not a package',
        'add a pattern for stray.bin to   "p" = [...]',
    ]


def test_version_is_one() -> None:
    """Guards against a release whose metadata and `deepinfer_jax.__version__` disagree."""
    assert pyproject()["project"]["version"] == deepinfer_jax.__version__


def test_python_version_file() -> None:
    """Guards against the pinned interpreter drifting from the oldest supported Python."""
    assert (ROOT / ".python-version").read_text(encoding="utf-8").strip() == "3.12"
    assert pyproject()["project"]["requires-python"] == ">=3.12"


def test_tracked_tree_is_small() -> None:
    """Guards against weights, logs or build output slipping into the repository (limit 40 MiB)."""
    paths = [ROOT / path for mode, path in git_index() if mode != "120000"]
    sizes = {path: path.stat().st_size for path in paths if path.is_file()}
    largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:5]
    report = ", ".join(f"{path.relative_to(ROOT)} {sizes[path]}" for path in largest)
    assert sum(sizes.values()) < MAX_TRACKED_BYTES, f"largest files in bytes: {report}"


def test_no_lock_file_is_tracked() -> None:
    """Guards against a lock file: this is a library, and its version ranges are what is tested."""
    tracked = [path for _, path in git_index()]
    assert [p for p in tracked if any(fnmatch.fnmatch(Path(p).name, pattern) for pattern in LOCK_FILES)] == []


def test_public_names_are_no_modules() -> None:
    """Guards against a public function that becomes a module as soon as something imports a module of its name."""
    names = set(deepinfer_jax.__all__)
    assert not names & {module.name for module in pkgutil.iter_modules(deepinfer_jax.__path__)}
