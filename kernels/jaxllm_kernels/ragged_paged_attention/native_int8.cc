// Attention over caches of codes: Int8 of `codes.h`.

#include "ragged_paged_attention/native.h"

#ifdef JAXLLM_FLOAT32
constexpr auto AttendInt8F32 = Attend<ffi::F32, ffi::S8, Coded<Float32, Int8>>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_attention_int8_f32, AttendInt8F32,
                              (Signature<ffi::F32, ffi::S8>()));
#endif
#ifdef JAXLLM_BFLOAT16
constexpr auto AttendInt8BF16 = Attend<ffi::BF16, ffi::S8, Coded<BFloat16, Int8>>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_attention_int8_bf16, AttendInt8BF16,
                              (Signature<ffi::BF16, ffi::S8>()));
#endif
