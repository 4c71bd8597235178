// Chooses the next token of every row, as `jaxllm.sampling.sampler.sample` does, and computes logprobs
// of given tokens.
//
// A row is computed by one thread from beginning to end, so that its vocabulary stays in the caches,
// and only the parts that it asks for are. Nothing in it depends on the other rows. Blocks of 128
// tokens are those of the draw; their maxima tell which blocks a later pass need not read.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "native/ffi.h"
#include "native/threads.h"
#include "native/vectors.h"
#include "sampler/record.h"
#include "sampler/rows.h"

namespace {

using namespace jaxllm;

constexpr int64_t kBlock = 128;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Where e^x becomes subnormal, which counts as zero.
constexpr float kLowestExponent = -87.336544f;
// Threads share no less than that.
constexpr int64_t kUnitElements = 1 << 14;

int64_t NumBlocks(int64_t size) { return (size + kBlock - 1) / kBlock; }

// Some memory of a thread, which lasts.
struct Scratch {
  std::vector<float> adjusted, p;        // [V], whole blocks
  std::vector<float> maxima, of_p, sums;  // by block
  std::vector<float> candidates, others;

  void Fit(int64_t size) {
    const int64_t blocks = NumBlocks(size);
    for (auto* its : {&adjusted, &p}) Grow(*its, blocks * kBlock);
    for (auto* its : {&maxima, &of_p, &sums}) Grow(*its, blocks + kLanes);
  }
  static void Grow(std::vector<float>& its, int64_t size) {
    if ((int64_t)its.size() < size) its.resize(size);
  }
  static Scratch& OfThisThread(int64_t size) {
    static thread_local Scratch scratch;
    scratch.Fit(size);
    return scratch;
  }
};

struct Row {
  Params params;
  int32_t flags, slot, output_index;
  uint32_t position;
  const float* logits;
  int64_t size;  // of the vocabulary
  const uint32_t* mask;
  const int32_t* pending;
  int64_t num_pending;

  bool Has(int32_t flag) const { return (flags & flag) != 0; }
};

struct Tables {
  Table<const int16_t> counts;
  Table<const int32_t> rounds;
  Table<const uint32_t> allowed;
  Table<const int32_t> biased_ids;
  Table<const float> biases;
  Table<const int32_t> bad_words, recent, stop_ids;
  int64_t word_size;
};

// The first of the most likely tokens, and its logit. NaN counts as +inf.
struct Best {
  int32_t token;
  float logit;
};

// The vector from a row's index on; what is behind the end is -inf.
inline Floats Load(const float* x, int64_t i, int64_t size) {
  if (i + kLanes <= size) return LoadVector<Floats>(x + i);
  float rest[kLanes];
  std::fill_n(rest, kLanes, -kInfinity);
  if (i < size) std::copy(x + i, x + size, rest);
  return LoadVector<Floats>(rest);
}

inline void Store(const Floats& v, float* p) { std::memcpy(p, &v, sizeof(v)); }

Best FindBest(const float* x, int64_t size, float* maxima) {
  int64_t best = 0;
  float largest = -kInfinity;
  for (int64_t block = 0; block < NumBlocks(size); ++block) {
    Floats most = -kInfinity - Floats{};
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kLanes) {
      Floats v = Load(x, i, size);
      v = v < kInfinity ? v : kInfinity - Floats{};
      most = most > v ? most : v;
    }
    maxima[block] = Largest(most);
    if (maxima[block] > largest) largest = maxima[block], best = block;
  }
  for (int64_t i = best * kBlock; i < size; ++i)
    if (!(x[i] < largest)) return {(int32_t)i, largest};
  return {0, largest};
}

// Changes of the logits.

// Set tokens without a bit to -inf. `x` has room for whole vectors.
void MaskOthers(const uint32_t* bits, float* x, int64_t size) {
  Words lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  for (int64_t i = 0; i < size; i += 32) {
    const uint32_t word = bits[i / 32];
    if (word == ~uint32_t{0}) continue;
    for (int64_t j = 0; j < 32; j += kLanes) {
      const Words has = ((word >> j) - Words{}) >> lanes & 1;
      const Floats v = LoadVector<Floats>(x + i + j);
      Store(has != 0 ? v : -kInfinity - Floats{}, x + i + j);
    }
  }
}

