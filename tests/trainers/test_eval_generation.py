import copy
import json
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hf_specgen import CausalLMDrafter, DSparkDrafter, PromptLookupDrafter, SamplingParams
from tests.support.dspark_models import bigram_target, fitted_drafter
from tests.support.models import assert_partly_accepted, make_model, noisy_copy
from tests.support.training import PROMPTS, dropout_model, text_tokenizer
from trainers import EvalGeneration, EvalPrompts, preserved

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
            draft = wrap(noisy_copy(make_model()))
            evaluation = generation(backend="speculative", draft_model=draft, num_assistant_tokens=3)
            generated = evaluation.generate(wrap(make_model()), text_tokenizer())
            assert [text.text for text in generated.completions] == expected
            assert_partly_accepted(generated.stats)
    finally:
        torch.distributed.destroy_process_group()


# What is told the chat template

TEMPLATE = (
    "{% if tools %}T{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% if depth is defined %}:{{ depth }}{% endif %}"
    "{% for message in messages %}<{{ message.role[0] | upper }}{{ message.content }}>{% endfor %}"
    "{% if add_generation_prompt %}<A{% endif %}"
)


def chat_tokenizer():
    tokenizer = text_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def chat_row(question, answer="ABC", **told):
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
        **told,
    }


def seen_prompts(dataset, params=GREEDY):
    """The prompts of a data set as the model sees them."""
    prompts = EvalPrompts.of(dataset)
    evaluation = EvalGeneration(prompts.prompts, params, "batched", {}, prompts.template_settings)
    evaluation.check(make_model(), chat_tokenizer())
    return [text.prompt for text in evaluation.generate(make_model(), chat_tokenizer()).completions]


def test_rows_tell_the_chat_template_what_they_tell_it_in_sft(tmp_path):
    trl = pytest.importorskip("trl")
    dataset = Dataset.from_list(
        [
            chat_row("HI", tools=json.dumps([tool("LOOK")]), chat_template_kwargs={"depth": 3}),
            chat_row("GO", tools=json.dumps([tool("WAIT"), tool("GO")]), chat_template_kwargs={"depth": 4}),
        ]
    )
    trainer = trl.SFTTrainer(
        model=make_model(),
        args=trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_steps=1),
        train_dataset=dataset,
        processing_class=chat_tokenizer(),
    )
    trained = [
        trainer.processing_class.decode([i for i, label in zip(row["input_ids"], row["labels"]) if label == -100])
        for row in trainer.train_dataset
    ]
    assert trained == ["TLOOK:3<UHI><A", "TWAITGO:4<UGO><A"]
    assert seen_prompts(dataset) == trained


def test_what_a_row_tells_goes_before_what_params_tell():
    dataset = Dataset.from_list(
        [
            chat_row("HI", tools=[tool("LOOK")], chat_template_kwargs=None),
            chat_row("GO", chat_template_kwargs={"depth": 4}),
        ]
    )
    params = replace(GREEDY, tools=[tool("WAIT")], chat_template_kwargs={"depth": 2})
    assert seen_prompts(dataset, params) == ["TLOOK:2<UHI><A", "TWAIT:4<UGO><A"]
    assert seen_prompts(dataset) == ["TLOOK<UHI><A", ":4<UGO><A"]


def test_contents_in_parts_reach_the_model():
    content = [{"type": "text", "text": "H"}, {"type": "text", "text": "I"}]
    assert seen_prompts(Dataset.from_list([chat_row(content)])) == ["<UHI><A"]


def test_what_the_chat_template_must_not_be_told_names_the_prompt():
    rows = [chat_row("HI", chat_template_kwargs=None), chat_row("GO", chat_template_kwargs={"tokenize": True})]
    dataset = Dataset.from_list(rows)
    with pytest.raises(ValueError, match="Prompt 1 cannot be served: .*tokenize"):
        seen_prompts(dataset)


# Samples


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
