"""Random numbers of requests: each has its own, in the order of use, and those of a failed round come again."""

import torch

from hf_specgen.engine.noise import Noise, draft_noise, verification_noise


def test_numbers_are_those_of_the_seed_however_they_are_split():
    expected = torch.rand(40, generator=torch.Generator().manual_seed(7))
    noise = Noise(7)
    assert torch.equal(torch.cat([noise.draw(count) for count in (1, 3, 16, 0, 20)]), expected)


def test_numbers_since_the_last_commit_come_again():
    noise = Noise(3)
    first = noise.draw(5)
    noise.roll_back()
    assert torch.equal(noise.draw(5), first)
    noise.commit()
    second = noise.draw(4)
    assert not torch.equal(second, first[:4])
    noise.roll_back()
    assert torch.equal(noise.draw(4), second)


def test_noise_without_a_seed_follows_the_default_generator():
    def numbers(seed):
        torch.manual_seed(seed)
        return Noise().draw(3).tolist()

    assert numbers(1) == numbers(1) != numbers(2)


def test_rows_draw_what_they_need_from_their_own_numbers():
    table = draft_noise([Noise(1), None, Noise(2)], [2, 2, 3], 3)
    assert table[0].tolist() == [*Noise(1).draw(2).tolist(), 0.0]
    assert table[1].tolist() == [0.0] * 3
    assert torch.equal(table[2], Noise(2).draw(3))


def test_number_of_the_next_token_stands_last():
    table = verification_noise([Noise(1), Noise(2)], torch.tensor([1, 3]), 3)
    first, second = Noise(1).draw(2), Noise(2).draw(4)
    assert table[0, 0] == first[0] and table[0, 3] == first[1]
    assert torch.equal(table[1], second)
