// One token after the other of the gated delta rule.
//
// A pass over some columns of a head's state changes it by a token, and sums what it then holds of
// the next token's key and query. Between two tokens of a tile these columns stay in the first cache
// of the processor. Sums have an order of their own, whatever other rows there are, and wherever
// tiles begin.

#include <algorithm>
#include <cstdint>

#include "native/ffi.h"
#include "native/vectors.h"
#include "recurrent/native.h"

namespace {

using namespace jaxllm;

// Vectors of columns at a time: two sums and a change for each of them are in registers, and 128
// keys of them fill at most half of a first cache of 32 KiB.
constexpr int kColumns = std::min(kNumRegisters / 4, 32 / kLanes);
constexpr int kBlock = kColumns * kLanes;

// What a token does to a head, of sizes [K] in whole vectors. The decays are multiplied into the
// first pair of keys and queries.
struct Token {
  const float *decays, *decayed_k, *decayed_q, *k;
  float beta, product;  // of key and query
};

// Some columns of a matrix [K, ...]: those of the first key, and from one key to the next.
template <typename Float>
struct Matrix {
  Float* columns;
  int64_t stride;
};

// What columns hold of a key, and of a query.
template <int kNum>
struct Sums {
  Floats held[kNum], seen[kNum];
};

// Change some columns by a token, if kChanges, and sum what they then hold of the next one, if
// kReads.
template <bool kChanges, bool kReads, typename Columns, int kNum = Columns::kVectors>
[[gnu::always_inline]] inline Sums<kNum> Pass(const Columns& columns, int64_t num_keys,
                                              Matrix<const float> from, Matrix<float> to,
                                              const Token& token, const Floats (&changes)[kNum],
                                              const Token& next) {
  // Compilers keep in registers only what no store can change.
  Floats change[kNum], held[kNum] = {}, seen[kNum] = {};
  for (int n = 0; n < kNum; ++n) change[n] = changes[n];
  for (int64_t i = 0; i < num_keys; ++i) {
    const Floats decay = token.decays[i] - Floats{}, k = token.k[i] - Floats{};
    const Floats next_k = next.decayed_k[i] - Floats{}, next_q = next.decayed_q[i] - Floats{};
    for (int n = 0; n < kNum; ++n) {
      Floats state = columns.Load(from.columns + i * from.stride + n * kLanes);
      if constexpr (kChanges) {
        state = decay * state;
        AddProduct(state, k, change[n]);
        columns.Store(state, to.columns + i * to.stride + n * kLanes);
      }
      if constexpr (kReads) {
        AddProduct(held[n], state, next_k);
        AddProduct(seen[n], state, next_q);
      }
    }
  }
  Sums<kNum> sums;
  for (int n = 0; n < kNum; ++n) sums.held[n] = held[n], sums.seen[n] = seen[n];
  return sums;
}

// The operands of all tokens, and their outputs.
struct Operands {
  const float *q, *k, *v, *log_decay, *beta;
  float* out;
  int64_t num_key_heads, num_heads, num_keys, num_values;
  bool decays_by_channel;
};

// Computes tiles, in memory of its own.
class Advance {
 public:
  explicit Advance(const Operands& of)
      : of_(of),
        padded_((of.num_keys + kLanes - 1) / kLanes * kLanes),
        prepared_(4 * padded_ * kTileTokens),
        columns_(of.num_keys * kBlock) {}

  void operator()(const Tile& tile, const float* from, float* to) {
    Token tokens[kTileTokens];
    for (int64_t j = 0; j < tile.num_tokens; ++j)
      tokens[j] = Prepare(j, tile.first + j, tile.head);
    int64_t begin = tile.values.begin;
    auto advance = [&](const auto& columns, int64_t count) {
      AdvanceColumns(columns, tokens, tile, begin, from, to);
      begin += count;
    };
    while (tile.values.end - begin >= kBlock) advance(Whole<kColumns>{}, kBlock);
    while (tile.values.end - begin >= kLanes) advance(Whole<1>{}, kLanes);
    if (begin < tile.values.end) advance(Part{tile.values.end - begin}, tile.values.end - begin);
  }

