"""Learns maps between neighbouring layers from the turns that are stored, for one model on one rank."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.interface import LayerKV
from krul_backend.codec.layer_map import LayerMap, LayerMapFitter, LayerMaps, load_layer_maps, save_layer_maps
from krul_backend.codec.rotary import RotaryTable
from krul_backend.errors import CodecError
from krul_backend.memory import format_bytes
from krul_backend.segment import ModelIdentity
from krul_backend.strategy.strategy import Pair, Precision
from krul_sglang.engine.budget.damage import nearest_pairs
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.save.turn import Turn

logger = logging.getLogger(__name__)

TOKENS_PER_CHANNEL = 16
"""Least squares on ``n`` tokens of ``C`` channels leaves ``C / (n - C)`` more variance than the best map
would: 7% here, which is a twentieth of a bit per element of what the map does not predict. On the reference
model 16 leave 1 to 5% more than 40 do (new conversations, layers 1, 5 and 9)."""

MAX_TURN_TOKENS = 512
"""Bounds the work of one turn. A turn gives at most ``C`` tokens, too: tokens of one turn are alike, and so
at least ``TOKENS_PER_CHANNEL`` turns are learned from."""

MAX_REMEMBERED_PAGES = 1 << 16


class LayerMapLearner:
    """Learns to predict a layer from the one below it, for ``PredictedPair``.

    From each turn a few new tokens enter the sums of every pair's fitter. When there are enough, one pair is
    fitted at each turn, for all ``precisions``. A map never changes after that, because segments name it by
    its digest; when all pairs are through, the maps are written to ``path`` (None: no later run has this
    model), and the next run starts with them and learns nothing. Sums are not kept between runs.

    ``max_bytes`` bounds the fitters (host memory) and the maps (memory of the pool's device) each: where it
    is too little for all neighbours, the pairs with the most similar attention on the first turn are taken,
    those first that do not overlap.

    Each rank has its own heads, so its own maps, but all ranks have maps of the same pairs: ``learn`` is
    called on all of them for the same turns, how far learning is depends on the turns' page keys alone, and
    a pair that cannot be fitted on one rank is left out on all. ``maps`` may be read on any thread.

    The maps are kept in this process's memory and in ``path``, the segments that name them in the daemon. An
    engine that leases a segment without having its maps reports it as undecodable, and computes it.
    """

    def __init__(
        self,
        *,
        path: Path | None,
        model: ModelIdentity,
        pool: DevicePool,
        rotary: RotaryTable | None,
        precisions: Sequence[Precision],
        max_bytes: int,
        agreement: RankAgreement,
    ) -> None:
        """Called by all ranks at the same point of their start."""
        self.num_learned_tokens = 0
        self.num_pairs = 0
        self._path = path
        self._page_size = model.page_size
        self._pool = pool
        self._rotary = rotary
        self._precisions = tuple(precisions)
        self._agreement = agreement
        shape = pool.shape
        self._width = shape.num_kv_heads * (shape.k_head_dim + shape.v_head_dim)
        neighbours = [(layer, layer + 1) for layer in range(pool.num_layers - 1)]
        self._max_pairs = min(len(neighbours), max_bytes // self._pair_bytes)
        self._maps = self._agreed(_load(path, neighbours, self._precisions, self._width), neighbours)
        self.num_pairs = len({pair for pair, _ in self._maps})
        self._is_complete = bool(self._maps) or self._max_pairs == 0
        self._waiting: list[Pair] = []
        self._fitters: dict[Pair, LayerMapFitter] = {}
        self._seen_pages: OrderedDict[str, None] = OrderedDict()
        self._log_start(len(neighbours), max_bytes)

    @property
    def maps(self) -> LayerMaps:
        """The maps there are now, on the pool's device; more appear in it while turns are learned from."""
        return self._maps

    @property
    def num_needed_tokens(self) -> int:
        return TOKENS_PER_CHANNEL * self._width

    def learn(self, turn: Turn, statistics: AttentionStatistics, first_exact_token: int = 0) -> None:
        """Take what is new in a turn that all ranks store. ``statistics`` are those of all ranks' heads.

        From ``first_exact_token`` on the turn's KV was computed, and not decoded; the same on all ranks.
        """
        if self._is_complete or not statistics.num_rows:
            return
        if not self._waiting:
            self._begin(statistics)
        elif self.num_learned_tokens >= self.num_needed_tokens:
            self._fit_next()
            return
        tokens = self._new_tokens(turn.page_keys, first_exact_token)
        self.num_learned_tokens += len(tokens)
        self._add(turn.slots[tokens.start : tokens.stop], tokens.start)

    def forget_model(self) -> None:
        """The model has other weights, not those that ``path`` is named for."""
        self._path = None
        self._seen_pages.clear()

    def as_dict(self) -> dict[str, Any]:
        return {
            "pairs": self.num_pairs,
            "learned_tokens": self.num_learned_tokens,
            "is_complete": self._is_complete,
        }

    @property
    def _pair_bytes(self) -> int:
        """Sums of a fitter, float64; its maps, float32, at up to four precisions, are not larger."""
        sums = 2 * 8 * (self._width + 1) ** 2
        maps = 4 * len(self._precisions) * (self._width + 1) * self._width
        return max(sums, maps)

    def _begin(self, statistics: AttentionStatistics) -> None:
        nearest = [(i, j) for i, j in nearest_pairs(statistics, self._pool.num_layers**2) if j == i + 1]
        self._waiting = _disjoint_first(nearest)[: self._max_pairs]
        try:
            self._fitters = {pair: LayerMapFitter(self._pool.shape, self._rotary) for pair in self._waiting}
        except Exception:
            # The other ranks go on until they hear of it, when the pairs are fitted.
            logger.exception("krul: layers will not be predicted")

    def _new_tokens(self, page_keys: Sequence[str], first_exact_token: int) -> range:
        """The last exact tokens of the pages that no earlier turn had, as many as one turn may give."""
        seen = [page for page, key in enumerate(page_keys) if key in self._seen_pages]
        first_page = seen[-1] + 1 if seen else 0
        self._seen_pages.update(dict.fromkeys(page_keys[first_page:]))
        while len(self._seen_pages) > MAX_REMEMBERED_PAGES:
            self._seen_pages.popitem(last=False)
        end = len(page_keys) * self._page_size
        missing = self.num_needed_tokens - self.num_learned_tokens
        first = max(first_page * self._page_size, first_exact_token)
        return range(max(first, end - min(MAX_TURN_TOKENS, self._width, missing)), end)

    def _add(self, slots: torch.Tensor, start_token: int) -> None:
        if not len(slots):
            return
        try:
            layers: dict[int, LayerKV] = {}
            for pair in sorted(self._fitters):
                layers = {i: layers[i] if i in layers else self._pool.gather(i, slots) for i in pair}
                self._fitters[pair].add(layers[pair[0]], layers[pair[1]], start_token=start_token)
        except Exception:
            logger.exception("krul: a turn could not be learned from")

    def _fit_next(self) -> None:
        pair = self._waiting.pop(0)
        fitted = self._fit(pair)
        flag = None if fitted is None else torch.ones(1, dtype=torch.float64)
        if self._agreement.gather(flag, (1,)) is not None and fitted is not None:
            self._maps.update(fitted)
            self.num_pairs += 1
        if not self._waiting:
            self._finish()

    def _fit(self, pair: Pair) -> dict[tuple[Pair, Precision], LayerMap] | None:
        """Fit the maps of one pair, on the pool's device; None if no fit is usable."""
        try:
            fitter = self._fitters.pop(pair)
            if fitter.num_tokens < self.num_needed_tokens / 2:
                raise ValueError(f"only {fitter.num_tokens} tokens were learned from, the rest failed")
            fitted = {(pair, precision): fitter.fit(precision) for precision in self._precisions}
            if all(_is_finite(layer_map) for layer_map in fitted.values()):
                return {key: self._on_device(layer_map) for key, layer_map in fitted.items()}
            logger.warning("krul: the map of layers %s is not finite", pair)
        except Exception:
            logger.exception("krul: layer %d will not be predicted from layer %d", pair[1], pair[0])
        return None

    def _finish(self) -> None:
        self._is_complete = True
        self._seen_pages.clear()
        logger.info(
            "krul: layers are predicted from their neighbours in %d pairs, learned from %d tokens",
            self.num_pairs,
            self.num_learned_tokens,
        )
        if not self._maps or self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            save_layer_maps(self._path, self._maps)
        except OSError as error:
            logger.warning("krul: %s could not be written: %s", self._path, error)

    def _agreed(self, mine: LayerMaps, neighbours: Sequence[Pair]) -> dict[tuple[Pair, Precision], LayerMap]:
        """Maps of the pairs that every rank has, on the pool's device; no more pairs than there is room."""
        has_pair = [all((pair, precision) in mine for precision in self._precisions) for pair in neighbours]
        shape = (len(neighbours),)
        of_ranks = self._agreement.gather(torch.tensor(has_pair, dtype=torch.float64), shape)
        if of_ranks is None:
            return {}
        on_all = torch.stack(of_ranks).amin(0).tolist()
        pairs = [pair for pair, is_there in zip(neighbours, on_all, strict=True) if is_there]
        return {
            (pair, precision): self._on_device(mine[pair, precision])
            for pair in pairs[: self._max_pairs]
            for precision in self._precisions
        }

    def _on_device(self, layer_map: LayerMap) -> LayerMap:
        device = self._pool.device
        return LayerMap(layer_map.weight.to(device), layer_map.bias.to(device))

    def _log_start(self, num_neighbours: int, max_bytes: int) -> None:
        if self._maps:
            logger.info("krul: maps of %d pairs of layers, from %s", self.num_pairs, self._path)
        else:
            logger.info(
                "krul: will learn to predict layers from their neighbours, on %d tokens of finished turns: "
                "%d of %d pairs, %s, fit into map_memory = %s",
                self.num_needed_tokens,
                self._max_pairs,
                num_neighbours,
                format_bytes(self._max_pairs * self._pair_bytes),
                format_bytes(max_bytes),
            )


def layer_maps_path(cache_dir: str, model: ModelIdentity, rotary: RotaryTable | None) -> Path:
    """One file for each model, element type and rank; maps of rotated keys are others."""
    keys = "rotated" if rotary is None else "unrotated"
    rank = f"rank-{model.tp_rank}-of-{model.tp_size}"
    name = f"{model.config_digest[:32]}-{model.dtype}-{keys}-{rank}.npz"
    return Path(cache_dir).expanduser() / "layer_maps" / name


def _disjoint_first(pairs: Sequence[Pair]) -> list[Pair]:
    """Order pairs so that those that one strategy can use together, without overlap, come first."""
    together: list[Pair] = []
    used: set[int] = set()
    for pair in pairs:
        if used.isdisjoint(pair):
            together.append(pair)
            used.update(pair)
    return together + [pair for pair in pairs if pair not in together]


def _load(
    path: Path | None, neighbours: Sequence[Pair], precisions: Sequence[Precision], width: int
) -> LayerMaps:
    """The maps that an earlier run of this model wrote; none, with a warning, if they cannot be used."""
    if path is None:
        return {}
    try:
        maps = load_layer_maps(path)
        for (pair, precision), layer_map in maps.items():
            fits = layer_map.weight.shape == (width, width) and layer_map.bias.shape == (width,)
            if pair not in neighbours or precision not in precisions or not fits:
                raise CodecError(f"{path} holds a map of layers {pair} that is none of this model")
            if not _is_finite(layer_map):
                raise CodecError(f"{path}: the map of layers {pair} has numbers that are not finite")
    except FileNotFoundError:
        return {}
    except (CodecError, OSError) as error:
        logger.warning("krul: maps are learned again: %s", error)
        return {}
    return maps


def _is_finite(layer_map: LayerMap) -> bool:
    return bool(layer_map.weight.isfinite().all() and layer_map.bias.isfinite().all())
