"""Options that contradict themselves are refused, by name."""

import pytest

from jaxllm.bench.latency import LatencyOptions
from jaxllm.bench.options import DatasetOptions, LoadOptions, ReportOptions
from jaxllm.errors import ValidationError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (DatasetOptions(num_prompts=0), "num_prompts=0"),
        (LatencyOptions(batch_size=0), "batch_size=0"),
        (LatencyOptions(num_iters_warmup=-1), "num_iters_warmup=-1"),
        (DatasetOptions(dataset_name="sharegpt"), "dataset_path=None"),
        (DatasetOptions(dataset_path="x"), "dataset_path='x'"),
        (DatasetOptions(random_range_ratio=1.0), "random_range_ratio=1.0"),
        (LoadOptions(request_rate=0.0), "request_rate=0.0"),
        (LoadOptions(burstiness=-1.0), "burstiness=-1.0"),
        (LoadOptions(max_concurrency=0), "max_concurrency=0"),
        (LoadOptions(header=("x",)), "header='x'"),
        (LoadOptions(ramp_up_strategy="linear"), "needs --ramp-up-start-rps"),
        (LoadOptions(ramp_up_end_rps=2.0), "needs --ramp-up-strategy"),
        (ReportOptions(percentile_metrics="ttft,x"), "percentile_metrics='x'"),
        (ReportOptions(metric_percentiles="101"), "metric_percentiles='101'"),
        (ReportOptions(metric_percentiles="a"), "metric_percentiles='a'"),
        (ReportOptions(goodput=("ttft",)), "goodput='ttft'"),
        (ReportOptions(goodput=("itl:5",)), "a request has many"),
        (ReportOptions(plot="x.pdf"), "end the name with .svg"),
        (ReportOptions(metadata=("x",)), "metadata='x'"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        options.validate()


def test_what_is_asked_of_a_report():
    options = ReportOptions(
        goodput=("ttft:200", "tpot:50.5"), metric_percentiles="50,99.9", percentile_metrics="e2el"
    )
    options.validate()
    assert options.goals() == {"ttft": 200.0, "tpot": 50.5}
    assert options.percentiles() == [50.0, 99.9]
    assert options.shown_metrics() == ["e2el"]
