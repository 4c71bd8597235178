import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.programs import compile
from jaxllm.programs.compile import Program, Programs, compilation_counter
from jaxllm.runner.jax_setup import use_compilation_cache


@pytest.fixture
def cache(tmp_path):
    """A compilation cache of the test's own; afterwards the process has its former one."""
    before = jax.config.jax_compilation_cache_dir
    use_compilation_cache(str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def programs(offset: float) -> Programs:
    """Two programs; another offset makes them others."""
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)

    def program(name, scale):
        def function(x):
            return x * scale + offset

        return Program(name=name, function=function, arguments=(shape,), donate=())

    return Programs({"double": program("double", 2), "triple": program("triple", 3)})


def test_everything_is_compiled_at_start_and_nothing_when_it_runs(cache):
    compiled = programs(offset=0.25)
    report = compiled.compile_all()
    assert report.num_programs == 2
    after = compilation_counter.compiles
    assert compiled["double"](np.ones(4, np.float32)).tolist() == [2.25] * 4
    assert compiled["triple"](np.ones(4, np.float32)).tolist() == [3.25] * 4
    assert compilation_counter.compiles == after


def test_second_start_finds_all_programs_in_the_cache(cache):
    assert programs(offset=0.5).compile_all().cache_hits == 0
    assert programs(offset=0.5).compile_all().cache_hits == 2


def test_it_is_told_how_many_programs_are_compiled_and_of_which_one_somebody_waits(cache, caplog):
    report = programs(offset=0.625).compile_all()
    assert f"compiling 0 of {report.num_programs} programs, 0 s" in caplog.messages
    caplog.clear()
    programs(offset=0.6875)["double"]
    assert caplog.messages == ["compiling double, now that it is needed; 0 of 2 programs are there"]


class Asked:
    """A store that is empty, and notes what is looked for."""

    def __init__(self):
        self.modules = []

    def load(self, key):
        return None

    def find(self, key, lowered, module):
        self.modules.append(module)

    def save(self, key, compiled, module):
        pass


def test_a_program_has_arguments_that_it_does_not_use():
    """As that of a tower has its model's decoder, which may be another one."""
    store = Asked()
    for size in (4, 8, 8):
        shapes = tuple(jax.ShapeDtypeStruct((one,), jnp.float32) for one in (size, 2))
        program = Program(name="second", function=lambda _, x: x + 1, arguments=shapes, donate=())
        Programs({"second": program}, store=store)["second"]
    first, second, third = store.modules
    assert first != second == third


def test_program_is_compiled_when_first_needed_if_not_at_start(cache):
    compiled = programs(offset=0.75)
    before = compilation_counter.compiles
    compiled["double"](np.ones(4, np.float32))
    assert compilation_counter.compiles == before + 1
    compiled["double"](np.ones(4, np.float32))
    assert compilation_counter.compiles == before + 1


def of_functions(**functions) -> Programs:
    """Programs of functions of one number. Behind steps the last one is made first."""
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return Programs(
        {
            name: Program(name=name, function=function, arguments=(shape,), donate=())
            for name, function in functions.items()
        }
    )


def test_every_program_is_compiled_once_behind_the_steps_or_in_one():
    traced = []

    def function(name):
        return lambda x: (traced.append(name), x + 1)[1]

    names = [f"p{i}" for i in range(6)]
    compiled = of_functions(**{name: function(name) for name in names})
    compiled.compile_behind()
    assert [compiled[name](2.0) for name in names] == [3.0] * 6
    compiled.stop()
    assert sorted(traced) == names


def test_nothing_more_is_compiled_behind_an_engine_that_ends():
    traced, is_told, go = [], threading.Event(), threading.Event()

    def last(x):
        is_told.set()
        assert go.wait(60)
        return x

    compiled = of_functions(
        **{f"p{i}": lambda x: (traced.append(x), x)[1] for i in range(9)}, last=last
    )
    compiled.compile_behind()
    assert is_told.wait(60)
    compiled.begin_to_stop()
    go.set()
    compiled.stop()
    assert len(traced) < 9
    assert compiled["last"](2.0) == 2.0


def test_who_needs_a_program_that_cannot_be_compiled_gets_the_error():
    def wrong(x):
        raise RuntimeError("no such program")

    compiled = of_functions(right=lambda x: x, wrong=wrong)
    compiled.compile_behind()
    assert compiled["right"](2.0) == 2.0
    with pytest.raises(RuntimeError, match="no such program"):
        compiled["wrong"]
    compiled.stop()


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_a_program_that_could_not_be_compiled_is_tried_again(error):
    left = [error]

    def function(x):
        if left:
            raise left.pop()
        return x

    compiled = of_functions(function=function)
    with pytest.raises(type(error)):
        compiled["function"]
    assert compiled["function"](2.0) == 2.0


def test_a_step_tries_what_failed_behind_it():
    is_traced, go, left = threading.Event(), threading.Event(), [RuntimeError("no memory")]

    def function(x):
        if left:
            is_traced.set()
            assert go.wait(60)
            raise left.pop()
        return x

    compiled = of_functions(function=function)
    compiled.compile_behind()
    assert is_traced.wait(60)
    threading.Timer(0.1, go.set).start()
    assert compiled["function"](2.0) == 2.0
    compiled.stop()


def test_what_the_compiler_has_freed_is_given_back_whenever_it_has_run(cache, monkeypatch):
    trimmed = []
    monkeypatch.setattr(compile, "trim_heap", lambda: trimmed.append(compilation_counter.compiles))
    before = compilation_counter.compiles
    at_start, when_needed = programs(offset=2.0), programs(offset=3.0)
    at_start.compile_all()
    for name in ("double", "triple"):
        at_start[name](np.ones(4, np.float32))
        when_needed[name](np.ones(4, np.float32))
        when_needed[name](np.ones(4, np.float32))
    assert trimmed == [before + 2, before + 3, before + 4]


def test_wrong_shape_is_an_error_and_no_compilation(cache):
    compiled = programs(offset=1.0)
    compiled.compile_all()
    before = compilation_counter.compiles
    with pytest.raises(TypeError):
        compiled["double"](np.ones(5, np.float32))
    assert compilation_counter.compiles == before


def test_engines_with_different_caches_each_use_their_own(tmp_path, cache):
    programs(offset=1.25).compile_all()
    other = tmp_path / "other"
    use_compilation_cache(str(other))
    assert programs(offset=1.25).compile_all().cache_hits == 0
    assert list(other.iterdir())


def test_unwritable_cache_is_no_reason_not_to_start(tmp_path, caplog, cache):
    file = tmp_path / "file"
    file.write_text("in the way")
    use_compilation_cache(str(file / "cache"))
    assert programs(offset=1.5).compile_all().num_programs == 2
