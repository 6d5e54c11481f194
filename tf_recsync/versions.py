"""Versions of something in numbered folders, each of which is seen whole or not at all.

TensorFlow Serving watches a folder for such versions, and serves the one of the highest number.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from tf_recsync._checks import checked_path

MARKER = "published.json"
_UNFINISHED = ".publishing-"
_PROBE = ".probe"
_BEGUN = ".begun"
# Of file systems where a folder gets its new name in one operation; "" is that of plain paths.
_RENAME_AT_ONCE = ("", "file", "hdfs", "viewfs")


def latest_published(target: str | os.PathLike) -> str | None:
    """The version that `callbacks.Publish` published last.

    Args:
        target: the folder that it publishes to.

    Returns:
        The path of the version's folder, a SavedModel; None if there is none.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(latest_published(folder))
        None
    """
    versions = Versions(target)
    published = versions.published()
    return versions.path(published[-1]) if published else None


_locks: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()
_locks_lock = threading.Lock()


class Versions:
    """The numbered folders below a target; one process at a time writes there.

    In a process one thread at a time may write there: whoever does holds `writing`, a lock that all
    who name the target share. So what an interrupted call of `fit` has left writing comes to its
    end before that of the next call begins, which would take it for something left behind.

    Where a folder is renamed in one operation, a version is written to
    `.publishing-<number>-<token>` and renamed at the end, so that its number is there when it is
    whole. Elsewhere, as in object stores, where renaming is copying, it is written to `<number>`,
    and a file `.publishing-<number>-<token>` beside it says that it is not whole yet. In either
    case a version that is whole has a file, `published.json` by default, which is written last.

    The token is each object's own: should a second program write there nevertheless, it removes
    what the first one has not finished, whose next version fails, and that is all.

    Args:
        target: the folder, a path that `tf.io.gfile` knows.
        marker: the name of that file.
    """

    def __init__(self, target: str | os.PathLike, marker: str = MARKER):
        self._target = checked_path(target, "target")
        self._marker_name = marker
        self._token = secrets.token_hex(4)
        scheme, found, _ = self._target.partition("://")
        name = self._target.rstrip("/") if found else os.path.realpath(self._target)
        with _locks_lock:
            self.writing = _locks.setdefault(name, threading.Lock())
        self._renames = (scheme if found else "") in _RENAME_AT_ONCE

    def path(self, number: int) -> str:
        """The folder of a version."""
        return os.path.join(self._target, str(number))

    def published(self) -> list[int]:
        """The versions that are whole, in their order."""
        found = sorted(number for number in map(_number, self._names()) if number is not None)
        return [number for number in found if tf.io.gfile.exists(self._marker(number))]

    def prepare(self) -> None:
        """Makes the target if it is missing.

        Raises:
            tf.errors.OpError: if it can't be written.
        """
        tf.io.gfile.makedirs(self._target)
        probe = os.path.join(self._target, _PROBE)
        _write(probe, "Whether this folder can be written.\n")
        tf.io.gfile.remove(probe)

    def begin(self) -> tuple[int, str]:
        """Begins a version after all that are there; removes what was not finished.

        Returns:
            Its number, and the folder to write.
        """
        names = self._names()
        numbers = [number for number in map(_number, names) if number is not None]
        for note in names:
            left = _number(note.removeprefix(_UNFINISHED).partition("-")[0])
            if not note.startswith(_UNFINISHED) or left is None:
                continue
            if not self._renames:
                numbers.append(left)  # Whoever began it may still write there.
            note = os.path.join(self._target, note)
            try:
                self._remove_unfinished(left, note)
            except (OSError, tf.errors.OpError) as error:  # As of a file that somebody reads.
                logging.warning("%s could not be removed: %s", note, error)
                numbers.append(left)
        number = max(numbers, default=0) + 1
        if not self._renames:
            self._write_note(number)
            return number, self.path(number)
        tf.io.gfile.makedirs(self._note(number))
        _write(self._begun(number), f"Version {number} is being written.\n")
        return number, self._note(number)

    def finish(self, number: int, about: Mapping[str, Any]) -> None:
        """Has the version seen, which has been written.

        Args:
            number: its number.
            about: what its marker says of it, beside the number.

        Raises:
            OSError: if another program has removed it.
            tf.errors.OpError: if it can't be written.
        """
        # Not the folder alone, which a file that is written makes anew.
        if not tf.io.gfile.exists(self._begun(number)):
            raise OSError(f"{self._note(number)} is gone: another program writes there, too")
        folder = self._note(number) if self._renames else self.path(number)
        marker = json.dumps({"version": number, **about})
        _write(os.path.join(folder, self._marker_name), f"{marker}\n")
        tf.io.gfile.remove(self._begun(number))
        if self._renames:
            tf.io.gfile.rename(folder, self.path(number))

    def give_up(self, number: int) -> None:
        """Removes what was written of a version that was begun, and nothing of another program."""
        self._remove_unfinished(number, self._note(number))

    def remove(self, number: int) -> None:
        """Removes a version, whole or not; it is never seen by halves."""
        if self._renames:
            if tf.io.gfile.exists(self.path(number)):
                tf.io.gfile.rename(self.path(number), self._note(number))
        else:
            self._write_note(number)
            if tf.io.gfile.exists(self._marker(number)):
                tf.io.gfile.remove(self._marker(number))
        self._remove_unfinished(number, self._note(number))

    def _remove_unfinished(self, number: int, note: str) -> None:
        """Removes what was left behind before a version was whole, or when it was removed."""
        is_whole = tf.io.gfile.exists(self._marker(number))
        if not self._renames and not is_whole and tf.io.gfile.exists(self.path(number)):
            tf.io.gfile.rmtree(self.path(number))
        if tf.io.gfile.isdir(note):
            begun = os.path.join(note, _BEGUN)
            if tf.io.gfile.exists(begun):
                tf.io.gfile.remove(begun)  # First: nobody shall take the rest for a whole version.
            tf.io.gfile.rmtree(note)
        elif tf.io.gfile.exists(note):
            tf.io.gfile.remove(note)

    def _write_note(self, number: int) -> None:
        about = f"Version {number} is being written or removed, until this is gone.\n"
        _write(self._note(number), about)

    def _note(self, number: int) -> str:
        return os.path.join(self._target, f"{_UNFINISHED}{number}-{self._token}")

    def _begun(self, number: int) -> str:
        """The file that is there from the begin of a version to its end, unless somebody else has
        removed what was written of it."""
        note = self._note(number)
        return os.path.join(note, _BEGUN) if self._renames else note

    def _marker(self, number: int) -> str:
        return os.path.join(self.path(number), self._marker_name)

    def _names(self) -> list[str]:
        if not tf.io.gfile.exists(self._target):
            return []
        # Folders of object stores end in a slash.
        return [name.rstrip("/") for name in tf.io.gfile.listdir(self._target)]


def _write(path: str, text: str) -> None:
    with tf.io.gfile.GFile(path, "w") as file:
        file.write(text)


def _number(name: str) -> int | None:
    # Not with leading zeros: it is by the number that a folder is found again.
    return int(name) if name.isdecimal() and name == str(int(name)) else None
