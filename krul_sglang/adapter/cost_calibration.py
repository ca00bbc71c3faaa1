"""Measures once per model and device how long computing and loading take: the planner's costs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch

from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import PoolRows
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.restore import GroupTarget, begin_groups, in_waves
from krul_backend.codec.unit_restore import NativeTail, NativeTails, restore_layer
from krul_backend.codec.units import UnitDecoder, UnitPlan
from krul_backend.memory import is_out_of_memory
from krul_backend.planner import (
    NO_DECODING,
    ComputeCost,
    DecodeCost,
    RestoreCosts,
    TierCost,
    fit_compute,
    fit_tier,
)
from krul_backend.strategy import SUBSPACE, Precision, Strategy
from krul_backend.tiers.common.interface import DRAM_TIER
from krul_sglang.adapter.head_recompute import HeadRecompute
from krul_sglang.adapter.start_proof import ordinary_prefill, random_token_ids, timed
from krul_sglang.engine.budget import COARSE
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.restore import DecodeCosts, Head

logger = logging.getLogger(__name__)

_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_MAX_FORWARD_S = 3.0
"""Once a prompt takes this long, longer ones are not measured: they follow from the fit, which knows nothing
of caches that long prompts outgrow."""
_MIN_LENGTHS = 3
"""Lengths that a fit needs at least, however slow the machine is."""
_NEW_SHARE = 8
"""One token of so many is computed again, after the others: a question after what was restored."""
_REPEATS = 3
_SHORT_S = 0.25
"""Once a prompt takes this long, longer ones run once and not ``_REPEATS`` times."""
_DECODED_TOKENS, _DECODED_ON_ACCELERATOR = 512, 2048
"""Of a segment whose decoding is measured. An accelerator takes about as long for 256 tokens as for more."""
_SHORT_SHARE = 8
"""One token of so many is decoded, too, to tell what is paid once from what each token takes."""
_DECODED_DAMAGE = 0.01
"""Nats per predicted token that the decoded blocks of groups may have lost."""
_LEAST_S = 1e-9
"""Decoding that was measured to take no longer than its copy counts as this."""
_CHECKED_TOKENS = 256
_MAX_TOO_SLOW = 2.0
"""Costs that are so many times what a prompt of ``_CHECKED_TOKENS`` takes are those of a busier machine."""
_BLOCKS = 8
"""Segments of the prefix whose loading is measured: of a conversation of several turns."""


Sample = tuple[int, int, float]
"""Tokens, tokens before them in the pool, and seconds per layer."""

CodedUnit = tuple[tuple[int, ...], Precision]
"""Layers that are stored together, and how."""


class CostCalibration:
    """Measures costs on the engine itself before it serves. Every rank runs it at the same point."""

    def __init__(
        self,
        model_runner: Any,
        tree_cache: Any,
        pool: DevicePool,
        heads: HeadRecompute | None,
        agreement: RankAgreement,
    ) -> None:
        self._runner = model_runner
        self._tree_cache = tree_cache
        self._pool = pool
        self._heads = heads
        self._agreement = agreement

    def measure(self) -> RestoreCosts:
        """Measure the forward, heads and loads from host memory."""
        own, head = self._compute()
        return RestoreCosts(head=head, own=own, tiers={DRAM_TIER: self._tier()})

    def are_too_slow(self, costs: RestoreCosts) -> bool:
        """Whether a prompt takes much less than these costs say."""
        num_tokens = min(_CHECKED_TOKENS, self._longest)
        of_own, of_heads = self._prefill_samples(num_tokens, _REPEATS)
        known = [(costs.own, of_own[0]), *((costs.head, sample) for sample in of_heads[:1])]
        return any(cost.layer_s(new, past) > _MAX_TOO_SLOW * seconds for cost, (new, past, seconds) in known)

    @property
    def _longest(self) -> int:
        # SGLang asks for a page more than a prompt fills. A pool of windows may be smaller than that of KV.
        room = int(self._tree_cache.token_to_kv_pool_allocator.size) - int(self._tree_cache.page_size)
        return min(room, int(self._runner.model_config.context_len))

    def _compute(self) -> tuple[ComputeCost, ComputeCost]:
        """Seconds per layer of the engine's own forward, and of the recomputation of heads."""
        num_layers = self._pool.num_layers
        own: list[Sample] = []
        head: list[Sample] = []
        slowest_s = 0.0
        for num_tokens in (length for length in _LENGTHS if length <= self._longest):
            try:
                num_runs = _REPEATS if slowest_s < _SHORT_S else 1
                of_own, of_heads = self._prefill_samples(num_tokens, num_runs)
            except Exception as error:
                # With several ranks the others would wait for ever in the forward that this one has left.
                is_too_short = num_tokens <= _LENGTHS[_MIN_LENGTHS - 1]
                if not is_out_of_memory(error) or self._agreement.num_ranks > 1 or is_too_short:
                    raise
                logger.warning("krul: no memory to measure prompts of %d tokens: %s", num_tokens, error)
                break
            own += of_own
            head += of_heads
            slowest_s = self._slowest_s(num_layers * of_own[0][2])
            if slowest_s > _MAX_FORWARD_S and num_tokens >= _LENGTHS[_MIN_LENGTHS - 1]:
                break
        fitted = fit_compute(own)
        return fitted, fit_compute(head) if head else fitted

    def _prefill_samples(self, num_tokens: int, num_runs: int) -> tuple[list[Sample], list[Sample]]:
        """Samples of the engine's own forward, of a whole prompt and of its end after the rest, and of
        recomputing its heads. Of ``num_runs`` the fastest counts."""
        token_ids = random_token_ids(self._runner.model_config.vocab_size, num_tokens)
        seconds: list[tuple[float, float]] = []
        of_heads: list[Sample] = []
        num_layers = self._pool.num_layers
        num_past = num_tokens - num_tokens // _NEW_SHARE
        for _ in range(num_runs):
            with ordinary_prefill(self._runner, self._tree_cache, token_ids) as prefilled:
                seconds.append((prefilled.seconds, prefilled.again_s(num_past)))
                if self._heads is not None and len(seconds) == num_runs:
                    whole = Head(prefilled.token_ids, prefilled.slots, 0, (num_tokens,) * num_layers)
                    of_heads += self._head_samples(self._heads, whole, num_runs)
        whole_s, end_s = map(min, zip(*seconds, strict=True))
        of_own = [
            (num_tokens, 0, whole_s / num_layers),
            (num_tokens - num_past, num_past, end_s / num_layers),
        ]
        return of_own, of_heads

    def _head_samples(self, heads: HeadRecompute, whole: Head, num_runs: int) -> Iterable[Sample]:
        """Of the whole head and of its second half."""
        num_tokens = whole.ends[0]
        parts = [whole.part(0, num_tokens), whole.part(num_tokens // 2, num_tokens)]
        for part in parts:
            assert part is not None
            run = partial(heads.run, [part])
            seconds = min(timed(self._pool.streams, run) for _ in range(num_runs))
            yield part.ends[0] - part.start, part.start, seconds / self._pool.num_layers

    def _slowest_s(self, seconds: float) -> float:
        """The slowest rank's seconds, so that all ranks stop at the same length."""
        of_ranks = self._agreement.gather(torch.tensor([seconds], dtype=torch.float64), (1,))
        assert of_ranks is not None
        return max(float(of_rank.item()) for of_rank in of_ranks)

    def _tier(self) -> TierCost:
        """Seconds per native block of one layer, from host memory into the pool: blocks come together."""
        codec = ModelCodecs(self._pool.shape, self._pool.num_layers, None)
        half = self._pool.num_tokens // 2
        num_blocks = max(1, min(_BLOCKS, half // 128))
        longest = half // num_blocks
        lengths = sorted({min(length, longest) for length in (64, 256, 1024)})
        return fit_tier([self._block_s(codec, num_blocks, num_tokens) for num_tokens in lengths])

    def _block_s(self, codec: ModelCodecs, num_blocks: int, num_tokens: int) -> tuple[float, float]:
        """Bytes and seconds of a native block of ``num_tokens``, of so many that are restored together."""
        device = self._pool.streams
        slots = torch.arange(1, num_blocks * num_tokens + 1, device=self._pool.device)
        parts = [
            self._encoded(codec, (0,), Precision.NATIVE, of_block)
            for of_block in torch.split(slots, num_tokens)
        ]
        blocks = [on_host[0].numpy() for _, on_host in parts]
        unit = parts[0][0].native_units[0]
        assert unit is not None
        tails = NativeTails([NativeTail(unit, 0, num_tokens)] * num_blocks, device)

        def restore() -> None:
            tails.restore(device.upload_joined(blocks), *self._pool.buffers(0), slots)

        with device.as_bound_thread():
            seconds = min(timed(device, restore) for _ in range(_REPEATS))
        return float(blocks[0].nbytes), seconds / num_blocks

    @property
    def _decoded_lengths(self) -> tuple[int, int]:
        wanted = _DECODED_TOKENS if self._pool.streams.shares_cores else _DECODED_ON_ACCELERATOR
        num_tokens = min(wanted, self._pool.num_tokens // 2)
        return num_tokens // _SHORT_SHARE, num_tokens

    def decode_costs(self, codec: ModelCodecs, units: Iterable[CodedUnit], tier: TierCost) -> DecodeCosts:
        """Measure how long a layer alone, and one in a pair, takes to decode after its copy, by precision.

        It is counted for each segment, since segments are decoded one by one.
        """
        single = {Precision.NATIVE: NO_DECODING}
        pair: dict[Precision, DecodeCost] = {}
        for unit, precision in units:
            if len(unit) == 1 and precision is Precision.NATIVE:
                continue  # the tier's cost is that of native blocks, until they are in the pool
            samples = []
            for num_tokens in self._decoded_lengths:
                num_bytes, seconds = self._restore_s(codec, unit, precision, num_tokens)
                samples.append((num_tokens, max(_LEAST_S, seconds - tier.load_s(num_bytes))))
            fitted = fit_tier(samples)
            (single if len(unit) == 1 else pair)[precision] = DecodeCost(0.0, fitted.byte_s, fitted.latency_s)
        return DecodeCosts(single, pair)

    def group_cost(
        self, subspace: SubspaceCodec, tier: TierCost, *, has_all_cores: bool = False
    ) -> DecodeCost:
        """Measure how long a layer of groups takes to decode after ``tier`` has brought it, with KV like that
        which the bases were learned from.

        A CPU does it on the core that a load has beside a forward, or on all of them.
        """
        samples = []
        with nullcontext() if has_all_cores else self._pool.streams.as_bound_thread():
            for num_tokens in self._decoded_lengths:
                sizes, seconds = self._restore_groups_s(subspace, num_tokens)
                beyond_s = seconds - sum(map(tier.load_s, sizes))
                samples.append((num_tokens, max(_LEAST_S, beyond_s) / self._pool.num_layers))
        fitted = fit_tier(samples)
        return DecodeCost(fitted.latency_s, fitted.byte_s)

    def _restore_groups_s(self, subspace: SubspaceCodec, num_tokens: int) -> tuple[list[int], float]:
        """Bytes of each group of KV like that which the bases were learned from, and seconds to restore all.

        It goes to memory of its own, since the pool may be in use when bases have been learned.
        """
        device, layers = self._pool.streams, subspace.draw(num_tokens)
        encoded = subspace.encode(
            layers.__getitem__,
            start_token=0,
            num_tokens=num_tokens,
            attention=None,
            max_damage=_DECODED_DAMAGE,
        )
        decoder = subspace.open(encoded.params, start_token=0, num_tokens=num_tokens)
        # Page-locked, as the arena is.
        on_host = [device.host_empty(block.shape, block.dtype).copy_(block) for block in encoded.blocks]
        slots = torch.arange(num_tokens, device=self._pool.device)
        buffers = [
            (k.new_empty((num_tokens, *k.shape[1:])), v.new_empty((num_tokens, *v.shape[1:])))
            for k, v in map(self._pool.buffers, range(self._pool.num_layers))
        ]

        def restore() -> None:
            numbered = enumerate(zip(decoder.stored_as.groups, on_host, strict=True))
            targets = [
                [GroupTarget(decoder.tail(group, block, 0, num_tokens), [0] * len(of_group), slots)]
                for group, (of_group, block) in numbered
            ]
            begun = chain.from_iterable(begin_groups(wave, device) for wave in in_waves(targets))
            for of_group, group in zip(decoder.stored_as.groups, begun, strict=True):
                group.write([buffers[layer] for layer in of_group])

        seconds = min(timed(device, restore) for _ in range(_REPEATS))
        return [block.numel() for block in on_host], seconds

    def _restore_s(
        self, codec: ModelCodecs, unit: tuple[int, ...], precision: Precision, num_tokens: int
    ) -> tuple[float, float]:
        """Bytes and seconds to restore ``num_tokens`` of the last layer of a unit. The pool is unused yet."""
        device = self._pool.streams
        slots = torch.arange(1, num_tokens + 1, device=self._pool.device)
        decoder, on_host = self._encoded(codec, unit, precision, slots)

        def restore() -> None:
            blocks = {source: device.upload(on_host[source]) for source in decoder.sources(unit[-1])}
            target = PoolRows(*self._pool.buffers(unit[-1]), slots)
            restore_layer(decoder, unit[-1], blocks, range(num_tokens), target)

        with device.as_bound_thread():
            seconds = min(timed(device, restore) for _ in range(_REPEATS))
        return float(sum(on_host[source].numel() for source in decoder.sources(unit[-1]))), seconds

    def _encoded(
        self, codec: ModelCodecs, unit: tuple[int, ...], precision: Precision, slots: torch.Tensor
    ) -> tuple[UnitDecoder, dict[int, torch.Tensor]]:
        """A unit of the rows at ``slots``, as a segment: its decoder, and its blocks on the host by layer."""
        device, num_tokens, num_layers = self._pool.streams, len(slots), self._pool.num_layers
        precisions = [precision if layer in unit else Precision.NATIVE for layer in range(num_layers)]
        strategy = Strategy.from_pairs(num_layers, [(unit[0], unit[-1])] if unit[1:] else [], precisions)
        run = TokenRun(partial(self._pool.gather, slots=slots), 0, num_tokens, in_pool=(self._pool, slots))
        encoded = codec.of(strategy).encode(run, UnitPlan(strategy))
        on_host = {}
        for layer, block in encoded.blocks:
            if layer not in unit:
                continue
            # Page-locked, as the arena is: copies of other memory are several times slower.
            on_host[layer] = device.host_empty(block.shape, block.dtype)
            device.download(on_host[layer], block)
        device.synchronize()
        return codec.of(strategy).open(encoded.params, start_token=0, num_tokens=num_tokens), on_host


def units_in_use(strategy_name: str, precision: Precision, num_layers: int) -> list[CodedUnit]:
    """Kinds of units that a server with these options may store, each once."""
    if strategy_name == SUBSPACE:
        return [((0,), coarse) for coarse in COARSE]
    alone = dict.fromkeys((Precision.NATIVE, precision))
    kinds: list[CodedUnit] = [((0,), each) for each in alone]
    return kinds if strategy_name == "none" or num_layers < 2 else [*kinds, ((0, 1), precision)]
