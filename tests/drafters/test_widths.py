"""Draft lengths: hand-computed cases, the distribution of the text by enumeration, and what a policy may look at."""

import itertools
import json
import math

import pytest
import torch

from hf_specgen.drafters.step_costs import StepCosts
from hf_specgen.drafters.widths import ConfidenceThreshold, DraftLengthPolicy, ThroughputScheduler, VerifyAll

APPENDIX_COSTS = {1: 1.0, 2: 1 / 0.5, 3: 1 / 0.45}  # a gain beyond a dip
JAGGED_COSTS = {2: 1.0, 3: 1.5, 4: 1.55, 5: 2.4, 6: 2.41}
NAN = float("nan")


def costs_of(milliseconds: dict[int, float]) -> StepCosts:
    return StepCosts(milliseconds, "tiny", "cpu", num_rows=1, context_length=0)


def lengths_of(
    policy: DraftLengthPolicy,
    confidences: list[list[float]] | torch.Tensor,
    limits: list[int] | None = None,
    is_live: list[bool] | None = None,
) -> list[int]:
    table = torch.as_tensor(confidences)
    rows, k = table.shape
    limits = [k] * rows if limits is None else limits
    live = torch.tensor([True] * rows if is_live is None else is_live)
    lengths = policy.lengths(table, torch.tensor(limits), live)
    assert lengths.dtype == torch.long and lengths.shape == (rows,) and lengths.device.type == "cpu"
    assert all(0 <= length <= limit for length, limit in zip(lengths.tolist(), limits))
    return lengths.tolist()


class GlobalSearch(DraftLengthPolicy):
    """The negative control: the best of all lengths. It knows candidates that it is about to withhold."""

    needs_confidence = True

    def __init__(self, step_costs: StepCosts):
        self.step_costs = step_costs

    def throughput(self, table: list[list[float]], lengths: tuple[int, ...], is_live: list[bool]) -> float:
        rows = [row for row, live in enumerate(is_live) if live]
        expected = sum(1 + sum(math.prod(table[row][: j + 1]) for j in range(lengths[row])) for row in rows)
        return expected / self.step_costs.at(sum(1 + lengths[row] for row in rows))

    def lengths(self, confidences, limits, is_live):
        table, live = confidences.tolist(), is_live.tolist()
        choices = itertools.product(*(range(limit + 1) for limit in limits.tolist()))
        return torch.tensor(max(choices, key=lambda lengths: self.throughput(table, lengths, live)))


# The distribution of the text


