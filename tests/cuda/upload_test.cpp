// Weights on the card are the bytes that the host packs.

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/card.hpp"
#include "cuda/on_card.hpp"
#include "experts/cuda/cuda_backend.hpp"
#include "experts/cuda/cuda_plan.hpp"
#include "support/random_layer.hpp"
#include "weights/fragment_pack.hpp"

namespace fusedmoe {
namespace {

class CudaUpload : public testing::TestWithParam<std::string> {};

TEST_P(CudaUpload, EveryExpert_TheBlocksOfPackFragmentExpert) {
  FMOE_SKIP_WITHOUT_KERNELS(GetParam());
  MoeProblem problem;
  problem.config.num_experts = problem.config.num_local_experts = 5;
  problem.config.routing.top_k = 2;
  problem.config.hidden = 384;
  problem.config.intermediate = 2304;  // several pieces of gate and up, and a shorter one
  problem.config.activation.kind =
      GetParam().starts_with("fp8") ? ActivationKind::kGeluNoMul : ActivationKind::kSilu;
  const auto layer = testing_support::MakeRandomLayer(problem.config, GetParam(), 3);
  problem.scheme = layer.source.scheme;
  const cuda::CudaPlan plan = cuda::MakeCudaPlan(problem, HostMachine());
  const bool gated = plan.shape.gated();
  const FragmentSizes sizes =
      FragmentSizesOf(plan.spec, problem.config.hidden, problem.config.intermediate, gated);
  const auto pool = ThreadPool::Create(3);
  ASSERT_TRUE(pool.ok());
  for (const Executor& executor : {Executor{}, (*pool)->executor()}) {
    const auto prepared = kCudaFusedBackend.prepare(problem, HostMachine(), layer.source, executor);
    ASSERT_TRUE(prepared.ok()) << prepared.status().message();
    const auto read = [&](const char* name) {
      const TensorView view = prepared->Find(name)->view();
      std::vector<uint8_t> bytes(static_cast<size_t>(view.total_bytes()));
      EXPECT_TRUE(cuda::CopyToHost(bytes.data(), view.data(), view.total_bytes(), nullptr).ok());
      return bytes;
    };
    const std::vector<uint8_t> gate_up = read("gate_up"), down = read("down");
    std::vector<uint8_t> want_up(static_cast<size_t>(sizes.gate_up_bytes)),
        want_down(static_cast<size_t>(sizes.down_bytes));
    std::vector<float> tensor(3), rows(static_cast<size_t>(2 * sizes.gate_up_rows + sizes.down_rows));
    for (int64_t e = 0; e < 5; ++e) {
      FragmentOutput out;
      out.gate_up = want_up.data(), out.down = want_down.data();
      out.gate_up_tensor_scale = tensor.data(), out.down_tensor_scale = tensor.data() + 2;
      out.gate_up_row_scale = rows.data(), out.down_row_scale = rows.data() + 2 * sizes.gate_up_rows;
      ASSERT_TRUE(PackFragmentExpert(*layer.source.load(e), plan.spec, out).ok());
      EXPECT_TRUE(std::equal(want_up.begin(), want_up.end(), gate_up.begin() + e * sizes.gate_up_bytes)) << e;
      EXPECT_TRUE(std::equal(want_down.begin(), want_down.end(), down.begin() + e * sizes.down_bytes)) << e;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, CudaUpload,
                         testing::Values("nvfp4_w4a16", "mxfp4_w4a16", "int4_w4a16:g128", "int4_w4a16:g32",
                                         "int4_w4a16:channel", "fp8_w8a16:channel", "fp8_w8a16:block128",
                                         "mxfp8_w8a16", "int8_w8a16:g128", "int8_w8a16:channel",
                                         "unquantized"),
                         [](const auto& instance) {
                           std::string name = instance.param;
                           std::replace(name.begin(), name.end(), ':', '_');
                           return name;
                         });

TEST(CudaUploadErrors, ExpertThatDoesNotLoad_IsNamed) {
  FMOE_SKIP_WITHOUT_KERNELS("nvfp4_w4a16");
  MoeProblem problem;
  problem.config.num_experts = problem.config.num_local_experts = 4;
  problem.config.hidden = problem.config.intermediate = 128;
  auto layer = testing_support::MakeRandomLayer(problem.config, "nvfp4_w4a16", 3);
  problem.scheme = layer.source.scheme;
  const auto load = layer.source.load;
  layer.source.load = [load](int64_t expert) -> Result<CanonicalExpert> {
    return expert == 2 ? Result<CanonicalExpert>(Status::BadInput("torn file")) : load(expert);
  };
  const auto prepared = kCudaFusedBackend.prepare(problem, HostMachine(), layer.source, Executor{});
  ASSERT_FALSE(prepared.ok());
  EXPECT_NE(prepared.status().message().find("expert 2"), std::string::npos) << prepared.status().message();
}

}  // namespace
}  // namespace fusedmoe
