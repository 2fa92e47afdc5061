#include "jobs/bench/random_weights.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "core/random_bits.hpp"
#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe::bench {
namespace {

constexpr int64_t kFewestScales = 61;  // rows of one scale each still differ

constexpr int64_t kUnits = int64_t{1} << 14;  // of a table of codes
constexpr int64_t kMostValues = 4;            // of a unit

/// Drawn once: they take as long as the bytes of a layer of a megabyte.
const std::vector<float>& NormalValues() {
  static const std::vector<float> kValues = [] {
    std::mt19937_64 random(7);
    std::normal_distribution<float> normal(0.0F, 1.0F);
    std::vector<float> values(static_cast<size_t>(kUnits * kMostValues));
    std::generate(values.begin(), values.end(), [&] { return normal(random); });
    return values;
  }();
  return kValues;
}

/// Codes of normal values, some to a unit of whole bytes, looked up by random bits: a byte of weights costs a
/// nanosecond, where quantizing it would cost ten.
class CodeTable {
 public:
  CodeTable(DType element, float deviation, float offset)
      : element_(element),
        unit_bytes_(DTypeBits(element) == 6 ? 3 : std::max(1, DTypeBits(element) / 8)),
        unit_values_(unit_bytes_ * 8 / DTypeBits(element)) {
    std::vector<float> values(static_cast<size_t>(kUnits * unit_values_));
    const auto normals = std::span(NormalValues()).first(values.size());
    std::transform(normals.begin(), normals.end(), values.begin(),
                   [&](float normal) { return normal * deviation + offset; });
    units_.resize(static_cast<size_t>(kUnits * unit_bytes_));
    EncodeRow(element, values.data(), static_cast<int64_t>(values.size()), units_.data());
  }

  /// One packed row; bits behind the last element stay zero.
  void Fill(uint64_t key, int64_t count, std::byte* row) const {
    switch (unit_bytes_) {
      case 1:
        return FillUnits<1>(key, count, row);
      case 2:
        return FillUnits<2>(key, count, row);
      case 3:
        return FillUnits<3>(key, count, row);
      default:
        return FillUnits<4>(key, count, row);
    }
  }

 private:
  template <int kBytes>
  void FillUnits(uint64_t key, int64_t count, std::byte* row) const {
    const int64_t whole = count / unit_values_;
    for (int64_t unit = 0; unit < whole; unit += 4) {
      uint64_t bits = SplitMix64(key + static_cast<uint64_t>(unit));
      const int64_t lanes = std::min<int64_t>(4, whole - unit);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        std::memcpy(row + (unit + lane) * kBytes, units_.data() + (bits & (kUnits - 1)) * kBytes, kBytes);
        bits >>= 16;
      }
    }
    for (int64_t index = whole * unit_values_; index < count; ++index) {
      StoreCode(element_, row, index, LoadCode(element_, units_.data(), index % unit_values_));
    }
  }

  DType element_;
  int64_t unit_bytes_;
  int64_t unit_values_;
  std::vector<std::byte> units_;
};

/// How a matrix of `cols` inputs is drawn: the codes, and the product of all its scales.
struct Recipe {
  std::shared_ptr<const CodeTable> codes;
  float scale = 1.0F;
};

Recipe RecipeFor(const WeightFormat& format, int64_t cols) {
  // Weights of deviation 1 / sqrt(inputs). Codes use the range of their type as quantizers do: the largest of
  // a group of 16 or 32 normal values is about 2.5 deviations, of a row about four.
  const float weight = 1.0F / std::sqrt(static_cast<float>(cols));
  if (!format.quantized()) {
    return {std::make_shared<const CodeTable>(format.element, weight, 0.0F), 1.0F};
  }
  const int zero = format.implied_zero();
  const float largest = zero > 0 ? static_cast<float>(zero - 1) : LargestValue(format.element);
  const float code = largest / (DTypeBits(format.element) < 8 ? 2.5F : 4.0F);
  return {std::make_shared<const CodeTable>(format.element, code, static_cast<float>(zero)), weight / code};
}

Status CheckGroups(const WeightFormat& format, int64_t cols) {
  const GroupShape block = format.block;
  if (format.has_block_scale() && block.row == 1 && block.col > 0 && cols % block.col != 0) {
    return Status::Unsupported(fmt::format("groups of {} do not divide {} inputs", block.col, cols));
  }
  return Status::Ok();
}

