"""Downloads: what is fetched, asked, checked, remembered and refused. The client is a stub; nothing uses a network."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deepinfer_jax import demo, hub
from deepinfer_jax import load as loading
from deepinfer_jax.checkpoint import CheckpointError
from deepinfer_jax.cli import main
from deepinfer_jax.model.config import ModelConfig

from .checkpoint_files import random_tensors, write_folder

pytestmark = pytest.mark.fast

MICRO = ModelConfig.micro()
NAME = "someone/micro.flash_1"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LATER = "f" * 40
INDEX = "model.safetensors.index.json"


class HTTPError(Exception):
    """Base of the HTTP library's errors, as the client's module of errors names it."""


class HfHubHTTPError(HTTPError, OSError):
    """An answer that is an error."""


class RepositoryNotFoundError(HfHubHTTPError):
    """Stub of the client's error of this name."""


class GatedRepoError(RepositoryNotFoundError):
    """Stub of the client's error of this name."""


class RevisionNotFoundError(HfHubHTTPError):
    """Stub of the client's error of this name."""


class Client:
    """A hub with one repository and a client whose cache is laid out like the real one.

    commits: commit -> folder of its files. branches: name -> commit. error: raised by every call.
    fetched: files whose content went over the wire. limit: files that a call may fetch before it breaks off.
    """

    def __init__(self, cache: Path, commits: dict[str, Path]) -> None:
        self.cache, self.commits = cache / "models--stub", commits
        self.branches = {"main": COMMIT}
        self.error: Exception | None = None
        self.fetched: list[str] = []
        self.limit = 1000
        self.extra: dict[str, int | None] = {}

    def _commit(self, repo_id: str, revision: str | None) -> str:
        if self.error is not None:
            raise self.error
        if repo_id != NAME:
            raise RepositoryNotFoundError(repo_id)
        commit = self.branches.get(revision or "main", revision or "")
        if commit not in self.commits:
            raise RevisionNotFoundError(revision)
        return commit

    def model_info(self, repo_id: str, *, revision: str | None = None, files_metadata: bool = False) -> Any:
        commit = self._commit(repo_id, revision)
        assert files_metadata, "sizes are only listed on demand"
        sizes = {path.name: path.stat().st_size for path in self.commits[commit].iterdir()}
        listed = {**sizes, "README.md": 5, "modeling.py": 9, "pytorch_model.bin": 9, **self.extra}
        return SimpleNamespace(
            sha=commit, siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in listed.items()]
        )

    def snapshot_download(
        self, repo_id: str, *, revision: str | None = None, allow_patterns: list[str] | str | None = None
    ) -> str:
        commit = self._commit(repo_id, revision)
        folder = self.cache / "snapshots" / commit
        (self.cache / "blobs").mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        assert isinstance(allow_patterns, list)
        started = len(self.fetched)
        for name in allow_patterns:
            if (folder / name).exists():
                continue
            if len(self.fetched) - started == self.limit:
                raise HTTPError("connection reset")
            content = (self.commits[commit] / name).read_bytes()
            blob = self.cache / "blobs" / hashlib.sha256(content).hexdigest()
            blob.write_bytes(content)
            (folder / name).symlink_to(blob)
            self.fetched.append(name)
        return str(folder)

    def try_to_load_from_cache(
        self, repo_id: str, filename: str, cache_dir: Any = None, revision: str | None = None
    ) -> str | None:
        path = self.cache / "snapshots" / (revision or "main") / filename
        return str(path) if repo_id == NAME and path.exists() else None

    def module(self) -> ModuleType:
        """What `import huggingface_hub` gives."""
        module, errors = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.errors")
        for kind in (HTTPError, HfHubHTTPError, RepositoryNotFoundError, GatedRepoError, RevisionNotFoundError):
            setattr(errors, kind.__name__, kind)
        values = {
            "errors": errors,
            "HfApi": lambda: SimpleNamespace(model_info=self.model_info),
            "snapshot_download": self.snapshot_download,
            "try_to_load_from_cache": self.try_to_load_from_cache,
        }
        for name, value in values.items():
            setattr(module, name, value)
        return module


def total_size(folder: Path, change: int = 0) -> None:
    """Write metadata.total_size into the index, off by `change`."""
    index = json.loads((folder / INDEX).read_text())
    held = 0
    for shard in set(index["weight_map"].values()):
        data = (folder / shard).read_bytes()
        held += len(data) - 8 - int.from_bytes(data[:8], "little")
    index["metadata"] = {"total_size": held + change}
    (folder / INDEX).write_text(json.dumps(index))


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """The repository's files: a micro checkpoint in three shards."""
    folder = tmp_path / "remote"
    write_folder(folder, MICRO, random_tensors(MICRO), shards=3)
    total_size(folder)
    return folder


