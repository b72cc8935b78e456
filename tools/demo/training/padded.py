"""Dialogues of about one length side by side, padded, with the next token as label where the model speaks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NOT_TRAINED = -100
"""The label of positions that are not trained on."""

Encoded = tuple[Sequence[int], Sequence[bool]]
"""Token ids, and which of them are trained on."""


def padded(
    dialogues: Sequence[Encoded], rows: int, length: int, padding: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids and labels, both ``[rows, length]``; rows without a dialogue are padding alone."""
    ids = np.full((rows, length), padding, np.int64)
    labels = np.full((rows, length), NOT_TRAINED, np.int64)
    for row, (tokens, trained) in enumerate(dialogues):
        ids[row, : len(tokens)] = tokens
        following = np.array(tokens[1:])
        labels[row, : len(following)] = np.where(np.array(trained[1:]), following, NOT_TRAINED)
    return ids, labels
