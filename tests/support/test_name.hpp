#pragma once

#include <algorithm>
#include <cctype>
#include <string>

#include <gtest/gtest.h>

namespace fusedmoe::test {

/// `text` as a part of a test's name: everything but letters and digits becomes '_'.
inline std::string TestName(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char letter) { return std::isalnum(letter) == 0; }, '_');
  return text;
}

/// Names each instance of a suite over strings after its string.
inline std::string NamedAfterText(const testing::TestParamInfo<std::string>& drawn) {
  return TestName(drawn.param);
}

}  // namespace fusedmoe::test