@pytest.fixture
def client(tmp_path: Path, remote: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    """The stub in place of the client, an empty cache, no terminal."""
    made = Client(tmp_path / "cache", {COMMIT: remote})
    module = made.module()
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", module.errors)  # type: ignore[attr-defined]
    monkeypatch.setenv("DEEPINFER_JAX_CACHE", str(tmp_path / "own"))
    monkeypatch.delenv(hub.REPOSITORY_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return made


@pytest.fixture
def get(tmp_path: Path, client: Client) -> Callable[..., hub.Snapshot]:
    """`hub.download` of the repository, confirmed."""

    def call(source: str = NAME, **options: Any) -> hub.Snapshot:
        settings: dict[str, Any] = {"yes": True, "cache": tmp_path / "own"} | options
        return hub.download(source, **settings)

    return call


class Terminal(io.StringIO):
    """Standard input of a person."""

    def isatty(self) -> bool:
        return True


# ---- what is fetched and checked ---------------------------------------------------------------------


def test_download(client: Client, remote: Path, get: Callable[..., hub.Snapshot], tmp_path: Path) -> None:
    """Guards the list of files: the checkpoint whole, no code, no pickles, and the small ones before the shards."""
    (remote / "extra.safetensors").write_bytes(b"not in the index")
    snapshot = get()
    names = ["config.json", "engram_token_map.npy", INDEX, *(f"part-{i}.safetensors" for i in range(3))]
    assert client.fetched == names
    assert sorted(snapshot.files) == sorted(names)
    assert snapshot == hub.Snapshot(snapshot.folder, NAME, "main", COMMIT, snapshot.files)
    for name in names:
        assert (snapshot.folder / name).read_bytes() == (remote / name).read_bytes()
    record = json.loads((tmp_path / "own/hub/someone%2Fmicro.flash_1@main.json").read_text())
    assert record == {"repository": NAME, "revision": "main", "commit": COMMIT, "files": dict(snapshot.files)}


def test_load_params(client: Client, remote: Path) -> None:
    """Guards the way from a name to weights: the same configuration and leaves as from the folder."""
    loaded = loading.load_params(NAME, yes=True, unpack=False)
    other = loading.load_params(remote, unpack=False)
    assert loaded.config == other.config == MICRO
    assert loaded.norm.tobytes() == other.norm.tobytes()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"revision: .*remote is not a repository of the hub"):
        loading.load_params(remote, revision="main")
    with pytest.raises(ValueError, match="no such folder"):
        loading.load_params(Path(NAME))
    assert len(client.fetched) == len(set(client.fetched)) == 6


def test_single_file(client: Client, remote: Path, get: Callable[..., hub.Snapshot]) -> None:
    """Guards small repositories that have one tensor file and no index; the tokenizer comes with it."""
    shutil.rmtree(remote)
    write_folder(remote, MICRO, random_tensors(MICRO))
    (remote / "tokenizer.json").write_bytes(demo.tokenizer_json())
    assert sorted(get().files) == ["config.json", "engram_token_map.npy", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("error", [None, OSError("no route"), HTTPError("down")])
def test_complete_snapshot_needs_no_network(
    client: Client, get: Callable[..., hub.Snapshot], error: Exception | None
) -> None:
    """Guards offline work: a complete download is used without a question to hub or user."""
    first = get()
    client.error, client.fetched = error, []
    assert get(yes=False) == first
    assert client.fetched == []


def test_branch_stays_at_its_commit(
    client: Client, remote: Path, get: Callable[..., hub.Snapshot], tmp_path: Path
) -> None:
    """Guards against the same call loading other weights after somebody pushed."""
    first = get()
    client.commits[LATER] = Path(shutil.copytree(remote, tmp_path / "later"))
    client.branches["main"] = LATER
    assert get() == first
    assert get(revision=LATER).commit == LATER
    assert get(f"{NAME}@{LATER}").commit == LATER
    shutil.rmtree(client.cache)
    assert get() == first  # downloaded anew, at the recorded commit
    hub.record_path(NAME, "main", tmp_path / "own").unlink()
    assert get().commit == LATER


def test_interrupted_download_goes_on(client: Client, get: Callable[..., hub.Snapshot]) -> None:
    """Guards against fetching complete files twice, and against a broken download that passes as complete."""
    client.limit = 2
    for fetched in (2, 5):  # among the small files, then among the shards
        with pytest.raises(hub.HubError, match=r"failed \(HTTPError: connection reset\); call again to go on"):
            get()
        assert len(client.fetched) == fetched
    client.limit = 1000
    get()
    assert len(client.fetched) == len(set(client.fetched)) == 6


def test_damaged_file_is_named(client: Client, get: Callable[..., hub.Snapshot]) -> None:
    """Guards the size of every file, also of one that was complete once: the blob to remove is named."""
    folder = get().folder
    blob = (folder / "part-1.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(
        hub.HubError, match=rf"part-1\.safetensors: has \d+ bytes, but the hub lists \d+; .*{blob.name}"
    ):
        get()
    blob.unlink()
    (folder / "part-1.safetensors").unlink()
    get()


def test_headers_are_checked(client: Client, remote: Path, get: Callable[..., hub.Snapshot]) -> None:
    """Guards against a shard of the right size whose header does not describe its data."""
    shard = remote / "part-0.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b'"F32"', b'"BF1"', 1))
    with pytest.raises(CheckpointError, match=r"part-0\.safetensors: tensor .*dtype 'BF1'"):
        get()


def test_total_size(
    client: Client, remote: Path, get: Callable[..., hub.Snapshot], capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the sum that the index announces; an index without one is told, not passed over."""
    total_size(remote, 1)
    with pytest.raises(CheckpointError, match=r"index\.json: metadata\.total_size is \d+, but the tensors take \d+"):
        get()
    shutil.rmtree(client.cache)
    index = json.loads((remote / INDEX).read_text())
    (remote / INDEX).write_text(json.dumps({"weight_map": index["weight_map"]}))
    get()
    assert "tells no total_size" in capsys.readouterr().err


# ---- what is refused before the shards ---------------------------------------------------------------


def shards_of(client: Client) -> list[str]:
    return [name for name in client.fetched if name.endswith(".safetensors")]


def change_index(remote: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((remote / INDEX).read_text())
    change(index["weight_map"])
    (remote / INDEX).write_text(json.dumps(index))


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    "other model": (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "model_type is 'llama'"),
    "no tensors": (lambda f: (f / INDEX).unlink(), "neither model.safetensors nor"),
    "no shard": (lambda f: (f / "part-2.safetensors").unlink(), r"names files that are not there: 'part-2\.safe"),
    "missing tensor": (lambda f: change_index(f, lambda m: m.popitem()), "lacks tensors"),
    "unknown tensor": (lambda f: change_index(f, lambda m: m.update(x="part-1.safetensors")), "unknown tensors: 'x'"),
    "path": (lambda f: change_index(f, lambda m: m.update(dict.fromkeys(m, "../x.safetensors"))), "not there: '../x"),
    "no map": (lambda f: (f / INDEX).write_text('{"weight_map": [1]}'), "weight_map is missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_the_shards(client: Client, remote: Path, get: Callable[..., hub.Snapshot], name: str) -> None:
    """Guards against half a terabyte of something that is not this model."""
    change, message = REFUSED[name]
    change(remote)
    with pytest.raises(ValueError, match=message):
        get()
    assert shards_of(client) == []


def test_sizes_must_be_known_and_small(client: Client, get: Callable[..., hub.Snapshot]) -> None:
    """Guards the sum that the user is asked about, and the files that come without asking."""
    client.extra = {"part-1.safetensors": None}
    with pytest.raises(hub.HubError, match=r"tells no size of part-1\.safetensors"):
        get()
    client.extra = {"tokenizer.json": 65 << 20}
    with pytest.raises(hub.HubError, match=r"tokenizer\.json has 68157440 bytes; at most"):
        get()
    assert client.fetched == []


def test_disk_too_small(client: Client, get: Callable[..., hub.Snapshot], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a disk that is full after hours of downloading."""
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(hub.HubError, match=r"0\.0 GB free at .*; the disk is too small\. Set HF_HUB_CACHE"):
        get()
    assert shards_of(client) == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError("403"), "accept the terms on its page and set HF_TOKEN"),
        (RepositoryNotFoundError("404"), "no such folder here, and no such repository"),
        (RevisionNotFoundError("404"), "has no such revision"),
        (HTTPError("timed out\nsee there"), r"the download failed \(HTTPError: timed out\); call again"),
        (ConnectionError("offline mode"), r"the download failed \(ConnectionError: offline mode\)"),
    ],
)
def test_errors_of_the_hub(client: Client, get: Callable[..., hub.Snapshot], error: Exception, message: str) -> None:
    """Guards against tracebacks of an HTTP library: repository, revision and what to do are named."""
    client.error = error
    with pytest.raises(hub.HubError, match=rf"^{NAME}@main: .*{message}"):
        get()


