import math
from collections import Counter

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from hf_specgen.logits_process.bias_and_masks import LogitBias, UndecodableMask
from hf_specgen.logits_process.token_penalties import (
    FrequencyPenalty,
    PresencePenalty,
    RepetitionPenalty,
    TokenPenalties,
)

INF = float("inf")
PAD = 2  # also eos
VOCAB = 11


@pytest.fixture(autouse=True)
def _one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def tiny_llama(vocab_size: int, hidden_size: int, **settings) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        bos_token_id=None,
        **settings,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def chain_model():
    """The next token depends on the current one alone: 10 -> 11 -> 12 -> eos, where 5 has 80 % of eos's logit."""
    model = tiny_llama(16, 16, eos_token_id=PAD, pad_token_id=PAD)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(16))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for current, following in {3: 10, 10: 11, 11: 12, 12: PAD, 5: 6, 6: 7, 7: 8, 8: 9}.items():
            model.lm_head.weight[following, current] = 2.5
        model.lm_head.weight[5, 12] = 2.0
    return model


def expected_scores(ids: list[int], scores: torch.Tensor, penalties: TokenPenalties) -> torch.Tensor:
    """The rules of the docstring for one row, token by token in float64."""
    begin = 0
    while penalties.pad_token_id is not None and begin < len(ids) and ids[begin] == penalties.pad_token_id:
        begin += 1
    if penalties.scope == "generated":
        begin = max(begin, penalties.prompt_length)
    counts = Counter(ids[begin:])
    expected = scores.double().clone()
    for token, count in counts.items():
        if token in penalties.exempt_ids or not 0 <= token < len(scores):
            continue
        score = expected[token]
        score = score / penalties.repetition_penalty if score > 0 else score * penalties.repetition_penalty
        expected[token] = score - count * penalties.frequency_penalty - penalties.presence_penalty
    return expected


def random_penalties(generator: torch.Generator, prompt_length: int) -> TokenPenalties:
    draw = torch.rand(7, generator=generator).tolist()
    return TokenPenalties(
        (1.0, 1.3, 0.7)[int(draw[0] * 3)],
        (0.0, 0.6, -0.4)[int(draw[1] * 3)],
        (0.0, 0.9, -0.2)[int(draw[2] * 3)],
        scope=("all", "generated")[int(draw[3] * 2)],
        prompt_length=prompt_length,
        pad_token_id=(None, PAD)[int(draw[4] * 2)],
        exempt_ids=((), (0, 4), (7, -5, 99))[int(draw[5] * 3)],
    )


