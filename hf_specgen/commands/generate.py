"""Answers a prompt, or one after the other in a chat, and says how fast that was."""

import json
import time
from collections.abc import Iterator
from typing import Any

from transformers import set_seed

from hf_specgen import SamplingParams, get_generation_backend, tune_linears
from hf_specgen.serving import GenerationBackend

from .models import load_draft_model, load_model
from .options.generate import GenerateArguments, read_logit_bias


def main(args: GenerateArguments) -> None:
    set_seed(args.seed)
    params = make_params(args)
    backend = make_backend(args)
    messages: list[dict[str, str]] = []
    seconds = 0.0  # of decoding: the time in which a person reads and types is nobody's speed
    try:
        for said in read_turns() if args.prompt is None else [args.prompt]:
            messages.append({"role": "user", "content": said})
            start = time.perf_counter()
            try:
                messages.append({"role": "assistant", "content": answer(backend, messages, params)})
            finally:
                seconds += time.perf_counter() - start
    finally:
        if args.stats:
            stats = backend.stats.to_dict()
            rate = stats["tokens"] / seconds if seconds else 0.0
            print(json.dumps({**stats, "wall_seconds": seconds, "tokens_per_second": rate}), flush=True)


def answer(backend: GenerationBackend, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Prints the answer to the last message as it comes, and returns it. Without a chat template all that was said is
    the prompt."""
    has_template = backend.tokenizer.chat_template is not None
    prompt = messages if has_template else "\n".join(message["content"] for message in messages)
    pieces: list[str] = []
    try:
        for piece in backend.stream(prompt, params):
            pieces.append(piece)
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    return "".join(pieces)


def make_backend(args: GenerateArguments) -> GenerationBackend:
    """The model with its drafter, behind the backend that the arguments name."""
    model, tokenizer = load_model(args.model, args.tokenizer)
    if args.tune_linears:
        tune_linears(model)
    has_drafter = args.draft_model is not None or args.num_lookup_tokens is not None
    settings: dict[str, Any] = {
        "num_assistant_tokens": args.num_assistant_tokens or args.num_lookup_tokens,
        "assistant_confidence_threshold": args.assistant_confidence_threshold,
        "draft_model": None if args.draft_model is None else load_draft_model(args.draft_model, model),
    }
    given = {name: value for name, value in settings.items() if value is not None}
    name = args.backend or ("speculative" if has_drafter else "eager")
    return get_generation_backend(name, model, tokenizer, **given)


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
        logit_bias=read_logit_bias(args.logit_bias),
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
