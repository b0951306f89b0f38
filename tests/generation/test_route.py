"""Who serves a call: the loop, transformers or nobody."""

import copy

import pytest
import torch
from transformers import (
    GenerationConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MoshiConfig,
    MoshiForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)

from hf_specgen import enable_speculation
from hf_specgen.generation.route import Inputs
from tests.support.generate_calls import ForwardCount, RecordingStreamer
from tests.support.models import (
    EOS,
    PAD,
    assert_partly_accepted,
    assert_same_as_plain,
    left_padded,
    make_model,
    noisy_copy,
    t5,
    widened,
)

IDS = {"vocab_size": 64, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TEXT = {"model_type": "llama", **IDS, **SIZES}
VISION = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}


def test_model_with_windows_of_its_own_is_served_one_row_at_a_time():
    config = GPTNeoConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        window_size=8,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=256,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    torch.manual_seed(0)
    plain = GPTNeoForCausalLM(config).eval()
    ours, draft = enable_speculation(copy.deepcopy(plain)), noisy_copy(plain)
    draft.generation_config.num_assistant_tokens = 5
    one, two = left_padded([12]), left_padded([9, 12])
    assert torch.equal(
        ours.generate(**one, max_new_tokens=14, assistant_model=draft), plain.generate(**one, max_new_tokens=14)
    )
    with pytest.raises(ValueError, match="attention windows"):
        ours.generate(**two, max_new_tokens=14, assistant_model=draft)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_zeros_inside_a_row_are_left_to_transformers_under_sliding_windows(family):
    plain = make_model(family)
    ours, draft = enable_speculation(copy.deepcopy(plain)), noisy_copy(plain)
    batch = left_padded([12])
    batch["attention_mask"][0, 7:10] = 0
    expected = plain.generate(**batch, max_new_tokens=16)
    assert torch.equal(ours.generate(**batch, max_new_tokens=16, assistant_model=draft), expected)
    batch = {name: tensor.repeat(2, 1) for name, tensor in batch.items()}
    with pytest.raises(ValueError, match="zeros inside a row"):
        ours.generate(**batch, max_new_tokens=16, assistant_model=draft)


def test_zeros_inside_a_row_are_served_without_windows(llama):
    ours, draft = enable_speculation(copy.deepcopy(llama)), noisy_copy(llama)
    batch = left_padded([12, 9])
    batch["attention_mask"][0, 7:10] = 0
    expected = llama.generate(**batch, max_new_tokens=16)
    assert torch.equal(ours.generate(**batch, max_new_tokens=16, assistant_model=draft), expected)


# What transformers serves right at one row


def lfm2():
    config = Lfm2Config(**IDS, **SIZES, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    return made(Lfm2ForCausalLM, config)


def moshi():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    return made(MoshiForCausalLM, MoshiConfig(vocab_size=64, **sizes, sliding_window=24, max_position_embeddings=256))


def llava():
    config = LlavaConfig(text_config=TEXT, vision_config=VISION, image_token_index=60)
    return made(LlavaForConditionalGeneration, config)


def paligemma():
    text = {**TEXT, "model_type": "gemma", "head_dim": 8}
    vision = {**VISION, "model_type": "siglip_vision_model"}
    config = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=60, projection_dim=32)
    return made(PaliGemmaForConditionalGeneration, config)


def made(model_class, config):
    model = widened(model_class, config, gain=3.0)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, EOS
    return model


