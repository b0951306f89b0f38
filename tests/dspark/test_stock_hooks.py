"""DSpark in transformers' own loop: what is computed, and that nothing is left behind on a target."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch.nn.modules import module as torch_module
from transformers import LogitsProcessor

from hf_specgen import DSparkModel
from hf_specgen.dspark import stock_assistant
from tests.support.dspark_models import HEADS, bigram_target, fitted_drafter
from tests.support.generate_calls import RecordingStreamer
from tests.support.models import left_padded, noisy_copy

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


# What is computed


def test_one_pass_of_each_model_per_round_and_context_once(target, draft, monkeypatch):
    asked, written, blocks = [], [], []
    own, write_context, forward = copy.deepcopy(target), DSparkModel.write_context, DSparkModel.forward

    def recording_write(this, target_states, cache, position_ids):
        written.extend(position_ids[0].tolist())
        return write_context(this, target_states, cache, position_ids)

    def recording_forward(this, input_ids, *args, **kwargs):
        blocks.append(tuple(input_ids.shape))
        return forward(this, input_ids, *args, **kwargs)

    monkeypatch.setattr(DSparkModel, "write_context", recording_write)
    monkeypatch.setattr(DSparkModel, "forward", recording_forward)
    own.get_decoder().register_forward_hook(
        lambda module, args, kwargs, outputs: asked.append(
            (kwargs.get("output_hidden_states"), [states is not None for states in outputs.hidden_states or ()])
        ),
        with_kwargs=True,
    )
    ids, sizes = decode(own, draft)
    num_drafts = len(sizes) - 1 - (sizes[-1] == 1 and sum(sizes[:-1]) == 23)  # none for the last token of the budget
    assert blocks == [(1, BLOCK)] * num_drafts
    assert len(asked) == len(sizes), "no second prefill"
    assert all(wanted == [0, 1] and given == [True, True, False] for wanted, given in asked[:num_drafts])
    assert written == list(range(len(written))), "a position is written once, in order"
    assert len(written) >= 6 + sum(sizes[:-2])
    assert_partly_kept(sizes)


@torch.no_grad()
def test_context_is_that_of_the_accepted_tokens(target, draft, monkeypatch):
    """Behind each block the session's context is that of all tokens but the last."""
    checked, draft_method = [], stock_assistant.Session.draft

    def checking(session, choice, max_new_tokens):
        text = choice.input_ids[:, :-1]
        states = target(input_ids=text, output_hidden_states=True).hidden_states
        features = draft.context_features(torch.cat([states[i + 1] for i in draft.config.target_layer_ids], dim=-1))
        rotary = draft.rotary_emb(torch.arange(text.shape[1])[None], features.dtype)
        assert int(session.context.lengths[0]) == text.shape[1]
        for layer, stored in zip(draft.layers, session.context.layers):
            keys, values = layer.self_attn.keys_values(features, rotary)
            torch.testing.assert_close(stored.keys[:, :, : text.shape[1]], keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(stored.values[:, :, : text.shape[1]], values, atol=1e-4, rtol=1e-4)
        checked.append(text.shape[1])
        return draft_method(session, choice, max_new_tokens)

    monkeypatch.setattr(stock_assistant.Session, "draft", checking)
    _, sizes = decode(target, draft)
    assert len(checked) > 5
    assert_partly_kept(sizes)


def test_threshold_cuts_the_blocks(target, drafts):
    draft, sizes = copy.deepcopy(drafts["vanilla"]), {}
    for threshold in (0.0, 0.5):
        draft.confidence_threshold = threshold
        passes, own = [], copy.deepcopy(target)
        own.register_forward_pre_hook(
            lambda module, args, kwargs, passes=passes: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        decode(own, draft)
        sizes[threshold] = passes[1:]
    assert set(sizes[0.0][:-3]) == {1 + BLOCK}
    assert set(sizes[0.5][:-3]) >= {1, 2, 1 + BLOCK}, "where nothing is left the target takes a plain step"


@pytest.mark.parametrize("place", ["drafter", "call"])
def test_number_of_candidates_cuts_the_blocks(target, draft, place):
    settings = {"num_assistant_tokens": 2} if place == "call" else {}
    if place == "drafter":
        draft.generation_config.num_assistant_tokens = 2
    batch = left_padded([6])
    ids, sizes = decode(target, draft, batch, **settings)
    assert ids.tolist() == target.generate(**batch, max_new_tokens=24).tolist()
    assert max(sizes) == 3
    assert_partly_kept(sizes)


def test_threshold_without_a_confidence_head_is_refused(target):
    draft = fitted_drafter(target, "vanilla", enable_confidence_head=False)
    decode(target, draft)
    draft.confidence_threshold = 0.5
    with pytest.raises(ValueError, match="`confidence_threshold` is 0.5, but the drafter has no confidence head"):
        decode(target, draft)


# What is left behind


def state_of(model):
    """All that a call could change in a model."""
    return (
        type(model),
        list(vars(model)),
        {id(module): list(vars(module)) for module in model.modules()},
        repr(model.config),
        repr(model.generation_config),
        [module.training for module in model.modules()],
        hooks_of(model),
        model.config._attn_implementation,
    )


class Failing(LogitsProcessor):
    def __init__(self, call):
        self.calls_left = call

    def __call__(self, input_ids, scores):
        self.calls_left -= 1
        if self.calls_left < 0:
            raise OutOfLuck
        return scores


class FailingStreamer(RecordingStreamer):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def put(self, value):
        super().put(value)
        if len(self.puts) > self.call:
            raise OutOfLuck


def failing_method(model, name, call):
    """Makes a method of a model raise from its `call`-th call on; returns what restores it."""
    method, calls = getattr(model, name), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) > call:
            raise OutOfLuck
        return method(*args, **kwargs)

    setattr(model, name, wrapped)
    return lambda: delattr(model, name)


@pytest.mark.parametrize("call", [0, 2])
@pytest.mark.parametrize(
    "place", ["processor", "streamer", "prepare_inputs_for_generation", "forward", "layer", "none"]
)
def test_target_and_drafter_stay_as_they_were(target, draft, place, call):
    own = copy.deepcopy(target)
    own.generate(**left_padded([6]), max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)
    before, random_state = [state_of(own), state_of(draft)], torch.get_rng_state()
    settings, restore = {}, lambda: None
    if place == "processor":
        settings["logits_processor"] = [Failing(3 * call)]
    elif place == "streamer":
        settings["streamer"] = FailingStreamer(call)
    elif place == "layer":
        restore = failing_method(own.model.layers[0].mlp, "forward", call)
    elif place != "none":
        restore = failing_method(own, place, call)
    batch = left_padded([6])
    if place == "none":
        own.generate(**batch, assistant_model=draft, max_new_tokens=12)
    else:
        with pytest.raises(OutOfLuck) as caught:
            own.generate(**batch, assistant_model=draft, max_new_tokens=12, **settings)
        if place in ("layer", "processor", "streamer"):
            assert hooks_of(own) == [], "not even while somebody keeps the error"
        del caught
    restore()
    gc.collect()
    assert [state_of(own), state_of(draft)] == before
    assert torch.equal(torch.get_rng_state(), random_state), "greedy decoding draws nothing"
    ids, sizes = decode(own, draft)
    assert ids.tolist() == target.generate(**batch, max_new_tokens=24).tolist()
    assert_partly_kept(sizes)


def test_sessions_are_collected(target, draft, monkeypatch):
    sessions = []

    class WatchedSession(stock_assistant.Session):
        def __init__(self, model):
            super().__init__(model)
            sessions.append(weakref.ref(self))

    monkeypatch.setattr(stock_assistant, "Session", WatchedSession)
    decode(target, draft)
    with pytest.raises(OutOfLuck):
        decode(target, draft, logits_processor=[Failing(9)])
    output, _ = decode(target, draft, **DICT_OUTPUT)
    gc.collect()
    assert len(sessions) == 3 and output is not None
    assert [session() for session in sessions] == [None] * 3


def test_generation_configs_are_unchanged_by_thresholds_and_counts(target, draft):
    draft.confidence_threshold = 0.5
    before = [model.generation_config.to_dict() for model in (target, draft)]
    for _ in range(3):
        decode(target, draft)
    assert [model.generation_config.to_dict() for model in (target, draft)] == before
    assert draft.confidence_threshold == 0.5


@pytest.mark.slow
def test_targets_may_alternate(target, draft):
    """Whole calls in turn, and one call inside a round of another."""
    other = noisy_copy(target, 0.1)
    for seed in range(3):
        batch = left_padded([6], seed=seed)
        for model in (target, other):
            ids, sizes = decode(model, draft, batch)
            assert ids.tolist() == model.generate(**batch, max_new_tokens=24).tolist()
            assert_partly_kept(sizes)
    batch, inner = left_padded([6]), []
    assert target.generate(**batch, max_new_tokens=24).tolist() != other.generate(**batch, max_new_tokens=24).tolist()

    class Nested(RoundSizes):
        def put(self, value):
            super().put(value)
            inner.append(decode(other, draft, batch)[0].tolist())

    streamer = Nested()
    ids = target.generate(**batch, assistant_model=draft, streamer=streamer, max_new_tokens=24)
    assert ids.tolist() == target.generate(**batch, max_new_tokens=24).tolist()
    expected = other.generate(**batch, max_new_tokens=24).tolist()
    assert len(inner) > 3 and all(text == expected for text in inner)
    assert_partly_kept(streamer.sizes)


@pytest.mark.parametrize("place", ["processor", "streamer"])
def test_target_may_be_called_between_its_passes(target, draft, place):
    """As classifier-free guidance does: what these passes compute is nobody's context."""
    seen = []

    def call(*args):
        assert hooks_of(target) == [], "hooks are there for the awaited pass only"
        seen.append(target(input_ids=torch.tensor([[3, 4, 5, 6, 7, 8, 9]])).logits)
        return args[-1]

    class Calling(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return call(scores)

    class CallingStreamer(RoundSizes):
        def put(self, value):
            super().put(call(value))

    expected, expected_sizes = decode(target, draft)
    streamer = CallingStreamer() if place == "streamer" else RoundSizes()
    processors = [Calling()] if place == "processor" else []
    ids, _ = decode(target, draft, streamer=streamer, logits_processor=processors)
    assert len(seen) >= len(expected_sizes)
    assert (ids.tolist(), streamer.sizes) == (expected.tolist(), expected_sizes)
    assert_partly_kept(streamer.sizes)


def test_threads_share_target_and_drafter(target, draft):
    batches = [left_padded([3 + seed], seed=seed) for seed in range(6)]
    expected = [target.generate(**batch, max_new_tokens=24).tolist() for batch in batches]
    alone = [decode(target, draft, batch)[1] for batch in batches]
    found, sizes, errors, barrier = [None] * 6, [None] * 6, [], threading.Barrier(3)

    def work(first):
        barrier.wait()
        try:
            for index in (first, first + 3):
                ids, sizes[index] = decode(target, draft, batches[index])
                found[index] = ids.tolist()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert found == expected
    assert sizes == alone, "each call draws its candidates from its own context"
    assert hooks_of(target) == []
    assert_partly_kept(sum(alone, []))


def test_copies_after_use(target, draft):
    batch = left_padded([6])
    own = copy.deepcopy(target)
    decode(own, draft, batch)
    other, other_draft = copy.deepcopy(own), copy.deepcopy(draft)
    ids, sizes = decode(other, other_draft, batch)
    assert ids.tolist() == target.generate(**batch, max_new_tokens=24).tolist()
    assert_partly_kept(sizes)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert decode(own, draft, batch)[0].tolist() == ids.tolist()


def test_copy_of_a_target_made_inside_a_call(target, draft):
    """Its hooks, if there are any at that moment, are no longer of use in the copy."""
    copies, own = [], copy.deepcopy(target)

    class Copying(LogitsProcessor):
        def __call__(self, input_ids, scores):
            copies.append(copy.deepcopy(own))
            return scores

    ids, _ = decode(own, draft, max_new_tokens=6, logits_processor=[Copying()])
    gc.collect()
    for other in copies[:8]:
        again, sizes = decode(other, draft)
        assert again[:, : ids.shape[1]].tolist() == ids.tolist()
        assert_partly_kept(sizes)
