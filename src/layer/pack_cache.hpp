#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/weights.hpp>

#include "moe/backend.hpp"

namespace fusedmoe {

/// backend.prepare, through a folder of packed weights when `directory` is not empty.
///
/// A file is named after what it was made from: the identity of the source (ExpertSource::identity), backend,
/// layout and sizes. It is mapped, not copied, once its checksums agree with every byte; a file that is
/// damaged or belongs to something else is refused, made again and replaced. New files appear whole or not at
/// all. Sources without identity, backends that keep the canonical form and those whose weights lie on a card
/// are prepared as without a folder. Neither a refused file nor one that cannot be written is an error:
/// `notes` says what happened.
Result<PreparedWeights> PrepareCached(const Backend& backend, const Plan& plan, const MoeProblem& problem,
                                      const Machine& machine, const ExpertSource& source,
                                      const Executor& executor, const std::string& directory,
                                      std::vector<std::string>& notes);

/// The file itself. `key` must be the one it was written for.
Status WritePacked(const std::string& path, std::string_view key, const PreparedWeights& weights,
                   const Executor& executor);
Result<PreparedWeights> ReadPacked(const std::string& path, std::string_view key, const Executor& executor);

}  // namespace fusedmoe
