import random

import numpy as np
import pytest
import torch

from tests.support.models import make_model
from tests.support.training import dropout_model, text_tokenizer
from trainers.preservation import preserved


def training_model():
    model = dropout_model().train()
    model.transformer.h[1].eval()  # a frozen layer
    model.config.use_cache = False
    model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": True})
    return model


def state_of(model, tokenizer) -> dict:
    modules = dict(model.named_modules())
    return {
        "flags": {name: module.training for name, module in modules.items()},
        "checkpointing": {
            name: (module.gradient_checkpointing, module._gradient_checkpointing_func.keywords)
            for name, module in modules.items()
            if hasattr(module, "_gradient_checkpointing_func")
        },
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "use_cache": model.config.use_cache,
        "generation_config": (id(model.generation_config), model.generation_config.to_dict()),
        "padding_side": (tokenizer.padding_side, tokenizer.truncation_side),
        "python": random.getstate(),
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "torch": torch.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "determinism": torch.get_deterministic_debug_mode(),
        "precision": torch.get_float32_matmul_precision(),
        "default": (torch.get_default_dtype(), torch.get_default_device()),
        "numpy errors": np.geterr(),
    }


def disturb(model, tokenizer):
    """What evaluation code has been seen to leave behind."""
    model.train()
    model.config.use_cache = True
    model.activation_checkpointing_disable()
    model.activation_checkpointing_enable()
    model.generation_config.max_length = 20
    model.generation_config = type(model.generation_config)(do_sample=True)
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    random.random(), np.random.rand(), torch.rand(3)
    torch.set_grad_enabled(False), torch.autograd.set_detect_anomaly(True)
    torch.use_deterministic_algorithms(True, warn_only=True), torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float64), torch.set_default_device("meta")
    np.seterr(all="ignore")


def test_everything_is_as_before():
    model, tokenizer = training_model(), text_tokenizer()
    before = state_of(model, tokenizer)
    with preserved([model], tokenizer):
        disturb(model, tokenizer)
        disturbed = state_of(model, tokenizer)
    assert {name for name, value in disturbed.items() if value == before[name]} == {"attributes"}
    assert state_of(model, tokenizer) == before
    assert before["checkpointing"], "nothing was checkpointed"
    assert set(before["flags"].values()) == {True, False}


def test_everything_is_as_before_after_an_exception():
    model, tokenizer = training_model(), text_tokenizer()
    before = state_of(model, tokenizer)
    with pytest.raises(RuntimeError, match="no luck"):
        with preserved([model], tokenizer):
            disturb(model, tokenizer)
            raise RuntimeError("no luck")
    assert state_of(model, tokenizer) == before


def test_all_models_are_in_eval_mode_inside():
    model, draft, tokenizer = training_model(), make_model().train(), text_tokenizer()
    with preserved([model, draft], tokenizer):
        assert not any(module.training for each in (model, draft) for module in each.modules())
    assert draft.training and model.training and not model.transformer.h[1].training


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_numbers_of_the_device_are_as_before():
    model, tokenizer = make_model().cuda(), text_tokenizer()
    torch.cuda.manual_seed(3)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(3)
    with preserved([model], tokenizer):
        torch.rand(5, device="cuda")
    assert torch.rand(3, device="cuda").tolist() == expected.tolist()
