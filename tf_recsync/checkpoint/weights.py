"""A model's weights as the content of a file of Keras's, without the rows of tables.

Files of HDF5 that are written to a full disk end the process: so they are made in memory.
"""

from __future__ import annotations

import io

import keras
from keras.src.saving import saving_lib

from tf_recsync.embedding.table_rows import RowsApart, apart


def saved_weights(model: keras.Model, rows: RowsApart) -> bytes:
    """What `save_weights` of a model would write, but for the rows of tables, which `rows` gets."""
    file = io.BytesIO()
    store = saving_lib.H5IOStore(file, mode="w")
    with apart(rows):
        saving_lib._save_state(
            model,
            weights_store=store,
            assets_store=None,
            inner_path="",
            visited_saveables=set(),
        )
        store.close()
    return file.getvalue()


def load_weights(model: keras.Model, content: bytes, rows: RowsApart) -> None:
    """Sets a model's weights to what `saved_weights` gave.

    Raises:
        ValueError: if they are of another model.
    """
    store = saving_lib.H5IOStore(io.BytesIO(content), mode="r")
    errors: dict = {}
    failed: set = set()
    with apart(rows):
        saving_lib._load_state(
            model,
            weights_store=store,
            assets_store=None,
            inner_path="",
            visited_saveables=set(),
            failed_saveables=failed,
            error_msgs=errors,
        )
        store.close()
    if failed:
        saving_lib._raise_loading_failure(errors)
