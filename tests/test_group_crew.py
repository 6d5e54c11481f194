"""What becomes of the tokens of a worker that is gone, whatever goes wrong meanwhile."""

import threading
import types

import pytest
import tensorflow as tf

from tf_recsync.strategies import group_crew
from tf_recsync.synchronization.arrangement import hierarchical

WORKER = 3  # Of the second group.
BROKEN = tf.errors.UnavailableError(None, None, "connection reset")
WRONG = tf.errors.InvalidArgumentError(None, None, "a wrong argument")


class Played:
    """Two groups; giving tokens back fails as told, then succeeds.

    Args:
        errors: what it fails of, one after the other.
        answers: whether the group's server does.
        is_gone: whether that is known to be gone.
        is_current: whether it has what it gives back, and not another life's.
        is_needed: whether nobody goes on without the server.
    """

    takes_tokens = True

    def __init__(self, errors, answers, is_gone=False, is_needed=False, is_current=True):
        self._errors = list(errors)
        self.given_back, self.asked = [], []
        self._answers, self._is_needed = answers, is_needed
        self.suspended = set()
        made, there = object(), object()
        self.is_made_for = [made].count
        self.copies = types.SimpleNamespace(
            answers=self._does_answer,
            are_gone=lambda group: is_gone,
            of=lambda group: made if is_current else there,
        )
        self.crew = group_crew.GroupCrew(
            hierarchical(2, 2, 1, workers=4, ps=2, sync_ps=0),
            types.SimpleNamespace(
                copies=self.copies,
                lose=lambda worker: None,
                holders_of=lambda worker: () if self._is_needed else (("ps", worker // 2),),
            ),
            {1: self},
            1,
            self.suspended,
            [threading.Lock(), threading.Lock()],
        )

    def _does_answer(self, group):
        self.asked.append(group)
        return self._answers

    def lose(self, worker):
        if self._errors:
            raise self._errors.pop(0)
        self.given_back.append(worker)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(group_crew, "_RETRY_SECONDS", 0.0)


def test_a_connection_that_broke_leaves_nobody_waiting_for_them():
    played = Played([BROKEN, BROKEN], answers=True)
    played.crew.lose(WORKER)
    assert played.given_back == [WORKER]
    assert played.suspended == set()


def test_they_are_given_back_later_if_the_groups_server_is_gone_too():
    played = Played([BROKEN], answers=False, is_gone=True)
    played.crew.lose(WORKER)
    assert played.given_back == []
    assert played.suspended == {WORKER}
    played.crew.lose(WORKER)
    assert played.suspended == set()


def test_a_server_that_does_not_answer_for_a_moment_is_asked_again():
    played = Played([BROKEN], answers=False)
    played.crew.lose(WORKER)
    assert played.given_back == [WORKER]
    played = Played([BROKEN] * 100, answers=False)
    played.crew.lose(WORKER)
    assert played.given_back == []
    assert played.suspended == {WORKER}


def test_what_a_server_had_in_an_earlier_life_nobody_gives_back():
    played = Played([WRONG] * 100, answers=True, is_current=False)
    played.crew.lose(WORKER)
    assert played.given_back == []
    assert played.suspended == {WORKER}


@pytest.mark.parametrize("error", [WRONG, BROKEN])
def test_an_error_of_a_server_that_is_there_is_raised(error):
    played = Played([error] * 100, answers=True)
    with pytest.raises(type(error), match=error.message):
        played.crew.lose(WORKER)
    assert played.suspended == set()


def test_without_others_that_go_on_an_error_is_raised_at_once():
    played = Played([BROKEN], answers=False, is_needed=True)
    with pytest.raises(tf.errors.UnavailableError, match="connection reset"):
        played.crew.lose(WORKER)
    assert played.asked == [] == played.given_back
