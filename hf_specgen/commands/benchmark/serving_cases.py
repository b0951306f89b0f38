"""What `benchmark` measures of backends: ragged requests through them, and what streaming costs."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, PreTrainedTokenizerBase

from hf_specgen import DecodingStats, SamplingParams, get_generation_backend
from hf_specgen.serving import GenerationBackend, TextAssembler

from .decoding_cases import ragged_budgets, ragged_padded
from .measuring import Measurement, Outputs, Runner, Setting, measure

PAGE_SIZE = 16
ASSEMBLED = (2_500, 10_000)  # tokens


def serving_case(
    setting: Setting, tokenizer: PreTrainedTokenizerBase, slots: int, drafting: dict[str, Any]
) -> list[Measurement]:
    """
    Ragged prompts with ragged budgets, greedy, without eos: padded `generate` in batches, transformers' continuous
    batching (its loop only), the batched backend, and the same with a drafter.
    """
    budgets = ragged_budgets(setting)
    params = [SamplingParams(max_new_tokens=budget, temperature=0, ignore_eos=True) for budget in budgets]

    def through(backend: GenerationBackend) -> tuple[Outputs, DecodingStats]:
        before = backend.stats.target_forwards
        completions = backend.generate(setting.prompts, params)
        assert backend.stats.target_forwards > before, "the backend has decoded"
        return [list(completion.token_ids) for completion in completions], sum_of(completions)

    plain = {"max_batch_size": slots, "mask_undecodable": False}
    batched = get_generation_backend("batched", setting.model, tokenizer, **plain)
    speculative = get_generation_backend("speculative", setting.model, tokenizer, **plain, **drafting)
    order = list(range(len(budgets)))
    runners = [Runner(f"padded generate in batches of {slots}", lambda: ragged_padded(setting, budgets, order, slots))]
    with continuous_batching(setting, budgets, slots) as run_transformers:
        runners.append(Runner("transformers' continuous batching", run_transformers))
        runners.append(Runner("batched", lambda: through(batched)))
        runners.append(Runner("batched, speculative", lambda: through(speculative)))
        return measure(runners, setting, slots)


def sum_of(completions: list) -> DecodingStats:
    """The counts of all completions together."""
    return sum((completion.stats for completion in completions), DecodingStats())


@contextmanager
def continuous_batching(setting: Setting, budgets: list[int], slots: int) -> Iterator[Any]:
    """
    A function that decodes all prompts with transformers' manager, which is set up once, outside of what is timed, and
    gets as many blocks as the longest requests of all slots need.
    """
    longest = max(len(prompt) + budget for prompt, budget in zip(setting.prompts, budgets))
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=slots * (longest // PAGE_SIZE + 2),
        max_batch_tokens=max(512, slots, max(map(len, setting.prompts))),
        max_requests_per_batch=slots,
    )
    model, eos = setting.model, setting.model.generation_config.eos_token_id
    attention = model.config._attn_implementation
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:

        def run() -> tuple[Outputs, None]:
            names = [
                manager.add_request(prompt, max_new_tokens=budget, eos_token_id=-1)
                for prompt, budget in zip(setting.prompts, budgets)
            ]
            found: dict[str, list[int]] = {}
            while len(found) < len(names):
                result = manager.get_result(timeout=60)
                if result is not None and result.is_finished():
                    found[result.request_id] = result.generated_tokens
            return [found[name] for name in names], None

        yield run
    model.generation_config.eos_token_id = eos  # the manager writes -1 for None
    model.set_attn_implementation(attention)


def streaming_case(setting: Setting, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Seconds of eager generation with and without streaming, in turns; microseconds per token of assembling text."""
    backend = get_generation_backend("eager", setting.model, tokenizer)
    params = SamplingParams(max_new_tokens=setting.generate_kwargs["max_new_tokens"], temperature=0, ignore_eos=True)
    times: dict[str, list[float]] = {"generate": [], "stream": []}
    for repeat in range(setting.repeats + 1):
        for name in times:
            start = time.perf_counter()
            for prompt in setting.prompts:
                if name == "generate":
                    backend.generate([prompt], params)
                else:
                    for _ in backend.stream(prompt, params):
                        pass
            if repeat > 0:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    generator = torch.Generator().manual_seed(0)
    assembly = {}
    for count in ASSEMBLED:
        assembler = TextAssembler(tokenizer, ["\n\n\n\n"])
        ids = torch.randint(3, len(tokenizer), (count,), generator=generator).tolist()
        start = time.perf_counter()
        for token_id in ids:
            assembler.add(token_id)
        assembly[str(count)] = 1e6 * (time.perf_counter() - start) / count
    return {
        "seconds": medians,
        "streaming_overhead": medians["stream"] / medians["generate"] - 1,
        "assembly_us_per_token": assembly,
    }
