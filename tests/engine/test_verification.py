import pytest
import torch

from hf_specgen.engine import verification
from hf_specgen.engine.verification import Candidates, sample, verify
from tests.support.chi_square import FALSE_ALARM, NUM_DRAWS, chi_square_p_value, target_probs

INF = float("inf")
ALMOST_ONE = 1 - 2**-24  # the largest fp32 number below 1
SHARP = [0.0, 5.0, 1.0, 2.0]  # best token 1
UNIFORM = [0.0, 0.0, 0.0, 0.0]  # softmax is exactly 0.25 each
HALVES = [0.0, 0.0, -INF, -INF]  # exactly 0.5, 0.5, 0, 0


def block(token_ids, lengths=None, probs=None) -> Candidates:
    token_ids = torch.tensor(token_ids)
    lengths = torch.full((len(token_ids),), token_ids.shape[1]) if lengths is None else torch.tensor(lengths)
    return Candidates(token_ids, lengths, None if probs is None else torch.as_tensor(probs))


def judge(candidates, scores, do_sample=False, noise=None):
    rows = len(candidates.token_ids)
    noise = None if noise is None else torch.tensor(noise)
    found = verify(candidates, torch.tensor(scores), [do_sample] * rows, noise)
    return (
        found.num_accepted.tolist(),
        found.next_token_ids.tolist(),
        (found.num_possible > found.num_accepted).tolist(),
    )


@pytest.mark.parametrize(
    ("token_ids", "num_accepted", "next_token_id"),
    [([1, 2, 3], 3, 0), ([1, 2, 0], 2, 3), ([1, 3, 3], 1, 2), ([0, 2, 3], 0, 1)],
)
def test_greedy_keeps_what_equals_the_best_token(token_ids, num_accepted, next_token_id):
    best = [1, 2, 3, 0]
    scores = [[[float(token == b) for token in range(4)] for b in best]]
    assert judge(block([token_ids]), scores) == ([num_accepted], [next_token_id], [True])


def test_greedy_with_equal_scores_takes_the_first():
    assert judge(block([[0], [1]]), [[UNIFORM, SHARP]] * 2)[:2] == ([1, 0], [1, 0])


def test_greedy_ignores_the_law_of_the_draft():
    q = [[[0.0, 1.0, 0.0, 0.0]]]
    assert judge(block([[1]], probs=q), [[SHARP, UNIFORM]])[:2] == ([1], [0])


@pytest.mark.parametrize(("u", "num_accepted"), [(0.0, 1), (0.5 - 2**-25, 1), (0.5, 0), (0.75, 0)])
def test_sampling_keeps_a_candidate_when_u_times_q_is_below_p(u, num_accepted):
    q = [[[0.5, 0.25, 0.25, 0.0]]]
    assert judge(block([[0]], probs=q), [[UNIFORM, UNIFORM]], True, [[u, 0.0]])[0] == [num_accepted]


@pytest.mark.parametrize(("u", "num_accepted"), [(0.25 - 2**-26, 1), (0.25, 0)])
def test_candidate_chosen_without_chance_is_kept_when_u_is_below_p(u, num_accepted):
    assert judge(block([[3]]), [[UNIFORM, UNIFORM]], True, [[u, 0.0]])[0] == [num_accepted]


@pytest.mark.parametrize("u", [0.0, 0.3, ALMOST_ONE])
def test_candidate_with_p_equal_to_q_is_always_kept(u):
    scores = torch.randn(200, 2, 50, generator=torch.Generator().manual_seed(0)) * 5
    probs = scores.softmax(dim=-1)
    token_ids = probs[:, :1].argmin(dim=-1)
    token_ids[::2] = probs[::2, :1].argmax(dim=-1)
    noise = torch.tensor([[u, 0.5]]).expand(200, 2)
    found = verify(Candidates(token_ids, torch.ones(200).long(), probs[:, :1]), scores, [True] * 200, noise)
    assert found.num_accepted.eq(1).all() and (found.num_possible > found.num_accepted).all()


@pytest.mark.parametrize("q", [None, [[[0.0, 0.0, 0.0, 1.0]]], [[[0.5, 0.5, 0.0, 0.0]]]])
def test_candidate_of_probability_zero_is_never_kept(q):
    assert judge(block([[3]], probs=q), [[HALVES, UNIFORM]], True, [[0.0, 0.6]])[:2] == ([0], [1])


@pytest.mark.parametrize(
    ("u", "next_token_id"), [(0.0, 1), (0.249, 1), (0.251, 2), (0.624, 2), (0.626, 3), (0.999, 3)]
)
def test_correction_comes_from_what_p_exceeds_q_by(u, next_token_id):
    # p - q = [-0.75 + .25, .0625, .09375, .09375] after clamping: shares 0.25, 0.375, 0.375
    q = [[[0.75, 0.1875, 0.15625, 0.15625]]]
    assert judge(block([[0]], probs=q), [[UNIFORM, SHARP]], True, [[0.9, u]])[:2] == ([0], [next_token_id])


