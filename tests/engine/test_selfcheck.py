"""What is compared at the first use of a model."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, MistralForCausalLM

from hf_specgen import CausalLMDrafter, Decoder, DecodingStats, Request, enable_speculation
from hf_specgen.engine.selfcheck import self_check
from tests.support.generate_calls import ForwardCount
from tests.support.models import assert_partly_accepted, assert_same_as_plain, left_padded, make_model, noisy_copy


class BatchSensitive(LlamaForCausalLM):
    """Its logits depend on what else is in the batch."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits + 0.5 * (len(outputs.logits) - 1)
        return outputs


class IgnoresPositions(LlamaForCausalLM):
    """Numbers the tokens of a pass itself."""

    def forward(self, input_ids, position_ids=None, **kwargs):
        return super().forward(input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **kwargs)


class IgnoresMask(LlamaForCausalLM):
    """Builds its own mask over all columns."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        if attention_mask is not None:
            attention_mask = torch.ones_like(attention_mask)
        return super().forward(input_ids, attention_mask=attention_mask, **kwargs)


@pytest.mark.parametrize("model_class", [BatchSensitive, IgnoresPositions, IgnoresMask])
def test_self_check_refuses_a_model_that_treats_ragged_rows_otherwise(llama, model_class):
    model = model_class(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    for _ in range(2):  # a refused model is checked again
        with pytest.raises(ValueError, match=f"`{model_class.__name__}` does not decode ragged rows.*differ by"):
            Decoder(model)
    with pytest.raises(ValueError, match="does not decode ragged rows"):
        enable_speculation(model).generate(**left_padded([5, 3]), assistant_model=llama, max_new_tokens=4)


def test_self_check_runs_once_per_model(llama):
    model = copy.deepcopy(llama)
    passes = ForwardCount(model)
    Decoder(model)
    assert passes.count == 4
    Decoder(model)
    assert passes.count == 4
    other = copy.deepcopy(llama)
    passes = ForwardCount(other)
    Decoder(other)
    assert passes.count == 4, "a copy is another model"


def test_self_check_leaves_flags_and_ignores_dropout():
    model = make_model(attention_dropout=0.9).train()
    model.model.layers[1].eval()
    flags = [module.training for module in model.modules()]
    self_check(model)
    assert [module.training for module in model.modules()] == flags


def test_self_check_passes_a_model_whose_head_is_zero(llama):
    model = copy.deepcopy(llama)
    nn.init.zeros_(model.lm_head.weight)
    self_check(model)
    nn.init.constant_(model.lm_head.weight, float("nan"))
    with pytest.raises(ValueError, match="nan"):
        self_check(copy.deepcopy(model))


class Raises(LlamaForCausalLM):
    """Refuses what it does not expect, in its own way."""

    error: type[BaseException] = AssertionError

    def forward(self, *args, attention_mask=None, **kwargs):
        if attention_mask is not None:
            raise self.error("no 4-D masks here")
        return super().forward(*args, **kwargs)


class ComputesInOneLayer(LlamaForCausalLM):
    """Its second layer keeps nothing in the cache."""

    def __init__(self, config):
        super().__init__(config)
        del self.model.layers[1]


@pytest.mark.parametrize("error", [AssertionError, ValueError, NotImplementedError, ZeroDivisionError, StopIteration])
def test_whatever_a_forward_pass_raises_becomes_a_sentence(llama, error):
    model = Raises(llama.config).eval()
    model.error = error
    with pytest.raises(ValueError, match=f"target `Raises` cannot run on ragged rows.*{error.__name__}"):
        Decoder(model)
    with pytest.raises(ValueError, match="draft model `Raises` cannot run.*another draft"):
        Decoder(copy.deepcopy(llama), CausalLMDrafter(model))


def test_layer_that_caches_nothing_passes(llama):
    self_check(ComputesInOneLayer(llama.config).eval())


# Windows


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("lengths", [[40], [40, 9, 33], [20, 30]], ids=str)
def test_window_of_the_configuration_is_cut_as_plain_generate_cuts_it(family, lengths, attention):
    """Llama reads no window, though its configuration may name one; Mistral and Gemma do."""
    kinds = {} if family != "gemma3" else {"layer_types": ["sliding_attention", "full_attention"]}
    model = make_model(family, attn_implementation=attention, **{"sliding_window": 32} | kinds)
    stats = [
        assert_same_as_plain(model, left_padded(lengths, seed=seed), drafting, max_new_tokens=24)
        for seed in range(2)
        for drafting in ({"assistant_model": noisy_copy(model), "num_assistant_tokens": 4},)
    ]
    assert_partly_accepted(*stats)


def test_window_matters_once_a_row_can_pass_it(llama):
    model = make_model(sliding_window=32)
    passes, decoder = ForwardCount(model), Decoder(model)
    decoder.add(Request([3] * 20, 12))
    assert passes.count == 4 and not decoder.rows.cache.spares_prompts
    decoder.add(Request([3] * 20, 13))
    assert decoder.rows.cache.spares_prompts
    count = passes.count
    other = Decoder(model)
    other.add(Request([3] * 40, 4))
    assert other.rows.cache.spares_prompts and passes.count == count, "a model is compared once"


class WidensItsWindow(MistralForCausalLM):
    """Sees four tokens more than its configuration says."""

    def forward(self, *args, **kwargs):
        self.config.sliding_window += 4
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.config.sliding_window -= 4


def test_window_that_cannot_be_followed_is_refused():
    plain = make_model("mistral", sliding_window=32)
    model = WidensItsWindow(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    Decoder(model).add(Request([3] * 20, 12))
    with pytest.raises(ValueError, match="`WidensItsWindow` does not cut its sliding window of 32.*Keep prompt"):
        Decoder(model).add(Request([3] * 20, 13))


# Drafts


def test_quantized_draft_drafts(llama):
    draft = torch.ao.quantization.quantize_dynamic(copy.deepcopy(llama), {nn.Linear}, dtype=torch.qint8)
    drafting = {"assistant_model": draft, "num_assistant_tokens": 4}
    stats = [
        assert_same_as_plain(llama, left_padded([6, 2, 9], seed=s), drafting, max_new_tokens=24) for s in range(3)
    ]
    assert sum(stats, DecodingStats()).acceptance_rate > 0
    with pytest.raises(ValueError, match="does not decode ragged rows"):
        self_check(BatchSensitive(llama.config).eval())
    self_check(BatchSensitive(llama.config).eval(), "draft model")