def residual(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    excess = (target - draft).clamp(min=0)
    return excess / excess.sum() if excess.sum() > 0 else excess


class TwoTokens:
    """Target and draft over two tokens of text, as probabilities: first (vocab,), second (vocab, vocab)."""

    def __init__(self, target: tuple[torch.Tensor, torch.Tensor], draft: tuple[torch.Tensor, torch.Tensor]):
        self.target, self.draft = target, draft

    @classmethod
    def random(cls, generator: torch.Generator, vocab: int = 2) -> "TwoTokens":
        def probabilities(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64).add(0.05)

        first = [probabilities(vocab) for _ in range(2)]
        second = [probabilities(vocab, vocab) for _ in range(2)]
        first, second = [p / p.sum() for p in first], [p / p.sum(1, keepdim=True) for p in second]
        return cls((first[0], second[0]), (first[1], second[1]))

    @property
    def probs(self) -> torch.Tensor:
        return self.target[0][:, None] * self.target[1]

    def candidates_with_chance(self) -> list[tuple[tuple[int, int], float]]:
        first, second = self.draft
        pairs = itertools.product(range(len(first)), repeat=2)
        return [((x1, x2), float(first[x1] * second[x1, x2])) for x1, x2 in pairs]

    def emitted(self, candidates: tuple[int, int], length: int) -> torch.Tensor:
        """How likely the first two tokens are if `length` candidates are verified; later rounds are the target's."""
        (p1, p2), (q1, q2), (x1, x2) = self.target, self.draft, candidates
        if length == 0:
            return self.probs
        kept = min(1.0, float(p1[x1] / q1[x1]))
        probs = (1 - kept) * residual(p1, q1)[:, None] * p2
        if length == 1:
            probs[x1] += kept * p2[x1]
        else:
            kept_too = min(1.0, float(p2[x1, x2] / q2[x1, x2]))
            probs[x1] += kept * (1 - kept_too) * residual(p2[x1], q2[x1])
            probs[x1, x2] += kept * kept_too
        return probs


def joint_bias(policy: DraftLengthPolicy, seed: int) -> float:
    """The total variation between the text of two rows, decoded side by side under a policy, and the target's."""
    generator = torch.Generator().manual_seed(seed)
    rows = [TwoTokens.random(generator) for _ in range(2)]
    firsts = torch.rand(2, generator=generator)
    seconds = torch.rand(2, 2, generator=generator)  # the second confidence knows the first candidate
    probs = torch.zeros(2, 2, 2, 2, dtype=torch.float64)
    for (x, chance), (y, other_chance) in itertools.product(*(row.candidates_with_chance() for row in rows)):
        table = torch.tensor([[firsts[0], seconds[0, x[0]]], [firsts[1], seconds[1, y[0]]]])
        lengths = lengths_of(policy, table)
        emitted = [row.emitted(candidates, n) for row, candidates, n in zip(rows, (x, y), lengths)]
        probs += chance * other_chance * torch.einsum("ab,cd->abcd", *emitted)
    expected = torch.einsum("ab,cd->abcd", rows[0].probs, rows[1].probs)
    return float((probs - expected).abs().sum() / 2)


@pytest.mark.parametrize(
    "policy",
    [
        VerifyAll(),
        ConfidenceThreshold(0.5),
        ThroughputScheduler(costs_of(JAGGED_COSTS)),
        ThroughputScheduler(costs_of({2: 5.0, 6: 6.5})),
    ],
    ids=["all", "threshold", "jagged", "smooth"],
)
def test_text_of_all_rows_together_follows_the_target(policy):
    assert max(joint_bias(policy, seed) for seed in range(15)) < 1e-12


def test_global_search_is_biased():
    assert max(joint_bias(GlobalSearch(costs_of(JAGGED_COSTS)), seed) for seed in range(15)) > 0.01


def appendix_chance_of_a(policy: DraftLengthPolicy) -> float:
    """P(Y = A) with p = (.7, .3), q = (.5, .5): .8 is the chance of acceptance, and c2 is .9 after A, 0 after B."""
    p, q = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    text = TwoTokens((p, torch.stack([p, p])), (q, torch.stack([q, q])))
    chance_of_a = 0.0
    for candidates, chance in text.candidates_with_chance():
        (length,) = lengths_of(policy, [[0.8, (0.9, 0.0)[candidates[0]]]])
        chance_of_a += chance * float(text.emitted(candidates, length)[0].sum())
    return chance_of_a


def test_search_beyond_a_dip_favours_tokens_with_good_successors():
    everything = GlobalSearch(costs_of(APPENDIX_COSTS))
    assert lengths_of(everything, [[0.8, 0.9]]) == [2]
    assert lengths_of(everything, [[0.8, 0.0]]) == [0]
    assert appendix_chance_of_a(everything) == pytest.approx(0.85)
    scheduler = ThroughputScheduler(costs_of(APPENDIX_COSTS))
    assert lengths_of(scheduler, [[0.8, 0.9]]) == lengths_of(scheduler, [[0.8, 0.0]]) == [0]
    assert appendix_chance_of_a(scheduler) == pytest.approx(0.7)


# What may be looked at


def sequential_lengths(step_costs: StepCosts, table: list[list[float]], limits: list[int]) -> list[int]:
    """Algorithm 1 by its definition: all products, sorted, ties by position and then row; stops at the first loss."""
    products = [
        (-math.prod(row[: j + 1]), j, index)
        for index, (row, limit) in enumerate(zip(table, limits))
        for j in range(limit)
    ]
    lengths, n, tau = [0] * len(table), len(table), float(len(table))
    best = tau / step_costs.at(n)
    for negated, j, index in sorted(product for product in products if product[0] < 0):
        n, tau = n + 1, tau - negated
        if not tau / step_costs.at(n) > best:
            break
        best, lengths[index] = tau / step_costs.at(n), j + 1
    return lengths


def random_case(seed: int) -> tuple[list[list[float]], list[int], StepCosts]:
    """Confidences with repeated values and some zeros, limits, and costs with dips and jumps."""
    generator = torch.Generator().manual_seed(seed)
    rows, k = (int(torch.randint(1, high, (), generator=generator)) for high in (6, 8))
    table = torch.randint(0, 9, (rows, k), generator=generator).div(8).pow(0.25).double().tolist()
    limits = torch.randint(0, k + 1, (rows,), generator=generator).tolist()
    steps = torch.rand(rows * (k + 1), generator=generator).pow(3).mul(0.4).cumsum(0).add(1)
    return table, limits, costs_of(dict(enumerate(steps.tolist(), start=rows)))


def test_equals_the_sorted_walk_of_algorithm_1():
    totals = []
    for seed in range(200):
        table, limits, step_costs = random_case(seed)
        lengths = lengths_of(ThroughputScheduler(step_costs), torch.tensor(table, dtype=torch.float64), limits)
        assert lengths == sequential_lengths(step_costs, table, limits)
        totals.append((sum(lengths), sum(limits)))
    assert any(0 < taken < possible for taken, possible in totals), "all or nothing shows nothing"


POLICIES = ["threshold", "scheduler"]


def policy_for(name: str, step_costs: StepCosts) -> DraftLengthPolicy:
    return ConfidenceThreshold(0.7) if name == "threshold" else ThroughputScheduler(step_costs)


@pytest.mark.parametrize("name", POLICIES)
def test_later_confidences_of_a_row_do_not_decide_about_a_candidate(name):
    num_partly = 0
    for seed in range(100):
        table, limits, step_costs = random_case(seed)
        policy = policy_for(name, step_costs)
        lengths = lengths_of(policy, table, limits)
        num_partly += 0 < sum(lengths) < sum(limits)
        for row, k in itertools.product(range(len(table)), range(len(table[0]))):
            for value in (0.0, 0.3, 1.0, NAN):
                changed = [list(confidences) for confidences in table]
                changed[row][k + 1 :] = [value] * len(changed[row][k + 1 :])
                assert (lengths_of(policy, changed, limits)[row] > k) == (lengths[row] > k)
    assert num_partly > 10


@pytest.mark.parametrize("name", POLICIES)
def test_confidences_behind_what_is_withheld_have_no_say_in_any_row(name):
    """Stronger: the lengths of all rows stay when every confidence that stands behind a withheld candidate changes."""
    for seed in range(100):
        table, limits, step_costs = random_case(seed)
        policy = policy_for(name, step_costs)
        lengths = lengths_of(policy, table, limits)
        for value in (0.0, 0.3, 1.0, NAN, 7.0):
            changed = [c[: n + 1] + [value] * (len(c) - n - 1) for c, n in zip(table, lengths)]
            assert lengths_of(policy, changed, limits) == lengths


def test_global_search_looks_ahead():
    control = GlobalSearch(costs_of(APPENDIX_COSTS))
    assert lengths_of(control, [[0.8, 0.9]]) != lengths_of(control, [[0.8, 0.0]])


class OnDevice(torch.Tensor):
    """A tensor that stands for one on an accelerator: whatever is computed from it is one too, and copies count."""

    copies: list[str] = []
    copying = {"cpu", "tolist", "item", "numpy", "to", "__bool__", "__int__", "__float__", "__index__", "__iter__"}

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ in cls.copying:
            cls.copies.append(function.__name__)
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **(kwargs or {}))
            return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result
        return super().__torch_function__(function, types, args, kwargs)