bool HasAny(const float* x, int64_t size) {
  return std::any_of(x, x + size, [](float logit) { return logit != -kInfinity; });
}

// Biases, allowed ids, and the row's mask.
void Restrict(const Row& row, const Tables& tables, float* x) {
  auto add_biases = [&] {
    std::copy_n(row.logits, row.size, x);
    if (!row.Has(kLogitBias)) return;
    const int32_t* ids = tables.biased_ids.Of(row.slot);
    const float* biases = tables.biases.Of(row.slot);
    for (int64_t i = 0; i < tables.biased_ids.width; ++i)
      if (ids[i] >= 0 && ids[i] < row.size) x[ids[i]] += biases[i];
  };
  add_biases();
  if (row.Has(kAllowedIds)) MaskOthers(tables.allowed.Of(row.slot), x, row.size);
  if (!row.Has(kGrammar)) return;
  MaskOthers(row.mask, x, row.size);
  // If no allowed token is in the mask, only the mask counts.
  if (row.Has(kAllowedIds) && !HasAny(x, row.size)) {
    add_biases();
    MaskOthers(row.mask, x, row.size);
  }
}

void MaskToken(int32_t token, float* x, int64_t size) {
  if (token >= 0 && token < size) x[token] = -kInfinity;
}

void BanWords(const Row& row, const Tables& tables, float* x) {
  const int64_t width = tables.recent.width, size = tables.word_size;
  // The latest tokens, with those that are pending.
  std::vector<int32_t> recent(tables.recent.Of(row.slot), tables.recent.Of(row.slot) + width);
  recent.insert(recent.end(), row.pending, row.pending + row.num_pending);
  const int32_t* latest = recent.data() + row.num_pending;
  const int32_t* words = tables.bad_words.Of(row.slot);
  for (const int32_t* word = words; word < words + tables.bad_words.width; word += size) {
    if (word[size - 1] == kNoToken) continue;
    bool matches = true;
    for (int64_t i = 0; i < size - 1; ++i)
      matches &= word[i] == kNoToken || word[i] == latest[i];
    if (matches) MaskToken(word[size - 1], x, row.size);
  }
}

void Penalize(const Row& row, const Tables& tables, float* x) {
  const int16_t* counts = tables.counts.Of(row.slot);
  // Tokens whose counts lack something: a full round, or one that is pending.
  std::vector<std::pair<int32_t, int32_t>> more;
  auto add = [&](int32_t token, int32_t number) {
    if (token < 0 || token >= row.size) return;
    for (auto& its : more)
      if (its.first == token) return void(its.second += number);
    more.push_back({token, number});
  };
  for (int64_t i = 0; i < tables.rounds.width; ++i)
    add(tables.rounds.Of(row.slot)[i], kMaxCount + 1);
  for (int64_t i = 0; i < row.num_pending; ++i) add(row.pending[i], 1);

  auto penalize = [&](int32_t token, int32_t number) {
    float logit = x[token];
    const float repetition = row.params.repetition;
    if (counts[token] < 0 || number > 0)
      logit = logit > 0 ? logit / repetition : logit * repetition;
    logit -= row.params.frequency * number;
    x[token] = logit - row.params.presence * (number > 0);
  };
  constexpr int64_t kSome = 32;
  for (int64_t first = 0; first < row.size; first += kSome) {
    const int64_t end = std::min(first + kSome, row.size);
    int16_t any = 0;
    for (int64_t i = first; i < end; ++i) any |= counts[i];
    for (int64_t i = first; any != 0 && i < end; ++i)
      if (counts[i] != 0 && std::none_of(more.begin(), more.end(), [&](auto& its) {
            return its.first == i;
          }))
        penalize(i, counts[i] & kMaxCount);
  }
  for (auto& [token, number] : more) penalize(token, (counts[token] & kMaxCount) + number);
}

