// Attention over caches of keys and values as they are.

#include "native/ffi.h"
#include "ragged_paged_attention/native.h"

#ifdef JAXLLM_FLOAT32
JAXLLM_FUNCTION(jaxllm_attention_f32, (Attend<ffi::F32, ffi::F32, Float32>),
                JAXLLM_ATTENTION_ATTRIBUTES)
#endif
#ifdef JAXLLM_BFLOAT16
JAXLLM_FUNCTION(jaxllm_attention_bf16, (Attend<ffi::BF16, ffi::BF16, BFloat16>),
                JAXLLM_ATTENTION_ATTRIBUTES)
#endif
