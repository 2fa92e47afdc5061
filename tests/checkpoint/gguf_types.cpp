#include "checkpoint/gguf_types.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <tuple>
#include <utility>

#include <fusedmoe/layer.hpp>
#include <fusedmoe/problems.hpp>

#include "layer/kernel_builder.hpp"
#include "weights/dequantize.hpp"
#include "weights/panel.hpp"

namespace fusedmoe::testing_support {
namespace {

void PutHalf(std::string& block, int64_t at, uint16_t half) {
  block.replace(static_cast<size_t>(at), 2, Raw(half));
}

/// IQ1_M has its scale in the upper nibbles of four words.
void PutScale(std::string& block, const GgufType& type, uint16_t half) {
  if (std::string_view(type.name) != "IQ1_M") {
    PutHalf(block, type.scale_at, half);
    return;
  }
  for (int64_t word = 0; word < 4; ++word) {
    char& byte = block[static_cast<size_t>(type.scale_at + 2 * word + 1)];
    byte = static_cast<char>((byte & 15) | (half >> (4 * word) & 15) << 4);
  }
}

std::string RandomBlocks(const GgufType& type, uint64_t blocks, uint32_t seed) {
  std::mt19937 random(seed);
  std::string bytes, block(static_cast<size_t>(type.bytes), '\0');
  for (uint64_t i = 0; i < blocks; ++i) {
    for (size_t at = 0; at < block.size(); at += 4) {
      const auto word = static_cast<uint32_t>(random());
      std::memcpy(&block[at], &word, std::min<size_t>(4, block.size() - at));
    }
    const auto half = [&](uint32_t exponent) {
      return static_cast<uint16_t>((random() & 1U) << 15 | exponent << 10 | (random() & 0x3ffU));
    };
    PutScale(block, type, i % 8 == 7 ? uint16_t{0} : half(7 + random() % 3));
    if (type.minimum_at >= 0) {
      PutHalf(block, type.minimum_at, half(6 + random() % 3));
    }
    bytes += block;
  }
  return bytes;
}

}  // namespace

const GgufType& TypeNamed(std::string_view name) {
  const auto* found = std::find_if(std::begin(kGgufTypes), std::end(kGgufTypes),
                                   [&](const GgufType& type) { return type.name == name; });
  EXPECT_NE(found, std::end(kGgufTypes)) << name;
  return *found;
}

bool HasTwoLevels(const GgufType& type) {
  return (type.id >= 10 && type.id <= 14) || type.id == 23;
}

double NarrowBits(const GgufType& type) {
  switch (type.id) {
    case 6:  // Q5_0
      return 5.5;
    case 7:  // Q5_1: scales and minima in F32
      return 7;
    case 10:  // Q2_K
      return 3.25;
    case 11:  // Q3_K
      return 3.625;
    case 13:  // Q5_K
      return 5.75;
    case 14:  // Q6_K
      return 6.625;
    case 20:  // IQ4_NL
      return 4.5;
    case 18:  // IQ3_XXS, IQ3_S, IQ4_XS
    case 21:
    case 23:
      return 4.375;
    case 16:  // IQ2_XXS, IQ1_S
    case 19:
      return 3.375;
    case 17:  // IQ2_XS, IQ2_S, IQ1_M
    case 22:
    case 29:
      return 3.625;
    default:
      return 0;
  }
}

RawGguf::Tensor RandomStack(const std::string& name, std::vector<uint64_t> dims, const GgufType& type,
                            uint32_t seed) {
  uint64_t blocks = 1;
  for (const uint64_t dim : dims) {
    blocks *= dim;
  }
  blocks /= static_cast<uint64_t>(type.elements);
  // Pairs of types have most of their stacks in common, and drawing them took half the time of such tests.
  static std::map<std::tuple<uint32_t, uint64_t, uint32_t>, std::string> drawn;
  std::string& bytes = drawn[{type.id, blocks, seed}];
  if (bytes.empty()) {
    bytes = RandomBlocks(type, blocks, seed);
  }
  return {name, std::move(dims), type.id, bytes, 0};
}

RawGguf ModelOf(const GgufType& inputs, const GgufType& down) {
  static const auto kValues = Model(kTypeF32).values;
  RawGguf model;
  model.values = kValues;
  for (auto& [key, bytes] : model.values) {
    if (key.ends_with("embedding_length")) {
      bytes = Raw(kUint32) + Raw<uint32_t>(kGgufHidden);
    } else if (key.ends_with("expert_feed_forward_length")) {
      bytes = Raw(kUint32) + Raw<uint32_t>(kGgufInner);
    }
  }
  model.tensors = {
      Stack("blk.0.ffn_gate_inp.weight", {kGgufHidden, kGgufExperts}, kTypeF32),
      RandomStack("blk.0.ffn_gate_exps.weight", {kGgufHidden, kGgufInner, kGgufExperts}, inputs, 1),
      RandomStack("blk.0.ffn_up_exps.weight", {kGgufHidden, kGgufInner, kGgufExperts}, inputs, 2),
      RandomStack("blk.0.ffn_down_exps.weight", {kGgufInner, kGgufHidden, kGgufExperts}, down, 3)};
  return model;
}

LoadedExpert LoadExpert(const std::string& path, bool decode) {
  CheckpointOptions options;
  options.decode_blocks = decode;
  const auto checkpoint = Checkpoint::Open(path, options);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  const auto experts = (*checkpoint)->Experts(0);
  EXPECT_TRUE(experts.ok()) << experts.status().ToString();
  auto expert = experts->load(1);
  EXPECT_TRUE(expert.ok()) << expert.status().ToString();
  return {experts->scheme, *std::move(expert)};
}

void ExpectSameValues(const CanonicalMatrix& integers, const CanonicalMatrix& decoded) {
  ASSERT_EQ(decoded.format.element, DType::kF32);
  const auto values = DequantizeMatrix(integers);
  ASSERT_TRUE(values.ok()) << values.status().ToString();
  const auto* found = values->view().as<float>();
  const auto* wanted = decoded.codes.view().as<float>();
  const int64_t group = integers.format.block.col;
  bool only_zeros = true;
  for (int64_t at = 0; at < integers.rows * integers.cols / group; ++at) {  // groups divide rows
    double bound = 0.0;
    if (!integers.zero_point.empty()) {
      const double scale = std::fabs(integers.block_scale.view().as<float>()[at]);
      const double zero = std::fabs(integers.zero_point.view().as<float>()[at]);
      bound = 5 * std::ldexp(scale * (zero + 255.0), -24);
    }
    for (int64_t i = at * group; i < (at + 1) * group; ++i) {
      const double difference = double{found[i]} - double{wanted[i]};
      if (!(difference >= -bound && difference <= bound)) {  // an assertion each takes most of the time
        FAIL() << "element " << i << ": " << found[i] << " and not " << wanted[i] << ", bound " << bound;
      }
      only_zeros = only_zeros && wanted[i] == 0.0F;
    }
  }
  EXPECT_FALSE(only_zeros);
}

void ExpectPanels(const CanonicalMatrix& integers, const CanonicalMatrix& decoded) {
  const PanelFormat format = *ChoosePanelFormat(integers.format, !integers.zero_point.empty());
  const float factor = integers.tensor_scale.value_or(1.0F);
  const std::vector<int32_t> columns = PanelColumns(integers, format);
  std::vector<std::byte> stripe(columns.size() / static_cast<size_t>(format.block) *
                                static_cast<size_t>(format.block_bytes()));
  const auto* wanted = decoded.codes.view().as<float>();
  for (int64_t row = 0; row < integers.rows; ++row) {
    if (row % kPanelRows == 0) {
      PackPanelStripe(integers, format, columns, row / kPanelRows, stripe.data());
    }
    for (size_t k = 0; k < columns.size(); ++k) {
      if (columns[k] >= 0) {
        ASSERT_EQ(PanelValue(format, stripe.data(), static_cast<int64_t>(columns.size()) / format.block,
                             row % kPanelRows, static_cast<int64_t>(k)) *
                      factor,
                  wanted[row * decoded.codes.view().stride_bytes(0) / 4 + columns[k]])
            << "row " << row << " column " << columns[k];
      }
    }
  }
}

void ExpectPanelsOfTwoLevels(const CanonicalMatrix& integers, const CanonicalMatrix& decoded) {
  const PanelFormat format = *ChoosePanelFormat(integers.format, !integers.zero_point.empty());
  EXPECT_EQ(format.scale, PanelScale::kI8);
  ExpectPanels(integers, decoded);
}

MoeProblem ProblemOf(const Checkpoint& checkpoint, const ParallelConfig& parallel) {
  const ExpertSource source = *checkpoint.Experts(0, parallel);
  const MoeConfig config = *PerRank(checkpoint.Describe(0)->config, parallel, source.scheme);
  LayerOptions options;
  options.mode = "latency";  // tiles of AMX take one format for both GEMMs
  options.max_tokens = 8;
  Result<MoeProblem> problem = MakeProblem(config, source, options);
  EXPECT_TRUE(problem.ok()) << problem.status().ToString();
  return *std::move(problem);
}

std::vector<float> OutputOf(const std::shared_ptr<const Checkpoint>& checkpoint, const char* backend,
                            const std::string& isa) {
  constexpr int64_t kTokens = 5;
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
  Tensor hidden = *Tensor::Allocate(DType::kF32, Shape{kTokens, kGgufHidden});
  std::generate_n(hidden.mutable_view().as<float>(), kTokens * kGgufHidden, [&] { return uniform(random); });
  LayerOptions options;
  options.backend = backend;
  options.isa = isa;
  options.max_tokens = kTokens;
  const auto layer = MoeLayer::Load(checkpoint, 0, options);
  EXPECT_TRUE(layer.ok()) << layer.status().ToString();
  auto workspace = (*layer)->CreateWorkspace();
  Tensor logits = *Tensor::Allocate(DType::kF32, Shape{kTokens, kGgufExperts});
  std::fill_n(logits.mutable_view().as<float>(), kTokens * kGgufExperts, 0.0F);
  Tensor output = *Tensor::Allocate(DType::kF32, Shape{kTokens, kGgufHidden});
  const Status status = (*layer)->Forward(hidden.view(), logits.view(), output.mutable_view(), *workspace);
  EXPECT_TRUE(status.ok()) << status.ToString();
  const auto* values = output.view().as<float>();
  return {values, values + kTokens * kGgufHidden};
}

void ExpectOutput(const std::vector<float>& found, const std::vector<float>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  double error = 0, size = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    error += std::pow(found[i] - wanted[i], 2);
    size += std::pow(wanted[i], 2);
  }
  EXPECT_GT(size, 0);
  EXPECT_LT(std::sqrt(error / size), 0x1p-11);
}

}  // namespace fusedmoe::testing_support
