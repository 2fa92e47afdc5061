#pragma once

#include <bitset>
#include <cstdint>
#include <string_view>
#include <vector>

#include <fusedmoe/status.hpp>

namespace fusedmoe::checkpoint {

/// Regular expressions of quantization metadata ("re:.*mlp.gate$"), which come from files that nobody vouches
/// for: matching takes time in proportion to pattern times text, whatever they are, and no recursion.
/// Literals, ., classes, \d \w \s \b, ^ $, groups, alternatives, repetition (greedy or not: only whether it
/// matches is asked), and look-ahead. Back references and look-behind are kUnsupported, mistakes kBadInput.
class Pattern {
 public:
  static Result<Pattern> Compile(std::string_view text);
  /// True when the pattern matches from the beginning of `text` on, not necessarily to its end (Python's
  /// re.match).
  bool MatchesPrefix(std::string_view text) const;

 private:
  friend class PatternCompiler;
  enum class Op : uint8_t { kClass, kSplit, kJump, kBegin, kEnd, kWordBoundary, kLook, kMatch };
  struct Instruction {
    Op op = Op::kMatch;
    int32_t x = 0, y = 0;  // class index or targets; kLook: where its program starts, and where to go on
    bool negated = false;
  };

  void Connect();
  /// Whether the step behind an instruction that takes no character may be made here.
  bool Holds(const Instruction& instruction, std::string_view text, size_t position,
             const std::vector<char>& matches) const;

  std::vector<Instruction> program_;
  std::vector<std::bitset<256>> classes_;
  // Of each instruction: those that lead to it without a character.
  std::vector<std::vector<int32_t>> sources_;
  // Instructions of each look-ahead, inner ones first; the rest last.
  std::vector<std::vector<int32_t>> nests_;
};

}  // namespace fusedmoe::checkpoint
