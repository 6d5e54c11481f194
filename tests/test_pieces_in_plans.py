"""Operator plans with units in pieces: loads by messages, what is divided, what is saved."""

import dataclasses
import itertools
import json

import keras
import numpy as np
import pytest
from test_operator_plan import RESOURCES, random_graph, random_resources, tower_plan

import tf_recsync as recsync
from tf_recsync.placement import Edge, OperatorPlan, Resources, StepGraph, Unit
from tf_recsync.placement.loads import LoadModel


@pytest.fixture(autouse=True)
def _clear_names():
    keras.utils.clear_session()


def up_and_down(width=6, hidden=64, out=8, activation="relu"):
    inputs = keras.Input((width,), name="x")
    x = keras.layers.Dense(hidden, name="up")(inputs)
    x = keras.layers.Activation(activation, name="between")(x)
    x = keras.layers.Dense(out, "relu", name="down")(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="last")(x))


PAIR = {"x": None, "up": "columns", "between": "columns", "down": "rows", "loss": None}


def messages(edge, plan):
    """Sender, receiver, bytes of what one edge sends each way; a trainer is `servers`."""
    p, graph = plan.resources.servers, plan.graph
    source, target = graph[edge.source], graph[edge.target]
    a, b = plan.operators[edge.source], plan.operators[edge.target]
    trainer = p
    a, b = (trainer if place is None else place for place in (a, b))
    forward, backward = edge.forward_bytes, edge.backward_bytes
    if a == b and not isinstance(a, str):
        return
    goes_on = b == "rows" or (b == "columns" and not target.parameter_bytes)
    if a == "columns" and source.elementwise and goes_on:
        return  # Each server goes on with what it has.
    if isinstance(a, int) and isinstance(b, int):
        yield a, b, forward
        yield b, a, backward
        return
    if b == "columns" and isinstance(a, int) and a != trainer:
        for server in set(range(p)) - {a}:
            yield a, server, forward  # Directly.
            yield server, trainer if p > 2 else a, backward
        if p > 2:
            yield trainer, a, backward  # The sum.
        return
    if a == "columns":
        for server in range(p):
            yield server, trainer, forward / p
            yield trainer, server, backward / p
    elif a == "rows":
        for server in range(p):
            yield server, trainer, forward
            yield trainer, server, backward
    elif a != trainer:
        yield a, trainer, forward
        yield trainer, a, backward
    if b == "columns":
        for server in range(p):
            yield trainer, server, forward
            yield server, trainer, backward
    elif b == "rows":
        for server in range(p):
            yield trainer, server, forward / p
            yield server, trainer, backward / p
    elif b != trainer:
        yield trainer, b, forward
        yield b, trainer, backward


def with_features(graph, random):
    """Some units can be divided, and some act on each element."""
    units = []
    for unit in graph.units:
        if unit.parameter_bytes and not unit.pinned:
            features = {"features_in": 8, "features_out": int(random.choice([4, 16]))}
            unit = dataclasses.replace(unit, **features)
        elementwise = unit.kind == "layer" and random.random() < 0.7
        units.append(dataclasses.replace(unit, elementwise=bool(elementwise)))
    return StepGraph(units, graph.edges)


def random_plan(random):
    graph = with_features(random_graph(random), random)
    resources = random_resources(random)
    p = resources.servers
    operators, weights = {}, {}
    for unit in graph.units:
        places = [None] if unit.pinned else [None, *range(p)]
        if unit.can_be_divided and random.random() < 0.6:
            places = ["columns", "rows"]
        place = places[random.integers(len(places))]
        sources = [edge.source for edge in graph.edges if edge.target == unit.name]
        in_columns = [
            name for name in sources if operators[name] == "columns" and graph[name].elementwise
        ]
        follows = unit.kind == "layer" and not unit.parameter_bytes and unit.elementwise
        if follows and len(sources) == 1 == len(in_columns) and random.random() < 0.8:
            place = "columns"
        operators[unit.name] = place
        if unit.parameter_bytes and place is None:
            weights[unit.name] = int(random.integers(p))
    return OperatorPlan(graph, resources, operators, weights)


