// GGUF types of few values or few bits: indices of a codebook and codes of 2, 3, 5 and 6 bits in panels.
#include <gtest/gtest.h>

#include <cstring>

#include <fusedmoe/machine.hpp>

#include "checkpoint/gguf_types.hpp"
#include "experts/cpu/cpu_plan.hpp"
#include "experts/cpu/cpu_weights.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "weights/dequantize.hpp"
#include "weights/narrow.hpp"
#include "weights/panel.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

class GgufNarrowTypes : public GgufOfType {};
INSTANTIATE_TEST_SUITE_P(Types, GgufNarrowTypes, testing::ValuesIn(kGgufTypes), NameOfType);

// Panels have the bits of the type, the values of the file, outputs of the reference at every level.
TEST_P(GgufNarrowTypes, AreNarrowInPanels) {
  const GgufType& type = GetParam();
  const TemporaryDirectory folder;
  const std::string path = (folder.path() / "a.gguf").string();
  folder.Write("a.gguf", ModelOf(type, type).Bytes());
  const auto checkpoint = *Checkpoint::Open(path);
  const MoeProblem problem = ProblemOf(*checkpoint);
  const cpu::CpuPlan plan = cpu::MakeCpuPlan(problem, HostMachine());
  const double bits = NarrowBits(type);
  EXPECT_EQ(plan.gate_up.panel.codebook == Codebook::kNone && plan.gate_up.panel.code_bits == 0, bits == 0);
  if (bits == 0) {
    return;
  }
  EXPECT_EQ(static_cast<double>(plan.gate_up.panel.block_bytes()) * 8 /
                static_cast<double>(kPanelRows * plan.gate_up.panel.block),
            bits);
  const CanonicalExpert expert = LoadExpert(path, false).expert, decoded = LoadExpert(path, true).expert;
  const PreparedWeights prepared = *cpu::PrepareCpuWeights(plan, *checkpoint->Experts(0), {});
  EXPECT_EQ(prepared.layout_key.find("U8"), std::string::npos) << prepared.layout_key;
  for (const auto matrix : {&CanonicalExpert::gate, &CanonicalExpert::up, &CanonicalExpert::down}) {
    const Result<CanonicalMatrix> narrow = Narrow(expert.*matrix);
    ASSERT_TRUE(narrow.ok()) << narrow.status().ToString();
    const char* refused = narrow->format.codebook != Codebook::kNone ? "indices" : "code_bits";
    EXPECT_NE(ValidateCanonical(*narrow).message().find(refused), std::string::npos);
    if (type.id == 7) {  // the zero point of a minimum was rounded
      continue;
    }
    ExpectPanels(*narrow, decoded.*matrix);
    if (!narrow->zero_point.empty()) {
      continue;
    }
    std::vector<float> row(static_cast<size_t>(narrow->cols));
    for (int64_t r = 0; r < narrow->rows; ++r) {
      DequantizeRow(*narrow, r, row.data());
      const auto* wanted = (decoded.*matrix).codes.view().as<float>() + r * narrow->cols;
      for (size_t c = 0; c < row.size(); ++c) {
        ASSERT_EQ(row[c], wanted[c]) << r << " " << c;
      }
    }
  }
  // The fast packer, and back.
  const CanonicalMatrix down = *Narrow(expert.down);
  const std::vector<int32_t> columns = PanelColumns(down, plan.down.panel);
  std::vector<std::byte> stripes(static_cast<size_t>(plan.down.expert_bytes()));
  for (int64_t stripe = 0; stripe < plan.down.stripes; ++stripe) {
    PackPanelStripe(down, plan.down.panel, columns, stripe, stripes.data() + stripe * plan.down.stripe_bytes);
  }
  EXPECT_EQ(std::memcmp(stripes.data(), prepared.Find("down")->view().data() + plan.down.expert_bytes(),
                        stripes.size()),
            0);
  const int64_t row_bytes = down.cols * DTypeBits(down.format.element) / 8;
  std::vector<std::byte> codes(static_cast<size_t>(down.rows * row_bytes));
  UnpackPanelCodes(down.format, plan.down.panel, columns, stripes.data(), down.rows, codes.data(), row_bytes);
  EXPECT_EQ(std::memcmp(codes.data(), down.codes.view().data(), codes.size()), 0);

  const std::vector<float> wanted = OutputOf(checkpoint, "REFERENCE");
  for (const Isa isa : cpu::BuiltIsas()) {
    if (!HostMachine().Has(isa)) {
      continue;
    }
    SCOPED_TRACE(IsaName(isa));
    ExpectOutput(OutputOf(checkpoint, "CPU_FUSED", std::string(IsaName(isa))), wanted);
  }
}

#if defined(__x86_64__)
// Also where tiles of AMX take them.
TEST(GgufNarrowTypes, AreNarrowForTiles) {
  for (const char* name : {"IQ4_XS", "IQ1_S", "IQ2_S", "Q2_K", "Q3_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K"}) {
    SCOPED_TRACE(name);
    const TemporaryDirectory folder;
    folder.Write("a.gguf", ModelOf(TypeNamed(name), TypeNamed(name)).Bytes());
    MoeProblem problem = ProblemOf(**Checkpoint::Open((folder.path() / "a.gguf").string()));
    problem.isa = "amx";
    const PanelFormat panel = cpu::MakeCpuPlan(problem, HostMachine()).gate_up.panel;
    EXPECT_TRUE(panel.codebook != Codebook::kNone || panel.code_bits != 0);
    problem.mode = "throughput";
    const cpu::CpuPlan plan = cpu::MakeCpuPlan(problem, HostMachine());
    ASSERT_TRUE(plan.matrix_unit.enabled);
    EXPECT_EQ(plan.gate_up.panel, panel);
  }
}
#endif

}  // namespace
}  // namespace fusedmoe