// All changes that come before temperature, and the best token of the result.
Best Adjust(const Row& row, const Tables& tables, float* x, float* maxima) {
  Restrict(row, tables, x);
  if (row.Has(kBadWords)) BanWords(row, tables, x);
  if (row.Has(kMinTokens) && row.output_index < row.params.min_tokens) {
    const int32_t* ids = tables.stop_ids.Of(row.slot);
    for (int64_t i = 0; i < tables.stop_ids.width; ++i) MaskToken(ids[i], x, row.size);
  }
  if (row.Has(kPenalties)) Penalize(row, tables, x);
  const Best best = FindBest(x, row.size, maxima);
  if (best.logit != -kInfinity) return best;
  Restrict(row, tables, x);  // nothing is left
  return FindBest(x, row.size, maxima);
}

// The draw.

struct Key {
  uint32_t x[2];
};

// Threefry-2x32 of some numbers with one key: what `jax.random.fold_in` evaluates.
template <typename Numbers>
void Fold(const Key& key, const Numbers& numbers, Numbers (&words)[2]) {
  const uint32_t keys[3] = {key.x[0], key.x[1], key.x[0] ^ key.x[1] ^ 0x1BD11BDA};
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  Numbers a = Numbers{} + keys[0], b = numbers + keys[1];
  for (int group = 0; group < 5; ++group) {
    for (int turn : kRotations[group % 2]) {
      a += b;
      b = (b << turn | b >> (32 - turn)) ^ a;
    }
    a += keys[(group + 1) % 3];
    b += keys[(group + 2) % 3] + (group + 1);
  }
  words[0] = a, words[1] = b;
}

// log x for normal x > 0: the logarithm of a number between sqrt(1/2) and sqrt(2) as a series of
// (x - 1) / (x + 1), and its exponent's.
Floats Log(const Floats& x) {
  const Words bits = (Words)x;
  const Ints exponent = (Ints)(bits - 0x3f3504f3u) >> 23;
  const Floats m = (Floats)(bits - ((Words)exponent << 23));
  const Floats s = (m - 1.0f) / (m + 1.0f), square = s * s;
  Floats y = 2.0f / 9 * square + 2.0f / 7;
  y = y * square + 2.0f / 5;
  y = y * square + 2.0f / 3;
  const Floats e = __builtin_convertvector(exponent, Floats);
  // ln 2 in two parts
  return e * 0x1.62e4p-1f + (2.0f * s + (s * square * y + e * 0x1.7f7d1cp-20f));
}

// Exponential noise of random bits, e^-g of the Gumbel noise g that `sampling.choose` makes of them.
Floats Noise(const Words& bits) {
  const Floats most = 1 - 0x1p-24f - Floats{};
  Floats u = (__builtin_convertvector(bits, Floats) + 0.5f) * 0x1p-32f;
  u = u < most ? u : most;
  // -log(1 - u), and what rounding 1 - u takes away.
  const Floats left = 1.0f - u;
  return left == 1.0f ? u : Log(left) * (u / (left - 1.0f));
}

// The arg-max of log(weight) + g, as that of weight / e^-g, which is in the same order. Number i has
// the noise of one of the words of number i. The first, if no weight is above zero.
int64_t Choose(const float* weights, int64_t size, const Key& key, int word) {
  int64_t chosen = 0;
  float best = 0;
  Words lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  for (int64_t i = 0; i < size; i += kLanes) {
    Floats scores = LoadVector<Floats>(weights + i);
    if (Largest(scores) <= 0) continue;
    Words words[2];
    Fold(key, lanes + (uint32_t)i, words);
    scores /= Noise(words[word]);
    if (Largest(scores) <= best) continue;
    for (int lane = 0; lane < kLanes; ++lane)
      if (scores[lane] > best) best = scores[lane], chosen = i + lane;
  }
  return chosen;
}

// All p that are at least `lowest`, which is above zero.
void Gather(const Scratch& scratch, int64_t size, float lowest, std::vector<float>& found) {
  found.clear();
  for (int64_t block = 0; block < NumBlocks(size); ++block) {
    if (scratch.of_p[block] < lowest) continue;
    const float* p = scratch.p.data() + block * kBlock;
    const size_t before = found.size();
    found.resize(before + kBlock);
    float* to = found.data() + before;
    for (int64_t i = 0; i < kBlock; ++i) {
      *to = p[i];
      to += p[i] >= lowest;
    }
    found.resize(to - found.data());
  }
}

