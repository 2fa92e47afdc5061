// GGUF types of integers: what they decode to, and that the codes, scales and zero points that they are
// listed as mean the same values.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <tuple>

#include <fusedmoe/layer.hpp>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/problems.hpp>
#include <fusedmoe/safetensors.hpp>

#include "checkpoint/gguf/gguf_blocks.hpp"
#include "checkpoint/raw_checkpoint.hpp"
#include "checkpoint/raw_gguf.hpp"
#include "experts/cpu/cpu_plan.hpp"
#include "experts/cpu/cpu_weights.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "layer/kernel_builder.hpp"
#include "weights/dequantize.hpp"
#include "weights/narrow.hpp"
#include "weights/panel.hpp"
#include "weights/slice.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

constexpr int64_t kHidden = 512, kInner = 256, kExperts = 2;

struct Type {
  uint32_t id;
  const char* name;
  const char* scheme;
  int64_t elements, bytes;
  int64_t scale_at;    // of the F16 scale in a block
  int64_t minimum_at;  // of the F16 minimum; -1: none
  bool zeros;          // listed with zero points
  bool decoded;        // for writers
};

constexpr Type kTypes[] = {{2, "Q4_0", "int4_w4a16:g32", 32, 18, 0, -1, false, false},
                           {3, "Q4_1", "int4_w4a16:g32", 32, 20, 0, 2, true, true},
                           {6, "Q5_0", "int8_w8a16:g32", 32, 22, 0, -1, false, true},
                           {7, "Q5_1", "int8_w8a16:g32", 32, 24, 0, 2, true, true},
                           {8, "Q8_0", "int8_w8a16:g32", 32, 34, 0, -1, false, false},
                           {10, "Q2_K", "int4_w4a16:g16", 256, 84, 80, 82, true, true},
                           {11, "Q3_K", "int4_w4a16:g16", 256, 110, 108, -1, false, true},
                           {12, "Q4_K", "int4_w4a16:g32", 256, 144, 0, 2, true, true},
                           {13, "Q5_K", "int8_w8a16:g32", 256, 176, 0, 2, true, true},
                           {14, "Q6_K", "int8_w8a16:g16", 256, 210, 208, -1, false, true},
                           {16, "IQ2_XXS", "int8_w8a16:g32", 256, 66, 0, -1, false, true},
                           {17, "IQ2_XS", "int8_w8a16:g16", 256, 74, 0, -1, false, true},
                           {18, "IQ3_XXS", "int8_w8a16:g32", 256, 98, 0, -1, false, true},
                           {19, "IQ1_S", "int4_w4a16:g32", 256, 50, 0, -1, true, true},
                           {20, "IQ4_NL", "int8_w8a16:g32", 32, 18, 0, -1, false, true},
                           {21, "IQ3_S", "int4_w4a16:g32", 256, 110, 0, -1, true, true},
                           {22, "IQ2_S", "int8_w8a16:g16", 256, 82, 0, -1, false, true},
                           {23, "IQ4_XS", "int8_w8a16:g32", 256, 136, 0, -1, false, true},
                           {29, "IQ1_M", "int8_w8a16:g16", 256, 56, 48, -1, false, true},
                           {34, "TQ1_0", "int4_w4a16:g32", 256, 54, 52, -1, false, true},
                           {35, "TQ2_0", "int4_w4a16:g32", 256, 66, 64, -1, false, true},
                           {41, "Q1_0", "int4_w4a16:g32", 128, 18, 0, -1, false, true}};

/// K types and IQ4_XS.
bool HasTwoLevels(const Type& type) {
  return (type.id >= 10 && type.id <= 14) || type.id == 23;
}

/// Of the IQ types whose panels hold indices.
double BookBits(const Type& type) {
  switch (type.id) {
    case 20:  // IQ4_NL
      return 4.5;
    case 16:  // IQ2_XXS, IQ3_XXS, IQ3_S, IQ4_XS
    case 18:
    case 21:
    case 23:
      return 4.375;
    case 17:  // IQ2_XS, IQ2_S, IQ1_M
    case 22:
    case 29:
      return 4.625;
    default:
      return 0;
  }
}

void PutHalf(std::string& block, int64_t at, uint16_t half) {
  block.replace(static_cast<size_t>(at), 2, Raw(half));
}

/// IQ1_M has its scale in the upper nibbles of four words.
void PutScale(std::string& block, const Type& type, uint16_t half) {
  if (std::string_view(type.name) != "IQ1_M") {
    PutHalf(block, type.scale_at, half);
    return;
  }
  for (int64_t word = 0; word < 4; ++word) {
    char& byte = block[static_cast<size_t>(type.scale_at + 2 * word + 1)];
    byte = static_cast<char>((byte & 15) | (half >> (4 * word) & 15) << 4);
  }
}