class BatchSensitive(LlamaForCausalLM):
    """Its scores depend on what else is in the batch."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits + torch.arange(64) * 0.5 * (len(outputs.logits) - 1)
        return outputs


class BlockSensitive(LlamaForCausalLM):
    """Its scores depend on how many tokens come in one pass behind the prompt."""

    def forward(self, input_ids, *args, cache=None, **kwargs):
        is_later = cache is not None and cache.get_seq_length() > 0
        outputs = super().forward(input_ids, *args, cache=cache, **kwargs)
        outputs.logits = outputs.logits + torch.arange(64) * 0.5 * (input_ids.shape[1] - 1) * is_later
        return outputs


def of_class(model_class):
    plain = make_model()
    model = model_class(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    model.generation_config = plain.generation_config
    return model


def draftings(model):
    draft = noisy_copy(model)
    draft.generation_config.num_assistant_tokens = 3
    return {"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}


@pytest.mark.parametrize("make", [lfm2, lambda: of_class(BatchSensitive)], ids=["lfm2", "batch_sensitive"])
def test_one_row_is_served_by_transformers_where_that_is_right(make):
    plain = make()
    ours = enable_speculation(copy.deepcopy(plain))
    for drafting in draftings(plain):
        for seed in range(2):
            batch = left_padded([7], seed=seed)
            actual = ours.generate(**batch, **drafting, max_new_tokens=16)
            assert actual.tolist() == plain.generate(**batch, max_new_tokens=16).tolist()
            assert ours.speculation_stats is None
        with pytest.raises(ValueError, match="own loop takes one row at a time, and the batch has 2"):
            ours.generate(**left_padded([7, 3]), **drafting, max_new_tokens=16)


@pytest.mark.parametrize(
    ("make", "reason"),
    [(paligemma, "does not decode ragged rows"), (lambda: of_class(BlockSensitive), "does not decode ragged rows")],
    ids=["paligemma", "block_sensitive"],
)
def test_what_transformers_decodes_wrongly_is_refused(make, reason):
    ours = enable_speculation(make())
    for drafting in draftings(ours):
        with pytest.raises(ValueError, match=f"{reason}.*own loop is wrong too: in a trial"):
            ours.generate(**left_padded([7]), **drafting, max_new_tokens=16)


def test_windows_that_transformers_cuts_wrongly_are_refused_once_they_matter():
    plain = moshi()
    ours, (drafting, _) = enable_speculation(copy.deepcopy(plain)), draftings(plain)
    batch = left_padded([7])
    actual = ours.generate(**batch, **drafting, max_new_tokens=16)
    assert actual.tolist() == plain.generate(**batch, max_new_tokens=16).tolist()
    with pytest.raises(ValueError, match="cuts its attention windows.*own loop is wrong too"):
        ours.generate(**batch, **drafting, max_new_tokens=40)


def test_a_model_is_tried_once(llama):
    ours, drafting = enable_speculation(of_class(BatchSensitive)), {"prompt_lookup_num_tokens": 3}
    counts = []
    for _ in range(3):
        passes = ForwardCount(ours)
        ours.generate(**left_padded([7]), **drafting, max_new_tokens=8)
        counts.append(passes.count)
    assert counts[0] > counts[1] == counts[2]


def test_text_alone_in_a_vision_language_model_is_served_by_the_loop():
    plain = llava()
    ours = enable_speculation(copy.deepcopy(plain))
    for drafting in draftings(plain):
        for lengths in ([7], [7, 3]):
            batch = left_padded(lengths, vocab_size=56)
            actual = ours.generate(**batch, **drafting, max_new_tokens=16)
            assert actual.tolist() == plain.generate(**batch, max_new_tokens=16).tolist()
            assert ours.speculation_stats is not None


@pytest.mark.parametrize("value", [{}, [], (), None], ids=str)
def test_empty_inputs_ask_for_nothing(value):
    kwargs = {"mm_encoder_outputs": value, "attention_mask": torch.ones(1, 2)}
    assert Inputs(torch.ones(1, 2), [], [], kwargs).given == {"attention_mask"}
    assert "images" in Inputs(torch.ones(1, 2), [], [], {"images": {"a": 1}}).given


def test_settings_of_the_call_reach_transformers_own_loop(monkeypatch):
    plain = of_class(BatchSensitive)
    ours, draft, seen = enable_speculation(copy.deepcopy(plain)), noisy_copy(plain), []
    before = repr(draft.generation_config)

    class Watched(type(draft)):
        def generate(self, *args, **kwargs):
            seen.append((kwargs["max_new_tokens"], self.generation_config.assistant_confidence_threshold))
            return super().generate(*args, **kwargs)

    draft.__class__ = Watched
    settings = {"num_assistant_tokens": 2, "assistant_confidence_threshold": 0.25}
    actual = ours.generate(**left_padded([7]), assistant_model=draft, max_new_tokens=16, **settings)
    assert actual.tolist() == plain.generate(**left_padded([7]), max_new_tokens=16).tolist()
    assert max(count for count, _ in seen) == 2 and {threshold for _, threshold in seen} == {0.25}
    assert repr(draft.generation_config) == before


@pytest.mark.parametrize(
    ("words", "lookup", "settings"),
    [
        ("`num_assistant_tokens` is given, but prompt lookup has no use", True, {"num_assistant_tokens": 3}),
        ("`max_matching_ngram_size` is given, but a draft model has no use", False, {"max_matching_ngram_size": 3}),
        ("`num_assistant_tokens` has to be at least 1", False, {"num_assistant_tokens": 0}),
        (r"`assistant_confidence_threshold` has to be in \[0, 1\]", False, {"assistant_confidence_threshold": 2}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_settings_that_transformers_own_loop_would_ignore_are_refused(words, lookup, settings):
    ours = enable_speculation(of_class(BatchSensitive))
    drafting = {"prompt_lookup_num_tokens": 3} if lookup else {"assistant_model": noisy_copy(ours)}
    with pytest.raises(ValueError, match=words):
        ours.generate(**left_padded([7]), max_new_tokens=8, **drafting, **settings)


# What a call says


@pytest.mark.parametrize("eos", [-1, [EOS, -1], None], ids=str)
@pytest.mark.parametrize("lengths", [[6], [6, 2]], ids=["single", "batch"])
def test_no_end_is_written_as_minus_one(llama, eos, lengths):
    settings = {"eos_token_id": eos, "max_new_tokens": 24}
    for drafting in draftings(llama):
        assert_same_as_plain(llama, left_padded(lengths), drafting, **settings)


class PreparesTwice(LlamaForCausalLM):
    """Fills its configuration before it calls `generate`, as Janus does."""

    def generate(self, inputs=None, attention_mask=None, **kwargs):
        config, kwargs = self._prepare_generation_config(kwargs.pop("generation_config", None), **kwargs)
        return super().generate(inputs=inputs, attention_mask=attention_mask, generation_config=config, **kwargs)


def test_model_that_fills_its_own_configuration_gives_nothing(llama):
    plain = of_class(PreparesTwice)
    ours, seen = enable_speculation(copy.deepcopy(plain)), []
    batch = left_padded([6, 2])
    for drafting in draftings(plain):
        actual = ours.generate(**batch, **drafting, max_new_tokens=16, on_round=lambda *args: seen.append(1))
        assert actual.tolist() == plain.generate(**batch, max_new_tokens=16).tolist()
    assert seen
    with pytest.raises(ValueError, match="`num_assistant_tokens` is given, but prompt lookup.*Leave out its 3"):
        ours.generate(**batch, prompt_lookup_num_tokens=3, num_assistant_tokens=3)


@pytest.mark.parametrize("lengths", [[6], [6, 2]], ids=["single", "batch"])
def test_attentions_need_eager_attention(llama, lengths):
    ours = enable_speculation(copy.deepcopy(llama))
    passes = ForwardCount(ours)
    with pytest.raises(ValueError, match=r"`output_attentions` needs eager.*'sdpa'.*attn_implementation\('eager'\)"):
        ours.generate(**left_padded(lengths), prompt_lookup_num_tokens=3, output_attentions=True)
    assert passes.count == 0


@pytest.mark.parametrize("place", ["call", "generation_config", "model", "config"])
def test_a_cache_that_is_turned_off_is_on_for_the_call(llama, place):
    ours = enable_speculation(copy.deepcopy(llama))
    given = {"use_cache": False} if place == "call" else {}
    if place == "generation_config":
        given = {"generation_config": GenerationConfig(use_cache=False)}
    elif place == "model":
        ours.generation_config.use_cache = False
    elif place == "config":
        ours.config.use_cache = False
    batch = left_padded([6, 2])
    for drafting in draftings(llama):
        actual = ours.generate(**batch, **drafting, max_new_tokens=16, **given)
        assert actual.tolist() == llama.generate(**batch, max_new_tokens=16).tolist()
        assert_partly_accepted(ours.speculation_stats)
    assert (ours.generation_config.use_cache is False) == (place == "model"), "the user's configuration stays"
    handed_over = enable_speculation(of_class(BatchSensitive))
    one = handed_over.generate(**left_padded([6]), prompt_lookup_num_tokens=3, max_new_tokens=8, use_cache=False)
    assert one.tolist() == of_class(BatchSensitive).generate(**left_padded([6]), max_new_tokens=8).tolist()


def test_streamer_of_several_rows_is_refused_before_it_gets_anything(llama):
    ours, streamer = enable_speculation(copy.deepcopy(llama)), RecordingStreamer()
    passes, sampled = ForwardCount(ours), {"do_sample": True, "num_return_sequences": 2}
    for batch, settings in ((left_padded([6, 2]), {}), (left_padded([6]), sampled)):
        with pytest.raises(ValueError, match="`streamer` works with one row at a time, but the batch has 2 rows"):
            ours.generate(**batch, prompt_lookup_num_tokens=3, streamer=streamer, **settings)
    assert passes.count == 0 and streamer.puts == [] and not streamer.has_ended


def test_encoder_does_not_run_for_a_batch_that_is_refused():
    ours = enable_speculation(t5())
    passes = ForwardCount(ours.encoder, ours)
    with pytest.raises(ValueError, match="is an encoder-decoder model.*one row"):
        ours.generate(**left_padded([5, 3]), prompt_lookup_num_tokens=3)
    assert passes.count == 0
