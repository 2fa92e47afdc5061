#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <fusedmoe/config.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>

/// Layers described without their weights, and the parts that ranks have of them. All functions are
/// thread-safe; ReadProblem reads a file, the others are pure.

namespace fusedmoe {

/// The experts layer of a published model, described without its weights. Sizes are those of the whole layer:
/// one rank, nothing split.
struct Problem {
  std::string name;
  std::string source;      ///< where the sizes were read
  std::string scheme;      ///< the scheme of the published checkpoint, e.g. "fp8_w8a8:block128"
  int64_t num_layers = 0;  ///< layers of experts in the model
  MoeConfig config;
};

/// The problems compiled in (problems/*.json), by name.
std::span<const Problem> Problems();

/// A problem by its name, or from the text of a JSON object of the same form (problems/README.md). Errors:
/// kUsage for an unknown name, with those that exist; kBadInput for malformed text, naming the field, its
/// value and what it may be.
Result<Problem> ParseProblem(std::string_view name_or_json);

/// A problem by its name, or from a file that holds such an object, which errors then name.
Result<Problem> ReadProblem(const std::string& name_or_path);

/// ParseScheme for experts of these sizes. Errors: those of ParseScheme; kBadInput where groups of the scheme
/// do not divide what the experts multiply by, since partial groups are padded by nobody.
Result<Scheme> ParseSchemeFor(const MoeConfig& config, std::string_view name);

/// `config` of the whole layer with `parallel` applied, as the rank of `parallel` sees it: intermediate
/// divided by tp_size, num_local_experts by ep_size (the first ranks take the remainder). Errors: kUsage when
/// intermediate cannot be divided, with the sizes that could.
Result<MoeConfig> PerRank(const MoeConfig& config, const ParallelConfig& parallel);

/// Columns [begin, end) of the intermediate size that a rank has.
struct IntermediateRange {
  int64_t begin = 0;
  int64_t end = 0;
};

/// The share of a tensor-parallel rank: whole quantization blocks (halves of super-blocks), spread as evenly
/// as they come, so that any intermediate size works; smaller units if there are fewer blocks than ranks.
/// kUsage for a rank that does not exist, kUnsupported if the smallest units do not suffice.
Result<IntermediateRange> IntermediateShare(int64_t intermediate, const ParallelConfig& parallel,
                                            const Scheme& scheme);

/// PerRank as a layer of this library is spread: any intermediate size can be split, by IntermediateShare.
Result<MoeConfig> PerRank(const MoeConfig& config, const ParallelConfig& parallel, const Scheme& scheme);

}  // namespace fusedmoe
