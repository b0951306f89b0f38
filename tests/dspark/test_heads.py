import numpy as np
import pytest
import torch

from hf_specgen import DSparkConfig, DSparkModel
from hf_specgen.dspark.heads import MARKOV_HEADS, ConfidenceHead
from tests.support.models import make_model

VOCAB, HIDDEN, RANK, BLOCK = 11, 6, 4, 5
HEADS = ("vanilla", "gated", "rnn")


def config_for(head: str = "vanilla", **settings) -> DSparkConfig:
    return DSparkConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "target_layer_ids": [0],
            "block_size": BLOCK,
            "markov_rank": RANK,
            "markov_head_type": head,
        }
        | settings
    )


def make_head(head: str, seed: int = 0, **settings) -> torch.nn.Module:
    torch.manual_seed(seed)
    module = MARKOV_HEADS[head](config_for(head, **settings))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def sigmoid(values):
    return 1 / (1 + np.exp(-values))


def reference(head: str, module: torch.nn.Module, previous_ids: np.ndarray, states: np.ndarray) -> np.ndarray:
    """The formulas of the paper for one block: ids `(k,)` and states `(k, hidden)` to corrections `(k, vocab)`."""
    weights = {name: parameter.detach().double().numpy() for name, parameter in module.named_parameters()}
    w1, w2 = weights["markov_w1.weight"], weights["markov_w2.weight"]
    memory = np.zeros(RANK)
    corrections = []
    for token_id, h in zip(previous_ids, states):
        e = w1[token_id]
        if head == "vanilla":
            features = e
        elif head == "gated":
            features = e * sigmoid(weights["gate_proj.weight"] @ np.concatenate([h, e]) + weights["gate_proj.bias"])
        else:
            z = np.concatenate([memory, e, h])
            joint = weights["joint_proj.weight"] @ z + weights["joint_proj.bias"]
            a, c, o = joint[:RANK], joint[RANK : 2 * RANK], joint[2 * RANK :]
            memory = sigmoid(a) * memory + (1 - sigmoid(a)) * np.tanh(c)
            features = np.tanh(o)
        corrections.append(w2 @ features)
    return np.stack(corrections)


