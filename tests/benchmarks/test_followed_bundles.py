"""The scalar code of a listing is followed: its loops, its branches and its copies."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# Loads as many pages as the operand says, and waits for all of them. A branch has a delay of two.
LISTING = """\
     0   :  { %s1_s0 = inlined_call_operand.vmem [shape: s32[2], index: 0, kind: input]  ;;  \
%s2_s1 = smov [#allocation2] /* materialized constant */ }
   0x1   :  { %3 = dma.vmem_to_smem /*vmem=*/%s1_s0, /*size_in_granules=*/16, /*smem=*/%s2_s1, \
/*dst_syncflagno=*/[#allocation3] }
   0x2   :  { %s4_s2 = sld [smem:[#allocation2 + $0x1]]  ;;  %s5_s3 = smov 0 }
   0x3   :  { %p6_p0 = scmp.le.s32.totalorder %s4_s2, 0 }
   0x4   :  { %7 = sbr.rel (%p6_p0) target = $region2 }
   0x5   :  {}
   0x6   :  {}
   0x7 LB: > { %s8_s3 = sphi %s5_s3, %s9_s3 /* phi copy */  ;;  %s9_s3 = sadd.s32 1, %s8_s3 } \
/* Start region 1 */
   0x8   : > { %p10_p0 = scmp.ge.s32.totalorder %s9_s3, %s4_s2  ;;  \
%11 = dma.hbm_to_vmem [thread:$0]  %s1_s0, 4, %s2_s1, [#allocation4] }
   0x9   : > { %12 = sbr.rel (!%p10_p0) target = $region1 }
   0xa   :  {}
   0xb   :  { %v13_v0 = vadd.f32 %v1_v0, %v2_v1 }
   0xc PF:  { %s14_s4 = sshll.u32 %s4_s2, 2  ;;  %p15_p1 = scmp.eq.s32.totalorder %s4_s2, 3 } \
/* Start/End empty region 2 :: Start region 3 */
   0xd   :  { %s16_s5 = smov (%p15_p1, %s14_s4), 0 }
   0xe   :  { %17 = dma.done.wait [#allocation4], %s16_s5 }
   0xf   :  { %18 = dma.done.wait (%p15_p1), [#allocation4], 12 }
"""


@pytest.fixture
def followed_bundles(monkeypatch):
    spec = importlib.util.spec_from_file_location(
        "followed_bundles", BENCHMARKS / "followed_bundles.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "followed_bundles", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("pages", "bytes_per_cycle"), [(0, 1), (3, 1), (3, 1e9)])
def test_bundles_and_copies_of_a_loop_are_counted(
    pages, bytes_per_cycle, followed_bundles, tmp_path
):
    path = tmp_path / "kernel-final_bundles.txt"
    path.write_text(LISTING)
    code = followed_bundles.read_code(path)
    outcome = followed_bundles.follow(code, [[7, pages]], bytes_per_cycle=bytes_per_cycle)
    assert outcome.executions == [1] * 7 + [pages] * 5 + [1] * 4
    assert outcome.bundles == 11 + 5 * pages
    page_bytes = 4 * followed_bundles.GRANULE_BYTES
    assert outcome.copied_bytes == pages * page_bytes
    # The first copy starts in bundle 8, and the last wait is the last bundle.
    waited = 8 + pages * page_bytes / bytes_per_cycle + 1 if pages else 0
    assert outcome.cycles == pytest.approx(max(outcome.bundles, waited))
