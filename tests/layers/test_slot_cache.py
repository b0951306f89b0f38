import copy

import pytest
import torch
import transformers
from transformers.masking_utils import create_sliding_window_causal_mask

from hf_specgen import CausalLMDrafter, Decoder, Request
from hf_specgen.engine.batch import forward, padded
from hf_specgen.layers.slot_cache import GROWTH_CHUNK, SlotCache
from tests.support.models import assert_partly_accepted, assert_same_as_plain, left_padded, make_model, noisy_copy

CPU = torch.device("cpu")
HEADS, HEAD_DIM = 2, 3


def config_of(layers: int = 1, **settings) -> transformers.PreTrainedConfig:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    return transformers.MistralConfig(**{**sizes, "num_hidden_layers": layers, "sliding_window": None, **settings})


def write(cache: SlotCache, rows: slice, num_tokens: list[int], num_new: int, seed: int = 0):
    """One pass of random states through the first layer, as a model would run it; returns them and what came back."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows.stop - rows.start, HEADS, num_new, HEAD_DIM)
    keys, values = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    prepared = cache.begin(rows, torch.tensor(num_tokens), num_new, CPU)
    returned = cache.update(keys, values, 0)
    cache.advance(rows, torch.tensor(num_tokens))
    return prepared, (keys, values), returned


def test_rows_are_written_at_their_own_columns():
    """Random passes and roll-backs against lists that know nothing of columns."""
    cache = SlotCache(config_of(), num_rows=5)
    kept: list[list[tuple]] = [[] for _ in range(5)]
    generator = torch.Generator().manual_seed(0)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for step in range(120):
        first, num_new = integer(0, 4), integer(1, 9)
        rows = slice(first, integer(first + 1, 5))
        num_tokens = [integer(0, num_new) for _ in range(rows.stop - rows.start)]
        starts = [len(kept[row]) for row in range(rows.start, rows.stop)]
        prepared, (keys, values), returned = write(cache, rows, num_tokens, num_new, seed=step)
        assert prepared.columns.tolist() == [list(range(start, start + num_new)) for start in starts]
        for index, (start, count) in enumerate(zip(starts, num_tokens, strict=True)):
            kept[first + index] += [(keys[index, :, i], values[index, :, i]) for i in range(count)]
            valid = list(range(start, start + count))
            padding = [start + max(count, 1) - 1] * (num_new - count)
            assert prepared.position_ids[index].tolist() == valid + padding
        assert [len(tokens) for tokens in kept] == cache.lengths.tolist()
        for row, tokens in enumerate(kept):
            for buffer, part in ((cache.layers[0].keys, 0), (cache.layers[0].values, 1)):
                for column, token in enumerate(tokens):
                    assert torch.equal(buffer[row, :, column], token[part])
        assert torch.equal(returned[0], cache.layers[0].keys[rows, :, : max(starts) + num_new])
        assert torch.equal(returned[1], cache.layers[0].values[rows, :, : max(starts) + num_new])
        row = integer(0, 4)
        length = integer(0, len(kept[row]) + 2)
        cache.truncate(row, length)
        del kept[row][length:]
    assert max(len(tokens) for tokens in kept) > 10


def test_buffers_grow_in_chunks_and_keep_what_they_hold():
    cache = SlotCache(config_of(), num_rows=2)
    _, (keys, _), _ = write(cache, slice(0, 2), [3, 1], 3)
    assert cache.layers[0].keys.shape == (2, HEADS, GROWTH_CHUNK, HEAD_DIM)
    pointer = cache.layers[0].keys.data_ptr()
    write(cache, slice(0, 2), [GROWTH_CHUNK - 3, 1], GROWTH_CHUNK - 3)
    assert cache.layers[0].keys.data_ptr() == pointer, "a full chunk is no reason to grow"
    write(cache, slice(0, 1), [1], 1)
    assert cache.layers[0].keys.shape[2] == 2 * GROWTH_CHUNK
    assert torch.equal(cache.layers[0].keys[0, :, :3], keys[0])
    assert torch.equal(cache.layers[0].keys[1, :, :1], keys[1, :, :1])
    assert not cache.layers[0].keys[:, :, GROWTH_CHUNK + 1 :].any(), "masked columns have to be numbers"


def test_capacity_gives_static_shapes_and_refuses_more():
    cache = SlotCache(config_of(), num_rows=2, capacity=12)
    pointers = set()
    for num_new in (4, 3, 1, 3):
        _, _, returned = write(cache, slice(0, 2), [num_new, 1], num_new)
        pointers.add(cache.layers[0].keys.data_ptr())
        assert returned[0].shape[2] == returned[1].shape[2] == 12
        assert cache.attention_mask(False, torch.float32).shape == (2, 1, num_new, 12)
        assert cache.layers[0].get_mask_sizes(num_new) == (12, 0)
    assert len(pointers) == 1
    with pytest.raises(ValueError, match="`capacity` of 12 columns, but 13 are needed"):
        cache.begin(slice(0, 2), torch.tensor([2, 2]), 2, CPU)
    cache.begin(slice(1, 2), torch.tensor([2]), 2, CPU)  # the other row has room


def test_query_sees_its_row_up_to_itself():
    cache = SlotCache(config_of(), num_rows=3)
    write(cache, slice(0, 3), [4, 0, 2], 4)
    cache.begin(slice(1, 3), torch.tensor([2, 2]), 2, CPU)
    mask = cache.attention_mask(False, torch.float32)
    assert mask.dtype == torch.bool
    assert mask[:, 0].int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0]], [[1, 1, 1, 0], [1, 1, 1, 1]]]


def test_no_mask_where_the_model_is_causal_by_itself():
    cache = SlotCache(config_of(), num_rows=2)
    cache.begin(slice(0, 2), torch.tensor([4, 2]), 4, CPU)
    assert cache.attention_mask(False, torch.float32) is None  # nothing came before
    write(cache, slice(0, 2), [3, 3], 3)
    cache.begin(slice(0, 2), torch.tensor([1, 1]), 1, CPU)
    assert cache.attention_mask(False, torch.float32) is None  # one token sees all
    cache.begin(slice(0, 2), torch.tensor([2, 2]), 2, CPU)
    assert cache.attention_mask(False, torch.float32) is not None
    cache.truncate(0, 2)
    cache.begin(slice(0, 2), torch.tensor([1, 1]), 1, CPU)
    assert cache.attention_mask(False, torch.float32) is not None


@pytest.mark.parametrize("start", [0, 3, 7, 11])
def test_sliding_mask_equals_that_of_transformers(start):
    config = config_of(sliding_window=5)
    config._attn_implementation = "sdpa"
    cache = SlotCache(config, num_rows=2)
    if start:
        write(cache, slice(0, 2), [start, 2], start)  # another row of another length changes nothing
    cache.begin(slice(0, 2), torch.tensor([4, 4]), 4, CPU)
    whole = torch.zeros(1, start + 4, 8)
    expected = create_sliding_window_causal_mask(config, whole, None, None, allow_is_causal_skip=False)
    mask = cache.attention_mask(False, torch.float32)
    assert torch.equal(mask[:1], expected[:, :, start:])


def test_mask_for_each_layer_kind():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(num_hidden_layers=3, layer_types=kinds, sliding_window=2)
    cache = SlotCache(config, num_rows=1)
    write(cache, slice(0, 1), [3], 3)
    cache.begin(slice(0, 1), torch.tensor([1]), 1, CPU)
    masks = cache.attention_mask(False, torch.float32)
    assert {kind: mask.int().flatten().tolist() for kind, mask in masks.items()} == {
        "full_attention": [1, 1, 1, 1],
        "sliding_attention": [0, 0, 1, 1],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_additive_mask_says_the_same_in_floats(dtype):
    cache = SlotCache(config_of(sliding_window=3), num_rows=2)
    write(cache, slice(0, 2), [4, 1], 4)
    cache.begin(slice(0, 2), torch.tensor([2, 2]), 2, CPU)
    additive, boolean = cache.attention_mask(True, dtype), cache.attention_mask(False, dtype)
    assert additive.dtype == dtype
    assert torch.equal(additive == 0, boolean)
    assert additive[~boolean].eq(torch.finfo(dtype).min).all()


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (transformers.MambaConfig(num_hidden_layers=2), "mamba|linear_attention"),
        (transformers.Qwen3NextConfig(num_hidden_layers=4), "linear_attention"),
        (transformers.Llama4TextConfig(num_hidden_layers=4), "chunked_attention"),
    ],
    ids=["recurrent", "linear", "chunked"],
)
def test_layers_without_keys_of_all_tokens_are_refused(config, kind):
    with pytest.raises(ValueError, match=kind):
        SlotCache(config, num_rows=1)


def cached_tokens(decoder: Decoder) -> dict[tuple[int, int], tuple]:
    """Per slot and layer of both caches: who sits there, and copies of its keys and values."""
    found = {}
    for which, cache in enumerate((decoder.rows.cache, decoder.rows.draft_cache)):
        for slot, request in enumerate(decoder.rows.requests):
            length = int(cache.lengths[slot])
            for depth, layer in enumerate(cache.layers):
                if request is not None and length:
                    parts = [buffer[slot, :, :length].clone() for buffer in (layer.keys, layer.values)]
                    found[which, slot, depth] = (request, *parts)
    return found


def pointers(decoder: Decoder) -> list[int]:
    caches = (decoder.rows.cache, decoder.rows.draft_cache)
    return [
        b.data_ptr() for c in caches for layer in c.layers if layer.is_initialized for b in (layer.keys, layer.values)
    ]


def test_no_cached_key_or_value_moves_between_rounds(llama):
    decoder = Decoder(llama, CausalLMDrafter(noisy_copy(llama), num_assistant_tokens=4), max_batch_size=3)
    requests = [Request(list(range(3, 4 + 2 * n)), max_new_tokens=20 + 5 * n) for n in range(5)]
    before, buffers, num_compared, num_rolled_back = {}, [], 0, 0
    for _ in decoder.run(requests):
        after = cached_tokens(decoder)
        for place, (request, *old) in before.items():
            if place in after and after[place][0] is request:
                length = min(old[0].shape[1], after[place][1].shape[1])
                num_rolled_back += length < old[0].shape[1]
                for earlier, now in zip(old, after[place][1:], strict=True):
                    assert torch.equal(earlier[:, :length], now[:, :length])
                num_compared += 1
        if len(buffers) == 8:  # two caches of two layers with keys and values
            assert pointers(decoder) == buffers
        before, buffers = after, pointers(decoder)
    assert num_compared > 50
    assert num_rolled_back == 0, "between rounds a cache holds committed tokens only"
    assert_partly_accepted(decoder.stats)


def test_cache_holds_all_committed_tokens_but_the_last(llama):
    decoder = Decoder(llama, CausalLMDrafter(noisy_copy(llama), num_assistant_tokens=4), max_batch_size=3)
    for _ in decoder.run([Request(list(range(3, 4 + 2 * n)), max_new_tokens=20) for n in range(5)]):
        for slot, request in enumerate(decoder.rows.requests):
            expected = 0 if request is None else request.num_committed - 1
            assert decoder.rows.cache.lengths[slot] == expected
            assert decoder.rows.draft_cache.lengths[slot] <= expected
    assert_partly_accepted(decoder.stats)


def sharing_model() -> transformers.PreTrainedModel:
    """A tiny Gemma3n whose last two layers read the keys and values of the first two."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=32,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        altup_num_inputs=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model


