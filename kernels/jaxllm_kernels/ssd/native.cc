// One token after the other of the state space of Mamba2.
//
// Some columns of some rows of a head's state stay in registers for all tokens of a tile. Each
// token lets them decay, adds its input, and adds what is seen of them to the sums of these rows.
// Sums have an order of their own, whatever other rows of the step there are, and wherever tiles
// begin.

#include <algorithm>
#include <cstdint>

#include "native/ffi.h"
#include "native/vectors.h"
#include "recurrent/native.h"

namespace {

using namespace jaxllm;

// Rows of a state, and vectors of columns, in registers.
constexpr int kRows = kNumRegisters / 8;
constexpr int kColumns = 4;
// Tokens whose sums become numbers together.
constexpr int kTotals = 4;
static_assert(kTileTokens % kTotals == 0);

// The operands of all tokens, and their outputs.
struct Operands {
  const float *x, *b, *c, *step, *rate;
  float* out;
  int64_t num_heads, num_groups, num_rows, num_columns;
};

// Computes tiles, in memory of its own.
class Advance {
 public:
  explicit Advance(const Operands& of)
      : of_(of),
        vectors_(2 * kTileTokens * (of.num_columns + kLanes)),
        added_(kTileTokens * of.num_rows),
        sums_(kTileTokens * kRows * kLanes) {}

  void operator()(const Tile& tile, const float* from, float* to) {
    Prepare(tile);
    int64_t row = tile.values.begin;
    for (; row + kRows <= tile.values.end; row += kRows) AdvanceRows<kRows>(tile, row, from, to);
    for (; row < tile.values.end; ++row) AdvanceRows<1>(tile, row, from, to);
  }

 private:
  // Call work(columns, column) for all columns.
  template <typename Work>
  void ForColumns(const Work& work) const {
    int64_t column = 0;
    for (; column + kColumns * kLanes <= of_.num_columns; column += kColumns * kLanes)
      work(Whole<kColumns>{}, column);
    for (; column + kLanes <= of_.num_columns; column += kLanes) work(Whole<1>{}, column);
    if (column < of_.num_columns) work(Part{of_.num_columns - column}, column);
  }

  // The vectors b and c of a token, side by side, for some columns. Tokens are beside each other:
  // where they come from, all of them would have the same places in the processor's first cache.
  template <typename Columns>
  float* VectorsOf(const Columns&, const Tile& tile, int64_t j, int64_t column) const {
    return vectors_.get() + 2 * (column * tile.num_tokens + j * Columns::kVectors * kLanes);
  }

  void Prepare(const Tile& tile) {
    for (int64_t j = 0; j < tile.num_tokens; ++j) {
      const int64_t t = tile.first + j, place = t * of_.num_heads + tile.head;
      const int64_t group = tile.head / (of_.num_heads / of_.num_groups);
      const int64_t vector = (t * of_.num_groups + group) * of_.num_columns;
      const int64_t ahead = 2 * of_.num_heads * of_.num_rows;
      Fetch(of_.x + place * of_.num_rows + ahead, of_.num_rows);
      ForColumns([&](const auto& columns, int64_t column) {
        constexpr int kNum = std::decay_t<decltype(columns)>::kVectors;
        float* both = VectorsOf(columns, tile, j, column);
        for (int n = 0; n < kNum; ++n) {
          const int64_t at = vector + column + n * kLanes;
          Whole<1>::Store(columns.Load(of_.b + at), both + n * kLanes);
          Whole<1>::Store(columns.Load(of_.c + at), both + (kNum + n) * kLanes);
        }
      });
      const float step = of_.step[place];
      decays_[j] = Exp(step * of_.rate[tile.head] - Floats{})[0];
      for (int64_t row = tile.values.begin; row < tile.values.end; ++row)
        added_.get()[j * of_.num_rows + row] = step * of_.x[place * of_.num_rows + row];
    }
  }