/// Random bytes below scales of 2^-8 to 2^-5 and minima of 2^-9 to 2^-6, of either sign; every eighth scale
/// is zero.
RawGguf::Tensor RandomStack(const std::string& name, std::vector<uint64_t> dims, const Type& type,
                            uint32_t seed) {
  std::mt19937 random(seed);
  uint64_t blocks = 1;
  for (const uint64_t dim : dims) {
    blocks *= dim;
  }
  blocks /= static_cast<uint64_t>(type.elements);
  RawGguf::Tensor tensor{name, std::move(dims), type.id, "", 0};
  for (uint64_t i = 0; i < blocks; ++i) {
    std::string block(static_cast<size_t>(type.bytes), '\0');
    for (char& byte : block) {
      byte = static_cast<char>(random());
    }
    const auto half = [&](uint32_t exponent) {
      return static_cast<uint16_t>((random() & 1U) << 15 | exponent << 10 | (random() & 0x3ffU));
    };
    PutScale(block, type, i % 8 == 7 ? uint16_t{0} : half(7 + random() % 3));
    if (type.minimum_at >= 0) {
      PutHalf(block, type.minimum_at, half(6 + random() % 3));
    }
    tensor.bytes += block;
  }
  return tensor;
}

RawGguf ModelOf(const Type& inputs, const Type& down) {
  RawGguf model = Model(kTypeF32);
  for (auto& [key, bytes] : model.values) {
    if (key.ends_with("embedding_length")) {
      bytes = Raw(kUint32) + Raw<uint32_t>(kHidden);
    } else if (key.ends_with("expert_feed_forward_length")) {
      bytes = Raw(kUint32) + Raw<uint32_t>(kInner);
    }
  }
  model.tensors = {Stack("blk.0.ffn_gate_inp.weight", {kHidden, kExperts}, kTypeF32),
                   RandomStack("blk.0.ffn_gate_exps.weight", {kHidden, kInner, kExperts}, inputs, 1),
                   RandomStack("blk.0.ffn_up_exps.weight", {kHidden, kInner, kExperts}, inputs, 2),
                   RandomStack("blk.0.ffn_down_exps.weight", {kInner, kHidden, kExperts}, down, 3)};
  return model;
}

struct Loaded {
  Scheme scheme;
  CanonicalExpert expert;
};

Loaded Load(const std::string& path, bool decode) {
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

/// Codes, scales and zero points against the decoded values. Without zero points the product of code and
/// scale is rounded once, as decoding rounds it. With them, `code - zero`, the product, the zero point
/// itself, and of the decoded value product and difference are rounded: five steps of at most 2^-24 of |code
/// * scale| + |minimum|, where the minimum is zero * scale.
void ExpectSameValues(const CanonicalMatrix& integers, const CanonicalMatrix& decoded) {
  ASSERT_EQ(decoded.format.element, DType::kF32);
  const auto values = DequantizeMatrix(integers);
  ASSERT_TRUE(values.ok()) << values.status().ToString();
  const auto* found = values->view().as<float>();
  const auto* wanted = decoded.codes.view().as<float>();
  const int64_t group = integers.format.block.col;
  double largest = 0.0;
  for (int64_t i = 0; i < integers.rows * integers.cols; ++i) {
    double bound = 0.0;
    if (!integers.zero_point.empty()) {
      const int64_t at = i / group;  // groups divide rows
      const double scale = std::fabs(integers.block_scale.view().as<float>()[at]);
      const double zero = std::fabs(integers.zero_point.view().as<float>()[at]);
      bound = 5 * std::ldexp(scale * (zero + 255.0), -24);
    }
    ASSERT_LE(std::fabs(double{found[i]} - double{wanted[i]}), bound) << "element " << i;
    largest = std::max(largest, std::fabs(double{wanted[i]}));
  }
  EXPECT_GT(largest, 0.0);
}

// The values of the gguf package's own decoder, bit for bit.
TEST(GgufBlocks, DecodeAsThePackageDoes) {
  const auto file = ReadSafetensors(FMOE_GOLDEN_DIR "/gguf/blocks.safetensors");
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  for (const Type& type : kTypes) {
    if (std::string_view(type.name) == "Q1_0") {  // which that decoder lacks
      continue;
    }
    SCOPED_TRACE(type.name);
    const checkpoint::BlockType* found = checkpoint::FindBlockType(type.id);
    ASSERT_TRUE(found != nullptr);
    const checkpoint::BlockType& decoded = checkpoint::DecodedType(*found);
    ASSERT_EQ(decoded.parts.size(), 1U);
    ASSERT_EQ(decoded.parts[0].dtype, DType::kF32);
    const Tensor* blocks = file->Find(std::string(type.name) + ".blocks");
    const Tensor* values = file->Find(std::string(type.name) + ".values");
    ASSERT_TRUE(blocks != nullptr && values != nullptr);
    ASSERT_EQ(blocks->dim(1), decoded.bytes);
    ASSERT_EQ(values->dim(1), decoded.elements);
    std::vector<float> ours(static_cast<size_t>(values->shape().count()));
    decoded.parts[0].decode(blocks->view().data(), blocks->dim(0), reinterpret_cast<std::byte*>(ours.data()));
    for (size_t i = 0; i < ours.size(); ++i) {
      ASSERT_EQ(ours[i], values->view().as<float>()[i]) << "element " << i;
    }
  }
}

TEST(GgufBlocks, Q1_0_IsAScaleAndSigns) {
  const checkpoint::BlockType& decoded = checkpoint::DecodedType(*checkpoint::FindBlockType(41));
  std::string block = Raw<uint16_t>(0x4100) + std::string("\x05\x00\x80", 3) + std::string(13, '\0');  // 2.5
  ASSERT_EQ(static_cast<int64_t>(block.size()), decoded.bytes);
  float values[128];
  decoded.parts[0].decode(reinterpret_cast<const std::byte*>(block.data()), 1,
                          reinterpret_cast<std::byte*>(values));
  for (int i = 0; i < 128; ++i) {
    EXPECT_EQ(values[i], i == 0 || i == 2 || i == 23 ? 2.5F : -2.5F) << "element " << i;
  }
}

/// In the panels of CPUs scales of two levels are the integers and units of the file, and minima too:
/// products and differences are those of decoding, bit by bit. So are numbers of a codebook times the power
/// of two that their matrix has.
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
  const bool tiles =
      format.group == 32 && integers.zero_point.empty() && format.codebook == Codebook::kNone;  // take floats
  EXPECT_EQ(format.scale, tiles ? PanelScale::kF32 : PanelScale::kI8);
  ExpectPanels(integers, decoded);
}

