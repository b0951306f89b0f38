"""Finders of stop strings are small, shared while they are used, and kept no longer."""

import gc
import tracemalloc

from hf_specgen.serving.detokenizer import TextAssembler
from hf_specgen.serving.parameter_checks import MAX_STOP_CHARACTERS
from hf_specgen.serving.stop_finder import _finders, stop_finder
from tests.support.models import character_tokenizer


def test_finders_are_shared_while_they_are_used_and_kept_no_longer():
    tokenizer = character_tokenizer("?ab")
    assemblers = [TextAssembler(tokenizer, stop=["x" * 5000, "y" * 5000]) for _ in range(3)]
    gc.collect()
    before = len(_finders)  # rows that wait have none
    for assembler in assemblers:
        assembler.add(1)
    assert len({id(assembler._finder) for assembler in assemblers}) == 1 and len(_finders) == before + 1
    del assembler, assemblers
    gc.collect()
    assert len(_finders) == before


def test_finder_of_the_longest_stops_takes_little_memory():
    stops = tuple(letter * (MAX_STOP_CHARACTERS // 4) for letter in "abcd")
    tracemalloc.start()
    try:
        stop_finder(stops)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20


def test_step_takes_constant_work_where_stops_repeat_themselves():
    finder = stop_finder(("a" * 1000 + "b",))
    state = 0
    for _ in range(3000):
        state = finder.step(state, "a")
    assert finder.depths[state] == 1000
    assert finder.stops[finder.step(state, "b")] == "a" * 1000 + "b"
