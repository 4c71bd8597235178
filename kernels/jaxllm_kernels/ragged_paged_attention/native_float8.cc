// Attention over caches of codes: Float8 of `codes.h`.

#include "ragged_paged_attention/native.h"

#ifdef JAXLLM_FLOAT32
constexpr auto AttendFloat8F32 = Attend<ffi::F32, ffi::U8, Coded<Float32, Float8>>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_attention_float8_f32, AttendFloat8F32,
                              (Signature<ffi::F32, ffi::U8>()));
#endif
#ifdef JAXLLM_BFLOAT16
constexpr auto AttendFloat8BF16 = Attend<ffi::BF16, ffi::U8, Coded<BFloat16, Float8>>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_attention_float8_bf16, AttendFloat8BF16,
                              (Signature<ffi::BF16, ffi::U8>()));
#endif
