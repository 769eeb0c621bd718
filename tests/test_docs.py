"""The documents must agree with the tree: links, the two commands, the test table, nothing machine-bound."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]
COMMANDS = (
    'pip install -q uv && uv run deepinfer-jax generate "Once upon a time"',
    "uv run --extra test pytest",
)
SENTENCE = "independent re-implementation, not affiliated with DeepSeek; names are their owners'"
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".cfg", ".cc", ".cpp", ".h", ".yml", ".yaml", ""}
SKIPPED_FOLDERS = {"__pycache__", "build", "dist", "data", "site-packages"}

# Put together from pieces, so that this file passes its own test.
REGISTRY_HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("files", "pythonhosted", "org"),
        ("registry", "npmjs", "org"),
        ("deb", "debian", "org"),
        ("proxy", "golang", "org"),
        ("crates", "io"),
    )
)
MACHINE_PATH = re.compile(r"(?<![\w./~*-])/(?:" + "|".join(("wo" + "rk", "ro" + "ot", "ho" + r"me/\w+")) + r")(?:/|\b)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1[^\S\n]*$", re.MULTILINE | re.DOTALL)


def text_files() -> list[Path]:
    """Text files of the project, relative to the root: no links, no data, nothing built or hidden but .ci."""
    found = []
    for current, folders, files in os.walk(ROOT, followlinks=False):
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED_FOLDERS and not name.endswith(".egg-info") and (name[0] != "." or name == ".ci")
        ]
        paths = [Path(current) / name for name in files if not name.endswith(".lock")]
        found += [p.relative_to(ROOT) for p in paths if p.suffix in TEXT_SUFFIXES and not p.is_symlink()]
    return sorted(path for path in found if path.name != ".git")


def heading_anchors(text: str) -> set[str]:
    """Anchors that a Markdown page gets for its headings: lower case, punctuation dropped, blanks to hyphens."""
    headings = re.findall(r"^#+\s+(.*?)\s*$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative link targets of `text`, read as the file `page`, that lead to no file or no heading."""
    broken = []
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if path != page and not path.exists():
            broken.append(target)
        elif anchor and path.suffix == ".md":
            content = path.read_text(encoding="utf-8") if path != page else text
            if anchor not in heading_anchors(content):
                broken.append(target)
    return broken


def machine_bound(text: str) -> list[str]:
    """Registry host names and absolute machine paths in `text`."""
    hosts = [host for host in REGISTRY_HOSTS if host in text]
    return hosts + [match.group(0) for match in MACHINE_PATH.finditer(text)]


def test_relative_links_resolve() -> None:
    """Guards against a page that moved or a heading that was renamed under a link."""
    pages = [path for path in text_files() if path.suffix == ".md"]
    assert Path("README.md") in pages
    errors = {str(page): broken_links(ROOT / page, (ROOT / page).read_text(encoding="utf-8")) for page in pages}
    assert {page: links for page, links in errors.items() if links} == {}


def test_broken_links_are_found(tmp_path: Path) -> None:
    """Guards the check itself: dead files and dead anchors are reported, web links and code are not."""
    (tmp_path / "other.md").write_text("# One title: here\n```\n# not a heading\n```\n", encoding="utf-8")
    text = (
        "# Top\n[a](other.md) [b](other.md#one-title-here) [c](#top) [d](https://example.com/x)\n"
        "```\n[e](in-code.md)\n```\n[f](gone.md) [g](other.md#not-a-heading) [h](#gone)"
    )
    assert broken_links(tmp_path / "page.md", text) == ["gone.md", "other.md#not-a-heading", "#gone"]


def test_readme_has_the_two_commands() -> None:
    """Guards the commands that a newcomer copies: verbatim, each alone on its line in a code block."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = "\n".join(match.group(0) for match in FENCE.finditer(readme))
    assert [command for command in COMMANDS if command not in blocks.splitlines()] == []


def test_ci_runs_the_readme_test_command() -> None:
    """Guards against a README whose test command is not the one that is tried on every change."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").replace('"${UV[@]}"', "uv")
    assert COMMANDS[1] in script


def test_readme_says_who_made_this() -> None:
    """Guards the sentence that keeps readers from taking this for DeepSeek's own release."""
    words = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert SENTENCE.lower() in words.lower()


def table_errors(rows: set[str], files: set[str]) -> list[str]:
    """Test files without a row and rows without a file; a row that ends in "/" covers the files of that folder."""
    folders = {row for row in rows if row.endswith("/")}
    covered = {file for file in files if file in rows or file.rpartition("/")[0] + "/" in folders}
    used = covered | {folder for folder in folders if any(file.startswith(folder) for file in files)}
    errors = [f"add a row  | `{name}` | what it guards |" for name in sorted(files - covered)]
    return errors + [f"remove the row of `{name}`" for name in sorted(rows - used)]


def test_every_test_file_is_in_the_table() -> None:
    """Guards docs/testing.md: a test file without a row, or a row whose file is gone."""
    page = (ROOT / "docs/testing.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `((?:\w+/)*(?:test_\w+\.py)?)`", page, re.MULTILINE))
    files = {path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    errors = table_errors(rows, files)
    assert not errors, "docs/testing.md:\n  " + "\n  ".join(errors)


def test_table_errors_are_found() -> None:
    """Guards the check itself: missing and stale rows, of files and of folders."""
    assert table_errors({"test_a.py", "kernels/"}, {"test_a.py", "kernels/test_b.py"}) == []
    assert table_errors({"kernels/"}, {"test_a.py"}) == [
        "add a row  | `test_a.py` | what it guards |",
        "remove the row of `kernels/`",
    ]


def test_every_dependency_has_a_reason() -> None:
    """Guards docs/dependencies.md: a dependency, extra or tool that nobody gave a reason for."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = document["project"]["optional-dependencies"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=!~;\[ ]", requirement)[0] for requirement in requirements}

    page = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    rows = {match[0]: match[1] for match in re.findall(r"^\| `([\w.-]+)` (.*)$", page, re.MULTILINE)}
    builders = names(document["build-system"]["requires"])
    tools = names(document["dependency-groups"]["lint"])
    assert set(rows) == names(document["project"]["dependencies"]) | set(extras) | tools | builders
    unnamed = [(extra, n) for extra, needs in extras.items() for n in names(needs) if f"`{n}" not in rows[extra]]
    assert unnamed == []


def test_no_machine_bound_text() -> None:
    """Guards against host names of package registries and paths of one machine in the published tree."""
    errors = {str(path): machine_bound((ROOT / path).read_text(encoding="utf-8")) for path in text_files()}
    assert {path: found for path, found in errors.items() if found} == {}


def test_machine_bound_text_is_found() -> None:
    """Guards the check itself, and that ordinary prose and relative paths pass."""
    for piece in (
        "see https://" + REGISTRY_HOSTS[0] + "/x",
        "in /wo" + "rk/main",
        "/ro" + "ot/.cache",
        "/ho" + "me/me/x",
    ):
        assert machine_bound(piece) != []
    assert machine_bound("docs/work/a, ../root/b, the work / root of x, ~/home/me") == []