@pytest.mark.parametrize("name", POLICIES)
def test_copies_from_the_device_once(name):
    confidences = torch.full((8, 7), 0.9).as_subclass(OnDevice)
    OnDevice.copies.clear()
    bool((confidences.mean() > 0).any())
    assert len(OnDevice.copies) == 1, "the counter counts"
    OnDevice.copies.clear()
    policy = policy_for(name, costs_of({8: 1.0, 64: 1.1}))
    lengths = policy.lengths(confidences, torch.full((8,), 7), torch.ones(8, dtype=torch.bool))
    assert lengths.tolist() == [7] * 8 and type(lengths) is torch.Tensor
    assert len(OnDevice.copies) == 1


# Lengths


def test_all_is_the_limits_without_a_look_at_confidences():
    limits = torch.tensor([3, 0, 2])
    assert not VerifyAll.needs_confidence
    lengths = VerifyAll().lengths(None, limits, torch.tensor([True, False, True]))
    lengths += 1
    assert limits.tolist() == [3, 0, 2], "the caller's tensor is not handed out"


@pytest.mark.parametrize(
    "threshold, expected",
    [(0, [3, 3, 3]), (0.5, [3, 1, 0]), (0.75, [1, 1, 0]), (0.9, [1, 1, 0]), (1, [0, 1, 0])],
)
def test_threshold_stops_before_the_first_lower_confidence(threshold, expected):
    confidences = [[0.9, 0.5, 0.7], [1.0, 0.2, 1.0], [0.0, 1.0, 1.0]]
    assert lengths_of(ConfidenceThreshold(threshold), confidences) == expected


