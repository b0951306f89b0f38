import random
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_specgen.serving.detokenizer import REPLACEMENT, TextAssembler
from tests.support.models import character_tokenizer
from tests.support.tokenizers import byte_level

EOS = "<eos>"
LETTERS = "abcdefghij"
WORDS = [
    "speculative",
    "decoding",
    "naïve",
    "café",
    "über",
    "नमस्ते",
    "दुनिया",
    "日本語",
    "한국어",
    "👩‍👩‍👧‍👦",
    "😀😁",
    "e\u0301a\u0300\u0323",
    "🇩🇪",
    "a.b,c!",
    "  two",
    "\n\n",
    "don't",
    "''",
    "#",
    "0",
]
T1_TEXTS = [
    "😀 and 🎉🎉",
    "नमस्ते दुनिया",
    "👩‍👩‍👧‍👦 family",
    "e\u0301 n\u0303 a\u0323\u0300 end",
    " leading",
    "a\u200db",
]


def merged_bytes() -> Tokenizer:
    tokenizer = byte_level()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(random_texts(0, 60), trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(random_texts(0, 60), trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2: a space is put before the text and taken off again, unknown characters are spelled in bytes."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    pieces += [(piece, -3.0) for piece in ["▁a", "de", "co", "ding", "▁sp", "é", *"abcdeginosuvt.,!'#0"]]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(random_texts(0, 60), trainer)
    return tokenizer


def random_texts(seed: int, count: int) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, 12))) for _ in range(count)]


BACKENDS = {
    "bytes": byte_level,
    "byte_bpe": lambda: merged_bytes(),
    "metaspace": metaspace,
    "byte_fallback": byte_fallback,
    "word_piece": word_piece,
}
NAMES = [*BACKENDS, "characters"]


@cache
def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    if name == "characters":
        return character_tokenizer("?" + LETTERS + " 😀éनमस\u0301" + REPLACEMENT)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=BACKENDS[name](), clean_up_tokenization_spaces=True)
    tokenizer.add_special_tokens({"eos_token": EOS})
    return tokenizer


def byte_ids(name: str) -> list[int]:
    """The id of each byte."""
    if name == "byte_fallback":
        tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        tokens = [character for _, character in sorted(bytes_to_unicode().items())]
    return make_tokenizer(name).convert_tokens_to_ids(tokens)


def decode(tokenizer: PreTrainedTokenizerFast, ids: list[int], skip_special_tokens: bool = True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def assemble(assembler: TextAssembler, ids: list[int]) -> list[str]:
    return [*(assembler.add(token_id) for token_id in ids), assembler.finish()]


def random_ids(tokenizer: PreTrainedTokenizerFast, generator: random.Random) -> list[int]:
    """Any ids in any order: broken characters, continuations without a word, special tokens."""
    return [generator.randrange(len(tokenizer)) for _ in range(generator.randint(0, 40))]


@pytest.mark.parametrize("name", NAMES)
def test_pieces_join_to_the_decoded_text(name):
    tokenizer = make_tokenizer(name)
    texts = T1_TEXTS + random_texts(1, 60)
    num_pieces = 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assembler = TextAssembler(tokenizer)
        pieces = assemble(assembler, ids)
        assert "".join(pieces) == assembler.text == decode(tokenizer, ids)
        assert assembler.num_tokens == len(ids)
        num_pieces += sum(map(bool, pieces[:-1]))
    assert num_pieces > len(texts)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "byte_fallback"])
def test_any_ids_join_to_the_decoded_text(name, skip_special_tokens):
    tokenizer = make_tokenizer(name)
    generator = random.Random(2)
    for _ in range(200):
        ids = random_ids(tokenizer, generator)
        assembler = TextAssembler(tokenizer, skip_special_tokens=skip_special_tokens)
        assert "".join(assemble(assembler, ids)) == decode(tokenizer, ids, skip_special_tokens)


@pytest.mark.parametrize("name", NAMES)
def test_text_behind_a_prompt_is_what_decoding_adds(name):
    tokenizer = make_tokenizer(name)
    generator = random.Random(3)
    for text in random_texts(4, 40):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        cut = generator.randint(0, len(ids))
        while REPLACEMENT in decode(tokenizer, ids[:cut]):
            cut -= 1
        assembler = TextAssembler(tokenizer, prompt_ids=ids[:cut])
        text_of_prompt = decode(tokenizer, ids[:cut])
        assert text_of_prompt + "".join(assemble(assembler, ids[cut:])) == decode(tokenizer, ids)


