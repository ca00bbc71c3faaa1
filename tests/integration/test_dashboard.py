"""Each query of the Grafana dashboard asks for what a server and its daemon really export."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from demo.server import find_free_port
from krul_backend.daemon.server.metrics import DaemonMetrics
from tests.support.forked_server import ForkedServer
from tests.support.scenario import POOL_TOKENS, ask, push_out, random_prompt, small_krul_server_args
from tests.support.stats_builders import make_daemon_stats, make_store_stats

ROOT = Path(__file__).parents[2]
PANELS = json.loads((ROOT / "deploy" / "grafana.json").read_text())["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
LEGENDS = {target["expr"]: target["legendFormat"] for panel in PANELS for target in panel["targets"]}
METRIC = re.compile(r"\b((?:krul|sglang)[_:]\w+)")
GROUPED = re.compile(r"\bby \(([^)]*)\)")

Exported = dict[str, set[str]]


@pytest.fixture(scope="module")
def exported(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Labels by the name of a sample, of a server from whose host memory and SSD something came back."""
    port, folder = find_free_port(), str(tmp_path_factory.mktemp("ssd"))
    options = {"metrics_port": port, "ssd_dir": folder, "ssd_capacity": "256MiB", "planner": "full-load"}
    args = (*small_krul_server_args(POOL_TOKENS, options), "--enable-metrics")
    with ForkedServer(tiny_models["float32"], args=args) as server:
        prompt = random_prompt("dashboard", 600)
        ask(server, prompt)
        push_out(server, num_tokens=POOL_TOKENS, seed="dashboard")
        assert ask(server, prompt).host_tokens > 0
        pages = [
            httpx.get(f"{url}/metrics", trust_env=False) for url in (server.url, f"http://127.0.0.1:{port}")
        ]
    found: Exported = {}
    families = {}
    for page in pages:
        families |= {family.name: family for family in text_string_to_metric_families(page.text)}
    # A counter with labels has no sample before something was counted: of these a full snapshot has some.
    snapshot = DaemonMetrics(lambda: (make_store_stats(), make_daemon_stats())).registry
    full = text_string_to_metric_families(generate_latest(snapshot).decode())
    counted_nothing = {name for name, family in families.items() if not family.samples}
    for family in (*families.values(), *(each for each in full if each.name in counted_nothing)):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    sources = "".join(path.read_text() for path in (ROOT / "krul_sglang").rglob("*.py"))
    of_bases = re.findall(r'\bshow\("(\w+)"', sources)
    return found | {f"krul_{name}": {"tp_rank"} for name in of_bases}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_finds_its_metrics_with_their_labels(query: str, exported: Exported) -> None:
    names = METRIC.findall(query)
    assert names
    grouped = {label.strip() for labels in GROUPED.findall(query) for label in labels.split(",")}
    shown = set(re.findall(r"{{(\w+)}}", LEGENDS[query]))
    assert shown <= grouped
    for name in names:
        assert name in exported
        assert grouped <= exported[name]


def test_a_metric_that_nobody_exports_would_be_noticed(exported: Exported) -> None:
    assert "krul_hit_pages" not in exported
    assert "le" not in exported["krul_hit_pages_total"]


def test_panels_lie_beside_each_other_and_have_numbers_of_their_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS}) == len(PANELS)


def test_what_is_scraped_are_a_server_and_a_daemon() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    assert jobs == {"sglang": ["127.0.0.1:30000"], "krul": ["127.0.0.1:9400"]}
