"""Rules about what each folder may import and call, checked on the syntax tree of every source file.

    kernels  <-  model  <-  sharding  <-  deepinfer_jax

Each rule is a function of (module name, syntax tree) that returns violations. Each has a self-test
on synthetic sources, so a rule that silently stops finding anything fails too.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "model", "sharding", "deepinfer_jax")
"""Lowest first. A layer imports from itself and from lower ones."""

OTHER_FOLDERS = ("tests", "tools", "examples", "benchmarks")

COMPILE_AND_MESH = {
    "jit", "pjit", "pmap", "shard_map", "xmap",
    "mesh", "Mesh", "AbstractMesh", "make_mesh", "set_mesh", "get_mesh", "get_abstract_mesh", "mesh_utils",
    "NamedSharding", "PartitionSpec", "with_sharding_constraint", "device_put", "devices", "local_devices",
    "psum", "psum_scatter", "pmax", "pmin", "pmean", "all_gather", "all_to_all", "ppermute", "axis_index",
}  # fmt: skip
IO_MODULES = {
    "builtins", "glob", "io", "json", "logging", "mmap", "os", "pathlib", "pickle", "safetensors", "shutil",
    "socket", "subprocess", "sys", "tempfile", "tokenizers", "tqdm", "importlib.resources",
}  # fmt: skip
IO_CALLS = {"open", "print", "input", "exec", "eval"}
IO_ATTRIBUTES = {
    "np.load", "np.save", "np.savez", "np.fromfile", "np.memmap", "numpy.load", "numpy.save", "numpy.fromfile",
    "jnp.load", "jnp.save", "jax.debug", "jax.experimental.io_callback",
}  # fmt: skip
TORCH_FAMILY = {"torch", "torchvision", "transformers", "triton"}
TORCH_PEERS = "benchmarks.torch_peers"

Rule = Callable[[str, ast.Module], list[str]]


def module_name(path: Path) -> str:
    """Import name of a source file given relative to the repository root; packages end in ".__init__"."""
    parts = path.with_suffix("").parts
    return ".".join(parts if parts[0] not in LAYERS[:3] else ("deepinfer_jax", *parts))


def layer_of(module: str) -> str | None:
    """Layer that an absolute module name belongs to, None for foreign modules."""
    parts = module.split(".")
    if parts[0] != "deepinfer_jax":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS[:3] else "deepinfer_jax"


def imported_modules(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of everything imported: statements, relative ones resolved, and import_module("...").

    `from a import b` yields "a.b", since b may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = dotted(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__", "importorskip") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def dotted(node: ast.AST) -> str:
    """ "a.b.c" of an attribute chain, "" for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else node.attr
    return ""


def one_way(module: str, tree: ast.Module) -> list[str]:
    """A layer never imports a higher one."""
    own = layer_of(module)
    if own is None:
        return []
    allowed = LAYERS[: LAYERS.index(own) + 1]
    return [
        f"line {line}: {own} imports {name}"
        for line, name in imported_modules(module, tree)
        if (target := layer_of(name)) is not None and target not in allowed
    ]


def no_bare_folder(module: str, tree: ast.Module) -> list[str]:
    """`import model` would load a second copy of the package, with other class identities."""
    return [
        f"line {line}: {name}: write deepinfer_jax.{name.split('.')[0]}... (in tests/, a relative import)"
        for line, name in imported_modules(module, tree)
        if name.split(".")[0] in LAYERS[:3]
    ]


def no_torch(module: str, tree: ast.Module) -> list[str]:
    """The project runs without torch. One benchmark times it, where it is installed."""
    if module == TORCH_PEERS:
        return []
    return [
        f"line {line}: imports {name}"
        for line, name in imported_modules(module, tree)
        if name.split(".")[0] in TORCH_FAMILY
    ]


