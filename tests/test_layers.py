"""The package is read from the bottom up: imports go down only, at the top of a file, and files stay short."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_specgen"
MAX_LINES = 330
LAYERS = (
    {
        "logits_process",
        "token_counts",
        "token_penalties",
        "verification",
        "stats",
        "cache",
        "attention",
        "cpu_linear",
        "draft_length",
        "text",
        "prompts",
        "embedded_model",
        "dspark.field_kinds",
        "dspark.layouts",
        "dspark.reliability",
        "dspark.configuration_dspark",
        "dspark.heads",
        "dspark.backbone",
    },
    {"request"},
    {"sampling_params", "completion"},
    {"openai"},
    {"rows", "stopping"},
    {"scoring", "compatibility", "drafting"},
    {"outcome", "profiling", "seating"},
    {"decoder"},
    {"dspark.calibration", "dspark.target"},
    {"dspark.storage"},
    {"dspark.drafting_dspark"},
    {"dspark.pretrained_dspark"},
    {"dspark.assistant_dspark", "dspark.selfcheck"},
    {"dspark.modeling_dspark"},
    {"dspark.convert"},
    {"assistant", "assisted_call", "generation", "job"},
    {"streams"},
    {"generation_backend"},
    {"backends"},
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
# What may import a file of its own level, downwards within the level.
NEIGHBOURS = {
    ("logits_process", "token_penalties"),
    ("token_penalties", "token_counts"),
    ("drafting", "scoring"),
    ("dspark.configuration_dspark", "dspark.layouts"),
    ("dspark.configuration_dspark", "dspark.field_kinds"),
    ("dspark.layouts", "dspark.field_kinds"),
    ("dspark.heads", "dspark.configuration_dspark"),
    ("dspark.backbone", "dspark.configuration_dspark"),
    ("dspark.backbone", "cache"),
    ("generation", "assisted_call"),
    ("generation", "assistant"),
    ("assisted_call", "assistant"),
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def is_for_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def runtime_nodes(node: ast.AST):
    """All nodes but those that only a type checker reads."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not is_for_type_checking(child):
            yield from runtime_nodes(child)


def imported_files(tree: ast.AST, path: Path) -> set[str]:
    """The files of this package that a file imports when it is loaded."""
    found = set()
    folder = path.parent.relative_to(PACKAGE.parent).parts
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = folder[: len(folder) - node.level + 1] if node.level else ()
            base = ".".join((*parent, *filter(None, [node.module])))
            modules = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        found.update(module.removeprefix("hf_specgen.") for module in modules if module.startswith("hf_specgen."))
    return {module for module in found if module in {name_of(file) for file in FILES}}


def imports_within_functions(tree: ast.AST) -> list[int]:
    functions = [node for node in runtime_nodes(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    imports = [n for f in functions for n in ast.walk(f) if isinstance(n, (ast.Import, ast.ImportFrom))]
    return sorted({node.lineno for node in imports})


def upward_imports(tree: ast.AST, path: Path) -> list[str]:
    name = name_of(path)
    return sorted(
        module
        for module in imported_files(tree, path)
        if LEVELS[module] >= LEVELS[name] and (name, module) not in NEIGHBOURS
    )


def test_every_file_has_a_level():
    assert {name_of(path) for path in FILES} == set(LEVELS), "add new files to `LAYERS`, take removed ones out"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down(path):
    assert upward_imports(ast.parse(path.read_text()), path) == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_stand_at_the_top(path):
    assert imports_within_functions(ast.parse(path.read_text())) == []


@pytest.mark.parametrize("path", [*FILES, PACKAGE / "__init__.py"], ids=lambda path: path.stem)
def test_file_is_short(path):
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_LINES, f"{path.name} has {num_lines} lines: it is two nouns"


@pytest.mark.parametrize(
    "source",
    [
        "from .generation import enable_speculation",
        "from . import generation",
        "import hf_specgen.generation",
        "from hf_specgen.generation import unwrap",
        "from hf_specgen import generation",
        "try:\n    from .generation import unwrap\nexcept ImportError:\n    pass",
    ],
)
def test_upward_import_is_noticed(source):
    assert upward_imports(ast.parse(source), PACKAGE / "rows.py") == ["generation"]


def test_downward_import_and_import_for_types_are_fine():
    path = PACKAGE / "rows.py"
    assert upward_imports(ast.parse("from .cache import SlotCache\nimport torch"), path) == []
    for_types = "if TYPE_CHECKING:\n    from .generation import unwrap"
    assert upward_imports(ast.parse(for_types), path) == []


def test_import_within_a_function_is_noticed():
    source = "import torch\n\n\nclass A:\n    def f(self):\n        if True:\n            import json\n"
    assert imports_within_functions(ast.parse(source)) == [7]
