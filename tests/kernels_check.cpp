// Checks kernels against plain loops, as a program: for CPUs that only an emulator has here. Prints what is wrong.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#define GEMM_ARGUMENTS const float*, int64_t, float*, int64_t, int64_t, int64_t, int64_t, int
extern "C" {
void hadamard(float*, int64_t, int64_t, float, int);
void gemm_float32(const float*, int64_t, const float*, GEMM_ARGUMENTS);
void gemm_bfloat16(const float*, int64_t, const uint16_t*, GEMM_ARGUMENTS);
void gemm_bits3_axis1(const float*, int64_t, const uint8_t*, GEMM_ARGUMENTS, int64_t, int);
void gemm_bits4_axis1(const float*, int64_t, const uint8_t*, GEMM_ARGUMENTS, int64_t, int);
void gemm_bits8_axis1(const float*, int64_t, const uint8_t*, GEMM_ARGUMENTS, int64_t, int);
#define QUANTIZER(bits)                                                             \
  void pack_bits##bits(const float*, int64_t, int64_t, int, uint8_t*, int64_t, int); \
  void unpack_bits##bits(const uint8_t*, int64_t, int64_t, int, float*, int64_t, int);
QUANTIZER(3)
QUANTIZER(4)
QUANTIZER(8)
}

namespace {

constexpr int64_t kRows = 3, kOutputs = 21, kInputs = 64;
constexpr int kGroup = 5;  // log2 of the group size
int failed = 0;

void check(const char* what, double found, double most) {
  if (found <= most) return;
  std::printf("%s: off by %g, at most %g\n", what, found, most);
  failed = 1;
}

std::vector<float> values(int64_t count, uint32_t seed) {  // in [-1, 1)
  std::vector<float> made(count);
  for (float& value : made) value = static_cast<int32_t>(seed = seed * 1664525u + 1013904223u) * 0x1p-31f;
  return made;
}

using Weights = std::vector<float>;

double gemm_error(const std::vector<float>& x, const Weights& w, const std::vector<float>& out) {
  double worst = 0;
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kOutputs; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < kInputs; ++k) sum += double(x[i * kInputs + k]) * w[j * kInputs + k];
      worst = std::fmax(worst, std::fabs(sum - out[i * kOutputs + j]));
    }
  return worst;
}

template <typename Gemm, typename Stored, typename... More>
void check_gemm(const char* what, Gemm gemm, const Stored* stored, const Weights& w, More... more) {
  const std::vector<float> x = values(kRows * kInputs, 1);
  std::vector<float> out(kRows * kOutputs, NAN);
  gemm(x.data(), kInputs, stored, nullptr, 0, out.data(), kOutputs, kRows, kOutputs, kInputs, 2, more...);
  check(what, gemm_error(x, w, out), 1e-5);
}

template <typename Pack, typename Unpack, typename Gemm>
void check_bits(const char* what, int bits, Pack pack, Unpack unpack, Gemm gemm) {
  const int64_t row_bytes = kInputs / 8 * bits + 4 * (kInputs >> kGroup);
  const Weights w = values(kOutputs * kInputs, 2);
  std::vector<uint8_t> packed(kOutputs * row_bytes);
  Weights unpacked(w.size(), NAN);
  pack(w.data(), kOutputs, kInputs, kGroup, packed.data(), row_bytes, 2);
  unpack(packed.data(), kOutputs, kInputs, kGroup, unpacked.data(), row_bytes, 2);
  double worst = 0;
  for (size_t i = 0; i < w.size(); ++i) worst = std::fmax(worst, std::fabs(double(w[i]) - unpacked[i]));
  check(what, worst, 1.02 / ((1 << bits) - 1));  // half a step of a range of at most 2, and float16's rounding
  check_gemm(what, gemm, packed.data(), unpacked, row_bytes, kGroup);
}

}  // namespace

int main() {
  const Weights w = values(kOutputs * kInputs, 3);
  check_gemm("float32", gemm_float32, w.data(), w);
  std::vector<uint16_t> upper(w.size());
  Weights rounded(w.size());
  for (size_t i = 0; i < w.size(); ++i) {
    uint32_t word;
    std::memcpy(&word, &w[i], sizeof word);
    upper[i] = word >> 16;
    word &= 0xffff0000u;
    std::memcpy(&rounded[i], &word, sizeof word);
  }
  check_gemm("bfloat16", gemm_bfloat16, upper.data(), rounded);
  check_bits("3 bits", 3, pack_bits3, unpack_bits3, gemm_bits3_axis1);
  check_bits("4 bits", 4, pack_bits4, unpack_bits4, gemm_bits4_axis1);
  check_bits("8 bits", 8, pack_bits8, unpack_bits8, gemm_bits8_axis1);
  std::vector<float> twice = w;
  for (int i = 0; i < 2; ++i) hadamard(twice.data(), kOutputs, kInputs, 0.125f, 2);  // its own inverse
  double worst = 0;
  for (size_t i = 0; i < w.size(); ++i) worst = std::fmax(worst, std::fabs(double(w[i]) - twice[i]));
  check("hadamard", worst, 1e-5);
  return failed;
}