def no_compile_or_mesh(module: str, tree: ast.Module) -> list[str]:
    """model/ is pure functions: compiling and placing are the callers' work."""
    if layer_of(module) != "model":
        return []
    found = [
        f"line {line}: imports {name}"
        for line, name in imported_modules(module, tree)
        if set(name.split(".")) & COMPILE_AND_MESH
    ]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in COMPILE_AND_MESH:
            continue
        if dotted(node).startswith(("jax.", "lax.")):
            found.append(f"line {node.lineno}: uses {dotted(node)}")
    return found


def no_io(module: str, tree: ast.Module) -> list[str]:
    """model/ and kernels/ touch no file, stream or environment; kernels' shapes.py and tuned/ may read data."""
    parts = module.split(".")
    if layer_of(module) not in ("kernels", "model"):
        return []
    if layer_of(module) == "kernels" and (parts[-1] == "shapes" or "tuned" in parts):
        return []
    found = [
        f"line {line}: imports {name}"
        for line, name in imported_modules(module, tree)
        if name.split(".")[0] in IO_MODULES or ".".join(name.split(".")[:2]) in IO_MODULES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IO_CALLS:
            found.append(f"line {node.lineno}: calls {node.func.id}()")
        elif isinstance(node, ast.Attribute) and dotted(node) in IO_ATTRIBUTES:
            found.append(f"line {node.lineno}: uses {dotted(node)}")
    return found


RULES: tuple[Rule, ...] = (one_way, no_bare_folder, no_torch, no_compile_or_mesh, no_io)


def sources() -> list[Path]:
    """Every Python file of the project, relative to the root; links are not followed, so each appears once."""
    found = []
    for top in (*LAYERS, *OTHER_FOLDERS):
        for current, folders, files in os.walk(ROOT / top, followlinks=False):
            folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
            found += [(Path(current) / name).relative_to(ROOT) for name in files if name.endswith(".py")]
    return sorted(found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_keep_the_rule(rule: Rule) -> None:
    """Guards the layering: a convenient import in the wrong direction, or I/O in a pure function."""
    errors = []
    for path in sources():
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))
        errors += [f"{path}: {error}" for error in rule(module_name(path), tree)]
    assert not errors, f"{rule.__doc__}\n  " + "\n  ".join(errors)


def test_sources_are_found_once() -> None:
    """Guards against a scan that finds nothing, or finds a folder again through its link."""
    found = [path.as_posix() for path in sources()]
    for expected in ("kernels/__init__.py", "model/config.py", "sharding/__init__.py", "tests/test_imports.py"):
        assert expected in found
    assert not [path for path in found if path.startswith(tuple(f"deepinfer_jax/{top}/" for top in LAYERS[:3]))]


