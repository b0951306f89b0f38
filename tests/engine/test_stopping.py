import copy
import time

import pytest
import torch
from transformers import MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from hf_specgen import CausalLMDrafter, Decoder, DecodingRules, Request, enable_speculation
from hf_specgen.engine.criteria import apply_criteria
from hf_specgen.engine.request import PaddedBatch
from hf_specgen.engine.results import RowResult
from hf_specgen.engine.stopping import apply_stops
from tests.support.models import character_tokenizer, cycle_model, left_padded, make_model, noisy_copy

LETTERS = "?abcdefghijklmnopqrstu"  # the id of a letter is its place; 0 is no letter
ALPHABET = [0, *range(2, 21), 1, 21]  # what follows each id: the first 20 letters in a cycle
TOKENIZER = character_tokenizer(LETTERS)


def ids_of(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def stop_at(*strings: str) -> StopStringCriteria:
    return StopStringCriteria(TOKENIZER, list(strings))


class Seen(StoppingCriteria):
    """Stops after certain ids, as a tensor for the rows or as one boolean; remembers what it was called with."""

    def __init__(self, *stops: str, is_tensor: bool = True):
        self.stops, self.is_tensor, self.calls = set(ids_of("".join(stops))), is_tensor, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.clone())
        found = [row[-1] in self.stops for row in input_ids.tolist()]
        return torch.tensor(found) if self.is_tensor else found[0]


def request(prompt="ab", generated="", max_new_tokens=20, eos="", criteria=(), like=None, row=0) -> Request:
    """A request that is being decoded; on its own, or in the batch of another one."""
    rules = DecodingRules(stopping_criteria=StoppingCriteriaList(criteria), eos_token_ids=frozenset(ids_of(eos)))
    rules, batch = (rules, None) if like is None else like
    made = Request(ids_of(prompt), max_new_tokens, rules, batch=batch, batch_row=row)
    made.start(torch.device("cpu"))
    if generated:
        made.commit(ids_of(generated))
    if made.is_alone:
        made.batch.num_judged = len(generated)
    return made


def cut(requests: list[Request], token_lists: list[list[int]]) -> list[tuple[int, str | None]]:
    """How many of its new tokens each request takes in a round, and its finish reason."""
    for made in (other for one in requests for other in one.batch.requests):
        made.status = "decoding" if made.finish_reason is None else made.status
    starts = [len(made.token_ids) for made in requests]
    results = [
        RowResult(row, made, start, [], 0, tokens)
        for row, (made, start, tokens) in enumerate(zip(requests, starts, token_lists))
    ]
    for result in apply_stops(results):
        result.request.commit(result.token_ids)
        if result.finish_reason is not None:
            result.request.finish(result.finish_reason, error=result.error)
    for batch in {id(made.batch): made.batch for made in requests}.values():
        apply_criteria(batch)
    return [(len(made.token_ids) - start, made.finish_reason) for made, start in zip(requests, starts)]


def cut_one(made: Request, tokens: str) -> tuple[int, str | None]:
    return cut([made], [ids_of(tokens)])[0]


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("eos", {"eos": "st"}),
        ("stop", {"criteria": [stop_at("s")]}),
        ("criteria", {"criteria": [Seen("s")]}),
        ("criteria", {"criteria": [Seen("s", is_tensor=False)]}),
    ],
    ids=["eos", "stop string", "criterion", "criterion with one answer"],
)
def test_row_ends_at_any_place_of_a_block(place, reason, settings):
    block = "abcde"[:place] + "s" + "abcde"[place:]
    for generated in ("", "cd"):
        assert cut_one(request(generated=generated, **settings), block) == (place + 1, reason)
        assert cut_one(request(generated=generated, **settings), "abcde") == (5, None)


@pytest.mark.parametrize("budget", range(1, 8))
def test_budget_ends_a_row(budget):
    made = request(max_new_tokens=budget + 2, generated="cd")
    assert cut_one(made, "abcde") == ((5, None) if budget > 5 else (budget, "length"))


def test_earliest_wins():
    everything = {"eos": "e", "criteria": [stop_at("s"), Seen("c")], "max_new_tokens": 4}
    blocks = {"escab": (1, "eos"), "secab": (1, "stop"), "csea": (1, "criteria"), "aabbe": (4, "length")}
    for block, expected in blocks.items():
        assert cut_one(request(**everything), block) == expected
    blocks = {
        "aes": (2, "eos"),
        "ase": (2, "stop"),
        "ace": (2, "criteria"),
        "acs": (2, "criteria"),
        "aaab": (4, "length"),
    }
    for block, expected in blocks.items():
        assert cut_one(request(**everything), block) == expected


