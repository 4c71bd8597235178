// Products with weights of elements.

#include <cstdint>

#include "dense/multiply.h"

namespace ffi = xla::ffi;

namespace {

using namespace jaxllm;

template <ffi::DataType kType, typename Kind>
ffi::Error MultiplyBuffers(ffi::ThreadPool pool, ffi::Buffer<kType, 2> x,
                           ffi::Buffer<kType, 2> weight, ffi::ResultBuffer<ffi::F32, 2> y) {
  using Element = typename Kind::Element;
  const auto rows = x.dimensions(), outputs = weight.dimensions();
  if (rows[1] != outputs[1] || rows[1] % Kind::kStep != 0)
    return ffi::Error::InvalidArgument("the inner sizes do not fit");
  const ElementMatrices<Kind> matrix{reinterpret_cast<const Element*>(weight.untyped_data()),
                                     outputs[0], outputs[1]};
  MultiplyAll(matrix, reinterpret_cast<const Element*>(x.untyped_data()), rows[0], y->typed_data(),
              pool);
  return ffi::Error::Success();
}

template <ffi::DataType kType>
auto Signature() {
  using Matrix = ffi::Buffer<kType, 2>;
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .template Arg<Matrix>()
      .template Arg<Matrix>()
      .template Ret<ffi::Buffer<ffi::F32, 2>>();
}

}  // namespace

#ifdef JAXLLM_FLOAT32
constexpr auto MultiplyF32 = MultiplyBuffers<ffi::F32, Float32>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_dense_f32, MultiplyF32, Signature<ffi::F32>());
#endif
#ifdef JAXLLM_BFLOAT16
constexpr auto MultiplyBF16 = MultiplyBuffers<ffi::BF16, BFloat16>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_dense_bf16, MultiplyBF16, Signature<ffi::BF16>());
#endif
