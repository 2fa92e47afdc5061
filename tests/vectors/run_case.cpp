#include "support/golden.hpp"

namespace fusedmoe::golden {

#define FMOE_GOLDEN_TOPIC(topic, function) Outcome function(const GoldenCase& golden_case);
#include "vectors/topics.inc"
#undef FMOE_GOLDEN_TOPIC

Outcome RunCase(const GoldenCase& golden_case) {
  try {
#define FMOE_GOLDEN_TOPIC(topic_name, function) \
  if (golden_case.topic() == #topic_name) {     \
    return function(golden_case);               \
  }
#include "vectors/topics.inc"
#undef FMOE_GOLDEN_TOPIC
  } catch (const std::exception& error) {
    return std::string("the case cannot be read: ") + error.what();
  }
  return "unknown operation '" + golden_case.topic() + "'";
}

}  // namespace fusedmoe::golden
