import numpy as np
import pytest

from hf_specgen.arguments import check_count


def test_a_count_is_an_int_of_any_library():
    for given in (3, np.int64(3)):
        count = check_count("width", given)
        assert count == 3 and type(count) is int
    assert check_count("width", 0, minimum=0) == 0


@pytest.mark.parametrize("given", [2.0, True, "2", None, np.float32(2)])
def test_what_is_no_int(given):
    with pytest.raises(TypeError, match="`width` has to be an int, but is"):
        check_count("width", given)


@pytest.mark.parametrize("minimum, given", [(1, 0), (0, -1), (4, np.int32(3))])
def test_too_few(minimum, given):
    with pytest.raises(ValueError, match=f"`width` has to be at least {minimum}, but is {given}"):
        check_count("width", given, minimum)


def test_too_many():
    assert check_count("width", 9, maximum=9) == 9
    with pytest.raises(ValueError, match="`width` has to be at most 9, but is 10"):
        check_count("width", 10, maximum=9)
