"""
A real model, decoded plainly and speculatively side by side:

    make demo
    python scripts/demo.py --max_new_tokens 64

Eight built-in prompts on SmolLM2-135M, one by one and in batches of four, with and without penalties. Drafts come from
prompt lookup, which needs no second model: the text is the same, the number of passes is not.
"""

from dataclasses import dataclass, field

from .checks import check_counts

CATEGORIES = {"code_editing": 4, "summarisation": 2, "chat": 2}
NUM_PROMPTS = sum(CATEGORIES.values())


@dataclass
class DemoArguments:
    max_new_tokens: int = field(default=40, metadata={"help": "The most tokens per prompt."})
    num_shown: int = field(default=3, metadata={"help": f"How many answers to print, 1 to {NUM_PROMPTS}."})

    def __post_init__(self) -> None:
        check_counts(self, "max_new_tokens")
        if not 1 <= self.num_shown <= NUM_PROMPTS:
            raise ValueError(f"`--num_shown` has to be from 1 to {NUM_PROMPTS}, but is {self.num_shown}.")
