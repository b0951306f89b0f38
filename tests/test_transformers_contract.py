"""What this package leans on in transformers beyond its documentation. A failing test names what a release changed."""

import inspect

import pytest
import torch
import transformers
from conftest import character_tokenizer, left_padded, make_model
from transformers import Cache, GenerationConfig, StopStringCriteria
from transformers.cache_utils import CacheLayerMixin, DummyLayer, get_layer_types_and_kwargs
from transformers.generation import GenerationMixin
from transformers.generation import logits_process as hf
from transformers.masking_utils import create_causal_mask

from hf_specgen import enable_speculation
from hf_specgen.generation import SpeculationMixin
from hf_specgen.scoring import IGNORES_IDS


def parameters_of(function) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.fixture
def model():
    return make_model("llama")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("_prepare_generation_config", ["self", "generation_config", "kwargs"]),
        (
            "_validate_generation_mode",
            ["self", "generation_mode", "generation_config", "generation_mode_kwargs"],
        ),
        (
            "_assisted_decoding",
            [
                "self",
                "input_ids",
                "logits_processor",
                "stopping_criteria",
                "generation_config",
                "synced_gpus",
                "streamer",
                "inputs_tensor",
                "assistant_model",
                "assistant_tokenizer",
                "tokenizer",
                "model_kwargs",
            ],
        ),
    ],
)
def test_overridden_methods_have_the_parameters_that_are_passed_on(name, wanted):
    assert name in vars(GenerationMixin), f"transformers has no `GenerationMixin.{name}` any more"
    found = parameters_of(getattr(GenerationMixin, name))
    assert set(wanted) <= set(found), f"`{name}` lost the parameters {sorted(set(wanted) - set(found))}"
    assert found[: len(wanted) - 1] == wanted[:-1], f"`{name}` takes its parameters in another order"
    assert parameters_of(getattr(SpeculationMixin, name)) == wanted, f"the override of `{name}` differs"


def test_nothing_else_is_overridden():
    own = {name for name, value in vars(SpeculationMixin).items() if inspect.isfunction(value)}
    assert own == {"_prepare_generation_config", "_validate_generation_mode", "_assisted_decoding", "__reduce_ex__"}


def test_generate_finds_the_overrides_on_the_class_and_calls_them_in_order(model):
    """`_prepare_generation_config` comes first and sees the caller's keywords; validation comes before decoding."""
    calls = []

    class Recorder(type(model)):
        def _prepare_generation_config(self, generation_config, **kwargs):
            calls.append(("prepare", kwargs.get("num_assistant_tokens"), "assistant_model" in kwargs))
            return super()._prepare_generation_config(generation_config, **kwargs)

        def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
            calls.append(("validate", generation_mode.value, "assistant_model" in generation_mode_kwargs))

        def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
            calls.append(("decode", len(input_ids), kwargs["assistant_model"] is draft))
            return input_ids

    draft = make_model("llama", seed=1)
    model.__class__ = Recorder
    model.generate(**left_padded([3, 2]), assistant_model=draft, num_assistant_tokens=7, max_new_tokens=2)
    assert calls == [("prepare", 7, False), ("validate", "assisted_generation", True), ("decode", 2, True)], (
        "`generate` no longer looks its private methods up on `type(self)`, or calls them in another order"
    )


def prepared_call(model, **settings) -> dict:
    """What `generate` hands to the decoding method."""
    call = {}

    class Recorder(type(model)):
        def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
            pass

        def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
            call.update(kwargs, config=generation_config, criteria=stopping_criteria, processors=logits_processor)
            return input_ids

    model.__class__ = Recorder
    model.generate(assistant_model=make_model("llama", seed=1), **settings)
    return call


def test_private_attributes_of_a_generation_config_reach_decoding(model):
    class Marking(type(model)):
        def _prepare_generation_config(self, generation_config, **kwargs):
            prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
            prepared._mark = "here"
            return prepared, model_kwargs

    model.__class__ = Marking
    call = prepared_call(model, **left_padded([3, 2]), max_new_tokens=2)
    assert call["config"]._mark == "here", "`generate` decodes with another object than it prepared"


