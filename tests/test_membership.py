"""Who is there, lost or coming back: the state machine, against a model of its own."""

import logging
import random
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_recsync.cluster.membership import AWAY, MOVES, TRANSITIONS, Membership, Order
from tf_recsync.cluster.membership import MemberState as State

WORKER, PS, READER = ("worker", 0), ("ps", 0), ("reader", 0)
SERVERS = {"worker": 2, "ps": 1, "reader": 1}


class Told:
    """A listener that keeps what it is told, in a list that several may share."""

    def __init__(self, told, name=None):
        self._told = told
        self._name = name

    def lost(self, server, is_news):
        self._told.append((self._name, "lost", server, is_news))

    def back(self, server):
        self._told.append((self._name, "back", server, True))


def connected(process=1, servers=SERVERS):
    members = Membership(servers)
    all_of_them = [(m.job, m.index) for m in members.members()]
    members.connected(dict.fromkeys(all_of_them, process), all_answer=True)
    return members


def state(members, server=WORKER):
    return next(m.state for m in members.members() if (m.job, m.index) == server)


def test_no_state_is_without_a_way_out():
    """By the tables alone: from each state, others lead to a worker that works."""
    ways = {(before, after) for before, afters in MOVES.items() for after in afters}
    for of_event in TRANSITIONS.values():
        # Where nothing is said against it, a server does what its threads do.
        ways |= {(b or State.READY, a or State.READY) for b, a in of_event.items()}
    ways.add((State.READY, State.JOINING))
    leads = {State.WORKING}
    while True:
        more = {before for before, after in ways if after in leads} | leads
        if more == leads:
            break
        leads = more
    assert leads == set(State)
    # And all of them but what is gone by itself can be lost.
    assert set(TRANSITIONS["lost"]) == {None, *State} - AWAY - set(MOVES)


