#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "moe/backend.hpp"

/// Objections to a problem that several backends have. Each is added to `verdicts` where it applies.
namespace fusedmoe {

/// Adds an objection.
void Refuse(std::vector<Verdict>& verdicts, Reason reason, std::string sentence, std::string_view actual,
            std::string_view required);

/// Router weights on the input where a token has several experts.
void RefuseInputWeights(std::vector<Verdict>& verdicts, const MoeProblem& problem);
/// A forced mode other than "masked" of batched rows, "latency" or "throughput" of standard ones.
void RefuseForeignMode(std::vector<Verdict>& verdicts, const MoeProblem& problem);
/// One activation scale over all tokens where a token must not depend on the others.
void RefuseBatchScale(std::vector<Verdict>& verdicts, const MoeProblem& problem,
                      const ActivationFormat& activation);

}  // namespace fusedmoe