class GgufIntegers : public testing::TestWithParam<Type> {};

INSTANTIATE_TEST_SUITE_P(Types, GgufIntegers, testing::ValuesIn(kTypes),
                         [](const auto& param) { return std::string(param.param.name); });

TEST_P(GgufIntegers, CodesBelowScales_MeanTheDecodedValues) {
  const Type& type = GetParam();
  const TemporaryDirectory folder;
  const std::string path = (folder.path() / "a.gguf").string();
  folder.Write("a.gguf", ModelOf(type, type).Bytes());
  const Loaded integers = Load(path, false), decoded = Load(path, true);
  EXPECT_EQ(integers.scheme.name, type.scheme);
  EXPECT_EQ(decoded.scheme.name, type.decoded ? "unquantized" : type.scheme);
  for (const auto matrix : {&CanonicalExpert::gate, &CanonicalExpert::up, &CanonicalExpert::down}) {
    EXPECT_EQ((integers.expert.*matrix).zero_point.empty(), !type.zeros);
    if (type.decoded) {
      ExpectSameValues(integers.expert.*matrix, decoded.expert.*matrix);
    }
    EXPECT_EQ((integers.expert.*matrix).format.super_cols, HasTwoLevels(type) ? 256 : 0);
    if (HasTwoLevels(type)) {
      ExpectPanelsOfTwoLevels(integers.expert.*matrix, decoded.expert.*matrix);
    }
  }
}

// Shares of ranks: halves of super-blocks while these go round, then less. They hold what the whole matrix
// holds there, in as many columns of panels as a plan expects.
TEST_P(GgufIntegers, SharesOfRanks_HoldTheSameValues) {
  const Type& type = GetParam();
  if (!HasTwoLevels(type)) {
    return;
  }
  const TemporaryDirectory folder;
  folder.Write("a.gguf", ModelOf(type, type).Bytes());
  CheckpointOptions options;
  const auto checkpoint = Checkpoint::Open((folder.path() / "a.gguf").string(), options);
  ASSERT_TRUE(checkpoint.ok());
  options.decode_blocks = true;
  const auto floats = Checkpoint::Open((folder.path() / "a.gguf").string(), options);
  ASSERT_TRUE(floats.ok());
  const CanonicalExpert whole = *(*floats)->Experts(0)->load(1);
  for (const int ranks : {2, 3, 5, 16}) {
    int64_t begin = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      ParallelConfig parallel;
      parallel.tp_size = ranks;
      parallel.tp_rank = rank;
      const auto experts = (*checkpoint)->Experts(0, parallel);
      ASSERT_TRUE(experts.ok()) << experts.status().ToString();
      const auto expert = experts->load(1);
      ASSERT_TRUE(expert.ok()) << expert.status().ToString();
      const int64_t share = expert->down.cols;
      ASSERT_TRUE(ValidateCanonical(expert->down).ok()) << ValidateCanonical(expert->down).ToString();
      ExpectPanelsOfTwoLevels(expert->up, *SliceMatrix(whole.up, begin, share, 0, kHidden));
      ExpectPanelsOfTwoLevels(expert->down, *SliceMatrix(whole.down, 0, kHidden, begin, share));
      begin += share;
    }
    EXPECT_EQ(begin, kInner);
  }
}