@pytest.fixture
def quiet():
    """What is logged of a hundred thousand events takes most of the time."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_thousand_random_events_are_what_a_simple_model_says(seed):
    """100 walks of 1,000 steps. The model: who is there, in which life, and who has joined."""
    rng = random.Random(seed)
    members, told, expected = connected(), [], []
    first, second = Told(told, "training"), Told(told, "reports")
    members.listen(second, Order.REPORTS)
    members.listen(first, Order.TRAINING)
    life = Counter()
    there = {server: "there" for server in [WORKER, ("worker", 1), PS, READER]}
    joined: dict = {}  # (server, thread): [life, state]
    returning, untold = set(), set()

    def deliver():
        members.deliver()
        untold.clear()

    for _ in range(1000):
        server = rng.choice(list(there))
        event = rng.choice(
            ["lost"] * 2 + ["readmitting", "refused", "readmitted", "suspected", "answered"]
            + ["deliver", "join", "move", "move", "move", "connected"]
        )  # fmt: skip
        if event == "lost":
            known = rng.choice([None, life[server], life[server] - 1])
            was_there = there[server] in ("there", "suspect")
            is_lost = was_there and known != life[server] - 1
            assert members.lost(server, known, "in a test") == is_lost
            if is_lost:
                life[server] += 1
                there[server] = "lost"
                expected.append(("lost", server, server not in returning))
                returning.discard(server)
                untold.add(server)
        elif event in ("readmitting", "refused", "suspected", "answered"):
            before, after = {
                "readmitting": ("lost", "coming"),
                "refused": ("coming", "lost"),
                "suspected": ("there", "suspect"),
                "answered": ("suspect", "there"),
            }[event]
            assert getattr(members, event)(server) == (there[server] == before)
            if there[server] == before:
                there[server] = after
        elif event == "readmitted" or (event == "connected" and there[server] == "lost"):
            is_away = there[server] in ("lost", "coming")
            if event == "readmitted":
                assert members.readmitted(server) == is_away
                came = [server] if is_away else []
            else:
                members.connected(dict.fromkeys(there, 1), all_answer=True)
                came = [other for other in there if there[other] == "lost"]
            for other in came:
                there[other] = "there"
                if other[0] == "worker":
                    returning.add(other)
                else:
                    expected.append(("back", other, True))
        elif event == "deliver":
            deliver()
        elif server[0] == "worker":
            thread = rng.randrange(2)
            own = joined.get((server, thread))
            is_usable = there[server] in ("there", "suspect")
            if event == "join":
                may = is_usable and server not in untold
                assert members.join(server, thread) == (life[server] if may else None)
                if may:
                    joined[server, thread] = [life[server], State.JOINING]
            elif own is not None and own[1] is not State.DONE:
                goal = rng.choice([own[1], *sorted(MOVES[own[1]] - {State.JOINING}, key=str)])
                is_current = is_usable and own[0] == life[server]
                assert members.move(server, thread, own[0], goal) == is_current
                if is_current:
                    if own[1] is State.JOINING and goal is State.READY and server in returning:
                        returning.discard(server)
                        expected.append(("back", server, True))
                    own[1] = goal
        assert members.is_away(server) == (there[server] in ("lost", "coming"))
        assert members.life(server) == life[server]
    deliver()
    # Nothing was lost or told twice, and each was told to all, in their order.
    assert told == [(name, *e) for e in expected for name in ("training", "reports")]
    # And wherever a worker stands, it works again.
    if members.is_away(WORKER):
        members.readmitted(WORKER)
    now = members.join(WORKER, "anew")
    for goal in (State.READY, State.WORKING):
        assert members.move(WORKER, "anew", now, goal)
    assert state(members) in (State.WORKING, State.SUSPECT)


def test_what_is_of_an_earlier_life_is_refused():
    members = connected()
    before = members.join(WORKER, "thread")
    members.move(WORKER, "thread", before, State.READY)
    members.lost(WORKER, before, "in a test")
    members.readmitted(WORKER)
    assert not members.move(WORKER, "thread", before, State.WORKING)
    assert not members.are_current({WORKER: before})
    assert not members.lost(WORKER, before, "once more, by a thread that notices late")
    assert members.are_current({WORKER: members.life(WORKER)})


def test_nobody_joins_before_all_know_that_it_was_lost():
    members, seen = connected(), []

    class Joins(Told):
        def lost(self, server, is_news):
            members.readmitted(server)
            seen.append(members.join(server, "meanwhile"))

    listener = Joins([])
    members.listen(listener, Order.TRAINING)
    members.lost(WORKER, None, "in a test")
    assert members.join(WORKER, "at once") is None
    members.deliver()
    assert seen == [None]
    assert members.join(WORKER, "after") == 1


def test_a_listener_that_fails_keeps_nobody_from_knowing(caplog):
    members, told = connected(), []

    class Fails(Told):
        def lost(self, server, is_news):
            raise ValueError("no idea")

    fails, knows = Fails([]), Told(told)
    members.listen(fails, Order.TRAINING)
    members.listen(knows, Order.REPORTS)
    members.lost(PS, None, "in a test")
    members.deliver()
    assert [event for _, event, *_ in told] == ["lost"]
    assert "could not be told of ps:0" in caplog.text


def test_a_server_is_taken_in_again_though_who_was_told_of_its_loss_was_interrupted():
    class Interrupted(Told):
        def lost(self, server, is_news):
            raise KeyboardInterrupt

    members, listener = connected(), Interrupted([])
    members.listen(listener, Order.TRAINING)
    members.lost(WORKER, None, "in a test")
    with pytest.raises(KeyboardInterrupt):
        members.deliver()
    members.readmitted(WORKER)
    members.deliver()
    assert members.join(WORKER, object()) == members.life(WORKER)


def test_a_listener_that_is_dropped_is_told_no_more():
    members, told = connected(), []
    listener = Told(told)
    members.listen(listener, Order.TRAINING)
    del listener
    members.lost(PS, None, "in a test")
    members.deliver()
    assert told == []


def test_of_several_threads_the_busiest_says_what_a_worker_does():
    members = connected()
    for thread in "ab":
        members.join(WORKER, thread)
        members.move(WORKER, thread, 0, State.READY)
    for thread, goal, expected in [
        ("a", State.WORKING, State.WORKING),
        ("b", State.IDLE, State.WORKING),
        ("a", State.READY, State.READY),
        ("a", State.DONE, State.IDLE),
        ("b", State.DONE, State.DONE),
    ]:
        assert members.move(WORKER, thread, 0, goal)
        assert state(members) is expected
    members.suspected(WORKER)
    assert state(members) is State.SUSPECT


def test_a_thread_that_works_without_having_joined_is_a_bug_that_shows():
    members = connected()
    members.join(WORKER, "thread")
    with pytest.raises(RuntimeError, match="was joining, then working, which is a bug"):
        members.move(WORKER, "thread", 0, State.WORKING)


def test_a_process_that_was_started_again_has_lost_its_earlier_life():
    members, told = connected(process=1), []
    listener = Told(told)
    members.listen(listener, Order.TRAINING)
    members.connected(dict.fromkeys([WORKER, PS, READER], 2), all_answer=True)
    members.deliver()
    lost = {server for _, event, server, _ in told if event == "lost"}
    assert lost == {WORKER, PS, READER, ("worker", 1)}  # The last is not there at all.
    assert members.is_away(("worker", 1))
    assert not members.is_away(WORKER)


def test_one_that_was_not_up_at_first_was_never_lost():
    members, told = Membership(SERVERS), []
    listener = Told(told)
    members.listen(listener, Order.TRAINING)
    members.connected({WORKER: 1, PS: 1, READER: 1}, all_answer=True)
    assert state(members, ("worker", 1)) is State.ABSENT
    assert members.readmitting(("worker", 1))
    assert members.refused(("worker", 1))
    assert state(members, ("worker", 1)) is State.ABSENT
    members.connected(dict.fromkeys([WORKER, ("worker", 1), PS, READER], 1), all_answer=True)
    life = members.join(("worker", 1), "thread")
    members.move(("worker", 1), "thread", life, State.READY)
    members.deliver()
    assert told == [(None, "back", ("worker", 1), True)]


@pytest.mark.usefixtures("quiet")
def test_events_of_many_threads_are_told_once_each():
    members, told = connected(servers={"worker": 8}), []
    listener = Told(told)
    members.listen(listener, Order.TRAINING)
    losses = Counter()

    def live(index):
        server, rng = ("worker", index), random.Random(index)
        for _ in range(300):
            members.deliver()
            life = members.join(server, index)
            if life is None:
                continue
            members.move(server, index, life, State.READY)
            victim = ("worker", rng.randrange(8))
            if members.lost(victim, None, "in a test"):
                with lock:
                    losses[victim] += 1
                members.readmitted(victim)

    lock = threading.Lock()
    threads = [threading.Thread(target=live, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    members.deliver()
    assert Counter(server for _, event, server, _ in told if event == "lost") == losses
    assert all(members.life(server) == count for server, count in losses.items())