Result<CanonicalMatrix> DrawMatrix(const Scheme& scheme, const Recipe& recipe, int64_t rows, int64_t cols,
                                   bool has_bias, uint64_t key) {
  CanonicalMatrix matrix;
  matrix.rows = rows;
  matrix.cols = cols;
  const WeightFormat& format = matrix.format = scheme.weight;
  std::mt19937_64 random(key);
  const auto around = [&random](float value) {
    return value * std::uniform_real_distribution<float>(0.75F, 1.25F)(random);
  };
  FMOE_ASSIGN_OR_RETURN(matrix.codes, Tensor::Allocate(format.element, {rows, cols}));
  const MutableTensorView codes = matrix.codes.mutable_view();
  for (int64_t row = 0; row < rows; ++row) {
    recipe.codes->Fill(SplitMix64(key + static_cast<uint64_t>(row)), cols,
                       codes.data() + row * codes.row_bytes());
  }
  float scale = recipe.scale;
  if (format.has_block_scale()) {
    const int64_t row_blocks = format.block.row < 0 ? 1 : CeilDiv(rows, format.block.row);
    const int64_t col_blocks = format.block.col < 0 ? 1 : CeilDiv(cols, format.block.col);
    FMOE_ASSIGN_OR_RETURN(matrix.block_scale,
                          Tensor::Allocate(format.block_scale_dtype, {row_blocks, col_blocks}));
    // An e4m3 scale stands in the middle of its range below a second level; others carry all of it.
    const bool second_level = format.has_tensor_scale || format.has_channel_scale;
    const float block_scale = second_level ? 48.0F : scale;
    scale = second_level ? scale / block_scale : 1.0F;
    std::vector<float> values(static_cast<size_t>(std::max(kFewestScales, col_blocks)));
    for (float& value : values) {
      value = around(block_scale);
    }
    const MutableTensorView scales = matrix.block_scale.mutable_view();
    for (int64_t row = 0; row < row_blocks; ++row) {
      std::rotate(values.begin(), values.begin() + 1, values.end());
      EncodeRow(format.block_scale_dtype, values.data(), col_blocks,
                scales.data() + row * scales.row_bytes());
    }
  }
  if (format.has_channel_scale) {
    FMOE_ASSIGN_OR_RETURN(matrix.channel_scale, Tensor::Allocate(DType::kF32, {rows}));
    std::generate_n(matrix.channel_scale.mutable_view().as<float>(), rows, [&] { return around(scale); });
    scale = 1.0F;
  }
  if (format.has_tensor_scale) {
    matrix.tensor_scale = around(scale);
  }
  if (scheme.activation.static_tensor_scale) {
    // Activations of about unit variance stay within eight deviations.
    const float largest = LargestValue(*scheme.activation.element);
    const float codes_of_scale = scheme.activation.scale_dtype == DType::kF8E4M3 ? 448.0F : 1.0F;
    matrix.input_tensor_scale = around(8.0F) / (largest * codes_of_scale);
  }
  if (has_bias) {
    FMOE_ASSIGN_OR_RETURN(matrix.bias, Tensor::Allocate(DType::kF32, {rows}));
    std::normal_distribution<float> normal(0.0F, 0.1F);
    std::generate_n(matrix.bias.mutable_view().as<float>(), rows, [&] { return normal(random); });
  }
  return matrix;
}

}  // namespace

Result<ExpertSource> RandomExperts(const MoeConfig& config, const Scheme& scheme, uint64_t seed,
                                   int64_t layer) {
  FMOE_RETURN_IF_ERROR(CheckGroups(scheme.weight, config.hidden));
  FMOE_RETURN_IF_ERROR(CheckGroups(scheme.weight, config.intermediate));
  ExpertSource source;
  source.num_local_experts = config.num_local_experts;
  source.scheme = scheme;
  source.alike = true;
  source.identity = fmt::format("random weights 2, seed {}, layer {}, {} biases", seed, layer,
                                config.has_bias ? "with" : "without");
  const Recipe inner = RecipeFor(scheme.weight, config.hidden);
  const Recipe down = RecipeFor(scheme.weight, config.intermediate);
  const uint64_t layer_key = SplitMix64(SplitMix64(seed) + static_cast<uint64_t>(layer));
  source.load = [=](int64_t expert) -> Result<CanonicalExpert> {
    const uint64_t key = SplitMix64(layer_key + static_cast<uint64_t>(expert));
    const int64_t hidden = config.hidden, intermediate = config.intermediate;
    CanonicalExpert drawn;
    if (config.activation.gated()) {
      FMOE_ASSIGN_OR_RETURN(
          drawn.gate, DrawMatrix(scheme, inner, intermediate, hidden, config.has_bias, SplitMix64(key + 1)));
    }
    FMOE_ASSIGN_OR_RETURN(
        drawn.up, DrawMatrix(scheme, inner, intermediate, hidden, config.has_bias, SplitMix64(key + 2)));
    if (config.activation.gated()) {
      drawn.up.input_tensor_scale = drawn.gate.input_tensor_scale;  // calibrated on the same hidden states
    }
    FMOE_ASSIGN_OR_RETURN(
        drawn.down, DrawMatrix(scheme, down, hidden, intermediate, config.has_bias, SplitMix64(key + 3)));
    return drawn;
  };
  return source;
}

}  // namespace fusedmoe::bench
