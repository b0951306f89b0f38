"""DSpark as `assistant_model` of a target that nobody prepared, in transformers' own loop: equality, refusals."""

import copy
import gc

import pytest
import torch
from torch.nn.modules import module as torch_module
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, StaticCache, pipeline

from hf_specgen import DSparkModel, FrequencyPenalty, enable_speculation
from tests.support.dspark_models import HEADS, bigram_target, fitted_drafter
from tests.support.generate_calls import TOKENIZER, RecordingStreamer, generated
from tests.support.models import PAD, left_padded

BLOCK = 4
DICT_OUTPUT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Leaves what is there already out of the collections below."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def target():
    return bigram_target()


@pytest.fixture(scope="module")
def drafts(target):
    return {head: fitted_drafter(target, head) for head in HEADS}


@pytest.fixture
def draft(drafts):
    """Its attributes may be changed."""
    return copy.deepcopy(drafts["gated"])


class OutOfLuck(Exception):
    pass


class RoundSizes(RecordingStreamer):
    """How many tokens each round gave."""

    @property
    def sizes(self):
        return [len(put[0]) if isinstance(put[0], list) else len(put) for put in self.puts[1:]]


def decode(target, draft, batch=None, **settings):
    """Generates through the stock entry point; the ids and the sizes of the rounds."""
    batch = left_padded([6]) if batch is None else batch
    settings = {"max_new_tokens": 24, "streamer": RoundSizes(), **settings}
    ids = target.generate(**batch, assistant_model=draft, **settings)
    return ids, settings["streamer"].sizes


def assert_partly_kept(sizes: list[int]) -> None:
    print(f"\n{sum(sizes) / len(sizes):.2f} tokens per round")
    assert 1 in sizes and max(sizes) > 1, "nothing or everything was accepted"


def hooks_of(model) -> list:
    """Hooks on modules of a model and on all modules; those apart that transformers leaves to read hidden states."""
    tables = [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
    for module in model.modules():
        tables += [module._forward_pre_hooks, module._forward_hooks]
    hooks = [hook for table in tables for hook in table.values()]
    return [hook for hook in hooks if hook.__module__ != "transformers.utils.output_capturing"]


# Equality


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("head", HEADS)
def test_greedy_equals_plain_generate(target, drafts, head, threshold):
    draft, all_sizes = copy.deepcopy(drafts[head]), []
    draft.confidence_threshold = threshold
    for seed in range(3):
        batch = left_padded([1 + 4 * seed], seed=seed)
        ids, sizes = decode(target, draft, batch)
        assert ids.tolist() == target.generate(**batch, max_new_tokens=24).tolist()
        all_sizes += sizes
    if threshold == 1.0:  # no confidence is that high
        assert set(all_sizes) == {1}
    else:
        assert_partly_kept(all_sizes)


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2}], ids=str)
@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("head", HEADS)
def test_rounds_are_those_of_our_own_loop(target, drafts, head, threshold, settings):
    draft, speculating = copy.deepcopy(drafts[head]), enable_speculation(copy.deepcopy(target))
    draft.confidence_threshold = threshold
    for seed in range(2):
        batch = left_padded([2 + 7 * seed], seed=seed)
        ids, sizes = decode(target, draft, batch, **settings)
        expected = speculating.generate(**batch, assistant_model=draft, max_new_tokens=24, trace=True, **settings)
        assert ids.tolist() == expected.tolist()
        traces = speculating.speculation_stats.traces
        emitted = [trace.num_accepted + (trace.next_token_id is not None) for trace in traces]
        assert sizes == [1, *emitted], "the prefill gives the first token"
        assert 0 < speculating.speculation_stats.acceptance_rate < 1