def test_space_behind_a_prompt_survives():
    tokenizer = make_tokenizer("metaspace")
    hello, world = tokenizer("decoding decoding").input_ids[:1], tokenizer("decoding").input_ids
    assert "".join(assemble(TextAssembler(tokenizer), world)) == "decoding"
    assert "".join(assemble(TextAssembler(tokenizer, prompt_ids=hello), world)) == " decoding"
    long_prompt = tokenizer("decoding " * 40).input_ids
    assert "".join(assemble(TextAssembler(tokenizer, prompt_ids=long_prompt), world)) == " decoding"


def test_prompt_that_ends_in_bytes_of_many_characters_does_not_break_the_next_one():
    tokenizer = make_tokenizer("byte_fallback")
    for num_characters in range(1, 8):
        ids = tokenizer("日" * num_characters).input_ids
        assembler = TextAssembler(tokenizer, prompt_ids=ids)
        assert "".join(assemble(assembler, tokenizer("語").input_ids[-3:])) == "語"


def test_prompt_that_ends_within_a_character_leaves_the_rest_as_it_decodes_alone():
    tokenizer = make_tokenizer("bytes")
    ids = tokenizer("a😀b").input_ids
    assert "".join(assemble(TextAssembler(tokenizer, prompt_ids=ids[:3]), ids[3:])) == decode(tokenizer, ids[3:])


@pytest.mark.parametrize("name", ["bytes", "byte_bpe", "byte_fallback"])
def test_no_replacement_character_that_later_tokens_complete(name):
    tokenizer = make_tokenizer(name)
    for text in T1_TEXTS + random_texts(5, 40):
        assembler = TextAssembler(tokenizer)
        ids = tokenizer(text).input_ids
        for count, token_id in enumerate(ids, start=1):
            assembler.add(token_id)
            assert decode(tokenizer, ids).startswith(assembler.text)
            # What is whole is given away at once.
            assert len(assembler.text) >= len(decode(tokenizer, ids[:count]).rstrip(REPLACEMENT))


@pytest.mark.parametrize("name", ["bytes", "byte_fallback"])
def test_unfinished_character_comes_out_at_the_end(name):
    tokenizer = make_tokenizer(name)
    ids = tokenizer("a😀").input_ids[:-1]
    assembler = TextAssembler(tokenizer)
    pieces = assemble(assembler, ids)
    assert "".join(pieces[:-1]) == "a"
    assert pieces[-1] == decode(tokenizer, ids)[1:] != ""
    assert assembler.finish() == ""


@pytest.mark.parametrize("broken", [b"\xff", b"\xe2\x82", b"\xf0\x9f\x98", b"\x80", b"\xed\xa0", b"\xf0\x9f\xf0"])
@pytest.mark.parametrize("name", ["bytes", "byte_fallback"])
def test_at_most_three_bytes_of_broken_text_are_held_back(name, broken):
    tokenizer, ids_of_bytes = make_tokenizer(name), byte_ids(name)
    ids = [ids_of_bytes[byte] for byte in broken * 30]
    assembler = TextAssembler(tokenizer)
    for count, token_id in enumerate(ids, start=1):
        assembler.add(token_id)
        assert assembler.text in [decode(tokenizer, ids[: max(0, count - num_held)]) for num_held in range(4)]
    assembler.finish()
    assert assembler.text == decode(tokenizer, ids)
    assert set(assembler.text) == {REPLACEMENT}


@pytest.mark.parametrize("name", ["bytes", "byte_fallback"])
def test_whole_text_goes_on_after_broken_bytes(name):
    tokenizer, ids_of_bytes = make_tokenizer(name), byte_ids(name)
    for num_broken in range(1, 40):
        ids = tokenizer("a😀").input_ids + [ids_of_bytes[0xFF]] * num_broken + tokenizer("d😀e").input_ids
        text = "".join(assemble(TextAssembler(tokenizer), ids))
        assert text.strip(REPLACEMENT + " ").startswith("a😀")
        assert text.endswith("d😀e")
        assert text.count(REPLACEMENT) == num_broken


