"""The daemon's page in a real browser: what a server with several users keeps, finds and restores."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from demo.app import BUNDLED_CONVERSATIONS
from demo.conversations import Conversation, load_conversations
from demo.player import Player
from demo.server import ServerProcess, find_free_port
from krul_sglang.cli.server_client import open_client
from krul_sglang.cli.top import ask as ask_once
from krul_sglang.cli.top import draw
from krul_sglang.learning.command import learn_to_files
from krul_sglang.models.checkpoint import Checkpoint
from krul_sglang.models.find import REFERENCE_MODEL
from tests.support.daemon_process import running_daemon
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    STRICT,
    krul_stats,
    play_chats,
    push_out,
    random_prompt,
    request_payload,
    settled_stats,
    small_krul_server_args,
)

CHROMIUM = shutil.which("chromium")
POOL_TOKENS = 2560
NUM_USERS = 6
MAX_FIGURE_BYTES = 150 << 10
HOSTILE = '<img src=x onerror="document.title=1">'
"""A request's id: whoever sends a request chooses it."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="`make chromium` installs the browser")


class Site(NamedTuple):
    """A daemon's page, and the server that it asks."""

    page_url: str
    token: str
    server: ServerProcess

    @property
    def url(self) -> str:
        return f"{self.page_url}/#token={self.token}&server={self.server.url}"