def test_threshold_is_not_about_the_product():
    assert lengths_of(ConfidenceThreshold(0.5), [[0.6, 0.6, 0.6, 0.6]]) == [4]


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_nan_is_not_confident(threshold):
    assert lengths_of(ConfidenceThreshold(threshold), [[1.0, NAN, 1.0], [NAN, 1.0, 1.0]]) == [1, 0]
    assert lengths_of(ThroughputScheduler(costs_of({1: 1.0})), [[1.0, NAN, 1.0], [NAN, 1.0, 1.0]]) == [1, 0]


@pytest.mark.parametrize("threshold", [-0.1, 1.5, NAN, math.inf, True, None, "0.5", torch.tensor(0.5)])
def test_threshold_outside_its_range_is_refused(threshold):
    with pytest.raises((TypeError, ValueError), match=r"^`threshold` has to be in \[0, 1\], but is .*\.$"):
        ConfidenceThreshold(threshold)


def test_limits_bound_threshold_and_scheduler():
    confidences = [[0.9, 0.9, 0.9], [0.9, 0.9, 0.9], [0.9, 0.9, 0.9]]
    for policy in (ConfidenceThreshold(0.5), ThroughputScheduler(costs_of({1: 1.0}))):
        assert lengths_of(policy, confidences, [3, 1, 0]) == [3, 1, 0]
        assert lengths_of(policy, torch.zeros(2, 0)) == [0, 0]


def test_scheduler_equals_the_best_of_all_lengths_when_throughput_has_one_peak():
    """With convex costs it has: expected tokens grow by less and less, costs by more and more."""
    generator = torch.Generator().manual_seed(0)
    totals = []
    for case in range(60):
        rows, k = 1 + case % 3, 4
        table = torch.rand(rows, k, generator=generator).pow(0.3)
        base, slope, bend = torch.rand(3, generator=generator).tolist()
        step_costs = costs_of({n: 5 * base + slope * n + 0.2 * bend * n**2 for n in range(1, rows * (k + 1) + 1)})
        limits = torch.randint(0, k + 1, (rows,), generator=generator)
        live = torch.ones(rows, dtype=torch.bool)
        lengths = ThroughputScheduler(step_costs).lengths(table, limits, live)
        control = GlobalSearch(step_costs)
        best = control.lengths(table, limits, live)
        values = [control.throughput(table.tolist(), tuple(each.tolist()), live.tolist()) for each in (lengths, best)]
        assert values[0] == pytest.approx(values[1], rel=1e-9)
        totals.append(int(lengths.sum()))
    assert len(set(totals)) > 4


