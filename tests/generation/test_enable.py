"""The enabled model: its class, copies, threads and state."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specgen import (
    disable_speculation,
    enable_speculation,
)
from tests.support.generate_calls import (
    DICT_OUTPUT,
)
from tests.support.models import (
    left_padded,
    make_model,
    noisy_copy,
    ragged_lengths,
)


@pytest.fixture(scope="module")
def draft(llama):
    return noisy_copy(llama)


@pytest.fixture
def speculating(llama):
    return enable_speculation(copy.deepcopy(llama))


def test_enabling_keeps_the_object_and_its_class(llama):
    model = copy.deepcopy(llama)
    names = list(vars(model)), list(model.state_dict())
    enabled = enable_speculation(model)
    assert enabled is model and isinstance(model, LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM" and type(model).__module__ == LlamaForCausalLM.__module__
    subclass = type(model)
    assert enable_speculation(model) is model and type(model) is subclass
    assert (list(vars(model)), list(model.state_dict())) == names
    assert disable_speculation(model) is model and type(model) is LlamaForCausalLM
    assert disable_speculation(model) is model and type(model) is LlamaForCausalLM


def test_disabling_forgets_the_statistics_and_brings_back_the_old_refusal(llama, draft, speculating):
    speculating.generate(**left_padded([6, 2]), assistant_model=draft, max_new_tokens=4)
    disable_speculation(speculating)
    assert "speculation_stats" not in vars(speculating)
    with pytest.raises(ValueError, match="batch_size = 1"):
        speculating.generate(**left_padded([6, 2]), assistant_model=draft, max_new_tokens=4)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "sample", "beams"])
def test_generate_without_a_drafter_is_untouched(llama, speculating, settings):
    outputs, states = [], []
    for model in (llama, speculating):
        torch.manual_seed(0)
        outputs.append(model.generate(**left_padded([6, 2]), max_new_tokens=12, **DICT_OUTPUT, **settings))
        states.append(torch.get_rng_state())
    assert type(outputs[0]) is type(outputs[1])
    assert outputs[0].sequences.tolist() == outputs[1].sequences.tolist()
    torch.testing.assert_close(outputs[1].scores, outputs[0].scores, atol=0, rtol=0)
    assert torch.equal(*states)
    assert "speculation_stats" not in vars(speculating)
    assert isinstance(outputs[1], GenerateDecoderOnlyOutput) or "num_beams" in settings


def test_saved_model_loads_as_the_plain_class(speculating, draft, tmp_path):
    speculating.generate(**left_padded([6, 2]), assistant_model=draft, max_new_tokens=4)
    speculating.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert type(loaded) is LlamaForCausalLM
    assert loaded.config._attn_implementation == "sdpa"
    torch.testing.assert_close(loaded.state_dict(), speculating.state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_speculation_and_weights(draft, duplicate):
    plain = make_model()  # not the shared one: after a pass for hidden states no model can be pickled
    speculating = enable_speculation(copy.deepcopy(plain))
    speculating.generate(**left_padded([6, 2]), assistant_model=draft, max_new_tokens=4)
    other = duplicate(speculating)
    assert type(other) is type(speculating) and other is not speculating
    torch.testing.assert_close(other.state_dict(), speculating.state_dict(), atol=0, rtol=0)
    with torch.no_grad():
        other.lm_head.weight.zero_()  # its own weights, not shared ones
    batch, settings = left_padded([6, 2]), {"assistant_model": draft, "max_new_tokens": 12}
    expected = plain.generate(**batch, max_new_tokens=12)
    assert speculating.generate(**batch, **settings).tolist() == expected.tolist()
    assert other.generate(**batch, **settings).tolist() != expected.tolist()
    assert type(disable_speculation(other)) is LlamaForCausalLM
    assert type(speculating) is not LlamaForCausalLM


def test_threads_share_a_model(llama, draft, speculating):
    batches = [left_padded(ragged_lengths(3, seed), seed) for seed in range(6)]
    expected = [llama.generate(**batch, max_new_tokens=24).tolist() for batch in batches]
    actual = [None] * len(batches)
    barrier = threading.Barrier(3)

    def work(indices, drafting):
        barrier.wait()
        for index in indices:
            actual[index] = speculating.generate(**batches[index], max_new_tokens=24, **drafting).tolist()

    jobs = [((0, 1), {"assistant_model": draft}), ((2, 3), {"prompt_lookup_num_tokens": 3}), ((4, 5), {})]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert actual == expected
    assert speculating.config._attn_implementation == draft.config._attn_implementation == "sdpa"


def test_greedy_call_leaves_flags_configs_and_random_state(llama, draft, speculating):
    speculating.train()
    speculating.model.layers[1].eval()
    models = speculating, draft

    def state():
        return [
            [[module.training for module in model.modules()] for model in models],
            [(repr(model.config), repr(model.generation_config)) for model in models],
            [(model.config._attn_implementation, model.config.use_cache) for model in models],
            torch.get_rng_state().tolist(),
        ]

    speculating.config.use_cache = False  # as Trainer leaves it
    before = state()
    batch = left_padded([6, 2])
    actual = speculating.generate(**batch, assistant_model=draft, max_new_tokens=16, use_cache=True)
    assert state() == before
    assert actual.tolist() == llama.generate(**batch, max_new_tokens=16).tolist()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_failure_in_a_call_leaves_the_attention_as_it_was(attention):
    plain = make_model(attn_implementation=attention)
    model, draft = enable_speculation(copy.deepcopy(plain)), noisy_copy(plain)
    batch, used = left_padded([6, 2]), set()

    def fail(rows, candidates, verification):
        used.add(model.config._attn_implementation)
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        model.generate(**batch, assistant_model=draft, on_round=fail)
    assert used == {"hf_specgen_grouped" if attention == "sdpa" else "eager"}
    assert model.config._attn_implementation == draft.config._attn_implementation == attention
    actual = model.generate(**batch, assistant_model=draft, max_new_tokens=16)
    assert actual.tolist() == plain.generate(**batch, max_new_tokens=16).tolist()


def test_copy_of_a_model_that_another_library_subclassed(llama):
    model = enable_speculation(copy.deepcopy(llama))
    model.__class__ = type("Wrapped", (type("Mixin", (), {}), type(model)), {})
    batch = left_padded([6])
    copied = copy.deepcopy(model)
    assert torch.equal(
        copied.generate(**batch, max_new_tokens=8, prompt_lookup_num_tokens=3),
        llama.generate(**batch, max_new_tokens=8),
    )


def test_statistics_are_those_of_the_last_call(llama):
    model, batch = enable_speculation(copy.deepcopy(llama)), left_padded([6])
    assert model.speculation_stats is None
    model.generate(**batch, max_new_tokens=8, prompt_lookup_num_tokens=3)
    assert model.speculation_stats.tokens == 8
    model.generate(**batch, max_new_tokens=8)
    assert model.speculation_stats is None


@pytest.mark.slow
def test_classes_made_on_the_fly_are_freed_with_their_models(llama):
    alive = []
    for number in range(20):
        model_class = type(f"Made{number}", (LlamaForCausalLM,), {})
        model = enable_speculation(model_class(llama.config).eval())
        model.generate(**left_padded([4]), prompt_lookup_num_tokens=2, max_new_tokens=2)
        alive += [weakref.ref(model_class), weakref.ref(type(model))]
        del model, model_class
    gc.collect()
    gc.collect()  # a class is freed behind its subclass
    assert [reference for reference in alive if reference() is not None] == []