BAD = [
    (one_way, "kernels/a.py", "import deepinfer_jax.model.config"),
    (one_way, "kernels/a.py", "from deepinfer_jax import sharding"),
    (one_way, "kernels/a.py", "from .. import model"),
    (one_way, "kernels/op/a.py", "from ...model.config import ModelConfig"),
    (one_way, "kernels/op/__init__.py", "from ... import engine"),
    (one_way, "kernels/a.py", "def f():\n    import importlib\n    importlib.import_module('deepinfer_jax.model')"),
    (one_way, "kernels/a.py", "if True:\n    from deepinfer_jax import __version__"),
    (one_way, "model/a.py", "from deepinfer_jax.sharding import mesh"),
    (one_way, "model/a.py", "from deepinfer_jax.engine import step"),
    (one_way, "model/a.py", "import deepinfer_jax"),
    (one_way, "sharding/a.py", "from ..checkpoint import load"),
    (no_bare_folder, "deepinfer_jax/a.py", "import model"),
    (no_bare_folder, "tests/a.py", "from kernels.quantization import GROUP"),
    (no_bare_folder, "tools/a.py", "import sharding as s"),
    (no_torch, "tests/a.py", "import torch"),
    (no_torch, "tools/a.py", "from torch.nn import functional"),
    (no_torch, "benchmarks/a.py", "import torch"),
    (no_torch, "tests/a.py", "import pytest\ntorch = pytest.importorskip('torch')"),
    (no_compile_or_mesh, "model/a.py", "import jax\nf = jax.jit(f)"),
    (no_compile_or_mesh, "model/a.py", "from jax import jit"),
    (no_compile_or_mesh, "model/a.py", "import jax\n@jax.jit\ndef f(x): return x"),
    (no_compile_or_mesh, "model/a.py", "import jax\nf = jax.shard_map(f, mesh=m)"),
    (no_compile_or_mesh, "model/a.py", "from jax.sharding import NamedSharding"),
    (no_compile_or_mesh, "model/a.py", "import jax\ns = jax.sharding.Mesh(d, 'x')"),
    (no_compile_or_mesh, "model/a.py", "from jax import lax\ny = lax.psum(x, 'group')"),
    (no_io, "model/a.py", "import os"),
    (no_io, "model/a.py", "from pathlib import Path"),
    (no_io, "kernels/a.py", "import json as j"),
    (no_io, "kernels/op/api.py", "from importlib.resources import files"),
    (no_io, "kernels/op/api.py", "from importlib import resources"),
    (no_io, "model/a.py", "def f(x):\n    print(x)"),
    (no_io, "model/a.py", "text = open('x').read()"),
    (no_io, "model/a.py", "import numpy as np\nx = np.load('x.npy')"),
    (no_io, "model/a.py", "import jax\njax.debug.print('x')"),
]

GOOD = [
    (one_way, "model/a.py", "from deepinfer_jax.kernels.quantization import GROUP\nfrom .config import ModelConfig"),
    (one_way, "sharding/a.py", "from deepinfer_jax import kernels, model"),
    (one_way, "kernels/op/a.py", "from ..quantization import GROUP\nfrom . import shapes"),
    (one_way, "deepinfer_jax/engine/a.py", "from deepinfer_jax.sharding import mesh"),
    (one_way, "tests/a.py", "import deepinfer_jax.model"),
    (no_bare_folder, "deepinfer_jax/a.py", "from deepinfer_jax import model\nfrom . import kernels"),
    (no_torch, "tests/a.py", "import jax\ntext = 'import torch'"),
    (no_compile_or_mesh, "deepinfer_jax/a.py", "import jax\nf = jax.jit(f)"),
    (no_compile_or_mesh, "model/a.py", "import jax\ny = jax.lax.scan(f, x, None)\nexchange.all_gather(x)"),
    (no_io, "kernels/op/shapes.py", "import json\nfrom importlib import resources"),
    (no_io, "kernels/op/tuned/a.py", "import json"),
    (no_io, "deepinfer_jax/a.py", "import os\nprint(1)"),
    (no_io, "model/a.py", "x = cache.open\nstate.print()"),
]


def case_id(value: object) -> str:
    return value.__name__ if callable(value) else str(value).replace("\n", "; ")  # type: ignore[attr-defined]


@pytest.mark.parametrize(("rule", "path", "source"), BAD, ids=case_id)
def test_rule_finds_violation(rule: Rule, path: str, source: str) -> None:
    """Guards against a rule that no longer sees one of the ways to break it."""
    assert len(rule(module_name(Path(path)), ast.parse(source))) >= 1


@pytest.mark.parametrize(("rule", "path", "source"), GOOD, ids=case_id)
def test_rule_accepts_allowed_code(rule: Rule, path: str, source: str) -> None:
    """Guards against a rule so wide that people would switch it off."""
    assert rule(module_name(Path(path)), ast.parse(source)) == []


def test_every_rule_has_both_self_tests() -> None:
    """Guards against adding a rule without showing that it can fail and can pass."""
    assert {rule for rule, *_ in BAD} == set(RULES) == {rule for rule, *_ in GOOD}
