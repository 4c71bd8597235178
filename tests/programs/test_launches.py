"""XLA's listing of a program's launches is read as the tree that it is."""

import pytest

from jaxllm.programs.launches import (
    all_launches,
    by_name,
    in_command_buffer,
    least,
    parse,
    read_listing,
)

# As XLA writes it, which does not indent the condition of a loop.
LISTING = """\
000: kCommandBuffer [source | sink] 
    001: kCustomKernel [source       | next=002 (1)] loop_add_fusion_12 grid: [1, 1, 1]
    002: kCustomKernel [prev=001 (1) | next=010 (1)] loop_add_fusion grid: [1, 1, 1]
    010: kConditional  [prev=002 (1) | next=011 (1)]       
      false_branch:
        003: kCustomKernel [source       | next=004 (1)] input_reduce_fusion_3 grid: [1, 1, 1]
        007: kConditional  [prev=003 (1) | next=008 (1)]           
          false_branch:
            004: kWhile        [source | sink]               
condition:
                005: kCustomKernel [source | sink] sort grid: [1, 1, 1]
              body:
                006: kCopy         [source | sink] kCopy
          true_branch:
            No thunks.
        008: kCustomCall [prev=007 (1) | sink        ] kCustomCall
      true_branch:
        009: kCopy [source | sink] kCopy
    011: kCustomKernel [prev=010 (1) | sink        ] fusion grid: [1, 1, 1]
"""


def test_launches_are_in_their_branches():
    outermost = parse(LISTING)
    inner = in_command_buffer(outermost)
    assert [launch.kind for launch in inner] == [
        "kCustomKernel", "kCustomKernel", "kConditional", "kCustomKernel",
    ]  # fmt: skip
    taken, other = inner[2].branches
    assert [launch.kind for launch in taken] == ["kCustomKernel", "kConditional", "kCustomCall"]
    assert [launch.name for launch in other] == ["kCopy"]
    loop, nothing = taken[1].branches
    assert nothing == []
    assert [[one.name for one in branch] for branch in loop[0].branches] == [["sort"], ["kCopy"]]
    assert by_name(inner) == {"loop_add_fusion": 2, "": 1, "fusion": 1}


def test_the_shortest_branches_are_counted():
    inner = in_command_buffer(parse(LISTING))
    assert least(inner) == 4 + 1
    assert len([*all_launches(inner)]) == 11


def test_a_step_of_several_graphs_is_refused():
    with pytest.raises(AssertionError, match="not one graph"):
        in_command_buffer(parse(LISTING + "012: kCopy [source | sink] kCopy\n"))


def test_the_folder_of_one_program_is_read(tmp_path):
    before, after = "thunk_sequence.txt", "thunk_sequence_after_thunk_passes.txt"
    with pytest.raises(ValueError, match="has the launches of 0 programs"):
        read_listing(tmp_path)
    (tmp_path / f"module_1.jit_run.{before}").write_text("001: kKernel fusion\n")
    assert [launch.name for launch in read_listing(tmp_path)] == ["fusion"]
    (tmp_path / f"module_1.jit_run.{after}").write_text("001: kCommandBuffer graph\n")
    assert [launch.name for launch in read_listing(tmp_path)] == ["graph"]
    (tmp_path / f"module_2.jit_run.{after}").write_text("001: kCommandBuffer graph\n")
    with pytest.raises(ValueError, match="has the launches of 2 programs"):
        read_listing(tmp_path)
