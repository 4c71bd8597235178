// One token after the other of the gated delta rule: decodes, and rows with drafts.
//
// The first pass over a head's state sums what it holds of the key and of the query, and the second
// one, which finds it in the processor's cache, changes it. Sums have an order of their own, whatever
// other rows there are.

#include <algorithm>
#include <cstdint>
#include <memory>

#include "native/ffi.h"
#include "native/vectors.h"
#include "recurrent/native.h"

namespace {

using namespace jaxllm;

// Vectors of columns at a time: two sums for each of them stay in registers.
constexpr int kColumns = kNumRegisters / 4;

// What a token does to a head, of sizes [K] in whole vectors. The decays are multiplied into the
// first pair of keys and queries.
struct Token {
  const float *decays, *decayed_k, *decayed_q, *k;
  float beta, product;  // of key and query
};

// Compute some columns. `from` is null if the state is zeros, and `to` if nothing needs the next one.
template <typename Columns>
void Advance(const Columns& columns, const Token& token, const float* v, const float* from,
             float* to, float* out, int64_t num_keys, int64_t stride) {
  constexpr int kNum = Columns::kVectors;
  Floats held[kNum] = {}, seen[kNum] = {}, change[kNum];
  for (int64_t i = 0; from && i < num_keys; ++i) {
    const Floats k = token.decayed_k[i] - Floats{}, q = token.decayed_q[i] - Floats{};
    for (int n = 0; n < kNum; ++n) {
      const Floats state = columns.Load(from + i * stride + n * kLanes);
      AddProduct(held[n], state, k);
      AddProduct(seen[n], state, q);
    }
  }
  for (int n = 0; n < kNum; ++n) {
    change[n] = token.beta * (columns.Load(v + n * kLanes) - held[n]);
    AddProduct(seen[n], token.product - Floats{}, change[n]);
    columns.Store(seen[n], out + n * kLanes);
  }
  for (int64_t i = 0; to && i < num_keys; ++i) {
    const Floats k = token.k[i] - Floats{}, decay = token.decays[i] - Floats{};
    for (int n = 0; n < kNum; ++n) {
      const int64_t at = i * stride + n * kLanes;
      Floats state = from ? decay * columns.Load(from + at) : Floats{};
      AddProduct(state, k, change[n]);
      columns.Store(state, to + at);
    }
  }
}

void AdvanceHead(const Token& token, const float* v, const float* from, float* to, float* out,
                 int64_t num_keys, int64_t num_values) {
  int64_t begin = 0;
  auto advance = [&](const auto& columns, int64_t count) {
    Advance(columns, token, v + begin, from ? from + begin : from, to ? to + begin : to,
            out + begin, num_keys, num_values);
    begin += count;
  };
  while (num_values - begin >= kColumns * kLanes) advance(Whole<kColumns>{}, kColumns * kLanes);
  while (num_values - begin >= kLanes) advance(Whole<1>{}, kLanes);
  if (begin < num_values) advance(Part{num_values - begin}, num_values - begin);
}

// The operands of all tokens.
struct Operands {
  const float *q, *k, *v, *log_decay, *beta;
  int64_t num_key_heads, num_heads, num_keys, num_values;
  bool decays_by_channel;
};

// Memory for a token, of which `Token` is a view.
class Prepared {
 public:
  explicit Prepared(int64_t num_keys)
      : padded_((num_keys + kLanes - 1) / kLanes * kLanes), numbers_(new float[4 * padded_]()) {}

  Token Of(const Operands& of, int64_t t, int64_t head) {
    float* decays = &numbers_[0];
    float *decayed_k = decays + padded_, *decayed_q = decayed_k + padded_,
          *key = decayed_q + padded_;
    const int64_t its = of.num_keys, place = t * of.num_heads + head;
    const int64_t row = t * of.num_key_heads + head / (of.num_heads / of.num_key_heads);
    const float *q = of.q + row * its, *k = of.k + row * its;
    if (of.decays_by_channel) std::copy_n(of.log_decay + place * its, its, decays);
    else std::fill(decays, decays + its, of.log_decay[place]);
    std::fill(decays + its, decays + padded_, 0.0f);  // what the token before has left
    std::copy_n(k, its, key);
    std::copy_n(q, its, decayed_q);
    Floats product{};
    for (int64_t i = 0; i < padded_; i += kLanes) {
      const Floats decay = Exp(LoadVector<Floats>(decays + i));
      const Floats keys = LoadVector<Floats>(key + i), queries = LoadVector<Floats>(decayed_q + i);
      AddProduct(product, keys, queries);
      const Floats both[] = {keys * decay, queries * decay};
      std::memcpy(decays + i, &decay, sizeof(decay));
      std::memcpy(decayed_k + i, &both[0], sizeof(decay));
      std::memcpy(decayed_q + i, &both[1], sizeof(decay));
    }
    return {decays, decayed_k, decayed_q, key, of.beta[place], Sum(product)};
  }

 private:
  int64_t padded_;
  std::unique_ptr<float[]> numbers_;
};

ffi::Error Delta(ffi::ThreadPool pool, ffi::Buffer<ffi::F32, 3> q, ffi::Buffer<ffi::F32, 3> k,
                 ffi::Buffer<ffi::F32, 3> v, ffi::Buffer<ffi::F32, 3> log_decay,
                 ffi::Buffer<ffi::F32, 2> beta, ffi::Buffer<ffi::F32, 4> state,
                 ffi::Buffer<ffi::F32, 3> out, ffi::RemainingArgs rows,
                 ffi::ResultBuffer<ffi::F32, 4> next, ffi::ResultBuffer<ffi::F32, 3> outputs) {
  const Operands of{q.typed_data(),      k.typed_data(),
                    v.typed_data(),      log_decay.typed_data(),
                    beta.typed_data(),   q.dimensions()[1],
                    v.dimensions()[1],   q.dimensions()[2],
                    v.dimensions()[2],   log_decay.dimensions()[2] > 1};
  if (next->typed_data() != state.typed_data() || outputs->typed_data() != out.typed_data())
    return ffi::Error::InvalidArgument("states and outputs must be updated in place");
  StateRows(state, rows).Advance(pool, [&] {
    return [&of, out = out.typed_data(), prepared = Prepared(of.num_keys)](
               int64_t token, int64_t head, const float* from, float* to) mutable {
      const int64_t at = (token * of.num_heads + head) * of.num_values;
      AdvanceHead(prepared.Of(of, token, head), of.v + at, from, to, out + at, of.num_keys,
                  of.num_values);
    };
  });
  return ffi::Error::Success();
}

}  // namespace

JAXLLM_FUNCTION(jaxllm_delta_f32, Delta)
