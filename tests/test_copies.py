"""Workers' copies of variables, and what users see of them."""

import numpy as np
import tensorflow as tf

from tf_recsync.synchronization.arrangement import Group
from tf_recsync.synchronization.copies import CopiedVariable, Copies


def test_what_is_no_number_is_not_taken_for_an_assignment():
    values = [[np.nan, 1.0], [np.nan, 2.0], [3, 4]]
    dtypes = [tf.float32, tf.bfloat16, tf.int32]
    variables = [CopiedVariable(v, dtype=d) for v, d in zip(values, dtypes, strict=True)]
    copies = Copies(variables, cluster=None, groups=[Group(0, trainers=(0,))])
    copies.load({0: [variable.numpy() for variable in variables]})
    copies.begin()
    assert copies.assigned == [False, False, False]
    variables[0].assign([np.nan, 5.0])
    variables[1].assign(tf.constant([6.0, 2.0], tf.bfloat16))
    copies.begin()
    assert copies.assigned == [True, True, False]
