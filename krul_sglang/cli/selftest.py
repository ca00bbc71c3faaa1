"""``krul-sglang selftest``: checks that a running server restores what krul stored.

It sends a random prompt (cold), pushes it out of the device pool with other random prompts (noise), and sends
it again. Prompts are made of token ids that the server's own tokenizer gave for plain words, so that no
tokenizer is needed here and no special token occurs.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx

from krul_sglang.cli.server_client import CannotRunError, open_client, request, states_with_krul

_NUM_NEW_TOKENS = 24
_NUM_TOP_LOGPROBS = 5
_NOISE_FACTOR = 1.25
_MAX_NOISE_PROMPT_TOKENS = 4096
_MIN_PROMPT_PAGES = 4
_STORE_DELAY_S = 1.0
# Every tokenizer makes at least some dozens of different ordinary tokens of this text.
_WORDS = (
    "The quick brown fox jumps over the lazy dog while seven bright stars shine above a quiet harbour town, "
    "and nobody knows which road leads back home: north, south, east or west? 0 1 2 3 4 5 6 7 8 9 "
    "People often write letters about music, money, weather, work, family, science, garden tools and cheese."
)


@dataclass(frozen=True)
class SelftestConfig:
    """The settings of the probe.

    ``tie_tolerance`` is in natural-logarithm units: 0.0625 is one bfloat16 step of a logit between 8 and 16,
    so two tokens closer than that may change places without anything being wrong.
    """

    url: str
    prompt_tokens: int = 600
    min_host_share: float = 0.5
    max_noise_tokens: int = 1_000_000
    timeout_s: float = 600.0
    tie_tolerance: float = 0.0625


@dataclass(frozen=True)
class ServerLimits:
    """The server's limits that the probe depends on."""

    pool_tokens: int
    max_input_tokens: int
    page_size: int


@dataclass(frozen=True)
class ProbeAnswer:
    """One answer; ``top_logprobs[i]`` maps token id to logprob at output position ``i``."""

    text: str
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[int, float], ...]
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    latency_s: float


@dataclass(frozen=True)
class SelftestResult:
    """``draft_tokens``: restored tokens whose draft KV came, too; None without a draft model."""

    config: SelftestConfig
    limits: ServerLimits
    cold: ProbeAnswer
    again: ProbeAnswer
    noise_tokens: int
    draft_tokens: int | None = None
    timestamp: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def first_difference(self) -> int | None:
        """The first output position at which the two answers differ."""
        pairs = zip(self.cold.output_ids, self.again.output_ids, strict=False)
        for position, (cold, again) in enumerate(pairs):
            if cold != again:
                return position
        lengths = len(self.cold.output_ids), len(self.again.output_ids)
        return None if lengths[0] == lengths[1] else min(lengths)

    @property
    def max_logprob_difference(self) -> float:
        """Largest difference of the chosen tokens' logprobs before the first different token."""
        pairs = zip(
            self.cold.logprobs[: self.first_difference],
            self.again.logprobs[: self.first_difference],
            strict=False,
        )
        return max((abs(cold - again) for cold, again in pairs), default=0.0)

    @property
    def tie_margin(self) -> float | None:
        """The distance of the rival tokens' logprobs at the first difference, the larger one of both runs.

        None if there is no such position, or if a rival is not among the top tokens of both runs.
        """
        position = self.first_difference
        if position is None or position >= min(len(self.cold.output_ids), len(self.again.output_ids)):
            return None
        rivals = self.cold.output_ids[position], self.again.output_ids[position]
        margins = []
        for answer in (self.cold, self.again):
            top = answer.top_logprobs[position] if position < len(answer.top_logprobs) else {}
            if rivals[0] not in top or rivals[1] not in top:
                return None
            margins.append(abs(top[rivals[0]] - top[rivals[1]]))
        return max(margins)

    @property
    def equal(self) -> bool:
        return self.first_difference is None and self.cold.text == self.again.text

    @property
    def equal_within_a_tie(self) -> bool:
        return self.tie_margin is not None and self.tie_margin <= self.config.tie_tolerance

    @property
    def host_share(self) -> float:
        return self.again.host_tokens / self.again.prompt_tokens

    @property
    def passed(self) -> bool:
        return self.host_share >= self.config.min_host_share and (self.equal or self.equal_within_a_tie)

    @property
    def verdict(self) -> str:
        """The result in plain words; of drafts it says only what changes no answer."""
        if self.draft_tokens is None:
            return self._verdict_on_answers
        came = "all" if self.draft_tokens >= self.again.host_tokens else f"{self.draft_tokens}"
        hint = "" if came == "all" else ": fewer drafts are accepted after restores"
        return f"{self._verdict_on_answers} Draft KV came back for {came} of the tokens{hint}."

    @property
    def _verdict_on_answers(self) -> str:
        taken = f"{self.again.host_tokens} of {self.again.prompt_tokens} prompt tokens"
        if self.host_share < self.config.min_host_share:
            hint = (
                f"{self.again.device_tokens} were still in the device pool"
                if self.again.device_tokens > self.again.host_tokens
                else "the rest was computed again: the planner does that if it is faster, and /server_info "
                "counts it under krul.restore.plans.refused; a longer prompt is loaded sooner"
            )
            return (
                f"FAILED: the second run took only {taken} from host memory, where "
                f"{self.config.min_host_share:.0%} are expected ({hint})."
            )
        if self.equal:
            return (
                f"PASSED: the second run took {taken} from host memory and gave the same answer "
                f"({len(self.again.output_ids)} tokens, logprobs within {self.max_logprob_difference:.1e})."
            )
        if self.equal_within_a_tie:
            return (
                f"PASSED: the second run took {taken} from host memory and its answer is equal within a tie: "
                f"at output token {self.first_difference} the two candidates are {self.tie_margin:.4f} apart "
                f"(tolerance {self.config.tie_tolerance})."
            )
        margin = "more than its rivals" if self.tie_margin is None else f"{self.tie_margin:.4f}"
        return (
            f"FAILED: the second run took {taken} from host memory, but its answer differs from output token "
            f"{self.first_difference} on (the candidates there are {margin} apart; tolerance "
            f"{self.config.tie_tolerance})."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "host_share": self.host_share,
            "equal": self.equal,
            "equal_within_a_tie": self.equal_within_a_tie,
            "first_difference": self.first_difference,
            "tie_margin": self.tie_margin,
            "max_logprob_difference": self.max_logprob_difference,
            "draft_tokens": self.draft_tokens,
            "noise_tokens": self.noise_tokens,
            "configuration": asdict(self.config),
            "server": asdict(self.limits),
            "cold": asdict(self.cold),
            "again": asdict(self.again),
            "timestamp": self.timestamp,
        }