 private:
  Token Prepare(int64_t j, int64_t t, int64_t head) {
    float* decays = prepared_.get() + j * 4 * padded_;
    float *decayed_k = decays + padded_, *decayed_q = decayed_k + padded_,
          *key = decayed_q + padded_;
    const int64_t num_keys = of_.num_keys, place = t * of_.num_heads + head;
    const int64_t row = t * of_.num_key_heads + head / (of_.num_heads / of_.num_key_heads);
    const int64_t ahead = 2 * of_.num_key_heads * num_keys;
    Fetch(of_.k + row * num_keys + ahead, num_keys);
    Fetch(of_.q + row * num_keys + ahead, num_keys);
    if (of_.decays_by_channel)
      Fetch(of_.log_decay + (place + 2 * of_.num_heads) * num_keys, num_keys);
    auto copy = [=](const float* of_token, float* padded) {
      std::fill(std::copy_n(of_token, num_keys, padded), padded + padded_, 0.0f);
    };
    copy(of_.k + row * num_keys, key);
    copy(of_.q + row * num_keys, decayed_q);
    if (of_.decays_by_channel) copy(of_.log_decay + place * num_keys, decays);
    Floats product{}, decay{};
    if (!of_.decays_by_channel) decay = Exp(of_.log_decay[place] - Floats{});
    for (int64_t i = 0; i < padded_; i += kLanes) {
      if (of_.decays_by_channel) decay = Exp(LoadVector<Floats>(decays + i));
      const Floats keys = LoadVector<Floats>(key + i), queries = LoadVector<Floats>(decayed_q + i);
      AddProduct(product, keys, queries);
      Whole<1>::Store(decay, decays + i);
      Whole<1>::Store(keys * decay, decayed_k + i);
      Whole<1>::Store(queries * decay, decayed_q + i);
    }
    return {decays, decayed_k, decayed_q, key, of_.beta[place], Sum(product)};
  }

  template <typename Columns>
  void AdvanceColumns(const Columns& columns, const Token* tokens, const Tile& tile, int64_t begin,
                      const float* from, float* to) {
    static constexpr float kZeros[kBlock] = {};
    constexpr int kNum = Columns::kVectors;
    const int64_t num_keys = of_.num_keys;
    Matrix<const float> state{kZeros, 0};
    if (from) state = {from + begin, of_.num_values};
    const Matrix<float> here{columns_.get(), kBlock};
    const int64_t next_token = of_.num_heads * of_.num_values;
    Floats change[kNum] = {};
    auto sums = Pass<false, true>(columns, num_keys, state, here, tokens[0], change, tokens[0]);
    for (int64_t j = 0;; ++j) {
      const Token& token = tokens[j];
      const int64_t at = ((tile.first + j) * of_.num_heads + tile.head) * of_.num_values + begin;
      for (int n = 0; n < kNum; ++n) {
        change[n] = token.beta * (columns.Load(of_.v + at + n * kLanes) - sums.held[n]);
        AddProduct(sums.seen[n], token.product - Floats{}, change[n]);
        columns.Store(sums.seen[n], of_.out + at + n * kLanes);
      }
      if (j + 1 == tile.num_tokens) break;
      Fetch(of_.v + at + next_token, kNum * kLanes);
      Fetch(of_.out + at + next_token, kNum * kLanes);
      sums = Pass<true, true>(columns, num_keys, state, here, token, change, tokens[j + 1]);
      state = {here.columns, here.stride};
    }
    if (!to) return;
    const Token& last = tokens[tile.num_tokens - 1];
    Pass<true, false>(columns, num_keys, state, {to + begin, of_.num_values}, last, change, last);
  }

  const Operands& of_;
  int64_t padded_;
  Scratch prepared_, columns_;
};

ffi::Error Delta(ffi::ThreadPool pool, ffi::Buffer<ffi::F32, 3> q, ffi::Buffer<ffi::F32, 3> k,
                 ffi::Buffer<ffi::F32, 3> v, ffi::Buffer<ffi::F32, 3> log_decay,
                 ffi::Buffer<ffi::F32, 2> beta, ffi::Buffer<ffi::F32, 4> state,
                 ffi::RemainingArgs rows_of_step, ffi::ResultBuffer<ffi::F32, 4> next,
                 ffi::ResultBuffer<ffi::F32, 3> out) {
  const Operands of{q.typed_data(),         k.typed_data(),    v.typed_data(),
                    log_decay.typed_data(), beta.typed_data(), out->typed_data(),
                    q.dimensions()[1],      v.dimensions()[1], q.dimensions()[2],
                    v.dimensions()[2],      log_decay.dimensions()[2] > 1};
  if (next->typed_data() != state.typed_data())
    return ffi::Error::InvalidArgument("states must be updated in place");
  const StateRows rows(state, rows_of_step);
  rows.ClearOthers(of.out, v.dimensions()[0], of.num_heads * of.num_values);
  rows.Advance(pool, of.num_values, kBlock, [&] { return Advance(of); });
  return ffi::Error::Success();
}

}  // namespace

JAXLLM_FUNCTION(jaxllm_delta_f32, Delta)
