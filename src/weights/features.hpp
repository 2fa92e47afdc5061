#pragma once

#include <optional>

#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

namespace fusedmoe {

/// What stands beside the codes of a projection and may be missing: `Join` over all experts of a layer says
/// what each of them needs, so that one plan and one layout hold them all.
struct MatrixFeatures {
  bool zero_point = false, group_index = false, pre_quant_scale = false, bias = false;
  std::optional<DType> scale_dtype;     ///< of block scales; F32 where experts differ
  DType zero_point_dtype = DType::kU8;  ///< F32 where one has such
  /// How all were stored; of no bits where they differ. Empty: of no matrix.
  std::optional<StoredIntegers> stored;

  void Join(const MatrixFeatures& other);
  bool operator==(const MatrixFeatures&) const = default;
};

/// The same of an expert; gate and up read one input and are packed together.
struct ExpertFeatures {
  MatrixFeatures gate_up, down;

  void Join(const ExpertFeatures& other);
  bool operator==(const ExpertFeatures&) const = default;
};

ExpertFeatures FeaturesOf(const CanonicalExpert& expert);

/// Gives the expert what it lacks of `features`, without a change of its values: zero points of the middle
/// code, groups in order, factors of one, biases of zero, scales and zero points in F32.
Status AddFeatures(const ExpertFeatures& features, CanonicalExpert& expert);

}  // namespace fusedmoe
