// Products of rows with weights by stored form, in one thread's processor time: what the native
// kernels reach on a machine that others use, too. The first line is what plain reads reach.
//
//   g++ -O3 -march=native -std=c++17 -w -I kernels/jaxllm_kernels benchmarks/products.cc -o /tmp/p
//   /tmp/p

#include <sys/mman.h>
#include <time.h>

#include <cstdio>
#include <random>
#include <vector>

#include "native/matrices.h"

using namespace jaxllm;

constexpr int64_t kInputs = 1024, kOutputs = 2816, kWeights = kInputs * kOutputs;
constexpr size_t kBytes = 96 << 20;  // no cache has them all
constexpr int kRepetitions = 5;      // the shortest counts

double Seconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

template <typename Work>
double Shortest(const Work& work) {
  double shortest = 1e9;
  for (int i = 0; i < kRepetitions; ++i) {
    const double start = Seconds();
    work();
    shortest = std::min(shortest, Seconds() - start);
  }
  return shortest;
}

// `make` takes the place of a weight.
template <typename Make>
void Measure(const char* form, int64_t num_bytes, const uint8_t* data, const Make& make) {
  std::vector<uint16_t> x(64 * kInputs);
  std::mt19937 random(1);
  for (auto& value : x) value = 0x3f00 + (random() & 0x80ff);  // about 1, of both signs
  std::vector<float> y(64 * kOutputs);
  for (int64_t num_rows : {1, 4, 16, 64}) {
    const int count = kBytes / num_bytes;
    const double seconds = Shortest([&] {
      for (int i = 0; i < count; ++i) {
        const auto weight = make(data + i * num_bytes);
        const auto rows = weight.Take(x.data(), num_rows);
        for (int64_t row = 0; row < num_rows; ++row) rows.Prepare(row);
        MultiplyPanel(weight.Multiply(rows, {0, num_rows}, 0, {0, kOutputs}, y.data()),
                      {0, num_rows}, {0, kOutputs});
      }
    }) / count;
    std::printf("%-12s%6ld rows %9.1f us %7.1f GB/s of codes %7.1f G products/s\n", form, num_rows,
                seconds * 1e6, num_bytes / seconds / 1e9, num_rows * kWeights / seconds / 1e9);
  }
}

template <typename Codes>
void MeasureCodes(const char* form, int64_t group, const uint8_t* data) {
  static const std::vector<float> scales(kWeights / 16, 0.01f);
  Measure(form, kWeights * Codes::kBytes / kChunk, data, [&](const uint8_t* codes) {
    return CodedMatrices<uint16_t, Codes>{codes, scales.data(), nullptr, kOutputs,
                                          kInputs, kInputs / group};
  });
}

int main() {
  auto* data = (uint8_t*)mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  madvise(data, kBytes, MADV_HUGEPAGE);
  std::mt19937 random(1);
  for (size_t i = 0; i < kBytes / 4; ++i) ((uint32_t*)data)[i] = random() & 0x3f3f3f3f;
  volatile int32_t result;
  const double seconds = Shortest([&] {
    Ints sums[4] = {};
    for (size_t i = 0; i < kBytes; i += sizeof(sums)) {
      __builtin_prefetch(data + i + 2048, 0, 2);
      for (int j = 0; j < 4; ++j) sums[j] ^= LoadVector<Ints>(data + i + j * sizeof(Ints));
    }
    result = (sums[0] ^ sums[1] ^ sums[2] ^ sums[3])[0];
  });
  std::printf("reads %.1f GB/s\n", kBytes / seconds / 1e9);
  Measure("bfloat16", 2 * kWeights, data, [](const uint8_t* weights) {
    return ElementMatrices<BFloat16>{(const uint16_t*)weights, kOutputs, kInputs};
  });
  MeasureCodes<Int8>("int8", kInputs, data);
  MeasureCodes<Int8>("int8/128", 128, data);
  MeasureCodes<Int8>("int8/32", 32, data);
  MeasureCodes<Int4>("int4/128", 128, data);
  MeasureCodes<Int4>("int4/32", 32, data);
  MeasureCodes<Float4>("float4/32", 32, data);
  MeasureCodes<Float8>("float8/128", 128, data);
}