def test_no_byte_is_lost_or_doubled_where_a_run_of_bytes_is_broken():
    tokenizer, ids_of_bytes = make_tokenizer("byte_fallback"), byte_ids("byte_fallback")
    for num_broken in range(5):
        for num_whole in range(1, 30):
            run = b"\xff" * num_broken + "日".encode() * num_whole + b"\xe6\x97"
            ids = [ids_of_bytes[byte] for byte in run] + tokenizer("a").input_ids[-1:]
            text = "".join(assemble(TextAssembler(tokenizer), ids))
            assert text.endswith("a") and set(text) <= {"日", REPLACEMENT, " ", "a"}
            assert 3 * text.count("日") + text.count(REPLACEMENT) == len(run)
            assert num_broken > 0 or text.count("日") == num_whole


def test_special_token_within_a_character_is_left_out():
    tokenizer = make_tokenizer("bytes")
    ids = tokenizer("a😀b").input_ids
    ids = [*ids[:3], *[tokenizer.eos_token_id] * 40, *ids[3:]]
    assert "".join(assemble(TextAssembler(tokenizer), ids)) == "a😀b"


@pytest.mark.parametrize("kind", ["special", "unknown"])
def test_tokens_without_text_between_words_do_not_eat_spaces(kind):
    tokenizer = make_tokenizer("metaspace")
    word = tokenizer("decoding").input_ids
    ids = [*word, *[tokenizer.eos_token_id if kind == "special" else len(tokenizer) + 3] * 40, *word]
    assert "".join(assemble(TextAssembler(tokenizer), ids)) == "decoding decoding"


def test_spaces_are_not_cleaned_up():
    tokenizer = make_tokenizer("word_piece")
    ids = tokenizer("decoding . don't").input_ids
    assert " ." in decode(tokenizer, ids) and " ." not in tokenizer.decode(ids)
    assert "".join(assemble(TextAssembler(tokenizer), ids)) == decode(tokenizer, ids)


