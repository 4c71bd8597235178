// One token after the other of the state space of Mamba2: decodes, and rows with drafts.
//
// One pass over a head's state lets it decay, adds the token and sums what is seen of it. Each sum
// has an order of its own, whatever other rows there are.

#include <algorithm>
#include <cstdint>

#include "native/ffi.h"
#include "native/vectors.h"
#include "recurrent/native.h"

namespace {

using namespace jaxllm;

// Rows of a state at a time, whose sums become numbers together.
constexpr int kRows = 4;

// What a token does to a head: its vectors [K], and the head's decay.
struct Token {
  const float *b, *c;
  float decay;
};

// Compute some columns of some rows of a state.
template <int kNum, typename Columns>
void Advance(const Columns& columns, const Token& token, int64_t column, const Floats (&added)[kNum],
             const float* from, float* to, int64_t stride, Floats (&sums)[1][kNum]) {
  const Floats b = columns.Load(token.b + column), c = columns.Load(token.c + column);
  for (int n = 0; n < kNum; ++n) {
    const int64_t at = n * stride + column;
    Floats state = from ? token.decay * columns.Load(from + at) : Floats{};
    AddProduct(state, added[n], b);
    AddProduct(sums[0][n], state, c);
    if (to) columns.Store(state, to + at);
  }
}

// Compute some rows of a state, of which x has the inputs. `from` is null if the state is zeros, and
// `to` if nothing needs the next one.
template <int kNum>
void AdvanceRows(const Token& token, const float* x, float step, const float* from, float* to,
                 float* out, int64_t num_columns) {
  Floats added[kNum], sums[1][kNum] = {};
  for (int n = 0; n < kNum; ++n) added[n] = step * x[n] - Floats{};
  const int64_t whole = num_columns / kLanes * kLanes;
  for (int64_t column = 0; column < whole; column += kLanes)
    Advance(Whole<1>{}, token, column, added, from, to, num_columns, sums);
  if (whole < num_columns)
    Advance(Part{num_columns - whole}, token, whole, added, from, to, num_columns, sums);
  float totals[kNum][1];
  SumAll(sums, totals);
  for (int n = 0; n < kNum; ++n) out[n] = totals[n][0];
}

ffi::Error Ssd(ffi::ThreadPool pool, ffi::Buffer<ffi::F32, 3> x, ffi::Buffer<ffi::F32, 3> b,
               ffi::Buffer<ffi::F32, 3> c, ffi::Buffer<ffi::F32, 2> step,
               ffi::Buffer<ffi::F32, 1> rate, ffi::Buffer<ffi::F32, 4> state,
               ffi::Buffer<ffi::F32, 3> out, ffi::RemainingArgs rows,
               ffi::ResultBuffer<ffi::F32, 4> next, ffi::ResultBuffer<ffi::F32, 3> outputs) {
  const int64_t num_heads = x.dimensions()[1], num_rows = x.dimensions()[2];
  const int64_t num_groups = b.dimensions()[1], num_columns = b.dimensions()[2];
  if (next->typed_data() != state.typed_data() || outputs->typed_data() != out.typed_data())
    return ffi::Error::InvalidArgument("states and outputs must be updated in place");
  auto advance = [&](int64_t t, int64_t head, const float* from, float* to) {
    const int64_t place = t * num_heads + head;
    const int64_t group = t * num_groups + head / (num_heads / num_groups);
    const float its_step = step.typed_data()[place];
    const Floats decay = Exp(its_step * rate.typed_data()[head] - Floats{});
    const Token token{b.typed_data() + group * num_columns, c.typed_data() + group * num_columns,
                      decay[0]};
    const float* inputs = x.typed_data() + place * num_rows;
    float* sums = out.typed_data() + place * num_rows;
    auto advance_rows = [&](auto number, int64_t row) {
      const int64_t at = row * num_columns;
      AdvanceRows<decltype(number)::value>(token, inputs + row, its_step, from ? from + at : from,
                                           to ? to + at : to, sums + row, num_columns);
    };
    int64_t row = 0;
    for (; row + kRows <= num_rows; row += kRows)
      advance_rows(std::integral_constant<int, kRows>{}, row);
    for (; row < num_rows; ++row) advance_rows(std::integral_constant<int, 1>{}, row);
  };
  StateRows(state, rows).Advance(pool, [&] { return advance; });
  return ffi::Error::Success();
}

}  // namespace

JAXLLM_FUNCTION(jaxllm_ssd_f32, Ssd)