// The k-th largest p, if that is at least `lowest`, and otherwise `lowest`.
float CutToK(Scratch& scratch, int64_t size, int64_t k, float lowest) {
  if (k >= size) return lowest;
  const int64_t blocks = NumBlocks(size);
  float least = std::max(lowest, FLT_MIN);
  auto& its = scratch.candidates;
  auto down_to = [&](auto begin, auto end) {
    std::nth_element(begin, begin + (k - 1), end, std::greater<float>());
    return begin[k - 1];
  };
  if (k <= blocks) {  // at least k tokens are as likely as the k-th block's best
    its.assign(scratch.of_p.begin(), scratch.of_p.begin() + blocks);
    least = std::max(least, down_to(its.begin(), its.end()));
  }
  Gather(scratch, size, least, its);
  return k <= (int64_t)its.size() ? std::max(lowest, down_to(its.begin(), its.end())) : lowest;
}

double SumOf(const std::vector<float>& values, int64_t size) {
  double sum = 0;
  int64_t i = 0;
  Floats sums{};
  for (; i + kLanes <= size; i += kLanes) {
    sums += LoadVector<Floats>(values.data() + i);
    if (i % 1024 == 0) sum += Sum(sums), sums = Floats{};
  }
  sum += Sum(sums);
  for (; i < size; ++i) sum += values[i];
  return sum;
}

// The largest cut for which all p at or above it have the share of all p at or above `lowest`.
float CutToShare(Scratch& scratch, int64_t size, float share, float lowest) {
  auto &its = scratch.candidates, &below = scratch.others;
  double total;
  float least = std::max(lowest, FLT_MIN);
  if (lowest > 0) {
    Gather(scratch, size, least, its);
    total = SumOf(its, its.size());
  } else {
    total = SumOf(scratch.sums, NumBlocks(size));
    // Tokens below that are together less than what may be missing.
    least = std::max(least, (float)(0.99 * (1 - share) * total / size));
    Gather(scratch, size, least, its);
  }
  const double wanted = share * total;
  double above = 0;  // the sum of all p at or above `high`
  uint32_t low, high = 0x3f800001;  // the bits of the cut are at or above one and below the other
  std::memcpy(&low, &least, sizeof(low));
  while (high - low > 1 && !its.empty()) {
    const uint32_t middle = low + (high - low) / 2;
    float cut;
    std::memcpy(&cut, &middle, sizeof(cut));
    below.resize(its.size());
    int64_t kept = 0, left = 0;
    for (float p : its) {
      its[kept] = p, below[left] = p;
      const bool is_above = p >= cut;
      kept += is_above, left += !is_above;
    }
    const double sum = SumOf(its, kept);
    if (above + sum >= wanted) {
      its.resize(kept), low = middle;
    } else {
      above += sum;
      below.resize(left), its.swap(below), high = middle;
    }
  }
  float cut;
  std::memcpy(&cut, &low, sizeof(cut));
  return cut;
}

// The lowest p that the row may sample (`top_k_cut.api`).
float Cut(const Params& params, Scratch& scratch, int64_t size) {
  float lowest = std::fabs(params.min_p);
  if (params.top_k > 0) lowest = CutToK(scratch, size, params.top_k, lowest);
  if (params.top_p < 1) lowest = CutToShare(scratch, size, params.top_p, lowest);
  return lowest;
}

