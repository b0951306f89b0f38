"""What a person reads of each case."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

CONSOLE_WIDTH = 130


def print_environment(model: str, environment: dict[str, Any]) -> None:
    Console(width=CONSOLE_WIDTH).print(
        f"{model} on {environment['device']}, {environment['num_threads']} threads x "
        f"{environment['num_processes']} processes, torch {environment['torch']}, "
        f"transformers {environment['transformers']}"
    )


def print_result(name: str, result: Any) -> None:
    """A case's result, in the form that this case has."""
    PRINTERS[name](Console(width=CONSOLE_WIDTH), result)


def print_check(console: Console, check: dict[str, Any]) -> None:
    for name, length in check["alternatives"].items():
        console.print(f"check of the drafter: {length:.2f} tokens per round with {name}")
    for finding in check["findings"]:
        console.print(f"check of the drafter: {finding}")


def print_speculation(console: Console, lines: list[dict[str, Any]]) -> None:
    console.print(measurement_table("speculation", lines))
    for line in lines:
        if line["name"] == "speculative" and line["stats"] is not None:
            console.print(position_table(line))


def print_attention(console: Console, entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        console.print(
            f"{entry['new_positions']} positions over {entry['cached_tokens']} cached, {entry['linears']} linears: "
            f"sdpa {entry['sdpa_ms']:.1f} ms, grouped {entry['grouped_ms']:.1f} ms ({entry['speedup']:.2f}x, largest "
            f"difference {entry['max_difference']:.1e})"
        )


def print_streaming(console: Console, result: dict[str, Any]) -> None:
    times = ", ".join(f"{us:.1f} of {count}" for count, us in result["assembly_us_per_token"].items())
    console.print(f"streaming adds {result['streaming_overhead']:+.1%}; text takes us per token: {times} tokens")


def print_processors(console: Console, milliseconds: dict[str, float]) -> None:
    times = ", ".join(f"{name} {ms:.2f}" for name, ms in milliseconds.items())
    console.print(f"penalties over 8 rows x 4,096 tokens x 151,936 ids, ms: {times}")


def print_overhead(console: Console, result: dict[str, Any]) -> None:
    share = result["processors_verification_bookkeeping_share"]
    text = "not measured" if share is None else f"{share:.1%} of the time"
    console.print(f"processors, verification and bookkeeping at batch 1 with penalties: {text}")


def measurement_table(title: str, lines: list[dict[str, Any]]) -> Table:
    table = Table(title=title)
    names = ("batch", "what", "tokens/s", "speed-up", "decode only", "equal ids", "tokens/round", "kept by position")
    for name in names:
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=name == "what")
    for line in lines:
        stats, decode, gap = line["stats"] or {}, line["decode_tokens_per_second"], line["largest_gap"]
        equal = "" if line["num_equal"] is None else f"{line['num_equal']}/{line['num_prompts']}"
        table.add_row(
            str(line["batch_size"]),
            line["name"],
            f"{line['tokens_per_second']:.1f}",
            f"{line['speedup']:.2f}x",
            "" if decode is None else f"{decode:.1f}",
            equal + (f" (gap {gap:.0e})" if gap else ""),
            f"{stats['mean_accepted_length']:.2f}" if stats.get("drafting_rounds") else "",
            " ".join(f"{share:.1f}" for share in stats.get("survival", [])[:8]),
        )
    return table


def evaluation_table(result: dict[str, Any]) -> Table:
    """Ways to generate an evaluation's texts."""
    table = Table(title=f"evaluation: {result['num_prompts']} prompts x {result['num_new_tokens']} tokens")
    for name in ("what", "seconds", "CPU seconds", "of the first", "equal texts"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for name, seconds in result["seconds"].items():
        share, num_equal = result["share_of_baseline"][name], result["num_equal"][name]
        cpu = f"{result['cpu_seconds'][name]:.2f}"
        table.add_row(name, f"{seconds:.2f}", cpu, f"{share:.2f}x", f"{num_equal}/{result['num_prompts']}")
    return table


def position_table(line: dict[str, Any]) -> Table:
    """How candidates fared by their place in the block."""
    stats = line["stats"]
    title = f"candidates by position, batch {line['batch_size']}: {stats['mean_accepted_length']:.2f} tokens per round"
    table = Table(title=title)
    for name in ("position", "proposed", "kept", "kept of proposed", "kept if those before are"):
        table.add_column(name, justify="right")
    rows = zip(stats["proposed"], stats["accepted"], stats["survival"], stats["conditional_acceptance"])
    for position, (proposed, accepted, survival, conditional) in enumerate(rows, start=1):
        table.add_row(str(position), str(proposed), str(accepted), f"{survival:.3f}", f"{conditional:.3f}")
    return table


PRINTERS: dict[str, Callable[[Console, Any], None]] = {
    "drafter_check": print_check,
    "speculation": print_speculation,
    "ragged": lambda console, lines: console.print(measurement_table("ragged", lines)),
    "batching": lambda console, lines: console.print(measurement_table("batching", lines)),
    "serving": lambda console, lines: console.print(measurement_table("serving", lines)),
    "evaluation": lambda console, result: console.print(evaluation_table(result)),
    "streaming": print_streaming,
    "attention": print_attention,
    "overhead": print_overhead,
    "processors": print_processors,
}
