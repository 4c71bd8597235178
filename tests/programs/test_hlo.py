import jax
import jax.numpy as jnp

from jaxllm.programs.hlo import Collective, Copy, collectives, copies, whole_array_copies

HLO = """
  %copy.1 = bf16[4096,2,128]{2,1,0:T(8,128)(2,1)} copy(%p.1), metadata={op_name="jit(f)"}
  %start = (bf16[512,1024]{1,0}, bf16[512,1024]{1,0}, u32[]{:S(2)}) copy-start(%p.2)
  %ahead = (bf16[512,1024]{1,0:S(1)}, bf16[512,1024]{1,0}, u32[]{:S(2)}) copy-start(%p.2)
  ROOT %t = f32[128,4096,2]{2,1,0} transpose(%x), dimensions={2,0,1}
  %ar = f32[64,4096]{1,0} all-reduce(%y), replica_groups={{0,1}}
  %s = (f32[64]{0}, f32[512]{0}) all-gather-start(%z), dimensions={0}
  %d = f32[512]{0} all-gather-done(%s)
  %add.copy = f32[3]{0} add(%a, %b)
"""


def test_copies_are_found_sync_async_and_transposed():
    assert copies(HLO) == [
        Copy("bf16", (4096, 2, 128), "copy"),
        Copy("bf16", (512, 1024), "copy-start"),
        Copy("f32", (128, 4096, 2), "transpose"),
    ]


def test_an_array_is_recognised_in_any_order_of_its_axes():
    cache = jax.ShapeDtypeStruct((2, 4096, 1, 128), jnp.bfloat16)
    found = whole_array_copies(HLO, [cache, jax.ShapeDtypeStruct((512, 1024), jnp.int8)])
    assert [copy.opcode for copy in found] == ["copy", "transpose"]


def test_collectives_are_counted_once():
    assert collectives(HLO) == [
        Collective("all-reduce", 64 * 4096 * 4),
        Collective("all-gather", 512 * 4),
    ]


def test_compiled_text_is_understood():
    text = jax.jit(lambda x: x.T.copy()).lower(jnp.ones((600, 512))).compile().as_text()
    assert text is not None
    assert whole_array_copies(text, [jax.ShapeDtypeStruct((512, 600), jnp.float32)])
