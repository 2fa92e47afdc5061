#include "checkpoint/mlx/mlx_model.hpp"

#include <fmt/format.h>

#include "checkpoint/formats.hpp"
#include "checkpoint/rules/rules_support.hpp"
#include "numerics/element_types.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr std::string_view kWeightSuffix = ".weight", kScales = ".scales", kBiases = ".biases";
// The second level of NVFP4: the largest magnitude of each matrix, or the factor 1 where the file has none.
constexpr std::string_view kMatrixScale = ".global_scale", kUnitScale = ".unit_scale";

// Missing ones are those of `fallback`; a mode is not handed on: MLX takes a module's own settings whole.
Result<MlxSettings> ReadSettings(const JsonValue& spec, const MlxSettings* fallback,
                                 const std::string& path) {
  const auto or_none = [&](int64_t MlxSettings::*field) {
    return fallback == nullptr ? std::nullopt : std::optional<int64_t>(fallback->*field);
  };
  MlxSettings settings;
  FMOE_ASSIGN_OR_RETURN(settings.group,
                        Size(spec, "group_size", 8, 1024, or_none(&MlxSettings::group), path));
  FMOE_ASSIGN_OR_RETURN(settings.bits, Size(spec, "bits", 2, 8, or_none(&MlxSettings::bits), path));
  FMOE_ASSIGN_OR_RETURN(settings.mode, Word(spec, "mode", "affine", path));
  if (settings.mode != "affine" && settings.mode != "mxfp4" && settings.mode != "mxfp8" &&
      settings.mode != "nvfp4") {
    return NotSupported("mode", *spec.Find("mode"), "affine, mxfp4, mxfp8 and nvfp4 are", path);
  }
  return settings;
}

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
    return Status::BadInput(fmt::format("words {} do not fit scales", matrix.shape.ToString()));
  }
  return words * 32 / num_groups;
}