int32_t Draw(const Row& row, const float* x, const Best& best, Scratch& scratch) {
  const Params& params = row.params;
  const float temperature = params.temperature;
  // If the division overflows, the overflowing tokens are equally likely, and no others.
  auto heated = [&](float logit) { return std::min(logit / temperature, FLT_MAX); };
  if (best.logit == kInfinity) {  // as a penalty can make it
    for (int64_t i = 0; i < row.size; ++i)
      if (std::isinf(std::exp(heated(x[i]))) && x[i] > 0) return i;
    return best.token;
  }
  if (best.logit == -kInfinity) return 0;

  // Probabilities divided by that of the most likely token, in blocks.
  const float first = heated(best.logit);
  float* p = scratch.p.data();
  const int64_t blocks = NumBlocks(row.size);
  for (int64_t block = 0; block < blocks; ++block) {
    Floats sum{}, most{};
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kLanes) {
      Floats v = Load(x, i, row.size) / temperature;
      v = v < FLT_MAX ? v : FLT_MAX - Floats{};
      v = Exp(v - first, kLowestExponent);
      v = v >= FLT_MIN ? v : Floats{};
      Store(v, p + i);
      sum += v;
      most = most > v ? most : v;
    }
    scratch.of_p[block] = Largest(most);
    scratch.sums[block] = Sum(sum);
  }
  std::fill_n(scratch.sums.begin() + blocks, kLanes, 0.0f);

  const float lowest = Cut(params, scratch, row.size);
  auto weights = [&](int64_t i) {
    const Floats v = LoadVector<Floats>(p + i);
    return v >= lowest ? v : Floats{};
  };
  for (int64_t block = 0; lowest > FLT_MIN && block < blocks; ++block) {
    Floats sum{};
    if (scratch.of_p[block] >= lowest)
      for (int64_t i = 0; i < kBlock; i += kLanes) sum += weights(block * kBlock + i);
    scratch.sums[block] = Sum(sum);
  }
  uint32_t words[2];
  Fold({{params.seed_high, params.seed_low}}, row.position, words);
  const Key key{{words[0], words[1]}};
  const int64_t block = Choose(scratch.sums.data(), blocks, key, 0);
  float places[kBlock];
  for (int64_t i = 0; i < kBlock; i += kLanes) Store(weights(block * kBlock + i), places + i);
  return block * kBlock + Choose(places, kBlock, key, 1);
}

// Logprobs, of the logits as they came.

struct Logprobs {
  int32_t* token_ids;
  float* logprobs;
  int32_t* rank;
  float* normaliser;
};

void ComputeLogprobs(const float* x, int64_t size, const Best& best, int32_t token,
                     const float* maxima, int64_t num_best, bool wants_more, const Logprobs& out) {
  const float target = x[token];
  double sum = 0;
  int64_t better = 0;
  for (int64_t block = 0; block < NumBlocks(size); ++block) {
    Floats sums{};
    Ints above{};
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kLanes) {
      const Floats v = Load(x, i, size);
      sums += Exp(v - best.logit);
      above -= v > target;
    }
    sum += Sum(sums);
    if (maxima[block] > target)
      for (int lane = 0; lane < kLanes; ++lane) better += above[lane];
  }
  const float normaliser = best.logit + std::log((float)sum);
  *out.normaliser = normaliser;
  *out.rank = 1 + better;
  out.token_ids[0] = token;
  out.logprobs[0] = target - normaliser;
  if (num_best == 0) return;
  if (!wants_more) {
    out.token_ids[1] = best.token;
    out.logprobs[1] = best.logit - normaliser;
    return;
  }
  // The best so far, the first of equals first.
  struct Found {
    float logit;
    int32_t token;
  };
  std::vector<Found> found;
  found.reserve(num_best + 1);
  for (int64_t block = 0; block < NumBlocks(size); ++block) {
    auto is_full = [&] { return (int64_t)found.size() == num_best; };
    if (is_full() && maxima[block] <= found.back().logit) continue;
    for (int64_t i = block * kBlock; i < std::min((block + 1) * kBlock, size); ++i) {
      if (is_full() && !(x[i] > found.back().logit)) continue;
      auto place = found.end();
      while (place != found.begin() && place[-1].logit < x[i]) --place;
      found.insert(place, {x[i], (int32_t)i});
      if ((int64_t)found.size() > num_best) found.pop_back();
    }
  }
  for (size_t i = 0; i < found.size(); ++i) {
    out.token_ids[1 + i] = found[i].token;
    out.logprobs[1 + i] = found[i].logit - normaliser;
  }
}

struct Chosen {
  int32_t token;
  bool is_valid;
};

