#pragma once

#include "oracle/question.hpp"

namespace fusedmoe {

/// The request with everything derived that the tables look at. Errors: those of Explain.
Result<Question> MakeQuestion(const ExplainRequest& request);

/// Selection and nothing around it: what WhyNot and the alternatives ask again and again.
Result<Selection> SelectFor(const Question& question, const ExplainRequest& request);

}  // namespace fusedmoe
