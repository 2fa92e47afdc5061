#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <fusedmoe/jobs/convert.hpp>

#include "checkpoint/gguf/gguf_blocks.hpp"
#include "checkpoint/storage/storage.hpp"
#include "jobs/common/experts_rewriter.hpp"
#include "jobs/convert/other_modules.hpp"
#include "jobs/convert/transform.hpp"

namespace fusedmoe::jobs {

/// Whose files are written.
enum class Form : uint8_t {
  kPlain,   ///< dequantized, one type for all
  kTool,    ///< ModelOpt, compressed-tensors, DeepSeek
  kGptOss,  ///< all experts of a layer in one tensor, MXFP4
  kGguf     ///< a GGUF file with the MoE layers
};

/// What becomes of the matrices that are stored in one scheme.
struct Rule {
  Scheme from, to;
  Target target;
  const checkpoint::StorageRow* row = nullptr;    ///< kTool; null: stays unquantized
  const checkpoint::BlockType* blocks = nullptr;  ///< kGguf
  bool plain() const { return row == nullptr; }
};

/// A conversion before anything is written: which matrices there are, and what each becomes.
struct ConvertPlan {
  Form form = Form::kPlain;
  std::vector<Rule> rules;
  std::vector<size_t> layer_rules;                  ///< of rewriter.layers(), in their order
  std::vector<std::optional<size_t>> shared_rules;  ///< kGguf: of the shared experts of the same layers
  std::vector<OtherModule> others;
  std::vector<size_t> other_rules;
  std::vector<std::string> ignored;  ///< modules that stay unquantized, for the configuration

  const Rule& RuleOf(size_t layer) const { return rules[layer_rules[layer]]; }
  /// quantization_config of config.json ("": none) and hf_quant_config.json ("": none).
  Result<std::string> Config(const ExpertsRewriter& rewriter) const;
  std::string SideFile(const ExpertsRewriter& rewriter) const;
  /// Names of the schemes, each once, in order.
  std::string SourceSchemes() const;
  std::string TargetSchemes() const;
};

/// Reads the first expert of each layer and the headers of everything else. kUsage for unknown names;
/// kUnsupported when the target does not store what is there (the module is named).
Result<ConvertPlan> PlanConversion(const ExpertsRewriter& rewriter, const ConvertOptions& options);

/// An expert in the form of its rule; failures name it.
Result<CanonicalExpert> TransformExpert(const SourceLayer& layer, const Rule& rule, int64_t expert);
/// The same for one that was loaded already; `module` stands in failures.
Result<CanonicalExpert> TransformLoaded(const CanonicalExpert& source, const Rule& rule,
                                        const std::string& module);
/// A matrix that is no routed expert, as the source has it.
Result<CanonicalMatrix> ReadOther(const checkpoint::LayerContext& context, const OtherModule& module);

}  // namespace fusedmoe::jobs
