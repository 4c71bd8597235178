// Attention over caches of keys and values as they are.

#include "ragged_paged_attention/native.h"

#ifdef JAXLLM_FLOAT32
constexpr auto AttendF32 = Attend<ffi::F32, ffi::F32, Float32>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_attention_f32, AttendF32, (Signature<ffi::F32, ffi::F32>()));
#endif
#ifdef JAXLLM_BFLOAT16
constexpr auto AttendBF16 = Attend<ffi::BF16, ffi::BF16, BFloat16>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_attention_bf16, AttendBF16,
                              (Signature<ffi::BF16, ffi::BF16>()));
#endif
