import math
from collections import Counter
from functools import partial

import datasets
import evaluate
import numpy as np
import pytest
import torch

from hf_specgen import DecodingStats
from tests.support.completions import completed, compute, failed
from trainers import metrics as metrics_file
from trainers.metrics import EvalMetric, builtin_metrics, resolve_metrics

SCRIPT = '''
import datasets
import evaluate


class Shared(evaluate.Metric):
    """The share of predictions that begin as their reference does."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"shared": sum(p[:1] == r[:1] for p, r in zip(predictions, references)) / len(predictions)}
'''


def module(columns, result, kind=evaluate.Metric):
    """An evaluate module whose `_compute` is `result`."""

    class Module(kind):
        def _info(self):
            return evaluate.MetricInfo(description="", citation="", inputs_description="", features=columns)

        def _compute(self, **inputs):
            return result(**inputs)

    return Module(keep_in_memory=True)


def features(**kinds):
    return datasets.Features({name: datasets.Value(kind) for name, kind in kinds.items()})


TEXTS = features(predictions="string", references="string")


def test_several_samples_of_a_prompt_share_its_reference():
    completions = [completed(text, index) for index, text in [(1, "b"), (0, "b"), (0, "a"), (1, "b")]]
    assert compute("exact_match", completions, ["a", "b"]) == {"exact_match": 0.75}
    seen = []
    compute(lambda c, references: seen.append(references) or 0.0, completions, ["a", "b"])
    assert seen == [["b", "a", "a", "b"]]


# Functions


def mean_length(completions, references):
    return sum(len(completion.text) for completion in completions) / len(completions)


def test_functions_return_a_number_or_several():
    completions = [completed("ab"), completed("abcd", 1)]
    assert compute(mean_length, completions) == {"mean_length": 3.0}
    assert compute(partial(mean_length), completions) == {"partial": 3.0}
    several = {"a": np.float32(0.5), "b": torch.tensor(2), "c": np.array(1.0), "d": True, "e": 3}
    result = compute(lambda completions, references: several, completions)
    assert result == {"a": 0.5, "b": 2.0, "c": 1.0, "d": 1.0, "e": 3.0}
    assert {type(value) for value in result.values()} == {float}


def test_functions_get_completions_and_do_without_references():
    seen = []
    compute(lambda *arguments: seen.append(arguments) or 0, [completed("a")])
    assert seen == [([completed("a")], None)]


def test_a_single_metric_needs_no_list():
    assert [metric.name for metric in resolve_metrics("exact_match")] == ["exact_match"]
    assert [metric.name for metric in resolve_metrics(mean_length)] == ["mean_length"]
    assert resolve_metrics(()) == []
    ready = EvalMetric("mine", needs_references=False, score=mean_length)
    assert resolve_metrics([ready]) == [ready]


@pytest.mark.parametrize(
    "result, error, sentence",
    [
        ({"scores": [1, 2]}, TypeError, r"'scorer' has to return numbers, but its 'scores' is \[1, 2\]. Wrap it"),
        ({"score": "good"}, TypeError, "its 'score' is 'good'"),
        ({"score": None}, TypeError, "its 'score' is None"),
        ({"score": torch.ones(1)}, TypeError, "has to return numbers"),
        (None, TypeError, "its 'scorer' is None"),
        ({3: 1.0}, TypeError, "keys .* have to be texts, but one is 3"),
        (math.nan, ValueError, "finite numbers, but its 'scorer' is nan"),
        ({"score": torch.tensor(math.inf)}, ValueError, "its 'score' is inf"),
    ],
)
def test_results_that_are_no_numbers(result, error, sentence):
    def scorer(completions, references):
        return result

    with pytest.raises(error, match=sentence):
        compute(scorer, [completed()])


# evaluate


