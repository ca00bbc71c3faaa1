"""Seconds of load steps as a function of where loading begins."""

from __future__ import annotations

import numpy as np

from krul_backend.planner.arrays import Floats, Tokens


class LoadPart:
    """The part of every load step ``l`` that begins at the head of one layer, ``last_use[l]``.

    Between two ends of runs it falls evenly with the token at which it begins, so that a look-up finds it
    however many runs there are. ``latency_s`` [R, L] is paid by a run with any token, ``token_s`` [R, L] by
    each token; both are 0 in runs that belong to another part.
    """

    def __init__(
        self, last_use: tuple[int, ...], first: Tokens, end: Tokens, latency_s: Floats, token_s: Floats
    ) -> None:
        self.last_use = last_use
        layers = np.arange(len(last_use))
        self._layers = layers
        self._from: Tokens | None = None if last_use == tuple(layers) else np.array(last_use, np.int64)
        self._ends = end
        whole_s = (latency_s + token_s * (end - first)[:, None])[::-1].cumsum(axis=0)[::-1]
        # Row r: a load that begins in run r; the last row one that begins after all of them.
        nothing = np.zeros((1, len(last_use)))
        after_s = np.concatenate([whole_s[1:], nothing, nothing]) if len(end) else nothing
        latency_s, token_s = np.concatenate([latency_s, nothing]), np.concatenate([token_s, nothing])
        # From the token t of run r on: rest + (end - t) * token_s.
        self._token_s = token_s.ravel()
        last_end = end[-1] if len(end) else 0
        self._at_zero_s = (after_s + latency_s + token_s * np.append(end, last_end)[:, None]).ravel()

    def seconds(self, head_ends: Tokens) -> Floats:
        """[C, L]: of each step for head ends [C, L], none before the first run."""
        begin = head_ends if self._from is None else head_ends[:, self._from]
        places = np.searchsorted(self._ends, begin, side="right") * len(self._layers) + self._layers
        seconds: Floats = self._at_zero_s.take(places) - begin * self._token_s.take(places)
        return seconds