Chosen SampleRow(const Row& row, const Tables& tables, int64_t num_best, const Logprobs& logprobs) {
  Scratch& scratch = Scratch::OfThisThread(row.size);
  const Best best = FindBest(row.logits, row.size, scratch.maxima.data());
  Chosen chosen{best.token, std::isfinite(best.logit)};
  Best adjusted = best;
  const float* x = row.logits;
  if (row.Has(kAdjusts)) {
    adjusted = Adjust(row, tables, scratch.adjusted.data(), scratch.of_p.data());
    x = scratch.adjusted.data();
    if (adjusted.logit == kInfinity)
      chosen.is_valid &= std::none_of(x, x + row.size, [](float v) { return std::isnan(v); });
    chosen.token = adjusted.token;
  }
  if (row.Has(kRandom)) chosen.token = Draw(row, x, adjusted, scratch);
  if (row.Has(kLogprobs))
    ComputeLogprobs(row.logits, row.size, best, chosen.token, scratch.maxima.data(), num_best,
                    row.Has(kMoreLogprobs), logprobs);
  return chosen;
}

template <typename Buffer>
auto TableOf(Buffer& buffer) {
  const auto shape = buffer.dimensions();
  int64_t width = 1;
  for (size_t i = 1; i < shape.size(); ++i) width *= shape[i];
  return Table<const std::remove_pointer_t<decltype(buffer.typed_data())>>{buffer.typed_data(),
                                                                          shape[0], width};
}

template <int kRank>
using Int32s = ffi::Buffer<ffi::S32, kRank>;
using Floats2 = ffi::Buffer<ffi::F32, 2>;

// Where all rows' logprobs go. Rows without any have zeros.
class AllLogprobs {
 public:
  AllLogprobs(ffi::ResultBuffer<ffi::S32, 2>& token_ids, ffi::ResultBuffer<ffi::F32, 2>& logprobs,
              ffi::ResultBuffer<ffi::S32, 1>& ranks, ffi::ResultBuffer<ffi::F32, 1>& normalisers)
      : all_{token_ids->typed_data(), logprobs->typed_data(), ranks->typed_data(),
             normalisers->typed_data()},
        width_(token_ids->dimensions()[1]) {
    const int64_t num_rows = token_ids->dimensions()[0];
    std::fill_n(all_.token_ids, num_rows * width_, 0);
    std::fill_n(all_.logprobs, num_rows * width_, 0.0f);
    std::fill_n(all_.rank, num_rows, 0);
    std::fill_n(all_.normaliser, num_rows, 0.0f);
  }
  int64_t num_best() const { return width_ - 1; }
  Logprobs Of(int64_t row) const {
    return {all_.token_ids + row * width_, all_.logprobs + row * width_, all_.rank + row,
            all_.normaliser + row};
  }

 private:
  const Logprobs all_;
  const int64_t width_;
};

template <typename Work>
void ShareRows(ffi::ThreadPool& pool, int64_t num_rows, int64_t size, const Work& work) {
  const int64_t unit = std::max<int64_t>(1, kUnitElements / std::max<int64_t>(1, size));
  Share(pool, {(num_rows + unit - 1) / unit}, [&](int64_t, int64_t index) {
    const int64_t end = std::min(num_rows, (index + 1) * unit);
    for (int64_t row = index * unit; row < end; ++row) work(row);
  });
}

