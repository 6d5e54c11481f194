"""The one watch over silent servers, for all who wait; servers are played here."""

import threading
import time

import pytest
from helpers import wait_until

from tf_recsync.cluster.membership import Membership, MemberState
from tf_recsync.cluster.silence_watch import SilenceWatch, Wait

PS = ("ps", 0)


class Played:
    """A server that answers, or does not; asking it takes no time."""

    def __init__(self):
        self.is_silent = False
        self.asked = 0

    def probe(self, server):
        self.asked += 1
        return self._Answer(self)

    class _Answer:
        def __init__(self, server):
            self.answered = None if server.is_silent else True
            self.reachable = not server.is_silent

        def is_alive(self):
            return not self.answered


@pytest.fixture
def played():
    return Played()


@pytest.fixture
def members():
    members = Membership({"ps": 1})
    members.connected({PS: 1}, all_answer=True)
    return members


@pytest.fixture
def watch(members, played):
    return SilenceWatch(members, played.probe)


def waiting(limit, gave_up, suspects=lambda: [PS]):
    return Wait(suspects, lambda server, seconds: gave_up.append(seconds), limit)


def state(members):
    return members.members("ps")[0].state


def test_each_gives_up_by_its_own_limit(watch, played):
    soon, late = [], []
    waits = [waiting(0.2, soon), waiting(1.0, late)]
    for wait in waits:
        watch.begin(wait)
    played.is_silent = True
    began = time.monotonic()
    # Again and again, which does not put off the other.
    assert wait_until(lambda: late and len(soon) >= 2, 60)
    assert time.monotonic() - began >= 0.9
    assert min(soon) >= 0.2
    assert min(late) >= 1.0
    for wait in waits:
        watch.end(wait)


def test_others_are_watched_beside_one_who_waits_without_a_limit(watch, played):
    gave_up = []
    played.is_silent = True
    waits = [waiting(float("inf"), []), waiting(0.2, gave_up)]
    for wait in waits:
        watch.begin(wait)
        time.sleep(0.1)
    assert wait_until(lambda: gave_up, 60)
    for wait in waits:
        watch.end(wait)


def test_each_silence_is_noticed_as_soon_as_the_first(watch, played, members):
    """Of a server that nobody waits for in between, so that nobody asks it."""
    is_waiting, gave_up, rounds = [True], [], []

    def suspects():
        rounds.append(len(rounds))
        return [PS] if is_waiting else []

    wait = waiting(0.5, gave_up, suspects)
    watch.begin(wait)
    for _ in range(3):
        began = time.monotonic()
        played.is_silent = True
        is_waiting[:] = [True]
        assert wait_until(lambda: gave_up, 60)
        # Of ten rounds to the limit none counts as more than two, however late it is, and none
        # before it was silent counts at all.
        seconds = gave_up.pop(0)
        assert 0.5 <= seconds < 0.5 + 2 * 0.05 + 0.001
        assert seconds <= time.monotonic() - began
        is_waiting.clear()
        asked = played.asked
        played.is_silent = False
        members.readmitted(PS)
        # A few rounds, in which it is no suspect.
        past = len(rounds)
        assert wait_until(lambda past=past: len(rounds) > past + 3, 60)
        assert played.asked <= asked + 1
        gave_up.clear()
    watch.end(wait)


def test_who_answers_is_suspected_no_longer(watch, played, members):
    gave_up, suspected = [], threading.Event()

    def suspects():
        if state(members) is MemberState.SUSPECT:
            suspected.set()
            played.is_silent = False
            watch.end(wait)
        return [PS]

    wait = waiting(5.0, gave_up, suspects)
    played.is_silent = True
    watch.begin(wait)
    assert suspected.wait(60)
    assert wait_until(lambda: state(members) is MemberState.READY, 60)
    assert gave_up == []


def test_an_error_of_one_who_waits_is_nothing_to_the_others(watch, played, caplog):
    gave_up = []

    def fails():
        raise ValueError("no idea")

    played.is_silent = True
    waits = [waiting(0.1, [], suspects=fails), waiting(0.2, gave_up)]
    for wait in waits:
        watch.begin(wait)
    assert wait_until(lambda: gave_up, 20)
    for wait in waits:
        watch.end(wait)
    assert "could not be asked or told" in caplog.text


def test_what_was_expected_ends_by_itself(watch, played):
    wait = waiting(0.1, [])
    watch.begin(wait)
    assert wait_until(lambda: played.asked >= 1, 20)
    wait.until = time.monotonic() + 0.1
    assert wait_until(lambda: wait not in watch._waits, 20)


def test_who_begins_anew_waits_until_all_have_given_up(watch, played):
    begun, go_on, settled, gave_up = threading.Event(), threading.Event(), threading.Event(), []

    def cuts_off(server, seconds):
        begun.set()
        assert go_on.wait(60)
        gave_up.append(server)

    def settle():
        watch.settle()
        settled.set()

    played.is_silent = True
    waits = [Wait(lambda: [PS], cuts_off, 0.1) for _ in range(2)]
    for wait in waits:
        watch.begin(wait)
    assert begun.wait(60)
    settling = threading.Thread(target=settle)
    settling.start()
    assert not settled.wait(0.2)
    go_on.set()
    settling.join(60)
    assert settled.is_set()
    assert gave_up
    for wait in waits:
        watch.end(wait)


def test_who_has_ended_meanwhile_gives_up_nobody(watch, played):
    ended = []

    def end_the_other(server, seconds):
        for wait in waits:
            watch.end(wait)
        ended.append(server)

    played.is_silent = True
    waits = [Wait(lambda: [PS], end_the_other, 0.1) for _ in range(2)]
    for wait in waits:
        watch.begin(wait)
    assert wait_until(lambda: ended, 60)
    time.sleep(0.2)
    assert ended == [PS]


def test_nobody_is_asked_when_nobody_waits(watch, played):
    wait = waiting(0.1, [])
    watch.begin(wait)
    assert wait_until(lambda: played.asked >= 2, 20)
    watch.end(wait)
    time.sleep(0.1)
    asked = played.asked
    time.sleep(0.2)
    assert played.asked <= asked + 1  # It may have been about to ask.
    assert any(t.name == "recsync_silence_watch" for t in threading.enumerate())