/// Lists the words of the other modes as the bytes that they hold, in the order that words have them.
Result<MlxSettings> ListBlocks(TensorInfo& matrix, TensorInfo& scales) {
  FMOE_ASSIGN_OR_RETURN(const int64_t bits_of_group, BitsOfGroup(matrix, scales));
  if (scales.dtype != DType::kU8 || (bits_of_group != 64 && bits_of_group != 128 && bits_of_group != 256)) {
    return Status::BadInput(fmt::format("groups of {} bits with these scales are not known", bits_of_group));
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

}  // namespace

std::string MlxSettings::ToString() const {
  return quantized ? fmt::format("{} of {} bits in groups of {}", mode, bits, group) : "not quantized";
}

const MlxSettings& MlxGroups::Of(std::string_view module) const {
  const auto own = of_module.find(module);
  return own == of_module.end() ? common : own->second;
}

Result<std::optional<MlxGroups>> ReadMlxGroups(const ModelConfig& config) {
  const JsonValue* spec = config.Find("quantization");
  if (spec == nullptr || !spec->is_object() || spec->Find("group_size") == nullptr ||
      spec->Find("bits") == nullptr) {
    return std::optional<MlxGroups>();
  }
  MlxGroups groups;
  FMOE_ASSIGN_OR_RETURN(groups.common, ReadSettings(*spec, nullptr, config.path()));
  for (const auto& [module, own] : spec->members()) {
    if (own.is_object()) {
      FMOE_ASSIGN_OR_RETURN(groups.of_module[module], ReadSettings(own, &groups.common, config.path()));
    } else if (own.is_bool() && !own.boolean()) {
      groups.of_module[module].quantized = false;
    }
  }
  return std::optional<MlxGroups>(std::move(groups));
}

// Tensors of a matrix are found by its scales. Whatever is wrong with one spoils that matrix alone.
Status TensorStore::FoldMlx(const MlxGroups& groups) {
  std::vector<bool> hidden(tensors_.size());
  std::vector<std::pair<TensorInfo, Place>> unit_scales;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    TensorInfo& scales = tensors_[i];
    if (!scales.name.ends_with(kScales)) {
      continue;
    }
    const std::string module = scales.name.substr(0, scales.name.size() - kScales.size());
    const auto codes = by_name_.find(module + std::string(kWeightSuffix));
    if (codes == by_name_.end() || tensors_[codes->second].dtype != DType::kU32) {
      continue;
    }
    TensorInfo& matrix = tensors_[codes->second];
    const MlxSettings& said = groups.Of(module);
    const std::string stored =
        fmt::format("'{}' is {} {}", scales.name, DTypeName(scales.dtype), scales.shape.ToString());
    const Result<MlxSettings> found = IsPlainFloat(scales.dtype)
                                          ? FoldAffine(said.group, codes->second, i, &hidden)
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
  for (auto& [info, place] : unit_scales) {
    tensors_.push_back(std::move(info));
    places_.push_back(place);
  }
  hidden.resize(tensors_.size());
  return Hide(hidden);
}

// An affine matrix is listed as the one that it decodes to, its scales and biases are not.
Result<MlxSettings> TensorStore::FoldAffine(int64_t group, size_t codes, size_t scales,
                                            std::vector<bool>* hidden) {
  TensorInfo& matrix = tensors_[codes];
  const DType type = tensors_[scales].dtype;
  const Shape& groups = tensors_[scales].shape;
  FMOE_ASSIGN_OR_RETURN(const int64_t bits_of_group, BitsOfGroup(matrix, tensors_[scales]));
  const std::string& name = tensors_[scales].name;
  const auto biases = by_name_.find(name.substr(0, name.size() - kScales.size()) + std::string(kBiases));
  if (biases == by_name_.end() || tensors_[biases->second].dtype != type ||
      !(tensors_[biases->second].shape == groups)) {
    return Status::BadInput("biases like the scales are needed");
  }
  const int64_t bits = bits_of_group / group;
  if (bits * group != bits_of_group || bits < 2 || bits > 8 || bits == 7) {
    return Status::BadInput(fmt::format("groups of {} would have {} bits each", group, bits_of_group));
  }
  const AffineMatrix affine{type, static_cast<int>(bits), group, groups[groups.rank() - 1] * group};
  (*hidden)[scales] = (*hidden)[biases->second] = true;
  matrix.dtype = affine.dtype;
  matrix.shape[matrix.shape.rank() - 1] = affine.cols;
  matrix.bytes = matrix.shape.count() * (DTypeBits(affine.dtype) / 8);
  const auto index = static_cast<int32_t>(affine_.size());
  affine_.push_back({affine, places_[codes], places_[scales], places_[biases->second]});
  places_[codes].affine = index;
  return MlxSettings{.group = group, .bits = bits};
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

QuantRules MlxRules(std::shared_ptr<const TensorStore> store) {
  QuantRules rules;
  rules.producer = "mlx";
  rules.format_of = [store = std::move(store)](const std::string& module) -> Result<LinearFormat> {
    LinearFormat format;
    const TensorInfo* codes = store->Find(module + std::string(kWeightSuffix));
    const TensorInfo* scales = store->Find(module + std::string(kScales));
    if (codes == nullptr || scales == nullptr || codes->dtype == DType::kU32) {
      return format;
    }
    format.scale = kScales;
    if (scales->dtype == DType::kF8E4M3) {
      format.weight = Nvfp4(16);
      format.second_scale = kMatrixScale;
      // The largest code times the largest scale.
      format.second_scale_divisor = 6.0F * 448.0F;
      if (!store->Has(module + std::string(kMatrixScale))) {
        format.second_scale = kUnitScale;
        format.second_scale_divisor = 1.0F;
      }
    } else {
      format.weight = Mx(codes->dtype == DType::kF8E4M3 ? DType::kF8E4M3 : DType::kF4E2M1);
    }
    return format;
  };
  return rules;
}

}  // namespace fusedmoe::checkpoint
