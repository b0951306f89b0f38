"""Calibration of a drafter's confidence: metrics by hand, temperatures that are known, recorded rounds, the file."""

import dataclasses
import json
import sys

import pytest
import torch
from transformers import PreTrainedModel

from hf_specgen import Candidates, CausalLMDrafter, Decoder, DecodingRules, Request
from hf_specgen.dspark.calibration import (
    CALIBRATION_FILE,
    GRID,
    Calibration,
    ConfidenceRecorder,
    ConfidenceRecords,
    auroc,
    brier_score,
    by_position,
    calibrate,
    expected_calibration_error,
    fit_temperatures,
)
from hf_specgen.dspark.reliability_plot import plot_reliability
from hf_specgen.engine import Verification
from hf_specgen.engine.batch import Rows
from tests.support.models import EOS, assert_partly_accepted, make_model, noisy_copy

SGLANG = {
    "temperatures": [1.5, 0.5],
    "dataset": "gsm8k",
    "num_samples": 100,
    "ece_before": [0.1, 0.2],
    "ece_after": [0.0, 0.1],
}


def exact_records(*factors: float) -> ConfidenceRecords:
    """Every combination of 4 probabilities, kept exactly as often as they say; logits are scaled by the factors."""
    index = torch.cartesian_prod(*[torch.arange(32)] * len(factors)).view(-1, len(factors))
    eighths = 2 * (index // 8) + 1
    is_kept = index % 8 < eighths
    logits = (eighths / 8).logit() * torch.tensor(factors)
    return ConfidenceRecords(logits, accepted(is_kept), torch.full((len(index),), len(factors)))


def random_records(factors: tuple[float, ...], seed: int, count: int = 4000) -> ConfidenceRecords:
    """True logits, normally distributed; candidates kept with those probabilities; logits scaled by the factors."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.2 * torch.randn(count, len(factors), generator=generator) + 1.2
    is_kept = torch.rand(logits.shape, generator=generator) < logits.sigmoid()
    return ConfidenceRecords(logits * torch.tensor(factors), accepted(is_kept), torch.full((count,), len(factors)))


def accepted(is_kept: torch.Tensor) -> torch.Tensor:
    return is_kept.long().cumprod(dim=1).sum(dim=1)


def test_calibration_error_by_hand():
    probabilities, labels = torch.tensor([0.12, 0.14, 0.62, 0.92, 0.94]), torch.tensor([0, 1, 1, 1, 0])
    # The first two share a bin, and so do the last two: |0.26 - 1| + |0.62 - 1| + |1.86 - 1|
    assert float(expected_calibration_error(probabilities, labels)) == pytest.approx((0.74 + 0.38 + 0.86) / 5)


def test_probability_of_one_falls_into_the_last_bin():
    error = expected_calibration_error(torch.tensor([1.0, 0.97, 0.92]), torch.tensor([1, 0, 1]))
    assert float(error) == pytest.approx((0.97 + 0.08) / 3)


def test_calibration_errors_of_many_rows_are_those_of_each():
    probabilities = torch.rand(3, 200, generator=torch.Generator().manual_seed(0))
    labels = torch.rand(200, generator=torch.Generator().manual_seed(1)) < 0.5
    together = expected_calibration_error(probabilities, labels)
    assert together.tolist() == [float(expected_calibration_error(row, labels)) for row in probabilities]
    assert len(set(together.tolist())) == 3


def test_brier_score_by_hand():
    score = brier_score(torch.tensor([0.1, 0.8, 0.6]), torch.tensor([0, 1, 0]))
    assert float(score) == pytest.approx((0.01 + 0.04 + 0.36) / 3)


def test_auroc_by_hand():
    # Of the pairs of a true and a false label, 0.4 over 0.1, 0.8 over 0.1 and 0.8 over 0.4 are right, 0.4 ties.
    assert auroc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1])) == 3.5 / 4


def test_auroc_is_the_share_of_pairs_in_order():
    probabilities = torch.randint(0, 12, (150,), generator=torch.Generator().manual_seed(0)) / 12
    labels = torch.rand(150, generator=torch.Generator().manual_seed(1)) < 0.2 + 0.6 * probabilities
    differences = probabilities[labels][:, None] - probabilities[~labels]
    share = ((differences > 0).double() + 0.5 * (differences == 0).double()).mean()
    assert auroc(probabilities, labels) == pytest.approx(float(share))
    assert share > 0.6


@pytest.mark.parametrize("label", [0, 1])
def test_auroc_needs_both_labels(label):
    assert auroc(torch.tensor([0.1, 0.4]), torch.tensor([label, label])) is None


def test_calibrated_logits_keep_temperature_1():
    records = exact_records(1.0, 1.0, 1.0)
    assert fit_temperatures(records) == [1.0, 1.0, 1.0]
    assert max(by_position(expected_calibration_error, records, (1.0,) * 3)) < 1e-6


def test_known_temperatures_are_found():
    assert fit_temperatures(exact_records(2.0, 0.5, 1.0)) == [2.0, 0.5, 1.0]


def test_a_position_is_fitted_behind_the_temperatures_before_it():
    records = exact_records(2.0, 1.0)
    assert fit_temperatures(records) == [2.0, 1.0]
    # Behind the raw first position, the second one would have to make up for it.
    first, second = records.logits.double().T
    labels = records.labels[:, 1]
    survivals = [first.sigmoid() * (second / temperature).sigmoid() for temperature in GRID]
    errors = [float(expected_calibration_error(survival, labels)) for survival in survivals]
    assert abs(GRID.index(1.0) - errors.index(min(errors))) > 1


def test_of_equally_good_temperatures_the_closest_to_1_is_taken():
    num_accepted = torch.tensor([0] * 60 + [1] * 40)
    records = ConfidenceRecords(torch.zeros(100, 1), num_accepted, torch.ones(100, dtype=torch.long))
    assert fit_temperatures(records) == [1.0]
    assert fit_temperatures(records, grid=[4.0, 0.5, 1.0, 2.0]) == [1.0]


def test_what_lies_behind_a_stop_is_not_fitted():
    known = exact_records(1.0, 1.0)
    # Half of them kept as their probability says; at the second position they would look like certain failures.
    stopped = ConfidenceRecords(
        torch.tensor([[0.0, 2.0]] * 4000), torch.tensor([0, 1] * 2000), torch.ones(4000).long()
    )
    records = ConfidenceRecords.concatenate([known, stopped])
    assert fit_temperatures(records) == [1.0, 1.0]
    assert max(by_position(expected_calibration_error, records, (1.0, 1.0))) < 1e-6
    as_if_judged = dataclasses.replace(records, num_judged=torch.full_like(records.num_judged, 2))
    assert by_position(expected_calibration_error, as_if_judged, (1.0, 1.0))[1] > 0.05
    assert fit_temperatures(as_if_judged)[1] > 1.5


def test_overconfident_logits_are_calibrated_on_held_out_records():
    factors = (1.8, 1.4, 2.0)
    calibration = calibrate(random_records(factors, seed=0), random_records(factors, seed=1), "synthetic", {})
    print(calibration)
    for before, after in zip(calibration.ece_before, calibration.ece_after):
        assert after < before / 2
    for before, after in zip(calibration.brier_before, calibration.brier_after):
        assert after < before
    first = calibration.auroc_before[0]
    assert first is not None and 0.6 < first < 1
    assert calibration.auroc_after[0] == pytest.approx(first)  # there a temperature changes no order
    assert calibration.num_samples == 4000


def test_metrics_are_those_of_the_held_out_records():
    fitted, held_out = exact_records(2.0, 1.0), exact_records(1.0, 1.0)
    calibration = calibrate(fitted, held_out, "synthetic", {})
    assert calibration.temperatures == (2.0, 1.0)
    assert max(calibration.ece_before) < 1e-6
    assert min(calibration.ece_after) > 0.01


def test_too_few_records_are_refused():
    many, few = exact_records(1.0, 1.0), random_records((1.0, 1.0), seed=0, count=60)
    few = dataclasses.replace(few, num_judged=torch.tensor([1] * 11 + [2] * 49))
    for fitted, held_out in ([few, many], [many, few]):
        with pytest.raises(ValueError, match=r"At least 50 records .* there are \[60, 49\]"):
            calibrate(fitted, held_out, "synthetic", {})
    assert len(fit_temperatures(dataclasses.replace(few, num_judged=torch.full((60,), 2)))) == 2


@pytest.mark.parametrize("grid", [[0.5, 2.0], [1.0, 0.0], [1.0, float("nan")], []])
def test_unusable_grid_is_refused(grid):
    with pytest.raises(ValueError, match="`grid` has to hold positive numbers and 1.0"):
        fit_temperatures(exact_records(1.0, 1.0), grid)


@dataclasses.dataclass
class FakeDrafter:
    confidence_logits: torch.Tensor | None
    num_assistant_tokens: int = 3


def make_rows(model: PreTrainedModel, num_slots: int) -> Rows:
    rows = Rows(model, num_slots)
    rules = DecodingRules(eos_token_ids=frozenset({EOS}))
    rows.requests = [Request([5], 20, rules) for _ in range(num_slots)]
    return rows


def verified(rows: int, num_accepted: list[int], num_possible: list[int] | None = None) -> Verification:
    possible = torch.full((rows,), 4) if num_possible is None else torch.tensor(num_possible)
    return Verification(torch.tensor(num_accepted), torch.full((rows,), 9), possible)


def test_recorder_keeps_rows_whose_whole_block_was_verified(llama):
    rows = make_rows(llama, 4)
    rows.requests[2] = None
    logits = torch.arange(12.0).view(4, 3) / 7
    candidates = Candidates(torch.full((4, 3), 8), torch.tensor([3, 2, 3, 3]))
    recorder = ConfidenceRecorder(FakeDrafter(logits))
    recorder(rows, candidates, verified(4, [1, 2, 3, 3]))
    records = recorder.records()
    assert torch.equal(records.logits, logits[[0, 3]])  # to the bit
    assert records.num_accepted.tolist() == [1, 3]
    assert records.num_judged.tolist() == [3, 3]
    assert records.labels.tolist() == [[True, False, False], [True, True, True]]


def test_recorder_reads_the_rows_of_the_span(llama):
    rows = make_rows(llama, 4)
    rows.requests[0] = rows.requests[3] = None
    rows.span = slice(1, 3)
    recorder = ConfidenceRecorder(FakeDrafter(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])))
    recorder(rows, Candidates(torch.full((2, 3), 8), torch.tensor([1, 3])), verified(2, [0, 2]))
    assert recorder.records().logits.tolist() == [[4.0, 5.0, 6.0]]
    assert recorder.records().num_accepted.tolist() == [2]


def test_nothing_is_known_behind_an_accepted_stop(llama):
    rows = make_rows(llama, 4)
    token_ids = torch.tensor([[8, EOS, 8], [8, EOS, 8], [EOS, EOS, 8], [8, 8, EOS]])
    recorder = ConfidenceRecorder(FakeDrafter(torch.zeros(4, 3)))
    # The stop is accepted with a token behind it; refused; accepted twice; accepted at the end.
    recorder(rows, Candidates(token_ids, torch.tensor([3] * 4)), verified(4, [3, 1, 2, 3]))
    records = recorder.records()
    assert records.num_accepted.tolist() == [2, 1, 1, 3]
    assert records.num_judged.tolist() == [2, 3, 1, 3]
    assert records.is_judged.sum(dim=0).tolist() == [4, 3, 2]


def test_rounds_without_a_whole_block_are_not_recorded(llama):
    rows = make_rows(llama, 2)
    drafter = FakeDrafter(torch.zeros(2, 3))
    recorder = ConfidenceRecorder(drafter)
    recorder(rows, Candidates.none(2, torch.device("cpu")), verified(2, [0, 0], [1, 1]))  # a prefill
    drafter.confidence_logits = torch.zeros(2, 2)  # all rows near the end of their budgets
    recorder(rows, Candidates(torch.full((2, 2), 8), torch.tensor([2, 2])), verified(2, [1, 2], [3, 3]))
    drafter.confidence_logits = None
    recorder(rows, Candidates(torch.full((2, 3), 8), torch.tensor([3, 3])), verified(2, [1, 2]))
    assert recorder.parts == []
    with pytest.raises(ValueError, match="No round was recorded in which a whole block was verified"):
        recorder.records()


def test_rows_that_could_not_be_judged_are_not_recorded(llama):
    rows = make_rows(llama, 3)
    recorder = ConfidenceRecorder(FakeDrafter(torch.tensor([[1.0] * 3, [2.0] * 3, [3.0] * 3])))
    # The first row could not be judged behind its first candidate, the second not behind its second.
    recorder(rows, Candidates(torch.full((3, 3), 8), torch.tensor([3] * 3)), verified(3, [2, 2, 2], [1, 2, 3]))
    assert recorder.records().logits.tolist() == [[3.0] * 3]


class DrafterWithConfidence(CausalLMDrafter):
    """Says a number of its own for every round and position."""

    confidence_logits: torch.Tensor | None = None

    def draft(self, rows, max_tokens):
        candidates = super().draft(rows, max_tokens)
        start = 100.0 * self.num_forwards
        self.confidence_logits = start + torch.arange(candidates.token_ids.numel()).view(candidates.token_ids.shape)
        return candidates


def test_records_of_a_decoder_are_its_whole_rounds():
    model = make_model("llama")
    drafter = DrafterWithConfidence(noisy_copy(model), num_assistant_tokens=3)
    recorder = ConfidenceRecorder(drafter)
    decoder = Decoder(model, drafter, max_batch_size=2, on_round=recorder, trace=True)
    rules = DecodingRules(eos_token_ids=frozenset({EOS, 7, 11}))
    for _ in decoder.run([Request([3 + i, 9, 4], 24, rules) for i in range(6)]):
        pass
    assert_partly_accepted(decoder.stats)
    whole = [trace.num_accepted for trace in decoder.stats.traces if len(trace.proposed) == 3]
    records = recorder.records()
    assert records.num_accepted.tolist() == whole
    assert 0 < len(whole) < len(decoder.stats.traces)
    assert len(records.logits.unique()) == 3 * len(whole)


def test_probabilities_by_hand():
    calibration = Calibration((2.0, 0.5))
    expected = torch.tensor([[1.0, 2.0], [-2.0, 8.0]]).sigmoid()
    assert torch.equal(calibration.probabilities(torch.tensor([[2.0, 1.0], [-4.0, 4.0]])), expected)
    first = calibration.probabilities(torch.tensor([[2.0], [-4.0]], dtype=torch.bfloat16))
    assert torch.equal(first, expected[:, :1])


def test_probabilities_do_not_wait_for_the_device():
    logits = torch.empty(4, 2, device="meta")  # has no values to read
    assert Calibration((2.0, 0.5)).probabilities(logits).device == logits.device


def test_file_gives_back_what_was_saved(tmp_path):
    decoding = {"do_sample": True, "temperature": 0.7, "top_k": 0}
    records = exact_records(2.0, 0.5)
    always = dataclasses.replace(records, num_accepted=torch.full_like(records.num_accepted, 2))
    calibration = calibrate(records, always, "gsm8k", decoding)
    assert calibration.auroc_after == (None, None)
    path = calibration.save(tmp_path / "drafter")
    assert path == tmp_path / "drafter" / CALIBRATION_FILE
    assert Calibration.load(path) == Calibration.load(tmp_path / "drafter") == calibration
    written = json.loads(path.read_text())
    assert set(SGLANG) < set(written)
    assert written["temperatures"] == [2.0, 0.5]
    assert written["auroc_after"] == [None, None]
    assert written["decoding"] == decoding


def test_file_of_sglang_is_read(tmp_path):
    (tmp_path / CALIBRATION_FILE).write_text(json.dumps(SGLANG | {"version": 3}))
    calibration = Calibration.load(tmp_path)
    assert calibration == Calibration((1.5, 0.5), "gsm8k", 100, ece_before=(0.1, 0.2), ece_after=(0.0, 0.1))


@pytest.mark.parametrize(
    "text, problem",
    [
        ("{", "readable JSON file"),
        ("[1.0]", "a JSON object"),
        ('{"ece_before": [0.1]}', "a list `temperatures`"),
        ('{"temperatures": 1.0}', "a list `temperatures`"),
        ('{"temperatures": []}', "`temperatures` have to be positive finite numbers"),
        ('{"temperatures": [1.0, 0.0]}', "`temperatures` have to be positive finite numbers"),
        ('{"temperatures": [1.0, -1]}', "`temperatures` have to be positive finite numbers"),
        ('{"temperatures": [NaN]}', "`temperatures.0` has to be a finite number"),
        ('{"temperatures": [Infinity]}', "`temperatures.0` has to be a finite number"),
        ('{"temperatures": ["1.0"]}', "`temperatures` have to be positive finite numbers"),
        ('{"temperatures": [true]}', "`temperatures` have to be positive finite numbers"),
        ('{"temperatures": [1.0], "ece_after": [NaN]}', "`ece_after.0` has to be a finite number"),
        ('{"temperatures": [1.0], "ece_after": [0.1, 0.2]}', "`ece_after` has to hold 1 numbers, but holds 2"),
    ],
)
def test_wrong_file_is_refused_by_name(tmp_path, text, problem):
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"some.json.*{problem}"):
        Calibration.load(path)


def test_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="absent.json.*readable"):
        Calibration.load(tmp_path / "absent.json")


def test_block_size_is_checked():
    calibration = Calibration((1.0, 1.0))
    calibration.check_block_size(2)
    with pytest.raises(ValueError, match="fitted for blocks of 2 candidates, but the drafter proposes 3; refit with"):
        calibration.check_block_size(3)


@pytest.mark.slow
@pytest.mark.parametrize("num_positions", [1, 5])
def test_diagram_is_drawn(tmp_path, num_positions):
    pytest.importorskip("matplotlib")
    records = random_records((1.5,) * num_positions, seed=0, count=300)
    plot_reliability(records, calibrate(records, records, "synthetic", {}), tmp_path / "reliability.png")
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="fitted for blocks of"):
        plot_reliability(records, Calibration((1.0,) * 3), tmp_path / "other.png")


def test_diagram_without_matplotlib_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="needs matplotlib: `pip install matplotlib`"):
        plot_reliability(exact_records(1.0), Calibration((1.0,)), tmp_path / "reliability.png")
