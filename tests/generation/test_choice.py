"""Which drafter a call gets, with which settings."""

import copy
import string

import pytest
import torch
from transformers import GenerationConfig

from hf_specgen import (
    UndecodableMask,
    enable_speculation,
)
from tests.support.models import (
    EOS,
    PAD,
    assert_partly_accepted,
    assert_same_as_plain,
    character_tokenizer,
    left_padded,
    make_model,
    noisy_copy,
)


@pytest.fixture(scope="module")
def draft(llama):
    return noisy_copy(llama)


@pytest.fixture
def speculating(llama):
    return enable_speculation(copy.deepcopy(llama))


@pytest.mark.parametrize("place", ["call", "generation_config", "target", "draft"])
def test_assistant_settings_are_honoured_and_not_written_back(llama, place):
    batch = left_padded([6, 2])
    for wanted in (
        {"num_assistant_tokens": 1},
        {"num_assistant_tokens": 7},
        {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "heuristic"},
        {"num_assistant_tokens": 7, "assistant_confidence_threshold": 0.9},
    ):
        target, draft = enable_speculation(copy.deepcopy(llama)), noisy_copy(llama)
        owner = {"target": target, "draft": draft}.get(place)
        if owner is not None:
            owner.generation_config.update(**wanted)
        given = dict(wanted) if place == "call" else {"max_new_tokens": 24}
        if place == "generation_config":
            given = {"generation_config": GenerationConfig(max_new_tokens=24, **wanted)}
        before = [repr(vars(config)) for config in configs_of(target, draft, given)]
        ids = target.generate(**batch, assistant_model=draft, trace=True, **{"max_new_tokens": 24} | given)
        assert [repr(vars(config)) for config in configs_of(target, draft, given)] == before
        assert ids.tolist() == llama.generate(**batch, max_new_tokens=24).tolist()
        assert_partly_accepted(target.speculation_stats)
        check_block_sizes(wanted, [len(trace.proposed) for trace in target.speculation_stats.traces])


def configs_of(target, draft, given):
    return [m.generation_config for m in (target, draft)] + [g for g in given.values() if hasattr(g, "to_dict")]


def check_block_sizes(wanted, sizes):
    if "num_assistant_tokens_schedule" in wanted:
        assert sizes[0] == 4 and max(sizes) > 4 and min(sizes) < 4
    elif "assistant_confidence_threshold" in wanted:
        assert max(sizes[:4]) < 7
    else:
        assert set(sizes[:2]) == {max(sizes)} == {wanted["num_assistant_tokens"]}


# Vocabularies


def padded_vocabulary(model, size):
    resized = copy.deepcopy(model)
    resized.resize_token_embeddings(size, mean_resizing=False)
    return resized


@pytest.mark.parametrize("sizes", [(64, 72), (72, 64)], ids=str)
def test_vocabularies_padded_to_different_sizes(llama, draft, sizes):
    target, other = padded_vocabulary(llama, sizes[0]), padded_vocabulary(draft, sizes[1])
    batch = left_padded([5, 2, 8])
    decodable = {"logits_processor": [UndecodableMask(64, PAD, EOS)], "max_new_tokens": 24}
    stats = assert_same_as_plain(target, batch, {"assistant_model": other}, **decodable)
    assert_partly_accepted(stats)
    speculating, texts, sampled = enable_speculation(target), [], []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        texts.append(speculating.generate(**batch, assistant_model=other, do_sample=True, **decodable).tolist())
        sampled.append(speculating.speculation_stats)
    assert texts[0] == texts[2] != texts[1]
    assert max(map(max, texts[0] + texts[1])) < 64
    assert_partly_accepted(*sampled)


def test_draft_with_another_tokenizer_goes_to_transformers_or_is_refused(llama):
    target_tokenizer = character_tokenizer(string.ascii_letters + string.digits + "+-")
    draft_tokenizer = character_tokenizer("-+" + string.digits[::-1] + string.ascii_letters[::-1] + "@$%&")
    other = make_model("llama", vocab_size=68)
    settings = {"max_new_tokens": 12, "tokenizer": target_tokenizer}
    speculating = enable_speculation(copy.deepcopy(llama))
    batch = left_padded([6])
    actual = speculating.generate(**batch, assistant_model=other, assistant_tokenizer=draft_tokenizer, **settings)
    assert actual.tolist() == llama.generate(**batch, **settings).tolist()
    assert speculating.speculation_stats is None, "our loop cannot translate between tokenizers"
    with pytest.raises(ValueError, match="another tokenizer"):
        speculating.generate(
            **left_padded([6, 3]), assistant_model=other, assistant_tokenizer=draft_tokenizer, **settings
        )
