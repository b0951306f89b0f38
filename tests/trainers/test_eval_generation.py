import copy

import pytest
import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hf_specgen import CausalLMDrafter, DSparkDrafter, PromptLookupDrafter, SamplingParams
from tests.support.dspark_models import bigram_target, fitted_drafter
from tests.support.models import assert_partly_accepted, make_model, noisy_copy
from tests.support.training import PROMPTS, dropout_model, text_tokenizer
from trainers import EvalGeneration, preserved

GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


def generation(params=GREEDY, backend="batched", **settings) -> EvalGeneration:
    return EvalGeneration(PROMPTS, params, backend, settings)


def texts(generation, model) -> list[str]:
    return [text.text for text in generation.generate(model, text_tokenizer()).completions]


class Cascade(PromptLookupDrafter):
    """A user's drafter that holds others."""

    def __init__(self, *drafters):
        super().__init__(3)
        self.drafters = drafters


def test_models_of_drafters_are_found():
    target = bigram_target()
    model, block = noisy_copy(target), fitted_drafter(target)
    assert generation().draft_models == []
    assert generation(backend="speculative").draft_models == []
    for draft, models in [
        (None, []),
        (model, [model]),
        (block, [block]),
        (CausalLMDrafter(model, 3), [model]),
        (DSparkDrafter(block), [block]),
        (PromptLookupDrafter(3), []),
        (Cascade(DSparkDrafter(block), CausalLMDrafter(model, 3)), [block, model]),
    ]:
        found = generation(backend="speculative", draft_model=draft).draft_models
        assert [id(each) for each in found] == [id(each) for each in models]


@pytest.mark.parametrize("wrap", [lambda block: block, DSparkDrafter], ids=["model", "drafter"])
def test_a_dspark_drafter_drafts_in_eval_mode_and_is_restored(wrap):
    target = bigram_target()
    block = fitted_drafter(target).train()
    block.layers[0].eval()  # a frozen layer
    flags = {name: module.training for name, module in block.named_modules()}
    evaluation = generation(backend="dspark", draft_model=wrap(block))
    seen = []
    block.layers[1].register_forward_pre_hook(lambda module, inputs: seen.append(module.training))
    with preserved([target, *evaluation.draft_models], text_tokenizer()):
        generated = evaluation.generate(target, text_tokenizer())
    assert seen and not any(seen)
    assert {name: module.training for name, module in block.named_modules()} == flags
    assert_partly_accepted(generated.stats)
    assert [text.text for text in generated.completions] == texts(generation(), target)


def test_what_gradient_checkpointing_leaves_changes_no_text():
    expected = texts(generation(), make_model())
    model = make_model().train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.config.use_cache = model.generation_config.use_cache = False
    draft = copy.deepcopy(model)
    evaluations = generation(), generation(backend="speculative", draft_model=draft, num_assistant_tokens=3)
    for evaluation in evaluations:
        with preserved([model, *evaluation.draft_models], text_tokenizer()):
            assert texts(evaluation, model) == expected
    assert model.config.use_cache is model.generation_config.use_cache is False
    assert model.training and model.is_activation_checkpointing


def test_wrappers_of_data_parallelism_are_looked_through(tmp_path):
    expected = texts(generation(), make_model())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for wrap in (DistributedDataParallel, DataParallel):
            draft = noisy_copy(make_model())
            evaluation = generation(backend="speculative", draft_model=draft, num_assistant_tokens=3)
            generated = evaluation.generate(wrap(make_model()), text_tokenizer())
            assert [text.text for text in generated.completions] == expected
            assert_partly_accepted(generated.stats)
    finally:
        torch.distributed.destroy_process_group()


def test_samples_have_random_numbers_of_their_own_the_same_each_time():
    model = dropout_model().eval()
    sampled = generation(SamplingParams(max_new_tokens=12, n=3, seed=1))
    first = texts(sampled, model)
    torch.manual_seed(5)
    assert texts(sampled, model) == first
    assert len(set(first)) == 3 * len(PROMPTS)
    assert texts(generation(SamplingParams(max_new_tokens=12, n=3, seed=2)), model) != first


def test_a_refused_prompt_has_one_text_and_the_others_all_samples():
    params = SamplingParams(max_new_tokens=12, n=2, seed=1)
    evaluation = EvalGeneration([PROMPTS[0], "D" * 300, PROMPTS[1]], params, "batched", {})
    completions = evaluation.generate(make_model(), text_tokenizer()).completions
    assert [(text.index, text.sample) for text in completions] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    assert [text.index for text in completions if text.error is not None] == [1]
