"""Makes forwards wait for the layers that are being loaded."""

from __future__ import annotations

from collections.abc import Sequence

from krul_sglang.engine.restore.load_batch import LoadBatch


class LayerWaits:
    """Makes forwards wait for loads: SGLang's pool calls ``wait_until`` before it hands out a layer's KV.

    On a GPU the current stream waits, on a CPU the thread. ``layer_ids``: the numbers that SGLang has for the
    layers.
    """

    def __init__(self, num_layers: int, layer_ids: Sequence[int] | None = None) -> None:
        self.num_layers = num_layers
        numbers = range(num_layers) if layer_ids is None else layer_ids
        self._index_of = {number: index for index, number in enumerate(numbers)}
        self.consumer_index = -1
        self.batches: dict[int, LoadBatch] = {}

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Raises LoadFailedError through the forward that asks; whoever called the forward handles it."""
        batch = self.batches.get(self.consumer_index)
        if batch is not None:
            batch.wait_layer(self._index_of[layer])
