"""The pictures: well-formed, with the data where it belongs."""

import xml.etree.ElementTree as ET

import pytest

from jaxllm.bench.figures import Outcome
from jaxllm.bench.plot import plot
from jaxllm.bench.svg import Chart, Line, Mark, draw, ticks

NS = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("most", "last", "count"),
    [(0, 1, 2), (1, 1, 6), (99, 100, 6), (0.31, 0.4, 5), (1e6, 1e6, 6), (7, 8, 5)],
)
def test_ticks_are_round_and_reach_the_largest(most, last, count):
    found = ticks(most)
    assert found[-1] == pytest.approx(last)
    assert len(found) == count


def test_a_line_goes_where_its_points_are():
    line = Line("a <b> & c", [0, 5, 10], [0, 100, 50])
    root = ET.fromstring(draw([Chart("t", "x", "y", [line, line], [Mark("p50", 5)])]))
    points = [
        tuple(map(float, p.split(","))) for p in root.find(f".//{NS}polyline").get("points").split()
    ]
    assert points[0][0] < points[1][0] < points[2][0]
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.02)
    assert points[0][1] - points[2][1] == pytest.approx((points[0][1] - points[1][1]) / 2, abs=0.02)
    texts = [text.text for text in root.iter(f"{NS}text")]
    assert {"t", "x", "y", "p50", "a <b> & c", "10", "100"} <= set(texts)


@pytest.mark.parametrize(
    "outcomes",
    [
        [
            Outcome(1, start=i / 9, output_len=3, ttft=0.1, itl=[0.1, 0.2], latency=0.4)
            for i in range(9)
        ],
        [Outcome(1, output_len=1, ttft=0.1, latency=0.1)],
        [Outcome(1, error="x")],
    ],
)
def test_a_run_is_drawn_whatever_came_of_it(outcomes, tmp_path):
    plot(str(tmp_path / "run.svg"), outcomes)
    assert len(list(ET.parse(tmp_path / "run.svg").iter(f"{NS}polyline"))) == 4


def test_one_point_alone_is_seen():
    def drawn(x, y):
        return draw([Chart("t", "x", "y", [Line("a", x, y)])])

    assert "<circle" in drawn([1.0], [2.0])
    assert "<circle" not in drawn([1.0, 2.0], [2.0, 2.0])
