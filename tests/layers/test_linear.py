import copy
import io
import pickle

import pytest
import torch
from torch import nn

from hf_specgen.layers import linear as cpu_linear
from hf_specgen.layers.linear import Linear, LinearTiming, tune_linears


class TwoLayers(nn.Module):
    """An embedding tied to the last layer, as in language models, and a layer with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.inner = nn.Linear(24, 24)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(input_ids))))


@pytest.fixture
def always_transposed(monkeypatch):
    """Makes the measured winner certain: the clock has its say in no test but the one that reads the table."""
    monkeypatch.setattr(LinearTiming, "is_transposed_faster", True)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TwoLayers().eval()


@pytest.fixture
def transposed_calls(monkeypatch):
    calls = []

    def counted(rows, weight, bias=None, product=cpu_linear.transposed_product):
        calls.append(rows.shape[0])
        return product(rows, weight, bias)

    monkeypatch.setattr(cpu_linear, "transposed_product", counted)
    return calls


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 4), (3, 5), (16,), (1, 17)])
def test_same_numbers_as_stock(model, always_transposed, transposed_calls, shape):
    stock = copy.deepcopy(model)
    tune_linears(model, num_rows=(1, 2, 16))
    transposed_calls.clear()
    input_ids = torch.arange(torch.Size(shape).numel()).view(shape)
    with torch.no_grad():
        expected, logits = stock(input_ids), model(input_ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    assert logits.is_contiguous() and logits.shape == expected.shape
    assert len(transposed_calls) == (0 if input_ids.numel() > 16 else 2)


def test_input_that_is_not_contiguous(model, always_transposed):
    hidden = torch.randn(24, 3, 2).permute(2, 1, 0)
    with torch.no_grad():
        expected = model.inner(hidden)
        with tune_linears(model):
            torch.testing.assert_close(model.inner(hidden), expected)


def test_unmeasured_counts_follow_the_nearest_measured_one():
    shape = torch.Size((3, 4))
    slow, fast = (LinearTiming(shape, 2, 10.0, 10.0), LinearTiming(shape, 6, 10.0, 5.0))
    assert cpu_linear._faster_num_rows([slow, fast], shape) == {4, 5, 6}


def test_small_gain_is_not_worth_a_change():
    assert not LinearTiming(torch.Size((3, 4)), 2, stock_us=100.0, transposed_us=96.0).is_transposed_faster
    assert LinearTiming(torch.Size((3, 4)), 2, stock_us=100.0, transposed_us=90.0).is_transposed_faster


def test_restore_gives_back_plain_modules(model, always_transposed):
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    tuning = tune_linears(model)
    assert type(model.inner) is type(model.head) is Linear
    tuning.restore()
    tuning.restore()
    assert type(model.inner) is type(model.head) is nn.Linear
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_context_manager_restores_after_an_error(model, always_transposed):
    with pytest.raises(RuntimeError, match="stop"), tune_linears(model):
        raise RuntimeError("stop")
    assert type(model.inner) is nn.Linear


def test_shapes_without_a_gain_stay_plain(model, monkeypatch):
    monkeypatch.setattr(LinearTiming, "is_transposed_faster", False)
    assert tune_linears(model).modules == ()
    assert type(model.inner) is nn.Linear


def test_copies_and_pickles_are_plain_and_equal(model, always_transposed):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tune_linears(model)
    assert model.state_dict().keys() == state.keys()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert type(copied.inner) is nn.Linear and "plan" not in vars(copied.inner)
        assert copied.head.weight is copied.embedding.weight
        for name, tensor in copied.state_dict().items():
            assert torch.equal(tensor, state[name])
    assert type(model.inner) is Linear and "plan" in vars(model.inner)


def test_bears_the_name_of_its_base(model, always_transposed):
    before = repr(model)
    tune_linears(model)
    assert repr(model) == before


def test_other_thread_count_uses_the_stock_product(model, always_transposed, transposed_calls):
    num_threads = torch.get_num_threads()
    tune_linears(model)
    transposed_calls.clear()
    try:
        torch.set_num_threads(num_threads + 1)
        with torch.no_grad():
            model(torch.arange(4))
    finally:
        torch.set_num_threads(num_threads)
    assert transposed_calls == []
    with torch.no_grad():
        model(torch.arange(4))
    assert transposed_calls == [4, 4]


def test_gradients_flow_and_equal_stock(model, always_transposed, transposed_calls):
    stock = copy.deepcopy(model)
    tune_linears(model)
    transposed_calls.clear()
    for each in (stock, model):
        each(torch.arange(4)).square().sum().backward()
    assert transposed_calls == []
    assert torch.equal(model.inner.weight.grad, stock.inner.weight.grad)


def test_other_precisions_use_the_stock_product(model, always_transposed, transposed_calls):
    tune_linears(model)
    transposed_calls.clear()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(torch.arange(4)).dtype == torch.bfloat16
    with torch.no_grad():
        assert model.to(torch.bfloat16)(torch.arange(4)).dtype == torch.bfloat16
    assert transposed_calls == []


def test_measuring_leaves_the_global_generator_alone(model):
    state = torch.get_rng_state()
    tune_linears(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_subclasses_of_linear_stay_untouched(model, always_transposed):
    class SpecialLinear(nn.Linear):
        pass

    model.inner.__class__ = SpecialLinear
    tuning = tune_linears(model)
    assert tuning.modules == (model.head,) and type(model.inner) is SpecialLinear


def test_table_names_every_shape_and_count(model):
    tuning = tune_linears(model, num_rows=(2, 5))
    assert len(tuning.timings) == 4 and tuning.num_threads == torch.get_num_threads()
    assert all(timing.stock_us > 0 and timing.transposed_us > 0 for timing in tuning.timings)
    title, header, *lines = str(tuning).splitlines()
    assert f"{torch.get_num_threads()} threads" in title
    assert "24 x 24" in header and "50 x 24" in header
    assert [line.split()[0] for line in lines] == ["2", "5"]


def test_no_time_left_still_measures_everything_once(model, monkeypatch):
    monkeypatch.setattr(cpu_linear, "MAX_SECONDS", 0.0)
    assert len(tune_linears(model, num_rows=(2, 5)).timings) == 4


def test_refuses_what_it_cannot_tune(model, always_transposed):
    with pytest.raises(ValueError, match="float32"):
        tune_linears(copy.deepcopy(model).half())
    with pytest.raises(ValueError, match="none"):
        tune_linears(nn.Embedding(3, 4))
    with pytest.raises(ValueError, match="at least 1"):
        tune_linears(model, num_rows=(0, 2))
    with pytest.raises(ValueError, match="at least 1"):
        tune_linears(model, num_rows=())
    tune_linears(model)
    with pytest.raises(ValueError, match="tuned already"):
        tune_linears(model)
