"""A room may import those below it, and no file imports in a circle: read from the sources, type checking included."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# From the bottom up. Rooms side by side do not know each other.
ROOMS = (
    {"arguments"},
    {"logits_process", "layers"},
    {"engine"},
    {"drafters", "prompts"},
    {"dspark"},
    {"generation"},
    {"serving"},
    {"embedded"},
    {"trainers"},
    {"commands"},
    {"scripts"},
)
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def module_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


MODULES = {
    module_of(path): path
    for folder in ("hf_specgen", "trainers", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def room_of(module: tuple[str, ...]) -> str:
    return module[1] if module[0] == "hf_specgen" and len(module) > 1 else module[0]


def imported(path: Path, source: str | None = None) -> dict[tuple[str, ...], int]:
    """The project's modules that a file imports, wherever the import stands, with its line."""
    module, found = module_of(path), {}
    package = module if path.name == "__init__.py" else module[:-1]
    for node in ast.walk(ast.parse(path.read_text() if source is None else source)):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else ()
            base = (*parent, *(node.module or "").split("."))
            base = tuple(part for part in base if part)
            names = [(*base, alias.name) for alias in node.names]
        else:
            continue
        for name in names:
            while name and name not in MODULES:
                name = name[:-1]
            if name:
                found[name] = node.lineno
    return found


def upward_imports(path: Path, source: str | None = None) -> list[str]:
    module = module_of(path)
    level = LEVELS[room_of(module)]
    return [
        f"{path.relative_to(ROOT)}:{line} imports {'.'.join(target)}"
        for target, line in imported(path, source).items()
        if target != ("hf_specgen",) and room_of(target) != room_of(module) and LEVELS[room_of(target)] >= level
    ]


def nested_imports(path: Path) -> list[str]:
    """Imports of the project inside a function; only a command may delay `trainers`."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(path.read_text())
    lines = {
        node.lineno
        for function in ast.walk(tree)
        if isinstance(function, functions)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    is_command = module_of(path)[:2] == ("hf_specgen", "commands")
    return [
        f"{path.relative_to(ROOT)}:{line} imports {'.'.join(target)}"
        for target, line in imported(path).items()
        if line in lines and not (is_command and target[0] == "trainers")
    ]


def find_circle(graph: dict[tuple[str, ...], list[tuple[str, ...]]]) -> list[str]:
    """The files of a circle, or nothing."""
    done: set[tuple[str, ...]] = set()

    def visit(module: tuple[str, ...], trail: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        if module in trail:
            return trail[trail.index(module) :]
        if module in done:
            return []
        for target in graph[module]:
            if circle := visit(target, [*trail, module]):
                return circle
        done.add(module)
        return []

    for module in graph:
        if circle := visit(module, []):
            return [".".join(part) for part in circle]
    return []


def test_every_room_has_its_place():
    rooms = {room_of(module) for module in MODULES if module != ("hf_specgen",)}
    assert rooms == set(LEVELS), "put new rooms into `ROOMS`, take removed ones out"


def test_imports_go_down():
    outside = [path for module, path in MODULES.items() if module != ("hf_specgen",)]
    assert [line for path in outside for line in upward_imports(path)] == []


def test_trainers_and_commands_import_what_rooms_export():
    """Not their files, which a room may rearrange."""
    files = [path for module, path in MODULES.items() if room_of(module) in ("trainers", "commands")]
    targets = {target for path in files for target in imported(path) if room_of(target) != "commands"}
    targets = {target for target in targets if target[0] == "hf_specgen"}
    assert ("hf_specgen", "serving") in targets
    assert {target for target in targets if MODULES[target].name != "__init__.py"} <= {("hf_specgen", "arguments")}


def test_no_import_stands_in_a_function():
    assert [line for path in MODULES.values() for line in nested_imports(path)] == []


def test_no_file_imports_in_a_circle():
    graph = {module: [m for m in imported(path) if m != module] for module, path in MODULES.items()}
    assert find_circle(graph) == []


def test_an_upward_import_is_noticed():
    path = ROOT / "hf_specgen" / "engine" / "batch.py"
    for source in (
        "from ..generation import enable_speculation",
        "from .. import serving",
        "import hf_specgen.generation.enable",
        "from hf_specgen.generation import unwrap",
        "if TYPE_CHECKING:\n    from ..drafters.lookup import PromptLookupDrafter",
        "def f():\n    from trainers import EvalPrompts",
    ):
        assert len(upward_imports(path, source)) == 1, source
    assert upward_imports(path, "from ..layers.slot_cache import SlotCache\nimport torch") == []


def test_a_circle_is_noticed():
    a, b, c = ("a",), ("b",), ("c",)
    assert find_circle({a: [b], b: [c], c: [b]}) == ["b", "c"]
    assert find_circle({a: [b, c], b: [c], c: []}) == []
