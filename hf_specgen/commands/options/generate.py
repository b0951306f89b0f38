"""
Answers prompts, with any settings:

    python scripts/generate.py --prompt "Write a haiku about rain." --stats
    python scripts/generate.py --prompt "Rewrite: ..." --num_lookup_tokens 8 --tune_linears --stats
    python scripts/generate.py --model my/target --draft_model my/draft --prompt "Hello" --do_sample --temperature 0.7
    python scripts/generate.py --chat

The text is streamed to stdout; with `--stats` the last line is one JSON object. `--chat` reads what you say from the
terminal until you say nothing.
"""

import json
from dataclasses import dataclass, field
from typing import Literal

from .checks import (
    EMBEDDED,
    MODEL_HELP,
    TOKENIZER_HELP,
    check_counts,
    check_excludes,
    check_needs,
    check_sampling,
    check_seed,
    check_threshold,
    check_tokenizer,
)

DRAFTERS = ("draft_model", "num_lookup_tokens")


@dataclass
class GenerateArguments:
    prompt: str | None = field(default=None, metadata={"help": "What to answer."})
    chat: bool = field(default=False, metadata={"help": "Talk in the terminal instead."})
    backend: Literal["batched", "dspark", "eager", "speculative"] | None = field(
        default=None, metadata={"help": "By default the one that fits the drafter."}
    )
    model: str = field(default=EMBEDDED, metadata={"help": MODEL_HELP})
    tokenizer: str | None = field(default=None, metadata={"help": TOKENIZER_HELP})
    draft_model: str | None = field(
        default=None, metadata={"help": "A DSpark drafter, or a smaller model with the same tokenizer."}
    )
    num_lookup_tokens: int | None = field(default=None, metadata={"help": "Candidates per round by prompt lookup."})
    num_assistant_tokens: int | None = field(default=None, metadata={"help": "Candidates per round of the draft."})
    assistant_confidence_threshold: float | None = field(
        default=None, metadata={"help": "The draft stops after a candidate less probable than this."}
    )
    max_new_tokens: int = field(default=128, metadata={"help": "The most tokens to generate."})
    do_sample: bool = field(default=False, metadata={"help": "Sample instead of taking the best token."})
    temperature: float = field(default=1.0, metadata={"help": "Divides the scores when sampling."})
    top_k: int = field(default=0, metadata={"help": "Sample among the best k only; 0 is all."})
    top_p: float = field(default=1.0, metadata={"help": "Sample within this probability mass only."})
    repetition_penalty: float = field(default=1.0, metadata={"help": "Above 1 discourages tokens that occur."})
    frequency_penalty: float = field(default=0.0, metadata={"help": "Subtracted per occurrence."})
    presence_penalty: float = field(default=0.0, metadata={"help": "Subtracted once from tokens that occur."})
    logit_bias: str | None = field(default=None, metadata={"help": 'JSON object of id to bias, as {"198": -100}.'})
    stop: list[str] = field(default_factory=list, metadata={"help": "Strings that end the text."})
    seed: int = field(default=0, metadata={"help": "Seeds torch."})
    tune_linears: bool = field(default=False, metadata={"help": "Measure and use faster few-row products on CPU."})
    stats: bool = field(default=False, metadata={"help": "Print statistics as JSON."})

    def __post_init__(self) -> None:
        if (self.prompt is None) != self.chat:
            raise ValueError("Give either `--prompt` or `--chat`, one of them.")
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError(f"`--prompt` has to say something, but is {self.prompt!r}.")
        check_counts(self, "max_new_tokens", "num_lookup_tokens", "num_assistant_tokens")
        check_excludes(self, *DRAFTERS)
        check_needs(self, "num_assistant_tokens", "draft_model")
        check_needs(self, "assistant_confidence_threshold", "draft_model")
        check_threshold("assistant_confidence_threshold", self.assistant_confidence_threshold)
        check_sampling(self)
        check_seed(self)
        check_tokenizer(self, self.model)
        if self.repetition_penalty <= 0:
            raise ValueError(f"`--repetition_penalty` has to be above 0, but is {self.repetition_penalty}.")
        if "" in self.stop:
            raise ValueError("`--stop` has to hold strings that are not empty.")
        read_logit_bias(self.logit_bias)
        self._check_backend()

    def _check_backend(self) -> None:
        given = [f"`--{name}`" for name in DRAFTERS if vars(self)[name] is not None]
        if given and self.backend in ("batched", "eager"):
            raise ValueError(f"`--backend` {self.backend!r} drafts nothing, so it cannot take {given[0]}.")
        if self.backend == "dspark" and self.draft_model is None:
            raise ValueError("`--backend` 'dspark' needs `--draft_model`, a DSpark drafter.")


def read_logit_bias(text: str | None) -> dict[int | str, float] | None:
    """The biases by id that a JSON object holds."""
    if text is None:
        return None
    rule = '`--logit_bias` has to be a JSON object of ids and numbers, such as {"198": -100}'
    try:
        bias = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{rule}, but {text!r} is no JSON: {error}.") from error
    if not isinstance(bias, dict) or not all(
        token_id.isdecimal() and isinstance(value, int | float) and not isinstance(value, bool)
        for token_id, value in bias.items()
    ):
        raise ValueError(f"{rule}, but is {text!r}.")
    return bias
