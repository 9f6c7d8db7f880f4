"""Pauses between processes that take each other's place."""

from torchrec_bls.serve.processes.pause import Pause


def test_who_has_lived_for_long_is_followed_at_once():
    pause = Pause()
    assert pause.ended(began=0.0, now=100.0) == 0
    assert pause.until == 100.0


def test_short_lives_are_followed_later_and_later_up_to_ten_seconds():
    pause, now, pauses = Pause(), 0.0, []
    for _ in range(10):
        pauses.append(pause.ended(began=now, now=now + 1))
        now = pause.until
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]


def test_a_long_life_ends_the_pauses():
    pause = Pause()
    for _ in range(5):
        pause.ended(began=0.0, now=1.0)
    assert pause.ended(began=0.0, now=60.0) == 0
    assert pause.ended(began=60.0, now=61.0) == 0.1
