// Low-rank products: each token with the matrices of its own adapter, and no other.
//
// Tokens of one adapter are computed together, a few at a time, so that its matrices are read once for
// them. A token's sums do not depend on which tokens these are.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "native/ffi.h"
#include "native/threads.h"
#include "native/vectors.h"

namespace {

using namespace jaxllm;

constexpr int kTokens = 4;  // at a time
constexpr int kRanks = 2;   // rows of A at a time

inline Floats Widen(const float* p) { return LoadVector<Floats>(p); }

inline Floats Widen(const uint16_t* p) {
  return (Floats)(__builtin_convertvector(LoadVector<Halves>(p), Words) << 16);
}

struct Sizes {
  int64_t num_inputs, num_parts, rank;
  int64_t num_outputs;  // of all parts
};

template <typename Element>
struct Part {
  const Element* b;  // [n, r, columns]
  int64_t columns, first;
};

// inner[t, r] = x[t] . a[r] for a few tokens and all rows of A.
template <int kNum, typename Kind>
void MultiplyByA(const typename Kind::Element* const* x, const typename Kind::Element* a,
                 const Sizes& sizes, float* inner) {
  const int64_t num_rows = sizes.num_parts * sizes.rank;
  for (int64_t row = 0; row < num_rows; row += kRanks) {
    const int num = std::min<int64_t>(kRanks, num_rows - row);
    Floats sums[kNum][kRanks] = {};
    const auto* rows = a + row * sizes.num_inputs;
    for (int64_t k = 0; k < sizes.num_inputs; k += Kind::kStep) {
      typename Kind::Loaded loaded[kRanks];
      for (int r = 0; r < kRanks; ++r)
        loaded[r] = Kind::Load(rows + std::min(r, num - 1) * sizes.num_inputs + k);
      for (int t = 0; t < kNum; ++t) {
        const auto token = Kind::Load(x[t] + k);
        for (int r = 0; r < kRanks; ++r) Kind::Add(sums[t][r], token, loaded[r]);
      }
    }
    for (int t = 0; t < kNum; ++t)
      for (int r = 0; r < num; ++r) inner[t * num_rows + row + r] = Sum(sums[t][r]);
  }
}

// y[t, c] = the sum over r of inner[t, r] * b[r, c], for the columns of one part.
template <int kNum, typename Element>
void MultiplyByB(const float* inner, const Part<Element>& part, const Element* b, int64_t number,
                 const Sizes& sizes, float* const* y) {
  const int64_t num_rows = sizes.num_parts * sizes.rank;
  for (int64_t c = 0; c < part.columns; c += kLanes) {
    Floats sums[kNum] = {};
    for (int64_t r = 0; r < sizes.rank; ++r) {
      const Floats row = Widen(b + r * part.columns + c);
      for (int t = 0; t < kNum; ++t)
        AddProduct(sums[t], inner[t * num_rows + number * sizes.rank + r] - Floats{}, row);
    }
    for (int t = 0; t < kNum; ++t) std::memcpy(y[t] + part.first + c, &sums[t], sizeof(Floats));
  }
}

template <int kNum, typename Kind>
void Compute(const typename Kind::Element* x, const int32_t* tokens, int64_t slot,
             const typename Kind::Element* a,
             const std::vector<Part<typename Kind::Element>>& parts, const Sizes& sizes, float* y) {
  const typename Kind::Element* inputs[kNum];
  float* outputs[kNum];
  for (int t = 0; t < kNum; ++t) {
    inputs[t] = x + tokens[t] * sizes.num_inputs;
    outputs[t] = y + tokens[t] * sizes.num_outputs;
  }
  const int64_t num_rows = sizes.num_parts * sizes.rank;
  std::vector<float> inner(kNum * num_rows);
  MultiplyByA<kNum, Kind>(inputs, a + slot * num_rows * sizes.num_inputs, sizes, inner.data());
  for (size_t number = 0; number < parts.size(); ++number) {
    const auto& part = parts[number];
    const auto* b = part.b + slot * sizes.rank * part.columns;
    MultiplyByB<kNum>(inner.data(), part, b, number, sizes, outputs);
  }
}

template <ffi::DataType kType, typename Kind>
ffi::Error LowRank(ffi::ThreadPool pool, ffi::Buffer<kType, 2> x, ffi::Buffer<ffi::S32, 1> slots,
                   ffi::Buffer<kType, 4> a, ffi::RemainingArgs bs,
                   ffi::ResultBuffer<ffi::F32, 2> y) {
  using Element = typename Kind::Element;
  const auto of_a = a.dimensions();
  const int64_t num_tokens = x.dimensions()[0], num_slots = of_a[0];
  const Sizes sizes{of_a[3], of_a[1], of_a[2], y->dimensions()[1]};
  if (x.dimensions()[1] != sizes.num_inputs || sizes.num_inputs % Kind::kStep)
    return ffi::Error::InvalidArgument("the inner sizes do not fit");
  std::vector<Part<Element>> parts;
  int64_t first = 0;
  for (size_t i = 0; i < bs.size(); ++i) {
    auto b = bs.get<ffi::Buffer<kType, 4>>(i);
    if (!b) return ffi::Error::InvalidArgument("the matrices have another type");
    const int64_t columns = b->dimensions()[3];
    if (columns % kLanes) return ffi::Error::InvalidArgument("the columns do not fit");
    parts.push_back({reinterpret_cast<const Element*>(b->untyped_data()), columns, first});
    first += columns;
  }
  if (first != sizes.num_outputs) return ffi::Error::InvalidArgument("the outputs do not fit");

  // The tokens in the order of their slots, and where in it each few of one slot begin.
  struct Few {
    int32_t first, count, slot;
  };
  std::vector<int32_t> tokens;
  std::vector<Few> work;
  const int32_t* slot_of = slots.typed_data();
  for (int32_t slot = 0; slot < num_slots; ++slot) {
    int32_t begin = tokens.size();
    for (int32_t t = 0; t < num_tokens; ++t)
      if (slot_of[t] == slot) tokens.push_back(t);
    for (; begin < (int32_t)tokens.size(); begin += kTokens)
      work.push_back({begin, std::min<int32_t>(kTokens, tokens.size() - begin), slot});
  }
  float* out = y->typed_data();
  for (int64_t t = 0; t < num_tokens; ++t)
    if (slot_of[t] < 0 || slot_of[t] >= num_slots)
      std::fill_n(out + t * sizes.num_outputs, sizes.num_outputs, 0.0f);
  const auto* in = reinterpret_cast<const Element*>(x.untyped_data());
  const auto* of_slots = reinterpret_cast<const Element*>(a.untyped_data());
  Share(pool, {(int64_t)work.size()}, [&](int64_t, int64_t unit) {
    const Few& few = work[unit];
    const int32_t* its = tokens.data() + few.first;
    switch (few.count) {
      case 4: return Compute<4, Kind>(in, its, few.slot, of_slots, parts, sizes, out);
      case 3: return Compute<3, Kind>(in, its, few.slot, of_slots, parts, sizes, out);
      case 2: return Compute<2, Kind>(in, its, few.slot, of_slots, parts, sizes, out);
      default: return Compute<1, Kind>(in, its, few.slot, of_slots, parts, sizes, out);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

#ifdef JAXLLM_FLOAT32
JAXLLM_FUNCTION(jaxllm_low_rank_f32, (LowRank<ffi::F32, Float32>))
#endif
#ifdef JAXLLM_BFLOAT16
JAXLLM_FUNCTION(jaxllm_low_rank_bf16, (LowRank<ffi::BF16, BFloat16>))
#endif
