// Products with weights of elements.

#include <cstdint>

#include "dense/multiply.h"
#include "native/ffi.h"

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

}  // namespace

#ifdef JAXLLM_FLOAT32
JAXLLM_FUNCTION(jaxllm_dense_f32, (MultiplyBuffers<ffi::F32, Float32>))
#endif
#ifdef JAXLLM_BFLOAT16
JAXLLM_FUNCTION(jaxllm_dense_bf16, (MultiplyBuffers<ffi::BF16, BFloat16>))
#endif