@pytest.mark.parametrize(
    "settings",
    [
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.4},
        {"logits_processor": [FrequencyPenalty(2.0)]},
        {"min_new_tokens": 12, "eos_token_id": list(range(2, 40))},
        {"bad_words_ids": [[28], [60], [25, 25]], "suppress_tokens": list(range(3, 30))},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_processors_equal_plain_generate(target, drafts, settings):
    all_sizes, has_effect = [], False
    for seed, head in enumerate(HEADS):
        batch = left_padded([6], seed=seed)
        ids, sizes = decode(target, drafts[head], batch, **settings)
        assert ids.tolist() == target.generate(**batch, max_new_tokens=24, **settings).tolist()
        without = {name: value for name, value in settings.items() if name == "eos_token_id"}
        has_effect |= ids.tolist() != target.generate(**batch, max_new_tokens=24, **without).tolist()
        all_sizes += sizes
    assert has_effect, "the option changes nothing here"
    assert_partly_kept(all_sizes)


def test_left_padding_is_no_context(target, draft):
    for seed in range(3):
        batch = left_padded([5], seed=seed)
        padded = {
            "input_ids": torch.nn.functional.pad(batch["input_ids"], (4, 0), value=PAD),
            "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (4, 0), value=0),
        }
        expected, expected_sizes = decode(target, draft, batch)
        ids, sizes = decode(target, draft, padded)
        assert ids[:, 4:].tolist() == expected.tolist()
        assert sizes == expected_sizes
        assert_partly_kept(sizes)


@pytest.mark.slow
def test_eos_at_every_place(target):
    good_draft, ends = fitted_drafter(target, "vanilla", noise=0.1, markov_rank=32), set()
    for seed in range(3):
        batch = left_padded([6], seed=seed)
        text = generated(target, batch, 14)
        for eos in dict.fromkeys(text):
            settings = {"eos_token_id": eos, "max_new_tokens": 14}
            ids, sizes = decode(target, good_draft, batch, **settings)
            assert ids.tolist() == target.generate(**batch, **settings).tolist()
            ends.add((len(sizes) > 1, sizes[-1]))
    assert ends >= {(False, 1), *((True, size) for size in range(1, BLOCK + 2))}


@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_budget(target, draft, budget):
    for seed in range(3):
        batch = left_padded([6], seed=seed)
        ids, _ = decode(target, draft, batch, max_new_tokens=budget)
        assert ids.tolist() == target.generate(**batch, max_new_tokens=budget).tolist()


def test_dict_output_equals_plain_generate(target, draft):
    batch, settings = left_padded([6]), {"output_hidden_states": True, "repetition_penalty": 1.2, **DICT_OUTPUT}
    expected = target.generate(**batch, max_new_tokens=24, **settings)
    actual, sizes = decode(target, draft, batch, **settings)
    assert actual.sequences.tolist() == expected.sequences.tolist()
    assert_partly_kept(sizes)
    for name in ("scores", "logits"):
        assert len(actual[name]) == 24
        torch.testing.assert_close(actual[name], expected[name], atol=1e-4, rtol=0)
    assert len(actual.hidden_states) == 24
    torch.testing.assert_close(actual.hidden_states, expected.hidden_states, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["static", "own static", "own dynamic"])
def test_other_caches(target, draft, kind):
    batch = left_padded([6])
    caches = {
        "static": lambda: {"cache_implementation": "static"},
        "own static": lambda: {"cache": StaticCache(config=target.config, max_cache_len=64)},
        "own dynamic": lambda: {"cache": DynamicCache(config=target.config)},
    }
    ids, sizes = decode(target, draft, batch, **caches[kind]())
    assert ids.tolist() == target.generate(**batch, max_new_tokens=24).tolist()
    assert_partly_kept(sizes)


def test_families_with_windows_shorter_than_the_text():
    for family in ("mistral", "gemma3", "qwen3"):
        model = bigram_target(family)
        batch = left_padded([12])
        ids, sizes = decode(model, fitted_drafter(model, "vanilla"), batch)
        assert ids.tolist() == model.generate(**batch, max_new_tokens=24).tolist()
        assert_partly_kept(sizes)


def test_text_longer_than_the_cache_first_is(target, draft):
    batch, settings = left_padded([6]), {"max_new_tokens": 160, "eos_token_id": None}
    ids, sizes = decode(target, draft, batch, **settings)
    assert ids.tolist() == target.generate(**batch, **settings).tolist()
    assert ids.shape[1] == 166
    assert_partly_kept(sizes)


def test_text_may_hold_the_mask_token(target):
    batch = left_padded([6])
    draft = fitted_drafter(target, "vanilla")
    draft.config.mask_token_id = generated(target, batch)[0]
    ids, sizes = decode(target, draft, batch)
    assert ids.tolist() == target.generate(**batch, max_new_tokens=24).tolist()
    assert_partly_kept(sizes)


def test_drafter_without_tables_of_its_own(target, draft):
    batch = left_padded([6])
    expected, expected_sizes = decode(target, draft, batch)
    draft.embed_tokens = draft.lm_head = None
    ids, sizes = decode(target, draft, batch)
    assert (ids.tolist(), sizes) == (expected.tolist(), expected_sizes)


def test_compiled_target(target, draft):
    batch = left_padded([6])
    ids, sizes = decode(torch.compile(copy.deepcopy(target), backend="eager"), draft, batch)
    assert ids.tolist() == target.generate(**batch, max_new_tokens=24).tolist()
    assert_partly_kept(sizes)


def test_masked_columns_inside_a_prompt_are_no_context(target, draft):
    speculating = enable_speculation(copy.deepcopy(target))
    for seed in range(3):
        batch = left_padded([9], seed=seed)
        batch["attention_mask"][0, 6] = 0
        ids, sizes = decode(target, draft, batch)
        assert ids.tolist() == target.generate(**batch, max_new_tokens=24).tolist()
        speculating.generate(**batch, assistant_model=draft, max_new_tokens=24, trace=True)
        traces = speculating.speculation_stats.traces
        assert sizes == [1, *(trace.num_accepted + (trace.next_token_id is not None) for trace in traces)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_are_those_of_the_processed_logits_once(target, draft, monkeypatch, dtype):
    """What the loop takes for a candidate's distribution is that of its corrected logits behind those before it."""
    corrected, outputs = [], []
    unroll, generate = DSparkModel.unroll, DSparkModel.generate

    def recording_unroll(this, states, base_logits, anchor_ids, choose, has_confidence=True):
        corrected.append([])

        def recording_choose(index, logits):
            corrected[-1].append(logits.clone())
            return choose(index, logits)

        return unroll(this, states, base_logits, anchor_ids, recording_choose, has_confidence)

    def recording_generate(this, input_ids, **kwargs):
        outputs.append((input_ids.shape[1], generate(this, input_ids, **kwargs)))
        return outputs[-1][1]

    monkeypatch.setattr(DSparkModel, "unroll", recording_unroll)
    monkeypatch.setattr(DSparkModel, "generate", recording_generate)
    torch.manual_seed(0)
    settings = {"temperature": 0.7, "top_k": 0, "logits_processor": [FrequencyPenalty(0.5)]}
    _, sizes = decode(copy.deepcopy(target).to(dtype), draft.to(dtype), do_sample=True, **settings)
    assert len(outputs) > len(corrected) > 5
    for (length, output), block in zip(outputs[1:], corrected):
        assert len(output.scores) == len(block) == output.sequences.shape[1] - length
        for index, (scores, logits) in enumerate(zip(output.scores, block)):
            assert scores.dtype == torch.float32
            counts = torch.bincount(output.sequences[0, : length + index], minlength=64)
            torch.testing.assert_close(scores[0], (logits[0] - 0.5 * counts) / 0.7)
    assert_partly_kept(sizes)


class AllowsOnly(LogitsProcessor):
    """Every fourth token has to be one of some ids."""

    def __init__(self, token_ids):
        self.token_ids = token_ids

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 4:
            return scores
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.token_ids] = scores[:, self.token_ids]
        return masked


def test_processor_may_leave_no_drafted_token(target):
    draft = fitted_drafter(target, "vanilla", draft_vocab_size=40)
    others = (~draft.t2d).nonzero()[:, 0].tolist()
    settings = {"logits_processor": [AllowsOnly(others)]}
    ids, _ = decode(target, draft, **settings)
    assert ids.tolist() == target.generate(**left_padded([6]), max_new_tokens=24, **settings).tolist()
    torch.manual_seed(0)
    ids, sizes = decode(target, draft, do_sample=True, **settings)
    assert set(ids[0, 8::4].tolist()) <= set(others)
    assert_partly_kept(sizes)


def test_constraint_does_not_have_to_know_the_mask_token(target, draft):
    follows = {token_id: [(token_id + step) % 61 + 3 for step in (1, 5, 9, 20, 33)] for token_id in range(3, 64)}

    def allowed(batch_id, input_ids):
        return follows.get(int(input_ids[-1]), [])  # as a trie has it: what was never allowed leads nowhere

    batch = left_padded([6])
    ids, _ = decode(target, draft, batch, prefix_allowed_tokens_fn=allowed)
    expected = target.generate(**batch, max_new_tokens=24, prefix_allowed_tokens_fn=allowed)
    assert ids.tolist() == expected.tolist()


def test_seed_gives_one_text(target, draft):
    texts = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        ids, sizes = decode(target, draft, do_sample=True, top_k=10)
        texts.append(ids.tolist())
        assert_partly_kept(sizes)
    assert texts[0] == texts[1] != texts[2]


def test_pipeline(target, drafts):
    settings = {
        "tokenizer": TOKENIZER,
        "max_new_tokens": 12,
        "do_sample": False,
        "clean_up_tokenization_spaces": False,
    }
    plain = pipeline("text-generation", model=copy.deepcopy(target), **settings)
    model = copy.deepcopy(target)
    assisted = pipeline("text-generation", model=model, assistant_model=drafts["vanilla"], **settings)
    sizes, forward = [], type(model).forward

    def count(module, args, kwargs):
        sizes.append(kwargs["input_ids"].shape[1])

    model.register_forward_pre_hook(count, with_kwargs=True)
    assert assisted("quickfox") == plain("quickfox")
    assert sizes[0] == 8 and max(sizes[1:]) == 1 + BLOCK, "the drafter was used"
    assert type(model).forward is forward


# Refusals


def test_stop_strings_are_refused_with_a_pointer(target, draft):
    with pytest.raises(ValueError, match="`stop_strings` are missed.*enable_speculation"):
        decode(target, draft, stop_strings=["ab"], tokenizer=TOKENIZER)
    assert hooks_of(target) == []


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_filled_cache_is_refused_with_a_pointer(target, draft, kind):
    batch = left_padded([9])
    cache = DynamicCache(config=target.config)
    if kind == "static":
        cache = StaticCache(config=target.config, max_cache_len=64)
    with torch.no_grad():
        target(input_ids=batch["input_ids"][:, :5], cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="`cache` that is not empty.*enable_speculation"):
        decode(target, draft, batch, cache=cache)
    gc.collect()
    assert hooks_of(target) == []
    ids, _ = decode(target, draft, batch)
    assert ids.tolist() == target.generate(**batch, max_new_tokens=24).tolist()


@pytest.mark.parametrize(
    "settings", [{}, {"max_new_tokens": 5}, {"generation_config": GenerationConfig(max_new_tokens=5)}], ids=str
)
def test_drafter_cannot_generate_alone(draft, settings):
    with pytest.raises(TypeError, match="cannot generate alone.*assistant_model=drafter"):
        draft.generate(torch.tensor([[3, 4, 5]]), **settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hidden_size": 48}, "made for a hidden size of 32, but `LlamaForCausalLM` has 48"),
        ({"num_hidden_layers": 3}, "made for a number of target layers of 2, but `LlamaForCausalLM` has 3"),
    ],
    ids=["width", "depth"],
)
def test_other_target_is_refused(draft, settings, sentence):
    other = bigram_target(**settings)
    with pytest.raises(ValueError, match=sentence):
        decode(other, draft)
    gc.collect()
    assert hooks_of(other) == []
    other.generate(**left_padded([4]), max_new_tokens=4)