def left_padded_ids(generator: torch.Generator, num_rows: int, num_columns: int, num_prompt: int) -> torch.Tensor:
    """Random ids with some out of the vocabulary, padded by 0 to all columns of the prompt."""
    ids = torch.randint(0, VOCAB, (num_rows, num_columns), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -100
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = VOCAB + 2
    for row, length in enumerate(torch.randint(0, num_prompt + 1, (num_rows,), generator=generator).tolist()):
        ids[row, :length] = PAD
    return ids


# Hand-computed


def test_frequency_penalty_is_subtracted_per_occurrence_whatever_the_sign():
    scores = torch.tensor([[3.0, -3.0, 0.5, 0.0]])
    ids = torch.tensor([[0, 1, 1, 0]])
    assert FrequencyPenalty(1)(ids, scores).tolist() == [[1.0, -5.0, 0.5, 0.0]]


def test_penalty_of_one_row_leaves_another_row_alone():
    scores = torch.tensor([[3.0, -3.0], [3.0, -3.0]])
    ids = torch.tensor([[0, 1, 1, 0], [7, -1, 7, 9]])
    assert FrequencyPenalty(1.0)(ids, scores).tolist() == [[1.0, -5.0], [3.0, -3.0]]


def test_presence_penalty_is_subtracted_once():
    scores = torch.tensor([[3.0, -3.0, 0.5]])
    assert PresencePenalty(0.5)(torch.tensor([[0, 1, 1]]), scores).tolist() == [[2.5, -3.5, 0.5]]


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores_once():
    scores = torch.tensor([[3.0, -3.0, 0.0, 4.0]])
    ids = torch.tensor([[0, 1, 1, 2, 0]])
    assert RepetitionPenalty(2)(ids, scores).tolist() == [[1.5, -6.0, 0.0, 4.0]]
    assert RepetitionPenalty(0.5)(ids, scores).tolist() == [[6.0, -1.5, 0.0, 4.0]]


def test_fused_penalties_apply_repetition_before_the_subtractions():
    scores = torch.tensor([[8.0, -2.0, 1.0]])
    penalties = TokenPenalties(2.0, 0.5, 0.25)
    assert penalties(torch.tensor([[0, 1, 0]]), scores).tolist() == [[4.0 - 1.0 - 0.25, -4.0 - 0.5 - 0.25, 1.0]]


def test_integer_penalty_is_as_good_as_a_float():
    scores, ids = torch.randn(2, VOCAB), torch.tensor([[1, 2], [3, 3]])
    assert torch.equal(RepetitionPenalty(2)(ids, scores), RepetitionPenalty(2.0)(ids, scores))


def test_repetition_penalty_equals_transformers_without_padding():
    generator = torch.Generator().manual_seed(3)
    scores, ids = torch.randn(4, 50, generator=generator), torch.randint(0, 50, (4, 30), generator=generator)
    for penalty in (1.3, 0.6):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)
        assert torch.equal(RepetitionPenalty(penalty)(ids, scores), expected)


def test_empty_ids_change_nothing():
    scores = torch.randn(2, VOCAB)
    assert torch.equal(TokenPenalties(1.3, 1.0, 1.0)(torch.zeros(2, 0, dtype=torch.long), scores), scores)


# What counts


@pytest.mark.parametrize(
    "penalty",
    [
        RepetitionPenalty(1.3, pad_token_id=PAD),
        FrequencyPenalty(1.5, pad_token_id=PAD),
        PresencePenalty(2.5, pad_token_id=PAD),
    ],
    ids=repr,
)
def test_penalty_ignores_left_padding_and_still_stops_at_eos(chain_model, penalty):
    ids = torch.tensor([[PAD, PAD, 10], [PAD, 3, 10], [3, 10, 11]])
    mask = torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1]])
    out = chain_model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, logits_processor=[penalty])
    assert out[:, 3:].tolist() == [[11, 12, PAD], [11, 12, PAD], [12, PAD, PAD]]


def test_a_penalty_that_counts_padding_misses_eos(chain_model):
    ids, mask = torch.tensor([[PAD, PAD, 10]]), torch.tensor([[0, 0, 1]])
    for counts_padding in (RepetitionPenaltyLogitsProcessor(1.3), RepetitionPenalty(1.3)):
        out = chain_model.generate(
            ids, attention_mask=mask, max_new_tokens=4, do_sample=False, logits_processor=[counts_padding]
        )
        assert out[0, 3:].tolist() == [11, 12, 5, 6]


def test_only_the_leading_run_of_the_pad_id_is_ignored():
    scores = torch.zeros(2, 4)
    ids = torch.tensor([[PAD, PAD, 1, PAD], [1, PAD, PAD, PAD]])
    assert FrequencyPenalty(1.0, pad_token_id=PAD)(ids, scores).tolist() == [[0, -1, -1, 0], [0, -1, -3, 0]]
    assert FrequencyPenalty(1.0)(ids, scores).tolist() == [[0, -1, -3, 0], [0, -1, -3, 0]]


def test_scope_decides_whether_the_prompt_counts():
    scores, prompt = torch.tensor([[0.0] * 7 + [2.0]]), torch.tensor([[7]])
    generated = FrequencyPenalty(1.0, scope="generated", prompt_length=1)
    assert generated(prompt, scores)[0, 7] == 2.0
    assert generated(torch.tensor([[7, 7]]), scores)[0, 7] == 1.0
    assert FrequencyPenalty(1.0, scope="all")(prompt, scores)[0, 7] == 1.0


