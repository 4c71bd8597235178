"""How many replicas a load needs: the rule of a fleet under Ray Serve, and of a simulated one."""

import math
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import refused
from jaxllm.option_types import check_type

# The field that we add to Ray Serve's `autoscaling_config`.
KV_TARGET = "target_kv_cache_usage"


def needed_replicas(
    num_requests: float,
    target_ongoing_requests: float,
    kv_cache_usage: float = 0.0,
    target_kv_cache_usage: float | None = None,
) -> float:
    """The number of replicas with which each has its target of requests, and of its KV cache.

    Few requests with long prompts fill a cache that many short ones do not, so the greater of both
    counts. A request that waits holds no cache yet, and counts as a request.

    Args:
      kv_cache_usage: the shares of the caches that requests hold, summed over replicas.
    """
    needed = num_requests / target_ongoing_requests
    if target_kv_cache_usage is None:
        return needed
    return max(needed, kv_cache_usage / target_kv_cache_usage)


def kv_target(config: Mapping[str, Any]) -> float | None:
    """Read and check our field of an `autoscaling_config`; None: the cache does not count."""
    target = config.get(KV_TARGET)
    if target is None:
        return None
    check_type(KV_TARGET, target, float)
    if not (math.isfinite(target) and 0 < target <= 1):
        raise refused(KV_TARGET, target, "it is a share of the cache: above 0, to 1")
    if "policy" in config:
        raise refused(
            "policy", config["policy"], f"{KV_TARGET} has a policy of its own; give one of them"
        )
    return float(target)
