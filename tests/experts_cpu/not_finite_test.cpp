#include <cmath>

#include "definition.hpp"

/// What NaN and infinity spoil, in tokens and among codes of weights, and that they spoil nothing else.
namespace fusedmoe::cpu_test {
namespace {

TEST(NotFinite, Tokens_StayInTheirRow) {
  for (const char* scheme : {"unquantized", "nvfp4_w4a16", "int4_w4a16:g32", "fp8_w8a16:block128",
                             "fp8_w8a8:channel", "mxfp8_w8a8"}) {
    const LayerSpec spec = SpecOf(scheme);
    const Layer layer = MakeLayer(spec);
    const Runner runner = MakeRunner(layer);
    Batch batch = MakeBatch(spec, 20, 4);
    const std::vector<float> clean = RunBatch(layer, runner, batch);
    uint16_t* hidden = const_cast<uint16_t*>(batch.hidden.view().as<uint16_t>());
    hidden[3 * spec.hidden + 7] = 0x7fc0;  // NaN
    hidden[9 * spec.hidden + 1] = 0x7f80;  // infinity
    const std::vector<float> out = RunBatch(layer, runner, batch);
    for (int64_t t = 0; t < 20; ++t) {
      for (int64_t i = 0; i < spec.hidden; ++i) {
        const auto at = static_cast<size_t>(t * spec.hidden + i);
        if (t == 3 || t == 9) {
          EXPECT_FALSE(std::isfinite(out[at])) << scheme << " token " << t;
        } else {
          ASSERT_EQ(out[at], clean[at]) << scheme << " token " << t;
        }
      }
    }
  }
}

struct NanCode {
  const char* scheme;
  CanonicalMatrix CanonicalExpert::*matrix;
  const char* name;
};

class NotFiniteCodes : public testing::TestWithParam<NanCode> {};
INSTANTIATE_TEST_SUITE_P(Fp8, NotFiniteCodes, testing::ValuesIn([] {
                           std::vector<NanCode> cases;
                           for (const char* scheme : {"fp8_w8a16:channel", "fp8_w8a16:block128",
                                                      "fp8_w8a8:channel", "mxfp8_w8a8"}) {
                             cases.push_back({scheme, &CanonicalExpert::gate, "gate"});
                             cases.push_back({scheme, &CanonicalExpert::up, "up"});
                             cases.push_back({scheme, &CanonicalExpert::down, "down"});
                           }
                           return cases;
                         }()),
                         [](const auto& each) {
                           std::string name = std::string(each.param.scheme) + "_" + each.param.name;
                           std::replace(name.begin(), name.end(), ':', '_');
                           return name;
                         });

// A NaN in gate or up reaches all outputs of the tokens of its expert, one in down its row of them.
TEST_P(NotFiniteCodes, SpoilTheOutputsThatTheDefinitionSays) {
  for (const std::string& isa : HostIsas()) {
    for (const int64_t tokens : {1, 40}) {
      Layer layer = MakeLayer(SpecOf(GetParam().scheme));
      layer.problem.isa = isa;
      const Batch batch = MakeBatch(layer.spec, tokens, 4);
      const std::vector<float> clean = RunBatch(layer, MakeRunner(layer), batch);
      const auto expert = static_cast<size_t>(batch.ids[0]);
      CanonicalMatrix& matrix = layer.experts[expert].*GetParam().matrix;
      matrix.codes.mutable_view().data()[37 * matrix.cols + 21] = std::byte{0xff};
      const std::vector<double> defined = Definition(layer).Forward(batch);
      const std::vector<float> out = RunBatch(layer, MakeRunner(layer), batch);
      for (size_t at = 0; at < out.size(); ++at) {
        ASSERT_EQ(std::isnan(out[at]), std::isnan(defined[at])) << isa << " output " << at;
        ASSERT_TRUE(std::isnan(out[at]) || out[at] == clean[at]) << isa << " output " << at;
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu_test