def test_at_one_token_eos_is_named_first_and_the_budget_last():
    assert cut_one(request(eos="s", criteria=[stop_at("s"), Seen("s")], max_new_tokens=2), "as") == (2, "eos")
    assert cut_one(request(criteria=[stop_at("s")], max_new_tokens=2), "as") == (2, "stop")
    assert cut_one(request(criteria=[stop_at("s"), Seen("s")]), "as") == (2, "stop")


@pytest.mark.parametrize("window", ["cd", "bcd", "de", "abcde", "ef", "b", "f"])
@pytest.mark.parametrize("num_committed", range(4))
def test_stop_string_may_begin_in_the_prompt_or_in_committed_tokens(window, num_committed):
    """As in plain `generate`, which looks at the whole text after every token; here the text is "abcdef"."""
    generated = "cdef"
    ends = [len(generated[:count]) for count in range(1, 5) if ("ab" + generated[:count]).endswith(window)]
    ends = [end for end in ends if end > num_committed]
    expected = (ends[0] - num_committed, "stop") if ends else (4 - num_committed, None)
    made = request(generated=generated[:num_committed], criteria=[stop_at(window)])
    assert cut_one(made, generated[num_committed:]) == expected


def test_first_of_several_stop_strings_wins():
    assert cut_one(request(criteria=[stop_at("fg", "def")]), "cdefgh") == (4, "stop")
    assert cut_one(request(criteria=[stop_at("fg"), stop_at("cd")]), "cdefgh") == (2, "stop")


def test_time_ends_a_row_after_what_it_has_got():
    late = MaxTimeCriteria(max_time=10.0, initial_timestamp=time.time() - 20)
    early = MaxTimeCriteria(max_time=1000.0)
    assert cut_one(request(criteria=[late]), "abc") == (3, "time")
    assert cut_one(request(criteria=[early]), "abc") == (3, None)
    assert cut_one(request(criteria=[late], eos="b"), "abc") == (2, "eos")
    assert cut_one(request(criteria=[late, stop_at("a")]), "abc") == (1, "stop")
    assert cut_one(request(criteria=[early, stop_at("a")]), "abc") == (1, "stop")


def batch_of(prompts: list[str], generated: list[str], criteria: list) -> list[Request]:
    width = max(map(len, prompts))
    prompt_ids = torch.tensor([[0] * (width - len(prompt)) + ids_of(prompt) for prompt in prompts])
    rules = DecodingRules(stopping_criteria=StoppingCriteriaList(criteria))
    batch = PaddedBatch(prompt_ids, 20)
    return [
        request(prompt, text, like=(rules, batch), row=row)
        for row, (prompt, text) in enumerate(zip(prompts, generated, strict=True))
    ]


def test_rows_of_a_batch_are_judged_together_once_the_slowest_is_there():
    seen = Seen("s")
    requests = batch_of(["abc", "d", "ef"], ["g", "hij", ""], [seen])
    assert cut([requests[0], requests[2]], [ids_of("kls"), ids_of("m")]) == [(3, None), (1, None)]
    assert [call.tolist() for call in seen.calls] == [[ids_of("abcg"), ids_of("??dh"), ids_of("?efm")]]
    assert cut([requests[1], requests[2]], [ids_of("k"), ids_of("ns")]) == [(1, None), (2, "criteria")]
    assert cut([requests[1]], [ids_of("lm")]) == [(2, None)]  # no row has to wait for one that has ended
    assert requests[0].finish_reason == "criteria" and requests[0].token_ids == ids_of("gkls")
    assert [call.shape[1] - 3 for call in seen.calls] == [1, 2, 3, 4, 5, 6]
    texts = ["abcgkls??", "??dhijklm", "?efmns???"]
    assert seen.calls[-1].tolist() == [ids_of(text) for text in texts]


def test_row_that_was_ahead_gives_back_what_is_behind_its_end():
    requests = batch_of(["abc", "d"], ["", ""], [Seen("s")])
    cut(requests, [ids_of("aasbb"), ids_of("c")])
    assert requests[0].token_ids == ids_of("aasbb") and requests[0].finish_reason is None
    cut([requests[1]], [ids_of("defg")])
    assert (requests[0].token_ids, requests[0].finish_reason) == (ids_of("aas"), "criteria")
    assert requests[1].finish_reason is None
    assert requests[0].batch.token_ids[0].tolist()[:8] == ids_of("abcaas??")