def run_selftest(config: SelftestConfig, *, api_key: str | None = None) -> SelftestResult:
    """Probe the server at ``config.url``.

    Raises:
        CannotRunError: the server cannot be reached, is not an SGLang server, runs without krul, or has a
            pool that cannot be flushed within the limits of ``config``.
    """
    deadline = time.monotonic() + config.timeout_s
    with open_client(config.url, api_key=api_key, timeout_s=config.timeout_s) as client:
        limits = _read_limits(client)
        prompt_tokens = min(config.prompt_tokens, limits.max_input_tokens - _NUM_NEW_TOKENS - 1)
        if prompt_tokens < _MIN_PROMPT_PAGES * limits.page_size:
            raise CannotRunError(
                f"a probe prompt of {prompt_tokens} tokens is too short for pages of {limits.page_size} "
                f"tokens; at least {_MIN_PROMPT_PAGES} pages are needed"
            )
        noise_tokens = _num_noise_tokens(limits, config.max_noise_tokens)
        vocabulary = _ordinary_token_ids(client)
        # From the operating system's entropy, so that no cache can have seen the prompt.
        salt = random.SystemRandom()
        prompt = salt.choices(vocabulary, k=prompt_tokens)
        cold = _ask(client, prompt)
        if cold.device_tokens + cold.host_tokens >= limits.page_size:
            raise CannotRunError(
                "a fresh random prompt was found in the cache: the server's answers are fishy"
            )
        # Storing is asynchronous: noise that comes at once could push out what is still being copied.
        time.sleep(min(_STORE_DELAY_S, config.timeout_s))
        _make_noise(client, salt, vocabulary, noise_tokens, limits, deadline)
        before = _num_drafts_restored(client)
        again = _ask(client, prompt)
        now = _num_drafts_restored(client)
        num_drafts = None if now is None or before is None else now - before
        return SelftestResult(config, limits, cold, again, noise_tokens, num_drafts)


def _num_drafts_restored(client: httpx.Client) -> int | None:
    """Tokens that the server has restored with their draft KV; None without a draft model or krul."""
    (state, *_) = request(client, "GET", "/server_info").get("internal_states") or [{}]
    draft = (state.get("krul") or {}).get("draft")
    return None if draft is None else int(draft["restored_tokens"])


