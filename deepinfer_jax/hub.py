"""Download of a checkpoint from a model hub at a pinned commit, through the client of the extra `hub`.

Only named files are fetched and nothing of a repository is executed or unpickled. The small files come first
and are checked before the shards are asked for: a repository that is not of this model costs megabytes, not
half a terabyte. Transfer, resuming, tokens and cache folder are the client's own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from urllib.parse import quote

from deepinfer_jax.checkpoint.engram_map import MAP_FILE
from deepinfer_jax.checkpoint.files import CheckpointError, exists, parse_json, read_small, shortened, shown
from deepinfer_jax.checkpoint.load import CONFIG_FILE, check_tensors, load_config
from deepinfer_jax.checkpoint.reader import INDEX_FILE, MAX_INDEX_BYTES, SINGLE_FILE, Checkpoint
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import checkpoint_table
from deepinfer_jax.prompt.tokenizer import MAX_TOKENIZER_BYTES, TOKENIZER_FILE

RELEASED = "released"
"""Name for `load_params` of the repository below."""

RELEASED_REPOSITORY = "deepseek-ai/DeepSeek-V4.1-Flash-1017@main"
"""Repository and revision of the released weights; the environment variable REPOSITORY_VARIABLE takes its place."""

REPOSITORY_VARIABLE = "DEEPINFER_JAX_REPOSITORY"

SMALL_FILES = (CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE, MAP_FILE)
"""What is fetched before the shards, where the repository has it."""

_MAX_SMALL_BYTES = max(MAX_INDEX_BYTES, MAX_TOKENIZER_BYTES)
_MAX_RECORD_BYTES = 1 << 20
_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95})(?:@([A-Za-z0-9][\w./-]{0,254}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")


class HubError(ValueError):
    """A download that is refused, was not confirmed, failed, or brought something else than was announced."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A downloaded and checked checkpoint.

    folder: where its files are. repository: "owner/name". revision: what was asked for, a branch, tag or
    commit. commit: 40 hexadecimal digits, what the revision stood for when it was first downloaded.
    files: size in bytes of every file.
    """

    folder: Path
    repository: str
    revision: str
    commit: str
    files: Mapping[str, int]


# ---- names ------------------------------------------------------------------------------------------


def is_hub_name(source: str) -> bool:
    """Whether a source reads "owner/name", with or without "@revision", or is RELEASED."""
    return source == RELEASED or _NAME.fullmatch(source) is not None


def parse_name(source: str, revision: str | None = None) -> tuple[str, str]:
    """(repository, revision) of a source; the revision defaults to "main".

    Raises HubError when the source is no name, or names another revision than `revision`.
    """
    name = (os.environ.get(REPOSITORY_VARIABLE) or RELEASED_REPOSITORY) if source == RELEASED else source
    match = _NAME.fullmatch(name)
    if match is None:
        where = f"{REPOSITORY_VARIABLE}: " if source == RELEASED else ""
        raise HubError(f"{where}{shown(name)} is not of the form owner/name or owner/name@revision")
    repository, named = match[1], match[2]
    if revision is not None:
        if _NAME.fullmatch(f"{repository}@{revision}") is None:
            raise HubError(f"revision: {shown(revision)} is not a branch, tag or commit")
        if named is not None and named != revision and source != RELEASED:
            raise HubError(f"{source}: names the revision {named}, but revision={revision!r} was given; leave one out")
        return repository, revision
    standard, _, standard_revision = RELEASED_REPOSITORY.partition("@")
    return repository, named or (standard_revision if repository == standard else "main")


# ---- the record of what was downloaded --------------------------------------------------------------


def record_path(repository: str, revision: str, cache: Path) -> Path:
    """The file that says which commit a repository and revision stand for on this machine."""
    return cache / "hub" / f"{quote(repository, safe='')}@{quote(revision, safe='')}.json"


def _write_record(path: Path, snapshot: Snapshot) -> None:
    document = {
        "repository": snapshot.repository,
        "revision": snapshot.revision,
        "commit": snapshot.commit,
        "files": dict(sorted(snapshot.files.items())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _read_record(path: Path) -> tuple[str, dict[str, int]] | None:
    """(commit, sizes of files) of a record, None if there is none."""
    if not exists(path.parent, path.name):
        return None
    document = parse_json(read_small(path.parent, path.name, _MAX_RECORD_BYTES), str(path))
    commit, files = document.get("commit"), document.get("files")
    plain = isinstance(files, dict) and all(_plain_file(n) and type(size) is int for n, size in files.items())
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or not plain:
        raise HubError(f"{path}: is damaged; remove it, and the next call asks the hub again")
    return commit, document["files"]


def recorded(source: str, revision: str | None = None, *, cache: Path) -> Snapshot | None:
    """What an earlier `download` of the source brought, without the network; None if it is not complete here.

    cache: this package's cache folder.
    """
    repository, wanted = parse_name(source, revision)
    record = _read_record(record_path(repository, wanted, cache))
    if record is None:
        return None
    commit, files = record
    config = _client().try_to_load_from_cache(repository, CONFIG_FILE, revision=commit)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    if any(_size(folder, name) != size for name, size in files.items()):
        return None
    return Snapshot(folder, repository, wanted, commit, files)


# ---- the client -------------------------------------------------------------------------------------


def _client() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise HubError(
            "downloading needs huggingface_hub; install it with: pip install 'deepinfer-jax[hub]'"
        ) from error
    return huggingface_hub


@contextmanager
def _told(repository: str, revision: str) -> Iterator[None]:
    """Turn the client's errors into one sentence that says what to do."""
    from huggingface_hub import errors

    where = f"{repository}@{revision}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(f"{where}: access is restricted; accept the terms on its page and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(f"{where}: no such folder here, and no such repository (or it is private)") from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{where}: the repository has no such revision") from error
    # The client passes failures to connect on as errors of its HTTP library, whose base class it names here.
    except (errors.HTTPError, OSError) as error:  # pyright: ignore[reportPrivateImportUsage]
        first = (str(error).splitlines() or [""])[0]
        raise HubError(
            f"{where}: the download failed ({type(error).__name__}: {first}); call again to go on where it ended"
        ) from error


