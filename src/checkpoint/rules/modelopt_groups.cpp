#include "checkpoint/rules/modelopt_groups.hpp"

#include <cstdint>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "checkpoint/rules/rules_support.hpp"

namespace fusedmoe::checkpoint {
namespace {

/// One side of a module: what its values are, as far as both descriptions say it.
struct ValueForm {
  std::string type;  // "float", "int"; empty: not said
  std::optional<int64_t> bits, group;
  bool quantized = false;

  std::string Words() const {
    if (!quantized) {
      return "as they are";
    }
    return fmt::format("as {} of {} bits{}", type.empty() ? "values" : type,
                       bits ? fmt::format("{}", *bits) : "unknown",
                       group ? fmt::format(" in groups of {}", *group) : "");
  }
};

ValueForm FormSaidBy(const JsonValue* spec) {
  ValueForm side;
  if (spec == nullptr || !spec->is_object()) {
    return side;
  }
  side.quantized = true;
  const JsonValue* type = spec->Find("type");
  side.type = type == nullptr ? "" : type->string();
  const JsonValue* bits = spec->Find("num_bits");
  side.bits = bits == nullptr ? std::nullopt : bits->integer();
  const JsonValue* group = spec->Find("group_size");
  side.group = group == nullptr ? std::nullopt : group->integer();
  return side;
}

ValueForm FormOf(DType element, int64_t group) {
  const bool integer = element == DType::kI4 || element == DType::kI8;
  ValueForm side;
  side.type = integer ? "int" : "float";
  side.bits = DTypeBits(element);
  side.quantized = true;
  if (group > 0) {
    side.group = group;
  }
  return side;
}

bool Agree(const ValueForm& meant, const ValueForm& said) {
  const auto differ = [](const auto& a, const auto& b) { return a && b && *a != *b; };
  return meant.quantized == said.quantized && !differ(meant.bits, said.bits) &&
         !differ(meant.group, said.group) &&
         (meant.type.empty() || said.type.empty() || meant.type == said.type);
}

Status CompareOne(const std::string& group_name, const JsonValue& group, const AlgorithmOf& algorithm,
                  const std::string& path) {
  const LinearFormat& format = *algorithm.format;
  const bool in_groups = format.weight.has_block_scale() && format.weight.block.row == 1;
  ValueForm weights = FormOf(format.weight.element, !in_groups                     ? 0
                                                    : format.stored_block_cols > 0 ? format.stored_block_cols
                                                                                   : format.weight.block.col);
  // ModelOpt 0.47 has one description for these two, with weights of floats and inputs of 8 bits.
  const bool of_awq = algorithm.name == "NVFP4_AWQ" || algorithm.name == "W4A8_AWQ";
  if (of_awq) {
    weights.type = "";
    weights.group = std::nullopt;
  }
  if (algorithm.name == "W4A8_NVFP4_FP8") {
    weights.group = std::nullopt;  // 16 or 32, by age
  }
  const auto compare = [&](std::string_view what, const ValueForm& meant, const ValueForm& said) {
    if (Agree(meant, said)) {
      return Status::Ok();
    }
    return Status::BadInput(
               fmt::format("'quant_algo' is {}, which has {} {}, but 'config_groups.{}' has them {}",
                           algorithm.name, what, meant.Words(), group_name, said.Words()))
        .WithFile(path)
        .WithHint("one of the two was edited or is another checkpoint's: take them from one export");
  };
  FMOE_RETURN_IF_ERROR(compare("weights", weights, FormSaidBy(group.Find("weights"))));
  const JsonValue* said = group.Find("input_activations");
  const bool silent = said == nullptr || !said->is_object();  // of inputs: readers take the algorithm's word
  if (of_awq || algorithm.name == "MXFP4" || (silent && format.activation.quantized())) {
    return Status::Ok();  // MXFP4 does not say whether inputs are quantized
  }
  ValueForm inputs;
  if (format.activation.quantized()) {
    inputs = FormOf(*format.activation.element, 0);
  }
  return compare("inputs", inputs, FormSaidBy(said));
}

}  // namespace

Status CompareWithGroups(const JsonValue& groups,
                         const std::function<AlgorithmOf(const std::string& target)>& algorithm_of,
                         const std::string& path) {
  for (const auto& [name, group] : groups.members()) {
    if (group.Find("weights") == nullptr) {
      continue;  // an algorithm that ModelOpt has no such words for
    }
    FMOE_ASSIGN_OR_RETURN(std::vector<std::string> targets,
                          StringList(group.Find("targets"), "targets", path));
    if (targets.empty()) {
      targets.emplace_back();
    }
    for (const std::string& target : targets) {
      const AlgorithmOf algorithm = algorithm_of(target);
      if (algorithm.format != nullptr) {
        FMOE_RETURN_IF_ERROR(CompareOne(name, group, algorithm, path));
      }
    }
  }
  return Status::Ok();
}

}  // namespace fusedmoe::checkpoint