// Q4_K_M has Q4_K for gate and up and, in half of the layers, Q6_K for down.
TEST_P(GgufIntegers, BesideOthers_BecomeBytesInTheShortestGroups) {
  const Type& type = GetParam();
  for (const Type& down : kTypes) {
    if (down.id == type.id) {
      continue;
    }
    SCOPED_TRACE(down.name);
    const TemporaryDirectory folder;
    const std::string path = (folder.path() / "a.gguf").string();
    folder.Write("a.gguf", ModelOf(type, down).Bytes());
    const Loaded integers = Load(path, false), decoded = Load(path, true);
    const auto has16 = [](const Type& one) { return std::string_view(one.scheme).ends_with("g16"); };
    EXPECT_EQ(integers.scheme.name, has16(type) || has16(down) ? "int8_w8a16:g16" : "int8_w8a16:g32");
    EXPECT_EQ(decoded.scheme.name, "unquantized");
    const bool zeros = type.zeros || down.zeros;
    for (const auto matrix : {&CanonicalExpert::gate, &CanonicalExpert::up, &CanonicalExpert::down}) {
      EXPECT_EQ((integers.expert.*matrix).zero_point.empty(), !zeros);
      EXPECT_EQ((integers.expert.*matrix).format.super_cols,
                HasTwoLevels(type) && HasTwoLevels(down) ? 256 : 0);
      ExpectSameValues(integers.expert.*matrix, decoded.expert.*matrix);
    }
  }
}

/// The tensors of two matrices, byte by byte.
void ExpectSameMatrix(const CanonicalMatrix& found, const CanonicalMatrix& wanted) {
  EXPECT_EQ(Describe(found.format), Describe(wanted.format));
  EXPECT_EQ(*ChoosePanelFormat(found.format, !found.zero_point.empty()),
            *ChoosePanelFormat(wanted.format, !wanted.zero_point.empty()));
  for (const auto tensor :
       {&CanonicalMatrix::codes, &CanonicalMatrix::block_scale, &CanonicalMatrix::zero_point,
        &CanonicalMatrix::super_scale, &CanonicalMatrix::super_minimum}) {
    const TensorView &own = (found.*tensor).view(), &other = (wanted.*tensor).view();
    ASSERT_EQ(own.empty(), other.empty());
    if (own.empty()) {
      continue;
    }
    ASSERT_EQ(own.shape(), other.shape());
    ASSERT_EQ(own.dtype(), other.dtype());
    EXPECT_EQ(std::memcmp(own.data(), other.data(), static_cast<size_t>(own.total_bytes())), 0);
  }
}

// From the bytes of a layer of several types back to what each of them is alone.
TEST_P(GgufIntegers, BesideOthers_NarrowToWhatTheyAreAlone) {
  const Type& type = GetParam();
  const TemporaryDirectory folder;
  folder.Write("a.gguf", ModelOf(type, type).Bytes());
  const CanonicalExpert own = Load((folder.path() / "a.gguf").string(), false).expert;
  EXPECT_EQ(own.up.stored.bits, BookBits(type) > 0 ? 4 : 0);
  const Result<CanonicalMatrix> alone = BookBits(type) > 0 ? Narrow(own.up) : own.up;
  ASSERT_TRUE(alone.ok()) << alone.status().ToString();
  for (const Type& down : kTypes) {
    if (down.id == type.id) {
      continue;
    }
    SCOPED_TRACE(down.name);
    folder.Write("b.gguf", ModelOf(type, down).Bytes());
    const CanonicalExpert mixed = Load((folder.path() / "b.gguf").string(), false).expert;
    ASSERT_GT(mixed.up.stored.bits, 0);
    const Result<CanonicalMatrix> narrow = Narrow(mixed.up);
    ASSERT_TRUE(narrow.ok()) << narrow.status().ToString();
    ExpectSameMatrix(*narrow, *alone);
  }
}

/// Of a file, what the CPU backend would compute.
MoeProblem ProblemOf(const Checkpoint& checkpoint, const ParallelConfig& parallel = {}) {
  const ExpertSource source = *checkpoint.Experts(0, parallel);
  const MoeConfig config = *PerRank(checkpoint.Describe(0)->config, parallel, source.scheme);
  LayerOptions options;
  options.mode = "latency";  // tiles of AMX take one format for both GEMMs
  options.max_tokens = 8;
  Result<MoeProblem> problem = MakeProblem(config, source, options);
  EXPECT_TRUE(problem.ok()) << problem.status().ToString();
  return *std::move(problem);
}

