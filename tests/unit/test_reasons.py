"""Why tokens of a prompt were computed: each cause, what is remembered for it, and its bounds."""

from __future__ import annotations

import threading
import tracemalloc
import weakref

import msgspec
import numpy as np
import pytest

from krul_sglang import reasons as module
from krul_sglang.cli.why import COMPUTED, DEVICE, HEAD, Piece, Texts, pieces_of, sentences
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.restore.returning_request import Prompt
from krul_sglang.engine.restore.returning_requests import ReturningRequests
from krul_sglang.reasons import Parting, Reasons, RequestReasons, Run, StoredTokens
from tests.support.store_builders import page_keys, tokens_of
from tests.support.tiered_builders import MODEL, AskedAtOnce, Rig, put_in_dram

PAGE = 16
RNG = np.random.default_rng(3)
TEXT = RNG.integers(0, 1000, 400).astype(np.int64)
"""A conversation of 25 pages."""
OTHER = RNG.integers(1000, 2000, 400).astype(np.int64)
"""None of its tokens is one of ``TEXT``."""


class Server:
    """Tells ``Reasons`` what a server does, with tokens in place of KV."""

    def __init__(self, *, has_states: bool = False) -> None:
        self.model = "weights 1"
        self.is_reachable = True
        self.reasons = Reasons(PAGE, lambda: self.model, lambda: self.is_reachable, has_states=has_states)

    def store(
        self,
        tokens: np.ndarray,
        *,
        tenant: str = "",
        num_stored: int | None = None,
        cause: str = "hint",
        session: object = None,
        rid: str = "earlier",
    ) -> StoredTokens:
        stored = self.reasons.store(rid, tenant, tokens, self.model, session, "")
        stored.num_stored = len(tokens) if num_stored is None else num_stored
        stored.cause = cause
        return stored

    def ask(self, tokens: np.ndarray, *, found: int = 0, device: int = 0, tenant: str = "") -> RequestReasons:
        """Look a prompt up of which ``found`` tokens are there, ``device`` of them on the device."""
        whole = tokens[: len(tokens) // PAGE * PAGE]
        self.reasons.look_up("r", len(tokens), device, lambda: (tenant, whole))
        if self.reasons.found("r", found):
            self.reasons.explain("r")
        return self.shown()

    def shown(self, rid: str = "r") -> RequestReasons:
        """A request as the command gets to see it."""
        told = msgspec.json.decode(self.reasons.as_text(), type=list[RequestReasons])
        return next(each for each in told if each.rid == rid)


@pytest.fixture
def server() -> Server:
    return Server()


def joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def computed(reasons: RequestReasons) -> list[tuple[int, int, str]]:
    return [(piece.first, piece.end, piece.why) for piece in pieces_of(reasons) if piece.source == COMPUTED]


def test_what_nobody_has_stored_is_new(server: Server) -> None:
    server.store(OTHER)
    assert computed(server.ask(TEXT[:101])) == [(0, 101, "new")]


def test_what_follows_a_stored_conversation_is_new(server: Server) -> None:
    server.store(TEXT[:160])
    told = server.ask(TEXT[:205], found=160)
    assert (told.missing, told.parting) == ([Run(160, 192, "new")], None)


@pytest.mark.parametrize("token", [8, 9, 31, 32, 100, 163, 175, 319])
def test_a_prompt_that_parts_from_a_stored_one_says_where(server: Server, token: int) -> None:
    server.store(OTHER)
    server.store(TEXT)
    page = token // PAGE * PAGE
    told = server.ask(joined(TEXT[:token], OTHER[token:330]), found=page)
    assert told.missing == [Run(page, 320, "parted")]
    assert told.parting == Parting(
        token,
        tuple(TEXT[token - 8 : token].tolist()),
        tuple(OTHER[token : token + 8].tolist())[: 320 - token],
        tuple(TEXT[token : token + 8].tolist()),
    )


def test_the_conversation_with_most_in_common_counts(server: Server) -> None:
    server.store(TEXT)
    for end in (40, 90):
        server.store(joined(TEXT[:end], RNG.integers(2000, 3000, 200).astype(np.int64)))
    told = server.ask(joined(TEXT[:300], OTHER[:50]), found=288)
    assert told.parting is not None
    assert told.parting.token == 300


def test_what_was_stored_and_is_gone_was_evicted(server: Server) -> None:
    server.store(TEXT[:160])
    told = server.ask(joined(TEXT[:160], OTHER[:45]), found=64)
    assert computed(told)[-2:] == [(64, 160, "evicted"), (160, 205, "new")]


def test_a_model_with_states_goes_on_only_where_a_turn_ended() -> None:
    server = Server(has_states=True)
    server.store(TEXT[:160])
    server.store(TEXT)
    told = server.ask(joined(TEXT[:200], OTHER[:100]), found=160)
    assert computed(told)[-2:] == [(160, 192, "between"), (192, 300, "parted")]
    # It would go on from there.
    told = server.ask(joined(TEXT, OTHER[:100]), found=160)
    assert computed(told)[-2:] == [(160, 400, "evicted"), (400, 500, "new")]


def test_a_prompt_that_parts_where_pages_are_gone_says_both(server: Server) -> None:
    server.store(TEXT)
    told = server.ask(joined(TEXT[:100], OTHER[:100]))
    assert computed(told) == [(0, 96, "evicted"), (96, 200, "parted")]


@pytest.mark.parametrize("cause", ["evicted", "no room", "no answer", "error"])
def test_a_turn_that_was_not_stored_whole_says_why(server: Server, cause: str) -> None:
    server.store(TEXT[:320], num_stored=160, cause=f"dropped: {cause}")
    told = server.ask(TEXT[:330], found=160, device=160)
    assert computed(told)[0] == (160, 320, f"dropped: {cause}")
    told = server.ask(TEXT[:331], found=0)
    assert computed(told)[:2] == [(0, 160, "evicted"), (160, 320, f"dropped: {cause}")]


def test_a_turn_that_is_being_stored_says_so(server: Server) -> None:
    stored = server.reasons.store("earlier", "", TEXT[:320], server.model, None, "")
    assert computed(server.ask(TEXT[:330]))[0] == (0, 320, "waiting")
    stored.num_stored, stored.cause = 320, ""
    assert computed(server.ask(TEXT[:331]))[0] == (0, 320, "evicted")


def test_a_flush_other_weights_and_a_closed_session_are_causes(server: Server) -> None:
    server.store(TEXT[:160], session="mine")
    server.store(OTHER[:160], session="others")
    server.reasons.lose("demoted", "mine")
    assert computed(server.ask(TEXT[:161]))[0] == (0, 160, "demoted")
    assert computed(server.ask(OTHER[:162]))[0] == (0, 160, "evicted")
    server.reasons.lose("cleared")
    assert computed(server.ask(OTHER[:163]))[0] == (0, 160, "cleared")
    server.model = "weights 2"
    assert computed(server.ask(OTHER[:164]))[0] == (0, 160, "weights")


def test_a_tenant_learns_nothing_of_another(server: Server) -> None:
    server.store(TEXT, tenant="a")
    told = server.ask(TEXT[:330], tenant="b")
    assert (computed(told), told.parting) == ([(0, 330, "new")], None)
    assert computed(server.ask(TEXT[:331], tenant="a"))[0] == (0, 320, "evicted")


def test_a_store_that_cannot_be_asked_is_the_cause(server: Server) -> None:
    server.store(TEXT)
    server.is_reachable = False
    assert computed(server.ask(TEXT[:330]))[0] == (0, 320, "unreachable")


def test_an_answer_that_comes_late_is_the_cause(server: Server) -> None:
    reasons = server.reasons
    reasons.look_up("r", 330, 0, lambda: ("", TEXT[:320]))
    assert computed(server.shown()) == [(0, 330, "unknown")]
    reasons.decline("r", "late")
    assert computed(server.shown()) == [(0, 330, "late")]
    reasons.found("r", 160, is_late=True)
    reasons.explain("r")
    assert computed(server.shown())[0] == (0, 160, "late")
    # A later round of a request that still waits may use it.
    reasons.found("r", 160)
    reasons.load("r", [Run(0, 160, "dram")], (0, 0))
    assert pieces_of(server.shown())[0] == Piece(0, 160, "dram")


@pytest.mark.parametrize("why", ["sooner", "bases", "unreadable", "unplannable", "changed", "given back"])
def test_what_was_found_and_not_loaded_says_why(server: Server, why: str) -> None:
    server.ask(TEXT[:330], found=160, device=32)
    server.reasons.decline("r", why)
    assert computed(server.shown())[0] == (32, 160, why)
    assert told_of(server)[1].startswith("Tokens 32 to 159 were computed: they were stored")


def told_of(server: Server) -> list[str]:
    return sentences(server.shown(), Texts("'a'", "'b'", "'c'"))


def test_a_restore_says_which_tokens_came_from_where(server: Server) -> None:
    server.store(TEXT)
    server.ask(joined(TEXT[:200], OTHER[:30]), found=192, device=32)
    server.reasons.load("r", [Run(32, 64, "dram"), Run(64, 128, "dram"), Run(128, 192, "ssd")], (80, 48))
    assert told_of(server) == [
        "Tokens 0 to 31 were on the device.",
        "Tokens 32 to 79 were recomputed as the head of what was loaded: all in the first layer, 16 in the "
        "last.",
        "Tokens 80 to 127 came from dram.",
        "Tokens 128 to 191 came from ssd.",
        "Tokens 192 to 229 were computed: the prompt parts from what was stored at token 200. After 'a' it "
        "has 'b', where 'c' was stored.",
    ]


def test_a_load_that_failed_is_the_cause_of_what_it_did_not_bring(server: Server) -> None:
    server.ask(TEXT[:330], found=160)
    server.reasons.load("r", [Run(0, 160, "ssd")], (64, 0))
    server.reasons.fail("r", "layer 3 did not arrive", 96)
    assert [(piece.end, piece.source, piece.why) for piece in pieces_of(server.shown())] == [
        (96, "ssd", ""),
        (160, COMPUTED, "failed"),
        (330, COMPUTED, "new"),
    ]
    assert (
        "Tokens 96 to 159 were computed: the load failed, or came late (layer 3 did not arrive)."
        in told_of(server)
    )


def test_what_is_computed_in_any_case_is_no_miss(server: Server) -> None:
    server.ask(TEXT[:161], found=160, device=160)
    assert told_of(server) == [
        "Tokens 0 to 159 were on the device.",
        "Token 160 was computed: the last token always is, and only whole pages are restored.",
    ]
    assert [piece.source for piece in pieces_of(server.shown())] == [DEVICE, COMPUTED]
    assert HEAD not in [piece.source for piece in pieces_of(server.shown())]


def test_its_own_turn_does_not_explain_a_request(server: Server) -> None:
    """Even if that is stored before anybody had the time to find out why it missed."""
    server.reasons.look_up("r", 330, 0, lambda: ("", TEXT[:320]))
    server.reasons.found("r", 0)
    server.store(TEXT[:320], rid="r")
    server.reasons.explain("r")
    assert computed(server.shown()) == [(0, 330, "new")]
    server.reasons.end("r")
    # The next one of the same id is another one.
    assert computed(server.ask(TEXT[:330], found=64, device=64))[0] == (64, 320, "evicted")


def test_the_prompt_of_a_request_that_was_aborted_is_not_kept(server: Server) -> None:
    prompt = TEXT[:320].copy()
    kept = weakref.ref(prompt)
    server.reasons.look_up("r", len(prompt), 0, lambda whole=prompt: ("", whole))
    server.reasons.end("r")
    del prompt
    assert kept() is None
    assert computed(server.shown()) == [(0, 320, "unknown")]


def test_the_lookups_of_waiting_requests_are_explained(server: Server) -> None:
    rig, keys = Rig(), page_keys("c", 0, 4)
    put_in_dram(rig, "c", 0, 2)
    reasons = Reasons(MODEL.page_size, lambda: "", lambda: True)
    waiting = ReturningRequests(rig.store, ServedModel(MODEL), AskedAtOnce(), reasons=reasons)
    num_tokens = len(keys) * MODEL.page_size + 1
    reasons.look_up("r", num_tokens, 0, lambda: ("", np.asarray(tokens_of(keys), np.int64)))
    waiting.expect("r", Prompt(num_tokens, 0, lambda: tokens_of(keys)))
    assert waiting.look_up("r", keys) == 2
    (told,) = msgspec.json.decode(reasons.as_text(), type=list[RequestReasons])
    assert told.found_end == 2 * MODEL.page_size
    assert told.missing == [Run(2 * MODEL.page_size, 4 * MODEL.page_size, "new")]
    waiting.release_all()


def test_turns_of_one_conversation_are_remembered_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 1000)
    server.store(OTHER)
    for end in range(40, 401, 40):
        server.store(TEXT[:end])
    assert computed(server.ask(OTHER[:390]))[0] == (0, 384, "evicted")
    # A third one does not fit beside these; the oldest one is forgotten.
    server.store(RNG.integers(2000, 3000, 400).astype(np.int64))
    assert computed(server.ask(OTHER[:391])) == [(0, 391, "new")]
    assert computed(server.ask(TEXT[:392]))[0] == (0, 384, "evicted")


