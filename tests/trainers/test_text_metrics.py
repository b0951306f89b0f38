import pytest

from tests.support.completions import completed, compute, failed


def test_exact_match_looks_past_white_space_around():
    completions = [completed(" 42\n", 0), completed("4 2", 1), completed("b", 2), completed("a", 3)]
    assert compute("exact_match", completions, ["42", "42", ["a", "b "], ["b"]]) == {"exact_match": 0.5}


def test_a_failed_completion_matches_nothing():
    assert compute("exact_match", [failed(), completed("", 1)], ["", ""]) == {"exact_match": 0.5}


def test_rouge_l_is_the_mean_f_measure_of_the_longest_common_subsequence():
    pytest.importorskip("rouge_score")
    # "the cat": 2 words in order of 4 generated (1/2) and 3 wanted (2/3): F = 4/7. "yes": 1. Nothing: 0.
    completions = [completed("The fat black cat.", 0), completed("yes", 1), completed("", 2)]
    result = compute("rouge_l", completions, ["the cat sat", ["no", "yes"], "something"])
    assert result == {"rouge_l": pytest.approx((4 / 7 + 1 + 0) / 3)}
    assert type(result["rouge_l"]) is float


def test_rouge_l_refuses_references_without_words_that_it_knows():
    pytest.importorskip("rouge_score")
    with pytest.raises(ValueError, match="knows words of a-z and 0-9 only"):
        compute("rouge_l", [completed("नमस्ते")], ["नमस्ते"])


def chrf_by_hand(orders):
    """The mean over orders of precision and of recall, then F with beta 2, of (matches, generated, wanted)."""
    precision = sum(m / g for m, g, _ in orders) / len(orders)
    recall = sum(m / w for m, _, w in orders) / len(orders)
    return 100 * 5 * precision * recall / (4 * precision + recall)


def test_chrf_is_the_f_score_of_character_n_grams():
    pytest.importorskip("sacrebleu")
    # "abc" for "abd": 2 of 3 characters, 1 of 2 pairs, 0 of 1 triple; there are no longer ones.
    expected = chrf_by_hand([(2, 3, 3), (1, 2, 2), (0, 1, 1)])
    assert compute("chrf", [completed("abc")], ["abd"]) == {"chrf": pytest.approx(expected)}
    assert compute("chrf", [completed("abd")], ["abd"]) == {"chrf": 100.0}
    assert compute("chrf", [completed("")], ["abd"]) == {"chrf": 0.0}


def test_chrf_counts_the_whole_corpus_and_the_best_of_several_references():
    pytest.importorskip("sacrebleu")
    # Characters: 2 + 2 matches of 3 + 2 generated and 3 + 2 wanted; pairs: 1 + 1 of 2 + 1; triples: 0 of 1.
    expected = chrf_by_hand([(4, 5, 5), (2, 3, 3), (0, 1, 1)])
    completions = [completed("abc", 0), completed("xy", 1)]
    assert compute("chrf", completions, ["abd", ["nothing", "xy"]]) == {"chrf": pytest.approx(expected)}
