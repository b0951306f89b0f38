"""The pages and the README name what exists: public names, imports, files, tests; mkdocs builds them strictly."""

import ast
import importlib.util
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hf_specgen
import trainers
from tests.support.reference_pages import ROOT, listed_paths

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)")
MAX_README_LINES = 200


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_every_public_name_is_on_the_reference_pages():
    public = {f"hf_specgen.{name}" for name in hf_specgen.__all__} | {f"trainers.{name}" for name in trainers.__all__}
    assert public <= listed_paths()


@pytest.mark.parametrize("path", sorted(listed_paths()))
def test_reference_pages_list_what_exists(path):
    assert pkgutil.resolve_name(path).__doc__


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_code_on_pages_compiles_and_imports_what_exists(page):
    for source in CODE.findall(page.read_text()):
        if source.startswith("--8<--"):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("hf_specgen", "trainers"):
                for alias in node.names:
                    pkgutil.resolve_name(f"{node.module}:{alias.name}")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_to_files_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_promises_name_tests_that_exist():
    table = (ROOT / "README.md").read_text().partition("## What is guaranteed")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]*test_\w+\.py)`", table)
    assert len(named) > 15
    for name in named:
        assert (ROOT / "tests" / name).is_file(), name


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def build(folder: Path, site: Path) -> subprocess.CompletedProcess:
    if importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_pages_build(tmp_path):
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "api" / "engine.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", ["[a name][hf_specgen.nowhere]", "[a page](nowhere.md)", "[a part](limits.md#nowhere)"]
)
def test_a_wrong_reference_fails_the_build(tmp_path, wrong):
    for name in ("docs", "examples", "hf_specgen", "trainers"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write(f"\n{wrong}\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and "nowhere" in done.stderr
