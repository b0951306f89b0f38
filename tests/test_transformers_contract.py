"""What this package leans on in transformers beyond its documentation. A failing test names what a release changed."""

import copy
import inspect
from dataclasses import dataclass

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import Cache, GenerationConfig, PreTrainedModel, StopStringCriteria
from transformers.cache_utils import CacheLayerMixin, DummyLayer, get_layer_types_and_kwargs
from transformers.generation import GenerationMixin
from transformers.generation import logits_process as hf
from transformers.masking_utils import create_causal_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import cached_file

from hf_specgen import enable_speculation
from hf_specgen.engine.judging import IGNORES_IDS
from hf_specgen.generation.enable import SpeculationMixin
from tests.support.models import FAMILIES, character_tokenizer, left_padded, make_model


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
        "a fresh `GenerationConfig` holds numbers for assistant settings: they would be taken for the caller's"
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


def test_plain_decoding_takes_what_assisted_decoding_is_given():
    """A trial runs both with the same prepared arguments."""
    wanted = ["self", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus"]
    assert parameters_of(GenerationMixin._sample)[:6] == wanted


def test_cache_that_a_user_gave_is_marked(model):
    cache = transformers.DynamicCache()
    assert prepared_call(model, **left_padded([3]), max_new_tokens=2, cache=cache)["cache"]._is_user_defined


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


# What hf_specgen/dspark leans on


def test_loading_lets_the_model_judge_its_keys_before_they_are_reported(tmp_path, monkeypatch):
    model, calls = make_model("llama"), []

    class Judge(type(model)):
        def _adjust_missing_and_unexpected_keys(self, loading_info):
            super()._adjust_missing_and_unexpected_keys(loading_info)
            calls.append(("adjust", copy.deepcopy(loading_info), self))
            loading_info.missing_keys.clear()

    def report(**settings):
        calls.append(("report", settings["loading_info"], settings["model"]))

    assert parameters_of(PreTrainedModel._adjust_missing_and_unexpected_keys) == ["self", "loading_info"]
    tensors = model.state_dict()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors |= {"foo": torch.ones(1), "lm_head.weight": torch.ones(3, 32)}
    model.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(transformers.modeling_utils, "log_state_dict_report", report)
    loaded = Judge.from_pretrained(tmp_path)
    (first, info, of_model), (second, reported, _) = calls
    assert (first, second) == ("adjust", "report") and of_model is loaded, "keys are judged elsewhere or later"
    assert info.missing_keys == {"model.layers.1.mlp.up_proj.weight"} and info.unexpected_keys == {"foo"}
    ((name, in_file, in_model),) = info.mismatched_keys
    assert (name, tuple(in_file), tuple(in_model)) == ("lm_head.weight", (3, 32), (64, 32))
    assert not reported.missing_keys, "what the model takes off the list is reported all the same"


def test_what_is_raised_about_keys_leaves_from_pretrained(tmp_path):
    model = make_model("llama")
    model.save_pretrained(tmp_path)

    class Strict(type(model)):
        def _adjust_missing_and_unexpected_keys(self, loading_info):
            raise ValueError("these keys are wrong")

    with pytest.raises(ValueError, match="these keys are wrong"):
        Strict.from_pretrained(tmp_path)


class StubCache:
    """A cache of no length, as the drafter's own."""

    def __init__(self):
        self.crops = []

    def get_seq_length(self, layer_idx=0):
        return 0

    def crop(self, max_length):
        self.crops.append(max_length)


class StubAssistant:
    """An assistant that always guesses token 5 and says what is asked of it."""

    def __init__(self, model):
        self._known = {
            "device": model.device,
            "config": model.config,
            "generation_config": GenerationConfig(num_assistant_tokens=3, num_assistant_tokens_schedule="constant"),
            "_supports_logits_to_keep": lambda: False,
            "generate": self._generate,
        }
        self.asked, self.calls, self.caches = set(), [], []

    def __getattr__(self, name):
        if name.startswith("__") or name not in self.__dict__.get("_known", {}):
            raise AttributeError(name)
        self.asked.add(name)
        return self._known[name]

    def _generate(self, **kwargs):
        self.calls.append(kwargs)
        self.caches.append(StubCache())
        count = kwargs["max_new_tokens"]
        guesses = torch.full((1, count), 5)
        scores = torch.full((1, 64), -100.0)
        scores[:, 5] = 0.0
        return StubOutput(torch.cat([kwargs["input_ids"], guesses], dim=1), (scores,) * count, self.caches[-1])


@dataclass(frozen=True)
class StubOutput:
    """All that the loop may read of what an assistant gives."""

    sequences: torch.Tensor
    scores: tuple[torch.Tensor, ...]
    cache: StubCache


def test_assistant_is_asked_for_these_attributes_and_arguments(model):
    assistant = StubAssistant(model)
    batch = left_padded([6])
    found = model.generate(**batch, assistant_model=assistant, max_new_tokens=8, do_sample=False)
    assert found.tolist() == model.generate(**batch, max_new_tokens=8, do_sample=False).tolist()
    wanted = {"device", "config", "generation_config", "_supports_logits_to_keep", "generate"}
    assert assistant.asked <= wanted, f"an assistant needs {assistant.asked - wanted} as well"
    assert len(assistant.calls) > 1
    for number, call in enumerate(assistant.calls):
        assert {"input_ids", "max_new_tokens", "generation_config", "logits_processor", "attention_mask"} <= set(call)
        others = {"min_new_tokens", "position_ids", "use_cache", "cache", "logits_to_keep", "token_type_ids"}
        left = set(call) - others - {"input_ids", "max_new_tokens", "generation_config", "logits_processor"}
        assert left == {"attention_mask"}, f"an assistant is called with other arguments: {left}"
        assert call["generation_config"].is_assistant is True, "the mark of a call by transformers' own loop is gone"
        assert call["generation_config"].do_sample is False and call["max_new_tokens"] <= 3
        previous = assistant.caches[number - 1] if number else None
        assert call.get("cache") is previous, "the cache of the round before is not handed back: no place for a state"
        assert not (previous and any(length > 0 for length in previous.crops)), "crop takes a length to keep again"


def test_assistant_in_transformers_gets_the_padding_and_the_processors(model):
    assistant = StubAssistant(model)
    batch = left_padded([3, 6])
    row = {name: tensor[:1] for name, tensor in batch.items()}
    settings = {"max_new_tokens": 6, "do_sample": True, "temperature": 0.5, "top_k": 7, "repetition_penalty": 1.3}
    model.generate(**row, assistant_model=assistant, **settings)
    for call in assistant.calls:
        names = [type(processor).__name__ for processor in call["logits_processor"]]
        assert names == ["RepetitionPenaltyLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper"]
        assert call["generation_config"].do_sample is True
        assert call["attention_mask"].shape == call["input_ids"].shape
        assert call["attention_mask"][0, :4].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "phi3_longrope"])