// The panels of such a layer are those of two layers of one type each; outputs are those of the reference.
TEST(GgufIntegers, TypesOfEachGemm_HavePanelsOfTheirOwn) {
  const auto type = [](uint32_t id) {
    return *std::find_if(std::begin(kTypes), std::end(kTypes), [&](const Type& one) { return one.id == id; });
  };
  const TemporaryDirectory folder;
  const auto open = [&](const Type& inputs, const Type& down) {
    const std::string name = fmt::format("{}-{}.gguf", inputs.name, down.name);
    folder.Write(name, ModelOf(inputs, down).Bytes());
    return *Checkpoint::Open((folder.path() / name).string(), CheckpointOptions());
  };
  for (const auto& [inputs, outputs, bits] : {std::tuple(12U, 14U, 2 * 4.75 + 8.625),  // Q4_K_M
                                              std::tuple(12U, 6U, 2 * 4.75 + 8.5),     // rows of 1408
                                              std::tuple(2U, 8U, 2 * 4.5 + 8.5)}) {
    SCOPED_TRACE(fmt::format("{} and {}", inputs, outputs));
    const auto prepare = [&](const Checkpoint& checkpoint) {
      const cpu::CpuPlan plan = cpu::MakeCpuPlan(ProblemOf(checkpoint), HostMachine());
      Result<PreparedWeights> weights = cpu::PrepareCpuWeights(plan, *checkpoint.Experts(0), {});
      EXPECT_TRUE(weights.ok()) << weights.status().ToString();
      return *std::move(weights);
    };
    const auto mixed = open(type(inputs), type(outputs));
    const PreparedWeights both = prepare(*mixed);
    const PreparedWeights first = prepare(*open(type(inputs), type(inputs)));
    const PreparedWeights second = prepare(*open(type(outputs), type(outputs)));
    EXPECT_NE(both.layout_key, first.layout_key);
    double bytes = 0;
    for (const auto& [name, alone] : {std::pair("gate_up", &first), std::pair("down", &second)}) {
      const TensorView& found = both.Find(name)->view();
      bytes += static_cast<double>(found.total_bytes());
      const TensorView& wanted = alone->Find(name)->view();
      ASSERT_EQ(found.shape(), wanted.shape());
      EXPECT_EQ(std::memcmp(found.data(), wanted.data(), static_cast<size_t>(found.total_bytes())), 0);
    }
    EXPECT_EQ(bytes * 8 / static_cast<double>(kExperts * kHidden * kInner), bits);

    constexpr int64_t kTokens = 5;
    std::mt19937 random(7);
    std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
    Tensor hidden = *Tensor::Allocate(DType::kF32, Shape{kTokens, kHidden});
    std::generate_n(hidden.mutable_view().as<float>(), kTokens * kHidden, [&] { return uniform(random); });
    std::vector<std::vector<float>> outputs_of;
    for (const char* backend : {"REFERENCE", "CPU_FUSED"}) {
      LayerOptions options;
      options.backend = backend;
      options.max_tokens = kTokens;
      const auto layer = MoeLayer::Load(mixed, 0, options);
      ASSERT_TRUE(layer.ok()) << layer.status().ToString();
      auto workspace = (*layer)->CreateWorkspace();
      ASSERT_TRUE(workspace.ok());
      Tensor logits = *Tensor::Allocate(DType::kF32, Shape{kTokens, kExperts});
      Tensor output = *Tensor::Allocate(DType::kF32, Shape{kTokens, kHidden});
      const Status status =
          (*layer)->Forward(hidden.view(), logits.view(), output.mutable_view(), *workspace);
      ASSERT_TRUE(status.ok()) << status.ToString();
      const auto* values = output.view().as<float>();
      outputs_of.emplace_back(values, values + kTokens * kHidden);
    }
    double error = 0, size = 0;
    for (size_t i = 0; i < outputs_of[0].size(); ++i) {
      error += std::pow(outputs_of[1][i] - outputs_of[0][i], 2);
      size += std::pow(outputs_of[0][i], 2);
    }
    // Rows are held in 15 bits of the largest of 64 values: 2^-15 of it, 2^-13 of a value in the mean, in
    // both GEMMs; twice that for what cancels.
    EXPECT_GT(size, 0);
    EXPECT_LT(std::sqrt(error / size), 0x1p-11);
  }
}

/// The CPU backend and the reference, in floats of a model.
std::vector<float> OutputOf(const std::shared_ptr<const Checkpoint>& checkpoint, const char* backend,
                            const std::string& isa) {
  constexpr int64_t kTokens = 5;
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
  Tensor hidden = *Tensor::Allocate(DType::kF32, Shape{kTokens, kHidden});
  std::generate_n(hidden.mutable_view().as<float>(), kTokens * kHidden, [&] { return uniform(random); });
  LayerOptions options;
  options.backend = backend;
  options.isa = isa;
  options.max_tokens = kTokens;
  const auto layer = MoeLayer::Load(checkpoint, 0, options);
  EXPECT_TRUE(layer.ok()) << layer.status().ToString();
  auto workspace = (*layer)->CreateWorkspace();
  Tensor logits = *Tensor::Allocate(DType::kF32, Shape{kTokens, kExperts});
  std::fill_n(logits.mutable_view().as<float>(), kTokens * kExperts, 0.0F);
  Tensor output = *Tensor::Allocate(DType::kF32, Shape{kTokens, kHidden});
  const Status status = (*layer)->Forward(hidden.view(), logits.view(), output.mutable_view(), *workspace);
  EXPECT_TRUE(status.ok()) << status.ToString();
  const auto* values = output.view().as<float>();
  return {values, values + kTokens * kHidden};
}