def test_loads_of_pieces_are_those_of_the_messages_and_of_their_parts():
    random = np.random.default_rng(8)
    in_pieces = followers = 0
    for _ in range(100):
        plan = random_plan(random)
        of, graph = plan.resources, plan.graph
        p, nets = of.servers, of.trainers * of.nets_per_trainer
        traffic, flops, memory = np.zeros(p + 1), np.zeros(p + 1), np.zeros(p + 1)
        total = dict.fromkeys(plan.operators, 0.0)
        for edge in graph.edges:
            for sender, receiver, size in messages(edge, plan):
                traffic[[sender, receiver]] += size
                total[edge.source] += size
                total[edge.target] += size
        for unit in graph.units:
            place, held = plan.operators[unit.name], (1 + unit.slots) * unit.parameter_bytes
            if isinstance(place, str):
                in_pieces += 1
                followers += not unit.parameter_bytes
                flops[:p] += unit.flops / p
                given = unit.activation_bytes / (p if place == "columns" else 1)
                memory[:p] += np.ceil(held / p) + nets * np.ceil(given)
                continue
            where = p if place is None else place
            flops[where] += unit.flops
            memory[where] += unit.activation_bytes * (of.nets_per_trainer if where == p else nets)
            if unit.parameter_bytes:
                home = plan.weights[unit.name]
                memory[home] += held
                if place is None:
                    traffic[[p, home]] += 2 * unit.parameter_bytes
                    total[unit.name] += 2 * unit.parameter_bytes
        times = np.array([nets] * p + [1])
        speeds = [of.server_flops_per_second] * p + [of.trainer_flops_per_second]
        np.testing.assert_allclose(plan.loads.processor, times * flops / speeds)
        sending = np.array([nets] * p + [of.nets_per_trainer])
        np.testing.assert_allclose(plan.loads.network, sending * traffic / of.bytes_per_second)
        assert plan.loads.memory.tolist() == memory.tolist()
        traffic_of = LoadModel(graph, of).traffic(plan.positions)
        np.testing.assert_allclose(traffic_of, list(total.values()))
    assert in_pieces > 50 and followers > 3


def test_a_pair_that_fits_together_sends_p_times_the_input_and_p_times_the_output():
    graph = OperatorPlan.step_graph(up_and_down(), 32)
    plan = OperatorPlan(graph, Resources(2, 4), {**PAIR, "last": None}, {"last": 0})
    assert graph["between"].elementwise and graph["up"].elementwise
    sent = plan.loads.network[-1] * plan.resources.bytes_per_second
    # The input has no gradient; the last layer's 9 weights are pulled and pushed.
    assert sent == pytest.approx(4 * 32 * (4 * 6 + 2 * 4 * 8) + 2 * 4 * 9)
    compressed = dataclasses.replace(plan.resources, compression_seconds_per_byte=1e-9)
    more = OperatorPlan(graph, compressed, plan.operators, plan.weights).loads
    cut = 4 * 32 * (6 + 2 * 8)
    np.testing.assert_allclose(
        more.processor - plan.loads.processor, 1e-9 * cut * np.array([2, 2, 2, 2, 4])
    )


def test_units_with_more_than_a_servers_part_of_the_weights_are_divided_and_others_are_not():
    graph = OperatorPlan.step_graph(up_and_down(), 32)
    resources = Resources(2, 2, bytes_per_second=1e12)
    plan = OperatorPlan.search(graph, resources)
    # Of 7 * 64 + 65 * 8 + 9 weights the second layer has more than a half.
    assert plan.divided == {"down": "rows"}
    wide = OperatorPlan.search(graph, dataclasses.replace(resources, servers=3))
    assert wide.divided == {name: how for name, how in PAIR.items() if how}
    assert set(wide.weights) == {"last"}
    whole = OperatorPlan.search(graph, resources, splits=False)
    assert not whole.divided
    assert plan.refined() == plan
    # One server has nothing to divide, and 8 columns are too few for nine.
    assert not OperatorPlan.search(graph, Resources(1, 1)).divided
    narrow = OperatorPlan.step_graph(up_and_down(8, 8, 8), 32)
    assert not OperatorPlan.search(narrow, Resources(1, 9)).divided


def test_where_only_divided_layers_have_weights_a_plan_is_found():
    inputs = keras.Input((32,), name="x")
    x = keras.layers.Dense(10, name="only")(inputs)
    graph = OperatorPlan.step_graph(keras.Model(inputs, keras.layers.Softmax(name="last")(x)), 16)
    plan = OperatorPlan.search(graph, Resources(1, 2))
    assert plan.operators == {"x": None, "only": "rows", "last": None, "loss": None}


def test_what_is_not_elementwise_between_two_is_whole():
    graph = OperatorPlan.step_graph(up_and_down(activation="softmax"), 32)
    plan = OperatorPlan.search(graph, Resources(2, 3))
    assert plan.divided == {"up": "columns", "down": "rows"}
    with pytest.raises(ValueError, match=r"\['between'\]='columns': .* does not follow on columns"):
        OperatorPlan(graph, plan.resources, {**plan.operators, "between": "columns"}, plan.weights)


