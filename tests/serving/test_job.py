"""A job tells what became of one prompt."""

import pytest
import torch

from hf_specgen.serving.job import Job
from hf_specgen.serving.prompt_encoder import PromptEncoder
from hf_specgen.serving.sampling_params import SamplingParams
from tests.support.models import make_model
from tests.support.tokenizers import TOKENIZER, letters_tokenizer


def greedy(max_new_tokens=8, **settings):
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, **settings)


def job_of(params=None, prompt="hi") -> Job:
    (job,) = PromptEncoder(make_model(), TOKENIZER).jobs(prompt, greedy(20) if params is None else params)
    job.request.start(torch.device("cpu"))
    return job


def commit(job, text):
    job.request.commit(letters_tokenizer(False)(text)["input_ids"])


def test_pieces_are_given_once():
    job = job_of(greedy(20, stop=["xyz"]))
    commit(job, "abx")
    assert job.take_piece() == "ab" and job.take_piece() == ""
    commit(job, "y")
    assert job.take_piece() == ""
    commit(job, "q")
    assert job.take_piece() == "xyq"
    commit(job, "rxy")
    assert job.take_piece() == "r"
    job.request.finish_reason = "length"
    assert job.take_piece() == "xy" and job.take_piece() == ""
    assert job.completion().text == "abxyqrxy"


@pytest.mark.parametrize("reason", ["length", "eos", "stop", "aborted"])
def test_completion_tells_the_finish_reason(reason):
    job = job_of(greedy(20, logprobs=0))
    commit(job, "abc")
    assert not job.is_done
    job.request.finish_reason = reason
    completion = job.completion()
    assert job.is_done and completion.finish_reason == reason and completion.error is None
    assert completion.text == "abc" and completion.token_ids == tuple(job.request.token_ids)
    assert completion.prompt == "hi" and completion.stats is job.request.stats and completion.logprobs == ()


def test_error_of_a_request_and_of_its_job():
    job = job_of()
    commit(job, "ab")
    job.request.finish_reason, job.request.error = "error", LookupError("own")
    assert str(job.completion().error) == "own" and job.completion().finish_reason == "error"
    job = job_of()
    commit(job, "ab")
    job.error = RuntimeError("from outside")
    job.request.finish_reason = "aborted"
    completion = job.completion()
    assert completion.finish_reason == "error" and str(completion.error) == "from outside" and completion.text == "ab"


def test_job_is_one_of_its_kind():
    assert job_of() != job_of()
