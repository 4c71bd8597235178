"""What an engine tells XLA about GPUs is in its programs' identity, by content."""

import dataclasses

import jax
import pytest
from jaxllm_kernels.platform import CHIPS

from jaxllm.config import EngineArgs
from jaxllm.errors import ValidationError
from jaxllm.plan.gpu_compiler import TIMED, UNTIMED, AutotuneResults, graph_options, tiles_of
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.identity import program_identity
from jaxllm.testing import make_tiny_checkpoint

H200 = CHIPS["h200"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    made = make_plan(EngineArgs(model=str(model), max_model_len=64, max_num_seqs=2))
    return dataclasses.replace(made, chip=H200)


def read(folder, content):
    folder.mkdir(exist_ok=True)
    (folder / "results.txt").write_text(content)
    return AutotuneResults.read(str(folder / "results.txt"), H200)


def test_the_content_of_autotune_results_determines_programs_and_not_their_place(plan, tmp_path):
    here, there = read(tmp_path / "here", "tiles"), read(tmp_path / "there", "tiles")
    others = read(tmp_path / "others", "other tiles")
    of = {
        results: program_identity(dataclasses.replace(plan, autotune_results=results))
        for results in (None, here, others)
    }
    assert of[here] == program_identity(dataclasses.replace(plan, autotune_results=there))
    assert len({str(identity) for identity in of.values()}) == 3


def test_programs_get_the_options(plan, tmp_path):
    results = read(tmp_path / "results", "tiles")
    changed = dataclasses.replace(
        plan, autotune_results=results, graph_options=graph_options("off", H200)
    )
    options = dict(changed.compiler_options)
    assert options["xla_gpu_load_autotune_results_from"] == results.path
    assert options["xla_gpu_enable_command_buffer"] == ""
    assert "CONDITIONAL" in dict(plan.compiler_options)["xla_gpu_enable_command_buffer"]
    assert program_identity(changed) != program_identity(plan)


def test_only_products_of_few_tokens_are_cut_into_parts(plan):
    whole = ("xla_gpu_experimental_force_split_k", "1")
    assert [whole in plan.step_options(number) for number in (1, 16, 17, 64)] == [0, 0, 1, 1]
    assert plan.step_options(64)[-len(plan.compiler_options) :] == plan.compiler_options
    assert CHIPS["v6e"].step_options(64) == CHIPS["cpu"].step_options(64) == ()


def test_flat_graphs_have_no_conditionals_and_no_loops():
    (options,) = dict(graph_options("flat", H200)).values()
    whole = dict(H200.compiler_options)["xla_gpu_enable_command_buffer"]
    assert set(whole.split(",")) - set(options.split(",")) == {"CONDITIONAL", "WHILE"}


def test_other_chips_have_no_such_options():
    assert graph_options("off", CHIPS["cpu"]) == ()
    with pytest.raises(ValidationError, match="gpu_autotune_results.*they are of GPUs"):
        AutotuneResults.read("results.txt", CHIPS["v6e"])


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="gpu_autotune_results.*cannot be read"):
        AutotuneResults.read(str(tmp_path / "none.txt"), H200)


def test_only_a_gpu_that_is_there_times_tiles(tmp_path):
    absent, present = object(), jax.devices()[0]
    assert tiles_of(H200, absent, None) == UNTIMED
    assert tiles_of(H200, present, None) == TIMED
    results = read(tmp_path, "tiles")
    assert results.digest in (tiles_of(H200, absent, results) or "")
    assert tiles_of(CHIPS["v6e"], absent, None) is None
