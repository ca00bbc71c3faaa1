"""The kits of SGLang's wheel, with sizes for two cores. What they assert is theirs.

Of the kits beside them, ``prefix_cache_branching_kit`` expects the cache of a Mamba model, and those of
accuracy, images, speculative decoding and split prefill want other models or more machines.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import TestCase

import openai
import orjson
import pytest
from sglang.test import kl_test_utils
from sglang.test.kits import radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin, RunningTimeoutTwoWaveMixin, WaitingTimeoutMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.json_mode_kit import JSONModeMixin
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.streaming_session_kit import AbortLeakReproKitMixin, StreamingSessionKitMixin
from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin
from sglang.test.server_fixtures import streaming_session_fixture
from transformers import AutoTokenizer

from benchmarks.serving.configuration import Configuration
from benchmarks.serving.conversations import generated_conversation
from tests.peers.servers import PeerServers, Setup
from tests.support.scenario import assert_nothing_left_behind, settled_stats

CHECKED = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
"""What SGLang's own fixture of streaming sessions sets: leaks end the server."""

PLAIN = Setup(pool_tokens=3000)
LARGE = Setup(pool_tokens=8400)
"""For a prompt of 8,000 tokens."""
SESSIONS = Setup(
    pool_tokens=4000,
    # A kit asks for 100,000 tokens, and aborts what it gets of them.
    args=("--enable-streaming-session", "--context-length", "131072"),
    env={**CHECKED, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
)
SHORT_CONTEXT = Setup(
    pool_tokens=4096,
    args=(
        "--enable-streaming-session",
        *("--context-length", str(streaming_session_fixture.ABORT_REPRO_CONTEXT_LEN)),
        *("--chunked-prefill-size", str(streaming_session_fixture.ABORT_REPRO_CHUNKED_PREFILL_SIZE)),
    ),
    env={**CHECKED, "SGLANG_REQ_RUNNING_TIMEOUT": "10"},
)
ONE_BY_ONE = Setup(
    pool_tokens=4000, args=("--max-running-requests", "1"), env={"SGLANG_REQ_WAITING_TIMEOUT": "1"}
)


class Peer(TestCase):
    """What all kits have in common: a server, its model, and how it is left."""

    setup_of_server: ClassVar[Setup] = PLAIN
    loads: ClassVar[bool] = False
    """Whether what the kit asks for again has left the pool: krul must have loaded some of it."""
    base_url: str
    model: str

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _of_server(cls, servers: PeerServers, smollm2: Path) -> Iterator[None]:
        server = servers.running(cls.setup_of_server)
        cls.base_url, cls.model = server.url, str(smollm2)
        cls.process = SimpleNamespace(poll=lambda: None if server.is_running() else 1)
        loaded = _loaded_tokens(server) if servers.with_krul else 0
        yield
        if servers.with_krul:
            assert_nothing_left_behind(server)
            assert not cls.loads or _loaded_tokens(server) > loaded, (
                "all that was asked for stayed in the pool"
            )


def _loaded_tokens(server: Any) -> int:
    return int(settled_stats(server)["load"]["tokens"])


@pytest.fixture(scope="session")
def prompts(smollm2: Path) -> list[list[int]]:
    """Token ids of ordinary sentences, 512 and a little more per prompt."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    def count(messages: list[dict[str, str]]) -> int:
        return len(tokenizer.encode(messages[0]["content"]))

    sizes = Configuration(model_path=str(smollm2), history_tokens=(520,))
    texts = (generated_conversation(number, sizes, count).turns[0].text for number in range(48))
    return [tokenizer.encode(text) for text in texts]


class TestUnifiedRadixCache(UnifiedRadixTreeTestMixin, Peer):
    loads = True
    max_new_tokens = 16
    num_groups = 2
    branches_per_group = 2

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _prompts(cls, prompts: list[list[int]]) -> None:
        cls.input_ids = prompts


@pytest.mark.quick
class TestKLDivergence(KLDivergenceMixin, Peer):
    loads = True
    kl_div_thres = 0.003
    kl_div_max_samples = 6
    kl_div_prefill_max_new_tokens = 16
    kl_div_decode_max_new_tokens = 16

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _prompts(cls, prompts: list[list[int]], smollm2: Path) -> Iterator[None]:
        """In the place of a data set that would be fetched from the internet."""
        key = f"{smollm2}_{kl_test_utils.DEFAULT_PROMPT_TOKENS}_{kl_test_utils.DEFAULT_NUM_SAMPLES}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(kl_test_utils._cached_input_ids, key, prompts)
            yield


@pytest.mark.quick
class TestCacheHit(Peer):
    loads = True

    @pytest.fixture(autouse=True)
    def _data_set(self, tmp_path: Path, smollm2: Path) -> None:
        """A file like ShareGPT's, from which the kit takes its prompts."""
        tokenizer = AutoTokenizer.from_pretrained(smollm2)
        sizes = Configuration(model_path=str(smollm2), history_tokens=(260,))

        def count(messages: list[dict[str, str]]) -> int:
            return len(tokenizer.encode(messages[0]["content"]))

        texts = [generated_conversation(number, sizes, count).turns[0].text for number in range(24)]
        rows = [{"conversations": [{"value": text}, {"value": "Yes."}]} for text in texts]
        self.data_set = tmp_path / "sharegpt.json"
        self.data_set.write_bytes(orjson.dumps(rows))

    def test_multiturn_cache_hit(self) -> None:
        run_multiturn_cache_hit_test(
            self.base_url, self.model, num_clients=5, output_length=16, dataset_path=str(self.data_set)
        )


class TestRadixCacheServer(Peer):
    def test_radix_attention(self) -> None:
        random.seed(1)
        with pytest.MonkeyPatch.context() as patch:
            small = partial(radix_cache_server_kit.gen_radix_tree, num_nodes=24)
            patch.setattr(radix_cache_server_kit, "gen_radix_tree", small)
            radix_cache_server_kit.run_radix_attention_test(self.base_url)


class TestPauseResume(PauseResumeInPlaceMixin, Peer):
    pause_num_requests = 8
    pause_max_new_tokens = 64
    pause_duration = 2
    pause_ignore_eos = True


class TestAbortAll(AbortAllMixin, Peer):
    abort_all_num_requests = 8
    abort_all_max_new_tokens = 4000


@pytest.mark.quick
class TestBasicAPIContract(BasicAPIContractMixin, Peer):
    pass


class TestBasicDecodeCorrectness(BasicDecodeCorrectnessMixin, Peer):
    pass


class TestMatchedStop(MatchedStopMixin, Peer):
    pass


class TestJSONConstrained(JSONConstrainedMixin, Peer):
    pass


class TestJSONMode(JSONModeMixin, Peer):
    @property
    def client(self) -> openai.Client:
        return openai.Client(api_key="EMPTY", base_url=f"{self.base_url}/v1")


class TestRegexConstrained(RegexConstrainedMixin, Peer):
    pass


class TestEBNFConstrained(EBNFConstrainedMixin, Peer):
    pass


class TestBasicSchedulerStress(BasicSchedulerStressMixin, Peer):
    setup_of_server = LARGE


class SessionPeer(Peer):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _sizes(cls, smollm2: Path) -> Iterator[None]:
        cls.tokenizer = AutoTokenizer.from_pretrained(smollm2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streaming_session_fixture, "CONCURRENT_LOGPROB_ROUNDS", 2)
            patch.setattr(streaming_session_fixture, "ABORT_REPRO_ROUNDS", 4)
            # What sessions hold is never evicted: all of it has to fit into the pool.
            patch.setattr(streaming_session_fixture, "STRESS_NUM_SESSIONS", 4)
            patch.setattr(streaming_session_fixture, "STRESS_NUM_TURNS", 3)
            yield


class TestStreamingSession(StreamingSessionKitMixin, SessionPeer):
    setup_of_server = SESSIONS


class TestAbortLeak(AbortLeakReproKitMixin, SessionPeer):
    setup_of_server = SHORT_CONTEXT


class TestRunningTimeout(RunningTimeoutTwoWaveMixin, Peer):
    setup_of_server = SHORT_CONTEXT
    running_timeout_max_new_tokens = 480


class TestWaitingTimeout(WaitingTimeoutMixin, Peer):
    setup_of_server = ONE_BY_ONE
    waiting_timeout_max_new_tokens = 64
