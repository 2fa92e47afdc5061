#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/parallel.hpp>

#include "checkpoint/raw_checkpoint.hpp"
#include "checkpoint/raw_gguf.hpp"
#include "moe/backend.hpp"

/// GGUF files whose experts have any of the types of integers, what is loaded from them, and what a CPU makes
/// of it.
namespace fusedmoe::testing_support {

inline constexpr int64_t kGgufHidden = 512, kGgufInner = 256, kGgufExperts = 2;

struct GgufType {
  uint32_t id;
  const char* name;
  const char* scheme;
  int64_t elements, bytes;
  int64_t scale_at;    // of the F16 scale in a block
  int64_t minimum_at;  // of the F16 minimum; -1: none
  bool zeros;          // listed with zero points
  bool decoded;        // for writers
};

inline constexpr GgufType kGgufTypes[] = {{2, "Q4_0", "int4_w4a16:g32", 32, 18, 0, -1, false, false},
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
                                          {41, "Q1_0", "int4_w4a16:g32", 128, 18, 0, -1, false, true},
                                          {42, "Q2_0", "int4_w4a16:g32", 64, 18, 0, -1, false, true}};

const GgufType& TypeNamed(std::string_view name);
/// K types and IQ4_XS.
bool HasTwoLevels(const GgufType& type);
/// Bits a weight in panels, of types whose codes are narrower there than in the matrix: indices of IQ types,
/// and codes of 2, 3, 5 and 6 bits. Else 0.
double NarrowBits(const GgufType& type);

/// Random bytes below scales of 2^-8 to 2^-5 and minima of 2^-9 to 2^-6, of either sign; every eighth scale
/// is zero.
RawGguf::Tensor RandomStack(const std::string& name, std::vector<uint64_t> dims, const GgufType& type,
                            uint32_t seed);

/// A layer of such tensors: gate and up of `inputs`, down of `down`.
RawGguf ModelOf(const GgufType& inputs, const GgufType& down);

struct LoadedExpert {
  Scheme scheme;
  CanonicalExpert expert;
};
/// Expert 1 of a file. `decode`: as CheckpointOptions::decode_blocks.
LoadedExpert LoadExpert(const std::string& path, bool decode);

/// Codes, scales and zero points against the decoded values. Without zero points the product of code and
/// scale is rounded once, as decoding rounds it. With them, `code - zero`, the product, the zero point
/// itself, and of the decoded value product and difference are rounded: five steps of at most 2^-24 of |code
/// * scale| + |minimum|, where the minimum is zero * scale.
void ExpectSameValues(const CanonicalMatrix& integers, const CanonicalMatrix& decoded);

/// In the panels of CPUs scales of two levels are the integers and units of the file, and minima too:
/// products and differences are those of decoding, bit by bit. So are numbers of a codebook times the power
/// of two that their matrix has.
void ExpectPanels(const CanonicalMatrix& integers, const CanonicalMatrix& decoded);
/// And that the panels have two levels.
void ExpectPanelsOfTwoLevels(const CanonicalMatrix& integers, const CanonicalMatrix& decoded);

/// Of a file, what the CPU backend would compute.
MoeProblem ProblemOf(const Checkpoint& checkpoint, const ParallelConfig& parallel = {});

/// Of a few seeded tokens, by a backend at a level ("": any).
std::vector<float> OutputOf(const std::shared_ptr<const Checkpoint>& checkpoint, const char* backend,
                            const std::string& isa = "");
/// Rows are held in 15 bits of the largest of 64 values: 2^-15 of it, 2^-13 of a value in the mean, in both
/// GEMMs; twice that for what cancels.
void ExpectOutput(const std::vector<float>& found, const std::vector<float>& wanted);

/// Cases of each type; suites derive from it.
class GgufOfType : public testing::TestWithParam<GgufType> {};
inline std::string NameOfType(const testing::TestParamInfo<GgufType>& param) {
  return param.param.name;
}

}  // namespace fusedmoe::testing_support