def push_out(client: httpx.Client, *, max_noise_tokens: int, timeout_s: float) -> int:
    """Fill the device pool with random prompts, and return how many tokens that took.

    All that no request uses leaves the pool, and stays where krul has stored it. The server may be without.

    Raises:
        CannotRunError: as ``run_selftest``.
    """
    deadline = time.monotonic() + timeout_s
    limits = _limits_of(client, request(client, "GET", "/server_info"))
    noise_tokens = _num_noise_tokens(limits, max_noise_tokens)
    vocabulary = _ordinary_token_ids(client)
    # Storing is asynchronous: noise that comes at once could push out what is still being copied.
    time.sleep(min(_STORE_DELAY_S, timeout_s))
    _make_noise(client, random.SystemRandom(), vocabulary, noise_tokens, limits, deadline)
    return noise_tokens


def _num_noise_tokens(limits: ServerLimits, most: int) -> int:
    noise_tokens = math.ceil(_NOISE_FACTOR * limits.pool_tokens)
    if noise_tokens > most:
        raise CannotRunError(
            f"the device pool of {limits.pool_tokens} tokens is too large to be flushed by noise: "
            f"{noise_tokens} tokens would be needed, {most} are allowed "
            "(--max-noise-tokens); start a server with a smaller --max-total-tokens for this test"
        )
    return noise_tokens


def _limits_of(client: httpx.Client, info: Mapping[str, Any]) -> ServerLimits:
    numbers: list[Any] = [
        info.get(name) for name in ("max_total_num_tokens", "max_req_input_len", "page_size")
    ]
    if not all(isinstance(number, int) for number in numbers):
        raise CannotRunError(f"{client.base_url} answers, but not as an SGLang server does")
    return ServerLimits(*numbers)


def _read_limits(client: httpx.Client) -> ServerLimits:
    info = request(client, "GET", "/server_info")
    limits = _limits_of(client, info)
    states = states_with_krul(client, info)
    if len(states) > 1:
        raise CannotRunError(
            f"the server has {len(states)} data-parallel ranks, and noise cannot be sent to the rank of the "
            "probe; run the test against one rank"
        )
    return limits


def _ordinary_token_ids(client: httpx.Client) -> list[int]:
    """Ids of ordinary tokens: they occur in plain text, so they exist and none of them is special."""
    encoded = request(
        client, "POST", "/tokenize", {"model": "default", "prompt": _WORDS, "add_special_tokens": False}
    )
    token_ids = sorted(set(encoded["tokens"]))
    if len(token_ids) < 10:
        raise CannotRunError(
            f"the server's tokenizer made only {len(token_ids)} different tokens of plain text"
        )
    return token_ids


def _make_noise(
    client: httpx.Client,
    salt: random.Random,
    vocabulary: Sequence[int],
    num_tokens: int,
    limits: ServerLimits,
    deadline: float,
) -> None:
    """Send random prompts one after the other, with ``num_tokens`` tokens together."""
    longest = min(_MAX_NOISE_PROMPT_TOKENS, limits.max_input_tokens - 2, limits.pool_tokens // 2)
    started = time.monotonic()
    sent = 0
    while sent < num_tokens:
        if time.monotonic() > deadline:
            raise CannotRunError(
                f"flushing the device pool takes too long: {sent} of {num_tokens} tokens of noise were "
                f"processed in {time.monotonic() - started:.0f} s (--timeout)"
            )
        prompt = salt.choices(vocabulary, k=longest)
        _generate(client, {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 1}})
        sent += longest


def _ask(client: httpx.Client, prompt: Sequence[int]) -> ProbeAnswer:
    started = time.perf_counter()
    answer = _generate(
        client,
        {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": _NUM_NEW_TOKENS, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": _NUM_TOP_LOGPROBS,
        },
    )
    latency_s = time.perf_counter() - started
    meta = answer["meta_info"]
    cached = meta.get("cached_tokens_details") or {}
    chosen = meta.get("output_token_logprobs") or []
    top = meta.get("output_top_logprobs") or []
    return ProbeAnswer(
        text=answer["text"],
        output_ids=tuple(answer["output_ids"]),
        logprobs=tuple(logprob for logprob, _, _ in chosen),
        top_logprobs=tuple({token_id: logprob for logprob, token_id, _ in row or []} for row in top),
        prompt_tokens=meta["prompt_tokens"],
        device_tokens=cached.get("device", 0),
        host_tokens=cached.get("host", 0),
        latency_s=latency_s,
    )


def _generate(client: httpx.Client, payload: Mapping[str, Any]) -> Any:
    return request(client, "POST", "/generate", payload)
