// Attention over caches of codes: Float8 of `codes.h`.

#include "native/ffi.h"
#include "ragged_paged_attention/native.h"

#ifdef JAXLLM_FLOAT32
JAXLLM_FUNCTION(jaxllm_attention_float8_f32, (Attend<ffi::F32, ffi::U8, Coded<Float32, Float8>>),
                JAXLLM_ATTENTION_ATTRIBUTES)
#endif
#ifdef JAXLLM_BFLOAT16
JAXLLM_FUNCTION(jaxllm_attention_float8_bf16, (Attend<ffi::BF16, ffi::U8, Coded<BFloat16, Float8>>),
                JAXLLM_ATTENTION_ATTRIBUTES)
#endif