class CountingTokenizer:
    """Counts the ids that are decoded."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, ids: list[int], **options: bool) -> str:
        self.num_decoded += len(ids)
        return self._tokenizer.decode(ids, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("kind", ["words", "emoji", "broken", "special", "unknown"])
@pytest.mark.parametrize("name", ["byte_bpe", "byte_fallback", "metaspace"])
def test_ten_thousand_tokens_take_linear_work(name, kind):
    tokenizer = make_tokenizer(name)
    ids = {
        "words": tokenizer(" ".join(random_texts(6, 300))).input_ids,
        "emoji": tokenizer("😀🎉").input_ids,
        "broken": [byte_ids(name)[0xFF]] if name != "metaspace" else [0],
        "special": [tokenizer.eos_token_id],
        "unknown": [len(tokenizer) + 3],
    }[kind]
    ids = ids * (10_000 // len(ids) + 1)
    counting = CountingTokenizer(tokenizer)
    assembler = TextAssembler(counting, stop=[word * 20 for word in WORDS])
    pieces = assemble(assembler, ids)
    assert counting.num_decoded <= 25 * len(ids)
    if kind == "words":
        assert counting.num_decoded <= 8 * len(ids)
    if kind != "broken":
        assert "".join(pieces) == decode(tokenizer, ids)


# Stop strings


def stopped_by_hand(tokenizer: PreTrainedTokenizerFast, ids: list[int], stops: list[str]) -> tuple[str, int | None]:
    """The text, and the number of tokens with which a stop string is complete, by decoding everything each time."""
    for count in range(1, len(ids) + 1):
        text = decode(tokenizer, ids[:count])
        starts = [text.index(stop) for stop in stops if stop in text]
        if starts:
            return text[: min(starts)], count
    return decode(tokenizer, ids), None


def held_by_hand(text: str, stops: list[str]) -> int:
    """The characters at the end of the text that may begin a stop string."""
    return max(
        (size for stop in stops for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size])),
        default=0,
    )


def random_stops(generator: random.Random, letters: str) -> list[str]:
    return ["".join(generator.choices(letters, k=generator.randint(1, 5))) for _ in range(generator.randint(1, 6))]


def piece_tokenizer(generator: random.Random) -> PreTrainedTokenizerFast:
    """One to four of the letters "abc" per token."""
    pieces = {"".join(generator.choices("abc", k=generator.randint(1, 4))) for _ in range(12)}
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(sorted(pieces))}))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("seed", range(40))
def test_stop_strings_end_the_text_where_a_search_from_the_start_does(seed):
    generator = random.Random(seed)
    num_stopped = 0
    for _ in range(25):
        tokenizer = piece_tokenizer(generator)
        stops = random_stops(generator, "abc")
        ids = generator.choices(range(len(tokenizer)), k=generator.randint(1, 10))
        text, num_tokens = stopped_by_hand(tokenizer, ids, stops)
        assembler = TextAssembler(tokenizer, stop=stops)
        for count, token_id in enumerate(ids, start=1):
            assembler.add(token_id)
            assert assembler.num_tokens == count
            assert assembler.is_stopped == (num_tokens is not None and count >= num_tokens)
            if not assembler.is_stopped:
                decoded = decode(tokenizer, ids[:count])
                assert assembler.text == decoded[: len(decoded) - held_by_hand(decoded, stops)]
        assembler.finish()
        assert assembler.text == text
        assert assembler.num_text_tokens == next(
            count for count in range(len(ids) + 1) if decode(tokenizer, ids[:count]).startswith(text)
        )
        if num_tokens is not None:
            assert assembler.stop_string in stops
            assert decode(tokenizer, ids[:num_tokens])[len(text) :].startswith(assembler.stop_string)
            num_stopped += 1
    assert 0 < num_stopped


def tokenized(*pieces: str) -> tuple[PreTrainedTokenizerFast, list[int]]:
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer), [vocabulary[piece] for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "stops", "given"),
    [
        (["la", "s", "topper", "x"], ["stop"], ["la", "", "", "", ""]),
        (["a STOPper b"], ["STOP"], ["a ", ""]),
        (["x", "<", "|", "end", "|>", "y"], ["<|end|>"], ["x", "", "", "", "", "", ""]),
        (["x", "<", "|", "en", "t", "y"], ["<|end|>"], ["x", "", "", "", "<|ent", "y", ""]),
        (["stop", "x"], ["stop"], ["", "", ""]),
        (["aab", "aac", "z"], ["aabaac", "baa"], ["", "", "", ""]),  # both in one token: the earlier start
        (["a", "b", "c", "d"], ["abcd", "bc"], ["", "", "a", "", ""]),  # "bc" is complete first
        (["xab", "c"], ["abc", "ab"], ["x", "", ""]),  # a stop that begins another
        (["aaa", "b"], ["aab"], ["a", "", ""]),
        (["ab", "ab", "ac"], ["ababac"], ["", "", "", ""]),
        (["ab", "ab", "ab", "ac"], ["ababac"], ["", "", "ab", "", ""]),
        (["x", "ab"], ["abc"], ["x", "", "ab"]),  # never complete
    ],
)
def test_stop_strings_by_hand(pieces, stops, given):
    tokenizer, ids = tokenized(*pieces)
    assert assemble(TextAssembler(tokenizer, stop=stops), ids) == given


def test_stop_string_over_bytes_of_characters():
    tokenizer = make_tokenizer("bytes")
    assembler = TextAssembler(tokenizer, stop=["🎉!"])
    pieces = assemble(assembler, tokenizer("a🎉🎉!b").input_ids)
    assert "".join(pieces) == "a🎉" and assembler.stop_string == "🎉!"
    assert assembler.num_text_tokens == 5 and assembler.num_tokens == 11


def test_stop_string_that_ends_in_an_unfinished_character():
    tokenizer = make_tokenizer("bytes")
    assembler = TextAssembler(tokenizer, stop=["a" + REPLACEMENT])
    assert "".join(assemble(assembler, tokenizer("xa😀").input_ids[:3])) == "x"
    assert assembler.stop_string == "a" + REPLACEMENT


def test_skipped_special_token_is_no_stop():
    tokenizer = make_tokenizer("bytes")
    ids = [*tokenizer("a<eo").input_ids, tokenizer.eos_token_id, *tokenizer("b").input_ids]
    assert "".join(assemble(TextAssembler(tokenizer, stop=[EOS]), ids)) == "a<eob"
    assembler = TextAssembler(tokenizer, stop=[EOS], skip_special_tokens=False)
    assert "".join(assemble(assembler, ids)) == "a<eo"
    assert assembler.is_stopped


def test_text_tokens_leave_out_the_end_that_has_no_text():
    tokenizer = make_tokenizer("bytes")
    ids = tokenizer("ab").input_ids
    assembler = TextAssembler(tokenizer, stop=["bc"])
    assemble(assembler, [*ids, tokenizer.eos_token_id])
    assert (assembler.text, assembler.num_text_tokens, assembler.num_tokens) == ("ab", 2, 3)
    assembler = TextAssembler(tokenizer)
    assemble(assembler, [*tokenizer("é").input_ids[:1], tokenizer.eos_token_id])
    assert (assembler.text, assembler.num_text_tokens) == (REPLACEMENT, 1)
    assert TextAssembler(tokenizer).num_text_tokens == 0
    assembler = TextAssembler(tokenizer)
    assemble(assembler, [tokenizer.eos_token_id, *tokenizer("é").input_ids[:1]])
    assert (assembler.text, assembler.num_text_tokens) == (REPLACEMENT, 2)


def test_hundreds_of_stops_cost_no_more_per_token():
    tokenizer = character_tokenizer("?ab")
    stops = ["a" * 20 + "b" * size for size in range(1, 400)]
    assembler = TextAssembler(tokenizer, stop=stops)
    finder = assembler._finder
    num_looks = 0

    class Counting(dict):
        def __contains__(self, key):
            nonlocal num_looks
            num_looks += 1
            return super().__contains__(key)

    finder._following = Counting(finder._following)
    ids = [random.Random(0).choice([1, 1, 1, 2]) for _ in range(2000)]
    assemble(assembler, [1] * 19 + [2] + ids)
    assert num_looks <= 3 * 2020


@pytest.mark.parametrize("stop", ["abc", 5, None, [5], [b"a"], ["a", None], {"a": 1}.keys()])
def test_stops_that_are_no_texts_are_refused(stop):
    with pytest.raises(TypeError, match="`stop`"):
        TextAssembler(make_tokenizer("bytes"), stop=stop)


def test_empty_stop_is_refused():
    with pytest.raises(ValueError, match="`stop`"):
        TextAssembler(make_tokenizer("bytes"), stop=["a", ""])


# Following a row


@pytest.mark.parametrize("seed", range(20))
def test_follower_finds_the_token_whatever_the_blocks(seed):
    generator = random.Random(seed)
    for _ in range(25):
        tokenizer = piece_tokenizer(generator)
        stops = random_stops(generator, "abc")
        ids = generator.choices(range(len(tokenizer)), k=generator.randint(1, 12))
        text, num_tokens = stopped_by_hand(tokenizer, ids, stops)
        follower = TextAssembler(tokenizer, stop=stops)
        pieces: list[str] = []
        committed: list[int] = []
        while len(committed) < len(ids):
            block = ids[len(committed) :][: generator.randint(1, 5)]
            if generator.random() < 0.3:  # judged, and then not committed
                follower.first_stop(committed, generator.choices(range(len(tokenizer)), k=4))
            found = follower.first_stop(committed, block)
            is_here = num_tokens is not None and num_tokens <= len(committed) + len(block)
            assert (found and len(committed) + found) == (num_tokens if is_here else None)
            committed = committed + block[:found]
            if found is None and generator.random() < 0.3:  # another rule took the last tokens back
                committed = committed[: len(committed) - generator.randint(0, len(block) - 1)]
            if found is not None or generator.random() < 0.5:
                pieces.append(follower.pop_text(committed))
            if found is not None:
                break
        pieces.append(follower.pop_text(committed, is_finished=True))
        assert "".join(pieces) == text == follower.text


def test_text_of_tokens_taken_back_is_never_given_away():
    tokenizer, ids = tokenized("a", "b", "c")
    follower = TextAssembler(tokenizer, stop=["c"])
    assert follower.first_stop([], ids) == 3
    assert follower.pop_text(ids[:1]) == "a"
    assert follower.pop_text(ids[:1], is_finished=True) == ""
    assert follower.text == "a" and not follower.is_stopped


def test_following_a_row_reads_each_token_once():
    tokenizer = make_tokenizer("byte_bpe")
    counting = CountingTokenizer(tokenizer)
    follower = TextAssembler(counting, stop=["never"])
    ids = tokenizer(" ".join(random_texts(7, 60))).input_ids[:2000]
    pieces = []
    for start in range(0, len(ids), 5):
        assert follower.first_stop(ids[:start], ids[start : start + 5]) is None
        pieces.append(follower.pop_text(ids[: start + 5]))
    pieces.append(follower.pop_text(ids, is_finished=True))
    assert "".join(pieces) == decode(tokenizer, ids)
    assert counting.num_decoded <= 8 * len(ids)


# What ends a row, and from when on


@pytest.mark.parametrize("name", ["bytes", "byte_bpe", "byte_fallback", "metaspace"])
@pytest.mark.parametrize("is_special", [True, False])
def test_id_that_ends_the_row_is_no_part_of_its_text(name, is_special):
    tokenizer = make_tokenizer(name)
    ids = tokenizer("decoding").input_ids
    end = tokenizer.eos_token_id if is_special else tokenizer("0").input_ids[-1]
    assembler = TextAssembler(tokenizer, end_ids=frozenset([end]), skip_special_tokens=False)
    assert "".join(assemble(assembler, [*ids, end])) == decode(tokenizer, ids) == assembler.text
    assert (assembler.num_tokens, assembler.num_text_tokens) == (len(ids) + 1, len(ids))


def test_id_that_ends_the_row_completes_no_stop_string():
    tokenizer, ids = tokenized("a", "b", "c")
    assembler = TextAssembler(tokenizer, stop=["bc"], end_ids=[ids[2]])
    assert assemble(assembler, ids) == ["a", "", "", "b"]
    assert not assembler.is_stopped and assembler.text == "ab"
    follower = TextAssembler(tokenizer, stop=["bc"], end_ids=[ids[2]])
    assert follower.first_stop([], ids) is None
    assert follower.pop_text(ids, is_finished=True) == "ab"


@pytest.mark.parametrize(
    ("stops", "min_tokens", "text", "stop"),
    [
        (["b"], 0, "a", "b"),
        (["b"], 1, "a", "b"),
        (["b"], 2, "abca", "b"),  # the first one is complete with the second token
        (["bc"], 2, "a", "bc"),  # begins below the floor and ends above it
        (["bc"], 3, "abca", "bc"),
        (["abc"], 2, "", "abc"),
        (["ab", "abcabcx"], 5, "abcabc", "ab"),
        (["ab", "cab"], 3, "ab", "cab"),
        (["c", "bca"], 3, "a", "bca"),
        (["abcabcabc"], 8, "", "abcabcabc"),
        (["abcabcabc"], 9, "abcabcabc", None),
        (["a"], 100, "abcabcabc", None),
    ],
)
def test_stop_string_counts_once_the_floor_is_reached(stops, min_tokens, text, stop):
    tokenizer, _ = tokenized("a", "b", "c")
    ids = [0, 1, 2] * 3
    for block in (1, 2, 5, 9):
        follower = TextAssembler(tokenizer, stop=stops, min_tokens=min_tokens)
        pieces, found = [], None
        for start in range(0, len(ids), block):
            found = follower.first_stop(ids[:start], ids[start : start + block])
            pieces.append(follower.pop_text(ids[: start + (found or block)]))
            if found is not None:
                break
        pieces.append(follower.pop_text(ids[: follower.num_tokens], is_finished=True))
        assert ("".join(pieces), follower.stop_string, found is None) == (text, stop, stop is None)


def test_text_below_the_floor_is_held_only_for_what_may_still_count():
    tokenizer, _ = tokenized("a", "b", "c")
    assembler = TextAssembler(tokenizer, stop=["ab"], min_tokens=4)
    assert [assembler.add(token_id) for token_id in [0, 1, 2, 0, 1]] == ["", "ab", "c", "", ""]
    assert assembler.stop_string == "ab" and assembler.text == "abc"
