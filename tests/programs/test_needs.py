"""What the host uploads for programs is counted: the most of a step, and no more."""

import jax
import numpy as np
import pytest

from jaxllm.config import EngineArgs
from jaxllm.media.device import in_runs, most_patches
from jaxllm.parallel.sharding import device_bytes
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import (
    WRITE_ADAPTER,
    EncodeKey,
    declare_stage_programs,
    make_packer,
)
from jaxllm.programs.drafting import ReadKey
from jaxllm.programs.needs import uploaded_bytes
from jaxllm.scheduler.schedule import Encoding
from jaxllm.testing import make_tiny_checkpoint
from tests.media.models import make_model
from tests.profile import TINY


def declared(model, **options):
    plan = make_plan(EngineArgs(str(model), **(TINY | options)))
    return plan, declare_stage_programs(plan, plan.stages[0], make_packer(plan).layouts)


def bytes_without(plan, programs, keys):
    return uploaded_bytes(plan, {key: its for key, its in programs.items() if key not in keys})


def bytes_of(arrays):
    return sum(map(device_bytes, jax.tree.leaves(arrays)))


def test_a_step_may_write_an_adapter_into_each_slot(tmp_path):
    plan, programs = declared(make_tiny_checkpoint(tmp_path), enable_lora=True, max_loras=3)
    of_one = bytes_of(programs[WRITE_ADAPTER].arguments[1:])
    without = bytes_without(plan, programs, [WRITE_ADAPTER])
    assert uploaded_bytes(plan, programs) == without + 3 * of_one


def test_a_step_reads_drafts_once(tmp_path):
    model = make_tiny_checkpoint(tmp_path)
    plan, programs = declared(model, spec_model=str(model), spec_tokens=2)
    *others, largest = sorted(key for key in programs if isinstance(key, ReadKey))
    assert others
    without = bytes_without(plan, programs, [*others, largest])
    of_one = bytes_of(programs[largest].arguments[2:])
    assert uploaded_bytes(plan, programs) == without + of_one


def test_a_step_may_run_the_tower_more_than_once(tmp_path):
    plan, programs = declared(make_model(tmp_path))
    keys = [key for key in programs if isinstance(key, EncodeKey)]
    of_one = bytes_of(programs[max(keys)].arguments[2:])
    of_all = uploaded_bytes(plan, programs) - bytes_without(plan, programs, keys)
    assert of_all % of_one == 0 and of_all > of_one


@pytest.mark.parametrize("shortest", [1, 300, 900])
def test_no_images_of_a_step_need_more_room_for_patches(shortest):
    rng, sizes = np.random.default_rng(shortest), (256, 512, 1024)
    for _ in range(50):
        counts = rng.integers(shortest, 1025 if shortest > 1 else 9, 200)
        counts = counts[np.cumsum(counts) <= 8192]
        images = [Encoding(1, int(n), np.empty(0), np.empty(0)) for n in counts]
        runs = [sum(one.columns for one in run) for run in in_runs(images, sizes)]
        padded = sum(next(size for size in sizes if size >= run) for run in runs)
        assert padded <= most_patches(sizes, max_patches=sum(counts), max_images=len(counts))
