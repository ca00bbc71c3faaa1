"""An SGLang server in which what comes back from bases is wrong.

``python -m tests.support.faulty_server`` takes the arguments of ``sglang.launch_server``; the environment
variable ``FAULT`` names one of ``FAULTS``.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

from krul_backend.codec.layout import LayerKV
from krul_backend.codec.subspace import restore
from krul_backend.codec.subspace.coded_tail import CodedTail, decode_tails

Decoded = Iterator[tuple[slice, list[LayerKV]]]


def swapped_heads(tails: Sequence[CodedTail]) -> Decoded:
    """Each KV head has the KV of another one."""
    for rows, layers in decode_tails(tails):
        yield rows, [LayerKV(kv.k.flip(1), kv.v.flip(1)) for kv in layers]


def wrong_basis(tails: Sequence[CodedTail]) -> Decoded:
    """Each coefficient is multiplied with the direction of the one before."""
    wrong = []
    for tail in tails:
        old = tail.transform
        basis = replace(old.basis, decoder=old.basis.decoder.roll(1, 0))
        wrong.append(replace(tail, transform=replace(old, basis=basis, decoder=old.decoder.roll(1, 0))))
    return decode_tails(wrong)


FAULTS: dict[str, Callable[[Sequence[CodedTail]], Decoded]] = {
    "swapped heads": swapped_heads,
    "wrong basis": wrong_basis,
}


# Where SGLang's processes are spawned, each imports the module that the first one was started with.
if __name__ in ("__main__", "__mp_main__"):
    patch.object(restore, "decode_tails", FAULTS[os.environ["FAULT"]]).start()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