def test_missing_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards the hint that names the extra."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(hub.HubError, match=r"pip install 'deepinfer-jax\[hub\]'"):
        hub.download(NAME, cache=tmp_path)


# ---- asking ------------------------------------------------------------------------------------------


def test_no_terminal(client: Client, get: Callable[..., hub.Snapshot], capsys: pytest.CaptureFixture[str]) -> None:
    """Guards scripts: without a terminal and without yes=True nothing large is fetched, and the error says so."""
    with pytest.raises(hub.HubError, match=r"no terminal to ask on; pass yes=True \(on the command line: --yes\)"):
        get(yes=False)
    assert shards_of(client) == []
    assert f"{NAME}@{COMMIT} (main): 0.0 GB in 6 files" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "fetched"), [("y\n", 3), ("YES\n", 3), ("n\n", 0), ("\n", 0), ("", 0)])
def test_question(
    client: Client,
    get: Callable[..., hub.Snapshot],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    fetched: int,
) -> None:
    """Guards the question: only a clear yes downloads; silence and end of input do not."""
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    if fetched:
        get(yes=False)
    else:
        with pytest.raises(hub.HubError, match="not confirmed"):
            get(yes=False)
    assert len(shards_of(client)) == fetched
    assert capsys.readouterr().err.endswith("Download? [y/N] ")