def test_batch_is_refused_by_transformers(target, draft):
    with pytest.raises(ValueError, match="batch_size = 1"):
        target.generate(**left_padded([4, 6]), assistant_model=draft, max_new_tokens=4)


@pytest.mark.parametrize("count", [0, -1, 2.5, "a", True, 99])
def test_number_of_candidates_of_a_call_is_checked(target, draft, count):
    with pytest.raises((ValueError, TypeError), match="`num_assistant_tokens` has to be"):
        target.generate(**left_padded([6]), assistant_model=draft, max_new_tokens=8, num_assistant_tokens=count)


def test_threshold_of_a_call_replaces_that_of_the_drafter(target, draft):
    batch, sizes = left_padded([6]), {}
    for threshold in (0.0, 0.5, 0.8):
        draft.confidence_threshold = threshold
        ids, sizes[threshold] = decode(target, draft, batch)
        # 0.4 is what transformers fills in where the call says nothing.
        assert decode(target, draft, batch, assistant_confidence_threshold=0.4)[1] == sizes[threshold]
    for own in (0.0, 0.5):
        draft.confidence_threshold = own
        for threshold, expected in sizes.items():
            settings = {"generation_config": GenerationConfig(assistant_confidence_threshold=threshold)}
            for said in (settings, {"assistant_confidence_threshold": threshold}):
                again, found = decode(target, draft, batch, **said)
                assert found == expected and again.tolist() == ids.tolist()
    assert len(set(map(str, sizes.values()))) == 3, "the thresholds make a difference"