@torch.no_grad()
def ragged_difference(model: transformers.PreTrainedModel, texts: list[list[int]], heads: list[int]) -> float:
    """How far the last logits of rows that are fed in two parts are from plain passes over each."""
    cache = SlotCache(model.config, num_rows=len(texts))
    rows = slice(0, len(texts))
    for parts in (
        [text[:head] for text, head in zip(texts, heads, strict=True)],
        [text[head:] for text, head in zip(texts, heads, strict=True)],
    ):
        token_ids, num_tokens = padded(parts, CPU)
        logits = forward(model, cache, rows, token_ids, num_tokens).logits
    expected = [model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1] for text in texts]
    found = [logits[row, len(part) - 1] for row, part in enumerate(parts)]
    scale = max(float(e.abs().max()) for e in expected)
    return max(float((f - e).abs().max()) for f, e in zip(found, expected, strict=True)) / scale


RAGGED_TEXTS = [[(7 * i + 3 * n) % 61 + 3 for i in range(length)] for n, length in enumerate((30, 5, 17))]


@pytest.mark.parametrize("family", ["llama", "gemma3", "sharing"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_ragged_rows_have_the_logits_of_plain_passes(family, attention):
    model = sharing_model() if family == "sharing" else make_model(family)
    model.set_attn_implementation(attention)
    assert ragged_difference(model, RAGGED_TEXTS, [26, 2, 12]) < 1e-5


def test_layers_that_share_keys_decode_as_plain_generate():
    model = sharing_model()
    kinds = [type(layer).__name__ for layer in SlotCache(model.config, num_rows=1).layers]
    assert kinds == ["SlotLayer", "SlotLayer", "DummyLayer", "DummyLayer"]
    drafting = {"assistant_model": noisy_copy(copy.deepcopy(model), 0.4), "num_assistant_tokens": 4}
    settings = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None}
    assert_partly_accepted(assert_same_as_plain(model, left_padded([1, 12, 5]), drafting, **settings))
