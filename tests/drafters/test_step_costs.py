"""The profiler on tiny models: what it runs, what it gives and what it leaves behind. No test reads the real clock."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen.drafters import step_costs as profiling
from hf_specgen.drafters.step_costs import profile_step_costs
from hf_specgen.layers.attention import GROUPED_ATTENTION
from tests.support.models import make_model


@pytest.fixture
def passes(monkeypatch):
    """The shape of the new tokens of every verification pass and where its rows stood before it."""
    seen = []

    def watched(model, cache, rows, token_ids, num_tokens, forward=profiling.forward, **kwargs):
        assert num_tokens.tolist() == [token_ids.shape[1]] * token_ids.shape[0], "nothing is padding"
        assert not torch.is_grad_enabled() and not any(module.training for module in model.modules())
        seen.append((tuple(token_ids.shape), cache.lengths.tolist(), model.config._attn_implementation))
        return forward(model, cache, rows, token_ids, num_tokens, **kwargs)

    monkeypatch.setattr(profiling, "forward", watched)
    return seen


def test_measures_every_number_of_tokens_at_the_same_place(llama, passes):
    costs = profile_step_costs(llama, num_rows=2, max_tokens=14, context_length=9, repeats=3)
    assert list(costs.milliseconds) == [2, 4, 6, 8, 10, 12, 14]
    assert all(ms > 0 for ms in costs.milliseconds.values())
    assert (costs.num_rows, costs.context_length) == (2, 9)
    up = [(2, count) for count in range(1, 8)]
    assert [shape for shape, _, _ in passes] == [*up[::-1], *up, *up[::-1], *up], "a warm-up and 3 repeats, in turn"
    assert all(lengths == [9, 9] for _, lengths, _ in passes), "rolled back after each pass"
    assert all(attention == GROUPED_ATTENTION for _, _, attention in passes)


@pytest.mark.parametrize(
    "max_tokens, expected",
    [(1, [1]), (5, [1, 2, 3, 4, 5]), (7, [1, 2, 3, 4, 5, 6, 7]), (None, [1, 2, 3, 4, 5, 6, 8, 12, 16])],
)
def test_many_positions_are_measured_at_some(llama, max_tokens, expected):
    costs = profile_step_costs(llama, max_tokens=max_tokens, context_length=4, repeats=1)
    assert list(costs.milliseconds) == expected


def test_gives_the_median_without_the_warm_up(llama, monkeypatch):
    durations = [90.0, 80.0, 1.0, 2.0, 5.0, 3.0, 4.0, 8.0]  # of 2 positions, 1, then 1, 2, then 2, 1, then 1, 2
    clock = iter([time for i, duration in enumerate(durations) for time in (1000.0 * i, 1000.0 * i + duration)])
    monkeypatch.setattr(profiling, "time_now", lambda model: next(clock))
    costs = profile_step_costs(llama, max_tokens=2, context_length=4, repeats=3)
    assert costs.milliseconds == {1: 3000.0, 2: 5000.0}


def test_names_the_model_and_the_device(llama):
    model = make_model()
    costs = profile_step_costs(model, max_tokens=1, context_length=4, repeats=1)
    assert costs.model == "LlamaForCausalLM"
    assert costs.device == f"cpu, threads: {torch.get_num_threads()}"
    model.config.name_or_path = "some/model"
    assert profile_step_costs(model, max_tokens=1, context_length=4, repeats=1).model == "some/model"


def state_of(model: PreTrainedModel) -> tuple:
    flags = {name: module.training for name, module in model.named_modules()}
    return flags, model.config._attn_implementation, torch.get_rng_state().tolist(), torch.is_grad_enabled()


def test_leaves_everything_as_it_was(passes):
    model = make_model().train()
    model.model.layers[0].eval()
    before = state_of(model)
    profile_step_costs(model, max_tokens=2, context_length=4, repeats=1)
    assert state_of(model) == before
    assert len(passes) == 4, "which were not in train mode"


def test_leaves_everything_as_it_was_after_an_error(monkeypatch):
    model = make_model().train()
    model.model.layers[0].eval()
    before = state_of(model)

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(profiling, "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        profile_step_costs(model, max_tokens=2, context_length=4, repeats=1)
    assert state_of(model) == before


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "mixtral"])
def test_other_families(family):
    costs = profile_step_costs(make_model(family), num_rows=2, max_tokens=4, context_length=12, repeats=1)
    assert list(costs.milliseconds) == [2, 4]


@pytest.mark.parametrize(
    "arguments, error, sentence",
    [
        ({"num_rows": 0}, ValueError, "`num_rows` has to be at least 1, but is 0"),
        ({"num_rows": 1.0}, TypeError, "`num_rows` has to be an int"),
        ({"max_tokens": 0}, ValueError, "`max_tokens` has to be at least 1"),
        ({"max_tokens": True}, TypeError, "`max_tokens` has to be an int"),
        ({"num_rows": 3, "max_tokens": 16}, ValueError, r"multiple of `num_rows` \(3\), but is 16"),
        ({"num_rows": 3, "max_tokens": 2}, ValueError, r"multiple of `num_rows` \(3\), but is 2"),
        ({"context_length": 0}, ValueError, "`context_length` has to be at least 1"),
        ({"repeats": 0}, ValueError, "`repeats` has to be at least 1"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(llama, passes, arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        profile_step_costs(llama, **arguments)
    assert passes == []


def test_models_that_cannot_be_measured_are_refused():
    with pytest.raises(TypeError, match="`model` has to be a causal language model, but is a 'Linear'"):
        profile_step_costs(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="come to 257 tokens, but the model has learned positions for 256"):
        profile_step_costs(make_model("gpt2"), max_tokens=1, context_length=256)
    profile_step_costs(make_model("gpt2"), max_tokens=1, context_length=255, repeats=1)


def test_model_that_the_loop_does_not_serve_is_refused():
    model = make_model()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="cannot serve this model: .*'flash_attention_2'"):
        profile_step_costs(model)
