"""Splits lines into fields, which may be quoted: in Python, and in a `tf.data` graph.

A field that begins with a quotation mark goes on to the next single one, whatever separators are
between; two in a row stand for one. This is how Python's `csv` reads a line with
`skipinitialspace`. It is not used itself, since a pipeline that calls Python can't run in another
process, and since its separators have one character.
"""

import re
import string
from collections.abc import Sequence

import tensorflow as tf

from tf_recsync.data import _errors

UNCLOSED = (
    "a field is not closed on its line: a field that begins with a quotation mark must end with "
    "one, and cannot hold a line break (Schema(quotechar=None) reads quotation marks as text)"
)

# What readers leave out around a text: `tf.strings.strip` knows the white space of ASCII alone.
BLANKS = string.whitespace

# Stands between the fields of a line that has been taken apart; no text has it.
_END = "\x00\x01\x00"

_Split = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


class _Patterns:
    """Regular expressions for RE2 and `re` alike, of text in which each field has its end."""

    def __init__(self, separator: str, quotechar: str) -> None:
        end, quote = re.escape(separator), re.escape(quotechar)
        # Lazy, so that nothing but the inside of quotation marks goes beyond a separator.
        quoted = f" *{quote}((?:[^{quote}]|{quote}{quote})*){quote}((?:[^{quote}].*?)??)"
        self.field = f"(?s)({quoted}|.*?){end}"  # with the separator after it
        self.quoted = f"(?s)^{quoted}$"  # the same without it, if it is quoted
        self.begins_quoted = f"(?s) *{quote}.*"


def stripped(texts: Sequence[str]) -> tuple[str, ...]:
    """Returns texts as readers compare them, without blanks around them."""
    return tuple(text.strip(BLANKS) for text in texts)


def split_line(line: str, separator: str, quotechar: str | None) -> list[str] | None:
    """Splits a line into its fields, without the blanks around them.

    Args:
        line: The line, with or without its end.
        separator: What stands between two fields.
        quotechar: The quotation mark, one character; None for no quoted fields.

    Returns:
        The fields; None if one begins with a quotation mark that is not closed.
    """
    if quotechar is None or quotechar not in line:
        return [field.strip(BLANKS) for field in line.split(separator)]
    patterns = _Patterns(separator, quotechar)
    fields = []
    for match in re.finditer(patterns.field, line.rstrip("\r\n") + separator):
        field = match[1]
        if re.fullmatch(patterns.begins_quoted, field):
            quoted = re.fullmatch(patterns.quoted, field)
            if quoted is None:
                return None
            field = quoted[1].replace(quotechar * 2, quotechar) + quoted[2]
        fields.append(field.strip(BLANKS))
    return fields


def split_columns(
    lines: tf.Tensor,
    separator: str,
    names: Sequence[str],
    checks: _errors.Checks,
    quotechar: str | None = None,
) -> tf.Tensor:
    """Splits lines into fields.

    Args:
        lines: string `[batch]`.
        separator: What stands between two fields.
        names: Names of the columns.
        checks: What becomes of rows that have another number of fields, or one with a quotation
            mark that is not closed.
        quotechar: The quotation mark, one character; None (the default) for no quoted fields.

    Returns:
        string `[batch, len(names)]`. Fields that a malformed row lacks are empty.
    """

    def plain() -> _Split:
        fields = tf.strings.split(lines, separator)
        return fields.flat_values, fields.row_lengths(), tf.zeros_like(lines, tf.bool)

    def quoted() -> _Split:
        return _split_quoted(lines, separator, str(quotechar))

    def quoted_bytes() -> _Split:
        # RE2 matches characters of UTF-8: each byte becomes one.
        characters = tf.strings.unicode_transcode(lines, "ISO-8859-1", "UTF-8")
        marks = (text.encode().decode("latin-1") for text in (separator, str(quotechar)))
        values, counts, unclosed = _split_quoted(characters, *marks)
        all_bytes = tf.constant([bytes([byte]) for byte in range(256)])
        values = tf.gather(all_bytes, tf.strings.unicode_decode(values, "UTF-8"))
        return tf.strings.reduce_join(values, axis=-1), counts, unclosed

    if quotechar is None:
        values, counts, unclosed = plain()
    else:
        # Regular expressions take several times as long as splitting.
        has_quotes = tf.strings.regex_full_match(lines, rf"\C*{re.escape(quotechar)}\C*")
        is_utf8 = tf.strings.regex_full_match(lines, "(?s).*")
        values, counts, unclosed = tf.case(
            [
                (tf.logical_not(tf.reduce_any(has_quotes)), plain),
                (tf.reduce_all(is_utf8), quoted),
            ],
            default=quoted_bytes,
        )
    check = _errors.require_rows(unclosed, UNCLOSED, checks)
    with tf.control_dependencies([check]):
        check = _errors.require_columns(counts, names, checks)
    with tf.control_dependencies([check]):
        if checks.is_raising:
            return tf.reshape(values, [-1, len(names)])
        fields = tf.RaggedTensor.from_row_lengths(values, counts, validate=False)
        return fields.to_tensor(default_value="", shape=[None, len(names)])


def _split_quoted(lines: tf.Tensor, separator: str, quotechar: str) -> _Split:
    """Returns the fields of all lines one after the other, how many each line has, and whether one
    of them has a quotation mark that is not closed.
    """
    patterns = _Patterns(separator, quotechar)
    ended = tf.strings.regex_replace(lines + separator, patterns.field, rf"\1{_END}")
    fields = tf.strings.split(ended, _END)[:, :-1]
    text = fields.flat_values
    is_quoted = tf.strings.regex_full_match(text, patterns.quoted)
    begins_quoted = tf.strings.regex_full_match(text, patterns.begins_quoted)
    unclosed = fields.with_flat_values(tf.logical_and(begins_quoted, tf.logical_not(is_quoted)))
    inner = tf.strings.regex_replace(text, patterns.quoted, r"\1")
    # Two marks stand for one before the closing mark only; what follows it is text.
    inner = tf.strings.regex_replace(inner, re.escape(quotechar * 2), quotechar)
    after = tf.strings.regex_replace(text, patterns.quoted, r"\2")
    values = tf.where(is_quoted, inner + after, text)
    return values, fields.row_lengths(), tf.reduce_any(unclosed, axis=-1)
