"""Loops in the machine code of a GPU are found, and their instructions priced."""

import importlib
from pathlib import Path

import pytest

CODE = """
        /*0010*/                   MOV R1, R2 ;
.L_x_1:
        /*0020*/                   MUFU.EX2 R4, R4 ;
.L_x_2:
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0040*/                   MUFU.EX2 R5, R5 ;
        /*0050*/              @!P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0060*/                   HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR4], R24 ;
        /*0070*/               @P1 BRA `(.L_x_4) ;
        /*0080*/                   BRA `(.L_x_3) ;
.L_x_4:
        /*0090*/               @P2 BRA `(.L_x_1) ;
.L_x_5:
        /*00a0*/               @P2 BRA `(.L_x_5) ;
"""


@pytest.fixture
def counted_sass(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("counted_sass")


def test_innermost_loops_with_matrix_instructions(counted_sass):
    assert counted_sass.matrix_loops(CODE) == [(3, 8, 64), (3, 0, 16)]


def test_cycles_add_up(counted_sass):
    assert counted_sass.count(["MUFU.EX2 R4, R4", "FADD R1, R1, R2"]) == (2, 8, 0)
    cycles = counted_sass.Cycles(1, 2, 3).times(2)
    assert cycles.plus(counted_sass.Cycles(1, 1, 1)) == (3, 5, 7)
