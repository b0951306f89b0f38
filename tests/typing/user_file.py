"""What a user writes, for type checkers; test_user_file.py runs them over this file, and nothing imports it."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from hf_specgen import (
    Candidates,
    CausalLMDrafter,
    Completion,
    Decoder,
    DecodingRules,
    DecodingStats,
    Drafter,
    DSparkDrafter,
    DSparkModel,
    FrequencyPenalty,
    LogitBias,
    PromptLookupDrafter,
    Request,
    SamplingParams,
    StepCosts,
    ThroughputScheduler,
    TokenPenalties,
    disable_speculation,
    enable_speculation,
    from_openai,
    get_generation_backend,
    tune_linears,
)
from hf_specgen.embedded import load_embedded_model
from hf_specgen.engine import Rows, Verification
from hf_specgen.layers import SlotCache
from trainers import GenerationEvalCallback


class NoDrafter(Drafter):
    def make_cache(self, rows: int) -> SlotCache | None:
        return None

    def draft(self, rows: Rows, max_tokens: Tensor) -> Candidates:
        return Candidates.none(rows.num_spanned, rows.device)

    def observe(self, rows: Rows, candidates: Candidates, outputs: object) -> None:
        pass


def watch(rows: Rows, candidates: Candidates, verification: Verification) -> None:
    for row, request in rows.live():
        print(len(request.token_ids), candidates.lengths[row], verification.num_accepted[row])


def speed_up(model: PreTrainedModel, prompt_ids: list[int]) -> PreTrainedModel:
    same: PreTrainedModel = enable_speculation(model)
    processors = [FrequencyPenalty(0.5), LogitBias({"198": -100}), TokenPenalties(1.1, 0.2)]
    print(same.speculation_stats, processors)
    tune_linears(same)
    return disable_speculation(same)


def decode(model: PreTrainedModel, draft: PreTrainedModel, prompts: list[list[int]]) -> DecodingStats:
    rules = DecodingRules(eos_token_ids=frozenset({2}), do_sample=True)
    requests = [Request(ids, max_new_tokens=10, rules=rules, seed=seed) for seed, ids in enumerate(prompts)]
    decoder = Decoder(model, CausalLMDrafter(draft), max_batch_size=8, on_round=watch)
    for progressed in decoder.run(requests):
        print([request.finish_reason for request in progressed])
    return sum((request.stats for request in requests), DecodingStats())


def drafters(draft: DSparkModel, costs: str) -> list[Drafter]:
    scheduler = ThroughputScheduler(StepCosts.load(costs))
    return [NoDrafter(), PromptLookupDrafter(4), DSparkDrafter(draft, draft_length=scheduler)]


def serve(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, body: dict[str, object]) -> Iterator[str]:
    backend = get_generation_backend("speculative", model, tokenizer, draft_model=NoDrafter())
    with backend.stream([{"role": "user", "content": "Hello"}], from_openai(body)) as stream:
        yield from stream
    last: Completion | None = stream.completion
    completions: list[Completion] = backend.generate(["one", [1, 2]], SamplingParams(temperature=0, stop="###"))
    yield from (completion.text for completion in completions if completion is not last)


def evaluate(trainer: Trainer, prompts: list[str]) -> GenerationEvalCallback:
    callback = GenerationEvalCallback(
        prompts, SamplingParams(temperature=0), metrics=["exact_match"], references=prompts
    )
    return callback.attach(trainer)


def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_embedded_model(dtype=torch.bfloat16)
