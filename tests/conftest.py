"""Settings of every test: CPU, fp32, one thread, no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from tests.support.models import make_model  # noqa: E402

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return make_model("llama")
