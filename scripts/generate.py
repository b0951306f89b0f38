"""
Answers one prompt, with any settings:

    python scripts/generate.py --prompt "Write a haiku about rain." --stats
    python scripts/generate.py --prompt "Rewrite: ..." --num_lookup_tokens 8 --tune_linears --stats
    accelerate launch scripts/generate.py --model my/target --draft_model my/draft --prompt "Hello" --do_sample

The text is streamed to stdout; with `--stats` the last line is one JSON object.
"""

import json
import time
from dataclasses import dataclass, field

import torch
from loading import load_draft_model, load_model
from transformers import (
    HfArgumentParser,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TextStreamer,
    set_seed,
)

from hf_specgen import LogitBias, TokenPenalties, UndecodableMask, enable_speculation, order_logits_processors
from hf_specgen.cpu_linear import tune_linears
from hf_specgen.prompts import encode_prompt

NOT_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # values that leave the distribution as it is
DRAFT_OPTIONS = ("num_assistant_tokens", "assistant_confidence_threshold")


@dataclass
class GenerateArguments:
    prompt: str = field(metadata={"help": "What to answer."})
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
    model, tokenizer = load_model(args.model, args.tokenizer)
    enable_speculation(model)
    if args.tune_linears:
        tune_linears(model)
    draft = None
    if args.draft_model is not None:
        draft = load_draft_model(args.draft_model, model)
    input_ids = torch.tensor([encode_prompt(tokenizer, (args.prompt,))])
    settings = {
        "assistant_model": draft,
        "prompt_lookup_num_tokens": args.num_lookup_tokens,
        "num_assistant_tokens": args.num_assistant_tokens,
        "assistant_confidence_threshold": args.assistant_confidence_threshold,
        "stop_strings": args.stop or None,
        "tokenizer": tokenizer if args.stop else None,
        "do_sample": args.do_sample,
    }
    if args.do_sample:
        settings |= {name: vars(args)[name] for name in NOT_SAMPLING}
    start = time.perf_counter()
    output_ids = model.generate(
        input_ids=input_ids.to(model.device),
        attention_mask=torch.ones_like(input_ids).to(model.device),
        max_new_tokens=args.max_new_tokens,
        logits_processor=_processors(args, model.config.get_text_config().vocab_size, tokenizer),
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **{name: value for name, value in settings.items() if value is not None},
    )
    seconds = time.perf_counter() - start
    if args.stats:
        num_tokens = output_ids.shape[1] - input_ids.shape[1]
        result = {"tokens": num_tokens, "wall_seconds": seconds, "tokens_per_second": num_tokens / seconds}
        has_drafter = draft is not None or args.num_lookup_tokens is not None
        if has_drafter and model.speculation_stats is not None:  # None where transformers' own loop decoded
            result |= model.speculation_stats.to_dict()
        print(json.dumps(result))


def _processors(args: GenerateArguments, vocab_size: int, tokenizer: PreTrainedTokenizerBase) -> LogitsProcessorList:
    processors: list = []
    penalties = (args.repetition_penalty, args.frequency_penalty, args.presence_penalty)
    if penalties != (1.0, 0.0, 0.0):
        processors.append(TokenPenalties(*penalties))
    if args.logit_bias is not None:
        processors.append(read_logit_bias(args.logit_bias))
    if vocab_size > len(tokenizer):
        processors.append(UndecodableMask(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id))
    return order_logits_processors(processors)


if __name__ == "__main__":
    main()