def test_scheduler_stops_at_the_first_dip():
    """Three tokens cost as much as two, but the second does not pay: what lies behind is not looked for."""
    step_costs = costs_of({1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0})
    assert lengths_of(ThroughputScheduler(step_costs), [[0.9, 0.99, 0.99]]) == [0]
    assert lengths_of(GlobalSearch(step_costs), [[0.9, 0.99, 0.99]]) == [3]


def test_equal_products_go_by_position_and_then_by_row():
    confidences = [[0.5, 1.0, 1.0], [0.5, 1.0, 1.0], [0.5, 1.0, 1.0]]
    for room, expected in enumerate(([0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1])):
        step_costs = costs_of({3 + room: 1.0, 4 + room: 100.0})
        assert lengths_of(ThroughputScheduler(step_costs), confidences) == expected


def test_confident_row_takes_the_room_of_an_unsure_one():
    step_costs = costs_of({5: 1.0, 6: 100.0})
    assert lengths_of(ThroughputScheduler(step_costs), [[0.2, 0.9, 0.9], [0.9, 0.8, 0.7]]) == [0, 3]


def test_no_gain_is_no_reason_to_verify():
    step_costs = costs_of({1: 1.0, 2: 1.5})
    assert lengths_of(ThroughputScheduler(step_costs), [[0.5]]) == [0]
    assert lengths_of(ThroughputScheduler(step_costs), [[0.51]]) == [1]


def test_impossible_candidates_are_not_verified_even_for_free():
    falling = costs_of({1: 3.0, 4: 1.0})
    assert lengths_of(ThroughputScheduler(falling), [[0.5, 0.0, 1.0]]) == [1]
    assert lengths_of(ThroughputScheduler(falling), [[1e-300, 1e-300, 1.0]]) == [0], "fp32 knows no such number"
    tiny = torch.tensor([[1e-300, 1e-300, 1.0]], dtype=torch.float64)
    assert lengths_of(ThroughputScheduler(falling), tiny) == [1], "the product is 0"


def test_live_row_without_room_costs_a_token_and_an_empty_slot_does_not():
    step_costs = costs_of({1: 1.0, 2: 1.0, 3: 10.0})
    scheduler, confidences = ThroughputScheduler(step_costs), [[0.9, 0.9], [0.9, 0.9]]
    assert lengths_of(scheduler, confidences, [2, 0], [True, False]) == [1, 0]
    assert lengths_of(scheduler, confidences, [2, 0], [True, True]) == [0, 0]
    assert lengths_of(scheduler, [[NAN, NAN], [0.9, 0.9]], [0, 2], [False, True]) == [0, 1]
    assert lengths_of(scheduler, confidences, [0, 0], [False, False]) == [0, 0]


def test_scheduler_needs_step_costs():
    with pytest.raises(TypeError, match="`step_costs` has to be a `StepCosts`, but is a 'dict'"):
        ThroughputScheduler({1: 1.0})  # type: ignore[arg-type]


# Step costs


def test_costs_between_and_beyond_what_was_measured():
    step_costs = costs_of({8: 6.0, 2: 1.0, 4: 2.0})
    expected = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 8: 6.0, 9: 7.0, 12: 10.0}
    assert {n: step_costs.at(n) for n in expected} == pytest.approx(expected)


def test_costs_do_not_fall_beyond_what_was_measured():
    step_costs = costs_of({1: 3.0, 3: 2.0})
    assert [step_costs.at(n) for n in (1, 2, 3, 4, 100)] == [3.0, 2.5, 2.0, 2.0, 2.0]


