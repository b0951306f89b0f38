"""README's tree of files is the one on disk: a stranger finds from it where something is done."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHOWN_WHOLE = ("hf_specgen", "trainers", "scripts")
SHOWN_AS_A_FOLDER = ("benchmarks", "docs", "examples", "tests")
NOT_SHOWN = ("__init__.py", "py.typed")


def tree_of(readme: str) -> list[str]:
    """The paths in the block under "Files": names before two spaces, with commas, indented under their folder."""
    block = re.search(r"^## Files\n.*?^```\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block is not None, "README has a section with the tree"
    paths: list[str] = []
    folders: dict[int, str] = {0: ""}
    for line in block[1].splitlines():
        indent = len(line) - len(line.lstrip())
        names = line.strip().split("  ")[0].split(", ")
        assert indent in folders, f"this line stands under no folder: {line!r}"
        paths += [folders[indent] + name for name in names]
        folders = {depth: folder for depth, folder in folders.items() if depth <= indent}
        if names[0].endswith("/"):
            folders[indent + 2] = paths[-1]
    return paths


def paths_on_disk() -> list[str]:
    found = [f"{name}/" for name in SHOWN_AS_A_FOLDER]
    for name in SHOWN_WHOLE:
        found.append(f"{name}/")
        for path in (ROOT / name).rglob("*"):
            relative = path.relative_to(ROOT).as_posix()
            if "__pycache__" not in path.parts and path.name not in NOT_SHOWN:
                found.append(f"{relative}/" if path.is_dir() else relative)
    return found


def test_the_tree_is_the_one_on_disk():
    shown = tree_of((ROOT / "README.md").read_text())
    assert len(shown) == len(set(shown)), "nothing is shown twice"
    on_disk = paths_on_disk()
    assert sorted(set(on_disk) - set(shown)) == [], "on disk, but not in the tree"
    assert sorted(set(shown) - set(on_disk)) == [], "in the tree, but not on disk"
    assert all((ROOT / path).exists() for path in on_disk)


def test_the_tree_is_read_with_its_folders():
    readme = "## Files\n\nWords.\n\n```\na/     a room\n  b.py, c.py  two\n  d/\n    e.py\n  f.py  one, two\ng/\n```\n"
    assert tree_of(readme) == ["a/", "a/b.py", "a/c.py", "a/d/", "a/d/e.py", "a/f.py", "g/"]
