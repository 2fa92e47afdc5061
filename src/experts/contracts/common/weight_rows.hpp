#pragma once

#include <cstdint>
#include <vector>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

#include "moe/backend.hpp"
#include "quant/swizzle.hpp"
#include "weights/steps/fused_expert.hpp"

namespace fusedmoe {

/// Reads rows of one projection of all experts out of prepared bytes, through index maps that follow from the
/// recipe: where each canonical row went, how codes lie in K, where the scale of a block is. Nothing is
/// rearranged back, so that what a kernel would read is what is computed with.
///
/// Row r of "gate_up" is gate for r < I and up behind it; of "down" output r. Values are
/// (code - zero) * block_scale * channel_scale; a tensor scale that a step gave to rows counts as theirs, any
/// other is the caller's, with the 2^-bias of MARLIN's e2m1.
class WeightRows {
 public:
  /// `projection` is "gate_up" or "down". The weights must outlive the reader. kBadInput when a tensor is
  /// missing or has another size than the recipe gives it.
  static Result<WeightRows> Create(const PreparedWeights& weights, const LayoutRecipe& recipe,
                                   const FusedShape& shape, const char* projection);

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t num_experts() const { return num_experts_; }
  /// F32 [rows] of an expert; null: none.
  const float* bias(int64_t expert) const { return bias_.empty() ? nullptr : bias_.data() + expert * rows_; }

  /// Columns [begin, begin + count) of `row` of `expert`; `begin` on a whole byte. Allocates nothing.
  void Decode(int64_t expert, int64_t row, int64_t begin, int64_t count, float* out) const;

 private:
  enum class Place : uint8_t { kRows, kBlockMajor, kSwizzled, kColumns, kMarlin };
  /// Where the rows of a tensor are.
  struct Located {
    const std::byte* data = nullptr;
    DType dtype = DType::kU8;
    int64_t expert_bytes = 0;
    Place place = Place::kRows;
    std::vector<int32_t> at;  ///< stored row (kColumns: column) of each canonical row
    int64_t stored_rows = 0;
    int64_t stored_columns = 0;
  };
  static Status FollowSteps(const LayoutRecipe& recipe, const std::string& name, Located& located,
                            Tensor& numbers);
  static Result<Located> Locate(const PreparedWeights& weights, const LayoutRecipe& recipe,
                                const std::string& name, int64_t rows, int64_t columns);
  Status TakeVectors(const PreparedWeights& weights, const LayoutRecipe& recipe, const std::string& name);
  Status TakeOrder(const PreparedWeights& weights, const std::string& name);
  void DecodeCodes(int64_t expert, int64_t row, int64_t begin, int64_t count, float* out) const;
  float ScaleAt(int64_t expert, int64_t row, int64_t group) const;

  int64_t rows_ = 0, cols_ = 0, groups_ = 0, block_rows_ = 1, block_cols_ = 1, num_experts_ = 0;
  Located codes_, scales_;
  std::vector<int32_t> fragment_;  // place of each code within a tile of Marlin
  std::vector<float> value_of_;    // of each 4- or 8-bit code
  bool scale_is_s0e5m3_ = false;
  float scale_factor_ = 1.0F;  ///< what the decoding of codes leaves over, 2^-exponent of marlin_scale_type
  float implied_zero_ = 0.0F;
  // Activation order, [experts, cols]: where each canonical column is stored, and its group. Empty: in order.
  std::vector<int32_t> stored_column_, group_of_;
  std::vector<uint8_t> zero_points_;          // [experts, rows, groups]
  std::vector<float> channel_scales_, bias_;  // [experts, rows]; values, whatever the kernel's exponent
};

}  // namespace fusedmoe