def _plain_file(name: str) -> bool:
    return name in SMALL_FILES or _SHARD.fullmatch(name) is not None


def _listing(repository: str, revision: str) -> tuple[str, dict[str, int]]:
    """(commit, sizes of the files that a checkpoint can consist of) of a revision."""
    client = _client()
    with _told(repository, revision):
        info = client.HfApi().model_info(repository, revision=revision, files_metadata=True)
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise HubError(f"{repository}@{revision}: the hub names no commit for it")
    files: dict[str, int] = {}
    for sibling in info.siblings or ():
        if _plain_file(sibling.rfilename):
            if type(sibling.size) is not int or sibling.size < 0:
                raise HubError(f"{repository}@{revision}: the hub tells no size of {sibling.rfilename}")
            files[sibling.rfilename] = sibling.size
    if CONFIG_FILE not in files:
        raise HubError(f"{repository}@{revision}: has no {CONFIG_FILE}; it is no checkpoint of this model")
    return info.sha, files


def _fetch(repository: str, commit: str, names: list[str]) -> Path:
    client = _client()
    with _told(repository, commit):
        return Path(client.snapshot_download(repository, revision=commit, allow_patterns=sorted(names)))


# ---- download ---------------------------------------------------------------------------------------


def _size(folder: Path, name: str) -> int | None:
    """Size of a file, links followed; None if it is not there."""
    path = folder / name
    return path.stat().st_size if path.is_file() else None


