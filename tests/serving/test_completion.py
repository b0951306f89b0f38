"""A completion says what became of its prompt, and how fast."""

import pytest

from hf_specgen import Completion
from tests.support.serving import KINDS, backend_of, greedy


def test_repr_leaves_out_what_is_long():
    completion = Completion("a prompt", "some text", (1, 2, 3), "stop", 1, 0, stop_reason="###", num_prompt_tokens=4)
    assert repr(completion) == (
        "Completion(index=1, sample=0, text='some text', finish_reason='stop', stop_reason='###', "
        "num_prompt_tokens=4, num_generated_tokens=3)"
    )
    refused = Completion("a prompt", "", (), "error", error=ValueError("too long"))
    assert repr(refused).endswith("num_generated_tokens=0, error=ValueError('too long'))")


@pytest.mark.parametrize("kind", KINDS)
def test_each_completion_has_its_own_statistics(kind):
    backend = backend_of(kind)
    completions = backend.generate(["abc", "xyz", "qrstu"], greedy(ignore_eos=True))
    for completion in completions:
        assert completion.stats.tokens == completion.num_generated_tokens == 24
        assert (completion.stats.drafting_rounds > 0) == (backend.stats.drafting_rounds > 0)
        assert completion.stats.summary().startswith("24 tokens in ")
    assert sum(completion.stats.accepted.total() for completion in completions) == backend.stats.accepted.total()