def test_memory_is_bounded(server: Server) -> None:
    """As docs/serving.md says."""
    tracemalloc.start()
    try:
        for number in range(2 * module.MAX_TOKENS // 8192):
            server.store(np.random.default_rng(number).integers(0, 1000, 8192).astype(np.int64))
        stored_bytes, _ = tracemalloc.get_traced_memory()
        for number in range(3 * module.MAX_REQUESTS):
            rid = f"{number:032x}"
            server.reasons.look_up(rid, 330, 0, lambda: ("", OTHER[:320]))
            server.reasons.found(rid, 160)
            server.reasons.explain(rid)
            server.reasons.load(rid, [Run(0, 100, "dram"), Run(100, 160, "ssd")], (64, 0))
        all_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 16 << 20 < stored_bytes < 26 << 20
    assert all_bytes - stored_bytes < 4 << 20
    told = msgspec.json.decode(server.reasons.as_text(), type=list[RequestReasons])
    assert len(told) == module.MAX_REQUESTS
    assert told[-1].rid == f"{3 * module.MAX_REQUESTS - 1:032x}"


def test_threads_store_and_look_up_at_once(server: Server) -> None:
    stop = threading.Event()

    def store() -> None:
        while not stop.is_set():
            for end in (100, 200, 400):
                server.store(TEXT[:end])
                server.store(joined(TEXT[:50], OTHER[:end]))

    storing = threading.Thread(target=store)
    storing.start()
    try:
        for number in range(300):
            server.ask(joined(TEXT[:40], OTHER[number : number + 60 + number % 7]), found=32)
            # Whichever of those that are stored it is compared with.
            assert server.shown().parting is None or server.shown().parting.token in (40, 41)
    finally:
        stop.set()
        storing.join()
