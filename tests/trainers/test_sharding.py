"""What is chosen for which model, on one process. How sharded models generate is in test_distributed."""

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tests.support.models import make_model
from trainers import sharding
from trainers.distribution import BrokenPass, on_all_ranks
from trainers.sharding import SynchronisedRounds, generating_model


@pytest.fixture
def said(monkeypatch):
    messages = []
    monkeypatch.setattr(sharding.logger, "info", messages.append)
    return messages


@pytest.fixture
def group(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_whole_model_is_used_as_it_is(said):
    model = make_model()
    with generating_model(model) as (target, rounds):
        assert target is model and rounds is None
    assert said == ["Generating with the whole model: every rank goes at its own pace."]


def test_wrappers_of_data_parallelism_and_compilation_are_taken_off(group):
    model = make_model()
    for wrapped in (DistributedDataParallel(model), DataParallel(model), torch.compile(model)):
        with generating_model(wrapped) as (target, rounds):
            assert target is model and rounds is None


def test_parameters_that_deepspeed_has_partitioned_need_rounds(said):
    model = make_model()
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number
    with generating_model(model) as (target, rounds):
        assert target is model and isinstance(rounds, SynchronisedRounds)
    assert said == ["Generating with ZeRO-3: the ranks run synchronised rounds."]
    assert not model._forward_pre_hooks


def test_tensor_parallelism_is_refused(group):
    model = make_model()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    weight = DTensor.from_local(model.lm_head.weight.detach(), mesh, [Replicate()])
    model.lm_head.weight = torch.nn.Parameter(weight)
    with pytest.raises(ValueError, match="`lm_head.weight` is split by tensor parallelism"):
        with generating_model(model):
            pass


def test_a_round_owes_one_pass(group):
    model = make_model()
    rounds = SynchronisedRounds(model)
    assert rounds(False) is False
    assert rounds(True) is True
    assert rounds(False) is True, "the others count on the pass of this round"
    model(input_ids=torch.tensor([[3]]))
    assert rounds(False) is False
    rounds.close()
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_an_error_waits_until_the_round_is_complete(group):
    model, passes = make_model(), []
    model.register_forward_pre_hook(lambda *args: passes.append(1))
    rounds = SynchronisedRounds(model)
    with pytest.raises(LookupError):
        with rounds.in_step():
            rounds(True)
            raise LookupError("between the question and the pass")
    assert len(passes) == 1


def test_an_error_inside_a_pass_names_the_rank_and_waits_for_nobody(group, monkeypatch):
    messages, exchanges = [], []
    monkeypatch.setattr(sharding.logger, "error", messages.append)
    model = make_model()
    rounds = SynchronisedRounds(model)
    monkeypatch.setattr(distributed, "all_reduce", exchanges.append)

    def fail(*args):
        raise MemoryError("no room")

    def share():
        with rounds.in_step():
            model(input_ids=torch.tensor([[3]]))

    model.model.layers[1].register_forward_pre_hook(fail)
    sentence = "Rank 0 failed inside a pass of a sharded model.*MemoryError: no room"
    with pytest.raises(BrokenPass, match=sentence) as caught:
        on_all_ranks(share)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert messages == [str(caught.value)] and not exchanges


def test_a_dummy_pass_that_fails_is_an_error_inside_a_pass(group):
    model = make_model()
    rounds = SynchronisedRounds(model)

    def fail(*args):
        raise MemoryError("no room")

    model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(BrokenPass, match="Rank 0 failed inside a pass"):
        with rounds.in_step():
            rounds(True)
            raise LookupError("between the question and the pass")


def test_an_error_inside_a_pass_that_somebody_catches_is_raised_at_the_next_round(group):
    model = make_model()
    rounds = SynchronisedRounds(model)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(BrokenPass, match="ZeroDivisionError"):
        with rounds.in_step():
            rounds(True)
            try:
                model(input_ids=torch.tensor([[3]]))
            except ZeroDivisionError:
                pass
            handle.remove()
            rounds(True)


def test_an_error_outside_of_passes_that_is_handled_breaks_nothing(group):
    model = make_model()
    rounds = SynchronisedRounds(model)
    with rounds.in_step():
        try:
            raise LookupError("before the pass")
        except LookupError:
            model(input_ids=torch.tensor([[3]]))
        assert rounds(False) is False
