// Matrices of MLX as tensors: affine ones of routed experts as they stand, others as what they decode to, and
// the words of the other modes as bytes.
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/files/tensor_store.hpp"
#include "checkpoint/mlx/mlx_model.hpp"
#include "numerics/element_types.hpp"

namespace fusedmoe::checkpoint {
namespace {

using namespace mlx_suffixes;

/// Bits of a row's words that share a scale.
Result<int64_t> BitsOfGroup(const TensorInfo& matrix, const TensorInfo& scales) {
  const int rank = matrix.shape.rank();
  bool same_rows = rank == scales.shape.rank() && (rank == 2 || rank == 3);
  for (int axis = 0; same_rows && axis + 1 < rank; ++axis) {
    same_rows = matrix.shape[axis] == scales.shape[axis];
  }
  const int64_t words = same_rows ? matrix.shape[rank - 1] : 0;
  const int64_t num_groups = same_rows ? scales.shape[rank - 1] : 0;
  if (words < 1 || num_groups < 1 || words * 32 % num_groups != 0) {
    return Status::BadInput(
        fmt::format("words {} do not fit scales: 2 or 3 axes, all but the last equal, and groups of "
                    "whole bits are required",
                    matrix.shape.ToString()));
  }
  return words * 32 / num_groups;
}

/// Lists the words of the other modes as the bytes that they hold, in the order that words have them.
Result<MlxSettings> ListBlocks(TensorInfo& matrix, TensorInfo& scales) {
  FMOE_ASSIGN_OR_RETURN(const int64_t bits_of_group, BitsOfGroup(matrix, scales));
  if (scales.dtype != DType::kU8 || (bits_of_group != 64 && bits_of_group != 128 && bits_of_group != 256)) {
    return Status::BadInput(
        fmt::format("groups of {} bits with these scales are not known; U8 scales with "
                    "groups of 64 (nvfp4), 128 (mxfp4) or 256 (mxfp8) bits are",
                    bits_of_group));
  }
  matrix.dtype = bits_of_group == 256 ? DType::kF8E4M3 : DType::kU8;
  matrix.shape[matrix.shape.rank() - 1] *= 4;
  scales.dtype = bits_of_group == 64 ? DType::kF8E4M3 : DType::kU8;
  return MlxSettings{.mode = bits_of_group == 64    ? "nvfp4"
                             : bits_of_group == 128 ? "mxfp4"
                                                    : "mxfp8",
                     .group = bits_of_group == 64 ? 16 : 32,
                     .bits = bits_of_group == 256 ? 8 : 4};
}

/// Whether schemes, and kernels, have groups of so many beside zero points that are numbers.
bool HasScheme(int64_t group) {
  return group == 32 || group == 64 || group == 128;
}

/// Which matrices of routed experts one is: those of the same projection lie in one stack, or are numbered.
struct ExpertsMatrix {
  std::string_view block;       ///< all projections of a layer have it; empty: the matrix is none of experts
  std::string_view projection;  ///< "up_proj"
};

// "X.switch_mlp.up_proj.weight" of three axes, and "X.experts.7.w1.weight" of the first converters.
ExpertsMatrix FindExperts(const TensorInfo& info) {
  const std::string_view name = info.name;
  if (!name.ends_with(kWeight)) {
    return {};
  }
  const std::string_view module = name.substr(0, name.size() - kWeight.size());
  const size_t last = module.rfind('.');
  if (last == std::string_view::npos) {
    return {};
  }
  const std::string_view parent = module.substr(0, last), projection = module.substr(last + 1);
  if (info.shape.rank() == 3) {
    return {parent, projection};
  }
  const std::string_view list = parent.substr(0, parent.find_last_not_of("0123456789") + 1);
  const bool numbered = list.size() < parent.size() && list.ends_with(".experts.");
  return numbered ? ExpertsMatrix{list, projection} : ExpertsMatrix{};
}

}  // namespace

/// The tensors of an affine matrix, by their numbers.
struct TensorStore::AffineParts {
  AffineMatrix matrix;
  size_t codes = 0, scales = 0, biases = 0;
};

// Tensors of a matrix are found by its scales. Whatever is wrong with one spoils that matrix alone.
Status TensorStore::FoldMlx(const MlxGroups& groups, bool decode) {
  std::vector<bool> hidden(tensors_.size());
  std::vector<std::pair<TensorInfo, Place>> unit_scales;
  std::vector<AffineParts> affine;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    TensorInfo& scales = tensors_[i];
    if (!scales.name.ends_with(kScales)) {
      continue;
    }
    const std::string module = scales.name.substr(0, scales.name.size() - kScales.size());
    const auto codes = by_name_.find(module + std::string(kWeight));
    if (codes == by_name_.end() || tensors_[codes->second].dtype != DType::kU32) {
      continue;
    }
    TensorInfo& matrix = tensors_[codes->second];
    const MlxSettings& said = groups.Of(module);
    const std::string stored =
        fmt::format("'{}' is {} {}", scales.name, DTypeName(scales.dtype), scales.shape.ToString());
    const Result<MlxSettings> found = IsPlainFloat(scales.dtype)
                                          ? FindAffine(said.group, codes->second, i, &affine)
                                          : ListBlocks(matrix, scales);
    if (!found.ok()) {
      matrix.problem = fmt::format("MLX: {}; {}", found.status().message(), stored);
    } else if (*found != said) {
      matrix.problem = fmt::format("MLX: the tensors are {}, and 'quantization' says: {}; {}",
                                   found->ToString(), said.ToString(), stored);
    } else if (scales.dtype == DType::kF8E4M3 && !Has(module + std::string(kMatrixScale))) {
      const BlockPart& one = UnitScalePart();
      const Shape shape = matrix.shape.rank() == 3 ? Shape{matrix.shape[0]} : Shape{1};
      unit_scales.push_back(
          {{module + std::string(kUnitScale), one.dtype, shape, matrix.file, shape.count() * one.bytes, ""},
           {places_[i].file, 0, nullptr, &one}});
    }
  }
  FoldAffine(affine, decode, &hidden);
  for (auto& [info, place] : unit_scales) {
    tensors_.push_back(std::move(info));
    places_.push_back(place);
  }
  hidden.resize(tensors_.size());
  return Hide(hidden);
}

