#include <gtest/gtest.h>

#include <chrono>

#include "checkpoint/rules/pattern.hpp"
#include "checkpoint/rules/quant_rules.hpp"

namespace fusedmoe::checkpoint {
namespace {

bool Matches(std::string_view pattern, std::string_view text) {
  const auto compiled = Pattern::Compile(pattern);
  EXPECT_TRUE(compiled.ok()) << pattern << ": " << compiled.status().ToString();
  return compiled.ok() && compiled->MatchesPrefix(text);
}

TEST(Pattern, PythonExpressions_MatchAsPythonDoes) {
  const std::string expert = "model.layers.12.mlp.experts.3.gate_proj";
  struct Case {
    std::string pattern, text;
    bool matches;
  };
  const std::vector<Case> cases = {
      {".*lm_head", "lm_head", true},
      {".*mlp.gate$", "model.layers.0.mlp.gate", true},
      {".*mlp.gate$", "model.layers.0.mlp.gate_proj", false},
      {".*mlp\\.(gate|up|down)_proj.*", "model.layers.0.mlp.up_proj", true},
      {".*\\.experts\\.\\d+\\..*", expert, true},
      {".*\\.experts\\.\\d+\\..*", "model.layers.12.mlp.experts.x.gate_proj", false},
      {"model\\.layers\\.(?!1\\.)\\d+\\.", expert, true},
      {"model\\.layers\\.(?!12\\.)\\d+\\.", expert, false},
      {"^(?!.*experts).*$", expert, false},
      {"^(?!.*experts).*$", "model.layers.0.self_attn.q_proj", true},
      {"layers", expert, false},  // anchored at the beginning
      {"model", expert, true},    // and there alone
      {"model.layers.[0-9]{2}\\.", expert, true},
      {"model.layers.[0-9]{3,}\\.", expert, false},
      {"model.layers.[^a-z]+.mlp", expert, true},
      {"(a|b)*c", "ababc", true},
      {"(a|b)*?c", "ababd", false},
      {"a{,2}b", "aab", true},
      {"a{x}", "a{x}", true},
      {"[]a]+", "]a", true},
      {"a\\b", "a.b", true},
      {"a\\b", "ab", false},
      {"", "anything", true},
      {"(?P<name>x)", "x", true},
      {"[\\w.-]+$", "a-b.c_d", true},
      {"(?=.*b)(?!.*c)a", "aab", true},
      {"(?=.*b)(?!.*c)a", "aabc", false},
      {"(?<=a)b", "ab", false},  // from the beginning on, as re.match
      {"a(?<=a)b", "ab", true},
      {".*(?<!shared_)experts", "mlp.experts.0", true},
      {".*(?<!shared_)experts", "mlp.shared_experts.0", false},
      {".*(?<=mlp\\.|moe\\.)experts", "moe.experts", true},
      {".*(?<=mlp\\.|moe\\.)experts", "block.experts", false},
      {"(?<!a)b", "b", true},
      {"(?:x(?<=[xy]))+(?<!y)$", "xxx", true},
      {"(?=a(?!b)|x)..", "ac", true},  // one look-ahead in another
      {"(?=a(?!b)|x)..", "ab", false},
      {"(?!(?=a)b)a", "ab", true},
      {"(?:a(?=b)b)+c", "ababc", true},
      {"(?:a(?=b|$)b?)*$", "abab", true},
      {"a\\x2eb", "a.b", true},
      {"a\\x2eb", "axb", false},
      {"a\\u002Eb$", "a.b", true},
      {"a\\U0000002eb", "axb", false},
      {"[\\x30-\\x39]+$", "042", true},
      {"[\\x30-\\x39]+$", "x", false},
      {"a\\fb", "afb", false},
      {"\\_\\-\\/", "_-/", true},
      {"(?:|a)*b", "aab", true},  // a group that may be empty
  };
  for (const Case& one : cases) {
    EXPECT_EQ(Matches(one.pattern, one.text), one.matches) << one.pattern << " on " << one.text;
  }
}

TEST(Pattern, Mistakes_AreRefused) {
  for (const std::string pattern :
       {"(", ")", "[", "a**", "*a", "a\\", "[z-a]", "a{3,1}", "(?", "((((a{99}){99}){99}){99})"}) {
    const auto compiled = Pattern::Compile(pattern);
    ASSERT_FALSE(compiled.ok()) << pattern;
    EXPECT_TRUE(compiled.status().code() == StatusCode::kBadInput ||
                compiled.status().code() == StatusCode::kUnsupported);
  }
  // Escapes that Python does not know either, or that would mean something else here.
  for (const std::string pattern : {"a\\qb", "[\\q]", "\\x4", "\\xzz", "\\u12", "[a-\\d]", "\\N", "\\x-1"}) {
    EXPECT_EQ(Pattern::Compile(pattern).status().code(), StatusCode::kBadInput) << pattern;
  }
  for (const std::string pattern : {"\\u00e9", "\\xe9", "\\012", "(?P=name)"}) {
    EXPECT_EQ(Pattern::Compile(pattern).status().code(), StatusCode::kUnsupported) << pattern;
  }
  EXPECT_EQ(Pattern::Compile("(a)\\1").status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(Pattern::Compile("(?<=a+)b").status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(Pattern::Compile("(?i)a").status().code(), StatusCode::kUnsupported);
  EXPECT_FALSE(Pattern::Compile(std::string(1000, '(')).ok());
}

// The classic that takes a backtracking matcher 2^n steps.
TEST(Pattern, NestedRepetition_TakesNoTime) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(Matches("(a*)*(a|a)*(a+)+b", std::string(1000, 'a')));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

// Each look-ahead was run again for every way to reach it: 4 s with five, more than 20 with eight.
TEST(Pattern, NestedLookAheads_TakeNoTime) {
  const auto begin = std::chrono::steady_clock::now();
  std::string pattern = "zz";
  for (int i = 0; i < 30; ++i) {
    pattern = "(?=.*" + pattern + ")";
  }
  const std::string text(300, 'a');
  EXPECT_FALSE(Matches(pattern + ".*", text));
  EXPECT_TRUE(Matches(pattern + ".*", text + "zz"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

TEST(Wildcard, StarsAndMarks) {
  EXPECT_TRUE(MatchesWildcard("*.mlp.gate", "model.layers.0.mlp.gate"));
  EXPECT_FALSE(MatchesWildcard("*.mlp.gate", "model.layers.0.mlp.gate_proj"));
  EXPECT_TRUE(MatchesWildcard("a*b*c", "axxbxbxc"));
  EXPECT_FALSE(MatchesWildcard("a*b*c", "axxbxbx"));
  EXPECT_TRUE(MatchesWildcard("layers.?.x", "layers.7.x"));
  EXPECT_TRUE(MatchesWildcard("**", ""));
  EXPECT_FALSE(MatchesWildcard("", "a"));
}

}  // namespace
}  // namespace fusedmoe::checkpoint