  // Compute some rows of a state.
  template <int kNumRows>
  void AdvanceRows(const Tile& tile, int64_t row, const float* from, float* to) {
    const int64_t at = row * of_.num_columns;
    ForColumns([&](const auto& columns, int64_t column) {
      AdvanceColumns<kNumRows>(columns, tile, row, column, from ? from + at + column : nullptr,
                               to ? to + at + column : nullptr);
    });
    for (int64_t j = 0; j < tile.num_tokens; j += kTotals) {
      Floats sums[kTotals][kNumRows];
      std::memcpy(sums, sums_.get() + j * kNumRows * kLanes, sizeof(sums));
      float totals[kNumRows][kTotals];
      SumAll(sums, totals);
      const int64_t last = std::min<int64_t>(kTotals, tile.num_tokens - j);
      for (int64_t i = 0; i < last; ++i) {
        const int64_t place = (tile.first + j + i) * of_.num_heads + tile.head;
        for (int r = 0; r < kNumRows; ++r) of_.out[place * of_.num_rows + row + r] = totals[r][i];
      }
    }
  }

  template <int kNumRows, typename Columns>
  void AdvanceColumns(const Columns& columns, const Tile& tile, int64_t row, int64_t column,
                      const float* from, float* to) {
    constexpr int kNum = Columns::kVectors;
    Floats state[kNumRows][kNum] = {};
    if (from)
#pragma GCC unroll 8
      for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < kNum; ++n)
          state[r][n] = columns.Load(from + r * of_.num_columns + n * kLanes);
    const float* vectors = VectorsOf(columns, tile, 0, column);
    const float* inputs = added_.get() + row;
    float* sums = sums_.get();
    for (int64_t j = 0; j < tile.num_tokens; ++j) {
      const Floats decay = decays_[j] - Floats{};
      Floats added[kNumRows], sum[kNumRows] = {};
#pragma GCC unroll 8
      for (int r = 0; r < kNumRows; ++r) {
        added[r] = inputs[r] - Floats{};
        if (column > 0) sum[r] = LoadVector<Floats>(sums + r * kLanes);
      }
#pragma GCC unroll 8
      for (int n = 0; n < kNum; ++n) {
        const Floats b = LoadVector<Floats>(vectors + n * kLanes);
        const Floats c = LoadVector<Floats>(vectors + (kNum + n) * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kNumRows; ++r) {
          state[r][n] = decay * state[r][n];
          AddProduct(state[r][n], added[r], b);
          AddProduct(sum[r], state[r][n], c);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kNumRows; ++r) Whole<1>::Store(sum[r], sums + r * kLanes);
      vectors += 2 * kNum * kLanes, inputs += of_.num_rows, sums += kNumRows * kLanes;
    }
    if (to)
#pragma GCC unroll 8
      for (int r = 0; r < kNumRows; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < kNum; ++n)
          columns.Store(state[r][n], to + r * of_.num_columns + n * kLanes);
  }

  const Operands& of_;
  Scratch vectors_, added_, sums_;
  float decays_[kTileTokens];
};

ffi::Error Ssd(ffi::ThreadPool pool, ffi::Buffer<ffi::F32, 3> x, ffi::Buffer<ffi::F32, 3> b,
               ffi::Buffer<ffi::F32, 3> c, ffi::Buffer<ffi::F32, 2> step,
               ffi::Buffer<ffi::F32, 1> rate, ffi::Buffer<ffi::F32, 4> state,
               ffi::RemainingArgs rows_of_step, ffi::ResultBuffer<ffi::F32, 4> next,
               ffi::ResultBuffer<ffi::F32, 3> out) {
  const Operands of{x.typed_data(),    b.typed_data(),    c.typed_data(),    step.typed_data(),
                    rate.typed_data(), out->typed_data(), x.dimensions()[1], b.dimensions()[1],
                    x.dimensions()[2], b.dimensions()[2]};
  if (next->typed_data() != state.typed_data())
    return ffi::Error::InvalidArgument("states must be updated in place");
  const StateRows rows(state, rows_of_step);
  rows.ClearOthers(of.out, x.dimensions()[0], of.num_heads * of.num_rows);
  rows.Advance(pool, of.num_rows, kRows, [&] { return Advance(of); });
  return ffi::Error::Success();
}

}  // namespace

JAXLLM_FUNCTION(jaxllm_ssd_f32, Ssd)
