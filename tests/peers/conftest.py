"""The options of ``make peer-tests``, the servers that the kits ask, and the tests that cannot pass."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from krul_sglang.models.find import find_model
from tests.peers.servers import PeerServers

NOT_RUN = {"test_gsm8k": "its questions are fetched from the internet, and a model of this size answers none"}
"""Tests of kits by name, and why they are left out."""

FAILS_WITHOUT_KRUL = {
    "TestBasicDecodeCorrectness::test_basic_math": "the model cannot multiply",
    "TestBasicSchedulerStress::test_concurrent_requests": "after this preface the model names no capital",
    "TestJSONConstrained::test_json_generate": "the model writes an integer without an end",
    "TestJSONConstrained::test_mix_json_and_other": "the same",
    "TestStreamingSession::test_first_mid_abort_recovery": "the model ends its story before it is aborted",
}
"""Tests by class and name, and why they fail on SGLang alone. They must fail, with krul and without it."""

_UNBOUNDED = "what is sampled from this grammar may not end within the kit's 128 tokens"
MAY_FAIL_WITHOUT_KRUL = {
    "TestRegexConstrained::test_regex_generate_complex_json": _UNBOUNDED,
    "TestRegexConstrained::test_regex_generate_custom_log_format": _UNBOUNDED,
    "TestEBNFConstrained::test_ebnf_generate_complex_json": _UNBOUNDED,
    "TestEBNFConstrained::test_ebnf_generate_custom_log_format": _UNBOUNDED,
}
"""The same of tests that fail now and then."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-krul", action="store_true", help="ask servers of SGLang alone")
    parser.addoption("--krul-options", default="{}", help="JSON object: options of krul, none by default")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: a part that takes less than three minutes in all, for CI")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in NOT_RUN:
            item.add_marker(pytest.mark.skip(reason=NOT_RUN[item.name]))
        name = "::".join(item.nodeid.split("::")[1:])
        for reasons in (FAILS_WITHOUT_KRUL, MAY_FAIL_WITHOUT_KRUL):
            if name in reasons:
                is_strict = reasons is FAILS_WITHOUT_KRUL
                item.add_marker(pytest.mark.xfail(reason=reasons[name], strict=is_strict))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return Path(find_model("smollm2", print, option="--model"))


@pytest.fixture(scope="session")
def servers(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PeerServers]:
    without_krul = request.config.getoption("--without-krul")
    options = None if without_krul else json.loads(request.config.getoption("--krul-options"))
    with PeerServers(smollm2, options, tmp_path_factory.mktemp("krul-cache")) as running:
        yield running