def test_decoding_gets_mask_positions_and_special_tokens(model):
    call = prepared_call(model, **left_padded([3, 2]), max_new_tokens=2)
    assert call["config"]._pad_token_tensor.tolist() == 0, "`_pad_token_tensor` is not set on the config"
    assert call["config"]._eos_token_tensor.tolist() == [2], "`_eos_token_tensor` is not set on the config"
    assert call["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert call["position_ids"][1, 1:].tolist() == [0, 1]
    names = [type(criterion).__name__ for criterion in call["criteria"]]
    assert names == ["MaxLengthCriteria", "EosTokenCriteria"], "other stopping criteria stand for length and eos"
    assert call["criteria"][0].max_length == 5
    assert call["criteria"][1].eos_token_id.tolist() == [2]


def test_assistant_settings_are_filled_in_before_decoding():
    """The reason to look at the caller's keywords: afterwards nobody can tell a default from a wish."""
    config = GenerationConfig()
    assert config.num_assistant_tokens is None and config.assistant_confidence_threshold is None, (
        "a fresh `GenerationConfig` holds numbers for assistant settings: `_said` then takes them for the caller's"
    )


@pytest.mark.parametrize(
    "name",
    [
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "cache_implementation",
        "max_matching_ngram_size",
        "num_assistant_tokens_schedule",
        "output_attentions",
        "output_hidden_states",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "speculation_type",
        "use_mtp",
    ],
)
def test_generation_config_has(name):
    assert hasattr(GenerationConfig(), name), f"`GenerationConfig.{name}` is gone"


def test_cache_layers_come_from_the_config():
    assert parameters_of(get_layer_types_and_kwargs) == ["config"]
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=8
    )
    kinds, settings = get_layer_types_and_kwargs(config)
    assert kinds == ["sliding_attention", "full_attention"]
    assert [setting.get("sliding_window") for setting in settings] == [8, None]