// Types of few values: nibbles in panels, the values of the file, outputs of the reference at every level.
TEST_P(GgufIntegers, OfFewValues_TakeIndices) {
  const Type& type = GetParam();
  const TemporaryDirectory folder;
  const std::string path = (folder.path() / "a.gguf").string();
  folder.Write("a.gguf", ModelOf(type, type).Bytes());
  const auto checkpoint = *Checkpoint::Open(path);
  const MoeProblem problem = ProblemOf(*checkpoint);
  const cpu::CpuPlan plan = cpu::MakeCpuPlan(problem, HostMachine());
  const double bits = BookBits(type);
  EXPECT_EQ(plan.gate_up.panel.codebook == Codebook::kNone, bits == 0);
  if (bits == 0) {
    return;
  }
  EXPECT_EQ(static_cast<double>(plan.gate_up.panel.block_bytes()) * 8 /
                static_cast<double>(kPanelRows * plan.gate_up.panel.block),
            bits);
  const CanonicalExpert expert = Load(path, false).expert, decoded = Load(path, true).expert;
  const PreparedWeights prepared = *cpu::PrepareCpuWeights(plan, *checkpoint->Experts(0), {});
  EXPECT_EQ(prepared.layout_key.find("U8"), std::string::npos) << prepared.layout_key;
  for (const auto matrix : {&CanonicalExpert::gate, &CanonicalExpert::up, &CanonicalExpert::down}) {
    const Result<CanonicalMatrix> narrow = Narrow(expert.*matrix);
    ASSERT_TRUE(narrow.ok()) << narrow.status().ToString();
    EXPECT_NE(ValidateCanonical(*narrow).message().find("indices"), std::string::npos);
    ExpectPanels(*narrow, decoded.*matrix);
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
  const int64_t row_bytes = down.cols / 2;
  std::vector<std::byte> codes(static_cast<size_t>(down.rows * row_bytes));
  UnpackPanelCodes(down.format, plan.down.panel, columns, stripes.data(), down.rows, codes.data(), row_bytes);
  EXPECT_EQ(std::memcmp(codes.data(), down.codes.view().data(), codes.size()), 0);

  const std::vector<float> wanted = OutputOf(checkpoint, "REFERENCE", "");
  for (const Isa isa : cpu::BuiltIsas()) {
    if (!HostMachine().Has(isa)) {
      continue;
    }
    const std::vector<float> found = OutputOf(checkpoint, "CPU_FUSED", std::string(IsaName(isa)));
    double error = 0, size = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      error += std::pow(found[i] - wanted[i], 2);
      size += std::pow(wanted[i], 2);
    }
    EXPECT_GT(size, 0);
    EXPECT_LT(std::sqrt(error / size), 0x1p-11) << IsaName(isa);  // 15 bits, as of TypesOfEachGemm
  }
}

#if defined(__x86_64__)
// Also where tiles of AMX take them.
TEST(GgufIntegers, OfFewValues_TakeIndicesForTiles) {
  const TemporaryDirectory folder;
  folder.Write("a.gguf", ModelOf(kTypes[17], kTypes[17]).Bytes());  // IQ4_XS
  MoeProblem problem = ProblemOf(**Checkpoint::Open((folder.path() / "a.gguf").string()));
  problem.isa = "amx";
  EXPECT_EQ(cpu::MakeCpuPlan(problem, HostMachine()).gate_up.panel.codebook, Codebook::kIq4);
  problem.mode = "throughput";
  const cpu::CpuPlan plan = cpu::MakeCpuPlan(problem, HostMachine());
  ASSERT_TRUE(plan.tiles.enabled);
  EXPECT_EQ(plan.gate_up.panel.codebook, Codebook::kIq4);
}
#endif

/// Shares of down, as ranks have them, for gate and up of `inputs`: `check(share, narrow, wanted)`, of the
/// values that the same columns of the whole matrix have. The plan of each has room for the panels of its
/// share.
template <typename Check>
void ForShares(const Type& inputs, const Type& down, const Check& check) {
  const TemporaryDirectory folder;
  folder.Write("a.gguf", ModelOf(inputs, down).Bytes());
  CheckpointOptions options;
  const auto checkpoint = *Checkpoint::Open((folder.path() / "a.gguf").string(), options);
  options.decode_blocks = true;
  const auto floats = *Checkpoint::Open((folder.path() / "a.gguf").string(), options);
  const CanonicalExpert whole = *(*floats).Experts(0)->load(1);
  for (const int ranks : {2, 3, 5, 16}) {
    int64_t begin = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      SCOPED_TRACE(fmt::format("{} and {}, rank {} of {}", inputs.name, down.name, rank, ranks));
      ParallelConfig parallel;
      parallel.tp_size = ranks;
      parallel.tp_rank = rank;
      const auto expert = checkpoint->Experts(0, parallel)->load(1);
      ASSERT_TRUE(expert.ok()) << expert.status().ToString();
      const Result<CanonicalMatrix> narrow = Narrow(expert->down);
      ASSERT_TRUE(narrow.ok()) << narrow.status().ToString();
      const cpu::CpuPlan plan = cpu::MakeCpuPlan(ProblemOf(*checkpoint, parallel), HostMachine());
      ASSERT_EQ(plan.down.panel, *ChoosePanelFormat(narrow->format, !narrow->zero_point.empty()));
      EXPECT_LE(static_cast<int64_t>(PanelColumns(*narrow, plan.down.panel).size()), plan.down.padded_cols);
      check(expert->down, *narrow, *SliceMatrix(whole.down, 0, kHidden, begin, narrow->cols));
      begin += narrow->cols;
    }
    EXPECT_EQ(begin, kInner);
  }
}

