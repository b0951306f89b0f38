"""Runs a command: reads its options, and ends with one line where the user made a mistake or pressed Ctrl-C.

A command is loaded after its options were read, so that `--help` and a mistyped option are answered at once.
"""

import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from transformers import HfArgumentParser

from .options.benchmark import BenchmarkArguments
from .options.calibrate import CalibrateArguments
from .options.demo import DemoArguments
from .options.generate import GenerateArguments
from .options.profile import ProfileArguments
from .options.train_with_generation_eval import TrainArguments

MISTAKE, INTERRUPTED = 2, 130  # exit statuses, as shells and argparse have them
SHOW_TRACEBACK = "HF_SPECGEN_TRACEBACK"


@dataclass(frozen=True)
class Command:
    """
    Args:
        arguments (`type`): the dataclass of its options; the docstring of its file is the command's help.
        module (`str`): the file in this room whose `main` takes them.
        summary (`str`): a line for the list of commands.
    """

    arguments: type
    module: str
    summary: str

    @property
    def description(self) -> str:
        return (sys.modules[self.arguments.__module__].__doc__ or "").strip()


COMMANDS = {
    "demo": Command(DemoArguments, "demo", "decode with a real model, plainly and speculatively"),
    "generate": Command(GenerateArguments, "generate", "answer a prompt, or chat"),
    "benchmark": Command(BenchmarkArguments, "benchmark.command", "measure ours against plain and stock generation"),
    "calibrate": Command(CalibrateArguments, "calibrate", "fit the confidence of a DSpark drafter"),
    "profile": Command(ProfileArguments, "profile", "measure what a pass costs by its number of tokens"),
    "train_with_generation_eval": Command(
        TrainArguments, "train_with_generation_eval", "an example: train a tiny model and watch what it writes"
    ),
}


class Parser(HfArgumentParser):
    """Says in one line what is wrong, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Namespace, list[str]]:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            close = get_close_matches(unknown[0].split("=")[0], known, n=1)
            hint = f"did you mean `{close[0]}`?" if close else "`--help` lists those that there are."
            raise ValueError(f"unknown option {unknown[0]!r}: {hint}")
        return options, unknown


class Formatter(RawDescriptionHelpFormatter, ArgumentDefaultsHelpFormatter):
    """The description as it was written, and every default."""


def run(name: str, arguments: Sequence[str] | None = None, program: str | None = None) -> None:
    """
    Runs a command to its end.

    Args:
        name (`str`): one of `COMMANDS`.
        arguments (`Sequence[str]`, *optional*): the command line behind the name; by default that of this process.
        program (`str`, *optional*): what to call the command in its help; by default the file that was started.

    Raises:
        `SystemExit`: with status 2 after a mistake of the user, which is told in one line, or 130 after Ctrl-C. The
        environment variable `HF_SPECGEN_TRACEBACK` shows where a mistake was found.
    """
    try:
        options = read_options(COMMANDS[name], arguments, program)
        import_module(f"{__package__}.{COMMANDS[name].module}").main(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        end("interrupted", INTERRUPTED)
    except BrokenPipeError:  # nobody reads any more, as under `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (ValueError, TypeError, OSError, ImportError) as error:
        if os.environ.get(SHOW_TRACEBACK):
            raise
        end(f"error: {in_one_line(error)}", MISTAKE)


def read_options(command: Command, arguments: Sequence[str] | None, program: str | None) -> Any:
    """The options as the command's dataclass; raises ValueError in the option's name."""
    parser = Parser(
        command.arguments, prog=program, description=command.description, formatter_class=Formatter, allow_abbrev=False
    )
    given = list(sys.argv[1:] if arguments is None else arguments)
    (options,) = parser.parse_args_into_dataclasses(given, look_for_args_file=False)
    return options


def in_one_line(error: BaseException) -> str:
    """What an error says, without line breaks; its class where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def end(line: str, status: int) -> NoReturn:
    """Ends this process with a line on stderr; the others that were started beside it say who they are."""
    rank = os.environ.get("RANK", "0")
    print(line if rank == "0" else f"{line} (process {rank})", file=sys.stderr, flush=True)
    raise SystemExit(status) from None


def main() -> None:
    """`hf-specgen <command> ...`."""
    given = sys.argv[1:]
    if given and given[0] in COMMANDS:
        run(given[0], given[1:], f"hf-specgen {given[0]}")
        return
    listed = "\n".join(f"  {name:28}{command.summary}" for name, command in COMMANDS.items())
    if not given or given[0] in ("-h", "--help"):
        print(f"usage: hf-specgen <command> [options]\n\n{listed}\n\n`hf-specgen <command> --help` tells its options.")
        return
    end(f"error: unknown command {given[0]!r}: there are {', '.join(COMMANDS)}.", MISTAKE)
