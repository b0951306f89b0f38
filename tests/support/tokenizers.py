"""Tiny tokenizers: a letter a token, a byte a token."""

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.support.models import BOS, EOS, PAD

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ,.!?"  # ids 3 to 59; four ids have no token
NUM_TOKENS = 3 + len(LETTERS)
NUM_BYTES = 259
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message['role'][0] }} {{ message['content'] }}.{% endfor %}{% if add_generation_prompt %}a {% endif %}"
)


def letters_tokenizer(adds_bos=True):
    """One token per letter, and a beginning of sequence before every text."""
    vocabulary = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, **{letter: i for i, letter in enumerate(LETTERS, start=3)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="?"
    )
    made.chat_template = CHAT_TEMPLATE
    return made


TOKENIZER = letters_tokenizer()


def ids_of(text):
    return TOKENIZER(text)["input_ids"]


def byte_level() -> Tokenizer:
    """One token per byte, no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@functools.cache
def byte_tokenizer():
    """One token per byte, <pad>, <bos> and <eos>: random text is full of broken characters."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    tokenizer.add_special_tokens({"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"})
    assert len(tokenizer) == NUM_BYTES
    return tokenizer