def unrolled(module, previous_ids, states):
    """All steps of blocks, ids `(..., k)` and states `(..., k, hidden)`."""
    memory, corrections = None, []
    for index in range(states.shape[-2]):
        embedding = module.embed(previous_ids[..., index])
        correction, memory = module.step(embedding, states[..., index, :], memory)
        corrections.append(correction)
    return torch.stack(corrections, dim=-2)


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_step_follows_the_formula(head):
    module = make_head(head)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        previous_ids = torch.randint(VOCAB, (BLOCK,), generator=generator)
        states = torch.randn(BLOCK, HIDDEN, generator=generator)
        expected = reference(head, module, previous_ids.numpy(), states.double().numpy())
        found = unrolled(module, previous_ids, states)
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_step_over_any_leading_dimensions_equals_each_alone(head):
    """Sampling calls it with (rows, .), training with (batch, anchors, .)."""
    module = make_head(head)
    previous_ids, states = torch.randint(VOCAB, (2, 3, BLOCK)), torch.randn(2, 3, BLOCK, HIDDEN)
    together = unrolled(module, previous_ids, states)
    assert together.shape == (2, 3, BLOCK, VOCAB)
    for row in range(2):
        for anchor in range(3):
            alone = unrolled(module, previous_ids[row, anchor], states[row, anchor])
            torch.testing.assert_close(together[row, anchor], alone, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("head", ["vanilla", "gated"])
def test_heads_without_memory_take_all_slots_at_once(head):
    module = make_head(head)
    previous_ids, states = torch.randint(VOCAB, (2, 3, BLOCK)), torch.randn(2, 3, BLOCK, HIDDEN)
    at_once, memory = module.step(module.embed(previous_ids), states, None)
    assert memory is None
    torch.testing.assert_close(at_once, unrolled(module, previous_ids, states), rtol=0, atol=1e-5)


@torch.no_grad()
def test_memory_of_the_rnn_head_matters_and_starts_at_zero():
    module = make_head("rnn")
    embedding, states = module.embed(torch.tensor([3])), torch.randn(1, HIDDEN)
    first, memory = module.step(embedding, states, None)
    zero = torch.zeros(1, RANK)
    assert torch.equal(first, module.step(embedding, states, zero)[0])
    assert not torch.allclose(first, module.step(embedding, states, memory)[0])


@torch.no_grad()
def test_output_of_the_rnn_head_comes_from_the_state_before():
    """Changing what is only written to the memory (the candidate `c`) leaves this step's correction as it is."""
    module = make_head("rnn")
    embedding, states, memory = module.embed(torch.tensor([3])), torch.randn(1, HIDDEN), torch.randn(1, RANK)
    before, next_before = module.step(embedding, states, memory)
    module.joint_proj.weight[: 2 * RANK] += 1.0
    after, next_after = module.step(embedding, states, memory)
    assert torch.equal(before, after) and not torch.allclose(next_before, next_after)


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_states_are_read_by_the_heads_that_say_so(head):
    module = make_head(head)
    embedding = module.embed(torch.tensor([3]))
    first, second = (module.step(embedding, torch.randn(1, HIDDEN), None)[0] for _ in range(2))
    assert torch.equal(first, second) == (head == "vanilla")


def test_shapes_of_the_tensors():
    shapes = {
        "vanilla": {},
        "gated": {"gate_proj.weight": (RANK, HIDDEN + RANK), "gate_proj.bias": (RANK,)},
        "rnn": {"joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN), "joint_proj.bias": (3 * RANK,)},
    }
    for head, own in shapes.items():
        for draft_vocab_size in (None, 7):
            module = make_head(head, draft_vocab_size=draft_vocab_size)
            tables = {"markov_w1.weight": (VOCAB, RANK), "markov_w2.weight": (draft_vocab_size or VOCAB, RANK)}
            assert {n: tuple(p.shape) for n, p in module.named_parameters()} == tables | own


# The confidence head


@torch.no_grad()
@pytest.mark.parametrize("with_markov", [False, True])
def test_confidence_follows_the_formula(with_markov):
    head = ConfidenceHead(config_for(enable_confidence_head=True, confidence_head_with_markov=with_markov))
    assert tuple(head.proj.weight.shape) == (1, HIDDEN + (RANK if with_markov else 0))
    states, embedding = torch.randn(2, 3, HIDDEN), torch.randn(2, 3, RANK)
    found = head(states, embedding if with_markov else None)
    features = np.concatenate([states, embedding], axis=-1) if with_markov else states.numpy()
    expected = features @ head.proj.weight.numpy()[0] + head.proj.bias.numpy()
    assert found.shape == (2, 3)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_confidence_is_computed_in_fp32_for_models_in_bf16():
    head = ConfidenceHead(config_for(enable_confidence_head=True, confidence_head_with_markov=True)).bfloat16()
    states, embedding = torch.randn(64, HIDDEN).bfloat16(), torch.randn(64, RANK)
    found = head(states, embedding)
    assert found.dtype == torch.float32
    rounded = embedding.bfloat16()  # cast to the type of the states before they are put side by side
    weight, bias = head.proj.weight.double(), head.proj.bias.double()
    expected = torch.cat([states, rounded], dim=-1).double() @ weight[0] + bias
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    in_bf16 = head.proj(torch.cat([states, rounded], dim=-1))[:, 0]
    assert (in_bf16.double() - expected).abs().max() > 1e-3, "bf16 would have shown"


# The unroll of a model


def drafter(head: str = "vanilla", **settings) -> DSparkModel:
    target = make_model("qwen3")
    torch.manual_seed(0)
    defaults = {"num_hidden_layers": 1, "block_size": BLOCK, "markov_rank": RANK, "markov_head_type": head}
    model = DSparkModel.from_target(target, 60, **defaults | settings).eval()
    with torch.no_grad():
        for module in (model.markov_head, model.confidence_head):
            for parameter in () if module is None else module.parameters():
                parameter.normal_()
    return model


def unroll(model: DSparkModel, token_ids: torch.Tensor, seed: int = 0, has_confidence: bool = True):
    """Corrected logits and confidences when the candidates `(rows, k)` are chosen, whatever their logits."""
    generator = torch.Generator().manual_seed(seed)
    rows, k = token_ids.shape
    states = torch.randn(rows, k, model.config.hidden_size, generator=generator).to(model.dtype)
    base_logits = torch.randn(rows, k, model.config.draft_vocab_size or 64, generator=generator)
    seen = []

    def choose(index, logits):
        assert index == len(seen)
        seen.append(logits)
        return token_ids[:, index]

    anchor_ids = torch.arange(3, 3 + rows)
    confidences = model.unroll(states, base_logits, anchor_ids, choose, has_confidence)
    return torch.stack(seen, dim=1), confidences, states, base_logits, anchor_ids


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_unroll_adds_what_the_tokens_before_say(head):
    model = drafter(head)
    token_ids = torch.randint(64, (2, BLOCK))
    logits, _, states, base_logits, anchor_ids = unroll(model, token_ids)
    previous_ids = torch.cat([anchor_ids[:, None], token_ids[:, :-1]], dim=1)
    expected = base_logits + unrolled(model.markov_head, previous_ids, states)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_memory_is_gone_in_the_next_block(head):
    model = drafter(head)
    token_ids = torch.randint(64, (2, BLOCK))
    first = unroll(model, token_ids)
    unroll(model, torch.randint(64, (2, BLOCK)), seed=5)
    second = unroll(model, token_ids)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("with_markov", [False, True])
def test_confidence_does_not_depend_on_the_token_that_it_is_for(head, with_markov):
    """What makes pruning with it exact: position k sees candidates before k only."""
    model = drafter(head, confidence_head_with_markov=with_markov)
    token_ids = torch.randint(64, (1, BLOCK))
    confidences = unroll(model, token_ids)[1]
    assert confidences.shape == (1, BLOCK)
    for changed in range(BLOCK):
        others = token_ids.clone()
        others[:, changed] = (token_ids[:, changed] + 7) % 64
        found = unroll(model, others)[1]
        assert torch.equal(found[:, : changed + 1], confidences[:, : changed + 1])
        if changed + 1 < BLOCK:
            assert torch.equal(found[:, changed + 1], confidences[:, changed + 1]) == (not with_markov)


@torch.no_grad()
def test_confidence_features_are_the_state_and_the_token_before():
    model = drafter(confidence_head_with_markov=True)
    token_ids = torch.randint(64, (2, BLOCK))
    _, confidences, states, _, anchor_ids = unroll(model, token_ids)
    previous_ids = torch.cat([anchor_ids[:, None], token_ids[:, :-1]], dim=1)
    expected = model.confidence_head(states, model.markov_head.markov_w1(previous_ids))
    torch.testing.assert_close(confidences, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_confidence_is_not_computed_unless_it_is_wanted():
    token_ids = torch.randint(64, (1, BLOCK))
    assert unroll(drafter(), token_ids, has_confidence=False)[1] is None
    without = drafter(enable_confidence_head=False, confidence_head_with_markov=False)
    assert unroll(without, token_ids)[1] is None


@torch.no_grad()
def test_no_markov_head_leaves_the_base_logits():
    model = drafter(markov_rank=0)
    logits, confidences, _, base_logits, _ = unroll(model, torch.randint(64, (2, BLOCK)))
    assert torch.equal(logits, base_logits) and confidences is not None


@torch.no_grad()
def test_ids_that_are_not_drafted_cannot_be_chosen():
    model = drafter(draft_vocab_size=5)
    kept = torch.tensor([4, 9, 10, 33, 63])
    model.d2t.copy_(kept - torch.arange(5))
    logits, _, states, base_logits, anchor_ids = unroll(model, torch.randint(64, (2, BLOCK)))
    is_kept = torch.zeros(64, dtype=torch.bool)
    is_kept[kept] = True
    assert (logits[..., ~is_kept] == -torch.inf).all()
    bias = model.markov_head.step(model.markov_head.embed(anchor_ids), states[:, 0], None)[0]
    torch.testing.assert_close(logits[:, 0, kept], base_logits[:, 0] + bias, rtol=0, atol=1e-5)


@torch.no_grad()
def test_soft_cap_bounds_the_base_logits_and_not_the_correction():
    model = drafter(final_logit_softcapping=2.0)
    states = torch.randn(1, 3, 32) * 100
    raw = states @ model.lm_head.weight.T
    logits = model.base_logits(states)
    torch.testing.assert_close(logits, torch.tanh(raw / 2.0) * 2.0, rtol=0, atol=1e-4)
    assert float(logits.abs().max()) <= 2.0 < float(raw.abs().max())
    corrected = []
    model.unroll(
        states, logits, torch.tensor([3]), lambda index, values: corrected.append(values) or values.argmax(-1)
    )
    assert float(torch.stack(corrected).abs().max()) > 2.0


@torch.no_grad()
def test_base_logits_are_fp32_for_models_in_bf16():
    model = drafter().bfloat16()
    assert model.base_logits(torch.randn(1, 3, 32).bfloat16()).dtype == torch.float32
