// Experts whose weights are elements.

#include <cstdint>

#include "experts/layer.h"
#include "native/ffi.h"

namespace {

using namespace jaxllm;

template <ffi::DataType kType, typename Kind>
ffi::Error RunExperts(ffi::ThreadPool pool, ffi::Buffer<kType, 2> x,
                      ffi::Buffer<ffi::S32, 2> chosen, ffi::Buffer<ffi::F32, 2> factors,
                      ffi::Buffer<kType, 4> gate_up, ffi::Buffer<kType, 3> down,
                      ffi::Buffer<kType, 3> gate_up_bias, ffi::Buffer<kType, 2> down_bias,
                      ffi::ResultBuffer<ffi::F32, 2> y, ffi::ResultBuffer<kType, 2> inner,
                      float slope, float cubic, float offset, float limit) {
  using Element = typename Kind::Element;
  const auto sizes = down.dimensions();
  const int64_t hidden_size = sizes[1], size = sizes[2];
  const int64_t num_halves = gate_up.dimensions()[1];
  if (x.dimensions()[1] != hidden_size || num_halves < 1 || num_halves > 2 ||
      hidden_size % Kind::kStep || size % Kind::kStep)
    return ffi::Error::InvalidArgument("the inner sizes do not fit");
  using Matrices = ElementMatrices<Kind>;
  const Matrices matrices[] = {
      {reinterpret_cast<const Element*>(gate_up.untyped_data()), size, hidden_size},
      {reinterpret_cast<const Element*>(down.untyped_data()), hidden_size, size}};
  RunLayer<Kind>(pool, Operands<kType>{x, chosen, factors, gate_up_bias, down_bias, y, inner},
                 sizes[0], num_halves, matrices[0], matrices[1], {slope, cubic, offset, limit});
  return ffi::Error::Success();
}

}  // namespace

#ifdef JAXLLM_FLOAT32
JAXLLM_FUNCTION(jaxllm_experts_f32, (RunExperts<ffi::F32, Float32>),
                "slope", "cubic", "offset", "limit")
#endif
#ifdef JAXLLM_BFLOAT16
JAXLLM_FUNCTION(jaxllm_experts_bf16, (RunExperts<ffi::BF16, BFloat16>),
                "slope", "cubic", "offset", "limit")
#endif
