// The golden checkpoints through the card: routing with the bits of the CPU, outputs as close as each case
// asks.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/jobs/verify.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/safetensors.hpp>

#include "cuda/card.hpp"
#include "cuda/on_card.hpp"
#include "numerics/rows.hpp"
#include "support/relative_l2.hpp"
#include "support/tensors.hpp"
#include "support/test_name.hpp"

namespace fusedmoe {
namespace {

namespace fs = std::filesystem;
using test::RelativeL2;

/// A machine with a card may have the sources elsewhere than the one that built them.
fs::path Root() {
  const char* root = std::getenv("FMOE_GOLDEN_ROOT");
  return root == nullptr ? fs::path(FMOE_GOLDEN_DIR) : fs::path(root);
}

std::vector<std::string> Cases() {
  std::vector<std::string> names;
  for (const char* kind : {"checkpoints", "families"}) {
    std::error_code ignored;
    for (const fs::directory_entry& entry : fs::directory_iterator(Root() / kind, ignored)) {
      if (fs::exists(entry.path() / "case.json")) {
        names.push_back(std::string(kind) + "/" + entry.path().filename().string());
      }
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

struct Produced {
  Tensor output, ids, weights;
};

Result<Produced> ForwardOf(const MoeLayer& layer, const MoeLayer::Inputs& inputs) {
  const int64_t tokens = inputs.hidden.dim(0), k = layer.config().top_k();
  Produced produced;
  FMOE_ASSIGN_OR_RETURN(produced.output, Tensor::Allocate(inputs.hidden.dtype(), inputs.hidden.shape()));
  FMOE_ASSIGN_OR_RETURN(produced.ids, Tensor::Allocate(DType::kI32, {tokens, k}));
  FMOE_ASSIGN_OR_RETURN(produced.weights, Tensor::Allocate(DType::kF32, {tokens, k}));
  FMOE_ASSIGN_OR_RETURN(const Workspace workspace, layer.CreateWorkspace());
  const MoeLayer::Outputs outputs{produced.output.mutable_view(), produced.ids.mutable_view(),
                                  produced.weights.mutable_view()};
  FMOE_RETURN_IF_ERROR(layer.ForwardFromHost(inputs, outputs, workspace));
  return produced;
}

template <typename T>
std::vector<T> ValuesOf(const Tensor& tensor) {
  const auto* values = tensor.view().as<T>();
  return {values, values + tensor.view().count()};
}

MoeLayer::Inputs InputsOf(const SafetensorsFile& file) {
  const auto view = [&](const char* name) {
    const Tensor* tensor = file.Find(name);
    return tensor == nullptr ? TensorView() : tensor->view();
  };
  MoeLayer::Inputs inputs;
  inputs.hidden = view("hidden_states");
  inputs.router_logits = view("router_logits");
  inputs.topk_ids = view("topk_ids");
  inputs.topk_weights = view("topk_weights");
  inputs.token_ids = view("input_ids");
  return inputs;
}

class CudaGolden : public testing::TestWithParam<std::string> {};

TEST_P(CudaGolden, SameRoutingAsTheCpu_OutputsAsCloseAsItsCaseAsks) {
  FMOE_SKIP_WITHOUT_CARD();
  const fs::path directory = Root() / GetParam();
  std::ifstream text(directory / "case.json");
  const nlohmann::json info = nlohmann::json::parse(text);
  const int64_t number = info.at("layer").get<int64_t>();
  auto checkpoint = Checkpoint::Open(directory);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  for (const fs::directory_entry& io : fs::directory_iterator(directory / "io")) {
    SCOPED_TRACE(io.path().filename().string());
    const Result<SafetensorsFile> file = ReadSafetensors(io.path());
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    const MoeLayer::Inputs inputs = InputsOf(*file);
    LayerOptions options;
    options.device = "cuda";
    options.max_tokens = options.plan_tokens = inputs.hidden.dim(0);
    const auto layer = MoeLayer::Load(*checkpoint, number, options);
    if (!layer.ok() && layer.status().code() == StatusCode::kUnsupported) {
      GTEST_SKIP() << layer.status().message();
    }
    ASSERT_TRUE(layer.ok()) << layer.status().ToString();
    LayerOptions cpu_options;
    cpu_options.backend = "REFERENCE";
    cpu_options.max_tokens = options.max_tokens;
    cpu_options.activation = (*layer)->plan().activation;
    const auto cpu = MoeLayer::Load(*checkpoint, number, cpu_options);
    ASSERT_TRUE(cpu.ok()) << cpu.status().ToString();
    const Result<Produced> actual = ForwardOf(**layer, inputs), wanted = ForwardOf(**cpu, inputs);
    ASSERT_TRUE(actual.ok()) << actual.status().ToString();
    ASSERT_TRUE(wanted.ok()) << wanted.status().ToString();
    EXPECT_TRUE(test::SameBits(ValuesOf<int32_t>(actual->ids), ValuesOf<int32_t>(wanted->ids)))
        << "other experts";
    EXPECT_TRUE(test::SameBits(ValuesOf<float>(actual->weights), ValuesOf<float>(wanted->weights)))
        << "other weights";
    const Plan& plan = (*layer)->plan();
    const MoeConfig& config = (*layer)->config();
    double bound =
        BoundOf(plan, (*layer)->scheme(), inputs.hidden.dtype(), config.hidden, config.intermediate).value();
    // Operands are 16-bit whatever the hidden states are, and both results are rounded.
    bound = std::hypot(bound, 4 * std::sqrt(2.0) * 0x1p-9);
    EXPECT_LE(RelativeL2(test::Floats(actual->output), test::Floats(wanted->output)), bound)
        << plan.mode << " against the reference";
    const char* rounded = "tolerance_rel_l2_if_intermediate_is_rounded_to_bf16_first";
    const Tensor* expected = file->Find("expected_output");
    if (expected != nullptr && info.contains("tolerance_rel_l2")) {
      const bool short_mid =
          plan.intermediate_dtype != "F32" && info.contains(rounded) && info.at(rounded).is_number();
      const auto tolerance = info.at(short_mid ? rounded : "tolerance_rel_l2").get<double>();
      EXPECT_LE(RelativeL2(test::Floats(actual->output), test::Floats(*expected)), tolerance)
          << plan.mode << " against the golden output";
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaGolden);
INSTANTIATE_TEST_SUITE_P(Tools, CudaGolden, testing::ValuesIn(Cases()), test::NamedAfterText);

}  // namespace
}  // namespace fusedmoe