def test_an_evaluate_module_compares_texts():
    metric = module(TEXTS, lambda predictions, references: {"same": np.mean(np.equal(predictions, references))})
    assert compute(metric, [completed("a"), completed("b", 1)], ["a", "a"]) == {"same": 0.5}
    (resolved,) = resolve_metrics(metric)
    assert resolved.needs_references and resolved.name == "module"
    for _ in range(2):  # once more, as in the next evaluation
        assert resolved.compute([completed("a")], ["a"]) == {"same": 1.0}


def test_an_evaluate_module_may_do_without_references():
    metric = module(features(predictions="string"), lambda predictions: {"count": len(predictions)})
    assert compute(metric, [completed("a")] * 3) == {"count": 3.0}
    measurement = module(features(data="string"), lambda data: {"longest": max(map(len, data))}, evaluate.Measurement)
    assert compute(measurement, [completed("a"), completed("abc")]) == {"longest": 3.0}
    assert not resolve_metrics(measurement)[0].needs_references


def test_an_evaluate_module_that_fails_starts_afresh():
    results = iter([ZeroDivisionError, None])

    def count(predictions, references):
        if error := next(results):
            raise error
        return {"count": len(predictions)}

    (metric,) = resolve_metrics(module(TEXTS, count))
    with pytest.raises(ZeroDivisionError):
        metric.compute([completed("a")] * 2, ["a"])
    with pytest.raises(ValueError):  # a reference that is no text leaves predictions behind
        metric.compute([completed("a")] * 2, [5])
    assert metric.compute([completed("a")], ["a"]) == {"count": 1.0}


