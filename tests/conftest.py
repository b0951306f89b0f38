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


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "run every test with the first of its parameters only, as `make test-fast` does"
    parser.addoption("--first-parameters", action="store_true", help=help)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--first-parameters"):
        first: dict[str, pytest.Item] = {}
        for item in items:
            first.setdefault(item.nodeid.split("[")[0], item)
        config.hook.pytest_deselected(items=[item for item in items if item not in first.values()])
        items[:] = first.values()


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return make_model("llama")