def test_a_large_unit_that_stays_whole_is_said_to_be_so():
    model = keras.Sequential(
        [
            keras.Input((8,), name="x"),
            keras.layers.Dense(64, name="large", kernel_regularizer="l2"),
            keras.layers.Dense(1, name="small"),
        ],
        name="net",
    )
    graph = OperatorPlan.step_graph(model, 4)
    plan = OperatorPlan(
        graph, Resources(1, 2), {"x": None, "loss": None, "net/large": 0} | {"net/small": 1}
    )
    assert OperatorPlan.search(graph, plan.resources).divided == {}
    rows = {line.split()[0]: line for line in str(plan).splitlines()[3:]}
    assert rows["net/large"].endswith("whole: it has a kernel_regularizer, which needs the whole")
    assert rows["net/small"].endswith("%")
    with pytest.raises(ValueError, match="can't be divided so: it has a kernel_regularizer"):
        OperatorPlan(graph, plan.resources, {**plan.operators, "net/large": "rows"})


FEATURES = {"features_in": 10, "features_out": 20}


def test_a_unit_that_fits_no_device_whole_is_divided_and_one_that_does_not_either_is_named():
    huge = Unit("huge", "layer", 1e6, 1000, slots=2, **FEATURES)
    others = [Unit(f"other{i}", "layer", 1e6, 900, slots=0) for i in range(3)]
    graph = StepGraph([huge, *others])
    # 3000 bytes of one with less than a third of the weights.
    plan = OperatorPlan.search(graph, Resources(1, 3, memory_limit=2000))
    assert plan.divided == {"huge": "columns"}
    assert plan.loads.memory[:-1].tolist() == [1900] * 3
    assert not OperatorPlan.search(graph, Resources(1, 3, memory_limit=4000)).divided
    with pytest.raises(ValueError, match="'huge' fits no.* 3000 bytes.*; not even divided among 3"):
        OperatorPlan.search(graph, Resources(1, 3, memory_limit=999))
    with pytest.raises(ValueError, match="'huge' fits no.* 3000 bytes.*; it would, .*splits=True"):
        OperatorPlan.search(graph, Resources(1, 3, memory_limit=2000), splits=False)
    fixed = dataclasses.replace(huge, features_in=0, features_out=0, why_whole="is a GRU")
    with pytest.raises(ValueError, match="'huge' fits no.* 3000 bytes.*it can't be .*: it is a GR"):
        OperatorPlan.search(StepGraph([fixed]), Resources(1, 3, memory_limit=2000))
    # What is left of the memory beside pieces is too small for the others.
    with pytest.raises(ValueError, match="no placement of the 4 units"):
        OperatorPlan.search(graph, Resources(1, 3, memory_limit=1500))


def test_with_what_is_divided_fixed_the_search_finds_the_best_place_for_the_rest():
    graph = OperatorPlan.step_graph(up_and_down(), 32)
    resources = Resources(2, 2, bytes_per_second=1e9, server_flops_per_second=1e11)
    plan = OperatorPlan.search(graph, resources)
    free = ["up", "between", "last"]
    best = np.inf
    for places in itertools.product([None, 0, 1], repeat=3):
        operators = {**plan.operators, **dict(zip(free, places, strict=True))}
        for homes in itertools.product([0, 1], repeat=2):
            wanted = dict(zip(["up", "last"], homes, strict=True))
            weights = {n: home for n, home in wanted.items() if operators[n] is None}
            best = min(best, OperatorPlan(graph, resources, operators, weights).highest_load)
    assert plan.highest_load == pytest.approx(best, rel=1e-3)


def test_a_plan_in_pieces_prints_and_is_drawn_and_saved(tmp_path):
    graph = OperatorPlan.step_graph(up_and_down(), 32)
    plan = OperatorPlan(graph, RESOURCES, {**PAIR, "last": 1})
    lines = str(plan).splitlines()[2:7]
    assert [line.split("  ", 2)[1].strip() for line in lines[1:]] == ["x", "up", "between", "down"]
    places = [line[10:].split("  ")[0].strip() for line in lines]
    assert places == ["device", "trainers", *2 * ["PS 0-1, columns"], "PS 0-1, rows"]
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    plan.save(tmp_path / "plan.json")
    loaded = OperatorPlan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.divided == {n: how for n, how in PAIR.items() if how}


def test_plans_of_the_version_before_pieces_are_read(tmp_path):
    path = tmp_path / "plan.json"
    tower_plan().save(path)
    content = json.loads(path.read_text())
    content["version"] = 1
    for unit in content["units"]:
        for name in ("features_in", "features_out", "elementwise", "why_whole"):
            del unit[name]
    path.write_text(json.dumps(content))
    assert OperatorPlan.load(path) == tower_plan()