def browse(url: str, *options: str, height: int = 1400) -> str:
    """The document as it is after the page has asked a few times; its own clock runs ahead while it waits."""
    with tempfile.TemporaryDirectory(prefix="krul-chromium-", ignore_cleanup_errors=True) as profile:
        command = [
            str(CHROMIUM),
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--hide-scrollbars", f"--user-data-dir={profile}", f"--window-size=1240,{height}"),
            *("--virtual-time-budget=8000", *options, url),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


class _Reader(HTMLParser):
    """Collects the text of the element with an id, or of the whole document."""

    def __init__(self, wanted: str | None) -> None:
        super().__init__()
        self._wanted = wanted
        self._depth = 0
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if self._depth or (self._wanted is not None and dict(attributes).get("id") == self._wanted):
            self._depth += 1

    def handle_endtag(self, tag: str) -> None:
        self._depth = max(0, self._depth - 1)

    def handle_data(self, data: str) -> None:
        if self._depth or self._wanted is None:
            self.words += data.split()


def text_of(document: str, name: str | None = None) -> str:
    """The text that is shown, with single blanks: all, or that of the element with this id."""
    reader = _Reader(name)
    reader.feed(document)
    return " ".join(reader.words)


def talk(server: ServerProcess) -> None:
    """Users side by side, each with a conversation of its own."""

    def play(conversation: Conversation) -> None:
        with Player(server.url, max_tokens=48) as player:
            list(play_chats(player, [conversation]))

    chats = load_conversations(BUNDLED_CONVERSATIONS).select(num_conversations=NUM_USERS, turns=4)
    with ThreadPoolExecutor(NUM_USERS) as pool:
        list(pool.map(play, chats))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    cache_dir = tmp_path_factory.mktemp("krul-cache")
    assert list(learn_to_files(Checkpoint(str(REFERENCE_MODEL)), None, num_pieces=4, cache_dir=cache_dir))
    port = find_free_port()
    options = {
        "strategy": "subspace",
        "error_budget": 0.05,
        "relearn": False,
        "cache_dir": str(cache_dir),
        "host_memory": "48MiB",
        "ssd_dir": str(tmp_path_factory.mktemp("ssd")),
        "ssd_capacity": "256MiB",
        "hints_port": port,
        # Slow enough that heads are worth recomputing, and never as slow as computing all.
        "link_mbs": 200,
    }
    args = small_krul_server_args(POOL_TOKENS, options)
    with ForkedServer(REFERENCE_MODEL, args=args, env=STRICT) as server:
        talk(server)
        settled_stats(server)
        prompt = random_prompt("hostile", 600)
        server.post_json("/generate", request_payload(prompt, max_new_tokens=2))
        push_out(server, num_tokens=POOL_TOKENS, seed="hostile")
        server.post_json("/generate", request_payload(prompt, max_new_tokens=2, rid=HOSTILE))
        token = Path(settled_stats(server)["daemon"]["endpoint"], "hints.token").read_text()
        yield Site(f"http://127.0.0.1:{port}", token, server)


@pytest.fixture(scope="module")
def document(site: Site) -> str:
    return browse(site.url, "--dump-dom")


def test_what_the_tiers_hold_and_what_it_saves(site: Site, document: str) -> None:
    stats = krul_stats(site.server)
    assert "no answer" not in document
    tiers = text_of(document, "tiers")
    assert re.search(r"\bdram [\d.]+ MiB 48.0 MiB \d+ ", tiers), tiers
    assert re.search(r"\bssd [\d.]+ [KM]iB 256.0 MiB \d+ ", tiers), tiers
    numbers = text_of(document, "numbers")
    plans = stats["restore"]["plans"]
    assert f"{plans['prefix_tokens'] - plans['head_tokens']:,} tokens loaded" in numbers
    failed = stats["restore"]["forward"]["rescued_requests"]
    assert f"{plans['loads']} requests restored, {failed} failed" in numbers
    assert re.search(r"[\d.]+ x smaller: [\d.]+ MiB of KV in [\d.]+ [KM]iB", numbers), numbers
    assert "uplot" in document.partition('id="hits"')[2]


def test_conversations_are_shown_with_what_they_have_spent(document: str) -> None:
    shown = text_of(document, "conversations")
    assert "first page tenant stored as tokens turns dram ssd exact copies nats spent leases idle" in shown
    spent = [float(number) for number in re.findall(r" (0\.\d{4}) \d+ [\d.]+ (?:s|min) ", shown)]
    assert len(spent) >= NUM_USERS
    assert 0 < max(spent) < 0.2
    assert "subspace" in shown


def test_causes_and_restores_are_drawn(document: str) -> None:
    causes = text_of(document, "causes")
    assert "on the device" in causes
    assert "restored" in causes
    assert re.search(r"computed: (new|parted)", causes), causes
    drawn = document.partition('id="restores"')[2]
    assert drawn.count('class="load"') > 10
    assert drawn.count('class="own"') > 10
    assert 'class="planned"' in drawn


def test_a_request_cannot_put_html_into_the_page(document: str) -> None:
    assert HOSTILE in text_of(document, "restores")
    assert "<img" not in document
    assert "<title>krul</title>" in document


def test_a_silent_server_leaves_what_the_daemon_says(site: Site) -> None:
    document = browse(f"{site.page_url}/#token={site.token}&server=http://127.0.0.1:9", "--dump-dom")
    assert "server: no answer since" in text_of(document)
    assert re.search(r"\bdram [\d.]+ MiB 48.0 MiB", text_of(document, "tiers"))


def test_without_the_token_only_the_server_is_shown(site: Site) -> None:
    document = browse(f"{site.page_url}/#token=wrong&server={site.server.url}", "--dump-dom")
    assert "a token is missing or wrong" in text_of(document, "daemon")
    assert text_of(document, "tiers") == ""
    assert "requests restored" in text_of(document, "numbers")


def test_a_daemon_that_has_nothing() -> None:
    port = find_free_port()
    with running_daemon("--host-memory", "1MiB", "--hints-port", str(port)) as (runtime_dir, _):
        token = (runtime_dir / "hints.token").read_text()
        document = browse(f"http://127.0.0.1:{port}/#token={token}&server=http://127.0.0.1:9", "--dump-dom")
    assert "daemon: up for" in text_of(document, "daemon")
    assert "dram - 1.0 MiB 0 0 0 -" in text_of(document, "tiers")
    assert text_of(document, "conversations") == "none yet"


def test_it_is_drawn_while_the_server_serves(site: Site, tmp_path: Path) -> None:
    """FIGURES_DIR names the folder where the pictures of the documentation are then put."""
    folder = Path(os.environ.get("FIGURES_DIR", tmp_path)).absolute()
    with ThreadPoolExecutor(1) as background:
        talking = background.submit(talk, site.server)
        browse(site.url, f"--screenshot={folder / 'page.png'}", height=1560)
        with open_client(site.server.url, api_key=None, timeout_s=60) as client:
            draw(ask_once(client), folder / "top.svg", url="http://127.0.0.1:30000", size=(100, 44))
        talking.result()
    with Image.open(folder / "page.png") as picture:
        assert len(picture.getcolors(1 << 20) or ()) > 100, "it is not empty"
        picture.quantize(64).save(folder / "page.png", optimize=True)
    assert (folder / "page.png").stat().st_size < MAX_FIGURE_BYTES