def test_several_formats_of_references():
    lists = datasets.Features(
        {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
    )
    metric = module([lists, TEXTS], lambda predictions, references: {"kinds": len(references[0])})
    assert compute(metric, [completed("a")], [["x", "y", "z"]]) == {"kinds": 3.0}
    assert compute(metric, [completed("a")], ["xy"]) == {"kinds": 2.0}


def test_what_evaluate_combines():
    first = module(TEXTS, lambda predictions, references: {"score": 1.0})
    second = module(features(predictions="string"), lambda predictions: {"score": 2.0})
    (metric,) = resolve_metrics(evaluate.combine({"a": first, "b": second}))
    assert metric.needs_references
    assert metric.compute([completed("a")], ["a"]) == {"a_score": 1.0, "b_score": 2.0}
    measurement = module(features(data="string"), lambda data: {"score": 1.0}, evaluate.Measurement)
    with pytest.raises(ValueError, match="does not keep apart"):
        resolve_metrics(evaluate.combine([first, measurement]))


def test_the_path_of_an_evaluate_script(tmp_path):
    (tmp_path / "shared.py").write_text(SCRIPT)
    path = str(tmp_path / "shared.py")
    assert compute(path, [completed("ab"), completed("cd", 1)], ["ax", "x"]) == {"shared": 0.5}


def test_evaluate_modules_that_cannot_be_fed():
    numbers = module(features(predictions="int64", references="int64"), None)
    with pytest.raises(ValueError, match="'module' has to take texts, but takes Value.*int64"):
        resolve_metrics([numbers])
    with pytest.raises(ValueError, match=r"there are only predictions and references. .* gives it \['sources'\]"):
        resolve_metrics([module(features(sources="string", predictions="string", references="string"), None)])
    with pytest.raises(ValueError, match="returned nothing: was it made for a `process_id` other than 0"):
        compute(module(TEXTS, lambda predictions, references: None), [completed("a")], ["a"])
    lists = module(TEXTS, lambda predictions, references: {"precisions": [1, 2]})
    with pytest.raises(TypeError, match=r"its 'precisions' is \[1, 2\]. Wrap it in a function"):
        compute(lists, [completed("a")], ["a"])


# What is refused


@pytest.mark.parametrize(
    "metrics, error, sentence",
    [
        (["exact-match"], ValueError, "one of .*'exact_match'.* but 'exact-match' is neither"),
        (["/nowhere/metric.py"], ValueError, "needs the path of a script"),
        ([5], TypeError, "A metric has to be one of .* but is 5"),
        ([evaluate.Metric], TypeError, "A metric has to be one of .* but is <class"),
        (5, TypeError, "`metrics` has to be a list of metrics, but is 5"),
        ({"mine": mean_length}, TypeError, "`metrics` has to be a list of metrics"),
        ([lambda completions: 0], TypeError, "'<lambda>' has to take completions and references, two arguments"),
        ([mean_length, mean_length], ValueError, "2 are called 'mean_length'"),
    ],
)
def test_what_is_no_metric(metrics, error, sentence):
    with pytest.raises(error, match=sentence):
        resolve_metrics(metrics)


@pytest.mark.parametrize("name, package", [("rouge_l", "rouge_score"), ("chrf", "sacrebleu")])
def test_a_package_that_is_missing_is_named(monkeypatch, name, package):
    monkeypatch.setattr(metrics_file, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"needs the package {package}.*`pip install 'hf-specgen\[metrics\]'`"):
        resolve_metrics([name])
    resolve_metrics(["exact_match"])


def test_references_that_are_needed_and_missing():
    (metric,) = resolve_metrics(["exact_match"])
    for check in (metric.check_references, lambda references: metric.compute([completed()], references)):
        with pytest.raises(ValueError, match="'exact_match' compares with references, but there are none"):
            check(None)
        for wrong in (5, None, [], ["a", 5]):
            with pytest.raises(TypeError, match="a reference has to be a text or a list of texts, but one is"):
                check([wrong])
    with pytest.raises(ValueError, match="holds 1, and there is a completion of prompt number 1"):
        metric.compute([completed(index=1)], ["a"])
    with pytest.raises(ValueError, match="needs at least one completion"):
        metric.compute([], [])
    resolve_metrics([mean_length])[0].check_references(None)
    resolve_metrics([mean_length])[0].check_references([5])


# Without references


def test_statistics_of_completions():
    completions = [
        completed(ids=[1, 2, 1, 2, 1, 2, 9], reason="eos"),  # 4-grams 1212 2121 1212: one of three repeats
        completed(ids=[3, 4, 5], reason="length"),
        completed(ids=[3], reason="stop"),
        failed(),
    ]
    stats = DecodingStats(
        drafting_rounds=4, drafting_tokens=10, judged=Counter({0: 4, 1: 1}), accepted=Counter({0: 3})
    )
    assert builtin_metrics(completions, 2.0, stats) == {
        "mean_length": 11 / 3,
        "max_length": 7.0,
        "distinct_1": 5 / 10,  # 1 2 3 4 5, without the eos
        "distinct_2": 4 / 7,  # 12 21 34 45 of 5 + 2
        "repetition_rate": pytest.approx(1 / 9),
        "eos_rate": 1 / 3,
        "length_limited_rate": 1 / 3,
        "error_rate": 0.25,
        "tokens_per_second": 5.5,
        "mean_accepted_length": 2.5,
        "acceptance_rate": 0.6,
    }


def test_n_grams_do_not_run_from_one_completion_into_the_next():
    completions = [completed(ids=[1, 2], reason="length")] * 2
    assert builtin_metrics(completions, 1.0, DecodingStats())["distinct_2"] == 0.5


def test_without_drafts_nothing_is_said_of_them():
    names = builtin_metrics([completed(ids=[1])], 1.0, DecodingStats(rounds=3, tokens=3)).keys()
    assert not names & {"mean_accepted_length", "acceptance_rate"}


@pytest.mark.parametrize(
    "completions",
    [[], [completed()], [completed(ids=[5])], [failed()]],
    ids=["none", "no token", "only eos", "failed"],
)
def test_rates_of_nothing_are_zero(completions):
    result = builtin_metrics(completions, 0.0, DecodingStats())
    assert all(type(value) is float and math.isfinite(value) for value in result.values())
    silent = ("distinct_1", "distinct_2", "repetition_rate", "tokens_per_second", "length_limited_rate")
    assert [result[name] for name in silent] == [0.0] * 5
