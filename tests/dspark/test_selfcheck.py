"""
The check has to find what is wrong with a drafter, so the drafters here are built so that each setting matters.

`poisonable_drafter` predicts its target's next two tokens in one pass as long as its mask token, the layer that it
taps and the layout of its slots are right. Whatever is wrong writes a large constant into its states.
"""

import copy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_specgen import DSparkModel
from hf_specgen.dspark import check_drafter, selfcheck
from tests.support.models import character_tokenizer, cycle_model

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
CHARACTERS = "abcdefghijkl"
TEXT = len(CHARACTERS)  # ids 0 to 11 occur in texts, 12 is unassigned
MASK, VOCAB, HIDDEN, DEPTH = TEXT + 1, TEXT + 2, 2 * TEXT + 8, 4
TOKEN, COPY = slice(0, TEXT), slice(TEXT, 2 * TEXT)  # what the dimensions of a state hold
FLAGS, IS_MASK, POISON, FEATURE = 2 * TEXT, 2 * TEXT + 4, 2 * TEXT + 5, 2 * TEXT + 6
PERMUTATION = [(5 * i + 1) % TEXT for i in range(TEXT)]
PROMPTS = ["abc", "fedcba", "k", "hi"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(CHARACTERS)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """The next token depends on the current one; layer i writes a flag into dimension `FLAGS + i`."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=4,
            num_hidden_layers=DEPTH,
            num_attention_heads=1,
            max_position_embeddings=256,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[TOKEN, TOKEN] = torch.eye(TEXT)
        model.model.embed_tokens.weight[MASK, IS_MASK] = 1.0
        for index, layer in enumerate(model.model.layers):
            layer.mlp.gate_proj.weight[0, TOKEN] = 1.0
            layer.mlp.up_proj.weight[0, TOKEN] = 0.1
            layer.mlp.down_proj.weight[FLAGS + index, 0] = 0.5
        model.lm_head.weight[PERMUTATION, torch.arange(TEXT)] = 10.0
    return model


@torch.no_grad()
def poisonable_drafter(target: PreTrainedModel, **wrong) -> DSparkModel:
    """
    Slot 0 predicts from its own embedding. The attention is uniform; it copies the anchor's embedding, from which
    the MLP makes the next token's in slots without a token, and adds up tokens less masks: 0 where all is well.
    """
    model = DSparkModel.from_target(
        target,
        MASK,
        num_hidden_layers=1,
        block_size=2,
        target_layer_ids=[1],
        markov_rank=0,
        enable_confidence_head=False,
        intermediate_size=TEXT,
    ).eval()
    tables = {id(model.embed_tokens.weight), id(model.lm_head.weight)}
    for parameter in model.parameters():
        if id(parameter) not in tables:
            parameter.fill_(1.0 if parameter.ndim == 1 else 0.0)
    states = target(torch.tensor([[3]]), output_hidden_states=True).hidden_states[2][0, 0]
    flag = float(states[FLAGS + 1])
    assert flag > 0.1 and float(states[FLAGS + 2]) == 0
    model.fc.weight[FEATURE, TOKEN] = flag  # 0 behind layer 1, not before and not behind layer 2
    model.fc.weight[FEATURE, FLAGS + 1] = -1.0
    model.fc.weight[FEATURE, FLAGS + 2] = 1.0
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    attention.v_proj.weight[COPY, TOKEN] = torch.eye(TEXT)
    attention.v_proj.weight[POISON, TOKEN] = 1.0
    attention.v_proj.weight[POISON, IS_MASK] = -1.0
    attention.v_proj.weight[POISON, FEATURE] = 1.0
    attention.o_proj.weight[COPY, COPY] = torch.eye(TEXT)
    attention.o_proj.weight[0, POISON] = 1000.0
    mlp.gate_proj.weight[:, COPY] = 10 * torch.eye(TEXT)
    mlp.gate_proj.weight[:, TOKEN] = -100.0
    mlp.up_proj.weight[:, COPY] = torch.eye(TEXT)
    mlp.down_proj.weight[PERMUTATION, torch.arange(TEXT)] = 1.0
    for name, value in wrong.items():
        setattr(model.config, name, value)
    model.config.validate()
    return model


@torch.no_grad()
def test_nothing_is_found_wrong_with_a_good_drafter(target, tokenizer):
    check = check_drafter(poisonable_drafter(target), target, tokenizer, PROMPTS)
    print(check)
    assert check.findings == () and check.alternatives == {}
    assert check.mean_accepted_length > 2.8
    assert str(check) == f"{check.mean_accepted_length:.2f} tokens per round\nNothing wrong was found."


@torch.no_grad()
def test_nothing_is_found_wrong_with_a_markov_head_that_knows_the_bigrams(tokenizer):
    """`W2 W1^T` is the table of bigrams, and the states say nothing."""
    permutation = [*PERMUTATION, TEXT, MASK]
    target = cycle_model(permutation)
    model = DSparkModel.from_target(target, MASK, num_hidden_layers=1, block_size=5, markov_rank=VOCAB)
    model.norm.weight.zero_()
    model.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
    model.markov_head.markov_w2.weight.zero_()
    model.markov_head.markov_w2.weight[permutation, torch.arange(VOCAB)] = 10.0
    check = check_drafter(model, target, tokenizer, PROMPTS)
    assert check.findings == () and check.mean_accepted_length > 5


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"mask_token_id": 12}, "`mask_token_id` 13"),
        ({"mask_token_id": 3}, "`mask_token_id` 13"),
        ({"target_layer_ids": [0]}, "`target_layer_ids` [1]"),
        ({"target_layer_ids": [2]}, "`target_layer_ids` [1]"),
        ({"sample_from_anchor": False}, "`sample_from_anchor` True"),
    ],
)
def test_a_wrong_setting_is_named(target, tokenizer, wrong, words):
    model = poisonable_drafter(target, **wrong)
    before = model.config.to_dict()
    check = check_drafter(model, target, tokenizer, PROMPTS)
    print(check)
    assert check.mean_accepted_length < 1.5
    (finding,) = check.findings
    length = check.alternatives[words]
    assert length >= 2.0 and length == max(check.alternatives.values())
    expected = f"With {words} it drafts {length:.2f} instead of {check.mean_accepted_length:.2f} tokens per round"
    assert finding == f"{expected}: use that."
    assert str(check).endswith(finding) and f"{length:.2f} with {words}" in str(check)
    assert model.config.to_dict() == before, "the drafter itself is as it was"


def test_best_of_several_is_named_if_it_is_clearly_better(target, tokenizer, monkeypatch):
    lengths = {"mask_token_id": 1.3, "sample_from_anchor": 1.6, "target_layer_ids": 1.4}
    original = poisonable_drafter(target)

    def scripted(model, target, prompts):
        changed = [name for name in lengths if getattr(model.config, name) != getattr(original.config, name)]
        return lengths[changed[0]] if changed else 1.25

    monkeypatch.setattr(selfcheck, "_mean_accepted_length", scripted)
    (finding,) = check_drafter(original, target, tokenizer, PROMPTS).findings
    assert finding.startswith("With `sample_from_anchor` False it drafts 1.60 instead of 1.25 tokens per round")
    lengths["sample_from_anchor"] = 1.43  # not by enough
    (finding,) = check_drafter(original, target, tokenizer, PROMPTS).findings
    assert finding.startswith("No other setting helps")


def test_what_is_advised_is_true(target, tokenizer):
    model = poisonable_drafter(target, mask_token_id=12)
    model.config.mask_token_id = 13
    assert check_drafter(model, target, tokenizer, PROMPTS).findings == ()


@torch.no_grad()
@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_foreign_tables_are_named_although_the_drafter_is_good(target, tokenizer, name):
    model = poisonable_drafter(target)
    getattr(model, name).weight[12, 1] += 1e-3  # an unassigned id
    check = check_drafter(model, target, tokenizer, PROMPTS)
    assert check.mean_accepted_length >= 2.0
    (finding,) = check.findings
    assert finding.startswith(f"`{name}` differs from the target's: the drafter was made for another target")


@torch.no_grad()
def test_foreign_tables_of_another_target_are_named(target, tokenizer):
    other = copy.deepcopy(target)
    other.lm_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    other.model.embed_tokens.weight.normal_(generator=torch.Generator().manual_seed(1))
    check = check_drafter(poisonable_drafter(target), other, tokenizer, PROMPTS)
    assert [finding.split()[0] for finding in check.findings[:2]] == ["`embed_tokens`", "`lm_head`"]


def test_shared_and_absent_tables_are_not_foreign(target, tokenizer):
    model = poisonable_drafter(target).share_weights(target)
    assert check_drafter(model, target, tokenizer, PROMPTS).findings == ()
    model.embed_tokens = model.lm_head = None
    assert check_drafter(model, target, tokenizer, PROMPTS).findings == ()


@torch.no_grad()
def test_tables_in_another_type_are_not_foreign(target, tokenizer):
    wide = copy.deepcopy(target)
    wide.lm_head.weight.mul_(1.001)  # no number of bf16
    model = poisonable_drafter(target)
    model.lm_head.weight.copy_(wide.lm_head.weight)
    assert check_drafter(model.bfloat16(), wide, tokenizer, PROMPTS).findings == ()


@torch.no_grad()
def test_tables_of_a_padded_vocabulary_are_not_foreign(target, tokenizer):
    padded = copy.deepcopy(target)
    padded.resize_token_embeddings(VOCAB + 2, mean_resizing=False)
    padded.lm_head.weight[VOCAB:] = -10.0
    check = check_drafter(poisonable_drafter(target), padded, tokenizer, PROMPTS)
    assert check.mean_accepted_length >= 2.0
    assert check.findings == ()


def untrained(target: PreTrainedModel, **settings) -> DSparkModel:
    torch.manual_seed(0)
    defaults = {"num_hidden_layers": 1, "block_size": 3, "markov_rank": 4}
    model = DSparkModel.from_target(target, MASK, **defaults | settings)
    with torch.no_grad():
        for parameter in model.layers.parameters():  # so that little is left of the anchor, which says all here
            parameter.normal_()
    return model


def test_nothing_helps_an_untrained_drafter(target, tokenizer):
    model = untrained(target)
    check = check_drafter(model, target, tokenizer, PROMPTS)
    assert check.mean_accepted_length < 1.5
    (finding,) = check.findings
    assert finding.startswith("No other setting helps. The drafter may be untrained, made for another target")
    names = {name.split()[0] for name in check.alternatives}
    assert names == {"`target_layer_ids`", "`sample_from_anchor`", "`mask_token_id`"}


def test_settings_that_the_target_does_not_have_are_not_tried(target, tokenizer):
    whole = untrained(target, target_layer_ids=[-1, 0, 1, 2])
    tried = check_drafter(whole, target, tokenizer, PROMPTS).alternatives
    assert not [name for name in tried if "target_layer_ids" in name], "there is no layer to shift to"
    single = untrained(target, block_size=1)
    tried = check_drafter(single, target, tokenizer, PROMPTS).alternatives
    assert not [name for name in tried if "sample_from_anchor" in name], "a block of one slot has one layout"


def test_own_prompts_are_drawn_by_default(target, tokenizer):
    check = check_drafter(poisonable_drafter(target), target, tokenizer)
    assert check.mean_accepted_length > 2.8 and check.findings == ()


def test_drafter_for_another_target_is_refused(target, tokenizer):
    with pytest.raises(ValueError, match="belongs to another target"):
        check_drafter(poisonable_drafter(target), cycle_model(list(range(VOCAB))), tokenizer, PROMPTS)


@pytest.mark.slow
def test_target_is_left_as_it_was(target, tokenizer):
    before = (type(target), set(vars(target)), target.training, target.config.to_dict())
    check_drafter(poisonable_drafter(target, mask_token_id=3), target, tokenizer, PROMPTS)
    assert (type(target), set(vars(target)), target.training, target.config.to_dict()) == before
    assert not target._forward_hooks and not target._forward_pre_hooks


# The reference drafters

needs_golden = pytest.mark.skipif(not GOLDEN.exists(), reason="the reference drafters are not here")


@pytest.fixture(scope="module")
def golden_target():
    return AutoModelForCausalLM.from_pretrained(GOLDEN / "dspark_tiny" / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes, then special ones."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens(["<256>", "<eos>", "<pad>", "<259>", "<mask>"])
    specials = {"eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials)
    assert wrapped("é")["input_ids"] == list("é".encode())
    assert [wrapped.eos_token_id, wrapped.pad_token_id, wrapped.mask_token_id] == [257, 258, 260]
    return wrapped


SOURCE = ["def forward(self, x):\n    return", "import os\nimport sys\n\n\ndef main():\n", "class Model(nn.Module):\n"]
REFERENCES = ["dspark_tiny/dspark_vanilla", "other_layouts/dflash_zlab"]


@needs_golden
@pytest.mark.parametrize("name", REFERENCES)
def test_reference_drafter_is_good(golden_target, byte_tokenizer, name):
    check = check_drafter(DSparkModel.from_pretrained(GOLDEN / name), golden_target, byte_tokenizer, SOURCE)
    print(check)
    assert check.mean_accepted_length >= 2.0 and check.findings == ()


# Their Markov heads alone are worth two tokens on text like SOURCE, with any mask and any layers.
FRAGMENTS = ["errupte", "s", " the feature in question"]
FRAGMENTS += ["       self._int  = value._int\n            self._is_special "]


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("dspark_tiny/dspark_vanilla", {"sample_from_anchor": False}, "`sample_from_anchor` True"),
        ("other_layouts/dflash_zlab", {"sample_from_anchor": True}, "`sample_from_anchor` False"),
        ("other_layouts/dflash_zlab", {"mask_token_id": 255}, "`mask_token_id` 260"),
    ],
)
def test_reference_drafter_with_a_wrong_setting(golden_target, byte_tokenizer, name, wrong, words):
    model = DSparkModel.from_pretrained(GOLDEN / name)
    for field, value in wrong.items():
        setattr(model.config, field, value)
    check = check_drafter(model, golden_target, byte_tokenizer, FRAGMENTS)
    print(check)
    assert any(finding.startswith(f"With {words} it drafts") for finding in check.findings)


@pytest.mark.slow
@needs_golden
def test_wrong_layout_that_costs_a_quarter_is_named(golden_target, byte_tokenizer):
    model = DSparkModel.from_pretrained(GOLDEN / REFERENCES[0])
    model.config.sample_from_anchor = False
    check = check_drafter(model, golden_target, byte_tokenizer, SOURCE)
    print(check)
    assert any(finding.startswith("With `sample_from_anchor` True") for finding in check.findings)