// Alone, and down of such a type beside others: shares of ranks have the values of the whole matrix.
TEST_P(GgufIntegers, OfFewValues_SharesOfRanksHoldTheSame) {
  const Type& type = GetParam();
  if (BookBits(type) == 0) {
    return;
  }
  for (const Type* inputs : {&type, &kTypes[7], &kTypes[9]}) {
    ForShares(*inputs, type,
              [](const CanonicalMatrix& /*share*/, const CanonicalMatrix& narrow,
                 const CanonicalMatrix& wanted) { ExpectPanels(narrow, wanted); });
  }
}

// Shares of ranks know the groups of the layer; those of a type may be longer.
TEST(GgufIntegers, SharesOfRanksBesideOthers_NarrowToTheSameValues) {
  for (const auto& [inputs, down] : {std::pair(9, 7), std::pair(7, 9), std::pair(4, 7), std::pair(6, 1)}) {
    ForShares(kTypes[inputs], kTypes[down],
              [](const CanonicalMatrix& share, const CanonicalMatrix& narrow, const CanonicalMatrix& wanted) {
                const Status valid = ValidateCanonical(narrow);
                ASSERT_TRUE(valid.ok()) << valid.ToString();
                const auto found = DequantizeMatrix(narrow), same = DequantizeMatrix(share);
                ASSERT_TRUE(found.ok() && same.ok());
                // Codes less zero points are the same numbers, but where the zero point has left.
                EXPECT_EQ(std::memcmp(found->view().data(), same->view().data(),
                                      static_cast<size_t>(found->view().total_bytes())),
                          0);
                const PanelFormat panel = *ChoosePanelFormat(narrow.format, !narrow.zero_point.empty());
                if (panel.scale == PanelScale::kI8) {
                  ExpectPanelsOfTwoLevels(narrow, wanted);
                }
              });
  }
}

// A matrix that is not what it says is refused, and the message says where.
TEST(GgufIntegers, MatricesThatAreNotOfTheirType_AreRefused) {
  const TemporaryDirectory folder;
  folder.Write("a.gguf", ModelOf(kTypes[7], kTypes[9]).Bytes());  // Q4_K, Q6_K
  const CanonicalExpert expert = Load((folder.path() / "a.gguf").string(), false).expert;
  const auto refused = [](CanonicalMatrix matrix, auto change, const char* what) {
    for (Tensor* tensor : {&matrix.codes, &matrix.block_scale, &matrix.zero_point}) {
      Tensor copy = *Tensor::Allocate(tensor->dtype(), tensor->shape());
      std::memcpy(copy.mutable_view().data(), tensor->view().data(),
                  static_cast<size_t>(tensor->view().total_bytes()));
      *tensor = std::move(copy);
    }
    ASSERT_TRUE(Narrow(matrix).ok());
    change(matrix);
    const Result<CanonicalMatrix> narrow = Narrow(matrix);
    ASSERT_FALSE(narrow.ok());
    EXPECT_NE(narrow.status().message().find(what), std::string::npos) << narrow.status().message();
  };
  refused(
      expert.up, [](CanonicalMatrix& m) { m.codes.mutable_view().data()[2 * kHidden] = std::byte{16}; },
      "row 2 has codes from 0 to 16; 0 to 15");
  refused(
      expert.up, [](CanonicalMatrix& m) { m.block_scale.mutable_view().as<float>()[5] += 1.0F; },
      "scales of row 0 differ in groups 4 and 5");
  refused(
      expert.up, [](CanonicalMatrix& m) { m.zero_point.mutable_view().as<float>()[5] += 1.0F; },
      "zero points of row 0 differ in groups 4 and 5");
  refused(
      expert.down, [](CanonicalMatrix& m) { m.zero_point.mutable_view().as<float>()[5] += 1.0F; },
      "zero_point of row 0, group 5, is 33; 32 is that");
  refused(
      expert.up, [](CanonicalMatrix& m) { m.stored = {}; }, "do not hold 0 bits");
  folder.Write("b.gguf", ModelOf(kTypes[17], kTypes[15]).Bytes());  // IQ4_XS, IQ3_S
  const CanonicalExpert few = Load((folder.path() / "b.gguf").string(), false).expert;
  refused(
      few.up, [](CanonicalMatrix& m) { m.codes.mutable_view().data()[2 * kHidden + 1] = std::byte{130}; },
      "row 2, column 1 has the code 130, whose value is none of IQ4");
  refused(
      few.down, [](CanonicalMatrix& m) { m.codes.mutable_view().data()[3 * kInner] = std::byte{16}; },
      "row 3, column 0 has the code 16, whose value is none of IQ3_S");
  refused(
      few.down, [](CanonicalMatrix& m) { m.zero_point.mutable_view().as<float>()[5] = 7.0F; },
      "zero_point of row 0, group 5, is 7; 7.5 is that");
  refused(
      few.down, [](CanonicalMatrix& m) { m.block_scale.mutable_view().as<float>()[5] *= 1.25F; },
      "does not divide its scales");
}