def _shards(folder: Path, config: ModelConfig, listed: Mapping[str, int], where: str) -> list[str]:
    """Files that hold the tensors, from the index, which must name exactly this model's tensors."""
    if INDEX_FILE not in listed:
        if SINGLE_FILE not in listed:
            raise HubError(f"{where}: has neither {SINGLE_FILE} nor {INDEX_FILE}; it is no checkpoint of this model")
        return [SINGLE_FILE]
    index = parse_json(read_small(folder, INDEX_FILE, MAX_INDEX_BYTES), f"{where}: {INDEX_FILE}")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{where}: {INDEX_FILE}: weight_map is missing or does not map names to files")
    expected = {tensor.name for tensor in checkpoint_table(config)}
    for names, problem in ((expected - set(weight_map), "lacks"), (set(weight_map) - expected, "has unknown")):
        if names:
            raise CheckpointError(f"{where}: {INDEX_FILE} {problem} tensors: {shortened(sorted(names), len(names))}")
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if shard not in listed]
    if absent:
        raise HubError(f"{where}: {INDEX_FILE} names files that are not there: {shortened(absent, len(absent))}")
    return shards


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def _confirm(text: str, yes: bool) -> None:
    """Tell what will be downloaded and go on only if that is wanted. Raises HubError otherwise."""
    print(text, file=sys.stderr)
    if yes:
        return
    if not sys.stdin.isatty():
        raise HubError(
            "the download needs a confirmation, and there is no terminal to ask on; "
            "pass yes=True (on the command line: --yes)"
        )
    print("Download? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise HubError("the download was not confirmed; nothing was fetched but the small files")


def _free(folder: Path) -> int:
    """Bytes that are free where a folder is or will be."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def verify(folder: Path, files: Mapping[str, int], config: ModelConfig) -> None:
    """Compare a downloaded folder with what was announced; values of tensors are not read.

    Every file's size must be the listed one, every shard's header must cover its file exactly, names, dtypes
    and shapes must be the configuration's, and the index's metadata.total_size must be the sum of the tensors.
    Raises HubError or CheckpointError, naming the file.
    """
    for name, size in files.items():
        found = _size(folder, name)
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise HubError(
                f"{folder / name}: {state}, but the hub lists {size}; remove {os.path.realpath(folder / name)} "
                "and call again"
            )
    checkpoint = Checkpoint(folder)
    check_tensors(checkpoint, config)
    if INDEX_FILE not in files:
        return
    where = str(folder / INDEX_FILE)
    metadata = parse_json(read_small(folder, INDEX_FILE, MAX_INDEX_BYTES), where).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    held = sum(entry.end - entry.begin for entry in checkpoint.entries.values())
    if total is None:
        print(f"{where}: tells no total_size; the shards were checked one by one", file=sys.stderr)
    elif type(total) is not int or total != held:
        raise CheckpointError(f"{where}: metadata.total_size is {shown(total)}, but the tensors take {held} bytes")


def download(source: str, *, revision: str | None = None, yes: bool = False, cache: Path) -> Snapshot:
    """Make a checkpoint of the hub available here, at one commit.

    The first download of a branch or tag pins it: later calls with the same words load the same commit, without
    the network if it is complete. `record_path` names the file to remove to follow the branch again.

    Args:
        source: "owner/name", "owner/name@revision" or RELEASED.
        revision: branch, tag or commit; default "main", or what the source names.
        yes: do not ask before the shards are fetched.
        cache: this package's cache folder, for the record; the files go to the client's own cache.
    Raises: HubError when the extra is not installed, the repository cannot be had, the disk is too small,
        or nobody confirms; CheckpointError when what it holds is not a checkpoint of this model.
    """
    present = recorded(source, revision, cache=cache)
    if present is not None:
        return present
    repository, wanted = parse_name(source, revision)
    path = record_path(repository, wanted, cache)
    record = _read_record(path)
    commit, listed = _listing(repository, wanted if record is None else record[0])
    where = f"{repository}@{commit}"
    small = [name for name in SMALL_FILES if name in listed]
    for name in small:
        if listed[name] > _MAX_SMALL_BYTES:
            raise HubError(f"{where}: {name} has {listed[name]} bytes; at most {_MAX_SMALL_BYTES} are allowed")
    folder = _fetch(repository, commit, small)
    config = load_config(folder)
    shards = _shards(folder, config, listed, where)
    files = {name: listed[name] for name in (*small, *shards)}
    needed = sum(files[name] for name in shards if _size(folder, name) != files[name])
    if needed:
        free = _free(folder)
        text = (
            f"{where} ({wanted}): {_gigabytes(sum(files.values()))} in {len(files)} files, "
            f"{_gigabytes(needed)} to download; {_gigabytes(free)} free at {folder}"
        )
        if needed > free:
            raise HubError(f"{text}; the disk is too small. Set HF_HUB_CACHE to a folder on a larger one")
        _confirm(text, yes)
        folder = _fetch(repository, commit, list(files))
    verify(folder, files, config)
    snapshot = Snapshot(folder, repository, wanted, commit, files)
    _write_record(path, snapshot)
    return snapshot