@pytest.mark.parametrize(("u", "next_token_id"), [(0.0, 0), (0.3, 0), (0.4, 1), (0.7, 3), (ALMOST_ONE, 3)])
def test_correction_of_a_candidate_without_chance_is_anything_else(u, next_token_id):
    assert judge(block([[2]]), [[UNIFORM, SHARP]], True, [[0.25, u]])[:2] == ([0], [next_token_id])


def test_correction_comes_from_p_when_nothing_exceeds_q():
    q = [[[0.5, 0.5, 0.0, 0.0]]] * 2
    outcome = judge(block([[2], [2]], probs=q), [[HALVES, UNIFORM]] * 2, True, [[0.0, 0.4], [0.0, 0.6]])
    assert outcome == ([0, 0], [0, 1], [True, True])


def test_bonus_token_comes_from_p_alone():
    q = [[[1.0, 0.0, 0.0, 0.0]]]
    assert judge(block([[0]], probs=q), [[UNIFORM, UNIFORM]], True, [[0.1, 0.1]])[:2] == ([1], [0])


@pytest.mark.parametrize("do_sample", [False, True])
def test_right_padding_is_neither_kept_nor_a_refusal(do_sample):
    scores = [[[-INF, 0.0, -INF, -INF]] * 3] * 3  # token 1 for certain, everywhere
    q = [[[0.0, 1.0, 0.0, 0.0]] * 2] * 3  # without the lengths, position 1 would have a residual of nothing
    candidates = block([[1, 1]] * 3, lengths=[0, 1, 2], probs=q)
    assert judge(candidates, scores, do_sample, [[0.5, 0.5, 0.5]] * 3) == ([0, 1, 2], [1, 1, 1], [True] * 3)


def test_row_with_fewer_candidates_draws_its_bonus_from_p():
    q = [[[0.0, 1.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]]
    candidates = block([[1, 1]], lengths=[1], probs=q)
    scores = [[SHARP, [-INF, 0.0, -INF, -INF], UNIFORM]]
    assert judge(candidates, scores, True, [[0.0, 0.99, 0.0]])[:2] == ([1], [1])


def test_greedy_and_sampling_rows_in_one_block():
    noise = torch.tensor([[0.9, 0.9], [0.9, 0.9]])
    found = verify(block([[0], [0]]), torch.tensor([[UNIFORM, SHARP]] * 2), [False, True], noise)
    assert found.num_accepted.tolist() == [1, 0]
    assert found.next_token_ids.tolist() == [1, 3]


@pytest.mark.parametrize(("do_sample", "next_token_ids"), [(False, [1, 0]), (True, [1, 3])])
def test_without_candidates_a_row_gets_one_token(do_sample, next_token_ids):
    candidates = Candidates.none(2, torch.device("cpu"))
    outcome = judge(candidates, [[SHARP], [UNIFORM]], do_sample, [[0.5], [0.8]])
    assert outcome == ([0, 0], next_token_ids, [True, True])


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("worthless", [[-INF] * 4, [float("nan")] * 4, [0.0, float("nan"), 1.0, -INF]])
def test_impossible_position_is_reported_only_where_it_was_judged(do_sample, worthless):
    certain = [-INF, 0.0, -INF, -INF]
    reached = [[certain, worthless, UNIFORM], [worthless, certain, UNIFORM]]
    assert judge(block([[1, 1]] * 2), reached, do_sample, [[0.5] * 3] * 2)[2] == [False, False]
    beyond_a_refusal = [[certain, worthless, UNIFORM]]
    assert judge(block([[0, 1]]), beyond_a_refusal, do_sample, [[0.5] * 3]) == ([0], [1], [True])
    in_the_padding = [[certain, certain, worthless]]
    assert judge(block([[1, 1]], lengths=[1]), in_the_padding, do_sample, [[0.5] * 3]) == ([1], [1], [True])


def test_score_of_plus_infinity_cannot_be_sampled():
    endless = [0.0, INF, 0.0, 0.0]
    assert judge(block([[1]]), [[endless, endless]], False) == ([1], [1], [True])
    assert judge(block([[1]]), [[endless, endless]], True, [[0.5, 0.5]])[2] == [False]


def random_block(rows=40, k=4, vocab=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, k + 1, vocab, generator=generator) * 2
    q = (scores[:, :k] + torch.randn(rows, k, vocab, generator=generator)).softmax(dim=-1)
    token_ids = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(rows, k)
    lengths = torch.randint(0, k + 1, (rows,), generator=generator)
    do_sample = (torch.rand(rows, generator=generator) < 0.6).tolist()
    return Candidates(token_ids, lengths, q), scores, do_sample, torch.rand(rows, k + 1, generator=generator)


@pytest.mark.parametrize("has_probs", [False, True])
def test_row_does_not_depend_on_other_rows_or_right_padding(has_probs):
    candidates, scores, do_sample, noise = random_block()
    if not has_probs:
        candidates = Candidates(candidates.token_ids, candidates.lengths)
    together = verify(candidates, scores, do_sample, noise)
    assert 0 < together.num_accepted.sum() < candidates.lengths.sum()
    for row, length in enumerate(candidates.lengths.tolist()):
        alone = Candidates(
            candidates.token_ids[[row], :length],
            candidates.lengths[[row]],
            candidates.probs[[row], :length] if has_probs else None,
        )
        own_noise = torch.cat([noise[[row], :length], noise[[row], -1:]], dim=1)
        found = verify(alone, scores[[row], : length + 1], [do_sample[row]], own_noise)
        assert found.num_accepted[0] == together.num_accepted[row]
        assert found.next_token_ids[0] == together.next_token_ids[row]


def test_arguments_are_left_as_they_are():
    candidates, scores, do_sample, noise = random_block()
    before = [t.clone() for t in (candidates.token_ids, candidates.lengths, candidates.probs, scores, noise)]
    verify(candidates, scores, do_sample, noise)
    after = [candidates.token_ids, candidates.lengths, candidates.probs, scores, noise]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("u", "index"), [(0.0, 1), (0.2499, 1), (0.25, 3), (0.5, 3), (ALMOST_ONE, 3), (1 - 2**-53, 3), (1.0, 3)]
)
@pytest.mark.parametrize("scale", [1.0, 1 / 4, 37.0, 1e-37, 1e37])
def test_sample_inverts_the_cumulative_distribution(u, index, scale):
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]]) * scale
    assert sample(weights, torch.tensor([u], dtype=torch.float64)).tolist() == [index]