Result<MlxSettings> TensorStore::FindAffine(int64_t group, size_t codes, size_t scales,
                                            std::vector<AffineParts>* affine) const {
  const DType type = tensors_[scales].dtype;
  const Shape& groups = tensors_[scales].shape;
  FMOE_ASSIGN_OR_RETURN(const int64_t bits_of_group, BitsOfGroup(tensors_[codes], tensors_[scales]));
  const std::string& name = tensors_[scales].name;
  const std::string biases_name = name.substr(0, name.size() - kScales.size()) + std::string(kBiases);
  const auto biases = by_name_.find(biases_name);
  if (biases == by_name_.end()) {
    return Status::BadInput(fmt::format("'{}' is missing; biases like the scales are required", biases_name));
  }
  if (const TensorInfo& found = tensors_[biases->second]; found.dtype != type || !(found.shape == groups)) {
    return Status::BadInput(fmt::format("'{}' is {} {}; biases like the scales are required", biases_name,
                                        DTypeName(found.dtype), found.shape.ToString()));
  }
  const int64_t bits = bits_of_group / group;
  if (bits * group != bits_of_group || bits < 2 || bits > 8 || bits == 7) {
    return Status::BadInput(
        fmt::format("{} bits in groups of {} are {:.3g} bits a code; 2 to 6 or 8 are required", bits_of_group,
                    group, static_cast<double>(bits_of_group) / static_cast<double>(group)));
  }
  affine->push_back({{type, static_cast<int>(bits), group, groups[groups.rank() - 1] * group},
                     codes,
                     scales,
                     biases->second});
  return MlxSettings{.group = group, .bits = bits};
}

// Matrices stay as they are where a layer's experts run from their codes: all of them are affine, in groups
// that schemes have, and those of a projection alike. Others are listed as what they decode to, their scales
// and biases are not.
void TensorStore::FoldAffine(const std::vector<AffineParts>& affine, bool decode, std::vector<bool>* hidden) {
  std::map<size_t, const AffineMatrix*> by_codes;
  for (const AffineParts& parts : affine) {
    by_codes[parts.codes] = &parts.matrix;
  }
  std::set<std::string_view> decoded;
  std::map<std::pair<std::string_view, std::string_view>, const AffineMatrix*> projections;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const ExpertsMatrix experts = FindExperts(tensors_[i]);
    if (experts.block.empty()) {
      continue;
    }
    const auto found = by_codes.find(i);
    if (found == by_codes.end() || !tensors_[i].problem.empty() || !HasScheme(found->second->group)) {
      decoded.insert(experts.block);
      continue;
    }
    const AffineMatrix& own = *found->second;
    const AffineMatrix& first =
        *projections.try_emplace({experts.block, experts.projection}, &own).first->second;
    if (own.bits != first.bits || own.group != first.group) {
      decoded.insert(experts.block);
    }
  }
  for (const AffineParts& parts : affine) {
    TensorInfo& matrix = tensors_[parts.codes];
    const std::string_view block = FindExperts(matrix).block;
    if (!decode && !block.empty() && !decoded.contains(block)) {
      continue;
    }
    (*hidden)[parts.scales] = (*hidden)[parts.biases] = true;
    matrix.dtype = parts.matrix.dtype;
    matrix.shape[matrix.shape.rank() - 1] = parts.matrix.cols;
    matrix.bytes = matrix.shape.count() * (DTypeBits(matrix.dtype) / 8);
    places_[parts.codes].affine = static_cast<int32_t>(affine_.size());
    affine_.push_back({parts.matrix, places_[parts.codes], places_[parts.scales], places_[parts.biases]});
  }
}

Result<platform::FileBytes> TensorStore::ReadAffineAt(const Place& place, int64_t offset,
                                                      int64_t bytes) const {
  const AffineTensor& tensor = affine_[static_cast<size_t>(place.affine)];
  const auto read = [&](AffinePart part, int64_t first, int64_t count) {
    const Place& from = part == AffinePart::kCodes    ? tensor.codes
                        : part == AffinePart::kScales ? tensor.scales
                                                      : tensor.biases;
    const int64_t row = part == AffinePart::kCodes ? tensor.matrix.code_bytes() : tensor.matrix.side_bytes();
    return files_[static_cast<size_t>(from.file)]->Read(from.begin + first * row, count * row);
  };
  // Callers read whole rows.
  const int64_t row_bytes = tensor.matrix.row_bytes();
  return ReadAffineRows(tensor.matrix, read, offset / row_bytes, bytes / row_bytes);
}

}  // namespace fusedmoe::checkpoint