ffi::Error Sample(ffi::ThreadPool pool, Floats2 logits, Int32s<2> params, Int32s<1> flags,
                  Int32s<1> slots, Int32s<1> output_index, Int32s<1> positions,
                  ffi::Buffer<ffi::U32, 2> masks, Int32s<2> pending,
                  ffi::Buffer<ffi::S16, 2> token_counts, Int32s<2> full_rounds,
                  ffi::Buffer<ffi::U32, 2> allowed_bits, Int32s<2> biased_ids, Floats2 biases,
                  Int32s<3> bad_words, Int32s<2> recent_tokens, Int32s<2> stop_ids,
                  ffi::ResultBuffer<ffi::S32, 1> tokens, ffi::ResultBuffer<ffi::PRED, 1> is_valid,
                  ffi::ResultBuffer<ffi::S32, 2> token_ids,
                  ffi::ResultBuffer<ffi::F32, 2> logprobs, ffi::ResultBuffer<ffi::S32, 1> ranks,
                  ffi::ResultBuffer<ffi::F32, 1> normalisers) {
  const int64_t num_rows = logits.dimensions()[0], size = logits.dimensions()[1];
  const int64_t num_columns = params.dimensions()[1], num_words = masks.dimensions()[1];
  const int64_t num_pending = pending.dimensions()[1];
  if (num_columns * sizeof(int32_t) < sizeof(Params) || token_counts.dimensions()[1] < size ||
      (int64_t)allowed_bits.dimensions()[1] * 32 < size || (num_words && num_words * 32 < size) ||
      bad_words.dimensions()[2] != recent_tokens.dimensions()[1] + 1)
    return ffi::Error::InvalidArgument("the sizes do not fit");
  const Tables tables{TableOf(token_counts), TableOf(full_rounds), TableOf(allowed_bits),
                      TableOf(biased_ids),   TableOf(biases),      TableOf(bad_words),
                      TableOf(recent_tokens), TableOf(stop_ids),
                      (int64_t)bad_words.dimensions()[2]};
  const AllLogprobs out(token_ids, logprobs, ranks, normalisers);
  ShareRows(pool, num_rows, size, [&](int64_t r) {
    Row row;
    std::memcpy(&row.params, params.typed_data() + r * num_columns, sizeof(Params));
    // Padding and greedy rows have zeros; one has no effect.
    if (!(row.params.top_p > 0)) row.params.top_p = 1;
    if (!(row.params.repetition > 0)) row.params.repetition = 1;
    row.flags = flags.typed_data()[r], row.slot = slots.typed_data()[r];
    row.output_index = output_index.typed_data()[r];
    row.position = positions.typed_data()[r];
    row.logits = logits.typed_data() + r * size, row.size = size;
    row.mask = masks.typed_data() + r * num_words;
    row.pending = pending.typed_data() + r * num_pending;
    row.num_pending = 0;
    while (row.num_pending < num_pending && row.pending[row.num_pending] != kNoToken)
      ++row.num_pending;
    const Chosen chosen = SampleRow(row, tables, out.num_best(), out.Of(r));
    tokens->typed_data()[r] = chosen.token;
    is_valid->typed_data()[r] = chosen.is_valid;
  });
  return ffi::Error::Success();
}

ffi::Error LogprobsOf(ffi::ThreadPool pool, Floats2 logits, Int32s<1> targets,
                      ffi::Buffer<ffi::PRED, 0> wants_more,
                      ffi::ResultBuffer<ffi::S32, 2> token_ids,
                      ffi::ResultBuffer<ffi::F32, 2> logprobs,
                      ffi::ResultBuffer<ffi::S32, 1> ranks,
                      ffi::ResultBuffer<ffi::F32, 1> normalisers) {
  const int64_t num_rows = logits.dimensions()[0], size = logits.dimensions()[1];
  if ((int64_t)targets.dimensions()[0] != num_rows)
    return ffi::Error::InvalidArgument("the sizes do not fit");
  const AllLogprobs out(token_ids, logprobs, ranks, normalisers);
  ShareRows(pool, num_rows, size, [&](int64_t r) {
    const int32_t token = targets.typed_data()[r];
    if (token < 0 || token >= size) {  // as XLA says it
      std::fill_n(out.Of(r).logprobs, 1 + out.num_best(), std::numeric_limits<float>::quiet_NaN());
      return;
    }
    Scratch& scratch = Scratch::OfThisThread(size);
    const float* row = logits.typed_data() + r * size;
    const Best best = FindBest(row, size, scratch.maxima.data());
    ComputeLogprobs(row, size, best, token, scratch.maxima.data(), out.num_best(),
                    wants_more.typed_data()[0], out.Of(r));
  });
  return ffi::Error::Success();
}

}  // namespace

JAXLLM_FUNCTION(jaxllm_sample_f32, Sample)
JAXLLM_FUNCTION(jaxllm_logprobs_f32, LogprobsOf)
JAXLLM_FUNCTION(jaxllm_record_f32, Record)