@pytest.mark.parametrize("u", [0.0, 2**-24, ALMOST_ONE])
def test_sample_never_draws_an_index_of_weight_zero(u):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(300, 1000, generator=generator) ** 20  # spread over many magnitudes
    weights[torch.rand(weights.shape, generator=generator) < 0.7] = 0.0
    weights[:, :5] = weights[:, -5:] = 0.0
    drawn = sample(weights, torch.full((300,), u))
    assert (weights.gather(1, drawn[:, None]) > 0).all()


def token_p_values() -> list[float]:
    """P-values of the first, second and third token among the rows that reached them; all rows have one case."""
    generator = torch.Generator().manual_seed(1)
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.4, 0.1], [0.25, 0.25, 0.1, 0.4]])
    q = torch.tensor([[0.3, 0.1, 0.2, 0.4], [0.1, 0.4, 0.3, 0.2]])
    token_ids = torch.stack([torch.multinomial(probs, NUM_DRAWS, True, generator=generator) for probs in q], dim=1)
    candidates = Candidates(token_ids, torch.full((NUM_DRAWS,), 2), q.expand(NUM_DRAWS, 2, 4))
    noise = torch.rand(NUM_DRAWS, 3, generator=generator)
    found = verify(candidates, p.log().expand(NUM_DRAWS, 3, 4), [True] * NUM_DRAWS, noise)
    mean = found.num_accepted.double().mean()
    print(f"mean acceptance {mean:.2f} of 2")
    assert 0.5 < mean < 1.9
    p_values = []
    for position in range(3):
        has_it = found.num_accepted >= position
        drafted = token_ids[:, min(position, 1)]
        tokens = torch.where(found.num_accepted > position, drafted, found.next_token_ids)[has_it]
        p_values.append(chi_square_p_value(tokens.bincount(minlength=4), p[position]))
    return p_values


def test_tokens_have_the_law_of_the_target():
    """Wrongly alarmed once in 10,000 seeds per position."""
    assert min(token_p_values()) > FALSE_ALARM


def test_correction_from_p_instead_of_the_residual_is_noticed(monkeypatch):
    monkeypatch.setattr(verification, "_next_weights", target_probs)
    first, second, third = token_p_values()
    assert max(first, second) < FALSE_ALARM < third  # the bonus token comes from p anyway


WAITS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")


@pytest.fixture
def no_waits(monkeypatch):
    """Makes everything that reads a tensor's value on the host an error."""

    def refuse(*args, **kwargs):
        raise AssertionError("a value was read on the host")

    for name in WAITS:
        monkeypatch.setattr(torch.Tensor, name, refuse)


@pytest.mark.parametrize("has_probs", [False, True])
@pytest.mark.parametrize("do_sample", [[False] * 3, [True] * 3, [True, False, True]])
def test_no_value_is_read_on_the_host(has_probs, do_sample, no_waits):
    candidates = Candidates(
        torch.ones(3, 2, dtype=torch.long), torch.ones(3).long(), torch.full((3, 2, 4), 0.25) if has_probs else None
    )
    verify(candidates, torch.zeros(3, 3, 4), do_sample, torch.full((3, 3), 0.5))
    with pytest.raises(AssertionError, match="read on the host"):
        bool(candidates.lengths.max() > 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("has_probs", [False, True])
def test_device_is_not_waited_for(has_probs):
    candidates, scores, do_sample, noise = random_block()
    token_ids, probs, scores, noise = (t.cuda() for t in (candidates.token_ids, candidates.probs, scores, noise))
    candidates = Candidates(token_ids, candidates.lengths, probs if has_probs else None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify(candidates, scores, do_sample, noise)
    finally:
        torch.cuda.set_sync_debug_mode("default")