@pytest.mark.parametrize("threshold", [-0.1, 1.5, "0.5", True, float("nan")])
def test_threshold_of_a_call_is_checked_before_the_first_pass(target, draft, monkeypatch, threshold):
    monkeypatch.setattr(type(target), "forward", lambda *args, **kwargs: pytest.fail("a pass"))
    with pytest.raises(ValueError, match=r"`assistant_confidence_threshold` has to be in \[0, 1\], but is"):
        target.generate(
            **left_padded([6]), assistant_model=draft, max_new_tokens=8, assistant_confidence_threshold=threshold
        )


def test_threshold_of_a_call_needs_a_confidence_head(target):
    draft = fitted_drafter(target, enable_confidence_head=False, confidence_head_with_markov=False)
    with pytest.raises(ValueError, match="`confidence_threshold` is 0.5, but the drafter has no confidence head"):
        decode(target, draft, assistant_confidence_threshold=0.5)


def test_settings_that_transformers_would_rewrite_are_refused(target, draft):
    draft.generation_config.assistant_confidence_threshold = 0.9
    for model in (target, enable_speculation(copy.deepcopy(target))):
        with pytest.raises(ValueError, match="set `confidence_threshold` of the drafter itself"):
            model.generate(**left_padded([6]), assistant_model=draft, max_new_tokens=8)


def test_pass_that_never_came_leaves_no_tap_in_later_calls(target, draft, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("between the drafter and the target")

    own = copy.deepcopy(target)
    decode(own, draft)
    rounds = []

    def prepare(*args, **kwargs):
        rounds.append(1)
        return fail() if len(rounds) == 4 else type(own).prepare_inputs_for_generation(own, *args, **kwargs)

    monkeypatch.setattr(own, "prepare_inputs_for_generation", prepare)
    kept = None
    try:
        decode(own, draft)
    except RuntimeError as error:
        kept = error  # as a notebook keeps the last one
    assert kept is not None
    outputs = own.model(left_padded([6])["input_ids"], use_cache=True)
    assert outputs.hidden_states is None, "a pass of somebody else is not tapped"
