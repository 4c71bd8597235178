"""The dashboard asks for what the server tells."""

import json
import re
from importlib.resources import files

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.metrics.memory import DeviceMemory, EngineMemory
from jaxllm.server.engine_metrics import Figures

DASHBOARD = json.loads((files("jaxllm.server") / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

NAME = re.compile(r"\b(?:jaxllm:|http_)\w+")
SELECTOR = re.compile(r"((?:jaxllm:|http_)\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*=~?\s*"[^"]*"')
BY = re.compile(r"\bby \(([^)]*)\) \((?:rate\()?((?:jaxllm:|http_)\w+)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")


@pytest.fixture(scope="module")
def labels(client):
    """The labels of every sample that a server exposes, by name."""
    for stream in (False, True):
        body = {"prompt": "Once", "max_tokens": 3, "ignore_eos": True, "stream": stream}
        assert client.post("/v1/completions", json=body).status_code == 200
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    # A CPU does not tell its memory: the series are as they would be.
    memory = EngineMemory(1, [[DeviceMemory(0, 1, 1, 1)]])
    for family in Figures("jaxllm", "tiny").of_memory(memory, 1):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions():
    return [
        pytest.param(target, id=f"{panel['title']} {target['refId']}")
        for panel in PANELS
        for target in panel["targets"]
    ]


@pytest.mark.slow  # the first one starts an engine
@pytest.mark.parametrize("target", expressions())
def test_every_expression_asks_for_what_there_is(target, labels):
    expr = target["expr"]
    names = NAME.findall(expr)
    assert names
    for name in names:
        assert name in labels, f"{name} is not exposed"
    for name, selector in SELECTOR.findall(expr):
        matchers = MATCHER.findall(selector)
        assert matchers and set(matchers) <= labels[name], (name, matchers)
    assert len(BY.findall(expr)) == expr.count("by (")
    kept = set()
    for group, name in BY.findall(expr):
        kept |= set(group.split(", "))
        assert set(group.split(", ")) <= labels[name], (group, name)
    for label in LEGEND.findall(target["legendFormat"]):
        if "sum" in expr or "scalar" in expr:
            assert label in kept, label
        else:
            assert label in labels[names[0]], label


@pytest.mark.slow
def test_counters_are_asked_for_their_rate(labels, client):
    types = re.findall(r"^# TYPE (\S+) (\w+)$", client.get("/metrics").text, re.M)
    counters = {name for name, kind in types if kind == "counter"}
    gauges = {name for name, kind in types if kind == "gauge"}
    asked = set()
    for panel in PANELS:
        for target in panel["targets"]:
            rated = set(re.findall(r"rate\(((?:jaxllm:|http_)\w+)", target["expr"]))
            assert not rated & gauges
            asked |= rated | set(NAME.findall(target["expr"]))
            late = {"jaxllm:compiles_after_warmup_total"}  # as a number: it should be 0
            assert set(NAME.findall(target["expr"])) & counters <= rated | late
    # Nothing of importance is left out.
    for name in ("num_preemptions_total", "compiles_after_warmup_total", "token_rows_total"):
        assert f"jaxllm:{name}" in asked & counters


def test_panels_lie_side_by_side():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.slow
def test_variables_are_labels(labels):
    names = {one["name"] for one in DASHBOARD["templating"]["list"]}
    used = {
        name
        for panel in PANELS
        for target in panel["targets"]
        for name in re.findall(r'=~"\$(\w+)"', target["expr"])
    }
    assert used == names - {"datasource"}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            metric = NAME.search(variable["definition"])[0]
            assert variable["name"] in labels[metric]
            assert variable["definition"].endswith(f", {variable['name']})")
