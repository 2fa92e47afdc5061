#include <time.h>

#include <algorithm>

#include "cpu_layer.hpp"

namespace fusedmoe::cpu_test {
namespace {

/// CPU time of this thread: other programs on the machine do not stretch it.
double CpuSeconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Nine tokens of ten choose expert 0 first.
Batch Skewed(const LayerSpec& spec, Batch batch) {
  for (int64_t token = 0; token < batch.tokens; ++token) {
    int32_t* ids = batch.ids.data() + token * spec.top_k;
    if (token % 10 != 9 && std::find(ids, ids + spec.top_k, 0) == ids + spec.top_k) {
      ids[0] = 0;
    }
  }
  return batch;
}

/// The same tokens, the same number of products, in turn: the better of the two routings' times in each round
/// is disturbed least, and one undisturbed round in twelve is enough.
TEST(Skew_NineTokensOfTenOnOneExpert, KeepFourFifthsOfTheUniformRate) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
  GTEST_SKIP() << "times say nothing in this build";
#endif
  for (const char* scheme : {"nvfp4_w4a16", "mxfp4_w4a16", "int4_w4a16:g128", "int8_w8a8", "fp8_w8a16"}) {
    LayerSpec spec;
    spec.scheme = scheme;
    spec.hidden = 512;
    spec.intermediate = 256;
    spec.experts = 8;
    spec.top_k = 2;
    spec.max_tokens = 256;
    const Layer layer = MakeLayer(spec);
    const Runner runner = MakeRunner(layer);
    const Batch uniform = MakeBatch(spec, 256, 7);
    const Batch skewed = Skewed(spec, uniform);
    double best_uniform = 1e9, best_skewed = 1e9, rate = 0;
    for (int round = 0; round < 12 && rate < 0.8; ++round) {
      for (int sample = 0; sample < 3; ++sample) {
        double begin = CpuSeconds();
        RunBatch(layer, runner, uniform);
        best_uniform = std::min(best_uniform, CpuSeconds() - begin);
        begin = CpuSeconds();
        RunBatch(layer, runner, skewed);
        best_skewed = std::min(best_skewed, CpuSeconds() - begin);
      }
      rate = best_uniform / best_skewed;
    }
    EXPECT_GE(rate, 0.8) << scheme << ": " << best_skewed * 1e3 << " ms skewed, " << best_uniform * 1e3
                         << " ms uniform";
  }
}

}  // namespace
}  // namespace fusedmoe::cpu_test
