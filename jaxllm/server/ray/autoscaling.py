"""Our rule as an autoscaling policy of Ray Serve. Serve's controller asks it for a number, and puts
delays, factors and bounds of the `autoscaling_config` around it."""

from typing import Any

from ray.serve.config import AutoscalingContext

from jaxllm.engine.scaling import needed_replicas

# A figure that replicas report.
KV_CACHE_USAGE = "kv_cache_usage"


class LoadPolicy:
    """Follows the requests, as Serve's own policy does, and the KV cache that they hold."""

    def __init__(self, target_kv_cache_usage: float):
        self._target_kv_cache_usage = target_kv_cache_usage

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        config: Any = context.config
        if context.current_num_replicas == 0:
            return context.target_num_replicas, {}
        # Serve gives the mean of each running replica over the look-back period.
        usages = (context.aggregated_metrics or {}).get(KV_CACHE_USAGE, {})
        needed = needed_replicas(
            context.total_num_requests,
            config.get_target_ongoing_requests(),
            sum(usages.values()),
            self._target_kv_cache_usage,
        )
        return needed, {}
