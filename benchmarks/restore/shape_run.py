"""All settings of one model: calibrate, store each history in every way, and restore it from each tier."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from benchmarks.restore.calibration import Calibration
from benchmarks.restore.configuration import Configuration, TierSpec
from benchmarks.restore.model import SHAPES, Decoder, KVPool, scattered_slots
from benchmarks.restore.restorer import LayerLoader, Restorer, Turn
from benchmarks.restore.setting import TOLERANCES, Checks, Setting, restore_problem, strategies
from benchmarks.restore.stored import StoredConversation, segment_ends, store
from benchmarks.restore.tiers import SsdTier, Tier
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.registry import ModelCodecs
from krul_backend.device import Device
from krul_backend.planner.calibration import fit_compute, fit_tier
from krul_backend.planner.interface import RestoreCosts, TierCost

logger = logging.getLogger(__name__)


class ShapeRun:
    """One model, its pool and its load thread; a context. ``calibration``: what was fitted, and to what.

    ``left_out``: settings that would have taken too long.
    """

    def __init__(self, name: str, configuration: Configuration, device: Device, folder: Path) -> None:
        self.dtype: torch.dtype = getattr(torch, configuration.dtype)
        self.tolerance = TOLERANCES[self.dtype]
        self.calibration: dict[str, Any] = {}
        self.left_out: list[dict[str, Any]] = []
        self._name = name
        self._configuration = configuration
        self._device = device
        self._folder = folder
        shape, page_size = SHAPES[name], configuration.page_size
        longest = max(configuration.history_tokens) + configuration.new_tokens
        # Twice what is needed: the slots of a request lie between those of others.
        num_slots = 2 * -(-longest // page_size) * page_size
        pool = KVPool(shape.kv_shape(self.dtype), shape.num_layers, num_slots, device.torch_device)
        model = Decoder(
            shape, self.dtype, device.torch_device, longest, is_one_layer=configuration.is_one_layer
        )
        self.weight_bytes = model.num_bytes
        self._slots = scattered_slots(num_slots, page_size, seed=1, device=device.torch_device)
        self._codec = ModelCodecs(shape.kv_shape(self.dtype), shape.num_layers, model.rotary)
        self._loader = LayerLoader(device, pool)
        self._restorer = Restorer(model, pool, device, self._loader)
        self._calibration = Calibration(self._restorer, configuration.repeats)

    def __enter__(self) -> ShapeRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._loader.close()

    def rows(self) -> list[dict[str, Any]]:
        """Raises WrongRestoreError if a restore is wrong."""
        turns = [self._turn(tokens) for tokens in sorted(self._configuration.history_tokens)]
        head_samples, own_samples = self._calibration.heads(turns[-1]), self._calibration.own(turns)
        costs = RestoreCosts(fit_compute(head_samples), fit_compute(own_samples), {})
        self.calibration = {
            "head": {**vars(costs.head), "samples": head_samples},
            "own": {**vars(costs.own), "samples": own_samples},
            "decode_token_s": {},
            "tiers": [],
            "without_head_error": {},
        }
        rows = []
        for turn in turns:
            rows += self._history_rows(turn, costs, keeps_timelines=turn is turns[-1])
        return rows

    def _history_rows(
        self, turn: Turn, costs: RestoreCosts, *, keeps_timelines: bool
    ) -> list[dict[str, Any]]:
        with torch.inference_mode():
            reference = self._restorer.own_forward(turn, 0)[0].clone()
            history = self._history(turn)
            conversations = self._store(turn)
        checks = Checks(self._restorer, turn, history, self.tolerance)
        decodes = {name: self._calibration.decodes(each, turn) for name, each in conversations.items()}
        self.calibration["decode_token_s"][turn.history_tokens] = decodes
        rows = []
        for spec in self._configuration.tiers:
            full_load_s = spec.least_s(conversations["native"].tail_bytes([0] * len(history)))
            if full_load_s > self._configuration.max_load_s:
                self.left_out.append({**self._place(turn, spec), "full_load_s": full_load_s})
                continue
            tier = spec.open(self._device, self._folder)
            try:
                for conversation in conversations.values():
                    conversation.put(tier)
                tier_cost = self._tier_cost(conversations["native"], spec, tier)
                with_tier = RestoreCosts(costs.head, costs.own, {tier.name: tier_cost})
                problems = {
                    name: restore_problem(
                        each, turn, tier.name, with_tier, decodes[name], self._configuration.page_size
                    )
                    for name, each in conversations.items()
                }
                error = checks.without_head(self._loader, conversations["native"], tier, reference)
                self.calibration["without_head_error"][turn.history_tokens] = error
                setting = Setting(self._restorer, turn, tier, conversations, problems, checks, reference)
                measured = setting.rows(self._configuration.repeats, keeps_timelines=keeps_timelines)
            finally:
                tier.close()
            rows += [{**self._place(turn, spec), **of_method} for of_method in measured]
            logger.info("%s, %d tokens, %s", self._name, turn.history_tokens, spec)
        return rows

    def _place(self, turn: Turn, spec: TierSpec) -> dict[str, Any]:
        return {
            "shape": self._name,
            "tier": spec.name,
            "bandwidth_gbs": spec.bandwidth_gbs,
            "history_tokens": turn.history_tokens,
            "new_tokens": turn.num_tokens - turn.history_tokens,
        }

    def _turn(self, history_tokens: int) -> Turn:
        num_tokens = history_tokens + self._configuration.new_tokens
        generator = torch.Generator().manual_seed(history_tokens)
        token_ids = torch.randint(SHAPES[self._name].vocab_size, (num_tokens,), generator=generator)
        return Turn(token_ids.to(self._device.torch_device), self._slots[:num_tokens], history_tokens)

    def _history(self, turn: Turn) -> list[LayerKV]:
        """What the last forward, of the whole turn, left in the pool of the history."""
        pool, slots = self._restorer.pool, turn.slots[: turn.history_tokens]
        return [pool.gather(layer, slots) for layer in range(pool.num_layers)]

    def _store(self, turn: Turn) -> dict[str, StoredConversation]:
        ends = segment_ends(turn.history_tokens, self._configuration.turns, self._configuration.page_size)
        pool = self._restorer.pool
        return {
            name: store(name, self._codec, strategy, pool, turn.slots, ends)
            for name, strategy in strategies(pool.num_layers).items()
        }

    def _tier_cost(self, native: StoredConversation, spec: TierSpec, tier: Tier) -> TierCost:
        samples = self._calibration.loads(native, tier)
        cost = fit_tier(samples)
        self.calibration["tiers"].append(
            {
                "history_tokens": native.num_tokens,
                "tier": spec.name,
                "bandwidth_gbs": spec.bandwidth_gbs,
                "is_direct": tier.is_direct if isinstance(tier, SsdTier) else None,
                **vars(cost),
                "samples": samples,
            }
        )
        return cost