class ForRow(StoppingCriteria):
    """Stops row `row` alone, by its place in the batch, once the text is `length` long."""

    def __init__(self, row: int, length: int):
        self.row, self.length = row, length

    def __call__(self, input_ids, scores, **kwargs):
        return (torch.arange(len(input_ids)) == self.row) & (input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_criterion_stops_the_row_that_it_names(row):
    requests = batch_of(["abc", "d", "ef"], ["g", "hij", ""], [ForRow(row, 8)])  # five generated tokens
    cut(requests, [ids_of("klmnop")] * 3)
    lengths = [7, 9, 6]
    for index, made in enumerate(requests):
        expected = (5, "criteria") if index == row else (lengths[index], None)
        assert (len(made.token_ids), made.finish_reason) == expected


def test_stop_strings_of_rows_of_different_lengths():
    requests = batch_of(["abc", "d", "ef"], ["g", "hij", ""], [stop_at("jk", "ab")])
    assert cut(requests, [ids_of("ab"), ids_of("kl"), ids_of("abc")]) == [(2, "stop"), (1, "stop"), (2, "stop")]


def test_requests_with_their_own_criteria_are_judged_apart():
    requests = [request(criteria=[stop_at("s")]), request(eos="a"), request(criteria=[Seen("c")]), request()]
    assert cut(requests, [ids_of("abcs")] * 4) == [(4, "stop"), (1, "eos"), (3, "criteria"), (4, None)]


class Failing(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise LookupError("no opinion")


def test_failing_criterion_concerns_a_lone_request_only():
    requests = [request(criteria=[Failing()]), request(eos="b")]
    assert cut(requests, [ids_of("abc")] * 2)[1] == (2, "eos")
    assert isinstance(requests[0].error, LookupError) and requests[1].error is None
    with pytest.raises(LookupError):
        cut(batch_of(["abc", "d"], ["", ""], [Failing()]), [ids_of("abc")] * 2)


def test_every_two_letter_stop_string_ends_where_plain_generate_ends():
    """Prompt: a whole cycle of letters and three more; the model goes on with the cycle."""
    plain = cycle_model(ALPHABET)
    target = enable_speculation(copy.deepcopy(plain))
    cycle = LETTERS[1:21]
    input_ids = torch.tensor([ids_of(cycle + cycle[:3])])
    settings = {"max_new_tokens": 30, "do_sample": False, "tokenizer": TOKENIZER, "pad_token_id": 0}
    num_blocks = 0
    for start in range(20):
        stop = (cycle * 2)[start : start + 2]
        expected = plain.generate(input_ids, stop_strings=[stop], **settings).tolist()
        for drafting in (
            {"assistant_model": plain, "num_assistant_tokens": 8},
            {"prompt_lookup_num_tokens": 8},
        ):
            assert target.generate(input_ids, stop_strings=[stop], **drafting, **settings).tolist() == expected
            stats = target.speculation_stats
            assert stats.accepted == stats.judged and stats.tokens == len(expected[0]) - 23
            num_blocks += stats.drafting_rounds
    assert num_blocks > 40, "most stop strings end within a drafted block"


class AfterSum(StoppingCriteria):
    """Stops a row when the sum of its last ids allows it: at some place that no one can foresee."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -3:].sum(dim=1) % 11 == 0


@pytest.mark.parametrize("seed", range(5))
def test_custom_criterion_ends_rows_of_a_batch_as_in_plain_generate(seed):
    plain = make_model(seed=seed)
    target, draft = enable_speculation(copy.deepcopy(plain)), noisy_copy(plain)
    settings = {"max_new_tokens": 40, "do_sample": False, "stopping_criteria": StoppingCriteriaList([AfterSum()])}
    batch = left_padded([5, 1, 9, 3], seed=seed)
    expected = plain.generate(**batch, **settings)
    found = target.generate(**batch, assistant_model=draft, num_assistant_tokens=4, **settings)
    assert found.tolist() == expected.tolist()
    assert 0 < target.speculation_stats.acceptance_rate < 1
    ends = (expected[:, 9:] != 0).sum(dim=1)
    assert len(ends.unique()) > 1, "rows that all end together show nothing"


def test_finish_reasons_of_decoded_requests():
    model = cycle_model(ALPHABET)
    late = MaxTimeCriteria(max_time=10.0, initial_timestamp=time.time() - 20)
    requests = [
        request("ab", eos="h"),
        request("ab", criteria=[stop_at("gh")]),
        request("ab", criteria=[Seen("h")]),
        request("ab", max_new_tokens=6),
        request("ab", criteria=[late]),
    ]
    decoder = Decoder(model, CausalLMDrafter(model, num_assistant_tokens=4))
    for _ in decoder.run(requests):
        pass
    assert [made.finish_reason for made in requests] == ["eos", "stop", "criteria", "length", "time"]
    assert [made.token_ids for made in requests] == [ids_of("cdefgh")] * 4 + [ids_of("c")]