DIVISIBLE = Unit("a", "layer", 1.0, 8, features_in=2, features_out=3)
TWO = Resources(1, 2)
BAD = {
    "features_in=3 and features_out=0": lambda: Unit("a", "layer", 1.0, 8, features_in=3),
    "features_in=1 and features_out=1": lambda: Unit(
        "a", "layer", 1.0, features_in=1, features_out=1
    ),
    "features_out must be an integer": lambda: dataclasses.replace(DIVISIBLE, features_out=-1),
    "elementwise=1 must be a bool": lambda: Unit("a", "layer", 1.0, elementwise=1),
    "why_whole=None must be a str": lambda: Unit("a", "layer", 1.0, why_whole=None),
    r"operators\['a'\]='columns': .* has no features_in": lambda: OperatorPlan(
        StepGraph([Unit("a", "layer", 1.0, 8)]), TWO, {"a": "columns"}
    ),
    r"operators\['a'\]='rows': .* has 2 rows for 3 servers": lambda: OperatorPlan(
        StepGraph([DIVISIBLE]), Resources(1, 3), {"a": "rows"}
    ),
    r"operators\['a'\]='halves': must be from 0 to 1.* or \"rows\"": lambda: OperatorPlan(
        StepGraph([DIVISIBLE]), TWO, {"a": "halves"}
    ),
    r"weights\['a'\]=0: must not be there": lambda: OperatorPlan(
        StepGraph([DIVISIBLE]), TWO, {"a": "rows"}, {"a": 0}
    ),
    r"weights\['a'\]='rows': must be": lambda: OperatorPlan(
        StepGraph([DIVISIBLE]), TWO, {"a": None}, {"a": "rows"}
    ),
    r"operators\['b'\]='columns': must be None": lambda: OperatorPlan(
        StepGraph([Unit("b", "loss", 1.0)]), TWO, {"b": "columns"}
    ),
    r"operators\['b'\]='rows': .* has no parameters": lambda: OperatorPlan(
        StepGraph(
            [
                dataclasses.replace(DIVISIBLE, elementwise=True),
                Unit("b", "layer", 1.0, elementwise=True),
            ],
            [Edge("a", "b", 1)],
        ),
        TWO,
        {"a": "columns", "b": "rows"},
    ),
    "PS 0 would hold 12 bytes": lambda: OperatorPlan(
        StepGraph([dataclasses.replace(DIVISIBLE, slots=2)]),
        Resources(1, 2, memory_limit=11),
        {"a": "rows"},
    ),
    "splits=1: must be True or False": lambda: OperatorPlan.search(
        StepGraph([DIVISIBLE]), TWO, splits=1
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_pieces_are_refused(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


def test_a_step_tells_which_layers_can_be_divided_and_why_others_can_not():
    inputs = keras.Input((4, 6), name="x")
    row = keras.layers.Flatten(name="flat")(inputs)
    dense = keras.layers.Dense
    twice = dense(24, name="twice")
    first, tied = dense(24, name="first"), TiedTo(name="tied")
    tied.first = first
    found = [
        twice(twice(row)),
        first(row),
        tied(row),
        keras.layers.PReLU(name="prelu")(dense(24, "softmax", name="softmax")(row)),
        keras.layers.Flatten()(dense(6, name="steps")(inputs)),
        keras.layers.ReLU(name="relu")(dense(24, "relu", name="plain")(row)),
    ]
    model = keras.Model(inputs, dense(2, name="last")(keras.layers.Add(name="add")(found)))
    graph = OperatorPlan.step_graph(model, 4)
    reasons = {
        "twice": "is called 2 times",
        "first": "shares variables with another layer",
        "steps": "gives more than a row for each example",
        "prelu": "is not a keras.layers.Dense itself",
    }
    assert {unit.name: unit.why_whole for unit in graph.units if unit.why_whole} == reasons
    features = {u.name: (u.features_in, u.features_out) for u in graph.units if u.can_be_divided}
    assert features == {"softmax": (24, 24), "plain": (24, 24), "last": (24, 2)}
    assert {unit.name for unit in graph.units if unit.elementwise} == {"relu", "plain", "last"}
    # An optimizer that is not built yet may train any of them.
    model.compile(recsync.optimizers.SGD(0.1, global_clipnorm=1.0), "mse")
    clipped = OperatorPlan.step_graph(model, 4)
    assert clipped["plain"].why_whole == (
        "is trained with global_clipnorm=1.0, which needs the whole"
    )


class TiedTo(keras.layers.Layer):
    """Computes with the kernel of another layer."""

    first = None

    def call(self, inputs):
        return inputs @ self.first.kernel
