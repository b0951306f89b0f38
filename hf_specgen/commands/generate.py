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
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import HfArgumentParser, set_seed

from hf_specgen import LogitBias, SamplingParams, get_generation_backend
from hf_specgen.layers.linear import tune_linears
from hf_specgen.serving.backend import GenerationBackend
from hf_specgen.serving.backends import BACKENDS

from .loading import load_draft_model, load_model

NOT_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # values that leave the distribution as it is
DRAFT_OPTIONS = ("num_assistant_tokens", "assistant_confidence_threshold")


@dataclass
class GenerateArguments:
    prompt: str | None = field(default=None, metadata={"help": "What to answer."})
    chat: bool = field(default=False, metadata={"help": "Talk in the terminal instead."})
    backend: str | None = field(
        default=None, metadata={"help": f"One of {sorted(BACKENDS)}; by default the one that fits the drafter."}
    )
    model: str = field(default="smollm2", metadata={"help": "'smollm2', 'small', a folder or a hub name."})
    tokenizer: str | None = field(
        default=None, metadata={"help": "Where it is not the model's own; 'bytes' for none."}
    )
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
        given = vars(self)
        for name, neutral in NOT_SAMPLING.items():
            if given[name] != neutral and not self.do_sample:
                raise ValueError(f"`{name}` needs `do_sample`, but is {given[name]!r} without it.")
        for name in DRAFT_OPTIONS:
            if given[name] is not None and self.draft_model is None:
                raise ValueError(f"`{name}` needs `draft_model`, but is {given[name]!r} without it.")
        if self.logit_bias is not None:
            read_logit_bias(self.logit_bias)
        if (self.prompt is None) != self.chat:
            raise ValueError(f"Give either `prompt` or `chat`, but not `prompt` {self.prompt!r} with {self.chat!r}.")
        if self.backend is None:
            has_drafter = self.draft_model is not None or self.num_lookup_tokens is not None
            self.backend = "speculative" if has_drafter else "eager"


def read_logit_bias(text: str) -> LogitBias:
    """The bias that a JSON object describes."""
    try:
        return LogitBias(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(
            f'`logit_bias` has to be a JSON object such as {{"198": -100}}, but {text!r} is no JSON: {error}.'
        ) from error
    except TypeError as error:
        raise ValueError(
            f'`logit_bias` has to be a JSON object such as {{"198": -100}}, but is {text!r}: {error}'
        ) from error


def main() -> None:
    (args,) = HfArgumentParser(GenerateArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    backend = make_backend(args)
    params = make_params(args)
    messages: list[dict[str, str]] = []
    start = time.perf_counter()
    for said in read_turns() if args.chat else [args.prompt]:
        messages.append({"role": "user", "content": said})
        has_template = backend.tokenizer.chat_template is not None
        stream = backend.stream(messages if has_template else said, params)
        for piece in stream:
            print(piece, end="", flush=True)
        print()
        assert stream.completion is not None, "the stream has ended"
        messages.append({"role": "assistant", "content": stream.completion.text})
    if args.stats:
        seconds = time.perf_counter() - start
        stats = backend.stats.to_dict()
        print(json.dumps({**stats, "wall_seconds": seconds, "tokens_per_second": stats["tokens"] / seconds}))


def make_backend(args: GenerateArguments) -> GenerationBackend:
    """The model with its drafter, behind the backend that the arguments name."""
    model, tokenizer = load_model(args.model, args.tokenizer)
    if args.tune_linears:
        tune_linears(model)
    settings: dict[str, Any] = {
        "num_assistant_tokens": args.num_assistant_tokens or args.num_lookup_tokens,
        "assistant_confidence_threshold": args.assistant_confidence_threshold,
        "draft_model": None if args.draft_model is None else load_draft_model(args.draft_model, model),
    }
    given = {name: value for name, value in settings.items() if value is not None}
    assert args.backend is not None, "chosen when the arguments were read"
    return get_generation_backend(args.backend, model, tokenizer, **given)


def make_params(args: GenerateArguments) -> SamplingParams:
    """How to decode."""
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature if args.do_sample else 0.0,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
        frequency_penalty=args.frequency_penalty,
        presence_penalty=args.presence_penalty,
        penalty_scope="all",
        logit_bias=None if args.logit_bias is None else json.loads(args.logit_bias),
        stop=args.stop,
        seed=args.seed,
    )


def read_turns() -> Iterator[str]:
    """What the user says, until it is nothing."""
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            return
        if not said:
            return
        yield said


if __name__ == "__main__":
    main()