// The gate of shared experts and Arctic's norm are floats beside matrices of any type.
TEST(GgufIntegers, FloatsBesideExperts_LeaveThemTheirCodes) {
  const Type& q4_k = kTypes[7];
  RawGguf model = ModelOf(q4_k, q4_k);
  for (auto& [key, bytes] : model.values) {
    if (key == "general.architecture") {
      bytes = Raw(kText) + Text("qwen2moe");
    } else if (key.starts_with("qwen3moe.")) {
      key = "qwen2moe." + key.substr(9);
    }
  }
  model.tensors.push_back(Stack("blk.0.ffn_norm_exps.weight", {kHidden}, kTypeF32));
  model.tensors.push_back(Stack("blk.0.ffn_gate_inp_shexp.weight", {kHidden}, kTypeF32));
  model.tensors.push_back(RandomStack("blk.0.ffn_gate_shexp.weight", {kHidden, kInner}, q4_k, 4));
  model.tensors.push_back(RandomStack("blk.0.ffn_up_shexp.weight", {kHidden, kInner}, q4_k, 5));
  model.tensors.push_back(RandomStack("blk.0.ffn_down_shexp.weight", {kInner, kHidden}, q4_k, 6));
  const TemporaryDirectory folder;
  folder.Write("a.gguf", model.Bytes());
  const auto checkpoint = Checkpoint::Open((folder.path() / "a.gguf").string());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  EXPECT_EQ((*checkpoint)->Experts(0)->scheme.name, q4_k.scheme);
  const auto shared = (*checkpoint)->SharedExperts(0);
  ASSERT_TRUE(shared.ok()) << shared.status().ToString();
  ASSERT_TRUE(shared->has_value());
  EXPECT_EQ((*shared)->source.scheme.name, q4_k.scheme);
  EXPECT_FALSE((*shared)->gate.empty());
}

// What is multiplied in floats is listed as floats, whatever its type.
TEST(GgufIntegers, RoutersOfSuchTypes_AreDecoded) {
  for (const Type& type : kTypes) {
    if (!type.decoded) {
      continue;
    }
    RawGguf model = ModelOf(kTypes[7], kTypes[7]);
    model.Find("blk.0.ffn_gate_inp.weight") =
        RandomStack("blk.0.ffn_gate_inp.weight", {kHidden, kExperts}, type, 9);
    const TemporaryDirectory folder;
    folder.Write("a.gguf", model.Bytes());
    const auto checkpoint = Checkpoint::Open((folder.path() / "a.gguf").string());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
    const auto router = (*checkpoint)->LoadRouter(0);
    ASSERT_TRUE(router.ok()) << type.name << router.status().ToString();
    EXPECT_EQ(router->weight.dtype(), DType::kF32) << type.name;
    EXPECT_EQ(router->weight.shape(), (Shape{kExperts, kHidden})) << type.name;
  }
}

// A group of one value: its scale is zero and its minimum is not.
TEST(GgufIntegers, GroupsOfOneValue_KeepIt) {
  const Type& q4_k = kTypes[7];
  RawGguf model = ModelOf(q4_k, q4_k);
  RawGguf::Tensor& up = model.Find("blk.0.ffn_up_exps.weight");
  for (size_t at = 0; at < up.bytes.size(); at += static_cast<size_t>(q4_k.bytes)) {
    up.bytes.replace(at, 4, Raw<uint16_t>(0) + Raw<uint16_t>(0x1c01));  // 0 and 2^-8 (1 + 2^-10)
    up.bytes.replace(at + 4, 12, 12, '\x03');                           // steps and minima of three
  }
  const TemporaryDirectory folder;
  folder.Write("a.gguf", model.Bytes());
  const Loaded integers = Load((folder.path() / "a.gguf").string(), false);
  const auto values = DequantizeMatrix(integers.expert.up);
  ASSERT_TRUE(values.ok()) << values.status().ToString();
  for (int64_t i = 0; i < 8 * kHidden; ++i) {
    const float wanted = i % 256 < 128 ? -3.0F * 0x1.004p-8F : 0.0F;  // the last four minima are zero
    ASSERT_EQ(values->view().as<float>()[i], wanted) << i;
  }
}

TEST(GgufIntegers, ScalesAndMinimaThatAreNotFinite_AreRefused) {
  const Type& q4_k = kTypes[7];
  for (const int64_t at : {0, 2}) {
    for (const uint16_t half : {uint16_t{0x7c00}, uint16_t{0xfe00}}) {
      RawGguf model = ModelOf(q4_k, q4_k);
      RawGguf::Tensor& down = model.Find("blk.0.ffn_down_exps.weight");
      down.bytes.replace(static_cast<size_t>(at), 2, Raw(half));
      down.bytes.replace(4, 12, 12, '\x03');
      const Status status = LoadEverything(model);
      EXPECT_EQ(status.code(), StatusCode::kBadInput) << at << " " << half << status.ToString();
      EXPECT_EQ(status.tensor(),
                at == 0 ? "blk.0.ffn_down_exps.weight_scale" : "blk.0.ffn_down_exps.weight_zero");
    }
  }
}

}  // namespace
}  // namespace fusedmoe
