"""What `import hf_specgen` costs: nothing that only trainers and commands need."""

import ast
import subprocess
import sys

import hf_specgen
from tests.support.launching import LIMIT, ROOT, environment_of_a_script

FOR_TRAINERS_AND_COMMANDS = ("datasets", "pyarrow", "pandas", "evaluate", "rich", "matplotlib")


def loaded_by(code: str, *names: str) -> list[str]:
    """Which of the modules are there in a new process after `code`."""
    code += f"\nimport sys; print(*[name for name in {names} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment_of_a_script(), timeout=LIMIT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_library_loads_nothing_that_only_trainers_and_commands_need():
    everything = ", ".join(hf_specgen.__all__)
    code = f"from hf_specgen import {everything}"
    assert loaded_by(code, "hf_specgen.serving", *FOR_TRAINERS_AND_COMMANDS) == ["hf_specgen.serving"]


def test_help_and_mistakes_of_commands_load_no_models():
    code = (
        "from hf_specgen.commands.runner import read_options, COMMANDS\n"
        "read_options(COMMANDS['generate'], ['--prompt', 'hi'], None)"
    )
    heavy = ("torch", "transformers.modeling_utils", "hf_specgen.engine", *FOR_TRAINERS_AND_COMMANDS)
    assert loaded_by(code, "hf_specgen", *heavy) == ["hf_specgen"]


def test_every_public_name_is_there_for_readers_of_the_source_too():
    """Type checkers and editors follow the imports that stand in the file, not `__getattr__`."""
    tree = ast.parse((ROOT / "hf_specgen" / "__init__.py").read_text())
    written = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    assert written == set(hf_specgen.__all__)
    assert all(getattr(hf_specgen, name).__name__ == name for name in hf_specgen.__all__)
    assert set(hf_specgen.__all__) <= set(dir(hf_specgen))
    assert hf_specgen.serving.SamplingParams is hf_specgen.SamplingParams
    assert not hasattr(hf_specgen, "no_such_name")
