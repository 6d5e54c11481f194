"""Models of the gallery, and the layers that they need."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from programs import EXAMPLES, imported, run_here, strict_json

import tf_recsync as recsync
from tf_recsync.layers import Cross, FactorizationMachine

MODELS = ("deepfm", "dcn_v2", "din", "mmoe", "two_tower", "sasrec")
pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")


@pytest.mark.cases("din", "mmoe")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_on_servers_and_serves_without_this_package(clusters, name, tmp_path):
    strategy = recsync.AsyncStrategy(clusters.get(workers=2, ps=2))
    keras.utils.set_random_seed(1)
    with imported(EXAMPLES / f"{name}.py") as program:
        features, labels = program.make_examples(1600, np.random.default_rng(1))
        with strategy.scope():
            model = program.make_model()
        data = tf.data.Dataset.from_tensor_slices((features, labels)).batch(32)
        losses = model.fit(data, epochs=3, verbose=0, shuffle=False).history["loss"]
        assert losses[-1] < losses[0]
        if name == "two_tower":
            assert 0 < program.recall(model, (features, labels)) <= 1
            return  # It has no inputs of Keras to be exported by.
        recsync.export_model(model, tmp_path)
        served = tf.saved_model.load(tmp_path)
        some = next(iter(data))[0]
        expected = model.predict(tf.data.Dataset.from_tensors(some), verbose=0)
        tf.nest.map_structure(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), served.serve(some), expected
        )
        nodes = {n.op for f in served.signatures.values() for n in f.graph.as_graph_def().node}
        assert not any(op.startswith("Recsync") for op in nodes)


def test_a_program_says_its_figure_and_what_is_expected(tmp_path):
    out = tmp_path / "figures.json"
    arguments = ("--strategy=local", "--examples=1000", "--epochs=1", f"--metrics_json={out}")
    done = run_here(EXAMPLES / "dcn_v2.py", *arguments)
    assert done.returncode == 0, done.stderr
    figures = strict_json(out)
    assert figures["figure"] == "auc" and 0.4 < figures["value"] < 1
    assert f"auc {figures['value']:.4f} on 10,000 other examples" in done.stdout


def test_a_factorization_machine_sums_the_products_of_all_pairs():
    vectors = np.random.default_rng(2).normal(size=(5, 4, 3))
    expected = [[sum(a @ b for a, b in itertools.combinations(example, 2))] for example in vectors]
    np.testing.assert_allclose(FactorizationMachine()(vectors), expected, rtol=1e-5)
    with pytest.raises(ValueError, match=r"must be \[batch, features, dimension\], not \(5, 12\)"):
        FactorizationMachine()(vectors.reshape(5, 12))


@pytest.mark.parametrize("rank", [None, 2])
def test_a_cross_network_multiplies_its_input_with_what_each_layer_makes(rank):
    rng = np.random.default_rng(2)
    first, x = rng.normal(size=(2, 4, 6)).astype(np.float32)
    layer = Cross(rank)
    layer(first, x)
    layer.set_weights([rng.normal(size=weight.shape) for weight in layer.get_weights()])
    *kernels, bias = layer.get_weights()
    matrix = kernels[0] if rank is None else kernels[0] @ kernels[1]
    np.testing.assert_allclose(layer(first, x), first * (x @ matrix + bias) + x, rtol=1e-4)
    np.testing.assert_allclose(layer(first), first * (first @ matrix + bias) + first, rtol=1e-4)
    copy = Cross.from_config(layer.get_config())
    assert copy.rank == rank


def test_wrong_shapes_and_ranks_of_a_cross_layer_are_named():
    with pytest.raises(ValueError, match="rank must be an integer of at least 1, got 0"):
        Cross(rank=0)
    with pytest.raises(ValueError, match=r"first and x must be \[batch, features\] alike, not"):
        Cross()(np.ones((2, 3)), np.ones((2, 4)))
