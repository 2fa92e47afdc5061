// Experts that an engine cut where it pleased: computed as the reference does, or refused.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/layer.hpp>

#include "experts_cpu/cpu_layer.hpp"
#include "support/layer_inputs.hpp"
#include "support/random_layer.hpp"
#include "support/relative_l2.hpp"
#include "weights/slice.hpp"

namespace fusedmoe {
namespace {

using testing_support::MakeRandomLayer;
using testing_support::RandomLayer;
using testing_support::RandomRows;

constexpr int64_t kHidden = 256, kWhole = 512, kTokens = 5;

MoeConfig Sizes(int64_t intermediate) {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 4;
  config.routing.top_k = 2;
  config.hidden = kHidden;
  config.intermediate = intermediate;
  return config;
}

/// Columns [begin, kWhole) of the middle.
ExpertSource CutAt(int64_t begin, const std::string& scheme) {
  ExpertSource source = MakeRandomLayer(Sizes(kWhole), scheme, 3).source;
  source.load = [load = source.load, begin](int64_t expert) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert part, load(expert));
    const int64_t width = kWhole - begin;
    FMOE_ASSIGN_OR_RETURN(part.gate, SliceMatrix(part.gate, begin, width, 0, kHidden));
    FMOE_ASSIGN_OR_RETURN(part.up, SliceMatrix(part.up, begin, width, 0, kHidden));
    FMOE_ASSIGN_OR_RETURN(part.down, SliceMatrix(part.down, 0, kHidden, begin, width));
    return part;
  };
  return source;
}

/// Empty where the backend refuses the slice.
std::vector<float> Outputs(const ExpertSource& source, int64_t intermediate, const std::string& backend,
                           const std::string& isa) {
  LayerOptions options;
  options.backend = backend;
  options.isa = isa;
  options.max_tokens = kTokens;
  const auto layer = MoeLayer::Create(Sizes(intermediate), source, {}, options);
  if (!layer.ok()) {
    EXPECT_EQ(layer.status().code(), StatusCode::kUnsupported) << layer.status().ToString();
    return {};
  }
  const Tensor hidden = RandomRows(kTokens, kHidden, DType::kBF16, 7);
  const auto routing = testing_support::MakeRandomRouting(kTokens, 2, 4, 8);
  Tensor output = *Tensor::Allocate(DType::kF32, {kTokens, kHidden});
  const Workspace workspace = *(*layer)->CreateWorkspace();
  MoeLayer::Inputs inputs = testing_support::InputsOf(hidden, routing);
  const Status status = (*layer)->Forward(inputs, {.output = output.mutable_view()}, workspace);
  EXPECT_TRUE(status.ok()) << status.ToString();
  const auto* values = output.view().as<float>();
  return {values, values + output.view().count()};
}

// Codes took the activation scale of the place where padding had moved them to.
TEST(Slices, ThatCutGroups_AreComputedRightOrRefused) {
  int computed = 0;
  for (const char* scheme : {"int8_w8a8:block128", "fp8_w8a8:block128", "mxfp8_w8a8", "mxfp4_mxfp8",
                             "nvfp4_w4a4", "mxfp4_w4a4", "int4_w4a8:g128", "fp8_w8a16:block128"}) {
    if (!ParseScheme(scheme).ok()) {
      continue;
    }
    for (const int64_t begin : {32, 64, 128, 288, 320}) {
      const ExpertSource source = CutAt(begin, scheme);
      const std::vector<float> expected = Outputs(source, kWhole - begin, "REFERENCE", "");
      ASSERT_FALSE(expected.empty()) << scheme;
      for (const std::string& isa : cpu_test::HostIsas()) {
        const std::vector<float> actual = Outputs(source, kWhole - begin, "CPU_FUSED", isa);
        if (actual.empty()) {
          continue;
        }
        ++computed;
        // Scales of other groups change a tenth of the values of a group; rounding to 8 or 4 bits on another
        // side of a half a few in a thousand.
        EXPECT_LT(test::RelativeL2(actual, expected), 0.02) << scheme << " from " << begin << " on " << isa;
      }
    }
  }
  EXPECT_GT(computed, 20);
}

}  // namespace
}  // namespace fusedmoe