def test_layers_that_share_keys_are_dummies():
    config = transformers.Gemma3nTextConfig(
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    assert get_layer_types_and_kwargs(config)[0][2:] == ["dummy", "dummy"]
    DummyLayer()


def test_cache_layer_interface():
    wanted = {"lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length"}
    assert CacheLayerMixin.__abstractmethods__ == wanted, "cache layers have to implement other methods"
    assert parameters_of(CacheLayerMixin.update)[:3] == ["self", "key_states", "value_states"]
    assert parameters_of(CacheLayerMixin.get_mask_sizes) == ["self", "query_length"]
    assert "layers" in parameters_of(Cache.__init__)


def test_logits_to_keep_takes_indices(model):
    assert model._supports_logits_to_keep()
    batch = left_padded([6, 6])
    kept = torch.tensor([1, 4])
    found = model(**batch, logits_to_keep=kept).logits
    assert torch.equal(found, model(**batch).logits[:, kept]), "`logits_to_keep` no longer takes a tensor of indices"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_of_four_dimensions_are_passed_through(model, attention):
    model.set_attn_implementation(attention)
    mask = torch.zeros(1, 1, 2, 5, dtype=torch.bool)
    passed = create_causal_mask(model.config, torch.zeros(1, 2, 32), mask, None)
    assert passed is mask, "a 4-D mask is not used as it is"


@torch.no_grad()
def test_eager_attention_adds_its_mask_and_sdpa_takes_booleans(model):
    input_ids = left_padded([5])["input_ids"]
    is_past = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    additive = torch.zeros(is_past.shape).masked_fill(~is_past, torch.finfo(torch.float32).min)
    expected = model(input_ids).logits
    torch.testing.assert_close(model(input_ids, attention_mask=is_past).logits, expected, rtol=0, atol=1e-4)
    model.set_attn_implementation("eager")
    found = model(input_ids, attention_mask=additive).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    wrong = model(input_ids, attention_mask=is_past).logits
    assert (wrong - expected).abs().max() > 1e-2, "eager attention now takes booleans: `is_additive` can go"


def test_attention_implementation_is_read_from_the_config_at_every_call(model, monkeypatch):
    used = []

    def recorded(module, query, *args, **kwargs):
        used.append(query.shape)
        return query.transpose(1, 2), None

    transformers.AttentionInterface.register("hf_specgen_recorded", recorded)
    transformers.AttentionMaskInterface.register("hf_specgen_recorded", transformers.masking_utils.sdpa_mask)
    model.config._attn_implementation_internal = "hf_specgen_recorded"
    assert model.config._attn_implementation == "hf_specgen_recorded"
    model(left_padded([5])["input_ids"])
    assert len(used) == 2, "setting `_attn_implementation_internal` no longer switches the attention of all layers"


def test_model_class_flags(model):
    assert type(model)._can_set_attn_implementation() is True
    assert model._is_stateful is False
    config = transformers.MambaConfig(num_hidden_layers=1, hidden_size=8, vocab_size=8, state_size=4)
    assert transformers.MambaForCausalLM(config)._is_stateful is True


def test_peers_are_asked_with_three_arguments(model):
    assert parameters_of(GenerationMixin._has_unfinished_sequences) == [
        "self",
        "this_peer_finished",
        "synced_gpus",
        "device",
    ]
    assert model._has_unfinished_sequences(True, False, torch.device("cpu")) is False
    assert model._has_unfinished_sequences(False, False, torch.device("cpu")) is True


def test_prefix_processor_keeps_its_function():
    def allowed(batch_id, ids):
        return [1]

    processor = hf.PrefixConstrainedLogitsProcessor(allowed, 2)
    assert processor._prefix_allowed_tokens_fn is allowed and processor._num_beams == 2


def test_stop_strings_read_the_last_ids_and_match_no_id_outside_the_vocabulary():
    criterion = StopStringCriteria(character_tokenizer("?abcdef"), ["ab", "cabc"])
    assert criterion.maximum_token_len == 4, "`maximum_token_len` is not the length of the longest stop string"
    outside = torch.iinfo(torch.int32).max
    cases = {(1, 2): True, (3, 1): False, (outside, 2): False, (1, outside): False, (outside, 1, 2): True}
    for ids, is_stop in cases.items():
        assert criterion(torch.tensor([ids]), None).tolist() == [is_stop], f"{ids} is judged differently"
    assert criterion(torch.tensor([[outside] * 4]), None).tolist() == [False]


@pytest.mark.parametrize("processor", sorted(IGNORES_IDS, key=lambda kind: kind.__name__), ids=lambda k: k.__name__)
def test_processor_that_is_applied_to_all_positions_reads_no_ids(processor):
    """Ids that do not exist change nothing: whoever reads them fails or differs."""
    arguments = {
        "LogitBias": ({3: 1.5},),
        "UndecodableMask": (9,),
        "TemperatureLogitsWarper": (0.7,),
        "TopKLogitsWarper": (3,),
        "TopPLogitsWarper": (0.7,),
        "TopHLogitsWarper": (0.4,),
        "MinPLogitsWarper": (0.1,),
        "TypicalLogitsWarper": (0.8,),
        "EpsilonLogitsWarper": (0.05,),
        "EtaLogitsWarper": (0.05,),
        "InfNanRemoveLogitsProcessor": (),
        "LogitNormalization": (),
        "SuppressTokensLogitsProcessor": ([4, 5],),
    }[processor.__name__]
    built = processor(*arguments)
    scores = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) * 3
    together = built(torch.zeros(6, 1, dtype=torch.long), scores.clone())
    for ids in (torch.full((6, 4), 3), torch.full((6, 2), 10**6)):
        assert torch.equal(built(ids, scores.clone()), together)
    alone = torch.cat([built(torch.zeros(1, 1, dtype=torch.long), row[None].clone()) for row in scores])
    assert torch.equal(alone, together), "a row depends on the others"


def test_enabled_model_has_the_same_generate(model):
    assert type(enable_speculation(model)).generate is GenerationMixin.generate