def test_command_line(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards --yes and --revision: they reach the loader and the printed Python."""
    command = ["score", "Once", "--model", NAME, "--revision", LATER]
    assert main(command) == 1
    assert f"{NAME}@{LATER}: the repository has no such revision" in capsys.readouterr().err
    assert main(["score", "Once", "--model", NAME]) == 1
    assert "--yes" in capsys.readouterr().err
    assert main([*command, "--yes", "--show-code"]) == 0
    assert f"load_params({NAME!r}, revision={LATER!r}, yes=True)" in capsys.readouterr().out


# ---- names and records -------------------------------------------------------------------------------


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what counts as a repository, and where the default and its override come from."""
    monkeypatch.delenv(hub.REPOSITORY_VARIABLE, raising=False)
    repository, revision = hub.RELEASED_REPOSITORY.split("@")
    assert hub.parse_name("released") == hub.parse_name(repository) == (repository, revision)
    assert hub.parse_name("released", "abc") == (repository, "abc")
    assert hub.parse_name("a/b") == ("a/b", "main")
    assert hub.parse_name("a/b@refs/pr/1") == hub.parse_name("a/b@refs/pr/1", "refs/pr/1") == ("a/b", "refs/pr/1")
    monkeypatch.setenv(hub.REPOSITORY_VARIABLE, "mirror/flash@v2")
    assert hub.parse_name("released") == ("mirror/flash", "v2")
    assert hub.parse_name("released", "v3") == ("mirror/flash", "v3")
    assert hub.parse_name(repository) == (repository, revision)
    monkeypatch.setenv(hub.REPOSITORY_VARIABLE, "mirror")
    with pytest.raises(hub.HubError, match=r"^DEEPINFER_JAX_REPOSITORY: 'mirror' is not of the form"):
        hub.parse_name("released")
    with pytest.raises(hub.HubError, match=r"names the revision v1, but revision='v2'"):
        hub.parse_name("a/b@v1", "v2")
    with pytest.raises(hub.HubError, match="revision: '' is not"):
        hub.parse_name("a/b", "")
    for other in ("demo", "./a/b", "/a/b", "a/b/c", "../b", "a//b", "a/b@", "https://a/b", "a/b ", "a\\b"):
        assert not hub.is_hub_name(other)


@pytest.mark.parametrize("text", ["{}", "[]", '{"commit": "main", "files": {}}', '{"files": {"../x": 1}}', "{"])
def test_damaged_record(client: Client, get: Callable[..., hub.Snapshot], tmp_path: Path, text: str) -> None:
    """Guards against a record that names no commit, or a file outside the folder."""
    path = hub.record_path(NAME, "main", tmp_path / "own")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"micro\.flash_1@main\.json: "):
        get()


def test_stub_has_the_signatures_of_the_client() -> None:
    """Guards this file: what is called here exists in the real client with these parameters."""
    real = pytest.importorskip("huggingface_hub", reason="the extra hub is not installed")
    pairs = {
        "snapshot_download": (Client.snapshot_download, real.snapshot_download),
        "try_to_load_from_cache": (Client.try_to_load_from_cache, real.try_to_load_from_cache),
        "model_info": (Client.model_info, real.HfApi.model_info),
    }
    for name, (stub, function) in pairs.items():
        parameters = inspect.signature(function).parameters
        for parameter in list(inspect.signature(stub).parameters.values())[1:]:
            assert parameter.name in parameters, f"{name}: {parameter.name}"
            assert parameter.kind == parameters[parameter.name].kind, f"{name}: {parameter.name}"
    for kind in (HTTPError, HfHubHTTPError, RepositoryNotFoundError, GatedRepoError, RevisionNotFoundError):
        theirs = getattr(real.errors, kind.__name__)
        bases = [base.__name__ for base in theirs.__mro__]
        assert [base.__name__ for base in kind.__mro__ if base.__name__ in bases] == [b.__name__ for b in kind.__mro__]
    assert {field.name for field in dataclasses.fields(real.hf_api.RepoSibling)} >= {"rfilename", "size"}