def test_single_cost_is_the_cost_of_everything():
    assert [costs_of({4: 2.0}).at(n) for n in (1, 4, 9)] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        ({"milliseconds": {}}, ValueError, "at least one entry"),
        ({"milliseconds": [1.0]}, TypeError, "`milliseconds` has to be a dict"),
        ({"milliseconds": {0: 1.0}}, ValueError, "has to be at least 1, but is 0"),
        ({"milliseconds": {"1": 1.0}}, TypeError, "has to be an int, but is '1'"),
        ({"milliseconds": {True: 1.0}}, TypeError, "has to be an int, but is True"),
        ({"milliseconds": {1: 0.0}}, ValueError, "has to be above 0, but is 0.0"),
        ({"milliseconds": {1: NAN}}, ValueError, "has to be a finite number.*, but is nan"),
        ({"milliseconds": {1: math.inf}}, ValueError, "has to be a finite number.*, but is inf"),
        ({"milliseconds": {1: "2"}}, TypeError, "has to be a number, but is '2'"),
        ({"model": None}, TypeError, "`model` has to be a str"),
        ({"device": 0}, TypeError, "`device` has to be a str"),
        ({"num_rows": 0}, ValueError, "`num_rows` has to be at least 1"),
        ({"context_length": -1}, ValueError, "`context_length` has to be at least 0"),
        ({"context_length": 1.5}, TypeError, "`context_length` has to be an int"),
    ],
    ids=str,
)
def test_impossible_costs_are_refused(changes, error, sentence):
    good = {"milliseconds": {1: 1.0}, "model": "tiny", "device": "cpu", "num_rows": 1, "context_length": 0}
    with pytest.raises(error, match=sentence):
        StepCosts(**good | changes)


def test_costs_come_back_from_their_file(tmp_path):
    saved = StepCosts({2: 1.25, 4: 1 / 3}, "tiny – ü", "cpu, threads: 1", num_rows=2, context_length=256)
    saved.save(tmp_path / "costs.json")
    loaded = StepCosts.load(tmp_path / "costs.json")
    assert loaded == saved and list(loaded.milliseconds) == [2, 4]
    assert StepCosts.load(str(tmp_path / "costs.json")) == saved


GOOD_FILE = {"milliseconds": {"1": 1.0}, "model": "tiny", "device": "cpu", "num_rows": 1, "context_length": 0}


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"", "Expecting value"),
        (json.dumps(GOOD_FILE).encode()[:-5], "Unterminated string"),
        (b"\xff\xfe\x00", "'utf-8' codec"),
        ([1.0], "it has to be a JSON object, but is a list"),
        ({"temperatures": [1.0]}, r"it lacks \['context_length', 'device', 'milliseconds', 'model', 'num_rows'\]"),
        ({k: v for k, v in GOOD_FILE.items() if k != "num_rows"}, r"it lacks \['num_rows'\]"),
        (GOOD_FILE | {"comment": "mine"}, r"it has \['comment'\], which mean nothing here"),
        (GOOD_FILE | {"milliseconds": {}}, ".*at least one entry"),
        (GOOD_FILE | {"milliseconds": {"many": 1.0}}, "invalid literal for int.*'many'"),
        (GOOD_FILE | {"milliseconds": {"1": NAN}}, ".*a finite number"),
        (GOOD_FILE | {"milliseconds": {"1": None}}, ".*has to be a number, but is None"),
        (GOOD_FILE | {"milliseconds": [1.0]}, "`milliseconds` has to be a dict"),
    ],
    ids=range(12),
)
def test_other_file_is_refused_by_name(tmp_path, content, sentence):
    path = tmp_path / "other.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError, match=f"other.json' holds no step costs: {sentence}"):
        StepCosts.load(path)


def test_missing_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.json"):
        StepCosts.load(tmp_path / "none.json")


def test_policies_show_their_settings():
    costs = StepCosts({1: 2.0, 8: 3.0}, "a model", "a processor", 1, 100)
    assert repr([VerifyAll(), ConfidenceThreshold(0.5)]) == "[VerifyAll(), ConfidenceThreshold(0.5)]"
    assert repr(ThroughputScheduler(costs)) == f"ThroughputScheduler({costs})"