def test_generated_scope_asks_for_the_prompt_length():
    with pytest.raises(ValueError, match="`prompt_length`.*Pass the number of columns"):
        FrequencyPenalty(1.0, scope="generated")(torch.tensor([[7]]), torch.zeros(1, 8))


def test_exempt_ids_are_never_penalised():
    scores, ids = torch.ones(1, 4), torch.tensor([[0, 1, 1, 3, 0]])
    assert FrequencyPenalty(1.0, exempt_ids=[1, -7, 50])(ids, scores).tolist() == [[-1.0, 1.0, 1.0, 0.0]]
    assert FrequencyPenalty(1.0, exempt_ids={0})(ids, scores).tolist() == [[1.0, -1.0, 1.0, 0.0]]


def test_ids_outside_the_vocabulary_are_ignored_and_other_rows_equal_their_run_alone():
    scores = torch.randn(2, 4)
    ids = torch.tensor([[-100, 4, 99, -1], [1, 0, 1, 3]])
    penalised = TokenPenalties(1.3, 0.5, 0.2)(ids, scores)
    assert torch.equal(penalised[0], scores[0])
    assert torch.equal(penalised[1:], TokenPenalties(1.3, 0.5, 0.2)(ids[1:], scores[1:]))


def test_ids_that_do_not_count_leave_the_count_of_id_0_right():
    scores, ids = torch.zeros(1, 4), torch.tensor([[PAD, 0, -1, 9, 0, 0]])
    assert FrequencyPenalty(1.0, pad_token_id=PAD)(ids, scores).tolist() == [[-3.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("seed", range(40))
def test_penalties_follow_the_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = left_padded_ids(generator, 4, 14, 9)
    scores = torch.randn(4, VOCAB, generator=generator)
    scores[0, :3] = torch.tensor([-INF, 0.0, -0.0])
    penalties = random_penalties(generator, prompt_length=9)
    before, ids_before = scores.clone(), ids.clone()
    penalised = penalties(ids, scores)
    expected = torch.stack([expected_scores(row, s, penalties) for row, s in zip(ids.tolist(), scores, strict=True)])
    torch.testing.assert_close(penalised, expected.float(), rtol=1e-6, atol=1e-6)
    is_same = expected == before.double()
    assert torch.equal(penalised[is_same], before[is_same])
    assert torch.equal(scores, before) and torch.equal(ids, ids_before)


# In the loop: apply_ against __call__


def assert_apply_equals_call(penalties, ids, num_prompt, rows, block, first, num_positions, generator):
    """Judges `block` behind the committed `ids` with apply_, and each position with __call__ on the whole row."""
    counts = penalties.make_counts(ids[:, :num_prompt])
    for row, token_ids in enumerate(ids[:, num_prompt:].tolist()):
        for piece in (token_ids[:1], [], token_ids[1:]):
            counts.add(row, piece)
    for _ in range(2):  # the second time shows that nothing was remembered
        scores = torch.randn(len(rows), num_positions, VOCAB, generator=generator)
        scores[0, 0, :2] = torch.tensor([-INF, 0.0])
        raw = scores.clone()
        assert penalties.apply_(scores, counts, rows, block, first) is scores
        for position in range(num_positions):
            whole = torch.cat([ids[rows], block[:, : first + position]], dim=1)
            assert torch.equal(scores[:, position], penalties(whole, raw[:, position])), (rows, position)


@pytest.mark.parametrize("seed", range(150))
def test_apply_equals_call_at_every_position(seed):
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    num_rows, num_prompt, num_generated = number(1, 6), number(0, 10), number(0, 7)
    first, num_positions = number(0, 3), number(1, 6)
    ids = left_padded_ids(generator, num_rows, num_prompt + num_generated, num_prompt)
    rows = torch.randperm(num_rows, generator=generator)[: number(1, num_rows + 1)].tolist()
    block = left_padded_ids(generator, len(rows), first + num_positions - 1 + number(0, 2), 0)
    if block.shape[1] > 1:
        block[0, 1:] = block[0, 0]
    penalties = random_penalties(generator, prompt_length=num_prompt)
    assert_apply_equals_call(penalties, ids, num_prompt, rows, block, first, num_positions, generator)


@pytest.mark.parametrize("scope", ["all", "generated"])
def test_apply_follows_the_leading_run_of_padding_into_the_block(scope):
    ids = torch.tensor([[PAD, PAD], [PAD, 1], [PAD, PAD]])
    block = torch.tensor([[PAD, PAD, 5, PAD]] * 3)
    penalties = TokenPenalties(1.3, 0.5, 0.2, scope=scope, prompt_length=2, pad_token_id=PAD)
    generator = torch.Generator().manual_seed(0)
    assert_apply_equals_call(penalties, ids, 2, [0, 1, 2], block, 0, 5, generator)
    assert_apply_equals_call(penalties, torch.cat([ids, block[:, :1]], dim=1), 2, [2, 0], block[:2], 1, 4, generator)


def test_second_of_two_equal_candidates_is_judged_with_the_first_counted():
    penalty = FrequencyPenalty(1.0)
    counts = penalty.make_counts(torch.tensor([[3]]))
    scores = torch.zeros(1, 3, 4)
    penalty.apply_(scores, counts, [0], torch.tensor([[3, 3]]))
    assert scores[0, :, 3].tolist() == [-1.0, -2.0, -3.0]
    assert scores[..., :3].eq(0).all()


def test_counts_stay_right_while_they_grow():
    generator = torch.Generator().manual_seed(0)
    penalty = FrequencyPenalty(1.0, exempt_ids=[5])
    counts = penalty.make_counts(torch.zeros(2, 0, dtype=torch.long))
    committed: list[list[int]] = [[], []]
    for step in range(60):
        row = step % 2
        token_ids = torch.randint(-3, 300, (9,), generator=generator).tolist()
        counts.add(row, token_ids)
        committed[row] += token_ids
        scores = torch.zeros(2, 1, 250)
        penalty.apply_(scores, counts, [0, 1], torch.zeros(2, 0, dtype=torch.long))
        for index in range(2):
            expected = Counter(token for token in committed[index] if 0 <= token < 250 and token != 5)
            assert {token: -int(s) for token, s in enumerate(scores[index, 0].tolist()) if s} == expected
    assert counts.ids.shape[1] > 128 and counts.ids.shape == counts.counts.shape


def test_slots_of_the_same_id_have_the_same_count():
    counts = TokenPenalties().make_counts(torch.tensor([[0, 13, 1, 0], [1, 1, 12, 1]]))
    for token_ids in ([], [0, 11, 0], [13]):
        counts.add(0, token_ids)
        ids, seen = counts.select([0, 1], vocab_size=11)
        for row_ids, row_seen in zip(ids.tolist(), seen.tolist(), strict=True):
            pairs = set(zip(row_ids, row_seen, strict=True))
            assert {token for token, _ in pairs} == {0, 1} and len(pairs) == 2


def test_apply_never_waits_for_the_device():
    penalties = TokenPenalties(1.3, 0.5, 0.2, pad_token_id=PAD, exempt_ids=[4])
    counts = penalties.make_counts(torch.tensor([[PAD, PAD], [PAD, 1]]))
    for name, value in vars(counts).items():  # tensors without data: reading any value raises
        if isinstance(value, torch.Tensor):
            setattr(counts, name, value.to("meta"))
    scores, block = torch.zeros(2, 3, 9, device="meta"), torch.zeros(2, 3, dtype=torch.long, device="meta")
    assert penalties.apply_(scores, counts, [1, 0], block, first=1) is scores
    with pytest.raises(RuntimeError):
        scores.sum().item()


# Half precision and infinities


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("penalties", [(3e38, 3e38, 3e38), (1e-30, -3e38, -3e38), (1e4, 1e5, 0.0), (1e-5, 0.0, -1e5)])
def test_large_penalties_stay_finite_or_become_minus_infinity(dtype, penalties):
    largest = torch.finfo(dtype).max
    scores = torch.tensor([[largest, -largest, 0.0, 3.0, -3.0, -INF, INF, 1.0]], dtype=dtype)
    ids = torch.tensor([[0, 1, 2, 3, 4, 5, 6] * 3])
    penalised = TokenPenalties(*penalties)(ids, scores)
    assert penalised.dtype == dtype
    assert (penalised[0, :5] < INF).all()  # neither +inf nor NaN
    assert penalised[0, 5:].tolist() == [-INF, INF, 1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_fp32(dtype):
    generator = torch.Generator().manual_seed(0)
    scores, ids = (
        torch.randn(2, 40, generator=generator).to(dtype),
        torch.randint(0, 9, (2, 3000), generator=generator),
    )
    penalties = TokenPenalties(1.3, 0.01, 0.2)
    penalised = penalties(ids, scores)
    assert torch.equal(penalised, penalties(ids, scores.float()).to(dtype))
    assert torch.equal(penalised[:, 9:], scores[:, 9:])


def test_double_precision_stays_double():
    scores = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    assert RepetitionPenalty(1.3)(torch.tensor([[0]]), scores).tolist() == [[1.0 / 1.3, 2.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_bias_stays_finite_or_becomes_minus_infinity(dtype):
    scores = torch.zeros(1, 4, dtype=dtype)
    biased = LogitBias({0: 3e38, 1: -3e38, 2: -INF})(None, scores)
    assert biased.dtype == dtype and (biased < INF).all()
    assert biased[0, 2:].tolist() == [-INF, 0.0]


# Bias and mask


def test_bias_takes_json_strings_and_integers_and_drops_foreign_ids():
    scores = torch.zeros(1, 200)
    biased = LogitBias({"198": -100, 3: 2, "-4": 1.0, 200: 5, 10**30: 1.0})(torch.tensor([[1]]), scores)
    assert biased[0, 198] == -100 and biased[0, 3] == 2
    assert biased.count_nonzero() == 2 and scores.eq(0).all()


def test_bias_and_mask_work_on_every_leading_shape():
    bias, mask = LogitBias({"1": 2.0}), UndecodableMask(3)
    for shape in ((4,), (2, 4), (2, 3, 4)):
        scores = torch.randn(shape)
        expected = scores.clone()
        expected[..., 1] += 2.0
        assert torch.equal(bias(None, scores), expected)
        expected = scores.clone()
        expected[..., 3] = -INF
        assert torch.equal(mask(None, scores), expected)


def test_empty_bias_changes_nothing():
    scores = torch.randn(2, 4)
    assert torch.equal(LogitBias({})(None, scores), scores)


@pytest.mark.parametrize(
    "mask, forbidden",
    [
        (UndecodableMask(6), [6, 7]),
        (UndecodableMask(9), []),
        (UndecodableMask(6, pad_token_id=2), [2, 6, 7]),
        (UndecodableMask(6, 2, 2), [6, 7]),
        (UndecodableMask(6, 2, [1, 2]), [6, 7]),
        (UndecodableMask(6, 2, [1]), [2, 6, 7]),
        (UndecodableMask(9, 8), []),
        (UndecodableMask(6, -1), [6, 7]),
    ],
    ids=repr,
)
def test_mask_forbids_what_cannot_be_decoded(mask, forbidden):
    scores = torch.zeros(1, 8)
    assert mask(None, scores).isinf().nonzero()[:, 1].tolist() == forbidden
    assert scores.eq(0).all()


def test_sampling_a_padded_vocabulary_yields_decodable_ids_only():
    model = tiny_llama(72, 16, eos_token_id=None, pad_token_id=None)
    with torch.no_grad():
        model.lm_head.weight[70] *= 50

    def sample(*processors):
        torch.manual_seed(0)
        return model.generate(
            torch.tensor([[1, 2, 3]] * 8),
            max_new_tokens=24,
            do_sample=True,
            temperature=3.0,
            top_k=0,
            logits_processor=list(processors),
        )[:, 3:]

    assert (sample() == 70).any()
    masked = sample(UndecodableMask(64))
    assert masked.shape == (8, 24) and (masked < 64).all()


# Constructors


@pytest.mark.parametrize("kind", [RepetitionPenalty, FrequencyPenalty, PresencePenalty])
@pytest.mark.parametrize("value", [math.nan, INF, -INF, 1e39, 10**400])
def test_penalties_have_to_be_finite(kind, value):
    with pytest.raises(
        ValueError, match="`(repetition|frequency|presence)_penalty` has to be a finite number.*but is"
    ):
        kind(value)


@pytest.mark.parametrize("kind", [RepetitionPenalty, FrequencyPenalty, PresencePenalty])
@pytest.mark.parametrize("value", [True, "1.0", None, torch.tensor(1.0)])
def test_penalties_have_to_be_numbers(kind, value):
    with pytest.raises(TypeError, match="has to be a number, but is"):
        kind(value)


@pytest.mark.parametrize("value", [0, 0.0, -1, -0.5, 1e-40])
def test_repetition_penalty_has_to_be_positive(value):
    with pytest.raises(ValueError, match="`repetition_penalty` has to be a positive number.*but is"):
        TokenPenalties(value)


@pytest.mark.parametrize(
    "options, error",
    [
        ({"scope": "prompt"}, ValueError),
        ({"scope": None}, ValueError),
        ({"prompt_length": -1}, ValueError),
        ({"prompt_length": 2.0}, TypeError),
        ({"pad_token_id": True}, TypeError),
        ({"exempt_ids": "12"}, TypeError),
        ({"exempt_ids": [1.5]}, TypeError),
        ({"window": 3}, TypeError),
    ],
)
def test_counting_options_are_checked(options, error):
    for build in (lambda: TokenPenalties(**options), lambda: FrequencyPenalty(0.5, **options)):
        with pytest.raises(error, match=next(iter(options))):
            build()


@pytest.mark.parametrize("key", ["abc", "", "1.5", "1_0", "²", "--1"])
def test_bias_names_a_key_that_is_no_id(key):
    with pytest.raises(ValueError, match=f"`bias`.*'{key}'"):
        LogitBias({key: 1.0})


@pytest.mark.parametrize(
    "bias, error",
    [
        ({5: math.nan}, ValueError),
        ({5: INF}, ValueError),
        ({5: 1e39}, ValueError),
        ({5: True}, TypeError),
        ({5: "1"}, TypeError),
        ({5.0: 1.0}, TypeError),
        ({True: 1.0}, TypeError),
        ({5: 1.0, "5": 2.0}, ValueError),
        ([(5, 1.0)], TypeError),
    ],
)
def test_bias_refuses_what_it_cannot_add(bias, error):
    with pytest.raises(error, match="bias"):
        LogitBias(bias)


@pytest.mark.parametrize(
    "arguments, error",
    [((0,), ValueError), ((-3,), ValueError), ((2.0,), TypeError), ((True,), TypeError), ((5, "1"), TypeError)],
)
def test_mask_checks_its_arguments(arguments, error):
    with pytest.raises(error):
        UndecodableMask(*arguments)
    with pytest.raises(TypeError):
        UndecodableMask(5, None, [1.5])


def test_repr_shows_the_settings():
    penalty = RepetitionPenalty(1.3, scope="generated", prompt_length=4, pad_token_id=PAD, exempt_ids=[7])
    for shown in ("RepetitionPenalty(", "=1.3", "'generated'", "prompt_length=4", "pad_token_id=2", "(7,)"):
        assert shown in repr(penalty)
    assert repr(LogitBias({"198": -100})) == "LogitBias(bias={198: -100.0})"
    assert repr(UndecodableMask(64, 0)) == "UndecodableMask(tokenizer_size=64, pad_token_id=0, eos_token_id=[])"
