#include "checkpoint/mlx/mlx_model.hpp"

#include <fmt/format.h>

#include "checkpoint/formats.hpp"
#include "checkpoint/rules/rules_support.hpp"

namespace fusedmoe::checkpoint {
namespace {

using namespace mlx_suffixes;

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

// Codes in words along the rows. Of five bits panels hold as many in groups of 32, which take fewer bytes
// with scales repeated than codes of eight bits do in longer groups.
LinearFormat AffineFormat(const MlxSettings& settings) {
  LinearFormat format;
  const bool repeated = settings.bits == 5;
  format.bits = static_cast<int>(settings.bits);
  format.packing = Packing::kBits;
  format.weight = IntegerWeight(format.bits, repeated ? 32 : settings.group);
  format.weight.block_scale_dtype = format.weight.zero_point_dtype = DType::kF32;
  format.stored_block_cols = settings.group;
  format.scale = kScales;
  format.zero_point = kBiases;
  format.zero_point_is_bias = true;
  format.negative_scales = true;  // MLX counts from the end of a group that lies further from zero
  if (repeated) {
    format.stored.bits = format.bits;
    format.stored.group = format.weight.block.col;
    format.stored.zero_points = true;
  }
  return format;
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

QuantRules MlxRules(std::shared_ptr<const TensorStore> store, MlxGroups groups) {
  QuantRules rules;
  rules.producer = "mlx";
  rules.format_of = [store = std::move(store),
                     groups = std::move(groups)](const std::string& module) -> Result<LinearFormat> {
    LinearFormat format;
    const TensorInfo* codes = store->Find(module + std::string(kWeight));
    const TensorInfo* scales = store->Find(module + std::string(kScales));
    if (codes == nullptr || scales == nullptr || !codes->problem.empty()) {
      return format;
    }
    if (codes->dtype == DType::kU32) {
      return AffineFormat(groups.Of(module));
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