@torch.no_grad()
def test_decoder_takes_cache_and_wanted_hidden_states_as_keywords(family):
    """Hooks on `get_decoder()` read the cache and ask for single hidden states."""
    model, seen, asked = make_model(family), [], []

    def ask(module, args, kwargs):
        seen.append((args, kwargs.get("cache"), kwargs.get("output_hidden_states")))
        return args, {**kwargs, "output_hidden_states": [0, 1]}

    def catch(module, args, kwargs, outputs):
        asked.append(outputs.hidden_states)

    input_ids = left_padded([6])["input_ids"]
    expected = model(input_ids, output_hidden_states=True).hidden_states
    decoder = model.get_decoder()
    handles = [decoder.register_forward_pre_hook(ask, with_kwargs=True)]
    handles += [decoder.register_forward_hook(catch, with_kwargs=True)]
    model.generate(input_ids, max_new_tokens=3, do_sample=False)
    for handle in handles:
        handle.remove()
    assert len(seen) >= 2
    for args, cache, states in seen:
        assert not any(isinstance(value, Cache) for value in args) and isinstance(cache, Cache)
        assert not states, "somebody else asks for hidden states: the hook would have to add to them"
    for index in (0, 1):
        torch.testing.assert_close(asked[0][index], expected[index], rtol=0, atol=1e-5)
    assert len(asked[0]) == len(expected) and asked[0][2] is None, "all hidden states are kept, not the wanted ones"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
@torch.no_grad()
def test_hidden_states_are_raw_outputs_of_layers_but_for_the_last(family):
    """Why layer i is `hidden_states[i + 1]`, and why the last layer cannot be tapped."""
    model, raw = make_model(family, num_hidden_layers=3), []
    decoder = model.get_decoder()

    def keep(module, args, outputs):
        raw.append(outputs[0] if isinstance(outputs, tuple) else outputs)

    handles = [layer.register_forward_hook(keep) for layer in decoder.layers]
    states = model(left_padded([6])["input_ids"], output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    assert len(states) == 4
    for index in (0, 1):
        assert torch.equal(states[index + 1], raw[index])
    assert not torch.allclose(states[3], raw[2])
    torch.testing.assert_close(states[3], decoder.norm(raw[2]), rtol=0, atol=1e-5)


def test_new_weights_of_rotary_embeddings_and_norms_are_recognised_by_name(model):
    class AnyRotaryEmbedding(nn.Module):
        rope_type = "default"

        def __init__(self):
            super().__init__()
            self.config = model.config
            self.register_buffer("inv_freq", torch.zeros(4), persistent=False)
            self.register_buffer("original_inv_freq", torch.zeros(4), persistent=False)

        @staticmethod
        def compute_default_rope_parameters(config, **kwargs):
            return torch.arange(1.0, 5.0), 1.0

    rotary, norm = AnyRotaryEmbedding(), nn.RMSNorm(4)
    nn.init.zeros_(norm.weight)
    for module in (rotary, norm, nn.RMSNorm(4, elementwise_affine=False)):
        model._init_weights(module)
    assert rotary.inv_freq.tolist() == rotary.original_inv_freq.tolist() == [1.0, 2.0, 3.0, 4.0], (
        "`_init_weights` no longer fills the frequencies of a model that was made on the meta device"
    )
    assert norm.weight.tolist() == [1.0] * 4, "`_init_weights` no longer knows `torch.nn.RMSNorm`"


def test_rotary_functions_take_a_configuration():
    """`DSparkRotaryEmbedding` calls them with its own configuration and the default type has none."""
    assert {"linear", "yarn", "llama3", "proportional"} <= set(ROPE_INIT_FUNCTIONS)
    assert "default" not in ROPE_INIT_FUNCTIONS
    for kind in ("linear", "yarn", "llama3", "proportional"):
        parameters = inspect.signature(ROPE_INIT_FUNCTIONS[kind]).parameters.values()
        needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        assert needed in ([], ["config"]), f"{kind!r} needs {needed}"


def test_files_that_are_not_there_give_no_path(tmp_path):
    """How the threshold and the calibration beside a checkpoint are looked for."""
    quiet = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
        "_raise_exceptions_for_gated_repo": False,
    }
    assert cached_file(tmp_path, "generation_config.json", **quiet) is None
    (tmp_path / "generation_config.json").write_text("{}")
    assert cached_file(tmp_path, "generation_config.json", **quiet) == str(tmp_path / "generation_config.json")
